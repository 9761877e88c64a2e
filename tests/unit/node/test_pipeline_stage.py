"""The torch of a stage."""

import pytest
import torch
from pipeline_nodes import SMALL, microbatches, model

from farloop.algo.fragments import partition
from farloop.algo.stages import Hop, Stage
from farloop.node.pipeline.messages import Kind, MicrobatchRoute, Work
from farloop.node.pipeline.stage import Normalise, StageJobs, StagePart


def part(first: int, stop: int) -> StagePart:
    return StagePart(model(), Stage(first=first, stop=stop, replicas=("a",)), source=first == 0)


def work(kind: Kind, index: int = 0, attempt: int = 0) -> Work:
    trip = MicrobatchRoute(source="a", start=0, step=0, index=index, attempt=attempt)
    return Work(kind=kind, epoch=1, trip=trip, path=0, position=0, visited=(Hop(stage=0, node="a"),))


def test_the_stages_have_the_names_of_the_whole_model_and_share_none() -> None:
    """So that fragments cut over the whole model are held by the stages that they are of."""
    whole = dict(model().named_parameters())
    stages = [dict(part(*cut).named_parameters()) for cut in ((0, 1), (1, 3), (3, 4))]
    assert sorted(name for names in stages for name in names) == sorted(whole)
    for names in stages:
        assert all(torch.equal(parameter, whole[name]) for name, parameter in names.items())
    tensors = [(name, tuple(parameter.shape)) for name, parameter in whole.items()]
    layout = partition(tensors, pattern="strided", stages=(1, 3))
    for fragment in layout.fragments:
        assert all(slot.name in stages[fragment.stage] for slot in fragment.tensors)


def test_layers_that_the_model_has_not_are_refused() -> None:
    with pytest.raises(ValueError, match="layers 3 to 5 of a model of 4"):
        part(3, 5)


@pytest.mark.parametrize("normalise", ["visits", "share"])
def test_gradients_are_divided_by_visits_or_by_what_they_would_be(normalise: Normalise) -> None:
    """One of two microbatches came by: its own gradient, or half of it."""
    jobs, x = StageJobs(part(1, 2)), torch.randn(2, 16, SMALL.dim)
    out = jobs.do(work(Kind.FORWARD), x)
    assert out is not None
    jobs.do(work(Kind.BACKWARD), torch.ones_like(out))
    trained = jobs.finish(2, normalise)
    twin = part(1, 2)
    torch.autograd.backward(twin.run(x), torch.ones_like(out))
    weight, wanted = (p.blocks["1"].mlp.down.weight.grad for p in (jobs.part, twin))
    torch.testing.assert_close(weight, wanted if normalise == "visits" else wanted / 2)
    assert (trained.visits, trained.tokens, trained.loss) == (1, 32, None)


def test_a_step_of_the_optimizer_between_forward_and_backward_does_no_harm() -> None:
    """As with a guest of another source: the forward pass is computed again, with the weights of now."""
    jobs, x = StageJobs(part(1, 2)), torch.randn(2, 16, SMALL.dim)
    out = jobs.do(work(Kind.FORWARD), x)
    assert out is not None
    with torch.no_grad():
        for parameter in jobs.part.parameters():
            parameter.add_(0.1)
    assert jobs.do(work(Kind.BACKWARD), torch.ones_like(out)) is not None


def test_a_trip_that_was_lost_after_its_loss_does_not_make_the_next_step_longer() -> None:
    """It has left its gradient in the head: two losses, one backward. The mean over both is taken where both are."""
    jobs = StageJobs(part(0, 4))
    (tokens,) = microbatches(1, 5)
    jobs.load([tokens])
    for attempt in range(2):
        out = jobs.do(work(Kind.FORWARD, attempt=attempt), None)
        assert out is not None
        gradient = jobs.do(work(Kind.LOSS, attempt=attempt), out)
    assert gradient is not None
    jobs.do(work(Kind.BACKWARD, attempt=1), gradient)
    jobs.finish(1)
    whole = model()
    torch.autograd.backward(whole.loss(tokens))
    assert jobs.part.norm.weight.grad is not None
    torch.testing.assert_close(jobs.part.norm.weight.grad, whole.norm.weight.grad, rtol=1e-4, atol=1e-7)
    grads = jobs.part.blocks["2"].mlp.down.weight.grad, whole.blocks[2].mlp.down.weight.grad
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-7)


def test_nothing_is_kept_of_what_is_forgotten() -> None:
    jobs = StageJobs(part(1, 2))
    jobs.do(work(Kind.FORWARD), torch.randn(1, 4, SMALL.dim))
    jobs.forget(work(Kind.FORWARD).trip)
    assert not jobs._inputs
