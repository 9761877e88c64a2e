"""The coordinator's decisions: events in, commands out (protocol B–J, Q–S, U, V, Data leases).

The run of `conftest.py`: fragment 0 in slot 0, fragment 1 in slot 1, rounds of ten steps. Window 1 of fragment 1 is of
round 0, window 1 of fragment 0 of round 1: no fragment is sent before a full period (protocol A). The words of the
stories are those of `coordinator_run.py`.
"""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, C, Commands, Run, accepted, brief, merged, outcome, published, recorded, tell, told
from plain_runs import plain_progress
from stories import StoryText, all_stories, check_story

from farloop.algo import schedule
from farloop.algo.spec import Lease, NodeId, RoundPlan, RunSpec
from farloop.algo.terms import LearningRate
from farloop.coordinator.change_terms import Requests
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.deadlines import ALARM_SHARE, FIRST_S, FLOOR_S
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import Evaluations
from farloop.coordinator.decide.roster import CLOSED_GRACE_S, EXPIRE_S, MOST_MEMBERS, SLOW_TASKS, STALL_S
from farloop.coordinator.errors import NotNow
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

STALLS_AT = 100.0 + STALL_S * SLOW_TASKS
LOOK_S = ALARM_SHARE * FLOOR_S
"""When a node that was started at 100 s, and says nothing of a first step, is one that has stalled."""


def plan(index: int) -> RoundPlan:
    return RoundPlan(index=index, start=10 * index, length=10)


@all_stories(__file__, "nodes", "participation", "windows")
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


def test_a_node_gets_snapshots_of_what_it_lacks_and_the_updates_that_it_missed(spec: RunSpec) -> None:
    """I, R, S: one that begins has the run's first weights, unless it asks; no alarm if it does."""
    run = Run(spec, min_nodes=2)
    assert brief(run.greet(A, anchors=())) == "accept a"
    assert brief(run.say(A, msg.Fetch(fragment=1, first=True))) == "snapshot 1 to a" and not run.alarms
    run = Run(spec, "a")
    run.commit(1, A)
    assert brief(run.greet(B, anchors=())) == "accept b; snapshot 1 to b"
    digest_of_1 = (msg.AnchorRef(fragment=1, version=0, digest=101),)
    assert brief(run.greet(C, anchors=digest_of_1)) == "accept c; publish 1.1 to c"


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


def test_a_start_that_was_never_heard_is_given_again(spec: RunSpec) -> None:
    """The session broke under it: the node still says that it trains in no round, and no window may wait for it."""
    run = Run(spec, "ab", num_samples=1000)
    run.part(B)
    assert brief(run.greet(B)).startswith("left b NOT_A_PARTICIPANT; accept b")
    assert run.missing() == {A} and run.ledger.leases.returned
    run.say(B, msg.Ready())
    assert msg.Start(round=plan(1), lease=Lease(start=240, count=240)) in told(run.commit(1, A), B)
    assert run.ledger.leases.uncertain_total == 0


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


def used(watermark: int, left: int | None = -1, **changes: Any) -> msg.Progress:
    """A report of a node that was granted 240 samples."""
    left = 240 - watermark if left == -1 else left
    return plain_progress(
        **{"tokens": 64, "loss": None, "sample_watermark": watermark, "samples_left": left, **changes}
    )


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
    assert Run(spec, "a").say(A, used(500)) == [], "with data of its own it is granted none"


def test_samples_are_topped_up_by_what_was_used_once_it_is_worth_a_grant(spec: RunSpec) -> None:
    run = Run(spec, "a", num_samples=1000)
    assert run.say(A, used(79)) == []
    lease = Lease(start=240, count=80)
    assert run.say(A, used(80)) == [
        ev.Record(record=rec.LeaseGranted(node=A, incarnation=1, lease=lease, consumed=80, stored=0)),
        tell(A, msg.Grant(lease=lease)),
    ]
    assert run.say(A, used(81)) == []
    run.part(A)
    grants = [msg.Grant(lease=Lease(start=0, count=240)), msg.Grant(lease=lease)]
    assert told(run.greet(A, round=0), A) == grants, "the broken session may have lost them"
    run.say(A, used(240))
    assert told(run.greet(A, round=0), A)[0] == grants[1]


