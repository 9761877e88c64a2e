"""A new layout in two phases: first all who can be reached make it ready, then each follows it from a round's end on.

One node conducts, whichever was given the layout. Between the phases nothing changes: a refusal, in words, ends the
matter. Sources choose the moment, at the end of a round; the others follow when all of their sources have. Pure.
"""

from collections.abc import Collection, Mapping

from farloop.algo.layout import Layout
from farloop.node.pipeline.words import Prepare, Switch

Letters = list[tuple[str, Prepare | Switch]]
"""Whom to tell what."""


class Switching:
    """What a node knows of the layout to come."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        """Made ready here, and not followed yet."""
        self.committed = False
        """Whether it is to be followed."""
        self._addresses: dict[str, str] = {}
        """Of the newest layout."""
        self._asked: set[str] = set()
        """By this node, as the conductor, and not answered yet."""

    @property
    def epoch(self) -> int | None:
        """Of the layout that is ready."""
        return self.layout.epoch if self.layout is not None else None

    def prepare(self, layout: Layout, addresses: Mapping[str, str]) -> None:
        """Make it ready."""
        self.layout, self._addresses, self.committed = layout, dict(addresses), False

    def commit(self, epoch: int) -> None:
        """If it is the one that is ready here, it is to be followed."""
        self.committed = self.committed or self.epoch == epoch

    def over(self) -> None:
        """It is followed, or given up."""
        self.layout, self.committed, self._asked = None, False, set()

    # --- as the conductor

    def conduct(self, peers: Collection[str]) -> Letters:
        """Ask these, all that can be reached, to make ready what is ready here."""
        assert self.layout is not None
        self._asked = set(peers)
        if not peers:
            return self._second_phase(peers)
        return [(peer, Prepare(layout=self.layout, addresses=self._addresses)) for peer in sorted(peers)]

    def answered(self, peer: str, peers: Collection[str], *, refused: bool = False) -> Letters:
        """It has made it ready, or is gone: after the last one all are told. A refusal ends the matter."""
        if peer not in self._asked:
            return []
        if refused:
            self.over()
            return []
        self._asked.remove(peer)
        return [] if self._asked else self._second_phase(peers)

    def once_more(self, peer: str, present: Layout) -> Letters:
        """For one that has missed the switch to what all others follow."""
        return [
            (peer, Prepare(layout=present, addresses=self._addresses)),
            (peer, Switch(epoch=present.epoch)),
        ]

    def _second_phase(self, peers: Collection[str]) -> Letters:
        assert self.layout is not None
        self.committed = True
        return [(peer, Switch(epoch=self.layout.epoch)) for peer in sorted(peers)]


def why_not(layout: Layout, present: Layout, node: str) -> str:
    """Why a node that follows the present layout cannot go on with this one; an empty text when it can."""
    if layout.epoch <= present.epoch:
        return f"its epoch {layout.epoch} is not above the present one's, {present.epoch}"
    if fault := next(layout.faults(), ""):
        return fault
    cut, cut_now = ([(stage.first, stage.stop) for stage in one.stages] for one in (layout, present))
    if cut != cut_now:
        return f"its stages hold the layers {cut}, the run's {cut_now}: that takes a new start"
    if layout.stage_of(node) != present.stage_of(node):
        return f"{node} would hold stage {layout.stage_of(node)}, now {present.stage_of(node)}: start it anew"
    return ""
