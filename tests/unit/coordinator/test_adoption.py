"""A coordinator that goes on from what nodes hold: which it waits for, what it asks for and records (protocol S)."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B, C, Commands, Run, accepted, brief, recorded, snapshots, told
from plain_runs import plain_hello
from stories import StoryText, all_stories, check_story, literal

from farloop.algo import schedule
from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import BlobId, BlobKind, NodeId, Revision, RoundPlan, RunSpec, WindowTerms
from farloop.coordinator.change_terms import untrue
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.adoption import (
    ALARM,
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
EMPTY = msg.Held(anchors=(), windows=(), final=(), rounds=(), revisions=())


def ref(fragment: int, version: int, digest: int | None = None) -> msg.AnchorRef:
    """Version 0 is that of the spec."""
    usual = 100 + fragment if version == 0 else 1000 * fragment + version
    return msg.AnchorRef(fragment=fragment, version=version, digest=usual if digest is None else digest)


def refs(*words: str) -> tuple[msg.AnchorRef, ...]:
    """`0.2` is version 2 of fragment 0."""
    return tuple(ref(*map(int, word.split("."))) for word in words if word)


def window(fragment: int, number: int, round_index: int, **changes: Any) -> WindowTerms:
    plain = {"tau": 2, "mix": 0.5, "codec_up": "q4", "codec_down": "q4"}
    return WindowTerms(**{"fragment": fragment, "window": number, "round": round_index, **plain, **changes})  # type: ignore[arg-type]


NEW = (ref(0, 2), ref(1, 1))
WINDOW = window(0, 3, 2)


class Start(Run):
    """A start over a copy in which a and b have just begun. Its stories have words of their own:

    a dials 0.2 1.1 | a holds 0.2 1.1     greets with versions 2 and 1 of fragments 0 and 1; says in its session, too,
                                          that it holds them, and which terms follow
    a brings 0.2                          offers the anchor, which comes and is durable
    a loses 0.2 | a spoils 0.2            it stops coming; it is not what a said
    """

    def __init__(self, spec: RunSpec, *, known: str = "ab", fetched: str = "", newest: bool = True) -> None:
        """`known`: by the copy. `fetched`: which anchor b has brought. `newest`: what one node alone knows is taken."""
        self.plans = schedule.first_rounds(spec.terms, count=5)
        brought = [rec.AnchorFetched(anchor=anchor, node=B, blob_digest=1) for anchor in refs(fetched)]
        adopt = AdoptionSettings(
            untrue=untrue, patience_s=PATIENCE_S, fetched={one.anchor.fragment: one for one in brought}, newest=newest
        )
        super().__init__(spec, machine={"adopt": adopt})
        started = (rec.NodeStarted(node=NodeId(node), incarnation=1, round=0) for node in known)
        assert self.begin(*started) == []

    def gist(self, alarm: str) -> str:
        return alarm.partition("it waits for ")[2].partition(", which may hold newer")[0] or alarm

    def _happens(self, who: str, does: str = "", *words: str) -> Commands:
        if does not in ("dials", "holds", "brings", "loses", "spoils"):
            return super()._happens(who, does, *words)
        node, anchors = NodeId(who), refs(*(word for word in words if "=" not in word))
        given = dict(word.split("=", 1) for word in words if "=" in word)
        said = {key: refs(*value.split(",")) if "." in value else literal(value) for key, value in given.items()}
        match does:
            case "dials":
                return self.dials(node, *anchors, **said)
            case "holds":
                held = {"windows": ()} if said.pop("terms", "") == "unknown" else {}
                self.dials(node, *anchors, **said)
                return self.holds(node, *anchors, **held)
            case "brings":
                return self.bring(node, *anchors)
        return self.handle(ev.AnchorFailed(node=node, anchor=anchors[0], spoiled=does == "spoils"))

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
def both(spec: RunSpec) -> Start:
    """a holds all that is new, b nothing of it."""
    start = Start(spec)
    start.play("a holds 0.2 1.1; b holds 0.0 1.0")
    return start


def adopted(commands: Commands) -> rec.Adopted:
    (record,) = [record for record in recorded(commands) if isinstance(record, rec.Adopted)]
    return record


@all_stories(__file__, "adoption")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Start(spec, **story.settings).told, rewrite=rewrite)


def test_names_without_end_are_not_remembered(both: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farloop.coordinator.decide.adoption.MOST_MEMBERS", 4)
    both.play("old holds 0.9; old parts; 10s")
    assert "node old, which may hold newer versions" in both.alarms[ALARM]
    both.play("name-0 dials; name-1 dials")
    assert "node old" not in both.alarms[ALARM] and "the anchors to come" in both.alarms[ALARM]


def test_what_is_adopted_is_recorded_once_all_of_it_is_here(both: Start) -> None:
    both.play("10s; a brings 0.2")
    commands = both.play("a brings 1.1")
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


def test_an_anchor_that_was_not_asked_for_or_of_another_name_is_not_taken(both: Start) -> None:
    """Room for all of it is made as soon as it is let in: it has one name, so that no node has many on their way."""
    both.play("10s")
    for changes in (
        {"fragment": 1, "version": 1}, {"version": 9}, {"node": B}, {"incarnation": 1}, {"seq": 1},
    ):  # fmt: skip
        assert both.say(A, anchor_offer(A, NEW[0], **changes)) == []


def test_samples_beyond_belief_are_not_believed(both: Start) -> None:
    both.holds(A, *NEW, granted_to=(1 << 64) - 1)
    record = adopted(both.play("10s; a brings 0.2 1.1"))
    rec.encode(record)
    assert record.frontier <= 1 << 60 and record.rounds == (RoundPlan(index=2, start=20, length=10),)


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
def test_what_cannot_be_true_is_not_gone_on_under(both: Start, held: dict[str, Any]) -> None:
    """It would end the coordinator, then or at its next start. The anchors may be what they should be all the same."""
    assert brief(both.play("c holds 0.2 1.1; 10s")) == "a: recall 0; c: recall 1"
    if changes := held.pop("terms", None):
        terms = both.spec.terms.replace(**changes)
        held = {"revisions": (revision(1, terms, held.pop("of", (4, 4))),)}
    both.holds(A, *NEW, **held)
    assert "what it reports besides its anchors is rejected" in both.alarms[f"{ALARM} of a"]
    record = adopted(both.play("a brings 0.2; c brings 1.1"))
    assert [anchor.node for anchor in record.anchors] == [A, C] and not both.alarms and record.revisions == ()
    assert all(terms.codec_up == terms.codec_down == "q4" for terms in record.windows)


# --- what nodes hold, against each other and against the copy


def claim(*anchors: msg.AnchorRef, told: tuple[msg.AnchorRef, ...] = (), history: int = 0, **more: Any) -> NodeClaim:
    hello = plain_hello(anchors=anchors, announced=told, history=history)
    return NodeClaim(hello=hello, heard_at=0.0, session=1, **{"held": None, **more})


@pytest.fixture
def ledger(spec: RunSpec) -> Ledger:
    """Both fragments at version 0."""
    return Ledger.begin(rec.RunStarted(spec=spec, epoch=1, rounds=opening_rounds(spec)))


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
def test_what_a_person_must_decide_is_named(ledger: Ledger, claims: list[NodeClaim], words: tuple[str, ...]) -> None:
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
