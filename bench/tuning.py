"""An equal number of settings tried for every variant, on a seed of their own, before the runs that count.

A method that is tuned beats one that is not, whatever the two are worth. So all get the same number of runs to look for
their best: those with an outer optimizer for its ν, data parallel and a single node, which have none, for their
learning rate.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from farloop.algo.spec import RunSpec
from farloop.bench.quality import QualityPlan, RunFailed, Variant, Watch, run_each

SEED_OFFSET = 1000
"""From the first seed to that of the tuning, which no run that counts may have."""

RATE = "lr"
"""The knob that every variant has: the peak of the inner learning rate."""

REACH = 4.0
"""Where no learning rates are given but a variant has only that to tune, they lie between 1/4 and 4 of the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting and what to try for it."""

    name: str
    values: tuple[float, ...]
    """In rising order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One point of a variant's search."""

    settings: Mapping[str, float]
    spec: RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What it came to."""

    settings: Mapping[str, float]
    loss: float | None
    """None where the run broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """A variant's search."""

    label: str
    seed: int
    tried: tuple[Tried, ...]
    picked: Mapping[str, float]
    at_edge: tuple[str, ...]
    """Knobs whose best value was the first or the last that was tried: a better one may lie beyond."""


def settings_to_try(
    knobs: Sequence[Knob], *, without: Collection[str] = (), rate: float | None
) -> tuple[dict[str, float], ...]:
    """The points of one variant's search: as many for every variant, the product of all knobs' values.

    `without`: knobs that the variant does not have. In their place it tries more learning rates, spread evenly by ratio
    over the range of those given, or around `rate`, its default. `rate` is None where the variant's learning rate is
    not to be tuned; its points are then fewer.
    """
    own = {knob.name: knob.values for knob in knobs if knob.name not in without}
    missing = math.prod(len(knob.values) for knob in knobs if knob.name in without)
    if missing > 1 and rate is not None:
        given = own.get(RATE, (rate / REACH, rate * REACH))
        count = missing * (len(given) if RATE in own else 1)
        own[RATE] = evenly_by_ratio(given[0], given[-1], count)
    return tuple(dict(zip(own, point, strict=True)) for point in itertools.product(*own.values())) if own else ()


def evenly_by_ratio(low: float, high: float, count: int) -> tuple[float, ...]:
    """`count` numbers from low to high, each as many times the one before, of three digits."""
    if count == 1:
        return (float(f"{math.sqrt(low * high):.3g}"),)
    return tuple(float(f"{low * (high / low) ** (k / (count - 1)):.3g}") for k in range(count))


def plan_of(trials: Mapping[str, Sequence[Trial]], plan: QualityPlan) -> QualityPlan | None:
    """The runs of all searches; None where there is nothing to try. All else is as in `plan`."""
    variants = tuple(
        Variant(label=f"{label}, {settings_text(trial.settings)}", specs=(trial.spec,))
        for label, some in trials.items()
        for trial in some
    )
    if not variants:
        return None
    return dataclasses.replace(plan, variants=variants)


def tune(
    plan: QualityPlan, trials: Mapping[str, Sequence[Trial]], *, jobs: int, watch: Watch | None = None
) -> tuple[Tuned, ...]:
    """Run all points of `plan_of(trials, …)` and take every variant's best, by the validation loss at the run's end.

    Raises:
        RunFailed: of a variant every point broke.
    """
    results = run_each(plan, jobs=jobs, watch=watch, broken_is_none=True)
    losses = {key: result.loss for key, result in results.items()}
    return tuple(
        best_of(
            label,
            some[0].spec.identity.seed,
            [Tried(settings=trial.settings, loss=losses.get(plan.key(trial.spec))) for trial in some],
        )
        for label, some in trials.items()
        if some
    )


def best_of(label: str, seed: int, tried: Sequence[Tried]) -> Tuned:
    """Raises RunFailed where every point broke."""
    finished = [(one.loss, number) for number, one in enumerate(tried) if one.loss is not None]
    if not finished:
        raise RunFailed(f"{label}: not one of the {len(tried)} settings that were tried could be trained", 4)
    picked = tried[min(finished)[1]].settings
    at_edge = []
    for name, value in picked.items():
        values = sorted({one.settings[name] for one in tried})
        if len(values) > 1 and value in (values[0], values[-1]):
            at_edge.append(name)
    return Tuned(label=label, seed=seed, tried=tuple(tried), picked=picked, at_edge=tuple(at_edge))


def settings_text(settings: Mapping[str, float]) -> str:
    """`outer_lr=0.4 lr=0.004`."""
    return " ".join(f"{name}={value:g}" for name, value in settings.items())
