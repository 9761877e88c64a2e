"""A run that averages the running statistics of batch normalisation (`buffers = "average"`)."""

import pytest
import torch
from loopback import OWN_NODE, TORCHRUN, NewRun, Run, assert_all_agree, own_run
from own_node import WIDTH, Model, loss_of
from safetensors.torch import load_file
from slow_cases import slow
from torch import Tensor

from farloop.coordinator.storage.verify import verify
from farloop.monitoring.status import Status

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STATISTICS = ("norm.running_mean", "norm.running_var")


def normed_run(new_run: NewRun, **settings: object) -> Run:
    return own_run(new_run, "--normed", "0", buffers="average", **settings)


def tensors(run: Run, name: str) -> dict[str, Tensor]:
    return load_file(run.folder / f"{name}.safetensors")


def assert_is_the_mean(run: Run, status: Status, **tokens: int) -> None:
    """Of what these nodes had before their last exchange, by their tokens; and all have it, to the bit."""
    assert_all_agree(run, status, *tokens)
    model = tensors(run, "state/model")
    for name in STATISTICS:
        parts = [tensors(run, f"{node}-sent")[name].double() * count for node, count in tokens.items()]
        assert torch.allclose(model[name].double(), sum(parts) / sum(tokens.values()), rtol=1e-5, atol=1e-6), name
        gap = parts[0] / next(iter(tokens.values())) - model[name]
        assert len(tokens) == 1 or gap.abs().max() > 0.01, "nodes do not have the same"
    plain = Model(WIDTH, normed=True)
    plain.load_state_dict(model, strict=False)  # without the counter of batches
    for node in tokens:
        end = tensors(run, f"{node}-end")
        assert float(end.pop("loss")) == pytest.approx(loss_of(plain), rel=1e-6)
        assert end.keys() == model.keys() and all(torch.equal(end[name], model[name]) for name in end)
    assert verify(run.state_dir).faults == []


@pytest.mark.parametrize("method", ["streaming", *slow("diloco")])
def test_the_run_s_model_has_the_mean_by_tokens_and_computes_as_the_nodes(new_run: NewRun, method: str) -> None:
    run = normed_run(new_run, steps=40, h=10, method=method, mix=0.0)
    run.start_coordinator()
    run.start_own_node("a", "--normed", "0")
    run.start_own_node("b", "--normed", "3", "--batch", "24")
    assert_is_the_mean(run, run.until_done(), a=8, b=24)


@pytest.mark.slow
def test_two_ranks_that_hold_the_model_whole_have_the_statistics_of_the_first(new_run: NewRun) -> None:
    run = normed_run(new_run, steps=20, h=5, nodes=1, method="diloco")
    run.start_coordinator()
    run.start("many", *TORCHRUN, "2", str(OWN_NODE), "train", run.address, "many", "--normed", "2")
    assert_is_the_mean(run, run.until_done(timeout_s=280.0), many=8)
