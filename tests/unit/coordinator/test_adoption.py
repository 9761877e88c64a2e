"""A coordinator that goes on from what nodes hold: which it waits for, what it asks for and records (protocol S)."""

import dataclasses
from typing import Any

import pytest
from coordinator_run import A, B, C, Commands, Run, accepted, recorded, refused, snapshots, told
from plain_runs import plain_hello

from farloop.algo import schedule
from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import BlobId, BlobKind, NodeId, Revision, RoundPlan, RunSpec, WindowTerms
from farloop.coordinator.change_terms import untrue
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.adoption import (
    ALARM,
    LISTEN_S,
    AdoptionSettings,
    NodeClaim,
    Unknown,
    revisions_since,
    rounds_since,
    survey,
    terms_after,
)
from farloop.coordinator.decide.ledger import Ledger
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

PATIENCE_S = 60.0
LATER_S = LISTEN_S + PATIENCE_S
EMPTY = msg.Held(anchors=(), windows=(), final=(), rounds=(), revisions=())


def ref(fragment: int, version: int, digest: int | None = None) -> msg.AnchorRef:
    """Version 0 is that of the spec."""
    usual = 100 + fragment if version == 0 else 1000 * fragment + version
    return msg.AnchorRef(fragment=fragment, version=version, digest=usual if digest is None else digest)


def window(fragment: int, number: int, round_index: int, **changes: Any) -> WindowTerms:
    plain = {"tau": 2, "mix": 0.5, "codec_up": "q4", "codec_down": "q4"}
    return WindowTerms(**{"fragment": fragment, "window": number, "round": round_index, **plain, **changes})  # type: ignore[arg-type]


OLD = (ref(0, 0), ref(1, 0))
NEW = (ref(0, 2), ref(1, 1))
WINDOW = window(0, 3, 2)
FORK = ref(0, 2, digest=9)


class Start(Run):
    """A start over a copy in which a and b have just begun."""

    def __init__(self, spec: RunSpec, fetched: dict[int, rec.AnchorFetched] | None = None, newest: bool = True) -> None:
        """`newest`: what one node alone knows is taken, too."""
        self.plans = schedule.first_rounds(spec.terms, count=5)
        adopt = AdoptionSettings(untrue=untrue, patience_s=PATIENCE_S, fetched=fetched or {}, newest=newest)
        super().__init__(spec, machine={"adopt": adopt})
        started = (rec.NodeStarted(node=node, incarnation=1, round=0) for node in (A, B))
        assert self.begin(*started) == []

    @property
    def waits(self) -> str:
        return self.alarms[ALARM]

    def at(self, seconds: float) -> Commands:
        """Since the start."""
        self.now = 100.0 + seconds
        commands = self.obey(self.machine.handle_timer(self.now))
        self.machine.check()
        return commands

    def meets(
        self, node: NodeId, *anchors: msg.AnchorRef, held: dict[str, Any] | None = None, **hello: Any
    ) -> Commands:
        """A node that holds these greets, and says what it holds: `held` changes that."""
        self.dials(node, *anchors, **hello)
        return self.holds(node, *anchors, **(held or {}))

    def dials(self, node: NodeId, *anchors: msg.AnchorRef, **changes: Any) -> Commands:
        return self.greet(node, **{"anchors": anchors, "epoch_seen": 3, "round": 1, **changes})

    def holds(self, node: NodeId, *anchors: msg.AnchorRef, **changes: Any) -> Commands:
        windows = tuple(window(anchor.fragment, anchor.version + 1, 2) for anchor in anchors)
        held = dataclasses.replace(EMPTY, anchors=anchors, windows=windows, rounds=self.plans[:3])
        return self.say(node, dataclasses.replace(held, **changes))

    def bring(self, node: NodeId, *anchors: msg.AnchorRef) -> Commands:
        """From the node's offer to the disk."""
        commands: Commands = []
        for anchor in anchors:
            offer = anchor_offer(node, anchor)
            assert self.say(node, offer) == [ev.ReceiveAnchor(offer=offer, anchor=anchor)]
            record = rec.AnchorFetched(anchor=anchor, node=node, blob_digest=1)
            commands = self.handle(ev.AnchorStored(record=record))
        return commands


