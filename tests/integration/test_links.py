"""A run over a thin link that breaks and heals."""

import pytest
from loopback import NewRun, alone_since, assert_all_agree, merged_since, node_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_a_run_goes_on_while_a_thin_link_is_cut_and_its_node_returns(new_run: NewRun) -> None:
    run = new_run(steps=150, method="streaming", h=6, tau=4)
    coordinator = run.start_coordinator()
    a, b = run.start_metronome("a"), run.start_node("b", link="20mbit/40ms")
    versions = run.until("b's work is merged", lambda status: merged_since(status, [0, 0, 0], "b"))["versions"]
    run.cut("b")
    versions = run.until("a goes on alone", lambda status: alone_since(status, versions, "a"))["versions"]
    run.heal("b")
    run.until("b's work is merged again", lambda status: merged_since(status, versions, "b"))
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert node_of(status, "b")["incarnation"] == 1
