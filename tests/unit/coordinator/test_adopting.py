"""A coordinator that goes on from what nodes hold: whom it waits for, what it asks for, what it records (S)."""

import dataclasses
from typing import Any

import pytest
from plain_runs import plain_hello

from farloop.algo import schedule
from farloop.algo.spec import BlobId, BlobKind, NodeId, Revision, RoundPlan, RunSpec, WindowTerms
from farloop.coordinator.adoption_checks import untrue
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.adoption import ALARM, LISTEN_S, AdoptionSettings
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")
PATIENCE_S = 60.0


def ref(fragment: int, version: int, digest: int = 0) -> msg.AnchorRef:
    return msg.AnchorRef(fragment=fragment, version=version, digest=digest or 1000 * fragment + version)


OLD = tuple(msg.AnchorRef(fragment=f, version=0, digest=100 + f) for f in range(2))
NEW = (ref(0, 2), ref(1, 1))


class Start:
    """A start over a copy in which a and b have just begun; all invariants are checked after every event."""

    def __init__(
        self, spec: RunSpec, fetched: dict[int, rec.AnchorFetched] | None = None, *, newest: bool = True
    ) -> None:
        """`newest`: what one node alone knows is taken, too."""
        self.ledger = Ledger.begin(rec.RunStarted(spec=spec, epoch=1))
        for node in (A, B):
            self.ledger.apply(rec.NodeStarted(node=node, incarnation=1, round=0))
        self.now = 100.0
        self.plans = schedule.first_rounds(spec.terms, count=5)
        adopt = AdoptionSettings(untrue=untrue, patience_s=PATIENCE_S, fetched=fetched or {}, newest=newest)
        self.machine = CoordinatorMachine(self.ledger, now=self.now, liveness_s=10.0, adopt=adopt)
        assert self.machine.start() == []

    @property
    def waits(self) -> str:
        return self.machine.alarms[ALARM]

    def handle(self, event: ev.Event) -> list[ev.Command]:
        commands = self.machine.handle(event, self.now)
        self.machine.check()
        return commands

    def at(self, seconds: float) -> list[ev.Command]:
        """Since the start."""
        self.now = 100.0 + seconds
        commands = self.machine.handle_timer(self.now)
        self.machine.check()
        return commands

    def greet(self, node: NodeId, session: int, *anchors: msg.AnchorRef, **changes: Any) -> list[ev.Command]:
        hello = plain_hello(node=node, anchors=anchors, epoch_seen=3, round=1, protocol_max=4)
        return self.handle(ev.NodeHello(session=session, node=node, hello=dataclasses.replace(hello, **changes)))

    def tell(self, node: NodeId, session: int, *anchors: msg.AnchorRef, **changes: Any) -> list[ev.Command]:
        windows = tuple(
            WindowTerms(
                fragment=r.fragment, window=r.version + 1, round=2, tau=2, mix=0.5, codec_up="q4", codec_down="q4"
            )
            for r in anchors
        )
        held = msg.Held(anchors=anchors, windows=windows, final=(), rounds=self.plans[:3], revisions=())
        message = dataclasses.replace(held, **changes)
        return self.handle(ev.NodeMessage(session=session, node=node, message=message))

    def both(self) -> None:
        """a holds all that is new, b nothing of it."""
        self.greet(A, 1, *NEW)
        self.tell(A, 1, *NEW)
        self.greet(B, 2, *OLD)
        self.tell(B, 2, *OLD)

    def bring(self, node: NodeId, session: int, anchor: msg.AnchorRef) -> list[ev.Command]:
        """From the node's offer to the disk."""
        blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=anchor.fragment, version=anchor.version, node=node)
        offer = msg.Offer(blob=blob, size=10, digest=1)
        (receive,) = self.handle(ev.NodeMessage(session=session, node=node, message=offer))
        assert receive == ev.ReceiveAnchor(offer=offer, anchor=anchor)
        return self.handle(ev.AnchorStored(record=rec.AnchorFetched(anchor=anchor, node=node, blob_digest=1)))


@pytest.fixture
def start(spec: RunSpec) -> Start:
    return Start(spec)


def asked(commands: list[ev.Command]) -> list[tuple[NodeId, int]]:
    return [
        (command.node, command.message.fragment)
        for command in commands
        if isinstance(command, ev.Tell) and isinstance(command.message, msg.Recall)
    ]


def adopted(commands: list[ev.Command]) -> rec.Adopted:
    (record,) = [c.record for c in commands if isinstance(c, ev.Record) and isinstance(c.record, rec.Adopted)]
    return record


