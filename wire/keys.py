"""CURVE keys as files, and the allow-list. Standard library only; keys are generated elsewhere.

`NAME.key` holds a secret key, mode 0600; `NAME.pub` its public key. Both are one line of 40 characters of Z85 text.
The allow-list is a directory of `NAME.pub` files: the file's name is the node's name (protocol, Identity). While a key
is rotated, such a file has a second line with the next key, and both are accepted.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from farloop.algo.spec import NodeId

_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LONGEST_FILE = 4096  # bytes read of a secret file: one line, and enough of anything else to see that it is no key
_NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class KeyFileError(Exception):
    """A key file is missing, malformed, or not its owner's alone; one line with the fix."""


def check_name(name: str) -> NodeId:
    """A node's name, or ValueError: letters, digits, '.', '_' and '-', at most 63."""
    if not _NODE_NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a node name: letters, digits, '.', '_' and '-', at most 63, a letter or digit first"
        )
    return NodeId(name)


def fingerprint(public_key: bytes) -> str:
    """A public key's short name, for logs and lists."""
    return f"sha256:{hashlib.sha256(public_key).hexdigest()[:16]}"


def load_secret(path: Path) -> bytes:
    """The secret key in `path`, as 40 characters of Z85. Public keys look alike: those are known by their names. What
    is checked is what is read: one open file, so that it cannot change in between.
    Raises KeyFileError: missing, malformed, a symbolic link or no file at all, another user's, open to others, or named
    as a public key."""
    if path.suffix == ".pub":
        secret = path.with_suffix(".key")
        raise KeyFileError(f"{path} is a public key by its name; the secret key belongs here: {secret}")
    try:
        # Without O_NONBLOCK a pipe of this name would hold the daemon for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise KeyFileError(
                f"{path} holds a secret and is a symbolic link, which whoever can write to its folder can turn "
                "elsewhere; name the file itself"
            ) from error
        raise _unreadable(path, error) from error
    try:
        _check_private(path, os.fstat(descriptor))
        return _checked(path, os.read(descriptor, _LONGEST_FILE))
    except OSError as error:
        raise _unreadable(path, error) from error
    finally:
        os.close(descriptor)


def _check_private(path: Path, found: os.stat_result) -> None:
    mode, user = stat.S_IMODE(found.st_mode), os.geteuid()
    if not stat.S_ISREG(found.st_mode):
        raise KeyFileError(f"{path} is not a file; make a pair with: farloop keys new DIR")
    if found.st_uid != user:
        raise KeyFileError(
            f"{path} holds a secret and belongs to another user (uid {found.st_uid}, this one is {user}); "
            f"run: chown {user} {path}"
        )
    if mode & 0o077:
        raise KeyFileError(f"{path} holds a secret and is open to others (mode {mode:04o}); run: chmod 600 {path}")


def load_public(path: Path) -> bytes:
    """The public key in `path`, as 40 characters of Z85. Raises KeyFileError."""
    try:
        return _checked(path, path.read_bytes())
    except OSError as error:
        raise _unreadable(path, error) from error


def load_publics(path: Path) -> list[bytes]:
    """The public keys in `path`, one in each line: of several coordinators, or of one before and after its key is
    changed. Raises KeyFileError."""
    if path.suffix == ".key":
        raise KeyFileError(f"{path} is a secret key by its name; give the coordinator's .pub")
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise KeyFileError(f"there is no {path}; copy the coordinator's .pub there") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    return [_checked(path, line) for line in lines if line.strip()] or [_checked(path, b"")]


def _checked(path: Path, content: bytes) -> bytes:
    key = content.strip()
    if not _Z85.fullmatch(key):
        raise KeyFileError(f"{path} is not a key file: expected one line of 40 characters of Z85")
    return key


def _unreadable(path: Path, error: OSError) -> KeyFileError:
    return KeyFileError(f"cannot read the key file {path}: {error.strerror}; make a pair with: farloop keys new DIR")


@dataclass(slots=True)
class AllowList:
    """The public keys that may come in, from a folder that is read again when it changes."""

    folder: Path
    _stamp: tuple[tuple[str | int, ...], ...] | None = None
    _names: dict[bytes, NodeId] = field(default_factory=dict)

    def refresh(self) -> None:
        """Read the folder again if a file in it was added, removed or changed.
        Raises KeyFileError: the folder or a file in it cannot be used. No new peer is admitted then, and those admitted
        stay, but for those whose file is gone or holds another key, so a broken file prevents no revocation."""
        paths = key_files(self.folder)
        stamp = tuple(_mark(path) for path in paths)
        if stamp == self._stamp:
            return
        try:
            self._names = _owners(paths)
        except KeyFileError:
            self._names = {key: name for key, name in self._names.items() if self._holds(name, key)}
            raise
        self._stamp = stamp

    def _holds(self, name: NodeId, key: bytes) -> bool:
        """Whether a file that may be half-written still stands for this key."""
        path = self.folder / f"{name}.pub"
        try:
            return key in load_publics(path)
        except KeyFileError:
            return os.path.lexists(path)

    @property
    def keys(self) -> dict[NodeId, tuple[bytes, ...]]:
        """The keys of each node that may come in, the oldest first."""
        found: dict[NodeId, tuple[bytes, ...]] = {}
        for key, name in self._names.items():
            found[name] = (*found.get(name, ()), key)
        return found

    def owner(self, public_key: bytes) -> NodeId | None:
        """Whose key it is; None for a key that may not come in (any more)."""
        return self._names.get(public_key)


def key_files(folder: Path) -> list[Path]:
    """The files of an allow-list, in order of their names. Raises KeyFileError where the folder cannot be read."""
    try:
        if not folder.is_dir():
            raise KeyFileError(f"the allow-list {folder} is not a folder; put the nodes' .pub files into one")
        return sorted(path for path in folder.iterdir() if path.name.endswith(".pub"))
    except OSError as error:
        raise KeyFileError(f"cannot read the allow-list {folder}: {error.strerror}") from error


def _mark(path: Path) -> tuple[str | int, ...]:
    """Differs when the file does: a copy may keep the old time, but no other inode or time of change."""
    try:
        found = path.stat()
    except OSError:  # gone meanwhile, or a link to nothing: reading it will tell
        return (path.name,)
    return path.name, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _owners(paths: Sequence[Path]) -> dict[bytes, NodeId]:
    """Whose keys these are. Raises KeyFileError."""
    files: dict[bytes, Path] = {}
    for path in paths:
        for key in load_publics(path):
            if key in files:
                raise KeyFileError(f"{path} holds the same key as {files[key].name}: a node has one name; remove one")
            files[key] = path
    try:
        return {key: check_name(path.stem) for key, path in files.items()}
    except ValueError as error:
        raise KeyFileError(f"the allow-list has a file of a wrong name: {error}") from error
