"""Writes that survive a power cut, as far as one process can show it: order of calls, and what a failure leaves."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from farloop.coordinator.errors import DiskFull, ReadOnly, StorageFailed
from farloop.coordinator.storage import files
from farloop.coordinator.storage.files import DISK


def failing(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def test_a_replacement_is_synced_renamed_and_its_directory_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    replace = os.replace

    def record_sync(fd: int, path: Path) -> None:
        calls.append(f"sync {path.name}")

    def record_replace(source: Path, target: Path) -> None:
        calls.append(f"{source.name} -> {target.name}")
        replace(source, target)

    monkeypatch.setattr(files, "sync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    path = tmp_path / "state"
    path.write_text("old")
    with DISK.replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert calls == ["sync state.tmp", "state.tmp -> state", f"sync {tmp_path.name}"]


def test_what_fails_before_the_rename_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), DISK.replacing(path) as temporary:
        temporary.write_text("half")
        _ = 1 // 0
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("state", "old")]


def test_a_refused_rename_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise failing(errno.EIO)

    path = tmp_path / "state"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageFailed, match="rename"), DISK.replacing(path) as temporary:
        temporary.write_text("new")
    assert [found.name for found in tmp_path.iterdir()] == ["state"]


def test_a_failed_sync_is_storage_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise failing(errno.EIO)

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StorageFailed, match="sync: Input/output error"):
        DISK.create(tmp_path / "file").sync()


def test_short_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwritev = os.pwritev
    path = tmp_path / "file"
    parts = (b"abc", b"", memoryview(bytearray(b"defgh")), b"i")
    for most in range(1, 10):
        monkeypatch.setattr(os, "pwritev", lambda fd, views, at, most=most: pwritev(fd, [b"".join(views)[:most]], at))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        files.write_all(fd, path, parts, 2)
        os.close(fd)
        assert path.read_bytes() == b"\0\0abcdefghi"


def test_a_write_that_is_refused_is_storage_failed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(StorageFailed, match="write"):
        files.write_all(fd, path, [b"x"], 0)
    os.close(fd)


def test_allocated_room_reads_as_zeros_and_has_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"abc")
    files.allocate(fd, path, 3, 100_000)
    assert path.read_bytes() == b"abc" + bytes(100_000)
    assert os.fstat(fd).st_blocks * 512 >= 100_000
    os.close(fd)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def half(fd: int, offset: int, nbytes: int) -> None:
        os.ftruncate(fd, offset + nbytes // 2)
        raise failing(code)

    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"abc")
    monkeypatch.setattr(os, "posix_fallocate", half)
    with pytest.raises(DiskFull) as caught:
        files.allocate(fd, path, 3, 1000)
    os.close(fd)
    assert caught.value.needed_bytes == 1000
    assert path.read_bytes() == b"abc"


def test_a_read_only_disk_is_told_from_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise failing(errno.EROFS)

    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    with monkeypatch.context() as patch:
        for call in ("posix_fallocate", "ftruncate"):
            patch.setattr(os, call, refuse)
        with pytest.raises(ReadOnly):
            files.allocate(fd, path, 0, 1000)
        patch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY, f_bavail=1, f_frsize=4096))
        with pytest.raises(ReadOnly):
            files.require_free(tmp_path, 1)
    os.close(fd)


def test_what_went_wrong_is_told_although_the_temporary_file_cannot_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise failing(errno.EROFS)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ReadOnly), DISK.replacing(tmp_path / "file"):
        raise ReadOnly(tmp_path)


def test_a_file_system_that_cannot_allocate_is_asked_for_its_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, offset: int, nbytes: int) -> None:
        raise failing(errno.EOPNOTSUPP)

    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    files.allocate(fd, path, 0, 1)
    with pytest.raises(DiskFull):
        files.allocate(fd, path, 0, 1 << 60)
    os.close(fd)


def test_a_deletion_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync", lambda fd, path: synced.append(path))
    path = tmp_path / "file"
    path.touch()
    DISK.delete(path)
    assert not path.exists() and synced == [tmp_path]
    with pytest.raises(StorageFailed, match="delete: No such file"):
        DISK.delete(path)


def test_directories_are_made_with_their_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    DISK.make_directory(path)
    DISK.make_directory(path)
    assert path.is_dir()


def test_a_directory_cannot_be_made_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(StorageFailed):
        DISK.make_directory(tmp_path / "a")


def test_what_is_read_after_a_settling_sync_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"abc" * 10_000)
    files.sync_and_forget(fd, path)
    assert os.pread(fd, 30_000, 0) == b"abc" * 10_000
    os.close(fd)
