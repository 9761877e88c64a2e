"""Norm screening of deltas, and quarantine of the nodes that send bad ones.

A delta can be well-formed, timely and finite, and still ruin a model: a thousand times too long, pointing the wrong
way, an old one once more, or another node's. What a window refuses is journaled with its commit, and what is known of
nodes and of lengths is a fold over these records: a restart judges as the coordinator before it did.

    good ──a second refused delta, or three against all others──▶ quarantine ──four good deltas──▶ good

In quarantine a node trains on, its deltas are received and measured, and none is merged. docs/admission.md says why the
numbers below are what they are.
"""

import dataclasses
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Final, Literal

from farloop.algo import schedule
from farloop.algo.methods import screens_deltas
from farloop.algo.revisions import Revisions
from farloop.algo.spec import BlobId, Contribution, NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.algo.terms import Terms
from farloop.coordinator.decide import records as rec
from farloop.wire.messages import Offer
from farloop.wire.reasons import Reason

MEMORY: Final = 16  # recent versions of a fragment whose deltas are recognised when they come again
LATELY: Final = 8  # the newest of these, whose norms are the usual ones

ENOUGH: Final = 4
"""Deltas needed for a usual norm; with fewer, a delta is compared with the others of its window alone ..."""

FIRST: Final = 4.0  # with a band that much wider
STRIKES: Final = 2  # refused deltas that put a node in quarantine
AGAINST: Final = 3  # deltas in a row against the others that put a node in quarantine
OPPOSED: Final = -0.2  # cosine to the mean of the others below which a delta points against them

WITNESSES: Final = 3  # deltas that a window needs before directions count: of two that disagree, either may be wrong
TELLING: Final = 64  # from this many elements on, identical numbers are no coincidence
WAY_BACK: Final = 4  # good deltas that end a quarantine

