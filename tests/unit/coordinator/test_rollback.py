"""What greetings prove of the coordinator's state, when they hold the run, and what follows a rewind (protocol S)."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, Run, accepted, brief, merged
from plain_runs import plain_hello, plain_progress
from stories import StoryText, all_stories, check_story

from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.change_terms import Requests
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.rollback import (
    ALARM,
    FORGOTTEN_S,
    TRUSTED_AFTER_S,
    Kind,
    RollbackGuard,
    as_newcomer,
    of_this_run,
    standing_of,
)
from farloop.coordinator.decide.run_state import Decisions, RunState
from farloop.wire import messages as msg
from farloop.wire.messages import AnchorRef, Committed, Hello
from farloop.wire.reasons import Reason


def ref(fragment: int, version: int, digest: int | None = None) -> AnchorRef:
    return AnchorRef(fragment=fragment, version=version, digest=10 * fragment + version if digest is None else digest)


def hello(**changes: Any) -> Hello:
    """A node that holds what the ledger does: version 5 of fragment 0, version 4 of fragment 1."""
    plain = {"epoch_seen": 7, "anchors": (ref(0, 5), ref(1, 4)), "round": 3, "history": 3}
    return plain_hello(**{**plain, **changes})


AHEAD = hello(anchors=(ref(0, 9), ref(1, 4)))
NEW_EPOCH = hello(epoch_seen=1000)


@pytest.fixture
def ledger(spec: RunSpec) -> Ledger:
    """Start 7 of the coordinator; it was wound back in its third. It remembers two versions of each fragment."""
    ledger = Ledger.begin(rec.RunStarted(spec=spec, epoch=7, rounds=opening_rounds(spec)))
    ledger.history, ledger.versions = 3, [5, 4]
    for fragment, version in ((0, 4), (0, 5), (1, 3), (1, 4)):
        ledger.commits[fragment, version] = Committed(
            fragment=fragment, version=version, size=1, digest=0, anchor_digest=10 * fragment + version, merged=(),
            drops=(), next_window=None, rounds=(),
        )  # fmt: skip
    return ledger


@pytest.mark.parametrize(
    ("changes", "kind", "detail"),
    [
        ({}, "same", ""),
        ({"announced": (ref(0, 5),)}, "same", ""),
        ({"anchors": ()}, "behind", ""),
        ({"anchors": (ref(0, 5), ref(1, 3))}, "behind", ""),
        ({"anchors": (ref(0, 1, digest=666), ref(1, 4))}, "behind", ""),  # too long ago to be remembered
        ({"epoch_seen": 8}, "ahead", "has met epoch 8, this start has 7"),
        ({"anchors": (ref(0, 6), ref(1, 4))}, "ahead", "holds version 6 of fragment 0, here it is at 5"),
        ({"announced": (ref(1, 6),)}, "ahead", "was told of version 6 of fragment 1, here it is at 4"),
        ({"history": 4}, "ahead", "follows history 4, this is 3"),
        (
            {"anchors": (ref(0, 5, digest=6), ref(1, 4))},
            "forked",
            "holds version 5 of fragment 0 with digest 0000000000000006, here it has 0000000000000005",
        ),
        ({"anchors": (ref(0, 4, digest=6), ref(1, 4))}, "forked", "version 4 of fragment 0"),
        ({"anchors": (ref(0, 5, digest=6), ref(1, 9))}, "forked", "and holds version 9 of fragment 1"),
        ({"history": 0, "anchors": (ref(0, 9), ref(1, 4, digest=6))}, "lost", ""),
        ({"history": 0, "epoch_seen": 8}, "ahead", "has met epoch 8"),
        (
            {"epoch_seen": 9, "anchors": (ref(0, 9), ref(1, 9)), "announced": (ref(0, 9), ref(1, 9))},
            "ahead",
            "and 2 more like these",
        ),
    ],
)
def test_greetings_prove_where_a_node_is(ledger: Ledger, changes: dict[str, Any], kind: Kind, detail: str) -> None:
    standing = standing_of(hello(**changes), ledger)
    assert standing.kind == kind
    assert detail in standing.detail and bool(detail) == bool(standing.detail) == standing.is_in_doubt


# --- the guard


class Guard(RollbackGuard):
    """Of this ledger, with what it writes to."""

    def __init__(self, ledger: Ledger) -> None:
        self.run, self.decisions = RunState(ledger, 0.0), Decisions(ledger)
        super().__init__(self.run, self.decisions)
        self.alarms = self.run.alarms

    def says(self, node: str, greeting: Hello, now: float) -> tuple[Reason, bool] | None:
        """Why this node is refused, and whether for now."""
        said = self.refusal(NodeId(node), greeting, now)
        return said and (said.reason, said.retriable)

    def held_by_a(self, *others: Hello) -> None:
        """a claims an epoch in the minute after a restart; the others come again and again."""
        assert self.says("a", NEW_EPOCH, 100.0) == HOLDING
        for later in (101.0, 99.0 + TRUSTED_AFTER_S):
            for number, other in enumerate(others):
                assert self.says(f"n{number}", other, later) == HOLDING


HOLDING, FENCED = (Reason.HOLDING, True), (Reason.FENCED, True)


@pytest.fixture
def guard(ledger: Ledger) -> Guard:
    return Guard(ledger)


def test_an_epoch_of_another_run_proves_nothing(ledger: Ledger) -> None:
    ours = ledger.spec.identity.fingerprint()
    assert [of_this_run(hello(epoch_seen=9, epoch_run=run), ledger).epoch_seen for run in (ours, "", "b")] == [9, 9, 0]
    run = Run(ledger.spec)
    assert brief(run.greet(A, epoch_seen=9, epoch_run="b")).startswith("accept a")
    assert "refuse HOLDING" in brief(run.greet(A, epoch_seen=9, epoch_run=ours))


def test_the_ways_out_of_a_hold_are_those_that_help(guard: Guard, ledger: Ledger) -> None:
    guard.says("a", AHEAD, 2.0)
    assert "--adopt-from-nodes" in guard.alarms[ALARM] and "delete" not in guard.alarms[ALARM]
    guard = Guard(ledger)
    guard.says("a", hello(epoch_seen=9, anchors=(), round=None), 2.0)
    assert "adopt" not in guard.alarms[ALARM] and "delete the nodes' state folders" in guard.alarms[ALARM]
    ledger.versions = [0, 0]
    guard = Guard(ledger)
    guard.says("a", AHEAD, 2.0)
    _, _, ways = guard.alarms[ALARM].partition("; ")
    assert ways.startswith("this state folder is new: if you deleted the old one on purpose, start once with --rewind")
    assert "delete the nodes' state folders" in ways and "looks like an old copy" in ways


def test_one_node_s_word_alone_does_not_hold_a_run_that_others_contradict(guard: Guard) -> None:
    """A greeting with epoch_seen = 1000 in the minute after a restart held the run for ever."""
    guard.held_by_a(hello())
    assert "node a has met epoch 1000" in guard.alarms[ALARM] and "farloop run release" in guard.alarms[ALARM]
    assert guard.says("n0", hello(), 100.0 + TRUSTED_AFTER_S) is None, "whoever lives has come by then"
    assert guard.run.held is None and ALARM not in guard.alarms and guard.held_s == TRUSTED_AFTER_S
    assert guard.alarms[f"{ALARM} of a"] == (
        "it is kept out: it has met epoch 1000, this start has 7; n0 contradicts it, and the run goes on; "
        "if it is right, stop the coordinator and put the newer state folder back, or start once with "
        "--adopt-from-nodes"
    )
    assert guard.says("a", NEW_EPOCH, 101.0 + TRUSTED_AFTER_S) == FENCED and guard.run.held is None


@pytest.mark.parametrize(
    "other",
    [
        hello(anchors=()),
        hello(anchors=(ref(0, 5),)),
        hello(anchors=(ref(0, 5), ref(1, 2))),
        hello(anchors=(ref(0, 5), ref(1, 3, digest=9))),
        hello(history=0),
    ],
    ids=["a newcomer", "of a part", "away for long", "another version", "of a lost history"],
)
def test_who_was_not_there_at_the_last_commits_contradicts_no_node(guard: Guard, ledger: Ledger, other: Hello) -> None:
    if other.anchors[1:] == (ref(1, 3, digest=9),):
        del ledger.commits[1, 3]  # so long ago that its digest is not remembered
    guard.held_by_a(other)
    assert guard.says("n0", other, 1000.0) == HOLDING and guard.run.held is not None


# --- in the machine

FIRST = tuple(AnchorRef(fragment=f, version=0, digest=100 + f) for f in range(2))
NEWER = (AnchorRef(fragment=0, version=3, digest=9), FIRST[1])


@pytest.fixture
def run(spec: RunSpec) -> Run:
    return Run(spec, "ab", num_samples=1000)


@all_stories(__file__, "rollback")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Run(spec, **story.settings).told, rewrite=rewrite)


def test_after_a_rewind_every_node_of_the_lost_history_begins_again(run: Run) -> None:
    """Even those whose anchors may be the same: what they merge meanwhile is not known here. Of version 0 they have
    the digest in the run's identity."""
    known = hello(announced=(ref(0, 9),))
    assert as_newcomer(known) == dataclasses.replace(known, anchors=(), announced=(), round=None)
    run.store(A)
    granted = list(run.ledger.leases.held[A, 1].leases)
    run.restart(rec.Rewound(epoch=8))
    assert not run.ledger.inputs, "who sent it could not tell its outcome from that of the next one"
    for node, anchors in ((A, NEWER), (B, FIRST)):
        commands = run.greet(node, round=3, anchors=anchors, announced=NEWER, epoch_seen=7)
        left = f"left {node} NOT_A_PARTICIPANT"
        assert brief(commands) == f"{left}; accept {node}, which has none"
        assert (accepted(commands).history, accepted(commands).epoch) == (8, 8)
    assert not run.machine.holding and ALARM not in run.alarms
    for history, stage in ((0, "joining"), (8, "training")):  # ready for the lost one, and for this
        for node in (A, B):
            run.say(node, msg.Ready(history=history))
        assert {run.machine.members[node].stage for node in (A, B)} == {stage}
    assert run.ledger.leases.held[A, 1].leases == granted, "its samples had come back, and are granted again"


