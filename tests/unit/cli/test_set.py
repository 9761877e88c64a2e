"""`farloop run set` and `release`: what is asked at the coordinator's door, and how answers and refusals read."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import statuses
from command_line import error_line, farloop, found

from farloop.config.exit_codes import ExitCode
from farloop.coordinator.admin import AdminSocket
from farloop.coordinator.errors import NotNow
from farloop.coordinator.storage.files import DISK

CHANGES = [
    {"key": "h", "before": 30, "after": 60, "from": "round 9"},
    {"key": "codec_up", "before": "q4", "after": "q8", "from": "windows f0:8, f1:7"},
    {"key": "quorum", "before": None, "after": 2, "from": "windows f0:8, f1:7"},
]
ANSWER = {"revision": 2, "changes": CHANGES}


class Fake:
    """A coordinator that knows nothing but its door."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []

    async def __call__(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append(request)
        if request["do"] == "release":
            return {"held": "node b has met epoch 1000, this start has 7", "still": request.get("nodes") and "held"}
        if request["do"] == "forget":
            return {"nodes": ["a", "c"]}
        if "tau" in request["given"]:
            raise ValueError("tau: expected 0 to 14, got 99")
        if "steps" in request["given"]:
            raise NotNow("the run is over")
        return {**ANSWER, "dry_run": request["dry_run"]}


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    coordinator, loop, stop, opened = Fake(), asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        door = AdminSocket(tmp_path, dict.fromkeys(("set", "release", "forget"), coordinator))
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


def test_set_says_what_changes_and_from_where_on(fake: Fake, tmp_path: Path) -> None:
    result = farloop("run", "set", "h=60", "codec_up=q8", "--state", str(tmp_path))
    assert result.exit_code == ExitCode.DONE and result.stdout.splitlines() == [
        "revision 2 is:",
        "  h 30 → 60 from round 9 on",
        "  codec_up q4 → q8 from windows f0:8, f1:7 on",
        "  quorum none → 2 from windows f0:8, f1:7 on",
    ]
    assert fake.asked == [{"do": "set", "given": {"h": "60", "codec_up": "q8"}, "dry_run": False}]
    dry = farloop("run", "set", "h=60", "--state", str(tmp_path), "--dry-run")
    assert dry.stdout.startswith("revision 2 would be:") and fake.asked[1]["dry_run"] is True
    assert found("run", "set", "h=60", "--state", str(tmp_path)) == {**ANSWER, "dry_run": False}
    bad = error_line("run", "set", "tau=99", "--state", str(tmp_path), code=ExitCode.USAGE)
    assert bad == "tau: expected 0 to 14, got 99"
    assert error_line("run", "set", "steps=9", "--state", str(tmp_path), code=ExitCode.REFUSED) == "the run is over"


def test_what_cannot_even_be_asked_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state folder is `state` unless given."""
    monkeypatch.chdir(tmp_path)
    assert "state: there is no such folder; give" in error_line("run", "set", "h=3")
    (tmp_path / "state").mkdir()
    for words, code, line in (
        (["h"], ExitCode.USAGE, "'h' is not KEY=VALUE, as outer_lr=0.5"),
        (["=3"], ExitCode.USAGE, "'=3' is not KEY=VALUE"),
        (["h=3", "h=4"], ExitCode.USAGE, "h is set twice"),
        (["outer_lrr=3"], ExitCode.USAGE, "there is no term 'outer_lrr' that can change; did you mean outer_lr?"),
        (["seed=3"], ExitCode.USAGE, "seed is part of the run's identity"),
        (["h=3"], ExitCode.UNREACHABLE, "no coordinator at state/admin.sock"),
        (["h=3", "--state", str(tmp_path)], ExitCode.UNREACHABLE, "is one running on this folder?"),
    ):
        assert line in error_line("run", "set", *words, code=code)
    with closing(DISK.lock(tmp_path / "state" / "lock")):  # as that of a standby
        for asks in (["run", "set", "h=3"], ["run", "release"], ["status", "--state", "state"]):
            line = error_line(*asks, code=ExitCode.UNREACHABLE)
            assert "state does not answer: it does not lead: it starts, or stands by for another" in line
    (tmp_path / "state" / "status.json").write_text(json.dumps(statuses.finished()))
    line = error_line("run", "set", "steps=48", code=ExitCode.REFUSED)
    assert " is finished after " in line and '[run] init = "state/model.safetensors"' in line
    for told in (["run", "forget", "b"], ["run", "release"]):
        assert error_line(*told, code=ExitCode.REFUSED).endswith("steps: it waits for no node and misses none")


def test_a_run_that_is_held_by_a_node_s_word_is_released_by_one_command(fake: Fake, tmp_path: Path) -> None:
    result = farloop("run", "release", "--state", str(tmp_path))
    assert result.exit_code == ExitCode.DONE
    assert result.stdout == "released: node b has met epoch 1000, this start has 7\nthe run continues\n"
    result = farloop("run", "release", "--state", str(tmp_path), "--node", "b", "--node", "c")
    assert result.exit_code == ExitCode.DONE and result.stdout.endswith("\nheld\n")
    assert fake.asked == [{"do": "release"}, {"do": "release", "nodes": ["b", "c"]}]


def test_a_node_that_does_not_come_back_is_forgotten_by_name(fake: Fake, tmp_path: Path) -> None:
    result = farloop("run", "forget", "b", "--state", str(tmp_path))
    assert result.exit_code == ExitCode.DONE and result.stdout == "node b is forgotten; known nodes: a, c\n"
    assert fake.asked == [{"do": "forget", "node": "b"}]
