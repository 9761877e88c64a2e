"""From the words of `farloop bench quality` to the runs that are asked for."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farloop.algo.methods import METHODS, method_named
from farloop.algo.spec import RunSpec
from farloop.bench.quality import QualityPlan, Variant
from farloop.bench.trial import CPU
from farloop.bench.tuning import RATE, SEED_OFFSET, Knob, Trial, Tuned, settings_to_try
from farloop.cli.bench_grid import Grid, share_of
from farloop.cli.bench_words import SAME_FOR_ALL, parse_knobs, parse_variant, run_settings
from farloop.cli.exit_codes import CommandError
from farloop.cli.run import DataConfig, RunConfig, plan_run
from farloop.cli.sources import nearest
from farloop.node.corpus import Corpus, load_corpus
from farloop.node.model import PRESETS

EVALUATIONS = 15
"""Points of a loss curve."""

QUIET: Mapping[str, Any] = {"evaluation_sequences": 2048, "lr": 1e-3, "min_lr": 1e-5}
"""Where settings are not given: what keeps chance small. A pair of runs (nano, 4 nodes, 600 steps, fp32 beside q4) then
differs by 0.03 %, one standard deviation over 5 seeds. A peak of 2e-3 makes that 0.2 %, one of 3e-3 0.2 to 0.6 %, for
there training amplifies every difference; and 256 sequences alone add 0.14 %."""

METHODS_BASE: Mapping[str, Any] = {"evaluation_sequences": 2048, "lr": 4e-3}
"""Of a grid: a peak at which data parallel does about its best in 400 steps, or every method would look as good."""

LAST_SHARE = 0.05
"""Of the peak, where a grid's learning rate starts and ends unless min_lr is given (arXiv 2503.09799), so that the same
schedule is tuned whatever the peak."""

_FIXED_IN_GRID = SAME_FOR_ALL | {"steps", "batch_sequences"}
"""What makes the tokens of all variants equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The text that all runs of a plan are trained on."""

    data: DataConfig
    corpus: Corpus

    @classmethod
    def of(cls, data: DataConfig) -> "_Source":
        return cls(data=data, corpus=load_corpus(data.path, max_bytes=data.max_bytes))

    def spec(self, config: RunConfig) -> RunSpec:
        return plan_run(config, self.data, self.corpus).spec

    def plan(self, variants: Iterable[Variant], out: Path, device: str) -> QualityPlan:
        try:
            return QualityPlan(
                variants=tuple(variants),
                folder=out / "runs",
                data=self.data.path,
                max_bytes=self.data.max_bytes,
                device=device,
            )
        except ValueError as error:
            raise CommandError(str(error)) from error


# --- variants beside the first of them


def plan_quality(
    variants: Iterable[str], base: Mapping[str, Any], *, seeds: int, data: DataConfig, out: Path, device: str = CPU
) -> QualityPlan:
    """The runs that are asked for; `base` are fields of `RunConfig` for all variants.

    Raises:
        CommandError: a word or a setting cannot be used.
        CorpusError: there is no text.
    """
    source = _Source.of(data)
    columns = []
    for spelled in variants:
        label = " ".join(spelled.split())
        overrides = parse_variant(label)
        with _about(label):
            config = _config({**QUIET, **base}, overrides)
            specs = tuple(source.spec(seeded) for seeded in _seeded(config, seeds))
        columns.append(Variant(label=label, specs=specs))
    return source.plan(columns, out, device)


# --- methods at equal tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """A grid's runs, and those before them."""

    plan: QualityPlan
    trials: Mapping[str, tuple[Trial, ...]]
    """By the variant's label; none where nothing is tuned."""