def test_scraps_that_came_back_are_granted_together(spec: RunSpec) -> None:
    """A grant of a few samples alone would leave a node without a whole batch, and its round without an end."""
    run = Run(spec, "ab", num_samples=1000)
    run.store(B, consumed=238)
    run.leave(B)
    run.join(C)
    assert told(run.commit(1, A), C) == [
        msg.Start(round=plan(1), lease=Lease(start=478, count=2)),
        msg.Grant(lease=Lease(start=480, count=238)),
    ]
    assert run.ledger.leases.outstanding(C, 1) == 240


def test_a_node_that_is_away_is_granted_nothing(spec: RunSpec) -> None:
    run = Run(spec, "ab", num_samples=1000)
    before = run.ledger.leases.outstanding(B, 1)
    run.say(A, used(200))
    run.play("b parts; a sends 1; 1s; 1 is durable")
    assert run.ledger.leases.outstanding(B, 1) == before


def test_the_samples_of_a_node_that_never_comes_back_go_to_others(spec: RunSpec) -> None:
    """What is in its stored deltas stays used, what it is known to have used beyond that is counted."""
    run = Run(spec, "ab", num_samples=1000)
    run.store(B, 0, consumed=40)
    run.say(B, used(50))
    run.part(B)
    assert not recorded(run.pass_time(CLOSED_GRACE_S))
    assert recorded(run.pass_time(EXPIRE_S)) == [rec.NodeLeft(node=B, reason=Reason.CLOSED, consumed=50, stored=40)]
    assert run.ledger.leases.returned == [Lease(start=280, count=200)]
    assert run.ledger.leases.fates() == {"granted": 480, "trained": 40, "returned": 200, "uncertain": 10}
    assert run.machine.members[B].stage == "left"


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


def test_a_restart_gives_nodes_as_long_to_come_back(spec: RunSpec) -> None:
    run = Run(spec, "ab", num_samples=1000)
    run.play("restart; a returns")
    assert not recorded(run.pass_time(10.0 + EXPIRE_S - 1.0))
    assert recorded(run.pass_time(1.0)) == [rec.NodeLeft(node=B, reason=Reason.CLOSED, stored=0)]


def test_a_node_that_comes_back_in_time_keeps_its_samples(spec: RunSpec) -> None:
    run = Run(spec, "ab", num_samples=1000)
    run.part(B)
    run.pass_time(EXPIRE_S - 1.0)
    commands = run.greet(B, round=0)
    assert accepted(commands).leases == (Lease(start=240, count=240),)
    assert told(commands, B) == [msg.Grant(lease=Lease(start=240, count=240))]


def test_a_node_that_lives_on_lets_go_of_what_others_have_before_it_is_granted_more(spec: RunSpec) -> None:
    """No sample is granted twice: it is told that it holds none, and from which of its own on it gets others."""
    run = Run(spec, "ab", num_samples=1000)
    run.say(B, used(20))
    run.part(B)
    run.pass_time(EXPIRE_S + CLOSED_GRACE_S)
    commands = run.greet(B, round=0)
    assert accepted(commands).leases == () and not told(commands, B)
    assert run.say(B, used(32, 208)) == [], "this it said before it knew"
    granted = Lease(start=240, count=240)
    assert recorded(run.say(B, used(36, 0))) == [
        rec.LeaseGranted(node=B, incarnation=1, lease=granted, consumed=36, stored=36, since=36)
    ]
    assert run.ledger.leases.uncertain_total == 36
    run.say(B, used(36 + 80, 160))
    assert run.ledger.leases.outstanding(B, 1) == 240
    assert run.ledger.copy().leases == run.ledger.leases


def test_a_newer_start_frees_the_samples_of_the_older_but_for_those_it_brought(spec: RunSpec) -> None:
    """Q, Data leases."""
    run = Run(spec, "ab", num_samples=1000)
    run.store(B, 0, consumed=40)
    run.say(B, used(70, 170))
    freed = rec.NodeLeft(node=B, reason=Reason.OLD_INCARNATION, consumed=70, stored=40)
    assert recorded(run.play("b is reborn")) == [freed]
    assert run.ledger.leases.returned == [Lease(start=280, count=200)]
    assert run.ledger.leases.uncertain_total == 30 and run.machine.members[B].stage == "joining"


