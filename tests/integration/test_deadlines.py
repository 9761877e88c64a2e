"""A real node among real nodes that falls silent and goes on to report: the others go on (protocol, Deadlines)."""

from pathlib import Path

import pytest
from loopback import NewRun, alone_since, node_of

from farloop.coordinator.decide.deadlines import ALARM, FLOOR_S

MUTE = Path(__file__).with_name("mute.py")
BUSY_S = 120.0
"""What a busy machine may add."""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def test_a_node_that_reports_and_sends_nothing_is_named_and_does_not_hold_the_run(new_run: NewRun) -> None:
    run = new_run(method="diloco", h=2, steps=80, nodes=2)
    coordinator, honest = run.start_coordinator(), run.start_metronome("a")
    mute = run.start("node-b", str(MUTE), str(run.node_toml("b", "", {})), "6")
    named = run.until("an alarm names b", lambda status: any(one.startswith(f"{ALARM}: ") for one in status["alarms"]))
    (alarm,) = [one for one in named["alarms"] if one.startswith(f"{ALARM}: ")]
    assert "b owes its delta for window 7 of fragment 0: it reports 'waiting'" in alarm and "a owes" not in alarm
    assert node_of(named, "b")["connected"]
    run.until("a goes on alone", lambda status: alone_since(status, named["versions"], "a"), FLOOR_S + BUSY_S)
    mute.kill()
    run.hurry()
    run.until_done(coordinator, honest)
    commits = run.events("commit")
    assert all(commit["merged"] == ["a", "b"] for commit in commits[:6]) and len(commits) == 40
    assert commits[6]["merged"] == ["a"] and [node for node, _ in commits[6]["drops"]] == ["b"]
