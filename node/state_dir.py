"""What survives a restart of a node: start counter, epoch, the end of its run, residuals."""

import errno
import json
import logging
import math
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from farloop.algo.error_feedback import Command, Forget, Load, Persist, Residual, Tag, Zero
from farloop.algo.spec import BlobId, RunSpec
from farloop.node.errors import StateUnusable
from farloop.quant.registry import codec_named
from farloop.runtime.system import hold

_log = logging.getLogger(__name__)

# --- Start counter, epoch and end


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


# --- Residuals: what the codec lost of this node's deltas
#
# `algo/error_feedback.py` drives the buffers; durable ones have a copy on disk. The training thread decides, the worker
# writes into a buffer; a buffer is read again only once its encoding has been reported.

Later = Callable[[Callable[[], None]], None]  # runs a job before the next encoding, in the encoder's thread


class Residuals:
    """Error feedback of one node, for all of its fragments. Without it in the codec nothing is kept, or allocated."""

    def __init__(self, run: str, zeros: Callable[[int], Tensor], folder: Path | None, later: Later) -> None:
        """`run`: fingerprint of its identity, and its history. `zeros`: fp32, of what this process keeps of a fragment.
        `folder` holds the copies; None: there are none."""
        self._run, self._zeros, self._folder, self._later = run, zeros, folder, later
        self._machines: dict[int, Residual] = {}
        self._buffers: dict[int, Tensor] = {}
        self._payloads: dict[int, tuple[str, Tensor]] = {}  # codec and last payload, where the codec starts from it

    def for_delta(self, blob: BlobId, codec: str) -> Tensor | None:
        """The residual to add to this delta, fp32 [numel], zero at first; None: the codec keeps none."""
        if codec_named(codec).beta == 0.0:
            self._drop(blob.fragment)
            return None
        machine = self._machine(blob.fragment, codec)
        buffer = self._buffers.get(blob.fragment)
        if buffer is None or not machine.usable:
            buffer = self._buffers[blob.fragment] = self._zeros(blob.fragment)
        return buffer

    def previous(self, blob: BlobId, codec: str) -> Tensor | None:
        """The payload that `codec` last wrote of this fragment, uint8."""
        kept = self._payloads.get(blob.fragment)
        return kept[1] if kept is not None and kept[0] == codec else None

    def encoded(self, blob: BlobId, codec: str, payload: Tensor | None) -> None:
        """A delta lies encoded; `payload` is given where the codec wants to see it again."""
        if payload is not None:
            self._payloads[blob.fragment] = codec, payload
        if (machine := self._machines.get(blob.fragment)) is not None:
            self._do(machine, machine.encoded(blob))

    def on_outcome(self, blob: BlobId, merged_in: int | None) -> None:
        """A delta became part of that version, or (None) never will."""
        if (machine := self._machines.get(blob.fragment)) is not None:
            self._do(machine, machine.dropped(blob) if merged_in is None else machine.merged(blob, version=merged_in))

    def installed(self, fragment: int, version: int, codec: str) -> None:
        """A snapshot replaced the anchor; at the first one a fitting copy on disk is used."""
        if codec_named(codec).beta == 0.0:
            return
        if (known := self._machines.get(fragment)) is not None:
            return self._do(known, known.reset())
        machine = self._machine(fragment, codec)
        self._buffers[fragment] = self._zeros(fragment)
        self._do(machine, machine.restore(self._read_tag(fragment), version=version))

    def begin_again(self, run: str) -> None:
        """Drop all residuals: they belong to a history that is over. Copies on disk have another `run`."""
        for fragment in list(self._machines):
            self._drop(fragment)
        self._payloads.clear()
        self._run = run

    def _machine(self, fragment: int, codec: str) -> Residual:
        format = codec_named(codec)  # its parameters may change from window to window, and the loss stays a loss
        machine = self._machines.get(fragment)
        if machine is None or machine.codec != format.name:
            self._drop(fragment)
            durable = self._folder is not None and format.traits.sparse
            machine = Residual(run=self._run, fragment=fragment, codec=format.name, durable=durable)
            self._machines[fragment] = machine
        return machine

    def _drop(self, fragment: int) -> None:
        """The codec is another one now."""
        if (old := self._machines.pop(fragment, None)) is not None:
            self._do(old, old.reset())
            self._buffers.pop(fragment, None)

    def _do(self, machine: Residual, commands: Iterable[Command]) -> None:
        fragment = machine.fragment
        for command in commands:
            match command:
                case Zero():
                    self._buffers.pop(fragment, None)  # not zeroed: an encoding under way may still write into it
                case Persist(tag=tag):
                    self._persist(tag, self._buffers[fragment])
                case Forget():
                    self._path(fragment).unlink(missing_ok=True)
                case Load():
                    self._load(machine)

    def _persist(self, tag: Tag, buffer: Tensor) -> None:
        path = self._path(tag.fragment)

        def write() -> None:
            temporary = path.with_suffix(".tmp")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file({"residual": buffer.cpu()}, temporary, metadata=_as_metadata(tag))
                with temporary.open("rb") as file:
                    os.fsync(file.fileno())
                temporary.replace(path)
            except (OSError, SafetensorError) as error:  # a crash would cost what it holds, and the run goes on
                temporary.unlink(missing_ok=True)
                _log.warning("residual not saved fragment=%d: %s", tag.fragment, error)

        self._later(write)

    def _load(self, machine: Residual) -> None:
        path, fragment = self._path(machine.fragment), machine.fragment
        try:
            with safe_open(path, framework="pt") as file:
                kept = file.get_tensor("residual")
        except (OSError, SafetensorError) as error:
            _log.warning("residual not restored fragment=%d: %s", fragment, error)
            return self._do(machine, machine.reset())
        buffer = self._buffers[fragment]
        if kept.shape != buffer.shape or kept.dtype != buffer.dtype or not math.isfinite(float(kept.abs().sum())):
            _log.warning("residual not restored fragment=%d: it is not one of this fragment", fragment)
            return self._do(machine, machine.reset())
        buffer.copy_(kept)

    def _read_tag(self, fragment: int) -> Tag | None:
        if self._folder is None or not (path := self._path(fragment)).exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
            return Tag(
                run=metadata["run"], fragment=int(metadata["fragment"]), codec=metadata["codec"],
                version=int(metadata["version"]),
            )  # fmt: skip
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            _log.warning("residual not restored fragment=%d: %s", fragment, error)
            return None

    def _path(self, fragment: int) -> Path:
        assert self._folder is not None
        return self._folder / f"residual-{fragment}.safetensors"


def run_of(spec: RunSpec, history: int) -> str:
    """Identifies the run and its history: a copy on disk is used only if it matches."""
    fingerprint = spec.identity.fingerprint()
    return f"{fingerprint}.{history}" if history else fingerprint


def _as_metadata(tag: Tag) -> dict[str, str]:
    return {"run": tag.run, "fragment": str(tag.fragment), "codec": tag.codec, "version": str(tag.version)}
