"""The real store over a disk that forgets what was not synced (protocol O, P, S).

A representative run (begin, deltas, commits, new segments, snapshots, pruning, clean and unclean restarts, an adoption)
is cut at every call that it makes of the disk. What was told before the cut is there after it. Then every sync, rename
and directory sync is left out once: each time that has to show.
"""

import random
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import stored_runs
from power_cuts import extremes, image_of
from slow_cases import mostly_slow
from virtual_files import Drawn, VirtualFiles

from farloop.algo.spec import RunSpec
from farloop.coordinator.errors import StorageError, StorageFailed
from farloop.coordinator.storage.journal import claimed_epoch
from farloop.coordinator.storage.store import Cut, Store
from farloop.coordinator.storage.verify import verify
from farloop.quant.digest import digest

PLACE = Path("/state")
SEGMENT_BYTES = 12 << 10
A, B = stored_runs.NODES

State = tuple[Any, ...]
"""What a start finds, in values that can be compared; empty for no run."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything happens within a few commits."""
    stored_runs.shorten(monkeypatch, snapshot_every=2, history=1)


def state_of(store: Store) -> State:
    return (
        tuple(
            (b.version, digest(b.anchor), digest(b.target), *(digest(b.outer[name]) for name in sorted(b.outer)))
            for b in store.buffers
        ),
        tuple(sorted(str(blob) for blob in store.ledger.inputs)),
        tuple(f for f, found in sorted(store.fetched.items()) if found.anchor.version > store.ledger.versions[f]),
        store.ledger.history > 0,
    )


class Run:
    """One coordinator after another over one disk. `on_call` may look at the disk, or leave a step of it out."""

    store: Store
    epoch = 0
    """The newest that any node was told."""
    snapshot: Cut | None = None
    in_doubt: State = ()
    """What the folder may hold after a stage whose write failed."""

    def __init__(self, spec: RunSpec, on_call: Callable[[str, Path], bool] = lambda what, path: True) -> None:
        self.spec, self.on_call, self.files = spec, on_call, VirtualFiles()
        self.files.on_call = on_call

    def began(self) -> None:
        self.store = stored_runs.begun(PLACE, self.spec, segment_bytes=SEGMENT_BYTES, files=self.files)
        self.epoch = self.store.ledger.epoch

    def spool(self, fragment: int, node: Any, *, durable: bool = True) -> None:
        stored_runs.spool(self.store, fragment, node, durable=durable)

    def commit(self, fragment: int) -> None:
        stored_runs.commit(self.store, fragment, [b for b in self.store.ledger.inputs if b.fragment == fragment])

    def cut(self) -> None:
        """What the thread of the snapshots does, step by step, between other steps of the disk."""
        inputs = [blob for blob in self.store.ledger.inputs if blob.fragment == 0]
        stored_runs.commit(self.store, 0, inputs, snapshots=False)
        self.snapshot = self.store.next_snapshot()
        assert self.snapshot is not None and self.store.next_snapshot() is None

    def save(self) -> None:
        assert self.snapshot is not None
        self.store.save(self.snapshot)

    def saved(self) -> None:
        assert self.snapshot is not None
        self.store.saved(self.snapshot)

    def close(self, *, unsynced: bool = False) -> None:
        """A clean end makes all durable that was appended."""
        if unsynced:
            self.spool(1, A, durable=False)
        self.store.close()

    def restart(self) -> None:
        self.store = stored_runs.recovered(PLACE, segment_bytes=SEGMENT_BYTES, files=self.files)
        assert not self.store.alarms
        self.epoch = self.store.ledger.epoch

    def killed(self) -> None:
        """The process dies and the machine does not: what was written is in the page cache."""
        self.files = self.files.killed()
        self.files.on_call = self.on_call
        self.restart()

    def kill_with_an_unsynced_delta(self) -> None:
        self.spool(0, B, durable=False)
        self.killed()

    def fail_a_sync(self) -> None:
        """The kernel says that it could not write, calls the pages clean and keeps them; a supervisor starts again."""
        self.files.failing_sync = lambda path: path.name.startswith("journal")
        with pytest.raises(StorageFailed):
            self.spool(1, B)
        self.in_doubt = state_of(self.store)
        self.store.close()
        self.killed()

    def fetch(self, fragment: int) -> None:
        stored_runs.fetch(self.store, fragment)

    def adopt(self) -> None:
        stored_runs.adopt(self.store)
        self.epoch = self.store.ledger.epoch


Stage = Callable[[Run], None]


def window(fragment: int) -> list[Stage]:
    return [
        lambda run: run.spool(fragment, A), lambda run: run.spool(fragment, B), lambda run: run.commit(fragment)
    ]  # fmt: skip


