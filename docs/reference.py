"""Writes docs/configuration.md and docs/cli.md from the code, and tables of measurements from docs/results/:
`python docs/reference.py`, after any of them changed.

Committed rather than made while the site is built: they are read beside the code too, a change of an option shows in
its diff, and the site builds without torch. `tests/unit/docs/test_reference_pages.py` holds them to the code.
"""

import dataclasses
import html
import json
import re
import string
from collections import Counter
from collections.abc import Iterator, KeysView, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import typer.cli
import typer.main
from typer.models import Context

from farloop.cli.main import app
from farloop.config.settings import NODE_SCHEMA, RUN_SCHEMA, Key, Schema
from farloop.config.sources import PREFIX
from farloop.monitoring.units import AtLeast, OneOf
from farloop.node.settings import Share

DOCS = Path(__file__).resolve().parent

_MADE = "<!-- Made by `python docs/reference.py` from the code: change it there. -->\n\n"

_SORTS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
    tuple[Path, ...]: "list of paths",
    tuple[Share, ...]: "list of tables",
}

_SAME_DATA = "As in the RUN.toml, with the same text on every node: its digest is compared when a node joins."

_PANELS = ("Train", "Inspect", "Configure")

_GIVEN = "**Required.**"


def configuration() -> str:
    """docs/configuration.md."""
    return (
        _MADE
        + f"""# Configuration

There are two settings files: a RUN.toml on the coordinator defines the training run, a NODE.toml on each node defines
the node. A node receives the run's settings when it joins, so all nodes have the same settings.

Every key can be set in three places; a later one overrides an earlier one:

| where | how |
| --- | --- |
| the file | `steps = 2000` below `[run]` |
| the environment | `{PREFIX}RUN__STEPS=2000`: section and key in capitals, two underscores between them |
| a flag | `--set run.steps=2000`; may be repeated |

An unknown key is an error that names the nearest key. Relative paths in a file are relative to the file's folder, all
other paths to the working folder. An empty value in the environment or a flag leaves an optional key open.

```sh
farloop config check examples/run.toml   # validates it and prints the resulting run
farloop config show examples/run.toml    # every key with its value, meaning and source
```

Whole numbers of [run] are at most 2⁴⁰, but for `seed`, which is at most 2⁶³ − 1.

In brackets stand what a key takes, unless its default shows it, and its default. An *open* key takes its value from the
method (`farloop lab methods`), or as its meaning says.

## RUN.toml

{_sections(RUN_SCHEMA)}
## NODE.toml

{_sections(NODE_SCHEMA, said={"data": _SAME_DATA})}"""
    )


def _sections(schema: Schema, said: dict[str, str] | None = None) -> str:
    parts = []
    for section, keys in schema.items():
        parts.append(f"### [{section}]\n\n")
        if said and section in said:
            parts.append(said[section] + "\n\n")
            continue
        rows = _rows(keys)
        also = rows & _rows(RUN_SCHEMA["coordinator"]) if section == "node" else set()
        parts += [row for row in rows if row not in also]
        if also:
            parts.append(f"\nAs under [coordinator]: {', '.join(row.split()[1] for row in rows if row in also)}.\n")
        parts.append("\n")
    return "".join(parts).strip() + "\n"


def _rows(keys: Mapping[str, Key]) -> KeysView[str]:
    """In the order of the keys."""
    told = {key.name: "; ".join(filter(None, (_sort(key), _default(key)))) for key in keys.values()}
    return {f"- `{key.name}` ({told[key.name]}): {key.meaning}\n": None for key in keys.values()}.keys()


def _sort(key: Key) -> str:
    """What a key takes, unless its default shows it."""
    sort = "" if key.default not in (dataclasses.MISSING, None, "") else _SORTS[key.kind]
    match key.rules:
        case (OneOf(words),):
            return ", ".join(f"`{word}`" for word in words)
        case (AtLeast(least, wanted=""),):
            return f"{sort} ≥ {least}".strip()
        case _:
            return sort


