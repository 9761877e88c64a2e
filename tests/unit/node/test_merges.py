"""What `node/model/merges.py` makes of optimizers that keep copies of the weights, and of those that keep none."""

from collections.abc import Callable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from optimizers import (
    Inside,
    Listed,
    Make,
    Masters,
    Node,
    Previous,
    Pulled,
    ScheduleFree,
    Slow,
    alike,
    noise,
    schedulefree,
)
from pretend_cuda import Device
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Muon, Optimizer, RMSprop

from farloop.algo.fragments import partition, statistics_of
from farloop.node.errors import LoopError
from farloop.node.model.merges import Merges
from farloop.node.model.replica import Replica


class Lion(Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.sub_(momentum.lerp(parameter.grad, 0.1).sign(), alpha=group["lr"])
                momentum.lerp_(parameter.grad, 0.01)


def sgd(rate: float, **options: Any) -> Make:
    return lambda parameters: SGD(parameters, lr=rate, **options)


def muon(rate: float) -> Make:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return Muon([p.requires_grad_(p.ndim == 2) for p in parameters if p.ndim == 2], lr=rate)

    return make


# --- merges that are undone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradient", [noise(1.0), torch.ones_like, torch.zeros_like])
def test_an_optimizer_that_writes_its_copies_back_is_named(
    gradient: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    node = Node(lambda parameters: Masters(parameters, lr=1e-3), dtype=dtype)
    node.step(gradient)
    node.merge(noise(0.5))
    with pytest.raises(LoopError, match=r"^Masters undoes merges: it keeps copies of the weights") as caught:
        for _ in range(10):
            node.step(gradient)
    assert "\n" not in str(caught.value)


def test_one_that_goes_back_at_every_sixth_step_is_named_too() -> None:
    node = Node(lambda parameters: Slow(parameters, lr=1e-3, k=6, where="elsewhere"))
    for _ in range(9):
        node.step(noise(1.0))
    node.merge(noise(0.5))
    with pytest.raises(LoopError, match="Slow undoes merges"):
        for _ in range(10):
            node.step(noise(1.0))


@pytest.mark.parametrize("order", ["lazy", "random"])
def test_on_a_device_it_is_told_at_a_later_step_and_nothing_waits(order: str) -> None:
    with Device(order) as cuda:
        node = Node(lambda parameters: Masters(parameters, lr=1e-3), device="cuda")
        node.step(noise(1.0))
        node.merge(noise(0.5))
        cuda.waits.clear()
        for _ in range(9):
            node.step(noise(1.0))
        assert not cuda.waits and not cuda.races
        with pytest.raises(LoopError, match="Masters undoes merges"):
            for _ in range(3):
                node.step(noise(1.0))
                torch.cuda.synchronize()


class Averaged(SGD):
    """An average of the weights is swapped in by eval(), and out by train()."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, inside: bool) -> None:
        super().__init__(parameters, lr=1e-3)
        self._elsewhere, self.inside, self.train_mode = SimpleNamespace(averages={}), inside, True

    @torch.no_grad()
    def _swap(self, train: bool) -> None:
        for parameter, average in self._elsewhere.averages.items() if self.train_mode != train else ():
            weights = parameter.clone()
            parameter.copy_(average)
            average.copy_(weights)
        self.train_mode = train

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            average = self._elsewhere.averages.setdefault(parameter, parameter.detach().clone())
            if self.inside:
                self.state[parameter]["average"] = average
        super().step()
        for parameter, average in self._elsewhere.averages.items():
            average.lerp_(parameter, 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_that_is_swapped_in_for_evaluations_moves_or_is_named(dtype: torch.dtype) -> None:
    """Merges go into what is exchanged, the average: the weights that are trained have to move alike."""
    inside, outside = (Node(partial(Averaged, inside=inside), dtype=dtype) for inside in (True, False))
    for node in (inside, outside):
        for _ in range(5):
            node.step(noise(1.0))
    before = [parameter.detach().clone() for parameter in inside.model.parameters()]
    inside.merge(lambda like: torch.full_like(like, 2.0))
    for weights, was in zip(inside.model.parameters(), before, strict=True):
        torch.testing.assert_close(weights, was + 2.0, rtol=0.0, atol=0.05)
    for _ in range(10):
        inside.step(noise(1.0))
    outside.merge(lambda like: torch.full_like(like, 2.0))
    with pytest.raises(LoopError, match="Averaged undoes merges"):
        outside.step(noise(1.0))


# --- copies that are shifted


class Around(Optimizer):
    """Holds another optimizer, and has no state of its own, or that one's."""

    def __init__(self, inner: Optimizer, *, shared: bool = False) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {"lr": 0.1})
        if shared:
            self.state = inner.state

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def pulled(parameters: Iterable[nn.Parameter], lr: float, *, dry: bool = False) -> Optimizer:
    """`dry`: it has a state before its first step, as torch's checkpoint library has it make one."""
    made = Pulled(parameters, lr=0.0 if dry else lr / 16)
    if dry:
        for parameter in made.param_groups[0]["params"]:
            parameter.grad = torch.zeros_like(parameter)
        made.step()
        made.param_groups[0]["lr"] = lr / 16
    return made


@pytest.mark.parametrize(
    "make",
    {
        "masters": Inside,
        "masters in lists": Listed,
        "schedule-free": ScheduleFree,
        "lookahead": partial(Slow, k=6, where="state"),
        "slow": partial(Slow, k=12),
        "drawn": partial(Slow, k=100, drawn=0.1),
        "the step before": Previous,
        "pulled": pulled,
        "pulled after a dry step": partial(pulled, dry=True),
        "wrapped": lambda parameters, lr: Around(Inside(parameters, lr=lr)),
        "in one state": lambda parameters, lr: Around(Inside(parameters, lr=lr), shared=True),
    }.items(),
    ids=lambda case: case[0],
)
def test_what_an_optimizer_has_of_the_weights_moves_with_them(make: tuple[str, Callable[..., Optimizer]]) -> None:
    """A merge that moves everything by 2 leaves training as it was, 2 further on: the gradients are the same."""
    merged, alone = (Node(lambda parameters: make[1](parameters, lr=0.125)) for _ in range(2))
    for step in range(14):
        for node in (merged, alone):
            node.step(lambda weights, step=step: torch.full_like(weights, 0.25 * (step % 3)))
        if step == 5:
            merged.merge(alike(2.0))
    for one, other in zip(merged.model.parameters(), alone.model.parameters(), strict=True):
        torch.testing.assert_close(one, other + 2.0, rtol=0, atol=1e-4)


@pytest.mark.parametrize("make", [ScheduleFree, schedulefree])
def test_two_schedule_free_nodes_exchange_and_evaluate_the_average(make: Callable[..., Optimizer]) -> None:
    """With a loss of 1/2 |w - t|^2, two nodes that are averaged are one process with the mean of both t: what they have
    together is its average x, not what it takes gradients of."""
    targets, alone = (0.3, 0.5), Node(lambda parameters: make(parameters, lr=0.2))
    nodes = [Node(lambda parameters: make(parameters, lr=0.2)) for _ in targets]
    replicas = [Replica(node.model, node.layout, gradients=False) for node in nodes]
    for node, replica in zip(nodes, replicas, strict=True):
        replica.merges = node.merges
        replica.anchors[0].write().sub_(replica.compute_delta(0))
        node.merges.resume()
    for _ in range(3):
        for _ in range(5):
            alone.step(lambda weights: weights - 0.4)
            for node, target in zip(nodes, targets, strict=True):
                node.step(lambda weights, target=target: weights - target)
        deltas = [replica.compute_delta(0).clone() for replica in replicas]
        for node, replica in zip(nodes, replicas, strict=True):
            replica.anchors[0].write().sub_((deltas[0] + deltas[1]) / 2)
            replica.merge(0, 0.0)
            with replica.anchors_in_place(), node.merges.set_aside():
                shown = [parameter.detach().clone() for parameter in node.model.parameters()]
                cast(Any, node.optimizer).eval()  # as a loop's own evaluation does
                cast(Any, node.optimizer).train()
                assert all(map(torch.equal, shown, node.model.parameters()))
            node.merges.resume()
    cast(Any, alone.optimizer).eval()
    for weights, right in zip(shown, alone.model.parameters(), strict=True):
        torch.testing.assert_close(weights, right.detach(), rtol=0, atol=1e-6)


def test_masters_of_16_bit_weights_move_though_the_weights_are_rounded() -> None:
    node = Node(lambda parameters: Inside(parameters, lr=2**-12), dtype=torch.bfloat16)
    node.step(torch.ones_like)
    before = [node.optimizer.state[p]["master"].clone() for p in node.model.parameters()]
    node.merge(alike(2.0))
    for parameter, master in zip(node.model.parameters(), before, strict=True):
        moved = node.optimizer.state[parameter]["master"]
        torch.testing.assert_close(moved, master + 2.0, rtol=0, atol=2**-6)
        assert not torch.equal(moved, moved.bfloat16().float()), "what the weights cannot hold is kept"


def test_moments_are_no_copies() -> None:
    node = Node(lambda parameters: AdamW(parameters, lr=0.1))
    node.step(torch.zeros_like)
    node.step(noise(1.0))
    before = {key: value.clone() for state in node.optimizer.state.values() for key, value in state.items()}
    node.merge(noise(1.0))
    assert all(torch.equal(s[k], before[k]) for s in [[*node.optimizer.state.values()][-1]] for k in before)


@pytest.mark.parametrize("kind", [Masters, Listed])
def test_copies_elsewhere_move_by_what_on_merge_is_given(kind: type[Masters]) -> None:
    """Those in attributes too, and then by nothing else."""
    told = list[dict[nn.Parameter, Tensor]]()
    node = Node(lambda parameters: kind(parameters, lr=0.125), on_merge=lambda changes: told.append(dict(changes)))
    node.step(torch.ones_like)
    before = [parameter.detach().clone() for parameter in node.model.parameters()]
    node.merge(alike(2.0))
    assert isinstance(node.optimizer, Masters)
    for parameter, change in told[0].items():
        node.optimizer.masters[parameter].add_(change)
    for _ in range(10):
        node.step(torch.zeros_like)
    for parameter, was in zip(node.model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), was + 2.0)


