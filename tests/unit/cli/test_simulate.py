"""`farloop lab simulate bandwidth` and `run`: options and scenarios in; JSON and figures out.

The tables are compared with docs/tuning.md: tests/unit/docs/test_outputs.py.
"""

from pathlib import Path
from typing import Any

import pytest
from command_line import error_line, farloop
from command_line import found as found_by
from typer.testing import Result

from farloop.cli.simulate import parse_bandwidths, parse_number
from farloop.config.exit_codes import CommandError
from farloop.config.scenario_file import example_names, load_example, load_scenario
from farloop.sim.bandwidth import gbit_text
from farloop.sim.flow.scenario import Group

# --- bandwidth


def bandwidth(*words: str) -> Result:
    return farloop("lab", "simulate", "bandwidth", *words, columns=80)


def found(*words: str) -> Any:
    return found_by("lab", "simulate", "bandwidth", "--params", "1e9", "--layers", "24", "--step-s", "0.1", *words)


def test_json_has_the_required_bandwidths_and_the_utilization_at_each_one() -> None:
    words = ("--method", "streaming", "--bits", "4", "--overlap", "1")
    curve = found(*words, "--gbit-s", "1,2,10,2.50")
    assert list(curve["required_gbit_s"]) == ["0.5", "0.8", "0.9", "0.95", "0.99"]
    assert curve["required_gbit_s"]["0.95"] == pytest.approx(6.03, abs=0.005)
    assert list(curve["utilization"]) == ["1", "2", "10", "2.5"]
    assert curve["utilization"]["10"] == 1.0 > curve["utilization"]["1"] > 0.5
    settings = {"method": "streaming", "model": "farloop", "lag": 0, "params": 10**9, "layers": 24, "step_s": 0.1}
    shape = {"h": 100, "bits": 4.0, "fragments": 8, "overlap": 1, "payload_gbit": 4.0}
    assert (settings | shape).items() <= curve.items() and curve["mean_gbit_s"] == pytest.approx(0.4)
    published = found(*words, "--model", "published")
    assert published["required_gbit_s"]["0.95"] == pytest.approx(2.22, abs=0.005)
    assert found("--layers", "2")["fragments"] == 1


DIRECT = [("data-parallel", 1, 0, 16.0), ("diloco", 100, 0, 16.0)]
LADDERS = {
    "farloop": [*DIRECT, ("streaming", 100, 5, 16.0), ("streaming", 100, 5, 4.25)],
    "published": [*DIRECT, *(("streaming", 100, overlap, bits) for overlap, bits in ((0, 16.0), (1, 16.0), (1, 4.0)))],
}


@pytest.mark.parametrize(("model", "steps"), LADDERS.items())
def test_all_is_a_ladder_that_needs_less_at_every_step(model: str, steps: list[tuple[str, int, int, float]]) -> None:
    curves = found("--method", "all", "--model", model)["methods"]
    assert [(curve["method"], curve["h"], curve["overlap"], curve["bits"]) for curve in curves] == steps
    # Farloop's own data-parallel hides nothing: others are compared with one that overlaps its gradients.
    assert [curve["model"] for curve in curves] == ["published", *[model] * (len(curves) - 1)]
    for target in curves[0]["required_gbit_s"]:
        needs = [curve["required_gbit_s"][target] for curve in curves]
        assert needs == sorted(needs, reverse=True)
    short = found("--method", "all", "--model", "published", "--overlap", "0", "--bits", "4")["methods"]
    assert [curve["method"] for curve in short] == ["data-parallel", "diloco", "streaming"], "each step adds something"


@pytest.mark.parametrize(
    ("name", "magic"), [("one.svg", b"<?xml"), ("folder/all.png", b"\x89PNG"), ("all.pdf", b"%PDF")]
)
def test_the_figure_is_a_file_of_the_kind_that_its_name_says(name: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    result = bandwidth("--method", "all" if path.stem == "all" else "diloco", "--plot", str(path))
    assert result.exit_code == 0 and f"figure  {path}" in result.stdout, result.output
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("data-parallel --h 100", "data-parallel syncs at every step: --h 100 does not apply to it"),
        ("data-parallel --overlap 1", "data-parallel waits for its gradients: --overlap 1 does not apply to it"),
        ("diloco --layers-per-fragment 3", "diloco sends the model whole: --layers-per-fragment 3"),
    ],
)
def test_what_does_not_apply_is_said_and_changes_nothing(words: str, note: str) -> None:
    method, *rest = words.split()
    result = bandwidth("--method", method, *rest, "--json")
    assert note in result.stderr and result.stdout == bandwidth("--method", method, "--json").stdout


