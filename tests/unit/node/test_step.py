"""What `Node.step` does to a training loop's parameters (docs/models.md), with a driver that only takes notes."""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from node_story import identity
from plain_runs import plain_spec, plain_terms
from stories import StoryText, all_stories, check_story, python
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR

from farloop.algo.fragments import partition, trainable_tensors
from farloop.algo.spec import Layout, RunSpec
from farloop.node import arguments, library
from farloop.node.arguments import LoopOptions, check_hooks, unwrapped
from farloop.node.cluster import Cluster, Decision
from farloop.node.driver import Driver
from farloop.node.errors import LoopError, Unreachable
from farloop.node.hang_watch import HangWatch
from farloop.node.library import Held, Node, _check_ranks, _check_tau, _inner_optimizer, join
from farloop.node.model.inner_optimizer import default_optimizer
from farloop.node.model.shards import is_dtensor
from farloop.node.settings import NodeConfig
from farloop.wire import limits

RATE = 0.25
"""The run's, at the first step; half of it at the second, and so on."""

ONES = [[1.0, 1.0], [1.0, 1.0]]


class Notes:
    """In the driver's place: decides on the rate, and keeps what it was told."""

    def __init__(self) -> None:
        self.executor: Any = SimpleNamespace(machine=None, replica=None, attach=lambda *given: None)
        self.steps: list[tuple[int, float | None, bool]] = []
        self.failed, self.told, self.drained = False, False, list[float]()
        self.asked, self.at_once = 0, 1

    def drain(self, timeout_s: float) -> None:
        self.drained.append(timeout_s)

    def wait_for_start(self) -> list[Decision]:
        return [Decision(running=True, lr=RATE)]

    def save_moments(self) -> None:
        """As the driver's."""

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        self.told = True
        yield

    def close(self, error: BaseException | None = None) -> None:
        self.closed_by = error

    def after_step(self, tokens: int, loss: float | None, *, stepped: bool) -> list[Decision]:
        self.steps.append((tokens, loss, stepped))
        self.asked += 1
        return [Decision(running=True, lr=RATE / 2 ** (len(self.steps) + k)) for k in range(self.at_once)]

    def between_steps(self, tokens: int, loss: float | None, *, stepped: bool) -> None:
        self.steps.append((tokens, loss, stepped))


class Loop:
    """A model of two layers, all its weights 1, whose gradients a test gives."""

    def __init__(
        self,
        optimizer: Callable[[nn.Module], Optimizer | None],
        *,
        module: nn.Module | None = None,
        max_norm: float = 1e6,
        terms: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """`options` are those of the loop."""
        self.module = module or two_layers()
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(1.0)
        shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(self.module)]
        own = plain_terms(**{"method": "diloco", "clip": max_norm, **(terms or {})})
        spec = RunSpec(identity=identity(partition(shapes, pattern="whole")), terms=own)
        self.notes, self._optimizer = Notes(), optimizer(self.module)
        held = Held(Cluster(), watch=HangWatch(Cluster(), 0.0), driver=cast(Driver, self.notes))
        given = LoopOptions(model=self.module, optimizer=self._optimizer, **options)
        self.node = Node(held, NodeConfig(name="a"), given, spec)
        self.node._begin()

    @property
    def optimizer(self) -> Optimizer:
        assert self._optimizer is not None
        return self._optimizer

    @property
    def weights(self) -> list[list[float]]:
        """Of each layer."""
        return [parameter.detach().flatten().tolist() for parameter in self.module.parameters()]

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.module.parameters())

    def step(self, *gradients: float) -> bool:
        """All elements of a layer's gradient are the number given for it; of all layers, if it is one."""
        layers = list(self.module.parameters())
        for parameter, value in zip(layers, gradients * (len(layers) if len(gradients) == 1 else 1), strict=True):
            parameter.grad = torch.full_like(parameter, value)
        return self.node.step(loss=1.0, tokens=8)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 2, bias=False))


