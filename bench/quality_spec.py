"""Variants and grids of the quality benchmark, from text."""

import dataclasses
import itertools
import math
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError

from farloop.algo.methods import METHODS, method_named
from farloop.algo.spec import RunSpec
from farloop.bench.quality import CPU, RATE, SEED_OFFSET, Knob, QualityPlan, Trial, Tuned, Variant, settings_to_try
from farloop.config.exit_codes import CommandError
from farloop.config.run_config import DataConfig, RunConfig
from farloop.config.run_spec import plan_run
from farloop.config.settings import OTHER_NAMES, RUN_SCHEMA, run_settings
from farloop.config.sources import ConfigError, load_tables
from farloop.monitoring.units import nearest
from farloop.node.data import Corpus, load_corpus
from farloop.node.settings import PRESETS
from farloop.quant.registry import CODECS

# --- how variants, settings and knobs are spelled

SINGLE = "single"  # spells a node that trains alone; its averaging with itself changes nothing

_SINGLE = {
    "method": "diloco",
    "nodes": 1,
    "codec_up": "fp32",
    "codec_down": "fp32",
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
}

SAME_FOR_ALL = frozenset({"name", "seed", "init", "model", "sequence_tokens", "evaluation_sequences"})
"""Settings that decide the first weights, the samples and what is evaluated: runs that differ in them are no pairs."""


def parse_variant(spelled: str, *, fixed: Collection[str] = SAME_FOR_ALL) -> dict[str, Any]:
    """`streaming nodes=4 codec=q4`, `q4r:step=0.7/q4 h=15`: fields of `RunConfig`.

    A variant is a method or `single`, a pair of codecs as UP/DOWN, settings as KEY=VALUE, or several of these. `fixed`
    are settings that a variant may not have. Raises CommandError.
    """
    origin, words = repr(spelled), spelled.split()
    if not words:
        raise CommandError("an empty variant; name a method as streaming, codecs as q4/q4, settings as h=15, or all")
    settings = [word for word in words if "=" in word and not _is_pair(word)]
    pairs = [word for word in words if _is_pair(word)]
    names = [word for word in words if word not in settings and word not in pairs]
    if len(names) > 1:
        raise CommandError(f"{origin}: one method is wanted, not {' and '.join(names)}")
    if len(pairs) > 1:
        raise CommandError(f"{origin}: one pair of codecs is wanted, as q4/q4: up, then down")
    fields = _method_fields(names[0], origin) if names else {}
    for pair in pairs:
        up, _, down = pair.partition("/")
        if not up or not down or "/" in down:
            raise CommandError(f"{origin}: one pair of codecs is wanted, as q4/q4: up, then down")
        fields |= {"codec_up": up, "codec_down": down}
    fields |= run_settings(settings, origin=origin)
    if wrong := sorted(fixed & fields.keys()):
        raise CommandError(f"{origin}: {wrong[0]} is the same for all variants; {_how_for_all(wrong[0])}")
    return fields


def _is_pair(word: str) -> bool:
    """UP/DOWN, and not the path of a KEY=VALUE: a codec has a colon before its first equals sign."""
    before = word.partition("=")[0]
    return "/" in word and ("/" in before or ":" in before or "=" not in word)


def _method_fields(word: str, origin: str) -> dict[str, Any]:
    if word == SINGLE:
        return dict(_SINGLE)
    if word in METHODS:
        return {"method": word}
    if word.partition(":")[0] in CODECS:
        raise CommandError(f"{origin}: codecs are spelled UP/DOWN, as {word}/{word}, or codec={word} for both ways")
    raise CommandError(
        f"{origin}: {word!r} is neither a method nor UP/DOWN, as q4/q4, nor KEY=VALUE, as h=15; "
        f"{nearest(word, [SINGLE, *METHODS])}"
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
            raise CommandError(f"--tune {word}: KEY=VALUE,VALUE,… is wanted, as outer_lr=0.2,0.4,0.6")
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
            raise CommandError(f"--tune {word}: {part.strip()} cannot be tried; a number above 0 is wanted")
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
    "diloco nodes=2 h=30 codec=q4",
    "streaming nodes=2 h=30 codec=q4",
    "streaming nodes=4 h=30 codec=q4",
    "decoupled nodes=4 h=30 codec=q4",
    "co2 nodes=2 h=30 codec=q4",
    "async nodes=4 h=30 codec=q4",
)


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


_FIELDS = frozenset(field.name for field in dataclasses.fields(Grid))


def load_grid(path: Path) -> Grid:
    """The grid of a TOML file: keys of `Grid`, tables [set] and [tune], and a [[variant]] each, or several at once,
    where a value is a list. Raises ConfigError.
    """
    tables = load_tables(path)[1]
    hints = {**get_type_hints(Grid), "set": dict, "tune": dict, "variant": list}
    fields: dict[str, Any] = {}
    for key, value in tables.items():
        if key not in hints or key in ("variants", "settings"):
            known = sorted(hints.keys() - {"variants", "settings"})
            raise ConfigError(f"{path}: {key}: there is no such key; {nearest(key, known)}")
        match key:
            case "set":
                words = _table(path, "[set]", value)
                fields["settings"] = tuple(f"{name}={_text(path, name, one)}" for name, one in words.items())
            case "tune":
                fields["tune"] = tuple(_knob(path, name, one) for name, one in _table(path, "[tune]", value).items())
            case "variant":
                fields["variants"] = _variants(path, value)
            case _:
                fields[key] = _plain(path, key, hints[key], value)
    return Grid(**fields)


