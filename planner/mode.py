"""Fragments or activations between islands, and the cost of a running layout."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from farloop.algo.stages import IN_ORDER, PUBLISHED, Path, StageLayout
from farloop.planner.anomalies import UNREACHABLE_S
from farloop.planner.fabric import Fabric, Island, fabric_of
from farloop.planner.inventory import Inventory, Mode
from farloop.planner.paths import Work, path_length
from farloop.planner.placement import MAX_NODES, Costs, Groups, Placed, blocks, descend, min_max_split
from farloop.planner.routes import Paths, Task, plan_paths, random_paths
from farloop.planner.simulator import Route, simulate

# --- Fragments or activations between islands: the cost of both layouts, and the H at which it turns
#
# A: pipelines inside islands, replicas of a stage on different islands. B: a stage's replicas inside one island,
# pipelines across (Holmes). By DT-FM's cost DP/H + 2·PP: every step pays for its pipeline, every H-th for its sync.


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossover:
    """Two layouts and where they cost the same."""

    inside: Placed  # pipelines inside islands (A)
    across: Placed  # pipelines across islands (B)

    @property
    def h_star(self) -> float:
        """H* = (DP_A − DP_B)/(2·(PP_B − PP_A)): above it A is cheaper; 0 where it always is, inf where never."""
        dearer_sync = self.inside.dp_s - self.across.dp_s
        dearer_step = 2.0 * (self.across.pp_s - self.inside.pp_s)
        if dearer_sync <= 0.0:
            return 0.0 if dearer_step >= 0.0 else math.inf
        return dearer_sync / dearer_step if dearer_step > 0.0 else math.inf

    def prefers_inside(self, h: int) -> bool:
        """Whether A is cheaper with H local steps; a tie goes to A."""
        return self.inside.step_s(h) <= self.across.step_s(h)


def inside_groups(islands: Sequence[Island], stages: int) -> Groups:
    """A: every island is cut into all stages, so that whole pipelines fit in it; smaller islands have no part."""
    cut = [blocks(island.nodes, stages) for island in islands if len(island.nodes) >= stages]
    sizes = [min(len(block) for block in parts) for parts in cut]
    return tuple(
        tuple(node for parts, size in zip(cut, sizes, strict=True) for node in parts[stage][:size])
        for stage in range(stages)
    )


def across_groups(islands: Sequence[Island], stages: int) -> Groups:
    """B: nodes in the order of their islands, the kinds of cards together, cut into stages of consecutive ones."""
    kinds = list(dict.fromkeys(island.fabric for island in islands))
    order = sorted(range(len(islands)), key=lambda one: (kinds.index(islands[one].fabric), one))
    return blocks([node for one in order for node in islands[one].nodes], stages)


# --- Choice of the mode, and its paths

_DESCENT_MOVES = 120  # placements that are tried; one of 64 nodes takes some milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    mode: Mode
    why: str
    paths: Paths
    crossover: Crossover | None
    cost_s: float  # of the chosen layout in the crossover: communication of a step
    lost: tuple[tuple[str, float], ...] = ()  # (name, communication of a step)
    compared: tuple[tuple[str, float], ...] = ()  # (name, seconds of a step)


def caps_of(inventory: Inventory) -> list[int]:
    """Layers that each node can hold, no more than there are."""
    layers = inventory.model.layers
    return [min(node.max_layers or layers, layers) for node in inventory.nodes]


def work_of(inventory: Inventory, members: Sequence[int], layers: Sequence[int]) -> Work:
    """The work of some nodes in a step, with these layers per stage."""
    nodes, model, caps = inventory.nodes, inventory.model, caps_of(inventory)
    return Work(
        layer_s=tuple(nodes[node].layer_s for node in members),
        layers=tuple(layers),
        slots=tuple(nodes[node].slots for node in members),
        microbatches=model.microbatches,
        backward=model.backward,
        loss=model.loss,
        gap_s=model.gap_s,
        max_layers=tuple(caps[node] for node in members) if min(caps) < model.layers else None,
    )


class ModeChoice:
    def __init__(self, inventory: Inventory, fabric: Fabric, islands: Sequence[Island]) -> None:
        self._inventory, self._fabric, self._islands = inventory, fabric, islands
        self._nodes, self._model, self._wish = inventory.nodes, inventory.model, inventory.wish
        self._caps = caps_of(inventory)
        pins = [node.stage for node in inventory.nodes if node.stage is not None]
        self._pins = tuple(pins) if inventory.pinned else None

    def decision(self) -> Decision:
        """The mode that was asked for, else the cheapest: C where something is skipped or no island holds the model;
        otherwise A or B by H*. Raises ValueError where the mode that was asked for is not possible, or nothing is."""
        wish = self._wish
        inside = self._stages_inside()
        stages = wish.stages or (max(self._pins) + 1 if self._pins else None) or inside or self._stages_across()
        if wish.skip > 0.0 and wish.mode in (Mode.A, Mode.B):
            raise ValueError(
                f"mode is {wish.mode} and skip is {wish.skip}; only mode C skips stages, A and B take skip 0"
            )
        if wish.mode is Mode.C or (wish.mode is None and wish.skip > 0.0):
            return self._skipping(stages, "asked for" if wish.mode else "stages are skipped")
        holding = [island for island in self._islands if self._holds(island, stages)]
        if not holding:
            if wish.mode is Mode.A:
                raise ValueError(f"mode is A and no island holds {stages} stages; mode B or C can be planned")
            if wish.mode is None:
                return self._skipping(stages, f"no island holds {stages} stages")
        return self._inside_or_across(holding, stages, self._crossover(holding, stages))

    # --- Number of stages

    def _stages_inside(self) -> int | None:
        """The fewest stages with which some island holds the model."""
        most = min(self._model.layers, max(len(one.nodes) for one in self._islands))
        return next((n for n in range(1, most + 1) if any(self._holds(one, n) for one in self._islands)), None)

    def _stages_across(self) -> int:
        total = self._model.layers
        for stages in range(1, min(total, len(self._nodes)) + 1):
            if sum(sorted(self._caps, reverse=True)[:stages]) >= total:
                return stages
        raise ValueError(
            f"all nodes together hold {sum(self._caps)} layers; the model has {total}: "
            f"give nodes a larger max_layers, or more nodes"
        )

    def _holds(self, island: Island, stages: int) -> bool:
        if self._pins is not None:
            return {self._pins[node] for node in island.nodes} >= set(range(stages))
        largest = sorted((self._caps[node] for node in island.nodes), reverse=True)[:stages]
        return len(largest) == stages and sum(largest) >= self._model.layers

    # --- Modes A and B

    def _crossover(self, holding: Sequence[Island], stages: int) -> Crossover | None:
        """Both layouts by DT-FM's cost; None where there is one island, one stage, or stages are given."""
        if self._pins is not None or stages == 1 or len(self._islands) < 2 or not holding:
            return None
        costs = Costs(self._fabric, self._model.parameter_bytes / stages)
        inside = costs.placed(inside_groups(holding, stages))
        across = costs.placed(across_groups(self._islands, stages))
        if len(self._nodes) <= MAX_NODES:
            better = descend(across.groups, costs, h=1, moves=_DESCENT_MOVES, seed=self._wish.seed)
            across = min(across, better, key=lambda placed: placed.step_s(1))
        return Crossover(inside=inside, across=across)

    def _inside_or_across(self, holding: Sequence[Island], stages: int, crossover: Crossover | None) -> Decision:
        wish = self._wish
        if crossover is None:
            mode = wish.mode or (Mode.A if holding else Mode.B)
            why = "asked for" if wish.mode else self._only_way(stages)
        else:
            mode = wish.mode or (Mode.A if crossover.prefers_inside(wish.h) else Mode.B)
            side = "above" if mode is Mode.A else "below"
            why = f"H = {wish.h} is {side} H* = {crossover.h_star:.3g}" if wish.mode is None else "asked for"
        paths = self._inside_paths(holding, stages) if mode is Mode.A else self._across_paths(stages, crossover)
        if crossover is None:
            return Decision(mode=mode, why=why, paths=paths, crossover=None, cost_s=0.0)
        costs = {Mode.A: crossover.inside.step_s(wish.h), Mode.B: crossover.across.step_s(wish.h)}
        other = Mode.B if mode is Mode.A else Mode.A
        words = {Mode.A: "A: pipelines inside islands", Mode.B: "B: pipelines across islands"}
        return Decision(
            mode=mode, why=why, paths=paths, crossover=crossover, cost_s=costs[mode],
            lost=((words[other], costs[other]),),
        )  # fmt: skip

    def _only_way(self, stages: int) -> str:
        if self._pins is not None:
            return "nodes say their stage"
        return "every node holds the whole model" if stages == 1 else "there is one island"

    def _inside_paths(self, holding: Sequence[Island], stages: int) -> Paths:
        """Pipelines inside islands, without links between islands."""
        home = {node: number for number, island in enumerate(holding) for node in island.nodes}
        members = sorted(home)
        part = self._fabric.part(members)
        walled = tuple(
            tuple(
                seconds if home[u] == home[v] else UNREACHABLE_S for v, seconds in zip(members, row, strict=True)
            )
            for u, row in zip(members, part.message_s, strict=True)
        )  # fmt: skip
        over: list[int] = []
        for island in holding:
            slowest = sorted(island.nodes, key=lambda node: (self._caps[node], -self._nodes[node].layer_s, -node))
            over += slowest[: len(island.nodes) % stages]
        place = {node: index for index, node in enumerate(members)}
        left_out = sorted(place[node] for node in over) if self._pins is None else ()
        task = self._task(members, walled, stages, stages, stage_of=self._pins, left_out=left_out)
        return _spread(plan_paths(task), members, len(self._nodes))

    def _across_paths(self, stages: int, crossover: Crossover | None) -> Paths:
        """Holmes' layout: stages are blocks of nodes of one kind, pipelines join them."""
        groups: Groups = crossover.across.groups if crossover else across_groups(self._islands, stages)
        stage_of = self._pins or tuple(
            next(stage for stage, group in enumerate(groups) if node in group) for node in range(len(self._nodes))
        )
        members = list(range(len(self._nodes)))
        return plan_paths(self._task(members, self._fabric.message_s, stages, stages, stage_of=stage_of))

    # --- Mode C

    def _skipping(self, stages: int, why: str) -> Decision:
        length = path_length(stages, self._wish.skip)
        if stages > 1 and length < 2:
            raise ValueError(
                f"skip is {self._wish.skip}: with {stages} stages no path would leave its source; "
                f"the most that can be planned is {(stages - 2) / stages:.2f}"
            )
        members = list(range(len(self._nodes)))
        task = self._task(members, self._fabric.message_s, stages, length, stage_of=self._pins)
        paths = plan_paths(task)
        compared: list[tuple[str, float]] = [("paths dealt at random", random_paths(task, paths).makespan_s)]
        if length < stages:
            full = self._task(members, task.message_s, stages, stages, stage_of=paths.stage_of)
            with contextlib.suppress(ValueError):  # nodes that cannot carry full pipelines have nothing to compare with
                compared.insert(0, ("full pipelines, nothing skipped", plan_paths(full).makespan_s))
        compared = [(name, seconds) for name, seconds in compared if seconds < UNREACHABLE_S]
        return Decision(mode=Mode.C, why=why, paths=paths, crossover=None, cost_s=0.0, compared=tuple(compared))

    def _task(
        self,
        members: Sequence[int],
        message_s: Sequence[Sequence[float]],
        stages: int,
        length: int,
        *,
        stage_of: Sequence[int] | None = None,
        left_out: Sequence[int] = (),
    ) -> Task:
        model, wish = self._model, self._wish
        if len(members) < stages and stage_of is None and length == stages:
            raise ValueError(f"stages is {stages}; {len(members)} nodes can be joined, so at most that many")
        work = work_of(self._inventory, members, self._inventory.cut or min_max_split(model.layers, [1.0] * stages))
        return Task(
            work=work,
            message_s=message_s,
            stages=stages,
            length=length,
            limits=PUBLISHED if length < stages else IN_ORDER,
            stage_of=None if stage_of is None else tuple(stage_of[node] for node in members),
            seed=wish.seed,
            effort=wish.effort,
            keeps_cut=self._inventory.cut is not None,
            left_out=tuple(left_out),
        )


