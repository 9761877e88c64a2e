"""The coordinator's decisions: events in, commands out (protocol B–J, Q–S, V, Data leases).

The run of `conftest.py`: fragment 0 in slot 0, fragment 1 in slot 1, rounds of ten steps. Window 1 of fragment 1 is of
round 0, window 1 of fragment 0 of round 1: no fragment is sent before a full period (protocol A).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from plain_runs import plain_hello, plain_offer, plain_progress

from farloop.algo import schedule
from farloop.algo.spec import Lease, NodeId, RoundPlan, RunSpec
from farloop.algo.terms import LearningRate
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import RETRY_S
from farloop.coordinator.decide.deadlines import FIRST_S
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.roster import CLOSED_GRACE_S, EXPIRE_S, MOST_MEMBERS, SLOW_TASKS, STALL_S
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
STALLS_AT = 100.0 + STALL_S * SLOW_TASKS
"""When a node that was started at 100 s, and says nothing of a first step, is one that has stalled."""
FIRST_ANCHORS = tuple(msg.AnchorRef(fragment=f, version=0, digest=100 + f) for f in range(2))


def plan(index: int) -> RoundPlan:
    return RoundPlan(index=index, start=10 * index, length=10)


class Run:
    """A machine under test, and what every test says to it. All invariants are checked after every event."""

    def __init__(self, spec: RunSpec, **terms: Any) -> None:
        self.spec = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
        self.ledger = Ledger.begin(rec.RunStarted(spec=self.spec, epoch=1))
        self.now = 100.0
        self.sessions: dict[NodeId, int] = {}
        self.seq = 0
        self.begin()

    def begin(self) -> list[ev.Command]:
        """The coordinator starts, with what its ledger knows."""
        self.machine = CoordinatorMachine(self.ledger, now=self.now, liveness_s=10.0)
        self.machine.check()
        return self.machine.start()

    def restart(self) -> list[ev.Command]:
        self.ledger = self.ledger.copy()
        return self.begin()

    def handle(self, event: ev.Event) -> list[ev.Command]:
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        return commands

    def pass_time(self, seconds: float) -> list[ev.Command]:
        """Every timer that is due by then fires, as late as it may."""
        self.now += seconds
        commands: list[ev.Command] = []
        while (due := self.machine.next_timer()) is not None and due <= self.now:
            commands += self.machine.handle_timer(self.now)
            self.machine.check()
        return commands

    def greet(self, node: NodeId, session: int, **changes: Any) -> list[ev.Command]:
        """A hello of a node that holds version 0 and was never started."""
        plain = plain_hello(node=node, anchors=FIRST_ANCHORS)
        self.sessions[node] = session
        return self.handle(ev.NodeHello(session=session, node=node, hello=dataclasses.replace(plain, **changes)))

    def say(self, node: NodeId, message: msg.Message) -> list[ev.Command]:
        return self.handle(ev.NodeMessage(session=self.sessions[node], node=node, message=message))

    def part(self, node: NodeId, reason: Reason = Reason.CLOSED) -> list[ev.Command]:
        return self.handle(ev.NodeDisconnected(session=self.sessions[node], node=node, reason=reason))

    def offer(
        self,
        node: NodeId,
        fragment: int,
        *,
        incarnation: int = 1,
        tokens: int = 640,
        steps: int = 10,
        consumed: int | None = None,
    ) -> msg.Offer:
        """A delta of the node for the open window; every inner step has 4 sequences of 16 tokens."""
        window = self.machine.windows[fragment].terms.window
        self.seq += 1
        return plain_offer(
            node, window, fragment=fragment, incarnation=incarnation, seq=self.seq, steps=steps, tokens=tokens,
            size=100, digest=9, consumed=consumed,
        )  # fmt: skip

    def store(self, node: NodeId, fragment: int, **changes: Any) -> list[ev.Command]:
        """A delta of the node is offered, comes and is durable."""
        offer = self.offer(node, fragment, **changes)
        assert self.say(node, offer) == [ev.Receive(offer=offer)]
        return self.handle(ev.InputStored(offer=offer))

    def commit(self, fragment: int, *nodes: NodeId) -> list[ev.Command]:
        """Deltas of these nodes come, the window closes, and its commit is durable."""
        commands: list[ev.Command] = []
        for node in nodes:
            commands += self.store(node, fragment)
        return self.done(commands)

    def done(self, commands: list[ev.Command]) -> list[ev.Command]:
        """The one commit among these commands is durable."""
        (draft,) = (command.draft for command in commands if isinstance(command, ev.Commit))
        digest = 1000 * draft.fragment + draft.version
        record = dataclasses.replace(draft, anchor_digest=digest, update_size=50, update_digest=3)
        return self.handle(ev.CommitDone(record=record))

    def train(self, *nodes: NodeId) -> None:
        """These nodes join and are started together."""
        for session, node in enumerate(nodes, 1):
            self.greet(node, session)
        for node in nodes:
            self.say(node, msg.Ready())
        assert all(self.machine.members[node].stage == "training" for node in nodes)

    def expected(self, fragment: int) -> set[NodeId]:
        return self.machine.windows[fragment].expected

    def missing(self, fragment: int) -> set[NodeId]:
        return self.machine.windows[fragment].missing


def tell(node: NodeId, message: msg.Message) -> ev.Tell:
    return ev.Tell(node=node, message=message)


def told(commands: list[ev.Command], node: NodeId) -> list[msg.Message]:
    return [command.message for command in commands if isinstance(command, ev.Tell) and command.node == node]


def recorded(commands: list[ev.Command]) -> list[rec.Record]:
    return [command.record for command in commands if isinstance(command, ev.Record)]


def published(commands: list[ev.Command]) -> list[tuple[tuple[NodeId, ...], int, int]]:
    found = [command for command in commands if isinstance(command, ev.Publish)]
    return [(command.nodes, command.committed.fragment, command.committed.version) for command in found]


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(spec: RunSpec) -> MakeRun:
    def make(*nodes: NodeId, num_samples: int = 0, evaluation_set: str = "none", **terms: Any) -> Run:
        """A run whose `nodes` train, started together."""
        identity = dataclasses.replace(spec.identity, num_samples=num_samples, evaluation_set=evaluation_set)
        run = Run(dataclasses.replace(spec, identity=identity), **{"min_nodes": max(1, len(nodes)), **terms})
        if nodes:
            run.train(*nodes)
        return run

    return make


# --- joining and starting


def test_a_new_node_is_welcomed_with_all_that_it_must_know(make_run: MakeRun) -> None:
    """B, S: holding the welcome means holding the terms of every open window."""
    run = make_run()
    welcome = msg.Welcome(
        protocol=1,
        epoch=1,
        spec=run.spec,
        lane_token=b"",
        versions=(0, 0),
        windows=schedule.first_windows(run.spec.terms, run.spec.identity.layout),
        rounds=(plan(0), plan(1), plan(2)),
    )
    assert run.greet(A, 1) == [ev.Accept(session=1, node=A, welcome=welcome)]


def test_a_node_without_anchors_gets_a_snapshot_of_each(make_run: MakeRun) -> None:
    """I, R"""
    commands = make_run().greet(A, 1, anchors=())
    assert commands[1:] == [ev.SendSnapshot(node=A, fragment=0), ev.SendSnapshot(node=A, fragment=1)]


def test_a_node_that_begins_gets_a_snapshot_of_version_0_only_if_it_asks(make_run: MakeRun) -> None:
    """R: its own first weights are the run's, as a rule; no alarm if they are not."""
    run = make_run()
    assert run.greet(A, 1, anchors=(), begins=True)[1:] == []
    assert run.say(A, msg.Fetch(fragment=1, first=True)) == [ev.SendSnapshot(node=A, fragment=1)]
    assert run.machine.alarms == {}
    moved_on = make_run(A)
    moved_on.commit(1, A)
    assert moved_on.greet(B, 9, anchors=(), begins=True)[1:] == [ev.SendSnapshot(node=B, fragment=1)]


