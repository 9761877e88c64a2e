"""A node whose model is sharded over two ranks, one of two replicas, and one of a single process, in one run (T2)."""

from pathlib import Path

import pytest
from loopback import TORCHRUN, NewRun, assert_all_agree, own_run

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

OWN_LOOP = Path(__file__).resolve().parents[2] / "examples" / "own_loop.py"
FSDP_LOOP = Path(__file__).resolve().parents[2] / "examples" / "fsdp_loop.py"


def test_a_sharded_node_a_replicated_one_and_a_single_process_train_one_model(new_run: NewRun) -> None:
    settings = {"steps": 60, "method": "streaming", "h": 10, "tau": 2, "evaluate_every_rounds": 1, "nodes": 3}
    run = own_run(new_run, script=FSDP_LOOP, **settings)
    coordinator, address = run.start_coordinator(), run.address
    run.start("node-sharded", *TORCHRUN, "2", str(FSDP_LOOP), "train", address, "sharded")
    run.start("node-twofold", *TORCHRUN, "2", str(OWN_LOOP), "train", address, "twofold")
    run.start("node-whole", str(FSDP_LOOP), "train", address, "whole")
    status = run.until_done(timeout_s=600.0)  # five processes, and two each meet at every step
    names = ["sharded", "twofold", "whole"]  # the first is asked for the loss, and has evaluate=
    assert_all_agree(run, status, *names)
    assert "anchor_mismatch" not in coordinator.said, "digests were equal at every version"
    assert [(node["name"], node["inner_steps"], node["lost_steps"]) for node in status["nodes"]] == [
        (name, 60, 0) for name in names
    ]
    assert any(set(commit["merged"]) == set(names) for commit in run.events("commit"))
    losses = [event["loss"] for event in run.events("progress") if event["loss"] is not None]
    assert losses[-1] < 5.0, losses  # 5.5 and more before training
    scores = [event["loss"] for event in run.events("evaluation")]
    assert scores[-1] < 5.0, scores
