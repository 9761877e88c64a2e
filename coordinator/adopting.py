"""Going on from what nodes hold: a coordinator over an old copy of its state learns what came after it. Pure.

    listen   every node that greets says what it holds: it is let in for that alone, and told nothing
    fetch    the newest version of each fragment that somebody holds comes up, is held against the digest that was
             named, and is made durable
    adopt    one record says what is taken from whom; the nodes dial again, and the run goes on from there

Nothing is told to anybody before that record is durable: until then the copy is what it was, and another start begins
with what has come. The record begins a history (protocol, Adoption).
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Final

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator import events as ev
from farloop.coordinator import records as rec
from farloop.coordinator.admission import refusal
from farloop.coordinator.decisions import Decisions
from farloop.coordinator.history import epoch_met, standing_of, unbelievable
from farloop.coordinator.ledger import Ledger
from farloop.coordinator.roster import MOST_MEMBERS
from farloop.coordinator.survey import (
    MOST,
    RECALLED_SINCE,
    Claim,
    Survey,
    Unknown,
    revisions_since,
    rounds_since,
    survey,
    terms_after,
)
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

ALARM: Final = "adoption"
"""The alarm that says what the run waits for, until it goes on."""

LISTEN_S: Final = 10.0
"""Longer than the longest pause of a node that dials again: also those come that the copy has never met."""

PATIENCE_S: Final = 300.0
"""How long a node that the copy knows is waited for, and one that has gone away again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """That the run is to go on from what nodes hold."""

    untrue: Callable[[msg.Held, Ledger], str | None]
    """Says what cannot be true in an answer (`hearsay.py`, which knows codecs, as this room does not)."""
    patience_s: float = PATIENCE_S
    fetched: Mapping[int, rec.AnchorFetched] = field(default_factory=dict)
    """What an earlier start brought home, by fragment."""
    newest: bool = False
    """A version that one node alone knows is taken, too: an operator says that this node can be believed."""


