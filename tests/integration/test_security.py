"""Who may come in: keys, the allow-list, and bytes from strangers."""

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from loopback import FARLOOP, PACED, NewRun, Run, assert_all_agree, assert_one_line, merged_since, node_of

from farloop.cli.exit_codes import ExitCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_an_encrypted_run_lets_in_only_whom_it_knows_and_loses_whom_it_forgets(new_run: NewRun) -> None:
    run = new_run(steps=200, **PACED)
    keys = new_keys(run, "coordinator", "a", "b", "stranger")
    allow_only(run, "a", "b")
    run.tables["coordinator"] |= {"key": str(keys / "coordinator.key"), "allow": str(run.folder / "allow")}
    coordinator = run.start_coordinator()
    a = run.start_metronome("a", **keys_of(keys, "a"))
    b = run.start_node("b", **keys_of(keys, "b"))
    versions = run.until("both train", lambda s: merged_since(s, [0, 0, 0], "b"))["versions"]

    stranger = run.start_node("stranger", **keys_of(keys, "stranger"))
    fooled = run.start_node("fooled", **{**keys_of(keys, "b"), "server_key": str(keys / "stranger.pub")})
    claimant = run.start_node("somebody", **keys_of(keys, "b"))
    plain = run.start_node("plain")
    assert run.until_ended(stranger) == ExitCode.REFUSED
    assert_one_line(stranger, "allow-list")
    assert run.until_ended(claimant) == ExitCode.REFUSED
    assert_one_line(claimant, "the key is that of b, the node calls itself somebody")
    run.until_said(fooled.log, "no link")
    run.until_said(plain.log, "no link")
    status = run.until("others are unaffected", lambda s: merged_since(s, versions, "b"))
    assert [node["name"] for node in status["nodes"]] == ["a", "b"]
    assert fooled.running and plain.running, "they are not refused: nobody they could believe has answered"
    fooled.end()
    plain.end()

    (run.folder / "allow" / "b.pub").unlink()
    assert run.until_ended(b) == ExitCode.REFUSED
    assert_one_line(b, "allow-list")
    run.until("b's session is over", lambda s: not node_of(s, "b")["connected"])
    run.hurry()
    status = run.until_done(coordinator, a)
    assert_all_agree(run, status, "a")


def test_garbage_on_the_port_harms_nobody(new_run: NewRun) -> None:
    run = new_run(steps=120, **PACED)
    coordinator, a, b = run.start_coordinator(), run.start_metronome("a"), run.start_node("b")
    versions = run.until("both train", lambda s: merged_since(s, [0, 0, 0], "b"))["versions"]
    throw(run, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 64, GREETING + os.urandom(512))
    throw(run, GREETING + READY + frames(os.urandom(40)), GREETING + READY + frames(b"", b"\x01", os.urandom(300)))
    throw(run, GREETING + READY + b"\x02" + (1 << 62).to_bytes(8, "big"))
    run.until_said(coordinator.log, "bad frame")
    run.until("the run goes on", lambda s: merged_since(s, versions, "b"))
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert [node["name"] for node in status["nodes"]] == ["a", "b"]
    assert [node["lost_steps"] for node in status["nodes"]] == [0, 0]


def test_no_one_is_exposed_without_keys_unless_told_so(new_run: NewRun) -> None:
    run = new_run(steps=10)
    run.tables["coordinator"]["bind"] = f"tcp://0.0.0.0:{run.port}"
    careless = run.start_coordinator()
    assert run.until_ended(careless) == ExitCode.USAGE
    assert_one_line(careless, "[coordinator] bind", "goes beyond this machine", "insecure = true")
    run.tables["coordinator"]["insecure"] = True
    told = run.start_coordinator()
    run.until("it serves", lambda status: status["run"]["state"] == "waiting")
    told.signal(signal.SIGTERM)
    assert run.until_ended(told) == ExitCode.DONE


# --- keys


def new_keys(run: Run, *names: str) -> Path:
    """A folder of pairs, made as a person makes them."""
    for making in [run.start(f"keys-{name}", *FARLOOP, "keys", "new", "keys", "--name", name) for name in names]:
        assert run.until_ended(making) == 0, run.logs()
    return run.folder / "keys"


def allow_only(run: Run, *names: str) -> None:
    folder = run.folder / "allow"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.pub").write_bytes((run.folder / "keys" / f"{name}.pub").read_bytes())


def keys_of(keys: Path, name: str) -> dict[str, Any]:
    return {"key": str(keys / f"{name}.key"), "server_key": str(keys / "coordinator.pub")}


# --- bytes that nobody asked for

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_DEALER = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY = bytes([4, len(_DEALER)]) + _DEALER
"""With these a stranger is a peer (ZMTP 3.0): what follows reaches the coordinator itself."""


def throw(run: Run, *payloads: bytes) -> None:
    """Each over a connection of its own; the coordinator may hang up whenever it likes."""
    for payload in payloads:
        with socket.create_connection(("127.0.0.1", run.port), timeout=10) as connection:
            connection.settimeout(0.5)
            try:
                connection.sendall(payload)
                while connection.recv(4096):
                    pass
            except OSError:
                continue


def frames(*parts: bytes) -> bytes:
    """One ZeroMQ message, as ZMTP 3.0 frames it."""
    more = [1] * (len(parts) - 1) + [0]
    return b"".join(
        bytes([flag | 2]) + len(part).to_bytes(8, "big") + part for flag, part in zip(more, parts, strict=True)
    )
