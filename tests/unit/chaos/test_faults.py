"""The rules by which a storm judges a damaged copy of the state, and a second start: each breach is told."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from farloop.chaos import faults
from farloop.chaos.faults import copy_truncated, examine, second_start
from farloop.chaos.journal_referee import Journal, Unreadable
from farloop.config.exit_codes import ExitCode

WHOLE = Journal({(0, 0): "aa", (0, 1): "bb", (0, 2): "cc"}, (2,))
SHORT = Journal({(0, 0): "aa", (0, 1): "bb"}, (1,))


@dataclass
class Child:
    """A process that has ended with a code, or that runs for ever."""

    name: str
    code: int | None
    log: Path

    @property
    def running(self) -> bool:
        return self.code is None

    @property
    def process(self) -> Any:
        return self

    @property
    def returncode(self) -> int | None:
        return self.code

    def poll(self) -> int | None:
        return self.code

    def last_words(self) -> str:
        return f"{self.name} ended"

    def kill(self) -> None:
        self.code = -9


@dataclass
class Children:
    """What each command comes to, by the last part of its name; None: it runs, and its page answers."""

    folder: Path
    codes: dict[str, int | None]
    started: list[str] = field(default_factory=list)

    def start(self, name: str, arguments: list[str], *, threads: int) -> Child:
        self.started.append(name)
        log = self.folder / f"{name}.log"
        log.write_text("")
        return Child(name, self.codes[name.rpartition("-")[2]], log)


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is found wrong where the referee reads this, a start shows that page, and commands end with these codes."""

    def judge(cut: str, left: Journal | None, page: Any, **codes: int | None) -> list[str]:
        def read(folder: Path) -> Journal:
            if left is None:
                raise Unreadable("damaged")
            return left

        monkeypatch.setattr(faults, "read_journal", read)
        monkeypatch.setattr(faults, "page", lambda http: page)
        wrong: list[str] = []
        children: Any = Children(tmp_path, codes)
        trial = examine(children, "t", tmp_path / "copy", cut, WHOLE, lambda state, http: state, wrong.append)
        assert sum(1 for _ in trial) < 100
        return wrong

    return judge


def at(version: int, digest: str) -> dict[str, Any]:
    return {"versions": [version], "digests": [digest]}


def test_a_start_that_is_where_its_journal_is_is_good(judged: Any) -> None:
    assert judged("metrics.jsonl cut", WHOLE, at(2, "cc"), verify=0, start=None) == []
    assert judged("journal-000000.log cut", SHORT, at(1, "bb"), verify=0, start=None) == []


@pytest.mark.parametrize("page", [at(1, "bb"), at(2, "dd"), at(3, "ee"), at(0, "aa")])
def test_a_start_that_is_elsewhere_is_told(judged: Any, page: Any) -> None:
    (found,) = judged("snapshots/f0-v2.safetensors cut", WHOLE, page, verify=0, start=None)
    assert "the journal is at [2]" in found


def test_a_start_over_a_journal_that_cannot_be_read_is_told(judged: Any) -> None:
    for left in (None, Journal({}, ())):
        (found,) = judged("journal-000000.log cut", left, at(0, "aa"), verify=6, start=None)
        assert "cannot be read" in found
        assert judged("journal-000000.log cut", left, at(2, "cc"), verify=6, start=None) == [], "nothing is lost"


def test_a_refusal_must_be_of_a_vital_file_with_code_6_and_verify_must_have_said_so(judged: Any) -> None:
    good = {"verify": 6, "start": ExitCode.STORAGE, "salvage": 6}
    assert judged("journal-000000.log cut", None, None, **good) == []
    assert "no version needs" in judged("metrics.jsonl cut", WHOLE, None, **good)[0]
    assert "ends with 1" in judged("epoch cut", WHOLE, None, **{**good, "start": 1})[0]
    assert "verify calls the folder whole" in judged("epoch cut", WHOLE, None, **{**good, "verify": 0})[0]


def test_what_salvage_repaired_must_start_with_versions_that_were(judged: Any) -> None:
    codes = {"verify": 6, "start": ExitCode.STORAGE, "salvage": 0, "again": None}
    for page, good in ((at(1, "bb"), True), (at(1, "xx"), False), (at(5, "ff"), False)):
        assert (judged("journal-000000.log cut", None, page, **codes) == []) is good
    (found,) = judged("journal-000000.log cut", None, None, **{**codes, "again": 6})
    assert "refuses what salvage repaired" in found


def test_a_traceback_is_told(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Child, "last_words", lambda self: "boom")
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "Traceback (most recent call last)")
    assert any("traceback" in found for found in judged("epoch cut", WHOLE, at(2, "cc"), verify=6, start=None))


def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, *, locked: bool) -> Iterator[str]:
    """What is found of a second start that ends with a code, or whose page answers."""
    monkeypatch.setattr(faults, "page", lambda http: at(1, "bb") if code is None else None)
    monkeypatch.setattr(faults, "SEEN_S", 0.0)
    children: Any = Children(tmp_path, {"second": code})
    first: Any = Child("first", None, tmp_path / "first.log")
    wrong: list[str] = []
    for _ in second_start(children, "second", lambda: first, 1, tmp_path, locked=locked, wrong=wrong.append):
        assert len(wrong) < 5
    yield from wrong


@pytest.mark.parametrize("locked", [True, False])
def test_two_coordinators_on_one_folder_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool) -> None:
    assert len(list(beside(tmp_path, monkeypatch, None, locked=locked))) == 1
    assert list(beside(tmp_path, monkeypatch, ExitCode.STORAGE, locked=locked)) == []
    assert len(list(beside(tmp_path, monkeypatch, 1, locked=locked))) == 1


def test_one_file_of_a_copy_is_cut_and_the_folder_stays_as_it_was(tmp_path: Path) -> None:
    state = tmp_path / "state"
    (state / "snapshots").mkdir(parents=True)
    for name in ("epoch", "lock", "journal-000000.log", "snapshots/f0-v0.safetensors", "status.json"):
        (state / name).write_bytes(b"0123456789" + bytes(20))
    cut_files = set()
    for seed in range(60):
        copy = tmp_path / f"copy-{seed}"
        cut = copy_truncated(state, copy, random.Random(seed))
        changed = [path for path in copy.rglob("*") if path.is_file() and path.stat().st_size != 30]
        assert len(changed) == 1 and changed[0].stat().st_size < 10
        assert cut.startswith(str(changed[0].relative_to(copy))) and not (copy / "lock").exists()
        cut_files.add(changed[0].name)
    assert cut_files == {"epoch", "journal-000000.log", "f0-v0.safetensors", "status.json"}
    assert all(path.stat().st_size == 30 for path in state.rglob("*") if path.is_file())
