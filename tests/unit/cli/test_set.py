"""`farloop set`: what is asked at the coordinator's door, and how answers and refusals read."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_line import farloop, found

from farloop.config.exit_codes import ExitCode
from farloop.coordinator.admin import AdminSocket

ANSWER = {
    "revision": 2,
    "changes": [
        {"key": "h", "before": 30, "after": 60, "from": "round 9"},
        {"key": "codec_up", "before": "q4", "after": "q8", "from": "windows f0:8, f1:7"},
        {"key": "quorum", "before": None, "after": 2, "from": "windows f0:8, f1:7"},
    ],
}


class Fake:
    """A coordinator that knows nothing but its door."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []

    async def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append(request)
        if request["do"] == "release":
            return {"held": "node b has met epoch 1000, this start has 7", "still": request.get("nodes") and "waits"}
        if "seed" in request["given"]:
            raise ValueError("seed is part of the run's identity")
        return {**ANSWER, "dry_run": request["dry_run"]}


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    coordinator, loop, stop, opened = Fake(), asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        door = AdminSocket(tmp_path, {"set": coordinator, "release": coordinator})
        await door.open()
        opened.set()
        await stop.wait()
        await door.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert opened.wait(30.0)
    yield coordinator
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_it_says_what_changes_and_from_where_on(fake: Fake, tmp_path: Path) -> None:
    result = farloop("set", "h=60", "codec_up=q8", "--state", str(tmp_path))
    assert result.exit_code == ExitCode.DONE
    assert result.stdout.splitlines() == [
        "revision 2 is:",
        "  h 30 → 60 from round 9 on",
        "  codec_up q4 → q8 from windows f0:8, f1:7 on",
        "  quorum none → 2 from windows f0:8, f1:7 on",
    ]
    assert fake.asked == [{"do": "set", "given": {"h": "60", "codec_up": "q8"}, "dry_run": False}]


def test_a_dry_run_says_that_it_is_one(fake: Fake, tmp_path: Path) -> None:
    result = farloop("set", "h=60", "--state", str(tmp_path), "--dry-run")
    assert result.stdout.startswith("revision 2 would be:") and fake.asked[0]["dry_run"] is True


def test_json_is_the_answer(fake: Fake, tmp_path: Path) -> None:
    assert found("set", "h=60", "--state", str(tmp_path)) == {**ANSWER, "dry_run": False}


def test_a_refusal_is_one_line_and_its_exit_code(fake: Fake, tmp_path: Path) -> None:
    result = farloop("set", "seed=3", "--state", str(tmp_path))
    assert result.exit_code == ExitCode.REFUSED
    assert result.stderr == "farloop: error: seed is part of the run's identity\n"


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["h"], ExitCode.USAGE, "'h' is not KEY=VALUE, as outer_lr=0.5"),
        (["=3"], ExitCode.USAGE, "'=3' is not KEY=VALUE"),
        (["h=3", "h=4"], ExitCode.USAGE, "h is set twice"),
        (["h=3"], ExitCode.UNREACHABLE, "is one running on this folder?"),
    ],
)
def test_what_cannot_even_be_asked_is_said(words: list[str], code: ExitCode, line: str, tmp_path: Path) -> None:
    result = farloop("set", *words, "--state", str(tmp_path))
    assert result.exit_code == code and line in result.stderr and result.stderr.count("\n") == 1


def test_the_state_folder_is_state_unless_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of all commands that read one, and as the line has it that a plan ends with."""
    monkeypatch.chdir(tmp_path)
    result = farloop("set", "h=3")
    assert result.exit_code == ExitCode.USAGE and "state: there is no such folder; give" in result.stderr
    (tmp_path / "state").mkdir()
    result = farloop("set", "h=3")
    assert result.exit_code == ExitCode.UNREACHABLE and "no coordinator at state/admin.sock" in result.stderr


def test_a_run_that_is_held_by_a_node_s_word_is_released_by_one_command(fake: Fake, tmp_path: Path) -> None:
    result = farloop("release", "--state", str(tmp_path))
    assert result.exit_code == ExitCode.DONE
    assert result.stdout == "not believed any more: node b has met epoch 1000, this start has 7\nthe run goes on\n"
    result = farloop("release", "--state", str(tmp_path), "--node", "b", "--node", "c")
    assert result.exit_code == ExitCode.DONE and result.stdout.endswith("\nthe run is still held: waits\n")
    assert fake.asked == [{"do": "release"}, {"do": "release", "nodes": ["b", "c"]}]
