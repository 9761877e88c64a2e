"""Covers `node/reports.py`: what is told, when, and what of it is measured."""

from pathlib import Path

import pytest

from farloop.algo.spec import NodeId
from farloop.node.cluster import Cluster
from farloop.node.link import Traffic
from farloop.node.machine import NodeMachine, Stage
from farloop.node.reports import PROGRESS_S, Reports, TimeAccount
from farloop.node.sample_cursor import LeaseCursor
from farloop.node.state_dir import NodeState
from farloop.wire.messages import BytesByKind, Leave
from farloop.wire.reasons import Reason

MOVED = Traffic(BytesByKind(delta=1), BytesByKind(update=2, snapshot=3))


@pytest.fixture
def machine() -> NodeMachine:
    return NodeMachine(name=NodeId("a"), incarnation=1)


@pytest.fixture
def reports(machine: NodeMachine, tmp_path: Path) -> Reports:
    return Reports(machine, TimeAccount(), LeaseCursor(), NodeState.claim(tmp_path), Cluster(), "of the run")


def test_a_report_is_due_every_second_and_its_speed_is_that_since_the_last(
    machine: NodeMachine, reports: Reports
) -> None:
    assert reports.is_due(100.0)
    assert reports.progress(MOVED, None, 100.0).tokens_per_s == 0.0, "of what was before nothing is known"
    reports.reported(100.0)
    assert not reports.is_due(100.0 + PROGRESS_S / 2) and reports.is_due(100.0 + PROGRESS_S)
    machine.tokens = 300
    assert reports.progress(MOVED, None, 102.0).tokens_per_s == 150.0
    assert reports.progress(MOVED, None, 102.0).tokens_per_s == 150.0, "asking changes nothing"
    reports.reported(102.0)
    assert reports.progress(MOVED, None, 104.0).tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("stage", "waiting", "state"),
    [
        ("joining", "the coordinator", "joining"),
        ("ready", "the start", "ready"),
        ("training", None, "training"),
        ("training", "fragment 0, window 1", "waiting"),
        ("finishing", "the last windows", "waiting"),
        ("draining", "fragment 0, window 1", "draining"),
        ("finished", None, "finished"),
        ("left", None, "finished"),
        ("stopped", None, "finished"),
    ],
)
def test_the_state_is_that_of_the_machine_in_a_word(
    machine: NodeMachine, reports: Reports, stage: Stage, waiting: str | None, state: str
) -> None:
    machine.stage = stage
    told = reports.progress(MOVED, waiting, 1.0)
    assert (told.state, told.detail) == (state, waiting or "")
    assert (told.bytes_up, told.bytes_down, told.bytes_state) == (1, 2, 3)
    assert (told.sent, told.received) == (MOVED.up, MOVED.down)


def test_a_start_that_the_machine_has_not_heard_of_is_told_all_the_same(machine: NodeMachine, reports: Reports) -> None:
    """I: the session may break in between, and the next Hello would deny it."""
    assert reports.hello().round is None
    reports.starts_in(3)
    assert (reports.hello().round, reports.hello().fingerprint) == (3, "of the run")
    machine.schedule.start_round = machine.schedule.round = 4
    assert reports.hello().round == 4


def test_a_farewell_keeps_its_reason(reports: Reports) -> None:
    assert reports.farewell(Leave(reason=Reason.DRAINED, detail="bye")) == Leave(reason=Reason.DRAINED, detail="bye")