def test_a_node_that_is_behind_gets_what_it_missed(make_run: MakeRun) -> None:
    """R, S"""
    run = make_run(A)
    run.commit(1, A)
    commands = run.greet(B, 9, anchors=(FIRST_ANCHORS[1],))
    assert isinstance(commands[0], ev.Accept)
    assert commands[1:] == [
        ev.SendSnapshot(node=B, fragment=0),
        ev.Publish(nodes=(B,), committed=run.ledger.commits[1, 1]),
    ]


def test_a_node_that_disagrees_is_refused(make_run: MakeRun) -> None:
    run = make_run()
    (command,) = run.greet(A, 1, fingerprint="another")
    assert isinstance(command, ev.Refuse) and command.refused.reason is Reason.WRONG_RUN
    assert not run.machine.members


def test_the_run_begins_when_enough_nodes_are_ready(make_run: MakeRun) -> None:
    """A, I: who starts together is expected by the windows of its first sends."""
    run = make_run(min_nodes=2)
    run.greet(B, 1)
    run.greet(A, 2)
    assert run.say(B, msg.Ready()) == []
    assert not run.machine.begun
    assert run.say(A, msg.Ready()) == [
        ev.Record(record=rec.NodeStarted(node=A, incarnation=1, round=0)),
        tell(A, msg.Start(round=plan(0), lease=None)),
        ev.Record(record=rec.NodeStarted(node=B, incarnation=1, round=0)),
        tell(B, msg.Start(round=plan(0), lease=None)),
    ]
    assert run.machine.begun
    assert run.expected(0) == run.expected(1) == {A, B}


def test_who_is_ready_and_gone_does_not_begin_the_run(make_run: MakeRun) -> None:
    run = make_run(min_nodes=2)
    run.greet(A, 1)
    run.say(A, msg.Ready())
    run.part(A)
    run.greet(B, 2)
    assert run.say(B, msg.Ready()) == []


def test_a_late_joiner_starts_at_the_next_round_boundary(make_run: MakeRun) -> None:
    """I: it is told after the commit that ends the round, and counts for the windows that open from then on."""
    run = make_run(A)
    run.greet(B, 2)
    assert run.say(B, msg.Ready()) == []
    commands = run.commit(1, A)
    assert published(commands) == [((A, B), 1, 1)]
    assert commands[1:] == [
        ev.Record(record=rec.NodeStarted(node=B, incarnation=1, round=1)),
        tell(B, msg.Start(round=plan(1), lease=None)),
    ]
    assert run.expected(1) == {A, B}, "its first send, after a full period"
    assert run.expected(0) == {A}, "the window was open before, and it has no full period for it"
    run.commit(0, A)
    assert run.expected(0) == {A, B}


def test_a_joiner_starts_within_a_round_with_the_slot_that_the_others_are_at(make_run: MakeRun) -> None:
    """I: a full period from there its first send is, of the slot before."""
    run = make_run(A)
    run.commit(1, A)
    run.greet(B, 2, protocol_max=4)
    run.say(B, msg.Ready())
    commands = run.commit(0, A)
    assert published(commands) == [((A, B), 0, 1)]
    assert commands[-2:] == [
        ev.Record(record=rec.NodeStarted(node=B, incarnation=1, round=1, slot=1)),
        tell(B, msg.Start(round=plan(1), lease=None, slot=1)),
    ]
    assert run.expected(0) == {A, B} and run.expected(1) == {A}
    run.commit(1, A)
    assert run.expected(1) == {A, B}


@pytest.mark.parametrize("round_index", [0, 1])
def test_who_cannot_start_within_a_round_waits_for_the_next(make_run: MakeRun, round_index: int) -> None:
    """An older node would begin with the round's first step, and nobody knows where the first round is."""
    run = make_run(A)
    if round_index:
        run.commit(1, A)
    run.greet(B, 2, protocol_max=3)
    run.say(B, msg.Ready())
    run.commit(0, A)
    assert run.machine.members[B].stage == "ready"
    run.commit(1, A)
    assert run.machine.members[B].stage == "training" and run.machine.members[B].start_slot == 0


def test_a_joiner_starts_at_once_where_nobody_trains_any_more(make_run: MakeRun) -> None:
    """Else a window would wait for ever for a boundary that only it can bring about."""
    run = make_run(A)
    run.greet(B, 2)
    run.say(B, msg.Ready())
    commands = run.say(A, msg.Leave(reason=Reason.DRAINED))
    assert commands == [
        ev.Record(record=rec.NodeLeft(node=A, reason=Reason.DRAINED, stored=0)),
        ev.Record(record=rec.NodeStarted(node=B, incarnation=1, round=0)),
        tell(B, msg.Start(round=plan(0), lease=None)),
    ]
    assert run.missing(1) == {B}


def test_a_start_that_was_never_heard_is_given_again(make_run: MakeRun) -> None:
    """The session broke under it: the node still says that it trains in no round, and no window may wait for it."""
    run = make_run(A, B, num_samples=1000)
    run.part(B)
    commands = run.greet(B, 9)
    assert commands[0] == ev.Record(record=rec.NodeLeft(node=B, reason=Reason.NOT_A_PARTICIPANT, stored=0))
    assert run.machine.members[B].stage == "joining"
    assert run.missing(1) == {A} and run.ledger.leases.returned
    run.say(B, msg.Ready())
    commands = run.commit(1, A)
    start = next(message for message in told(commands, B) if isinstance(message, msg.Start))
    assert start == msg.Start(round=plan(1), lease=Lease(start=240, count=240))
    assert run.ledger.leases.uncertain_total == 0


