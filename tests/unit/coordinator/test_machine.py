"""The coordinator's decisions: events in, commands out (protocol B–J, Q–S, U, V, Data leases).

The run of `conftest.py`: fragment 0 in slot 0, fragment 1 in slot 1, rounds of ten steps. Window 1 of fragment 1 is of
round 0, window 1 of fragment 0 of round 1: no fragment is sent before a full period (protocol A). The words of the
stories are those of `coordinator_run.py`.
"""

import asyncio
import dataclasses
from pathlib import Path

import pytest
from coordinator_run import A, B, C, Run, brief, outcome, published, recorded, tell
from stories import StoryText, all_stories, check_story

from farloop.algo import schedule
from farloop.algo.spec import Lease, NodeId, RoundPlan, RunSpec
from farloop.algo.terms import LearningRate
from farloop.coordinator.change_terms import Requests
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.deadlines import ALARM_SHARE, FLOOR_S
from farloop.coordinator.decide.machine import Evaluations
from farloop.coordinator.decide.roster import EXPIRE_S, MOST_MEMBERS, SLOW_TASKS, STALL_S
from farloop.coordinator.errors import NotNow
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

STALLS_AT = 100.0 + STALL_S * SLOW_TASKS
LOOK_S = ALARM_SHARE * FLOOR_S
"""When a node that was started at 100 s, and says nothing of a first step, is one that has stalled."""


def plan(index: int) -> RoundPlan:
    return RoundPlan(index=index, start=10 * index, length=10)


@all_stories(__file__, "nodes", "participation", "windows", "samples", "evaluations")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Run(spec, **story.settings).told, rewrite=rewrite)


# --- joining


def test_a_new_node_is_welcomed_with_all_that_it_must_know(spec: RunSpec) -> None:
    """B, S: holding the welcome means holding the terms of every open window."""
    run = Run(spec)
    welcome = msg.Welcome(
        protocol=1, epoch=1, spec=run.spec, lane_token=b"", versions=(0, 0), rounds=(plan(0), plan(1), plan(2)),
        windows=schedule.first_windows(run.spec.terms, run.spec.identity.layout),
    )  # fmt: skip
    assert run.greet(A) == [ev.Accept(session=1, node=A, welcome=welcome)]


def test_a_node_goes_on_from_anchors_on_its_disk_if_they_are_of_this_run_and_not_too_old(spec: RunSpec) -> None:
    """R, S: others come as snapshots, and prove nothing about this state."""
    run = Run(spec, "a")
    run.commit(1, A)
    refs = (
        msg.AnchorRef(fragment=0, version=0, digest=99),
        msg.AnchorRef(fragment=1, version=0, digest=101),
        msg.AnchorRef(fragment=7, version=0, digest=101),
    )
    saved = msg.SavedAnchors(run=run.spec.identity.fingerprint(), history=0, anchors=refs)
    told = run.greet(B, anchors=(), saved=saved)
    assert brief(told) == "accept b; publish 1.1 to b"
    assert isinstance(told[0], ev.Accept) and told[0].welcome.restores == (1,)
    for other in (dataclasses.replace(saved, run="other"), dataclasses.replace(saved, history=2)):
        assert brief(run.greet(C, anchors=(), saved=other)).endswith("accept c; snapshot 1 to c")
    assert not run.alarms


def test_other_buffers_that_no_state_dict_has_are_warned_of(spec: RunSpec, caplog: pytest.LogCaptureFixture) -> None:
    """Both nodes train: the digest is rough, and such a buffer may be scratch memory."""
    run = Run(spec)
    for node, unsaved in zip(map(NodeId, "abc"), (7, 7, 8), strict=True):
        assert "rotary" not in caplog.text
        run.greet(node)
        run.say(node, msg.Ready(unsaved=unsaved))
    assert "nodes c and a differ in tables of whole numbers, or buffers that no state_dict holds: " in caplog.text


def test_strangers_and_sessions_that_are_over_are_not_heard(spec: RunSpec) -> None:
    run = Run(spec, "ab")
    run.play("b returns")
    for session, node in ((8, C), (2, B)):
        assert run.handle(ev.NodeMessage(session=session, node=node, message=msg.Ready())) == []
        assert run.handle(ev.NodeDisconnected(session=session, node=node, reason=Reason.CLOSED)) == []
    assert run.machine.members[B].session == 3 and run.missing() == {A, B}


