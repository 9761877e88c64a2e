"""`lowrank`: matrices as products of two thin ones, the rest as bf16. Needs error feedback; for deltas only.

PowerSGD (arXiv 1905.13727): one step of a power iteration, P = orth(M·Q), Q = Mᵀ·P, that starts from the last Q. There
all workers sum their P and then their Q, in two dependent round trips, with one Q for all. Here every sender has its
own subspace and sends P and Q in one blob: a missing sender changes nothing for the others, and the coordinator
averages the products. The cost: the mean of K products has rank K·r, where theirs has r.

The encoder tries one column more than it sends, and drops the one that holds least. This column starts from fresh
random numbers q, so no direction hides from a warm start forever, as in the counter-example of PowerSGD+ (arXiv
2509.11254): on average |M·q|²/|q|² is 1/m of |M|² for m columns, and orth(M·q) holds at least that much of M.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import MAX_FRAGMENT_ELEMENTS, TILE, Fragment
from farloop.quant.codec import Codec, SharedPolicy, Traits, of_tensors, require_flat
from farloop.quant.errors import BadPayload
from farloop.quant.formats.sparse import largest_bits, spans
from farloop.quant.packing import BF16_LARGEST, bf16_bits, from_bf16, largest_scale, to_bf16, uniform16

MOST_RANK = 128
_ONE = 0x3F80  # bits of 1 in bf16: no element of a column of length 1 is larger


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A tensor's place in the fragment and in the payload, both counted in elements."""

    offset: int
    numel: int
    place: int  # first of its numbers, bf16, in the payload
    rank: int
    tall: int = 0
    """The larger side of a matrix, whose bases are P [tall, rank] and Q [short, rank]; 0 for what is sent as it is."""
    short: int = 0
    wide: bool = False  # the matrix is the transpose of P·Qᵀ