def anchor_offer(holder: NodeId, anchor: msg.AnchorRef, **changes: Any) -> msg.Offer:
    blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=anchor.fragment, version=anchor.version, node=holder)
    return msg.Offer(blob=dataclasses.replace(blob, **changes), size=10, digest=1)


@pytest.fixture
def start(spec: RunSpec) -> Start:
    return Start(spec)


@pytest.fixture
def both(start: Start) -> Start:
    """a holds all that is new, b nothing of it."""
    start.meets(A, *NEW)
    start.meets(B, *OLD)
    return start


@pytest.fixture
def three(both: Start) -> Start:
    """So does c, and both were asked."""
    both.meets(C, *NEW)
    assert asked(both.at(LISTEN_S)) == [(A, 0), (C, 1)]
    return both


@pytest.fixture
def careful(spec: RunSpec) -> Start:
    """As without --adopt-newest."""
    return Start(spec, newest=False)


def asked(commands: Commands) -> list[tuple[NodeId, int]]:
    """Who is to bring which fragment."""
    tells = [command for command in commands if isinstance(command, ev.Tell)]
    return [(tell.node, tell.message.fragment) for tell in tells if isinstance(tell.message, msg.Recall)]


def adopted(commands: Commands) -> rec.Adopted:
    (record,) = [record for record in recorded(commands) if isinstance(record, rec.Adopted)]
    return record


# --- which nodes it waits for


def test_who_can_be_asked_is_let_in_for_that_alone(start: Start) -> None:
    commands = start.dials(A, *NEW, history=0)
    assert recorded(commands) == [rec.EpochSeen(epoch=3)], "for a start that winds the run back instead"
    assert accepted(commands).recalls and accepted(commands).protocol == 1
    assert start.machine.members[A].session is None and start.machine.holding is not None
    for changes, why in (({"anchors": ()}, (Reason.HOLDING, True)), ({"history": 1 << 40}, (Reason.MALFORMED, False))):
        said = refused(start.dials(B, *NEW, **changes))
        assert (said.reason, said.retriable) == why


def test_all_that_the_copy_knows_are_waited_for_and_named(start: Start) -> None:
    start.meets(A, *NEW)
    assert asked(start.at(LISTEN_S)) == [] and "node b, which may hold newer versions" in start.waits
    assert start.machine.next_timer() == 100.0 + PATIENCE_S
    assert asked(start.at(PATIENCE_S)) == [(A, 0)], "one at a time"
    assert adopted(start.bring(A, *NEW)).missing == (B,)


def test_nodes_that_the_copy_has_never_met_have_the_time_to_dial_again(both: Start) -> None:
    assert asked(both.at(LISTEN_S - 0.1)) == []
    both.meets(C, ref(0, 5))
    assert set(asked(both.at(LISTEN_S))) == {(C, 0), (A, 1)}


def test_a_node_whose_training_hangs_is_waited_for_no_longer_than_one_that_is_away(start: Start) -> None:
    """Its session lives, and the thread that would answer does not."""
    start.meets(A, *NEW)
    start.dials(B, *NEW)
    assert asked(start.at(LISTEN_S)) == [] and "node b, to say what they hold" in start.waits
    assert start.machine.next_timer() == 100.0 + PATIENCE_S
    assert asked(start.at(PATIENCE_S)) == [(A, 0)]


