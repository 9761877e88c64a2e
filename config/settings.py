"""RUN.toml and NODE.toml, environment and flags, as settings."""

import ast
import dataclasses
import inspect
import json
import math
import os
import re
import textwrap
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError

from farloop.algo.methods import METHODS
from farloop.algo.validation import INNER_OPTIMIZERS, ROBUST_RULES, RULES, SCREENS, SHAPES
from farloop.config.run_spec import DataConfig, Plan, RunConfig, plan_run
from farloop.config.sources import (
    ConfigError,
    Given,
    dump_toml,
    load_tables,
    nearest,
    parse_host_port,
    parse_tcp,
    read_environment,
    read_file,
    read_flags,
)
from farloop.coordinator.daemon import CoordinatorConfig
from farloop.coordinator.observe.straggler_detector import ADAPTS
from farloop.monitoring.tcp_connection import congestion_refused
from farloop.node.data import CorpusError
from farloop.node.machine_info import parse_nics
from farloop.node.model import PRESETS
from farloop.node.pipeline.events import LayoutError
from farloop.node.pipeline.layout import read_layout
from farloop.node.pipeline.trainer import NORMALISE, PipelineConfig
from farloop.node.trainer import NodeConfig
from farloop.quant.errors import BadParameter
from farloop.quant.registry import CODECS, codec_named
from farloop.wire.keys import check_name

# --- Which keys the sections of a settings file have: taken from the dataclasses that own them, docstrings included.


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


# --- RUN.toml and NODE.toml with the environment and flags on top, as the dataclasses that the daemons take.
#
# Here ends the doubt: what leaves this room has the right types, names that exist, and keys where others can listen.
# What the mathematics of a run demands is asked by `planned`, for it takes the model and the data to know.


CHOICES: Mapping[tuple[str, str], Iterable[str]] = {
    ("run", "method"): METHODS,
    ("run", "model"): PRESETS,
    ("run", "schedule"): SHAPES,
    ("run", "decay"): ("sqrt", "linear"),
    ("run", "h_rule"): RULES,
    ("run", "inner_optimizer"): INNER_OPTIMIZERS,
    ("run", "screen"): SCREENS,
    ("run", "merge"): ROBUST_RULES,
    ("pipeline", "normalise"): NORMALISE,
    ("coordinator", "adapt"): ADAPTS,
}

LEAST = {
    ("run", "seed"): 0,
    ("run", "nodes"): 1,
    ("run", "steps"): 1,
    ("run", "h"): 1,
    ("run", "evaluation_sequences"): 1,
    ("data", "max_bytes"): 1,
    ("node", "nproc"): 1,
    ("node", "threads"): 0,
    ("node", "tau"): 0,
    ("coordinator", "probe_bytes"): 0,
    ("pipeline", "microbatches"): 1,
    ("pipeline", "credit"): 1,
    ("pipeline", "memory"): 1,
}

_MOST = 2**63 - 1
"""What the wire and torch can carry."""