class Adoption:
    """Of one start of the coordinator, before it goes on."""

    def __init__(
        self, ledger: Ledger, decisions: Decisions, alarms: MutableMapping[str, str], adopt: Adopt, now: float
    ) -> None:
        """`ledger` is the copy's; `alarms` is told what is waited for."""
        self._ledger, self._decisions, self._alarms = ledger, decisions, alarms
        self._patience_s, self._fetched, self._untrue = adopt.patience_s, dict(adopt.fetched), adopt.untrue
        self._newest = adopt.newest
        self.began_at = now
        """Later by all the time in which this process stood still."""
        self._claims: dict[NodeId, Claim] = {}
        self._left: set[NodeId] = set()
        self.wakes_at: float | None = now + LISTEN_S
        """When `look` may find something else by the passing of time alone."""
        self._wait("nodes, to say what they hold")

    @property
    def waits(self) -> str:
        """What the run waits for."""
        return self._alarms[ALARM]

    def handle(self, event: ev.Event | None, now: float) -> bool:
        """Take an event, or None where time has passed. Whether all is done, and the run goes on."""
        match event:
            case ev.Greeted(session=session, node=node, hello=hello):
                if refused := refusal(hello, node, self._ledger, None) or unbelievable(hello, self._ledger):
                    self._decisions.do(ev.Refuse(session=session, refused=refused))
                else:
                    self._greeted(event, now)
            case ev.Heard(node=node, session=session, message=message):
                self._heard(node, session, message)
            case ev.Parted(node=node, session=session):
                self._parted(node, session, now)
            case ev.AnchorStored(record=record):
                self._stored(record)
            case ev.AnchorFailed():
                self._failed(event)
            case _:
                pass  # nothing else is under way
        return self._look(now)

    def clock_jumped(self, seconds: float) -> None:
        """This process stood still, and nobody could come (protocol C)."""
        self.began_at += seconds
        for claim in self._claims.values():
            claim.heard_at += seconds
            if claim.offers_until is not None:
                claim.offers_until += seconds

    # --- what nodes say

    def _greeted(self, event: ev.Greeted, now: float) -> None:
        """A node that the run would let in says what it holds. Who can be asked for it is let in, for that alone."""
        hello, before = event.hello, self._claims.get(event.node)
        if before is not None and before.session is not None:
            self._decisions.do(ev.Hang(session=before.session, reason=Reason.SUPERSEDED))
        claim = self._claims[event.node] = Claim(hello=hello, heard_at=now)
        self._left.discard(event.node)
        self._forget_one(event.node)
        if before is not None and before.hello.incarnation == hello.incarnation:
            claim.spoiled, claim.failed = before.spoiled, before.failed
        if epoch_met(hello) > max(self._ledger.epoch, self._ledger.epoch_seen):
            self._decisions.record(rec.EpochSeen(epoch=epoch_met(hello)))
        if claim.can_be_asked:
            claim.session = event.session
            self._decisions.do(ev.Accept(session=event.session, node=event.node, welcome=self._welcome(hello)))
        else:
            refused = msg.Refused(reason=Reason.HOLDING, detail=self.waits, retriable=True)
            self._decisions.do(ev.Refuse(session=event.session, refused=refused))

    def _forget_one(self, newest: NodeId) -> None:
        """Names cost nothing where no keys are asked for."""
        claims = self._claims
        gone = [n for n, c in claims.items() if c.session is None and n != newest and n not in self._ledger.started]
        if len(claims) > MOST_MEMBERS and gone:
            oldest = min(gone, key=lambda node: claims[node].heard_at)
            del claims[oldest]
            self._left.discard(oldest)

    def _heard(self, node: NodeId, session: int, message: msg.Message) -> None:
        """What a node says after that. All but its answer, and the anchor that it was asked for, comes too early."""
        claim = self._claims.get(node)
        if claim is None or claim.session != session:
            return
        match message:
            case msg.Held():
                claim.held = self._believed(node, message)
            case msg.Offer():
                for ref in claim.anchors:
                    if ref.fragment == claim.asked and message.blob == _blob_of(ref, node):  # one at a time
                        claim.offers_until = None
                        self._decisions.do(ev.ReceiveAnchor(offer=message, anchor=ref))
            case msg.Leave():
                claim.session, claim.held, claim.asked = None, None, None
                self._left.add(node)

    def _believed(self, node: NodeId, held: msg.Held) -> msg.Held:
        """What counts of an answer. Where something cannot be true, its anchors alone: their bytes will show."""
        count, about = len(self._ledger.versions), f"{ALARM} of {node}"
        refs = tuple(ref for ref in held.anchors if 0 <= ref.fragment < count and 0 <= ref.version < MOST)
        wrong = self._untrue(held, self._ledger)
        self._alarms.pop(about, None)
        if wrong is None:
            return replace(held, anchors=refs)
        self._alarms[about] = f"what it tells beside its anchors is not believed: {wrong}"
        return msg.Held(anchors=refs, windows=(), final=(), rounds=(), revisions=())

    def _parted(self, node: NodeId, session: int, now: float) -> None:
        """Its session ended."""
        claim = self._claims.get(node)
        if claim is not None and claim.session == session:
            claim.failed += claim.asked is not None
            claim.session, claim.held, claim.asked, claim.heard_at = None, None, None, now

    def _stored(self, record: rec.AnchorFetched) -> None:
        """An anchor is here, has the digest that was named, and is durable."""
        self._fetched[record.anchor.fragment] = record
        if (claim := self._claims.get(record.node)) and claim.asked == record.anchor.fragment:
            claim.asked = None

    def _failed(self, event: ev.AnchorFailed) -> None:
        """It is not what was named, or stopped coming."""
        claim = self._claims.get(event.node)
        if claim is not None:
            claim.asked = None
            claim.failed += 1
            if event.spoiled:
                claim.spoiled.add((event.anchor.fragment, event.anchor.version))

    # --- what follows

    def _look(self, now: float) -> bool:
        """Do what can be done now. Whether that was all, and the run goes on."""
        done = self._go_on(now)
        self.wakes_at = min((at for at in self._moments() if at > now), default=None)
        return done

    def _go_on(self, now: float) -> bool:
        for claim in self._claims.values():
            if claim.asked is not None and claim.offers_until is not None and now >= claim.offers_until:
                claim.asked, claim.failed = None, claim.failed + 1
        present = {node: claim for node, claim in self._claims.items() if self._counts(node, claim, now)}
        gone = {node: claim for node, claim in self._claims.items() if node not in present}
        found = survey(present, self._ledger, gone=gone)
        expected = {} if now >= self.began_at + self._patience_s else self._ledger.started
        missing = sorted(expected.keys() - present.keys() - self._left)
        missing += sorted(node for node, c in found.claims.items() if c.can_be_asked and c.session is None)
        if found.fault:
            return self._wait(f"you to decide: {found.fault}")
        if missing:
            why = "may hold newer versions than all others"
            return self._wait(f"{_named(missing)}, which {why}; {self._patience_s:g} s at most")
        silent = [node for node, c in found.claims.items() if c.session is not None and c.held is None]
        if silent or now < self.began_at + LISTEN_S:
            return self._wait(f"{_named(sorted(silent)) if silent else 'nodes'}, to say what they hold")
        if not self._newest and (alone := found.known_to_one(self._ledger)):
            who = ", ".join(found.witnesses(alone))
            return self._wait(
                f"you to decide: node {who} alone knows version {alone.version} of fragment {alone.fragment}, and "
                "nobody confirms its digest; start with --adopt-from-nodes --adopt-newest if you believe that node, "
                f"or shut it out with farloop keys revoke {who} and start again"
            )
        lacking = {f: ref for f, ref in found.wanted.items() if not self._has(ref)}
        if lacking:
            return self._fetch(lacking, found, now)
        return self._adopt(found)

    def _moments(self) -> Iterator[float]:
        """Of all that is waited for."""
        yield from (self.began_at + LISTEN_S, self.began_at + self._patience_s)
        for claim in self._claims.values():
            yield claim.heard_at + self._patience_s
            if claim.asked is not None and claim.offers_until is not None:
                yield claim.offers_until

    def _counts(self, node: NodeId, claim: Claim, now: float) -> bool:
        """Whether it has said what it holds, or may yet: one whose training hangs never does, though its link lives."""
        return claim.answers or (node not in self._left and now < claim.heard_at + self._patience_s)

    def _has(self, ref: msg.AnchorRef) -> bool:
        return ref.fragment in self._fetched and self._fetched[ref.fragment].anchor == ref

    def _fetch(self, lacking: Mapping[int, msg.AnchorRef], found: Survey, now: float) -> bool:
        """One fragment at a time from each node."""
        mute = []
        for fragment, ref in lacking.items():
            holders = [node for node in found.holders(ref) if found.claims[node].answers]
            if not holders:
                mute.append(ref)
            elif not any(found.claims[node].asked == fragment for node in holders):
                free = next((node for node in holders if found.claims[node].asked is None), None)
                if free is not None:
                    found.claims[free].asked, found.claims[free].offers_until = fragment, now + self._patience_s
                    self._decisions.tell(free, msg.Recall(fragment=fragment))
        if mute:
            return self._wait(
                f"somebody who can bring version {mute[0].version} of fragment {mute[0].fragment}: "
                f"{_named(found.holders(mute[0]))} cannot be asked, speaking a protocol below {RECALLED_SINCE}"
            )
        done = len(found.wanted) - len(lacking)
        return self._wait(f"the anchors to come: {done} of {len(found.wanted)} fragments are here")

    def _adopt(self, found: Survey) -> bool:
        ledger, claims = self._ledger, self._claims
        sessions = [node for node, claim in claims.items() if claim.session is not None]
        if found.wanted or any(standing_of(claim.hello, ledger).is_in_doubt for claim in claims.values()):
            stored = list(ledger.inputs)
            try:
                self._decisions.record(self._record(found))
            except Unknown as unknown:
                return self._wait(f"you to decide: {unknown}")
            for blob in stored:  # deltas of what came next in the copy: their nodes begin anew
                self._decisions.do(ev.Forget(blob=blob))
        for node in sessions:
            detail = "what nodes hold is known now: the run goes on"
            self._decisions.tell(node, msg.Leave(reason=Reason.HOLDING, detail=detail))
        for what in [what for what in self._alarms if what.startswith(ALARM)]:
            del self._alarms[what]
        return True

    def _record(self, found: Survey) -> rec.Adopted:
        """Raises Unknown."""
        ledger = self._ledger
        held = [claim.held for claim in found.claims.values() if claim.held is not None]
        after = [terms_after(ref, found.told(ref)) for ref in found.wanted.values()]
        windows = tuple(terms for terms in after if terms is not None)
        revisions = revisions_since(ledger, held)
        owners = {(node, c.hello.incarnation): c.held for node, c in found.claims.items() if c.held is not None}
        unused = {
            owner: [lease for lease in one.unused if 0 <= lease.start < MOST and 0 < lease.count < MOST]
            for owner, one in owners.items()
        }
        granted_to = min(MOST, max((one.granted_to for one in held), default=0))
        frontier, returned, uncertain = ledger.leases.as_told(unused, granted_to)
        return rec.Adopted(
            epoch=max(ledger.epoch, ledger.epoch_seen) + 1,
            anchors=tuple(
                rec.AdoptedAnchor(
                    fragment=fragment,
                    version=ref.version,
                    digest=ref.digest,
                    node=self._fetched[fragment].node,
                    before=ledger.versions[fragment],
                )
                for fragment, ref in found.wanted.items()
            ),
            windows=windows,
            rounds=rounds_since(ledger, held, revisions, windows),
            revisions=revisions,
            frontier=frontier,
            returned=returned,
            uncertain=uncertain,
            lost=found.lost,
            missing=tuple(sorted(ledger.started.keys() - self._claims.keys() - self._left)),
        )

    def _welcome(self, hello: msg.Hello) -> msg.Welcome:
        ledger = self._ledger
        return msg.Welcome(
            protocol=min(hello.protocol_max, msg.PROTOCOL_VERSIONS[1]),
            epoch=ledger.epoch,
            spec=ledger.spec,
            lane_token=b"",  # the shell's to draw
            versions=tuple(ledger.versions),
            windows=(),
            rounds=(),
            history=hello.history,  # it changes nothing of what the node follows
            recalls=True,
        )

    def _wait(self, what: str) -> bool:
        self._alarms[ALARM] = f"the run is held until it goes on from what the nodes hold; it waits for {what}"
        return False


def _blob_of(ref: msg.AnchorRef, node: NodeId) -> BlobId:
    """By which a node sends an anchor: there is but one, or it could have any number of them on their way."""
    return BlobId(kind=BlobKind.SNAPSHOT, fragment=ref.fragment, version=ref.version, node=node)


def _named(nodes: list[NodeId], most: int = 4) -> str:
    more = f" and {len(nodes) - most} others" if len(nodes) > most else ""
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(nodes[:most]) + more
