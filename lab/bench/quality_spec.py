"""Variants and grids of the quality benchmark, from text."""

import dataclasses
import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt

from farloop.algo.methods import METHODS, method_named
from farloop.config.exit_codes import CommandError
from farloop.config.run_config import RunConfig
from farloop.config.run_spec import plan_run
from farloop.config.settings import run_settings
from farloop.config.sources import load_tables, validated
from farloop.lab.bench.quality import CPU, QualityPlan, Variant
from farloop.monitoring.status import dumps
from farloop.monitoring.units import nearest
from farloop.node.data.corpus import load_corpus
from farloop.node.settings import PRESETS, DataConfig

# --- how variants and settings are spelled

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
"""Settings that decide the first weights, the samples, the evaluation or the tokens: equal in all runs of a pair."""


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
        of_a_step = "it is --global-batch shared by the nodes"
        how = {"steps": "set it with --steps", "model": "set it with --model", "batch_sequences": of_a_step}
        told = f"{wrong[0]} is the same for all variants; {how.get(wrong[0], 'set it with --set')}"
        raise CommandError(f"{origin}: {told}")
    return fields


def _method_fields(word: str, origin: str) -> dict[str, Any]:
    if word in (SINGLE, MUON):
        return _SINGLE | {"inner_optimizer": "muon" if word == MUON else "adamw"}
    if word in METHODS:
        return {"method": word}
    raise CommandError(
        f"{origin}: {word!r} is neither a method nor KEY=VALUE, as h=15; {nearest(word, [SINGLE, MUON, *METHODS])}"
    )


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
"""What `farloop lab bench frontier` trains: from one sync a step to one in 60 steps, and from 32 bits to 2."""


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


class _File(BaseModel):
    """A grid's TOML file: `Grid`, its settings as a table. What is left out has the grid's default."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = ""
    steps: PositiveInt = 1
    global_batch: PositiveInt = 1
    seeds: PositiveInt = 1
    set: dict[str, Any] = {}
    variant: list[dict[str, Any]] = []
    """Several at once where a value is a list: every combination."""


def load_grid(path: Path) -> Grid:
    """The grid of a TOML file: keys of `Grid`, a table [set], and a [[variant]] each, or several at once, where a value
    is a list. Raises ConfigError."""
    file = validated(_File, load_tables(path)[1], path)
    variants = tuple(
        _spelled(dict(zip(table, values, strict=True)))
        for table in file.variant
        for values in itertools.product(*(value if isinstance(value, list) else [value] for value in table.values()))
    )
    return Grid(
        variants=variants or DEFAULT_VARIANTS,
        settings=tuple(f"{name}={_text(value)}" for name, value in file.set.items()),
        **file.model_dump(include={"model", "steps", "global_batch", "seeds"}, exclude_unset=True),
    )


def asked_for(path: Path | None, flags: Mapping[str, Any], lists: Mapping[str, list[str] | None]) -> Grid:
    """The grid of a file, or the default one, with a command line's options on top. Raises CommandError.

    `flags`: fields of `Grid`; None where not given. `lists`: those that may be given several times, beside the file's.
    """
    grid = load_grid(path) if path else Grid()
    variants = lists.get("variants") or []
    return dataclasses.replace(
        grid,
        **{name: value for name, value in flags.items() if value is not None},
        variants=baseline_first((*(() if path is None and variants else grid.variants), *variants)),
        settings=(*grid.settings, *(lists.get("settings") or [])),
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
    return next((one for one in variants if one.split()[:1] == [method] or f"method={method}" in one.split()), None)


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
    words = ["farloop", "lab", "bench", "quality", "--model", grid.model, "--steps", str(grid.steps)]
    words += ["--global-batch", str(grid.global_batch), "--seeds", str(grid.seeds)]
    for flag, values in (("--set", grid.settings), ("--variant", grid.variants)):
        words += [word for value in values for word in (flag, value)]
    return shlex.join([*words, *options])


# --- the runs of variants and of a grid

METHODS_BASE: Mapping[str, Any] = {"evaluation_sequences": 2048, "lr": 4e-3}
"""Of a grid: a peak at which data parallel does about its best in 400 steps, or every method would look as good."""

LAST_SHARE = 0.05
"""Of the peak, where a grid's learning rate starts and ends unless min_lr is given (arXiv 2503.09799), so that the
schedules of all peaks are alike."""


def plan_grid(grid: Grid, *, data: DataConfig, out: Path, device: str = CPU) -> QualityPlan:
    """The runs of a grid; its variants as they are spelled, the first one the baseline.

    Raises CommandError: a word or a setting cannot be used.
    Raises CorpusError: there is no text.
    """
    corpus = load_corpus(data.path, max_bytes=data.max_bytes)
    settings = run_settings(grid.settings, origin="--set")
    if wrong := sorted(_OPTIONS.keys() & settings.keys()):
        raise CommandError(f"--set {wrong[0]}: say {_OPTIONS[wrong[0]]} instead; every variant trains the same tokens")
    if grid.model not in PRESETS:
        raise CommandError(f"--model: there is no {grid.model!r}; {nearest(grid.model, PRESETS)}")
    base = {**METHODS_BASE, **settings, "model": grid.model, "steps": grid.steps}
    columns = list[Variant]()
    for label in grid.variants:
        overrides = parse_variant(label)
        try:
            config = _config(grid, base, overrides, label)
            configs = [dataclasses.replace(config, seed=config.seed + number) for number in range(grid.seeds)]
            specs = tuple(plan_run(each, data, corpus).spec for each in configs)
        except ValueError as error:
            raise CommandError(f"{label}: {error}") from error
        columns.append(Variant(label=label, specs=specs))
    try:
        return QualityPlan(
            variants=tuple(columns), folder=out / "runs", data=data.path, max_bytes=data.max_bytes, device=device
        )
    except ValueError as error:
        raise CommandError(str(error)) from error


_OPTIONS = {"steps": "--steps", "batch_sequences": "--global-batch", "model": "--model"}


def _config(grid: Grid, base: Mapping[str, Any], overrides: Mapping[str, Any], label: str) -> RunConfig:
    """A variant's settings. What its method fixes it takes from the method, not from the base."""
    method = method_named(RunConfig(**{**base, **overrides}).method)
    config = RunConfig(**{**{key: value for key, value in base.items() if key not in method.fixed}, **overrides})
    if config.nodes < 1:
        raise ValueError(f"nodes: expected 1 or more, got {config.nodes}")
    return dataclasses.replace(
        config,
        name="quality",
        min_lr=config.min_lr if "min_lr" in {*base, *overrides} else LAST_SHARE * config.lr,
        evaluate_every_rounds=config.evaluate_every_rounds or config.steps,  # none on the way
        batch_sequences=share_of(grid, config.nodes, label),
    )
