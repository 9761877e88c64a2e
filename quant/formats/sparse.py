"""Base class of the codecs that send few elements of a fragment, and where tensors lie inside a fragment.

A sparse codec cuts a fragment's tensors into chunks; no chunk crosses a tensor, and the padding between tensors is in
none. Elements that are not sent decode to +0.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from farloop.algo.spec import TILE, Fragment
from farloop.quant.codec import INFINITY_BITS, Codec, finite_magnitude, finite_weight
from farloop.quant.kernels.dispatch import fast_sparse


def spans(fragment: Fragment) -> list[slice]:
    """The elements of each tensor with the padding after it; together they are the fragment."""
    starts = [*(tensor.offset for tensor in fragment.tensors), fragment.numel]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def padding(fragment: Fragment, stop: int) -> list[slice]:
    """The ranges of [0, stop) without a tensor, from first to last."""
    ends = [0, *(tensor.offset + tensor.numel for tensor in fragment.tensors)]
    starts = [*(tensor.offset for tensor in fragment.tensors), stop]
    return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]


def within(ranges: list[slice], start: int, length: int) -> list[slice]:
    """The parts of the ranges that lie in [start, start + length), counted from `start`."""
    clipped = (slice(max(part.start - start, 0), min(part.stop - start, length)) for part in ranges)
    return [part for part in clipped if part.start < part.stop]


def largest_bits(x: Tensor, span: slice) -> int:
    """Bits of the largest magnitude in a part of x fp32, 0 if it is empty; tile by tile.

    Raises NonFiniteError: the part holds a NaN or an infinity.
    """
    largest = 0
    if (fast := fast_sparse(x.device)) is not None:
        largest = int(fast.largest_magnitude(x[span]))
        if largest < INFINITY_BITS:
            return largest
    for start in range(span.start, span.stop, TILE):
        largest = max(largest, int(finite_magnitude(x[start : min(start + TILE, span.stop)], start).max()))
    return largest


PIECE = 1 << 18
"""Elements per step: 64-bit temporaries of so many still fit a cache, and their memory stays warm.

Random words for 4 Mi elements take 42 ms like this, and 650 ms all at once, on one core.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """`count` chunks of `length` elements each, one after the other."""

    start: int  # first element
    count: int
    length: int

    def of(self, x: Tensor) -> Tensor:
        """Their elements of x [numel], as [count, length]."""
        return x[self.start : self.start + self.count * self.length].view(self.count, self.length)

    def places(self, index: Tensor) -> Tensor:
        """index int64 [count, k] inside each chunk → element of the fragment, same shape."""
        first = torch.arange(self.count, device=index.device, dtype=torch.int64).mul_(self.length).add_(self.start)
        return index + first.unsqueeze(1)


def chunks_of(start: int, numel: int, length: int, piece: int = PIECE) -> Iterator[Chunks]:
    """The elements [start, start + numel) in chunks of `length`, the last one shorter; at most `piece` at a time."""
    whole, rest = divmod(numel, length)
    step = max(1, piece // length)
    for first in range(0, whole, step):
        yield Chunks(start=start + first * length, count=min(step, whole - first), length=length)
    if rest:
        yield Chunks(start=start + whole * length, count=1, length=rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCodec(Codec):
    """A format that is a list of elements."""

    @abstractmethod
    def entries(
        self, payload: Tensor, fragment: Fragment, seed: int, device: torch.device
    ) -> Iterator[tuple[Tensor | slice, Tensor]]:
        """Places in the fragment, int64 [m] or a slice, and the numbers there, fp32 [m]; no place comes twice."""

    def decode_into(self, payload: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0) -> None:
        self._require_operands(fragment, payload, out=out)
        out.zero_()
        for where, numbers in self.entries(payload, fragment, seed, out.device):
            out[where] = numbers

    def _tiles(self, payload: Tensor, fragment: Fragment, *, seed: int, device: torch.device) -> Iterator[Tensor]:
        decoded = torch.empty(fragment.numel, dtype=torch.float32, device=device)
        self.decode_into(payload, decoded, fragment, seed=seed)
        for start in range(0, fragment.numel, TILE):
            yield decoded[start : start + TILE]

    def decode_add_(self, payload: Tensor, acc: Tensor, weight: float, fragment: Fragment, *, seed: int = 0) -> None:
        """As `Codec.decode_add_`, bit for bit, with memory for the entries only."""
        self._require_operands(fragment, payload, acc=acc)
        w = torch.tensor(finite_weight(weight), dtype=torch.float32, device="cpu")
        sums = [
            (where, acc[where] + numbers.mul_(w))
            for where, numbers in self.entries(payload, fragment, seed, acc.device)
        ]
        if math.copysign(1.0, weight) > 0:
            # All other elements get w·0 = +0, which changes only −0: −0 + +0 = +0. (Adding −0 changes nothing.)
            acc.add_(0.0)
        for where, total in sums:
            acc[where] = total


def require_finite(x: Tensor) -> None:
    """Raise NonFiniteError unless all of x fp32 [numel] is finite."""
    largest_bits(x, slice(0, x.numel()))
