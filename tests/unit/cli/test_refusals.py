"""The page of error texts: what can be written wrongly, and the one line that says so (`stories/*.txt`)."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import error_line
from pipeline_layouts import layout_of
from stories import StoryText, all_stories, check_story

from farloop.config.inventory_file import inventory_of
from farloop.config.run_spec import planned
from farloop.config.settings import load_node, load_run
from farloop.config.sources import ConfigError
from farloop.pipeline.layout import layout_json

ROOT = Path(__file__).parents[3]
SMALL = ("coordinator.state_dir=state", "run.model=nano", "run.evaluation_sequences=4", "data.max_bytes=200000")
"""Set of every run."""

PLAN: dict[str, Any] = {
    "model": {"layers": 4},
    "nodes": [{"name": "a", "count": 2, "layer_s": 0.1}],
    "links": [{"between": ["a", "a"], "latency_ms": 1.0}],
}

SCENARIO = """\
steps = 300
[run]
h = 30
[[nodes]]
name = "a"
count = 2
[[nodes]]
name = "b"
step_s = 1.5
[[variants]]
method = "streaming"
h = 60
"""


def refused(load: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        load()
    return str(error.value)


def of_run(line: str) -> str:
    """A run of the lines that ` | ` divides: of its file, the command line or the environment."""
    parts = line.split(" | ")
    flags = [part.removeprefix("--set ") for part in parts if part.startswith("--set ")]
    environ = dict(part.split("=", 1) for part in parts if part.startswith("FARLOOP"))
    lines = [part for part in parts if not part.startswith(("--set ", "FARLOOP"))]
    Path("run.toml").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return refused(lambda: planned(load_run(Path("run.toml"), flags=[*SMALL, *flags], environ=environ)))


def of_node(line: str) -> str:
    """A node of the lines that ` | ` divides; one with a section [pipeline] has a layout."""
    text = line.replace(" | ", "\n")
    name = "" if "name = " in text else "name = 'rome'\n"
    if "[pipeline]" in text and "layout = " not in text:
        text = text.replace("[pipeline]", "[pipeline]\nlayout = 'layout.json'")
        layout = layout_of(["ab", ("rome", "d")], [("a", "rome"), "bd"])
        Path("layout.json").write_text(layout_json(layout, dict.fromkeys(("a", "b", "rome", "d"), "tcp://127.0.0.1:1")))
    Path("node.toml").write_text(f"[node]\n{name}{text}\n")
    return refused(lambda: load_node(Path("node.toml"), flags=[], environ={}))


def of_plan(line: str) -> str:
    """An inventory with other tables; without those that are null."""
    tables = {key: value for key, value in {**PLAN, **json.loads(line)}.items() if value is not None}
    return refused(lambda: inventory_of(tables, "plan.toml"))


def of_scenario(line: str) -> str:
    """A scenario with other words in place of some, or a whole one."""
    old, _, new = line.replace(" | ", "\n").rpartition(" => ")
    assert old in SCENARIO
    Path("scenario.toml").write_text(SCENARIO.replace(old, new, 1) if old else new)
    return error_line("lab", "simulate", "run", "scenario.toml")


def of_command(line: str) -> str:
    """It writes nothing."""
    Path("run.toml").write_text("[run]\nmodel = 'nano'\n[coordinator]\nstate_dir = 'state'\nhttp = ''\n")
    Path("node.toml").write_text("[node]\nname = 'a'\n")
    Path("file").touch()
    for name, depth in (("deep.toml", 101), ("deeper.toml", 2000), ("deep.json", 101), ("deeper.json", 2000)):
        key = '{"a": %s}' if name.endswith("json") else "a = %s"
        Path(name).write_text(key % ("[" * depth + "]" * depth))
    before = sorted(Path().rglob("*"))
    said = error_line(*shlex.split(line.replace("PLANS", f"{ROOT}/examples/plans")))
    assert sorted(Path().rglob("*")) == before
    return said


PLAYERS = {"runs": of_run, "nodes": of_node, "plans": of_plan, "scenarios": of_scenario, "commands": of_command}


@all_stories(__file__, *PLAYERS)
def test_what_is_wrong_is_one_line(
    path: Path, story: StoryText, rewrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def play(line: str) -> str:
        return PLAYERS[path.stem](line).replace(f"{tmp_path}/", "").replace(f"{ROOT}/examples/plans", "PLANS")

    check_story(path, story, play, rewrite=rewrite)
