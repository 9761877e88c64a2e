"""The codec benchmark on vectors far too small to say anything: rows, JSON, plots, and the commands."""

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from farloop.bench.codec_peers import PEERS
from farloop.bench.codec_speed import Pace, Where
from farloop.bench.codec_tables import error_text, summary_of
from farloop.bench.codecs import OPS, CodecReport, Plan, Watch, places, run
from farloop.bench.machine import source_commit
from farloop.bench.training import Settings
from farloop.cli.bench import QUICK_ELEMENTS, parse_count, parse_threads, plan_codecs
from farloop.cli.main import app
from farloop.config.exit_codes import CommandError
from farloop.plots.codecs import plot_quality, plot_speed
from farloop.quant.registry import CODECS as CODECS_BY_NAME
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
    return run(plan)


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
    assert plain["machine"]["commit"] == source_commit()
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


def test_stages_are_reported_and_after_the_deadline_no_codec_is_timed() -> None:
    stages: dict[str, int] = {}
    parts: list[str] = []
    plan = Plan(
        codecs=(codec_named("fp32"),), places=places([1], ["cpu"]), elements=256, ops=("encode",),
        pace=Pace(budget_s=0.0, least=1), samples=("gauss",), side=16, outer=None, peers=(),
    )  # fmt: skip
    run(plan, watch=Watch(stage=stages.__setitem__, part=parts.append))
    assert stages == {"quality": 1, "CPU, 1 thread": 2}
    assert parts == ["fp32 on gauss", "buffers", "fp32"]
    late = run(dataclasses.replace(plan, deadline_s=-1.0))
    assert [row.op for row in late.speed] == ["copy"] and len(late.quality) == 1


def test_places_are_what_is_asked_for() -> None:
    assert places([1, 3], ["cpu"]) == (Where(device="cpu", threads=1), Where(device="cpu", threads=3))
    assert [where.describe() for where in places([1, 3], ["cpu"])] == ["CPU, 1 thread", "CPU, 3 threads"]
    assert [where.device for where in places(None, ["cuda"])] == ["cuda"]


# --- the commands


def farloop(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}, prog_name="farloop")


def test_the_list_has_every_codec_its_summary_and_its_parameters_and_fits() -> None:
    lines = farloop("codecs", "--no-measure").stdout.splitlines()
    assert max(map(len, lines)) <= 110
    text = "\n".join(lines)
    assert "…" not in text.replace("beta=0…1", "")
    for codec in CODECS_BY_NAME.values():
        assert sum(line.split()[:1] == [codec.name] for line in lines) == 2
        assert all(f"{name}=" in text for name in codec.PARAMETERS)
    for codec in CODECS_BY_NAME.values():
        summary = summary_of(codec)
        assert len(summary) > 20 and not summary.startswith(("`", codec.name)), codec.name


def test_the_list_for_programs_holds_all_that_is_declared() -> None:
    listed = json.loads(farloop("codecs", "--no-measure", "--json").stdout)
    assert [entry["codec"] for entry in listed] == list(CODECS_BY_NAME)
    q4r = next(entry for entry in listed if entry["codec"] == "q4r")
    assert q4r["unbiased"] and q4r["entropy_coded"] and q4r["downlink"] and q4r["measured"] is None
    assert {"name": "rounding", "default": "stochastic"}.items() <= q4r["parameters"][1].items()
    assert {entry["codec"] for entry in listed if entry["downlink"]} >= {"q4", "fp32"}
    assert all(CODECS_BY_NAME[entry["codec"]].traits.exact_decode for entry in listed if entry["downlink"])


def test_the_benchmark_writes_json_and_plots(tmp_path: Path) -> None:
    words = ["--codec", "q4", "--codec", "q8", "--threads", "1", "--device", "cpu", "--elements", "4096", "--quick"]
    result = farloop("bench", "codecs", *words, "--no-quality", "--no-peers", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {row["codec"] for row in found["speed"]} >= {"memcpy", "q4", "q8"}
    assert json.loads((tmp_path / "codecs.json").read_text()) == found
    assert {path.name for path in tmp_path.iterdir()} == {"codecs.json", "codecs-speed.svg", "codecs-speed.png"}
    shown = farloop("bench", "codecs", *words, "--no-quality", "--no-peers", "--out", str(tmp_path)).stdout
    assert "CPU, 1 thread: memcpy" in shown and "may fit the processor's cache" in shown
    assert max(map(len, shown.splitlines())) <= 110 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--codec", "q44"], "q44"),
        (["--codec", "q4r:steq=1"], "has no parameter 'steq'"),
        (["--threads", "0"], "--threads is a list of whole numbers above 0"),
        (["--device", "tpu"], "--device is cpu or cuda, not 'tpu'"),
        (["--elements", "many"], "--elements is a number of elements"),
        (["--no-speed", "--no-quality"], "nothing is left to measure"),
    ],
)
def test_words_that_cannot_be_used_end_in_one_line(words: list[str], complaint: str) -> None:
    result = farloop("bench", "codecs", *words)
    assert result.exit_code == 2 and complaint in result.stderr


@pytest.mark.parametrize(
    ("text", "count"), [("64Mi", 64 << 20), ("1e6", 1_000_000), ("4096", 4096), ("2k", 2000), ("0.5Gi", 1 << 29)]
)
def test_counts_are_read(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "Mi", "4Ti", "nan", "inf", "1e99", "3MiMi"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(CommandError):
        parse_count(text)


def test_quick_is_smaller_everywhere(tmp_path: Path) -> None:
    quick, whole = (
        plan_codecs([], "", ["cpu"], "", quick=quick, speed=True, quality=True, peers=False, out=tmp_path)
        for quick in (True, False)
    )
    assert quick.elements == QUICK_ELEMENTS and whole.elements is None
    assert quick.pace.budget_s < whole.pace.budget_s
    assert quick.outer is not None and whole.outer is not None
    assert quick.outer.inner_steps < whole.outer.inner_steps


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (8.6e-3, "8.6e-3"), (0.1667, "0.17"), (15.02, "15")])
def test_errors_are_short(value: float, text: str) -> None:
    assert error_text(value) == text
    assert parse_threads("1, 2") == (1, 2) and parse_threads("") == ()
