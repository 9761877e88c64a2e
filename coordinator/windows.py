"""One open window of one fragment: who is expected, who came, when and why it closes. Pure."""

from dataclasses import dataclass, field
from typing import Literal

from farloop.algo import schedule
from farloop.algo.spec import BlobId, NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.algo.weights import sum_key, token_weights
from farloop.coordinator.records import Addend, WindowCommitted
from farloop.wire.messages import Drop, Offer, Share
from farloop.wire.reasons import Reason


@dataclass(slots=True, kw_only=True)
class Window:
    """An outer step of one fragment before its commit (protocol D)."""

    terms: WindowTerms
    expected: set[NodeId] = field(default_factory=set)
    """Frozen at opening; later removals carry reasons."""
    removed: dict[NodeId, Reason] = field(default_factory=dict)
    inputs: dict[BlobId, Offer] = field(default_factory=dict)
    """Durable deltas."""
    state: Literal["open", "closing"] = "open"

    @property
    def contributors(self) -> set[NodeId]:
        return {c.node for offer in self.inputs.values() for c in offer.contributors}

    @property
    def missing(self) -> set[NodeId]:
        """Nodes that the window still waits for."""
        return self.expected - set(self.removed) - self.contributors

    def why_close(self, quorum: int | None, floor: int) -> str | None:
        """The sentence that explains why the window closes now; None while it stays open.

        `quorum` None waits for all that are expected; below `floor` contributions the window is held.
        """
        came = len(self.contributors)
        if self.state != "open" or came < floor or not self.inputs:
            return None
        if not self.missing:
            gone = set(self.removed) - self.contributors
            return f"all {came} expected came" + (f", {len(gone)} removed" if gone else "")
        if quorum is not None and came >= quorum:
            return f"quorum of {quorum} reached, without {', '.join(sorted(self.missing))}"
        return None

    def ordered(self) -> list[Offer]:
        """The inputs in the order they are summed: arrival order never shows."""
        return sorted(self.inputs.values(), key=lambda offer: sum_key(offer.contributors))

    def shares(self) -> tuple[Share, ...]:
        """Weight of each input, in sum order."""
        offers = self.ordered()
        weights = token_weights([offer.contributors for offer in offers])
        return tuple(
            Share(node=sum_key(offer.contributors), weight=weight)
            for offer, weight in zip(offers, weights, strict=True)
        )

    def drops(self) -> tuple[Drop, ...]:
        """Who was expected and is not merged, and why."""
        absent = sorted(self.expected - self.contributors)
        return tuple(Drop(node=node, reason=self.removed.get(node, Reason.LATE)) for node in absent)

    def draft(self, spec: RunSpec, rounds: dict[int, RoundPlan], why: str) -> WindowCommitted:
        """The window's commit as far as it is decided; the arithmetic will add the update and the digests."""
        shares, terms = self.shares(), spec.terms
        # Momentum pays off in later rounds, and a flush has none: the run ends on the mean of what the nodes hold.
        outer_lr, outer_momentum = (1.0, 0.0) if self.terms.final else (terms.outer_lr, terms.outer_momentum)
        return WindowCommitted(
            fragment=self.terms.fragment,
            version=self.terms.window,
            round=self.terms.round,
            merged=shares,
            drops=self.drops(),
            blobs=tuple(
                Addend(blob=offer.blob, weight=share.weight)
                for offer, share in zip(self.ordered(), shares, strict=True)
            ),
            anchor_digest=0,
            target_digest=0,
            momentum_digest=None,
            next_window=schedule.window_after(terms, spec.identity.layout, self.terms, rounds),
            update_size=0,
            update_digest=0,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            why=why,
        )

    def check(self) -> None:
        """The invariants."""
        assert set(self.removed) <= self.expected
        sets = [frozenset(c.node for c in offer.contributors) for offer in self.inputs.values()]
        assert sum(len(s) for s in sets) == len(self.contributors), "contributor sets overlap"
        assert all(offer.window == self.terms.window for offer in self.inputs.values())
