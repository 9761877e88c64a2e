"""What can go wrong with the coordinator's durable state, and with its machine.

NotNow                 a request is valid and the run's state does not allow it; nothing was changed
MachineBroken          an unexpected error left the machine half changed; exit and recover
BindError              a port cannot be had

StorageError
├── JournalCorrupt     the journal is damaged where it cannot be a torn tail; restore the directory from a copy
├── StateLocked        another coordinator holds the state directory; retriable
├── NoRoom             the disk takes nothing more, and nothing was changed; retriable
│   ├── DiskFull       no bytes are free, or the quota is used up
│   ├── ReadOnly       the file system may only be read
│   └── NoDescriptor   this process, or the machine, may not open another file or connection
├── StorageFailed      a write or a sync failed: what the disk holds is unknown; exit and recover
│   └── ObjectFailed   the object store does not give what a record has there
├── Fenced             another coordinator has claimed a higher epoch of this very state; stop
├── Deposed            a standby has taken over; stop
├── FolderChanged      lock or journal are not as this coordinator left them; stop
├── SnapshotCorrupt    a snapshot cannot be read, or is not what was saved
└── StateMismatch      the parts of the directory do not belong together, or are another run's
    ├── StartRefused   who leads, or the run that is there, forbids the start; nothing was changed
    ├── Inconsistent   its records and snapshots do not fit together
    └── NoFolder       there is no such directory where a command was told to look for one
"""

import errno
from pathlib import Path
from typing import ClassVar, Final

_SALVAGE: Final = "farloop journal salvage --state DIR says what can be saved and changes nothing"


class BindError(OSError):
    """The endpoint cannot be bound. The message is one line for the person who chose it."""

    def __init__(self, endpoint: str, error: Exception, setting: str = "bind") -> None:
        where = f"[coordinator] {setting}"
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            super().__init__(f"{endpoint} is in use; stop the other process, or choose another port in {where}")
        else:
            super().__init__(f"cannot bind {endpoint}: {error}; choose another address in {where}")


class NotNow(ValueError):
    """The request is valid, but the state of the run does not allow it; one sentence."""


class MachineBroken(Exception):
    """An unexpected error left the machine with its invariants broken. The journal is whole: exit and recover."""


class StorageError(Exception):
    retriable: bool = False  # whether the same call, made again later in this process, may succeed
    next_step: str = ""
    """What a person does about it, where the message does not say it: shown behind it when a command ends."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path, self.detail = path, message


class JournalCorrupt(StorageError):
    """Bytes that were once durable are damaged, or were written by another version. Nothing was changed."""

    next_step = _SALVAGE

    def __init__(self, path: Path, offset: int, detail: str) -> None:
        super().__init__(path, f"at byte {offset}: {detail}")
        self.offset = offset
        self.detail = detail


class StateLocked(StorageError):
    retriable = True

    def __init__(self, path: Path) -> None:
        super().__init__(
            path, "another coordinator holds this state directory; stop it, or give this one its own: --state DIR"
        )


class NoRoom(StorageError):
    retriable = True
    fix: ClassVar[str]


class DiskFull(NoRoom):
    fix = "free space on its file system"
    next_step = f"{fix}, then start again"

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(path, f"{needed_bytes} bytes more are needed, {free_bytes} are free")


class ReadOnly(NoRoom):
    """The file system may only be read, as Linux makes one that found an error in itself."""

    fix = "find out why, and mount its file system for writing"
    next_step = f"{fix}, then start again"

    def __init__(self, path: Path) -> None:
        super().__init__(path, "the file system is read-only")


class NoDescriptor(NoRoom):
    fix = "raise the limit of open files (ulimit -n), or find out who opens so many connections"
    next_step = f"{fix}, then start again"

    def __init__(self, path: Path) -> None:
        super().__init__(path, "too many open files: no file can be opened now")


class StorageFailed(StorageError):
    """The disk refused a read, a write or a sync. After a failed sync it is unknown what is durable: never retried."""

    next_step = "check the disk and the permissions of the file, then start again: what is durable is recovered"


class ObjectFailed(StorageFailed):
    """The object store does not give what a record has there."""

    fix: ClassVar[str] = "check the object store with farloop doctor"
    next_step = f"{fix}, then start again: what it has is recovered. What is gone for good: docs/object-store.md"

    def __init__(self, path: Path, detail: str, *, passes: bool = False) -> None:
        """`passes`: it may give it later, without anybody's doing."""
        super().__init__(path, detail)
        self.retriable = passes


class Fenced(StorageError):
    """A later start of a coordinator has taken this state over. Nothing was written."""

    next_step = "leave this one stopped while the other one runs; the nodes reconnect to the port that answers"

    def __init__(self, path: Path, own: int, found: int) -> None:
        super().__init__(path, f"epoch {found} was claimed after ours, {own}: another coordinator took over this state")


class Deposed(StorageError):
    """Another coordinator leads the run by its record. Nothing was told that it does not have."""

    next_step = "start this one again, and it stands by"

    def __init__(self, path: Path, leader: str, term: int) -> None:
        if not leader:
            self.next_step = "put it back, or start the coordinator that led last with --force-lead"
        leads = f"{leader} leads the run since term {term}" if leader else "the record of the run's leader is gone"
        super().__init__(path, leads)


class FolderChanged(StorageError):
    """Another process removed, replaced or changed a file of this coordinator. Nothing was written."""

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(
            path,
            f"{detail}; this coordinator stops. Find the process that did it: only one coordinator may use the folder",
        )
        self.detail = detail


class SnapshotCorrupt(StorageError):
    next_step = _SALVAGE


class StateMismatch(StorageError):
    """The directory holds another run than the one asked for, or none that can be continued."""


class StartRefused(StateMismatch):
    """The record of who leads, its leader, or the run that the folder holds forbids this start. Nothing was changed."""


class Inconsistent(StateMismatch):
    next_step = _SALVAGE


class NoFolder(StateMismatch):
    def __init__(self, path: Path, *, is_file: bool = False, how: str = "with --state") -> None:
        what = "is a file, expected a folder" if is_file else "there is no such folder"
        super().__init__(path, f"{what}; give the coordinator's state_dir {how}")
