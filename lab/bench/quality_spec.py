"""Variants and grids of the quality benchmark, from text."""

import dataclasses
import itertools
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from farloop.algo.methods import METHODS, method_named
from farloop.algo.spec import RunSpec
from farloop.config.exit_codes import CommandError
from farloop.config.run_config import DataConfig, RunConfig
from farloop.config.run_spec import plan_run
from farloop.config.settings import OTHER_NAMES, RUN_SCHEMA, run_settings
from farloop.config.sources import WANTED, ConfigError, load_tables
from farloop.lab.bench.quality import (
    CPU,
    RATE,
    SEED_OFFSET,
    Knob,
    QualityPlan,
    Trial,
    Variant,
    settings_text,
    settings_to_try,
)
from farloop.monitoring.status import dumps
from farloop.monitoring.units import nearest
from farloop.node.data.corpus import load_corpus
from farloop.node.settings import PRESETS

# --- how variants, settings and knobs are spelled

SINGLE = "single"  # spells a node that trains alone; its averaging with itself changes nothing
MUON = "muon-data-parallel"  # the same with Muon: data parallel of the global batch, but for a link

_SINGLE = {
    "method": "diloco",
    "nodes": 1,
    "codec_up": "fp32",
    "codec_down": "fp32",
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "inner_optimizer": "adamw",
}

SAME_FOR_ALL = frozenset(
    {"name", "seed", "init", "model", "sequence_tokens", "evaluation_sequences", "steps", "batch_sequences"}
)
"""Settings that decide the first weights, the samples, what is evaluated, or the tokens: runs that differ in them are
no pairs."""


def parse_variant(spelled: str) -> dict[str, Any]:
    """`streaming nodes=4 codec=q4`, `diloco h=15`: fields of `RunConfig`.

    A variant is a method or `single`, settings as KEY=VALUE, or both. Raises CommandError.
    """
    origin, words = repr(spelled), spelled.split()
    if not words:
        raise CommandError("an empty variant; name a method as streaming, settings as h=15, or both")
    settings = [word for word in words if "=" in word]
    names = [word for word in words if "=" not in word]
    if len(names) > 1:
        raise CommandError(f"{origin}: expected one method, got {' and '.join(names)}")
    fields = _method_fields(names[0], origin) if names else {}
    fields |= run_settings(settings, origin=origin)
    if wrong := sorted(SAME_FOR_ALL & fields.keys()):
        raise CommandError(f"{origin}: {wrong[0]} is the same for all variants; {_how_for_all(wrong[0])}")
    return fields


def _method_fields(word: str, origin: str) -> dict[str, Any]:
    if word in (SINGLE, MUON):
        return _SINGLE | {"inner_optimizer": "muon" if word == MUON else "adamw"}
    if word in METHODS:
        return {"method": word}
    raise CommandError(
        f"{origin}: {word!r} is neither a method nor KEY=VALUE, as h=15; {nearest(word, [SINGLE, MUON, *METHODS])}"
    )


def _how_for_all(name: str) -> str:
    match name:
        case "steps" | "model":
            return f"set it with --{name}"
        case "batch_sequences":
            return "it is --global-batch shared by the nodes"
        case _:
            return "set it with --set"


def parse_knobs(words: Iterable[str]) -> tuple[Knob, ...]:
    """`outer_lr=0.2,0.4,0.6`: what to try, in rising order. Raises CommandError."""
    numbers = [name for name, key in RUN_SCHEMA["run"].items() if key.kind is float]
    knobs: dict[str, Knob] = {}
    for word in words:
        spelled, separator, text = word.partition("=")
        name = OTHER_NAMES.get(spelled, (spelled,))[0]
        if not separator or not text:
            raise CommandError(f"--tune {word}: expected KEY=VALUE,VALUE,…, as outer_lr=0.2,0.4,0.6")
        if name not in numbers:
            raise CommandError(f"--tune {word}: {spelled} cannot be tuned; {nearest(spelled, [*numbers, 'peak_lr'])}")
        if name in knobs:
            raise CommandError(f"--tune {word}: {name} is given twice; put all its values in one list")
        knobs[name] = Knob(name=name, values=tuple(sorted(_numbers(word, text))))
    return tuple(knobs.values())


