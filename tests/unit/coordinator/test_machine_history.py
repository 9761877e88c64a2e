"""A coordinator over an old copy of its state holds the run; one that winds it back lets nothing of the lost in (S)."""

import asyncio
import dataclasses
from typing import Any

import pytest
from plain_runs import plain_hello, plain_offer, plain_progress

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.change_terms import Release
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.rollback import ALARM, FORGOTTEN_S
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")
FIRST = tuple(msg.AnchorRef(fragment=f, version=0, digest=100 + f) for f in range(2))
NEWER = (msg.AnchorRef(fragment=0, version=3, digest=9), FIRST[1])


class Run:
    """Nodes a and b train; all invariants are checked after every event."""

    def __init__(self, spec: RunSpec) -> None:
        terms = spec.terms.replace(min_nodes=2)
        identity = dataclasses.replace(spec.identity, num_samples=1000)
        spec = dataclasses.replace(spec, terms=terms, identity=identity)
        self.ledger, self.now = Ledger.begin(rec.RunStarted(spec=spec, epoch=1)), 100.0
        self.begin()
        self.join(A, 1)
        self.join(B, 2)

    def begin(self, *records: rec.Record) -> list[ev.Command]:
        """A start of the coordinator, whose store has written these first."""
        self.ledger = self.ledger.copy()
        for record in records:
            self.ledger.apply(record)
        self.machine = CoordinatorMachine(self.ledger, now=self.now, liveness_s=10.0)
        return self.machine.start()

    def handle(self, event: ev.Event) -> list[ev.Command]:
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        return commands

    def greet(self, node: NodeId, session: int, **changes: Any) -> list[ev.Command]:
        plain = plain_hello(node=node, anchors=FIRST)
        return self.handle(ev.NodeHello(session=session, node=node, hello=dataclasses.replace(plain, **changes)))

    def back_from_the_lost(self) -> None:
        """Both come with more than the ledger knows, and begin again."""
        for session, node in ((1, A), (2, B)):
            self.greet(node, session, round=3, anchors=NEWER)
        for session, node in ((1, A), (2, B)):
            self.hear(node, session, msg.Ready(history=8))

    def hear(self, node: NodeId, session: int, message: msg.Message) -> list[ev.Command]:
        return self.handle(ev.NodeMessage(session=session, node=node, message=message))

    def join(self, node: NodeId, session: int) -> list[ev.Command]:
        return self.greet(node, session) + self.hear(node, session, msg.Ready())


@pytest.fixture
def run(spec: RunSpec) -> Run:
    return Run(spec)


def offer(node: NodeId, *, history: int = 0) -> msg.Offer:
    return plain_offer(node, size=100, digest=9, history=history)


def stored(run: Run, node: NodeId, session: int, *, history: int = 0) -> list[ev.Command]:
    assert run.hear(node, session, offer(node, history=history)) == [ev.Receive(offer=offer(node, history=history))]
    return run.handle(ev.InputStored(offer=offer(node, history=history)))


def test_who_is_ahead_holds_the_run_and_nothing_is_committed_any_more(run: Run) -> None:
    run.begin(rec.EpochClaimed(epoch=2))
    run.greet(A, 1, round=0)
    stored(run, A, 1)
    held = run.greet(B, 2, round=0, anchors=NEWER, epoch_seen=5)
    refuse, leave = held[1:]
    assert held[0] == ev.Record(record=rec.EpochSeen(epoch=5))
    assert isinstance(refuse, ev.Refuse) and refuse.session == 2
    assert (refuse.refused.reason, refuse.refused.retriable) == (Reason.HOLDING, True)
    assert leave == ev.Tell(node=A, message=msg.Leave(reason=Reason.HOLDING, detail=run.machine.holding or ""))
    assert "node b has met epoch 5" in run.machine.alarms[ALARM]
    assert run.handle(ev.NodeDisconnected(session=1, node=A, reason=Reason.HOLDING)) == []
    run.now += 50.0  # beyond every deadline: a's delta alone would close the window else
    assert run.machine.next_timer() is None and run.machine.handle_timer(run.now) == []
    (again,) = run.greet(A, 3, round=0)
    assert isinstance(again, ev.Refuse) and again.refused.reason is Reason.HOLDING


