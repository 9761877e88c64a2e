"""`farloop simulate run`: a scenario in; tables, JSON or a figure out; and one line for whatever is wrong in a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from farloop.cli.main import app
from farloop.cli.scenario_file import example_names, load_example, load_scenario
from farloop.sim.flow.scenario import Group

ROOT = Path(__file__).resolve().parents[3]

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


def farloop(*words: str) -> Result:
    env = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    return CliRunner().invoke(app, ["simulate", "run", *words], env=env, prog_name="farloop")


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    return str(path)


def found(*words: str) -> dict[str, Any]:
    result = farloop(*words, "--json")
    assert result.exit_code == 0, result.output
    parsed = json.loads(result.stdout)
    assert isinstance(parsed, dict)
    return parsed


def error_line(*words: str) -> str:
    result = farloop(*words)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    return line.removeprefix("farloop: error: ")


def test_json_has_a_row_for_every_variant(tmp_path: Path) -> None:
    report = found(written(tmp_path, GOOD), "--seed", "3", "--repeats", "2")
    assert (report["name"], report["seed"], report["repeats"], report["swept"]) == ("small", 3, 2, None)
    lock_step, mine = report["rows"]
    assert (lock_step["variant"], mine["variant"]) == ("data-parallel", "mine")
    assert (lock_step["outer_steps"], mine["outer_steps"]) == (300, 5)
    assert lock_step["time_to_steps_s"] > 450
    assert mine["metrics"]["farloop_node_bytes"]["up"] == mine["bytes_up"] > 0


def test_a_lock_step_variant_takes_over_nothing_that_it_has_no_use_for(tmp_path: Path) -> None:
    scenario = load_scenario(Path(written(tmp_path, GOOD)))
    lock_step, mine = (variant.choice.rules() for variant in scenario.variants)
    assert (lock_step.h, lock_step.bits_up) == (1, 32.0)
    assert (mine.h, mine.bits_up, mine.bits_down) == (60, 4, 4.25)
    assert scenario.nodes[1] == Group(name="b", step_s=1.5)


def test_the_tables_are_for_people(tmp_path: Path) -> None:
    result = farloop(written(tmp_path, GOOD))
    assert result.exit_code == 0, result.output
    assert "small: two kinds of nodes" in result.stdout
    assert "goodput" in result.stdout and "lost steps" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_without_variants_the_run_itself_is_played(tmp_path: Path) -> None:
    report = found(written(tmp_path, 'steps = 60\n[run]\nmethod = "diloco"\n'))
    assert [row["variant"] for row in report["rows"]] == ["diloco"]
    assert report["rows"][0]["goodput"] == 1.0


@pytest.mark.parametrize("sweep", ["", '[sweep]\nkey = "crashes_per_hour"\nvalues = [0.1, 1, 10]\n'])
def test_a_figure_is_drawn(tmp_path: Path, sweep: str) -> None:
    path = tmp_path / "out" / "figure.svg"
    published = '[[published]]\nvariant = "mine"\ngoodput = 0.5\n' + ("value = 10\n" if sweep else "")
    result = farloop(written(tmp_path, GOOD + sweep + published), "--plot", str(path))
    assert result.exit_code == 0, result.output
    text = path.read_text()
    assert "where machine-seconds go" in text and "mine" in text
    assert ("goodput: machine-seconds" in text) == bool(sweep)
    assert "published" in result.stdout


def test_the_same_scenario_gives_the_same_bytes(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD.replace("step_s = 1.5", "step_sigma = 0.2\ncrashes_per_hour = 20"))
    assert farloop(path, "--json").stdout == farloop(path, "--json").stdout
    assert farloop(path, "--json").stdout != farloop(path, "--json", "--seed", "9").stdout


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("steps = 300", "setps = 300", ":3: setps: there is no such key; did you mean steps?"),
        ("steps = 300", "", ": steps is missing: how long is it? Or give hours"),
        ("steps = 300", 'steps = "300"', ":3: steps: a whole number is wanted, not '300'"),
        ("h = 30", "hh = 30", ":6: [run] hh: there is no such key; did you mean h?"),
        ("h = 30", "h = 30.5", ":6: [run] h: a whole number is wanted, not 30.5"),
        ("count = 2", "cuont = 2", ":11: [[nodes]] cuont: there is no such key; did you mean count?"),
        ("step_s = 1.5", "step_s = -1", ":16: [[nodes]] step_s: is -1.0; it must be above 0"),
        ('name = "b"', 'name = "a"', ": nodes: the name 'a' is there twice"),
        ("step_s = 1.5", 'site = "paris"', ":16: [[nodes]] site: 'paris' is not among the sites"),
        ('"streaming"', '"streeming"', ":23: [[variants]] method: there is no 'streeming'; did you mean streaming?"),
        ("h = 60", "h = 4", ":21: [[variants]] fragments: is 6, more than the inner steps of a round; at most h = 4"),
        ("h = 60", "h = 60\ntau = true", ":25: [[variants]] tau: a whole number is wanted, not True"),
        ("[run]", "[rum]", ":5: rum: there is no such key; did you mean run?"),
        ('[[nodes]]\nname = "a"', '[nodes]\nname = "a"', ":14: is not TOML"),
        (
            "h = 60",
            'h = 60\n[sweep]\nkey = "cont"\nvalues = [1]',
            ":26: [sweep] key: there is no 'cont'; did you mean count?",
        ),
        (
            "h = 60",
            'h = 60\n[sweep]\nkey = "count"\nvalues = [1.5]',
            ":27: [sweep] values: count cannot be 1.5: it takes",
        ),
        ("h = 60", 'h = 60\n[sweep]\nkey = "count"', ":25: [sweep] values is missing"),
        (
            "h = 60",
            'h = 60\n[[outages]]\ngroup = "c"\nat_s = 1\nfor_s = 1',
            ":26: [[outages]] group: 'c' is not among the",
        ),
    ],
)
def test_whatever_is_wrong_is_one_line_that_says_where(tmp_path: Path, old: str, new: str, line: str) -> None:
    assert old in GOOD
    path = written(tmp_path, GOOD.replace(old, new, 1))
    assert error_line(path).startswith(path + line)


def test_words_that_make_no_sense_together_are_refused(tmp_path: Path) -> None:
    assert error_line().startswith("either a SCENARIO.toml or --example is wanted, of ")
    assert error_line("--example", "failure") == "--example: there is no 'failure'; did you mean failures?"
    assert error_line("--example", "failures", "--plot", "x.gif").startswith(
        "--plot is a file named .svg, .png or .pdf"
    )
    assert error_line(str(tmp_path / "none.toml")).endswith("none.toml: cannot be read: no such file or directory")
    assert error_line(written(tmp_path, GOOD), "--show").startswith("--show goes with --example")


def test_a_run_that_stands_still_for_good_is_told_so(tmp_path: Path) -> None:
    path = written(tmp_path, "steps = 600\n[[nodes]]\ndrains_at_s = 50\n")
    assert "stands still for good: after" in error_line(path)


def test_examples_are_listed_and_shown() -> None:
    names = example_names()
    assert {"failures", "published"} <= set(names)
    listed = farloop("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == names
    for name in names:
        scenario = load_example(name)
        assert scenario.name == name and scenario.about in "\n".join(listed)
        assert f'name = "{name}"' in farloop("--example", name, "--show").stdout


def test_the_scenario_for_users_is_good() -> None:
    scenario = load_scenario(ROOT / "examples" / "scenario.toml")
    assert [variant.name for variant in scenario.variants] == ["diloco", "streaming", "decoupled"]
