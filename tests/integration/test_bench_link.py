"""`python -m farloop.lab.bench.link` as a person calls it, over loopback."""

import re
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


def lines(end: str, *words: str) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "farloop.lab.bench.link"]
    there = subprocess.Popen([*command, "serve", address])
    try:
        done = subprocess.run([*command, end, address, *words], capture_output=True, text=True, timeout=120, check=True)
    finally:
        there.kill()
        there.wait()
    return done.stdout.splitlines()


def test_blobs_and_raw_tcp_are_measured_in_turns() -> None:
    words = ("--megabytes", "0.5", "--count", "1", "--pause-s", "0.01", "--lanes", "1", "--lanes", "3")
    *_, line, one, three = lines("send", *words)
    assert line.startswith("0.5 MB: possible ")
    systems = ("TCP", "farloop, 1 lanes", "farloop, 3 lanes")
    told = re.findall(r"; ([^;]+) (up|down) \d+%", line)
    assert sorted(told) == sorted((system, way) for system in systems for way in ("up", "down"))
    assert [one, three] == [f"lanes asked for: {lanes}, open at the end: {lanes}" for lanes in (1, 3)]


def test_control_is_timed_beside_blobs_and_beside_raw_tcp() -> None:
    told = lines("control", "--megabytes", "1", "--for-s", "0.5")
    found = [
        re.match(r"1 MB (up|down), (TCP|farloop): p50 \d+ ms, p99 \d+ ms, longest \d+ ms of \d+; \d+%", line)
        for line in told
    ]
    assert [match and match.groups() for match in found] == [
        ("up", "TCP"), ("up", "farloop"), ("down", "TCP"), ("down", "farloop"),
    ]  # fmt: skip