def test_a_late_delta_says_how_far_its_node_had_come(spec: RunSpec) -> None:
    """Even one that is dropped as it comes: it is durable, and so is what it says of samples."""
    run = Run(spec, "ab", num_samples=1000)
    late = run.offer(A, 0, consumed=40)
    run.commit(0, A, B)
    run.handle(ev.InputStored(offer=late))
    assert run.ledger.leases.held[A, 1].stored == 40


# --- deltas and windows


def test_a_durable_commit_is_published_and_opens_the_next_window(spec: RunSpec) -> None:
    """B, E, R: the announcement carries the decision, the terms that follow and the rounds that are fixed."""
    run = Run(spec, "a")
    (publish,) = published(run.commit(1, A))
    assert publish.committed == msg.Committed(
        fragment=1, version=1, size=50, digest=3, anchor_digest=1001, merged=(msg.Share(node=A, weight=1.0),), drops=(),
        next_window=dataclasses.replace(run.machine.windows[1].terms, window=2, round=1),
        rounds=(plan(0), plan(1), plan(2)),
    )  # fmt: skip
    assert run.ledger.versions == [0, 1]


def test_a_delta_that_is_offered_again_is_acknowledged_again(spec: RunSpec) -> None:
    """B18, Q: the blob id is the idempotency key; nothing is counted twice. One of a window that is over is late."""
    run = Run(spec, "ab")
    old, first = run.offer(A), run.offer(A)
    run.handle(ev.InputStored(offer=first))
    assert run.say(A, first) == [tell(A, msg.Stored(blob=first.blob))]
    assert list(run.machine.windows[1].inputs) == [first.blob]
    run.commit(1, B)
    assert run.say(A, old) == [outcome(old, Reason.LATE)]


def test_a_delta_that_claims_what_cannot_be_true_is_not_waited_for(spec: RunSpec) -> None:
    """H: what it says decides what it weighs. The others go on, and its sender is told why."""
    run = Run(spec, "ab", num_samples=1000)
    run.play("a sends 1")
    commands = run.say(B, run.offer(B, tokens=641))
    assert brief(commands) == "b: IMPLAUSIBLE; commit 1.1 of a, b IMPLAUSIBLE"
    assert "641 tokens in 10 inner steps, which have 640" in told(commands, B)[0].detail  # type: ignore[union-attr]


# --- nodes that go away, or stand still


def test_a_node_that_leaves_says_what_it_holds(spec: RunSpec) -> None:
    run = Run(spec, "ab")
    held = msg.AnchorRef(fragment=0, version=0, digest=100)
    run.say(B, msg.Leave(reason=Reason.DRAINED, anchors=(held,)))
    assert (run.machine.members[B].stage, run.machine.members[B].anchors) == ("left", (held,))
    assert run.machine.next_timer() == 100.0 + LOOK_S, "deadlines are reckoned from then on"
    assert run.pass_time(LOOK_S) == [] and run.machine.next_timer() == STALLS_AT, "of a"


def moved(inner_steps: int, **changes: Any) -> msg.Progress:
    return used(0, inner_steps=inner_steps, **{"tokens": 64 * inner_steps, **changes})


def stepping(run: Run, *nodes: NodeId, seconds: float = 1.0) -> None:
    """They report 5 inner steps, one after the other."""
    for step in range(1, 6):
        run.pass_time(seconds)
        for node in nodes:
            run.say(node, moved(step))


def test_a_node_whose_training_hangs_while_its_link_lives_is_not_waited_for(spec: RunSpec) -> None:
    """V: it is heard all the time. The others go on without it."""
    run = Run(spec, "ab")
    stepping(run, A, B)
    run.store(A)
    for step in range(6, 36):
        run.say(A, moved(step))
        run.pass_time(STALL_S / 30)
    assert brief([run.pending[1]]) == "commit 1.1 of a, b STALLED"
    run.durable()
    assert run.expected() == {A} and run.machine.members[B].stalled


def test_a_node_that_moves_again_is_back(spec: RunSpec) -> None:
    run = Run(spec, "ab")
    stepping(run, A, B)
    run.pass_time(STALL_S - 1.0)
    run.say(A, moved(6))
    run.pass_time(1.0)
    assert run.missing() == {A} and run.machine.members[B].reason is Reason.STALLED
    run.say(B, moved(5))
    assert run.machine.members[B].stalled, "it says what it said before"
    run.say(B, moved(6))
    assert run.missing() == {A, B} and run.machine.windows[1].removed == {}
    assert run.machine.members[B].counts and run.machine.members[B].reason is Reason.NONE


