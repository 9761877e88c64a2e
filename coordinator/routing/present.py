"""What the paths of a layout that is there take now: what a new plan is held against. Pure."""

from itertools import pairwise

from farloop.algo.layout import Layout, Path
from farloop.coordinator.routing.deciding import work_of
from farloop.coordinator.routing.fabric import UNREACHABLE_S, Fabric, fabric_of
from farloop.coordinator.routing.inventory import Inventory
from farloop.coordinator.routing.simulator import Route, simulate


class NotPredicted(Exception):
    """Why nothing is predicted of the paths that are there, as a sentence."""


def present_step_s(layout: Layout, inventory: Inventory) -> float:
    """Seconds of an inner step along a layout's paths, by the inventory's nodes and links.

    Raises:
        NotPredicted: a node of theirs is not there, or a link of theirs is not known or not believed.
    """
    place = {node.name: number for number, node in enumerate(inventory.nodes)}
    fabric = fabric_of(inventory)
    for path in layout.paths:
        _check(path, place, fabric)
    routes = tuple(
        Route(nodes=tuple(place[hop.node] for hop in path.hops), stages=tuple(hop.stage for hop in path.hops))
        for path in layout.paths
    )
    work = work_of(inventory, range(len(place)), [stage.layers for stage in layout.stages])
    outcome = simulate(routes, work, fabric.message_s)
    if outcome.stalled:
        raise NotPredicted(f"{outcome.stalled} of their microbatches would wait for each other's slots")
    return outcome.makespan_s


def _check(path: Path, place: dict[str, int], fabric: Fabric) -> None:
    names = [hop.node for hop in path.hops]
    if gone := next((name for name in names if name not in place), None):
        raise NotPredicted(f"{gone} is not there")
    for one, other in pairwise([*names, names[0]]):
        for ends in ((one, other), (other, one)):
            pair = place[ends[0]], place[ends[1]]
            if fabric.message_s[pair[0]][pair[1]] >= UNREACHABLE_S:
                what = "believed" if pair in fabric.suspects else "known"
                raise NotPredicted(f"the link from {ends[0]} to {ends[1]} is not {what}")
