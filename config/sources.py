"""TOML text and errors of the configuration. Loads no torch."""

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from farloop.config.exit_codes import CommandError
from farloop.monitoring.status import dumps
from farloop.monitoring.units import Checked, nearest


def dump_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """One `[table]` each, with one `key = value` a line.
    Raises TypeError: a value is neither text, number, truth value nor a list or table of these."""
    sections = []
    for table, values in tables.items():
        lines = [f"{key} = {_value(value)}" for key, value in values.items()]
        sections.append("\n".join([f"[{table}]", *lines]))
    return "\n\n".join(sections) + "\n"


def _value(value: object) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return dumps(value)  # a TOML basic string escapes as JSON does
        case list():
            return f"[{', '.join(_value(item) for item in value)}]"
        case dict():
            return f"{{{', '.join(f'{key} = {_value(item)}' for key, item in value.items())}}}"
        case _:
            raise TypeError(f"{value!r} has no place in a settings file")


PREFIX = "FARLOOP_"
"""Environment variables are `FARLOOP_<SECTION>__<KEY>`: two underscores, because Kubernetes makes names with one."""

_HEADER = re.compile(r"\s*\[\[?\s*([\w-]+)\s*\]")
_KEY = re.compile(r"\s*([\w-]+)\s*=")
_TABLE = re.compile(r"\s*(\[\[?[^\[\]]+\])")


WANTED = {
    "int": "a whole number",
    "float": "a number",
    "string": "text in quotes",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "model": "a table",
    "dataclass": "a table",
    "dict": "a table",
}
"""By the first word of pydantic's kind of error."""


class ConfigError(CommandError):
    """An invalid setting: its place, what is wrong, and the nearest valid value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    section: str
    key: str
    value: object
    origin: str  # `run.toml:7`, `FARLOOP_RUN__STEPS` or `--set`
    is_text: bool  # from the environment or a flag: `600` may be a number
    folder: Path  # base of relative paths: the folder of the file, else the working folder

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self.origin}: [{self.section}] {self.key}: {what}")


def read_file(path: Path, known: Iterable[str]) -> list[Given]:
    """All keys of a TOML file whose sections are `known`. Raises ConfigError."""
    text, tables = load_tables(path)
    lines, sections = line_numbers(text), list(known)
    found = []
    for section, table in tables.items():
        where = _origin(path, lines.get((section, 0, ""), lines.get(("", 0, section))))
        if not isinstance(table, dict):
            below = " or ".join(f"[{one}]" for one in sections)
            raise ConfigError(f"{where}: {section} is outside of a section; put it below {below}")
        if section not in sections:
            takes = {"run": "coordinator", "node": "node"}.get(section)
            hint = f"farloop {takes} takes such a file" if takes else nearest(section, sections)
            raise ConfigError(f"{where}: there is no section [{section}] here; {hint}")
        for key, value in table.items():
            found.append(
                Given(
                    section=section,
                    key=key,
                    value=value,
                    origin=_origin(path, lines.get((section, 0, key))),
                    is_text=False,
                    folder=path.absolute().parent,
                )
            )
    return found


def load_tables(path: Path) -> tuple[str, dict[str, Any]]:
    """A TOML file as text and as tables. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
        return text, parsed(tomllib.loads, text, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {(error.strerror or 'no such file').lower()}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not a text in UTF-8, as TOML must be") from None
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+), column \d+", str(error))
        what = re.sub(r" \(at .*\)$", "", str(error))
        what = f"is not TOML: {what[:1].lower()}{what[1:]}"
        number = int(line[1]) if line else None
        if re.search("overwrite a value|twice", what):
            number, what = _given_twice(text) or (number, what)
        raise ConfigError(f"{_origin(path, number)}: {what}") from None


_MOST_NESTED = 100  # parsers and validation refuse at some hundreds, each at another number, and some by RecursionError


def parsed(parse: Callable[[str], Any], text: str, path: Path) -> Any:
    """What a parser makes of the text of a file. Raises ConfigError: nested too deeply; and what the parser raises."""
    try:
        found = parse(text)
        level: list[Any] = [[found]]
        for _ in range(_MOST_NESTED):
            inside = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
            level = [one for one in inside if isinstance(one, dict | list)]
    except RecursionError:
        level = [[None]]
    if level:
        what = f"nested too deeply: take at most {_MOST_NESTED} lists and tables inside each other"
        raise ConfigError(f"{path}: {what}") from None
    return found


_Tables = TypeVar("_Tables", bound=BaseModel)
_TABLES = (BaseModel, Checked)


