"""A standby's state in memory: takes records as they arrive and repeats each commit: leading then reads nothing."""

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from farloop.coordinator.decide import records as rec
from farloop.coordinator.errors import JournalCorrupt, StateMismatch, StorageError
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.recovery import Place, Recovery, as_they_are, recovered
from farloop.coordinator.storage.segment import (
    SEGMENT_HEADER_BYTES,
    Entry,
    Scan,
    Segments,
    read_records,
    read_segment_header,
    segment_numbers,
    segment_path,
)

_log = logging.getLogger(__name__)

FOLLOW_S: Final = 0.05  # between two looks for new records
AGAIN_S: Final = 5.0  # after a fault, before the state is read again


class Adopted(Exception):
    """The state took versions from nodes: it has to be read anew."""


class Follower:
    """The state of a folder that another process appends to. One thread."""

    def __init__(self, directory: Path, files: Files = DISK, place: Place = as_they_are) -> None:
        """Read it, as a start does. Raises StorageError, OSError."""
        self._directory, self._files, self._place = directory, files, place
        segments = Segments(directory, files)
        self.recovery: Recovery = recovered(segments, place)
        self.number, last = segments.numbers[-1], segments.last
        self._salt, self._sequence, self._end = last.salt, last.next_sequence, last.end

    @property
    def last(self) -> Scan:
        """Where the journal goes on: behind all that was taken."""
        path = segment_path(self._directory, self.number)
        identity = self._files.identity(path)
        return Scan(
            path=path, salt=self._salt, first_sequence=self._sequence, items=(), next_sequence=self._sequence,
            end=self._end, torn_bytes=0, size=self._end if identity is None else identity[2],
        )  # fmt: skip

    def follow(self) -> int:
        """Take what was appended since. Returns how many records. Raises StorageError, OSError, Adopted."""
        taken = 0
        while True:
            path = segment_path(self._directory, self.number)
            with closing(self._files.open(path)) as opened:
                file, size = opened.reader(), opened.identity()[2]
                file.seek(self._end)
                for entry in read_records(
                    file, path, self.number, self._sequence, None, self._salt, size, offset=self._end
                ):
                    self._take(entry)
                    taken += 1
            if self.number + 1 not in segment_numbers(self._directory, self._files):
                return taken
            self.number += 1
            path = segment_path(self._directory, self.number)
            with closing(self._files.open(path)) as opened:
                self._salt, self._sequence = read_segment_header(opened.reader(), path, self.number)
            self._end = SEGMENT_HEADER_BYTES

    def _take(self, entry: Entry) -> None:
        recovery, record = self.recovery, entry.record
        if isinstance(record, rec.Adopted | rec.Rewound):
            raise Adopted
        recovery.take(entry)
        match record:
            case rec.WindowCommitted(fragment=fragment):
                buffers = recovery.repeat_next(fragment)
                recovery.buffers[fragment] = self._place(buffers)
            case rec.SnapshotTaken(fragment=fragment, version=version):
                recovery.restart_from[fragment] = (recovery.restart_from[fragment][1], version)
                recovery.attachments.forget(recovery.ledger, [older for older, _ in recovery.restart_from])
            case _:
                pass
        self._sequence, self._end = entry.sequence + 1, entry.attachment.offset + entry.attachment.size


class Following:
    """A follower in a thread of its own, of a folder that may become another's copy at any time."""

    def __init__(self, directory: Path, place: Place, whole: Callable[[], int]) -> None:
        """`whole`: the number of the copy that the folder has whole; 0 for none."""
        self._directory, self._place, self._whole = directory, place, whole
        self._follower: Follower | None = None
        self._of = 0  # the copy that it follows
        self.unreadable = ""
        """Why no start could read the folder, while that is so: such a standby must not lead. Any thread."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="follow", daemon=True)
        self._thread.start()

    @property
    def in_memory(self) -> bool:
        """Whether it has the state. Any thread."""
        return self._follower is not None

    def stop(self) -> Follower | None:
        """End the thread. The follower, with all that the folder has, if it could follow."""
        self._over.set()
        self._thread.join()
        if self._follower is not None and self._of == self._whole() and self._step():
            return self._follower
        return None

    def _run(self) -> None:
        pause_s = FOLLOW_S
        while not self._over.wait(pause_s):
            pause_s = FOLLOW_S if self._step() else AGAIN_S

    def _step(self) -> bool:
        """Take what is new, or begin; whether that went well."""
        whole = self._whole()
        try:
            if whole == 0 or whole != self._of:
                self._follower, self._of = None, whole
            if whole and self._follower is None:
                self._follower = Follower(self._directory, DISK, self._place)
                _log.info("following versions=%s", ",".join(map(str, self._follower.recovery.ledger.versions)))
            if self._follower is not None:
                self._follower.follow()
            self.unreadable = ""
        except Adopted:
            self._follower = None
        except (StorageError, OSError) as error:
            self._follower = None
            if whole == self._whole():
                self.unreadable = str(error) if isinstance(error, JournalCorrupt | StateMismatch) else ""
                note = "it does not take over" if self.unreadable else "taking over would read the folder"
                _log.warning("not followed why=%r note=%r", str(error), note)
                return False
        return True