def test_numbers_are_read_and_written_as_people_do() -> None:
    numbers = {"1e9": 1e9, "1B": 1e9, "350M": 350e6, "1.5 b": 1.5e9, "70k": 70e3, "2T": 2e12}
    assert {text: parse_number(text) for text in numbers} == numbers
    assert parse_bandwidths("1, 10 0.5,1.0") == [1.0, 10.0, 0.5], "a list without repetition"
    with pytest.raises(CommandError):
        parse_bandwidths("")
    rates = {0.35512: "0.355", 0.61: "0.610", 0.9999: "1.00", 97.03: "97.0", 1234.5: "1,234"}
    assert {rate: gbit_text(rate) for rate in rates} == rates


# --- scenarios

GOOD = """\
name = "small"
about = "two kinds of nodes"
steps = 300

[run]
h = 30
bits_up = 4

[[nodes]]
name = "a"
count = 2
up_gbit_s = 1

[[nodes]]
name = "b"
step_s = 1.5

[[variants]]
method = "data-parallel"

[[variants]]
name = "mine"
method = "streaming"
h = 60
"""


def played(*words: str) -> Any:
    return found_by("lab", "simulate", "run", *words)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return str(path)


def test_json_has_a_row_for_every_variant(tmp_path: Path) -> None:
    report = played(written(tmp_path, GOOD), "--seed", "3", "--repeats", "2")
    assert (report["name"], report["seed"], report["repeats"], report["swept"]) == ("small", 3, 2, None)
    rows = report["rows"]
    assert [(row["variant"], row["outer_steps"]) for row in rows] == [("data-parallel", 300), ("mine", 5)]
    assert rows[0]["time_to_steps_s"] > 450
    assert rows[1]["metrics"]["farloop_node_bytes"]["up"] == rows[1]["bytes_up"] > 0
    run, unlimited = '[run]\nmethod = "diloco"\n', "[[nodes]]\ncount = 4\nup_gbit_s = inf\ndown_gbit_s = inf\n"
    for text in (run, f"hours = inf\nvariants = []\n{run}{unlimited}"):
        alone = played(written(tmp_path, f"steps = 60\n{text}"))["rows"]
        found = [(row["variant"], row["goodput"]) for row in alone]
        assert found == [("diloco", pytest.approx(1.0))], "without variants"


def test_a_lock_step_variant_takes_over_nothing_that_it_has_no_use_for(tmp_path: Path) -> None:
    scenario = load_scenario(Path(written(tmp_path, GOOD)))
    lock_step, mine = (variant.rules for variant in scenario.variants)
    assert (lock_step.h, lock_step.bits_up) == (1, 32.0)
    assert (mine.h, mine.bits_up, mine.bits_down) == (60, 4, 4.25)
    assert scenario.nodes[1] == Group(name="b", step_s=1.5)


@pytest.mark.parametrize("sweep", ["", '[sweep]\nkey = "crashes_per_hour"\nvalues = [0.1, 1, 10]\n'])
def test_tables_and_a_figure_are_for_people(tmp_path: Path, sweep: str) -> None:
    path = tmp_path / "out" / "figure.svg"
    published = '[[published]]\nvariant = "mine"\ngoodput = 0.5\n' + ("value = 10\n" if sweep else "")
    result = farloop("lab", "simulate", "run", written(tmp_path, GOOD + sweep + published), "--plot", str(path))
    assert result.exit_code == 0, result.output
    told, text = result.stdout, path.read_text()
    assert all(words in told for words in ("small: two kinds of nodes", "goodput", "lost steps", "published"))
    assert max(len(line) for line in told.splitlines() if "figure" not in line) <= 100
    assert "machine-seconds by activity" in text and "mine" in text
    assert ("goodput: machine-seconds" in text) == bool(sweep)


def test_words_that_make_no_sense_together_are_refused(tmp_path: Path) -> None:
    for text, words, line in (
        (GOOD, ["--show"], "--show goes with --example"),
        ("steps = 600\n[[nodes]]\ndrains_at_s = 50\n", [], "never finishes: after"),
    ):
        assert line in error_line("lab", "simulate", "run", written(tmp_path, text), *words)


def test_examples_are_listed_shown_and_good() -> None:
    names = example_names()
    assert {"failures", "published"} <= set(names)
    listed = farloop("lab", "simulate", "run", "--list").stdout
    assert [line.split()[0] for line in listed.splitlines()] == names
    for name in names:
        scenario = load_example(name)
        assert scenario.name == name and scenario.about in listed
        assert f'name = "{name}"' in farloop("lab", "simulate", "run", "--example", name, "--show").stdout
