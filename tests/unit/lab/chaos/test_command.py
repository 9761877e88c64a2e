"""What `farloop lab chaos` tells, and what it refuses before anything is started."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import error_line
from rich.console import Console

from farloop.lab.chaos import command as chaos
from farloop.lab.chaos.faults import Ballast
from farloop.lab.chaos.storm import Outcome

GOOD = Outcome(
    seconds=60.0,
    faults=Counter({"kill_node": 2, "fill_disk": 1}),
    committed=120,
    lost=0,
    forks=0,
    digests_equal=True,
    recovery_s={"kill_node": [1.0, 3.0], "fill_disk": [2.0], "node_back": [20.0]},
    memory={"coordinator": [(0.0, 5), (2.0, 9), (4.0, 7)]},
    problems=[],
)


def test_the_numbers_that_programs_read_have_their_names() -> None:
    told = GOOD.figures()
    known = {"faults": {"kill_node": 2, "fill_disk": 1}, "committed": 120, "lost": 0, "forks": 0, "digests_equal": True}
    assert known.items() <= told.items()
    assert (told["recovery_s_mean"], told["recovery_s_max"]) == (2.0, 3.0), "a node's own return is told apart"
    assert told["recovery_s"]["node_back"] == {"times": 2, "count": 1, "mean": 20.0, "max": 20.0}
    assert told["rss_bytes"]["coordinator"]["max"] == 9 and json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("change", [{"lost": 1}, {"forks": 1}, {"digests_equal": False}, {"problems": ["a ended"]}])
def test_a_storm_is_good_only_if_nothing_is_wrong(change: dict[str, Any]) -> None:
    assert GOOD.good and not replace(GOOD, **change).good


def test_tables_and_figure_show_what_happened_and_nothing_else(tmp_path: Path) -> None:
    console = Console(width=100, record=True)
    console.print(chaos.faults_table(GOOD))
    console.print(chaos.result_table(GOOD, tmp_path))
    text = console.export_text()
    assert "fill_disk" in text and "stop_node" not in text and "2.0 s mean, 3.0 s max" in text
    series = [(0.0, 5), (0.5, 9), (1.2, 1), (1.9, 8), (4.0, 2)]
    assert chaos.highest(series, 1.0) == [(0.5, 9), (1.9, 8), (4.0, 2)] and chaos.highest(series, 0.0) == [(0.5, 9)]
    chaos.draw_memory(tmp_path / "memory.svg", {**GOOD.memory, "a": [(0.0, 3), (2.0, 4)]})
    assert "resident memory" in (tmp_path / "memory.svg").read_text()


def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "epoch").touch()
    for words, line in (
        *((["--minutes", m], f"--minutes is a number above 0, as 5, not {m}") for m in ("0", "nan", "inf")),
        (["--nodes", "1"], "--nodes is from 2 to 26, not 1"),
        (["--nodes", "27"], "--nodes is from 2 to 26, not 27"),
        (["--out", str(tmp_path)], "is not empty (epoch)"),
    ):
        assert line in error_line("lab", "chaos", *words)


def test_a_disk_that_others_are_on_is_never_filled(tmp_path: Path) -> None:
    assert "the state is on a file system that other things are on" in Ballast(tmp_path).refusal()
