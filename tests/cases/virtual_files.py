"""A disk in memory that forgets at a power cut what was not synced, as the page cache of a machine does.

Every file has the bytes that are on the disk and the list of changes since its last sync; every directory has the
names that are on the disk and the changes since. A power cut keeps the synced state, and of the rest any part: changes
may be lost, arrive without those before them, and writes may arrive in part, in sectors of 512 bytes. A rename is one
change, also from one directory to another, as in every file system with a journal. The code that runs over it is the
product's own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from farloop.coordinator.errors import DiskFull, ReadOnly, StateLocked, StorageFailed
from farloop.coordinator.storage.files import Bytes, File, Files, Identity, Lock
from farloop.sim.virtual_time import PowerCut

SECTOR_BYTES = 512


class Dead(PowerCut):
    """The power is gone: nothing can be read or changed any more."""


class Fate(Protocol):
    """What becomes of changes that were not synced."""

    def keeps_write(self) -> bool: ...

    def keeps_name(self) -> bool: ...

    def keeps_bytes(self, num_bytes: int) -> int:
        """How many of the first bytes of a kept write arrive."""


class AllOrNothing:
    """All unsynced writes, or none; all unsynced names, or none."""

    def __init__(self, *, writes: bool, names: bool) -> None:
        self.writes, self.names = writes, names

    def __repr__(self) -> str:
        return f"{type(self).__name__}(writes={self.writes}, names={self.names})"

    def keeps_write(self) -> bool:
        return self.writes

    def keeps_name(self) -> bool:
        return self.names

    def keeps_bytes(self, num_bytes: int) -> int:
        return num_bytes


class Drawn:
    """Drawn by `draw(n)`, a number from 0 to n - 1."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def keeps_write(self) -> bool:
        return self._draw(2) == 1

    def keeps_name(self) -> bool:
        return self._draw(2) == 1

    def keeps_bytes(self, num_bytes: int) -> int:
        sectors = num_bytes // SECTOR_BYTES + 1
        return num_bytes if self._draw(2) else self._draw(sectors) * SECTOR_BYTES


@dataclass(frozen=True, slots=True)
class _Write:
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class _Length:
    length: int
    grows: bool


@dataclass(slots=True, eq=False)
class _Content:
    """A file without its name."""

    number: int
    disk: bytearray = field(default_factory=bytearray)
    cache: bytearray = field(default_factory=bytearray)
    pending: list[_Write | _Length] = field(default_factory=list)
    changes: int = 0

    def apply(self, change: _Write | _Length) -> None:
        _apply(self.cache, change)
        self.pending.append(change)
        self.changes += 1

    def survivor(self, fate: Fate, _: dict[object, bool]) -> "_Content":
        kept = bytearray(self.disk)
        for change in self.pending:
            if fate.keeps_write():
                if isinstance(change, _Write):
                    change = _Write(change.offset, change.data[: fate.keeps_bytes(len(change.data))])
                _apply(kept, change)
        return _Content(self.number, kept, bytearray(kept))


@dataclass(slots=True, eq=False)
class _Folder:
    disk: "dict[str, _Content | _Folder]" = field(default_factory=dict)
    cache: "dict[str, _Content | _Folder]" = field(default_factory=dict)
    pending: "list[tuple[object, dict[str, _Content | _Folder | None]]]" = field(default_factory=list)
    """Of each change, what the names stand for after it; None for nothing. Those with the same object share a fate."""

    def apply(self, change: "dict[str, _Content | _Folder | None]", part_of: object = None) -> None:
        _rename(self.cache, change)
        self.pending.append((part_of or object(), change))

    def survivor(self, fate: Fate, decided: dict[object, bool]) -> "_Folder":
        kept = dict(self.disk)
        for part_of, change in self.pending:
            if part_of not in decided:
                decided[part_of] = fate.keeps_name()
            if decided[part_of]:
                _rename(kept, change)
        names = {name: found.survivor(fate, decided) for name, found in kept.items()}
        return _Folder(names, dict(names))


Call = Callable[[str, Path], bool]
"""Asked before every step that changes something, with what it is called (`sync`, `rename`, ...) and of which file;
False leaves the step out."""


