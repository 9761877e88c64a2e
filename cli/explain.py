"""`farloop explain`: why a window closed, from `decisions.jsonl` and the journal, as a table or JSON."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from farloop.cli.options import facts as facts_grid
from farloop.config.exit_codes import CommandError
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.observe.decision_log import FILE
from farloop.coordinator.observe.event_log import files, parsed
from farloop.coordinator.storage.state_reader import read_journal, steadily
from farloop.monitoring.status import dumps
from farloop.monitoring.units import NOTHING, duration_text, size_text

_WINDOW = re.compile(r"(?:f?([0-9]+):)?([1-9][0-9]*)")


def explain_window(directory: Path, window: str, console: Console, *, as_json: bool) -> None:
    """Print a window, or that of every fragment.

    Raises CommandError: no such window, not decided yet, or no longer known.
    Raises StorageError: the folder cannot be read.
    """
    found = _WINDOW.fullmatch(window)
    if found is None:
        raise CommandError(f"{window}: expected f0:812, or 812 for the window of every fragment")
    read_journal(directory)  # what cannot be read is found before torch is loaded
    from farloop.coordinator.observe.window_inspection import closed_windows

    version, chosen = int(found[2]), None if found[1] is None else int(found[1])
    past, ledger = steadily(lambda: closed_windows(directory, read_journal(directory), version, chosen))
    if ledger is None:
        raise CommandError(f"{window}: the journal is damaged; farloop journal verify says where")
    every = range(len(ledger.versions))
    if chosen is not None and chosen not in every:
        raise CommandError(f"{window}: the run has fragments 0 to {len(every) - 1}")
    told = dict(_decisions(directory, version))
    fragments = list(every) if chosen is None else [chosen]
    explained = [_explained(told.get(f), past.get(f)) for f in fragments if f in past or f in told]
    if not explained:
        raise CommandError(_unknown(window, fragments, version, ledger))
    if as_json:
        return typer.echo(dumps(explained, indent=1))
    for number, facts in enumerate(explained):
        console.print(*([Text()] if number else []), _picture(facts), sep="\n")


def _unknown(window: str, fragments: list[int], version: int, ledger: Ledger) -> str:
    latest = max(ledger.versions[fragment] for fragment in fragments)
    if version > latest and ledger.windows.keys().isdisjoint(fragments):
        return f"{window}: there is none; the run is over, and its last is {latest}"
    if version > latest:
        what = "is open" if version == latest + 1 else "is not open yet"
        return f"{window} {what}: the newest that closed is {latest}; farloop status shows which nodes are awaited"
    return f"{window} is no longer known: the journal was pruned past it, and {FILE} does not have it"


def _decisions(directory: Path, version: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines of that version, by fragment; the later of two: a commit may have been decided twice."""
    mark = f'"version": {version},'.encode()
    for path in files(directory / FILE):
        try:
            with path.open("rb") as file:
                lines = [line for line in file if mark in line]
        except OSError:
            continue  # rotated or deleted meanwhile
        for line in lines:
            try:
                if (told := parsed(line)) is not None and told["version"] == version:
                    yield int(told["fragment"]), told
            except (ValueError, KeyError, TypeError, OverflowError):
                continue  # damaged


def _explained(told: dict[str, Any] | None, past: dict[str, Any] | None) -> dict[str, Any]:
    """Both sources combined; unknown values are None."""
    facts = {"record": None, "measured": {}, **(past or {}), **(told or {})}
    facts.pop("event", None)
    for name in ("t", "open_s", "quorum", "quorum_s", "grace_s", "floor", "expected", "norm", "merge_s", "journal_s"):
        facts.setdefault(name, None)
    measured = facts.pop("measured")
    facts["deltas_stored"] = bool(measured)
    for row in facts["arrived"]:
        row["measured_norm"], row["cosine"] = measured.get(row["node"], (None, None))
    return facts


