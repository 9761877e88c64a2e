"""Errors become one line and a number."""

import re
from pathlib import Path

import pytest
import typer

from farloop.config.exit_codes import EPILOG, CommandError, ExitCode, ended_in_one_line, explain
from farloop.coordinator import errors
from farloop.coordinator.errors import StateLocked, StorageError, StorageFailed
from farloop.monitoring.endpoint import EndpointError
from farloop.node.data import CorpusError
from farloop.node.errors import DataError, LayoutMismatch, NonFiniteDelta, Refused, Unreachable
from farloop.quant.errors import UnknownCodec
from farloop.wire.keys import KeyFileError

DOCUMENT = Path(__file__).parents[3] / "docs" / "exit-codes.md"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CommandError("x"), ExitCode.USAGE),
        (CommandError("x", ExitCode.UNREACHABLE), ExitCode.UNREACHABLE),
        (CorpusError("x"), ExitCode.USAGE),
        (KeyFileError("x"), ExitCode.USAGE),
        (EndpointError("x"), ExitCode.USAGE),
        (UnknownCodec("q5", ["q4"]), ExitCode.USAGE),
        (Refused("x"), ExitCode.REFUSED),
        (LayoutMismatch("x"), ExitCode.REFUSED),
        (DataError("x"), ExitCode.REFUSED),
        (NonFiniteDelta("w", 3), ExitCode.BROKEN_NUMBERS),
        (Unreachable("x"), ExitCode.UNREACHABLE),
        (StorageFailed(Path("/s"), "x"), ExitCode.STORAGE),
        (StateLocked(Path("/s")), ExitCode.STORAGE),
    ],
)
def test_every_expected_error_has_its_code(error: Exception, code: ExitCode) -> None:
    found = explain(error)
    assert found is not None
    assert found[0] == code and found[1].startswith(str(error))


A_STORAGE_ERROR: dict[type[StorageError], StorageError] = {
    errors.JournalCorrupt: errors.JournalCorrupt(Path("/s"), 7, "x"),
    errors.StateLocked: errors.StateLocked(Path("/s")),
    errors.DiskFull: errors.DiskFull(Path("/s"), 2, 1),
    errors.ReadOnly: errors.ReadOnly(Path("/s")),
    errors.NoDescriptor: errors.NoDescriptor(Path("/s")),
    errors.StorageFailed: errors.StorageFailed(Path("/s"), "x"),
    errors.Fenced: errors.Fenced(Path("/s"), 1, 2),
    errors.FolderChanged: errors.FolderChanged(Path("/s"), "x"),
    errors.SnapshotCorrupt: errors.SnapshotCorrupt(Path("/s"), "x"),
    errors.Inconsistent: errors.Inconsistent(Path("/s"), "x"),
    errors.NoFolder: errors.NoFolder(Path("/s")),
}
WHAT_TO_DO = re.compile(r"; (stop|farloop journal|free|find out|raise|check|leave|this coordinator stops\. See|give) ")


@pytest.mark.parametrize("error", A_STORAGE_ERROR.values(), ids=lambda error: type(error).__name__)
def test_every_storage_error_names_the_next_step(error: StorageError) -> None:
    """The line said what is wrong, and not what to do."""
    found = explain(error)
    assert found is not None and WHAT_TO_DO.search(found[1]), found


def test_no_storage_error_is_left_out() -> None:
    """StateMismatch itself is raised with a text of its own, which says what to do."""
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StorageError)}
    assert kinds - {StorageError, errors.NoRoom, errors.StateMismatch} == A_STORAGE_ERROR.keys()


def test_an_expected_error_is_found_inside_the_groups_of_tasks() -> None:
    group = ExceptionGroup("tasks", [RuntimeError("x"), ExceptionGroup("more", [StorageFailed(Path("/s"), "fsync")])])
    found = explain(group)
    assert found is not None and found[0] == ExitCode.STORAGE and found[1].startswith("/s: fsync; check the disk")


@pytest.mark.parametrize("error", [RuntimeError("x"), ValueError("x"), OSError("x"), ExceptionGroup("g", [KeyError()])])
def test_a_surprise_is_not_explained_away(error: Exception) -> None:
    assert explain(error) is None


def test_an_expected_error_ends_in_one_line_without_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end, ended_in_one_line():
        raise CommandError("two\nlines", ExitCode.REFUSED)
    assert end.value.exit_code == 3
    assert capsys.readouterr().err == "farloop: error: two lines\n"


def test_a_surprise_shows_its_traceback_and_ends_with_a_line_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end, ended_in_one_line():
        raise RuntimeError("x")
    error = capsys.readouterr().err
    assert end.value.exit_code == 1
    assert error.startswith("Traceback")
    assert error.splitlines()[-1].startswith("farloop: error: RuntimeError: x (this is a bug")


def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end, ended_in_one_line():
        raise KeyboardInterrupt
    assert end.value.exit_code == 130
    assert capsys.readouterr().err == "farloop: interrupted\n"


def test_all_codes_stand_in_the_help_and_in_the_document() -> None:
    rows = [line.split("|")[1].strip() for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row for row in rows if row.isdecimal()] == [str(code.value) for code in ExitCode]
    assert all(f"{code.value} {code.meaning}" in EPILOG for code in ExitCode)