class VirtualFiles(Files):
    """One machine's disk, and one process's view of it."""

    def __init__(self, root: _Folder | None = None, numbers: "Iterator[int] | None" = None) -> None:
        self._root = root or _Folder()
        self._numbers = numbers or count(1)
        self._locks: dict[Path, _Content] = {}
        self.dead = False
        self.on_call: Call = lambda what, path: True
        self.on_write: Callable[[Path, bytes], None] = lambda path, data: None  # told of what is about to be written
        self.after_sync: Callable[[Path], None] = lambda path: None
        self.allocation_step = 4096  # so small that a disk that fills up is noticed within a short run
        self.full = False  # nothing more can be allocated
        self.exhausted = False
        """Nothing more can be written, even where it was allocated, as where every write is a copy."""
        self.room: int | None = None  # most bytes that can be allocated at once; None for any number
        self.read_only = False
        self.bytes_read = dict[Path, int]()  # by file
        self.failing_sync: Callable[[Path], bool] = lambda path: False
        """Whether the next sync of this file fails: the cached pages are called clean then, and are not on the disk."""

    @property
    def num_bytes(self) -> int:
        """Of all files as they are now."""
        return _num_bytes(self._root)

    # --- what happens to the machine

    def survivor(self, fate: Fate) -> "VirtualFiles":
        """The disk after a power cut at this moment, for the next start. This one goes on."""
        return VirtualFiles(self._root.survivor(fate, {}), self._numbers)

    def power_cut(self, fate: Fate) -> "VirtualFiles":
        """The disk after a power cut; every later call of this one fails and changes nothing."""
        self.dead = True
        return self.survivor(fate)

    def killed(self) -> "VirtualFiles":
        """The disk as the next process finds it after a kill: nothing is lost, the page cache is as it was."""
        self.dead = True
        return VirtualFiles(self._root, self._numbers)

    # --- steps

    def is_directory(self, path: Path) -> bool:
        self._alive()
        return isinstance(self._find(path), _Folder)

    def names(self, directory: Path) -> list[str]:
        self._alive()
        return list(self._folder(directory).cache)

    def identity(self, path: Path) -> Identity | None:
        self._alive()
        found = self._find(path)
        return _identity(found) if isinstance(found, _Content) else None

    def lock(self, path: Path) -> Lock:
        self._alive()
        if self._find(path) is None:
            self._step("create", path)
            self._folder(path.parent).apply({path.name: _Content(next(self._numbers))})
        content = self._content(path)
        if any(held is content for held in self._locks.values()):
            raise StateLocked(path)
        self._locks[path] = content
        return _VirtualLock(self, path, content)

    def open(self, path: Path, *, write: bool = False) -> File:
        self._alive()
        found = self._find(path)
        if found is None:
            raise FileNotFoundError(2, "No such file or directory")
        return _VirtualFile(self, path, found)

    def create(self, path: Path) -> File:
        self._alive()
        if self._find(path) is not None:
            raise FileExistsError(17, "File exists")
        if self.read_only:
            raise OSError(30, "Read-only file system")
        content = _Content(next(self._numbers))
        self._step("create", path)
        self._folder(path.parent).apply({path.name: content})
        return _VirtualFile(self, path, content)

    def read_bytes(self, path: Path) -> bytes:
        self._alive()
        data = bytes(self._content(path).cache)
        self.count_read(path, data)
        return data

    def count_read(self, path: Path, data: bytes) -> None:
        self.bytes_read[path] = self.bytes_read.get(path, 0) + len(data)

    def write_bytes(self, path: Path, data: bytes) -> None:
        self._alive()
        if self._find(path) is None:
            self.create(path).close()
        file = _VirtualFile(self, path, self._content(path))
        file.truncate(0)
        file.write([data], 0)

    def require_free(self, path: Path, num_bytes: int) -> None:
        self._alive()
        if self.read_only:
            raise ReadOnly(path)
        if self.full or (self.room is not None and num_bytes > self.room):
            raise DiskFull(path, num_bytes, self.room or 0)

    def forget(self, path: Path) -> None:
        self._alive()
        content = self._content(path)
        if not content.pending:
            content.cache = bytearray(content.disk)

    def mkdir(self, path: Path) -> None:
        if self._step("mkdir", path):
            self._folder(path.parent).apply({path.name: _Folder()})

    def rename(self, source: Path, target: Path) -> None:
        content = self._content(source)
        if not self._step("rename", target):
            return
        if source.parent == target.parent:
            self._folder(source.parent).apply({source.name: None, target.name: content})
        else:
            move = object()
            self._folder(target.parent).apply({target.name: content}, move)
            self._folder(source.parent).apply({source.name: None}, move)

    def unlink(self, path: Path) -> None:
        self._alive()
        self._content(path)
        if self._step("unlink", path):
            self._folder(path.parent).apply({path.name: None})

    # --- inside

    def _alive(self) -> None:
        if self.dead:
            raise Dead

    def _step(self, what: str, path: Path) -> bool:
        self._alive()
        wanted = self.on_call(what, path)
        self._alive()
        return wanted

    def _find(self, path: Path) -> _Content | _Folder | None:
        found: _Content | _Folder | None = self._root
        for name in path.parts[1:]:
            if not isinstance(found, _Folder):
                return None
            found = found.cache.get(name)
        return found

    def _folder(self, path: Path) -> _Folder:
        found = self._find(path)
        if not isinstance(found, _Folder):
            raise FileNotFoundError(2, "No such file or directory")
        return found

    def _content(self, path: Path) -> _Content:
        found = self._find(path)
        if not isinstance(found, _Content):
            raise FileNotFoundError(2, "No such file or directory")
        return found


