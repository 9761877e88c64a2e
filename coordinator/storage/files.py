"""The port to the disk: all that the state directory asks of a file system, and the file system of this machine."""

import errno
import fcntl
import io
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from farloop.coordinator.errors import DiskFull, NoDescriptor, NoFolder, NoRoom, ReadOnly, StateLocked, StorageFailed
from farloop.monitoring.descriptors import with_spare
from farloop.runtime.system import DIRECT_BYTES, DIRECT_PAGE, write_direct

if TYPE_CHECKING:
    from torch import Tensor

# --- System calls on open files

TEMPORARY_SUFFIX = ".tmp"  # suffix of an unfinished file; a start may delete it
Bytes = bytes | bytearray | memoryview

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})  # the file system has no such call


@contextmanager
def disk_errors(path: Path, what: str, *, room: bool = False) -> Iterator[None]:
    """Raises StorageFailed for an OSError of the block; where `room` is asked for and that is what lacks, NoRoom."""
    try:
        yield
    except OSError as error:
        refused = no_room(path, error.errno) if room else None
        raise refused or StorageFailed(path, f"{what}: {error.strerror}") from error


def write_all(fd: int, path: Path, parts: Sequence[Bytes], offset: int) -> None:
    """Write the parts one after the other at `offset`, however often the kernel stops short.
    Raises StorageFailed: some of the bytes may be there."""
    views = [memoryview(part).cast("B") for part in parts if len(part)]
    while views:
        with disk_errors(path, "write"):
            written = os.pwritev(fd, views, offset)
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if views:
            views[0] = views[0][written:]


def no_room(path: Path, code: int | None, nbytes: int = 0) -> NoRoom | None:
    """The error if this number says that the disk or the process can take nothing more; the parent of `path` exists."""
    if code == errno.EROFS:
        return ReadOnly(path)
    if code in NO_DESCRIPTOR:
        return NoDescriptor(path)
    if code in _NO_ROOM:
        stat = os.statvfs(path.parent)
        return DiskFull(path, nbytes, stat.f_bavail * stat.f_frsize)
    return None


def require_free(path: Path, nbytes: int) -> None:
    """A promise of nothing: `nbytes` are free now on the file system of `path`, which must exist.
    Raises NoRoom: they are not."""
    stat = os.statvfs(path)
    if stat.f_flag & os.ST_RDONLY:
        raise ReadOnly(path)
    free = stat.f_bavail * stat.f_frsize
    if nbytes > free:
        raise DiskFull(path, nbytes, free)


# --- The port
#
# What has to survive a power cut is made of few steps: sync a file, rename it, sync its directory. Their order is
# written here once, over the steps themselves, so that a file system in memory that forgets what was not synced
# (`tests/cases/virtual_files.py`) runs the very same code. Formats are not known here.

_T = TypeVar("_T")

SAFETENSORS: Final = {
    "torch.float64": "F64",
    "torch.int64": "I64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
}
"""How the format calls them. The larger come first in a file, so that each is aligned."""

Identity = tuple[int, int, int, int]
"""Device, inode, bytes and time of the last change of a file: another file or another content has another."""


