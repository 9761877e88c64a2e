"""Nodes that leave, die, hang and come back while a run goes on, and links that break, heal and become slow."""

import re
import signal
import time
from datetime import datetime

import pytest
from loopback import PACED, Daemon, NewRun, Run, alone_since, assert_all_agree, merged_since, node_of

from farloop.algo.schedule import first_step
from farloop.config.exit_codes import ExitCode
from farloop.coordinator.decide.records import NodeStarted
from farloop.monitoring.status import Status
from farloop.wire.limits import Timing

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CLOSED_S = 20.0
"""Bound of what the others lose to a node whose connection closed: 2 s (protocol V), a round, and a busy machine."""

PROMISED_S, BUSY_S = 2.0, 6.0
"""What a window may wait for a node whose connection was seen to close, and what a busy machine adds to it."""

SILENT_S = Timing().liveness_s + CLOSED_S
"""... and to one that says nothing any more."""


def test_a_node_told_to_stop_leaves_cleanly_and_one_that_comes_late_takes_part(new_run: NewRun) -> None:
    run = new_run(steps=180, **PACED)
    run.on_tape = True
    coordinator, a, b = run.start_coordinator(), run.start_metronome("a"), run.start_node("b")
    run.until("b's work is merged", lambda status: merged_since(status, [0, 0, 0], "b"))

    b.signal(signal.SIGTERM)
    assert run.until_ended(b) == ExitCode.DONE
    left = run.until("the coordinator knows that b left", lambda status: node_of(status, "b")["state"] == "left")
    assert node_of(left, "b")["reason"] == "the node left after finishing its work"
    assert node_of(left, "b")["lost_steps"] == 0
    versions = run.until("a goes on alone", lambda status: alone_since(status, left["versions"], "a"))["versions"]

    c = run.start_node("c")
    run.until("c's work is merged", lambda status: merged_since(status, versions, "c"))
    run.hurry()
    status = run.until_done(coordinator, a, c)
    assert_all_agree(run, status, "a", "c")
    assert 0 < node_of(status, "c")["inner_steps"] == 180 - steps_before(run, "c") < 180
    assert node_of(status, "a")["lost_steps"] == 0
    assert node_of(status, "c")["lost_steps"] <= 3 * 3, "more is lost than the delta with which c overtook a"


@pytest.mark.slow
def test_a_node_that_dies_or_hangs_costs_the_others_seconds_and_comes_back(new_run: NewRun) -> None:
    run = new_run(steps=320, **PACED)
    coordinator, a, b = run.start_coordinator(), run.start_metronome("a"), run.start_node("b")
    run.until("b's work is merged", lambda status: merged_since(status, [0, 0, 0], "b"))

    b.kill()
    assert_others_go_on(run, "a", CLOSED_S)
    assert 0 <= seconds_without(coordinator, "b") <= PROMISED_S + BUSY_S
    b = run.start_node("b")
    back = run.until("b is back", lambda status: started_again(status, "b"))
    run.until("b's work is merged again", lambda status: merged_since(status, back["versions"], "b"))

    b.signal(signal.SIGSTOP)
    versions = assert_others_go_on(run, "a", SILENT_S)
    b.signal(signal.SIGCONT)
    run.until("b's work is merged once more", lambda status: merged_since(status, versions, "b"))

    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert node_of(status, "b")["incarnation"] == 2, "a process that hung is still the same start of its node"


# --- conditions


def steps_before(run: Run, name: str) -> int:
    """Steps of the run before the only start of a node: whole rounds, and what its slot leaves out of its first."""
    (start,) = [r for r in run.records() if isinstance(r, NodeStarted) and r.node == name]
    return start.round * 3 + first_step(start.slot, slots=3, node_steps=3)


def started_again(status: Status, name: str) -> bool:
    node = node_of(status, name)
    return node["connected"] and node["incarnation"] == 2


def seconds_without(coordinator: Daemon, name: str) -> float:
    """By the coordinator's own log: from when it saw a connection end to the next commit that leaves the node out."""
    stamps = {}
    for what, words in [("end", f"event=session node={name} reason=closed"), ("commit", f"dropped=\\S*{name}:CLOSED")]:
        found = re.search(rf"^ts=(\S+)Z .*{words}", coordinator.said, flags=re.MULTILINE)
        assert found, f"{words} is not in the log\n{coordinator.said}"
        stamps[what] = datetime.fromisoformat(found[1])
    return (stamps["commit"] - stamps["end"]).total_seconds()


def assert_others_go_on(run: Run, name: str, bound_s: float) -> list[int]:
    """Every fragment commits again, without the node that was lost just now; the versions then."""
    lost_at = time.monotonic()
    before = run.until("the coordinator answers", lambda _: True)["versions"]
    versions = run.until(f"{name} goes on alone", lambda status: alone_since(status, before, name))["versions"]
    seconds = time.monotonic() - lost_at
    assert seconds < bound_s, (
        f"the others stood still for {seconds:.1f} s; expected at most {bound_s:g} s\n{run.logs()}"
    )
    return versions
