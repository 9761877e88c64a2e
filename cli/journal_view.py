"""What the journal commands show."""

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from farloop.algo.spec import BlobId, to_plain
from farloop.algo.stages import described
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.salvage import Salvage, carry_out, finish, is_unfinished, salvage
from farloop.coordinator.storage.segment import Scan, scan_segment, segment_paths
from farloop.coordinator.storage.state_reader import (
    LOOK_AGAIN_S,
    Placed,
    journal_folder,
    placed,
    read_journal,
    state_folder,
    steadily,
)
from farloop.coordinator.storage.verify import ReplayResult, Report, replay, span, verify
from farloop.monitoring.units import plural, size_text
from farloop.wire.messages import Drop

# --- A journal's records in words: one short sentence each, for people; their plain fields, for programs.


KINDS: dict[type[rec.Record], str] = {
    rec.RunStarted: "begin",
    rec.EpochClaimed: "epoch",
    rec.EpochSeen: "epoch-seen",
    rec.Rewound: "rewind",
    rec.NodeStarted: "start",
    rec.NodeLeft: "leave",
    rec.LeaseGranted: "lease",
    rec.RoundFixed: "round",
    rec.InputStored: "delta",
    rec.InputDropped: "drop",
    rec.WindowCommitted: "commit",
    rec.SnapshotTaken: "snapshot",
    rec.EvaluationTaken: "evaluation",
    rec.RunFinished: "finish",
    rec.LedgerSaved: "summary",
    rec.TermsChanged: "terms",
    rec.AnchorFetched: "fetch",
    rec.Adopted: "adopt",
}
"""What each kind is called on the command line."""


def kind_of(record: rec.Record) -> str:
    """Also of kinds that were added since: their own name."""
    return KINDS.get(type(record), type(record).__name__.lower())


def fragment_of(record: rec.Record) -> int | None:
    """The fragment that a record is about; None where it is about none, or all."""
    match record:
        case rec.InputStored(blob=blob) | rec.InputDropped(blob=blob):
            return blob.fragment
        case rec.WindowCommitted(fragment=fragment) | rec.SnapshotTaken(fragment=fragment):
            return fragment
        case rec.AnchorFetched(anchor=anchor):
            return anchor.fragment
        case _:
            return None


def nodes_of(record: rec.Record) -> set[str]:
    """Whom a record is about."""
    match record:
        case (
            rec.NodeStarted(node=node)
            | rec.NodeLeft(node=node)
            | rec.LeaseGranted(node=node)
            | rec.AnchorFetched(node=node)
        ):
            return {node}
        case rec.Adopted(anchors=anchors):
            return {anchor.node for anchor in anchors}
        case rec.InputStored(blob=blob) | rec.InputDropped(blob=blob):
            return {blob.node}
        case rec.WindowCommitted(merged=merged, drops=drops):
            return {share.node for share in merged} | {drop.node for drop in drops}
        case _:
            return set()


def words(at: Placed) -> str:
    """What a record says."""
    size = size_text(at.attachment.size)
    match at.record:
        case rec.RunStarted(spec=spec, epoch=epoch):
            count = len(spec.identity.layout.fragments)
            return f"run {spec.identity.name}, {spec.terms.method}, {count} fragments, epoch {epoch}"
        case rec.EpochClaimed(epoch=epoch):
            return f"epoch {epoch}: the coordinator started again"
        case rec.EpochSeen(epoch=epoch):
            return f"a node has met epoch {epoch}: this state looks like an old copy"
        case rec.Rewound(epoch=epoch):
            return f"epoch {epoch}: the run was wound back to what this state holds"
        case rec.AnchorFetched(anchor=anchor, node=node):
            return f"{node} brought f{anchor.fragment} at version {anchor.version}, {size}"
        case rec.Adopted() as adopted:
            return _adopted(adopted)
        case rec.NodeStarted(node=node, incarnation=incarnation, round=round_index, holds=holds):
            part = "" if holds is None else f", holds stages {described(holds)}"
            return f"{node} trains from round {round_index} on (incarnation {incarnation}{part})"
        case rec.NodeLeft(node=node, reason=reason):
            return f"{node} left: {reason.sentence}"
        case rec.LeaseGranted(node=node, lease=lease):
            return f"{node} got samples {lease.start} to {lease.start + lease.count - 1}"
        case rec.RoundFixed(round=plan):
            return f"round {plan.index}: {plan.length} steps from position {plan.start}"
        case rec.InputStored(blob=blob, window=window, contributors=contributors):
            steps = sum(contribution.steps for contribution in contributors)
            return f"{_delta(blob, window)}, {steps} steps, {size}"
        case rec.InputDropped(blob=blob, reason=reason, detail=detail):
            return f"{_delta(blob, None)} dropped: {reason.code}: {detail}"
        case rec.WindowCommitted() as commit:
            return f"{_commit(commit)}, {size}"
        case rec.SnapshotTaken(fragment=fragment, version=version):
            return f"f{fragment} at version {version}"
        case rec.EvaluationTaken(loss=loss, versions=versions, position=position):
            return f"loss {loss:.4f} at position {position:g}, versions {_list(versions)}"
        case rec.RunFinished():
            return "every fragment is final"
        case rec.TermsChanged(revision=revision):
            windows = " ".join(f"f{fragment}:{window}" for fragment, window in enumerate(revision.windows[:8]))
            more = f" … ({len(revision.windows)})" if len(revision.windows) > 8 else ""
            return (
                f"revision {revision.number} of the terms, from windows {windows}{more} and round {revision.round} on"
            )
        case rec.LedgerSaved(versions=versions, epoch=epoch):
            return f"all before it: versions {_list(versions)}, epoch {epoch}"


