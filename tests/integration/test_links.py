"""A run over a thin link that breaks and heals."""

from typing import Any

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


def test_a_link_that_becomes_eight_times_slower_is_named_in_the_status(new_run: NewRun) -> None:
    """Four nodes behind links that a delta takes a while to cross; nothing is said of them before."""
    run = new_run(steps=100_000, method="diloco", h=4, nodes=4)
    run.start_coordinator()
    for name in "abcd":
        run.start_metronome(name, link="4mbit/10ms")

    def watch(status: Any) -> Any:
        return status.get("watch") or {"why_not": "nothing yet", "anomalies": []}

    calm = run.until("all are judged", lambda status: status["round"] > 0 and not watch(status)["why_not"])
    assert watch(calm)["anomalies"] == []
    run.change_link("c", "0.5mbit/10ms")
    status = run.until("the link is named", lambda status: watch(status)["anomalies"])
    (found,) = watch(status)["anomalies"]
    assert (found["node"], found["kind"], found["action"]) == ("c", "link slow", "re-probe the link"), found
    assert found["factor"] > 3.0 and found["done"]
    assert 'farloop_anomalies{kind="link_slow",node="c"} 1.0' in run.page("/metrics")[1]
    assert "anomaly kind=link_slow node=c" in run.logs(lines=200)
