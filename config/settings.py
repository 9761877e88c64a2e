"""Settings: RUN.toml and NODE.toml, the environment and flags, validated into the dataclasses of the daemons.

The keys are the fields of those dataclasses, and their meanings the docstrings below the fields. `load` checks types,
names, bounds and addresses, `check_at_once` key files and terms; `run_spec.planned` builds the model and reads data.
Loads no torch.
"""

import ast
import dataclasses
import inspect
import json
import math
import os
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import FiniteFloat, TypeAdapter

from farloop.algo.methods import method_named
from farloop.algo.spec import Fragment, Layout
from farloop.algo.validation import MOST_WHOLE, check
from farloop.config.exit_codes import ExitCode
from farloop.config.run_config import RunConfig, terms_of
from farloop.config.sources import ConfigError, Given, dump_toml, load_tables, read_environment, read_file, read_flags
from farloop.coordinator.settings import CoordinatorConfig
from farloop.monitoring.addresses import check_source, parse_each_tcp, parse_host_port, parse_tcp
from farloop.monitoring.status import dumps
from farloop.monitoring.units import ascii_number, is_digits, nearest
from farloop.node.errors import LayoutError
from farloop.node.settings import PRESETS, DataConfig, NodeConfig, PipelineConfig, Share, located
from farloop.wire.keys import AllowList, load_publics, load_secret
from farloop.wire.uplink import UplinkLimit, nearest_rate

_PATHS = tuple[Path, ...]
_SHARES_OF_DATA = tuple[Share, ...]

_WANTED: Mapping[object, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text in quotes",
    Path: "a path in quotes",
    _PATHS: "a list of paths in quotes",
    _SHARES_OF_DATA: 'a list as [{path = "wiki.bin", weight = 3}, {path = "code.bin", weight = 1}]',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Keys of both daemons that only the command line uses."""

    insecure: bool = False
    """Allow connections beyond this machine without keys: unencrypted, and open to anybody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    section: str
    name: str
    kind: type
    optional: bool  # whether None is allowed
    default: object  # `dataclasses.MISSING` for a required key
    owner: type  # the dataclass whose field it is
    rules: tuple[Callable[[Any], object], ...]  # beside its type; each raises ValueError

    @property
    def meaning(self) -> str:
        """The docstring of its field, as one line."""
        return _meanings(self.owner).get(self.name, "")

    def parse(self, given: Given) -> object:
        """The given value in its type. Raises ConfigError."""
        if self.optional and given.value == "":
            return None
        if (self.kind is Path and given.value == "") or (isinstance(given.value, list) and "" in given.value):
            raise given.error("expected a path; for this folder itself write .")
        try:
            value = self._validated(given.value, is_text=given.is_text)
        except (ValueError, TypeError):
            raise given.error(f"expected {_WANTED[self.kind]}, got {_shown(given.value)}{self._hint(given)}") from None
        if isinstance(value, tuple):
            if self.kind == _SHARES_OF_DATA:
                return tuple(dataclasses.replace(one, path=_resolved(one.path, given.folder)) for one in value)
            return tuple(_resolved(path, given.folder) for path in value)
        if isinstance(value, float):
            return value + 0.0  # -0 is 0
        return _resolved(value, given.folder) if isinstance(value, Path) else value

    def _validated(self, value: object, *, is_text: bool) -> Any:
        adapter: TypeAdapter[Any] = TypeAdapter(FiniteFloat if self.kind is float else self.kind)
        if is_text and self.kind == _PATHS:  # a file has a list
            return tuple(Path(part.strip()) for part in str(value).split(","))
        if is_text and self.kind == _SHARES_OF_DATA:
            pairs = [part.strip().rpartition("=") for part in str(value).split(",")]
            shares = [{"path": path, "weight": ascii_number(weight)} for path, _, weight in pairs]
            return adapter.validate_python(shares)
        if is_text:
            return adapter.validate_strings(ascii_number(str(value)) if self.kind in (int, float) else value)
        # Strict validation accepts text for a path only as JSON.
        return adapter.validate_json(dumps(value), strict=True)

    def _hint(self, given: Given) -> str:
        """The value in the right type, as 600 for `"600"`."""
        if given.is_text or self.kind is Path or isinstance(given.value, dict | list):
            return ""
        if self.name in ("max_uplink", "quiet_uplink"):
            return f"; did you mean {_shown(nearest_rate(str(given.value)))}?"
        try:
            meant = self._validated(str(given.value), is_text=True)
        except ValueError:
            return ""
        return f"; did you mean {_shown([str(path) for path in meant] if self.kind == _PATHS else meant)}?"


def _resolved(path: Path, folder: Path) -> Path:
    return Path(os.path.normpath(folder / path.expanduser()))


Schema = Mapping[str, Mapping[str, Key]]  # section → key → what it is


def _section(name: str, *owners: type, without: frozenset[str] = frozenset()) -> dict[str, Key]:
    keys = {}
    for owner in owners:
        hints = get_type_hints(owner, include_extras=True)
        for field in dataclasses.fields(owner):
            if field.name not in without:
                hint = hints[field.name]
                hint, *rules = get_args(hint) if get_origin(hint) is Annotated else (hint,)
                kind, optional = _kind(hint)
                keys[field.name] = Key(
                    section=name,
                    name=field.name,
                    kind=kind,
                    optional=optional,
                    default=field.default,
                    owner=owner,
                    rules=tuple(rules),
                )
    return keys


def _kind(hint: Any) -> tuple[type, bool]:
    """`X | None` → X, True."""
    if get_origin(hint) in (Union, types.UnionType):
        (kind,) = (inner for inner in get_args(hint) if inner is not type(None))
        return kind, True
    assert hint in _WANTED, hint
    return hint, False


@cache
def _meanings(owner: type) -> dict[str, str]:
    """The docstrings below the fields of a dataclass, which Python does not keep."""
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
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)


