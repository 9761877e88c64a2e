"""A run that averages the running statistics of batch normalisation (`buffers = "average"`)."""

import shutil
import signal

import pytest
import torch
from loopback import FARLOOP, OWN_NODE, Daemon, NewRun, Run, assert_all_agree, merged_since, own_run
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
def test_a_late_node_takes_part_and_the_coordinator_may_start_again(new_run: NewRun) -> None:
    run = normed_run(new_run, steps=120, h=5, nodes=1, method="diloco")
    coordinator = run.start_coordinator()
    run.start_own_node("a", "--normed", "0", "--pace-s", "0.1")
    run.until("versions are there", lambda status: min(status["versions"]) >= 2)
    run.start_own_node("b", "--normed", "3", "--batch", "24")
    before = run.until("b takes part", lambda status: merged_since(status, [0, 0], "b"))
    coordinator.kill()
    run.start_coordinator()
    run.until("b still does", lambda status: merged_since(status, before["versions"], "b"))
    status = run.until_done()
    assert not status["alarms"], "targets came out as they were"
    assert_is_the_mean(run, status, a=8, b=24)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--rewind",), ("--adopt-from-nodes", "--adopt-newest")])
def test_an_old_copy_goes_back_or_takes_what_the_nodes_have(new_run: NewRun, options: tuple[str, ...]) -> None:
    run = normed_run(new_run, steps=120, h=5, method="diloco")
    coordinator = run.start_coordinator()
    run.start_own_node("a", "--normed", "0", "--pace-s", "0.1")
    run.start_own_node("b", "--normed", "3", "--pace-s", "0.1", "--batch", "24")
    later = run.set_back(coordinator)
    assert min(later["versions"]) < 20, "the nodes still train"
    coordinator = run.start_coordinator(*options)
    back = run.until("it goes on", lambda status: status["run"]["state"] == "training")
    run.until("both are merged", lambda status: merged_since(status, back["versions"], "a"))
    status = run.until_done()
    assert not status["alarms"], "targets and anchors are as they were"
    assert_is_the_mean(run, status, a=8, b=24)


@pytest.mark.slow
def test_a_copy_in_a_store_has_the_statistics(new_run: NewRun) -> None:
    pytest.importorskip("obstore")
    run = normed_run(new_run, steps=60, h=5, nodes=1, method="diloco")
    store = (run.folder / "store").as_uri()
    run.tables["coordinator"] |= {"copy_to": store, "copy_every_s": 86400.0}

    def stopped(coordinator: Daemon, name: str) -> dict[str, Tensor]:
        coordinator.signal(signal.SIGTERM)
        assert run.until_ended(coordinator) == 0
        export = run.start(name, *FARLOOP, "export", f"exports/{name}", "--state", str(run.state_dir))
        assert run.until_ended(export) == 0, run.logs()
        return load_file(run.folder / "exports" / name / "model.safetensors")

    coordinator, node = run.start_coordinator(), run.start_own_node("a", "--normed", "3", "--pace-s", "0.1")
    run.until("versions are there", lambda status: min(status["versions"]) >= 2)
    node.kill()
    before = stopped(coordinator, "before")
    assert min(float(before[name].std()) for name in STATISTICS) > 0, "they are no longer those of the first weights"
    shutil.rmtree(run.state_dir)
    coordinator = run.start_coordinator("--restore", store)
    run.until("it waits", lambda status: min(status["versions"]) >= 2)
    after = stopped(coordinator, "after")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    run.start_coordinator()
    run.start_own_node("a", "--normed", "3")
    assert_is_the_mean(run, run.until_done(), a=8)


@pytest.mark.slow
def test_two_ranks_that_hold_the_model_whole_have_the_statistics_of_the_first(new_run: NewRun) -> None:
    run = normed_run(new_run, steps=20, h=5, nodes=1, method="diloco")
    run.start_coordinator()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run.start("many", *torchrun, str(OWN_NODE), "train", run.address, "many", "--normed", "2")
    assert_is_the_mean(run, run.until_done(timeout_s=280.0), many=8)