def test_who_can_be_asked_is_let_in_for_that_alone(start: Start) -> None:
    seen, accept = start.greet(A, 1, *NEW, history=0)
    assert seen == ev.Record(record=rec.EpochSeen(epoch=3)), "for a start that winds the run back instead"
    assert isinstance(accept, ev.Accept) and accept.welcome.recalls and accept.welcome.protocol == 4
    assert start.machine.members[A].session is None and start.machine.holding is not None
    for session, changes in ((2, {"protocol_max": 3}), (3, {"anchors": ()})):
        *_, refuse = start.greet(B, session, *NEW, **changes)
        assert isinstance(refuse, ev.Refuse) and (refuse.refused.reason, refuse.refused.retriable) == (
            Reason.HOLDING,
            True,
        )


def test_all_that_the_copy_knows_are_waited_for_and_named(start: Start) -> None:
    start.greet(A, 1, *NEW)
    start.tell(A, 1, *NEW)
    assert asked(start.at(LISTEN_S)) == [] and "node b, which may hold newer versions" in start.waits
    assert start.machine.next_timer() == 100.0 + PATIENCE_S
    assert asked(start.at(PATIENCE_S)) == [(A, 0)], "one at a time"
    start.bring(A, 1, NEW[0])
    assert adopted(start.bring(A, 1, NEW[1])).missing == (B,)


def test_nodes_that_the_copy_has_never_met_have_the_time_to_dial_again(start: Start) -> None:
    start.both()
    assert asked(start.at(LISTEN_S - 0.1)) == []
    start.greet(NodeId("c"), 3, ref(0, 5))
    start.tell(NodeId("c"), 3, ref(0, 5))
    assert set(asked(start.at(LISTEN_S))) == {("c", 0), (A, 1)}


def test_what_is_adopted_is_recorded_once_all_of_it_is_here(start: Start, spec: RunSpec) -> None:
    start.both()
    assert asked(start.at(LISTEN_S)) == [(A, 0)]
    assert asked(start.bring(A, 1, NEW[0])) == [(A, 1)] and "1 of 2 fragments" in start.waits
    record, *told = start.bring(A, 1, NEW[1])
    assert adopted([record]) == rec.Adopted(
        epoch=4,
        anchors=tuple(
            rec.AdoptedAnchor(fragment=r.fragment, version=r.version, digest=r.digest, node=A, before=0) for r in NEW
        ),
        windows=tuple(start.ledger.windows[f] for f in range(2)),
        rounds=start.plans[2:3],
        revisions=(),
        frontier=0,
        returned=(),
        uncertain=0,
    )
    assert [c.node for c in told if isinstance(c, ev.Tell) and isinstance(c.message, msg.Leave)] == [A, B]
    assert start.ledger.versions == [2, 1] and (start.ledger.epoch, start.ledger.history) == (4, 4)
    assert start.machine.holding is None and not start.machine.alarms
    assert {window.terms.window for window in start.machine.windows.values()} == {3, 2}
    assert start.machine.members[A].gone_at == start.now + 10.0, "nobody could come before"
    start.handle(ev.NodeDisconnected(session=1, node=A, reason=Reason.HOLDING))
    for session, node in ((3, A), (4, B)):  # they dial again, and begin anew from snapshots
        commands = start.greet(node, session, *NEW)
        (accept,) = [command for command in commands if isinstance(command, ev.Accept)]
        assert (accept.welcome.history, accept.welcome.versions, accept.welcome.recalls) == (4, (2, 1), False)
        assert ev.SendSnapshot(node=node, fragment=0) in commands and ev.SendSnapshot(node=node, fragment=1) in commands


def test_what_an_earlier_start_brought_home_is_not_asked_for_again(spec: RunSpec) -> None:
    start = Start(spec, {0: rec.AnchorFetched(anchor=NEW[0], node=B, blob_digest=1)})
    start.both()
    assert asked(start.at(LISTEN_S)) == [(A, 1)]
    assert [anchor.node for anchor in adopted(start.bring(A, 1, NEW[1])).anchors] == [B, A]


def test_spoiled_bytes_are_asked_of_somebody_else_or_the_version_is_lost(start: Start) -> None:
    start.both()
    start.at(LISTEN_S)
    start.bring(A, 1, NEW[0])
    start.handle(ev.AnchorFailed(node=A, anchor=NEW[1], spoiled=False))
    assert "1 of 2" in start.waits, "it only stopped coming: once more"
    commands = start.handle(ev.AnchorFailed(node=A, anchor=NEW[1], spoiled=True))
    record = adopted(commands)
    assert [anchor.fragment for anchor in record.anchors] == [0] and record.lost == (NEW[1],)