# --- samples


def test_a_started_node_holds_samples_for_three_rounds(make_run: MakeRun) -> None:
    """Data leases: enough for two rounds of outage; at least 60 steps."""
    run = make_run(A, num_samples=1000)
    assert run.ledger.leases.held == {(A, 1): [Lease(start=0, count=60 * 4)]}
    long_rounds = make_run(A, num_samples=1000, h=30, steps=120)
    assert long_rounds.ledger.leases.held == {(A, 1): [Lease(start=0, count=90 * 4)]}


def test_where_rounds_grow_a_node_holds_samples_for_three_of_the_longest_that_is_planned(make_run: MakeRun) -> None:
    lr = LearningRate(peak=1e-2, minimum=1e-3, warmup_steps=0, shape="step", drops=(1,))
    run = make_run(A, num_samples=5000, steps=400, lr=lr, h_rule="linear", h_alpha=0.1)
    assert [plan.length for plan in run.ledger.rounds.values()] == [10, 100, 100]
    assert run.ledger.leases.held == {(A, 1): [Lease(start=0, count=300 * 4)]}


def progress(watermark: int) -> msg.Progress:
    return plain_progress(tokens=64, loss=None, sample_watermark=watermark, samples_left=240 - watermark)


def test_samples_are_topped_up_by_what_was_used_once_it_is_worth_a_grant(make_run: MakeRun) -> None:
    run = make_run(A, num_samples=1000)
    assert run.say(A, progress(79)) == []
    assert run.say(A, progress(80)) == [
        ev.Record(
            record=rec.LeaseGranted(node=A, incarnation=1, lease=Lease(start=240, count=80), consumed=80, stored=0)
        ),
        tell(A, msg.Grant(lease=Lease(start=240, count=80))),
    ]
    assert run.say(A, progress(81)) == []


def test_scraps_that_came_back_are_granted_together(make_run: MakeRun) -> None:
    """A grant of a few samples alone would leave a node without a whole batch, and its round without an end."""
    run = make_run(A, B, num_samples=1000)
    run.store(B, 1, consumed=238)
    run.say(B, msg.Leave(reason=Reason.DRAINED))
    run.greet(C, 3)
    run.say(C, msg.Ready())
    commands = run.done(run.store(A, 1))
    messages = told(commands, C)
    assert messages == [
        msg.Start(round=plan(1), lease=Lease(start=478, count=2)),
        msg.Grant(lease=Lease(start=480, count=238)),
    ]
    assert run.ledger.leases.outstanding(C, 1) == 240


def test_grants_that_a_broken_session_may_have_lost_are_told_again(make_run: MakeRun) -> None:
    run = make_run(A, num_samples=1000)
    run.say(A, progress(80))
    run.part(A)
    commands = run.greet(A, 2, round=0)
    assert told(commands, A) == [
        msg.Grant(lease=Lease(start=0, count=240)),
        msg.Grant(lease=Lease(start=240, count=80)),
    ]
    run.say(A, progress(240))
    commands = run.greet(A, 3, round=0)
    assert told(commands, A)[0] == msg.Grant(lease=Lease(start=240, count=80))


def test_a_node_that_is_away_is_granted_nothing(make_run: MakeRun) -> None:
    run = make_run(A, B, num_samples=1000)
    run.say(A, progress(200))
    before = run.ledger.leases.outstanding(B, 1)
    run.part(B)
    run.store(A, 1)
    run.done(run.pass_time(CLOSED_GRACE_S))
    assert run.ledger.leases.outstanding(B, 1) == before


def left(watermark: int, samples_left: int | None) -> msg.Progress:
    return dataclasses.replace(progress(watermark), samples_left=samples_left)


def test_the_samples_of_a_node_that_never_comes_back_go_to_others(make_run: MakeRun) -> None:
    """What is in its stored deltas stays used, what it is known to have used beyond that is counted."""
    run = make_run(A, B, num_samples=1000)
    run.store(B, 0, consumed=40)
    run.say(B, progress(50))
    run.part(B)
    assert not recorded(run.pass_time(CLOSED_GRACE_S))
    assert recorded(run.pass_time(EXPIRE_S)) == [rec.NodeLeft(node=B, reason=Reason.CLOSED, consumed=50, stored=40)]
    assert run.ledger.leases.returned == [Lease(start=280, count=200)]
    assert run.ledger.leases.fates() == {"granted": 480, "trained": 40, "returned": 200, "uncertain": 10}
    assert run.machine.members[B].stage == "left"


def test_a_restart_gives_nodes_as_long_to_come_back(make_run: MakeRun) -> None:
    run = make_run(A, B, num_samples=1000)
    run.restart()
    run.greet(A, 3, round=0)
    assert not recorded(run.pass_time(10.0 + EXPIRE_S - 1.0))
    assert recorded(run.pass_time(1.0)) == [rec.NodeLeft(node=B, reason=Reason.CLOSED, stored=0)]


def test_a_node_that_comes_back_in_time_keeps_its_samples(make_run: MakeRun) -> None:
    run = make_run(A, B, num_samples=1000)
    run.part(B)
    run.pass_time(EXPIRE_S - 1.0)
    accept, grant = run.greet(B, 9, round=0)[:2]
    assert accept.welcome.leases == (Lease(start=240, count=240),)  # type: ignore[union-attr]
    assert told([grant], B) == [msg.Grant(lease=Lease(start=240, count=240))]


def test_a_node_that_lives_on_lets_go_of_what_others_have_before_it_is_granted_more(make_run: MakeRun) -> None:
    """No sample is granted twice: it is told that it holds none, and from which of its own on it gets others."""
    run = make_run(A, B, num_samples=1000)
    run.say(B, progress(20))
    run.part(B)
    run.pass_time(EXPIRE_S + CLOSED_GRACE_S)
    commands = run.greet(B, 9, round=0)
    assert commands[1].welcome.leases == ()  # type: ignore[union-attr]
    assert not told(commands, B)
    assert run.say(B, left(32, 208)) == [], "this it said before it knew"
    granted = recorded(run.say(B, left(36, 0)))
    assert granted == [
        rec.LeaseGranted(node=B, incarnation=1, lease=Lease(start=240, count=240), consumed=36, stored=36, since=36)
    ]
    assert run.ledger.leases.uncertain_total == 36
    run.say(B, left(36 + 80, 160))
    assert run.ledger.leases.outstanding(B, 1) == 240
    copied = run.ledger.copy()
    assert copied.leases == run.ledger.leases