# --- merges that are kept

KEEP: dict[str, Callable[[float], Make]] = {
    "sgd": sgd,
    "momentum": lambda rate: sgd(rate, momentum=0.9),
    "adamw": lambda rate: lambda parameters: AdamW(parameters, lr=rate, weight_decay=0.1),
    "rmsprop": lambda rate: lambda parameters: RMSprop(parameters, lr=rate),
    "adagrad": lambda rate: lambda parameters: Adagrad(parameters, lr=rate),
    "lion": lambda rate: lambda parameters: Lion(parameters, lr=rate),
    "muon": muon,
}


def pull(strength: float) -> Callable[[Tensor], Tensor]:
    """To the data's own optimum, as on a node whose data differ from the others'."""
    return lambda weights: strength * (weights - 0.3)


@pytest.mark.parametrize("kind", KEEP)
@pytest.mark.parametrize(("rate", "move"), [(0.1, 1e-6), (0.1, 0.1), (1.0, 1.0), (1e-3, 1.0)])
def test_an_optimizer_without_copies_is_never_ended(kind: str, rate: float, move: float) -> None:
    """Whatever its steps: none, a single one, noise, a strong pull back from where the others are."""
    gradients = {
        "none": torch.zeros_like,
        "noise": noise(1.0),
        "small noise": noise(1e-4),
        "pull": pull(1.0),
        "strong pull": pull(1.0 / rate),
        "clipped": lambda weights: nn.functional.normalize(pull(1.0)(weights), dim=None) * 0.1,
        "not finite": lambda weights: pull(0.5)(weights) if torch.rand(()) < 0.5 else torch.zeros_like(weights),
    }
    for name, gradient in gradients.items():
        node = Node(KEEP[kind](rate))
        for step in range(26):
            if step % 6 == 4 or step == 13:
                node.merge(noise(move) if step % 2 else alike(move))
            if step % 5 == 0 and name == "noise":
                node.optimizer.param_groups[0]["lr"] = rate * (0.1 if step % 2 else 1.0)
            node.step(gradient)