def groups(first: float | None, second: float | None, **options: Any) -> Callable[[nn.Module], Optimizer]:
    """SGD with a group a layer, of these rates."""

    def build(module: nn.Module) -> Optimizer:
        each = zip(module.parameters(), (first, second), strict=True)
        return SGD([{"params": [p], **({} if rate is None else {"lr": rate})} for p, rate in each], **options)

    return build


def plain(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=7.0)


class Follower(Cluster):
    """Another rank than the lead, which has merged: every weight is larger by `change` there."""

    change = 0.0

    def share_decisions(self, decisions: Sequence[Decision]) -> list[Decision]:
        return [Decision(running=True, lr=RATE, merged=(0,) if self.change else ())]

    @torch.no_grad()
    def share_weights(self, layout: Layout, index: int, parameters: Mapping[str, Tensor]) -> None:
        for parameter in parameters.values():
            parameter.add_(self.change)


def test_copies_of_the_weights_move_on_the_ranks_that_follow() -> None:
    """In the optimizer's state, and outside of it by on_merge; the lead's replica moves its own."""
    beside = list[float]()
    loop = Loop(plain, on_merge=lambda changes: beside.extend(float(c.min()) for c in changes.values()))
    loop.step(0.0)
    for parameter in loop.module.parameters():
        loop.optimizer.state[parameter]["master"] = parameter.detach().clone()
    loop.node.cluster = follower = Follower(rank=1, size=2)
    follower.change, beside[:] = 3.0, []
    loop.step(0.0)
    assert loop.weights == [[4.0, 4.0], [4.0, 4.0]] and beside == [3.0, 3.0]
    assert [state["master"].flatten().tolist() for state in loop.optimizer.state.values()] == loop.weights