def test_names_that_come_and_go_are_forgotten(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MOST_MEMBERS > 100
    monkeypatch.setattr("farloop.coordinator.decide.membership.MOST_MEMBERS", 20)
    run = Run(spec, "a")
    for number in range(30):
        run.greet(NodeId(f"n{number}"))
        run.part(NodeId(f"n{number}"))
    assert len(run.machine.members) == 20 and A in run.machine.members


# --- samples


def test_a_started_node_holds_samples_for_three_rounds_of_the_longest_and_for_60_steps(spec: RunSpec) -> None:
    """Data leases: enough for two rounds of outage."""
    growing = LearningRate(peak=1e-2, minimum=1e-3, warmup_steps=0, shape="step", drops=(1,))
    for terms, steps in (
        ({}, 60),
        ({"h": 30, "steps": 120}, 90),
        ({"steps": 400, "lr": growing, "h_rule": "linear", "h_alpha": 0.1}, 300),
    ):
        ((owner, account),) = Run(spec, "a", num_samples=5000, **terms).ledger.leases.held.items()
        assert (owner, account.leases) == ((A, 1), [Lease(start=0, count=4 * steps)])
    assert Run(spec, "a").play("a uses 500") == [], "with data of its own it is granted none"


def test_a_node_that_was_forgotten_is_not_missed_also_after_a_restart_until_it_comes_back(spec: RunSpec) -> None:
    run = Run(spec, "ab", num_samples=1000)
    happened = list[ev.Command]()
    forget = Requests(run.machine, run.journal, lambda event: happened.extend(run.handle(event)), Path()).forget
    for node, error, line in ((B, NotNow, "node b is connected"), ("x", ValueError, "nodes a, b; got 'x'")):
        with pytest.raises(error, match=line):
            asyncio.run(forget({"node": node}))
    run.say(B, msg.Fetch(fragment=0))
    run.part(B)
    assert asyncio.run(forget({"node": B})) == {"nodes": [A]}
    assert recorded(happened) == [rec.NodeLeft(node=B, reason=Reason.CLOSED, stored=0)] and not run.alarms
    run.play("restart; a returns")
    assert set(run.machine.members) == {A} and not recorded(run.pass_time(EXPIRE_S))
    run.play("b joins")
    assert run.machine.members[B].session is not None


# --- deltas and windows


def test_a_delta_that_is_offered_again_is_acknowledged_again(spec: RunSpec) -> None:
    """B18, Q: the blob id is the idempotency key; nothing is counted twice. One of a window that is over is late."""
    run = Run(spec, "ab")
    old, first = run.offer(A), run.offer(A)
    run.handle(ev.InputStored(offer=first))
    assert run.say(A, first) == [tell(A, msg.Stored(blob=first.blob))]
    assert list(run.machine.windows[1].inputs) == [first.blob]
    run.commit(1, B)
    assert run.say(A, old) == [outcome(old, Reason.LATE)]


# --- nodes that go away, or stand still


def test_a_node_that_leaves_says_what_it_holds(spec: RunSpec) -> None:
    run = Run(spec, "ab")
    held = msg.AnchorRef(fragment=0, version=0, digest=100)
    run.say(B, msg.Leave(reason=Reason.DRAINED, anchors=(held,)))
    assert (run.machine.members[B].stage, run.machine.members[B].anchors) == ("left", (held,))
    assert run.machine.next_timer() == 100.0 + LOOK_S, "deadlines are reckoned from then on"
    assert run.pass_time(LOOK_S) == [] and run.machine.next_timer() == STALLS_AT, "of a"


# --- evaluations

SCORE = msg.Evaluation(loss=2.5, versions=(0, 1), position=10.0, seconds=1.0)


@pytest.mark.parametrize(
    ("every", "evaluation_set", "rounds"),
    [(1, "0123", [0, 1, 2, 3]), (2, "0123", [1, 3]), (3, "0123", [2, 3]), (1, "none", [])],
)
def test_the_lowest_live_node_evaluates_with_the_last_fragment(
    spec: RunSpec, every: int, evaluation_set: str, rounds: list[int]
) -> None:
    """J: every so many rounds, and at the end."""
    run = Run(spec, "ab", evaluation_set=evaluation_set, evaluate_every_rounds=every)
    run.play("a parts SILENT; 0s")
    evaluated = []
    for fragment in (1, 0) * 4:
        round_index = run.machine.windows[fragment].terms.round
        (publish,) = published(run.commit(fragment, B))
        if publish.committed.evaluator:
            assert (publish.committed.evaluator, fragment) == (B, 1)
            evaluated.append(round_index)
    assert evaluated == rounds


def test_only_who_was_asked_answers_and_once(spec: RunSpec) -> None:
    """J: each evaluation is kept as long as the run, and shown to everybody."""
    asked = Run(spec, "ab", evaluation_set="0123")
    asked.commit(1, A, B)
    for versions in ((), (0, 2), (1, 1), (-1, 1)):
        assert not asked.machine.believes(A, dataclasses.replace(SCORE, versions=versions))
    assert asked.say(B, SCORE) == [] and not asked.machine.believes(B, SCORE)
    assert asked.machine.believes(A, SCORE)
    assert recorded(asked.say(A, SCORE)) == [rec.EvaluationTaken(loss=2.5, versions=(0, 1), position=10.0)]
    assert asked.say(A, SCORE) == [] and not asked.machine.believes(A, SCORE)
    asked.commit(0, A, B)
    assert asked.say(A, dataclasses.replace(SCORE, versions=(1, 1))) == [], "nothing was asked for at this commit"


def test_questions_without_an_answer_are_forgotten_in_time(spec: RunSpec) -> None:
    """Fragment 1, the last one, is at version 20, and was evaluated then."""
    ledger = Run(spec, evaluation_set="0123").ledger
    ledger.versions = [19, 20]
    ledger.evaluations.append(rec.EvaluationTaken(loss=1.0, versions=(20, 20), position=1.0))
    evaluations = Evaluations(ledger)
    for version in range(1, 21):
        evaluations.ask(version, B if version <= 4 else A)
    assert evaluations.asked(B, (19, 20)) is None and evaluations.asked(A, (19, 5)) == 5


# --- the end


def test_a_restart_writes_what_a_crash_cut_off_from_the_commit_before(spec: RunSpec) -> None:
    """B: the records follow the commit, and a crash may come between them."""
    run = Run(spec, "a")
    run.commit(1, A)
    run.store(A, 0)
    run.journal.apply(run.draft(0))
    assert run.begin() == [ev.Record(record=rec.RoundFixed(round=plan(3)))]
    run = Run(spec, "a")
    run.finish(A)
    run.journal.finished = False
    assert brief(run.begin()) == "RunFinished; Finish"