def _numbers(word: str, text: str) -> list[float]:
    values = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            raise CommandError(f"--tune {word}: {part.strip()!r} is not a number, as 0.4 is") from None
        if not math.isfinite(value) or value <= 0.0:
            raise CommandError(f"--tune {word}: {part.strip()} cannot be tried; expected a number above 0")
        if value in values:
            raise CommandError(f"--tune {word}: {part.strip()} is given twice; once is enough")
        values.append(value)
    return values


def check_device(name: str) -> None:
    """Raises CommandError unless the device is there."""
    if name not in ("cpu", "cuda"):
        raise CommandError(f"--device is cpu or cuda, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: torch finds no GPU here; take cpu")


# --- a grid: the default one, from a file, and from flags

BASELINE = "data-parallel"  # the method that all others are measured against

DEFAULT_VARIANTS = (
    "data-parallel nodes=2",
    "single",
    "muon-data-parallel",
    "diloco nodes=2",
    "streaming nodes=2",
    "streaming nodes=4",
    "decoupled nodes=4",
    "co2 nodes=2",
    "async nodes=4",
)

FRONTIER = (
    "data-parallel nodes=2",
    "muon-data-parallel",
    "diloco nodes=2 codec=fp32",
    "diloco nodes=2",
    "streaming nodes=2",
    "streaming nodes=2 h=30",
    "streaming nodes=2 h=60",
    "streaming nodes=4",
    "streaming nodes=4 h=60",
    "co2 nodes=2",
    "decoupled nodes=4",
)
"""What `farloop bench frontier` trains: from one sync a step to one in 60 steps, and from 32 bits to 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Runs that all train the same tokens: every step of a run is one batch, shared by its nodes."""

    variants: tuple[str, ...] = DEFAULT_VARIANTS  # as they are spelled
    model: str = "micro"
    """A built-in model: half a million parameters are enough to tell methods apart, and few enough for two cores."""
    steps: int = 400  # of every node
    global_batch: int = 16  # sequences of one step of all nodes together
    seeds: int = 3
    settings: tuple[str, ...] = ()  # KEY=VALUE, for all variants that do not say otherwise
    tune: tuple[str, ...] = ()  # KEY=VALUE,VALUE,…: what is tried for every variant before the runs that count


GRIDS: Final = {
    # The smallest row of table 5 of arXiv 2501.18512: 35 M parameters, 700 M tokens, sequences of 1024. The batch, a
    # size that such models are trained with, and the rate are ours.
    "paper-35m": Grid(
        variants=("data-parallel", "muon-data-parallel", "streaming nodes=2", "streaming nodes=4"),
        model="medium",
        steps=5340,
        global_batch=128,
        seeds=1,
        settings=("sequence_tokens=1024", "lr=2e-3"),
    ),
}
"""Of `farloop bench quality --preset`."""


