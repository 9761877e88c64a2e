"""Covers `node/reports.py`."""

from pathlib import Path

import pytest

from farloop.algo.spec import NodeId
from farloop.node.link import Traffic
from farloop.node.machine import NodeMachine, Stage
from farloop.node.metrics import Metrics
from farloop.node.reports import AWAY_S, PROGRESS_S, ROUNDS, SENTENCES, Isolation, Reports, TimeAccount
from farloop.node.sample_cursor import LeaseCursor
from farloop.node.state_dir import NodeState
from farloop.wire import messages as msg
from farloop.wire.messages import BytesByKind, Leave
from farloop.wire.reasons import Reason

MOVED = Traffic(BytesByKind(delta=1), BytesByKind(update=2, snapshot=3))


@pytest.fixture
def machine() -> NodeMachine:
    return NodeMachine(name=NodeId("a"), incarnation=1)


@pytest.fixture
def reports(machine: NodeMachine, tmp_path: Path) -> Reports:
    return Reports(machine, TimeAccount(), LeaseCursor(), NodeState.claim(tmp_path), "", "of the run")


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


def test_nothing_is_counted_before_the_first_step_or_after_the_last() -> None:
    clock = TimeAccount()
    assert clock.activity is None and clock.compute_share(1000.0) == 1.0
    clock.turn("training", 1000.0)
    clock.turn("farloop", 1009.0)
    clock.turn(None, 1010.0)
    assert clock.compute_share(5000.0) == pytest.approx(0.9)


def test_a_wait_counts_while_it_lasts() -> None:
    """A node that stands still must not look busier and busier."""
    clock = TimeAccount()
    clock.turn("training", 0.0)
    clock.turn("blocked", 10.0)
    assert clock.compute_share(20.0) == pytest.approx(0.5)
    assert clock.seconds("blocked", 40.0) == 30.0
    assert clock.compute_share(40.0) == pytest.approx(0.25)


def test_farloop_s_own_time_waiting_and_evaluation_count_against_the_share() -> None:
    """J."""
    clock = TimeAccount()
    for activity, now in (("training", 0.0), ("farloop", 6.0), ("evaluation", 7.0), ("farloop", 107.0)):
        clock.turn(activity, now)  # type: ignore[arg-type]
    clock.turn("blocked", 108.0)
    clock.turn("training", 110.0)
    assert clock.compute_share(110.0) == pytest.approx(6 / 110)
    assert clock.seconds("evaluation", 110.0) == 100.0


def test_the_first_instant_has_a_share_of_one() -> None:
    clock = TimeAccount()
    clock.turn("farloop", 3.0)
    assert clock.compute_share(3.0) == 1.0


A, B = NodeId("oslo"), NodeId("bergen")


def committed(*names: NodeId) -> msg.Committed:
    return msg.Committed(
        fragment=0, version=1, size=1, digest=1, anchor_digest=1, drops=(), next_window=None, rounds=(),
        merged=tuple(msg.Share(node=name, weight=1 / len(names)) for name in names),
    )  # fmt: skip


class Scene:
    def __init__(self) -> None:
        self.alone, self.round, self.now = Isolation(A), 5, 100.0

    def how(self, *, connected: bool = True, trains: bool = True) -> str:
        return self.alone.how(trains=trains, connected=connected, round_index=self.round, now=self.now)

    def go_on(self, rounds: int, *names: NodeId) -> str:
        for _ in range(rounds):
            self.round += 1
            self.how()
            if names:
                self.alone.heard(committed(*names), self.round)
        return self.how()


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    assert scene.how() == ""
    return scene


def test_a_node_among_others_is_not_alone(scene: Scene) -> None:
    assert scene.go_on(20, A, B) == ""


def test_a_node_of_which_nothing_is_merged_says_so_until_something_is(scene: Scene) -> None:
    assert scene.go_on(ROUNDS, B) == ""
    assert scene.go_on(1, B) == "not merged"
    assert scene.go_on(1, A, B) == ""


def test_a_node_that_is_merged_alone_says_so(scene: Scene) -> None:
    assert scene.go_on(ROUNDS, A) == ""
    assert scene.go_on(1, A) == "merged alone"
    assert scene.go_on(1, A, B) == ""


def test_a_node_that_goes_on_without_the_coordinator_says_so_after_a_while(scene: Scene) -> None:
    assert scene.how(connected=False) == ""
    scene.now += AWAY_S - 0.1
    assert scene.how(connected=False) == ""
    scene.now += 0.1
    assert scene.how(connected=False) == "without the coordinator"
    assert scene.how() == ""
    scene.now += 0.1
    assert scene.how(connected=False) == "", "the time counts from each loss"


def test_who_does_not_train_is_not_alone_and_begins_anew(scene: Scene) -> None:
    scene.go_on(9)
    assert scene.how(trains=False, connected=False) == ""
    assert scene.go_on(1) == ""


def test_every_way_has_a_sentence_and_the_metric_and_the_page_show_it() -> None:
    report = msg.Progress(
        state="training", position=0.0, round=0, inner_steps=0, tokens=0, loss=None, tokens_per_s=0.0,
        compute_share=0.0, blocked_s=0.0, lost_steps=0, sample_watermark=0, bytes_up=0, bytes_down=0, bytes_state=0,
        detail=SENTENCES["not merged"],
    )  # fmt: skip
    assert len(set(SENTENCES.values())) == len(SENTENCES)
    metrics = Metrics(A)
    for alone in (True, False):
        metrics.saw(report, versions={0: 0}, connected=True, alone=alone)
        assert f'farloop_node_alone{{node="oslo"}} {float(alone)}' in metrics.exposition().decode()
    assert metrics.standing == (True, "training: nothing of it was merged in the last 3 rounds")