def test_a_node_whose_optimizer_undoes_a_merge_ends_by_hook_and_by_step() -> None:
    class Masters(SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.data.fill_(1.0)

    for hook in (False, True):
        loop = Loop(lambda module: Masters(module.parameters(), lr=0.1), hook=hook)
        with torch.no_grad(), cast(Any, loop.node)._merges.merge(0):
            for parameter in loop.module.parameters():
                parameter.add_(0.5)
        with pytest.raises(LoopError, match="Masters undoes merges"):
            for _ in range(10):
                for parameter in loop.module.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                loop.optimizer.step() if hook else loop.node.step()
        assert loop.notes.told


def test_a_wrapping_optimizer_is_stepped_as_given_and_one_without_hooks_is_refused() -> None:
    inner = SGD(two_layers().parameters(), lr=0.1)

    class Around(Optimizer):
        def __init__(self) -> None:
            self.optimizer, self.param_groups = inner, inner.param_groups

        def step(self, closure: Any = None) -> None:
            self.optimizer.step()

    around = Around()
    assert unwrapped(around) is around
    assert unwrapped(type("AcceleratedOptimizer", (Around,), {"__module__": "accelerate.optimizer"})()) is inner
    check_hooks(inner)
    with pytest.raises(LoopError, match=r"^join\(hook=True\): Around has no step hooks, as it does not call") as caught:
        check_hooks(around)
    assert "\n" not in str(caught.value)


def test_what_deepspeed_has_made_is_refused_in_one_line() -> None:
    """Its classes are known by their names: the package builds its own kernels, and is not installed here."""
    wrapper: Any = pytest.importorskip("accelerate.utils.deepspeed").DeepSpeedOptimizerWrapper
    module = two_layers()
    of_accelerate = wrapper.__new__(wrapper)  # it is made from what initialize returns
    of_accelerate.optimizer = plain(module)
    zero = type("DeepSpeedZeroOptimizer", (), {"__module__": "deepspeed.runtime.zero.stage_1_and_2"})()
    engine = type("DeepSpeedEngine", (nn.Sequential,), {})(module)
    parted = two_layers()
    cast(Any, parted[0].weight).ds_id = 0  # of ZeRO-3, which leaves no elements there
    for model, optimizer in ((module, of_accelerate), (module, zero), (engine, plain(module)), (parted, plain(parted))):
        with pytest.raises(LoopError, match=r"^join got a model or an optimizer of DeepSpeed, .*fully_shard") as caught:
            join("tcp://127.0.0.1:1", model, optimizer, name="a", hook=True)
        assert "\n" not in str(caught.value)
    of_its_own = type("DeepSpeedCPUAdam", (SGD,), {"__module__": "deepspeed.ops.adam"})(module.parameters())
    assert unwrapped(of_its_own) is of_its_own, "a plain optimizer"


def test_the_dry_step_of_torch_s_checkpoint_library_is_none() -> None:
    def fresh() -> Loop:
        return Loop(lambda module: AdamW(module.parameters(), lr=0.1), hook=True)

    saved = get_optimizer_state_dict((loop := fresh()).module, loop.optimizer)
    set_optimizer_state_dict((other := fresh()).module, other.optimizer, saved)
    for dry in (loop, other):
        assert dry.optimizer.state and dry.weights == ONES and not dry.notes.steps
    for plain_step, rate, gradient in ((loop, 0.0, 0.0), (fresh(), 0.1, 0.0), (fresh(), 0.0, 1.0)):
        plain_step.optimizer.param_groups[0]["lr"] = rate
        for parameter in plain_step.module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        plain_step.optimizer.step()
        assert len(plain_step.notes.steps) == 1, "with a state, a rate or a gradient it is one"


# --- the learning rate


def test_what_is_decided_for_several_steps_is_asked_for_once() -> None:
    loop = Loop(plain)
    loop.notes.at_once = 3
    rates = []
    for _ in range(7):
        loop.step(1.0)
        rates += loop.rates[:1]
    assert rates == [RATE / 2**k for k in range(7)], "each step has its own rate"
    assert loop.notes.steps == [(8, 1.0, True)] * 7, "each step is counted"
    assert loop.notes.asked == 3


def warming(module: nn.Module) -> Optimizer:
    """A scheduler that has begun to warm up does not change the ratios."""
    optimizer = groups(None, 0.2, lr=0.02)(module)
    LinearLR(optimizer, start_factor=1e-3)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (groups(None, 0.002, lr=0.02), [RATE, RATE / 10]),
        (groups(None, 0.2, lr=0.02), [RATE, RATE * 10]),
        (groups(1e-6, 1e-2), [RATE / 1e4, RATE]),
        (groups(0.0, 0.5), [0.0, RATE]),
        (warming, [RATE, RATE * 10]),
    ],
    ids=["a slower one", "a faster one", "none has the default", "one stands still", "a scheduler"],
)
def test_parameter_groups_keep_their_ratios(optimizer: Callable[[nn.Module], Optimizer], expected: list[float]) -> None:
    loop = Loop(optimizer)
    loop.step(1.0)
    assert loop.rates == pytest.approx(expected)
    loop.step(1.0)
    assert loop.rates == pytest.approx([rate / 2 for rate in expected]), "the run's schedule scales them all"


def test_a_group_that_is_added_later_gets_its_own_ratio_and_a_rate_may_be_a_tensor() -> None:
    loop = Loop(lambda module: AdamW([next(module.parameters())], lr=torch.tensor(0.02)))
    tensor = loop.optimizer.param_groups[0]["lr"]
    loop.optimizer.add_param_group({"params": list(loop.module.parameters())[1:], "lr": torch.tensor(0.04)})
    loop.step(1.0)
    assert loop.rates == pytest.approx([RATE, 2 * RATE])
    assert loop.optimizer.param_groups[0]["lr"] is tensor, "a compiled optimizer reads the one that it was given"


