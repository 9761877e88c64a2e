"""What the codec benchmark measures: errors as theory has them, rows of speeds, peers. No test asks for a speed."""

import importlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from farloop.algo.spec import Fragment, TensorSlot
from farloop.bench.codec_peers import MEASURED, PEERS, Kernels, Peer, Peers, peer_quality, probe
from farloop.bench.codec_quality import (
    DISTRIBUTIONS,
    OUTER,
    QualityRow,
    Sample,
    codec_quality,
    compared,
    outer_sample,
    random_sample,
)
from farloop.bench.codec_speed import (
    Bench,
    Pace,
    SpeedRow,
    Where,
    codec_rows,
    matrices,
    peer_rows,
    reference_rows,
    settled,
)
from farloop.bench.training import OuterGradients, Settings, cpu_threads, default_threads, outer_gradients
from farloop.quant.registry import CODECS, codec_named

# --- errors

# On a Gaussian of 4 Mi numbers (measured); a matrix of 256² is within a few percent.
GAUSSIAN_ERRORS = {"bf16": 2.8e-6, "q8": 4.9e-5, "q4": 9.1e-3, "e3m0": 3.5e-2, "q4r": 0.167, "q4r:step=0.7": 8.2e-2}


@pytest.mark.parametrize("spelling", GAUSSIAN_ERRORS)
def test_a_gaussian_loses_what_it_should(spelling: str) -> None:
    row = codec_quality(codec_named(spelling), random_sample("gauss", 256))
    assert row.codec == spelling
    assert row.rel_mse == pytest.approx(GAUSSIAN_ERRORS[spelling], rel=0.06)
    assert row.cosine == pytest.approx(row.projection / math.sqrt(row.rel_mse + 2 * row.projection - 1), rel=1e-6)


@pytest.mark.parametrize("name", CODECS)
def test_no_codec_beats_the_rate_distortion_bound_of_a_gaussian(name: str) -> None:
    row = codec_quality(CODECS[name], random_sample("gauss", 256))
    assert row.gap_db is None or row.gap_db > -0.1
    if name == "fp32":
        assert (row.rel_mse, row.bits, row.gap_db, row.projection) == (0.0, 32.0, None, 1.0)


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
    slots = [TensorSlot(name=n, shape=(c,), offset=o) for n, c, o in (("a", 2000, 0), ("b", 1024, 2048))]
    fragment = Fragment(index=0, slot=0, numel=3072, tensors=tuple(slots))
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


# --- speeds

BRIEF = Pace(budget_s=0.0, least=2)
HERE = Where(device="cpu", threads=1)


@pytest.fixture
def bench() -> Bench:
    return Bench(HERE, 8192, BRIEF)


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_has_its_rows(name: str, bench: Bench) -> None:
    with cpu_threads(1):
        rows = list(codec_rows(bench, CODECS[name], ("encode", "decode", "add", "sum8", "fused")))
    assert [row.op for row in rows] == ["encode", "decode", "add", "sum8", "fused"]
    for row in rows:
        assert row.codec == name and row.path in ("numba", "torch") and row.repetitions == 2
        assert row.gb_per_s >= row.median_gb_per_s > 0 and row.warmup_s > 0
        assert row.ratio_to_memcpy == row.gb_per_s / row.memcpy_gb_per_s


def test_operations_are_chosen_and_a_faster_path_is_timed_with_its_reference(bench: Bench) -> None:
    rows = list(reference_rows(bench, codec_named("q4"), ("encode", "decode", "add")))
    assert [(row.codec, row.op, row.path) for row in rows] == [
        ("q4 reference", "encode", "torch"), ("q4 reference", "decode", "torch")
    ]  # fmt: skip
    assert list(reference_rows(bench, codec_named("topk"), ("encode",))) == []
    assert [row.op for row in codec_rows(bench, codec_named("q4"), ("decode",))] == ["decode"]
    list(codec_rows(bench, codec_named("fp32"), ("encode", "decode")))
    assert torch.equal(bench.y, bench.x) and bool(bench.x.any()), "what is timed does its work"


