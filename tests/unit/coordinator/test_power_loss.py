"""The real store over a disk that forgets what was not synced (protocol O, P, S).

A representative run (begin, deltas, commits, new segments, snapshots, pruning, clean and unclean restarts, an adoption)
is cut at every call that it makes of the disk. What was told before the cut is there after it. Then every sync, rename
and directory sync is left out once: each time that has to show.
"""

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import stored_runs
from power_cuts import extremes, image_of

from farloop.algo.digest import digest
from farloop.algo.spec import RunSpec
from farloop.coordinator.errors import StorageError, StorageFailed
from farloop.coordinator.storage.epoch import claimed_epoch
from farloop.coordinator.storage.store import Store
from farloop.coordinator.storage.verify import verify
from farloop.sim.virtual_files import Drawn, VirtualFiles

PLACE = Path("/state")
SEGMENT_BYTES = 12 << 10
A, B = stored_runs.NODES


State = tuple[Any, ...]
"""What a start finds, in values that can be compared; empty for no run."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything happens within a few commits."""
    monkeypatch.setattr("farloop.coordinator.storage.store.SNAPSHOT_EVERY", 2)
    monkeypatch.setattr("farloop.coordinator.storage.journal.RECORD_ROOM", 4096)
    monkeypatch.setattr("farloop.coordinator.storage.recovery.HISTORY_VERSIONS", 1)
    monkeypatch.setattr("farloop.coordinator.decide.ledger.HISTORY_VERSIONS", 1)


def state_of(store: Store) -> State:
    return (
        tuple(
            (b.version, digest(b.anchor), digest(b.target), *(digest(b.outer[name]) for name in sorted(b.outer)))
            for b in store.buffers
        ),
        tuple(sorted(str(blob) for blob in store.ledger.inputs)),
        tuple(sorted(store.fetched)),
        store.ledger.history > 0,
    )


class Run:
    """One coordinator after another over one disk; `states` has what the folder holds after each of the stages."""

    def __init__(self, files: VirtualFiles, spec: RunSpec) -> None:
        self.files, self.spec = files, spec
        self.store: Store | None = None
        self.epoch = 0
        """The newest that anybody was told."""
        self.in_doubt: State = ()
        """What the folder may hold after a stage whose write failed."""

    def open(self) -> Store:
        store = Store.recover(PLACE, segment_bytes=SEGMENT_BYTES, files=self.files)
        assert store is not None, "the run is gone"
        assert not store.alarms
        self.store, self.epoch = store, store.ledger.epoch
        return store

    def began(self) -> Store:
        self.store = stored_runs.begun(PLACE, self.spec, segment_bytes=SEGMENT_BYTES, files=self.files)
        self.epoch = self.store.ledger.epoch
        return self.store


Stage = Callable[[Run], None]


def begin(run: Run) -> None:
    run.began()


def spool(fragment: int, node: Any, *, durable: bool = True) -> Stage:
    def stage(run: Run) -> None:
        assert run.store is not None
        stored_runs.spool(run.store, fragment, node, durable=durable)

    return stage


def commit(fragment: int) -> Stage:
    def stage(run: Run) -> None:
        assert run.store is not None
        stored_runs.commit(run.store, fragment, [blob for blob in run.store.ledger.inputs if blob.fragment == fragment])

    return stage


def window(fragment: int) -> list[Stage]:
    return [spool(fragment, A), spool(fragment, B), commit(fragment)]


def close_with_an_unsynced_delta(run: Run) -> None:
    """A clean end makes all durable that was appended."""
    assert run.store is not None
    stored_runs.spool(run.store, 1, A, durable=False)
    run.store.close()


def close(run: Run) -> None:
    assert run.store is not None
    run.store.close()


def restart(run: Run) -> None:
    run.open()


def kill_with_an_unsynced_delta(run: Run) -> None:
    """The process dies and the machine does not: what was written is in the page cache."""
    assert run.store is not None
    stored_runs.spool(run.store, 0, B, durable=False)
    run.files = run.files.killed()
    run.open()


def fail_a_sync(run: Run) -> None:
    """The kernel says that it could not write, calls the pages clean and keeps them; a supervisor starts again."""
    assert run.store is not None
    run.files.failing_sync = lambda path: path.name.startswith("journal")
    with pytest.raises(StorageFailed):
        stored_runs.spool(run.store, 1, B)
    run.in_doubt = state_of(run.store)
    run.store.close()
    run.files = run.files.killed()
    run.open()


def fetch(fragment: int) -> Stage:
    def stage(run: Run) -> None:
        assert run.store is not None
        stored_runs.fetch(run.store, fragment)

    return stage


def adopt(run: Run) -> None:
    assert run.store is not None
    stored_runs.adopt(run.store)
    run.epoch = run.store.ledger.epoch


STAGES: list[Stage] = [
    begin,
    *window(0), *window(1), *window(0), *window(1), *window(0),
    kill_with_an_unsynced_delta,
    spool(0, A), commit(0), *window(1), *window(1),
    close_with_an_unsynced_delta, restart,
    fail_a_sync,
    *window(0), *window(0), *window(1), *window(1),
    fetch(0), fetch(1), adopt, close, restart,
]  # fmt: skip


class Lost(AssertionError):
    """Something that was told is not there after a cut."""


