"""The coordinator of a simulated run that may die, and the disk of its machine."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor
from virtual_files import AllOrNothing, Drawn, VirtualFiles

from farloop.algo.spec import Revision, RunSpec
from farloop.coordinator.change_terms import revision_asked_for
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.segment import Entry, Segments, scan_segment, segment_numbers, segment_path
from farloop.coordinator.storage.store import Store
from farloop.sim.world import SimulatedCoordinator

FOLDER = Path("/state")
_KIND_AT = 4  # where a record in a segment has its kind (`storage/segment.py`)
_BOOKKEEPING = (rec.LedgerSaved, rec.SnapshotTaken)  # records that say nothing new of the run


class StateDisk:
    """The disk of the coordinator's machine over all starts: what survives a crash, and what is done to it."""

    def __init__(self, spec: RunSpec, anchors: Sequence[Tensor], rng: random.Random, *, copies: int = 0) -> None:
        """`copies`: how many commits back a copy may be restored."""
        self.spec, self.anchors, self._rng = spec, anchors, rng
        self.writes = -1
        """Records that were written, or were to be, over all starts; the first one, the run's start, is number 0."""
        self.at_write: list[Callable[[int, bool], None]] = []
        """Told of every record: its number, and whether it is durable by now. May raise PowerCut."""
        self.alarms = 0  # commits whose optimizer state came out different when a restart repeated them
        self._undurable: list[int] = []  # numbers of the records that were written since the last sync
        self._copies: deque[VirtualFiles] = deque(maxlen=copies)  # the disk just before each of the last commits
        self._pruned: dict[int, list[rec.Record]] = {}  # records of the segments that were deleted
        self._full = self._read_only = False
        self._room: int | None = None
        self._use(VirtualFiles())

    def open(self, *, rewind: bool = False) -> Store:
        """Begin the run, or go on with what the disk holds. Raises as `Store.recover`."""
        store = Store.recover(FOLDER, rewind=rewind, files=self.files)
        if store is None:
            return Store.create(FOLDER, self.spec, self.anchors, files=self.files)
        self.alarms += sum(what.startswith("optimizer of fragment") for what in store.alarms)
        return store

    def reopened(self) -> Store | None:
        """What one more start would find, on a disk without faults. Ends the use of this one."""
        return Store.recover(FOLDER, files=self.files.killed())

    def records(self) -> list[rec.Record]:
        """The journal, with what was pruned and without what only helps a restart."""
        numbers = segment_numbers(FOLDER, self.files) if self.files.is_directory(FOLDER) else set()
        if not numbers:
            return []
        pruned = [record for number in range(min(numbers)) for record in self._pruned[number]]
        items = Segments(FOLDER, self.files).items()
        found = [*pruned, *(item.record for item in items if isinstance(item, Entry))]
        return [record for record in found if not isinstance(record, _BOOKKEEPING)]

    @property
    def num_bytes(self) -> int:
        return self.files.num_bytes

    # --- What is done to it

    def set_space(self, *, full: bool | None = None, read_only: bool | None = None) -> None:
        """Nothing more goes onto it, or everything does."""
        self._full = self._full if full is None else full
        self._read_only = self._read_only if read_only is None else read_only
        self._use(self.files)

    def set_room(self, room: int | None) -> None:
        """No file grows by more than this; None for any size."""
        self._room = room
        self._use(self.files)

    def power_cut(self) -> None:
        """What was not synced is lost, or not."""
        self._use(self.files.power_cut(Drawn(self._rng.randrange)))

    def restore(self, commits_ago: int) -> list[rec.WindowCommitted]:
        """Put back a copy that was taken before the last `commits_ago` commits; returns those. The process is gone."""
        if commits_ago == 0 or not self._copies:
            return []
        before, back = self.records(), min(commits_ago, len(self._copies))
        for _ in range(back):
            copy = self._copies.pop()
        self._use(copy)
        return [record for record in before[len(self.records()) :] if isinstance(record, rec.WindowCommitted)]

    def _use(self, files: VirtualFiles) -> None:
        self.files, self._undurable = files, []
        files.full, files.exhausted, files.read_only, files.room = self._full, self._full, self._read_only, self._room
        files.on_write, files.after_sync, files.on_call = self._on_write, self._after_sync, self._on_call

    def _on_write(self, path: Path, data: bytes) -> None:
        if path.suffix != ".log":
            return
        kind = data[_KIND_AT]
        if kind in (rec.KINDS[cls] for cls in _BOOKKEEPING):
            return
        if kind == rec.KINDS[rec.WindowCommitted] and self._copies.maxlen:
            self._copies.append(self.files.survivor(AllOrNothing(writes=True, names=True)))
        self.writes += 1
        self._undurable.append(self.writes)
        for look in self.at_write:
            look(self.writes, False)

    def _after_sync(self, path: Path) -> None:
        if path.suffix == ".log":
            durable, self._undurable = self._undurable, []
            for write in durable:
                for look in self.at_write:
                    look(write, True)

    def _on_call(self, what: str, path: Path) -> bool:
        if what == "unlink" and path.suffix == ".log":
            number = next(n for n in segment_numbers(FOLDER, self.files) if segment_path(FOLDER, n) == path)
            self._pruned[number] = [entry.record for entry in scan_segment(path, number, self.files).entries]
        return True


class MortalCoordinator(SimulatedCoordinator):
    """One start of the coordinator, which may die, and be given other terms."""

    def change_terms(self, given: Mapping[str, str]) -> Revision | str:
        """What the admin socket answers: the revision, or why there is none."""
        try:
            revision = revision_asked_for(self.machine, given)
        except ValueError as error:
            return str(error)
        self.executor.happened(ev.TermsGiven(revision=revision))
        return revision

    def crash(self) -> None:
        """Die now, perhaps in the middle of a job of the disk."""
        self.executor.stop()
        self.storage.interrupt(finished=self.rng.random() < 0.5)
        self.process.kill()
