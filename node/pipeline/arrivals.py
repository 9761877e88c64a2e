"""What a node believes of work that came: whether it can be done here, or fits a trip that is known. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from farloop.algo.layout import Hop, Layout
from farloop.node.pipeline.words import Kind, Work


@dataclass(slots=True, kw_only=True)
class Held:
    """A trip whose input is kept here."""

    visited: tuple[Hop, ...]
    """Up to this node."""
    next: str | None = None
    """Where its output was sent; None while it is computed."""
    looped: tuple[Hop, ...] | None = None
    """At its source: all its visits, once its loss is asked for."""


def fault_of(work: Work, layout: Layout, stage: int) -> str:
    """Why forward work cannot be done on a node of this stage; an empty text when it can."""
    if work.epoch != layout.epoch:
        return f"layout {work.epoch}, here it is {layout.epoch}"
    paths = layout.paths_from(work.trip.source)
    if not work.path < len(paths) or not 0 < work.position < len(paths[work.path].hops):
        return "no such path"
    if paths[work.path].hops[work.position].stage != stage:
        return "another stage's"
    if not work.visited or work.visited[0] != Hop(stage=0, node=work.trip.source):
        return "it does not begin at its source"
    stages = [hop.stage for hop in work.visited]
    if stage in stages or len(set(stages)) != len(stages) or not exist(work.visited, layout):
        return "visits that cannot be"
    return ""


def fits(work: Work, held: Held | None, layout: Layout, *, at_source: bool) -> bool:
    """Whether loss or backward work is of a trip that is known here and waits for it."""
    if held is None or held.next is None or work.visited[: len(held.visited)] != held.visited:
        return False
    if work.kind is Kind.LOSS:
        return at_source and held.looped is None and exist(work.visited, layout)
    if at_source:
        return held.looped == work.visited and work.position == 0
    return work.position == len(held.visited) - 1


def exist(hops: Sequence[Hop], layout: Layout) -> bool:
    """Whether the layout has all of these nodes in these stages."""
    return all(hop.stage < len(layout.stages) and hop.node in layout.stages[hop.stage].replicas for hop in hops)