ADOPTION: list[Stage] = [
    lambda run: run.fetch(0), lambda run: run.fetch(1), Run.adopt, Run.close, Run.restart
]  # fmt: skip
STAGES: list[Stage] = [
    Run.began,
    *window(0), *window(1), *window(0), *window(1), *window(0),
    lambda run: run.spool(0, A), Run.cut, *window(1), lambda run: run.spool(0, B), Run.save, lambda run: run.commit(0),
    Run.saved, lambda run: run.spool(0, A), Run.cut, Run.save, *window(1),
    Run.kill_with_an_unsynced_delta,
    lambda run: run.spool(0, A), lambda run: run.commit(0), *window(1), *window(1),
    partial(Run.close, unsynced=True), Run.restart,
    Run.fail_a_sync,
    *window(0), *window(0), *window(1), *window(1), *ADOPTION,
]  # fmt: skip


class Lost(AssertionError):
    """Something that was told is not there after a cut."""


class Cutter:
    """Cuts the power at every call, and starts on what is left; the run itself goes on as if nothing had been."""

    def __init__(
        self, spec: RunSpec, states: list[State], fates: Callable[[], list[Any]], leave_out: str | None = None
    ) -> None:
        self.run = Run(spec, self.on_call)
        self.states, self.in_doubt, self.fates, self.leave_out = states[:-1], states[-1], fates, leave_out
        self.armed = leave_out is None
        self.stage = self.cuts = 0
        self._seen: set[tuple[int, int, int]] = set()
        self._busy = False

    def on_call(self, what: str, path: Path) -> bool:
        self.cut()
        if self.leave_out is not None and what in STEPS and site(what, path) == self.leave_out:
            self.armed = True
            return False
        return True

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
        if self.stage < len(STAGES) and STAGES[self.stage] is Run.fail_a_sync:
            may_be.append(self.in_doubt)
        where = f"stage {self.stage}, {fate}"
        if left.is_directory(PLACE) and any(name.endswith(".log") for name in left.names(PLACE)):
            report = verify(PLACE, left)
            if report.faults or (report.records and report.epoch < self.run.epoch):
                raise Lost(f"{where}: {report.faults}, epoch {report.epoch}, told {self.run.epoch}")
        try:
            adopt = self.stage >= len(STAGES) - len(ADOPTION)
            store = Store.recover(PLACE, segment_bytes=SEGMENT_BYTES, files=left, adopt=adopt)
        except Exception as error:
            raise Lost(f"{where}: {error}") from error
        found: State = () if store is None else state_of(store)
        if store is not None:
            if store.alarms or store.ledger.epoch <= self.run.epoch:
                raise Lost(f"{where}: {store.alarms}, epoch {store.ledger.epoch} after {self.run.epoch}")
            for fragment, version in (key for key, known in store.ledger.commits.items() if known.digest):
                source = store.update_source(fragment, version)
                source.read(0, source.size)
            if claimed_epoch(PLACE, left) != store.ledger.epoch:
                raise Lost(f"{where}: the epoch's file")
        if found not in may_be:
            raise Lost(f"{where}: found {found}, told {may_be}")

    def play(self) -> None:
        """All stages, with a look at what the run itself holds after each."""
        for number, stage in enumerate(STAGES):
            self.stage = number
            stage(self.run)
            if state_of(self.run.store) != self.states[number + 1]:
                raise Lost(f"the run itself went another way at stage {number}")
        self.stage = len(STAGES)
        self.cut()


@pytest.fixture
def states(spec: RunSpec) -> list[State]:
    """What the folder holds before the first stage, and after each; and after the one that fails, perhaps."""
    run, states = Run(spec), list[State]([()])
    for stage in STAGES:
        stage(run)
        states.append(state_of(run.store))
    return [*states, run.in_doubt]


@pytest.mark.parametrize("fates", mostly_slow([2, 6], 2))
def test_a_power_cut_at_any_call_leaves_what_was_told(spec: RunSpec, states: list[State], fates: int) -> None:
    """With nothing of what was not synced, all of it, writes without names, names without writes, and parts: of these
    six two that are drawn for each call, and in `make test-slow` all."""
    draw = random.Random(1)
    cutter = Cutter(spec, states, lambda: draw.sample([*extremes(), Drawn(draw.randrange)], fates))
    cutter.play()
    assert cutter.cuts > 200


STEPS = ("sync", "rename", "forget")


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


def found_out_without(step: str, spec: RunSpec, states: list[State]) -> bool:
    try:
        Cutter(spec, states, extremes, leave_out=step).play()
    except (Lost, AssertionError, StorageError, OSError):
        return True
    return False


@pytest.mark.slow
def test_every_sync_and_rename_that_is_left_out_is_found_out(spec: RunSpec, states: list[State]) -> None:
    steps = dict[str, None]()

    def on_call(what: str, path: Path) -> bool:
        if what in STEPS:
            steps[site(what, path)] = None
        return True

    run = Run(spec, on_call)
    for stage in STAGES:
        stage(run)
    needless = [step for step in steps if not found_out_without(step, spec, states)]
    assert not needless, "these can be left out, and no test notices"
    assert len(steps) > 15, "a part of the run is missing"
