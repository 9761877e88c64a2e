"""The inner step of `Node.step` (docs/models.md), and the default inner optimizers.

The defaults are torch's AdamW, or a Muon of our own for matrices with AdamW for the rest. Their moments survive merges
and are never exchanged.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Adam, AdamW, Optimizer, SparseAdam

from farloop.algo.adamw import is_decayed
from farloop.algo.fragments import is_muon_matrix
from farloop.algo.terms import Terms
from farloop.node.devices import Awaited
from farloop.node.errors import LoopError
from farloop.node.model.shards import box_of, is_dtensor, local_of, whole

_log = logging.getLogger(__name__)

Whose = Literal["run", "own"]  # who decides on the learning rate, or the clip: the run's terms, or the training loop
_BETAS = (0.9, 0.95)  # arXiv 2407.07852 (OpenDiLoCo)
_MUON_MOMENTUM = 0.9  # MuLoCo's (arXiv 2505.23725); torch's own default, 0.95, is for one node
_NESTEROV = True  # as torch's default; MuLoCo's has none, which did worse in 400 steps of the built-in GPT
_MUON_RMS = 0.4  # of an element of a step, by the rate: the published 0.2 and 0.8 ended higher (2160 steps of nano)
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # K. Jordan's coefficients, which torch has too
_NEWTON_SCHULZ_STEPS = 5
MOST_AT_ONCE = 1 << 24  # elements of a stack of matrices: bounds its copies, of which there are about five


def default_optimizer(module: nn.Module, terms: Terms) -> Optimizer:
    """What the terms name, at their learning rate, with their weight decay on matrices. AdamW alone where the process
    holds no matrix for Muon, as with the first or last layers of a model in stages."""
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    if terms.inner.optimizer == "adamw":
        return _adamw([parameter for _, parameter in named], terms)
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    hidden = {id(p) for name, p in named if is_muon_matrix(name, p.shape) and id(p) not in tables}
    matrices = [parameter for _, parameter in named if id(parameter) in hidden]
    rest = [parameter for _, parameter in named if id(parameter) not in hidden]
    if not matrices:
        _log.warning("no matrices of layers for muon here: adamw steps all of the %d tensors", len(named))
        return _adamw(rest, terms)
    muon = Muon(matrices, lr=terms.schedule.lr.peak, weight_decay=terms.inner.weight_decay)
    return Together(muon, _adamw(rest, terms)) if rest else muon


def _adamw(parameters: Iterable[nn.Parameter], terms: Terms) -> AdamW:
    parameters = list(parameters)
    decayed = [p for p in parameters if is_decayed(tuple(p.shape))]
    plain = [p for p in parameters if not is_decayed(tuple(p.shape))]
    groups = [{"params": decayed, "weight_decay": terms.inner.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    fused = True if parameters and all(p.is_cuda for p in parameters) else None
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=terms.schedule.lr.peak, betas=_BETAS, eps=1e-8, fused=fused)


@torch.enable_grad()
def _loss_of(closure: Callable[[], Any] | None) -> Any:
    """What an optimizer's `step` returns."""
    return None if closure is None else closure()


