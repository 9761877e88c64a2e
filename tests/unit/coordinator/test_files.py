"""Writes that survive a power cut, as far as one process can show it: order of calls, and what a failure leaves."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from disk_faults import refuse

from farloop.coordinator.errors import DiskFull, NoRoom, ReadOnly, StorageFailed
from farloop.coordinator.storage import files
from farloop.coordinator.storage.files import DISK


@contextmanager
def opened(path: Path, flags: int = os.O_RDWR | os.O_CREAT | os.O_TRUNC) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def test_what_replaces_or_deletes_is_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, replace = list[str](), os.replace

    def record_replace(source: Path, target: Path) -> None:
        calls.append(f"{source.name} -> {target.name}")
        replace(source, target)

    monkeypatch.setattr(files, "sync", lambda fd, path: calls.append(f"sync {path.name}"))
    monkeypatch.setattr(os, "replace", record_replace)
    path = tmp_path / "state"
    path.write_text("old")
    with DISK.replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    DISK.delete(path)
    assert not path.exists()
    assert calls == ["sync state.tmp", "state.tmp -> state", f"sync {tmp_path.name}", f"sync {tmp_path.name}"]
    with pytest.raises(StorageFailed, match="delete: No such file"):
        DISK.delete(path)


def test_a_replacement_that_fails_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), DISK.replacing(path) as temporary:
        temporary.write_text("half")
        _ = 1 // 0
    monkeypatch.setattr(os, "replace", refuse())
    with pytest.raises(StorageFailed, match="rename"), DISK.replacing(path) as temporary:
        temporary.write_text("new")
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("state", "old")]
    monkeypatch.setattr(Path, "unlink", refuse(errno.EROFS))
    with pytest.raises(ReadOnly), DISK.replacing(path):  # although the temporary file cannot be deleted
        raise ReadOnly(tmp_path)


def test_what_the_disk_refuses_is_storage_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.touch()
    with opened(path, os.O_RDONLY) as fd, pytest.raises(StorageFailed, match="write"):
        files.write_all(fd, path, [b"x"], 0)
    with pytest.raises(StorageFailed):
        DISK.make_directory(path)
    monkeypatch.setattr(os, "fsync", refuse())
    with pytest.raises(StorageFailed, match="sync: Input/output error"):
        DISK.create(tmp_path / "other").sync()


def test_short_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev, path = os.pwritev, tmp_path / "file"
    for most in range(1, 10):
        monkeypatch.setattr(os, "pwritev", lambda fd, views, at, most=most: pwritev(fd, [b"".join(views)[:most]], at))
        with opened(path) as fd:
            files.write_all(fd, path, (b"abc", b"", memoryview(bytearray(b"defgh")), b"i"), 2)
        assert path.read_bytes() == b"\0\0abcdefghi"


def test_allocated_room_reads_as_zeros_and_has_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with opened(path) as fd:
        os.write(fd, b"abc")
        files.allocate(fd, path, 3, 100_000)
        assert path.read_bytes() == b"abc" + bytes(100_000)
        assert os.fstat(fd).st_blocks * 512 >= 100_000


@pytest.mark.parametrize(
    ("code", "error"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EROFS, ReadOnly)]
)
def test_no_room_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[NoRoom]
) -> None:
    path = tmp_path / "file"

    def half(fd: int, offset: int, nbytes: int) -> None:
        if code != errno.EROFS:
            os.ftruncate(fd, offset + nbytes // 2)
        refuse(code)()

    monkeypatch.setattr(os, "posix_fallocate", half)
    with opened(path) as fd:
        os.write(fd, b"abc")
        with pytest.raises(error) as caught:
            files.allocate(fd, path, 3, 1000)
    assert getattr(caught.value, "needed_bytes", 1000) == 1000
    assert path.read_bytes() == b"abc"


def test_where_nothing_can_be_allocated_free_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
    with opened(path) as fd:
        files.allocate(fd, path, 0, 1)
        with pytest.raises(DiskFull):
            files.allocate(fd, path, 0, 1 << 60)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY, f_bavail=1, f_frsize=4096))
        with pytest.raises(ReadOnly):
            files.allocate(fd, path, 0, 1)
