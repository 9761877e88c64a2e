"""Continue from what nodes hold: the survey, the choice, the fetch."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from farloop.algo.revisions import Revisions
from farloop.algo.schedule import round_after
from farloop.algo.spec import BlobId, BlobKind, NodeId, Revision, RoundPlan, WindowTerms
from farloop.algo.stages import is_in
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.admission import refusal
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.rollback import epoch_met, standing_of, unbelievable
from farloop.coordinator.decide.roster import MOST_MEMBERS
from farloop.coordinator.decide.run_state import Decisions
from farloop.wire import messages as msg
from farloop.wire.messages import AnchorRef, Held, Hello
from farloop.wire.reasons import Reason

# --- Survey of what nodes hold (protocol, Adoption)
#
# It finds the newest available version of each fragment, and what prevents the run from continuing there: two digests
# of one version, or unknown terms or rounds.

MOST: Final = 1 << 60  # larger counts of samples, steps, rounds or versions are refused: no run has had so many
MOST_ROUNDS: Final = 1 << 20  # that a copy can be behind: they are found one by one


@dataclass(slots=True, kw_only=True)
class NodeClaim:
    hello: Hello
    heard_at: float  # when it greeted, or its session ended
    session: int | None = None
    held: Held | None = None  # its answer, in this session
    asked: int | None = None  # the fragment that it is to send, or is sending
    offers_until: float | None = None  # when another one is asked instead; None once the anchor is on its way
    failed: int = 0  # anchors that it did not bring
    spoiled: set[tuple[int, int]] = field(default_factory=set)
    """Fragments and versions whose bytes were not what it says."""

    @property
    def answers(self) -> bool:
        return self.session is not None and self.held is not None

    @property
    def anchors(self) -> list[AnchorRef]:
        """The anchors that it can send."""
        said = self.held.anchors if self.held is not None else self.hello.anchors
        return [ref for ref in said if (ref.fragment, ref.version) not in self.spoiled]


Claims = Mapping[NodeId, NodeClaim]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionSurvey:
    """What the nodes of the newest history hold."""

    claims: Claims  # claims of nodes that follow the newest history; older ones do not count
    wanted: Mapping[int, AnchorRef]  # by fragment, the newest version that a node holds and the state does not
    lost: tuple[AnchorRef, ...]  # newer versions that are known, and that no node can send intact
    fault: str = ""  # why nothing of it can be taken; empty where it can

    def holders(self, ref: AnchorRef) -> list[NodeId]:
        """Nodes that claim this very anchor; those that failed to send one come last."""
        found = [node for node, claim in self.claims.items() if ref in claim.anchors]
        return sorted(found, key=lambda node: (self.claims[node].failed, node))

    def witnesses(self, ref: AnchorRef) -> list[NodeId]:
        """Nodes that hold this very anchor, or were told of its commit."""
        return sorted(n for n, claim in self.claims.items() if ref in claim.anchors or ref in claim.hello.announced)

    def known_to_one(self, ledger: Ledger) -> AnchorRef | None:
        """A wanted anchor that only one node knows, while several hold the fragment: nothing else confirms it."""
        for index, ref in self.wanted.items():
            fragment = ledger.fragment(index)
            others = {node for node, claim in self.claims.items() if is_in(fragment, claim.hello.holds)}
            if len(others.union(ledger.holders(index))) > 1 and len(self.witnesses(ref)) < 2:
                return ref
        return None

    def answers(self, ref: AnchorRef) -> list[Held]:
        answers = (self.claims[node].held for node in self.holders(ref))
        return [held for held in answers if held is not None]


def survey(claims: Claims, ledger: Ledger, *, gone: Claims | None = None) -> AdoptionSurvey:
    """The state that these claims add up to. `gone`: claims of nodes that have left and cannot send anything."""
    history = max([ledger.history, *(claim.hello.history for claim in claims.values())])
    ours = {node: claim for node, claim in claims.items() if claim.hello.history == history}
    newest = _newest(ref for claim in ours.values() for ref in claim.anchors)
    wanted = {f: ref for f, ref in newest.items() if ref.version > ledger.versions[f]}
    fault = next(_forks(ours, ledger if history == ledger.history else None), "")
    if not fault and history != ledger.history:
        fault = next(_unlike(newest, ledger, history), "")
    reached = {f: wanted[f].version if f in wanted else version for f, version in enumerate(ledger.versions)}
    hellos = [claim.hello for claim in (*ours.values(), *(gone or {}).values()) if claim.hello.history == history]
    known = _newest(ref for hello in hellos for ref in (*hello.announced, *hello.anchors))
    lost = tuple(ref for f, ref in known.items() if ref.version > reached[f])
    return AdoptionSurvey(claims=ours, wanted=wanted, lost=lost, fault=fault)


def _newest(refs: Iterable[AnchorRef]) -> dict[int, AnchorRef]:
    newest: dict[int, AnchorRef] = {}
    for ref in refs:
        if ref.fragment not in newest or newest[ref.fragment].version < ref.version:
            newest[ref.fragment] = ref
    return dict(sorted(newest.items()))


def _forks(claims: Claims, ledger: Ledger | None) -> Iterator[str]:
    """Conflicts: one version with two contents. `ledger`: of the same history as the claims."""
    known: dict[tuple[int, int], tuple[int, str]] = {}
    for node, claim in sorted(claims.items()):
        for ref in (*claim.anchors, *claim.hello.announced):
            ours = ledger.anchor_digest(ref.fragment, ref.version) if ledger is not None else None
            first = (ref.digest, f"node {node}") if ours is None else (ours, "this state")
            digest, who = known.setdefault((ref.fragment, ref.version), first)
            if digest != ref.digest:
                yield (
                    f"version {ref.version} of fragment {ref.fragment} has digest {digest:016x} for {who} and "
                    f"{ref.digest:016x} for node {node}: two runs went on from one, and which is the right one, only "
                    "you can say: stop the nodes of the other and start again"
                )


def _unlike(newest: Mapping[int, AnchorRef], ledger: Ledger, history: int) -> Iterator[str]:
    """Why a state of an older history cannot take over the nodes' history."""
    for fragment, version in enumerate(ledger.versions):
        ref = newest.get(fragment)
        if ref is None:
            said = f"no node holds fragment {fragment} of history {history}, and this state is of {ledger.history}"
            yield f"{said}: start one that does"
        elif ref.version < version or (
            ref.version == version and ref.digest != ledger.anchor_digest(fragment, version)
        ):
            yield (
                f"nodes follow history {history}, in which fragment {fragment} is at version {ref.version}, and this "
                f"state is of history {ledger.history}, where it is at {version}: start a node that has seen more"
            )


