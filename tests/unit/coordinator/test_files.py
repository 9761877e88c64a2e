"""Writes that survive a power cut, as far as one process can show it: order of calls, and what a failure leaves."""

import errno
import fcntl
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
from farloop.runtime.system import DIRECT_BYTES


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

    monkeypatch.setattr(files.OsFile, "sync", lambda file: calls.append(f"sync {file.path.name}"))
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


@pytest.mark.parametrize(
    ("offset", "how"),
    [(0, "direct"), (1, "direct"), (4095, "half a write"), (4096, "odd write"), (12_345, "odd write"), (1, "no flag"),
     (12_345, "no write")],
)  # fmt: skip
def test_large_parts_are_written_past_the_page_cache_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, how: str
) -> None:
    """From any place in memory to any place in a file, also where the file system cannot do it."""
    pwrite, setfl, direct = os.pwrite, fcntl.fcntl, list[int]()

    def write(fd: int, data: memoryview, at: int) -> int:
        if how == "no write":
            raise OSError(errno.EINVAL, "Invalid argument")
        size = {"half a write": 8192, "odd write": 5000}.get(how, len(data))
        direct.append(pwrite(fd, data[:size] if how != "odd write" else data[:4096], at))
        return min(size, len(data))

    def flag(fd: int, what: int, value: int = 0) -> int:
        if how == "no flag" and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return setfl(fd, what, value)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(fcntl, "fcntl", flag)
    large = os.urandom(5 * DIRECT_BYTES + 5 * 4096 + 77)  # more than one piece
    parts = [b"header", memoryview(bytearray(large))[3:], b"between", large, b"", b"end"]
    expected = b"".join(bytes(part) for part in parts)
    file = DISK.create(tmp_path / "file")
    file.allocate(0, offset + len(expected) + 100)
    file.write([b"x" * offset], 0)
    file.write(parts, offset)
    file.write([b"behind"], offset + len(expected))
    file.sync()
    found = (tmp_path / "file").read_bytes()
    assert found[: offset + len(expected) + 6] == b"x" * offset + expected + b"behind"
    assert not any(found[offset + len(expected) + 6 :]), "nor anything beyond"
    file.close()
    assert bool(direct) == (how in ("direct", "half a write", "odd write")) or not has_direct_writes(tmp_path)


def has_direct_writes(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_direct_write_that_a_disk_refuses_is_storage_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DISK.create(tmp_path / "file")
    monkeypatch.setattr(os, "pwrite", refuse(errno.EIO))
    if has_direct_writes(tmp_path):
        with pytest.raises(StorageFailed, match="write: "):
            file.write([bytes(DIRECT_BYTES * 2)], 0)
    file.close()


def test_allocated_room_reads_as_zeros_and_has_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with opened(path) as fd:
        os.write(fd, b"abc")
        files.OsFile(path, fd).allocate(3, 100_000)
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
            files.OsFile(path, fd).allocate(3, 1000)
    assert getattr(caught.value, "needed_bytes", 1000) == 1000
    assert path.read_bytes() == b"abc"


def test_where_nothing_can_be_allocated_free_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    monkeypatch.setattr(os, "posix_fallocate", refuse(errno.EOPNOTSUPP))
    with opened(path) as fd:
        files.OsFile(path, fd).allocate(0, 1)
        with pytest.raises(DiskFull):
            files.OsFile(path, fd).allocate(0, 1 << 60)
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY, f_bavail=1, f_frsize=4096))
        with pytest.raises(ReadOnly):
            files.OsFile(path, fd).allocate(0, 1)
