"""`farloop simulate bandwidth`: words in; tables, JSON and a figure out."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from farloop.cli.main import app
from farloop.cli.simulate import parse_bandwidths, parse_number
from farloop.config.exit_codes import CommandError
from farloop.sim.bandwidth import gbit_text

MODEL = ("--params", "1e9", "--layers", "24", "--step-s", "0.1")


def farloop(*words: str, columns: int = 80) -> Result:
    env = {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, ["simulate", "bandwidth", *words], env=env, prog_name="farloop")


def found(*words: str) -> dict[str, Any]:
    result = farloop(*MODEL, *words, "--json")
    assert result.exit_code == 0, result.output
    parsed = json.loads(result.stdout)
    assert isinstance(parsed, dict)
    return parsed


def error_line(*words: str) -> str:
    result = farloop(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("farloop: error: ")


def test_json_has_the_required_bandwidths_and_the_utilization_at_each_one() -> None:
    curve = found("--method", "streaming", "--bits", "4", "--overlap", "1", "--gbit-s", "1,2,10,2.50")
    assert list(curve["required_gbit_s"]) == ["0.5", "0.8", "0.9", "0.95", "0.99"]
    assert curve["required_gbit_s"]["0.95"] == pytest.approx(6.03, abs=0.005)
    assert list(curve["utilization"]) == ["1", "2", "10", "2.5"]
    assert curve["utilization"]["10"] == 1.0 > curve["utilization"]["1"] > 0.5
    settings = {
        "method": "streaming",
        "model": "farloop",
        "lag": 0,
        "params": 10**9,
        "layers": 24,
        "step_s": 0.1,
        "h": 100,
        "bits": 4.0,
    }
    assert settings.items() <= curve.items()
    assert (curve["fragments"], curve["overlap"], curve["payload_gbit"]) == (8, 1, 4.0)
    assert curve["mean_gbit_s"] == pytest.approx(0.4)


def test_the_published_model_needs_less_than_the_daemons_and_is_there_for_comparison() -> None:
    words = ("--method", "streaming", "--bits", "4", "--overlap", "1")
    ours, published = found(*words), found(*words, "--model", "published")
    assert published["required_gbit_s"]["0.95"] == pytest.approx(2.22, abs=0.005)
    assert 1.5 < ours["required_gbit_s"]["0.95"] / published["required_gbit_s"]["0.95"] < 3


def test_a_lag_of_one_round_needs_less_than_waiting_at_once() -> None:
    late, waiting = (found("--method", "diloco", "--lag", lag) for lag in "10")
    assert (late["lag"], waiting["lag"]) == (1, 0)
    assert late["required_gbit_s"]["0.95"] < waiting["required_gbit_s"]["0.95"] / 10


def test_diloco_with_h_of_1_has_the_rows_of_data_parallel() -> None:
    diloco, data_parallel = found("--method", "diloco", "--h", "1"), found("--method", "data-parallel")
    for key in ("required_gbit_s", "utilization", "payload_gbit"):
        assert diloco[key] == data_parallel[key]


def test_a_model_of_few_layers_needs_no_word_on_its_fragments() -> None:
    result = farloop("--layers", "2", "--json")
    assert json.loads(result.stdout)["fragments"] == 1


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        (
            "farloop",
            [
                ("data-parallel", 1, 0, 16.0),
                ("diloco", 100, 0, 16.0),
                ("streaming", 100, 5, 16.0),
                ("streaming", 100, 5, 4.25),
            ],
        ),
        (
            "published",
            [
                ("data-parallel", 1, 0, 16.0),
                ("diloco", 100, 0, 16.0),
                ("streaming", 100, 0, 16.0),
                ("streaming", 100, 1, 16.0),
                ("streaming", 100, 1, 4.0),
            ],
        ),
    ],
)
def test_all_is_a_ladder_that_needs_less_at_every_step(model: str, steps: list[tuple[str, int, int, float]]) -> None:
    curves = found("--method", "all", "--model", model)["methods"]
    assert [(curve["method"], curve["h"], curve["overlap"], curve["bits"]) for curve in curves] == steps
    # Farloop's own data-parallel hides nothing: others are compared with one that overlaps its gradients.
    assert [curve["model"] for curve in curves] == ["published", *[model] * (len(curves) - 1)]
    for target in curves[0]["required_gbit_s"]:
        needs = [curve["required_gbit_s"][target] for curve in curves]
        assert needs == sorted(needs, reverse=True)


def test_the_ladder_has_no_step_that_adds_nothing() -> None:
    curves = found("--method", "all", "--model", "published", "--overlap", "0", "--bits", "4")["methods"]
    assert [curve["method"] for curve in curves] == ["data-parallel", "diloco", "streaming"]


@pytest.mark.parametrize("method", ["all", "streaming"])
def test_the_tables_fit_a_terminal(method: str) -> None:
    lines = farloop(
        "--method", method, *(() if method == "all" else ("--overlap", "5")), "--gbit-s", "0.1,12345"
    ).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    assert "1B parameters, 24 layers, 0.1 s of compute per inner step" in text
    assert {"streaming", "12,345", "317" if method == "all" else "7.80"} <= set(text.split())  # for 99 %


@pytest.mark.parametrize("name", ["one.svg", "folder/all.png", "all.pdf"])
def test_the_figure_is_a_file_of_the_kind_that_its_name_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    result = farloop("--method", path.stem if path.stem == "all" else "diloco", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert f"figure  {path}" in result.stdout
    magic = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[path.suffix]
    assert path.read_bytes().startswith(magic)


def test_the_figure_is_the_same_bytes_every_time_and_names_its_curves(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        farloop("--method", "all", "--plot", str(tmp_path / name))
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert all(f">{word}<" in text for word in ("data-parallel", "diloco", "streaming", "+ 4.25 bit"))


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("data-parallel", "--h", "100"), "data-parallel syncs at every step: --h 100 does not apply to it"),
        (
            ("data-parallel", "--overlap", "1"),
            "data-parallel waits for its gradients: --overlap 1 does not apply to it",
        ),
        (("diloco", "--layers-per-fragment", "3"), "diloco sends the model whole: --layers-per-fragment 3"),
    ],
)
def test_what_does_not_apply_is_said_and_changes_nothing(words: tuple[str, ...], note: str) -> None:
    method, *rest = words
    result = farloop("--method", method, *rest, "--json")
    assert note in result.stderr
    assert result.stdout == farloop("--method", method, "--json").stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--overlap", "100"), "overlap is 100 inner steps; with h = 100 it takes 0 to 99"),
        (("--lag", "1", "--overlap", "5"), "overlap is 5; with lag = 1 it is 0, for a whole round overlaps"),
        (("--model", "hopeful"), "there is no model 'hopeful'; there are farloop and published"),
        (("--layers-per-fragment", "25"), "layers_per_fragment is 25, but the model has 24 layers"),
        (("--h", "0"), "h is 0; the least is 1"),
        (("--h", "4"), "h is 4, too short for 8 fragments, each sent after a step of its own"),
        (("--layers", "0"), "layers is 0; the least is 1"),
        (("--bits", "0"), "bits is 0; it must be a number above 0"),
        (("--params", "many"), "'many' is no number of parameters, as 1e9, 1B and 350M are"),
        (("--params", "-1B"), "'-1B' is no number of parameters, as 1e9, 1B and 350M are"),
        (("--gbit-s", "1,fast"), "--gbit-s is a list of numbers above 0, as 1,10,100, not '1,fast'"),
        (("--gbit-s", "0"), "--gbit-s is a list of numbers above 0, as 1,10,100, not '0'"),
        (
            ("--method", "gossip"),
            "there is no method 'gossip' here; there are data-parallel, diloco, streaming and all",
        ),
        (("--plot", "x.txt"), "--plot is a file named .svg, .png or .pdf, not 'x.txt'"),
    ],
)
def test_a_bad_option_is_one_line_and_ends_with_2(words: tuple[str, ...], line: str) -> None:
    assert error_line(*words) == line


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e9", 1e9), ("1B", 1e9), ("350M", 350e6), ("1.5 b", 1.5e9), ("70k", 70e3), ("2T", 2e12), ("1_000", 1e3)],
)
def test_a_number_of_parameters_may_be_written_as_people_do(text: str, number: float) -> None:
    assert parse_number(text) == number


def test_bandwidths_are_a_list_without_repetition() -> None:
    assert parse_bandwidths("1, 10 0.5,1.0") == [1.0, 10.0, 0.5]
    with pytest.raises(CommandError):
        parse_bandwidths("")


@pytest.mark.parametrize(
    ("gbit_s", "text"), [(0.35512, "0.355"), (0.61, "0.610"), (0.9999, "1.00"), (97.03, "97.0"), (1234.5, "1,234")]
)
def test_a_bandwidth_has_three_digits(gbit_s: float, text: str) -> None:
    assert gbit_text(gbit_s) == text


def test_the_command_has_help_with_an_example() -> None:
    result = farloop("--help", columns=100)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "Example: farloop simulate bandwidth" in result.stdout
