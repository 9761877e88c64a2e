"""A coordinator that dies, stops, or is started wrongly over its state: nothing committed is lost, no node restarts."""

import signal
import time
from collections.abc import Callable
from functools import partial

import pytest
from loopback import FARLOOP, PACED, NewRun, assert_all_agree, assert_one_line

from farloop.config.exit_codes import ExitCode
from farloop.coordinator.storage.verify import verify
from farloop.monitoring.status import Status

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_nodes_ride_through_a_coordinator_that_dies_again_and_again(new_run: NewRun) -> None:
    run = new_run(steps=120, **PACED)
    coordinator, a, b = run.start_coordinator(), run.start_metronome("a", pace_s=0.1), run.start_node("b")
    moments: dict[str, Callable[[Status], bool]] = {
        "a window has b's delta and waits for a's": lambda status: half_open(status, "b"),
        "every fragment has three versions": lambda status: min(status["versions"]) >= 3,
        "nine windows are through": lambda status: min(status["versions"]) >= 9,
    }
    for epoch, (moment, condition) in enumerate(moments.items(), start=2):
        before = run.until(moment, condition)
        coordinator.kill()
        coordinator = run.start_coordinator()
        after = run.until("it is back", partial(is_start, epoch))
        assert_nothing_lost(before, after)
        run.until("windows commit again", partial(progressed, after["versions"]))
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert [node["incarnation"] for node in status["nodes"]] == [1, 1]
    assert [node["inner_steps"] for node in status["nodes"]] == [120, 120]
    assert not status["alarms"], "target and momentum came out of every recovery as they were"


@pytest.mark.slow
def test_a_lost_node_is_forgotten_by_name_and_known_again_when_it_comes_back(new_run: NewRun) -> None:
    run = new_run(steps=100_000, nodes=1, **PACED)
    coordinator, a = run.start_coordinator(), run.start_node("a")
    run.until("it commits", lambda status: min(status["versions"]) >= 1)
    a.kill()
    run.until("it is missed", lambda status: not status["nodes"][0]["connected"])
    assert 'farloop_node_connected{node="a"} 0.0' in run.page("/metrics")[1]
    forget = run.start("forget", *FARLOOP, "run", "forget", "a", "--state", str(run.state_dir))
    assert run.until_ended(forget) == ExitCode.DONE and "node a is forgotten" in forget.said
    run.until("no node is missed", lambda status: not status["nodes"])
    assert "farloop_node_connected{" not in run.page("/metrics")[1]
    coordinator.kill()
    run.start_coordinator()
    run.until("it remembers", lambda status: status["run"]["epoch"] == 2 and not status["nodes"])
    run.start_node("a")
    run.until("the node is back", lambda status: bool(status["nodes"]) and status["nodes"][0]["inner_steps"] > 0)
    assert 'farloop_node_sessions_total{node="a"} 1.0' in run.page("/metrics")[1]


def test_a_stopped_coordinator_goes_on_with_its_own_run_only(new_run: NewRun) -> None:
    """E: its farewell ends their sessions, and no window closes for want of them."""
    run = new_run(steps=120, method="diloco", h=2)
    coordinator, a, b = run.start_coordinator(), run.start_metronome("a"), run.start_node("b")
    before = run.until("windows commit", lambda status: min(status["versions"]) >= 2)

    second = run.start_second_coordinator()
    assert run.until_ended(second) == ExitCode.STORAGE
    assert_one_line(second, "another coordinator holds this state directory")

    coordinator.signal(signal.SIGTERM)
    assert run.until_ended(coordinator) == ExitCode.DONE
    assert coordinator.last_line == "stopped before the run's end; the same command continues it"

    other = run.start_second_coordinator("run.seed=7")
    assert run.until_ended(other) == ExitCode.REFUSED
    assert_one_line(other, "holds another run", before["run"]["fingerprint"], "seed was 0, is 7")

    coordinator = run.start_coordinator()
    after = run.until("it is back", lambda status: status["run"]["epoch"] > 1)
    assert_nothing_lost(before, after)
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert [event["drops"] for event in run.events("commit") if event["drops"]] == []
    assert [(node["inner_steps"], node["lost_steps"], node["incarnation"]) for node in status["nodes"]] == [
        (120, 0, 1)
    ] * 2


# --- conditions


def half_open(status: Status, name: str) -> bool:
    return any(window["arrived"] == [name] and len(window["expected"]) == 2 for window in status["windows"])


def is_start(epoch: int, status: Status) -> bool:
    return status["run"]["epoch"] == epoch


def progressed(versions: list[int], status: Status) -> bool:
    return all(new > old for new, old in zip(status["versions"], versions, strict=True))


def assert_nothing_lost(before: Status, after: Status) -> None:
    pairs = list(zip(before["versions"], after["versions"], strict=True))
    assert all(old <= new for old, new in pairs), f"versions (before, after): {pairs}"


@pytest.mark.slow
def test_a_second_start_after_the_lock_was_deleted_ends_the_first_and_nothing_is_lost(new_run: NewRun) -> None:
    """S: the first had a window open, and would have committed to a journal that is not its own any more."""
    run = new_run(steps=60, **PACED)
    first, a, b = run.start_coordinator(), run.start_metronome("a", pace_s=0.1), run.start_node("b")
    before = run.until("every fragment has two versions", lambda status: min(status["versions"]) >= 2)
    first.signal(signal.SIGSTOP)  # else it would stop as soon as it misses its lock
    (run.state_dir / "lock").unlink()
    second = run.start_second_coordinator()
    deadline = time.monotonic() + 60
    while "serving" not in second.said and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "serving" in second.said, run.logs()
    first.signal(signal.SIGCONT)
    assert run.until_ended(first) == ExitCode.REFUSED
    assert_one_line(first, "epoch 2 was claimed after ours, 1: another coordinator took over this state")
    second.signal(signal.SIGTERM)
    assert run.until_ended(second) == ExitCode.DONE
    assert verify(run.state_dir).faults == []

    again = run.start_coordinator()
    after = run.until("it is back", partial(is_start, 3))
    assert_nothing_lost(before, after)
    run.hurry()
    status = run.until_done(again, a, b)
    assert_all_agree(run, status, "a", "b")