def test_eight_vectors_count_eight_times(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(1.0)
    monkeypatch.setattr(bench, "_seconds", lambda call: next(ticks))
    row = bench.row("x", "torch", "sum8", lambda: None, vectors=8)
    # First call 1 s; then copy 2, call 3, copy 4, call 5.
    size_gb = 4e-9 * 8192
    assert (row.warmup_s, row.gb_per_s, row.memcpy_gb_per_s) == pytest.approx((1.0, 8 * size_gb / 3, size_gb / 2))
    assert row.median_gb_per_s == pytest.approx(8 * size_gb / 4)


def test_a_copy_comes_before_every_repetition(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(bench, "_copies", [lambda: events.append("copy")])
    bench.row("x", "torch", "encode", lambda: events.append("call"))
    assert events == ["call", "copy", "call", "copy", "call"]


def test_rows_whose_copies_were_disturbed_take_the_usual_copy() -> None:
    rows = settled(
        [
            SpeedRow(
                codec="x", op=op, device="cpu", threads=1, path="torch", gb_per_s=speed, median_gb_per_s=speed,
                memcpy_gb_per_s=copy, ratio_to_memcpy=0.0, warmup_s=0.0, repetitions=1,
            )
            for op, speed, copy in (("copy", 10.0, 9.0), ("encode", 5.0, 10.0), ("add", 5.0, 0.1), ("sum8", 5.0, 20.0))
        ]
    )  # fmt: skip
    assert [row.memcpy_gb_per_s for row in rows] == [9.5, 10.0, 9.5, 20.0]
    assert [row.ratio_to_memcpy for row in rows] == pytest.approx([1.0, 0.5, 5 / 9.5, 0.25])
    assert rows[0].gb_per_s == 9.5


def test_a_vector_is_cut_into_square_matrices() -> None:
    assert [slot.shape for slot in matrices(2 * 1024 * 1024 + 300).tensors] == [(1024, 1024)] * 2 + [(300,)]
    assert [slot.shape for slot in matrices(4096 * 4096).tensors] == [(4096, 4096)]
    assert [slot.shape for slot in matrices(100).tensors] == [(100,)]
    with pytest.raises(ValueError, match="nothing to measure"):
        Bench(HERE, 0, BRIEF)


def test_threads_double_up_to_all_cores_and_their_number_is_restored() -> None:
    assert [default_threads(cores) for cores in (1, 2, 6)] == [(1,), (1, 2), (1, 2, 4, 6)]
    before = torch.get_num_threads()
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


# --- peers


def _halves(threads: int) -> Kernels:
    return Kernels(encode=lambda x: x.half(), decode=lambda h: h.float(), num_bytes=lambda h: h.nbytes)


def _absent(threads: int) -> Kernels:
    importlib.import_module("surely_not_installed")
    raise AssertionError


def _broken(threads: int) -> Kernels:
    def encode(x: Tensor) -> Tensor:
        raise TypeError("two lines\nof complaint")

    return Kernels(encode=encode, decode=lambda h: h, num_bytes=lambda h: 0)


def _forgetful(threads: int) -> Kernels:
    return Kernels(encode=lambda x: x, decode=lambda x: torch.zeros_like(x), num_bytes=lambda x: 1)


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (_halves, MEASURED),
        (_broken, "TypeError: two lines"),
        (_forgetful, "gives back other numbers than it took"),
        (_absent, "ModuleNotFoundError: No module named 'surely_not_installed'"),
    ],
)
def test_a_peer_is_tried_before_it_is_measured(make: object, state: str) -> None:
    assert callable(make)
    found = probe(Peer(name="a", package="torch", make=make))
    assert found.state == state and found.version
    missing = probe(Peer(name="a", package="surely-not-installed", make=_absent))
    assert (missing.version, missing.state) == (None, "not installed")


def test_one_that_breaks_is_left_out_from_then_on() -> None:
    good, bad = (Peer(name=name, package="torch", make=_halves) for name in ("good", "bad"))
    peers = Peers((good, bad))

    def breaks() -> Iterator[int]:
        yield 1
        raise RuntimeError("no such operator")

    assert peers.tried(good, lambda: [1, 2]) == [1, 2]
    assert peers.tried(bad, breaks) == []
    assert peers.present == [good]
    assert [state.state for state in peers.states] == [MEASURED, "RuntimeError: no such operator"]


def test_peers_of_plain_torch_work_and_lose_what_they_should(bench: Bench) -> None:
    sample = random_sample("gauss", 64)
    rows: dict[str, QualityRow] = {}
    for peer in PEERS:
        if peer.package == "torch":
            assert probe(peer).state == MEASURED
            (rows[peer.name],) = peer_quality(peer, [sample])
            timed = list(peer_rows(bench, peer, ("encode", "decode")))
            assert [(row.op, row.path) for row in timed] == [("encode", "peer"), ("decode", "peer")]
    assert rows["torch bf16"].bits == 16 and rows["torch bf16"].rel_mse == pytest.approx(2.8e-6, rel=0.1)
    assert rows["torch eager q4"].bits == 4.25
    assert rows["torch eager q4"].rel_mse == pytest.approx(9.1e-3, rel=0.1)
    assert rows["torch float8"].rel_mse == pytest.approx(7e-4, rel=0.1)


# --- outer gradients

TINY = Settings(model="nano", nodes=2, h=2, rounds=2, batch_sequences=1, sequence_tokens=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outer")


def test_outer_gradients_are_made_once_and_kept(folder: Path) -> None:
    steps: list[int] = []
    found = outer_gradients(TINY, folder=folder, on_step=lambda: steps.append(1))
    assert len(steps) == TINY.inner_steps == 8
    again = outer_gradients(TINY, folder=folder, on_step=lambda: pytest.fail("trained again"))
    for mine, kept in zip((*found.deltas, *found.before), (*again.deltas, *again.before), strict=True):
        assert torch.equal(mine, kept)
    assert found.fragment == again.fragment
    outer_gradients(Settings(model="nano", nodes=1, h=1, rounds=2, sequence_tokens=16), folder=folder)
    assert len(list(folder.glob("outer-gradients-*.safetensors"))) == 2, "other settings are another file"
    with pytest.raises(ValueError, match="two rounds or more"):
        Settings(rounds=1)


def test_every_node_has_a_delta_of_its_own_with_zeros_between_tensors(folder: Path) -> None:
    found = outer_gradients(TINY, folder=folder)
    assert len(found.deltas) == len(found.before) == 2
    one, other = found.deltas
    assert one.shape == (found.fragment.numel,) and not torch.equal(one, other) and bool(one.any())
    assert not torch.equal(one, found.before[0])
    used = torch.zeros(found.fragment.numel, dtype=torch.bool)
    for slot in found.fragment.tensors:
        used[slot.offset : slot.offset + slot.numel] = True
    assert not bool(one[~used].any())