class Muon(Optimizer):
    """Muon for matrices [rows, columns], one or more: momentum, made orthogonal by Newton–Schulz in place of scaled.

    A step is scaled by 0.4·√max(rows, columns), so that the run's one learning rate and its decay serve AdamW's tensors
    too: arXiv 2502.16982 finds 0.2 to 0.4 for AdamW's rms, and takes 0.2, which learns far less in short runs. Five
    steps of Newton–Schulz leave singular values of about 0.7 to 1.2: an element's rms is about 0.34 of the rate.

    Ours for three reasons. Matrices of one shape are stepped together, and in fp32 on a CPU, where torch's step takes
    many times as long in bf16. A matrix that lies on several ranks is gathered, and its direction found by one of
    them: the step is that of one process. And torch 2.13's normalises its own buffer in place where gradients are bf16
    and `nesterov` is off.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        momentum: float = _MUON_MOMENTUM,
        nesterov: bool = _NESTEROV,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _loss_of(closure)
        for group in self.param_groups:
            alike: dict[tuple[torch.Size, torch.device, Any], list[nn.Parameter]] = {}
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                mesh = getattr(parameter, "device_mesh", None)  # of a sharded one
                alike.setdefault((parameter.shape, parameter.device, mesh), []).append(parameter)
            for (shape, _, mesh), parameters in alike.items():
                count = max(1, MOST_AT_ONCE // shape.numel()) * (1 if mesh is None else max(mesh.shape))
                for first in range(0, len(parameters), count):
                    self._step_alike(parameters[first : first + count], group, mesh)
        return loss

    def _step_alike(self, parameters: Sequence[nn.Parameter], group: Mapping[str, Any], mesh: Any) -> None:
        """Step matrices of one shape; every rank of a mesh takes its part of each."""
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        if group["nesterov"]:
            buffers = [p.grad.lerp(b, group["momentum"]) for p, b in zip(parameters, buffers, strict=True)]  # type: ignore[union-attr]
        directions = orthogonal(torch.stack(buffers)) if mesh is None else _shared_out(buffers, mesh)
        rate = float(group["lr"])
        for parameter, direction in zip(parameters, directions, strict=True):
            here = local_of(parameter)
            here.mul_(1 - rate * group["weight_decay"])
            for dimension, (begin, count) in enumerate(zip(*box_of("", parameter), strict=True)):
                direction = direction.narrow(dimension, begin, count)
            here.add_(direction, alpha=-rate * _MUON_RMS * math.sqrt(max(parameter.shape)))


def _shared_out(buffers: Sequence[Tensor], mesh: Any) -> list[Tensor]:
    """The directions, whole, of sharded matrices of one shape: of n ranks each computes every n-th. All ranks call it,
    and each holds the whole of its own alone for long. Ranks that differ in other dimensions of the mesh than its
    longest compute the same."""
    along = max(range(mesh.ndim), key=mesh.size)
    ranks, here = mesh.size(along), mesh.get_local_rank(along)
    own = [matrix for number, matrix in enumerate(map(whole, buffers)) if number % ranks == here]
    each = math.ceil(len(buffers) / ranks)  # an equal number, for the exchange
    own += [torch.zeros(buffers[0].shape, dtype=buffers[0].dtype, device=buffers[0].device)] * (each - len(own))
    found = orthogonal(torch.stack(own))
    gathered = found.new_empty((ranks * each, *found.shape[1:]))
    dist.all_gather_into_tensor(gathered, found.contiguous(), group=mesh.get_group(along))
    return [gathered[number % ranks * each + number // ranks] for number in range(len(buffers))]


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly the nearest orthogonal matrices of a stack [count, rows, columns]: fp32 on a CPU, else bf16. Of zeros:
    zeros."""
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.float().mT if tall else matrices.float()
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=1e-18)  # the squares of less are no numbers in fp32
    if found.device.type != "cpu":
        found = found.bfloat16()
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.mT if tall else found