def test_a_node_of_a_release_before_is_believed_in_what_it_used(make_run: MakeRun) -> None:
    """It says nothing with its deltas: what it has reported is used."""
    run = make_run(A, B, num_samples=1000)
    run.store(B, 0)
    run.say(B, left(50, None))
    commands = run.greet(B, 9, incarnation=2)
    assert recorded(commands)[0] == rec.NodeLeft(node=B, reason=Reason.OLD_INCARNATION, consumed=50, stored=50)


def test_a_late_delta_says_how_far_its_node_had_come(make_run: MakeRun) -> None:
    """Even one that is dropped as it comes: it is durable, and so is what it says of samples."""
    run = make_run(A, B, num_samples=1000)
    late = run.offer(A, 0, consumed=40)
    run.commit(0, A, B)
    run.say(A, progress(40))
    run.machine.ledger.leases.stores(A, 1, 0)
    stale = dataclasses.replace(late, blob=dataclasses.replace(late.blob, seq=99))
    run.handle(ev.InputStored(offer=stale))
    assert run.ledger.leases.stored[A, 1] == 40


def test_names_that_come_and_go_are_forgotten(make_run: MakeRun) -> None:
    run = make_run(A, num_samples=1000)
    for number in range(MOST_MEMBERS + 50):
        run.greet(NodeId(f"n{number}"), 1000 + number)
        run.part(NodeId(f"n{number}"))
    assert len(run.machine.members) == MOST_MEMBERS
    assert A in run.machine.members


def test_a_node_with_data_of_its_own_is_granted_nothing(make_run: MakeRun) -> None:
    run = make_run(A, num_samples=0)
    assert run.say(A, progress(500)) == []


# --- deltas and windows


def test_a_window_closes_when_all_that_are_expected_have_come(make_run: MakeRun) -> None:
    """D, Q: a durable delta is acknowledged, and the last one closes the window."""
    run = make_run(A, B)
    first = run.offer(B, 1, tokens=300)
    assert run.say(B, first) == [ev.Receive(offer=first)]
    assert run.handle(ev.InputStored(offer=first)) == [tell(B, msg.Stored(blob=first.blob))]
    second = run.offer(A, 1, tokens=100)
    run.say(A, second)
    stored, commit = run.handle(ev.InputStored(offer=second))
    assert stored == tell(A, msg.Stored(blob=second.blob))
    assert isinstance(commit, ev.Commit) and commit.codec_down == "q4"
    assert commit.draft.blobs == (
        rec.Addend(blob=second.blob, weight=0.25),
        rec.Addend(blob=first.blob, weight=0.75),
    )
    assert (commit.draft.why, commit.draft.drops) == ("all 2 expected came", ())
    assert run.machine.windows[1].state == "closing"


def test_a_durable_commit_is_published_and_opens_the_next_window(make_run: MakeRun) -> None:
    """B, E, R: the announcement carries the decision, the terms that follow and the rounds that are fixed."""
    run = make_run(A)
    (publish,) = run.commit(1, A)
    assert publish == ev.Publish(
        nodes=(A,),
        committed=msg.Committed(
            fragment=1,
            version=1,
            size=50,
            digest=3,
            anchor_digest=1001,
            merged=(msg.Share(node=A, weight=1.0),),
            drops=(),
            next_window=dataclasses.replace(run.machine.windows[1].terms, window=2, round=1),
            rounds=(plan(0), plan(1), plan(2)),
        ),
    )
    assert run.ledger.versions == [0, 1]


def test_a_round_is_fixed_two_ahead_and_told_with_every_commit(make_run: MakeRun) -> None:
    """B: QSR is evaluated once per round, on the coordinator."""
    run = make_run(A)
    run.commit(1, A)
    commands = run.commit(0, A)
    assert commands[0] == ev.Record(record=rec.RoundFixed(round=plan(3)))
    publish = commands[1]
    assert isinstance(publish, ev.Publish)
    assert publish.committed.rounds == (plan(0), plan(1), plan(2), plan(3))


def test_a_quorum_closes_without_the_slowest(make_run: MakeRun) -> None:
    run = make_run(A, B, C, quorum=2)
    run.store(C, 1)
    commit = run.store(A, 1)[-1]
    assert isinstance(commit, ev.Commit)
    assert commit.draft.why == "quorum of 2 reached, without b"
    assert commit.draft.drops == (msg.Drop(node=B, reason=Reason.LATE),)


def test_a_delta_that_is_offered_again_is_acknowledged_again(make_run: MakeRun) -> None:
    """B18, Q: the blob id is the idempotency key; nothing is counted twice."""
    run = make_run(A, B)
    offer = run.offer(A, 1)
    run.say(A, offer)
    run.handle(ev.InputStored(offer=offer))
    assert run.say(A, offer) == [tell(A, msg.Stored(blob=offer.blob))]
    assert list(run.machine.windows[1].inputs) == [offer.blob]


def test_a_delta_that_may_not_come_has_its_outcome_at_once(make_run: MakeRun) -> None:
    """E: every delta gets one outcome, with a reason."""
    run = make_run(A, B)
    old = run.offer(A, 1)
    run.store(A, 1)
    again = run.offer(A, 1)
    assert told(run.say(A, again), A) == [
        msg.Outcome(blob=again.blob, reason=Reason.OVERLAP, detail=Reason.OVERLAP.sentence)
    ]
    run.commit(1, B)
    assert told(run.say(A, old), A) == [msg.Outcome(blob=old.blob, reason=Reason.LATE, detail=Reason.LATE.sentence)]


def test_a_delta_that_becomes_durable_too_late_is_dropped_on_the_record(make_run: MakeRun) -> None:
    """E: its bytes may go, and its sender learns that it was lost."""
    run = make_run(A, B, quorum=1)
    late = run.offer(B, 1)
    run.say(B, late)
    closing = run.store(A, 1)
    dropped = [
        ev.Record(record=rec.InputDropped(blob=late.blob, reason=Reason.LATE, detail=Reason.LATE.sentence)),
        ev.Forget(blob=late.blob),
        tell(B, msg.Outcome(blob=late.blob, reason=Reason.LATE, detail=Reason.LATE.sentence)),
    ]
    assert run.handle(ev.InputStored(offer=late)) == dropped, "while the window is closing"
    run.done(closing)
    assert run.handle(ev.InputStored(offer=late)) == dropped, "after it was committed"
    assert not run.ledger.inputs


def test_of_two_deltas_under_way_the_first_to_be_durable_counts(make_run: MakeRun) -> None:
    """H: OVERLAP"""
    run = make_run(A, B)
    first, second = run.offer(A, 1), run.offer(A, 1)
    run.say(A, first)
    run.say(A, second)
    run.handle(ev.InputStored(offer=second))
    assert recorded(run.handle(ev.InputStored(offer=first))) == [
        rec.InputDropped(blob=first.blob, reason=Reason.OVERLAP, detail=Reason.OVERLAP.sentence)
    ]
    assert list(run.machine.windows[1].inputs) == [second.blob]