class Unknown(Exception):
    """The answers lack something that the run needs to continue; one sentence."""


def terms_after(ref: AnchorRef, held: Sequence[Held]) -> WindowTerms | None:
    """The window that follows this version; None where it is the last. Raises Unknown."""
    for one in held:
        for terms in one.windows:
            if (terms.fragment, terms.window) == (ref.fragment, ref.version + 1):
                return terms
        if ref.fragment in one.final:
            return None
    raise Unknown(f"no node tells under which terms fragment {ref.fragment} goes on after version {ref.version}")


def revisions_since(ledger: Ledger, held: Sequence[Held]) -> tuple[Revision, ...]:
    """Changes of the terms since the copy, in order. Raises Unknown."""
    told: dict[int, Revision] = {}
    for revision in (revision for one in held for revision in one.revisions if revision.number > ledger.spec.revision):
        if told.setdefault(revision.number, revision) != revision:
            raise Unknown(f"nodes tell two revisions {revision.number} of the terms")
    return tuple(told[number] for number in sorted(told))


def rounds_since(
    ledger: Ledger, held: Sequence[Held], revisions: Sequence[Revision], windows: Sequence[WindowTerms]
) -> tuple[RoundPlan, ...]:
    """The rounds that were fixed since the copy, up to the newest of these windows; later ones are fixed anew. Nodes
    forget past rounds. Missing ones in between follow from the run's rule. Raises Unknown."""
    terms: Revisions = ledger.revisions
    for revision in revisions:
        terms = terms.and_then(revision)
    for window in windows:
        ours = terms.of_window(window.fragment, window.window)
        if dict(window.codec_up_of).keys() != dict(ours.codecs.up_of).keys():
            raise Unknown(f"window {window.window} of fragment {window.fragment} is told of with codecs of other nodes")
    told = {plan.index: plan for one in held for plan in one.rounds}
    plans = dict(ledger.rounds)
    last = max([max(plans), *(window.round for window in windows)])
    if last > max(plans) + MOST_ROUNDS:
        raise Unknown(f"a window of round {last} is told of, and this state is at round {max(plans)}")
    for index in range(min(plans) + 1, last + 1):
        before = plans[index - 1]
        plan = told.get(index) or plans.get(index) or round_after(terms.of_round(index), before)
        if plan is None or plan.start != before.start + before.length:
            raise Unknown(f"no node tells where round {index} begins, and by the run's rule the others do not fit")
        plans[index] = plan
    return tuple(plan for index, plan in plans.items() if ledger.rounds.get(index) != plan)


