"""SCENARIO.toml, the input of the flow simulator, as its dataclasses. Every error is one line with its place."""

import dataclasses
import importlib.resources
import re
from collections.abc import Mapping
from dataclasses import MISSING
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from farloop.config.exit_codes import CommandError
from farloop.config.sources import ConfigError, line_numbers, load_tables
from farloop.monitoring.units import nearest
from farloop.sim.flow.scenario import (
    LOCK_STEP,
    METHOD_NAMES,
    SWEPT,
    Crash,
    FlowScenario,
    Group,
    Hub,
    Model,
    Outage,
    Published,
    Rules,
    Site,
    Sweep,
    Variant,
)

_TABLES: Mapping[str, type] = {"model": Model, "coordinator": Hub, "run": Rules, "sweep": Sweep}  # `[name]`

_LISTS: Mapping[str, type] = {
    "nodes": Group,
    "sites": Site,
    "outages": Outage,
    "crashes": Crash,
    "variants": Rules,
    "published": Published,
}
"""`[[name]]`"""

_LOOSE_KEYS = frozenset(
    {"h", "fragments", "tau", "quorum", "max_staleness", "max_stale_rounds", "per_node_h", "bits_up", "bits_down"}
)
"""Keys of [run] that do not apply to a lock-step variant."""


def load_scenario(path: Path) -> FlowScenario:
    """The scenario in a file. Raises ConfigError."""
    text, tables = load_tables(path)
    return _File(path, text).scenario(tables)


def example_names() -> list[str]:
    """Scenarios that come with farloop."""
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
        fields: dict[str, Any] = {}
        plain = {f.name for f in dataclasses.fields(FlowScenario)} - set(_TABLES) - set(_LISTS)
        hints = get_type_hints(FlowScenario)
        for name, value in tables.items():
            if name in _TABLES or name in _LISTS:
                fields[name] = self._section(name, value)
            elif name in plain:
                fields[name] = self._value("", 0, name, hints[name], value)
            else:
                raise self._error("", 0, name, f"there is no such key; {nearest(name, [*plain, *_TABLES, *_LISTS])}")
        run, variants = fields.pop("run", {}), fields.pop("variants", ())
        found = [self._variant(number, run, own) for number, own in enumerate(variants)]
        if not found:
            rules = self._make("run", 0, Rules, run)
            found = [Variant(name=rules.method, rules=rules)]
        try:
            return FlowScenario(**fields, variants=tuple(found))
        except ValueError as error:
            raise self._about(str(error)) from error

    def _section(self, name: str, value: Any) -> Any:
        """The value of a table; for [run] and variants only its checked keys, which are combined later."""
        if name in _TABLES:
            if not isinstance(value, dict):
                raise self._error("", 0, name, f"expected a table: [{name}]")
            keys = self._keys(name, 0, _TABLES[name], value)
            return keys if name == "run" else self._make(name, 0, _TABLES[name], keys)
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            raise self._error(name, 0, "", f"expected a list of tables: [[{name}]]")
        found = [self._keys(name, number, _LISTS[name], one) for number, one in enumerate(value)]
        if name == "variants":
            return found
        return tuple(self._make(name, number, _LISTS[name], one) for number, one in enumerate(found))

    def _variant(self, number: int, run: Mapping[str, Any], own: dict[str, Any]) -> Variant:
        name = own.pop("name", None)
        method = own.get("method", run.get("method", Rules().method))
        left_out = _LOOSE_KEYS if method in LOCK_STEP else frozenset()
        rules = self._make("variants", number, Rules, {**{k: v for k, v in run.items() if k not in left_out}, **own})
        return Variant(name=name or rules.method, rules=rules)

    def _keys(self, table: str, number: int, owner: type, given: Mapping[str, Any]) -> dict[str, Any]:
        """Checked keys and values."""
        hints = get_type_hints(owner)
        if table == "variants":
            hints = {"name": str, **hints}
        found = {}
        for key, value in given.items():
            if key not in hints:
                raise self._error(table, number, key, f"there is no such key; {nearest(key, hints)}")
            found[key] = self._value(table, number, key, hints[key], value)
        return found

    def _value(self, table: str, number: int, key: str, hint: Any, value: Any) -> Any:
        if isinstance(value, list):
            value = tuple(value)
        for name, choices in (("method", METHOD_NAMES), ("key", SWEPT)):
            if key == name and value not in choices:
                raise self._error(table, number, key, f"there is no {value!r}; {nearest(str(value), sorted(choices))}")
        try:
            return TypeAdapter(hint).validate_python(value, strict=True)
        except ValidationError:
            raise self._error(table, number, key, f"expected {_wanted(hint)}, got {_shown(value)}") from None

    def _make(self, table: str, number: int, owner: type, keys: Mapping[str, Any]) -> Any:
        for field in dataclasses.fields(owner):
            if field.name not in keys and field.default is MISSING and field.default_factory is MISSING:
                raise self._error(table, number, "", f"{field.name} is missing")
        try:
            return owner(**keys)
        except ValueError as error:
            key = str(error).split(maxsplit=1)[0].rstrip(":")
            home = (table, number) if (table, number, key) in self._lines else ("run", 0)
            raise self._error(
                *(home if key in keys else (table, number)), key, _without_key(str(error), key)
            ) from error

    def _about(self, sentence: str) -> ConfigError:
        """An error of the whole scenario; it begins with a key, and may quote its value."""
        key = sentence.split(maxsplit=1)[0].rstrip(":")
        quoted = re.search(r"'([^']*)'", sentence)
        for (table, number, name), line in self._lines.items():
            if name == key and (not quoted or quoted[1] in self._text[line - 1]):
                return self._error(table, number, key, _without_key(sentence, key))
        return ConfigError(f"{self._path}: {sentence}")

    def _error(self, table: str, number: int, key: str, what: str) -> ConfigError:
        places = ((table, number, key), (table, number, ""), (key, 0, ""))  # a key may itself be a table
        line = next((self._lines[place] for place in places if place in self._lines), None)
        where = f"{self._path}:{line}" if line else str(self._path)
        header = f"[[{table}]] " if table in _LISTS else f"[{table}] " if table else ""
        return ConfigError(f"{where}: {header}{key}{': ' if key else ''}{what}")


def _without_key(sentence: str, key: str) -> str:
    return sentence.removeprefix(key).removeprefix(":").strip()


def _wanted(hint: Any) -> str:
    text = str(hint)
    if "tuple" in text:
        return "a list of numbers"
    if hint is bool or "bool" in text:
        return "true or false"
    if "float" in text:
        return "a number"
    return "a whole number" if hint is int or "int" in text else "text in quotes"


def _shown(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else repr(value)
