"""Errors become one line and a number."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import typer

from farloop.cli import agent, ranks
from farloop.config.exit_codes import (
    EPILOG,
    CommandError,
    ExitCode,
    code_of,
    ended_in_one_line,
    explain,
    write_output,
    writing,
)
from farloop.coordinator import errors
from farloop.coordinator.errors import BindError, StorageError
from farloop.coordinator.storage.bucket import CopyFailed
from farloop.monitoring.endpoint import EndpointError
from farloop.node.errors import CorpusError, DataError, LayoutMismatch, NonFiniteDelta, Refused, Unreachable
from farloop.quant.errors import UnknownCodec
from farloop.wire.keys import KeyFileError

DOCUMENT = Path(__file__).parents[3] / "docs" / "exit-codes.md"
FOLDER = Path("/s")
STORAGE_ERRORS: dict[type[StorageError], StorageError] = {
    errors.JournalCorrupt: errors.JournalCorrupt(FOLDER, 7, "x"),
    errors.StateLocked: errors.StateLocked(FOLDER),
    errors.DiskFull: errors.DiskFull(FOLDER, 2, 1),
    errors.ReadOnly: errors.ReadOnly(FOLDER),
    errors.NoDescriptor: errors.NoDescriptor(FOLDER),
    errors.StorageFailed: errors.StorageFailed(FOLDER, "x"),
    errors.ObjectFailed: errors.ObjectFailed(FOLDER, "x"),
    errors.Fenced: errors.Fenced(FOLDER, 1, 2),
    errors.FolderChanged: errors.FolderChanged(FOLDER, "x"),
    errors.SnapshotCorrupt: errors.SnapshotCorrupt(FOLDER, "x"),
    errors.Inconsistent: errors.Inconsistent(FOLDER, "x"),
    errors.Deposed: errors.Deposed(FOLDER, "b", 7),
    errors.NoFolder: errors.NoFolder(FOLDER),
}
WHAT_TO_DO = re.compile(
    r"; (stop|farloop journal|free|find out|raise|check|leave|start|this coordinator stops\. Find|give) "
)


def test_every_expected_error_has_its_code() -> None:
    for code, expected in {
        ExitCode.USAGE: (CommandError("x"), CorpusError("x"), KeyFileError("x"), EndpointError("x"),
                         UnknownCodec("q5", ["q4"]), STORAGE_ERRORS[errors.NoFolder],
                         CopyFailed("x"), BindError("tcp://a:1", OSError("x"))),
        ExitCode.UNREACHABLE: (CommandError("x", ExitCode.UNREACHABLE), Unreachable("x")),
        ExitCode.REFUSED: (Refused("x"), LayoutMismatch("x"), DataError("x"), errors.StartRefused(FOLDER, "x")),
        ExitCode.BROKEN_NUMBERS: (NonFiniteDelta("w", 3),),
        ExitCode.STORAGE: (STORAGE_ERRORS[errors.StorageFailed], STORAGE_ERRORS[errors.StateLocked]),
    }.items():  # fmt: skip
        for error in expected:
            found = explain(error)
            assert found is not None and found[0] == code and found[1].startswith(str(error)), error
    for surprise in (RuntimeError("x"), ValueError("x"), OSError("x"), ExceptionGroup("g", [KeyError()])):
        assert explain(surprise) is None
    inside = ExceptionGroup("more", [STORAGE_ERRORS[errors.StorageFailed]])
    assert explain(ExceptionGroup("tasks", [RuntimeError("x"), inside])) == explain(inside.exceptions[0])


def test_every_storage_error_names_the_next_step() -> None:
    """StateMismatch itself and StartRefused are raised with a text of their own, which says what to do."""
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, StorageError)}
    assert kinds - {StorageError, errors.NoRoom, errors.StateMismatch, errors.StartRefused} == STORAGE_ERRORS.keys()
    for error in STORAGE_ERRORS.values():
        found = explain(error)
        assert found is not None and WHAT_TO_DO.search(found[1]), found


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (CommandError("two\nlines", ExitCode.REFUSED), 3, r"farloop: error: two lines\n"),
        (RuntimeError("x"), 1, r"(?s)Traceback.*farloop: error: RuntimeError: x \(this is a bug[^\n]*\n"),
        (KeyboardInterrupt(), 130, r"farloop: interrupted\n"),
        (
            OSError(28, "No space left on device", "/o/run.toml"),
            6,
            r"farloop: error: cannot write /o/run.toml: no space .*\n",
        ),
        (
            OSError(28, "No space left on device"),
            6,
            r"farloop: error: cannot write a file: no space left on device; .*\n",
        ),
        (
            OSError(24, "Too many open files"),
            2,
            r"farloop: error: too many open files: \d+ may be .*, as by ulimit -n 4096\n",
        ),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to "
                "allocate 4000000000 bytes. Error code 12"
            ),
            2,
            r".*not enough memory: 4 GB were asked for.*\n",
        ),
        (MemoryError(), 2, r"farloop: error: memory or processes run out; .*\n"),
        (
            ImportError("libtorch_cpu.so: failed to map segment"),
            2,
            r"farloop: error: memory or processes run out; .*\n",
        ),
    ],
)
def test_an_expected_error_ends_in_one_line_and_a_surprise_with_its_traceback(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as end, ended_in_one_line():
        raise error
    assert end.value.exit_code == code and re.fullmatch(line, capsys.readouterr().err)


def test_a_line_is_written_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(typer.Exit), ended_in_one_line():
        threading.Thread().start()
    assert capsys.readouterr().err.startswith("farloop: error: memory or processes run out; ")


LOADS = """
import signal
try:
    signal.raise_signal(signal.SIGTERM)
    __import__("time").sleep(60)