def test_a_window_does_not_wait_for_a_delta_that_was_corrupt(make_run: MakeRun) -> None:
    run = make_run(A, B)
    run.store(A, 1)
    bad = run.offer(B, 1)
    run.say(B, bad)
    *dropped, commit = run.handle(ev.InputFailed(offer=bad, reason=Reason.CORRUPT, detail="the checksum is wrong"))
    assert dropped == [
        ev.Record(record=rec.InputDropped(blob=bad.blob, reason=Reason.CORRUPT, detail="the checksum is wrong")),
        ev.Forget(blob=bad.blob),
        tell(B, msg.Outcome(blob=bad.blob, reason=Reason.CORRUPT, detail="the checksum is wrong")),
    ]
    assert isinstance(commit, ev.Commit)
    assert commit.draft.drops == (msg.Drop(node=B, reason=Reason.CORRUPT),)


def test_a_window_is_held_below_the_floor(make_run: MakeRun) -> None:
    run = make_run(A, B, floor=2)
    run.store(A, 1)
    run.part(B, Reason.SILENT)
    assert run.pass_time(0.0) == []
    run.greet(B, 9, round=0)
    assert isinstance(run.store(B, 1)[-1], ev.Commit)


def test_a_failed_commit_is_tried_again_as_it_was_decided(make_run: MakeRun) -> None:
    """O: nothing was changed, the window stays closing, and a person can see why."""
    run = make_run(A, B, quorum=1)
    commit = run.store(A, 1)[-1]
    assert isinstance(commit, ev.Commit)
    assert run.handle(ev.CommitFailed(fragment=1, version=1, detail="the disk is full")) == []
    assert run.machine.alarms == {"commit of fragment 1": "the disk is full"}
    assert run.machine.next_timer() == run.now + RETRY_S
    run.say(B, run.offer(B, 1))
    assert run.pass_time(RETRY_S - 0.1) == []
    assert run.pass_time(0.1) == [commit]
    run.done([commit])
    assert run.machine.alarms == {} and run.machine.next_timer() == STALLS_AT


# --- nodes that go away


def test_a_closed_connection_is_waited_for_a_moment(make_run: MakeRun) -> None:
    """V: 1 s for a closed connection, so that with all else the others go on within 2 s."""
    run = make_run(A, B)
    run.store(A, 1)
    assert run.part(B, Reason.CLOSED) == []
    assert CLOSED_GRACE_S <= 1.0
    assert run.pass_time(CLOSED_GRACE_S - 0.1) == []
    (commit,) = run.pass_time(0.1)
    assert isinstance(commit, ev.Commit)
    assert commit.draft.drops == (msg.Drop(node=B, reason=Reason.CLOSED),)
    assert commit.draft.why == "all 1 expected came, 1 removed"


def test_a_silent_node_has_had_its_time(make_run: MakeRun) -> None:
    """V: the session's own time-out has passed already."""
    run = make_run(A, B)
    run.store(A, 1)
    run.part(B, Reason.SILENT)
    (commit,) = run.pass_time(0.0)
    assert isinstance(commit, ev.Commit)


def test_a_node_that_is_back_in_time_was_never_away(make_run: MakeRun) -> None:
    run = make_run(A, B)
    run.part(B)
    run.pass_time(CLOSED_GRACE_S / 2)
    run.greet(B, 9, round=0)
    assert run.machine.next_timer() == STALLS_AT
    assert run.missing(1) == {A, B}


def test_a_window_that_went_on_without_a_node_takes_it_in_again_while_it_is_open(make_run: MakeRun) -> None:
    run = make_run(A, B)
    run.part(B)
    run.pass_time(CLOSED_GRACE_S)
    assert run.missing(1) == {A}
    run.greet(B, 9, round=0)
    assert run.missing(1) == {A, B}
    assert run.machine.windows[1].removed == {}


def test_a_node_that_comes_back_is_not_excused_from_a_drop(make_run: MakeRun) -> None:
    """Its delta was bad: there is no other to wait for."""
    run = make_run(A, B)
    bad = run.offer(B, 1)
    run.say(B, bad)
    run.handle(ev.InputFailed(offer=bad, reason=Reason.CORRUPT, detail="x"))
    run.part(B)
    run.greet(B, 9, round=0)
    assert run.missing(1) == {A}


def test_an_absent_node_is_not_expected_by_windows_that_open(make_run: MakeRun) -> None:
    """D: expected is frozen at opening."""
    run = make_run(A, B)
    run.part(B, Reason.SILENT)
    run.pass_time(0.0)
    run.commit(1, A)
    assert run.expected(1) == {A}
    run.greet(B, 9, round=0)
    assert run.expected(1) == {A}
    run.commit(1, A)
    assert run.expected(1) == {A, B}


def test_a_joiner_does_not_bring_back_expectations_of_others(make_run: MakeRun) -> None:
    """D: frozen at opening. What a node lost to a drop, it does not send again (protocol E)."""
    run = make_run(A, B)
    bad = run.offer(B, 0)
    run.say(B, bad)
    run.handle(ev.InputFailed(offer=bad, reason=Reason.CORRUPT, detail="x"))
    run.say(A, msg.Leave(reason=Reason.DRAINED))
    run.greet(C, 3)
    run.say(C, msg.Ready())
    run.commit(1, B)
    assert run.machine.members[C].stage == "training"
    assert run.missing(0) == set() and set(run.machine.windows[0].removed) == {A, B}


def test_a_newer_incarnation_takes_the_place_of_the_older(make_run: MakeRun) -> None:
    """Q, Data leases: nobody waits for the older, its session ends, its samples are free but for those it brought."""
    run = make_run(A, B, num_samples=1000)
    run.store(B, 0, consumed=40)
    run.say(B, progress(70))
    commands = run.greet(B, 9, incarnation=2)
    assert commands[:2] == [
        ev.CloseSession(session=2, reason=Reason.SUPERSEDED),
        ev.Record(record=rec.NodeLeft(node=B, reason=Reason.OLD_INCARNATION, consumed=70, stored=40)),
    ]
    assert run.missing(1) == {A}
    assert run.ledger.leases.returned == [Lease(start=280, count=200)]
    assert run.ledger.leases.uncertain_total == 30
    assert run.machine.members[B].stage == "joining"


