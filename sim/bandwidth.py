"""Compute utilisation against bandwidth."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from farloop.algo.schedule import due_step
from farloop.algo.validation import require
from farloop.monitoring.units import AtLeast, Checked, Count, OneOf, Positive, plural

# --- How busy a node stays behind a link of a given bandwidth, and which bandwidth keeps it busy.
#
# Two models. Both send equal layers over a link that carries its rate in each direction, first in, first out.
#
# `farloop`, what the daemons do: at the step boundary at which a fragment is due its node uploads all of it; when the
# deltas of all nodes are there, all of the update is downloaded; the node merges it at the boundary τ steps after the
# send and stands still from there until it has come. With a lag of one round it may come during the next round: at the
# next send the node waits for the commit before it sends, and for the bytes before it trains on (protocol D). All nodes
# are alike; for unequal ones take the slowest link and step, or `farloop.sim.flow.simulator`, which plays every node.
#
# `published`, the simulator of Streaming DiLoCo (arXiv 2501.18512, section 3.1), whose Table 4 it meets within about
# a step of that table's grid, and that of Scaling Laws for DiLoCo (arXiv 2503.09799, Table 6) within two. Both tables
# print the last bandwidth of their grid that misses the target, and this model gives the first that reaches it: read
# so, 94 of 95 cells (10 B in the second) are within one step of 21 %. The second still asks for almost a step less
# from H = 10 on, for an unknown reason. A step is the forward passes of all layers in order, a third of its time,
# then their backward passes in reverse, two thirds. In the step after which a fragment is sent, each of its layers
# has a reduction, which queues on the one link as soon as the layer's backward pass ends. The layer's forward pass of
# the step τ + 1 later waits for it; τ = 0 is the very next one. This is a lower bound for data parallel that overlaps
# its gradients with the backward pass; farloop's daemons need more.
#
# What both leave out: latency, encoding, the commit's own time, links within a site, and the embedding, which counts as
# part of the layers. Messages and machines are simulated elsewhere in this room; here only sizes and durations count.


MethodName = Literal["data-parallel", "diloco", "streaming"]
ModelName = Literal["farloop", "published"]
Floats = NDArray[np.float64]
METHOD_NAMES: Final[tuple[MethodName, ...]] = get_args(MethodName)
MODEL_NAMES: Final[tuple[ModelName, ...]] = get_args(ModelName)

TARGETS: Final = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations whose bandwidth is worth knowing; those of the paper's Table 4."""

MOST_LAYERS: Final = 10_000

_TICKS_PER_LAYER = 3
"""A forward pass is one tick long, a backward pass two: places on the compute line are whole numbers, ties exact."""

_PERIODS = 6
"""Periods that are simulated from an idle start; the mean of the last two counts. A payload is waited for at most two
periods after it was sent, so from the third on all waits take part, and one more has always been enough to repeat (see
the tests): every period where nothing lags, every second one where updates come a round late."""