def test_a_scheduler_of_the_loop_is_told_of_once_and_overridden(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(plain)
    loop.step(1.0)
    assert "scheduler" not in caplog.text
    scheduler = ExponentialLR(loop.optimizer, gamma=0.5)
    for _ in range(3):
        loop.step(1.0)
        scheduler.step()
    assert caplog.text.count("join with rate='own'") == 1
    loop.step(1.0)
    assert loop.rates == [RATE / 16]


def test_a_constant_schedule_is_no_scheduler_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    """Trainers that have no other way to leave the rate alone put the same one back after every step."""
    loop = Loop(plain)
    scheduler = LambdaLR(loop.optimizer, lambda step: 1.0)
    for _ in range(3):
        loop.step(1.0)
        scheduler.step()
    assert caplog.text == ""
    loop.step(1.0)
    assert loop.rates == [RATE / 8]


class Container(Optimizer):
    """An optimizer for each part of a model, as torchtitan's OptimizersContainer: its own groups are copies."""

    def __init__(self, parts: Sequence[nn.Module], rates: Sequence[float]) -> None:
        self.optimizers = [SGD(part.parameters(), lr=rate) for part, rate in zip(parts, rates, strict=True)]
        super().__init__([p for part in parts for p in part.parameters()], {"lr": rates[0]})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step(closure)


def test_a_container_of_optimizers_is_one_step_and_its_parts_get_the_rate() -> None:
    loop = Loop(lambda module: Container(list(module.children()), (0.2, 0.1)), hook=True)
    for steps in (1, 2):
        for parameter in loop.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        loop.optimizer.step()
        assert len(loop.notes.steps) == steps
    assert loop.weights == [[1 - 1.5 * RATE] * 2, [1 - 0.75 * RATE] * 2]


def test_a_trainer_that_goes_on_after_the_end_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(plain, hook=True)
    loop.node._decision = Decision(running=False, lr=0.0)
    for _ in range(2):
        loop.optimizer.step()
    assert caplog.text.count("stop it when node.running is False") == 1 and not loop.notes.steps


def test_a_tie_by_memory_is_stepped_through_both_of_its_names() -> None:
    module = two_layers()
    module.register_parameter("again", nn.Parameter(next(module.parameters()).data))
    loop = Loop(plain, module=module)
    assert loop.step(1.0) and loop.step(1.0)


def test_an_evaluation_leaves_the_modes_of_all_layers_as_they_were() -> None:
    loop = Loop(plain)
    cast(nn.Sequential, loop.module)[0].eval()
    modes = [part.training for part in loop.module.modules()]

    def evaluate(module: nn.Module) -> float:
        assert not any(part.training for part in module.eval().modules())
        return 1.0

    assert loop.node._evaluated(evaluate) == 1.0
    assert [part.training for part in loop.module.modules()] == modes == [True, False, True]


def test_notes_without_steps_are_refused_or_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(plain, hook=True)
    for _ in range(60):
        loop.node.note(loss=1.0)
    next(loop.module.parameters()).grad = torch.zeros(1, 2)
    loop.optimizer.step()
    for _ in range(99):
        loop.node.note(loss=1.0)
    assert caplog.text == ""
    for _ in range(9):
        loop.node.note(loss=1.0)
    assert caplog.text.count("note was called 100 times") == 1


def test_with_a_rate_of_its_own_the_loop_s_scheduler_decides(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(groups(0.5, 0.25), rate="own")
    scheduler = ExponentialLR(loop.optimizer, gamma=0.5)
    for weights in ([[0.5, 0.5], [0.75, 0.75]], [[0.25, 0.25], [0.625, 0.625]]):
        loop.step(1.0)
        assert loop.weights == weights
        scheduler.step()
    assert caplog.text == ""


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_built_in_optimizers_take_the_run_s_rate_for_all_their_groups(kind: str) -> None:
    module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    terms = plain_terms(inner_optimizer=kind)
    loop = Loop(lambda module: default_optimizer(module, terms), module=module, terms={"control_variates": True})
    loop.step(1.0)
    assert set(loop.rates) == {RATE}


# --- the clip, and steps that are not finite


@pytest.mark.parametrize(
    ("clip", "gradients", "stepped"),
    [
        ("run", (3.0, 4.0), (3 / math.sqrt(50), 4 / math.sqrt(50))),  # to the run's norm over all parameters
        ("run", (0.25, 0.25), (0.25, 0.25)),  # a shorter one is left as it is
        ("own", (3.0, 4.0), (3.0, 4.0)),
    ],
)
def test_the_gradient_is_clipped(clip: str, gradients: tuple[float, float], stepped: tuple[float, float]) -> None:
    loop = Loop(plain, max_norm=1.0, clip=clip)
    loop.step(*gradients)
    for layer, gradient in zip(loop.weights, stepped, strict=True):
        assert layer == pytest.approx([1 - RATE * gradient] * 2)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("clip", ["run", "own"])
def test_a_step_not_finite_is_skipped_and_counted(clip: str, bad: float, caplog: pytest.LogCaptureFixture) -> None:
    """Clipping an infinite gradient made every weight NaN."""
    loop = Loop(lambda module: AdamW(module.parameters(), weight_decay=0.1), max_norm=1.0, clip=clip)
    for _ in range(4):
        assert loop.step(1.0, bad)
    assert loop.weights == ONES and not loop.optimizer.state
    assert loop.notes.steps == [(8, 1.0, False)] * 4, "the round goes on"
    assert [record.getMessage()[-1] for record in caplog.records] == ["1", "2", "4"]
    assert "inner step skipped cause='the gradient holds NaN or Inf'" in caplog.text
    assert not loop.has_gradients, "or they would be added to the next"
    loop.step(1.0)
    assert loop.weights != ONES and loop.notes.steps[-1] == (8, 1.0, True)


# --- gradient scalers


def scaled(loop: Loop, scaler: torch.amp.GradScaler, gradient: float) -> None:
    """A step as after `scaler.scale(loss).backward()`."""
    scaler.scale(torch.zeros(()))
    loop.step(scaler.get_scale() * gradient)


def test_a_gradient_is_unscaled_before_it_is_clipped() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    loop = Loop(plain, max_norm=2.0, scaler=scaler)
    scaled(loop, scaler, 0.5)
    assert loop.weights == [[1 - RATE / 2] * 2] * 2
    assert scaler.get_scale() == 1024.0
    scaled(loop, scaler, 2.0)
    assert loop.weights[0] == pytest.approx([1 - RATE / 2 - RATE / 2] * 2), "4 is clipped to 2"
    assert scaler.get_scale() == 2048.0, "and it is updated at every step"


def test_a_scale_that_is_too_large_is_lowered_by_a_skipped_step() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = Loop(plain, scaler=scaler)
    scaled(loop, scaler, math.inf)
    assert loop.weights == ONES and loop.notes.steps[-1][2] is False
    assert scaler.get_scale() == 512.0
    scaled(loop, scaler, 0.5)
    assert loop.weights == [[1 - RATE / 4] * 2] * 2, "at the rate of the second step"


@pytest.mark.parametrize("bad", [False, True])
def test_a_loop_may_unscale_by_itself_to_clip_by_itself(bad: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = Loop(plain, max_norm=1.0, clip="own", scaler=scaler)
    scaler.scale(torch.zeros(()))
    for parameter in loop.module.parameters():
        parameter.grad = torch.full_like(parameter, math.inf if bad else 3 * 1024.0)
    scaler.unscale_(loop.optimizer)
    loop.node.step()
    assert loop.weights == [[1.0 if bad else 1 - 3 * RATE] * 2] * 2
    assert scaler.get_scale() == (512.0 if bad else 1024.0)


# --- what is refused (stories/joining.txt)


def rateless(module: nn.Module) -> Optimizer:
    optimizer = plain(module)
    optimizer.param_groups[0]["lr"] = None
    return optimizer


def half_frozen() -> nn.Sequential:
    module = two_layers()
    module[0].requires_grad_(False)
    return module


def register(module: nn.Module, **parameters: Tensor) -> None:
    for name, data in parameters.items():
        module.register_parameter(name, nn.Parameter(data))


def joined(**given: Any) -> None:
    join("tcp://127.0.0.1:1", nn.Linear(1, 1), name="a", **given)


def check_tau(tau: int | None, **terms: int) -> None:
    """D: whether a send can meet its own merge depends on the run's rounds and slots."""
    _check_tau(plain_spec(method="diloco", steps=900, h=30, **terms), tau)


def check_ranks(size: int, **terms: bool) -> None:
    _check_ranks(plain_spec(method="diloco", **terms), Cluster(size=size))


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # of scripted modules
@all_stories(__file__, "joining")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(
        path, story, python(vars(optim), vars(arguments), vars(limits), vars(library), globals()), rewrite=rewrite
    )
    assert (LoopError("x").exit_code, LoopError("x").retriable) == (2, False)


def test_parameters_that_the_optimizer_does_not_have_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(lambda module: SGD([next(module.parameters())], lr=1.0))
    assert "SGD does not step 1 of the model's parameters, as '1.weight'" in caplog.text
    loop.step(1.0)
    assert not loop.has_gradients


def test_a_method_that_steps_at_the_coordinator_has_no_use_for_an_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(lambda module: None, terms={"method": "data-parallel"})
    loop.step(1.0)
    assert loop.weights == ONES and loop.notes.steps == [(8, 1.0, True)]
    assert _inner_optimizer(plain(loop.module), loop.module, loop.node.spec) is None
    assert "the optimizer is not used: with the method data-parallel the coordinator steps" in caplog.text


# --- what a script need not say


def test_what_differs_by_machine_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"coordinator": "tcp://127.0.0.1:1", "name": "oslo", "state_dir": str(tmp_path / "a")}.items():
        monkeypatch.setenv(f"FARLOOP_NODE__{key.upper()}", value)
    with pytest.raises(Unreachable):
        join(None, nn.Linear(1, 1), give_up_s=0.01)
    assert (tmp_path / "a").is_dir()
    with pytest.raises(Unreachable):
        join(None, nn.Linear(1, 1), state_dir=tmp_path / "b", give_up_s=0.01)
    assert (tmp_path / "b").is_dir(), "an argument comes first"
    with pytest.raises(Unreachable):
        join(None, nn.Linear(1, 1), state_dir=str(tmp_path / "c"), give_up_s=0.01)
    assert (tmp_path / "c").is_dir(), "a path may be a str"
    monkeypatch.delenv("FARLOOP_NODE__NAME")
    with pytest.raises(LoopError, match=r"^join got no name: give name=…, .* or set FARLOOP_NODE__NAME$"):
        join(None, nn.Linear(1, 1), give_up_s=0.01)
    monkeypatch.setenv("FARLOOP_NODE_NAME", "oslo")
    with pytest.raises(LoopError, match="FARLOOP_NODE_NAME is not read: did you mean FARLOOP_NODE__NAME, with two"):
        join(None, nn.Linear(1, 1), name="oslo", give_up_s=0.01)


def test_parts_of_a_batch_add_up_on_one_process_too() -> None:
    loop = Loop(plain)
    with loop.node.no_sync():
        loop.node.model(torch.ones(1, 2)).sum().backward()
    loop.node.model(torch.ones(1, 2)).sum().backward()
    assert next(loop.module.parameters()).grad.tolist() == [[4.0, 4.0]]  # type: ignore[union-attr]


def test_statistics_that_training_changes_end_the_first_step() -> None:
    """Not after hours, and not in silence."""
    loop = Loop(plain, module=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    loop.node.model(torch.randn(4, 2)).sum().backward()
    with pytest.raises(LoopError, match=r"^'1\.running_mean' is not exchanged, .* join\(buffers='own'\)$"):
        loop.node.step()
    assert loop.notes.told


@pytest.mark.parametrize("own", [[], ["0.weight"]])
def test_a_frozen_weight_that_changes_later_ends_the_node_or_is_told_when_it_leaves(
    own: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """As by a merge of an adapter into its base."""
    module = two_layers()
    module[0].requires_grad_(False)
    loop = Loop(plain, module=module, own=own)
    with nullcontext() if own else pytest.raises(LoopError, match=r"^'0\.weight' is not exchanged, .* has changed"):
        for step in range(17):
            assert "have changed in training" not in caplog.text
            module[0].weight.data.add_(step == 5)
            loop.step(0.0, 1.0)
    loop.node.leave()
    assert len(loop.notes.steps) == (17 if own else 16), "the second look is at the 17th step"
    assert ("1 tensors of this node's own have changed in training, as '0.weight'" in caplog.text) == bool(own)


@pytest.mark.parametrize("hook", [False, True])
def test_a_step_without_any_gradient_is_counted_and_told_of_once(hook: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A loop whose loss is of another model would train to the run's end."""
    loop = Loop(plain, hook=hook)
    take = loop.optimizer.step if hook else loop.node.step
    for parameter in loop.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    take()
    assert "gradient" not in caplog.text
    loop.optimizer.zero_grad()
    take()
    take()
    assert caplog.text.count("no parameter has a gradient at this step: call loss.backward()") == 1
    assert [stepped for _, _, stepped in loop.notes.steps] == [True, False, False]


# --- what a step is told


def granted() -> Loop:
    """In a run whose coordinator grants the samples: 4 sequences of 16 tokens a step."""
    loop = Loop(plain, terms={"batch_sequences": 4, "sequence_tokens": 16})
    own = dataclasses.replace(loop.node.spec.identity, num_samples=1000)
    loop.node.spec = dataclasses.replace(loop.node.spec, identity=own)
    loop.notes.executor.machine = SimpleNamespace(takes_samples=True)
    return loop


@pytest.mark.parametrize("tokens", [None, 64, 60, 0])
def test_a_step_has_the_tokens_of_the_batch_or_fewer(tokens: int | None) -> None:
    """Fewer where its sequences are padded; who brings the samples says how many tokens they are."""
    loop, own = granted(), Loop(plain)
    loop.node.step(tokens=tokens)
    own.node.step(tokens=10_000)
    assert (loop.notes.steps[0][0], own.notes.steps[0][0]) == (64 if tokens is None else tokens, 10_000)


def test_a_loss_or_tokens_may_be_a_tensor_of_one_element() -> None:
    """`step(loss=loss)` in place of `loss.item()` ended the link's thread."""
    loop = Loop(plain)
    loop.node.step(loss=torch.tensor(0.5, requires_grad=True), tokens=torch.tensor([8]))
    tokens, loss, _ = loop.notes.steps[0]
    assert (tokens, type(tokens), loss, type(loss)) == (8, int, 0.5, float)


@pytest.mark.parametrize("failed", [False, True])
def test_a_node_that_failed_leaves_without_waiting_for_outcomes(failed: bool) -> None:
    """`finally: node.leave()` after NonFiniteDelta waited for 20 s for an outcome that could not come."""
    loop = Loop(plain)
    loop.notes.failed = failed
    loop.node.leave(5.0)
    loop.node.leave()
    assert loop.notes.drained == ([] if failed else [5.0]) and not loop.node.running


def test_an_error_of_the_loop_ends_the_node_with_it() -> None:
    """The coordinator is told of it: without, the node is only a connection that closed."""
    loop, error = Loop(plain), RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"), loop.node:
        raise error
    assert loop.notes.closed_by is error


def test_no_tensor_is_sharded_while_another_thread_imports_dtensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes in one process: one ended with "partially initialized module"."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("torch.distributed.tensor"))
    assert not is_dtensor(torch.zeros(1))