class Cutter:
    """Cuts the power at every call, and starts on what is left; the run itself goes on as if nothing had been."""

    def __init__(self, run: Run, states: list[State], fates: Callable[[], list[Any]], *, armed: bool = True) -> None:
        self.run, self.states, self.fates = run, states[:-1], fates
        self.in_doubt = states[-1]
        self.stage = 0
        self.armed = armed
        self.cuts = 0
        self._seen: set[tuple[int, int, int]] = set()
        self._busy = False

    def cut(self) -> None:
        if self._busy or not self.armed:
            return
        self._busy = True
        for fate in self.fates():
            left = self.run.files.survivor(fate)
            key = (image_of(left), self.stage, self.run.epoch)
            if key not in self._seen:
                self._seen.add(key)
                self.cuts += 1
                self.check(left, fate)
        self._busy = False

    def check(self, left: VirtualFiles, fate: Any) -> None:
        may_be = self.states[self.stage : self.stage + 2]
        if self.stage < len(STAGES) and STAGES[self.stage] is fail_a_sync:
            may_be.append(self.in_doubt)
        where = f"stage {self.stage}, {fate}"
        if left.is_directory(PLACE) and any(name.endswith(".log") for name in left.names(PLACE)):
            report = verify(PLACE, left)
            if report.faults or (report.records and report.epoch < self.run.epoch):
                raise Lost(f"{where}: {report.faults}, epoch {report.epoch}, told {self.run.epoch}")
        try:
            store = Store.recover(PLACE, segment_bytes=SEGMENT_BYTES, files=left)
        except Exception as error:
            raise Lost(f"{where}: {error}") from error
        if store is None:
            found: State = ()
        else:
            found = state_of(store)
            if store.alarms or store.ledger.epoch <= self.run.epoch:
                raise Lost(f"{where}: {store.alarms}, epoch {store.ledger.epoch} after {self.run.epoch}")
            for fragment, version in (key for key, known in store.ledger.commits.items() if known.digest):
                source = store.update_source(fragment, version)
                source.read(0, source.size)
            if claimed_epoch(PLACE, left) != store.ledger.epoch:
                raise Lost(f"{where}: the epoch's file")
        if found not in may_be:
            raise Lost(f"{where}: found {found}, told {may_be}")


def told(spec: RunSpec) -> list[State]:
    """What the folder holds before the first stage, and after each; and after the one that fails, perhaps."""
    run, states = Run(VirtualFiles(), spec), [()]
    for stage in STAGES:
        stage(run)
        assert run.store is not None
        states.append(state_of(run.store))
    return [*states, run.in_doubt]


@pytest.fixture
def states(spec: RunSpec) -> list[State]:
    return told(spec)


def play(run: Run, cutter: Cutter, hook: Callable[[str, Path], bool]) -> None:
    """All stages, with a look at what the run itself holds after each."""
    with_hook(run, hook)
    for number, stage in enumerate(STAGES):
        cutter.stage = number
        stage(run)
        assert run.store is not None
        if state_of(run.store) != cutter.states[number + 1]:
            raise Lost(f"the run itself went another way at stage {number}")
    cutter.stage = len(STAGES)
    cutter.cut()


def with_hook(run: Run, hook: Callable[[str, Path], bool]) -> None:
    """Also of the disk as the next process finds it."""
    killed = run.files.killed

    def followed() -> VirtualFiles:
        run.files = killed()
        with_hook(run, hook)
        return run.files

    run.files.on_call = hook
    run.files.killed = followed  # type: ignore[method-assign]


def test_a_power_cut_at_any_call_leaves_what_was_told(spec: RunSpec, states: list[State]) -> None:
    """With nothing of what was not synced, all of it, writes without names, names without writes, and parts."""
    draw = random.Random(1)
    run = Run(VirtualFiles(), spec)
    cutter = Cutter(run, states, lambda: [*extremes(), Drawn(draw.randrange)])

    def on_call(what: str, path: Path) -> bool:
        cutter.cut()
        return True

    play(run, cutter, on_call)
    assert cutter.cuts > 200


def site(what: str, path: Path) -> str:
    """Which step this is, and of which function of the product."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        inside = "/coordinator/" in code.co_filename and "/tests/" not in code.co_filename
        if inside and not code.co_filename.endswith("/files.py") and code.co_name not in ("sync", "finish"):
            break
        frame = frame.f_back
    place = frame.f_code.co_name if frame is not None else "the caller of the store"
    return f"{what} {re.sub(r'[0-9]+', 'N', path.name)} in {place}"


def sites(spec: RunSpec) -> list[str]:
    run, found = Run(VirtualFiles(), spec), dict[str, None]()

    def on_call(what: str, path: Path) -> bool:
        if what in ("sync", "rename", "forget"):
            found[site(what, path)] = None
        return True

    with_hook(run, on_call)
    for stage in STAGES:
        stage(run)
    return list(found)


def found_out_without(left_out: str, spec: RunSpec, states: list[State]) -> str | None:
    """Why the run without this step is found out; None if it is not."""
    run = Run(VirtualFiles(), spec)
    cutter = Cutter(run, states, extremes, armed=False)

    def on_call(what: str, path: Path) -> bool:
        cutter.cut()
        if what in ("sync", "rename", "forget") and site(what, path) == left_out:
            cutter.armed = True
            return False
        return True

    try:
        play(run, cutter, on_call)
    except (Lost, AssertionError, StorageError, OSError) as error:
        return str(error) or type(error).__name__
    return None


def test_every_sync_and_rename_that_is_left_out_is_found_out(spec: RunSpec, states: list[State]) -> None:
    steps = sites(spec)
    needless = [step for step in steps if found_out_without(step, spec, states) is None]
    assert not needless, "these can be left out, and no test notices"
    assert len(steps) > 15, "a part of the run is missing"
