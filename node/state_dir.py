"""What survives a restart of a node: start counter, epoch, the end of its run."""

import errno
import json
import logging
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from farloop.node.errors import StateUnusable
from farloop.runtime.system import hold

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeState:
    """One node's small state file. Weights are never in it: anchors come from the coordinator."""

    path: Path | None  # None in a simulation, which carries the state over to the next start itself
    incarnation: int  # grows with every start
    epoch: int  # highest epoch seen in `run`: a coordinator of it with a lower one is fenced
    run: str = ""  # fingerprint; empty before the first
    finished: str = ""  # the run whose end this node saw last, if it has begun no other since
    process: int = 0  # random, of a claimed start, and not in the file

    @classmethod
    def read(cls, state_dir: Path) -> "NodeState":
        """What the folder holds; zeros if nothing. Raises StateUnusable: the file cannot be used."""
        path = state_dir / "node.json"
        try:
            nothing = {"incarnation": 0, "epoch": 0, "run": "", "finished": ""}
            kept: Any = json.loads(path.read_text()) if path.exists() else nothing
            return cls(path, int(kept["incarnation"]), int(kept["epoch"]), str(kept["run"]), str(kept["finished"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unusable(path, error) from error

    @classmethod
    def claim(cls, state_dir: Path, known: "NodeState | None" = None) -> "NodeState":
        """Count a start beyond what is `known`, that of the folder unless given, durably.

        Raises StateUnusable: the folder or the file cannot be used.
        """
        known = known or cls.read(state_dir)
        path, process = state_dir / "node.json", secrets.randbits(62)
        claimed = cls(path, known.incarnation + 1, known.epoch, known.run, known.finished, process)
        claimed._save()
        return claimed

    @property
    def folder(self) -> Path | None:
        """Folder of the copies of residuals; None: no copies."""
        return None if self.path is None else self.path.parent

    def renumber(self, incarnation: int) -> None:
        """Go on as this start, durably. Raises StateUnusable."""
        self.incarnation = incarnation
        self._save()

    def see_epoch(self, run: str, epoch: int) -> None:
        """Remember an epoch, durably, if it is the highest of its run; others are forgotten. Raises StateUnusable."""
        if run != self.run or epoch > self.epoch:
            self.run, self.epoch = run, epoch
            self._save()

    def see_end(self, run: str) -> None:
        """Remember that this run is finished; an empty text: that another one, or it again, has begun.

        It is only a help for the next start: a folder that cannot be written is logged.
        """
        if run != self.finished:
            self.finished = run
            try:
                self._save()
            except StateUnusable as error:
                _log.warning("the end of the run is not remembered reason=%r", str(error))

    def _save(self) -> None:
        if self.path is None:
            return
        temporary = self.path.with_suffix(f".{socket.gethostname()}-{os.getpid()}.tmp")  # hosts may share the folder
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w") as file:
                kept = {"incarnation": self.incarnation, "epoch": self.epoch, "run": self.run}
                json.dump(kept | {"finished": self.finished}, file, allow_nan=False)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
            sync_folder(self.path.parent)  # an incarnation that comes twice would give two deltas one id
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise _unusable(self.path, error) from error


def sync_folder(folder: Path) -> None:
    """Let the names of its files survive a power cut, too. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reserve(folder: Path, name: str) -> IO[str] | None:
    """Keep nodes of other names out of the folder until what is returned is closed. None: an earlier process of this
    node still has it, and will be replaced; or the file system knows no locks.

    Raises StateUnusable: it is that of another node that runs, or cannot be used.
    """
    path = folder / "node.lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise _unusable(path, error) from error
    try:
        hold(file.fileno())
        file.truncate(0)
        print(name, file=file, flush=True)
    except BlockingIOError:
        file.seek(0)
        other = file.read().strip()
        file.close()
        if other and other != name:
            raise StateUnusable(
                f"{folder} is the state folder of the node {other!r}, which is running: give every node another "
                "state_dir"
            ) from None
        return None
    except OSError:
        file.close()
        return None
    return file


def disk_of(folder: Path) -> tuple[int, int]:
    """Bytes that are free for a state folder, and that its files take. Raises OSError."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _unusable(path: Path, error: Exception) -> StateUnusable:
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    mend = "free space there, or choose another state_dir" if full else "choose another state_dir"
    return StateUnusable(f"cannot use the node's state {path}: {error}; {mend}")
