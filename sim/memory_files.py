"""Files in memory, for a coordinator whose state is not read after the run: nothing has to be synced."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path

from safetensors.torch import save as save_bytes
from torch import Tensor

from farloop.coordinator.storage.files import Bytes, File, Files, Identity, Lock


class _Content:
    """A file without its name."""

    def __init__(self, number: int) -> None:
        self.number, self.data, self.changes = number, bytearray(), 0

    def identity(self) -> Identity:
        return 1, self.number, len(self.data), self.changes

    def write(self, data: bytes, offset: int) -> None:
        self.extend(offset)
        self.data[offset : offset + len(data)] = data
        self.changes += 1

    def extend(self, length: int) -> None:
        self.data.extend(bytes(max(0, length - len(self.data))))


class MemoryFiles(Files):
    """A file system with one user."""

    def __init__(self) -> None:
        self._files: dict[Path, _Content] = {}
        self._folders = {Path("/")}
        self._numbers = count(1)

    def is_directory(self, path: Path) -> bool:
        return path in self._folders

    def names(self, directory: Path) -> list[str]:
        return [path.name for path in (*self._files, *self._folders) if path.parent == directory != path]

    def identity(self, path: Path) -> Identity | None:
        return self._files[path].identity() if path in self._files else None

    def lock(self, path: Path) -> Lock:
        return _MemoryLock(path)

    def open(self, path: Path, *, write: bool = False) -> File:
        return _MemoryFile(path, _Content(0) if path in self._folders else self._content(path))

    def create(self, path: Path) -> File:
        content = self._files[path] = _Content(next(self._numbers))
        return _MemoryFile(path, content)

    def read_bytes(self, path: Path) -> bytes:
        return bytes(self._content(path).data)

    def write_bytes(self, path: Path, data: bytes) -> None:
        self.create(path).write([data], 0)

    def write_tensors(self, path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        self.write_bytes(path, save_bytes(tensors, metadata))

    def require_free(self, path: Path, num_bytes: int) -> None:
        pass

    def forget(self, path: Path) -> None:
        pass

    def mkdir(self, path: Path) -> None:
        self._folders.add(path)

    def rename(self, source: Path, target: Path) -> None:
        self._files[target] = self._content(source)
        del self._files[source]

    def unlink(self, path: Path) -> None:
        self._content(path)
        del self._files[path]

    def _content(self, path: Path) -> _Content:
        if path not in self._files:
            raise FileNotFoundError(2, "No such file or directory")
        return self._files[path]


class _MemoryFile(File):
    allocation_step = 4096

    def __init__(self, path: Path, content: _Content) -> None:
        self.path, self._content = path, content

    def identity(self) -> Identity:
        return self._content.identity()

    def read(self, offset: int, num_bytes: int) -> bytes:
        return bytes(self._content.data[offset : offset + num_bytes])

    def write(self, parts: Sequence[Bytes], offset: int) -> None:
        self._content.write(b"".join(bytes(part) for part in parts), offset)

    def allocate(self, offset: int, num_bytes: int) -> None:
        self._content.extend(offset + num_bytes)

    def truncate(self, length: int) -> None:
        del self._content.data[length:]
        self._content.write(b"", length)

    def sync(self) -> None:
        pass

    def sync_and_forget(self) -> None:
        pass

    def require_writable(self) -> None:
        pass

    def close(self) -> None:
        pass


class _MemoryLock(Lock):
    def __init__(self, path: Path) -> None:
        self.path = path

    def is_ours(self) -> bool:
        return True

    def close(self) -> None:
        pass
