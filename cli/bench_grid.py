"""A grid of `farloop bench quality`: which methods are compared at equal tokens. By default, from a file, by flags."""

import dataclasses
import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from farloop.algo.methods import METHODS
from farloop.cli.exit_codes import CommandError
from farloop.cli.sources import ConfigError, load_tables, nearest

BASELINE = "data-parallel"
"""The method that all others are measured against."""

_DEFAULT_VARIANTS = (
    "data-parallel nodes=2",
    "single",
    "diloco nodes=2 h=30 codec=q4",
    "streaming nodes=2 h=30 codec=q4",
    "streaming nodes=4 h=30 codec=q4",
    "decoupled nodes=4 h=30 codec=q4",
    "co2 nodes=2 h=30 codec=q4",
    "async nodes=4 h=30 codec=q4",
    "sparse nodes=4 h=30",
)

_MOST_VARIANTS = 8


def default_variants() -> tuple[str, ...]:
    """Eight of the methods that there are."""
    known = [spelled for spelled in _DEFAULT_VARIANTS if spelled.split()[0] in {"single", *METHODS}]
    return tuple(known[:_MOST_VARIANTS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Runs that all train the same tokens: every step of a run is one batch, shared by its nodes."""

    variants: tuple[str, ...] = dataclasses.field(default_factory=default_variants)
    """As they are spelled."""
    model: str = "micro"
    """A built-in model: half a million parameters are enough to tell methods apart, and few enough for two cores."""
    steps: int = 400
    """Of every node."""
    global_batch: int = 16
    """Sequences of one step of all nodes together."""
    seeds: int = 3
    settings: tuple[str, ...] = ()
    """KEY=VALUE, for all variants that do not say otherwise."""
    tune: tuple[str, ...] = ()
    """KEY=VALUE,VALUE,…: what is tried for every variant before the runs that count."""


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
    return next((spelled for spelled in variants if method in (*spelled.split()[:1], *_method_of(spelled))), None)


def _method_of(spelled: str) -> list[str]:
    return [word.removeprefix("method=") for word in spelled.split() if word.startswith("method=")]


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
