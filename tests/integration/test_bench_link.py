"""`python -m farloop.bench.link` as a person calls it, over loopback."""

import re
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


def test_blobs_and_raw_tcp_are_measured_in_turns() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "farloop.bench.link"]
    there = subprocess.Popen([*command, "serve", address])
    try:
        words = ["send", address, "--megabytes", "0.5", "--count", "1", "--pause-s", "0.01"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120, check=True)
    finally:
        there.kill()
        there.wait()
    line = done.stdout.splitlines()[-1]
    assert line.startswith("0.5 MB: possible ")
    assert re.findall(r"(TCP|farloop) (up|down) \d+%", line) == [
        ("TCP", "up"), ("farloop", "up"), ("TCP", "down"), ("farloop", "down"),
    ]  # fmt: skip
