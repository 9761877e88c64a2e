"""Trainers that call `optimizer.step()` themselves take part by hooks."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import torch
from loopback import TORCHRUN, NewRun, Run, assert_all_agree, own_run
from safetensors.torch import load_file
from torch import Tensor, nn

from farloop.algo.schedule import learning_rate
from farloop.algo.terms import Terms
from farloop.coordinator.daemon import Coordinator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_a_node_that_steps_by_hook_counts_every_step_like_one_that_calls_step(new_run: NewRun) -> None:
    run = own_run(new_run, method="streaming", h=10, steps=60)
    run.start_coordinator()
    run.start_own_node("called"), run.start_own_node("hooked", "--hook")
    status = run.until_done()
    assert_all_agree(run, status, "called", "hooked")
    assert_every_step_counted(run, [60, 60], untrained=4.0)


class Doubling(nn.Sequential):
    """The tiny run's model as Hugging Face's Trainer takes it, on a device with room for `most` samples."""

    def __init__(self, most: int = 8) -> None:
        super().__init__(*tiny_run.model())
        self.most = most

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if self.training and len(x) > self.most:
            raise RuntimeError("CUDA out of memory.")
        y = super().forward(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


@dataclasses.dataclass
class TrainerRun:
    """A run of 24 steps for one node."""

    coordinator: Coordinator
    terms: Terms
    folder: Path

    def trainer(self, model: Doubling, **arguments: Any) -> Any:
        transformers = pytest.importorskip("transformers")
        from farloop.node.hf import FarloopCallback

        seen = self.seen = list[float]()
        logged = self.logged = list[float]()

        class Reporter(transformers.TrainerCallback):  # type: ignore[misc]
            """As TensorBoard's, it is told before callbacks that are given to the trainer."""

            def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **given: Any) -> None:
                logged.extend([logs["learning_rate"]] if "loss" in logs else [])

            def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
                seen.append(given["optimizer"].param_groups[0]["lr"])

        x = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
        data = [{"x": row, "labels": 2 * row} for row in x]
        callbacks = [Reporter(), FarloopCallback(self.coordinator.link.endpoint, name="a", state_dir=self.folder / "a")]
        given = transformers.TrainingArguments(
            self.folder / "out", use_cpu=True, disable_tqdm=True, logging_steps=1, **arguments
        )
        return transformers.Trainer(model, given, train_dataset=data, eval_dataset=data, callbacks=callbacks)


@pytest.fixture
def trainer_run(tmp_path: Path) -> Iterator[TrainerRun]:
    spec = tiny_run.plan(steps=24, h=4, nodes=1)
    spec = dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, num_samples=0))
    store = tiny_run.begin(tmp_path / "state", spec)
    with contextlib.closing(store), tiny_run.serving(tmp_path / "state", store) as coordinator:
        yield TrainerRun(coordinator, spec.terms, tmp_path)


def test_a_trainer_saves_resumes_and_loads_its_best_model(trainer_run: TrainerRun) -> None:
    often = {"save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    trainer_run.trainer(Doubling(), max_steps=10, **often).train()
    rates = [learning_rate(trainer_run.terms, step) for step in range(10)]
    assert trainer_run.seen == pytest.approx(rates)
    assert trainer_run.logged == trainer_run.seen

    trainer = trainer_run.trainer(model := Doubling(), max_steps=100, load_best_model_at_end=True, **often)
    trainer.train(resume_from_checkpoint=True)
    tiny_run.until(lambda: trainer_run.coordinator.executor.finished)
    assert trainer.state.global_step > 20
    assert trainer_run.logged == trainer_run.seen != []
    best = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    assert all(torch.equal(tensor, best[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_a_trainer_that_begins_again_with_a_smaller_batch_is_one_node(trainer_run: TrainerRun) -> None:
    trainer = trainer_run.trainer(Doubling(most=2), max_steps=12, auto_find_batch_size=True)
    for _ in range(2):
        assert not trainer_run.coordinator.executor.finished
        trainer.train()
        assert trainer.state.train_batch_size == 2 and trainer.state.global_step == 12
    tiny_run.until(lambda: trainer_run.coordinator.executor.finished)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("library", ["transformers", "accelerate", "lightning"])
def test_a_trainer_on_two_ranks_and_on_one_is_a_node(new_run: NewRun, library: str) -> None:
    """Both make the run's steps at the run's rate, and end when it ends."""
    pytest.importorskip(library)
    first = "hf_trainer.py" if library == "transformers" else "own_loop.py"
    settings = {"method": "streaming", "h": 10, "steps": 40, "warmup_steps": 5, "schedule": "constant", "lr": 0.00321}
    run = own_run(new_run, script=EXAMPLES / first, **settings)
    run.start_coordinator()
    match library:
        case "transformers":
            train = [str(EXAMPLES / "hf_trainer.py"), "train", run.address]
        case "accelerate":
            train = [str(EXAMPLES / "accelerate_loop.py"), run.address]
        case _:
            train = [str(EXAMPLES / "lightning_trainer.py"), run.address]
    # Lightning starts its processes itself.
    two = [*train, "two", "2"] if library == "lightning" else [*TORCHRUN, "2", *train, "two"]
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
