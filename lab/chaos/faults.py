"""Faults of the disk and of the state directory that a storm injects."""

import os
import random
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

from farloop.config.admin_client import change_terms
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.lab.chaos.journal_referee import Journal, Unreadable, read_journal
from farloop.local.processes import Child, Children, free_port, page
from farloop.monitoring.status import Status

# --- Full disk: a file that takes the free space of a small file system used by nothing else


SMALL_BYTES = 4 << 30  # a file system of its own that is larger than this is not filled
STEP_BYTES = 64 << 20  # taken at a time, without writing them, until the last few


class Ballast:
    """Fills the file system of a folder, if that is one of its own and small."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "ballast"

    @property
    def lies(self) -> bool:
        """Whether the disk is full of it now."""
        return self._path.exists()

    def refusal(self) -> str:
        """Why it must not be filled; empty where it may."""
        mend = f"mount one of at most {SMALL_BYTES >> 30} GiB at {self._folder}, as: mount -t tmpfs -o size=1g tmpfs …"
        if not os.path.ismount(self._folder):
            return f"the state is on a file system that other things are on; {mend}"
        stat = os.statvfs(self._folder)
        if stat.f_blocks * stat.f_frsize > SMALL_BYTES:
            return f"the state's file system is too large to fill; {mend}"
        return ""

    def fill(self) -> None:
        """Until not a byte is free."""
        with self._path.open("ab", buffering=0) as file:
            while True:
                size = os.fstat(file.fileno()).st_size
                try:
                    os.posix_fallocate(file.fileno(), size, STEP_BYTES)
                except OSError:
                    break
            for size in (1 << 20, 4096, 1):
                while True:
                    try:
                        file.write(bytes(size))
                    except OSError:
                        break

    def remove(self) -> None:
        """There is room again."""
        self._path.unlink(missing_ok=True)


# --- Settings of a storm's run, and the pace of its nodes


PACE = "pace"  # the file with the seconds of an inner step: see `storm_node.py`

RUN: dict[str, object] = {
    "name": "chaos",
    "model": "nano",
    "method": "streaming",
    "h": 3,
    "tau": 1,
    "batch_sequences": 4,
    "sequence_tokens": 32,
    "evaluation_sequences": 8,
    "evaluate_every_rounds": 20,
    "warmup_steps": 5,
}
"""Small and quick: every inner step has a send and a merge."""

DATA: dict[str, object] = {"max_bytes": 500_000}


def set_pace(out: Path, seconds: float) -> None:
    """From here on an inner step takes this long at least, on every node."""
    new = out / f"{PACE}.tmp"
    new.write_text(f"{seconds:.4f}")
    os.replace(new, out / PACE)


def shorten(state: Path, steps: int) -> str:
    """Give the run of this folder fewer steps; why that cannot be, or nothing."""
    try:
        change_terms([f"steps={steps}"], state, dry_run=False)
    except CommandError as error:
        return str(error)
    return ""


# --- Damage to a copy of the state directory, a second start on the directory itself, and the expected result of each
#
# A trial is a generator that the storm advances at each of its turns; it never blocks. What it finds wrong it says in
# sentences. Trials of damage work on a copy, so that the run itself goes on.


ANSWER_S: Final = 90.0  # how long a start may take to answer or to refuse, on a machine with much else to do
MOST_BYTES: Final = 1 << 30  # a state folder that is larger is not copied
SEEN_S: Final = 5.0  # for how long two coordinators may both live on one folder until one notices

_VITAL: Final = ("journal-", "epoch", "snapshots")
"""A start may refuse where one of these is damaged; any other file it must do without."""

Say = Callable[[str], None]


def copy_truncated(state: Path, copy: Path, dice: random.Random) -> str:
    """A copy of the folder with one file cut short; the file's name in it and where it was cut, as one text."""
    shutil.copytree(state, copy, ignore=shutil.ignore_patterns("ballast", "lock", "*.sock", "lost+found"))
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size > 0)
    kinds: dict[str, list[Path]] = {}
    for found in files:
        name = str(found.relative_to(copy))
        kinds.setdefault(next((vital for vital in _VITAL if name.startswith(vital)), "other"), []).append(found)
    path = dice.choice(kinds[dice.choice(sorted(kinds))])  # or it would mostly be a snapshot, or a file of no account
    data = path.read_bytes()
    used = len(data.rstrip(b"\0")) or len(data)  # zeros at the end are room set aside
    at = dice.choice((0, dice.randrange(used), dice.randrange(used), used - 1))
    with path.open("r+b") as file:
        file.truncate(at)
    return f"{path.relative_to(copy)} cut at byte {at} of {used}"


def small_enough(state: Path) -> bool:
    """Whether the folder may be copied."""
    return sum(path.stat().st_size for path in state.rglob("*") if path.is_file()) <= MOST_BYTES


