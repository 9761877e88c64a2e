"""How speeds are taken: complete rows, ratios that follow from them, buffers of their own. No test asks for a speed."""

import itertools

import pytest
import torch

from farloop.bench.codec_peers import PEERS
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
from farloop.bench.training import cpu_threads, default_threads
from farloop.quant.registry import CODECS, codec_named

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


def test_codecs_with_a_faster_path_are_timed_by_their_reference_too(bench: Bench) -> None:
    rows = list(reference_rows(bench, codec_named("q4"), ("encode", "decode", "add")))
    assert [(row.codec, row.op, row.path) for row in rows] == [
        ("q4 reference", "encode", "torch"),
        ("q4 reference", "decode", "torch"),
    ]
    assert list(reference_rows(bench, codec_named("topk"), ("encode",))) == []


def test_operations_can_be_chosen(bench: Bench) -> None:
    assert [row.op for row in codec_rows(bench, codec_named("q4"), ("decode",))] == ["decode"]


def test_what_is_timed_does_its_work(bench: Bench) -> None:
    list(codec_rows(bench, codec_named("fp32"), ("encode", "decode")))
    assert torch.equal(bench.y, bench.x) and bool(bench.x.any())


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
    rows = settled([_row("copy", 10.0, 9.0), _row("encode", 5.0, 10.0), _row("add", 5.0, 0.1), _row("sum8", 5.0, 20.0)])
    assert [row.memcpy_gb_per_s for row in rows] == [9.5, 10.0, 9.5, 20.0]
    assert [row.ratio_to_memcpy for row in rows] == pytest.approx([1.0, 0.5, 5 / 9.5, 0.25])
    assert rows[0].gb_per_s == 9.5


def test_peers_of_plain_torch_are_always_there(bench: Bench) -> None:
    rows = [row for peer in PEERS if peer.package == "torch" for row in peer_rows(bench, peer, ("encode", "decode"))]
    assert {row.op for row in rows} == {"encode", "decode"} and all(row.path == "peer" for row in rows)


def test_a_vector_is_cut_into_square_matrices() -> None:
    assert [slot.shape for slot in matrices(2 * 1024 * 1024 + 300).tensors] == [(1024, 1024)] * 2 + [(300,)]
    assert [slot.shape for slot in matrices(4096 * 4096).tensors] == [(4096, 4096)]
    assert [slot.shape for slot in matrices(100).tensors] == [(100,)]


def test_nothing_cannot_be_timed() -> None:
    with pytest.raises(ValueError, match="nothing to measure"):
        Bench(HERE, 0, BRIEF)


@pytest.mark.parametrize(("cores", "wanted"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_threads_double_up_to_all_cores(cores: int, wanted: tuple[int, ...]) -> None:
    assert default_threads(cores) == wanted


def test_the_number_of_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    with cpu_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def _row(op: str, gb_per_s: float, memcpy: float) -> SpeedRow:
    return SpeedRow(
        codec="x",
        op=op,
        device="cpu",
        threads=1,
        path="torch",
        gb_per_s=gb_per_s,
        median_gb_per_s=gb_per_s,
        memcpy_gb_per_s=memcpy,
        ratio_to_memcpy=0.0,
        warmup_s=0.0,
        repetitions=1,
    )