def test_who_goes_away_with_the_newest_is_waited_for_as_long_as_any(start: Start) -> None:
    start.both()
    start.at(LISTEN_S)
    start.handle(ev.NodeDisconnected(session=1, node=A, reason=Reason.CLOSED))
    assert "node a" in start.waits and start.machine.next_timer() is not None
    start.greet(A, 3, *NEW)
    assert asked(start.tell(A, 3, *NEW)) == [(A, 0)]
    start.handle(ev.NodeDisconnected(session=3, node=A, reason=Reason.CLOSED))
    record = adopted(start.at(LISTEN_S + PATIENCE_S))
    assert record.anchors == () and record.lost == NEW, "b alone is here, and has nothing that the copy has not"


def test_an_older_node_that_alone_holds_the_newest_is_named(start: Start) -> None:
    start.greet(A, 1, *NEW, protocol_max=3)
    start.greet(B, 2, *OLD)
    start.tell(B, 2, *OLD)
    start.at(LISTEN_S)
    assert "version 2 of fragment 0: node a cannot be asked, speaking a protocol below 4" in start.waits


def test_a_fork_is_the_person_s_to_decide(start: Start) -> None:
    start.both()
    start.greet(NodeId("c"), 3, ref(0, 2, digest=9))
    start.tell(NodeId("c"), 3, ref(0, 2, digest=9))
    start.at(LISTEN_S + PATIENCE_S)
    assert "you to decide: version 2 of fragment 0" in start.waits and "--rewind" in start.waits


def test_where_no_node_knows_more_the_run_just_goes_on(start: Start) -> None:
    for session, node in ((1, A), (2, B)):
        start.greet(node, session, *OLD, epoch_seen=1)
        start.tell(node, session, *OLD)
    commands = start.at(LISTEN_S)
    assert not [c for c in commands if isinstance(c, ev.Record) and isinstance(c.record, rec.Adopted)]
    assert start.machine.holding is None and start.ledger.history == 0


def test_without_the_terms_that_follow_nothing_is_adopted(start: Start) -> None:
    start.greet(A, 1, *NEW)
    start.tell(A, 1, *NEW, windows=())
    start.greet(B, 2, *OLD)
    start.tell(B, 2, *OLD)
    start.at(LISTEN_S)
    start.bring(A, 1, NEW[0])
    start.bring(A, 1, NEW[1])
    assert "nobody tells under which terms fragment 0 goes on after version 2" in start.waits
    assert start.ledger.versions == [0, 0]


def test_a_process_that_stood_still_gives_nodes_their_time(start: Start) -> None:
    start.machine.clock_jumped(1000.0)
    start.now += 1000.0
    start.greet(A, 1, *NEW)
    assert start.at(1000.0 + LISTEN_S) == [] and "node b" in start.waits


def test_a_coordinator_that_stops_asks_for_nothing(start: Start) -> None:
    start.both()
    start.machine.stop()
    assert start.at(LISTEN_S) == [] and start.machine.next_timer() is None


def test_a_node_that_leaves_is_not_waited_for(start: Start) -> None:
    start.both()
    start.handle(ev.NodeMessage(session=2, node=B, message=msg.Leave(reason=Reason.DRAINED)))
    start.handle(ev.NodeDisconnected(session=2, node=B, reason=Reason.DRAINED))
    assert asked(start.at(LISTEN_S)) == [(A, 0)]


def test_an_anchor_that_nobody_asked_for_is_not_taken(start: Start) -> None:
    start.both()
    start.at(LISTEN_S)
    other = BlobId(kind=BlobKind.SNAPSHOT, fragment=1, version=1, node=A)
    for blob in (other, dataclasses.replace(other, fragment=0, version=9), dataclasses.replace(other, node=B)):
        assert start.handle(ev.NodeMessage(session=1, node=A, message=msg.Offer(blob=blob, size=1, digest=1))) == []


def test_samples_beyond_belief_are_not_believed(start: Start) -> None:
    start.greet(A, 1, *NEW)
    start.tell(A, 1, *NEW, granted_to=(1 << 64) - 1)
    start.greet(B, 2, *OLD)
    start.tell(B, 2, *OLD)
    start.at(LISTEN_S)
    start.bring(A, 1, NEW[0])
    record = adopted(start.bring(A, 1, NEW[1]))
    rec.encode(record)
    assert record.frontier <= 1 << 60 and record.rounds == (RoundPlan(index=2, start=20, length=10),)


