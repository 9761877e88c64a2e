"""A coordinator started over an old copy of its state: it holds the run, and goes on once it may go back, or
from what the nodes hold (S)."""

import json
import shutil
import signal

import pytest
from loopback import PACED, Daemon, NewRun, Run, assert_all_agree, further_than, node_of

from farloop.config.exit_codes import ExitCode
from farloop.coordinator.storage.verify import verify
from farloop.monitoring.status import Status

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.slow
def test_an_old_copy_holds_the_run_until_it_is_wound_back_and_then_all_agree(new_run: NewRun) -> None:
    run = new_run(steps=120, **PACED)
    a, b, later = with_an_old_copy(run)

    coordinator = run.start_coordinator()
    held = run.until("it is held", lambda status: status["run"]["state"] == "holding")
    (alarm,) = held["alarms"]
    assert "looks like an old copy" in alarm and "--rewind" in alarm and "--adopt-from-nodes" in alarm
    assert "farloop_rollback_held 1.0" in run.page("/metrics")[1]
    for node in (a, b):
        run.until_said(node.log, "looks like an old copy")
        assert node.running
    assert not further_than(held, later)
    coordinator.signal(signal.SIGTERM)
    assert run.until_ended(coordinator) == ExitCode.DONE

    coordinator = run.start_coordinator("--rewind")
    back = run.until("it goes on", lambda status: status["run"]["state"] == "training")
    assert back["run"]["epoch"] > held["run"]["epoch"]
    run.until("both are merged again", lambda status: merged_by_both(status, held))
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert [node_of(status, name)["incarnation"] for name in ("a", "b")] == [1, 1]
    assert not status["alarms"]


@pytest.mark.slow
def test_an_old_copy_goes_on_from_what_the_nodes_hold(new_run: NewRun) -> None:
    run = new_run(steps=120, **PACED)
    a, b, later = with_an_old_copy(run)

    coordinator = run.start_coordinator("--adopt-from-nodes", "--adopt-newest")
    waits = run.until("it says what it waits for", lambda status: status["run"]["state"] == "holding")
    assert any(alarm.startswith("adoption: the run is held until") for alarm in waits["alarms"])
    back = run.until("it goes on", lambda status: status["run"]["state"] == "training")
    assert all(new + 1 >= old for new, old in zip(back["versions"], later["versions"], strict=True)), "what they hold"
    run.until_said(coordinator.log, "adopted history=")
    run.until("both are merged again", lambda status: merged_by_both(status, back))

    coordinator.kill()  # what was adopted is as durable as anything
    coordinator = run.start_coordinator()
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert [node_of(status, name)["incarnation"] for name in ("a", "b")] == [1, 1]
    assert not status["alarms"] and not verify(run.state_dir).faults


@pytest.mark.slow
def test_the_epoch_of_another_run_holds_nothing_and_an_old_one_until_folders_are_gone(
    new_run: NewRun,
) -> None:
    run = new_run(steps=100_000, nodes=1, **PACED)
    kept = run.folder / "b" / "node.json"
    kept.parent.mkdir()

    def met(run: str) -> None:
        """The node's folder is of a run whose coordinator started five times."""
        kept.write_text(json.dumps({"incarnation": 3, "epoch": 5, "run": run, "finished": ""}))

    def start() -> tuple[Daemon, Daemon]:
        return run.start_coordinator(), run.start_node("b")

    met("0123456789abcdef")
    daemons = start()
    fingerprint = run.until("it trains", lambda status: min(status["versions"]) >= 1)["run"]["fingerprint"]
    assert json.loads(kept.read_text()) == {"incarnation": 4, "epoch": 1, "run": fingerprint, "finished": ""}

    for daemon in daemons:
        daemon.kill()
    met(fingerprint)
    shutil.rmtree(run.state_dir)
    daemons = start()
    (alarm,) = run.until("it is held", lambda status: status["run"]["state"] == "holding")["alarms"]
    assert "node b has met epoch 5, this start has 1" in alarm
    assert "delete the nodes' state folders" in alarm and "--adopt-from-nodes" not in alarm

    for daemon in daemons:
        daemon.kill()
    shutil.rmtree(kept.parent)
    start()
    run.until("it trains", lambda status: min(status["versions"]) >= 1 and not status["alarms"])


def with_an_old_copy(run: Run) -> tuple[Daemon, Daemon, Status]:
    """Nodes a and b, a state folder that is older than what they hold, and no coordinator. The last status before."""
    coordinator, a, b = run.start_coordinator(), run.start_metronome("a"), run.start_node("b")
    return a, b, run.set_back(coordinator)


def merged_by_both(status: Status, before: Status) -> bool:
    return further_than(status, before) and all(window["merged"] == ["a", "b"] for window in status["windows"])
