"""How commands end: one line on standard error, and an exit code from which a scheduler decides whether to retry.

An expected error has no traceback; an unexpected one is a bug and shows it. The codes are in `docs/exit-codes.md`.
"""

import errno
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from farloop.runtime.log_queue import say

if TYPE_CHECKING:
    from farloop.coordinator.errors import StorageError


class ExitCode(IntEnum):
    """Numbers are never reused."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    REFUSED = 3
    BROKEN_NUMBERS = 4
    UNREACHABLE = 5
    STORAGE = 6
    HUNG = 7
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        return _MEANINGS[self]


def code_of(code: int) -> ExitCode:
    """What a command ends with whose process has ended with this code."""
    return ExitCode(code) if code in set(ExitCode) else ExitCode.UNEXPECTED


_MEANINGS = {
    ExitCode.DONE: "done, or left in order",
    ExitCode.UNEXPECTED: "unexpected error",
    ExitCode.USAGE: "bad usage or configuration",
    ExitCode.REFUSED: "refused (do not retry)",
    ExitCode.BROKEN_NUMBERS: "NaN or Inf in the weights",
    ExitCode.UNREACHABLE: "unreachable (retry)",
    ExitCode.STORAGE: "storage failed (check the disk, then retry)",
    ExitCode.HUNG: "a process hung (retry)",
    ExitCode.INTERRUPTED: "stopped at once by a signal (start again to continue)",
}

EPILOG = "Exit codes: " + ", ".join(f"{code.value} {code.meaning}" for code in ExitCode) + "."


class CommandError(Exception):
    """A refusal of a command: one line, and the exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code


_FULL = {errno.ENOSPC, errno.EDQUOT}
_DISK = {*_FULL, errno.EIO}
"""A file that could be written is not: the disk, not the command, has to change."""

_TOO_LARGE = re.compile(r"DefaultCPUAllocator: .* you tried to allocate (\d+) bytes")  # torch's MemoryError on CPUs
_NO_MEMORY = re.compile(r"can't start new thread|[Cc]annot allocate memory|failed to map segment")
_MORE_MEMORY = "memory or processes run out; raise the limit: ulimit -v, ulimit -u, or the container's"


def cannot_write(path: Path, error: OSError) -> CommandError:
    """Why an output file or folder cannot be written, and what to do."""
    why = (error.strerror or str(error)).lower()
    if error.errno in _DISK:
        return CommandError(f"cannot write {path}: {why}; free space, or name another place", ExitCode.STORAGE)
    if isinstance(error, FileExistsError | NotADirectoryError):
        taken = next((place for place in (path, *path.parents) if place.exists() and not place.is_dir()), path)
        return CommandError(f"cannot write {path}: {taken} is a file, not a folder; name another place")
    if isinstance(error, IsADirectoryError):
        return CommandError(f"cannot write {path}: it is a folder; name another place")
    return CommandError(f"cannot write {path}: {why}; name another place")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of an output file, which the block then writes.

    Raises CommandError in place of an OSError, of the block too.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise cannot_write(path, error) from error


def write_output(path: Path, content: str | bytes) -> None:
    """Write an output file of a command. Raises CommandError."""
    with writing(path):
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def explain(error: BaseException) -> tuple[ExitCode, str] | None:
    """Code and line of an expected error, also inside a group; None for others."""
    # Late, for the speed of `farloop --help`.
    from farloop.coordinator.errors import BindError, Deposed, Fenced, NoFolder, StartRefused, StorageError
    from farloop.coordinator.storage.bucket import CopyFailed
    from farloop.coordinator.storage.files import NO_DESCRIPTOR
    from farloop.monitoring.descriptors import hard_limit
    from farloop.monitoring.endpoint import EndpointError
    from farloop.node.errors import CorpusError, ModelError, NodeError
    from farloop.quant.errors import BadParameter, UnknownCodec, UnsoundPairing, UnsupportedHost
    from farloop.wire.keys import KeyFileError

    match error:
        case BaseExceptionGroup():
            return next((found for inner in error.exceptions if (found := explain(inner))), None)
        case CommandError():
            return error.code, str(error)
        case NodeError():
            return ExitCode(error.exit_code), str(error)
        case Fenced() | Deposed() | StartRefused():
            return ExitCode.REFUSED, _with_next_step(error)
        case NoFolder():
            return ExitCode.USAGE, str(error)
        case StorageError():
            return ExitCode.STORAGE, _with_next_step(error)
        case CorpusError() | KeyFileError() | EndpointError() | ModelError() | BindError() | CopyFailed():
            return ExitCode.USAGE, str(error)
        case UnknownCodec() | BadParameter() | UnsoundPairing() | UnsupportedHost():
            return ExitCode.USAGE, str(error)
        case OSError() if error.errno in _FULL:  # only writing fails so
            told = cannot_write(Path(error.filename or "a file"), error)
            return told.code, str(told)
        case OSError() if error.errno in NO_DESCRIPTOR:
            limit = f"{hard_limit()} may be open here; raise the limit, as by ulimit -n 4096"
            return ExitCode.USAGE, f"too many open files: {limit}"
        case RuntimeError() if asked := _TOO_LARGE.search(str(error)):
            return ExitCode.USAGE, f"there is not enough memory: {int(asked[1]) / 1e9:.3g} GB were asked for at once"
        case MemoryError():
            return ExitCode.USAGE, _MORE_MEMORY
        case OSError() | RuntimeError() | ImportError() if _NO_MEMORY.search(str(error)):
            return ExitCode.USAGE, _MORE_MEMORY
        case _:
            return None


def _with_next_step(error: "StorageError") -> str:
    return f"{error}; {error.next_step}" if error.next_step else str(error)


@contextmanager
def ended_in_one_line() -> Iterator[None]:
    """The error edge of a command: errors become one line and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        say("farloop: interrupted", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001 - the edge of the process: it becomes an exit code
        found = explain(error)
        if found is None:
            say(traceback.format_exc(), err=True)
            found = ExitCode.UNEXPECTED, f"{type(error).__name__}: {error} (this is a bug; the traceback is above)"
        code, line = found
        typer.echo(f"farloop: {line}", err=True) if code is ExitCode.DONE else say_error(line)
        raise typer.Exit(code) from None


def say_error(line: str) -> None:
    say(f"farloop: error: {' '.join(line.split())}", err=True)
