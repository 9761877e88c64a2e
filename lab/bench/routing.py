"""The planner's own experiments: what it chooses, how long that takes, and what it is worth in simulations.

No processes and no sockets here: seconds of training are predicted or simulated, seconds of planning are measured.
"""

import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from farloop.planner.anomalies import Action, Sample, next_step, slow
from farloop.planner.inventory import COORDINATOR, Hub, Inventory, Link, Model, Node, PlanRequest
from farloop.planner.mode import simulated
from farloop.planner.plan import Plan, make_plan
from farloop.sim.flow.links import SharedLink, Transfer
from farloop.sim.virtual_time import EventQueue

# --- 1: which mode


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRow:
    """Both layouts of two islands of two nodes at one H, and what the planner takes."""

    h: int
    inside_s: float
    across_s: float
    chosen: str


def two_islands(h: int) -> Inventory:
    """10 Gbit/s and 1 ms inside, 0.5 Gbit/s and 50 ms between; 0.4 GB of gradients, 50 MB of activations."""
    inside, across = Link(latency_s=1e-3, bytes_per_s=1.25e9), Link(latency_s=0.05, bytes_per_s=0.0625e9)
    return Inventory(
        nodes=tuple(Node(name=name, site=name[0].upper(), layer_s=0.1) for name in ("x0", "x1", "y0", "y1")),
        model=Model(layers=2, activation_bytes=0.05e9, parameter_bytes=0.8e9),
        links={("X", "X"): inside, ("Y", "Y"): inside, ("X", "Y"): across, ("Y", "X"): across},
        wish=PlanRequest(h=h, stages=2),
    )


def modes() -> tuple[tuple[ModeRow, ...], float]:
    """(rows, H*)."""
    rows, star = [], 0.0
    for h in (1, 2, 3, 4, 8, 16, 50):
        plan = make_plan(two_islands(h))
        star = plan.h_star or 0.0
        (lost,) = plan.alternatives
        mine, other = lost.chosen_s, lost.seconds
        a, b = (mine, other) if plan.mode.value == "A" else (other, mine)
        rows.append(ModeRow(h=h, inside_s=a, across_s=b, chosen=plan.mode.value))
    return tuple(rows), star


# --- 2: paths of a small instance


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallPaths:
    """Eight nodes, four stages of two, one microbatch from each of two sources, forward passes of 10 ms."""

    paths: tuple[tuple[str, ...], ...]
    step_ms: float
    full_ms: float
    random_ms: float


_FROM_SOURCES = ((1, 5, 2, 6, 4, 3), (4, 1, 5, 2, 2, 6))
_BETWEEN = {(2, 4): 1, (2, 5): 3, (2, 6): 2, (2, 7): 5, (3, 4): 4, (3, 5): 1, (3, 6): 6, (3, 7): 2, (4, 6): 3,
            (4, 7): 1, (5, 6): 1, (5, 7): 4}  # fmt: skip