def test_a_report_may_count_the_steps_of_lost_histories(run: Run) -> None:
    """Its node is the same, and counts on: who is not believed would look as if it stood still."""
    steps = run.ledger.spec.terms.schedule.steps
    report = plain_progress(position=0.0, inner_steps=steps, tokens=64 * steps)
    assert not run.machine.believes(A, report)
    run.restart(rec.Rewound(epoch=2))
    assert run.machine.believes(A, report)


def test_the_ledger_remembers_the_history_and_the_epochs_that_were_seen(run: Run) -> None:
    for record in (rec.EpochSeen(epoch=5), rec.EpochSeen(epoch=4), rec.Rewound(epoch=6), rec.EpochClaimed(epoch=7)):
        run.ledger.apply(record)
    saved = rec.decode(*rec.encode(run.ledger.saved()))
    assert isinstance(saved, rec.LedgerSaved)
    again = Ledger.resume(saved)
    assert (again.epoch, again.history, again.epoch_seen) == (7, 6, 5)


def test_a_run_that_several_nodes_hold_is_released_only_by_naming_all_of_them(run: Run) -> None:
    """`farloop run release` on a genuine old copy kept out every node, and named one."""
    run.play("restart as 2")
    release: Callable[..., Any] = Requests(run.machine, run.machine.ledger, run.handle, Path()).release
    with pytest.raises(ValueError, match="there is nothing to release"):
        asyncio.run(release({"do": "release"}))
    run.play("a returns epoch_seen=900; b returns epoch_seen=1000")
    for given in ({}, {"nodes": ["b"]}, {"nodes": ["a", "b", "c"]}):
        with pytest.raises(ValueError, match=r"--adopt-from-nodes.*farloop run release --node a --node b"):
            asyncio.run(release({"do": "release", **given}))
    assert set(run.machine.hold_claims) == {A, B}
    answer = asyncio.run(release({"do": "release", "nodes": ["b", "a"]}))
    assert answer["held"].startswith("node a has met epoch 900") and "node b has met epoch 1000" in answer["held"]
    assert "a, b are kept out, and no other node" in answer["still"] and answer["still"] == run.machine.holding
    assert not merged(run.pass_time(1000.0))


def test_the_alarm_of_a_node_that_was_kept_out_ends_when_it_does_not_dial_any_more(run: Run) -> None:
    run.play("restart as 2; a returns; b returns epoch_seen=1000; release")
    for node, seconds, stays in ((B, FORGOTTEN_S - 1.0, True), (A, FORGOTTEN_S - 1.0, True), (A, 1.0, False)):
        run.now += seconds
        run.greet(node, round=0, epoch_seen=1000 if node == B else 0)
        assert (f"{ALARM} of b" in run.alarms) is stays
    assert brief(run.play("b returns epoch_seen=1000")) == "refuse FENCED for now"
    assert f"{ALARM} of b" in run.alarms, "and is kept out all the same"