@pytest.mark.parametrize("state", ["waiting", "draining", "joining"])
def test_who_stands_still_for_good_reason_is_waited_for_until_its_deadline(spec: RunSpec, state: Any) -> None:
    """F, V: the reason is only what it says."""
    run = Run(spec, "ab")
    stepping(run, A, B)
    for _ in range(int(FIRST_S / 10.0) - 1):
        for node in (A, B):
            run.say(node, moved(5, state=state))
        run.pass_time(10.0)
    assert run.missing() == {A, B}
    run.pass_time(10.0)
    assert run.missing() == set()


def test_how_long_a_node_may_stand_still_follows_its_own_steps(spec: RunSpec) -> None:
    """V: of steps of 20 s, ten may pass. C: a stop of this process is no node's stall."""
    for seconds, jump, stalls_after in ((20.0, 0.0, 200.0), (1.0, 500.0, 500.0 + STALL_S)):
        run = Run(spec, "a")
        stepping(run, A, seconds=seconds)
        run.machine.clock_jumped(jump)
        run.pass_time(stalls_after - 1.0)
        assert run.missing() == {A}
        run.pass_time(1.0)
        assert run.missing() == set()


# --- what nodes report


def test_a_report_that_cannot_be_true_counts_for_nothing(spec: RunSpec) -> None:
    """A, V: it would set everybody's H, or hide that nothing moves."""
    run = Run(spec, "a", num_samples=1000)
    run.say(A, used(4))
    bad = used(80, inner_steps=2, tokens=10**12)
    assert run.say(A, bad) == [] and not run.machine.believes(A, bad)
    assert run.machine.members[A].progress == used(4)
    assert run.alarms == {"report of a": "it claims 1000000000000 tokens in 2 inner steps, which have 128 at most"}
    run.say(A, used(5))
    assert not run.alarms


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


def test_a_node_that_cannot_measure_the_loss_is_not_asked(spec: RunSpec) -> None:
    run = Run(spec, "ab", evaluation_set="0123")
    run.part(A)
    run.greet(A, round=0, can_evaluate=False)
    assert published(run.commit(1, A, B))[0].committed.evaluator == B
    run.commit(0, A, B)
    run.part(B)
    run.greet(B, round=1, can_evaluate=False)
    assert published(run.commit(1, A, B))[0].committed.evaluator is None


@pytest.fixture
def asked(spec: RunSpec) -> Run:
    """A was asked to evaluate version 1 of fragment 1."""
    run = Run(spec, "ab", evaluation_set="0123")
    run.commit(1, A, B)
    return run


def test_only_who_was_asked_answers_and_once(asked: Run) -> None:
    """J: each evaluation is kept as long as the run, and shown to everybody."""
    for versions in ((), (0, 2), (1, 1), (-1, 1)):
        assert not asked.machine.believes(A, dataclasses.replace(SCORE, versions=versions))
    assert asked.say(B, SCORE) == [] and not asked.machine.believes(B, SCORE)
    assert asked.machine.believes(A, SCORE)
    assert recorded(asked.say(A, SCORE)) == [rec.EvaluationTaken(loss=2.5, versions=(0, 1), position=10.0)]
    assert asked.say(A, SCORE) == [] and not asked.machine.believes(A, SCORE)
    asked.commit(0, A, B)
    assert asked.say(A, dataclasses.replace(SCORE, versions=(1, 1))) == [], "nothing was asked for at this commit"


def test_an_answer_may_be_of_a_later_version_than_was_asked_for(asked: Run) -> None:
    """The evaluator merged both at once."""
    asked.commit(0, A, B)
    asked.commit(1, A, B)
    assert recorded(asked.say(A, dataclasses.replace(SCORE, versions=(1, 2)))) and asked.say(A, SCORE) == []


def test_after_a_restart_whoever_was_asked_may_answer_once(asked: Run) -> None:
    """Q: which node the incarnation before has asked is in no record."""
    asked.play("restart; a returns; b returns")
    assert recorded(asked.say(B, SCORE)) and asked.say(A, SCORE) == []
    asked.play("restart; a returns")
    assert asked.say(A, SCORE) == []


