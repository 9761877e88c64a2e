"""`farloop codecs` and `farloop bench codecs`: words in, tables and JSON out."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from farloop.bench.codec_tables import codec_list_json, error_text, fits_downlink, summary_of
from farloop.cli.bench import QUICK_ELEMENTS, parse_count, parse_threads, plan_codecs
from farloop.cli.main import app
from farloop.config.exit_codes import CommandError
from farloop.quant.registry import CODECS


def farloop(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}, prog_name="farloop")


def test_the_list_has_every_codec_its_summary_and_its_parameters_and_fits() -> None:
    lines = farloop("codecs", "--no-measure").stdout.splitlines()
    assert max(map(len, lines)) <= 110
    text = "\n".join(lines)
    assert "…" not in text.replace("beta=0…1", "")
    for codec in CODECS.values():
        assert sum(line.split()[:1] == [codec.name] for line in lines) == 2
        assert all(f"{name}=" in text for name in codec.PARAMETERS)


def test_the_list_for_programs_holds_all_that_is_declared() -> None:
    listed = json.loads(farloop("codecs", "--no-measure", "--json").stdout)
    assert [entry["codec"] for entry in listed] == list(CODECS)
    q4r = next(entry for entry in listed if entry["codec"] == "q4r")
    assert q4r["unbiased"] and q4r["entropy_coded"] and q4r["downlink"] and q4r["measured"] is None
    assert {"name": "rounding", "default": "stochastic"}.items() <= q4r["parameters"][1].items()


def test_every_codec_says_what_it_is() -> None:
    for codec in CODECS.values():
        summary = summary_of(codec)
        assert len(summary) > 20 and not summary.startswith(("`", codec.name)), codec.name


def test_anchors_are_made_by_codecs_that_decode_exactly() -> None:
    assert fits_downlink(CODECS["q4"]) and fits_downlink(CODECS["fp32"])
    assert all(CODECS[entry["codec"]].traits.exact_decode for entry in codec_list_json(None) if entry["downlink"])


def test_the_benchmark_writes_json_and_plots(tmp_path: Path) -> None:
    words = ["--codec", "q4", "--codec", "q8", "--threads", "1", "--device", "cpu", "--elements", "4096", "--quick"]
    result = farloop("bench", "codecs", *words, "--no-quality", "--no-peers", "--out", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {row["codec"] for row in found["speed"]} >= {"memcpy", "q4", "q8"}
    assert json.loads((tmp_path / "codecs.json").read_text()) == found
    assert {path.name for path in tmp_path.iterdir()} == {"codecs.json", "codecs-speed.svg", "codecs-speed.png"}


def test_the_benchmark_prints_tables_that_fit(tmp_path: Path) -> None:
    words = ["--codec", "q4", "--threads", "1", "--device", "cpu", "--elements", "4096", "--quick", "--no-peers"]
    result = farloop("bench", "codecs", *words, "--no-quality", "--out", str(tmp_path))
    assert "CPU, 1 thread: memcpy" in result.stdout and "may fit the processor's cache" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 110 + len(str(tmp_path))


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


def test_threads_are_read() -> None:
    assert parse_threads("1, 2") == (1, 2) and parse_threads("") == ()


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
