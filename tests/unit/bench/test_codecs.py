"""The whole benchmark on vectors far too small to say anything: every row, the JSON, the plots."""

import dataclasses
import json
from pathlib import Path

import pytest

from farloop.bench.codec_peers import PEERS
from farloop.bench.codec_speed import Pace, Where
from farloop.bench.codecs import OPS, CodecReport, Plan, Watch, describe_machine, places, run
from farloop.bench.training import Settings
from farloop.plots.codecs import plot_quality, plot_speed
from farloop.quant.registry import codec_named

TINY = Settings(model="nano", nodes=2, h=1, rounds=2, batch_sequences=1, sequence_tokens=16)
CODECS = ("fp32", "q4", "q4r:step=0.7")
TORCH = tuple(peer for peer in PEERS if peer.package == "torch")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> CodecReport:
    plan = Plan(
        codecs=tuple(map(codec_named, CODECS)),
        places=(Where(device="cpu", threads=1), Where(device="cpu", threads=2)),
        elements=4096,
        pace=Pace(budget_s=0.0, least=1),
        side=32,
        outer=TINY,
        folder=tmp_path_factory.mktemp("outer"),
        peers=TORCH,
    )
    return run(plan, commit="abc")


def test_speed_has_a_row_for_every_codec_operation_and_place(report: CodecReport) -> None:
    found = {(row.codec, row.op, row.threads) for row in report.speed}
    for codec in CODECS:
        for threads in (1, 2):
            assert {op for name, op, count in found if (name, count) == (codec, threads)} >= set(OPS) - {"outer"}
    assert {("memcpy", "copy", 1), ("memcpy", "copy", 2), ("torch eager q4", "decode", 2)} <= found


def test_quality_has_a_row_for_every_codec_and_kind_of_data(report: CodecReport) -> None:
    found = {(row.codec, row.data) for row in report.quality}
    names = (*CODECS, *(peer.name for peer in TORCH))
    assert found == {(name, data) for name in names for data in ("gauss", "laplace", "student3", "outer")}


def test_the_json_has_what_is_promised(report: CodecReport) -> None:
    plain = json.loads(json.dumps(report.plain()))
    copies = [row["gb_per_s"] for row in plain["speed"] if row["op"] == "copy"]
    assert plain["memcpy_gb_per_s"] == max(copies) > 0
    assert plain["elements"] == {"cpu": 4096}
    keys = {"codec", "op", "device", "threads", "gb_per_s", "ratio_to_memcpy", "warmup_s"}
    assert all(keys <= row.keys() for row in plain["speed"])
    assert all({"codec", "data", "bits", "rel_mse", "cosine"} <= row.keys() for row in plain["quality"])
    assert {"cpu", "cores", "torch", "numba", "commit"} <= plain["machine"].keys()
    assert plain["machine"]["commit"] == "abc"
    assert [peer["state"] for peer in plain["peers"]] == ["measured"] * len(TORCH)


def test_small_vectors_are_told_from_memory(report: CodecReport) -> None:
    large = dataclasses.replace(report.machine, cache_bytes=1 << 20)
    assert dataclasses.replace(report, machine=large).fits_cache
    small = dataclasses.replace(report.machine, cache_bytes=0)
    assert not dataclasses.replace(report, machine=small).fits_cache


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_plots_are_written(report: CodecReport, kind: str, tmp_path: Path) -> None:
    for plot in (plot_quality, plot_speed):
        path = tmp_path / "made" / f"{plot.__name__}.{kind}"
        plot(path, report)
        assert path.stat().st_size > 5000
        if kind == "svg":
            text = path.read_text()
            assert all(name in text for name in ("q4r:step=0.7", "torch float8"))


def test_stages_say_how_much_there_is(tmp_path: Path) -> None:
    stages: dict[str, int] = {}
    parts: list[str] = []
    plan = Plan(
        codecs=(codec_named("fp32"),),
        places=places([1], ["cpu"]),
        elements=256,
        ops=("encode",),
        pace=Pace(budget_s=0.0, least=1),
        samples=("gauss",),
        side=16,
        outer=None,
        peers=(),
    )
    run(plan, watch=Watch(stage=stages.__setitem__, part=parts.append))
    assert stages == {"quality": 1, "CPU, 1 thread": 2}
    assert parts == ["fp32 on gauss", "buffers", "fp32"]


def test_after_the_deadline_no_codec_is_timed() -> None:
    plan = Plan(
        codecs=(codec_named("fp32"),),
        places=places([1], ["cpu"]),
        elements=256,
        pace=Pace(budget_s=0.0, least=1),
        samples=("gauss",),
        side=16,
        outer=None,
        peers=(),
        deadline_s=-1.0,
    )
    found = run(plan)
    assert [row.op for row in found.speed] == ["copy"] and len(found.quality) == 1


def test_places_are_what_is_asked_for() -> None:
    assert places([1, 3], ["cpu"]) == (Where(device="cpu", threads=1), Where(device="cpu", threads=3))
    assert [where.describe() for where in places([1, 3], ["cpu"])] == ["CPU, 1 thread", "CPU, 3 threads"]
    assert [where.device for where in places(None, ["cuda"])] == ["cuda"]


def test_the_machine_is_described() -> None:
    machine = describe_machine(None)
    assert machine.cpu and machine.cores >= 1 and machine.cache_bytes >= 0 and machine.commit is None