def plain(at: Placed) -> dict[str, Any]:
    """For `--json`: the place, the kind, and the record's own fields."""
    return {
        "sequence": at.entry.sequence,
        "segment": at.segment,
        "offset": at.offset,
        "kind": kind_of(at.record),
        "words": words(at),
        "attached_bytes": at.attachment.size,
        "record": to_plain(at.record),
    }


def without(drops: tuple[Drop, ...]) -> str:
    """`tromso (silent), oslo (late)`."""
    return ", ".join(f"{drop.node} ({drop.reason.code})" for drop in drops)


def _delta(blob: BlobId, window: int | None) -> str:
    name = f"f{blob.fragment}" + ("" if window is None else f":{window}")
    return f"{blob.node}'s delta for {name}, base {blob.version}"


def _commit(commit: rec.WindowCommitted) -> str:
    shares = ", ".join(f"{share.node} {share.weight:.3g}" for share in commit.merged)
    lost = f"; without {without(commit.drops)}" if commit.drops else ""
    final = ", final" if commit.flush else ""
    return f"f{commit.fragment}:{commit.version}{final}, round {commit.round}: {shares}{lost}; {commit.why}"


def _adopted(adopted: rec.Adopted) -> str:
    told = [f"f{anchor.fragment} {anchor.before} → {anchor.version} ({anchor.node})" for anchor in adopted.anchors]
    more = f" … ({len(told)})" if len(told) > 8 else ""
    lost = ", ".join(f"f{ref.fragment} {ref.version}" for ref in adopted.lost[:8])
    notes = [f"; lost {lost}"] * bool(lost)
    notes += [f"; {adopted.uncertain} samples may come twice"] * bool(adopted.uncertain)
    notes += [f"; nothing was heard of {', '.join(adopted.missing)}"] * bool(adopted.missing)
    what = ", ".join(told[:8]) + more or "nothing that was not here"
    return f"epoch {adopted.epoch}: the run goes on from what nodes held: {what}{''.join(notes)}"


def _list(numbers: tuple[int, ...]) -> str:
    shown = " ".join(map(str, numbers[:8]))
    return shown + (f" … ({len(numbers)})" if len(numbers) > 8 else "")


# --- What a person sees of a state folder: its records, what is wrong with it, and its commits made again.


