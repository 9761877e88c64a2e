"""Flow scenarios and failure traces."""

import dataclasses
import math
import random
import sys
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, get_args

import numpy as np

from farloop.algo.methods import METHODS
from farloop.algo.validation import require
from farloop.monitoring.units import (
    BELOW_1,
    LEAST_0,
    LEAST_1,
    AtLeast,
    Checked,
    Count,
    NotNegative,
    OneOf,
    filled,
)

# --- Scenario: machines, links, faults, and the methods to compare
# Values.
#
# A scenario is a table of cases: variants (rules) × swept values × seeds. `cases` spells them out. All of it is plain
# data with defaults, so that a file needs to say only what it cares for; whatever cannot be is refused in a sentence
# that begins with the key.


MethodName = Literal["data-parallel", "elastic", "diloco", "streaming", "decoupled"]

METHOD_NAMES: Final[tuple[MethodName, ...]] = get_args(MethodName)

LOCK_STEP: Final = frozenset({"data-parallel", "elastic"})  # methods whose machines take every step together
_FASTEST: Final = 1e18  # bytes a second of a link that has no limit


_MOST_NODES: Final = 10_000_000  # of a group; also machines of a node
_MOST_EVENTS: Final = AtLeast(0.0, most=1e6, wanted="0 to 1000000")  # crashes or outages in an hour
_MOST_REPEATS: Final = 10_000
MOST_STEPS: Final = 100_000_000_000
"""Inner steps of all nodes and cases: a day or two of simulation where a node's round has 100 steps."""

_LIMIT: Final = AtLeast(math.ulp(0.0), wanted="a number above 0 (leave it out for no limit)")  # or infinite
_SHARE: Final = AtLeast(0.0, most=1.0, wanted="0 to 1")

OPEN: Final[Any] = None
"""What a field is set to that follows from the method."""

_FRAGMENTS: Final = {"streaming": 6, "decoupled": 6}
"""Where nothing is said: those of a model of 18 layers or so, cut by three; the other methods send it whole."""

_BITS: Final = {"data-parallel": 32.0, "elastic": 32.0}
"""Gradients go as fp32; deltas and updates as q4 with its scales."""

_Q4_BITS: Final = 4.25