def test_an_evaluation_may_take_longer_than_a_step(asked: Run) -> None:
    """V: as a first step may, which compiles the model."""
    asked.pass_time(STALL_S * SLOW_TASKS - 1.0)
    assert asked.missing() == {A, B}
    stepping(asked, A, B)
    for step in range(6, 40):
        asked.say(B, moved(step))
        asked.pass_time(1.0)
    assert asked.missing() == {A, B}
    asked.say(A, SCORE)
    asked.pass_time(0.0)
    assert asked.missing() == {B}


@pytest.fixture
def at_20(spec: RunSpec) -> Ledger:
    """Fragment 1, the last one, is at version 20, and was evaluated then."""
    ledger = Run(spec, evaluation_set="0123").ledger
    ledger.versions = [19, 20]
    ledger.evaluations.append(rec.EvaluationTaken(loss=1.0, versions=(20, 20), position=1.0))
    return ledger


def test_questions_without_an_answer_are_forgotten_in_time(at_20: Ledger) -> None:
    evaluations = Evaluations(at_20)
    for version in range(1, 21):
        evaluations.ask(version, B if version <= 4 else A)
    assert evaluations.asked(B, (19, 20)) is None and evaluations.asked(A, (19, 5)) == 5


# --- the end


def finish(run: Run, *nodes: NodeId) -> Commands:
    """Commit all windows in the order of the schedule; return what the last one's commit brings about."""
    commands: Commands = []
    while windows := run.machine.windows:
        commands = run.commit(min(windows, key=lambda f: (windows[f].terms.round, -f)), *nodes)
    return commands


def test_the_run_ends_with_the_last_final_window(spec: RunSpec) -> None:
    """A: fragment 0 is flushed at the end; everybody is told, and the model can be exported. So is who comes later."""
    run = Run(spec, "ab")
    assert brief(finish(run, A, B)) == "publish 0.4 to ab; RunFinished; a: finished; b: finished; Finish"
    assert run.ledger.finished and run.ledger.versions == [4, 4]
    assert told(run.greet(C), C) == [msg.Finished()] and run.say(C, msg.Ready()) == []
    assert brief(run.restart()) == "Finish", "the crash may have come before the export was done"
    assert run.machine.awaited == [A, B], "else who is still dialling when the others have left would dial for ever"
    assert msg.Finished() in told(run.greet(A, round=3), A)
    run.say(A, msg.Leave(reason=Reason.RUN_FINISHED))
    run.greet(B, round=3)
    assert run.machine.awaited == [B]
    run.play("b parts; 1s")
    assert run.machine.awaited == []


def test_all_are_told_once_every_node_has_left_because_of_the_end(spec: RunSpec) -> None:
    """V: the coordinator may end. One that was drained, or was lost, may be dialling."""
    run = Run(spec, "abc")
    run.say(C, msg.Leave(reason=Reason.DRAINED))
    finish(run, A, B)
    for node in (A, B):
        assert not run.machine.all_left
        run.say(node, msg.Leave(reason=Reason.RUN_FINISHED))
    assert not run.machine.all_left and run.machine.awaited == []
    run.greet(C, incarnation=2)
    run.say(C, msg.Leave(reason=Reason.RUN_FINISHED))
    assert run.machine.all_left


def test_a_coordinator_that_stops_closes_no_window_for_want_of_the_nodes_it_sent_away(spec: RunSpec) -> None:
    """E: its own farewell ends their sessions; after the next start their deltas are merged as if nothing had been."""
    run = Run(spec, "ab")
    run.store(A)
    run.machine.stop()
    for node in (A, B):
        assert run.part(node, Reason.COORDINATOR_STOPPING) == []
    assert run.pass_time(100.0) == [] and run.machine.next_timer() is None
    assert run.missing() == {B}
    assert merged(run.play("restart; a returns; b returns; b sends 1")) == ["ab"]
    late = Run(spec, "a")
    late.machine.stop()
    assert not merged(late.store(A))


def test_a_restart_writes_what_a_crash_cut_off_from_the_commit_before(spec: RunSpec) -> None:
    """B: the records follow the commit, and a crash may come between them."""
    run = Run(spec, "a")
    run.commit(1, A)
    run.store(A, 0)
    run.journal.apply(run.draft(0))
    assert run.begin() == [ev.Record(record=rec.RoundFixed(round=plan(3)))]
    run = Run(spec, "a")
    finish(run, A)
    run.journal.finished = False
    assert brief(run.begin()) == "RunFinished; Finish"