VERDICTS: Final = frozenset({Reason.OUTLIER, Reason.REPLAYED, Reason.COPIED, Reason.QUARANTINED})
"""Reasons for which a window does not merge a delta that came in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Length:
    """Norm of a delta, and the work it depends on."""

    norm: float
    steps: int
    rate: float  # learning rate

    def as_long_as(self, work: "_Length") -> float:
        """The largest norm that a delta of other work may have, if this one is usual. More or larger steps allow a
        larger norm in proportion. Fewer or smaller ones lower nothing: how much of a path leads back is not known, and
        too narrow a band costs more than too wide a one."""
        rate = work.rate / self.rate if self.rate > 0.0 else 1.0
        return self.norm * max(1.0, work.steps / self.steps) * max(1.0, rate)


@dataclass(slots=True)
class Screening:
    """Judges the deltas of one run by those before."""

    spec: RunSpec
    seen: dict[int, list[rec.Seen]] = field(default_factory=dict)  # by fragment, the oldest first
    standings: dict[NodeId, rec.Standing] = field(default_factory=dict)
    payloads: dict[BlobId, int] = field(default_factory=dict)  # of the deltas that have no outcome yet
    revisions: Revisions = field(init=False)  # what windows run under

    def __post_init__(self) -> None:
        self.revisions = Revisions.of(self.spec)

    def revise(self, spec: RunSpec, revisions: Revisions) -> None:
        self.spec, self.revisions = spec, revisions

    def measures(self, fragment: int, window: int) -> bool:
        """Whether a delta of this window may be compared with others, in that window or a later one that takes it."""
        return any(screens_deltas(terms) for terms in self.revisions.from_window(fragment, window))

    def in_quarantine(self, nodes: Collection[NodeId]) -> dict[NodeId, str]:
        """Nodes whose deltas are not merged, with the reason: always fewer than half of `nodes`, which take part. If
        that many disagree, it is unknown which are right, and every delta is judged by itself."""
        whys = {node: self.standings[node].why for node in nodes if node in self.standings}
        found = {node: why for node, why in whys.items() if why}
        return found if 2 * len(found) < len(nodes) else {}

    # --- verdicts

    def verdicts(
        self, terms: WindowTerms, offers: Sequence[Offer], rounds: Mapping[int, RoundPlan], nodes: Collection[NodeId]
    ) -> list[rec.Refusal]:
        """Deltas to refuse if the window closed with these, given in the order they came."""
        ours = self.revisions.of_window(terms.fragment, terms.window, terms.round)
        if ours.admission.screen == "off":
            return []
        rate, apart = rate_of(ours, rounds[terms.round]), self.in_quarantine(nodes)
        averaged = self._is_averaged(terms.fragment)
        lengths = {offer.blob: None if averaged else _length(offer, rate) for offer in offers}
        peers = [
            (offer.blob.node, length)
            for offer in offers
            if offer.blob.node not in apart and (length := lengths[offer.blob]) is not None
        ]
        usual = self._usual(terms.fragment)
        known = dict[tuple[int, float], tuple[list[float], float | None, list[float]]]()  # by steps and rate
        own = dict[NodeId, list[_Length]]()
        for node, length in peers:
            own.setdefault(node, []).append(length)
        seen = self.seen.get(terms.fragment, ())
        merged = {(one.node, one.payload) for one in seen}
        senders = dict[int, list[NodeId]]()  # of each payload, in the order they came
        for one in seen:
            senders.setdefault(one.payload, []).append(one.node)
        refusals = []
        for offer in offers:
            found = self._known_numbers(offer, merged, senders)
            senders.setdefault(self.payloads.get(offer.blob, 0), []).append(offer.blob.node)
            if found is None and (work := lengths[offer.blob]) is not None:
                key = (work.steps, work.rate)  # most nodes do the same work
                if key not in known:
                    norms = [length.as_long_as(work) for length in usual]
                    middle = median(norms) if len(norms) >= ENOUGH else None
                    known[key] = norms, middle, sorted(length.as_long_as(work) for _, length in peers)
                theirs = [length.as_long_as(work) for length in own.get(offer.blob.node, ())]
                found = _too_long(offer, work, theirs, *known[key], ours.admission.norm_band)
            if found is None and offer.blob.node in apart:
                why = f"{Reason.QUARANTINED.sentence} ({apart[offer.blob.node]})"
                found = rec.Refusal(blob=offer.blob, reason=Reason.QUARANTINED, detail=why, strikes=False)
            if found is not None:
                refusals.append(found)
        return refusals

    def _known_numbers(
        self, offer: Offer, merged: Collection[tuple[NodeId, int]], senders: Mapping[int, Sequence[NodeId]]
    ) -> rec.Refusal | None:
        """Refuse numbers that were sent before: a replay or a copy. Nodes that bring their own samples may rightly send
        the same delta. `merged`: node and payload of the deltas of windows before. `senders`: by payload, their nodes
        and those whose deltas of this window came before."""
        payload, node = self.payloads.get(offer.blob, 0), offer.blob.node
        tensors = self.spec.identity.layout.fragments[offer.blob.fragment].tensors
        if (
            self._is_averaged(offer.blob.fragment)
            or not payload
            or not _norm(offer)
            or sum(tensor.numel for tensor in tensors) < TELLING
        ):
            return None
        if (node, payload) in merged:
            return _refusal(offer, Reason.REPLAYED)
        whose = next((other for other in senders.get(payload, ()) if other != node), None)
        if whose is None or not self.spec.identity.num_samples:
            return None
        return _refusal(offer, Reason.COPIED, f"{whose} has sent the same numbers before")

    def _is_averaged(self, fragment: int) -> bool:
        """Deltas of statistics say how nodes' samples differ: honest ones are of any length, opposed, and repeated."""
        return self.spec.identity.layout.fragments[fragment].averaged

    def _usual(self, fragment: int) -> list[_Length]:
        seen = self.seen.get(fragment, [])
        newest = max((one.version for one in seen), default=0)
        lately = [one for one in seen if one.version > newest - LATELY and one.steps > 0]
        return [_Length(norm=one.norm, steps=one.steps, rate=one.rate) for one in lately]

    # --- what is remembered

    def resume(self, saved: rec.LedgerSaved) -> None:
        for one in saved.seen:
            self.seen.setdefault(one.fragment, []).append(one)
        self.standings = {standing.node: standing for standing in saved.standings}
        self.payloads = {stored.blob: stored.payload for stored in saved.inputs if stored.payload}

    @property
    def all_seen(self) -> tuple[rec.Seen, ...]:
        return tuple(one for of_fragment in self.seen.values() for one in of_fragment)

    def on_stored(self, record: rec.InputStored) -> None:
        if record.payload:
            self.payloads[record.blob] = record.payload

    def forget(self, blob: BlobId) -> None:
        self.payloads.pop(blob, None)

    def on_committed(
        self, record: rec.WindowCommitted, inputs: Mapping[BlobId, Offer], rounds: Mapping[int, RoundPlan]
    ) -> None:
        """A window closed. `inputs` still holds its deltas, if deltas are spooled."""
        terms = self.revisions.of_window(record.fragment, record.version, record.round)
        if terms.admission.screen == "off":  # whoever looks again will not hold new deltas against such old ones
            self.seen.pop(record.fragment, None)
            self.standings.clear()
        elif not self._is_averaged(record.fragment):
            self._remember(record, inputs, rate_of(terms, rounds[record.round]))
            marks = [(addend.blob.node, False, addend.cosine, "") for addend in record.blobs]
            for one in record.refused:
                if one.strikes or one.reason is Reason.QUARANTINED:
                    marks.append((one.blob.node, one.strikes, one.cosine, one.detail))
            for node, struck, cosine, why in marks:
                side = _side(cosine, few=len(record.blobs) < WITNESSES)
                self.standings[node] = _after(self.standings.get(node, rec.Standing(node=node)), struck, side, why)
        # Without a mark on them nothing is known of most nodes, and nothing need be kept.
        self.standings = {n: s for n, s in self.standings.items() if s.why or s.strikes or s.against}

    def settle(self, inputs: Mapping[BlobId, Offer]) -> None:
        self.payloads = {blob: payload for blob, payload in self.payloads.items() if blob in inputs}

    def _remember(self, record: rec.WindowCommitted, inputs: Mapping[BlobId, Offer], rate: float) -> None:
        if not record.blobs:
            # All were refused: perhaps it is the memory that is wrong, and then the next window would fare no better.
            self.seen.pop(record.fragment, None)
            return
        new: list[rec.Seen] = []
        merged = {addend.blob: None for addend in record.blobs}
        for blob in [*merged, *(refusal.blob for refusal in record.refused)]:
            length = _length(inputs[blob], rate) if blob in merged and blob in inputs else None
            one = rec.Seen(
                fragment=record.fragment,
                version=record.version,
                node=blob.node,
                norm=length.norm if length else 0.0,
                steps=length.steps if length else 0,
                rate=rate,
                payload=self.payloads.get(blob, 0),
            )
            if length or one.payload:
                new.append(one)
        kept = [one for one in self.seen.get(record.fragment, ()) if one.version > record.version - MEMORY]
        self.seen[record.fragment] = kept + new


