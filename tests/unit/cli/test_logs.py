"""Log lines: pairs told apart, on one line or as JSON."""

import ast
import fcntl
import json
import logging
import os
import shlex
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.config.logs import JsonLines, KeyValueLines, LogLevel, pairs_of, set_up
from farloop.runtime.log_queue import MOST_WAITING, BackgroundWriter, LogQueue, dropped_lines, say

ROOT = Path(__file__).parents[3]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]


def record(message: str, *args: object, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("farloop.node.link", logging.WARNING, "f.py", 1, message, args, exc_info)  # type: ignore[arg-type]


def test_what_stands_before_the_first_pair_is_the_event_and_quoted_values_keep_their_spaces() -> None:
    assert pairs_of("journal open path=/x records=3") == {"event": "journal open", "path": "/x", "records": "3"}
    assert pairs_of("just words") == {"event": "just words"}
    assert pairs_of("event=page_failed path=/x") == {"event": "page_failed", "path": "/x"}
    assert pairs_of("commit why='all 2 came, h=3' n=1") == {"event": "commit", "why": "all 2 came, h=3", "n": "1"}


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_comes_back_from_its_repr(text: str) -> None:
    assert pairs_of(f"event_name reason={text!r} after=1") == {"event": "event_name", "reason": text, "after": "1"}


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        (
            "not saved fragment=1: [Errno 28] No space left on device: '/x'; a restart takes snapshots",
            {"fragment": "1", "detail": "[Errno 28] No space left on device: '/x'; a restart takes snapshots"},
        ),
        ("not saved path='a b:' n=2: it is gone", {"path": "a b:", "n": "2", "detail": "it is gone"}),
        ("not saved n=1: a record says event=none n=3", {"n": "1", "detail": "a record says event=none n=3"}),
        ("not saved n=1 detail='late' again", {"n": "1", "detail": "late; again"}),
        ("not saved n=1: a=b c=d; tried again", {"n": "1", "detail": "a=b c=d; tried again"}),
        ("not saved path='b:' n=2: it is gone", {"path": "b:", "n": "2", "detail": "it is gone"}),
        ("not saved host=:: port=7: it is gone", {"host": "::", "port": "7", "detail": "it is gone"}),
        ("not saved in='a': free space in /x", {"in": "a", "detail": "free space in /x"}),
    ],
)
def test_text_after_the_pairs_is_kept_and_adds_no_fields(message: str, fields: dict[str, str]) -> None:
    expected = {"event": "not saved", **fields}
    assert pairs_of(message) == expected
    assert expected.items() <= json.loads(JsonLines().format(record("%s", message))).items()
    line = KeyValueLines().format(record("%s", message))
    assert pairs_of(line).items() >= expected.items()


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_whatever_an_error_says_the_pairs_before_it_stay(text: str) -> None:
    fields = pairs_of(f"anchor not saved fragment=1: {text}; tried again")
    assert fields.keys() == {"event", "fragment", "detail"}
    assert fields["event"] == "anchor not saved" and fields["fragment"] == "1"
    assert text.strip(" :;,\n") in fields["detail"]


def test_a_line_has_time_level_and_place_first() -> None:
    line = KeyValueLines().format(record("session ended reason=%s detail=%r", "CLOSED", "the link was cut"))
    time, *words = shlex.split(line)
    assert time.startswith("ts=20") and time.endswith("Z")
    assert words == ["level=warning", "at=node.link", "event=session ended", "reason=CLOSED", "detail=the link was cut"]


def test_json_lines_hold_the_same_and_a_traceback_as_a_field() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = JsonLines().format(record("page failed path=%s", "/x", exc_info=sys.exc_info()))
    fields = json.loads(line)
    assert {"event": "page failed", "path": "/x", "level": "warning", "at": "node.link"}.items() <= fields.items()
    assert "ValueError: broken" in fields["traceback"] and "\n" not in line


def test_every_event_that_is_logged_has_words_or_fields() -> None:
    """The name of an event alone, as `isolated end`, says neither why nor of what."""
    bare = list[str]()
    for path in (
        path for name in PACKAGES[1:] for path in ROOT.glob(f"{name.partition('.')[2].replace('.', '/')}/*.py")
    ):
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="_log")), args=args):
                    text = next((arg.value for arg in args if isinstance(arg, ast.Constant)), "an expression = any")
                    if "=" not in text and "%" not in text and len(text.split()) < 5:
                        bare.append(f"{path.relative_to(ROOT)}:{call.lineno} {text}")
    assert not bare


# --- Output without a reader


@contextmanager
def small_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end to read of a pipe that is standard error, where logs go."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    handlers, level = logging.root.handlers[:], logging.root.level
    logging.root.handlers[:] = []
    with os.fdopen(write, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        set_up(LogLevel.INFO)
        yield read
        logging.captureWarnings(False)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def test_lines_without_a_reader_are_dropped_and_counted_and_the_gap_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_pipe(monkeypatch) as pipe:
        read_late(pipe)


def read_late(pipe: int) -> None:
    written = 2 * MOST_WAITING
    for number in range(written):
        logging.info("line number=%d", number)
    dropped = dropped_lines()
    assert 0 < dropped <= written - MOST_WAITING, "none of them waited for a reader"
    (handler,) = logging.root.handlers
    assert isinstance(handler, LogQueue)
    handler.flush()  # does not wait for a reader either, or this test ends here
    lines = list[str]()

    def reads() -> None:
        with os.fdopen(pipe) as stream:
            lines.extend(stream)

    reader = threading.Thread(target=reads)
    reader.start()
    while not handler.writer.flush():
        pass
    logging.info("last")
    say("farloop: error: the very last", err=True)
    sys.stderr.close()
    reader.join()
    numbers = [int(pairs_of(line)["number"]) for line in lines if " event=line " in line]
    assert numbers == sorted(numbers) and len(numbers) == written - dropped
    (gap,) = (pairs_of(line) for line in lines if "lines dropped" in line)
    assert gap["count"] == str(dropped)
    assert pairs_of(lines[-2])["event"] == "last" and lines[-1] == "farloop: error: the very last\n"


def test_no_caller_waits_for_a_line_to_be_printed_or_a_pipe_without_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with small_pipe(monkeypatch) as pipe:
        say("x" * 10_000, err=True)
        os.close(pipe)
        logging.info("into a broken pipe")
        logging.info("%d is a line that cannot be formatted", "x")
        say("and so is this", err=True)
        assert dropped_lines() == 2


def test_what_does_not_take_an_item_stops_no_caller() -> None:
    hangs, taken = threading.Event(), list[int]()
    writer = BackgroundWriter[int]("t", lambda item: (hangs.wait(), taken.append(item)), 2)
    for item in range(5):
        writer.put(item)
    assert not writer.flush(0.01) and writer.dropped in (2, 3)
    hangs.set()
    assert writer.flush() and len(taken) == 5 - writer.dropped