class File(ABC):
    """An open file, or an open directory, which can only be synced."""

    path: Path
    allocation_step: int = 1 << 20
    """Allocate this many bytes at once if possible, so that small records need no allocation."""

    @abstractmethod
    def identity(self) -> Identity: ...

    @abstractmethod
    def read(self, offset: int, num_bytes: int) -> bytes:
        """Up to `num_bytes` from `offset` on; fewer at the end. Any thread. Raises OSError."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill the buffer from `offset` on; how many bytes there were. Any thread. Raises OSError."""
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @abstractmethod
    def write(self, parts: Sequence[Bytes], offset: int) -> None:
        """Write the parts one after the other. Raises StorageFailed: some of the bytes may be there."""

    @abstractmethod
    def allocate(self, offset: int, num_bytes: int) -> None:
        """Give [offset, offset + num_bytes) blocks that read as zeros; `offset` is the file's length.
        Raises NoRoom: the file is as it was."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Cut the file to `length` bytes; durable after `sync`. Raises StorageFailed."""

    @abstractmethod
    def sync(self) -> None:
        """Make the content durable; of a directory, the names in it.
        Raises StorageFailed: the kernel may have dropped the dirty pages and called them clean, so that a second try
        would succeed and prove nothing. Exit and recover."""

    @abstractmethod
    def sync_and_forget(self) -> None:
        """`sync`, then drop the cached pages: the next read shows what the disk holds. After a failed sync they may be
        clean and never have got there: a process that starts over must not believe them. Raises StorageFailed."""

    @abstractmethod
    def require_writable(self) -> None:
        """See that the file system takes writes now: blocks that it gave before are no promise of that.
        Raises ReadOnly."""

    @abstractmethod
    def close(self) -> None:
        """Close the file as it is."""

    def reader(self) -> io.BufferedReader:
        """The file from its beginning, for code that reads on and on."""
        return io.BufferedReader(_Reader(self), 1 << 16)


