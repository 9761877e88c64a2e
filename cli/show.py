"""Resolved settings as text: a TOML file that says of every key what it means and who gave it, or the same as JSON."""

import json
from pathlib import Path
from typing import Any

from farloop.cli.config import Setting, Settings
from farloop.cli.toml import dump_toml


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