_Side = Literal["with", "against", "none", "unknown"]
"""Of all others: theirs, the other one, that there are none for they do not agree, or that they are too few to say."""


def _side(cosine: float | None, *, few: bool) -> _Side:
    if few:
        return "unknown"
    if cosine is None:
        return "none"
    return "against" if cosine < OPPOSED else "with"


def _after(before: rec.Standing, struck: bool, side: _Side, why: str) -> rec.Standing:
    """A node's standing after one more delta.

    If the others disagree, no node can be against them, and the row ends. Now and then a few agree by chance, and over
    many rounds an honest node would be against them three times. A node in quarantine has to show more.
    """
    against = before.against
    if side == "against":
        against += 1
    elif side == "with" or (side == "none" and not before.why):
        against = 0
    if struck:
        strikes = before.strikes + 1
        return dataclasses.replace(
            before, strikes=strikes, against=against, good=0, why=before.why or (why if strikes >= STRIKES else "")
        )
    if against >= AGAINST:
        sentence = f"{against} deltas in a row pointed against those of all others"
        return dataclasses.replace(before, against=against, good=0, why=before.why or sentence)
    if against:
        return dataclasses.replace(before, against=against, good=0)
    good = before.good + 1
    if good >= WAY_BACK:
        return rec.Standing(node=before.node)
    return dataclasses.replace(before, against=0, good=good)


def rate_of(terms: Terms, plan: RoundPlan) -> float:
    """The largest learning rate of a round, by its ends and its middle; `terms` are those of the round."""
    places = (plan.start, plan.start + plan.length / 2, plan.start + plan.length)
    return max(schedule.learning_rate(terms, place) for place in places)


def _norm(offer: Offer) -> float:
    return float(sum(max(share.norm_sq, 0.0) for share in offer.contributors) ** 0.5)


def _length(offer: Offer, rate: float) -> _Length | None:
    steps, norm = max((share.steps for share in offer.contributors), default=0), _norm(offer)
    return _Length(norm=norm, steps=steps, rate=rate) if steps > 0 and norm > 0.0 else None


def _refusal(offer: Offer, reason: Reason, detail: str = "", *, strikes: bool = True) -> rec.Refusal:
    return rec.Refusal(blob=offer.blob, reason=reason, detail=detail or reason.sentence, strikes=strikes)


def measured(offer: Offer, norm_sq: float | None) -> Offer:
    """The offer with the measured squared norm in place of the claimed one."""
    if norm_sq is None or len(offer.contributors) != 1:
        return offer
    contribution: Contribution = dataclasses.replace(offer.contributors[0], norm_sq=norm_sq)
    return dataclasses.replace(offer, contributors=(contribution,))


def _too_long(
    offer: Offer,
    work: _Length,
    own: Sequence[float],
    usual: Sequence[float],
    middle: float | None,
    peers: Sequence[float],
    band: float,
) -> rec.Refusal | None:
    """Refuse a norm above both bands: around the usual norm, and around the other deltas of the window. So a change
    that affects all nodes, such as a re-warm or longer rounds, refuses none. With too few deltas to tell which is
    wrong, the longest is left out without a strike.

    `usual`, `peers`: the usual norms, and those of the window's deltas in ascending order, for this work. `middle`: the
    median of the usual ones; None where they are too few. `own`: the norms among `peers` of the offer's own node.
    """
    if middle is not None and work.norm <= band * middle:
        return None
    peers = list(peers)
    for one in own:
        del peers[bisect_left(peers, one)]
    if middle is not None:
        allowed = max([middle, *([median_low(peers)] if peers else [])])
    elif others := sorted([*usual, *peers]):
        few = len(others) < WITNESSES
        allowed, band = others[-1] if few else median(others), FIRST * band
    else:
        return None
    if work.norm <= band * allowed:
        return None
    detail = f"its norm is {work.norm:.3g}, and {allowed:.3g} is usual: {band:g} times as much is too long"
    return _refusal(offer, Reason.OUTLIER, detail, strikes=middle is not None or len(peers) > 1)