def asked_for(path: Path | None, flags: Mapping[str, Any], lists: Mapping[str, list[str] | None]) -> Grid:
    """The grid of a file, or the default one, with a command line's options on top. Raises CommandError.

    `flags`: fields of `Grid`, and settings of a run for all variants; None where not given. `lists`: fields of `Grid`
    that may be given several times; they are added to the file's.
    """
    grid = Grid() if path is None else load_grid(path)
    given = {name: value for name, value in flags.items() if value is not None}
    fields: dict[str, Any] = {name: value for name, value in given.items() if name in _FIELDS}
    settings = [f"{name}={value}" for name, value in given.items() if name not in _FIELDS]
    variants = lists.get("variants") or []
    fields["variants"] = with_baseline((*(() if path is None and variants else grid.variants), *variants))
    fields["settings"] = (*grid.settings, *settings, *(lists.get("settings") or []))
    fields["tune"] = (*grid.tune, *(lists.get("tune") or []))
    return dataclasses.replace(grid, **fields)


def _plain(path: Path, key: str, kind: Any, value: Any) -> Any:
    try:
        found = TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        wanted = "text in quotes" if kind is str else "a whole number"
        raise ConfigError(f"{path}: {key}: {wanted} is wanted, not {value!r}") from None
    if kind is int and found < 1:
        raise ConfigError(f"{path}: {key}: the least is 1, not {found}")
    return found


def _table(path: Path, name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a table is wanted: {name}")
    return value


def _knob(path: Path, name: str, values: Any) -> str:
    if not isinstance(values, list) or not values:
        raise ConfigError(f"{path}: [tune] {name}: a list of numbers is wanted, as [0.2, 0.4, 0.6]")
    return f"{name}={','.join(_text(path, name, value) for value in values)}"


def _variants(path: Path, tables: Any) -> tuple[str, ...]:
    """Every [[variant]] as it would be spelled; of lists every combination."""
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{path}: a list of tables is wanted: [[variant]]")
    spelled = []
    for table in tables:
        choices = [[(name, one) for one in (v if isinstance(v, list) else [v])] for name, v in table.items()]
        for combination in itertools.product(*choices):
            method = [_text(path, name, value) for name, value in combination if name == "method"]
            rest = [f"{name}={_text(path, name, value)}" for name, value in combination if name != "method"]
            spelled.append(" ".join([*method, *rest]))
    return tuple(spelled)


def _text(path: Path, name: str, value: Any) -> str:
    """As a command line would have it."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return f"{value:.15g}"  # 0.004, and not 4e-3 or 0.0040000000000000001
        case str() if value and not any(map(str.isspace, value)):
            return value
        case _:
            raise ConfigError(f"{path}: {name}: a number or a text without spaces is wanted, not {value!r}")


def with_baseline(variants: tuple[str, ...]) -> tuple[str, ...]:
    """Data parallel first: the first one that is there; else `single`, the same training without a link, if that is
    there; else data parallel of two nodes."""
    tidy = tuple(" ".join(spelled.split()) for spelled in variants)
    found = _first(BASELINE, tidy) or _first("single", tidy)
    if found is None:
        return (f"{BASELINE} nodes=2", *tidy)
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

QUIET: Mapping[str, Any] = {"evaluation_sequences": 2048, "lr": 1e-3, "min_lr": 1e-5}
"""Where settings are not given: what keeps chance small. A pair of runs (nano, 4 nodes, 600 steps, fp32 beside q4) then
differs by 0.03 %, one standard deviation over 5 seeds. A peak of 2e-3 makes that 0.2 %, one of 3e-3 0.2 to 0.6 %, for
there training amplifies every difference; and 256 sequences alone add 0.14 %."""

METHODS_BASE: Mapping[str, Any] = {"evaluation_sequences": 2048, "lr": 4e-3}
"""Of a grid: a peak at which data parallel does about its best in 400 steps, or every method would look as good."""

LAST_SHARE = 0.05
"""Of the peak, where a grid's learning rate starts and ends unless min_lr is given (arXiv 2503.09799), so that the same
schedule is tuned whatever the peak."""

_FIXED_IN_GRID = SAME_FOR_ALL | {"steps", "batch_sequences"}  # what makes the tokens of all variants equal


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """A grid's runs, and those before them."""

    plan: QualityPlan
    trials: Mapping[str, tuple[Trial, ...]]  # by the variant's label; none where nothing is tuned


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
    """Errors about a variant's numbers begin with its label."""
    try:
        yield
    except ValueError as error:
        raise CommandError(f"{label}: {error}") from error
