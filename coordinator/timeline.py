"""`metrics.jsonl`: what happened in a run, a line per event, for reports. Never a reason that the run stops or waits.

The newest lines are in the file of that name. One that has grown to `PART_BYTES` is put aside under a number, as
`metrics-000003.jsonl`, higher numbers being later; of those the last `KEEP` stay. A line that cannot be written, on a
full disk, is dropped whole and counted.
"""

import json
import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from farloop.monitoring import plain_json
from farloop.monitoring.decisions import DecisionEvent
from farloop.monitoring.status import MetricsEvent

_log = logging.getLogger(__name__)

PART_BYTES = 64 << 20
KEEP = 16
"""Parts put aside, 1 GiB: about two weeks of four nodes, each with a line of 200 bytes a second."""

_END_BYTES = 1 << 20
"""How much is read to find the last line."""


class Timeline:
    """The file of one run, to be written by one process at a time. No method raises."""

    def __init__(self, path: Path, *, part_bytes: int = PART_BYTES, keep: int = KEEP) -> None:
        """Lines are appended to what is there."""
        self.dropped = 0
        """Lines that were not written since this start."""
        self._path, self._part_bytes, self._keep = path, part_bytes, keep
        self._fd: int | None = None
        self._size = 0
        """Bytes of whole lines. What is behind them, if anything, was cut short."""
        self._failing_since: int | None = None
        """How many were dropped when the lines that are being dropped began to be."""

    def write(self, event: MetricsEvent | DecisionEvent) -> None:
        """Append a line, or drop it."""
        line = plain_json.dumps(event).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            self._failed(error)
            return
        if self._failing_since is not None:
            _log.info("lines are written again path=%s dropped=%d", self._path, self.dropped - self._failing_since)
            self._failing_since = None

    def close(self) -> None:
        """Close the file; the next line opens it again."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            self._open()
        if self._size >= self._part_bytes:
            self._put_aside()
            self._open()
        assert self._fd is not None
        written = os.pwrite(self._fd, line, self._size)
        if written < len(line):
            # The rest did not fit either, or would not have been asked for: no half of it stays.
            os.ftruncate(self._fd, self._size)
            raise OSError(0, f"{len(line)} bytes did not fit")
        self._size += len(line)

    def _open(self) -> None:
        """Behind a line that a crash cut short begins another."""
        self.close()
        fd = self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = self._size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            self._size += os.pwrite(fd, b"\n", size)

    def _put_aside(self) -> None:
        self.close()
        number = max(_parts(self._path), default=-1) + 1
        os.replace(self._path, _part_path(self._path, number))
        for old, path in _parts(self._path).items():
            if old <= number - self._keep:
                path.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> None:
        if self._failing_since is None:
            self._failing_since = self.dropped
            _log.warning("lines are dropped path=%s why=%r", self._path, error.strerror)
        self.dropped += 1
        self.close()  # a file that is gone is begun anew with the next line


def files(path: Path) -> list[Path]:
    """All files that hold a run's lines, in the order of time; `path` is that of the newest, and may be a link."""
    path = path.resolve()
    parts = _parts(path)
    return [parts[number] for number in sorted(parts)] + ([path] if path.exists() else [])


def last_time(path: Path) -> float:
    """`t` of the last whole line; 0 where there is none. Reads no more than the ends of files."""
    for part in reversed(files(path)):
        try:
            with part.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
                lines = file.read(_END_BYTES).splitlines()
        except OSError as error:
            _log.warning("the run's clock may begin anew path=%s why=%r", part, error.strerror)
            continue
        for line in reversed(lines):
            try:
                return float(json.loads(line)["t"])
            except (ValueError, KeyError, TypeError):
                continue  # a line that a crash cut short
    return 0.0


def _part_path(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number:06d}{path.suffix}")


def _parts(path: Path) -> dict[int, Path]:
    """What was put aside, by number. Raises OSError: who took none for an answer would write over the oldest."""
    name = re.compile(re.escape(path.stem) + r"-(\d{6,})" + re.escape(path.suffix))
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return {}
    return {int(match[1]): path.with_name(other) for other in names if (match := name.fullmatch(other))}