class _VirtualFile(File):
    def __init__(self, files: VirtualFiles, path: Path, content: _Content | _Folder) -> None:
        self._files, self.path, self._opened = files, path, content
        self.allocation_step = files.allocation_step

    @property
    def _content(self) -> _Content:
        self._files._alive()
        assert isinstance(self._opened, _Content)
        return self._opened

    def identity(self) -> Identity:
        return _identity(self._content)

    def read(self, offset: int, num_bytes: int) -> bytes:
        data = bytes(self._content.cache[offset : offset + num_bytes])
        self._files.count_read(self.path, data)
        return data

    def write(self, parts: Sequence[Bytes], offset: int) -> None:
        data = b"".join(bytes(part) for part in parts)
        self._files.on_write(self.path, data)
        if self._files._step("write", self.path):
            self._content.apply(_Write(offset, data))

    def allocate(self, offset: int, num_bytes: int) -> None:
        self._files.require_free(self.path, num_bytes)
        if self._files._step("allocate", self.path):
            self._content.apply(_Length(offset + num_bytes, grows=True))

    def truncate(self, length: int) -> None:
        if self._files._step("truncate", self.path):
            self._content.apply(_Length(length, grows=False))

    def sync(self) -> None:
        if self._files._step("sync", self.path):
            self._sync()
            self._files.after_sync(self.path)

    def sync_and_forget(self) -> None:
        if self._files._step("forget", self.path):
            self._sync()
            self._content.cache = bytearray(self._content.disk)

    def _sync(self) -> None:
        if isinstance(self._opened, _Folder):
            self._opened.disk, self._opened.pending = dict(self._opened.cache), []
            return
        content = self._content
        fails = self._files.failing_sync(self.path)
        if not fails:
            for change in content.pending:
                _apply(content.disk, change)
        content.pending = []
        if fails:
            raise StorageFailed(self.path, "sync: Input/output error")

    def require_writable(self) -> None:
        if self._files.read_only:
            raise ReadOnly(self.path)
        if self._files.exhausted:
            raise DiskFull(self.path, 0, 0)

    def close(self) -> None:
        pass


class _VirtualLock(Lock):
    def __init__(self, files: VirtualFiles, path: Path, content: _Content) -> None:
        self._files, self.path, self._held = files, path, content

    def is_ours(self) -> bool:
        return self._files._find(self.path) is self._held

    def close(self) -> None:
        if self._files._locks.get(self.path) is self._held:
            del self._files._locks[self.path]


def _apply(data: bytearray, change: _Write | _Length) -> None:
    match change:
        case _Write(offset=offset, data=written):
            data.extend(bytes(max(0, offset - len(data))))
            data[offset : offset + len(written)] = written
        case _Length(length=length, grows=grows):
            if not grows:
                del data[length:]
            data.extend(bytes(max(0, length - len(data))))


def _rename(names: "dict[str, _Content | _Folder]", change: "dict[str, _Content | _Folder | None]") -> None:
    for name, content in change.items():
        if content is None:
            names.pop(name, None)
        else:
            names[name] = content


def _num_bytes(found: _Content | _Folder) -> int:
    if isinstance(found, _Content):
        return len(found.cache)
    return sum(map(_num_bytes, found.cache.values()))


def _identity(content: _Content) -> Identity:
    return 1, content.number, len(content.cache), content.changes