def test_a_fork_at_an_equal_version_holds_the_run(run: Run) -> None:
    (refuse,) = run.begin(rec.EpochClaimed(epoch=2)) + run.greet(
        A, 1, anchors=(msg.AnchorRef(fragment=0, version=0, digest=666), FIRST[1])
    )
    assert isinstance(refuse, ev.Refuse) and refuse.refused.reason is Reason.HOLDING


def test_after_a_rewind_every_node_of_the_lost_history_begins_again_from_snapshots(run: Run) -> None:
    """Even those whose anchors may be the same: what they merge meanwhile, nobody here knows."""
    granted = run.ledger.leases.held[A, 1]
    run.begin(rec.Rewound(epoch=8))
    for session, (node, anchors) in enumerate(((A, NEWER), (B, FIRST)), 1):
        commands = run.greet(node, session, round=3, anchors=anchors, announced=NEWER, epoch_seen=7)
        left, accept, *rest = commands
        assert left == ev.Record(record=rec.NodeLeft(node=node, reason=Reason.NOT_A_PARTICIPANT, stored=0))
        assert isinstance(accept, ev.Accept) and (accept.welcome.history, accept.welcome.epoch) == (8, 8)
        assert rest == [ev.SendSnapshot(node=node, fragment=0), ev.SendSnapshot(node=node, fragment=1)]
    assert not run.machine.holding and ALARM not in run.machine.alarms
    for session, node in ((1, A), (2, B)):
        run.hear(node, session, msg.Ready(history=0))
    assert {run.machine.members[node].stage for node in (A, B)} == {"joining"}, "those were ready for the lost one"
    for session, node in ((1, A), (2, B)):
        run.hear(node, session, msg.Ready(history=8))
    assert {run.machine.members[node].stage for node in (A, B)} == {"training"}
    assert run.ledger.leases.held[A, 1] == granted, "its samples had come back, and are granted again"


def test_nothing_that_was_measured_from_a_lost_anchor_is_merged(run: Run) -> None:
    run.begin(rec.Rewound(epoch=8))
    run.back_from_the_lost()
    (refused,) = run.hear(A, 1, offer(A, history=0))
    assert isinstance(refused, ev.Tell) and isinstance(refused.message, msg.Outcome)
    assert refused.message.reason is Reason.FOREIGN
    assert run.hear(A, 1, offer(A, history=8)) == [ev.Receive(offer=offer(A, history=8))]


def test_a_rewind_drops_the_stored_deltas_whose_nodes_begin_again(run: Run) -> None:
    """Their nodes could not tell the outcome of such a delta from that of the next one."""
    stored(run, A, 1)
    assert run.ledger.inputs
    run.begin(rec.Rewound(epoch=8))
    assert not run.ledger.inputs and not run.machine.windows[1].inputs


def test_who_follows_the_new_history_is_not_asked_to_begin_again(run: Run) -> None:
    run.begin(rec.Rewound(epoch=8))
    run.back_from_the_lost()
    run.begin(rec.EpochClaimed(epoch=9))
    (accept, *rest) = run.greet(A, 2, history=8, epoch_seen=8, round=0)
    assert isinstance(accept, ev.Accept) and accept.welcome.history == 8
    assert not any(isinstance(command, ev.SendSnapshot) for command in rest)
    assert run.machine.members[A].stage == "training"


def test_a_report_may_count_the_steps_of_lost_histories(run: Run) -> None:
    """Its node is the same, and counts on: who is not believed would look as if it stood still."""
    steps = run.ledger.spec.terms.schedule.steps
    report = plain_progress(position=0.0, inner_steps=steps, tokens=64 * steps, loss=None, tokens_per_s=0.0)
    assert not run.machine.believes(A, report)
    run.begin(rec.Rewound(epoch=2))
    assert run.machine.believes(A, report)


def test_the_ledger_remembers_the_history_and_the_epochs_that_were_seen(run: Run) -> None:
    for record in (rec.EpochSeen(epoch=5), rec.EpochSeen(epoch=4), rec.Rewound(epoch=6), rec.EpochClaimed(epoch=7)):
        run.ledger.apply(record)
    saved = rec.decode(*rec.encode(run.ledger.saved()))
    assert isinstance(saved, rec.LedgerSaved)
    again = Ledger.resume(saved)
    assert (again.epoch, again.history, again.epoch_seen) == (7, 6, 5)