_BRACKETS = 16  # parts into which a search cuts its interval at once: one pass of the graph serves many bandwidths
_PRECISION = 1e-6  # of a required bandwidth, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Checked):
    """What is trained, and how. Raises ValueError, one sentence, for what cannot be."""

    params: Positive  # parameters of the model
    layers: Annotated[int, AtLeast(1, MOST_LAYERS)]
    """Equal ones, between which the parameters and the step's time are divided."""
    step_s: Positive  # seconds of compute of one inner step
    method: Annotated[MethodName, OneOf(METHOD_NAMES)]
    h: Count = 1  # inner steps between two syncs of the same parameters; data-parallel has 1
    bits: Positive = 16.0  # sent over the link per parameter and sync
    layers_per_fragment: Count = 1  # of streaming; the others send the model whole
    overlap: int = 0  # inner steps that training goes on while a payload is on its way (τ); data-parallel has 0
    lag: Annotated[int, AtLeast(0, 1, wanted="0 or 1")] = 0
    """Rounds that an update may come late: 0, or 1 of the model `farloop`."""
    model: Annotated[ModelName, OneOf(MODEL_NAMES)] = "farloop"
    """What happens on the link: what the daemons do, or what was published."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.method == "data-parallel":
            require(self.h == 1, f"data-parallel syncs at every step: h is 1, not {self.h}")
            require(self.overlap == 0, f"data-parallel waits for its gradients: overlap is 0, not {self.overlap}")
        most = self.h if self.model == "published" else self.h - 1  # a send must not meet its own merge (protocol D)
        require(
            0 <= self.overlap <= most,
            f"overlap is {plural(self.overlap, 'inner step')}; with h = {self.h} it takes 0 to {most}",
        )
        if self.lag:
            require(self.model == "farloop", f"the model {self.model} knows no lag: lag is 0, not 1")
            require(self.method != "data-parallel", "data-parallel waits for its gradients: lag is 0, not 1")
            require(self.overlap == 0, f"overlap is {self.overlap}; with lag = 1 it is 0, for a whole round overlaps")
        require(
            self.layers_per_fragment <= self.layers,
            f"layers_per_fragment is {self.layers_per_fragment}, but the model has {plural(self.layers, 'layer')}",
        )
        if self.method == "streaming":
            require(
                self.fragments <= self.h,
                f"h is {self.h}, too short for {self.fragments} fragments, each sent after a step of its own",
            )

    @property
    def fragments(self) -> int:
        """Parts of the model that are sent one after the other."""
        return -(-self.layers // self.layers_per_fragment) if self.method == "streaming" else 1

    @property
    def payload_bits(self) -> float:
        """Of one sync of the whole model, in one direction."""
        return self.params * self.bits

    @property
    def mean_gbit_s(self) -> float:
        """What the link carries when no compute is lost. No bandwidth below it can reach a utilisation of 1."""
        return self.payload_bits / (self.h * self.step_s) / 1e9


def utilization(training: Training, gbit_s: Sequence[float] | Floats) -> Floats:
    """Share of the time in which the node computes, in the long run, at each of these bandwidths, in Gbit/s.
    Raises ValueError: a bandwidth is not a number above 0."""
    bandwidths = np.asarray(gbit_s, dtype=np.float64)
    if not (np.isfinite(bandwidths) & (bandwidths > 0)).all():
        raise ValueError("a bandwidth is a number of Gbit/s above 0")
    layer_bits = training.payload_bits / training.layers
    transfers = layer_bits / (bandwidths * 1e9) / training.step_s * (_TICKS_PER_LAYER * training.layers)  # ticks
    period = float(training.h * _TICKS_PER_LAYER * training.layers)
    if training.model == "published":
        events, legs = _published_events(training), 1
    else:
        events, legs = _farloop_events(training), 2
    return period / (period + _stall(events, period, transfers, training, legs))


def required_gbit_s(training: Training, targets: Sequence[float] = TARGETS) -> dict[float, float]:
    """The least bandwidth, in Gbit/s, that reaches each of these utilisations; all can be reached.

    Bounds of the search: with u the utilisation and m the mean rate of full utilisation, the link cannot carry more
    than it can, u ≤ B/m; and compute only stalls while the link is busy in one of its L directions that are used (2, or
    1 as published), 1/u ≤ 1 + L·m/B. So m·u ≤ B ≤ L·m·u/(1 − u).
    Raises ValueError: a target is not between 0 and 1.
    """
    if not all(0 < target < 1 for target in targets):
        raise ValueError("a target is a utilisation between 0 and 1")
    wanted = np.asarray(targets, dtype=np.float64)[:, None]  # [targets, 1]
    low = np.log(training.mean_gbit_s * wanted)
    high = low - np.log1p(-wanted) + np.log(2.0)
    parts = np.arange(1, _BRACKETS) / _BRACKETS
    while (high - low).max(initial=0.0) > _PRECISION:
        inner = low + (high - low) * parts  # [targets, _BRACKETS − 1]
        found = utilization(training, np.exp(inner).ravel()).reshape(inner.shape)
        edges = np.concatenate([low, inner, high], axis=1)
        # Utilisation never falls with bandwidth, so the first place that reaches the target is one after all that miss.
        missed = (found < wanted).sum(axis=1, keepdims=True)
        low, high = np.take_along_axis(edges, missed, axis=1), np.take_along_axis(edges, missed + 1, axis=1)
    return dict(zip(targets, np.exp(high[:, 0]).tolist(), strict=True))


# --- the graph


class _Event(NamedTuple):
    at: int  # ticks of compute since the period's start
    kind: Literal["send", "commit", "merge"]
    """Something is sent; compute stands still until it is at the coordinator; or until it is back."""
    part: int  # a layer or a fragment
    layers: int = 0  # where it is sent: its size
    periods_ago: int = 0  # where it is waited for: how many periods ago it was sent


def _farloop_events(training: Training) -> list[_Event]:
    """One period of H steps of a farloop node: everything happens at step boundaries."""
    fragments, h = training.fragments, training.h
    step = _TICKS_PER_LAYER * training.layers
    events = list[_Event]()
    for fragment in range(fragments):
        due = due_step(fragment, fragments, h)
        layers = len(range(fragment, training.layers, fragments))  # strided
        if training.lag:
            events.append(_Event(due * step, "commit", fragment, periods_ago=1))
        events.append(_Event(due * step, "send", fragment, layers))
        periods, boundary = divmod(due + (h if training.lag else training.overlap) - 1, h)
        events.append(_Event((boundary + 1) * step, "merge", fragment, periods_ago=periods))
    # At one boundary everything that is due is sent before anything is merged (protocol D).
    return sorted(events, key=lambda event: (event.at, event.kind == "merge"))


def _published_events(training: Training) -> list[_Event]:
    """One period of H steps: a layer is sent at the end of its backward pass, waited for before its forward pass."""
    layers, fragments = training.layers, training.fragments
    step = _TICKS_PER_LAYER * layers
    sends, waits = list[_Event](), list[_Event]()
    for layer in range(layers):
        # Strided: layer ℓ lies in fragment ℓ mod P, and fragment p has slot p, as in a run.
        sent = due_step(layer % fragments, fragments, training.h) - 1  # inner step, counted from 0
        sends.append(_Event(sent * step + layers + 2 * (layers - layer), "send", layer, layers=1))
        periods, needed = divmod(sent + 1 + training.overlap, training.h)
        waits.append(_Event(needed * step + layer, "merge", layer, periods_ago=periods))
    # The sort is stable: where the last backward pass of a step meets the next step's first forward pass, it is first.
    return sorted([*sends, *waits], key=lambda event: event.at)


def _stall(events: Sequence[_Event], period: float, transfers: Floats, training: Training, legs: int) -> Floats:
    """Ticks that compute loses in one period of the steady state, for each transfer time of a layer, in ticks.

    `legs`: directions of the link that every payload takes one after the other, up and then down.

    All times are relative to the period's start. A (max, +) system repeats itself after a while; the two ways to do so
    are that waits decide, which the last simulated periods show, and that the link is busy all the time, which would
    take as long to show as compute takes to run out of overlap, but is known beforehand.
    """
    stalled, stalled_before = np.zeros_like(transfers), np.zeros_like(transfers)
    free = [np.zeros_like(transfers) for _ in range(legs)]
    # Of every part, the oldest payload first: when it ends each leg.
    on_the_way = [deque[list[Floats]]() for _ in range(training.layers)]
    for number in range(_PERIODS):
        stalled_before, stalled = stalled, np.zeros_like(transfers)
        for event in events:
            if event.kind == "send":
                through = event.at + stalled
                ends = list[Floats]()
                for leg in range(legs):
                    through = free[leg] = np.maximum(free[leg], through) + event.layers * transfers
                    ends.append(through)
                on_the_way[event.part].append(ends)
            elif number >= event.periods_ago:
                waiting = on_the_way[event.part]
                ends = waiting.popleft() if event.kind == "merge" else waiting[0]
                awaited = ends[-1] if event.kind == "merge" else ends[0]
                stalled = np.maximum(stalled, awaited - event.at)
        elapsed = period + stalled
        free = [at - elapsed for at in free]
        on_the_way = [deque([at - elapsed for at in ends] for ends in waiting) for waiting in on_the_way]
    return np.maximum((stalled + stalled_before) / 2, training.layers * transfers - period)


# --- text


def model_text(training: Training) -> str:
    """`1B parameters, 24 layers, 0.1 s of compute per inner step`."""
    size, unit = next(
        ((size, unit) for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if training.params >= size),
        (1.0, ""),
    )
    layers = plural(training.layers, "layer")
    return f"{training.params / size:.4g}{unit} parameters, {layers}, {training.step_s:g} s of compute per inner step"


def model_lines(trainings: Sequence[Training]) -> list[str]:
    """Which model was simulated, a line each; of the yardstick beside farloop's methods too."""
    said = {
        "farloop": "Model farloop: upload, wait for all nodes, download, at step boundaries",
        "published": "Model published: layers queue on one link, overlapped with backward passes",
    }
    models = dict.fromkeys(training.model for training in trainings)
    if len(models) == 1:
        return [said[model] for model in models]
    return [said["farloop"], "Model published for data-parallel: its gradients overlap the backward pass"]


def gbit_text(gbit_s: float) -> str:
    """Three digits: `0.348`, `1.60`, `97.0`, `1,230`."""
    if gbit_s >= 99.95:
        return f"{gbit_s:,.0f}"
    return f"{gbit_s:.1f}" if gbit_s >= 9.995 else f"{gbit_s:.2f}" if gbit_s >= 0.9995 else f"{gbit_s:#.3g}"


def short_name(training: Training, before: Training | None) -> str:
    """Its method, or what it adds to the one before, where that has the same method."""
    if before is None or before.method != training.method:
        return training.method
    if before.overlap != training.overlap:
        return f"+ overlap {training.overlap}"
    return f"+ {training.bits:g} bit"