def _default(key: Key) -> str:
    if key.default is dataclasses.MISSING:
        return "**required**"
    if key.default is None:
        return "open"
    if key.default == "":
        return "empty"
    return f"`{json.dumps(key.default, default=str)}`"


def commands() -> str:
    """docs/cli.md: what several commands have stands once, before them."""
    root = typer.main.get_command(app)
    top: dict[str, Any] = dict(getattr(root, "commands"))  # noqa: B009 - a group's, in the click that typer brings
    by_panel = {panel: [name for name, command in top.items() if command.rich_help_panel == panel] for panel in _PANELS}
    assert sum(map(len, by_panel.values())) == len(top), "a command stands in no panel"
    found = {
        panel: [(words, *_command(words, command)) for name in names for words, command in _leaves([name], top[name])]
        for panel, names in by_panel.items()
    }
    times = Counter(row for told in found.values() for _, _, rows in told for row in rows)
    shared = [row for row, count in times.items() if count > 1]
    parts = [
        _MADE,
        "# Commands\n\n`farloop COMMAND --help` says the same at the terminal. "
        "[Exit codes](exit-codes.md) say how they end. "
        "The options of `farloop lab bench` and `lab chaos` are only there.\n\n",
        "Options of several commands, each of which names those that it has:\n\n",
        _options(shared),
    ]
    for panel, told in found.items():
        parts.append(f"\n## {panel}\n")
        for words, about, rows in told:
            own = [row for row in rows if row not in shared]
            also = [f"`{row[0].strip('`').split()[0]}`" for row in rows if row in shared]
            parts += [f"\n### farloop {' '.join(words)}\n\n{about}", *(["\n", _options(own)] if own else [])]
            parts += [f"\nAlso {', '.join(also)}.\n"] if also else []
    return "".join(parts)


