"""A real node among real nodes that sends what must not be merged (protocol E)."""

from pathlib import Path

import pytest
from loopback import NewRun, node_of

from farloop.wire.reasons import Reason

LIAR = Path(__file__).with_name("liar.py")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_deltas_a_thousand_times_too_long_are_refused_and_the_others_learn_all_the_same(new_run: NewRun) -> None:
    run = new_run(method="diloco", h=5, steps=100, nodes=3)
    run.start_coordinator()
    honest = [run.start_node("a"), run.start_node("b")]
    liar = run.start("node-c", str(LIAR), str(run.node_toml("c", "", {})))
    apart = run.until("c is in quarantine", lambda status: any(node.get("quarantine") for node in status["nodes"]))
    assert "too long" in node_of(apart, "c").get("quarantine", "")
    assert any(alarm.startswith("quarantine of c: ") for alarm in apart["alarms"])
    run.until_done(*honest, liar)
    status = run.until_done()

    commits = run.events("commit")
    assert len(commits) == 20 and all(commit["merged"] == ["a", "b"] for commit in commits)
    whys = [why for commit in commits for node, why in commit["drops"] if node == "c"]
    assert whys == [Reason.OUTLIER.sentence] * 20
    losses = [evaluation["loss"] for evaluation in status["evaluations"]]
    assert losses[-1] < losses[0]
