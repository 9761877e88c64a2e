"""Trainers that call `optimizer.step()` themselves take part by hooks."""

from pathlib import Path

import pytest
from loopback import NewRun, Run, assert_all_agree, own_run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_node_that_steps_by_hook_counts_every_step_like_one_that_calls_step(new_run: NewRun) -> None:
    run = own_run(new_run, method="streaming", h=10, steps=60)
    run.start_coordinator()
    run.start_own_node("called"), run.start_own_node("hooked", "--hook")
    status = run.until_done()
    assert_all_agree(run, status, "called", "hooked")
    assert_every_step_counted(run, [60, 60], untrained=4.0)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", ["transformers", "accelerate", "lightning"])
def test_a_trainer_on_two_ranks_and_on_one_is_a_node(new_run: NewRun, library: str) -> None:
    """Both make the run's steps at the run's rate, and end when it ends."""
    pytest.importorskip(library)
    run = new_run(method="streaming", h=10, steps=40, warmup_steps=5, schedule="constant", lr=0.00321)
    run.tables["run"] |= {"init": str(run.folder / "own.safetensors")}
    del run.tables["run"]["model"], run.tables["data"]
    first = "hf_trainer.py" if library == "transformers" else "own_loop.py"
    assert run.until_ended(run.start("init", str(EXAMPLES / first), "init", "own.safetensors")) == 0
    run.start_coordinator()
    match library:
        case "transformers":
            train = [str(EXAMPLES / "hf_trainer.py"), "train", run.address]
        case "accelerate":
            train = [str(EXAMPLES / "accelerate_loop.py"), run.address]
        case _:
            train = [str(EXAMPLES / "lightning_trainer.py"), run.address]
    # Lightning starts its processes itself.
    two = [*train, "two", "2"] if library == "lightning" else [*TORCHRUN, *train, "two"]
    nodes = [run.start("node-one", *train, "one"), run.start("node-two", *two)]
    assert_all_agree(run, run.until_done(timeout_s=600.0), "one", "two")
    assert_every_step_counted(run, [40, 40], untrained=5.5)
    for node in nodes:
        assert "0.00321" in node.said or "3.21e-03" in node.said, "the run's rate, not 1e-3"
        assert "scheduler" not in node.said


def assert_every_step_counted(run: Run, steps: list[int], *, untrained: float) -> None:
    """And the loss is well below that of the first weights; the first report may come after much of the training."""
    status = run.final()
    assert [node["inner_steps"] for node in status["nodes"]] == steps
    assert [node["lost_steps"] for node in status["nodes"]] == [0] * len(steps)
    losses = [event["loss"] for event in run.events("progress") if event["loss"] is not None]
    assert losses[-1] < untrained - 0.2, losses
