"""What codecs lose: errors as theory has them, and figures that fit one another."""

import math

import pytest
import torch

from farloop.algo.spec import Fragment, TensorSlot
from farloop.bench.codec_quality import (
    DISTRIBUTIONS,
    OUTER,
    Sample,
    codec_quality,
    compared,
    outer_sample,
    random_sample,
)
from farloop.bench.training import OuterGradients
from farloop.quant.registry import CODECS, codec_named

# On a Gaussian of 4 Mi numbers (measured); a matrix of 256² is within a few percent.
GAUSSIAN_ERRORS = {"bf16": 2.8e-6, "q8": 4.9e-5, "q4": 9.1e-3, "e3m0": 3.5e-2, "q4r": 0.167, "q4r:step=0.7": 8.2e-2}


@pytest.mark.parametrize("spelling", GAUSSIAN_ERRORS)
def test_a_gaussian_loses_what_it_should(spelling: str) -> None:
    row = codec_quality(codec_named(spelling), random_sample("gauss", 256))
    assert row.codec == spelling
    assert row.rel_mse == pytest.approx(GAUSSIAN_ERRORS[spelling], rel=0.06)
    assert row.cosine == pytest.approx(row.projection / math.sqrt(row.rel_mse + 2 * row.projection - 1), rel=1e-6)


def test_fp32_loses_nothing() -> None:
    row = codec_quality(codec_named("fp32"), random_sample("laplace", 64))
    assert (row.rel_mse, row.bits, row.gap_db) == (0.0, 32.0, None)
    assert row.cosine == pytest.approx(1.0) and row.projection == 1.0


@pytest.mark.parametrize("name", CODECS)
def test_no_codec_beats_the_rate_distortion_bound_of_a_gaussian(name: str) -> None:
    row = codec_quality(CODECS[name], random_sample("gauss", 256))
    assert row.gap_db is None or row.gap_db > -0.1


def test_bits_are_those_of_the_blob_after_its_entropy_stage() -> None:
    zeros = Sample(name="zeros", fragment=random_sample("gauss", 64).fragment, vectors=(torch.full((4096,), 1e-3),))
    assert codec_quality(codec_named("q4"), zeros).bits == 4.25
    assert codec_quality(codec_named("q4r"), zeros).bits < 1.0


def test_distributions_have_their_size_and_are_the_same_every_time() -> None:
    for name in DISTRIBUTIONS:
        (x,), (again,) = random_sample(name, 64).vectors, random_sample(name, 64).vectors
        assert torch.equal(x, again) and x.shape == (4096,)
    deviation = float(random_sample("gauss", 256).vectors[0].std())
    assert deviation == pytest.approx(1e-3, rel=0.02)


def test_an_unbiased_codec_gains_by_averaging_over_nodes_and_padding_costs_bits() -> None:
    fragment = Fragment(index=0, slot=0, numel=3072, tensors=(_slot("a", 2000, 0), _slot("b", 1024, 2048)))
    generator = torch.Generator().manual_seed(1)
    deltas = [torch.randn(3072, generator=generator) for _ in range(4)]
    for delta in deltas:
        delta[2000:2048] = 0
    found = OuterGradients(fragment=fragment, deltas=tuple(deltas), before=tuple(deltas))
    row = codec_quality(codec_named("q4r"), outer_sample(found))
    assert row.data == OUTER
    assert row.mean_rel_mse is not None and row.mean_rel_mse == pytest.approx(row.rel_mse, rel=0.2)
    assert codec_quality(codec_named("fp32"), outer_sample(found)).bits == pytest.approx(32 * 3072 / 3024)


def test_the_sender_starts_from_its_last_payload() -> None:
    """A second power iteration of a matrix of rank 8 finds more of it than the first."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(128, 8, generator=generator) @ torch.randn(8, 128, generator=generator)
    sample = random_sample("gauss", 128)
    cold = Sample(name="x", fragment=sample.fragment, vectors=(x.view(-1),))
    warm = Sample(name="x", fragment=sample.fragment, vectors=(x.view(-1),), before=(x.view(-1),))
    codec = codec_named("lowrank")
    assert codec_quality(codec, warm).rel_mse < codec_quality(codec, cold).rel_mse


def test_compared_by_hand() -> None:
    rel_mse, cosine, projection = compared(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0]))
    assert (rel_mse, cosine, projection) == pytest.approx((16 / 25, 9 / 15, 9 / 25))
    assert compared(torch.ones(2), torch.zeros(2)) == (1.0, 0.0, 0.0)


def _slot(name: str, numel: int, offset: int) -> TensorSlot:
    return TensorSlot(name=name, shape=(numel,), offset=offset)