@dataclass(frozen=True, slots=True, kw_only=True)
class LowrankCodec(Codec):
    """Payload: of each tensor in turn its P, its Q, both row by row, or its elements; all bf16, no gaps."""

    rank: tuple[int, ...] = (4,)  # of what arrives of a matrix; one, or one per tensor
    policy: SharedPolicy = "equal"
    alpha: float = 1.0  # of l-greco, as that of `q4r`

    @property
    def traits(self) -> Traits:
        """What it promises. The bits are those of what is no matrix; of an n×m matrix, 16·rank·(n + m) ÷ (n·m)."""
        # A projection never loses more than there is. What it keeps on average is at least 1/m by the random column,
        # with m the shorter side, and rank of rank + 1 columns are sent. Half of that is declared, for rounding.
        least = min(self.rank) if self.policy == "equal" else 1
        longest_short_side = math.isqrt(MAX_FRAGMENT_ELEMENTS)
        return Traits(
            bits_per_element=16.0,
            exact_decode=False,  # a matrix product adds in an order of its own on every machine
            unbiased=False,
            contraction=least / (least + 1) / longest_short_side / 2,
            deterministic=False,
            warm_start=True,
            sparse=True,
        )

    def payload_bytes(self, fragment: Fragment) -> int:
        return 2 * sum(_numbers(part) for part in self._parts(fragment))

    def _encode_into(self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int, previous: Tensor | None) -> None:
        # The bytes may differ between machines, as matrix products do.
        if previous is not None:
            require_flat(previous, torch.uint8, "previous", numel=out.numel())
        largest = [largest_bits(x, span) for span in spans(fragment)]
        for part, bits in zip(self._parts(fragment), largest, strict=True):
            if not part.tall:
                for start in range(0, part.numel, TILE):
                    stop = min(start + TILE, part.numel)
                    numbers = to_bf16(x[part.offset + start : part.offset + stop])
                    out[_bytes(part.place + start, part.place + stop)].copy_(numbers.view(torch.uint8))
                continue
            start_columns = self._start_columns(part, previous, seed).to(x.device)
            p, q = _power_step(_matrix(x, part), start_columns, (bits >> 23) - 127)
            place = part.place
            for factor, limit in ((p, _ONE), (q, self._largest_q)):
                numbers = to_bf16(factor.contiguous().view(-1), limit)
                out[_bytes(place, place + numbers.numel())].copy_(numbers.view(torch.uint8))
                place += numbers.numel()

    def _tiles(self, payload: Tensor, fragment: Fragment, *, seed: int, device: torch.device) -> Iterator[Tensor]:
        """With memory for one tile, the factors of a matrix and two of its rows."""
        parts = self._parts(fragment)
        buffer = torch.empty(min(TILE, fragment.numel), dtype=torch.float32, device=device)
        for start in range(0, fragment.numel, TILE):
            tile = buffer[: fragment.numel - start].zero_()
            for part in parts:
                first = max(start, part.offset)
                stop = min(start + tile.numel(), part.offset + part.numel)
                if first < stop:
                    piece = tile[first - start : stop - start]
                    self._decode_part_into(payload, part, first - part.offset, piece)
            yield tile

    def _check(self, payload: Tensor, fragment: Fragment) -> None:
        """Refuse numbers so large that their products could overflow."""
        for part in self._parts(fragment):
            end = part.place + _numbers(part)
            q_place = part.place + part.tall * part.rank
            _check(payload, part.place, q_place, _ONE)
            _check(payload, q_place, end, self._largest_q if part.tall else BF16_LARGEST)

    @property
    def _largest_q(self) -> int:
        """Bits of the largest bf16 that, times 1, can be added `rank` times."""
        return largest_scale(1 << (max(self.rank) - 1).bit_length())

    def _parts(self, fragment: Fragment) -> list[_Part]:
        """What becomes of each tensor. A matrix is split where that at least halves it, as torch's hook has it."""
        parts, place = [], 0
        for tensor, rank in zip(fragment.tensors, of_tensors(self.rank, fragment), strict=True):
            rows = tensor.shape[0] if tensor.shape else 1
            columns = tensor.numel // rows if rows else 0
            if len(tensor.shape) > 1 and 0 < 2 * rank * (rows + columns) <= tensor.numel:
                tall, short, wide = max(rows, columns), min(rows, columns), columns > rows
            else:
                tall, short, wide = 0, 0, False
            size = {"offset": tensor.offset, "numel": tensor.numel, "tall": tall, "short": short}
            part = _Part(place=place, rank=rank, wide=wide, **size)
            parts.append(part)
            place += _numbers(part)
        return parts

    def _start_columns(self, part: _Part, previous: Tensor | None, seed: int) -> Tensor:
        """Where the power iteration starts, fp32 [short, rank + 1] with magnitudes of at most 1."""
        noise = uniform16(seed, part.offset, part.short * (part.rank + 1)).view(-1, part.rank + 1) - 0.5
        if previous is None:
            return noise
        warm = self._factors(previous, part)[1].to(noise.device)
        size = warm.abs().amax(dim=0)
        return torch.cat((warm / torch.where(size == 0, 1.0, size), noise[:, :1]), dim=1)

    def _factors(self, payload: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
        """P fp32 [tall, rank] and Q fp32 [short, rank]."""
        numbers = from_bf16(_read(payload, part.place, part.place + _numbers(part)))
        of_p = part.tall * part.rank
        return numbers[:of_p].view(-1, part.rank), numbers[of_p:].view(-1, part.rank)

    def _decode_part_into(self, payload: Tensor, part: _Part, first: int, out: Tensor) -> None:
        """The elements of a tensor from `first` on."""
        if not part.tall:
            out.copy_(from_bf16(_read(payload, part.place + first, part.place + first + out.numel())))
            return
        p, q = (factor.to(out.device) for factor in self._factors(payload, part))
        by_row, by_column = (q, p) if part.wide else (p, q)
        columns = by_column.shape[0]
        row, last_row = first // columns, -(-(first + out.numel()) // columns)
        product = (by_row[row:last_row] @ by_column.T).view(-1)
        out.copy_(product[first - row * columns :][: out.numel()])


def _power_step(matrix: Tensor, start: Tensor, exponent: int) -> tuple[Tensor, Tensor]:
    """M fp32 [tall, short] of magnitudes below 2^(exponent + 1), start [short, r + 1] → P [tall, r], Q [short, r].

    P is rounded to bf16 before Q is taken with it: |M − P·Qᵀ| ≤ |M| while the eigenvalues of PᵀP are below 2, and
    rounding moves them from 1 by little more than √r/128.
    """
    # Powers of two on the thin factors keep every sum in range without a copy of M.
    exponent = max(-100, min(100, exponent))
    # Householder: of columns that are zero, or depend on others, it makes some that are neither.
    # The thin factor comes first and lies row by row: BLAS is up to ten times as fast as with five columns behind M.
    p = torch.linalg.qr(((start * 2.0**-exponent).T.contiguous() @ matrix.T).T).Q
    p = from_bf16(to_bf16(p.contiguous(), _ONE))
    q = ((p * 2.0**-exponent).T.contiguous() @ matrix).T
    kept = q.double().square().sum(dim=0).argsort(descending=True)[:-1]
    return p[:, kept], q[:, kept] * 2.0**exponent


def _matrix(x: Tensor, part: _Part) -> Tensor:
    """A view of a matrix, [tall, short]."""
    flat = x[part.offset : part.offset + part.numel]
    return flat.view(part.short, part.tall).T if part.wide else flat.view(part.tall, part.short)


def _numbers(part: _Part) -> int:
    return (part.tall + part.short) * part.rank if part.tall else part.numel


def _bytes(first: int, stop: int) -> slice:
    return slice(2 * first, 2 * stop)


def _read(payload: Tensor, first: int, stop: int) -> Tensor:
    return bf16_bits(payload[_bytes(first, stop)])


def _check(payload: Tensor, first: int, stop: int, largest: int) -> None:
    """Raise BadPayload where one of these numbers is larger in magnitude than `largest`, bf16 bits."""
    for start in range(first, stop, TILE):
        magnitude = _read(payload, start, min(start + TILE, stop)) & 0x7FFF
        if int(magnitude.max()) > largest:
            most = from_bf16(torch.tensor(largest, dtype=torch.int16, device="cpu"))
            raise BadPayload(f"a number above {float(most):g}")


LOWRANK = LowrankCodec(name="lowrank", code=13, beta=1.0)
