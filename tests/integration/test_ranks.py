"""A node of two processes, as torchrun starts them, beside a node of one."""

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
from loopback import NewRun, assert_all_agree

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_a_node_of_two_ranks_takes_part_like_any_other(new_run: NewRun) -> None:
    run = new_run(steps=60, method="streaming", h=10, tau=2)
    run.start_coordinator(), run.start_node("one")
    two = run.start_node("two", nproc=2)
    heard_on: set[str] = set()
    while two.running:
        heard_on |= listening(two.process.pid)
        time.sleep(0.1)
    status = run.until_done()
    assert heard_on == {"127.0.0.1"}, "whoever reaches torch's ports can run code"
    assert_all_agree(run, status, "one", "two")
    assert [node["device"].split(" ")[0] for node in status["nodes"]] == ["1", "2"]
    assert [node["inner_steps"] for node in status["nodes"]] == [60, 60]
    assert [node["lost_steps"] for node in status["nodes"]] == [0, 0]
    losses = [event["loss"] for event in run.events("evaluation")]
    assert losses[-1] < losses[0], losses


def listening(session: int) -> set[str]:
    """Addresses that the processes of a session listen on for TCP, by Linux's own book."""
    inodes: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may be gone by now
            if os.getsid(int(process.name)) == session:
                targets = [os.readlink(file) for file in (process / "fd").iterdir()]
                inodes |= {target[8:-1] for target in targets if target.startswith("socket:[")}
    found: set[str] = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw = bytes.fromhex(fields[1].partition(":")[0])
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
                found.add(socket.inet_ntop(family, words))
    return found