def test_a_node_whose_training_hangs_is_waited_for_no_longer_than_one_that_is_away(start: Start) -> None:
    """Its session lives, and the thread that would answer does not."""
    start.greet(A, 1, *NEW)
    start.tell(A, 1, *NEW)
    start.greet(B, 2, *NEW)
    assert asked(start.at(LISTEN_S)) == [] and "node b, to say what they hold" in start.waits
    assert start.machine.next_timer() == 100.0 + PATIENCE_S
    assert asked(start.at(PATIENCE_S)) == [(A, 0)]


C = NodeId("c")


def three(start: Start) -> None:
    """a and c hold all that is new."""
    start.both()
    start.greet(C, 3, *NEW)
    start.tell(C, 3, *NEW)
    assert asked(start.at(LISTEN_S)) == [(A, 0), (C, 1)]


def test_a_holder_that_offers_nothing_is_not_asked_before_another(start: Start) -> None:
    three(start)
    start.bring(C, 3, NEW[1])
    assert start.machine.next_timer() == 100.0 + PATIENCE_S
    start.at(PATIENCE_S)
    assert asked(start.at(LISTEN_S + PATIENCE_S)) == [(C, 0)]
    assert adopted(start.bring(C, 3, NEW[0])).anchors[0].node == C


@pytest.mark.parametrize("how", ["it stands still", "its session ends"])
def test_a_holder_whose_anchor_stops_coming_is_not_asked_before_another(start: Start, how: str) -> None:
    three(start)
    start.bring(C, 3, NEW[1])
    if how == "it stands still":
        commands = start.handle(ev.AnchorFailed(node=A, anchor=NEW[0], spoiled=False))
    else:
        start.handle(ev.NodeDisconnected(session=1, node=A, reason=Reason.CLOSED))
        start.greet(A, 4, *NEW)
        commands = start.tell(A, 4, *NEW)
    assert asked(commands) == [(C, 0)]


def test_an_anchor_has_one_name_so_that_no_node_can_have_many_on_their_way(start: Start) -> None:
    """Room for all of it is made as soon as it is let in."""
    start.both()
    start.at(LISTEN_S)
    blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=2, node=A)
    for other in (dataclasses.replace(blob, incarnation=1), dataclasses.replace(blob, seq=1)):
        assert start.handle(ev.NodeMessage(session=1, node=A, message=msg.Offer(blob=other, size=10, digest=1))) == []


def test_what_a_node_takes_away_with_it_is_told_as_lost(start: Start) -> None:
    start.both()
    start.handle(ev.NodeMessage(session=1, node=A, message=msg.Leave(reason=Reason.DRAINED)))
    record = adopted(start.at(LISTEN_S))
    assert (record.anchors, record.lost, record.missing) == ((), NEW, ())