def test_a_run_that_is_released_goes_on_where_it_was_held_and_no_deadline_came_nearer(run: Run) -> None:
    run.begin(rec.EpochClaimed(epoch=2))
    run.greet(A, 1, round=0)
    run.greet(B, 2, round=0, epoch_seen=1000)
    assert run.machine.holding is not None and "node b has met epoch 1000" in run.machine.alarms[ALARM]
    run.handle(ev.NodeDisconnected(session=1, node=A, reason=Reason.HOLDING))
    run.now += 1000.0
    run.handle(ev.HoldReleased())
    assert run.machine.holding is None and "kept out" in run.machine.alarms[f"{ALARM} of b"]
    gone_at = run.machine.members[B].gone_at
    assert gone_at is not None and gone_at > run.now, "it has the time to come back that it had before"
    assert any(isinstance(command, ev.Accept) for command in run.greet(A, 3, round=0))
    (refuse,) = run.greet(B, 4, round=0, epoch_seen=1000)
    assert isinstance(refuse, ev.Refuse) and refuse.refused.reason is Reason.FENCED
    assert any(isinstance(command, ev.Accept) for command in run.greet(B, 5, round=0))
    assert stored(run, A, 3) and stored(run, B, 5), "both take part again"


def test_a_run_that_several_nodes_hold_is_released_only_by_naming_all_of_them(run: Run) -> None:
    """`farloop release` on a genuine old copy kept out every node, and named one."""
    run.begin(rec.EpochClaimed(epoch=2))
    release = Release(run.machine, lambda event: run.handle(event))
    with pytest.raises(ValueError, match="there is nothing to release"):
        asyncio.run(release({"do": "release"}))
    run.greet(A, 1, round=0, epoch_seen=900)
    run.greet(B, 2, round=0, epoch_seen=1000)
    for given in ({}, {"nodes": ["b"]}, {"nodes": ["a", "b", "c"]}):
        with pytest.raises(ValueError, match=r"--adopt-from-nodes.*farloop release --node a --node b"):
            asyncio.run(release({"do": "release", **given}))
    assert set(run.machine.hold_claims) == {A, B}
    answer = asyncio.run(release({"do": "release", "nodes": ["b", "a"]}))
    assert answer["held"].startswith("node a has met epoch 900") and "node b has met epoch 1000" in answer["held"]
    assert answer["still"] == "a, b are kept out, and no other node has come yet" == run.machine.holding
    run.now += 1000.0
    assert not [c for c in run.machine.handle_timer(run.now) if isinstance(c, ev.Commit)]


def test_one_node_that_claims_an_epoch_and_is_contradicted_stops_nobody_for_longer_than_a_minute(run: Run) -> None:
    run.begin(rec.EpochClaimed(epoch=2))
    run.greet(B, 2, round=0, epoch_seen=1000)
    (refuse,) = run.greet(A, 1, round=0)
    assert isinstance(refuse, ev.Refuse) and refuse.refused.reason is Reason.HOLDING
    run.now += 61.0
    assert any(isinstance(command, ev.Accept) for command in run.greet(A, 3, round=0))
    stored(run, A, 3)
    run.now += 20.0
    commands = run.machine.handle_timer(run.now)
    assert any(isinstance(command, ev.Commit) for command in commands), "without b"


def test_the_alarm_of_a_node_that_was_kept_out_ends_when_it_does_not_dial_any_more(run: Run) -> None:
    run.begin(rec.EpochClaimed(epoch=2))
    run.greet(A, 1, round=0)
    run.greet(B, 2, round=0, epoch_seen=1000)
    run.handle(ev.HoldReleased())
    run.now += FORGOTTEN_S - 1.0
    (refuse,) = run.greet(B, 3, round=0, epoch_seen=1000)
    assert isinstance(refuse, ev.Refuse) and f"{ALARM} of b" in run.machine.alarms
    run.now += FORGOTTEN_S - 1.0
    run.greet(A, 4, round=0)
    assert f"{ALARM} of b" in run.machine.alarms, "it still dials"
    run.now += 1.0
    run.greet(A, 5, round=0)
    assert f"{ALARM} of b" not in run.machine.alarms
    (refuse,) = run.greet(B, 6, round=0, epoch_seen=1000)
    assert isinstance(refuse, ev.Refuse) and f"{ALARM} of b" in run.machine.alarms, "and is kept out all the same"