def test_names_without_end_are_not_remembered(both: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farloop.coordinator.decide.adoption.MOST_MEMBERS", 4)
    both.meets(NodeId("old"), ref(0, 9))
    both.part(NodeId("old"))
    both.at(LISTEN_S)
    assert "node old, which may hold newer versions" in both.waits
    for number in range(2):
        both.dials(NodeId(f"name-{number}"))
    assert "node old" not in both.waits and "the anchors to come" in both.waits


def test_a_process_that_stood_still_gives_nodes_their_time_and_one_that_stops_asks_for_nothing(
    spec: RunSpec, both: Start
) -> None:
    start = Start(spec)
    start.machine.clock_jumped(1000.0)
    start.now += 1000.0
    start.dials(A, *NEW)
    assert start.at(1000.0 + LISTEN_S) == [] and "node b" in start.waits
    both.machine.stop()
    assert both.at(LISTEN_S) == [] and both.machine.next_timer() is None


# --- what it asks for


def test_what_is_adopted_is_recorded_once_all_of_it_is_here(both: Start) -> None:
    assert asked(both.at(LISTEN_S)) == [(A, 0)]
    assert asked(both.bring(A, NEW[0])) == [(A, 1)] and "1 of 2 fragments" in both.waits
    commands = both.bring(A, NEW[1])
    assert adopted(commands) == rec.Adopted(
        epoch=4,
        anchors=tuple(
            rec.AdoptedAnchor(fragment=r.fragment, version=r.version, digest=r.digest, node=A, before=0) for r in NEW
        ),
        windows=tuple(both.ledger.windows[f] for f in range(2)),
        rounds=both.plans[2:3], revisions=(), frontier=0, returned=(), uncertain=0,
    )  # fmt: skip
    assert all(isinstance(told(commands, node)[0], msg.Leave) for node in (A, B))
    assert both.ledger.versions == [2, 1] and (both.ledger.epoch, both.ledger.history) == (4, 4)
    assert both.machine.holding is None and not both.alarms
    assert {window.terms.window for window in both.machine.windows.values()} == {3, 2}
    assert both.machine.members[A].gone_at == both.now + 10.0, "no node could come before"
    both.part(A, Reason.HOLDING)
    for node in (A, B):  # they dial again, and begin anew from snapshots
        commands = both.dials(node, *NEW)
        welcome = accepted(commands)
        assert (welcome.history, welcome.versions, welcome.recalls) == (4, (2, 1), False)
        assert snapshots(commands) == [0, 1]


def test_what_an_earlier_start_brought_home_is_not_asked_for_again(spec: RunSpec) -> None:
    start = Start(spec, {0: rec.AnchorFetched(anchor=NEW[0], node=B, blob_digest=1)})
    start.meets(A, *NEW)
    start.meets(B, *OLD)
    assert asked(start.at(LISTEN_S)) == [(A, 1)]
    assert [anchor.node for anchor in adopted(start.bring(A, NEW[1])).anchors] == [B, A]


def test_spoiled_bytes_are_asked_of_another_node_or_the_version_is_lost(both: Start) -> None:
    both.at(LISTEN_S)
    both.bring(A, NEW[0])
    both.handle(ev.AnchorFailed(node=A, anchor=NEW[1], spoiled=False))
    assert "1 of 2" in both.waits, "it only stopped coming: once more"
    record = adopted(both.handle(ev.AnchorFailed(node=A, anchor=NEW[1], spoiled=True)))
    assert [anchor.fragment for anchor in record.anchors] == [0] and record.lost == (NEW[1],)


def test_who_goes_away_with_the_newest_is_waited_for_as_long_as_any(both: Start) -> None:
    both.at(LISTEN_S)
    both.part(A)
    assert "node a" in both.waits and both.machine.next_timer() is not None
    assert asked(both.meets(A, *NEW)) == [(A, 0)]
    both.part(A)
    record = adopted(both.at(LATER_S))
    assert record.anchors == () and record.lost == NEW, "b alone is here, and has nothing that the copy has not"


def test_a_node_that_leaves_is_not_waited_for(both: Start) -> None:
    both.leave(B)
    both.part(B, Reason.DRAINED)
    assert asked(both.at(LISTEN_S)) == [(A, 0)]


def test_where_no_node_knows_more_the_run_just_goes_on(start: Start) -> None:
    for node in (A, B):
        start.meets(node, *OLD, epoch_seen=1)
    assert not [record for record in recorded(start.at(LISTEN_S)) if isinstance(record, rec.Adopted)]
    assert start.machine.holding is None and start.ledger.history == 0


def test_without_the_terms_that_follow_nothing_is_adopted(start: Start) -> None:
    start.meets(A, *NEW, held={"windows": ()})
    start.meets(B, *OLD)
    start.at(LISTEN_S)
    start.bring(A, *NEW)
    assert "no node tells under which terms fragment 0 goes on after version 2" in start.waits
    assert start.ledger.versions == [0, 0]


def test_an_anchor_that_was_not_asked_for_or_of_another_name_is_not_taken(both: Start) -> None:
    """Room for all of it is made as soon as it is let in: it has one name, so that no node has many on their way."""
    both.at(LISTEN_S)
    for changes in (
        {"fragment": 1, "version": 1}, {"version": 9}, {"node": B}, {"incarnation": 1}, {"seq": 1},
    ):  # fmt: skip
        assert both.say(A, anchor_offer(A, NEW[0], **changes)) == []


def test_a_holder_that_offers_nothing_is_not_asked_before_another(three: Start) -> None:
    three.bring(C, NEW[1])
    assert three.machine.next_timer() == 100.0 + PATIENCE_S
    three.at(PATIENCE_S)
    assert asked(three.at(LATER_S)) == [(C, 0)]
    assert adopted(three.bring(C, NEW[0])).anchors[0].node == C


@pytest.mark.parametrize("how", ["it stands still", "its session ends"])
def test_a_holder_whose_anchor_stops_coming_is_not_asked_before_another(three: Start, how: str) -> None:
    three.bring(C, NEW[1])
    if how == "it stands still":
        commands = three.handle(ev.AnchorFailed(node=A, anchor=NEW[0], spoiled=False))
    else:
        three.part(A)
        commands = three.meets(A, *NEW)
    assert asked(commands) == [(C, 0)]


# --- what it believes


def test_samples_beyond_belief_are_not_believed(start: Start) -> None:
    start.meets(A, *NEW, held={"granted_to": (1 << 64) - 1})
    start.meets(B, *OLD)
    start.at(LISTEN_S)
    record = adopted(start.bring(A, *NEW))
    rec.encode(record)
    assert record.frontier <= 1 << 60 and record.rounds == (RoundPlan(index=2, start=20, length=10),)


def test_a_history_that_begins_is_named_above_all_that_nodes_follow(start: Start) -> None:
    """A greeting tells of one as soon as the Welcome is here, and of its epoch once the node follows."""
    for node in (A, B):
        start.meets(node, *NEW, epoch_seen=3, history=7)
    start.at(LISTEN_S)
    start.bring(A, NEW[0])
    assert adopted(start.bring(B, NEW[1])).epoch == 8


def revision(number: int, terms: Any, windows: tuple[int, ...] = (4, 4), round_index: int = 4) -> Revision:
    return Revision(number=number, terms=terms, windows=windows, round=round_index)


@pytest.mark.parametrize(
    "held",
    [
        {"windows": (dataclasses.replace(WINDOW, codec_up="q9"),)},
        {"windows": (dataclasses.replace(WINDOW, codec_down="topk"),)},
        {"windows": (dataclasses.replace(WINDOW, codec_up_of=((A, "q4:no=1"),)),)},
        {"windows": (dataclasses.replace(WINDOW, fragment=7),)},
        {"windows": (dataclasses.replace(WINDOW, tau=-1),)},
        {"windows": (dataclasses.replace(WINDOW, mix=float("nan")),)},
        {"rounds": (RoundPlan(index=2, start=20, length=0),)},
        {"rounds": (RoundPlan(index=2, start=20, length=10, node_steps=((A, 0),)),)},
        {"terms": {"steps": 0}},
        {"terms": {"method": "none"}},
        {"terms": {"batch_sequences": 9}},
        {"terms": {"codec_up": "q9"}},
        {"terms": {"outer_lr": 0.1}, "of": (4,)},
    ],
)
def test_what_cannot_be_true_is_not_gone_on_under(three: Start, held: dict[str, Any]) -> None:
    """It would end the coordinator, then or at its next start. The anchors may be what they should be all the same."""
    if changes := held.pop("terms", None):
        terms = three.spec.terms.replace(**changes)
        held = {"revisions": (revision(1, terms, held.pop("of", (4, 4))),)}
    three.holds(A, *NEW, **held)
    assert "what it reports besides its anchors is rejected" in three.alarms[f"{ALARM} of a"]
    three.bring(A, NEW[0])
    record = adopted(three.bring(C, NEW[1]))
    assert [anchor.node for anchor in record.anchors] == [A, C] and not three.alarms and record.revisions == ()
    assert all(terms.codec_up == terms.codec_down == "q4" for terms in record.windows)


def test_a_version_that_one_node_alone_knows_does_not_become_the_model(careful: Start) -> None:
    """Its bytes have the digest that its own node names: no other node's word stands for them."""
    careful.meets(A, *NEW)
    assert asked(careful.at(PATIENCE_S)) == [] and "node a alone knows" in careful.waits, "b does not come"
    careful.meets(B, *OLD)
    assert asked(careful.at(LISTEN_S)) == []
    assert "you to decide: node a alone knows version 2 of fragment 0" in careful.waits
    assert "--adopt-newest" in careful.waits and "farloop keys revoke a" in careful.waits
    assert asked(careful.at(LATER_S)) == [] and careful.ledger.versions == [0, 0]


def test_nor_where_its_node_follows_a_history_of_its_own(careful: Start) -> None:
    careful.meets(A, *NEW, history=9)
    careful.meets(B, *OLD)
    assert asked(careful.at(LISTEN_S)) == [] and "node a alone knows" in careful.waits


def test_one_that_was_told_of_its_commit_stands_for_a_version_too(careful: Start) -> None:
    careful.meets(A, *NEW)
    careful.meets(B, *OLD, announced=NEW)
    assert asked(careful.at(LISTEN_S)) == [(A, 0)]
    assert adopted(careful.bring(A, *NEW)).missing == ()


def test_who_is_a_run_s_only_node_is_believed(careful: Start) -> None:
    del careful.ledger.started[B]
    careful.meets(A, *NEW)
    assert asked(careful.at(LISTEN_S)) == [(A, 0)]


# --- what nodes hold, against each other and against the copy


def claim(*anchors: msg.AnchorRef, told: tuple[msg.AnchorRef, ...] = (), history: int = 0, **more: Any) -> NodeClaim:
    hello = plain_hello(anchors=anchors, announced=told, history=history)
    return NodeClaim(hello=hello, heard_at=0.0, session=1, **{"held": None, **more})


@pytest.fixture
def ledger(spec: RunSpec) -> Ledger:
    """Both fragments at version 0."""
    return Ledger.begin(rec.RunStarted(spec=spec, epoch=1, rounds=opening_rounds(spec)))


SPOILED = claim(ref(0, 3), ref(1, 0))
SPOILED.spoiled.add((0, 3))
MERGED_ON_THE_WAY = dataclasses.replace(EMPTY, anchors=(ref(0, 4), ref(1, 0)))


@pytest.mark.parametrize(
    ("claims", "wanted", "lost"),
    [
        (  # the newest that any node holds; what no node holds is lost
            [claim(ref(0, 3), ref(1, 0)), claim(ref(0, 2), ref(1, 2), told=(ref(0, 4),))],
            [ref(0, 3), ref(1, 2)], (ref(0, 4),),
        ),
        ([claim(*OLD)], [], ()),
        ([SPOILED, claim(ref(0, 2), ref(1, 0))], [ref(0, 2)], (ref(0, 3),)),
        ([claim(ref(0, 3), ref(1, 0), held=MERGED_ON_THE_WAY)], [ref(0, 4)], ()),
        ([claim(ref(0, 9), ref(1, 9)), claim(ref(0, 1, 5), ref(1, 1, 6), history=4)], [ref(0, 1, 5), ref(1, 1, 6)], ()),
    ],
    ids=["the newest", "nothing new", "spoiled bytes", "said in the session", "the newest history"],
)  # fmt: skip
def test_what_is_wanted_of_what_nodes_hold(
    ledger: Ledger, claims: list[NodeClaim], wanted: list[msg.AnchorRef], lost: tuple[msg.AnchorRef, ...]
) -> None:
    found = survey(dict(zip((A, B), claims, strict=False)), ledger)
    assert (list(found.wanted.values()), found.lost, found.fault) == (wanted, lost, "")
    assert all(found.holders(anchor) for anchor in wanted) and not any(found.holders(anchor) for anchor in lost)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        (
            [claim(ref(0, 3)), claim(ref(0, 3, 7))],
            ("version 3 of fragment 0", "node a", "node b", "stop the nodes of the other"),
        ),
        ([claim(ref(0, 3)), claim(ref(0, 2), told=(ref(0, 3, 7),))], ("node a", "node b")),
        ([claim(ref(0, 0, 7))], ("for this state",)),
        ([claim(ref(0, 2, 5), history=4)], ("no node holds fragment 1 of history 4",)),
        ([claim(ref(0, 2, 5), ref(1, 0, 6), history=4)], ("fragment 1 is at version 0",)),
    ],
)
def test_what_only_a_person_can_decide_is_named(
    ledger: Ledger, claims: list[NodeClaim], words: tuple[str, ...]
) -> None:
    fault = survey(dict(zip((A, B), claims, strict=False)), ledger).fault
    assert all(word in fault for word in words), fault


