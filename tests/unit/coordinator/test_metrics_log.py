"""Covers `coordinator/observe/event_log.py`: lines that never stop a run, in files that never grow too large."""

import errno
import json
import logging
import os
import tracemalloc
from pathlib import Path

import pytest

from farloop.coordinator.observe.event_log import MetricsLog, files, last_time
from farloop.monitoring.status import NodeEvent


def line(t: float, name: str = "a") -> NodeEvent:
    return {"event": "node", "t": t, "name": name, "state": "training", "reason": ""}


LINE_BYTES = len(json.dumps(line(0.0))) + 1


def times(path: Path) -> list[float]:
    """Of all lines in all parts."""
    return [json.loads(text)["t"] for part in files(path) for text in part.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_file_that_has_grown_is_put_aside_and_the_last_few_stay(path: Path) -> None:
    written = MetricsLog(path, part_bytes=2 * LINE_BYTES, keep=3)
    for number in range(9):
        written.write(line(float(number)))
    written.close()
    assert [part.name for part in files(path)] == [
        *(f"metrics-00000{number}.jsonl" for number in (1, 2, 3)),
        "metrics.jsonl",
    ]
    assert times(path) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    again = MetricsLog(path, part_bytes=2 * LINE_BYTES, keep=3)
    for t in (9.0, 10.0):
        again.write(line(t))
    again.close()
    assert times(path) == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], "the numbers go on"


def test_lines_on_a_full_disk_are_dropped_whole_and_said_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    free = LINE_BYTES // 2
    real = os.pwrite

    def half(fd: int, data: bytes, offset: int) -> int:
        nonlocal free
        if not free:
            raise OSError(errno.ENOSPC, "No space left on device")
        data, free = data[:free], 0
        return real(fd, data, offset)

    written = MetricsLog(path)
    written.write(line(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half)
        for t in (2.0, 3.0, 4.0):
            written.write(line(t))
    assert written.dropped == 3
    written.write(line(5.0))
    written.close()
    assert times(path) == [1.0, 5.0]
    dropped, again = caplog.messages
    assert dropped.startswith("lines dropped") and again == f"lines written again path={path} dropped=3"


@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_file_that_cannot_be_opened_or_put_aside_stops_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    written = MetricsLog(path, part_bytes=LINE_BYTES)
    if call == "replace":
        written.write(line(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        written.write(line(2.0))
    assert written.dropped == 1
    written.write(line(3.0))
    written.close()
    assert times(path) == ([3.0] if call == "open" else [1.0, 3.0])


def test_the_end_of_a_large_file_is_read_and_no_more(path: Path) -> None:
    size = 256 << 20
    with path.open("wb") as file:
        file.truncate(size)  # a hole: no bytes on the disk
        file.seek(size)
        file.write(b"\n" + json.dumps(line(77.5)).encode() + b"\n" + b'{"event": "node", "t": 9')
    tracemalloc.start()
    try:
        assert last_time(path) == 77.5
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_the_time_goes_on_from_what_was_put_aside(path: Path) -> None:
    assert last_time(path) == 0.0
    written = MetricsLog(path, part_bytes=LINE_BYTES)
    for t in (1.0, 2.0):
        written.write(line(t))
    written.close()
    path.write_text('{"event": "no')
    assert last_time(path) == 1.0
    for broken in ("[]", "7", '{"t": null}', '{"t": "x"}'):
        path.write_text(broken + "\n")
        assert last_time(path) == 1.0


def test_an_unreadable_file_is_no_reason_not_to_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    path.write_text(json.dumps(line(1.0)) + "\n")
    monkeypatch.setattr(Path, "open", refuse)
    assert last_time(path) == 0.0
