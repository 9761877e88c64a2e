"""The whole plan: from an inventory to islands, layout, paths, sync, and their predicted times.

The same inventory gives the same plan on every machine. A plan also lists the rejected options with their times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal

from farloop.algo.stages import Hop, Path, Stage, StageLayout
from farloop.monitoring.units import few_of
from farloop.planner.anomalies import UNREACHABLE_S
from farloop.planner.fabric import Fabric, Island, fabric_of, islands_of
from farloop.planner.inventory import LOCAL, Hub, Inventory, Mode
from farloop.planner.mode import Decision, ModeChoice
from farloop.planner.placement import Groups, Transport, all_reduce_s, transport
from farloop.planner.routes import Paths
from farloop.planner.simulator import Outcome, simulate
from farloop.planner.sync_plan import Pace, Rate, choose

# --- The predicted seconds of a sync
#
# A fluid model with fair sharing: a transfer takes as long as its slowest link, and a link as long as all its bytes
# take.


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Links of a node to the coordinator; rates in bytes/s."""

    up: float
    down: float
    latency_s: float
    payload: float  # bytes it sends in a round; as many come back


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    name: str
    up_s: float
    down_s: float

    @property
    def round_s(self) -> float:
        """Up, then down, nothing overlapped."""
        return self.up_s + self.down_s

    def overlapped_s(self, fragments: int) -> float:
        """Fragments one after the other over full-duplex links: max(up, down) + (up + down)/F, if that is less."""
        return min(self.round_s, max(self.up_s, self.down_s) + self.round_s / fragments)


def star(workers: Sequence[Worker], hub: Hub) -> Prediction:
    """max(maxᵢ Sᵢ/uᵢ + lᵢ, ΣSᵢ/D + l); the same downwards with the other rates."""
    total = sum(worker.payload for worker in workers)
    least = min(worker.latency_s for worker in workers)
    up = max(worker.payload / worker.up + worker.latency_s for worker in workers)
    down = max(worker.payload / worker.down + worker.latency_s for worker in workers)
    return Prediction(
        name="star",
        up_s=max(up, total / hub.in_bytes_per_s + least),
        down_s=max(down, total / hub.out_bytes_per_s + least),
    )


# --- The sync of a plan: bits, interval and seconds

_FP32_BITS = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    rates: Mapping[str, Rate]  # by node
    star: Prediction  # through the coordinator, as the daemons do it
    within: Prediction | None
    """An all-reduce inside islands, if the replicas of each stage share one, by links that are given."""
    fragments: int
    payload_bytes: Mapping[str, float]  # bytes per node and round, each way

    @property
    def priced(self) -> Prediction:
        """What the plan counts: the faster."""
        return min(self.predicted, key=lambda one: one.round_s)

    @property
    def predicted(self) -> tuple[Prediction, ...]:
        return (self.star,) if self.within is None else (self.star, self.within)


def plan_sync(
    inventory: Inventory,
    fabric: Fabric,
    islands: Sequence[Island],
    groups: Groups,
    share: Mapping[int, float],
    pipelines: Sequence[tuple[Sequence[int], float]],
) -> Sync | None:
    """The sync of `groups` of nodes that hold `share` (≤ 1) of the parameters each; None without links to the
    coordinator.

    `pipelines` are (nodes, seconds of a step): nodes that step together do the same number of steps at the same bits,
    those of the slowest link among them.
    """
    nodes, model, wish = inventory.nodes, inventory.model, inventory.wish
    members = sorted(share)
    ups = {node: inventory.uplink(nodes[node]) for node in members}
    downs = {node: inventory.downlink(nodes[node]) for node in members}
    if not members or model.parameter_bytes == 0.0 or None in ups.values() or None in downs.values():
        return None
    up = {node: link.bytes_per_s for node, link in ups.items() if link is not None}
    down = {node: link.bytes_per_s for node, link in downs.items() if link is not None}
    paces = [
        Pace(step_s=max(step_s, 1e-9), bytes_per_s=min(up[node] / share[node] for node in several))
        for several, step_s in pipelines
    ]
    parameters = model.parameter_bytes / 4.0
    chosen = choose(paces, h=wish.h, parameters=parameters, bits=wish.bits)
    rates = {node: rate for (several, _), rate in zip(pipelines, chosen, strict=True) for node in several}
    payload = {
        node: share[node] * model.parameter_bytes * (rates[node].bits if node in rates else max(wish.bits)) / _FP32_BITS
        for node in members
    }
    workers = [
        Worker(up=up[node], down=down[node], latency_s=link.latency_s, payload=payload[node])
        for node in members
        if (link := ups[node]) is not None
    ]
    within = None
    assumed = any(_lonely(inventory, nodes[node].site) for node in members)
    if max(map(len, groups)) > 1 and not assumed and all(_together(islands, group) for group in groups):
        sent = {
            node: size if model.sync_bytes is None else share[node] * parameters * model.sync_bytes
            for node, size in payload.items()
        }
        half = max(all_reduce_s(group, fabric, max(sent[node] for node in group)) for group in groups) / 2.0
        within = Prediction(name="all-reduce inside islands", up_s=half, down_s=half)
    return Sync(
        rates={nodes[node].name: rate for node, rate in sorted(rates.items())},
        star=star(workers, inventory.hub or Hub()),
        within=within,
        fragments=wish.fragments,
        payload_bytes={nodes[node].name: payload[node] for node in members},
    )