def test_a_second_session_of_the_same_incarnation_takes_over(make_run: MakeRun) -> None:
    run = make_run(A, B)
    hang, accept = run.greet(B, 9, round=0)
    assert hang == ev.CloseSession(session=2, reason=Reason.SUPERSEDED) and isinstance(accept, ev.Accept)
    assert run.missing(1) == {A, B}
    assert run.handle(ev.NodeDisconnected(session=2, node=B, reason=Reason.CLOSED)) == [], "the old session is nobody's"
    assert run.machine.members[B].session == 9
    assert run.handle(ev.NodeMessage(session=2, node=B, message=run.offer(B, 1))) == []


def test_a_node_that_leaves_is_not_waited_for(make_run: MakeRun) -> None:
    run = make_run(A, B)
    run.store(A, 1)
    held = msg.AnchorRef(fragment=0, version=0, digest=100)
    commands = run.say(B, msg.Leave(reason=Reason.DRAINED, anchors=(held,)))
    assert isinstance(commands[0], ev.Commit)
    assert commands[1] == ev.Record(record=rec.NodeLeft(node=B, reason=Reason.DRAINED, stored=0))
    assert (run.machine.members[B].stage, run.machine.members[B].anchors) == ("left", (held,))
    assert run.machine.next_timer() == STALLS_AT, "of a"


def test_when_the_clock_jumps_deadlines_move(make_run: MakeRun) -> None:
    """C: this process stood still, not the nodes."""
    run = make_run(A, B)
    run.part(B)
    run.machine.clock_jumped(30.0)
    assert run.pass_time(30.9) == [] and not run.machine.members[B].absent
    run.pass_time(0.1)
    assert run.machine.members[B].absent


def test_strangers_are_not_heard(make_run: MakeRun) -> None:
    run = make_run(A)
    assert run.handle(ev.NodeMessage(session=8, node=C, message=msg.Ready())) == []
    assert run.handle(ev.NodeDisconnected(session=8, node=C, reason=Reason.CLOSED)) == []


# --- what nodes ask for and report


def test_an_anchor_that_does_not_match_is_replaced_and_seen(make_run: MakeRun) -> None:
    """N: a digest detects error."""
    run = make_run(A)
    assert run.say(A, msg.Fetch(fragment=1)) == [ev.SendSnapshot(node=A, fragment=1)]
    assert run.machine.alarms == {"anchor of a": "fragment 1 did not match its digest"}
    assert run.say(A, msg.Fetch(fragment=2)) == run.say(A, msg.Fetch(fragment=-1)) == []


SCORE = msg.Evaluation(loss=2.5, versions=(0, 1), position=10.0, seconds=1.0)


@pytest.mark.parametrize(("every", "rounds"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2, 3])])
def test_the_lowest_live_node_evaluates_with_the_last_fragment(
    make_run: MakeRun, every: int, rounds: list[int]
) -> None:
    """J: every so many rounds, and at the end."""
    run = make_run(A, B, evaluation_set="0123", evaluate_every_rounds=every)
    run.part(A, Reason.SILENT)
    run.pass_time(0.0)
    evaluated = []
    for fragment in (1, 0, 1, 0, 1, 0, 1, 0):
        round_index = run.machine.windows[fragment].terms.round
        publish = next(command for command in run.commit(fragment, B) if isinstance(command, ev.Publish))
        assert publish.committed.evaluator in (None, B)
        if publish.committed.evaluator:
            assert fragment == 1
            evaluated.append(round_index)
    assert evaluated == rounds


def test_a_run_without_an_evaluation_set_asks_nobody(make_run: MakeRun) -> None:
    run = make_run(A)
    (publish,) = run.commit(1, A)
    assert isinstance(publish, ev.Publish) and publish.committed.evaluator is None


@pytest.fixture
def asked(make_run: MakeRun) -> Run:
    """A was asked to evaluate version 1 of fragment 1."""
    run = make_run(A, B, evaluation_set="0123")
    run.commit(1, A, B)
    return run


def test_nobody_evaluates_who_was_not_asked(asked: Run) -> None:
    """J: each evaluation is kept as long as the run, and shown to everybody."""
    assert asked.say(B, SCORE) == [] and not asked.machine.believes(B, SCORE)
    assert asked.machine.believes(A, SCORE)
    assert len(asked.say(A, SCORE)) == 1


def test_who_was_asked_answers_once(asked: Run) -> None:
    """J."""
    asked.say(A, SCORE)
    assert asked.say(A, SCORE) == [] and not asked.machine.believes(A, SCORE)
    asked.commit(0, A, B)
    assert asked.say(A, dataclasses.replace(SCORE, versions=(1, 1))) == [], "nothing was asked for at this commit"
    assert len(asked.ledger.evaluations) == 1


def test_an_answer_may_be_of_a_later_version_than_was_asked_for(asked: Run) -> None:
    """The evaluator merged both at once."""
    asked.commit(0, A, B)
    asked.commit(1, A, B)
    assert len(asked.say(A, dataclasses.replace(SCORE, versions=(1, 2)))) == 1
    assert asked.say(A, SCORE) == []


def test_after_a_restart_whoever_was_asked_may_answer_once(asked: Run) -> None:
    """Q: whom the incarnation before has asked is in no record."""
    asked.restart()
    asked.greet(A, 1, round=0)
    asked.greet(B, 2, round=0)
    assert len(asked.say(B, SCORE)) == 1
    assert asked.say(A, SCORE) == []
    asked.restart()
    asked.greet(A, 3, round=0)
    assert asked.say(A, SCORE) == []


def test_an_evaluation_is_recorded_if_it_is_of_this_model(make_run: MakeRun) -> None:
    run = make_run(A, evaluation_set="0123")
    run.commit(1, A)
    evaluation = msg.Evaluation(loss=2.5, versions=(0, 1), position=10.0, seconds=1.0)
    assert run.say(A, evaluation) == [ev.Record(record=rec.EvaluationTaken(loss=2.5, versions=(0, 1), position=10.0))]
    for versions in ((), (0, 2), (1, 1), (-1, 1)):
        assert not run.machine.believes(A, dataclasses.replace(evaluation, versions=versions))


@pytest.mark.parametrize("mended", ["delta", "leave", "newer start"])
def test_the_alarm_of_a_lost_anchor_ends_when_it_is_mended(make_run: MakeRun, mended: str) -> None:
    """N: a node sends nothing from an anchor that is lost."""
    run = make_run(A, B)
    run.say(A, msg.Fetch(fragment=0))
    run.say(A, msg.Fetch(fragment=1))
    assert run.machine.alarms == {"anchor of a": "fragment 0, 1 did not match its digest"}
    run.say(B, run.offer(B, 1))
    assert run.machine.alarms
    match mended:
        case "delta":
            run.say(A, run.offer(A, 1))
            assert run.machine.alarms == {"anchor of a": "fragment 0 did not match its digest"}
            run.say(A, run.offer(A, 0))
        case "leave":
            run.say(A, msg.Leave(reason=Reason.DRAINED))
        case _:
            run.greet(A, 9, round=0)
            assert run.machine.alarms, "the same start of the node may still wait for its snapshot"
            run.greet(A, 10, incarnation=2)
    assert run.machine.alarms == {}


