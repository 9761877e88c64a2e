"""How a command ends: one line for the person, one number for the scheduler that has to decide whether to retry.

Every expected error is one line on standard error, never a traceback; whatever is left is a bug, and shows all it has.
The table is in `docs/exit-codes.md` and at the foot of `farloop --help`.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING

import typer

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
    INTERRUPTED = 130

    @property
    def meaning(self) -> str:
        """What a person or a scheduler should know."""
        return _MEANINGS[self]


_MEANINGS = {
    ExitCode.DONE: "done, or left in order",
    ExitCode.UNEXPECTED: "unexpected error",
    ExitCode.USAGE: "bad usage or configuration",
    ExitCode.REFUSED: "refused (do not retry)",
    ExitCode.BROKEN_NUMBERS: "NaN or Inf in the weights",
    ExitCode.UNREACHABLE: "unreachable (retry)",
    ExitCode.STORAGE: "storage failed (see to the disk, then retry)",
    ExitCode.INTERRUPTED: "stopped at once by a signal (start again to go on)",
}

EPILOG = "Exit codes: " + ", ".join(f"{code.value} {code.meaning}" for code in ExitCode) + "."


class CommandError(Exception):
    """What this command line itself has to refuse: one line, and the code to end with."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code


def explain(error: BaseException) -> tuple[ExitCode, str] | None:
    """Code and line of an expected error, also one inside a group; None for a surprise."""
    # Imported when something failed, not before: `farloop --help` has no use for the daemons.
    from farloop.coordinator.errors import Fenced, NoFolder, StorageError
    from farloop.monitoring.endpoint import EndpointError
    from farloop.node.data import CorpusError
    from farloop.node.errors import NodeError
    from farloop.quant.errors import BadParameter, UnknownCodec, UnsoundPairing, UnsupportedHost
    from farloop.wire.keys import KeyFileError

    match error:
        case BaseExceptionGroup():
            return next((found for inner in error.exceptions if (found := explain(inner))), None)
        case CommandError():
            return error.code, str(error)
        case NodeError():
            return ExitCode(error.exit_code), str(error)
        case Fenced():
            return ExitCode.REFUSED, _with_next_step(error)
        case NoFolder():
            return ExitCode.USAGE, str(error)
        case StorageError():
            return ExitCode.STORAGE, _with_next_step(error)
        case CorpusError() | KeyFileError() | EndpointError():
            return ExitCode.USAGE, str(error)
        case UnknownCodec() | BadParameter() | UnsoundPairing() | UnsupportedHost():
            return ExitCode.USAGE, str(error)
        case _:
            return None


def _with_next_step(error: "StorageError") -> str:
    return f"{error}; {error.next_step}" if error.next_step else str(error)


@contextmanager
def ended_in_one_line() -> Iterator[None]:
    """Around the body of every command: errors become one line and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("farloop: interrupted", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001 - the edge of the process: it becomes an exit code
        found = explain(error)
        if found is None:
            typer.echo(traceback.format_exc(), err=True)
            found = ExitCode.UNEXPECTED, f"{type(error).__name__}: {error} (this is a bug; the traceback is above)"
        code, line = found
        say_error(line)
        raise typer.Exit(code) from None


def say_error(line: str) -> None:
    """One line on standard error, whatever is in it."""
    typer.echo(f"farloop: error: {' '.join(line.split())}", err=True)
