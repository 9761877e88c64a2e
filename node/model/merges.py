"""What the inner optimizer makes of a merge: one that keeps copies of the weights writes them back, and undoes it.

Copies in its state and its attributes are moved as the weights are. After a merge the weights are looked at for some
steps, at a few elements and on their device. One step that goes back by the merge's own change, far longer than the
steps around it and not for a gradient's sake, undoes the merge.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farloop.algo.fragments import rows_of
from farloop.algo.spec import Layout, TensorSlot
from farloop.node.devices import Awaited
from farloop.node.errors import LoopError
from farloop.node.model.inner_optimizer import groups_of, held_by, rates_of
from farloop.node.model.shards import is_dtensor, local_of

_STEPS: Final = 10  # that are looked at after a merge: some optimizers go back at every fifth or sixth step alone
_FEWEST: Final = 4  # where the next merge comes earlier: a step is told by the others
_TENSORS, _ELEMENTS = 16, 32  # of a fragment, at most, and of each of these tensors
_OWN_ELEMENTS: Final = 16  # a tensor with fewer is looked at with the others alone: by chance, few may point anywhere
_ENOUGH: Final = 8  # merges that were kept: from then on nothing is looked at
_BACK, _TOO_FAR = 0.3, 1.3  # of the change: masters go all of the way back, slow weights half of it
_ALONG: Final = 0.9  # cosine of the step and the way back: of 16 elements, by chance once in a million times
_LONGER: Final = 3.0  # than any other step: those of most optimizers differ by less
_CERTAIN: Final = _LONGER**2  # product of that over merges: one step like no other, or two in a row

_NEAR: Final = 0.1  # of the spread of the weights, for a copy that the first step may have stepped

_COPIES: Final = frozenset({"slow_buffer", "slow_params", "slow_param", "x0", "p0"})
"""Keys of the state under which known optimizers keep weights of an earlier step."""

OnMerge = Callable[[Mapping[nn.Parameter, Tensor]], object]


class _Window:
    """A few elements of a fragment around a merge, and around the steps that follow: fp64 [elements] each."""

    def __init__(self, pieces: Sequence[tuple[nn.Parameter, TensorSlot]]) -> None:
        self._pieces = pieces
        self._sizes = [_elements(parameter, slot).numel() for parameter, slot in pieces]
        self._moves, self._pulls = list[Tensor](), list[Tensor]()  # of the steps, and their gradients times the rate
        self._change = self._begun = self._weights()
        self._rounding = torch.cat([_elements(p, slot).abs() * torch.finfo(p.dtype).eps for p, slot in pieces])

    def _weights(self) -> Tensor:
        return torch.cat([_elements(parameter, slot) for parameter, slot in self._pieces])

    @property
    def steps(self) -> int:
        return len(self._moves)

    def merged(self) -> None:
        self._change = self._weights() - self._begun

    def begin(self) -> None:
        self._begun = self._weights()

    def end(self, rate: float) -> None:
        self._moves.append(self._weights() - self._begun)
        pulls = [_elements(p, slot) * 0.0 if p.grad is None else _elements(p.grad, slot) for p, slot in self._pieces]
        self._pulls.append(torch.cat(pulls) * rate)

    def verdict(self) -> Tensor:
        """How many times as long as the others the step was that undid the merge, fp64 [1] on the device of the
        weights; 0 where none did, and -1 where none can have: the longest is short against the merge."""
        moves, pulls = torch.stack(self._moves), torch.stack(self._pulls)
        numbers = (moves, pulls, self._change, self._rounding)
        parts = (torch.split(each, self._sizes, -1) for each in numbers)
        large = [of for *of, size in zip(*parts, self._sizes, strict=True) if size >= _OWN_ELEMENTS]
        most = torch.stack([_undone(*of) for of in [numbers, *large]]).amax()
        kept = (moves.norm(dim=1).amax() * _LONGER < self._change.norm()).double() * float(self.steps == _STEPS)
        return torch.where(most > 0.0, most, -kept).reshape(1)


def _undone(moves_TE: Tensor, pulls_TE: Tensor, change_E: Tensor, rounding_E: Tensor) -> Tensor:
    """How many times as long as any other the step is that goes back by the change, fp64 []; 0 unless there is one.

    Both by itself and for its gradient: a pull to the data's own optimum is none, nor is a higher rate. Nor is what
    rounding makes of short steps: weights of 16 bits stand still in most of them, and then move by the smallest
    difference. T: steps, E: elements."""
    merge, length_T, pull_T = change_E.norm(), moves_TE.norm(dim=1), pulls_TE.norm(dim=1)
    along_T = -(moves_TE @ change_E) / merge
    is_back_T = (
        torch.arange(len(along_T), dtype=torch.int64, device=along_T.device) == along_T.argmax()
    )  # of equal ones, one
    back, cosine = along_T.amax() / merge, along_T.amax() / _of(length_T, is_back_T)
    for_pull_T = torch.where(pull_T > 0.0, length_T / pull_T, torch.inf)
    longer = _of(length_T, is_back_T) / torch.maximum(_of(length_T, ~is_back_T), rounding_E.norm())
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
        self._around: tuple[Tensor, Tensor] | None = None
        """Elements as they were trained before that, and as they were shown."""
        self._swapped = list[Tensor]()  # verdicts, as of a window
        self.is_copy = dict.fromkeys([*_COPIES, *(["z"] if self._averaging else [])], True)
        """By key of the state, once that is known. Schedule-free weights are drawn to z."""
        self._first: dict[nn.Parameter, Tensor] | None = None  # a few elements before the first step
        # Not the running statistics: each step draws them to its samples, however they were merged.
        self._parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        self._layout = layout
        self._windows: dict[int, _Window] = {}
        self._verdicts, self._kept, self._evidence = Awaited(), 0, 1.0

    def show(self) -> None:
        """Have the weights be the average that a schedule-free optimizer is for, until `resume`. It trains others."""
        if not (trains := [part for part in self._averaging if _trains(part)]):
            return
        before = self._sample()
        for part in trains:
            part.eval()
        self._shown += trains
        self._around = (before, self._sample()) if self._kept < _ENOUGH else None

    def resume(self) -> None:
        """Have it train again. The weights that it trains have to have moved as those that were shown."""
        around, self._around = self._around, None
        merged = self._sample() if around else None
        while self._shown:
            self._shown.pop().train()
        if around and merged is not None:
            before, shown = around
            change, rounding = merged - shown, shown * max(torch.finfo(p.dtype).eps for p in self._parameters.values())
            is_lost = (self._sample() - before - change).norm() > 0.5 * change.norm()
            is_merge = change.norm() > _LONGER**2 * rounding.norm()  # else eval() and train() move them as far
            self._swapped.append((is_lost & is_merge).double().reshape(1) * _CERTAIN)

    def _sample(self) -> Tensor:
        return torch.cat([_some(parameter) for parameter in self._parameters.values() if not parameter.is_meta])

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
            self._judge(before.verdict())
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
        here = [p for name in names if (p := self._parameters.get(name)) is not None and not p.is_meta]
        copies = self.copies(here)
        before = {p: local_of(p.detach()).clone() for p in (here if told is not None else dict(copies))}
        yield
        changes = {p: local_of(p.detach()).float() - weights.float() for p, weights in before.items()}
        for parameter, copy in copies:
            (there := local_of(copy)).add_(changes[parameter].reshape(there.shape))
        if told is not None:
            told(changes)

    def copies(self, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """What the optimizer has of the weights, by parameter. Devices are waited for until all its keys are known."""
        found = defaultdict[str, list[tuple[nn.Parameter, Tensor]]](list)
        here = set(parameters)
        for key, value, parameter in self._held():
            if parameter in here and self.is_copy.get(key, True):
                found[key].append((parameter, value))
        for key in found.keys() - self.is_copy.keys():
            weights = [local_of(parameter.detach()) for parameter, _ in found[key]]
            alike = all(_are_equal(local_of(copy), of) for (_, copy), of in zip(found[key], weights, strict=True))
            if not alike or any(bool(of.ne(of.flatten()[:1]).any()) for of in weights):
                self.is_copy[key] = alike  # else these weights are all the same, and tell nothing of others
            if not alike or not any(bool(of.any()) for of in weights):
                del found[key]  # zeros are no copies of zeros
        return [pair for pairs in found.values() for pair in pairs]

    def _held(self) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
        """Tensors that the optimizer has for parameters, each once, by key: in its state and, unless `on_merge` moves
        those, in lists and dicts of its attributes."""
        known = set(self._parameters.values())
        seen = {local_of(parameter).data_ptr() for parameter in known}
        for part in self._parts:
            states = ((key, value, p) for p in known & part.state.keys() for key, value in part.state[p].items())
            stepped = [p for group in part.param_groups for p in group["params"] if p in known]
            others = [] if self._on_merge is not None else [item for item in vars(part).items() if item[0] != "state"]
            beside = (_paired(_tensors_in(of, f"{type(part).__name__}.{name}"), stepped) for name, of in others)
            for key, value, parameter in chain(states, *beside):
                if _is_like(value, parameter) and (at := local_of(value).data_ptr()) not in seen:
                    seen.add(at)
                    yield key, value, parameter

    def before_step(self) -> None:
        """The optimizer steps next."""
        if self._first is None:
            self._first = {p: _some(p) for p in self._parameters.values() if not p.is_meta}
        for window in self._windows.values():
            window.begin()

    def after_step(self) -> None:
        """It has stepped. Raises LoopError: it undoes merges."""
        if self._first:
            self._note_copies(self._first)
            self._first = {}
        rate = rates_of(groups_of(self._parts[0])[:1], [1.0])[0] if self._windows else 1.0
        while self._swapped:
            self._judge(self._swapped.pop())
        for index, window in [*self._windows.items()]:
            window.end(rate)
            if window.steps == _STEPS:
                self._judge(self._windows.pop(index).verdict())
        if (seen := self._verdicts.poll()) is not None:
            self._hear(seen)

    def _note_copies(self, first: Mapping[nn.Parameter, Tensor]) -> None:
        """What the first step has put into the state of the weights as they were before it, and may have stepped by
        itself: later it is too far from them to be known."""
        far, spread = defaultdict[str, float](float), defaultdict[str, float](float)
        for key, value, parameter in self._held():
            if (weights := first.get(parameter)) is None:
                continue
            some = _some(value)
            is_gradient = parameter.grad is not None and torch.equal(some, _some(parameter.grad))
            far[key] += math.inf if is_gradient else float((some - weights).square().sum())
            spread[key] += float((weights - weights.mean()).square().sum())
        self.is_copy |= {key: True for key in far if far[key] < _NEAR**2 * spread[key]}

    def _judge(self, verdict: Tensor) -> None:
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
                f"{kind} undoes merges: it keeps copies of the weights, and put back those from before a "
                "merge. Change them in join(on_merge=…), or take an optimizer that keeps none (docs/models.md)"
            )

    def _pieces(self, index: int) -> list[tuple[nn.Parameter, TensorSlot]]:
        """Some of the fragment's tensors that are here."""
        slots = [slot for slot in self._layout.fragments[index].tensors if slot.name in self._parameters]
        some = [(self._parameters[slot.name], slot) for slot in slots[:: -(-len(slots) // _TENSORS) or 1]]
        return [(p, slot) for p, slot in some if not p.is_meta and _elements(p, slot).numel()]


def _elements(tensor: Tensor, slot: TensorSlot) -> Tensor:
    """A few of a parameter or its gradient; of a shard, whose rows are others, any."""
    return _some(tensor if is_dtensor(tensor) else rows_of(tensor.detach(), slot))


def _some(tensor: Tensor) -> Tensor:
    """A few elements of this process's part, a copy, fp64. An odd stride, so that not one column of a matrix
    stands for all."""
    flat = local_of(tensor.detach()).reshape(-1)
    return flat[:: flat.numel() // _ELEMENTS | 1][:_ELEMENTS].to(torch.float64, copy=True)


def _trains(part: Any) -> bool:
    """Whether a schedule-free optimizer is between its train() and its eval()."""
    return any(group.get("train_mode") for group in part.param_groups) or bool(getattr(part, "train_mode", False))


def _is_like(value: object, parameter: nn.Parameter) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    if is_dtensor(parameter):
        return value.shape == parameter.shape and getattr(value, "placements", 0) == getattr(parameter, "placements", 1)
    return type(value) in (Tensor, nn.Parameter) and value.shape in (parameter.shape, (parameter.numel(),))


def _tensors_in(value: object, key: str, of: nn.Parameter | None = None) -> Iterator[tuple[str, Tensor, Any]]:
    """Of lists and dicts, nested, by the words on the way there, and whose they are where a parameter leads there."""
    if isinstance(value, Tensor):
        yield key, value, of
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors_in(inner, key, of)
    elif isinstance(value, Mapping):
        for word, inner in value.items():
            is_word, is_parameter = isinstance(word, str), isinstance(word, nn.Parameter)
            yield from _tensors_in(inner, f"{key}.{word}" if is_word else key, word if is_parameter else of)


def _paired(
    tensors: Iterator[tuple[str, Tensor, Any]], parameters: Sequence[nn.Parameter]
) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
    """By key, with those of their shape in the order of the parameters where nothing says whose they are."""
    following = defaultdict[str, Iterator[nn.Parameter]](lambda: iter(parameters))
    for key, tensor, of in tensors:
        parameter = next((p for p in following[key] if _is_like(tensor, p)), None) if of is None else of
        if parameter is not None:
            yield key, tensor, parameter


def _are_equal(copy: Tensor, weights: Tensor) -> bool:
    """One is the other as cast to its type; it may be flat."""
    weights = weights.reshape(copy.shape)
    return torch.equal(copy.to(weights), weights) or torch.equal(copy, weights.to(copy))