@pytest.mark.parametrize("gone", ["left", "dead", "excluded", "another start"])
def test_alarms_of_a_node_that_is_gone_end_with_it(make_run: MakeRun, gone: str) -> None:
    """They stayed in the status for ever: nobody could mend them any more."""
    run = make_run(A, B)
    run.say(A, msg.Fetch(fragment=0))
    run.say(A, dataclasses.replace(progress(4), tokens=-1))
    assert set(run.machine.alarms) == {"anchor of a", "report of a"}
    match gone:
        case "left":
            run.say(A, msg.Leave(reason=Reason.DRAINED))
        case "dead":
            run.part(A, Reason.SILENT)
            run.pass_time(0.0)
        case "excluded":
            run.part(A, Reason.WRONG_KEY)
            run.pass_time(0.0)
        case _:
            run.greet(A, 9, incarnation=2)
    assert run.machine.alarms == {}


def test_alarms_of_a_node_that_may_be_back_at_once_stay(make_run: MakeRun) -> None:
    run = make_run(A, B)
    run.say(A, msg.Fetch(fragment=0))
    run.say(A, dataclasses.replace(progress(4), tokens=-1))
    run.part(A, Reason.CLOSED)
    assert set(run.machine.alarms) == {"anchor of a", "report of a"}
    run.pass_time(CLOSED_GRACE_S + 1.0)
    assert run.machine.alarms == {}


# --- what cannot be true


@pytest.mark.parametrize(
    ("claim", "untrue"),
    [
        ({"tokens": -5}, "-5 tokens in 10 inner steps"),
        ({"steps": 1000, "tokens": 64000}, "1000 inner steps, and there were at most 40 since its base"),
        ({"tokens": 641}, "641 tokens in 10 inner steps, which have 640"),
    ],
)
def test_a_delta_that_claims_what_cannot_be_true_is_not_waited_for(
    make_run: MakeRun, claim: dict[str, int], untrue: str
) -> None:
    """H: what it says decides what it weighs. The others go on, and its sender is told why."""
    run = make_run(A, B, num_samples=1000)
    run.store(A, 1)
    outcome, commit = run.say(B, run.offer(B, 1, **claim))
    assert isinstance(outcome, ev.Tell) and isinstance(outcome.message, msg.Outcome)
    assert outcome.message.reason is Reason.IMPLAUSIBLE and untrue in outcome.message.detail
    assert isinstance(commit, ev.Commit)
    assert commit.draft.drops == (msg.Drop(node=B, reason=Reason.IMPLAUSIBLE),)
    assert [share.weight for share in commit.draft.merged] == [1.0]


def test_a_report_that_cannot_be_true_counts_for_nothing(make_run: MakeRun) -> None:
    """A, V: it would set everybody's H, or hide that nothing moves."""
    run = make_run(A, num_samples=1000)
    run.say(A, progress(4))
    bad = dataclasses.replace(progress(80), inner_steps=2, tokens=10**12)
    assert run.say(A, bad) == [] and not run.machine.believes(A, bad)
    assert run.machine.members[A].progress == progress(4)
    assert run.machine.alarms == {
        "report of a": "it claims 1000000000000 tokens in 2 inner steps, which have 128 at most"
    }
    run.say(A, progress(5))
    assert run.machine.alarms == {}


# --- nodes that stand still


def moved(inner_steps: int, **changes: Any) -> msg.Progress:
    return dataclasses.replace(progress(0), inner_steps=inner_steps, tokens=64 * inner_steps, **changes)


def stepping(run: Run, *nodes: NodeId, seconds: float = 1.0, since: int = 0) -> None:
    """They report 5 inner steps, one after the other."""
    for step in range(since + 1, since + 6):
        run.pass_time(seconds)
        for node in nodes:
            run.say(node, moved(step))


def test_a_node_whose_training_hangs_while_its_link_lives_is_not_waited_for(make_run: MakeRun) -> None:
    """V: it is heard all the time. The others go on without it."""
    run = make_run(A, B)
    stepping(run, A, B)
    run.store(A, 1)
    commands = []
    for step in range(6, 36):
        run.say(A, moved(step))
        commands += run.pass_time(STALL_S / 30)
    (commit,) = commands
    assert isinstance(commit, ev.Commit) and commit.draft.drops == (msg.Drop(node=B, reason=Reason.STALLED),)
    run.done(commands)
    assert run.expected(1) == {A} and run.machine.members[B].stalled


def test_a_node_that_moves_again_is_back(make_run: MakeRun) -> None:
    run = make_run(A, B)
    stepping(run, A, B)
    run.pass_time(STALL_S - 1.0)
    run.say(A, moved(6))
    run.pass_time(1.0)
    assert run.missing(1) == {A} and run.machine.members[B].reason is Reason.STALLED
    run.say(B, moved(5))
    assert run.machine.members[B].stalled, "it says what it said before"
    run.say(B, moved(6))
    assert run.missing(1) == {A, B} and run.machine.windows[1].removed == {}
    assert run.machine.members[B].counts and run.machine.members[B].reason is Reason.NONE


@pytest.mark.parametrize("state", ["waiting", "draining", "joining"])
def test_who_stands_still_for_good_reason_is_waited_for_until_its_deadline(make_run: MakeRun, state: Any) -> None:
    """F, V: the reason is only what it says."""
    run = make_run(A, B)
    stepping(run, A, B)
    for _ in range(int(FIRST_S / 10.0) - 1):
        run.say(A, moved(5, state=state))
        run.say(B, moved(5, state=state))
        run.pass_time(10.0)
    assert run.missing(1) == {A, B}
    run.pass_time(10.0)
    assert run.missing(1) == set()


def test_how_long_a_node_may_stand_still_follows_its_own_steps(make_run: MakeRun) -> None:
    """V: of steps of 20 s, ten may pass."""
    run = make_run(A)
    stepping(run, A, seconds=20.0)
    run.pass_time(199.0)
    assert run.missing(1) == {A}
    run.pass_time(1.0)
    assert run.missing(1) == set()