def validated(kind: type[_Tables], tables: Mapping[str, Any], where: object) -> _Tables:
    """The tables of the file `where`, checked. Raises ConfigError: the first thing that is wrong, with its place."""
    try:
        return kind.model_validate_json(as_json(tables, where))
    except ValidationError as error:
        found = first_fault(error)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).lstrip(".")
    owner, _, key = place.rpartition(".")
    about = f"{where}: {owner}: " if owner else f"{where}: "
    match found["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            raise ConfigError(f"{about}there is no key {key!r}; {nearest(key, _keys(kind, found['loc'][:-1]))}")
        case "missing":
            raise ConfigError(f"{about}{key} is missing")
        case "enum":
            words = re.findall("'([^']*)'", found["ctx"]["expected"])
            raise ConfigError(
                f"{where}: {place}: there is no {found['input']!r}; {nearest(str(found['input']), words)}"
            )
        case "value_error":
            raise ConfigError(f"{where}: {place}.{found['ctx']['error']}")
        case fault:
            wanted = WANTED.get(fault.partition("_")[0])
            what = f"expected {wanted}" if wanted else found["msg"][:1].lower() + found["msg"][1:]
            raise ConfigError(f"{where}: {place}: {what}, got {found['input']!r}")


def as_json(tables: Mapping[str, Any], where: object) -> bytes:
    """As which strict validation takes a list for a tuple and a word for a member of an enumeration.

    Raises ConfigError: text that is not Unicode.
    """
    try:
        return to_json(tables, inf_nan_mode="constants")
    except PydanticSerializationError as error:
        raise ConfigError(f"{where}: {str(error).rpartition('Error: ')[2]}") from None


def first_fault(error: ValidationError) -> Any:
    """An unknown key goes before others: misspelt, a required one is missing, too."""
    found = error.errors()
    unknown = "extra_forbidden", "unexpected_keyword_argument"
    return next((fault for fault in found if fault["type"] in unknown), found[0])


def _keys(kind: Any, place: tuple[int | str, ...]) -> list[str]:
    """Of the table at this place of a model."""
    for name in (part for part in place if isinstance(part, str)):
        hint = get_type_hints(kind)[name]
        kind = next(each for each in (hint, *get_args(hint)) if isinstance(each, type) and issubclass(each, _TABLES))
    if issubclass(kind, BaseModel):
        return [field.alias or name for name, field in kind.model_fields.items()]
    return [field.name for field in fields(kind)]


def _given_twice(text: str) -> tuple[int, str] | None:
    """The first line that gives a key or a table again, and that in words; None where they are not spelled plainly."""
    table, first = "", dict[tuple[str, str], int]()
    for line, content in enumerate(text.splitlines(), start=1):
        if header := _TABLE.match(content):
            table = header[1] if header[1][1] != "[" else f"{header[1]}] {line}"
        key = _KEY.match(content)
        if header or key:
            given = table, key[1] if key else ""
            if given in first:
                return line, f"{given[1] or table} is given twice, first in line {first[given]}; keep one of them"
            first[given] = line
    return None


def read_environment(environ: Mapping[str, str], sections: Mapping[str, Iterable[str]]) -> list[Given]:
    """Settings from `FARLOOP_<SECTION>__<KEY>`. `sections`: all of farloop, with their keys. Raises ConfigError."""
    spellings = {f"{PREFIX}{s}_{k}".upper(): f"{PREFIX}{s}__{k}".upper() for s, keys in sections.items() for k in keys}
    found = []
    for name, value in sorted(environ.items()):
        if name in spellings:
            raise ConfigError(f"{name}: is not read; did you mean {spellings[name]}, with two underscores?")
        section, separator, key = name.removeprefix(PREFIX).lower().partition("__")
        if not name.startswith(PREFIX) or not separator:
            continue
        if section not in sections:
            raise ConfigError(f"{name}: there is no section {section}; {nearest(section, sections)}")
        found.append(Given(section=section, key=key, value=value, origin=name, is_text=True, folder=Path.cwd()))
    return found


def read_flags(flags: Iterable[str], known: Iterable[str], origin: str = "--set") -> list[Given]:
    """Settings from `--set section.key=value`. `origin`: the option that gave them. Raises ConfigError."""
    found, sections = list[Given](), list(known)
    for flag in flags:
        name, separator, value = flag.partition("=")
        section, dot, key = name.strip().partition(".")
        if not separator or not dot or not key:
            raise ConfigError(f"--set {flag}: expected section.key=value, with a section of {', '.join(sections)}")
        if section not in sections:
            raise ConfigError(f"--set {flag}: there is no section {section} here; {nearest(section, sections)}")
        if any((given.section, given.key) == (section, key) for given in found):
            raise ConfigError(f"--set {flag}: {section}.{key} is set twice; keep one of them")
        found.append(
            Given(section=section, key=key, value=value.strip(), origin=origin, is_text=True, folder=Path.cwd())
        )
    return found


def _origin(path: Path, line: int | None) -> str:
    return f"{path}:{line}" if line else str(path)


def line_numbers(text: str) -> dict[tuple[str, int, str], int]:
    """(table, its number among tables of that name, key) → line, for keys that are spelled plainly.

    The header of a table has the key ''.
    """
    table, number, seen = "", 0, Counter[str]()
    lines: dict[tuple[str, int, str], int] = {}
    for line, content in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(content):
            table = header[1]
            number = seen[table]
            seen[table] += 1
            lines[table, number, ""] = line
        elif key := _KEY.match(content):
            lines.setdefault((table, number, key[1]), line)
    return lines
