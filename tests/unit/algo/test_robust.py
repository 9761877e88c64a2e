"""Merges that a few hostile deltas cannot carry away: laws that hold for any deltas, and what each rule is for."""

from statistics import median

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farloop.algo.merge_rules import coordinates_into, cosines, gram, hostile, krum_scores, weights_by
from farloop.algo.validation import ROBUST_RULES

NUMEL = 50
COUNTS = st.integers(5, 9)
SEEDS = st.integers(0, 1 << 30)
RULES = st.sampled_from(sorted(ROBUST_RULES))


def deltas_of(seed: int, count: int) -> list[Tensor]:
    return list(torch.randn(count, NUMEL, generator=torch.Generator().manual_seed(seed)))


def pieces(deltas: list[Tensor]) -> list:
    return [lambda delta=delta: iter(delta.split(17)) for delta in deltas]


def merged(rule: str, deltas: list[Tensor]) -> Tensor:
    """By a rule, of deltas that weigh the same."""
    out = torch.full((NUMEL,), torch.nan)
    if not ROBUST_RULES[rule].weighted:
        coordinates_into(rule, pieces(deltas), out)
        return out
    weights = weights_by(rule, gram(pieces(deltas)), [1 / len(deltas)] * len(deltas))
    return sum((weight * delta for weight, delta in zip(weights, deltas, strict=True)), torch.zeros(NUMEL))


@settings(deadline=None)  # the first call into torch is slow
@given(RULES, SEEDS, COUNTS)
def test_the_order_of_deltas_never_shows(rule: str, seed: int, count: int) -> None:
    deltas = deltas_of(seed, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    torch.testing.assert_close(merged(rule, deltas), merged(rule, [deltas[k] for k in order]))


@settings(deadline=None)  # the first call into torch is slow
@given(RULES, SEEDS, COUNTS)
def test_of_equal_deltas_each_rule_gives_that_delta(rule: str, seed: int, count: int) -> None:
    (delta,) = deltas_of(seed, 1)
    torch.testing.assert_close(merged(rule, [delta] * count), delta)


@settings(deadline=None)  # the first call into torch is slow
@given(RULES, SEEDS, COUNTS, st.sampled_from([-1e30, -1e6, 1e6, 1e30]))
def test_below_the_breakdown_point_hostile_deltas_carry_nothing_away(
    rule: str, seed: int, count: int, factor: float
) -> None:
    """f of m deltas may be anything: the merge stays within the reach of the honest ones. The mean does not."""
    f = min(hostile(count), (count - 3) // 2)
    honest = deltas_of(seed, count - f)
    bad = [factor * delta for delta in deltas_of(seed + 1, f)]
    longest = max(float(delta.norm()) for delta in honest)
    assert float(merged(rule, honest + bad).norm()) <= longest * NUMEL**0.5
    assert float(torch.stack(honest + bad).double().mean(dim=0).norm()) > 100 * longest


@settings(deadline=None)  # the first call into torch is slow
@given(SEEDS)
def test_beyond_it_they_do(seed: int) -> None:
    """Two of three: no rule can tell which are the honest ones."""
    honest, bad = deltas_of(seed, 1), [1e6 * torch.ones(NUMEL)] * 2
    for rule in ("median", "trimmed"):
        assert float(merged(rule, honest + bad).norm()) > 1e5


def test_each_coordinate_is_a_median_or_a_mean_without_the_extremes() -> None:
    deltas = [torch.tensor([1.0, 9.0]), torch.tensor([2.0, 8.0]), torch.tensor([6.0, -4.0]), torch.tensor([100.0, 0.0])]
    out = torch.empty(2)
    coordinates_into("median", pieces(deltas), out)
    assert out.tolist() == [4.0, 4.0] == [median([1, 2, 6, 100]), median([9, 8, -4, 0])]
    coordinates_into("trimmed", pieces(deltas), out)
    assert out.tolist() == [4.0, 4.0]
    coordinates_into("median", pieces(deltas[:3]), out)
    assert out.tolist() == [2.0, 8.0]


def test_longer_deltas_are_cut_to_the_median_length() -> None:
    products = gram(pieces([torch.ones(4), 2 * torch.ones(4), 1000 * torch.ones(4)]))
    assert weights_by("clipped", products, [0.25, 0.25, 0.5]) == [0.25, 0.25, 0.5 * 4 / 2000]
    assert weights_by("clipped", gram(pieces([torch.zeros(4)] * 3)), [0.5, 0.5, 0.0]) == [0.5, 0.5, 0.0]


def test_krum_leaves_out_who_is_far_from_everybody() -> None:
    """The score of Blanchard et al.: squared distances to the m − f − 2 nearest others."""
    deltas = [torch.tensor([float(x)]) for x in (0, 1, 2, 3, 50)]
    products = gram(pieces(deltas))
    assert krum_scores(products, 1) == [1 + 4, 1 + 1, 1 + 1, 1 + 4, 47**2 + 48**2]
    assert weights_by("krum", products, [0.2] * 5) == pytest.approx([0.25, 0.25, 0.25, 0.25, 0.0])


@settings(deadline=None)  # the first call into torch is slow
@given(SEEDS, COUNTS)
def test_inner_products_are_those_of_the_whole_vectors(seed: int, count: int) -> None:
    deltas = deltas_of(seed, count)
    rows = torch.stack(deltas).double()
    torch.testing.assert_close(torch.tensor(gram(pieces(deltas)), dtype=torch.float64), rows @ rows.T)


def test_a_delta_that_points_against_all_others_is_seen_however_long_it_is() -> None:
    common = torch.ones(NUMEL)
    honest = [common + 0.5 * delta for delta in deltas_of(3, 3)]
    found = cosines(gram(pieces([*honest, -1000 * honest[0]])), range(4))
    assert found[3] is not None and found[3] < -0.8
    assert all(cosine is None for cosine in found[:3]), "without it they agree, with it they do not"


def test_deltas_that_add_up_to_nothing_accuse_nobody() -> None:
    """Where data differ and the model is as good as it gets, each points against the sum of the others, by right."""
    deltas = deltas_of(4, 4)
    deltas = [delta - torch.stack(deltas).mean(dim=0) for delta in deltas]
    assert cosines(gram(pieces(deltas)), range(4)) == [None] * 4


def test_what_is_measured_and_has_no_voice_is_held_against_those_that_have_one() -> None:
    common = torch.ones(NUMEL)
    honest = [common + 0.5 * delta for delta in deltas_of(5, 3)]
    found = cosines(gram(pieces([*honest, -common])), range(3))
    assert found[3] is not None and found[3] < -0.9 and all(cosine and cosine > 0.5 for cosine in found[:3])