class Together(Optimizer):
    """Several optimizers of different parameters as one: its groups are theirs, so that a learning rate reaches all."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self.param_groups = list(chain.from_iterable(part.param_groups for part in parts))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _loss_of(closure)
        for part in self.parts:
            part.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = list(chain.from_iterable(part.param_groups for part in self.parts))


class InnerStep:
    """One inner step: learning rate, clip and optimizer. A gradient that holds NaN or Inf steps nothing.

    On a CUDA device a fused Adam or AdamW skips such a step itself, and the host learns of it at a later one: nothing
    waits for the gradient's norm. Elsewhere, and where the ranks or control variates have to know at once, it waits.

    A parameter group's rate is the run's rate times the group's ratio. The ratio is taken at `join`: the group's rate
    (its `initial_lr`, where a scheduler has noted one) divided by the optimizer's `lr=`. Where no group has the rate
    `lr=`, it is divided by the largest rate of a group.
    """

    def __init__(
        self,
        optimizer: Optimizer | None,
        module: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        terms: Terms,
        *,
        rate: Whose = "run",
        clip: Whose = "run",
        scaler: GradScaler | None = None,
        all_agree: Callable[[bool], bool] = bool,
    ) -> None:
        """`optimizer`: None where the run's method has no inner step. `parameters`: those that are exchanged.
        `all_agree`: whether all ranks of the node say yes.
        Raises LoopError: this cannot be stepped; one line that says what to change."""
        self._optimizer, self._parameters, self._clip_norm = optimizer, parameters, terms.inner.clip
        self._kinds = {name: (parameter.dtype, parameter.device) for name, parameter in parameters.items()}
        self._module = module
        self._rate, self._clip, self._scaler, self._all_agree = rate, clip, scaler, all_agree
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        self._reference, self._ratios, self._rates = 1.0, list[float](), list[float]()
        """`_rates`: of the groups, as they were set last. Another one there is the work of a scheduler."""
        self._at_join, self._scheduler_seen, self._told_of_none = list[float](), False, False
        self._skipped_in_a_row, self._skipped_later = 0, Awaited()
        self._at_once = scaler is not None or all_agree is not bool or terms.inner.control_variates
        if optimizer is None:
            if rate == "own" or clip == "own" or scaler is not None:
                raise LoopError(
                    f"with the method {terms.method} the coordinator takes the step: rate='own', clip='own' and scaler "
                    "cannot be used"
                )
            return
        _check_optimizer(optimizer, module, parameters)
        if rate == "run":
            self._reference = _reference_rate(optimizer)
            self._ratios = [_rate_at_join(group) / self._reference for group in groups_of(optimizer)]
            self._rates = self._at_join = [float(group["lr"]) for group in groups_of(optimizer)]
        if terms.inner.control_variates and (rate == "own" or set(self._ratios) != {1.0}):
            raise LoopError(
                "the run has control_variates, which need one learning rate for all parameters: take rate='run', and "
                "give every parameter group the same lr"
            )

    def prepare(self, rate: float) -> bool:
        """Set the run's `rate`, unless the loop has its own. False if no parameter has a gradient. Raises as `run`."""
        self._check_parameters()
        has_gradient = any(parameter.grad is not None for parameter in self._parameters.values())
        if not (has_gradient or self._told_of_none):
            self._told_of_none = True
            _log.warning("no parameter has a gradient at this step: call loss.backward() on the model given to join")
        if self._optimizer is not None:
            _check_steps(self._optimizer, self._module, self._parameters)
        if self._optimizer is not None and self._rate == "run":
            self._set_rates(self._optimizer, rate)
        return has_gradient

    def is_dry(self) -> bool:
        """Whether the next step only makes an empty state: torch's checkpoint library takes one at a rate of 0 with
        gradients of zeros, to know the state's shapes."""
        if self._optimizer is None or any(self._optimizer.state.values()):
            return False
        if any(rates_of(groups_of(self._optimizer), repeat(1.0))):  # torch puts 0 on the CPU in their place
            return False
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        return bool(gradients) and not any(bool(local_of(gradient).any()) for gradient in gradients)

    def run(self, rate: float) -> bool:
        """Step, at the run's `rate` unless the loop has its own; False where no parameter had a gradient, or the step
        was skipped, or one before that the device skipped by itself.
        Raises LoopError: a parameter was frozen or unfrozen after `join`, or has a sparse gradient."""
        has_gradient = self.prepare(rate)
        optimizer, scaler = self._optimizer, self._scaler
        if optimizer is None:
            return has_gradient
        if scaler is not None:
            _unscale(scaler, optimizer)
        norm = _total_norm([p.grad for p in self._parameters.values() if p.grad is not None])
        if self._skips_by_itself(optimizer, norm):
            return self._step_fused(optimizer, norm)
        finite = self._all_agree(bool(torch.isfinite(norm)))
        if finite:
            if self._clip == "run":
                self._clip_gradients(norm)
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        self._log_skipped(finite)
        return finite and has_gradient

    def _skips_by_itself(self, optimizer: Optimizer, norm: Tensor) -> bool:
        return (
            not (self._at_once or norm.device.type == "cpu" or any(map(is_dtensor, self._parameters.values())))
            and isinstance(optimizer, Adam)
            and all(group.get("fused") for group in optimizer.param_groups)
        )

    def _step_fused(self, optimizer: Optimizer, norm: Tensor) -> bool:
        """The rest of `run`, by the protocol between torch's GradScaler and its fused optimizers."""
        if self._clip == "run":
            self._clip_gradients(norm)
        skips = torch.isfinite(norm).logical_not().to(torch.float32)
        optimizer.found_inf = skips  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
        seen = self._skipped_later.next(skips)
        if seen is not None:
            self._log_skipped(not seen)
        return not seen

    def _clip_gradients(self, norm: Tensor) -> None:
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        if not any(map(is_dtensor, gradients)):
            clip_grads_with_norm_(self._parameters.values(), self._clip_norm, norm)
            return
        factor = (self._clip_norm / (norm.double() + 1e-6)).clamp(max=1.0)  # as torch clips
        torch._foreach_mul_([local_of(gradient) for gradient in gradients], factor.to(norm.dtype))

    def zero_grad(self) -> None:
        """Clear all gradients, including parameters of the optimizer that are not the module's."""
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)

    def _set_rates(self, optimizer: Optimizer, rate: float) -> None:
        groups = groups_of(optimizer)
        found = rates_of(groups, self._rates)
        # A constant schedule puts the rates at join back after every step: nothing is lost.
        if not self._scheduler_seen and found not in (self._rates, self._at_join):
            self._scheduler_seen = True
            _log.warning(
                "the loop changes the learning rate (a scheduler?): step sets the run's rate instead. Remove the "
                "scheduler, or join with rate='own' to keep its rate"
            )
        for group in groups[len(self._ratios) :]:  # added after `join`
            self._ratios.append(_rate_at_join(group) / self._reference)
        for group, ratio in zip(groups, self._ratios, strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * ratio)
            else:
                group["lr"] = rate * ratio
        self._rates = rates_of(groups, [rate * ratio for ratio in self._ratios])

    def _check_parameters(self) -> None:
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                raise LoopError(
                    f"parameter {name!r} was frozen after join, but the run goes on exchanging it: freeze it before "
                    "join, on every node, in a run that begins without it"
                )
            if (parameter.dtype, parameter.device) != self._kinds[name]:
                raise LoopError(
                    f"parameter {name!r} was {_kind(*self._kinds[name])} at join and is "
                    f"{_kind(parameter.dtype, parameter.device)}: convert and move the model before join"
                )
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise LoopError(f"the gradient of parameter {name!r} is sparse, which step cannot clip: make it dense")
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise LoopError(
                    f"parameter {name!r} was unfrozen after join and would never be exchanged: unfreeze it before "
                    "join, on every node, in a run that begins with it"
                )

    def _log_skipped(self, finite: bool) -> None:
        """At the first skipped step in a row, the second, the fourth, the eighth ..."""
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        if (count := self._skipped_in_a_row) and count & (count - 1) == 0:
            _log.warning("inner step skipped cause='the gradient holds NaN or Inf' in_a_row=%d", count)


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Of all gradients together, over all ranks; torch takes those of one mesh at a time, and plain ones apart."""
    groups: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [whole(get_total_norm(group)) for group in groups.values()]
    return norms[0] if len(norms) == 1 else get_total_norm(norms)


def _check_optimizer(optimizer: Optimizer, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises LoopError for what `InnerStep` cannot step."""
    kind = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise LoopError(f"{kind} needs a closure at every step, which node.step has not: take another optimizer")
    if isinstance(optimizer, SparseAdam):
        raise LoopError("SparseAdam steps sparse gradients, which cannot be clipped or exchanged: take Adam or AdamW")
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse and part.weight.requires_grad:
            raise LoopError(f"the embedding {name!r} makes sparse gradients, which step cannot clip: take sparse=False")
    stepped = {id(parameter) for group in groups_of(optimizer) for parameter in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in stepped]
    if len(missing) == len(parameters):
        raise LoopError(f"{kind} has no parameter of the model: build it from the module that is given to join")
    if missing:
        _log.warning("%s does not step %d of the model's parameters, as %r", kind, len(missing), missing[0])


