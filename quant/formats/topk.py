"""`topk`: the largest 64 of every 4096 elements, a sign and one of two magnitudes. 0.23 bits per element.

The compressor of SparseLoCo (arXiv 2508.15706): v = Δ + β·e; Δ̂ = Q(top-k of each chunk of v); e = v − Δ̂. The residual
replaces the outer momentum: run it with an outer learning rate of 1 and no momentum. Matrices are cut into squares of
64 × 64 as in the paper's code, vectors into runs of 64 with k in proportion, everything else into runs of 4096.

The two magnitudes of a chunk are the means of its largest s and of the other k − s sent elements, for the s that loses
least. (The paper's code has four bins for a whole tensor, which clip heavy tails.) They are bf16, and nothing is
multiplied: decoding is exact.

Temporaries are 2¹⁸ elements, or one row of squares of a wide matrix, and the entries.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from farloop.algo.spec import Fragment, TensorSlot
from farloop.quant.codec import L_GRECO_SHARES, SharedPolicy, Traits, of_tensors
from farloop.quant.errors import BadPayload
from farloop.quant.formats.sparse import PIECE, Chunks, SparseCodec, chunks_of, largest_bits, padding, require_finite
from farloop.quant.kernels.dispatch import fast_sparse
from farloop.quant.packing import BF16_LARGEST, aligned, bf16_bits, check_scales, from_bf16, pack, to_scale, unpack_into

CHUNK = 4096
SIDE = 64  # of the squares of a matrix, and the length of a vector's chunks
LONG_VECTOR = 1 << 16  # no layer has a vector of this length: such a tensor is a flattened matrix, and is cut like one


@dataclass(frozen=True, slots=True, kw_only=True)
class Squares(Chunks):
    """Whole rows of squares of 64 × 64 of a matrix; an index inside a square is 64·row + column."""

    columns: int  # of the matrix, a multiple of 64

    def of(self, x: Tensor) -> Tensor:
        """As `Chunks.of`; a copy."""
        across = self.columns // SIDE
        rows = x[self.start : self.start + self.count * CHUNK].view(-1, SIDE, across, SIDE)
        return rows.transpose(1, 2).reshape(self.count, CHUNK)

    def places(self, index: Tensor) -> Tensor:
        square = torch.arange(self.count, device=index.device, dtype=torch.int64).unsqueeze(1)
        across = self.columns // SIDE
        first = self.start + (square // across) * (SIDE * self.columns) + (square % across) * SIDE
        return first + (index >> 6) * self.columns + (index & (SIDE - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TopkCodec(SparseCodec):
    k: tuple[int, ...] = (64,)
    """How many of 4096 elements are sent, and of a chunk of n elements ⌈k·n ÷ 4096⌉; one, or one per tensor."""
    policy: SharedPolicy = "equal"
    alpha: float = 1.0  # of l-greco, as that of `q4r`

    @property
    def traits(self) -> Traits:
        """What it promises.

        Contraction. Let a₁ ≥ … ≥ a_k be the magnitudes that are kept of a chunk. The split that loses least keeps at
        least M = max over s of (a₁ + … + a_s)²/s. So a₁ + … + a_s ≤ √(M·s) for every s, and, since squares are
        Schur-convex, a₁² + … + a_k² ≤ M·H with H = Σ (√i − √(i−1))². Of the others, each is at most a_k, and
        k·a_k² ≤ M. Hence the whole chunk has at most M·(H + 4096/k − 1), of which M is kept.
        """
        least = min(self.k) if self.policy == "equal" else max(1, round(min(L_GRECO_SHARES) * self.k[0]))
        h = sum((math.sqrt(i) - math.sqrt(i - 1)) ** 2 for i in range(1, least + 1))
        return Traits(
            bits_per_element=(14 * max(self.k) + 32) / CHUNK,
            exact_decode=True,
            unbiased=False,
            contraction=0.999 / (CHUNK / least - 1 + h),  # a thousandth for the rounding of magnitudes
            deterministic=True,
            sparse=True,
        )

    def payload_bytes(self, fragment: Fragment) -> int:
        _, _, _, values = self._ranges(fragment)
        return int(values.stop)

    def _encode_into(self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int, previous: Tensor | None) -> None:
        if (fast := fast_sparse(x.device, out.device)) is not None:
            self._encode_by(fast, x, out, fragment)
            return
        require_finite(x)
        levels = [x.new_empty(0, dtype=torch.int16)]
        index, values = [x.new_empty(0, dtype=torch.int16)], [x.new_empty(0, dtype=torch.uint8)]
        for chunks, k in self._chunks(fragment):
            part = _largest(chunks.of(x), k)
            for all_of_them, some in zip((levels, index, values), part, strict=True):
                all_of_them.append(some.view(-1))
        at_levels, at_zeros, at_index, at_values = self._ranges(fragment)
        _, total = self._totals(fragment)
        out[at_levels].copy_(torch.cat(levels).view(torch.uint8))
        out[at_zeros] = 0
        out[at_index].copy_(_pack12(torch.cat(index)))
        out[at_values].copy_(pack(torch.nn.functional.pad(torch.cat(values), (0, -total % 4)).view(-1, 4), bits=2))

    def _encode_by(self, fast: ModuleType, x: Tensor, out: Tensor, fragment: Fragment) -> None:
        """The bytes of the reference above, by compiled loops."""
        at_levels, at_zeros, at_index, at_values = self._ranges(fragment)
        count, total = self._totals(fragment)
        levels = torch.empty(4 * count, dtype=torch.uint8, device="cpu")
        index = torch.zeros(-(-total // 4) * 4, dtype=torch.int16, device="cpu")
        values = torch.zeros(index.numel(), dtype=torch.uint8, device="cpu")
        chunk, entry = 0, 0
        for chunks, k in self._chunks(fragment, piece=x.numel()):
            last, end = chunk + chunks.count, entry + chunks.count * k
            columns = chunks.columns if isinstance(chunks, Squares) else 0
            places = (chunks.start, chunks.count, chunks.length, columns)
            if not fast.largest(x, *places, levels[4 * chunk : 4 * last], index[entry:end], values[entry:end]):
                require_finite(x)
            chunk, entry = last, end
        for gap in padding(fragment, x.numel()):
            largest_bits(x, gap)
        packed_index, packed_values = fast.packed_entries(index, values)
        out[at_levels].copy_(levels)
        out[at_zeros] = 0
        out[at_index].copy_(packed_index[: at_index.stop - at_index.start])
        out[at_values].copy_(packed_values)

    def entries(
        self, payload: Tensor, fragment: Fragment, seed: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The elements of each chunk, by the order of their places."""
        for chunks, levels, index, values in self._parts(payload, fragment, device):
            sizes = from_bf16(levels)  # [count, 2]
            size = torch.where(values > 1, sizes[:, 1:], sizes[:, :1]).view(torch.int32)
            numbers = (size | ((values & 1).to(torch.int32) << 31)).view(torch.float32)
            yield chunks.places(index).view(-1), numbers.view(-1)

    def _check(self, payload: Tensor, fragment: Fragment) -> None:
        """Refuse magnitudes and places out of range or order, and pads that are not zero."""
        at_levels, at_zeros, at_index, at_values = self._ranges(fragment)
        _, total = self._totals(fragment)
        if bool(payload[at_zeros].any()):
            raise BadPayload("the bytes between magnitudes and places are not zero")
        if total % 2 and int(payload[at_index][-1]) >> 4:
            raise BadPayload("the half byte after the last place is not zero")
        if total % 4 and int(payload[at_values][-1]) >> 2 * (total % 4):
            raise BadPayload("the bits after the last value are not zero")
        magnitudes = bf16_bits(payload[at_levels])
        check_scales(magnitudes, BF16_LARGEST)
        # As integers, positive floats have their own order.
        bad = (magnitudes[0::2] > magnitudes[1::2]).any()
        for chunks, _, index, _ in self._parts(payload, fragment, payload.device):
            bad |= (index[:, -1] >= chunks.length).any() | (index[:, 1:] <= index[:, :-1]).any()
        if bool(bad):
            raise BadPayload("the magnitudes or the places of a chunk do not rise, or a place is outside of it")

    def _parts(
        self, payload: Tensor, fragment: Fragment, device: torch.device
    ) -> Iterator[tuple[Chunks, Tensor, Tensor, Tensor]]:
        """Chunks, with their magnitudes int16 [count, 2], places int64 [count, k] and values uint8 [count, k]."""
        at_levels, _, at_index, at_values = self._ranges(fragment)
        _, total = self._totals(fragment)
        levels = bf16_bits(payload[at_levels]).to(device).view(-1, 2)
        index = _unpack12(payload[at_index].to(device), total)
        values = torch.empty(-(-total // 4), 4, dtype=torch.uint8, device=device)
        unpack_into(payload[at_values].to(device), values, bits=2)
        values = values.view(-1)
        chunk, entry = 0, 0
        for chunks, k in self._chunks(fragment):
            end = entry + chunks.count * k
            yield (
                chunks,
                levels[chunk : chunk + chunks.count],
                index[entry:end].to(torch.int64).view(-1, k),
                values[entry:end].view(-1, k),
            )
            chunk, entry = chunk + chunks.count, end

    def _chunks(self, fragment: Fragment, piece: int = PIECE) -> Iterator[tuple[Chunks, int]]:
        """And how many elements of each are sent. Raises ValueError: there are several k, but not one per tensor."""
        for tensor, k in zip(fragment.tensors, of_tensors(self.k, fragment), strict=True):
            for chunks in _chunks(tensor, piece):
                yield chunks, -(-k * chunks.length // CHUNK)

    def _totals(self, fragment: Fragment) -> tuple[int, int]:
        """Chunks and entries of a fragment."""
        parts = [(chunks.count, chunks.count * k) for chunks, k in self._chunks(fragment)]
        return sum(count for count, _ in parts), sum(kept for _, kept in parts)

    def _ranges(self, fragment: Fragment) -> tuple[slice, slice, slice, slice]:
        """Where magnitudes, zeros, places and values lie in a payload."""
        count, total = self._totals(fragment)
        places = aligned(4 * count)
        values = places + -(-3 * total // 2)
        end = values + -(-total // 4)
        return slice(0, 4 * count), slice(4 * count, places), slice(places, values), slice(values, end)


def _chunks(tensor: TensorSlot, piece: int) -> Iterator[Chunks]:
    if len(tensor.shape) == 2 and tensor.shape[0] % SIDE == 0 and tensor.shape[1] % SIDE == 0:
        yield from _squares(tensor, piece)
    else:
        short = len(tensor.shape) < 2 and tensor.numel < LONG_VECTOR
        yield from chunks_of(tensor.offset, tensor.numel, SIDE if short else CHUNK, piece)


def _squares(matrix: TensorSlot, piece: int) -> Iterator[Squares]:
    rows, columns = matrix.shape
    if not columns:
        return
    step = max(1, piece // (SIDE * columns)) * SIDE
    for row in range(0, rows, step):
        height = min(step, rows - row)
        yield Squares(
            start=matrix.offset + row * columns, count=height * columns // CHUNK, length=CHUNK, columns=columns
        )


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """x fp32 [m, n ≤ 4096] → magnitudes int16 [m, 2], rising places int16 [m, k], values uint8 [m, k].

    Only integers and powers of two decide, so the bytes do not depend on a device's order of summation.
    """
    last = x.shape[1] - 1
    # No two keys are equal: of equal magnitudes, the earlier elements are taken.
    key = (x.view(torch.int32) & 0x7FFFFFFF).to(torch.int64) << 12
    key |= torch.arange(last, -1, -1, device=x.device, dtype=torch.int64)
    key = key.topk(k, dim=1).values  # [m, k], falling
    index, bits = last - (key & (CHUNK - 1)), key >> 12
    exponent = (bits[:, :1] >> 23).clamp_(min=1)  # [m, 1], biased; that of subnormals is 1
    # In units of 2⁻²³ of the largest one's power of two: whole numbers up to 2²⁴, with exact sums.
    size = (bits.to(torch.int32).view(torch.float32).double() * _power(150 - exponent)).round_()
    top = size.cumsum(dim=1)  # [m, k], of the largest s
    rest = top[:, -1:] - top
    s = torch.arange(1, k + 1, device=x.device, dtype=torch.float64)
    others = (k - s).clamp_(min=1)
    split = (top * top / s + rest * rest / others).argmax(dim=1, keepdim=True)  # s − 1, the smallest of the best
    means = torch.cat(((rest / others).gather(1, split), (top / s).gather(1, split)), dim=1)  # [m, 2]
    levels = to_scale((means * _power(exponent - 150)).to(torch.float32), BF16_LARGEST)
    index, order = index.sort(dim=1)
    values = (x.gather(1, index) < 0).to(torch.uint8) | ((order <= split).to(torch.uint8) << 1)
    return levels, index.to(torch.int16), values


def _power(exponent: Tensor) -> Tensor:
    """2^exponent, fp64, made of its bits."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _pack12(index: Tensor) -> Tensor:
    """index int16 [n] below 4096 → uint8 [⌈3n/2⌉]: two in three bytes, low bits first."""
    first, second = torch.nn.functional.pad(index, (0, index.numel() % 2)).view(-1, 2).unbind(dim=1)
    packed = torch.stack((first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4), dim=1)
    return packed.view(-1)[: -(-3 * index.numel() // 2)].to(torch.uint8)


def _unpack12(packed: Tensor, numel: int) -> Tensor:
    """uint8 [⌈3n/2⌉] → int16 [n]."""
    a, b, c = torch.nn.functional.pad(packed, (0, -packed.numel() % 3)).view(-1, 3).to(torch.int16).unbind(dim=1)
    return torch.stack((a | ((b & 0xF) << 8), (b >> 4) | (c << 4)), dim=1).view(-1)[:numel]


TOPK = TopkCodec(name="topk", code=7, block=CHUNK, beta=0.95)