def test_names_without_end_are_not_remembered(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farloop.coordinator.decide.adoption.MOST_MEMBERS", 4)
    start.both()
    start.greet(NodeId("old"), 3, ref(0, 9), protocol_max=3)
    start.at(LISTEN_S)
    assert "version 9 of fragment 0" in start.waits
    for number in range(2):
        start.greet(NodeId(f"name-{number}"), 4 + number, protocol_max=3)
    assert "version 9" not in start.waits and "the anchors to come" in start.waits


def test_a_history_that_begins_is_named_above_all_that_nodes_follow(start: Start) -> None:
    """A greeting tells of one as soon as the Welcome is here, and of its epoch once the node follows."""
    for session, node in ((1, A), (2, B)):
        start.greet(node, session, *NEW, epoch_seen=3, history=7)
        start.tell(node, session, *NEW)
    start.at(LISTEN_S)
    start.bring(A, 1, NEW[0])
    assert adopted(start.bring(B, 2, NEW[1])).epoch == 8


def test_a_history_that_no_run_can_have_reached_is_refused(start: Start) -> None:
    *_, refuse = start.greet(A, 1, *NEW, history=1 << 40)
    assert isinstance(refuse, ev.Refuse) and refuse.refused.reason is Reason.MALFORMED


WINDOW = WindowTerms(fragment=0, window=3, round=2, tau=2, mix=0.5, codec_up="q4", codec_down="q4")


@pytest.mark.parametrize(
    "told",
    [
        {"windows": (dataclasses.replace(WINDOW, codec_up="q9"),)},
        {"windows": (dataclasses.replace(WINDOW, codec_down="topk"),)},
        {"windows": (dataclasses.replace(WINDOW, codec_up_of=((A, "q4:no=1"),)),)},
        {"windows": (dataclasses.replace(WINDOW, fragment=7),)},
        {"windows": (dataclasses.replace(WINDOW, tau=-1),)},
        {"windows": (dataclasses.replace(WINDOW, mix=float("nan")),)},
        {"rounds": (RoundPlan(index=2, start=20, length=0),)},
        {"rounds": (RoundPlan(index=2, start=20, length=10, node_steps=((A, 0),)),)},
    ],
)
def test_what_cannot_be_true_is_not_gone_on_under(start: Start, told: dict[str, Any]) -> None:
    """It would end the coordinator, then or at its next start. The anchors may be what they should be all the same."""
    three(start)
    start.tell(A, 1, *NEW, **told)
    assert "what it tells beside its anchors is not believed" in start.machine.alarms[f"{ALARM} of a"]
    start.bring(A, 1, NEW[0])
    record = adopted(start.bring(C, 3, NEW[1]))
    assert [anchor.node for anchor in record.anchors] == [A, C] and not start.machine.alarms
    assert all(terms.codec_up == terms.codec_down == "q4" for terms in record.windows)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"steps": 0}, (4, 4)),
        ({"method": "none"}, (4, 4)),
        ({"batch_sequences": 9}, (4, 4)),
        ({"codec_up": "q9"}, (4, 4)),
        ({"outer_lr": 0.1}, (4,)),
    ],
)
def test_terms_that_a_run_cannot_have_are_not_taken_over(
    start: Start, spec: RunSpec, changes: dict[str, Any], windows: tuple[int, ...]
) -> None:
    three(start)
    terms = spec.terms.replace(**changes)
    revision = Revision(number=1, terms=terms, windows=windows, round=4)
    start.tell(A, 1, *NEW, revisions=(revision,))
    assert f"{ALARM} of a" in start.machine.alarms
    start.bring(A, 1, NEW[0])
    assert adopted(start.bring(C, 3, NEW[1])).revisions == ()


@pytest.fixture
def careful(spec: RunSpec) -> Start:
    """As without --adopt-newest."""
    return Start(spec, newest=False)


def test_a_version_that_one_node_alone_knows_does_not_become_the_model(careful: Start) -> None:
    """Its bytes have the digest that its own node names: nobody else's word stands for them."""
    careful.both()
    assert asked(careful.at(LISTEN_S)) == []
    assert "you to decide: node a alone knows version 2 of fragment 0" in careful.waits
    assert "--adopt-newest" in careful.waits and "farloop keys revoke a" in careful.waits
    assert asked(careful.at(LISTEN_S + PATIENCE_S)) == [] and careful.ledger.versions == [0, 0]


def test_nor_where_its_node_follows_a_history_of_its_own(careful: Start) -> None:
    careful.greet(A, 1, *NEW, history=9)
    careful.tell(A, 1, *NEW)
    careful.greet(B, 2, *OLD)
    careful.tell(B, 2, *OLD)
    assert asked(careful.at(LISTEN_S)) == [] and "node a alone knows" in careful.waits


def test_two_that_hold_it_or_one_that_was_told_of_its_commit_stand_for_a_version(careful: Start) -> None:
    careful.greet(A, 1, *NEW)
    careful.tell(A, 1, *NEW)
    careful.greet(B, 2, *OLD, announced=NEW)
    careful.tell(B, 2, *OLD)
    assert asked(careful.at(LISTEN_S)) == [(A, 0)]
    careful.bring(A, 1, NEW[0])
    assert adopted(careful.bring(A, 1, NEW[1])).missing == ()


def test_who_is_a_run_s_only_node_is_believed(spec: RunSpec) -> None:
    careful = Start(spec, newest=False)
    del careful.ledger.started[B]
    careful.greet(A, 1, *NEW)
    careful.tell(A, 1, *NEW)
    assert asked(careful.at(LISTEN_S)) == [(A, 0)]


def test_who_answers_alone_in_a_run_of_two_is_not(careful: Start) -> None:
    careful.greet(A, 1, *NEW)
    careful.tell(A, 1, *NEW)
    assert asked(careful.at(PATIENCE_S)) == [] and "node a alone knows" in careful.waits
