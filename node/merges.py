"""What the inner optimizer makes of a merge: one that keeps copies of the weights writes them back, and undoes it.

Copies in its state are moved as the weights are. After a merge the weights are looked at for some steps, at a few
elements and on their device. One step that goes back by the merge's own change, far longer than the steps around it
and not for a gradient's sake, undoes the merge.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farloop.algo.fragments import rows_of
from farloop.algo.spec import Layout, TensorSlot
from farloop.node.devices import Awaited
from farloop.node.errors import LoopError
from farloop.node.inner_optimizer import groups_of, held_by, rates_of
from farloop.node.shards import is_dtensor, local_of

_STEPS: Final = 10  # that are looked at after a merge: some optimizers go back at every fifth or sixth step alone
_FEWEST: Final = 4  # where the next merge comes earlier: a step is told by the others
_TENSORS, _ELEMENTS = 16, 32  # of a fragment, at most, and of each of these tensors
_OWN_ELEMENTS: Final = 16  # a tensor with fewer is looked at with the others alone: by chance, few may point anywhere
_ENOUGH: Final = 8  # merges that were kept: from then on nothing is looked at
_BACK, _TOO_FAR, _ALONG = 0.3, 1.3, 0.9  # of the change, as slow weights go half; cosine of the step and the way back
_LONGER: Final = 3.0  # than any other step, or it is one of them
_CERTAIN: Final = 9.0  # product of that over merges: one step like no other, or two in a row

_COPIES: Final = frozenset({"slow_buffer", "slow_params", "slow_param", "x0", "p0"})
"""Keys of the state under which known optimizers keep weights of an earlier step."""

OnMerge = Callable[[Mapping[nn.Parameter, Tensor]], object]

_Pick = Callable[[Tensor], Tensor]


class _Window:
    """A few elements of a fragment around a merge, and around the steps that follow: fp64 [elements] each."""

    def __init__(self, pieces: Sequence[tuple[nn.Parameter, _Pick]]) -> None:
        """`pieces`: parameters, and what picks the elements of one, or of its gradient."""
        self._pieces = pieces
        self._moves, self._pulls = list[Tensor](), list[Tensor]()  # of the steps, and their gradients times the rate
        self._change = self._begun = self._before = self._weights()

    def _weights(self) -> Tensor:
        return torch.cat([pick(parameter.detach()) for parameter, pick in self._pieces])

    @property
    def steps(self) -> int:
        return len(self._moves)

    def merged(self) -> None:
        self._change = self._weights() - self._before

    def begin(self) -> None:
        self._begun = self._weights()

    def end(self, rate: float) -> None:
        self._moves.append(self._weights() - self._begun)
        gradients = [pick(p.detach() * 0.0 if p.grad is None else p.grad) for p, pick in self._pieces]
        self._pulls.append(torch.cat(gradients) * rate)

    def verdict(self) -> Tensor:
        """How many times as long as the others the step was that undid the merge, fp64 [1] on the device of the
        weights; 0 where none did, and -1 where none can have: the longest is short against the merge."""
        moves, pulls = torch.stack(self._moves), torch.stack(self._pulls)
        ends = [*accumulate(pick(parameter.detach()).numel() for parameter, pick in self._pieces)]
        parts = [slice(a, b) for a, b in pairwise([0, *ends]) if b - a >= _OWN_ELEMENTS]
        undone = [_undone(moves[:, part], pulls[:, part], self._change[part]) for part in [slice(None), *parts]]
        longest, merge = moves.square().sum(1).amax(), self._change.square().sum()
        kept = (longest * _LONGER**2 < merge).double() * float(self.steps == _STEPS)
        most = torch.stack(undone).amax()
        return torch.where(most > 0.0, most, -kept).reshape(1)


def _undone(moves_TE: Tensor, pulls_TE: Tensor, change_E: Tensor) -> Tensor:
    """How many times as long as any other the step is that goes back by the change, fp64 []; 0 unless there is one.

    Both by itself and for its gradient: a pull to the data's own optimum is none, nor is a higher rate. T: steps, E:
    elements."""
    merge, length_T, pull_T = change_E.norm(), moves_TE.norm(dim=1), pulls_TE.norm(dim=1)
    along_T = -(moves_TE @ change_E) / merge
    is_back_T = along_T == along_T.amax()
    back, cosine = along_T.amax() / merge, along_T.amax() / _of(length_T, is_back_T)
    for_pull_T = torch.where(pull_T > 0.0, length_T / pull_T, torch.inf)
    longer = _of(length_T, is_back_T) / _of(length_T, ~is_back_T)
    longer_for_pull = _of(for_pull_T, is_back_T) / _of(for_pull_T, ~is_back_T)
    longer_for_pull = torch.where(_of(pull_T, is_back_T) > 0.0, longer_for_pull, torch.inf)
    is_back = (back > _BACK) & (back < _TOO_FAR) & (cosine > _ALONG)
    return torch.where(is_back, torch.minimum(longer, longer_for_pull), 0.0)


def _of(numbers: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, numbers, 0.0).amax()


class Merges:
    """Of one process."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        on_merge: OnMerge | None = None,
    ) -> None:
        """`parameters`: by the layout's names. `on_merge`: as `join` takes it."""
        self._parts, self._on_merge = [] if optimizer is None else [*held_by(optimizer)], on_merge
        self._averaging = [part for part in self._parts if hasattr(part, "eval") and hasattr(part, "train")]
        self._shown = list[Any]()  # of these, those that `resume` has train
        self._is_copy: dict[str, bool] = {}  # by key of the state, once that is known
        self._parameters, self._layout = parameters, layout
        self._windows: dict[int, _Window] = {}
        self._verdicts, self._kept, self._evidence = Awaited(), 0, 1.0

    def show(self) -> None:
        """Have the weights be the average that a schedule-free optimizer is for, until `resume`. It trains others."""
        for part in self._averaging:
            if _trains(part):
                part.eval()
                self._shown.append(part)

    def resume(self) -> None:
        while self._shown:
            self._shown.pop().train()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """After `show`. Inside, the weights are not those that the optimizer steps: its eval() and train() change none
        without a state."""
        states = [(part, part.state) for part in self._averaging]
        for part, _ in states:
            part.state = defaultdict(dict)
        try:
            yield
        finally:
            for part, state in states:
                part.eval()
                part.state = state

    @contextmanager
    def merge(self, index: int) -> Iterator[None]:
        """Inside, the fragment's local weights are merged."""
        self.show()
        if (before := self._windows.pop(index, None)) is not None and before.steps >= _FEWEST:
            self._judge(before)
        pieces = self._pieces(index) if self._parts and self._kept < _ENOUGH else []
        window = _Window(pieces) if pieces else None
        with self.move(index, self._on_merge):
            yield
        if window is not None:
            window.merged()
            self._windows[index] = window

    @contextmanager
    def move(self, index: int, told: OnMerge | None = None) -> Iterator[None]:
        """Inside, the fragment's local weights change by something else than the optimizer's step: what it has of them
        in its state changes alike."""
        names = dict.fromkeys(slot.name for slot in self._layout.fragments[index].tensors)
        here = [self._parameters[name] for name in names if not self._parameters[name].is_meta]
        copies = self.copies(here)
        before = {p: local_of(p.detach()).clone() for p in (here if told is not None else dict(copies))}
        yield
        changes = {p: local_of(p.detach()).float() - weights.float() for p, weights in before.items()}
        for parameter, copy in copies:
            (there := local_of(copy)).add_(changes[parameter].reshape(there.shape))
        if told is not None:
            told(changes)

    def copies(self, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """What the state has of the weights, by parameter. Devices are waited for until all keys of it are known."""
        found: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
        for part in self._parts:
            for parameter in parameters:
                for key, value in part.state.get(parameter, {}).items():
                    if self._is_copy.get(key, True) and _is_like(value, parameter):
                        found.setdefault(key, []).append((parameter, value))
            if part in self._averaging and "z" in found:  # schedule-free's, which the weights are drawn to
                self._is_copy["z"] = True
        for key, pairs in found.items():
            if key in self._is_copy or key in _COPIES:
                continue
            alike = all(_are_equal(local_of(value), local_of(parameter.detach())) for parameter, value in pairs)
            varied = any(
                bool((local := local_of(parameter.detach())).ne(local.flatten()[:1]).any()) for parameter, _ in pairs
            )
            if varied or not alike:
                self._is_copy[key] = alike
            elif not any(bool(local_of(parameter.detach()).any()) for parameter, _ in pairs):
                pairs.clear()  # zeros are no copies of zeros
        return [pair for key, pairs in found.items() if self._is_copy.get(key, True) for pair in pairs]

    def before_step(self) -> None:
        """The optimizer steps next."""
        for window in self._windows.values():
            window.begin()

    def after_step(self) -> None:
        """It has stepped. Raises LoopError: it undoes merges."""
        rate = rates_of(groups_of(self._parts[0])[:1], [1.0])[0] if self._windows else 1.0
        for index, window in [*self._windows.items()]:
            window.end(rate)
            if window.steps == _STEPS:
                self._judge(self._windows.pop(index))
        if (seen := self._verdicts.poll()) is not None:
            self._hear(seen)

    def _judge(self, window: _Window) -> None:
        verdict = window.verdict()
        if verdict.device.type == "cpu":
            self._hear(float(verdict))
        else:
            self._verdicts.add(verdict)

    def _hear(self, verdict: float) -> None:
        if verdict < 0.0:
            self._kept, self._evidence = self._kept + 1, 1.0
        elif verdict >= _LONGER:
            self._evidence *= verdict
        if self._evidence >= _CERTAIN:
            kind = type(self._parts[0]).__name__
            raise LoopError(
                f"{kind} undoes merges: it keeps copies of the weights, and its step put back those from before a "
                "merge. Change them in join(on_merge=…), or take an optimizer that keeps none, as AdamW (docs/step.md)"
            )

    def _pieces(self, index: int) -> list[tuple[nn.Parameter, _Pick]]:
        """Of some of the fragment's tensors: the parameter, and what picks a few elements of it or of its gradient."""
        found = list[tuple[nn.Parameter, _Pick]]()
        slots = self._layout.fragments[index].tensors
        for slot in slots[:: -(-len(slots) // _TENSORS)]:
            parameter = self._parameters[slot.name]
            part = local_of(parameter.detach()) if is_dtensor(parameter) else rows_of(parameter.detach(), slot)
            if part.is_meta or not part.numel():
                continue
            # An odd stride, so that a matrix is not looked at in one column alone.
            places = torch.arange(min(part.numel(), _ELEMENTS), dtype=torch.int64, device=part.device)
            places = places * (part.numel() // _ELEMENTS | 1) % part.numel()
            found.append((parameter, partial(_picked, slot, _at(places, part.shape))))
        return found


def _picked(slot: TensorSlot, places: tuple[Tensor, ...], tensor: Tensor) -> Tensor:
    """fp64; of a shard, whose rows are others, any elements are."""
    part = local_of(tensor) if is_dtensor(tensor) else rows_of(tensor, slot)
    return part[places].flatten().double()


def _at(places: Tensor, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """The index of flat places: a weight need not be contiguous, and is not copied for a few elements."""
    index = list[Tensor]()
    for size in reversed(shape):
        index.insert(0, places % size)
        places = places // size
    return tuple(index)


def _trains(part: Any) -> bool:
    """Whether a schedule-free optimizer is between its train() and its eval()."""
    return any(group.get("train_mode") for group in part.param_groups) or bool(getattr(part, "train_mode", False))


def _is_like(value: object, parameter: nn.Parameter) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    if is_dtensor(parameter):
        return value.shape == parameter.shape and getattr(value, "placements", 0) == getattr(parameter, "placements", 1)
    return type(value) in (Tensor, nn.Parameter) and value.shape in (parameter.shape, (parameter.numel(),))


def _are_equal(copy: Tensor, weights: Tensor) -> bool:
    """One is the other as cast to its type; it may be flat."""
    weights = weights.reshape(copy.shape)
    return torch.equal(copy.to(weights), weights) or torch.equal(copy, weights.to(copy))