def _leaves(words: list[str], command: Any) -> Iterator[tuple[list[str], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, one in inner.items():
        yield from _leaves([*words, name], one)


def _command(words: list[str], command: Any) -> tuple[str, list[tuple[str, str, str]]]:
    """What typer itself says of one command: its text with the example, and the rows of its options."""
    context = Context(command, info_name=words[-1])
    text = html.unescape(typer.cli.get_docs_for_click(obj=command, ctx=context, name=" ".join(["farloop", *words])))
    _, _, text = text.partition("\n")
    about, _, rest = text.partition("**Usage**:")
    about, _, example = about.strip().partition("Example: ")
    lines = [line.strip().removeprefix("Example: ") for line in example.strip().splitlines() if line.strip()]
    assert lines, f"{' '.join(words)} has no example"
    shown = f"{about.strip()}\n\n```sh\n" + "\n".join(lines) + "\n```\n"
    if words[:2] in (["lab", "bench"], ["lab", "chaos"]):  # for who measures or breaks farloop: --help has the options
        return shown, []
    return shown, [row for line in rest.splitlines() if (row := _option(line)) is not None]


def _options(rows: Sequence[tuple[str, str, str]]) -> str:
    return "".join(
        f"- {what}: {meaning}" + {"": "", _GIVEN: f" {_GIVEN}"}.get(default, f" Default: {default}.") + "\n"
        for what, meaning, default in rows
    )


def _option(line: str) -> tuple[str, str, str] | None:
    """A line of typer's lists as (what, meaning, default); None for other lines, and for --help."""
    match = re.fullmatch(r"\* `([^`]*)`:? *(.*)", line)
    if match is None or match[1] == "--help":
        return None
    meaning, default, bound = match[2], "", ""
    if extra := re.search(r"\s*\[((?:env var|default|required)\b.*|\S*x[<>]\S*)\]$", meaning):
        meaning = meaning[: extra.start()]
        for part in re.split(r"; (?=default: |required$|\d*[^ ]*x[<>])", extra[1]):
            label, _, value = part.partition(": ")
            if label == "default":
                default = _short(re.sub(r"^\((.*)\)$", r"\1", value))
            elif label == "env var":
                meaning += f" In the environment: `{value}`."
            elif label == "required":
                default = _GIVEN
            elif bounds := re.fullmatch(r"(?:x>=)?([\d.]+)(?:<=x<=([\d.]+))?", label):
                least, most = bounds.groups()
                bound = f" ({_short(least)} to {_short(most)})" if most else f" (≥ {_short(least)})"
            else:
                raise ValueError(f"{line}: typer's words {label!r} are not known here")
    return f"`{match[1].replace(' range>', '>')}`{bound}", meaning, default


def _short(number: str) -> str:
    return re.sub(r"e\+0?", "e", f"{float(number):g}") if re.fullmatch(r"\d+\.\d+", number) else number


_RESULTS = re.compile(
    r"(?P<head><!-- rows of (?P<file>\S+?)(?: (?P<list>[\w.-]+))?(?: by (?P<keys>[\w ]+))?: (?P<cells>.+?) -->\n"
    r"(?:\|.*\n){2})(?:\|.*\n)*|(?P<mark><!-- measured: (?P<files>.+?) -->\n)(?:(?:- |  ).*\n)*",
)


def measured(page: Path) -> str:
    """The page with its measurements as the files of docs/results/ have them, which `farloop lab … --json` writes.

    Below `<!-- rows of FILE LIST by KEY KEY: CELL | CELL -->` and the head of a table comes a row for each item of the
    list (`rows` if none is named). A cell is a format of the item's fields, as `{x:.1f}`, or `{x:1e3*.0f}` of 1e3 · x,
    and empty where the item lacks a field. `by`: items that have these keys and agree in the first are one row,
    whose fields are the values of the last. Below `<!-- measured: FILE FILE -->` comes what each file is from.
    """

    def made(match: re.Match[str]) -> str:
        if match["mark"]:
            return match["mark"] + "".join(_origins(page, match["files"].split()))
        found = json.loads((page.parent / match["file"]).read_text(encoding="utf-8"))
        for key in (match["list"] or "rows").split("."):
            found = found[int(key) if isinstance(found, list) else key]
        items = [{"key": key, **item} for key, item in found.items()] if isinstance(found, dict) else found
        if keys := (match["keys"] or "").split():
            items = [{keys[0]: first, **fields} for first, fields in _nested(items, keys).items()]
        rows = [[_cell(cell, item) for cell in match["cells"].split(" | ")] for item in items]
        rows = [row for row in rows if any(row[1:])]
        assert all(map(any, zip(*rows, strict=True))), f"{page.name}: {match['file']}: a column is empty"
        return match["head"] + "".join(f"| {' | '.join(row)} |\n" for row in rows)

    return _RESULTS.sub(made, page.read_text(encoding="utf-8"))


class _Scaled(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        factor, star, rest = format_spec.rpartition("*")
        return format(float(factor) * value, rest) if star else format(value, format_spec)


def _cell(cell: str, item: Mapping[str, Any]) -> str:
    try:
        return _Scaled().vformat(cell, (), {key: value for key, value in item.items() if value is not None})
    except KeyError:
        return ""


def _nested(items: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for item in (item for item in items if all(key in item for key in keys)):
        inner = found
        for key in keys[:-1]:
            inner = inner.setdefault(item[key], {})
        inner[item[keys[-1]]] = item
    return found


def _origins(page: Path, names: Sequence[str]) -> Iterator[str]:
    """A line for each commit, day and machine."""
    found = {name: json.loads((page.parent / name).read_text(encoding="utf-8")) for name in names}
    for what, same in groupby(found, lambda name: [found[name][key] for key in ("commit", "date", "machine")]):
        yield f"- commit {', '.join(what)}: "
        yield "; ".join(f"[{Path(name).stem}]({name}) `{found[name]['command']}`" for name in same) + "\n"


def pages() -> dict[Path, str]:
    """Every page that is made, or in part, and what stands in it."""
    shown = [page for page in (DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))) if "results/" in page.read_text()]
    whole = {DOCS / "configuration.md": configuration(), DOCS / "cli.md": commands()}
    return whole | {page: measured(page) for page in shown if page not in whole}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
