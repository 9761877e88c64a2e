"""Which keys the sections of a settings file have: taken from the dataclasses that own them, docstrings included."""

import ast
import dataclasses
import inspect
import json
import os
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from farloop.cli.run import DataConfig, RunConfig
from farloop.cli.sources import Given
from farloop.coordinator.daemon import CoordinatorConfig
from farloop.node.pipeline.trainer import PipelineConfig
from farloop.node.trainer import NodeConfig

_PATHS = tuple[Path, ...]

_WANTED: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text in quotes",
    Path: "a path in quotes",
    _PATHS: "a list of paths in quotes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Keys that both daemons have and only the command line cares for."""

    insecure: bool = False
    """Beyond this machine without keys: everything in the clear, and anybody may take part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One setting."""

    section: str
    name: str
    kind: type
    optional: bool
    """Whether it may stay open, as None."""
    default: object
    """`dataclasses.MISSING` where it has to be given."""
    meaning: str
    """The docstring of its field, as one line."""

    def parse(self, given: Given) -> object:
        """The value that was given, as the type it must have. Raises ConfigError."""
        if self.optional and given.value == "":
            return None
        if (self.kind is Path and given.value == "") or (isinstance(given.value, list) and "" in given.value):
            raise given.error("a path is wanted; for this folder itself write .")
        try:
            value = self._validated(given.value, is_text=given.is_text)
        except (ValidationError, TypeError):
            raise given.error(f"{_WANTED[self.kind]} is wanted, not {_shown(given.value)}{self._hint(given)}") from None
        if isinstance(value, tuple):
            return tuple(_resolved(path, given.folder) for path in value)
        return _resolved(value, given.folder) if isinstance(value, Path) else value

    def _validated(self, value: object, *, is_text: bool) -> Any:
        adapter: TypeAdapter[Any] = TypeAdapter(self.kind)
        if is_text and self.kind == _PATHS:  # a text has commas where a file has a list
            return tuple(Path(part.strip()) for part in str(value).split(","))
        if is_text:
            return adapter.validate_strings(value)
        # As JSON, because only there strict means: a path may be text, a number may not.
        return adapter.validate_json(json.dumps(value), strict=True)

    def _hint(self, given: Given) -> str:
        """A value of another type that says the same, as `"600"` for 600."""
        if given.is_text or self.kind is Path or isinstance(given.value, dict | list):
            return ""
        try:
            meant = self._validated(str(given.value), is_text=True)
        except ValidationError:
            return ""
        return f"; did you mean {_shown([str(path) for path in meant] if self.kind == _PATHS else meant)}?"


def _resolved(path: Path, folder: Path) -> Path:
    return Path(os.path.normpath(folder / path.expanduser()))


Schema = Mapping[str, Mapping[str, Key]]
"""Section → key → what it is."""


def _section(name: str, *owners: type, without: frozenset[str] = frozenset()) -> dict[str, Key]:
    keys = {}
    for owner in owners:
        meanings, hints = _meanings(owner), get_type_hints(owner)
        for field in dataclasses.fields(owner):
            if field.name not in without:
                kind, optional = _kind(hints[field.name])
                keys[field.name] = Key(
                    section=name,
                    name=field.name,
                    kind=kind,
                    optional=optional,
                    default=field.default,
                    meaning=meanings.get(field.name, ""),
                )
    return keys


def _kind(hint: Any) -> tuple[type, bool]:
    """`X | None` → X, True."""
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (inner for inner in get_args(hint) if inner is not type(None))
        return kind, True
    assert hint in _WANTED, hint
    return hint, False


def _meanings(owner: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass, which Python itself forgets."""
    (body,) = (node for node in ast.parse(textwrap.dedent(inspect.getsource(owner))).body)
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        match field, doc:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                meanings[name] = " ".join(text.split())
    return meanings


def _shown(value: object) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return str(value)


RUN_SCHEMA: Schema = {
    "run": _section("run", RunConfig),
    "data": _section("data", DataConfig),
    "coordinator": _section("coordinator", CoordinatorConfig, Exposure, without=frozenset({"limits", "timing"})),
}

NODE_SCHEMA: Schema = {
    # The data has a section of its own, the same in both files.
    "node": _section("node", NodeConfig, Exposure, without=frozenset({"data", "data_bytes", "data_phases"})),
    "data": _section("data", DataConfig),
    "pipeline": _section("pipeline", PipelineConfig),
}
