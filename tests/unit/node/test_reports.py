"""Covers `node/reports.py`, `node/metrics.py` and `node/send_schedule.py`: what a node tells of itself."""

import dataclasses
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_runs import plain_progress
from prometheus_client.parser import text_string_to_metric_families
from stories import StoryText, all_stories, check_story, python

import farloop.node.reports
from farloop.algo.spec import Lease, NodeId
from farloop.node.link import Traffic
from farloop.node.machine import NodeMachine, Stage
from farloop.node.metrics import Metrics
from farloop.node.reports import (
    NOT_MERGED,
    PROGRESS_S,
    Activity,
    Isolation,
    Reports,
    StageLog,
    TimeAccount,
)
from farloop.node.send_schedule import USED_KEPT, LeaseCursor
from farloop.node.state_dir import NodeState
from farloop.wire import messages as msg
from farloop.wire.messages import BytesByKind

MOVED = Traffic(BytesByKind(delta=1), BytesByKind(update=2, snapshot=3))


@pytest.fixture
def machine() -> NodeMachine:
    return NodeMachine(name=NodeId("a"), incarnation=1)


@pytest.fixture
def reports(machine: NodeMachine, tmp_path: Path) -> Reports:
    return Reports(machine, TimeAccount(), LeaseCursor(), NodeState.claim(tmp_path), "", "of the run")


# --- reports and greetings


def test_a_report_is_due_every_second_with_the_speed_since_the_last(machine: NodeMachine, reports: Reports) -> None:
    assert reports.is_due(100.0)
    assert reports.progress(MOVED, None, 100.0).tokens_per_s == 0.0, "of what was before nothing is known"
    reports.reported(100.0)
    assert not reports.is_due(100.0 + PROGRESS_S / 2) and reports.is_due(100.0 + PROGRESS_S)
    machine.tokens = 300
    assert reports.progress(MOVED, None, 102.0).tokens_per_s == 150.0
    assert reports.progress(MOVED, None, 102.0).tokens_per_s == 150.0, "asking changes nothing"
    reports.reported(102.0)
    assert reports.progress(MOVED, None, 104.0).tokens_per_s == 0.0


def test_a_start_that_the_machine_has_not_heard_of_is_told_all_the_same(machine: NodeMachine, reports: Reports) -> None:
    """I: the session may break in between, and the next Hello would deny it."""
    assert reports.hello().round is None
    reports.starts_in = 3
    assert (reports.hello().round, reports.hello().fingerprint) == (3, "of the run")
    machine.schedule.start_round = machine.schedule.round = 4
    assert reports.hello().round == 4


def told(stage: Stage, waiting: str | None) -> tuple[str, str]:
    machine = NodeMachine(name=NodeId("a"), incarnation=1)
    machine.stage = stage
    reports = Reports(machine, TimeAccount(), LeaseCursor(), cast(NodeState, None), "", "of the run")
    report = reports.progress(MOVED, waiting, 1.0)
    assert (report.sent, report.received) == (MOVED.up, MOVED.down)
    return report.state, report.detail


# --- where the time goes


def share(now: float, **since: float) -> float:
    """Of computing, where each of these activities began at a second; `end` is the end of the run."""
    clock = TimeAccount()
    for activity, second in since.items():
        clock.turn(cast(Activity, activity) if activity != "end" else None, second)
    return round(clock.compute_share(now), 9)


def test_farloop_s_own_time_waiting_and_evaluation_count_against_the_share() -> None:
    """J."""
    clock = TimeAccount()
    turns: list[tuple[Activity, float]] = [
        ("training", 0.0), ("farloop", 6.0), ("evaluation", 7.0), ("farloop", 107.0), ("blocked", 108.0),
        ("training", 110.0),
    ]  # fmt: skip
    for activity, since in turns:
        clock.turn(activity, since)
    assert clock.compute_share(110.0) == pytest.approx(6 / 110)
    assert (clock.seconds("evaluation", 110.0), clock.seconds("blocked", 110.0)) == (100.0, 2.0)


# --- a node that is alone

A, B = NodeId("oslo"), NodeId("bergen")


class Scene:
    def __init__(self) -> None:
        self.alone, self.round, self.now = Isolation(A), 5, 100.0
        assert self.how() == ""

    def how(self, *, connected: bool = True, trains: bool = True) -> str:
        return self.alone.how(trains=trains, connected=connected, round_index=self.round, now=self.now)

    def go_on(self, rounds: int, *names: NodeId) -> str:
        """Rounds, in each of which a version of these nodes comes."""
        for _ in range(rounds):
            self.round += 1
            self.how()
            committed = msg.Committed(
                fragment=0, version=1, size=1, digest=1, anchor_digest=1, drops=(), next_window=None, rounds=(),
                merged=tuple(msg.Share(node=name, weight=1 / len(names)) for name in names),
            )  # fmt: skip
            if names:
                self.alone.on_message(committed, self.round)
        return self.how()

    def away(self, seconds: float) -> str:
        """After so long without the coordinator."""
        self.now += seconds
        return self.how(connected=False)


@all_stories(__file__, "samples")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(farloop.node.reports), globals()), rewrite=rewrite)


# --- the log


def stub(**state: Any) -> NodeMachine:
    known = {"stage": "joining", "connected": False, "epoch": 2, "schedule": SimpleNamespace(round=4, step=7)}
    return cast(NodeMachine, SimpleNamespace(**(known | state)))


