"""A node of two processes, as torchrun starts them, beside a node of one."""

import pytest
from loopback import NewRun, assert_all_agree

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_a_node_of_two_ranks_takes_part_like_any_other(new_run: NewRun) -> None:
    run = new_run(steps=60, method="streaming", h=10, tau=2)
    run.start_coordinator(), run.start_node("one"), run.start_node("two", nproc=2)
    status = run.until_done()
    assert_all_agree(run, status, "one", "two")
    assert [node["device"].split(" ")[0] for node in status["nodes"]] == ["1", "2"]
    assert [node["inner_steps"] for node in status["nodes"]] == [60, 60]
    assert [node["lost_steps"] for node in status["nodes"]] == [0, 0]
    losses = [event["loss"] for event in run.events("evaluation")]
    assert losses[-1] < losses[0], losses