def plan_grid(
    grid: Grid,
    *,
    data: DataConfig,
    out: Path,
    device: str = CPU,
    picked: Mapping[str, Mapping[str, float]] | None = None,
) -> GridPlan:
    """The runs of a grid, `picked` settings in; its variants as they are spelled, the first one the baseline.

    Raises:
        CommandError: a word or a setting cannot be used.
        CorpusError: there is no text.
    """
    source, knobs = _Source.of(data), parse_knobs(grid.tune)
    base = {**METHODS_BASE, **run_settings(grid.settings, origin="--set")}
    if wrong := sorted({"steps", "batch_sequences", "model"} & run_settings(grid.settings, origin="--set").keys()):
        raise CommandError(f"--set {wrong[0]}: say {_OPTIONS[wrong[0]]} instead; every variant trains the same tokens")
    if grid.model not in PRESETS:
        raise CommandError(f"--model: there is no {grid.model!r}; {nearest(grid.model, PRESETS)}")
    if grid.seeds > SEED_OFFSET:
        raise CommandError(f"--seeds {grid.seeds}: at most {SEED_OFFSET}, for then comes the seed of the tuning")
    base |= {"model": grid.model, "steps": grid.steps}
    columns, trials = [], {}
    for label in grid.variants:
        overrides = {**parse_variant(label, fixed=_FIXED_IN_GRID), **(picked or {}).get(label, {})}
        with _about(label):
            config = _grid_config(grid, base, overrides, label)
            columns.append(
                Variant(label=label, specs=tuple(source.spec(seeded) for seeded in _seeded(config, grid.seeds)))
            )
            if picked is None:
                trials[label] = tuple(_trials(grid, base, overrides, label, knobs, source))
    return GridPlan(plan=source.plan(columns, out, device), trials=trials)


def picked_of(tuned: Iterable[Tuned]) -> dict[str, Mapping[str, float]]:
    """What the searches took, as `plan_grid` wants it."""
    return {one.label: one.picked for one in tuned}


_OPTIONS = {"steps": "--steps", "batch_sequences": "--global-batch", "model": "--model"}


def _trials(
    grid: Grid,
    base: Mapping[str, Any],
    overrides: Mapping[str, Any],
    label: str,
    knobs: tuple[Knob, ...],
    source: _Source,
) -> Iterator[Trial]:
    """The points of a variant's search. What it spells is not tuned, nor what its method does not have."""
    config = _grid_config(grid, base, overrides, label)
    method = METHODS[config.method]
    without = {
        knob.name
        for knob in knobs
        if knob.name in overrides
        or knob.name in method.fixed
        or (knob.name.startswith("outer_") and (method.outer == "adamw" or config.nodes == 1))
    }
    spelled_rate = RATE in overrides
    for settings in settings_to_try(knobs, without=without, rate=None if spelled_rate else config.lr):
        point = _grid_config(grid, base, {**overrides, **settings}, label)
        seeded = dataclasses.replace(point, seed=point.seed + SEED_OFFSET)
        with _about(" ".join(f"{name}={value:g}" for name, value in settings.items())):
            yield Trial(settings=settings, spec=source.spec(seeded))


def _grid_config(grid: Grid, base: Mapping[str, Any], overrides: Mapping[str, Any], label: str) -> RunConfig:
    config = _config(base, overrides)
    if not {"min_lr"} & (base.keys() | overrides.keys()):
        config = dataclasses.replace(config, min_lr=LAST_SHARE * config.lr)
    if config.nodes < 1:
        raise ValueError(f"nodes is {config.nodes}; the least is 1")
    return dataclasses.replace(config, batch_sequences=share_of(grid, config.nodes, label))


# --- both


def _config(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> RunConfig:
    """A variant's settings. What its method fixes it takes from the method, not from the base."""
    method = method_named(RunConfig(**{**base, **overrides}).method)
    config = RunConfig(**{**{key: value for key, value in base.items() if key not in method.fixed}, **overrides})
    every = config.evaluate_every_rounds or max(1, config.steps // ((config.h or method.h) * EVALUATIONS))
    return dataclasses.replace(config, name="quality", evaluate_every_rounds=every)


def _seeded(config: RunConfig, seeds: int) -> list[RunConfig]:
    return [dataclasses.replace(config, seed=config.seed + number) for number in range(seeds)]


@contextmanager
def _about(label: str) -> Iterator[None]:
    """What is wrong with a variant's numbers, in its name."""
    try:
        yield
    except ValueError as error:
        raise CommandError(f"{label}: {error}") from error