_TERM_KEYS = {
    "min_nodes": "nodes",
    "lr.peak": "lr",
    "lr.minimum": "min_lr",
    "lr.shape": "schedule",
    "lr.constant": "constant_lr",
    **{f"lr.{key}": key for key in ("warmup_steps", "drops", "drop_factor", "decay_share", "cooldown_steps")},
    **{f"lr.{key}": key for key in ("anneal_at", "rewarms")},
}
"""What the terms of a run call otherwise than the file does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One resolved value."""

    key: Key
    value: Any
    given: Given | None
    """None where it is the default."""

    @property
    def origin(self) -> str:
        """Who gave it."""
        return self.given.origin if self.given else "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every key of a file's sections, resolved."""

    path: Path
    by_name: Mapping[tuple[str, str], Setting]

    def section(self, name: str) -> dict[str, Any]:
        """The values of one section."""
        return {key: setting.value for (section, key), setting in self.by_name.items() if section == name}

    def error(self, section: str, key: str, what: str) -> ConfigError:
        """About a key, wherever it was given."""
        given = self.by_name[section, key].given
        return given.error(what) if given else ConfigError(f"{self.path}: [{section}] {key}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """What a coordinator needs."""

    settings: Settings
    run: RunConfig
    data: DataConfig
    coordinator: CoordinatorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFile:
    """What a node needs."""

    settings: Settings
    node: NodeConfig
    data: DataConfig
    pipeline: PipelineConfig


def load(path: Path, *, flags: Iterable[str], environ: Mapping[str, str]) -> RunFile | NodeFile:
    """Whichever of the two a file is: a NODE.toml has a section [node]. Raises ConfigError."""
    if "node" in load_tables(path)[1]:
        return load_node(path, flags=flags, environ=environ)
    return load_run(path, flags=flags, environ=environ)


def load_run(path: Path, *, flags: Iterable[str], environ: Mapping[str, str]) -> RunFile:
    """A RUN.toml with the environment and `section.key=value` flags on top. Raises ConfigError."""
    settings = _resolve(path, RUN_SCHEMA, flags, environ)
    coordinator = settings.section("coordinator")
    _check_address(settings, "coordinator", "bind", listens=True)
    _check_http(settings, "coordinator")
    _check_keys(settings, "coordinator", address="bind", partner="allow", whose="the folder of the nodes' .pub files")
    coordinator.pop("insecure")
    _check_congestion(settings, "coordinator")
    if (share := coordinator["floor_share"]) is not None and not 0.0 <= share <= 1.0:
        raise settings.error("coordinator", "floor_share", f"{share:g} is no share; 0 to 1 is wanted, as 0.5")
    if not 0.0 <= (price := coordinator["egress_price_per_gb"]) < math.inf:
        raise settings.error("coordinator", "egress_price_per_gb", f"{price:g} is no price; 0 or more is wanted")
    if not 0.0 <= (share := coordinator["probe_share"]) < math.inf:
        raise settings.error("coordinator", "probe_share", f"{share:g} is no share; 0 or more is wanted, as 0.01")
    return RunFile(
        settings=settings,
        run=RunConfig(**settings.section("run")),
        data=DataConfig(**settings.section("data")),
        coordinator=CoordinatorConfig(**coordinator),
    )


def load_node(path: Path, *, flags: Iterable[str], environ: Mapping[str, str]) -> NodeFile:
    """A NODE.toml with the environment and `section.key=value` flags on top. Raises ConfigError."""
    settings = _resolve(path, NODE_SCHEMA, flags, environ)
    node = settings.section("node")
    _check_node(settings, node)
    _check_address(settings, "node", "coordinator", listens=False)
    _check_http(settings, "node")
    _check_keys(settings, "node", address="coordinator", partner="server_key", whose="the coordinator's .pub file")
    node.pop("insecure")
    _check_congestion(settings, "node")
    data = DataConfig(**settings.section("data"))
    config = NodeConfig(**node, data=data.path, data_bytes=data.max_bytes, data_phases=data.phases or ())
    return NodeFile(settings=settings, node=config, data=data, pipeline=pipeline_of(settings))


def pipeline_of(settings: Settings) -> PipelineConfig:
    """The section [pipeline] of a NODE.toml. Raises ConfigError."""
    values, node = settings.section("pipeline"), settings.section("node")
    if values["layout"] is None:
        return PipelineConfig(**values)
    if node["nproc"] != 1:
        raise settings.error("node", "nproc", "a stage of a pipeline is one process; name each of them in the layout")
    if values["codec"]:
        _check_codec(settings, "codec", section="pipeline")
    for key in ("patience_s", "late_s", "liveness_s"):
        if not 0.0 < values[key] < math.inf:
            raise settings.error("pipeline", key, f"{values[key]:g} is no time; seconds above 0 are wanted")
    if values["peers"] is not None and node["key"] is None:
        raise settings.error("pipeline", "peers", "goes with [node] key (this side's secret key), which is missing")
    if values["bind"]:
        _check_address(settings, "pipeline", "bind", listens=True)
    try:
        layout, addresses = read_layout(values["layout"])
    except LayoutError as error:
        raise settings.error("pipeline", "layout", str(error)) from error
    if layout.stage_of(node["name"]) is None:
        raise settings.error("pipeline", "layout", f"no stage of it has a node {node['name']}")
    listens = values["bind"] or addresses[node["name"]]
    if values["peers"] is None and not node["insecure"] and not parse_tcp(listens, listens=True).is_loopback:
        what = f"{listens} goes beyond this machine, so peers and [node] key are required, or insecure = true"
        raise settings.error("pipeline", "peers", what)
    return PipelineConfig(**values)


def planned(file: RunFile) -> Plan:
    """The run that the file describes. Takes seconds: it reads the data and builds the model.

    Raises:
        ConfigError: such a run cannot be; the line names the key where it can.
    """
    settings, run = file.settings, file.run
    if run.init is None and run.sequence_tokens > (context := PRESETS[run.model].context):
        raise settings.error(
            "run", "sequence_tokens", f"{run.model} reads at most {context}, not {run.sequence_tokens}"
        )
    try:
        return plan_run(run, file.data)
    except CorpusError as error:
        key = "phases" if (sentence := str(error)).startswith("phases: ") else "path"
        raise settings.error("data", key, sentence.removeprefix("phases: ")) from error
    except SafetensorError as error:
        raise settings.error("run", "init", f"{run.init} is not a safetensors file: {error}") from error
    except ValueError as error:
        raise _about_run(settings, str(error)) from error


def _about_run(settings: Settings, sentence: str) -> ConfigError:
    """The mathematics' own sentence, with the key it begins with."""
    sentence = sentence.removeprefix("[run] ")
    for term, key in _TERM_KEYS.items():
        sentence = sentence.replace(term, key)
    key = re.split(r"[^\w]", sentence, maxsplit=1)[0]
    if ("run", key) not in settings.by_name:
        return ConfigError(f"{settings.path}: [run]: {sentence}")
    return settings.error("run", key, re.sub(rf"^{key}(: | is )", "", sentence))


# --- resolving


def _resolve(path: Path, schema: Schema, flags: Iterable[str], environ: Mapping[str, str]) -> Settings:
    everything = {**RUN_SCHEMA, **NODE_SCHEMA}
    sources = [*read_file(path, schema), *read_environment(environ, everything), *read_flags(flags, schema)]
    given: dict[tuple[str, str], Given] = {}
    for one in sources:  # the later wins
        keys = everything[one.section]
        if one.key not in keys:
            raise one.error(f"there is no such key; {nearest(one.key, keys)}")
        given[one.section, one.key] = one
    by_name = {
        (section, name): _setting(path, key, given.get((section, name)))
        for section, keys in schema.items()
        for name, key in keys.items()
    }
    settings = Settings(path=path, by_name=by_name)
    for (section, name), choices in CHOICES.items():
        if (
            (setting := by_name.get((section, name)))
            and setting.value is not None
            and setting.value not in list(choices)
        ):
            raise settings.error(section, name, f"there is no {setting.value!r}; {nearest(setting.value, choices)}")
    for name in ("codec_up", "codec_down"):
        _check_codec(settings, name)
    for (section, name), setting in by_name.items():
        least = LEAST.get((section, name), -_MOST)
        if type(setting.value) is int and not least <= setting.value <= _MOST:
            bound = f"the least is {least}" if setting.value < least else f"the most is {_MOST}"
            raise settings.error(section, name, f"{bound}, not {setting.value}")
    return settings


def _setting(path: Path, key: Key, given: Given | None) -> Setting:
    if given is not None:
        return Setting(key=key, value=key.parse(given), given=given)
    if key.default is dataclasses.MISSING:
        raise ConfigError(f"{path}: [{key.section}] {key.name}: is missing; its meaning: {key.meaning}")
    return Setting(key=key, value=key.default, given=None)


# --- rules


def _check_codec(settings: Settings, key: str, section: str = "run") -> None:
    setting = settings.by_name.get((section, key))
    if setting is None or setting.value is None:
        return
    name = setting.value.partition(":")[0]
    if name not in CODECS:
        raise settings.error(section, key, f"there is no {name!r}; {nearest(name, CODECS)}")
    try:
        codec_named(setting.value)
    except BadParameter as error:
        raise settings.error(section, key, str(error)) from error


def _check_node(settings: Settings, node: Mapping[str, Any]) -> None:
    try:
        check_name(node["name"])
    except ValueError as error:
        raise settings.error("node", "name", str(error)) from error
    if node["fingerprint"] is not None and not re.fullmatch("[0-9a-f]{16}", node["fingerprint"]):
        raise settings.error(
            "node", "fingerprint", "16 hex digits are wanted, as the coordinator says them at its start"
        )
    if node["address"]:
        _check_address(settings, "node", "address", listens=False)
    try:
        parse_nics(node["nics"])
    except ValueError as error:
        raise settings.error("node", "nics", str(error)) from error


def _check_congestion(settings: Settings, section: str) -> None:
    """Asked of this machine's kernel, so that nobody finds out at a slow link."""
    name = settings.section(section)["congestion"]
    if name and (refused := congestion_refused(name)):
        raise settings.error(section, "congestion", refused.partition(": ")[2])


def _check_address(settings: Settings, section: str, key: str, *, listens: bool) -> None:
    try:
        parse_tcp(settings.section(section)[key], listens=listens)
    except ValueError as error:
        raise settings.error(section, key, str(error)) from error


def _check_http(settings: Settings, section: str) -> None:
    if http := settings.section(section)["http"]:
        try:
            parse_host_port(http, listens=True)
        except ValueError as error:
            raise settings.error(section, "http", str(error)) from error


def _check_keys(settings: Settings, section: str, *, address: str, partner: str, whose: str) -> None:
    """Both halves of encryption or none, and none only on this machine or when told so."""
    values = settings.section(section)
    for key, other in (("key", partner), (partner, "key")):
        if values[key] is not None and values[other] is None:
            what = whose if other == partner else "this side's secret key, made by: farloop keys new DIR"
            raise settings.error(section, key, f"goes with {other} ({what}), which is missing")
    if parse_tcp(values[address], listens=True).is_loopback or values["key"] is not None or values["insecure"]:
        return
    raise settings.error(
        section,
        address,
        f"{values[address]} goes beyond this machine, so key and {partner} are required (make keys with: farloop keys "
        "new DIR), or insecure = true to let anybody listen and take part",
    )


# --- Resolved settings as text: a TOML file that says of every key what it means and who gave it, or the same as JSON.


def toml_text(settings: Settings) -> str:
    """A TOML file with every key: what a person may copy, keep and edit."""
    sections: dict[str, list[Setting]] = {}
    for (section, _), setting in settings.by_name.items():
        sections.setdefault(section, []).append(setting)
    lines = [f"# {settings.path} as farloop reads it; a key without a value is left open"]
    for section, entries in sections.items():
        width = max(len(_assignment(entry)) for entry in entries if len(_assignment(entry)) <= 40)
        lines += ["", f"[{section}]"]
        lines += [f"{_assignment(entry):<{width}}  # ({entry.origin}) {entry.key.meaning}" for entry in entries]
    return "\n".join(lines)


def json_text(settings: Settings) -> str:
    """`{"run": {"steps": {"value": 600, "from": "default"}, …}, …}`"""
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for (section, key), setting in settings.by_name.items():
        tables.setdefault(section, {})[key] = {"value": _plain(setting.value), "from": setting.origin}
    return json.dumps(tables, indent=2, ensure_ascii=False)


def _assignment(setting: Setting) -> str:
    if setting.value is None:
        return f"# {setting.key.name} ="
    (line,) = dump_toml({"-": {setting.key.name: _plain(setting.value)}}).splitlines()[1:]
    return line


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
