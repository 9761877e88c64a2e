"""How busy a node stays behind a link of a given bandwidth, and which bandwidth keeps it busy.

A step is the forward passes of all layers in order, a third of its time, then their backward passes in reverse, two
thirds; layers are equal. In the step after which a fragment is sent, each of its layers has a reduction: it queues on
the one link, first in, first out, as soon as the layer's backward pass ends. With an overlap of τ inner steps the
layer's forward pass of the step τ + 1 later waits for it; τ = 0 is the very next one. This is the simulator of
Streaming DiLoCo (arXiv 2501.18512, section 3.1), whose Table 4 it meets within about a step of that table's grid.

What it leaves out: latency, encoding, links within a site, and the embedding, which counts as part of the layers.
Messages and machines are simulated elsewhere in this room; here only sizes and durations count.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from farloop.algo.require import require
from farloop.algo.schedule import due_step

MethodName = Literal["data-parallel", "diloco", "streaming"]

Floats = NDArray[np.float64]

METHOD_NAMES: Final[tuple[MethodName, ...]] = get_args(MethodName)

TARGETS: Final = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations whose bandwidth is worth knowing; those of the paper's Table 4."""

MOST_LAYERS: Final = 10_000

_TICKS_PER_LAYER = 3
"""A forward pass is one tick long, a backward pass two: places on the compute line are whole numbers, ties exact."""

_PERIODS = 4
"""Periods that are simulated from an idle start; the last one counts. A payload is waited for at most two periods after
it was sent, so from the third on all waits take part, and one more has always been enough to repeat (see the tests)."""

_BRACKETS = 16
"""Parts into which a search cuts its interval at once: one pass of the graph serves many bandwidths."""

_PRECISION = 1e-6
"""Of a required bandwidth, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, and how. Raises ValueError, one sentence, for what cannot be."""

    params: float
    """Parameters of the model."""
    layers: int
    """Equal ones, between which the parameters and the step's time are divided."""
    step_s: float
    """Seconds of compute of one inner step."""
    method: MethodName
    h: int = 1
    """Inner steps between two syncs of the same parameters; data-parallel has 1."""
    bits: float = 16.0
    """Sent over the link per parameter and sync."""
    layers_per_fragment: int = 1
    """Of streaming; the others send the model whole."""
    overlap: int = 0
    """Inner steps that training goes on while a payload is on its way (τ); data-parallel has 0."""

    def __post_init__(self) -> None:
        require(self.method in METHOD_NAMES, f"there is no method {self.method!r}; there are {', '.join(METHOD_NAMES)}")
        for name in ("params", "step_s", "bits"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, f"{name} is {value:g}; it must be a number above 0")
        for name in ("layers", "h", "layers_per_fragment"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; the least is 1")
        require(self.layers <= MOST_LAYERS, f"layers is {self.layers}; the most is {MOST_LAYERS}")
        require(
            0 <= self.overlap <= self.h,
            f"overlap is {_plural(self.overlap, 'inner step')}; with h = {self.h} it takes 0 to {self.h}",
        )
        require(
            self.layers_per_fragment <= self.layers,
            f"layers_per_fragment is {self.layers_per_fragment}, but the model has {_plural(self.layers, 'layer')}",
        )
        if self.method == "data-parallel":
            require(self.h == 1, f"data-parallel syncs at every step: h is 1, not {self.h}")
            require(self.overlap == 0, f"data-parallel waits for its gradients: overlap is 0, not {self.overlap}")
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

    Raises:
        ValueError: a bandwidth is not a number above 0.
    """
    bandwidths = np.asarray(gbit_s, dtype=np.float64)
    if not (np.isfinite(bandwidths) & (bandwidths > 0)).all():
        raise ValueError("a bandwidth is a number of Gbit/s above 0")
    layer_bits = training.payload_bits / training.layers
    transfers = layer_bits / (bandwidths * 1e9) / training.step_s * (_TICKS_PER_LAYER * training.layers)  # ticks
    period = float(training.h * _TICKS_PER_LAYER * training.layers)
    return period / (period + _stall(_events(training), period, transfers, training.layers))


def required_gbit_s(training: Training, targets: Sequence[float] = TARGETS) -> dict[float, float]:
    """The least bandwidth, in Gbit/s, that reaches each of these utilisations; all can be reached.

    Bounds of the search: with u the utilisation and m the mean rate of full utilisation, the link cannot carry more
    than it can, u ≤ B/m; and compute only stalls while the link is busy, 1/u ≤ 1 + m/B. So m·u ≤ B ≤ m·u/(1 − u).

    Raises:
        ValueError: a target is not between 0 and 1.
    """
    if not all(0 < target < 1 for target in targets):
        raise ValueError("a target is a utilisation between 0 and 1")
    wanted = np.asarray(targets, dtype=np.float64)[:, None]  # [targets, 1]
    low = np.log(training.mean_gbit_s * wanted)
    high = low - np.log1p(-wanted)
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
    """Where compute and link meet: the end of a layer's backward pass, or the start of its forward pass."""

    at: int
    """Ticks of compute since the period's start."""
    layer: int
    periods_ago: int
    """How long ago the payload was sent that is waited for; −1 where one is sent."""


def _events(training: Training) -> list[_Event]:
    """Sends and waits of one period of H steps, in the order of compute; all else only takes its time."""
    layers, fragments = training.layers, training.fragments
    step = _TICKS_PER_LAYER * layers
    sends, waits = list[_Event](), list[_Event]()
    for layer in range(layers):
        # Strided: layer ℓ lies in fragment ℓ mod P, and fragment p has slot p, as in a run.
        sent = due_step(layer % fragments, fragments, training.h) - 1  # inner step, counted from 0
        sends.append(_Event(sent * step + layers + 2 * (layers - layer), layer, -1))
        periods, needed = divmod(sent + 1 + training.overlap, training.h)
        waits.append(_Event(needed * step + layer, layer, periods))
    # The sort is stable: where the last backward pass of a step meets the next step's first forward pass, it is first.
    return sorted([*sends, *waits], key=lambda event: event.at)


def _stall(events: Sequence[_Event], period: float, transfers: Floats, layers: int) -> Floats:
    """Ticks that compute loses in one period of the steady state, for each transfer time of a layer, in ticks.

    All times are relative to the period's start. A (max, +) system repeats itself after a while; the two ways to do so
    are that waits decide, which the last simulated period shows, and that the link is busy all the time, which would
    take as long to show as compute takes to run out of overlap, but is known beforehand.
    """
    link_free, stalled = np.zeros_like(transfers), np.zeros_like(transfers)
    on_the_way = [deque[Floats]() for _ in range(layers)]  # when the payloads of a layer arrive, oldest first
    for number in range(_PERIODS):
        stalled = np.zeros_like(transfers)
        for at, layer, periods_ago in events:
            if periods_ago < 0:
                link_free = np.maximum(link_free, at + stalled) + transfers
                on_the_way[layer].append(link_free)
            elif number >= periods_ago:
                stalled = np.maximum(stalled, on_the_way[layer].popleft() - at)
        elapsed = period + stalled
        link_free = link_free - elapsed
        on_the_way = [deque(arrival - elapsed for arrival in arrivals) for arrivals in on_the_way]
    return np.maximum(stalled, layers * transfers - period)


def _plural(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