def _kind(dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} on {device}"


def _check_steps(optimizer: Optimizer, module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raises LoopError: since `join` the optimizer or the model got other parameters, which are not exchanged."""
    exchanged = {id(parameter) for parameter in parameters.values()}
    memory = {parameter.data_ptr() for parameter in parameters.values()}  # a tie may be another object
    sharded = any(map(is_dtensor, parameters.values()))  # FSDP may still have whole parameters in the module's place
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad or id(parameter) in exchanged or sharded:
            continue
        if parameter.data_ptr() == 0 or parameter.data_ptr() not in memory:
            raise LoopError(
                f"parameter {name!r} is another one than at join: build, shard and prepare the model before join, not "
                "after"
            )
    stepped = {id(parameter) for group in groups_of(optimizer) for parameter in group["params"]}
    if stepped.isdisjoint(map(id, parameters.values())):
        raise LoopError(
            f"{type(optimizer).__name__} has other parameters than at join: shard and prepare the model and its "
            "optimizer (fully_shard, accelerator.prepare) before join, not after"
        )


def _reference_rate(optimizer: Optimizer) -> float:
    """The own rate that stands for the run's. Raises LoopError where there is none."""
    kind, groups = type(optimizer).__name__, groups_of(optimizer)
    if not all(isinstance(group.get("lr"), float | int | Tensor) for group in groups):
        raise LoopError(f"{kind} has no learning rate that could be set: join with rate='own'")
    rates = [_rate_at_join(group) for group in groups]
    default = optimizer.defaults.get("lr")
    reference = float(default) if default is not None and float(default) in rates else max(rates)
    if not 0.0 < reference < math.inf:
        raise LoopError(
            f"the learning rate of {kind} is {reference:g}: give it a finite one above 0, groups keep their ratios"
        )
    return reference


def groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups that it steps. A container of optimizers, as torchtitan's, steps theirs, and its own are copies."""
    parts = getattr(optimizer, "optimizers", None)
    if isinstance(parts, list | tuple) and parts and all(isinstance(part, Optimizer) for part in parts):
        return [group for part in parts for group in groups_of(part)]
    return optimizer.param_groups


def held_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    """It, and the optimizers that it holds: wrappers and containers keep states of their own."""
    yield optimizer
    for value in vars(optimizer).values():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, Optimizer) and part is not optimizer:
                yield from held_by(part)


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that step: itself, or those that it holds."""
    return [part for part in held_by(optimizer) if len([*held_by(part)]) == 1]


def rates_of(groups: Sequence[Mapping[str, Any]], noted: Iterable[float]) -> list[float]:
    """The groups' rates; where there is none, that which is `noted`, and for one on a device too: to look at that would
    wait for all that is queued there."""
    rates = [(group.get("lr"), rate) for group, rate in zip(groups, noted, strict=False)]
    return [
        rate if lr is None or (isinstance(lr, Tensor) and lr.device.type != "cpu") else float(lr) for lr, rate in rates
    ]


def _rate_at_join(group: Mapping[str, Any]) -> float:
    return float(group.get("initial_lr", group["lr"]))


def _unscale(scaler: GradScaler, optimizer: Optimizer) -> None:
    """Divide the gradients by the scale, unless the loop has done that."""
    try:
        scaler.unscale_(optimizer)
    except RuntimeError as error:
        if "already been called" not in str(error):
            raise