def examine(
    children: Children, name: str, copy: Path, cut: str, whole: Journal, toml: Callable[[Path, int], Path], wrong: Say
) -> Iterator[None]:
    """Judge what `journal verify`, a start and, where that refuses, `journal salvage` make of a damaged copy.

    Args:
        whole: what the journal said before the damage.
        toml: writes the settings of a coordinator over a folder, with its status page at a port.
    """
    left = _read(copy)
    verify = children.start(f"{name}-verify", ["journal", "verify", "--state", str(copy)], threads=1)
    yield from _answers(verify, None, wrong)
    http = free_port()
    start = children.start(f"{name}-start", ["coordinator", str(toml(copy, http))], threads=1)
    status = yield from _answers(start, http, wrong)
    if status is None:
        code = start.process.poll()
        if not cut.startswith(_VITAL):
            wrong(f"{cut}: a start refuses, though no version needs this file: {start.last_words()}")
        if code != ExitCode.STORAGE:
            wrong(f"{cut}: a start ends with {code}, not {ExitCode.STORAGE:d}: {start.last_words()}")
        if verify.process.returncode == 0:
            wrong(f"{cut}: verify calls the folder whole and a start refuses it: {start.last_words()}")
        yield from _salvaged(children, name, copy, cut, whole, toml, wrong)
    else:
        _compare(cut, whole, left, _read(copy), status, wrong)
    start.kill()
    shutil.rmtree(copy, ignore_errors=True)


def _read(folder: Path) -> Journal | None:
    """Its journal; None where that is damaged, or holds no run."""
    try:
        journal = read_journal(folder)
    except Unreadable:
        return None
    return journal if journal.newest else None


def _compare(cut: str, whole: Journal, left: Journal | None, now: Journal | None, status: Status, wrong: Say) -> None:
    """A start is where its journal is, or a version further by stored deltas. Over damage that the referee cannot read
    past it may go on only if nothing is lost."""
    newest = list((left or whole).newest)
    known = {**whole.digests, **(now.digests if now else {})}
    behind = [fragment for fragment, version in enumerate(newest) if status["versions"][fragment] < version]
    pairs = enumerate(zip(status["versions"], status["digests"], strict=True))
    other = [fragment for fragment, (version, digest) in pairs if known.get((fragment, version)) != digest]
    changed = [at for at, digest in (now.digests if now else {}).items() if whole.digests.get(at, digest) != digest]
    if behind or other or changed:
        what = "the journal is at" if left else "the journal cannot be read, and was at"
        wrong(
            f"{cut}: a start is at versions {status['versions']}; {what} {newest}; other digests of {other}, {changed}"
        )


def _salvaged(
    children: Children, name: str, copy: Path, cut: str, whole: Journal, toml: Callable[[Path, int], Path], wrong: Say
) -> Iterator[None]:
    """A folder that a start refuses: `journal salvage` repairs it, or says in one line that it cannot."""
    salvage = children.start(f"{name}-salvage", ["journal", "salvage", *SALVAGE, str(copy)], threads=1)
    yield from _answers(salvage, None, wrong)
    if salvage.process.returncode == ExitCode.USAGE:
        wrong(f"{cut}: salvage: {salvage.last_words()}")
    if salvage.process.returncode != 0:
        return
    http = free_port()
    start = children.start(f"{name}-again", ["coordinator", str(toml(copy, http))], threads=1)
    status = yield from _answers(start, http, wrong)
    if status is None:
        wrong(f"{cut}: a start refuses what salvage repaired: {start.last_words()}")
    else:
        for at, digest in zip(enumerate(status["versions"]), status["digests"], strict=True):
            if whole.digests.get(at, digest) != digest or at[1] > whole.newest[at[0]]:
                wrong(f"{cut}: salvage made version {at[1]} of fragment {at[0]}, which was never committed so")
    start.kill()


SALVAGE: Final = ("--write",)  # options with which `farloop journal salvage` changes the folder


def second_start(
    children: Children, name: str, first: Callable[[], Child], http: int, settings: Path, *, locked: bool, wrong: Say
) -> Iterator[None]:
    """A second coordinator on the folder, until it is ended from outside.

    Beside a held lock it must refuse. Without the lock one of the two must notice and stop.
    """
    second = children.start(name, ["coordinator", str(settings)], threads=1)
    beside = first()
    both_since: float | None = None
    while second.running:
        if page(http) is None or not beside.running:
            both_since = None
        elif locked:
            wrong("a second start on one folder started despite the lock of the first")
            break
        else:
            both_since = both_since or time.monotonic()
            if time.monotonic() - both_since > SEEN_S:
                wrong("without their lock, two coordinators serve one folder, and neither has noticed")
                break
        yield
    code = second.process.poll()
    if code not in (None, -9, ExitCode.REFUSED, ExitCode.STORAGE, ExitCode.DONE):
        wrong(f"a second start ended with {code}: {second.last_words()}")
    second.kill()


def _answers(child: Child, http: int | None, wrong: Say) -> Generator[None, None, Status | None]:
    """Wait for a coordinator's page, or, without a port, for a command's end; None where it ends. A traceback in its
    log is wrong."""
    deadline = time.monotonic() + ANSWER_S
    while child.running:
        if http is not None and (status := page(http)) is not None:
            return status
        if time.monotonic() > deadline:
            what = "does not end" if http is None else "neither answers nor ends"
            wrong(f"{child.name} {what} within {ANSWER_S:g} s")
            child.kill()
        yield
    if "Traceback" in child.log.read_text(errors="replace"):
        wrong(f"{child.name} shows a traceback: {child.last_words()} (log: {child.log})")
    return None