RUN_SCHEMA: Schema = {
    "run": _section("run", RunConfig),
    "data": _section("data", DataConfig),
    "coordinator": _section("coordinator", CoordinatorConfig, Exposure, without=frozenset({"limits", "timing"})),
}

NODE_SCHEMA: Schema = {
    # Data have a section of their own, the same in both files.
    "node": _section("node", NodeConfig, Exposure, without=frozenset({"data"})),
    "data": _section("data", DataConfig),
    "pipeline": _section("pipeline", PipelineConfig),
}


_MOST = 2**63 - 1  # largest integer of the wire and of torch
_NO_OPTIONS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    key: Key
    value: Any
    given: Given | None  # None for the default

    @property
    def origin(self) -> str:
        return self.given.origin if self.given else "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every key of a file's sections, resolved."""

    path: Path
    by_name: Mapping[tuple[str, str], Setting]

    def section(self, name: str) -> dict[str, Any]:
        return {key: setting.value for (section, key), setting in self.by_name.items() if section == name}

    def check(self, section: str, key: str, rule: Callable[[Any], object]) -> None:
        """Apply a rule that raises ValueError, unless the key is open, or empty as by default. Raises ConfigError."""
        setting = self.by_name[section, key]
        try:
            if setting.value is not None and (setting.value, setting.key.default) != ("", ""):
                rule(setting.value)
        except ValueError as error:
            raise self.error(section, key, str(error)) from error

    def error(self, section: str, key: str, what: str) -> ConfigError:
        given = self.by_name[section, key].given
        return given.error(what) if given else ConfigError(f"{self.path}: [{section}] {key}: {what}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    settings: Settings
    run: RunConfig
    data: DataConfig
    coordinator: CoordinatorConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFile:
    settings: Settings
    node: NodeConfig
    pipeline: PipelineConfig


def load(path: Path, *, flags: Iterable[str], environ: Mapping[str, str]) -> RunFile | NodeFile:
    """A RUN.toml or NODE.toml; the latter has a section [node]. Raises ConfigError."""
    if "node" in load_tables(path)[1]:
        return load_node(path, flags=flags, environ=environ)
    return load_run(path, flags=flags, environ=environ)


def load_run(
    path: Path, *, flags: Iterable[str], environ: Mapping[str, str], options: Mapping[str, str] = _NO_OPTIONS
) -> RunFile:
    """A RUN.toml with the environment and `section.key=value` flags on top; such flags by the `options` that stand for
    them. Raises ConfigError."""
    settings = _resolve(path, RUN_SCHEMA, flags, environ, options)
    _check_daemon(settings, "coordinator", address="bind", partner="allow", whose="the folder of the nodes' .pub files")
    coordinator = settings.section("coordinator")
    _check_http_port(settings, "coordinator", coordinator["bind"])
    _check_leadership(settings)
    coordinator.pop("insecure")
    _check_data(settings)
    return RunFile(
        settings=settings,
        run=RunConfig(**settings.section("run")),
        data=DataConfig(**settings.section("data")),
        coordinator=CoordinatorConfig(**coordinator),
    )


def load_node(
    path: Path, *, flags: Iterable[str], environ: Mapping[str, str], options: Mapping[str, str] = _NO_OPTIONS
) -> NodeFile:
    """A NODE.toml with the environment, flags and options on top, as `load_run`. Raises ConfigError."""
    settings = _resolve(path, NODE_SCHEMA, flags, environ, options)
    _check_daemon(settings, "node", address="coordinator", partner="server_key", whose="the coordinator's .pub file")
    leave_code = settings.section("node")["leave_code"]
    if leave_code not in (ExitCode.DONE, ExitCode.INTERRUPTED):
        what = f"expected 0 or {ExitCode.INTERRUPTED.value}, got {leave_code}"
        raise settings.error("node", "leave_code", what)
    for address in parse_each_tcp(settings.section("node")["coordinator"]):
        settings.check("node", "bulk_source", partial(check_source, host=address.host))
    if settings.section("node")["bulk_source"] and settings.section("node")["key"] is None:
        what = "needs key and server_key: without keys the lanes of a session come from one address"
        raise settings.error("node", "bulk_source", what)
    settings.check("node", "hosts", check_hosts)
    node = settings.section("node")
    node.pop("insecure")
    if node["hosts"] != "1" and not node["rendezvous"]:
        raise settings.error("node", "hosts", "needs [node] rendezvous, where the hosts meet, which is missing")
    data = DataConfig(**settings.section("data"))
    if data.digest is not None or data.samples is not None:
        key = "samples" if data.digest is None else "digest"
        raise settings.error("data", key, "goes into the RUN.toml: a node with a loop of its own has no NODE.toml")
    _check_data(settings)
    return NodeFile(settings=settings, node=NodeConfig(**node, data=data), pipeline=pipeline_of(settings))


def _check_data(settings: Settings) -> None:
    """What names the data, and what goes with it. Raises ConfigError."""
    data = settings.section("data")
    if data["mixture"] == ():
        raise settings.error("data", "mixture", 'expected at least one part, as [{ path = "a.bin", weight = 1 }]')
    if data["path"] is not None and data["mixture"] is not None:
        raise settings.error("data", "mixture", "stands in place of path: give one of them")
    if (data["digest"] is None) != (data["samples"] is None):
        key, other = ("digest", "samples") if data["samples"] is None else ("samples", "digest")
        raise settings.error("data", key, f"goes with {other}, which is missing")
    if data["digest"] is not None:
        run = settings.section("run")
        own = run["init"] is not None and run["model"] in PRESETS
        if not own or data["path"] is not None or data["mixture"] is not None:
            what = "is for a dataset of your own loops, so it goes with [run] init and without path and mixture"
            raise settings.error("data", "digest", what)
        if not re.fullmatch(r"[\w.-]{4,64}", data["digest"]) or data["digest"] == "none":
            raise settings.error("data", "digest", "expected 4 to 64 letters, digits, - and ., as the start of a hash")


def pipeline_of(settings: Settings) -> PipelineConfig:
    """The section [pipeline] of a NODE.toml. Raises ConfigError."""
    values, node = settings.section("pipeline"), settings.section("node")
    if values["layout"] is None:
        return PipelineConfig(**values)
    if node["nproc"] != 1:
        raise settings.error("node", "nproc", "a stage of a pipeline is one process; name each of them in the layout")
    for key in ("model", "microbatch", "checkpoint", "compile", "shard", "rendezvous"):
        if node[key]:
            raise settings.error("node", key, "a stage of a pipeline trains its part of a built-in model; leave it out")
    if values["peers"] is not None and node["key"] is None:
        raise settings.error("pipeline", "peers", "needs [node] key (this side's secret key), which is missing")
    from farloop.pipeline.layout import read_layout  # with the messages between stages, for pipelines alone

    try:
        layout, addresses = read_layout(values["layout"])
    except LayoutError as error:
        raise settings.error("pipeline", "layout", str(error)) from error
    if layout.stage_of(node["name"]) is None:
        raise settings.error("pipeline", "layout", f"no stage of it has a node {node['name']}")
    listens = values["bind"] or addresses[node["name"]]
    _check_http_port(settings, "node", listens)
    if values["peers"] is None and not node["insecure"] and not parse_tcp(listens, listens=True).is_loopback:
        what = f"{listens} goes beyond this machine, so peers and [node] key are required, or insecure = true"
        raise settings.error("pipeline", "peers", what)
    return PipelineConfig(**values)


def check_hosts(text: str) -> None:
    """Raises ValueError unless it is a number of hosts, or the least and the most."""
    least, colon, most = text.partition(":")
    numbers = [least, most] if colon else [least]
    if not all(map(is_digits, numbers)) or not 1 <= int(least) <= int(numbers[-1]):
        raise ValueError(f"expected a number of hosts, as 4 or 3:4, got {text!r}")


_TERM_KEYS = {
    "min_nodes": "nodes",
    "lr.peak": "lr",
    "lr.minimum": "min_lr",
    "lr.shape": "schedule",
    "lr.constant": "constant_lr",
    **{f"lr.{key}": key for key in ("warmup_steps", "drops", "drop_factor", "decay_share", "cooldown_steps")},
    **{f"lr.{key}": key for key in ("anneal_at", "rewarms")},
}
"""Names of terms that differ from the keys of the file."""


def check_at_once(file: RunFile | NodeFile) -> None:
    """Refuse what shows before a model or data are read: keys, texts that are missing, terms that no run can have.
    Raises ConfigError, KeyFileError: one line."""
    section = "node" if isinstance(file, NodeFile) else "coordinator"
    file.settings.check(section, "state_dir", _not_a_file)
    if isinstance(file, NodeFile):
        if file.node.key is not None and file.node.server_key is not None:
            load_secret(file.node.key)
            load_publics(file.node.server_key)
        return
    if file.coordinator.key is not None and file.coordinator.allow is not None:
        load_secret(file.coordinator.key)
        AllowList(file.coordinator.allow).refresh()
    settings, data = file.settings, file.data
    for key, paths in (("path", [data.path]), ("phases", data.phases or ())):
        if missing := [path for path in paths if path is not None and not path.exists()]:
            raise settings.error("data", key, f"no file or folder {missing[0]}")
    run = file.run
    try:
        method = method_named(run.method)
        if run.bytes_goal is not None:  # h follows from the model
            return
        slots = 1 if method.pattern == "whole" else None
        if slots is None and run.model in PRESETS and run.init is None and not run.stages and run.blocks_per_fragment:
            slots = math.ceil(PRESETS[run.model].layers / run.blocks_per_fragment) + 1  # as `partition` says
        terms, _ = terms_of(run, method, slots=slots or 1)
        if slots is not None:
            parts = (Fragment(index=part, slot=part, numel=1, tensors=()) for part in range(slots))
            check(terms, Layout(slots=slots, fragments=tuple(parts)))
    except ValueError as error:
        raise about_run(settings, str(error)) from error


def _not_a_file(folder: Path) -> None:
    for there in (folder, *folder.parents):
        if os.path.exists(there) and not os.path.isdir(there):
            raise ValueError(f"{there} is a file; give a folder")


def in_keys(sentence: str) -> str:
    """A sentence of `algo.validation` with the keys of the file in place of the names of terms."""
    sentence = sentence.removeprefix("[run] ")
    for term, key in _TERM_KEYS.items():
        sentence = sentence.replace(term, key)
    return sentence


def about_run(settings: Settings, sentence: str) -> ConfigError:
    """An error of `algo.validation`, with the key that it begins with."""
    sentence = in_keys(sentence)
    key = re.split(r"[^\w]", sentence, maxsplit=1)[0]
    if ("run", key) not in settings.by_name:
        return ConfigError(f"{settings.path}: [run]: {sentence}")
    return settings.error("run", key, re.sub(rf"^{key}(: | is )", "", sentence))


def _resolve(
    path: Path, schema: Schema, flags: Iterable[str], environ: Mapping[str, str], options: Mapping[str, str]
) -> Settings:
    """Every key with its value: typed, a known choice, and within its bounds. Raises ConfigError."""
    everything = {**RUN_SCHEMA, **NODE_SCHEMA}
    sources = [*read_file(path, schema), *read_environment(environ, everything), *read_flags(flags, schema)]
    sources += [one for option, flag in options.items() for one in read_flags([flag], schema, origin=option)]
    given: dict[tuple[str, str], Given] = {}
    for one in sources:  # the later wins
        keys = everything[one.section]
        if one.key not in keys:
            raise one.error(f"there is no such key; {nearest(one.key, keys)}")
        given[one.section, one.key] = one
    by_name = {
        (section, name): _setting(path, key, given.get((section, name)))
        for section, table in schema.items()
        for name, key in table.items()
    }
    settings = Settings(path=path, by_name=by_name)
    for (section, name), setting in by_name.items():
        for rule in setting.key.rules:
            settings.check(section, name, rule)
        largest, value = MOST_WHOLE if section == "run" and name != "seed" else _MOST, setting.value
        if type(value) is int and abs(value) > largest:
            wanted = f"{-largest} or more" if value < 0 else f"at most {largest}"
            raise settings.error(section, name, f"expected {wanted}, got {value}")
    return settings


def _setting(path: Path, key: Key, given: Given | None) -> Setting:
    if given is not None:
        value = key.parse(given)
        if key.name == "model" and isinstance(value, str):
            value = located(value, given.folder)
        return Setting(key=key, value=value, given=given)
    if key.default is dataclasses.MISSING:
        raise ConfigError(f"{path}: [{key.section}] {key.name}: is missing; its meaning: {key.meaning}")
    return Setting(key=key, value=key.default, given=None)


def _check_http_port(settings: Settings, section: str, bind: str) -> None:
    """The pages have a port of their own. Raises ConfigError."""
    if not (http := settings.section(section)["http"]):
        return
    address = parse_host_port(http, listens=True)
    if address.overlaps(parse_tcp(bind, listens=True)):
        other = address.port + 1 if address.port < 65535 else address.port - 1
        raise settings.error(section, "http", f"{http} is on the port of {bind}; give it another one, as {other}")


def _check_leadership(settings: Settings) -> None:
    """Settings of several coordinators go together. Raises ConfigError."""
    values = settings.section("coordinator")
    needs = {"mirror": ("peers", "leads_by"), "peers": ("mirror", "leads_by"), "name": ("leads_by",)}
    if values["recover"] == "auto":
        needs["recover"] = ("copy_to", "leads_by")
    if settings.section("run")["bulk"] == "store" and not values["bulk_url"]:
        raise settings.error("run", "bulk", "store needs [coordinator] bulk_url, which is missing")
    for key, others in needs.items():
        for other in others:
            if values[key] and not values[other]:
                raise settings.error("coordinator", key, f"needs [coordinator] {other}, which is missing")
    listens = parse_tcp(values["mirror"], listens=True) if values["mirror"] else None
    if listens is None:
        return
    if listens.overlaps(parse_tcp(values["bind"], listens=True)):
        raise settings.error(
            "coordinator", "mirror", f"{values['mirror']} is the address of bind; expected another port"
        )
    if values["key"] is None and not values["insecure"] and not listens.is_loopback:
        what = f"{values['mirror']} goes beyond this machine, so key is required"
        raise settings.error("coordinator", "mirror", f"{what}, or insecure = true, which lets anyone copy the state")


def _check_daemon(settings: Settings, section: str, *, address: str, partner: str, whose: str) -> None:
    """Quiet hours and keys. Encryption has both of its keys, and is required beyond loopback."""
    values = settings.section(section)
    for key, other in (("quiet_hours", "quiet_uplink"), ("quiet_uplink", "quiet_hours")):
        if values[key] and not values[other]:
            example = "2mbit" if other == "quiet_uplink" else "08:00-18:00"
            raise settings.error(section, key, f"needs {other}, as {example}, which is missing")
    try:
        UplinkLimit.parse(values["max_uplink"], values["quiet_hours"], values["quiet_uplink"])
    except ValueError as error:
        raise settings.error(section, "quiet_uplink", str(error).removeprefix("quiet_uplink ")) from error
    for key, other in (("key", partner), (partner, "key")):
        if values[key] is not None and values[other] is None:
            what = whose if other == partner else "this side's secret key, made by: farloop keys new DIR"
            raise settings.error(section, key, f"needs {other} ({what}), which is missing")
    open_to_all = values["key"] is None and not values["insecure"]
    if open_to_all and not all(one.is_loopback for one in parse_each_tcp(values[address], listens=True)):
        raise settings.error(
            section,
            address,
            f"{values[address]} goes beyond this machine, so key and {partner} are required (make keys with: farloop "
            "keys new DIR), or insecure = true, which lets anyone read the traffic and join",
        )


def toml_text(settings: Settings) -> str:
    """A TOML file with every key, its source and its meaning."""
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
    return dumps(tables, indent=2, ensure_ascii=False)


def _assignment(setting: Setting) -> str:
    if setting.value is None:
        return f"# {setting.key.name} ="
    (line,) = dump_toml({"-": {setting.key.name: _plain(setting.value)}}).splitlines()[1:]
    return line


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Share):
        return {"path": str(value.path), "weight": value.weight}
    return str(value) if isinstance(value, Path) else value


OTHER_NAMES = {"peak_lr": ("lr",), "codec": ("codec_up", "codec_down")}


def run_settings(words: Iterable[str], *, origin: str) -> dict[str, Any]:
    """`h=15` and the like as typed fields of `RunConfig`. Raises ConfigError."""
    keys, fields = RUN_SCHEMA["run"], dict[str, Any]()
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name:
            raise ConfigError(f"{origin}: {word!r} is not KEY=VALUE, as h=15")
        for key in OTHER_NAMES.get(name, (name,)):
            if key not in keys:
                raise ConfigError(f"{origin}: a run has no setting {name!r}; {nearest(name, [*keys, *OTHER_NAMES])}")
            given = Given(section="run", key=key, value=value, origin=origin, is_text=True, folder=Path.cwd())
            fields[key] = keys[key].parse(given)
    return fields