def test_terms_come_from_whoever_knows_them() -> None:
    after = window(0, 4, 3)
    knows, ended = dataclasses.replace(EMPTY, windows=(after,)), dataclasses.replace(EMPTY, final=(0,))
    assert terms_after(ref(0, 3), [EMPTY, knows]) == after and terms_after(ref(0, 3), [ended]) is None
    with pytest.raises(Unknown, match="fragment 0 goes on after version 3"):
        terms_after(ref(0, 3), [EMPTY])


def test_rounds_that_everybody_forgot_follow_from_the_rule(ledger: Ledger, spec: RunSpec) -> None:
    """The copy knows rounds 0 and 1; a node knows round 3, and round 2 is what leads there."""
    second, third = schedule.first_rounds(spec.terms, count=4)[2:]
    after, dealt = window(0, 4, 3), dataclasses.replace(third, node_steps=((A, 5),))
    knows = dataclasses.replace(EMPTY, rounds=(dealt,))
    assert rounds_since(ledger, [knows], (), [after]) == (second, dealt)
    assert rounds_since(ledger, [knows], (), []) == (), "nothing stands there: they are fixed anew"
    elsewhere = dataclasses.replace(EMPTY, rounds=(RoundPlan(index=3, start=33, length=10),))
    endless = revision(1, spec.terms.replace(steps=1 << 59))
    for helds, revisions, last, words in (
        ([elsewhere], [], 3, "round 3"),
        ([knows], [], 1 << 10, "round 4"),
        ([], [endless], 1 << 50, "this state is at round 1"),
    ):
        with pytest.raises(Unknown, match=words):
            rounds_since(ledger, helds, revisions, [window(0, 4, last)])


