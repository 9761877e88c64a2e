"""What greetings prove of the coordinator's state, when they hold the run, and what follows a rewind (protocol S)."""

import asyncio
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, Run, accepted, brief, merged
from plain_runs import plain_hello, plain_progress
from stories import Scripted, StoryText, all_stories, check_story

from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.change_terms import Requests
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.rollback import (
    ALARM,
    FORGOTTEN_S,
    RollbackGuard,
    as_newcomer,
    of_this_run,
    standing_of,
)
from farloop.coordinator.decide.run_state import Decisions, RunState
from farloop.wire import messages as msg
from farloop.wire.messages import AnchorRef, Committed, Hello


def ref(fragment: int, version: int, digest: int | None = None) -> AnchorRef:
    return AnchorRef(fragment=fragment, version=version, digest=10 * fragment + version if digest is None else digest)


def hello(**changes: Any) -> Hello:
    """A node that holds what the ledger does: version 5 of fragment 0, version 4 of fragment 1."""
    plain = {"epoch_seen": 7, "anchors": (ref(0, 5), ref(1, 4)), "round": 3, "history": 3}
    return plain_hello(**{**plain, **changes})


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


class Guard(RollbackGuard, Scripted):
    """Of this ledger, with what it writes to. The words of its stories:

    hello a epoch_seen=8 holds=0.5@6,1.4 told=0.9       where this greeting shows its node to be; `@6` is a digest
    says a 100.0 epoch_seen=8                           the same at 100 s: why it is refused
    forgets 1 3 | is_new                                a commit that is not remembered; a state without any
    alarm | alarm_of a | is_held
    """

    def __init__(self, ledger: Ledger) -> None:
        self.run, self.decisions = RunState(ledger, 0.0), Decisions(ledger)
        super().__init__(self.run, self.decisions)
        self.alarms = self.run.alarms

    def greeting(self, holds: object = "0.5,1.4", told: object = "", **fields: Any) -> Hello:
        anchors, announced = map(_refs, (holds, told))
        return hello(anchors=anchors, announced=announced, **fields)

    def hello(self, **given: Any) -> str:
        standing = standing_of(self.greeting(**given), self.run.ledger)
        assert bool(standing.detail) == standing.is_in_doubt
        return f"{standing.kind}: {standing.detail}" if standing.detail else standing.kind

    def says(self, node: str, now: float, **given: Any) -> str:
        said = self.refusal(NodeId(node), self.greeting(**given), now)
        return f"{said.reason.name}{' for now' if said.retriable else ''}" if said else "let in"

    def forgets(self, fragment: int, version: int) -> None:
        del self.run.ledger.commits[fragment, version]

    def is_new(self) -> None:
        self.run.ledger.versions = [0, 0]

    def alarm(self) -> str:
        return self.alarms.get(ALARM, "none")

    def alarm_of(self, node: str) -> str:
        return self.alarms.get(f"{ALARM} of {node}", "none")

    def is_held(self) -> bool:
        return self.run.held is not None


def _refs(words: object) -> tuple[AnchorRef, ...]:
    """`0.5,1.4@6`: version 5 of fragment 0, and version 4 of fragment 1 with digest 6."""
    found = re.findall(r"(\d)\.(\d)(?:@(\d+))?", str(words))
    return tuple(
        ref(int(fragment), int(version), int(digest) if digest else None) for fragment, version, digest in found
    )


@all_stories(__file__, "greetings")
def test_greetings(ledger: Ledger, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Guard(ledger).told, rewrite=rewrite)


def test_an_epoch_of_another_run_proves_nothing(ledger: Ledger) -> None:
    ours = ledger.spec.identity.fingerprint()
    assert [of_this_run(hello(epoch_seen=9, epoch_run=run), ledger).epoch_seen for run in (ours, "", "b")] == [9, 9, 0]
    run = Run(ledger.spec)
    assert brief(run.greet(A, epoch_seen=9, epoch_run="b")).startswith("accept a")
    assert "refuse HOLDING" in brief(run.greet(A, epoch_seen=9, epoch_run=ours))


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