# --- The plan

LEAST_COVERAGE = 0.5  # share of the microbatches that should visit a stage; a plan notes less
SLOW_SOURCE = 10.0  # times the median source: a plan notes a slower one


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes that hold the same stage and agree on it."""

    stage: int
    nodes: tuple[str, ...]
    transport: Transport  # best transport of a collective among them


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOption:
    """A rejected plan, or a reference."""

    name: str
    seconds: float  # in the unit of `of`
    chosen_s: float  # the chosen plan's
    of: str  # what the seconds are of

    @property
    def factor(self) -> float:
        """How many times as long as the chosen plan."""
        return self.seconds / self.chosen_s if self.chosen_s > 0.0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInterval:
    """A piece of work of the slowest source in a step: a forward pass (F), a loss (L) or a backward pass (B)."""

    node: str
    stage: int
    kind: Literal["F", "L", "B"]
    microbatch: int
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    mode: Mode
    why: str
    islands: tuple[tuple[str, ...], ...]
    layout: StageLayout
    groups: tuple[Group, ...]
    step_s: float  # simulated seconds of an inner step's microbatches
    bound_s: float  # no step along these paths is shorter
    optimal: bool  # proven: with these layers, no paths that share no node are faster
    h_star: float | None  # smallest H at which pipelines stay inside islands; None without a choice
    h: int
    sync: Sync | None  # None where links to the coordinator are not known
    sync_s: float | None
    """Of a round, blocking: as `Sync.priced`, or of an all-reduce among replicas where no star can be predicted; None
    where no links join those."""
    compute_s: float  # seconds of a round's inner steps
    alternatives: tuple[PlanOption, ...]
    suspects: tuple[tuple[str, str], ...]
    """Links that are too slow to be believed, left out until they are probed again."""
    standby: tuple[str, ...]  # replicas without work
    idle: tuple[str, ...]  # nodes without a stage: their island does not hold the model
    notes: tuple[str, ...]
    beats: tuple[StepInterval, ...]  # a step of the slowest source
    source_s: tuple[tuple[str, float], ...]  # seconds of a step of every source
    seed: int

    @property
    def round_s(self) -> float | None:
        """Seconds of H steps and the sync, nothing overlapped."""
        return None if self.sync_s is None else self.compute_s + self.sync_s

    @property
    def streamed_round_s(self) -> float | None:
        """Seconds of a round if fragments are sent during training: the longer of both."""
        if self.sync_s is None:
            return None
        if self.sync is None:
            return max(self.compute_s, self.sync_s)
        return max(self.compute_s, self.sync.priced.overlapped_s(self.sync.fragments))

    @property
    def compute_share(self) -> float | None:
        """Share of a blocking round that is steps: H·τ/(H·τ + T)."""
        if self.round_s is None:
            return None
        return self.compute_s / self.round_s if self.round_s else 1.0

    @property
    def streamed_compute_share(self) -> float | None:
        """As `compute_share`, of a streamed round."""
        if self.streamed_round_s is None:
            return None
        return self.compute_s / self.streamed_round_s if self.streamed_round_s else 1.0


def make_plan(inventory: Inventory) -> Plan:
    """The plan of an inventory. Raises ValueError: nothing can be planned, with what would have to change."""
    fabric = fabric_of(inventory)
    islands = islands_of(inventory)
    decision = ModeChoice(inventory, fabric, islands).decision()
    paths = decision.paths
    outcome = simulate(paths.routes, paths.work, fabric.message_s, keep=True)
    layout = _layout(inventory, paths)
    names = [node.name for node in inventory.nodes]
    sync, sync_s, compute_s = _synced(inventory, fabric, islands, paths, outcome)
    used = {node for route in paths.routes for node in route.nodes}
    return Plan(
        mode=decision.mode,
        why=decision.why,
        islands=tuple(tuple(names[node] for node in island.nodes) for island in islands),
        layout=layout,
        groups=tuple(
            Group(
                stage=number,
                nodes=stage.replicas,
                transport=_transport(inventory, islands, [names.index(name) for name in stage.replicas]),
            )
            for number, stage in enumerate(layout.stages)
        ),
        step_s=outcome.makespan_s,
        bound_s=paths.bound_s,
        optimal=paths.optimal,
        h_star=decision.crossover.h_star if decision.crossover is not None else None,
        h=inventory.wish.h,
        sync=sync,
        sync_s=sync_s,
        compute_s=compute_s,
        alternatives=_alternatives(decision, sync, outcome),
        suspects=tuple((names[u], names[v]) for u, v in fabric.suspects),
        standby=tuple(names[n] for n, stage in enumerate(paths.stage_of) if stage >= 0 and n not in used),
        idle=tuple(names[n] for n, stage in enumerate(paths.stage_of) if stage < 0),
        notes=_notes(inventory, paths, outcome, sync, sync_s),
        beats=_beats(inventory, paths, outcome),
        source_s=tuple((names[source], seconds) for source, seconds in outcome.source_s.items()),
        seed=inventory.wish.seed,
    )


def _beats(inventory: Inventory, paths: Paths, outcome: Outcome) -> tuple[StepInterval, ...]:
    slowest = max(outcome.source_s, key=lambda source: outcome.source_s[source])
    return tuple(
        StepInterval(
            node=inventory.nodes[piece.node].name,
            stage=paths.stage_of[piece.node],
            kind=piece.kind,
            microbatch=piece.microbatch,
            start_s=piece.start_s,
            stop_s=piece.stop_s,
        )
        for piece in outcome.pieces
        if piece.source == slowest
    )


def _layout(inventory: Inventory, paths: Paths) -> StageLayout:
    names = [node.name for node in inventory.nodes]
    first, stages = 0, []
    for number, layers in enumerate(paths.work.layers):
        replicas = tuple(names[node] for node, stage in enumerate(paths.stage_of) if stage == number)
        stages.append(Stage(first=first, stop=first + layers, replicas=replicas))
        first += layers
    ways = tuple(
        Path(hops=tuple(Hop(stage=s, node=names[n]) for n, s in zip(route.nodes, route.stages, strict=True)))
        for route in paths.routes
    )
    layout = StageLayout(epoch=0, stages=tuple(stages), paths=ways)
    faults = list(layout.faults())
    assert not faults, faults
    return layout


def _transport(inventory: Inventory, islands: Sequence[Island], members: Sequence[int]) -> Transport:
    """RDMA among nodes of one island with one RDMA fabric; a group across islands speaks TCP."""
    kinds = [inventory.nodes[node].fabric for node in members]
    return transport(kinds) if _together(islands, members) else Transport.SOCKET


def _together(islands: Sequence[Island], members: Sequence[int]) -> bool:
    return any(set(members) <= set(island.nodes) for island in islands)


def _synced(
    inventory: Inventory, fabric: Fabric, islands: Sequence[Island], paths: Paths, outcome: Outcome
) -> tuple[Sync | None, float | None, float]:
    """(what nodes send, seconds of a round's sync, None where nothing joins replicas, seconds of its steps)."""
    model, wish = inventory.model, inventory.wish
    total = sum(paths.work.layers)
    share = {node: paths.work.layers[stage] / total for node, stage in enumerate(paths.stage_of) if stage >= 0}
    members: dict[int, list[int]] = {}
    for route in paths.routes:
        members.setdefault(route.source, []).extend(route.nodes)
    pipelines = [(list(dict.fromkeys(nodes)), outcome.source_s[source]) for source, nodes in members.items()]
    groups = tuple(
        tuple(node for node, own in enumerate(paths.stage_of) if own == stage)
        for stage in range(len(paths.work.layers))
    )
    sync = plan_sync(inventory, fabric, islands, groups, share, pipelines)
    if sync is None:
        sent = model.parameter_bytes * (1.0 if model.sync_bytes is None else model.sync_bytes / 4.0)
        reduce_s = max(all_reduce_s(group, fabric, sent * share[group[0]]) for group in groups)
        return None, reduce_s if reduce_s < UNREACHABLE_S else None, wish.h * outcome.makespan_s
    first = {source: inventory.nodes[nodes[0]].name for source, nodes in members.items()}
    compute = max(sync.rates[first[source]].h * outcome.source_s[source] for source in members)
    return sync, sync.priced.round_s, compute


def _alternatives(decision: Decision, sync: Sync | None, outcome: Outcome) -> tuple[PlanOption, ...]:
    found = [
        PlanOption(name=name, seconds=seconds, chosen_s=decision.cost_s, of="communication of a step")
        for name, seconds in decision.lost
    ]
    found += [
        PlanOption(name=name, seconds=seconds, chosen_s=outcome.makespan_s, of="step")
        for name, seconds in decision.compared
    ]
    if sync is not None:
        priced = sync.priced
        found += [
            PlanOption(
                name=one.name, seconds=one.round_s, chosen_s=priced.round_s, of=f"sync, against the {priced.name}"
            )
            for one in sync.predicted
            if one is not priced
        ]
    return tuple(found)


def _notes(
    inventory: Inventory, paths: Paths, outcome: Outcome, sync: Sync | None, sync_s: float | None
) -> tuple[str, ...]:
    found = []
    usual_s = median_low(outcome.source_s.values())
    for source, seconds in outcome.source_s.items():
        if seconds > SLOW_SOURCE * usual_s:
            found.append(
                f"a step of source {inventory.nodes[source].name} takes {seconds:.3g} s, and of the median source "
                f"{usual_s:.3g} s: a sync waits for it; leave it out of the inventory, or give it a share of the steps"
            )
    if sync is None:
        how = "is predicted as an all-reduce among replicas" if sync_s is not None else "is not predicted"
        found.append(f"{_unknown_of(inventory)}: the sync {how}, bits and H are left as they are")
    elif sync.priced is not sync.star:
        found.append(
            f"the sync is counted as an all-reduce inside islands, {sync.priced.round_s:.3g} s; "
            f"through the coordinator, as the daemons do it, it takes {sync.star.round_s:.3g} s"
        )
    for stage, share in enumerate(_coverage(paths)):
        if share < LEAST_COVERAGE:
            found.append(f"only {100 * share:.0f} % of the microbatches visit stage {stage}: it learns that much less")
    assumed = {node.site for node in inventory.nodes if _lonely(inventory, node.site)}
    if assumed:
        found.append(
            f"nothing is given for links inside {', '.join(sorted(assumed)[:4])}: 10 Gbit/s and 0.5 ms are assumed"
        )
    guessed = sum(link.assumed for link in inventory.links.values())
    if guessed:
        found.append(f"{guessed} links have a measured round trip and no rate: that of the slower end is assumed")
    return tuple(found)


def _unknown_of(inventory: Inventory) -> str:
    """What is unknown and needed to predict a sync over the star."""
    if inventory.model.parameter_bytes == 0.0:
        return "the size of the parameters is not given"
    nodes = inventory.nodes
    far = [node.name for node in nodes if None in (inventory.uplink(node), inventory.downlink(node))]
    if len(far) == len(nodes):
        return "links to the coordinator are neither given nor measured yet"
    return f"the coordinator's link is not known in both directions for {few_of(far, 4)}"


def _coverage(paths: Paths) -> list[float]:
    """Share of all microbatches that visit each stage."""
    visits = [0.0] * len(paths.work.layers)
    sources = [route.source for route in paths.routes]
    for route in paths.routes:
        for stage in route.stages:
            visits[stage] += 1.0 / sources.count(route.source)
    return [count / len(set(sources)) for count in visits]


def _lonely(inventory: Inventory, site: str) -> bool:
    members = [node for node in inventory.nodes if node.site == site]
    if len(members) < 2:
        return False
    return inventory.link(members[0], members[1]) is LOCAL
