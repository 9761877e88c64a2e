"""A node whose model is sharded over two ranks and one that has it whole, in one run."""

from pathlib import Path

import pytest
from loopback import NewRun, assert_all_agree

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

FSDP_LOOP = Path(__file__).resolve().parents[2] / "examples" / "fsdp_loop.py"


def test_a_sharded_node_and_a_whole_one_train_one_model(new_run: NewRun) -> None:
    run = new_run(steps=60, method="streaming", h=10, tau=2, evaluate_every_rounds=1)
    run.tables["run"] |= {"init": str(run.folder / "own.safetensors")}
    del run.tables["run"]["model"], run.tables["data"]
    assert run.until_ended(run.start("init", str(FSDP_LOOP), "init", "own.safetensors")) == 0
    run.start_coordinator()
    address = f"tcp://127.0.0.1:{run.port}"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run.start("node-sharded", *torchrun, str(FSDP_LOOP), "train", address, "sharded")
    run.start("node-whole", str(FSDP_LOOP), "train", address, "whole")
    status = run.until_done(timeout_s=400.0)  # three processes, and two of them meet at every step
    assert_all_agree(run, status, "sharded", "whole")
    assert [node["inner_steps"] for node in status["nodes"]] == [60, 60]
    assert [node["lost_steps"] for node in status["nodes"]] == [0, 0]
    losses = [event["loss"] for event in run.events("progress") if event["loss"] is not None]
    assert losses[-1] < 5.0, losses  # 5.5 and more before training
    scores = [event["loss"] for event in run.events("evaluation")]
    assert scores[-1] < 5.0, scores