_OF_METHOD: Final = ("h", "tau", "lag", "quorum", "max_staleness", "max_stale_rounds", "per_node_h")
"""What a row of the table of methods decides unless it is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules(Checked):
    """How it is trained. What is left open gets the method's value (algo/methods.py)."""

    method: MethodName = "decoupled"
    h: Count = OPEN  # inner steps of a round; lock-step methods synchronise every step
    fragments: Count = OPEN  # equal parts of the model, each sent once a round, in a slot of its own
    tau: Annotated[int, LEAST_0] = OPEN  # inner steps between a send and its merge
    lag: int = OPEN  # rounds that an update comes late: 1 gives it the whole next round to come, without tau
    quorum: Annotated[int | None, LEAST_1] = OPEN  # deltas that can close a window; None: all that are expected
    max_staleness: Annotated[int, LEAST_0] = OPEN  # windows that a delta may come too late and still be merged
    max_stale_rounds: Annotated[int, LEAST_0] = OPEN  # rounds that a node runs past an unanswered send before it waits
    per_node_h: bool = OPEN  # slow nodes do fewer inner steps in a round
    bits_up: NotNegative = OPEN  # bits per parameter of a delta, scales included
    bits_down: NotNegative = OPEN  # bits per parameter of an update
    commit_s: NotNegative = 0.0  # summing, stepping, encoding and storing one window
    liveness_s: NotNegative = 10.0  # silence after which the others go on without a node
    reconfigure_s: NotNegative = 30.0
    """Everybody's pause (`elastic`), or that of one cluster of several machines, after a crash, to go on without it."""
    restart_s: NotNegative = 60.0  # from the last repair to the next step (`data-parallel`)
    checkpoint_steps: Count = 1
    """Inner steps between two checkpoints of `data-parallel`: what came after the last one is done again."""
    clusters: Annotated[int | None, LEAST_1] = None
    """Gather the machines of every group into so many nodes, each a cluster of equal size."""

    def __post_init__(self) -> None:
        for name, value in self._of_method().items():
            if getattr(self, name) is OPEN:
                object.__setattr__(self, name, value)
        Checked.__post_init__(self)
        if self.method in LOCK_STEP:
            for name in ("h", "fragments"):
                require(getattr(self, name) == 1, f"{name} is {getattr(self, name)}; {self.method} takes only 1")
        require(
            self.fragments <= self.h,
            f"fragments is {self.fragments}, more than the inner steps of a round; at most h = {self.h}",
        )
        most = METHODS[self.method].max_lag if self.method != "elastic" else 0
        require(0 <= self.lag <= most, f"lag is {self.lag}; {self.method} takes {f'0 to {most}' if most else '0 only'}")
        require(not self.lag or self.tau == 0, f"tau is {self.tau}; with lag = 1 it is 0, for a whole round overlaps")
        require(self.tau < self.h, f"tau is {self.tau}; with h = {self.h} it is {self.h - 1} at most")

    def _of_method(self) -> dict[str, Any]:
        row = METHODS["data-parallel" if self.method == "elastic" else self.method]
        bits = _BITS.get(self.method, _Q4_BITS)
        known = {name: getattr(row, name) for name in _OF_METHOD} | {"tau": 0 if self.lag else row.tau}
        return known | {"fragments": _FRAGMENTS.get(self.method, 1), "bits_up": bits, "bits_down": bits}

    def at_lag(self, lag: int) -> "Rules":
        """With another lag; tau follows unless it was given."""
        tau = OPEN if self.tau == self._of_method()["tau"] else self.tau
        return dataclasses.replace(self, lag=lag, tau=tau)

    @property
    def waits(self) -> bool:
        """Whether training stands still where an update is late (protocol, Late updates)."""
        return self.method != "decoupled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Checked):
    """Nodes of one kind. A node is one machine, or a cluster of several that train in lock-step among themselves."""

    name: str = "nodes"
    count: Annotated[int, AtLeast(1, _MOST_NODES)] = 1
    machines: Annotated[int, AtLeast(1, _MOST_NODES)] = 1  # of each node
    step_s: Annotated[float, AtLeast(1e-6, most=sys.float_info.max, wanted="0.000001 or more")] = (
        1.0  # seconds of an inner step
    )
    step_sigma: NotNegative = 0.0  # spread of a step's duration: σ of a lognormal law whose mean is step_s
    spread: NotNegative = 0.0  # lasting difference between the nodes: σ of a lognormal law over their step_s
    slow_share: Annotated[float, _SHARE] = 0.0  # share of the steps that stumble…
    slow_factor: Annotated[float, LEAST_1] = 1.0  # … and take so many times as long.
    crashes_per_hour: Annotated[float, _MOST_EVENTS] = 0.0  # of each machine, while it is up
    repair_s: NotNegative = 600.0  # from a crash until the machine can take part again
    joins_at_s: NotNegative = 0.0
    drains_at_s: Annotated[float | None, LEAST_0] = None  # leaves in order: what it has sent is still merged
    up_gbit_s: Annotated[float | None, _LIMIT] = None
    """Rate of each node's own link towards the coordinator; no limit where it is left out."""
    down_gbit_s: Annotated[float | None, _LIMIT] = None
    rtt_s: NotNegative = 0.0
    jitter_s: NotNegative = 0.0  # added to every transfer, evenly between 0 and this
    loss: Annotated[float, BELOW_1] = 0.0  # share of the rate that is lost to sending again
    outages_per_hour: Annotated[float, _MOST_EVENTS] = 0.0  # of each node's link
    outage_s: NotNegative = 60.0
    site: str | None = None  # name of the uplink that it shares

    def bytes_per_s(self, gbit_s: float | None) -> float:
        """What is left of a link's rate for data."""
        return bytes_per_s(gbit_s) * (1.0 - self.loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub(Checked):
    """The coordinator's own link: what comes in is the nodes' up."""

    up_gbit_s: Annotated[float | None, _LIMIT] = None
    down_gbit_s: Annotated[float | None, _LIMIT] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Site(Hub):
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage(Checked):
    """The links of a whole group are cut."""

    group: str
    at_s: NotNegative
    for_s: NotNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(Checked):
    """A machine of every node of a group breaks, besides what chance brings."""

    group: str
    at_s: NotNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Checked):
    parameters: Count = 1_000_000_000
    snapshot_bits: NotNegative = 32.0  # bits per parameter of what a newcomer fetches


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(Checked):
    name: str
    rules: Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep(Checked):
    """A key of the nodes or of the rules that takes several values."""

    key: Annotated[str, lambda key: OneOf(sorted(SWEPT))(key)]
    values: Annotated[tuple[float, ...], filled]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Checked):
    """What others report for one line of the table, to stand beside it."""

    variant: str
    goodput: Annotated[float, _SHARE]
    value: float | None = None  # of the swept key