class _File(BaseModel):
    """A grid's TOML file: `Grid`, its settings and what is tuned as tables. What is left out has the grid's default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = ""
    steps: PositiveInt = 1
    global_batch: PositiveInt = 1
    seeds: PositiveInt = 1
    set: dict[str, Any] = {}
    tune: dict[str, list[float]] = {}
    variant: list[dict[str, Any]] = []
    """Several at once where a value is a list: every combination."""


def load_grid(path: Path) -> Grid:
    """The grid of a TOML file: keys of `Grid`, tables [set] and [tune], and a [[variant]] each, or several at once,
    where a value is a list. Raises ConfigError.
    """
    try:
        file = _File.model_validate(load_tables(path)[1])
    except ValidationError as error:
        found = error.errors()[0]
        place = ".".join(map(str, found["loc"]))
        if found["type"] == "extra_forbidden":
            raise ConfigError(f"{path}: {place}: there is no such key; {nearest(place, _File.model_fields)}") from None
        kind = WANTED.get(found["type"].partition("_")[0])
        what = f"expected {kind}" if kind else found["msg"][:1].lower() + found["msg"][1:]
        raise ConfigError(f"{path}: {place}: {what}, got {found['input']!r}") from None
    variants = tuple(
        _spelled(dict(zip(table, values, strict=True)))
        for table in file.variant
        for values in itertools.product(*(value if isinstance(value, list) else [value] for value in table.values()))
    )
    return Grid(
        variants=variants or DEFAULT_VARIANTS,
        settings=tuple(f"{name}={_text(value)}" for name, value in file.set.items()),
        tune=tuple(f"{name}={','.join(map(_text, values))}" for name, values in file.tune.items()),
        **file.model_dump(include={"model", "steps", "global_batch", "seeds"}, exclude_unset=True),
    )


def asked_for(
    path: Path | None, flags: Mapping[str, Any], lists: Mapping[str, list[str] | None], preset: str | None = None
) -> Grid:
    """The grid of a file, a preset's, or the default one, with a command line's options on top. Raises CommandError.

    `flags`: fields of `Grid`; None where not given. `lists`: fields of `Grid` that may be given several times; they are
    added to the file's.
    """
    if preset is not None and path is not None:
        raise CommandError("--preset and --grid both name the variants; take one of them")
    if preset is not None and preset not in GRIDS:
        raise CommandError(f"--preset: there is no {preset!r}; {nearest(preset, GRIDS)}")
    grid = load_grid(path) if path else GRIDS[preset] if preset else Grid()
    variants = lists.get("variants") or []
    return dataclasses.replace(
        grid,
        **{name: value for name, value in flags.items() if value is not None},
        variants=baseline_first((*(() if path is None and preset is None and variants else grid.variants), *variants)),
        settings=(*grid.settings, *(lists.get("settings") or [])),
        tune=(*grid.tune, *(lists.get("tune") or [])),
    )


def _spelled(fields: dict[str, Any]) -> str:
    """A variant as a command line has it."""
    method = [str(fields.pop("method"))] if "method" in fields else []
    return " ".join([*method, *(f"{name}={_text(value)}" for name, value in fields.items())])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def baseline_first(variants: tuple[str, ...]) -> tuple[str, ...]:
    """Data parallel first, if it is there; else `single`, the same training without a link; else as they are."""
    tidy = tuple(" ".join(spelled.split()) for spelled in variants)
    found = _first(BASELINE, tidy) or _first(SINGLE, tidy) or tidy[0]
    return (found, *(spelled for spelled in tidy if spelled is not found))


def _first(method: str, variants: tuple[str, ...]) -> str | None:
    for spelled in variants:
        words = spelled.split()
        if words[:1] == [method] or f"method={method}" in words:
            return spelled
    return None


def share_of(grid: Grid, nodes: int, label: str) -> int:
    """Sequences of one step of one node. Raises CommandError unless the batch can be shared equally."""
    if grid.global_batch % nodes == 0:
        return grid.global_batch // nodes
    possible = [count for count in range(1, grid.global_batch + 1) if grid.global_batch % count == 0]
    near = min(possible, key=lambda count: (abs(count - nodes), count))
    raise CommandError(
        f"{label}: {nodes} nodes cannot share {grid.global_batch} sequences of a step equally; "
        f"take nodes={near}, or --global-batch {nodes * max(1, round(grid.global_batch / nodes))}"
    )


def command_of(grid: Grid, *, options: Sequence[str]) -> str:
    """What repeats the grid, whatever its defaults become; `options`: words of where and on what it runs."""
    words = ["farloop", "bench", "quality", "--model", grid.model, "--steps", str(grid.steps)]
    words += ["--global-batch", str(grid.global_batch), "--seeds", str(grid.seeds)]
    for flag, values in (("--set", grid.settings), ("--tune", grid.tune), ("--variant", grid.variants)):
        words += [word for value in values for word in (flag, value)]
    return shlex.join([*words, *options])


# --- the runs of variants and of a grid

EVALUATIONS = 15  # points of a loss curve

METHODS_BASE: Mapping[str, Any] = {"evaluation_sequences": 2048, "lr": 4e-3}
"""Of a grid: a peak at which data parallel does about its best in 400 steps, or every method would look as good."""

LAST_SHARE = 0.05
"""Of the peak, where a grid's learning rate starts and ends unless min_lr is given (arXiv 2503.09799), so that the same
schedule is tuned whatever the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """A grid's runs, and those before them."""

    plan: QualityPlan
    trials: Mapping[str, Sequence[Trial]]  # by the variant's label; none where nothing is tuned


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
    corpus, knobs = load_corpus(data.path, max_bytes=data.max_bytes), parse_knobs(grid.tune)
    settings = run_settings(grid.settings, origin="--set")
    if wrong := sorted(_OPTIONS.keys() & settings.keys()):
        raise CommandError(f"--set {wrong[0]}: say {_OPTIONS[wrong[0]]} instead; every variant trains the same tokens")
    if grid.model not in PRESETS:
        raise CommandError(f"--model: there is no {grid.model!r}; {nearest(grid.model, PRESETS)}")
    if grid.seeds > SEED_OFFSET:
        raise CommandError(f"--seeds {grid.seeds}: at most {SEED_OFFSET}, for then comes the seed of the tuning")
    base = {**METHODS_BASE, **settings, "model": grid.model, "steps": grid.steps}

    def spec(config: RunConfig, further: int) -> RunSpec:
        return plan_run(dataclasses.replace(config, seed=config.seed + further), data, corpus).spec

    columns, trials = list[Variant](), dict[str, list[Trial]]()
    for label in grid.variants:
        overrides = {**parse_variant(label), **(picked or {}).get(label, {})}
        with _about(label):
            config = _config(grid, base, overrides, label)
            columns.append(Variant(label=label, specs=tuple(spec(config, number) for number in range(grid.seeds))))
            points = _points(config, overrides, knobs) if picked is None else ()
            tried = [(point, _config(grid, base, {**overrides, **point}, label)) for point in points]
        for point, tuned in tried:
            with _about(f"{label}, {settings_text(point)}"):
                trials.setdefault(label, []).append(Trial(settings=point, spec=spec(tuned, SEED_OFFSET)))
    try:
        plan = QualityPlan(
            variants=tuple(columns), folder=out / "runs", data=data.path, max_bytes=data.max_bytes, device=device
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    return GridPlan(plan=plan, trials=trials)


_OPTIONS = {"steps": "--steps", "batch_sequences": "--global-batch", "model": "--model"}


def _points(config: RunConfig, overrides: Mapping[str, Any], knobs: tuple[Knob, ...]) -> tuple[dict[str, float], ...]:
    """Of a variant's search. What it spells is not tuned, nor what its method does not have."""
    method = METHODS[config.method]
    without = {
        knob.name
        for knob in knobs
        if knob.name in overrides
        or knob.name in method.fixed
        or (knob.name.startswith("outer_") and (method.outer == "adamw" or config.nodes == 1))
    }
    return settings_to_try(knobs, without=without, rate=None if RATE in overrides else config.lr)


def _config(grid: Grid, base: Mapping[str, Any], overrides: Mapping[str, Any], label: str) -> RunConfig:
    """A variant's settings. What its method fixes it takes from the method, not from the base."""
    method = method_named(RunConfig(**{**base, **overrides}).method)
    config = RunConfig(**{**{key: value for key, value in base.items() if key not in method.fixed}, **overrides})
    if config.nodes < 1:
        raise ValueError(f"nodes is {config.nodes}; the least is 1")
    rounds = config.steps // (config.h or method.h)
    return dataclasses.replace(
        config,
        name="quality",
        min_lr=config.min_lr if "min_lr" in {*base, *overrides} else LAST_SHARE * config.lr,
        evaluate_every_rounds=config.evaluate_every_rounds or max(1, rounds // EVALUATIONS),
        batch_sequences=share_of(grid, config.nodes, label),
    )


@contextmanager
def _about(label: str) -> Iterator[None]:
    """Errors about a variant's numbers begin with its label."""
    try:
        yield
    except ValueError as error:
        raise CommandError(f"{label}: {error}") from error