class Lock(ABC):
    """A held lock of a directory; free after `close`, or when the process dies."""

    path: Path

    @abstractmethod
    def is_ours(self) -> bool:
        """Whether the lock file is still ours: deleting it lets another process in."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class Files(ABC):
    """A file system. Operations are durable on return if they say so, else after a sync."""

    # --- Steps. They raise OSError unless something else is said, NoDescriptor where no file can be opened now.

    @abstractmethod
    def is_directory(self, path: Path) -> bool: ...

    @abstractmethod
    def names(self, directory: Path) -> list[str]:
        """What is in a directory, in any order."""

    @abstractmethod
    def identity(self, path: Path) -> Identity | None:
        """Identity of the file with this name; None without one. Needs no descriptor."""

    @abstractmethod
    def lock(self, path: Path) -> Lock:
        """Raises StateLocked where another process holds it, NoDescriptor, StorageFailed."""

    @abstractmethod
    def open(self, path: Path, *, write: bool = False) -> File:
        """An existing file, or a directory."""

    @abstractmethod
    def create(self, path: Path) -> File:
        """A new file, to be read and written."""

    @abstractmethod
    def read_bytes(self, path: Path) -> bytes: ...

    @abstractmethod
    def write_bytes(self, path: Path, data: bytes) -> None: ...

    @abstractmethod
    def require_free(self, path: Path, num_bytes: int) -> None:
        """Whether this much is free now on the file system of `path`, without reserving it. Raises NoRoom."""

    @abstractmethod
    def forget(self, path: Path) -> None:
        """Drop a file's cached pages that are on disk: the next read is the disk's."""

    @abstractmethod
    def mkdir(self, path: Path) -> None: ...

    @abstractmethod
    def rename(self, source: Path, target: Path) -> None: ...

    @abstractmethod
    def unlink(self, path: Path) -> None: ...

    # --- Operations made of these steps

    def write_tensors(self, path: Path, tensors: "dict[str, Tensor]", metadata: dict[str, str]) -> None:
        """A safetensors file of contiguous tensors on the CPU, in place of what is there. Raises OSError."""
        import torch  # who has tensors has loaded it; who reads a folder need not

        # The library would write through the page cache, and hold up what the journal waits for.
        header, parts, at = dict[str, object](__metadata__=metadata), list[Bytes](), 0
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
            dtype, ends = SAFETENSORS[str(tensor.dtype)], [at, at + tensor.nbytes]
            header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": ends}
            at += tensor.nbytes
            if tensor.nbytes:
                parts.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
        text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
        text += b" " * (-len(text) % 8)
        with suppress(FileNotFoundError):
            self.unlink(path)
        with closing(self.create(path)) as file:
            try:
                file.write([len(text).to_bytes(8, "little"), text, *parts], 0)
            except StorageFailed as error:
                raise error.__cause__ or error from None

    def require_ours(self) -> None:  # noqa: B027 - most file systems cannot be taken over
        """Raises Deposed, StorageFailed: another process writes here in place of this one."""

    def make_directory(self, path: Path) -> None:
        """Create `path` and its missing parents, durably. Raises StorageFailed."""
        if self.is_directory(path):
            return
        self.make_directory(path.parent)
        with self._opened(path.parent) as parent:
            with disk_errors(path, "create"):
                self.mkdir(path)
            parent.sync()

    def replace(self, temporary: Path, path: Path) -> None:
        """Let `temporary` take `path`'s place, durably and whole.
        Raises NoRoom: no descriptor is left; nothing was changed.
        Raises StorageFailed: a sync or the rename failed. After a failed sync of the directory either may be found."""
        with self._opened(path.parent) as directory:  # open before the rename, after which nothing may be missing
            with self._opened(temporary) as file:
                file.sync()
            with disk_errors(path, "rename"):
                self.rename(temporary, path)
            directory.sync()

    @contextmanager
    def replacing(self, path: Path) -> Iterator[Path]:
        """Yield a temporary path to write; on leaving, it replaces `path`, or is deleted."""
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        try:
            yield temporary
            self.replace(temporary, path)
        except BaseException:
            with suppress(OSError):  # a file system that became read-only keeps it until the next start
                self.unlink(temporary)
            raise

    def move(self, path: Path, target: Path) -> None:
        """Move a file into another directory of the same file system, durably. Raises StorageFailed."""
        self.make_directory(target.parent)
        with self._opened(path.parent) as old, self._opened(target.parent) as new:
            with disk_errors(path, "move"):
                self.rename(path, target)
            new.sync()
            old.sync()

    def delete(self, path: Path) -> None:
        """Delete a file, durably. Raises StorageFailed, NoRoom where no descriptor is left and nothing was changed."""
        with self._opened(path.parent) as directory:
            with disk_errors(path, "delete"):
                self.unlink(path)
            directory.sync()

    def remove_temporaries(self, directory: Path, prefix: str = "") -> None:
        """Delete unfinished files in `directory`. Not durable: the next start repeats it."""
        for name in self.names(directory):
            if name.endswith(TEMPORARY_SUFFIX) and name.startswith(prefix):
                with suppress(FileNotFoundError):
                    self.unlink(directory / name)

    def _opened(self, path: Path) -> closing[File]:
        with disk_errors(path, "open", room=True):
            return closing(self.open(path))


class OsFile(File):
    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    def identity(self) -> Identity:
        return _identity(os.fstat(self.fd))

    def read(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self.fd, num_bytes, offset)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        read = 0
        while read < len(buffer) and (count := os.preadv(self.fd, [buffer[read:]], offset + read)):
            read += count
        return read

    def write(self, parts: Sequence[Bytes], offset: int) -> None:
        """What is large is written past the page cache, but for its first and its last page."""
        waiting = list[memoryview]()
        for part in parts:
            view = memoryview(part).cast("B")
            if len(view) >= DIRECT_BYTES:
                start = offset + sum(map(len, waiting))
                head = -start % DIRECT_PAGE
                write_all(self.fd, self.path, [*waiting, view[:head]], offset)
                offset = start + head
                with disk_errors(self.path, "write"):
                    written = write_direct(self.fd, view[head:], offset)
                offset, view, waiting = offset + written, view[head + written :], []
            waiting.append(view)
        write_all(self.fd, self.path, waiting, offset)

    def allocate(self, offset: int, num_bytes: int) -> None:
        """Where the file system cannot allocate ahead, only `require_free` is asked."""
        if sys.platform != "linux":
            return require_free(self.path, num_bytes)
        try:
            os.posix_fallocate(self.fd, offset, num_bytes)
        except OSError as error:
            if error.errno in _CANNOT:
                require_free(self.path, num_bytes)
            elif refused := no_room(self.path, error.errno, num_bytes):
                if isinstance(refused, DiskFull):
                    self.truncate(offset)  # gives back the part that was there
                raise refused from error
            else:
                raise StorageFailed(self.path, f"allocate: {error.strerror}") from error

    def truncate(self, length: int) -> None:
        with disk_errors(self.path, "truncate"):
            os.ftruncate(self.fd, length)

    def sync(self) -> None:
        with disk_errors(self.path, "sync"):
            os.fsync(self.fd)

    def sync_and_forget(self) -> None:
        self.sync()
        self.forget()

    def forget(self) -> None:
        """Drop cached pages that are on disk. Linux only."""
        if sys.platform == "linux":
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def require_writable(self) -> None:
        if os.fstatvfs(self.fd).f_flag & os.ST_RDONLY:
            raise ReadOnly(self.path)

    def close(self) -> None:
        os.close(self.fd)


class OsLock(Lock):
    def __init__(self, path: Path, fd: int) -> None:
        self.path, self.fd = path, fd

    def is_ours(self) -> bool:
        held = os.fstat(self.fd)
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def close(self) -> None:
        os.close(self.fd)


class OsFiles(Files):
    file_type: type[OsFile] = OsFile

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def names(self, directory: Path) -> list[str]:
        return _with_descriptor(directory, partial(os.listdir, directory))

    def identity(self, path: Path) -> Identity | None:
        try:
            return _identity(os.stat(path))
        except FileNotFoundError:
            return None

    def lock(self, path: Path) -> Lock:
        with disk_errors(path, "open"):
            fd = _with_descriptor(path, partial(os.open, path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # perhaps `is_locked`, which holds it for a moment
                time.sleep(0.05)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise StateLocked(path) from error
            raise StorageFailed(path, f"lock: {error.strerror}") from error
        return OsLock(path, fd)

    def open(self, path: Path, *, write: bool = False) -> File:
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        return self.file_type(path, _with_descriptor(path, partial(os.open, path, flags)))

    def create(self, path: Path) -> File:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return self.file_type(path, _with_descriptor(path, partial(os.open, path, flags, 0o644)))

    def read_bytes(self, path: Path) -> bytes:
        return _with_descriptor(path, path.read_bytes)

    def write_bytes(self, path: Path, data: bytes) -> None:
        _with_descriptor(path, partial(path.write_bytes, data))

    def require_free(self, path: Path, num_bytes: int) -> None:
        require_free(path, num_bytes)

    def forget(self, path: Path) -> None:
        with closing(self.open(path)) as file:
            assert isinstance(file, OsFile)
            file.forget()

    def mkdir(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        path.unlink()


DISK = OsFiles()  # the default


def is_locked(path: Path) -> bool:
    """Whether a process holds this lock. Looks by holding it for a moment, shared."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def state_folder(directory: Path, files: Files = DISK, how: str = "with --state") -> Path:
    """The folder. Raises NoFolder: there is none; `how` a command takes it."""
    if not files.is_directory(directory):
        raise NoFolder(directory, is_file=files.identity(directory) is not None, how=how)
    return directory


def state_inside(directory: Path, files: Files = DISK) -> str:
    """What to try instead of a folder without a run: one of a demo has its state in a folder below."""
    return f"; try {directory / 'state'}" if files.is_directory(directory / "state") else ""


class _Reader(io.RawIOBase):
    def __init__(self, file: File) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_SET:
            self._at = offset
        elif whence == os.SEEK_CUR:
            self._at += offset
        else:
            raise OSError(errno.EINVAL, "only from the beginning or the current position")
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = self._file.read_into(self._at, memoryview(buffer))
        self._at += count
        return count


def _with_descriptor(path: Path, call: Callable[[], _T]) -> _T:
    """Open a file; with a spare descriptor where no other is free. Raises NoDescriptor: nothing was changed."""
    try:
        return with_spare(call)
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise NoDescriptor(path) from error
        raise


def _identity(stat: os.stat_result) -> Identity:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