def _picture(facts: dict[str, Any]) -> RenderableType:
    head = Text(f"f{facts['fragment']}:{facts['version']}", style="bold cyan")
    head.append(f"  round {facts['round']}", style="default not bold")
    head.append(", the last of its fragment" if facts["final"] else "", style="default not bold")
    if facts["open_s"] is not None:
        head.append(f"  open for {duration_text(facts['open_s'])}", style="default not bold")
    head.append(f"  of stage {facts['stage']}" if "stage" in facts else "", style="default not bold")
    if facts["t"] is not None:
        head.append(f"  {duration_text(facts['t'])} into the run", style="dim not bold")
    grid = facts_grid()
    grid.add_row("closed", Text(facts["why"], style="bold"))
    grid.add_row("waited", _waited(facts))
    if facts["revision"]:
        grid.add_row("terms", f"revision {facts['revision']}")
    if facts["expected"] is not None:
        grid.add_row("expected", ", ".join(facts["expected"]) or "none")
    parts: list[RenderableType] = [head, grid, Padding(_arrived(facts["arrived"], facts["version"]), (1, 0, 1, 0))]
    if facts["missing"] or facts["refused"]:
        parts += [Padding(_left_out(facts["missing"], facts["refused"]), (0, 0, 1, 0))]
    update = f"{size_text(facts['update_bytes'])}, {facts['codec_up']} up, {facts['codec_down']} down"
    if facts["merge_s"] is not None:
        update += f", merged in {1000 * facts['merge_s']:,.0f} ms, durable after {1000 * facts['journal_s']:,.0f} ms"
    where = f"record at {facts['record']}" if facts["record"] else "pruned from the journal"
    foot = facts_grid()
    foot.add_row("step", _step(facts))
    foot.add_row("update", update)
    foot.add_row("anchor", f"{facts['anchor_digest']}, {where}")
    return Group(*parts, foot)


def _waited(facts: dict[str, Any]) -> str:
    if facts["expected"] is None:
        return f"unknown: {FILE} does not have this window"
    quorum = "for all expected nodes" if facts["quorum"] is None else f"for a quorum of {facts['quorum']}"
    if facts["quorum_s"] is not None:
        quorum += f", reached after {duration_text(facts['quorum_s'])}"
    if facts["grace_s"] is not None:
        quorum += f", and then {duration_text(facts['grace_s'])} for the others"
    return quorum + (f", never below {facts['floor']}" if facts["floor"] > 1 else "")


def _arrived(rows: Iterable[dict[str, Any]], version: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("merged", no_wrap=True, overflow="ellipsis", max_width=20)
    for column in ("came", "weight", "steps", "tokens", "base", "norm", "cosine"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        norm = row["norm"] if row["measured_norm"] is None else row["measured_norm"]
        late = row["window"] is not None and row["window"] < version
        table.add_row(
            Text(row["node"], style="bold"),
            _age(row["after_s"]),
            Text(f"{row['weight']:.3f}", style="cyan"),
            NOTHING if row["steps"] is None else f"{row['steps']:,}",
            NOTHING if row["tokens"] is None else f"{row['tokens']:,}",
            f"{row['base']}{' late' if late else ''}",
            NOTHING if norm is None else f"{norm:.3g}",
            _cosine(row["cosine"]),
            Text(_own(row), style="dim"),
        )
    return table


def _own(row: dict[str, Any]) -> str:
    """Settings of the node that differ from the run's."""
    return ", ".join([*([f"by {row['codec']}"] if "codec" in row else []), *([f"H {row['h']}"] if "h" in row else [])])


def _left_out(gone: Iterable[dict[str, Any]], refused: Iterable[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("left out", no_wrap=True, overflow="ellipsis", max_width=20)
    table.add_column("when", justify="right", no_wrap=True)
    table.add_column("reason", no_wrap=True)
    table.add_column("", ratio=1)
    for row in gone:
        table.add_row(Text(row["node"], style="bold"), NOTHING, Text(row["code"], style="yellow"), row["sentence"])
    for row in refused:
        table.add_row(
            Text(row["node"], style="bold"), _age(row["after_s"]), Text(row["code"], style="red"), Text(row["detail"])
        )
    return table


def _step(facts: dict[str, Any]) -> str:
    parts = [f"H {facts['h']}", f"outer lr {facts['outer_lr']:g}", f"momentum {facts['outer_momentum']:g}"]
    parts += [f"delta × {facts['delta_scale']:g}"] if facts["delta_scale"] != 1.0 else []
    parts += ["a plain mean: the run's last"] if facts["final"] else []
    parts += [f"norm of the merged delta {facts['norm']:.3g}"] if facts["norm"] is not None else []
    return ", ".join(parts)


def _age(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"+{duration_text(seconds)}" if seconds >= 0 else f"-{duration_text(-seconds)}"


def _cosine(cosine: float | None) -> Text:
    if cosine is None:
        return Text(NOTHING)
    return Text(f"{cosine:.2f}", style="green" if cosine > 0.2 else "yellow" if cosine > -0.2 else "red")