def test_a_first_step_and_an_evaluation_may_take_longer(asked: Run) -> None:
    """V: the first inner step compiles the model."""
    asked.pass_time(STALL_S * SLOW_TASKS - 1.0)
    assert asked.missing(1) == {A, B}
    stepping(asked, A, B)
    assert asked.machine.members[A].evaluates
    for step in range(6, 40):
        asked.say(B, moved(step))
        asked.pass_time(1.0)
    assert asked.missing(1) == {A, B}
    asked.say(A, SCORE)
    asked.pass_time(0.0)
    assert asked.missing(1) == {B}


def test_a_stop_of_this_process_is_nobodys_stall(make_run: MakeRun) -> None:
    """C."""
    run = make_run(A)
    stepping(run, A)
    run.machine.clock_jumped(500.0)
    run.pass_time(500.0 + STALL_S - 1.0)
    assert run.missing(1) == {A}


# --- a coordinator that is stopped


def test_a_coordinator_that_stops_closes_no_window_for_want_of_the_nodes_it_sent_away(make_run: MakeRun) -> None:
    """E: its own farewell ends their sessions; after the next start their deltas are merged as if nothing had been."""
    run = make_run(A, B)
    run.store(A, 1)
    run.machine.stop()
    for node in (A, B):
        assert run.part(node, Reason.COORDINATOR_STOPPING) == []
    assert run.pass_time(100.0) == [] and run.machine.next_timer() is None
    assert run.missing(1) == {B}
    late = make_run(A)
    late.machine.stop()
    assert not [command for command in late.store(A, 1) if isinstance(command, ev.Commit)]

    run.restart()
    run.greet(A, 3, round=0)
    run.greet(B, 4, round=0)
    (commit,) = [command for command in run.store(B, 1) if isinstance(command, ev.Commit)]
    assert commit.draft.drops == () and len(commit.draft.merged) == 2


# --- the end


def finish(run: Run, *nodes: NodeId) -> list[ev.Command]:
    """Commit all windows but the last, in the order of the schedule; return what the last one's commit brings about."""
    commands: list[ev.Command] = []
    while run.machine.windows:
        commands = run.commit(min(run.machine.windows, key=lambda f: (run.machine.windows[f].terms.round, -f)), *nodes)
    return commands


def test_the_run_ends_with_the_last_final_window(make_run: MakeRun) -> None:
    """A: fragment 0 is flushed at the end; everybody is told, and the model can be exported."""
    run = make_run(A, B)
    commands = finish(run, A, B)
    assert published(commands) == [((A, B), 0, 4)]
    assert commands[1:] == [
        ev.Record(record=rec.RunFinished()),
        tell(A, msg.Finished()),
        tell(B, msg.Finished()),
        ev.Finish(),
    ]
    assert run.ledger.finished and run.ledger.versions == [4, 4]


def test_who_comes_after_the_end_is_told_so(make_run: MakeRun) -> None:
    run = make_run(A)
    finish(run, A)
    commands = run.greet(B, 9)
    assert isinstance(commands[0], ev.Accept)
    assert told(commands, B) == [msg.Finished()]
    assert run.say(B, msg.Ready()) == []


def test_a_finished_run_is_awaited_by_who_may_yet_be_back_to_hear_of_it(make_run: MakeRun) -> None:
    """Else a node that is still dialling when the others have left would dial for ever."""
    run = make_run(A, B)
    finish(run, A, B)
    run.restart()
    assert run.machine.awaited == [A, B]
    run.greet(A, 1, round=3)
    run.say(A, msg.Leave(reason=Reason.RUN_FINISHED))
    assert run.machine.awaited == [B]
    run.greet(B, 2, round=3)
    assert run.machine.awaited == [B]
    run.part(B)
    run.pass_time(CLOSED_GRACE_S)
    assert run.machine.awaited == []


# --- restarts


def test_after_a_restart_the_nodes_have_the_liveness_time_to_come_back(make_run: MakeRun) -> None:
    """C, Q: deadlines are armed anew; sessions are not durable."""
    run = make_run(A, B)
    run.now += 1000.0
    assert run.restart() == []
    assert run.missing(1) == {A, B}
    assert run.machine.next_timer() == run.now + 10.0
    run.greet(A, 1, round=0, anchors=FIRST_ANCHORS)
    run.store(A, 1)
    (commit,) = run.pass_time(10.0)
    assert isinstance(commit, ev.Commit)
    assert commit.draft.drops == (msg.Drop(node=B, reason=Reason.CLOSED),)


def test_a_restart_re_opens_a_window_with_the_deltas_that_were_durable(make_run: MakeRun) -> None:
    """B21, P: the commit that follows is the one that would have been."""
    run = make_run(A, B)
    run.store(A, 1)
    other = run.offer(B, 1)
    run.restart()
    run.greet(B, 1, round=0)
    run.say(B, other)
    commit = run.handle(ev.InputStored(offer=other))[-1]
    assert isinstance(commit, ev.Commit)

    uninterrupted = make_run(A, B)
    uninterrupted.store(A, 1)
    same = uninterrupted.store(B, 1)[-1]
    assert commit == same


def test_a_restart_in_the_middle_of_a_commit_decides_it_again(make_run: MakeRun) -> None:
    """B21, O"""
    run = make_run(A, B)
    run.store(A, 1)
    commit = run.store(B, 1)[-1]
    assert run.restart() == [commit]


def test_a_restart_fixes_the_round_that_a_crash_cut_off_from_its_commit(make_run: MakeRun) -> None:
    """B: the record follows the commit, and a crash may come between them."""
    run = make_run(A)
    run.commit(1, A)
    before = run.ledger.copy()
    draft = next(c.draft for c in run.store(A, 0) if isinstance(c, ev.Commit))
    before.apply(draft)
    run.ledger = before
    assert run.restart() == [ev.Record(record=rec.RoundFixed(round=plan(3)))]


def test_a_restart_ends_a_run_whose_end_a_crash_cut_off_from_its_last_commit(make_run: MakeRun) -> None:
    run = make_run(A)
    finish(run, A)
    run.ledger.finished = False
    assert run.restart() == [ev.Record(record=rec.RunFinished()), ev.Finish()]


def test_a_restart_after_the_end_exports_the_model_again(make_run: MakeRun) -> None:
    """The crash may have come before the export was done."""
    run = make_run(A)
    finish(run, A)
    assert run.restart() == [ev.Finish()]
    commands = run.greet(A, 1, round=3)
    assert msg.Finished() in told(commands, A)


def test_a_joiner_that_a_crash_found_ready_asks_again(make_run: MakeRun) -> None:
    run = make_run(A)
    run.greet(B, 2)
    run.say(B, msg.Ready())
    run.restart()
    assert B not in run.machine.members
    run.greet(A, 1, round=0)
    run.greet(B, 2)
    assert run.say(B, msg.Ready()) == []
    assert told(run.commit(1, A), B) == [msg.Start(round=plan(1), lease=None)]
