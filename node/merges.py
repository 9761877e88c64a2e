"""What the inner optimizer makes of a merge: one that keeps copies of the weights writes them back, and undoes it.

Copies in its state are moved as the weights are. After a merge the weights are looked at for some steps, at a few
elements and on their device. One step that goes back by the merge's own change, far longer than the steps around it
and not for a gradient's sake, undoes the merge.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from farloop.algo.fragments import rows_of
from farloop.algo.spec import Layout, TensorSlot
from farloop.node.devices import Awaited
from farloop.node.errors import LoopError
from farloop.node.inner_optimizer import groups_of
from farloop.node.shards import is_dtensor, local_of

_STEPS: Final = 10  # that are looked at after a merge: some optimizers go back at every fifth or sixth step alone
_FIRST_LOOK: Final = 4  # steps after which most of those that undo a merge are known
_TENSORS, _ELEMENTS = 16, 32  # of a fragment, at most, and of each of these tensors
_OWN_ELEMENTS: Final = 16  # so many of a tensor tell by themselves; fewer only with the fragment's others
_ENOUGH: Final = 8  # merges that were kept: from then on nothing is looked at
_BACK, _TOO_FAR, _ALONG = 0.3, 1.3, 0.9  # of the change, least and most; cosine of the step and the way back
_LONGER, _FAR_LONGER = 3.0, 10.0  # than the other steps: likely, which has to be seen twice; certain
_KEPT, _OPEN, _LIKELY, _CERTAIN = -1.0, 0.0, 1.0, 2.0


_COPIES: Final = frozenset({"slow_buffer", "slow_params", "slow_param", "x0", "p0"})
"""Keys of the state under which known optimizers keep weights of an earlier step."""

OnMerge = Callable[[Mapping[nn.Parameter, Tensor]], object]

_Pick = Callable[[Tensor], Tensor]


class _Window:
    """A few elements of a fragment around a merge, and around the steps that follow: fp64 [elements] each."""

    def __init__(self, pieces: Sequence[tuple[nn.Parameter, _Pick]]) -> None:
        """`pieces`: parameters, and what picks the elements of one, or of its gradient."""
        self._pieces = pieces
        self._moves, self._gradients, self._rates = list[Tensor](), list[Tensor](), list[float]()
        self.before = self._weights()
        self._change = self._begun = self.before

    def _weights(self) -> Tensor:
        return torch.cat([pick(parameter.detach()) for parameter, pick in self._pieces])

    @property
    def steps(self) -> int:
        return len(self._moves)

    def merged(self) -> None:
        self._change = self._weights() - self.before

    def begin(self) -> None:
        self._begun = self._weights()

    def end(self, rate: float) -> None:
        self._moves.append(self._weights() - self._begun)
        gradients = [(p, p.grad, pick) for p, pick in self._pieces]
        self._gradients.append(torch.cat([pick(p.detach() * 0.0 if g is None else g) for p, g, pick in gradients]))
        self._rates.append(rate)

    def verdict(self, *, last: bool) -> Tensor:
        """One of the four, fp64 [], on the device of the weights; a likely one at the `last` look alone.

        T: steps, E: elements, R: rows, those of all pieces and of each that tells by itself."""
        ends = list(accumulate(pick(parameter.detach()).numel() for parameter, pick in self._pieces))
        rows_ER = torch.zeros(len(self.before), 1 + len(ends), dtype=torch.float64, device=self.before.device)
        rows_ER[:, 0] = 1.0
        for row, (start, end) in enumerate(pairwise([0, *ends]), start=1):
            rows_ER[start:end, row] = float(end - start >= _OWN_ELEMENTS)
        moves_TE, gradients_TE = torch.stack(self._moves), torch.stack(self._gradients)
        change_R = (self._change.square() @ rows_ER).sqrt()
        length_TR, slope_TR = (moves_TE.square() @ rows_ER).sqrt(), (gradients_TE.square() @ rows_ER).sqrt()
        along_TR = (moves_TE * -self._change) @ rows_ER  # the way back
        back_TR, cosine_TR = along_TR / change_R.square(), along_TR / (change_R * length_TR)
        # At another rate a step has another length, and that may be the schedule's doing.
        rates_T1 = (
            torch.tensor(self._rates, dtype=torch.float64, device="cpu")[:, None].clamp(min=1e-30).to(length_TR.device)
        )
        length_TR /= rates_T1
        most_1R = back_TR.argmax(dim=0, keepdim=True)
        others_TR = torch.ones_like(back_TR).scatter(0, most_1R, 0.0) > 0
        length_R, slope_R = length_TR.gather(0, most_1R)[0], slope_TR.gather(0, most_1R)[0]
        longest_R = torch.where(others_TR, length_TR, 0.0).amax(0)
        # As far for its gradient as other steps went for theirs: then the gradient may be the reason.
        known_TR = others_TR & (slope_TR > 0)
        reach_R = torch.where(known_TR, length_TR / slope_TR, 0.0).amax(0)
        explained_R = (slope_R > 0) & ((known_TR.sum(0) < 2) | ~(length_R > _LONGER * reach_R * slope_R))
        most_R, cosine_R = back_TR.amax(0), cosine_TR.gather(0, most_1R)[0]
        gone_R = (most_R > _BACK) & (most_R < _TOO_FAR) & (cosine_R > _ALONG) & ~explained_R
        likely, certain = (gone_R & (length_R > by * longest_R) for by in (_LONGER, _FAR_LONGER))
        kept = (moves_TE.square().sum(1).amax().sqrt() * _LONGER < change_R[0]) & (self.steps == _STEPS)
        verdict = torch.where(
            certain.any(), _CERTAIN, torch.where(likely.any() & last, _LIKELY, torch.where(kept, _KEPT, _OPEN))
        )
        return verdict.double()


class Merges:
    """Of one process."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        layout: Layout,
        on_merge: OnMerge | None = None,
    ) -> None:
        """`parameters`: by the layout's names. `on_merge`: as `join` takes it."""
        self._parts, self._on_merge = [*_held_by(optimizer)], on_merge
        self._is_copy: dict[str, bool] = {}  # by key of the state, once that is known
        self._optimizer, self._parameters, self._layout = optimizer, parameters, layout
        self._windows: dict[int, _Window] = {}
        self._verdicts, self._kept, self._likely = Awaited(), 0, 0

    @contextmanager
    def merge(self, index: int) -> Iterator[None]:
        """Inside, the fragment's local weights are merged."""
        if (before := self._windows.pop(index, None)) is not None and before.steps >= _FIRST_LOOK:
            self._judge(before, last=True)
        pieces = self._pieces(index) if self._kept < _ENOUGH else []
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
        copies = self._copies(here)
        before = {p: local_of(p.detach()).clone() for p in (here if told is not None else dict(copies))}
        yield
        changes = {p: local_of(p.detach()).float() - weights.float() for p, weights in before.items()}
        for parameter, copy in copies:
            local_of(copy).add_(changes[parameter])
        if told is not None:
            told(changes)

    def _copies(self, parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
        """What the state has of the weights, by parameter. Devices are waited for until all keys of it are known."""
        found: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
        for part in self._parts:
            averages = any("train_mode" in group for group in part.param_groups) or hasattr(part, "train_mode")
            for parameter in parameters:
                for key, value in part.state.get(parameter, {}).items():
                    if self._is_copy.get(key, True) and _is_like(value, parameter):
                        found.setdefault(key, []).append((parameter, value))
            if averages and "z" in found:  # schedule-free's, which the weights are drawn to
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
        rates = [group.get("lr", 1.0) for group in groups_of(self._optimizer)] if self._windows else []
        rate = next((float(lr) for lr in rates if not isinstance(lr, Tensor) or lr.device.type == "cpu"), 1.0)
        for index, window in [*self._windows.items()]:
            window.end(rate)
            if window.steps in (_FIRST_LOOK, _STEPS):
                self._judge(window, last=window.steps == _STEPS)
            if window.steps == _STEPS:
                del self._windows[index]
        if (seen := self._verdicts.poll()) is not None:
            self._hear(seen)

    def _judge(self, window: _Window, *, last: bool) -> None:
        verdict = window.verdict(last=last)
        if verdict.device.type == "cpu":
            self._hear(float(verdict))
        else:
            self._verdicts.add(verdict)

    def _hear(self, verdict: float) -> None:
        self._kept += verdict == _KEPT
        self._likely = self._likely + 1 if verdict == _LIKELY else 0 if verdict == _KEPT else self._likely
        if verdict == _CERTAIN or self._likely == 2:
            kind = type(self._optimizer).__name__
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
            places = torch.arange(min(part.numel(), _ELEMENTS), dtype=torch.int64, device=part.device) * (
                part.numel() // _ELEMENTS | 1
            )
            found.append((parameter, partial(_picked, slot, torch.unravel_index(places % part.numel(), part.shape))))
        return found


def _picked(slot: TensorSlot, places: tuple[Tensor, ...], tensor: Tensor) -> Tensor:
    """fp64; of a shard, whose rows are others, any elements are."""
    part = local_of(tensor) if is_dtensor(tensor) else rows_of(tensor, slot)
    return part[places].flatten().double()


def _held_by(optimizer: Optimizer) -> Iterator[Optimizer]:
    """It, and the optimizers that it holds: wrappers and containers keep states of their own."""
    yield optimizer
    for value in vars(optimizer).values():
        for part in value if isinstance(value, list | tuple) else [value]:
            if isinstance(part, Optimizer):
                yield from _held_by(part)


def _is_like(value: object, parameter: nn.Parameter) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != parameter.shape:
        return False
    plain = type(value) in (Tensor, nn.Parameter) and not is_dtensor(parameter)
    return plain or getattr(value, "placements", 0) == getattr(parameter, "placements", 1)


def _are_equal(copy: Tensor, weights: Tensor) -> bool:
    """One is the other as cast to its type."""
    return torch.equal(copy.to(weights), weights) or torch.equal(copy, weights.to(copy))