def test_terms_that_were_changed_since_are_taken_over_in_order(ledger: Ledger, spec: RunSpec) -> None:
    first, second = (revision(n, spec.terms, (n, n), n) for n in (1, 2))
    begun = ledger.revisions.newest
    helds = [dataclasses.replace(EMPTY, revisions=revisions) for revisions in ((begun, second), (begun, first))]
    assert revisions_since(ledger, helds) == (first, second)
    other = dataclasses.replace(EMPTY, revisions=(dataclasses.replace(first, round=9),))
    with pytest.raises(Unknown, match="two revisions 1"):
        revisions_since(ledger, [*helds, other])


def test_codecs_of_other_nodes_than_the_terms_name_are_not_taken_over(ledger: Ledger, spec: RunSpec) -> None:
    """Which codec was chosen for which node would not be known at the commit."""
    after, theirs = window(0, 4, 1), window(0, 4, 1, codec_up_of=((A, "q8"),))
    own = revision(1, spec.terms.replace(codec_up_of=((A, "q8"),)), (4, 4), 2)
    assert rounds_since(ledger, [], [own], [theirs]) == rounds_since(ledger, [], (), [after]) == ()
    for revisions, terms in (([own], after), ([], theirs)):
        with pytest.raises(Unknown, match="window 4 of fragment 0"):
            rounds_since(ledger, [], revisions, [terms])