def test_every_stage_is_told_once_with_where_it_came_from_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    transitions, stages = StageLog(), [stage for stage in get_args(Stage) if stage != "joining"]
    for stage in stages:
        for _ in range(3):
            transitions.log_changes(stub(stage=stage))
    for line, stage, before in zip(caplog.messages, stages, ["joining", *stages[:-1]], strict=True):
        assert line.startswith(f"stage is={stage} was={before} round=4 step=7 why='")
        assert not line.endswith("why=''")


def test_every_new_session_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    transitions = StageLog()
    for connected in (False, True, True, False, True):
        transitions.log_changes(stub(connected=connected))
    assert caplog.messages == ["session open epoch=2 stage=joining round=4"] * 2


# --- metrics

PROGRESS = plain_progress(
    position=12.5, round=3, inner_steps=13, tokens=1300, loss=2.5, tokens_per_s=40.0, compute_share=0.75, blocked_s=1.5,
    lost_steps=4, sample_watermark=52, skipped_turns=5, skipped_steps=2,
    sent=BytesByKind(delta=1000), received=BytesByKind(update=2000, snapshot=3000),
)  # fmt: skip


def samples(metrics: Metrics) -> dict[str, float]:
    """Value by name and label values, the node's own left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name.startswith("process_"):
                continue
            labels = dict(sample.labels)
            assert labels.pop("node") == "oslo"
            name = sample.name.removeprefix("farloop_node_")
            found[" ".join([name, *(value for _, value in sorted(labels.items()))])] = sample.value
    return found


def test_a_scrape_shows_the_last_report() -> None:
    metrics = Metrics(A)
    assert samples(metrics) == {}, "what is not known is not shown"
    metrics.update(PROGRESS, versions={0: 3, 1: -1}, connected=True, lanes=4)
    metrics.mismatches += 1
    metrics.spent({"training": 9.0, "blocked": 1.5}, 0.25)
    moved = {f"{way} {kind}": 0 for way in ("up", "down") for kind in BytesByKind.__slots__ if kind != "total"}
    moved |= {"up delta": 1000, "down update": 2000, "down snapshot": 3000}
    assert samples(metrics) == {
        "connected": 1,
        "position_steps": 12.5,
        "tokens_per_second": 40,
        "compute_share_ratio": 0.75,
        "loss_nats": 2.5,
        "inner_steps_total": 13,
        "tokens_total": 1300,
        "alone": 0,
        "lanes": 4,
        "log_dropped_lines_total": 0,
        "anchor_mismatches_total": 1,
        "blocked_seconds_total": 1.5,
        "lost_steps_total": 4,
        "skipped_steps_total": 2,
        "skipped_sends_total": 5,
        "time_seconds_total training": 9,
        "time_seconds_total blocked": 1.5,
        "codec_seconds_total": 0.25,
        "fragment_version 0": 3,
        "fragment_version 1": -1,
        **{f"bytes_total {key}": value for key, value in moved.items()},
    }
    metrics.update(dataclasses.replace(PROGRESS, inner_steps=14, loss=None), versions={}, connected=False, alone=True)
    shown = samples(metrics)
    assert (shown["inner_steps_total"], shown["connected"], shown["alone"]) == (14, 0, 1)
    assert "loss_nats" not in shown
    metrics.piped({"completed": 8, "rerouted": 1}, 4096, 2)
    assert {name: value for name, value in samples(metrics).items() if "pipeline" in name} == {
        "pipeline_microbatches_total completed": 8,
        "pipeline_microbatches_total rerouted": 1,
        "pipeline_sent_bytes_total": 4096,
        "pipeline_inputs": 2,
    }


def test_a_node_is_ready_once_it_takes_part_and_says_what_it_waits_for() -> None:
    metrics = Metrics(A)
    assert metrics.standing == (False, "starting")
    for state in get_args(msg.NodeState):
        metrics.update(plain_progress(state=state, detail=NOT_MERGED), versions={}, connected=True)
        started = state in ("training", "waiting")
        assert metrics.standing == (started, f"{state}: {NOT_MERGED}")
    metrics.update(PROGRESS, versions={}, connected=True)
    assert metrics.standing == (True, "training")


# --- samples of leases


def cursor_of(*leases: tuple[int, int]) -> LeaseCursor:
    cursor = LeaseCursor()
    for start, count in leases:
        cursor.grant(Lease(start=start, count=count))
    return cursor


def test_what_is_remembered_of_used_leases_does_not_grow() -> None:
    cursor = LeaseCursor()
    for number in range(USED_KEPT + 10):
        cursor.grant(Lease(start=2 * number, count=1))
        cursor.consume(1)
    assert len(cursor._behind) == USED_KEPT and not cursor._ahead


@given(
    counts=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=10),
    takes=st.lists(st.integers(0, 30), max_size=20),
)
def test_every_granted_sample_is_taken_once_and_in_order(counts: list[tuple[int, int]], takes: list[int]) -> None:
    cursor, granted, start = LeaseCursor(), list[int](), 0
    for count, gap in counts:
        cursor.grant(Lease(start=start + gap, count=count))
        granted.extend(range(start + gap, start + gap + count))
        start += gap + count
    taken: list[int] = []
    for n in takes:
        if n <= cursor.remaining:
            taken.extend(cursor.consume(n))
        assert taken == granted[: cursor.watermark]
        assert cursor.watermark + cursor.remaining == len(granted)
    assert taken + cursor.consume(cursor.remaining) == granted
