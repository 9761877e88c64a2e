"""A node whose process is gone comes back with the anchors on its disk: it takes what it missed, and no snapshots."""

import signal
from pathlib import Path

import pytest
from loopback import (
    FARLOOP,
    PACED,
    TORCHRUN,
    Daemon,
    NewRun,
    assert_all_agree,
    further_than,
    merged_since,
    node_of,
    own_run,
)

from farloop.config.exit_codes import ExitCode
from farloop.config.memory import memory_of
from farloop.config.run_spec import planned
from farloop.config.settings import load
from farloop.monitoring.status import Status

FSDP_LOOP = Path(__file__).resolve().parents[2] / "examples" / "fsdp_loop.py"

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_a_killed_node_comes_back_with_updates_alone_also_to_a_coordinator_that_was_killed(new_run: NewRun) -> None:
    run = new_run(steps=150, **PACED)
    coordinator, a, b = run.start_coordinator(), run.start_metronome("a"), run.start_node("b")
    run.until("every fragment is on disk", lambda status: min(status["versions"]) >= 3)
    b.kill()
    before = run.until("b is gone", lambda status: not node_of(status, "b")["connected"])
    run.until("it missed a commit of each fragment", lambda status: further_than(status, before))
    coordinator.kill()
    coordinator, b = run.start_coordinator(), run.start_node("b")
    since = run.until("it trains again", lambda status: b_trains(status))["versions"]
    run.until("its work is merged again", lambda status: merged_since(status, since, "b"))
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert "going on from 3 of 3" in b.said and "snapshot" not in b.said, b.said
    assert "with the optimizer's state of 3 fragments" in b.said, b.said
    assert node_of(status, "b")["bytes_by_kind"]["snapshot"] == 0
    files = [path.stat().st_size for path in (run.folder / "b").rglob("*") if path.is_file()]
    told = memory_of(planned(load(run.folder / "run.toml", flags=[], environ={})).spec).node_disk
    assert sum(files) <= sum(told.values()) + 4096 * len(files), "as was predicted, but for the heads of the files"


@pytest.mark.slow
def test_of_two_machines_with_one_name_the_newer_goes_on_and_the_older_ends(new_run: NewRun) -> None:
    """Each begins with an empty folder, so that all of them count their starts from 1; and one was only suspended."""
    run = new_run(steps=100_000, **PACED)
    run.start_coordinator()
    run.start_metronome("a")
    first = run.start_node("b")
    run.until("its work is merged", lambda status: min(status["versions"]) >= 1)

    def replaced_by(number: int) -> Daemon:
        file = run.node_toml("b", "", {"state_dir": str(run.folder / f"b-{number}")})
        node = run.start(f"node-b-{number}", *FARLOOP, "node", str(file))
        since = run.until("it has joined", lambda status: node_of(status, "b")["incarnation"] == number)["versions"]
        run.until("its work is merged", lambda status: merged_since(status, since, "b"))
        return node

    second = replaced_by(2)
    assert run.until_ended(first, 30.0) == ExitCode.REFUSED
    assert "start 2 of b has joined, this is 1; if it runs on another machine" in first.last_line, first.last_line
    second.signal(signal.SIGSTOP)
    third = replaced_by(3)
    second.signal(signal.SIGCONT)
    assert run.until_ended(second, 30.0) == ExitCode.REFUSED
    assert "start 3 of b has joined, this is 2" in second.last_line, second.last_line
    assert 'reason="superseded"' not in run.page("/metrics")[1] and third.running


def b_trains(status: Status) -> bool:
    return any(node["name"] == "b" and node["state"] == "training" for node in status["nodes"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_sharded_node_comes_back_as_another_number_of_ranks(new_run: NewRun) -> None:
    """Its ranks read what others wrote."""
    run = own_run(new_run, script=FSDP_LOOP, steps=200, nodes=1, **PACED)
    coordinator = run.start_coordinator()

    def start(count: int) -> Daemon:
        return run.start("node-b", *TORCHRUN, str(count), str(FSDP_LOOP), "train", run.address, "b")

    b = start(2)
    before = run.until("every fragment is on disk", lambda status: min(status["versions"]) >= 12, 120.0)
    b.signal(signal.SIGTERM)  # torchrun ends its ranks, which do not know how to leave
    run.until_ended(b)
    run.daemons.remove(b)
    b = start(3)
    run.until("it trains again", lambda status: b_trains(status) and further_than(status, before), 120.0)
    status = run.until_done(coordinator, b, timeout_s=400.0)
    assert_all_agree(run, status, "b")
    assert node_of(status, "b")["incarnation"] == 2 and node_of(status, "b")["bytes_by_kind"]["snapshot"] == 0
