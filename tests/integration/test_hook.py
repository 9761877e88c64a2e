"""Trainers that call `optimizer.step()` themselves take part by hooks."""

from pathlib import Path

import pytest
from loopback import NewRun, Run, assert_all_agree, own_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

HF_TRAINER = Path(__file__).resolve().parents[2] / "examples" / "hf_trainer.py"


def test_a_node_that_steps_by_hook_counts_every_step_like_one_that_calls_step(new_run: NewRun) -> None:
    run = own_run(new_run, method="streaming", h=10, steps=60)
    run.start_coordinator()
    run.start_own_node("called"), run.start_own_node("hooked", "--hook")
    status = run.until_done()
    assert_all_agree(run, status, "called", "hooked")
    assert_every_step_counted(run, [60, 60], untrained=4.0)


def test_a_hugging_face_trainer_is_a_node(new_run: NewRun) -> None:
    pytest.importorskip("transformers", reason="needs transformers and accelerate")
    run = new_run(method="streaming", h=10, steps=40)
    run.tables["run"] |= {"init": str(run.folder / "own.safetensors")}
    del run.tables["run"]["model"], run.tables["data"]
    assert run.until_ended(run.start("init", str(HF_TRAINER), "init", "own.safetensors")) == 0
    run.start_coordinator()
    for name in ("a", "b"):
        run.start(f"node-{name}", str(HF_TRAINER), "train", f"tcp://127.0.0.1:{run.port}", name)
    status = run.until_done()
    assert_all_agree(run, status, "a", "b")
    assert_every_step_counted(run, [40, 40], untrained=5.5)


def assert_every_step_counted(run: Run, steps: list[int], *, untrained: float) -> None:
    """And the loss is well below that of the first weights; the first report may come after much of the training."""
    status = run.final()
    assert [node["inner_steps"] for node in status["nodes"]] == steps
    assert [node["lost_steps"] for node in status["nodes"]] == [0] * len(steps)
    losses = [event["loss"] for event in run.events("progress") if event["loss"] is not None]
    assert losses[-1] < untrained - 0.2, losses