@pytest.mark.parametrize("steps", [26, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_steps_and_those_that_rounding_swallows_undo_no_merge(dtype: torch.dtype, steps: int) -> None:
    """Steps back by the smallest difference, a third of the merge, equal to the last bit; or one of them, and then
    shorter ones. AdamW on bf16 weights was ended for either."""
    small = torch.finfo(dtype).eps
    node = Node(sgd(small), dtype=dtype)
    for parameter in node.model.parameters():
        nn.init.constant_(parameter, 1.5)
    for step in range(26):
        if step % 12 == 1:
            node.merge(alike(3 * small))
        node.step(alike(1.0 if (step - 1) % 12 < steps else 0.3))


def test_once_enough_merges_were_kept_nothing_is_looked_at() -> None:
    node = Node(sgd(1e-3))
    for _ in range(8):
        node.merge(noise(1.0))
        for _ in range(10):
            node.step(noise(1.0))
    node.merge(noise(1.0))
    assert not node.merges._windows


def test_statistics_that_samples_draw_back_are_no_merge_that_is_undone() -> None:
    """With a momentum of 1, in one step. Nor has the optimizer copies of them."""
    module = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32, momentum=1.0))
    parameters = {**dict(module.named_parameters()), **statistics_of(module)}
    layout = partition([(name, tuple(tensor.shape)) for name, tensor in parameters.items()], pattern="whole")
    told = list[int]()
    merges = Merges(
        SGD(module.parameters(), lr=1e-3), cast(Any, parameters), layout, lambda changes: told.append(len(changes))
    )
    x = torch.randn(64, 32)
    module(x)
    for _ in range(4):
        with merges.merge(0):
            statistics_of(module)["1.running_mean"].add_(3.0)
        for _ in range(10):
            merges.before_step()
            module(x)
            merges.after_step()
    assert layout.fragments[0].averaged and told == [0] * 4
