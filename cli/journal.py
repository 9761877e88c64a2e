"""`farloop journal`: read a coordinator's state folder, also while it runs, or repair it."""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from farloop.cli.options import STATE, AsJson, Commands, facts
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.monitoring.status import dumps
from farloop.monitoring.units import plural, size_text

if TYPE_CHECKING:
    from farloop.coordinator.storage.segment import Entry, Items
    from farloop.coordinator.storage.verify import ReplayResult

journal_app = Commands("Read a coordinator's state folder, running or not; only salvage --write changes it.")

Folder = Annotated[Path | None, typer.Argument(metavar="DIR", show_default=False, help="The same as --state DIR.")]
State = Annotated[
    Path | None, typer.Option("--state", metavar="DIR", show_default="state", help="The coordinator's state_dir.")
]
OneFragment = Annotated[int | None, typer.Option(metavar="N", show_default=False, help="Only this fragment.")]

_VERSIONS = re.compile(r"(\d*):(\d*)|(\d+)", re.ASCII)
_STYLES = {"commit": "bold green", "delta": "cyan", "drop": "yellow", "leave": "red", "epoch": "magenta",
           "begin": "magenta", "finish": "bold green", "start": "blue"}  # fmt: skip


def _folder(folder: Path | None, state: Path | None) -> Path:
    if folder is not None and state is not None:
        raise CommandError(f"the folder is given twice: {folder} and --state {state}; give one")
    return folder or state or STATE


