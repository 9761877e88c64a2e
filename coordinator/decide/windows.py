"""One open window of a fragment: expected nodes, stored deltas, and when and why it closes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from farloop.algo import schedule
from farloop.algo.methods import method_named
from farloop.algo.outer_optimizers import OUTER_OPTIMIZERS
from farloop.algo.outer_settings import settings_of
from farloop.algo.spec import BlobId, NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.algo.terms import Terms
from farloop.algo.validation import DISJOINT_SUM
from farloop.algo.weights import WEIGHT_RULES, reach, sum_key
from farloop.coordinator.decide.records import Addend, Refusal, WindowCommitted
from farloop.wire.messages import Drop, Offer, Share
from farloop.wire.reasons import Reason

_OF_THE_DELTA: Final = frozenset(
    {
        Reason.CORRUPT,
        Reason.NON_FINITE,
        Reason.WRONG_CODEC,
        Reason.TOO_LARGE,
        Reason.IMPLAUSIBLE,
        Reason.STALE_BASE,
        Reason.IDLE,
        Reason.OUTLIER,
        Reason.REPLAYED,
        Reason.COPIED,
        Reason.QUARANTINED,
        Reason.TOO_MUCH,
        Reason.VOID,
    }
)
"""Nodes removed for these reasons had their turn: they send nothing more for this window."""


@dataclass(slots=True, kw_only=True)
class Window:
    """The next outer step of one fragment."""

    terms: WindowTerms
    max_staleness: int = 0  # versions that a delta's base may be behind the one that the window began with
    alone: bool = False  # every delta is an outer step of its own; else a quorum counts deltas that name this window
    needs_steps: bool = False  # nodes train while they wait: a delta without a step does not count for a quorum
    opened_at: float = 0.0
    quorum_at: float | None = None  # when the quorum was reached
    expected: set[NodeId] = field(default_factory=set)  # frozen at opening; later removals carry reasons
    removed: dict[NodeId, Reason] = field(default_factory=dict)
    inputs: dict[BlobId, Offer] = field(default_factory=dict)  # durable deltas; `add` adds one
    contributors: set[NodeId] = field(init=False)  # of `inputs`
    refused: dict[BlobId, Refusal] = field(default_factory=dict)  # durable deltas that no window will merge
    state: Literal["open", "closing"] = "open"

    def __post_init__(self) -> None:
        self.contributors = {c.node for offer in self.inputs.values() for c in offer.contributors}

    @property
    def missing(self) -> set[NodeId]:
        """Nodes that the window still waits for."""
        return self.expected - self.removed.keys() - self.contributors

    @property
    def refused_nodes(self) -> set[NodeId]:
        """Nodes whose delta was refused: they send nothing more for this window."""
        return {node for node, reason in self.removed.items() if reason in _OF_THE_DELTA}

    @property
    def waits(self) -> bool:
        """Whether there are any; asked at every event, where most of the time their numbers tell."""
        return len(self.expected) > len(self.removed) + len(self.contributors) or bool(self.missing)

    @property
    def toward_quorum(self) -> int:
        """Contributions that count for a quorum.

        Late deltas do not: they must not use up a round's window. If nodes train while they wait, neither do deltas
        without a step, from a node that stalls or finished early, until no other node is expected: such a node would
        send one after the other as fast as the network allows, and no other node's would be in time.
        """
        if not self.max_staleness:
            return len(
                {c.node for o in self.inputs.values() for c in o.contributors if c.steps or not self.needs_steps}
            )
        timely = [o for o in self.inputs.values() if self.alone or o.window == self.terms.window]
        return sum(1 for offer in timely if any(c.steps for c in offer.contributors))

    def has_quorum(self, quorum: int | None) -> bool:
        return quorum is not None and len(self.contributors) >= quorum and self.toward_quorum >= quorum

    def add(self, offer: Offer) -> None:
        self.inputs[offer.blob] = offer
        self.contributors.update(contribution.node for contribution in offer.contributors)

    def refuse(self, refusal: Refusal) -> None:
        """Refuse one of its deltas for this and every other window."""
        offer = self.inputs.pop(refusal.blob)
        self.refused[refusal.blob] = refusal
        for contribution in offer.contributors:
            self.contributors.discard(contribution.node)
            if contribution.node in self.expected:
                self.removed[contribution.node] = refusal.reason

    def open_again(self, held: Mapping[BlobId, Offer], quorum: int | None) -> None:
        """Open again: the window could not close with its deltas. `held` came meanwhile."""
        self.state, self.inputs, self.contributors = "open", {}, set()
        self.begin_with({blob: offer for blob, offer in held.items() if blob not in self.refused}, quorum)

    def admits(self, offer: Offer) -> bool:
        """Whether a delta that names this window, or an earlier one, may be merged by it."""
        return self.terms.window - self.max_staleness <= offer.window <= self.terms.window

    def is_too_late_for(self, offer: Offer) -> bool:
        """Whether it is closing, and the next window would not merge this delta either."""
        fits = self.terms.window - self.max_staleness < offer.window and not self.terms.final
        return self.state == "closing" and not fits

    def begin_with(self, held: Mapping[BlobId, Offer], quorum: int | None) -> None:
        """Take deltas that came while the previous window was closing, in order. If every delta is an outer step of its
        own: a quorum of them, and those for which this is the last window; in the run's last step, all."""
        took = 0
        for blob, offer in held.items():
            if blob.fragment != self.terms.fragment:
                continue
            counts = any(c.steps for c in offer.contributors)
            last_chance = self.terms.final or offer.window + self.max_staleness <= self.terms.window
            if not self.alone or quorum is None or not counts or took < quorum or last_chance:
                self.add(offer)
                took += counts

    def why_close(self, quorum: int | None, floor: int, *, patient: bool = False) -> str | None:
        """Why the window closes now, as a sentence; None while it stays open. `quorum` None waits for all expected
        nodes. Below `floor` contributions it is held; if deltas were refused, it ends without any. `patient`: the
        quorum is not enough yet."""
        came = len(self.contributors)
        if self.state != "open":
            return None
        if came < floor or not self.inputs:
            return None if self.waits else self._why_void(floor)
        if not self.waits:
            gone = set(self.removed) - self.contributors
            return f"all {came} expected came" + (f", {len(gone)} removed" if gone else "")
        if not patient and self.has_quorum(quorum):
            return f"quorum of {quorum} reached, without {', '.join(sorted(self.missing))}"
        return None

    def short_of(self, floor: int) -> str | None:
        """Why the window stays open though it waits for no node, as a sentence; None otherwise."""
        came = len(self.contributors)
        if self.state != "open" or self.waits or not self.expected or came >= max(floor, 2):
            return None
        gone = ", ".join(f"{node} ({reason.code})" for node, reason in sorted(self.removed.items()))
        lacking = f"window {self.terms.window} is held with {came} of the {floor} contributions it needs"
        lower = f", or farloop run set floor={came}" if came else ""
        return f"{lacking}{f', without {gone}' if gone else ''}; start a node that contributes{lower}"

    def _why_void(self, floor: int) -> str | None:
        """Why the window ends without a delta: with good deltas it could have closed.

        Absent nodes may return, but no other delta would come: the run would stand still for good.
        """
        refused = self.refused_nodes - self.contributors
        came = len(self.contributors)
        if not refused or came + len(refused) < floor:
            return None
        names = ", ".join(f"{node} ({self.removed[node].code})" for node in sorted(refused))
        return f"{came} of {floor} deltas that a merge needs, refused: {names}"

    def make_void(self, why: str) -> None:
        for blob in list(self.inputs):
            self.refuse(Refusal(blob=blob, reason=Reason.VOID, detail=why, strikes=False))

    def ordered(self) -> list[Offer]:
        """The inputs in the order of the sum, which does not depend on arrival."""
        return sorted(self.inputs.values(), key=lambda offer: sum_key(offer.contributors))

    def shares(self, rule: str = "tokens") -> tuple[Share, ...]:
        """Weight of each input, in sum order, by a rule of `WEIGHT_RULES`, equal, or 1 for each in a sum. In the last
        step of a run in which nodes finish with different amounts of work, equal: it gives the mean of what they
        hold."""
        offers = self.ordered()
        if not offers:
            return ()
        uneven = self.max_staleness and not all(c.steps for o in offers for c in o.contributors)
        if rule == DISJOINT_SUM:
            weights = [1.0] * len(offers)
        elif rule == "equal" or (self.terms.final and uneven):
            weights = [1 / len(offers)] * len(offers)
        else:
            weights = WEIGHT_RULES[rule]([offer.contributors for offer in offers])
        return tuple(
            Share(node=sum_key(offer.contributors), weight=weight)
            for offer, weight in zip(offers, weights, strict=True)
        )

    def drops(self) -> tuple[Drop, ...]:
        """Nodes that were expected and not merged, with the reason; with staleness, late deltas may be merged yet."""
        absent = sorted((set(self.removed) if self.max_staleness else self.expected) - self.contributors)
        return tuple(Drop(node=node, reason=self.removed.get(node, Reason.LATE)) for node in absent)

    def draft(
        self,
        spec: RunSpec,
        rounds: dict[int, RoundPlan],
        why: str,
        served: Collection[NodeId] = (),
        following: Terms | None = None,
        before: Collection[NodeId] | None = None,
    ) -> WindowCommitted:
        """The window's commit without the update and its digests. `spec` has this window's terms, `following` those of
        the next one, if they differ. `served`: nodes that contributed to earlier windows of this round. `before`: those
        that made the version before."""
        terms = spec.terms
        sums = terms.outer.merge == DISJOINT_SUM
        shares = self.shares(DISJOINT_SUM if sums else method_named(terms.method).weights)
        same_nodes = before == {share.node for share in shares}
        outer = settings_of(terms, spec.identity.layout, self.terms, rounds, same_nodes=same_nodes)
        gapped = OUTER_OPTIMIZERS[outer.kind].has_gap
        return WindowCommitted(
            fragment=self.terms.fragment,
            version=self.terms.window,
            round=self.terms.round,
            merged=shares,
            drops=self.drops(),
            blobs=tuple(
                Addend(blob=offer.blob, weight=share.weight, consumed=offer.consumed)
                for offer, share in zip(self.ordered(), shares, strict=True)
            ),
            anchor_digest=0,
            target_digest=0,
            momentum_digest=None,
            next_window=schedule.window_after(
                following or terms, spec.identity.layout, self.terms, rounds, stay=self._stays(served)
            ),
            update_size=0,
            update_digest=0,
            outer_lr=outer.lr,
            outer_momentum=outer.momentum,
            delta_scale=outer.delta_scale,
            flush=self.terms.final,
            reach=reach([offer.contributors for offer in self.inputs.values()]) if gapped else 0.0,
            refused=tuple(self.refused.values()),
            why=why,
        )

    def _stays(self, served: Collection[NodeId]) -> bool:
        """Whether the next window belongs to the same round: other nodes have yet to contribute.

        At the run's end, that includes contributors of a late delta: their flush is still to come.
        """
        if self.terms.final:
            return any(offer.window < self.terms.window for offer in self.inputs.values())
        return self.alone and bool(self.expected - set(self.removed) - self.contributors - set(served))

    def check(self) -> None:
        assert set(self.removed) <= self.expected
        sets = [frozenset(c.node for c in offer.contributors) for offer in self.inputs.values()]
        assert sum(len(s) for s in sets) == len(self.contributors), "contributor sets overlap"
        assert self.contributors == set().union(*sets)
        assert all(self.admits(offer) for offer in self.inputs.values())
        assert not self.inputs.keys() & self.refused.keys()