def small_instance(unit_s: float = 0.01) -> Inventory:
    """Its links take 1 to 6 units each way."""
    pairs = {(source, 2 + one): value for source, row in enumerate(_FROM_SOURCES) for one, value in enumerate(row)}
    links = {}
    for (u, v), units in {**pairs, **_BETWEEN}.items():
        links[str(u), str(v)] = links[str(v), str(u)] = Link(latency_s=units * unit_s)
    return Inventory(
        nodes=tuple(Node(name=str(node), layer_s=unit_s, stage=node // 2) for node in range(8)),
        model=Model(layers=4),
        links=links,
        wish=PlanRequest(stages=4, skip=0.25),
    )


def small_paths() -> SmallPaths:
    plan = make_plan(small_instance())
    compared = {one.name: one.seconds for one in plan.alternatives}
    return SmallPaths(
        paths=tuple(tuple(hop.node for hop in path.hops) for path in plan.layout.paths),
        step_ms=1e3 * plan.step_s,
        full_ms=1e3 * compared["full pipelines, nothing skipped"],
        random_ms=1e3 * compared["paths dealt at random"],
    )


# --- 3: how long planning takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A plan of many nodes at twelve sites."""

    nodes: int
    plan_s: float
    cpu_s: float
    peak_mb: float  # of this whole process so far
    step_s: float
    random_s: float
    same_again: bool


def world(count: int, *, stages: int, skip: float, seed: int = 0) -> Inventory:
    """Nodes at sites around a circle: the farther apart, the slower. All numbers made up."""
    links, sites = {}, 12
    for a in range(sites):
        for b in range(sites):
            away = min(abs(a - b), sites - abs(a - b))
            rate = 2e9 if away == 0 else 3e8 / (1 + 3 * away)
            links[f"s{a}", f"s{b}"] = Link(latency_s=1e-3 + 0.02 * away, bytes_per_s=rate)
    return Inventory(
        nodes=tuple(Node(name=f"n{k}", site=f"s{k % sites}", layer_s=0.1, slots=3) for k in range(count)),
        model=Model(layers=24, activation_bytes=33e6, microbatches=6, gap_s=0.1, overhead_s=0.3),
        links=links,
        wish=PlanRequest(stages=stages, skip=skip, seed=seed),
    )


def planning(sizes: Sequence[int]) -> Iterator[Planning]:
    for count in sizes:
        inventory = world(count, stages=6 if count < 64 else 8, skip=1 / 3 if count < 64 else 0.25)
        began, cpu = time.perf_counter(), time.process_time()
        plan = make_plan(inventory)
        took, cpu_took = time.perf_counter() - began, time.process_time() - cpu
        compared = {one.name: one.seconds for one in plan.alternatives}
        yield Planning(
            nodes=count,
            plan_s=took,
            cpu_s=cpu_took,
            peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
            step_s=plan.step_s,
            random_s=compared["paths dealt at random"],
            same_again=make_plan(inventory) == plan,
        )


# --- 4: a link becomes slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    name: str
    num_bytes: int
    links: tuple[str, ...]  # it crosses all of them at once
    latency_s: float = 0.0  # from its last byte sent to its last byte there


def play(flows: Sequence[Flow], bytes_per_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds until each flow has arrived, over links by their names."""
    agenda, sent = EventQueue(), dict[str, float]()
    links = {name: SharedLink(agenda, rate) for name, rate in bytes_per_s.items()}

    def end(name: str) -> None:
        sent[name] = agenda.now

    for flow in flows:
        Transfer([links[name] for name in flow.links], flow.num_bytes, partial(end, flow.name))
    while agenda.step():
        pass
    return {flow.name: sent[flow.name] + flow.latency_s for flow in flows}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowLink:
    """Rounds of a run in which one uplink becomes slow; all seconds simulated."""

    round_s: tuple[float, ...]
    slow_from: int  # round, from 0
    found_at: int
    found: str
    actions: tuple[str, ...]
    before: str
    after: str  # bits and H of the slow node
    replanned_at: int
    path_old_s: float
    path_new_s: float  # a step along paths over a slow link, and along those that are planned with it


_NOISE = 0.03
_SLOWED = 8.0


def slow_link(*, seed: int = 0) -> SlowLink:
    """Eight nodes sync; the uplink of one becomes eight times slower; the planner is told what is measured."""
    rand, slow_from = random.Random(seed), 6
    inventory = _eight()
    plan = make_plan(inventory)
    history: list[dict[str, Sample]] = []
    seconds: list[float] = []
    taken: list[Action] = []
    found_at = replanned_at = -1
    found, before = "", _rate_text(plan, "n3")
    for number in range(16):
        slowed = {"n3"} if number >= slow_from else set[str]()
        samples = _round(inventory, plan, slowed, rand, known=replanned_at >= 0)
        history.append(samples)
        seconds.append(max(one.compute_s + one.transfer_s for one in samples.values()))
        if replanned_at < 0 and (flagged := slow(history)):
            step = next_step(flagged[0], taken)
            taken.append(step.action)
            if found_at < 0:
                found_at, found = number, flagged[0].reason
            if step.action is Action.LIGHTEN:
                measured = replace(inventory.links["n3", COORDINATOR], bytes_per_s=_UPLINK / _SLOWED)
                inventory = replace(inventory, links={**inventory.links, ("n3", COORDINATOR): measured})
                plan, replanned_at = make_plan(inventory), number + 1
    old_s, new_s = _slow_path(seed)
    return SlowLink(
        round_s=tuple(seconds), slow_from=slow_from, found_at=found_at, found=found,
        actions=tuple(action.value for action in taken), before=before, after=_rate_text(plan, "n3"),
        replanned_at=replanned_at, path_old_s=old_s, path_new_s=new_s,
    )  # fmt: skip


_UPLINK = 25e6


def _eight() -> Inventory:
    links = {(f"n{k}", COORDINATOR): Link(latency_s=0.03, bytes_per_s=_UPLINK) for k in range(8)}
    links |= {(COORDINATOR, f"n{k}"): Link(latency_s=0.03, bytes_per_s=_UPLINK) for k in range(8)}
    return Inventory(
        nodes=tuple(Node(name=f"n{k}", layer_s=0.02) for k in range(8)),
        model=Model(layers=12, parameter_bytes=400e6),
        links=links,
        hub=Hub(in_bytes_per_s=1.25e9, out_bytes_per_s=1.25e9),
        wish=PlanRequest(h=50, bits=(8, 4, 2)),
    )


def _rate_text(plan: Plan, name: str) -> str:
    assert plan.sync is not None
    rate = plan.sync.rates[name]
    return f"{rate.bits} bit, H = {rate.h}"


def _round(
    inventory: Inventory, plan: Plan, slowed: set[str], rand: random.Random, *, known: bool
) -> dict[str, Sample]:
    """What each node took, and what the plan said it would; a slow link that the plan knows is expected."""
    assert plan.sync is not None
    flows = [
        Flow(name=name, num_bytes=round(size), links=(f"{name} up", "hub"), latency_s=0.03)
        for name, size in plan.sync.payload_bytes.items()
    ]
    rates = {f"{name} up": _UPLINK / (_SLOWED if name in slowed else 1.0) for name in plan.sync.payload_bytes}
    arrived = play(flows, {**rates, "hub": 1.25e9})
    found = {}
    for name, own in plan.sync.rates.items():
        link = inventory.links[name, COORDINATOR]
        compute = own.h * plan.step_s
        found[name] = Sample(
            compute_s=compute * rand.lognormvariate(0.0, _NOISE),
            expected_compute_s=compute,
            transfer_s=arrived[name] * rand.lognormvariate(0.0, _NOISE),
            expected_transfer_s=link.seconds(plan.sync.payload_bytes[name]),
        )
    return found


def _slow_path(seed: int) -> tuple[float, float]:
    """Paths of 20 nodes over a site link that becomes slow: as they were planned, and planned anew."""
    inventory = world(20, stages=6, skip=1 / 3, seed=seed)
    plan = make_plan(inventory)
    slowest = max(plan.source_s, key=lambda one: one[1])[0]
    way = next(path for path in plan.layout.paths if path.source == slowest)
    ends = [hop.node for hop in way.hops[:2]]
    links = dict(inventory.links)
    by_name = {node.name: node for node in inventory.nodes}
    for a, b in (ends, ends[::-1]):
        link = inventory.link(by_name[a], by_name[b])
        assert link is not None
        links[a, b] = replace(link, bytes_per_s=link.bytes_per_s / _SLOWED)
    changed = replace(inventory, links=links)
    return _along(plan, changed), make_plan(changed).step_s


def _along(plan: Plan, inventory: Inventory) -> float:
    """A step of a plan over links as they are now."""
    model = inventory.model
    seconds = [
        [0.0 if u is v else link.seconds(model.activation_bytes) + model.overhead_s if link else 1e6
         for v in inventory.nodes for link in [inventory.link(u, v)]]
        for u in inventory.nodes
    ]  # fmt: skip
    return simulated(plan.layout, inventory, seconds).makespan_s


# --- all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What all experiments found."""

    modes: tuple[ModeRow, ...]
    h_star: float
    small: SmallPaths
    planning: tuple[Planning, ...]
    slow_link: SlowLink

    @property
    def recovered(self) -> float:
        """Mean round while the link was slow and unknown, over that after the plan was made anew."""
        slowed = self.slow_link.round_s[self.slow_link.slow_from : self.slow_link.replanned_at]
        return statistics.fmean(slowed) / statistics.fmean(self.slow_link.round_s[self.slow_link.replanned_at :])


def measure(sizes: Sequence[int], say: Callable[[str], None]) -> Findings:
    """All experiments; plans for these numbers of nodes."""
    rows, star = modes()
    timed = []
    for row in planning(sizes):
        say(f"{row.nodes} nodes planned in {row.plan_s:.2f} s")
        timed.append(row)
    return Findings(
        modes=rows,
        h_star=star,
        small=small_paths(),
        planning=tuple(timed),
        slow_link=slow_link(),
    )


def text(findings: Findings) -> str:
    """What was found, in lines."""
    small, slow = findings.small, findings.slow_link
    chosen = ", ".join(f"{row.chosen} at H = {row.h}" for row in findings.modes)
    lines = [
        f" modes     {chosen}; H* = {findings.h_star:.2f}",
        f" paths     {', '.join('-'.join(path) for path in small.paths)}: {small.step_ms:.1f} ms; "
        f"full pipelines {small.full_ms:.1f}, random {small.random_ms:.1f}",
    ]
    lines += [
        f" planning  {row.nodes} nodes in {row.plan_s:.2f} s ({row.cpu_s:.2f} s of CPU, {row.peak_mb:.0f} MB), "
        f"step {row.step_s:.1f} s, random {row.random_s:.1f} s, again {'the same' if row.same_again else 'ANOTHER'}"
        for row in findings.planning
    ]
    lines.append(
        f" slow link from round {slow.slow_from}, named in round {slow.found_at}: {slow.found}; "
        f"{slow.before} → {slow.after}, rounds {findings.recovered:.1f} times as fast as before the new plan; "
        f"paths {slow.path_old_s:.1f} → {slow.path_new_s:.1f} s"
    )
    return "\n".join(lines)
