"""Who may come in: keys, the allow-list, and bytes from strangers."""

import os
import signal
import socket
import time
import urllib.request

import pytest
from keyring import authorize, keys_of, new_keys, revoke
from loopback import PACED, NewRun, Run, assert_all_agree, assert_one_line, merged_since, node_of
from strangers import strangers_at

from farloop.config.exit_codes import ExitCode
from farloop.coordinator.decide.records import KeysChanged
from farloop.coordinator.storage.segment import Entry
from farloop.coordinator.storage.state_reader import read_journal

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

REVOKED_WITHIN_S = 10.0
"""The folder is looked at every second; the rest is for a machine that has other things to do."""


def test_an_encrypted_run_admits_only_known_keys_and_drops_revoked_ones(new_run: NewRun) -> None:
    run = new_run(steps=200, **PACED)
    keys = new_keys(run, "coordinator", "a", "b", "stranger")
    authorize(run, "a", "b")
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
    assert fooled.running and plain.running, "they are not refused: no coordinator they could believe has answered"
    fooled.end()
    plain.end()

    authorize(run, "stranger")
    run.until_said(coordinator.log, "key authorized")
    stranger = run.start_node("stranger", **keys_of(keys, "stranger"))
    run.until("who was let in later trains", lambda s: merged_since(s, versions, "stranger"))

    (run.folder / "allow" / "broken.pub").write_text("still being copied")
    run.until_said(coordinator.log, "allow list unreadable")
    revoke(run, "b")
    revoked_at = time.monotonic()
    run.until("b's session is over", lambda s: not node_of(s, "b")["connected"])
    assert time.monotonic() - revoked_at < REVOKED_WITHIN_S
    assert run.until_ended(b) == ExitCode.REFUSED
    assert_one_line(b, "allow-list")
    again = run.start_node("b", **keys_of(keys, "b"))
    assert run.until_ended(again) == ExitCode.REFUSED
    assert_one_line(again, "allow-list")
    run.hurry()
    status = run.until_done(coordinator, a, stranger)
    assert_all_agree(run, status, "a", "stranger")
    changes = [
        at.record for at in read_journal(run.state_dir) if isinstance(at, Entry) and isinstance(at.record, KeysChanged)
    ]
    told = [[sorted(key.node for key in keys) for keys in (change.added, change.removed)] for change in changes]
    assert told == [[["a", "b"], []], [["stranger"], []], [[], ["b"]]], "the audit log"


def test_garbage_on_the_port_harms_no_node(new_run: NewRun) -> None:
    run = new_run(steps=200, **PACED)
    coordinator, a, b = run.start_coordinator(), run.start_metronome("a"), run.start_node("b")
    versions = run.until("both train", lambda s: merged_since(s, [0, 0, 0], "b"))["versions"]
    throw(run, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 64, GREETING + os.urandom(512))
    throw(run, GREETING + READY + frames(os.urandom(40)), GREETING + READY + frames(b"", b"\x01", os.urandom(300)))
    throw(run, GREETING + READY + b"\x02" + (1 << 62).to_bytes(8, "big"))
    run.until_said(coordinator.log, "rejected peer")
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


# --- everybody knocks at once

KNOCK_S = 6.0


def turned_away(run: Run) -> dict[str, float]:
    """By reason, as Prometheus would see it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{run.http}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    found = [line for line in lines if line.startswith("farloop_rejected_peers_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


@pytest.mark.slow
def test_strangers_a_thief_and_half_open_connections_stop_no_node(new_run: NewRun) -> None:
    run = new_run(steps=150, **PACED)
    keys = new_keys(run, "coordinator", "a", "b", "thief")
    authorize(run, "a", "b", "thief")
    coordinator = run.start_coordinator()
    a = run.start_metronome("a", pace_s=0.15, **keys_of(keys, "a"))
    b = run.start_node("b", **keys_of(keys, "b"))
    run.until("both train", lambda s: merged_since(s, [0, 0, 0], "b"))
    with strangers_at(run.port, keys) as strangers:
        time.sleep(KNOCK_S)
        versions = run.until("it is still there", lambda s: True)["versions"]
        run.until("the run goes on under siege", lambda s: merged_since(s, versions, "b"))
        b.kill()
        run.until("b is missed", lambda s: not node_of(s, "b")["connected"])
        b = run.start_node("b", **keys_of(keys, "b"))
        versions = run.until("it is back", lambda s: node_of(s, "b")["connected"])["versions"]
        run.until("who comes back gets in, and takes part", lambda s: merged_since(s, versions, "b"))
        away = turned_away(run)
    assert min(strangers.did.values()) > 0, strangers.did
    assert {"malformed", "wrong_key", "too_often"} <= away.keys(), away
    said = coordinator.said
    assert 0 < said.count("rejected peer") < 100, said
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert node_of(status, "a")["lost_steps"] == 0


# --- bytes that were not asked for

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
