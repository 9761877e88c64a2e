"""A coordinator with few descriptors and a crowd at its port: it stays, and its nodes train on."""

import sys
import time

import pytest
from loopback import PACED, Daemon, NewRun, Run, assert_all_agree, merged_since, node_of
from strangers import HALF_GREETING, crowd

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.0/8 is all loopback on Linux"),
]

FEW = 512
"""Descriptors that the coordinator may have, soft and hard."""

LIMITED = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({few}, {few}))
sys.argv[0] = "farloop"
runpy.run_module("farloop.cli.main", run_name="__main__", alter_sys=True)
"""


def start_limited(run: Run) -> Daemon:
    return run.start("coordinator", "-c", LIMITED.format(few=FEW), "coordinator", str(run.write_toml()))


@pytest.mark.slow
def test_a_crowd_without_a_key_and_without_a_word_stops_no_run(new_run: NewRun) -> None:
    """1,085 connections ended the coordinator with 6 within 12 s: the epoch could not be read at a commit."""
    run = new_run(steps=400, **PACED)
    coordinator = start_limited(run)
    a = run.start_metronome("a", pace_s=0.1)
    b = run.start_node("b")
    run.until("both train", lambda s: merged_since(s, [0, 0, 0], "b"))
    for hosts, says in ((1, b""), (7, HALF_GREETING)):
        with crowd(run.port, 2 * FEW, hosts, says) as held:
            assert len(held) > FEW
            began = time.monotonic()
            for _ in range(2):
                versions = run.until("it is there", lambda s: True)["versions"]
                run.until("the run goes on", lambda s, since=versions: merged_since(s, since, "b"))
            assert coordinator.running
            if hosts > 1 and says:
                b.kill()
                run.until("b is missed", lambda s: not node_of(s, "b")["connected"])
                b = run.start_node("b")
                versions = run.until("b is back", lambda s: node_of(s, "b")["connected"])["versions"]
                run.until("and takes part", lambda s, since=versions: merged_since(s, since, "b"))
            assert time.monotonic() - began < 80
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert node_of(status, "a")["lost_steps"] == 0