# --- Adoption: continue an old copy of the state from what nodes hold
#
#     listen   every node that greets says what it holds; it is let in for that alone
#     fetch    nodes send the newest version of each fragment; it is compared with its digest and made durable
#     adopt    one record says what is taken from which node; the nodes dial again, and the run continues
#
# Nodes are told nothing before that record is durable: until then the copy is unchanged, and another start begins with
# the fetched anchors. The record begins a history (protocol, Adoption).

ALARM: Final = "adoption"  # the alarm that says what the run waits for, until it goes on

LISTEN_S: Final = 10.0  # longer than the longest redial pause, so that nodes which the copy never met are heard, too
_REWIND: Final = "start once with --rewind, which goes on from this state and gives up what all nodes did since"

PATIENCE_S: Final = 300.0  # how long to wait for a node that the copy knows, or that left again


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptionSettings:
    untrue: Callable[[msg.Held, Ledger], str | None]
    """Returns what is impossible in an answer (`change_terms.py`: this package knows no codecs)."""
    patience_s: float = PATIENCE_S
    fetched: Mapping[int, rec.AnchorFetched] = field(default_factory=dict)
    """What an earlier start brought home, by fragment."""
    newest: bool = False  # accept versions that only one node knows: an operator vouches for it


class Adoption:
    """Decides how one start of the coordinator continues from what nodes hold."""

    def __init__(
        self,
        ledger: Ledger,
        decisions: Decisions,
        alarms: MutableMapping[str, str],
        adopt: AdoptionSettings,
        now: float,
    ) -> None:
        """`ledger` is the copy's; an entry of `alarms` says what the run waits for."""
        self._ledger, self._decisions, self._alarms = ledger, decisions, alarms
        self._patience_s, self._fetched, self._untrue = adopt.patience_s, dict(adopt.fetched), adopt.untrue
        self._newest = adopt.newest
        self.began_at = now  # later by all the time in which this process stood still
        self._claims: dict[NodeId, NodeClaim] = {}
        self._left: set[NodeId] = set()
        self.wakes_at: float | None = now + LISTEN_S  # next time at which waiting alone may change the result
        self._wait("nodes, to say what they hold")

    @property
    def waits(self) -> str:
        return self._alarms[ALARM]

    def handle(self, event: ev.Event | None, now: float) -> bool:
        """Handle an event, or None when a timer fired. Returns whether the run continues."""
        match event:
            case ev.NodeHello(session=session, node=node, hello=hello):
                if refused := refusal(hello, node, self._ledger, None) or unbelievable(hello, self._ledger):
                    self._decisions.do(ev.Refuse(session=session, refused=refused))
                else:
                    self._on_hello(event, now)
            case ev.NodeMessage(node=node, session=session, message=message):
                self._on_message(node, session, message)
            case ev.NodeDisconnected(node=node, session=session):
                if (claim := self._claims.get(node)) and claim.session == session:
                    claim.failed += claim.asked is not None
                    claim.session, claim.held, claim.asked, claim.heard_at = None, None, None, now
            case ev.AnchorStored(record=record):
                self._fetched[record.anchor.fragment] = record
                if (claim := self._claims.get(record.node)) and claim.asked == record.anchor.fragment:
                    claim.asked = None
            case ev.AnchorFailed(node=node, anchor=anchor, spoiled=spoiled):
                if claim := self._claims.get(node):
                    claim.asked, claim.failed = None, claim.failed + 1
                    if spoiled:
                        claim.spoiled.add((anchor.fragment, anchor.version))
            case _:
                pass  # nothing else is under way
        done = self._advance(now)
        self.wakes_at = min((at for at in self._moments() if at > now), default=None)
        return done

    def clock_jumped(self, seconds: float) -> None:
        self.began_at += seconds
        for claim in self._claims.values():
            claim.heard_at += seconds
            if claim.offers_until is not None:
                claim.offers_until += seconds

    # --- what nodes say

    def _on_hello(self, event: ev.NodeHello, now: float) -> None:
        """Let in a node that holds anchors, to be asked for them alone."""
        hello, before = event.hello, self._claims.get(event.node)
        if before is not None and before.session is not None:
            self._decisions.do(ev.CloseSession(session=before.session, reason=Reason.SUPERSEDED))
        claim = self._claims[event.node] = NodeClaim(hello=hello, heard_at=now)
        self._left.discard(event.node)
        self._forget_one(event.node)
        if before is not None and before.hello.incarnation == hello.incarnation:
            claim.spoiled, claim.failed = before.spoiled, before.failed
        if epoch_met(hello) > max(self._ledger.epoch, self._ledger.epoch_seen):
            self._decisions.record(rec.EpochSeen(epoch=epoch_met(hello)))
        if hello.anchors:
            claim.session = event.session
            self._decisions.do(ev.Accept(session=event.session, node=event.node, welcome=self._welcome(hello)))
        else:
            refused = msg.Refused(reason=Reason.HOLDING, detail=self.waits, retriable=True)
            self._decisions.do(ev.Refuse(session=event.session, refused=refused))

    def _forget_one(self, newest: NodeId) -> None:
        """Bound the number of names: without keys, any number can be claimed."""
        claims = self._claims
        gone = [n for n, c in claims.items() if c.session is None and n != newest and n not in self._ledger.started]
        if len(claims) > MOST_MEMBERS and gone:
            oldest = min(gone, key=lambda node: claims[node].heard_at)
            del claims[oldest]
            self._left.discard(oldest)

    def _on_message(self, node: NodeId, session: int, message: msg.Message) -> None:
        """Accept the node's answer and the anchor that it was asked for; everything else comes too early."""
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
        """The credible part of an answer: its anchors alone, whose bytes are checked, if something is impossible."""
        count, about = len(self._ledger.versions), f"{ALARM} of {node}"
        refs = tuple(ref for ref in held.anchors if 0 <= ref.fragment < count and 0 <= ref.version < MOST)
        wrong = self._untrue(held, self._ledger)
        self._alarms.pop(about, None)
        if wrong is None:
            return replace(held, anchors=refs)
        self._alarms[about] = f"what it reports besides its anchors is rejected: {wrong}"
        return msg.Held(anchors=refs, windows=(), final=(), rounds=(), revisions=())

    # --- what follows

    def _advance(self, now: float) -> bool:
        """Do what is possible now. Returns whether adoption is complete."""
        for claim in self._claims.values():
            if claim.asked is not None and claim.offers_until is not None and now >= claim.offers_until:
                claim.asked, claim.failed = None, claim.failed + 1
        present = {node: claim for node, claim in self._claims.items() if self._counts(node, claim, now)}
        gone = {node: claim for node, claim in self._claims.items() if node not in present}
        found = survey(present, self._ledger, gone=gone)
        expected = {} if now >= self.began_at + self._patience_s else self._ledger.started
        missing = sorted(expected.keys() - present.keys() - self._left)
        missing += sorted(node for node, c in found.claims.items() if c.hello.anchors and c.session is None)
        if found.fault:
            return self._wait(f"you to decide: {found.fault}; or {_REWIND}")
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
                "no other node confirms its digest; start with --adopt-from-nodes --adopt-newest if you believe that "
                f"node, or shut it out with farloop keys revoke {who} and start again"
            )
        here = {record.anchor for record in self._fetched.values()}
        lacking = {f: ref for f, ref in found.wanted.items() if ref not in here}
        if lacking:
            return self._fetch(lacking, found, now)
        return self._adopt(found)

    def _moments(self) -> Iterator[float]:
        """Times at which something awaited is due."""
        yield from (self.began_at + LISTEN_S, self.began_at + self._patience_s)
        for claim in self._claims.values():
            yield claim.heard_at + self._patience_s
            if claim.asked is not None and claim.offers_until is not None:
                yield claim.offers_until

    def _counts(self, node: NodeId, claim: NodeClaim, now: float) -> bool:
        """Whether the node answered or may still answer: one whose training hangs never does, in an open session."""
        return claim.answers or (node not in self._left and now < claim.heard_at + self._patience_s)

    def _fetch(self, lacking: Mapping[int, msg.AnchorRef], found: AdoptionSurvey, now: float) -> bool:
        """Ask nodes for anchors, one fragment at a time from each."""
        for fragment, ref in lacking.items():
            holders = found.holders(ref)
            if not any(found.claims[node].asked == fragment for node in holders):
                free = next((node for node in holders if found.claims[node].asked is None), None)
                if free is not None:
                    found.claims[free].asked, found.claims[free].offers_until = fragment, now + self._patience_s
                    self._decisions.send(free, msg.Recall(fragment=fragment))
        done = len(found.wanted) - len(lacking)
        return self._wait(f"the anchors to come: {done} of {len(found.wanted)} fragments are here")

    def _adopt(self, found: AdoptionSurvey) -> bool:
        ledger, claims = self._ledger, self._claims
        sessions = [node for node, claim in claims.items() if claim.session is not None]
        if found.wanted or any(standing_of(claim.hello, ledger).is_in_doubt for claim in claims.values()):
            stored = list(ledger.inputs)
            try:
                self._decisions.record(self._record(found))
            except Unknown as unknown:
                return self._wait(f"you to decide: {unknown}; start a node that does, or {_REWIND}")
            for blob in stored:  # deltas of what came next in the copy: their nodes begin anew
                self._decisions.do(ev.Forget(blob=blob))
        for node in sessions:
            detail = "what nodes hold is known now: the run goes on"
            self._decisions.send(node, msg.Leave(reason=Reason.HOLDING, detail=detail))
        for what in [what for what in self._alarms if what.startswith(ALARM)]:
            del self._alarms[what]
        return True

    def _record(self, found: AdoptionSurvey) -> rec.Adopted:
        """Raises Unknown."""
        ledger = self._ledger
        held = [claim.held for claim in found.claims.values() if claim.held is not None]
        after = [terms_after(ref, found.answers(ref)) for ref in found.wanted.values()]
        windows = tuple(terms for terms in after if terms is not None)
        revisions = revisions_since(ledger, held)
        owners = {(node, c.hello.incarnation): c.held for node, c in found.claims.items() if c.held is not None}
        unused = {
            owner: [lease for lease in one.unused if 0 <= lease.start < MOST and 0 < lease.count < MOST]
            for owner, one in owners.items()
        }
        granted_to = min(MOST, max((one.granted_to for one in held), default=0))
        frontier, returned, uncertain = ledger.leases.free_after_reports(unused, granted_to)
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
            protocol=msg.PROTOCOL_VERSION,
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
    """The id under which a node sends an anchor. It is fixed, so that a node sends one at a time."""
    return BlobId(kind=BlobKind.SNAPSHOT, fragment=ref.fragment, version=ref.version, node=node)


def _named(nodes: list[NodeId], most: int = 4) -> str:
    more = f" and {len(nodes) - most} others" if len(nodes) > most else ""
    return ("node " if len(nodes) == 1 else "nodes ") + ", ".join(nodes[:most]) + more
