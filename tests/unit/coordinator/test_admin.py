"""The door in the state folder: who may use it, what it answers, and that nothing said to it can hurt (protocol Z)."""

import asyncio
import errno
import json
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from disk_faults import refuse

from farloop.coordinator.admin import MAX_BYTES, NAME, AdminSocket, address_of, ask


async def echo(request: Mapping[str, Any]) -> Mapping[str, Any]:
    if "wrong" in request:
        raise ValueError("that is wrong")
    return {"heard": request}


def talk(folder: Path, *requests: bytes) -> list[bytes]:
    """What a door in this folder answers to each line."""

    def say(line: bytes) -> bytes:
        with socket.socket(socket.AF_UNIX) as client, address_of(folder) as address:
            client.settimeout(30.0)
            client.connect(address)
            client.sendall(line)
            client.shutdown(socket.SHUT_WR)
            try:
                return b"".join(iter(lambda: client.recv(4096), b""))
            except ConnectionResetError:  # closed with bytes of a line that is too long still unread
                return b""

    async def serve() -> list[bytes]:
        door = AdminSocket(folder, {"echo": echo})
        await door.open()
        try:
            return [await asyncio.to_thread(say, request) for request in requests]
        finally:
            await door.close()

    return asyncio.run(serve())


def test_a_folder_that_became_read_only_does_not_hide_why_a_coordinator_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve() -> None:
        door = AdminSocket(tmp_path, {"echo": echo})
        await door.open()
        monkeypatch.setattr(Path, "unlink", refuse(errno.EROFS))
        await door.close()

    asyncio.run(serve())
    assert "admin socket not removed" in caplog.text and "Read-only file system" in caplog.text


ECHO, HEARD = b'{"do": "echo", "n": 1}\n', {"heard": {"do": "echo", "n": 1}}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"do": "echo", "wrong": 1}\n', "that is wrong"),
        (b'{"do": "sing"}\n', "with one of echo"),
        (b"[]\n", "with one of echo"),
        (b"\xff\n", "decode"),
        (b"\n", "Expecting value"),
        (b"[" * 30_000 + b"\n", "recursion"),
    ],
)
def test_what_it_does_not_understand_is_answered_with_a_sentence(tmp_path: Path, line: bytes, said: str) -> None:
    (answer,) = talk(tmp_path, line)
    assert said in json.loads(answer)["error"]


def test_nothing_said_to_it_keeps_it_from_the_next_who_comes(tmp_path: Path) -> None:
    answers = talk(tmp_path, b"", b"x" * (2 * MAX_BYTES), ECHO)
    assert json.loads(answers[-1]) == HEARD


def test_who_asks_gets_the_answer_and_only_the_owner_of_the_folder_may(tmp_path: Path) -> None:
    async def serve() -> tuple[Mapping[str, Any], int]:
        door = AdminSocket(tmp_path, {"echo": echo})
        await door.open()
        try:
            mode = stat.S_IMODE((tmp_path / NAME).stat().st_mode)
            return await asyncio.to_thread(ask, tmp_path, {"do": "echo", "n": 1}, 30.0), mode
        finally:
            await door.close()

    assert asyncio.run(serve()) == (HEARD, 0o600)
    assert not (tmp_path / NAME).exists()


def test_the_socket_of_a_start_that_was_killed_is_in_the_way_of_no_start(tmp_path: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / NAME))
    left.close()
    with pytest.raises(ConnectionRefusedError):
        ask(tmp_path, {"do": "echo"}, 5.0)
    (answer,) = talk(tmp_path, ECHO)
    assert json.loads(answer) == HEARD


def test_a_folder_may_be_deeper_than_a_sockets_address_is_long(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a-long-name-of-a-folder"] * 8)
    deep.mkdir(parents=True)
    (answer,) = talk(deep, ECHO)
    assert json.loads(answer) == HEARD and not (deep / NAME).exists()


def test_without_a_door_the_run_goes_on_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def open_and_close() -> None:
        door = AdminSocket(tmp_path / "nowhere", {})
        await door.open()
        await door.close()

    asyncio.run(open_and_close())
    assert "admin socket unavailable" in caplog.text and "no farloop run set" in caplog.text