@journal_app.command("show")
def show_journal(
    folder: Folder = None,
    state: State = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", show_default=False, help="commit, delta, drop, leave, …; repeatable."),
    ] = None,
    fragment: OneFragment = None,
    node: Annotated[str | None, typer.Option(metavar="NAME", show_default=False, help="Only this node.")] = None,
    last: Annotated[int, typer.Option(min=1, help="Most records to show.")] = 40,
    everything: Annotated[bool, typer.Option("--all", help="Show every record in the journal.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new records until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """List journal records, newest last; with --json one line per record. Exits with 6 if some are damaged.

    Example: farloop journal show --kind commit --fragment 0 --follow
    """
    from farloop.coordinator.storage.record_text import KINDS, fragment_of, kind_of, nodes_of
    from farloop.coordinator.storage.segment import Entry, Gap
    from farloop.coordinator.storage.state_reader import LOOK_AGAIN_S, read_journal

    for name in kind or ():
        if name not in KINDS.values():
            raise CommandError(f"--kind {name}: expected one of {', '.join(KINDS.values())}")

    def wanted(at: Entry | Gap) -> bool:
        return isinstance(at, Gap) or (
            (not kind or kind_of(at.record) in kind)
            and fragment in (None, fragment_of(at.record))
            and (node is None or node in nodes_of(at.record))
        )

    console = Console(highlight=False)
    state = _folder(folder, state)
    found = _with_earlier_keys(read_journal(state))
    entries, damage = [at for at in found if isinstance(at, Entry)], [at for at in found if isinstance(at, Gap)]
    following = entries[-1].sequence + 1 if entries else 0
    chosen = [at for at in found if wanted(at)]
    hidden = 0 if everything else max(0, len(chosen) - last)
    shown = [at for number, at in enumerate(chosen) if number >= hidden or isinstance(at, Gap)]
    _print_records(shown, console, as_json=as_json)
    if not as_json:
        more = f"; {hidden:,} earlier ones are left out, --all shows them" if hidden else ""
        console.print(Text(f"{plural(len(chosen) - len(damage), 'record')} of {len(entries):,}{more}", style="dim"))
    while follow:
        time.sleep(LOOK_AGAIN_S)
        new = list(_newer(state, following))
        following = new[-1].sequence + 1 if new else following
        _print_records([at for at in new if wanted(at)], console, as_json=as_json)
    if damage:
        raise CommandError(f"{damage[0].fault}; farloop journal verify says whether a start goes on", ExitCode.STORAGE)


def _with_earlier_keys(items: "Items") -> "Items":
    """The journal forgets old records; its first summary has the changes of the keys, of old ones what still holds."""
    from farloop.coordinator.decide.records import LedgerSaved
    from farloop.coordinator.storage.segment import Gap

    first = items[0] if items else None
    if first is None or isinstance(first, Gap) or not isinstance(first.record, LedgerSaved):
        return items
    return [*(replace(first, record=change) for change in first.record.keys), *items]


def _newer(directory: Path, following: int) -> "Iterator[Entry]":
    """Records from this sequence on."""
    from farloop.coordinator.storage.segment import Segments
    from farloop.coordinator.storage.state_reader import steadily

    def read_entries() -> "list[Entry]":
        segments = Segments(directory)
        entries: list[Entry] = []
        for number in reversed(segments.numbers):
            entries[:0] = segments.scan(number).entries
            if segments.scan(number).first_sequence <= following:
                break
        return entries

    return (at for at in steadily(read_entries) if at.sequence >= following)


def _print_records(records: "Items", console: Console, *, as_json: bool) -> None:
    from rich.table import Table

    from farloop.coordinator.storage.record_text import kind_of, plain, words
    from farloop.coordinator.storage.segment import Gap

    if as_json:
        for at in records:
            if isinstance(at, Gap):
                fault = {"path": at.fault.path.name, "offset": at.fault.offset, "words": at.fault.detail}
                typer.echo(dumps({"sequence": None, "kind": "damaged", **fault}))
            else:
                typer.echo(dumps(plain(at), default=repr))
        return
    rows = Table.grid(expand=True, padding=(0, 2, 0, 0))
    rows.add_column(justify="right", no_wrap=True, min_width=6)
    rows.add_column(no_wrap=True, style="dim", min_width=16)
    rows.add_column(no_wrap=True, min_width=10)
    rows.add_column(ratio=1)
    for at in records:
        if isinstance(at, Gap):
            where = f"{at.fault.path.name} byte {at.fault.offset}: "
            rows.add_row("", "", Text("damaged", style="bold red"), Text(where + at.fault.detail))
            continue
        kind = kind_of(at.record)
        rows.add_row(f"{at.sequence:,}", at.where, Text(kind, style=_STYLES.get(kind, "")), Text(words(at)))
    if rows.row_count:
        console.print(rows)


@journal_app.command("verify")
def verify_journal(folder: Folder = None, state: State = None, as_json: AsJson = False) -> None:
    """Check everything in the folder against its digests and for consistency; exits with 6 if it is damaged.

    Example: farloop journal verify state
    """
    from dataclasses import asdict

    from farloop.coordinator.storage.files import state_folder

    state = state_folder(_folder(folder, state))
    from farloop.coordinator.storage.verify import verify

    report = verify(state)
    if as_json:
        told = {key: value for key, value in asdict(report).items() if key not in ("refused", "epochs")}
        typer.echo(dumps({"good": not report.faults, "starts": not report.refused, **told}))
    else:
        rows = facts()
        rows.add_row("run", Text(report.run or "–", style="bold cyan"))
        sizes = f"{plural(report.segments, 'segment')}, {plural(report.records, 'record')}"
        rows.add_row("journal", f"{sizes}, {size_text(report.attached_bytes)} attached")
        held = f"{plural(report.deltas, 'delta')}, {plural(report.updates, 'update')}"
        rows.add_row("holds", f"{held}, {plural(report.snapshots, 'snapshot')}")
        if report.versions:
            rows.add_row("newest", f"{_versions(report.versions)}, epoch {report.epoch}")
        if report.torn:
            rows.add_row("tail", Text(report.torn, style="yellow"))
        for fault in report.faults:
            rows.add_row(Text("damaged", style="bold red"), Text(f"{fault.where}: {fault.what}"))
        result = Text("whole: every digest, sequence, epoch and invariant holds", style="bold green")
        if report.refused:
            result = Text("a start refuses this folder; farloop journal salvage says what can be saved", "bold red")
        elif report.objects_missing and len(report.faults) == 1:
            fix = "bring them back, or mend how this machine reaches the store (docs/object-store.md)"
            result = Text(f"the folder is whole; a start needs the newest of these objects: {fix}", style="yellow")
        elif report.faults:
            result = Text("damaged, but a start goes on: make a copy of the folder now", style="yellow")
        rows.add_row("result", result)
        Console(highlight=False).print(rows)
    if report.faults:
        first = report.faults[0]
        more = f" (and {plural(len(report.faults) - 1, 'fault')} more)" if len(report.faults) > 1 else ""
        raise CommandError(f"{state} is damaged: {first.where}: {first.what}{more}", ExitCode.STORAGE)


@journal_app.command("salvage")
def salvage_journal(
    folder: Folder = None,
    state: State = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write it; move the old files into DIR/before-salvage-N.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find the newest consistent state of a damaged folder, and list what would be lost.

    Changes nothing without --write. Stop the coordinator first: the folder of one at work is refused. Exits with 6 if
    no consistent state is left.

    Example: farloop journal salvage state --write
    """
    from farloop.coordinator.storage.files import state_folder

    directory = state_folder(_folder(folder, state))
    from farloop.coordinator.leadership import marked
    from farloop.coordinator.storage.salvage import carry_out, finish, is_unfinished, salvage
    from farloop.coordinator.storage.state_reader import journal_folder

    finished = finish(directory) if write and is_unfinished(directory) else None
    journal_folder(directory)
    found = salvage(directory)
    aside = finished or (carry_out(directory, found) if write else None)
    if as_json:
        lost = [{"fragment": fragment, "first": first, "last": last} for fragment, first, last in found.given_up]
        told = {"run": found.run, "versions": list(found.versions), "epoch": found.epoch, "given_up": lost}
        told |= {"deltas_given_up": found.deltas, "damage": list(found.damage)}
        told |= {"written": aside is not None, "old_files": None if aside is None else str(aside)}
        return typer.echo(dumps(told))
    rows = facts()
    rows.add_row("run", Text(found.run, style="bold cyan"))
    for fault in found.damage:
        rows.add_row(Text("damaged", style="bold red"), Text(fault))
    rows.add_row("goes on", f"from {_versions(found.versions)}, epoch {found.epoch}")
    for fragment, first, last in found.given_up:
        what = f"fragment {fragment}, version {f'{first} to {last}' if last > first else last}"
        rows.add_row(Text("gives up", style="yellow"), what)
    if found.deltas:
        deltas = f"{plural(found.deltas, 'stored delta')}; nodes send theirs again"
        rows.add_row(Text("gives up", style="yellow"), deltas)
    if finished is not None:
        rows.add_row("finished", "a salvage that was interrupted; its first run said what is given up")
    elif not found.given_up:
        rows.add_row("gives up", "no committed version")
    console = Console(highlight=False)
    console.print(rows)
    if found.given_up:
        console.print(
            "Nodes that have newer versions hold the run after the start: start the coordinator once with "
            "--adopt-from-nodes to go on from what they hold, or with --rewind to go on from here."
        )
        if marked(directory) is not None:
            console.print(
                "The run has several coordinators, and another may have all: start that one first; this one then "
                "stands by for it. If there is none, start this one once with --force-lead."
            )
    if aside is not None:
        console.print(f"done: the old files are in {aside}; start the coordinator as before")
    else:
        console.print("nothing was changed; stop the coordinator and add --write to carry it out")


def _versions(versions: Sequence[int]) -> str:
    newest = " ".join(f"f{index}:{version}" for index, version in enumerate(versions[:12]))
    return f"{newest} and {len(versions) - 12} more" if len(versions) > 12 else newest


@journal_app.command("replay")
def replay_journal(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR] [FROM:TO]", show_default="state, all", help="Folder; versions, e.g. 800:812."),
    ] = None,
    state: State = None,
    fragment: OneFragment = None,
    as_json: AsJson = False,
) -> None:
    """Repeat commits from the stored deltas and compare every bit; exits with 6 if one differs.

    The oldest version that it can repeat is the one after the oldest snapshot.

    Example: farloop journal replay state 800:812 --fragment 0
    """
    from farloop.coordinator.storage.files import state_folder

    folder, versions = None, ":"
    for word in words or ():
        if _VERSIONS.fullmatch(word):
            versions = word
        elif folder is None:
            folder = Path(word)
        else:
            raise CommandError(f"{word}: expected FROM:TO, as 800:812, 812 or : for all that can be made again")
    directory = state_folder(_folder(folder, state))
    from farloop.coordinator.storage.state_reader import read_journal, steadily
    from farloop.coordinator.storage.verify import replay, span

    def read_results() -> "list[ReplayResult]":
        items = read_journal(directory)
        return list(replay(directory, items, _wanted(versions, fragment, span(directory, items))))

    results = steadily(read_results)
    console = Console(highlight=False)
    if as_json:
        for replayed in results:
            typer.echo(dumps(_replayed_json(replayed)))
    else:
        _print_replayed(results, console)
    if first := next((replayed for replayed in results if not replayed.same), None):
        raise CommandError(f"{directory}: f{first.fragment}:{first.version} {_difference(first)}", ExitCode.STORAGE)
    if not as_json:
        console.print(Text(f"{plural(len(results), 'commit')} made again: bit for bit the same", style="bold green"))


