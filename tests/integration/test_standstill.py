"""Daemons whose output has no reader, and a coordinator whose event loop stands still."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from loopback import DEADLINE_S, FARLOOP, PACED, POLL_S, NewRun, assert_one_line, environment

from farloop.cli.status import fetch
from farloop.config.exit_codes import ExitCode
from farloop.local.processes import free_port
from farloop.monitoring.status import Status

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STANDS_STILL = """
import os, time
import farloop.cli.pages as pages
from farloop.cli.main import main
from farloop.coordinator.observe.observer import Observer

pages.STANDSTILL_S, pages.END_S = 1.0, 2.0
refresh = Observer.refresh

def refresh_and_hang(self, machine):
    refresh(self, machine)
    while os.path.exists("still"):
        time.sleep(0.1)

Observer.refresh = refresh_and_hang
main()
"""


@contextmanager
def full_pipe() -> Iterator[int]:
    """The end to write to of a pipe that is full, without a reader."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write, bytes(4096))
    try:
        yield write
    finally:
        os.close(write)
        os.close(read)


@pytest.mark.slow
def test_output_without_a_reader_stops_neither_daemon(new_run: NewRun) -> None:
    run = new_run(steps=100_000, nodes=1, **PACED)
    toml, node_port = run.write_toml(), free_port()
    node_toml = run.node_toml("a", "", {"http": f"127.0.0.1:{node_port}"})
    with full_pipe() as unread:
        begin = partial(subprocess.Popen, cwd=run.folder, env=environment(), stdout=unread, stderr=unread)
        coordinator = begin([sys.executable, *FARLOOP, "coordinator", str(toml), "--log-level", "debug"])
        node = begin([sys.executable, *FARLOOP, "node", str(node_toml), "--log-level", "debug"])
        try:
            first = run.until("it commits", lambda status: min(status["versions"]) >= 1)
            later = run.until("it commits on", partial(has_more, first))
            assert later["run"]["uptime_s"] > first["run"]["uptime_s"]
            for daemon in (node, coordinator):
                daemon.send_signal(signal.SIGTERM)
                assert daemon.wait(DEADLINE_S) == ExitCode.DONE
        finally:
            for daemon in (node, coordinator):
                daemon.kill()
                daemon.wait()


def has_more(before: Status, status: Status) -> bool:
    return status["commits"] >= before["commits"] + 20 and status["position"] > before["position"]


def test_a_loop_that_stands_still_shows_on_every_page_and_ends_at_a_signal(new_run: NewRun) -> None:
    run = new_run(steps=100, nodes=1)
    coordinator = run.start("coordinator", "-c", STANDS_STILL, "coordinator", str(run.write_toml()))
    run.until("it serves", lambda status: not status["alarms"])
    assert {run.page(path)[0] for path in ("/", "/status", "/healthz", "/readyz")} == {200}
    (run.folder / "still").touch()
    deadline = time.monotonic() + DEADLINE_S
    while {run.page(path)[0] for path in ("/", "/status", "/healthz", "/readyz")} != {503}:
        assert time.monotonic() < deadline, run.logs()
        time.sleep(POLL_S)
    assert "event loop stands still" in run.page("/healthz")[1]
    assert "the coordinator stands still" in run.page("/")[1]
    (alarm,) = fetch(f"127.0.0.1:{run.http}")["alarms"]
    assert alarm.startswith("standstill: ")
    code, metrics = run.page("/metrics")
    (age,) = (line.split()[1] for line in metrics.splitlines() if line.startswith("farloop_status_age_seconds "))
    assert code == 200 and float(age) > 1.0
    run.until_said(coordinator.log, "refresh_and_hang")
    (run.folder / "still").unlink()
    run.until_said(coordinator.log, "loop turns again")
    run.until("its status is fresh", lambda status: not status["alarms"])
    (run.folder / "still").touch()
    coordinator.signal(signal.SIGTERM)
    assert run.until_ended(coordinator) == ExitCode.HUNG
    assert_one_line(coordinator, "the event loop has stood still for", "start it again")
