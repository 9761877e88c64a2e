"""The rules by which a storm judges a damaged copy of the state, and a second start: each breach is told."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from farloop.config.exit_codes import ExitCode
from farloop.lab.chaos import faults
from farloop.lab.chaos.faults import copy_truncated, examine, second_start
from farloop.lab.chaos.journal_referee import Journal, Unreadable

WHOLE = Journal({(0, 0): "aa", (0, 1): "bb", (0, 2): "cc"}, (2,))
SHORT = Journal({(0, 0): "aa", (0, 1): "bb"}, (1,))
EMPTY = Journal({}, ())


@dataclass
class Child:
    """A process that has ended with a code, or that runs for ever."""

    name: str
    returncode: int | None
    log: Path

    @property
    def running(self) -> bool:
        return self.returncode is None

    @property
    def process(self) -> Any:
        return self

    def poll(self) -> int | None:
        return self.returncode

    def last_words(self) -> str:
        return f"{self.name} ended"

    def kill(self) -> None:
        self.returncode = -9


@dataclass
class Children:
    """What each command comes to, by the last part of its name; None: it runs, and its page answers."""

    folder: Path
    codes: dict[str, int | None]
    says: str = ""
    started: list[str] = field(default_factory=list)

    def start(self, name: str, arguments: list[str], *, threads: int) -> Child:
        self.started.append(name)
        log = self.folder / f"{name}.log"
        log.write_text(self.says)
        return Child(name, self.codes[name.rpartition("-")[2]], log)


def at(version: int, digest: str) -> dict[str, Any]:
    return {"versions": [version], "digests": [digest]}


JOURNAL, SNAPSHOT, METRICS, EPOCH = (
    f"{name} cut" for name in ("journal-000000.log", "snapshots/f0-v2.safetensors", "metrics.jsonl", "epoch")
)
STARTS: dict[str, int | None] = {"verify": 0, "start": None}
UNREAD: dict[str, int | None] = {"verify": 6, "start": None}
REFUSES: dict[str, int | None] = {"verify": 6, "start": ExitCode.STORAGE, "salvage": 6}
SALVAGED: dict[str, int | None] = {"verify": 6, "start": ExitCode.STORAGE, "salvage": 0, "again": None}


@pytest.mark.parametrize(
    ("cut", "left", "page", "codes", "told"),
    [
        # A start is where its journal is.
        (METRICS, WHOLE, at(2, "cc"), STARTS, ""),
        (JOURNAL, SHORT, at(1, "bb"), STARTS, ""),
        *((SNAPSHOT, WHOLE, at(*where), STARTS, "the journal is at [2]") for where in ((1, "bb"), (2, "dd"), (3, "e"))),
        # A start over a journal that cannot be read loses nothing.
        *((JOURNAL, left, at(0, "aa"), UNREAD, "cannot be read") for left in (None, EMPTY)),
        *((JOURNAL, left, at(2, "cc"), UNREAD, "") for left in (None, EMPTY)),
        # A refusal is of a vital file, with code 6, and verify says so too.
        (JOURNAL, None, None, REFUSES, ""),
        (METRICS, WHOLE, None, REFUSES, "no version needs"),
        (EPOCH, WHOLE, None, {**REFUSES, "start": 1}, "ends with 1"),
        (EPOCH, WHOLE, None, {**REFUSES, "verify": 0}, "verify calls the folder whole"),
        # What salvage repaired starts, with versions that were.
        (JOURNAL, None, at(1, "bb"), SALVAGED, ""),
        (JOURNAL, None, at(1, "xx"), SALVAGED, "t"),
        (JOURNAL, None, at(5, "ff"), SALVAGED, "t"),
        (JOURNAL, None, None, {**SALVAGED, "again": 6}, "refuses what salvage repaired"),
    ],
)
def test_each_breach_of_a_damaged_copy_is_told(
    cut: str, left: Journal | None, page: Any, codes: dict[str, int | None], told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`left` is what the referee reads (None: it cannot), `page` what a start shows."""
    for says in ("", "Traceback (most recent call last)"):
        wrong = judge(cut, left, page, Children(tmp_path, codes, says), monkeypatch)
        breaches = [one for one in wrong if "traceback" not in one]
        assert len(breaches) == bool(told) and (not told or told in breaches[0]), wrong
        assert says == "" or len(wrong) > len(breaches), "a traceback is told, too"


def judge(cut: str, left: Journal | None, page: Any, children: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def read(folder: Path) -> Journal:
        if left is None:
            raise Unreadable("damaged")
        return left

    monkeypatch.setattr(faults, "read_journal", read)
    monkeypatch.setattr(faults, "page", lambda http: page)
    wrong: list[str] = []
    trial = examine(children, "t", children.folder / "copy", cut, WHOLE, lambda state, http: state, wrong.append)
    assert sum(1 for _ in trial) < 100
    return wrong


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize(("code", "breaches"), [(None, 1), (1, 1), (ExitCode.STORAGE, 0)])
def test_two_coordinators_on_one_folder_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool, code: int | None, breaches: int
) -> None:
    monkeypatch.setattr(faults, "page", lambda http: at(1, "bb") if code is None else None)
    monkeypatch.setattr(faults, "SEEN_S", 0.0)
    children: Any = Children(tmp_path, {"second": code})
    first: Any = Child("first", None, tmp_path / "first.log")
    wrong: list[str] = []
    for _ in second_start(children, "second", lambda: first, 1, tmp_path, locked=locked, wrong=wrong.append):
        assert len(wrong) < 5
    assert len(wrong) == breaches


def test_one_file_of_a_copy_is_cut_and_the_folder_stays_as_it_was(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "snapshots").mkdir(parents=True)
    for name in ("epoch", "lock", "journal-000000.log", "snapshots/f0-v0.safetensors", "status.json"):
        (state / name).write_bytes(b"0123456789" + bytes(20))
    cut_files = set()
    for seed in range(60):
        copy = tmp_path / f"copy-{seed}"
        cut = copy_truncated(state, copy, random.Random(seed))
        (changed,) = (path for path in copy.rglob("*") if path.is_file() and path.stat().st_size != 30)
        assert changed.stat().st_size < 10 and not (copy / "lock").exists()
        assert cut.startswith(str(changed.relative_to(copy)))
        cut_files.add(changed.name)
    assert cut_files == {"epoch", "journal-000000.log", "f0-v0.safetensors", "status.json"}
    assert all(path.stat().st_size == 30 for path in state.rglob("*") if path.is_file())