def _wanted(versions: str, fragment: int | None, spans: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """From and to, by fragment; an open end is as far as possible."""
    found = _VERSIONS.fullmatch(versions)
    if found is None:
        raise CommandError(f"{versions}: expected FROM:TO, as 800:812, 812 or : for all that can be made again")
    if fragment is not None and fragment not in spans:
        raise CommandError(f"--fragment {fragment}: the run has fragments 0 to {len(spans) - 1}")
    low, high = (found[3], found[3]) if found[3] else (found[1], found[2])
    wanted: dict[int, tuple[int, int]] = {}
    for index, (first, last) in spans.items():
        if fragment not in (None, index):
            continue
        begin, end = int(low) if low else first, int(high) if high else last
        if low and high and begin > end:
            raise CommandError(f"{versions}: version {begin} is behind {end}")
        if first > last or begin > last or end < first:
            continue  # nothing of it can be made again
        if begin < first or end > last:
            raise CommandError(f"{versions}: of fragment {index}, {first} to {last} can be made again")
        wanted[index] = (begin, end)
    if not wanted:
        can = ", ".join(f"f{index} {a} to {b}" for index, (a, b) in spans.items() if a <= b) or "none"
        raise CommandError(f"{versions}: nothing of it can be made again; what can be is {can}: behind a snapshot")
    return wanted


def _replayed_json(replayed: "ReplayResult") -> dict[str, object]:
    names = ("fragment", "version", "where", "deltas", "from_deltas", "same", "trouble")
    digests = {
        comparison.name: {"recorded": _hex(comparison.recorded), "found": _hex(comparison.found)}
        for comparison in replayed.compared
    }
    return {**{name: getattr(replayed, name) for name in names}, "digests": digests}


def _print_replayed(results: "Iterable[ReplayResult]", console: Console) -> None:
    from rich.table import Table

    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in ("window", "at", "deltas", "update", "anchor", "target", "outer state"):
        rows.add_column(column, justify="right" if column == "deltas" else "left", no_wrap=True)
    for replayed in results:
        compared = {comparison.name: comparison for comparison in replayed.compared}
        cells = [
            Text(f"f{replayed.fragment}:{replayed.version}", style="bold"),
            Text(replayed.where, style="dim"),
            Text(str(replayed.deltas) if replayed.from_deltas else "not stored"),
        ]
        for name in ("update", "anchor", "target", "outer state"):
            comparison = compared.get(name)
            if comparison is None or (comparison.recorded is None and comparison.same):
                cells.append(Text("–", style="dim"))
            elif comparison.same:
                cells.append(Text(_hex(comparison.found) or "" if name == "anchor" else "same", style="green"))
            else:
                cells.append(Text("differs", style="bold red"))
        rows.add_row(*cells)
    console.print(rows)


def _difference(replayed: "ReplayResult") -> str:
    if replayed.trouble:
        return f"cannot be made again: {replayed.trouble}"
    differ = [comparison for comparison in replayed.compared if not comparison.same]
    first = differ[0]
    names = ", ".join(comparison.name for comparison in differ)
    return f"does not come out: {names}; {first.name} {_hex(first.found)}, recorded {_hex(first.recorded)}"


def _hex(digest: int | None) -> str | None:
    return None if digest is None else f"{digest:016x}"
