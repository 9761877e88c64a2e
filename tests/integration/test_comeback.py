"""A node whose process is gone comes back with the anchors on its disk: it takes what it missed, and no snapshots."""

import pytest
from loopback import PACED, NewRun, assert_all_agree, further_than, merged_since, node_of

from farloop.monitoring.status import Status

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


def b_trains(status: Status) -> bool:
    return any(node["name"] == "b" and node["state"] == "training" for node in status["nodes"])
