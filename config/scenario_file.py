"""SCENARIO.toml, the input of the flow simulator, as its dataclasses. Every error is one line with its place."""

import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError, create_model

from farloop.config.exit_codes import CommandError
from farloop.config.sources import WANTED, ConfigError, as_json, first_fault, line_numbers, load_tables
from farloop.monitoring.units import Checked, nearest
from farloop.sim.flow.scenario import LOCK_STEP, METHOD_NAMES, FlowScenario, Rules

_LOOSE_KEYS = frozenset(
    {"h", "fragments", "tau", "quorum", "max_staleness", "max_stale_rounds", "per_node_h", "bits_up", "bits_down"}
)
"""Keys of [run] that do not apply to a lock-step variant."""

_HINTS = {kind: get_type_hints(kind) for kind in (FlowScenario, Rules)}
_RUN: Any = create_model(
    "_RUN", __config__={"extra": "forbid"}, **{f.name: (_HINTS[Rules][f.name], None) for f in fields(Rules)}
)  # type: ignore[call-overload]
"""[run] alone: what it says is combined with a variant before it is a whole."""


def load_scenario(path: Path) -> FlowScenario:
    """The scenario in a file. Raises ConfigError."""
    text, tables = load_tables(path)
    return _File(path, text).scenario(tables)


def example_names() -> list[str]:
    folder = importlib.resources.files("farloop.sim") / "scenarios"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_example(name: str) -> FlowScenario:
    """The scenario of an example. Raises CommandError."""
    with importlib.resources.as_file(_example(name)) as path:
        return load_scenario(path)


def example_text(name: str) -> str:
    """The file of an example. Raises CommandError."""
    return _example(name).read_text(encoding="utf-8")


def _example(name: str) -> Traversable:
    if name not in example_names():
        raise CommandError(f"--example: there is no {name!r}; {nearest(name, example_names())}")
    return importlib.resources.files("farloop.sim") / "scenarios" / f"{name}.toml"


class _File:
    """A scenario file with the lines of its keys."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text.splitlines()
        self._lines = line_numbers(text)

    def scenario(self, tables: Mapping[str, Any]) -> FlowScenario:
        run, variants = tables.get("run", {}), tables.get("variants", [])
        if not isinstance(run, dict):
            raise self._error("", 0, "run", "expected a table: [run]")
        if not isinstance(variants, list) or not all(isinstance(one, dict) for one in variants):
            raise self._error("variants", 0, "", "expected a list of tables: [[variants]]")
        loose = _LOOSE_KEYS if variants else frozenset[str]()
        plain = {key: value for key, value in tables.items() if key != "run"}
        plain["variants"] = [_variant(run, own, loose) for own in variants or [{}]]
        for kind, given, at in ((_RUN, run, ("run",)), (FlowScenario, plain, ())):
            try:
                made = TypeAdapter[Any](kind).validate_json(as_json(given, self._path), strict=True)
            except ValidationError as error:
                raise self._refused(first_fault(error), at, run, alone=not variants) from None
        return made  # type: ignore[no-any-return]

    def _refused(self, found: Any, at: tuple[str, ...], run: Mapping[str, Any], *, alone: bool) -> ConfigError:
        """A fault that pydantic found in a table at this place; `alone`: [run] is the only variant."""
        name, *inside = (*at, *found["loc"]) or ("",)
        if name == "variants" and inside[1:2] == ["rules"]:
            del inside[1]  # a file has no such table
        number = inside.pop(0) if inside and isinstance(inside[0], int) else 0
        table, key = (name, inside[0]) if inside else ("", name)
        if found["type"] == "value_error":
            sentence = str(found["ctx"]["error"])
            if not name:
                return self._about(sentence)
            table, key = name, sentence.split(maxsplit=1)[0].rstrip(":")
        if table == "variants" and (alone or (key in run and (table, number, key) not in self._lines)):
            table, number = "run", 0
        match found["type"]:
            case "value_error":
                what = _without_key(sentence, key)
            case "unexpected_keyword_argument" | "extra_forbidden":
                what = f"there is no such key; {nearest(key, _keys_of(table))}"
            case "missing":
                return self._error(table, number, "", f"{key} is missing")
            case "literal_error":
                what = f"there is no {found['input']!r}; {nearest(str(found['input']), sorted(METHOD_NAMES))}"
            case "tuple_type" if not table:
                what = f"expected a list of tables: [[{key}]]"
            case fault:
                what = f"expected {WANTED[fault.partition('_')[0]]}, got {found['input']!r}"
        return self._error(table, number, key, what)

    def _about(self, sentence: str) -> ConfigError:
        """An error of the whole scenario; it begins with a key, and may quote its value."""
        key = sentence.split(maxsplit=1)[0].rstrip(":")
        quoted = re.search(r"'([^']*)'", sentence)
        for (table, number, name), line in self._lines.items():
            if name == key and (not quoted or quoted[1] in self._text[line - 1]):
                return self._error(table, number, key, _without_key(sentence, key))
        return ConfigError(f"{self._path}: {sentence}")

    def _error(self, table: str, number: int, key: str, what: str) -> ConfigError:
        # A key may itself be a table, and a table a key of the top.
        places = ((table, number, key), (table, number, ""), (key, 0, ""), ("", 0, table))
        line = next((self._lines[place] for place in places if place in self._lines), None)
        where = f"{self._path}:{line}" if line else str(self._path)
        listed = "tuple" in str(_HINTS[FlowScenario].get(table))
        header = f"[[{table}]] " if listed else f"[{table}] " if table else ""
        return ConfigError(f"{where}: {header}{key}{': ' if key else ''}{what}")


def _variant(run: Mapping[str, Any], own: Mapping[str, Any], loose: frozenset[str]) -> dict[str, Any]:
    """A variant with what [run] says for all; a lock-step one takes over nothing that it has no use for."""
    method = own.get("method", run.get("method", Rules().method))
    left_out = loose if method in [*LOCK_STEP] else ()
    shared = {key: value for key, value in run.items() if key not in left_out}
    name = own.get("name") or str(method)
    return {"name": name, "rules": {**shared, **{key: value for key, value in own.items() if key != "name"}}}


def _keys_of(table: str) -> list[str]:
    """Those that a file may have in a table; in an empty one, on top."""
    hint: Any = Rules if table in ("run", "variants") else _HINTS[FlowScenario].get(table, FlowScenario)
    kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type) and issubclass(kind, Checked)]
    more = {"variants": ["name"], "": ["run"]}.get(table, [])
    return [*(field.name for field in fields(kinds[0])), *more]  # type: ignore[arg-type]


def _without_key(sentence: str, key: str) -> str:
    return sentence.removeprefix(key).removeprefix(":").strip()
