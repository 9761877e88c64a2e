"""TOML out: the few kinds of values that settings have. Reading is the standard library's."""

import json
from collections.abc import Mapping


def dump_toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    """One `[table]` each, with one `key = value` a line.

    Raises:
        TypeError: a value is neither text, number, truth value nor a list of these.
    """
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
            return json.dumps(value)  # a TOML basic string escapes as JSON does
        case list():
            return f"[{', '.join(_value(item) for item in value)}]"
        case _:
            raise TypeError(f"{value!r} has no place in a settings file")