def _spread(paths: Paths, members: Sequence[int], count: int) -> Paths:
    """Paths of some nodes in the numbers of all; nodes that are not among them have stage −1."""
    if list(members) == list(range(count)):
        return paths
    stage_of, layer_s, slots = [-1] * count, [0.0] * count, [1] * count
    for index, node in enumerate(members):
        stage_of[node] = paths.stage_of[index]
        layer_s[node] = paths.work.layer_s[index]
        slots[node] = paths.work.slots[index]
    routes = tuple(replace(route, nodes=tuple(members[node] for node in route.nodes)) for route in paths.routes)
    work = replace(paths.work, layer_s=tuple(layer_s), slots=tuple(slots), max_layers=None)
    return replace(paths, routes=routes, stage_of=tuple(stage_of), work=work)


# --- Cost of a running layout, for comparison with a new plan


class NotPredicted(Exception):
    """Why the present paths cannot be predicted, as a sentence."""


def present_step_s(layout: StageLayout, inventory: Inventory) -> float:
    """Seconds of an inner step along a layout's paths, by the inventory's nodes and links.
    Raises NotPredicted: a node of theirs is not there, or a link of theirs is not known or not believed."""
    place = {node.name: number for number, node in enumerate(inventory.nodes)}
    fabric = fabric_of(inventory)
    for path in layout.paths:
        _check(path, place, fabric)
    routes = [
        Route(nodes=tuple(place[hop.node] for hop in path.hops), stages=tuple(hop.stage for hop in path.hops))
        for path in layout.paths
    ]
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
