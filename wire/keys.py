"""CURVE keys as files, and the list of those that may come in. Standard library only; nothing here makes a key.

`NAME.key` holds a secret key, mode 0600; `NAME.pub` its public key. Both are one line of 40 characters of Z85 text.
The coordinator's allow-list is a folder of `NAME.pub` files: the file's name is the node's name (protocol U).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farloop.algo.spec import NodeId

_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class KeyFileError(Exception):
    """A key file is missing, malformed, or open to others; one line with the mend."""


def check_name(name: str) -> NodeId:
    """A node's name, or ValueError: letters, digits, '.', '_' and '-', at most 63."""
    if not _NODE_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is no node name: letters, digits, '.', '_' and '-', at most 63, a letter or digit first"
        )
    return NodeId(name)


def load_secret(path: Path) -> bytes:
    """The secret key in `path`, as 40 characters of Z85.

    Raises:
        KeyFileError: missing, malformed, or readable by others than its owner.
    """
    key = _load(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise KeyFileError(f"{path} holds a secret and is open to others (mode {mode:04o}); run: chmod 600 {path}")
    return key


def load_public(path: Path) -> bytes:
    """The public key in `path`, as 40 characters of Z85. Raises KeyFileError."""
    return _load(path)


def _load(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        mend = "make a pair with: farloop keys new DIR"
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror}; {mend}") from error
    if not _Z85.fullmatch(key):
        raise KeyFileError(f"{path} is no key file: one line of 40 characters of Z85 is wanted")
    return key


@dataclass(slots=True)
class AllowList:
    """The public keys that may come in, from a folder that is read again when it changes."""

    folder: Path
    _stamp: tuple[tuple[str, int], ...] | None = None
    _names: dict[bytes, NodeId] = field(default_factory=dict)

    def refresh(self) -> None:
        """Read the folder again if a file in it was added, removed or changed.

        Raises:
            KeyFileError: the folder or a file in it cannot be read; the list stays as it was.
        """
        try:
            paths = sorted(self.folder.glob("*.pub"))
            stamp = tuple((path.name, path.stat().st_mtime_ns) for path in paths)
            if not self.folder.is_dir():
                raise KeyFileError(f"the allow-list {self.folder} is not a folder; put the nodes' .pub files into one")
        except OSError as error:
            raise KeyFileError(f"cannot read the allow-list {self.folder}: {error.strerror}") from error
        if stamp != self._stamp:
            self._names = _owners(paths)
            self._stamp = stamp

    @property
    def owners(self) -> frozenset[NodeId]:
        """All nodes that may come in."""
        return frozenset(self._names.values())

    def owner(self, public_key: bytes) -> NodeId | None:
        """Whose key it is; None for a key that may not come in (any more)."""
        return self._names.get(public_key)


def _owners(paths: Sequence[Path]) -> dict[bytes, NodeId]:
    """Whose keys these are. Raises KeyFileError."""
    files: dict[bytes, Path] = {}
    for path in paths:
        key = load_public(path)
        if key in files:
            raise KeyFileError(f"{path} holds the same key as {files[key].name}: a node has one name; remove one")
        files[key] = path
    try:
        return {key: check_name(path.stem) for key, path in files.items()}
    except ValueError as error:
        raise KeyFileError(f"the allow-list has a file of a wrong name: {error}") from error