_STYLES = {"commit": "bold green", "delta": "cyan", "drop": "yellow", "leave": "red", "epoch": "magenta",
           "begin": "magenta", "finish": "bold green", "start": "blue"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which records are wanted; nothing given wants all."""

    kinds: tuple[str, ...] = ()
    fragment: int | None = None
    node: str | None = None

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in KINDS.values():
                raise CommandError(f"--kind {kind}: one of {', '.join(KINDS.values())} is wanted")

    def wants(self, at: Placed) -> bool:
        record = at.record
        return (
            (not self.kinds or kind_of(record) in self.kinds)
            and (self.fragment is None or fragment_of(record) == self.fragment)
            and (self.node is None or self.node in nodes_of(record))
        )


# --- show


def show(directory: Path, wanted: Filter, console: Console, *, last: int | None, follow: bool, as_json: bool) -> None:
    """The last records that are wanted; with `follow`, also those that will come, until Ctrl-C."""
    found = [at for scan in read_journal(directory) for at in placed(scan)]
    following = found[-1].entry.sequence + 1 if found else 0
    chosen = [at for at in found if wanted.wants(at)]
    hidden = 0 if last is None else max(0, len(chosen) - last)
    _print_records(chosen[hidden:], console, as_json=as_json)
    if not as_json:
        more = f"; {hidden:,} earlier ones are left out, --all shows them" if hidden else ""
        console.print(Text(f"{plural(len(chosen), 'record')} of {len(found):,}{more}", style="dim"))
    if not follow:
        return
    while True:
        time.sleep(LOOK_AGAIN_S)
        new = list(_newer(directory, following))
        following = new[-1].entry.sequence + 1 if new else following
        _print_records([at for at in new if wanted.wants(at)], console, as_json=as_json)


def _newer(directory: Path, following: int) -> Iterator[Placed]:
    """Records from this sequence on: of the last segment, and of those before it that have some."""

    def look() -> list[Scan]:
        scans: list[Scan] = []
        for number, path in reversed(segment_paths(directory).items()):
            scans.insert(0, scan_segment(path, number, None))
            if scans[0].first_sequence <= following:
                break
        return scans

    return (at for found in steadily(look) for at in placed(found) if at.entry.sequence >= following)


def _print_records(records: Iterable[Placed], console: Console, *, as_json: bool) -> None:
    if as_json:
        for at in records:
            typer.echo(json.dumps(plain(at), default=repr))
        return
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True, min_width=6)
    table.add_column(no_wrap=True, style="dim", min_width=16)
    table.add_column(no_wrap=True, min_width=10)
    table.add_column(ratio=1)
    for at in records:
        kind = kind_of(at.record)
        table.add_row(f"{at.entry.sequence:,}", at.where, Text(kind, style=_STYLES.get(kind, "")), Text(words(at)))
    if table.row_count:
        console.print(table)


# --- verify


def check(directory: Path, console: Console, *, as_json: bool) -> None:
    """Look at everything, and say what was found. Raises CommandError where something is wrong."""
    report = verify(directory)
    if as_json:
        typer.echo(json.dumps(report_json(report)))
    else:
        _print_report(report, console)
    if report.faults:
        first = report.faults[0]
        more = f" (and {plural(len(report.faults) - 1, 'fault')} more)" if len(report.faults) > 1 else ""
        raise CommandError(f"{directory} is damaged: {first.where}: {first.what}{more}", ExitCode.STORAGE)


def report_json(report: Report) -> dict[str, Any]:
    """For `--json`."""
    return {
        "good": not report.faults,
        "starts": not report.refused,
        "run": report.run,
        "segments": report.segments,
        "records": report.records,
        "attached_bytes": report.attached_bytes,
        "deltas": report.deltas,
        "updates": report.updates,
        "epoch": report.epoch,
        "versions": report.versions,
        "snapshots": report.snapshots,
        "torn": report.torn,
        "faults": [{"where": fault.where, "what": fault.what} for fault in report.faults],
    }


def _print_report(report: Report, console: Console) -> None:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("run", Text(report.run or "–", style="bold cyan"))
    sizes = f"{plural(report.segments, 'segment')}, {plural(report.records, 'record')}"
    grid.add_row("journal", f"{sizes}, {size_text(report.attached_bytes)} attached")
    held = f"{plural(report.deltas, 'delta')}, {plural(report.updates, 'update')}"
    grid.add_row("holds", f"{held}, {plural(report.snapshots, 'snapshot')}")
    if report.versions:
        grid.add_row("newest", f"{_versions(report.versions)}, epoch {report.epoch}")
    if report.torn:
        grid.add_row("tail", Text(report.torn, style="yellow"))
    for fault in report.faults:
        grid.add_row(Text("damaged", style="bold red"), Text(f"{fault.where}: {fault.what}"))
    if report.refused:
        what = "a start refuses this folder; farloop journal salvage says what can be saved"
        grid.add_row("result", Text(what, style="bold red"))
    elif report.faults:
        grid.add_row("result", Text("damaged, but a start goes on: make a copy of the folder now", style="yellow"))
    else:
        grid.add_row("result", Text("whole: every digest, sequence, epoch and invariant holds", style="bold green"))
    console.print(grid)


# --- salvage


def repair(directory: Path, console: Console, *, write: bool, as_json: bool) -> None:
    """Say what can be saved of a damaged folder; with `write`, save it. Raises CommandError where nothing can be."""
    state_folder(directory)
    finished = finish(directory) if write and is_unfinished(directory) else None
    journal_folder(directory)
    found = salvage(directory)
    aside = finished or (carry_out(directory, found) if write else None)
    if as_json:
        typer.echo(json.dumps(salvage_json(found, aside)))
        return
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("run", Text(found.run, style="bold cyan"))
    for fault in found.damage:
        grid.add_row(Text("damaged", style="bold red"), Text(fault))
    grid.add_row("goes on", f"from {_versions(found.versions)}, epoch {found.epoch}")
    for fragment, first, last in found.given_up:
        what = f"fragment {fragment}, version {f'{first} to {last}' if last > first else last}"
        grid.add_row(Text("gives up", style="yellow"), what)
    if found.deltas:
        deltas = f"{plural(found.deltas, 'stored delta')}; nodes send theirs again"
        grid.add_row(Text("gives up", style="yellow"), deltas)
    if finished is not None:
        grid.add_row("finished", "a salvage that was interrupted; its first run said what is given up")
    elif not found.given_up:
        grid.add_row("gives up", "no committed version")
    console.print(grid)
    if found.given_up:
        console.print(
            "Nodes that have newer versions hold the run after the start: start the coordinator once with "
            "--adopt-from-nodes to go on from what they hold, or with --rewind to go on from here."
        )
    if aside is not None:
        console.print(f"done: the old files are in {aside}; start the coordinator as before")
    else:
        console.print("nothing was changed; stop the coordinator and add --write to carry it out")


def salvage_json(found: Salvage, aside: Path | None) -> dict[str, Any]:
    """For `--json`."""
    return {
        "run": found.run,
        "versions": list(found.versions),
        "epoch": found.epoch,
        "given_up": [{"fragment": fragment, "first": first, "last": last} for fragment, first, last in found.given_up],
        "deltas_given_up": found.deltas,
        "damage": list(found.damage),
        "written": aside is not None,
        "old_files": None if aside is None else str(aside),
    }


def _versions(versions: Sequence[int]) -> str:
    newest = " ".join(f"f{index}:{version}" for index, version in enumerate(versions[:12]))
    return f"{newest} and {len(versions) - 12} more" if len(versions) > 12 else newest


# --- replay


_VERSIONS = re.compile(r"(\d*):(\d*)|(\d+)")


def again(directory: Path, versions: str, fragment: int | None, console: Console, *, as_json: bool) -> None:
    """Make commits again. Raises CommandError where they cannot be, or one does not come out."""

    def look() -> list[ReplayResult]:
        scans = read_journal(directory)
        return list(replay(directory, scans, _wanted(versions, fragment, span(directory, scans))))

    rows = steadily(look)
    if as_json:
        for replayed in rows:
            typer.echo(json.dumps(replayed_json(replayed)))
    else:
        table = _replay_table()
        for replayed in rows:
            table.add_row(*_replay_cells(replayed))
        console.print(table)
    if first := next((replayed for replayed in rows if not replayed.same), None):
        raise CommandError(f"{directory}: f{first.fragment}:{first.version} {_difference(first)}", ExitCode.STORAGE)
    if not as_json:
        console.print(Text(f"{plural(len(rows), 'commit')} made again: bit for bit the same", style="bold green"))


def _wanted(versions: str, fragment: int | None, spans: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """From and to, by fragment; an open end is as far as possible."""
    found = _VERSIONS.fullmatch(versions)
    if found is None:
        raise CommandError(f"{versions}: FROM:TO is wanted, as 800:812, 812 or : for all that can be made again")
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


def replayed_json(replayed: ReplayResult) -> dict[str, Any]:
    """For `--json`, a line per commit."""
    return {
        "fragment": replayed.fragment,
        "version": replayed.version,
        "where": replayed.where,
        "deltas": replayed.deltas,
        "from_deltas": replayed.from_deltas,
        "same": replayed.same,
        "trouble": replayed.trouble,
        "digests": {
            comparison.name: {"recorded": _hex(comparison.recorded), "found": _hex(comparison.found)}
            for comparison in replayed.compared
        },
    }


def _replay_table() -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in ("window", "at", "deltas", "update", "anchor", "target", "outer state"):
        table.add_column(column, justify="right" if column == "deltas" else "left", no_wrap=True)
    return table


def _replay_cells(replayed: ReplayResult) -> list[Text | str]:
    compared = {comparison.name: comparison for comparison in replayed.compared}
    cells: list[Text | str] = [
        Text(f"f{replayed.fragment}:{replayed.version}", style="bold"),
        Text(replayed.where, style="dim"),
        str(replayed.deltas) if replayed.from_deltas else "not stored",
    ]
    for name in ("update", "anchor", "target", "outer state"):
        comparison = compared.get(name)
        if comparison is None or (comparison.recorded is None and comparison.same):
            cells.append(Text("–", style="dim"))
        elif comparison.same:
            short = name == "anchor"
            cells.append(Text(_hex(comparison.found) or "" if short else "same", style="green"))
        else:
            cells.append(Text("differs", style="bold red"))
    return cells


def _difference(replayed: ReplayResult) -> str:
    if replayed.trouble:
        return f"cannot be made again: {replayed.trouble}"
    differ = [comparison for comparison in replayed.compared if not comparison.same]
    first = differ[0]
    names = ", ".join(comparison.name for comparison in differ)
    return f"does not come out: {names}; {first.name} {_hex(first.found)}, recorded {_hex(first.recorded)}"


def _hex(digest: int | None) -> str | None:
    return None if digest is None else f"{digest:016x}"