_GROUP_KEYS = frozenset(f.name for f in dataclasses.fields(Group)) - {"name", "site"}
_RULE_KEYS = frozenset(f.name for f in dataclasses.fields(Rules)) - {"method", "per_node_h"}
SWEPT: Final = _GROUP_KEYS | _RULE_KEYS
_WHOLE = {"count", "machines", "h", "fragments", "tau", "lag", "quorum", "clusters", "checkpoint_steps"}
_WHOLE |= {"max_staleness", "max_stale_rounds"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowScenario(Checked):
    """What is played: every variant at every swept value with every seed."""

    name: str = "scenario"
    about: str = ""
    steps: Annotated[int | None, LEAST_1] = None  # inner steps after which a case ends: `steps / h` outer steps
    hours: Annotated[float | None, _LIMIT] = None  # hours after which it ends, whichever comes first
    seed: Annotated[int, LEAST_0] = 0
    repeats: Annotated[int, AtLeast(1, _MOST_REPEATS)] = 1  # seeds: the results are means over them
    model: Model = field(default_factory=Model)
    coordinator: Hub = field(default_factory=Hub)
    nodes: tuple[Group, ...] = (Group(count=4),)
    sites: tuple[Site, ...] = ()
    outages: tuple[Outage, ...] = ()
    crashes: tuple[Crash, ...] = ()
    variants: tuple[Variant, ...] = (Variant(name="decoupled", rules=Rules()),)
    sweep: Sweep | None = None
    published: tuple[Published, ...] = ()

    def __post_init__(self) -> None:
        if self.hours == math.inf:
            require(self.steps is not None, "hours: expected a finite number where steps is left out, got inf")
            object.__setattr__(self, "hours", None)
        require(self.steps is not None or self.hours is not None, "steps is missing: how long is it? Or give hours")
        Checked.__post_init__(self)
        require(len(self.nodes) > 0, "nodes: there are none")
        groups, sites = [group.name for group in self.nodes], [site.name for site in self.sites]
        for what, names in (("nodes", groups), ("sites", sites), ("variants", [v.name for v in self.variants])):
            twice = next((name for name in names if names.count(name) > 1), None)
            require(twice is None, f"{what}: the name {twice!r} is there twice")
        for group in self.nodes:
            require(group.site is None or group.site in sites, f"site {group.site!r} is not among the sites")
        for struck in [*(outage.group for outage in self.outages), *(crash.group for crash in self.crashes)]:
            require(struck in groups, f"group {struck!r} is not among the nodes")
        require(
            any(group.joins_at_s == 0 for group in self.nodes),
            "joins_at_s: one group must be there at the start",
        )
        names = [variant.name for variant in self.variants]
        for published in self.published:
            require(published.variant in names, f"variant {published.variant!r} is not among the variants")
        # This also refuses what only a swept value, or a gathering into clusters, makes impossible.
        node_steps = sum(case.setting.node_steps for case in cases(self))
        require(
            node_steps <= MOST_STEPS,
            f"it has {node_steps:.2g} inner steps, of all nodes, variants, swept values and repeats; the most is "
            f"{MOST_STEPS:.2g}: take fewer steps or hours, a longer step_s, or fewer of those",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one case is played from; equal settings give equal outcomes."""

    scenario: FlowScenario  # its coordinator, sites, outages, crashes, model and length
    rules: Rules
    groups: tuple[Group, ...]
    seed: int

    @property
    def seconds(self) -> float:
        return 3600.0 * self.scenario.hours if self.scenario.hours else math.inf

    @property
    def node_steps(self) -> float:
        """Inner steps of all nodes, if none ever waits."""
        most = self.scenario.steps or math.inf
        return sum(group.count * min(most, self.seconds / group.step_s) for group in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table, one seed."""

    variant: str
    value: float | None  # of the swept key
    setting: Setting


def cases(scenario: FlowScenario) -> list[Case]:
    """All cases in the order of the table. Raises ValueError where a value cannot be."""
    found = []
    for value in scenario.sweep.values if scenario.sweep else (None,):
        for variant in scenario.variants:
            rules, groups = variant.rules, scenario.nodes
            if scenario.sweep and value is not None:
                try:
                    rules, groups = _swept(scenario.sweep.key, value, rules, groups)
                except ValueError as error:
                    raise ValueError(f"values: {scenario.sweep.key} cannot be {value:g}: {error}") from error
            for repeat in range(scenario.repeats):
                gathered, seed = _gathered(groups, rules.clusters), scenario.seed + repeat
                setting = Setting(scenario=scenario, rules=rules, groups=gathered, seed=seed)
                found.append(Case(variant=variant.name, value=value, setting=setting))
    return found


def bytes_per_s(gbit_s: float | None) -> float:
    """A rate in bytes; a link without a limit has a very high one."""
    return _FASTEST if gbit_s in (None, math.inf) else gbit_s * 1e9 / 8


def _swept(key: str, value: float, rules: Rules, groups: tuple[Group, ...]) -> tuple[Rules, tuple[Group, ...]]:
    if key in _WHOLE:
        require(value == int(value), "it takes whole numbers")
        value = int(value)
    changed = {key: value}
    if key in _GROUP_KEYS:
        return rules, tuple(dataclasses.replace(group, **changed) for group in groups)  # type: ignore[arg-type]
    if key == "lag":
        return rules.at_lag(int(value)), groups
    return dataclasses.replace(rules, **changed), groups  # type: ignore[arg-type]


def _gathered(groups: tuple[Group, ...], clusters: int | None) -> tuple[Group, ...]:
    """The machines of every group in so many nodes, if they are to be gathered."""
    if clusters is None:
        return groups
    gathered = []
    for group in groups:
        total = group.count * group.machines
        require(total % clusters == 0, f"clusters is {clusters}, which does not divide the {total} of {group.name!r}")
        gathered.append(dataclasses.replace(group, count=clusters, machines=total // clusters))
    return tuple(gathered)


# --- Failure traces, seeded: pace, crashes and cuts of each node
#
# Every node draws each kind of fate from a stream of its own, so that the same seed means the same crashes at the same
# places whatever method is played: comparisons are paired.


class FailureTrace:
    """What is drawn for one node: its crashes, outages, jitter and step times."""

    def __init__(self, group: Group, *, seed: int, index: int) -> None:
        self._group = group
        self._crashes, self._outages, self._jitter = (
            random.Random(f"{seed}/{index}/{kind}") for kind in ("crash", "outage", "jitter")
        )
        self._steps = np.random.default_rng([seed, index]) if group.step_sigma or group.slow_share else None
        lasting = random.Random(f"{seed}/{index}/spread").gauss(0.0, group.spread) if group.spread else 0.0
        self.step_s = group.step_s * math.exp(lasting)  # mean seconds of its inner steps, stumbles aside

    def seconds_of(self, steps: int) -> float:
        """How long its next inner steps take together."""
        return self.step_s * steps if self._steps is None else float(self.durations(steps).sum())

    def durations(self, steps: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """Seconds of each of its next inner steps. [steps]"""
        group, rng = self._group, self._steps
        if rng is None:
            return np.full(steps, self.step_s)
        sigma = group.step_sigma
        drawn = self.step_s * rng.lognormal(-0.5 * sigma * sigma, sigma, steps)
        if group.slow_share:
            drawn[rng.random(steps) < group.slow_share] *= group.slow_factor
        return drawn

    def next_crash_s(self, machines: int) -> float:
        """Until the next crash of any of so many machines that are up."""
        rate = self._group.crashes_per_hour * machines / 3600.0
        return self._crashes.expovariate(rate) if rate > 0.0 else math.inf

    def next_outage_s(self) -> float:
        """Until its link is cut again."""
        rate = self._group.outages_per_hour / 3600.0
        return self._outages.expovariate(rate) if rate > 0.0 else math.inf

    def jitter_s(self) -> float:
        """What the next transfer is late by."""
        return self._jitter.uniform(0.0, self._group.jitter_s) if self._group.jitter_s else 0.0