except BaseException as error:
    print("native code lost", repr(error))
"""


@pytest.mark.parametrize(
    ("inside", "ends", "code", "printed"),
    [
        ("import loads", "", ExitCode.INTERRUPTED, ""),
        ("signal.raise_signal(signal.SIGINT); time.sleep(60)", "", ExitCode.INTERRUPTED, "cleaned\n"),
        ("signal.raise_signal(signal.SIGTERM); time.sleep(60)", "cleans", ExitCode.INTERRUPTED, ""),
        ("raise CommandError('full', ExitCode.STORAGE)", "exits", ExitCode.STORAGE, "cleaned\n"),
        ("raise CommandError('full', ExitCode.STORAGE)", "torn down", ExitCode.STORAGE, "cleaned\n"),
    ],
)
def test_a_signal_at_any_moment_ends_a_command_with_its_code_and_no_traceback(
    tmp_path: Path, inside: str, ends: str, code: ExitCode, printed: str
) -> None:
    """`ends`: where a second signal finds it."""
    (tmp_path / "loads.py").write_text(LOADS)
    (tmp_path / "command.py").write_text(f"""
import atexit, signal, sys, time
from farloop.cli import main
from farloop.cli.options import Commands
from farloop.config.exit_codes import CommandError, ExitCode

def signalled(at):
    if at == {ends!r}:
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.5)

class Last:
    def __del__(self, signalled=signalled):
        signalled("torn down")

sys.modules["last"] = Last()
main.app = Commands("A command.")

@main.app.command()
def works():
    try:
        {inside}
    finally:
        signalled("cleans")
        print("cleaned", flush=True)

atexit.register(signalled, "exits")
main.main()
""")
    ended = subprocess.run([sys.executable, "command.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (code, printed), ended.stderr
    assert ended.stderr == ("farloop: interrupted\n" if code == ExitCode.INTERRUPTED else "farloop: error: full\n")


@pytest.mark.parametrize(
    ("code", "told"), [(6, ExitCode.STORAGE), (-9, ExitCode.UNEXPECTED), (77, ExitCode.UNEXPECTED)]
)
def test_a_command_ends_with_the_code_of_its_process(code: int, told: ExitCode) -> None:
    assert code_of(code) is told


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(28, "No space left on device"), ExitCode.STORAGE, "no space left on device; free space, or name"),
        (OSError(5, "Input/output error"), ExitCode.STORAGE, "input/output error; free space, or name another place"),
        (OSError(30, "Read-only file system"), ExitCode.USAGE, "read-only file system; name another place"),
        (PermissionError(13, "Permission denied"), ExitCode.USAGE, "permission denied; name another place"),
    ],
)
def test_an_unwritable_output_file_is_one_line(tmp_path: Path, error: OSError, code: ExitCode, line: str) -> None:
    path = tmp_path / "new" / "out.json"
    with pytest.raises(CommandError, match=re.escape(f"cannot write {path}: {line}")) as caught, writing(path):
        raise error
    assert caught.value.code is code


def test_a_file_in_a_folder_s_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path, line in (
        (tmp_path / "file" / "new" / "x", f"{tmp_path}/file is a file, not a folder"),
        (tmp_path / "file" / "x", f"{tmp_path}/file is a file, not a folder"),
        (tmp_path / "folder", "it is a folder"),
    ):
        with pytest.raises(CommandError, match=re.escape(f"cannot write {path}: {line}; name another place")):
            write_output(path, "x")
    write_output(tmp_path / "a" / "b", "x")
    assert (tmp_path / "a" / "b").read_text() == "x"


def test_all_codes_stand_in_the_help_and_in_the_document() -> None:
    rows = [line.split("|")[1].strip() for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row for row in rows if row.isdecimal()] == [str(code.value) for code in ExitCode]
    assert all(f"{code.value} {code.meaning}" in EPILOG for code in ExitCode)


def test_of_several_ranks_the_one_that_knows_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for codes, code in (
        ({0: 3, 1: 1}, ExitCode.REFUSED),
        ({1: 1, 0: 4}, ExitCode.BROKEN_NUMBERS),
        ({1: 2}, ExitCode.USAGE),
        ({1: 1}, ExitCode.UNEXPECTED),
        ({0: -9, 1: 1}, ExitCode.UNEXPECTED),
        ({0: 77}, ExitCode.UNEXPECTED),
    ):
        assert agent.outcome(codes) is code
    environments: list[dict[str, str]] = [{}, {"RANK": "3"}, {"WORLD_SIZE": "4", "RANK": "3"}]
    assert [ranks.rank_of(environ) for environ in environments] == [None, None, 3], "only torchrun gives a rank"
    monkeypatch.setattr(ranks, "LINGER_S", 0.0)
    for rank, error, kind, line in (
        (2, "[gloo/pair.cc:553] Connection closed by peer", CommandError, "rank 2 lost another rank"),
        (2, "CUDA out of memory", RuntimeError, "out of memory"),
    ):
        with pytest.raises(kind, match=line), ranks.lets_others_report(rank):
            raise RuntimeError(error)
