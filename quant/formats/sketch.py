"""`sketch`: the largest 5 % of a tensor in a count sketch, and a bit per element that says which. Payloads add up.

Lossless homomorphic compression as TAGC (arXiv 2504.05638) uses it. Of a tensor of at least `min_numel` elements, those
above a threshold are kept, and each adds ±itself to three counters. A sum of sketches is the sketch of the sum, and the
union of the bitmaps says which elements it has, so adding needs no decoding. The receiver *peels*: a counter with only
one element is that element; it is subtracted from its other two counters, and so on. Smaller tensors are sent as fp32.

Our additions: the thresholds are relative to the root mean square, and the budget is always used up, so that something
definite is kept of every tensor. The encoder peels too, and leaves out what could not be peeled (one tensor of 65536
elements in a thousand has a pair that shares all three counters), so a payload decodes to what was kept, up to a
rounding. A sum can be peeled while its union has less than 0.8 elements per counter: choose `room` for the sum. What is
left over is estimated as the median of its three counters.

The price is 32 bits for a counter: 3.4 bits per element, where `q4` keeps nearly everything with 4.25.

Temporaries are a few times the largest tensor.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import Fragment, TensorSlot
from farloop.quant.codec import Traits
from farloop.quant.errors import BadPayload
from farloop.quant.formats.sparse import SparseCodec, require_finite
from farloop.quant.kernels.dispatch import fast_sparse
from farloop.quant.norm import norm_sq
from farloop.quant.packing import pack, unpack_into, words_at

ROWS = 3
ROW_SEEDS = (0x3C6EF372, 0xA54FF53A, 0x510E527F)
"""Of the three hashes; never those of a blob, for sketches of different nodes are added."""
SPARE_CELLS = 16  # in every row besides its share, so that small tensors come apart too
ROUNDS = 64
"""Of peeling, at most. 1.5 counters per element take 11, and 1.3 take 21; made-up bitmaps could take any number."""

THRESHOLDS = 25
STEP = 0.8  # of a threshold to the next smaller one
LARGEST = 2.0**100  # greater magnitudes become it, so that counters stay finite
FIXED_BITS = 45
"""The encoder adds whole numbers of 2⁻⁴⁵ of the largest magnitude: exact sums of up to 2¹⁷ elements, in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The sketch of one tensor."""

    tensor: TensorSlot
    budget: int  # elements that an encoder keeps at most
    width: int  # counters of one of the three rows
    counters: slice  # bytes of the payload
    bitmap: slice

    @property
    def elements(self) -> slice:
        return slice(self.tensor.offset, self.tensor.offset + self.tensor.numel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where elements stand in a sketch."""

    cells: Tensor  # int64 [3, n]: the first row's counters come first
    signs: Tensor  # fp64 [3, n], ±1


@dataclass(frozen=True, slots=True, kw_only=True)
class SketchCodec(SparseCodec):
    density: float = 0.05  # share of a tensor's elements that are kept
    room: float = 1.5
    """Counters per kept element; more than about 1.25 are needed for one payload, and K times that for a sum of K."""
    min_numel: int = 65536  # elements of the smallest tensor that is sketched

    @property
    def traits(self) -> Traits:
        """What it promises.

        Contraction. With d the density and n elements, either d·n are kept, and each is at least `STEP` times as large
        as any that is not; or all are kept but those below the smallest threshold, which have even less. A tenth is for
        what does not come apart, and would not be enough for an x that was made from the hash.
        """
        d = self.density
        return Traits(
            bits_per_element=1 + 32 * d * self.room,
            exact_decode=False,
            unbiased=False,
            contraction=0.9 * d / (d + (1 - d) / STEP**2),
            deterministic=True,
            summable=True,
            sparse=True,
        )

    def payload_bytes(self, fragment: Fragment) -> int:
        return self._plan(fragment)[2]

    def _encode_into(self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int, previous: Tensor | None) -> None:
        require_finite(x)
        dense, tables, _ = self._plan(fragment)
        for elements, where in dense:
            out[where].copy_(x[elements].view(torch.uint8))
        for table in tables:
            part = x[table.elements]
            kept = _that_come_apart(self._kept(part, table.budget), part, table.width)
            out[table.counters].copy_(_counters(kept, part, table.width).view(torch.uint8))
            out[table.bitmap].copy_(_bitmap(kept, part.numel()))

    def entries(
        self, payload: Tensor, fragment: Fragment, seed: int, device: torch.device
    ) -> Iterator[tuple[Tensor | slice, Tensor]]:
        """Whole small tensors, then what is in each sketch."""
        dense, tables, _ = self._plan(fragment)
        for elements, where in dense:
            # The copy aligns: received bytes may start at an odd address.
            yield elements, payload[where].to(device, copy=True).view(torch.float32)
        for table in tables:
            kept = _places_in(payload[table.bitmap].to(device), table.tensor.numel)
            counters = payload[table.counters].to(device, copy=True).view(torch.float32)
            yield kept + table.tensor.offset, _peel(counters.double(), kept, table.width).to(torch.float32)

    def _check(self, payload: Tensor, fragment: Fragment) -> None:
        """Refuse more elements than counters, a counter of no element that is not +0, a result that is not finite.

        Sums of payloads pass too. It decodes, since peeling takes differences of differences.
        """
        _, tables, _ = self._plan(fragment)
        for table in tables:
            numel = table.tensor.numel
            if numel % 8 and int(payload[table.bitmap][-1]) >> numel % 8:
                raise BadPayload("the bits after the last element are not zero")
            kept = _places_in(payload[table.bitmap], numel)
            if kept.numel() > ROWS * table.width:
                raise BadPayload(f"{kept.numel()} elements in {ROWS * table.width} counters cannot come apart")
            counters = payload[table.counters].clone().view(torch.int32)
            if bool(counters.index_fill_(0, _places(kept, table.width).cells.view(-1), 0).any()):
                raise BadPayload("a counter of no element is not zero")
        if not all(bool(numbers.isfinite().all()) for _, numbers in self.entries(payload, fragment, 0, payload.device)):
            raise BadPayload("an element is not finite")

    def _plan(self, fragment: Fragment) -> tuple[list[tuple[slice, slice]], list[Table], int]:
        """Elements and bytes of each tensor that travels as fp32, the sketches of the others, the payload's size."""
        large = [tensor for tensor in fragment.tensors if tensor.numel >= self.min_numel]
        end, dense, counters = 0, [], []
        for tensor in fragment.tensors:
            if tensor.numel < self.min_numel:
                elements = slice(tensor.offset, tensor.offset + tensor.numel)
                dense.append((elements, slice(end, end + 4 * tensor.numel)))
                end = dense[-1][1].stop
        for tensor in large:
            budget = math.ceil(tensor.numel * self.density)
            width = math.ceil(budget * self.room / ROWS) + SPARE_CELLS
            counters.append((budget, width, slice(end, end + 4 * ROWS * width)))
            end = counters[-1][2].stop
        tables = []
        for tensor, (budget, width, where) in zip(large, counters, strict=True):
            bitmap = slice(end, end + -(-tensor.numel // 8))
            tables.append(Table(tensor=tensor, budget=budget, width=width, counters=where, bitmap=bitmap))
            end = bitmap.stop
        return dense, tables, end

    def _kept(self, x: Tensor, budget: int) -> Tensor:
        """Rising places of at most `budget` elements, int64: all above a threshold, and the first above the next."""
        # No more than d·n squares are 1/d times their mean: the largest threshold is never too small for the budget.
        top = math.sqrt(norm_sq(x) / x.numel() / self.density)
        if not top:
            return torch.empty(0, dtype=torch.int64, device=x.device)
        thresholds = [top]
        for _ in range(THRESHOLDS - 1):
            thresholds.append(thresholds[-1] * STEP)
        # Within what fp32 has: never 0, never infinite.
        thresholds = [min(max(threshold, 2.0**-149), torch.finfo(torch.float32).max) for threshold in thresholds]
        if (fast := fast_sparse(x.device)) is not None:
            chosen: Tensor = fast.kept(x, thresholds, budget)
            return chosen
        size = x.abs()
        fit = bisect_right(thresholds, budget, key=lambda threshold: int((size >= threshold).count_nonzero()))
        above = size >= thresholds[fit - 1] if fit else torch.zeros_like(size, dtype=torch.bool)
        kept = above.nonzero().view(-1)
        if fit == THRESHOLDS:
            return kept
        between = ((size >= thresholds[fit]) & ~above).nonzero().view(-1)
        return torch.cat((kept, between[: budget - kept.numel()])).sort().values


def _places(kept: Tensor, width: int) -> Places:
    """Of elements of one tensor, int64 [n]."""
    hashes = torch.stack([words_at(seed, kept) for seed in ROW_SEEDS])  # [3, n]
    first = torch.arange(ROWS, device=kept.device, dtype=torch.int64).mul_(width).unsqueeze(1)
    return Places(
        cells=first + ((hashes & 0x7FFFFFFF) * width >> 31), signs=1.0 - 2.0 * (hashes >> 31).to(torch.float64)
    )


def _counters(kept: Tensor, x: Tensor, width: int) -> Tensor:
    """Every kept element with its sign in its three counters, fp32 [3·width], each rounded once."""
    values = x.index_select(0, kept)
    _, exponent = math.frexp(min(float(values.abs().max()), LARGEST)) if kept.numel() else (0.0, 0)
    scale = math.ldexp(1.0, FIXED_BITS - exponent)
    if (fast := fast_sparse(x.device)) is not None:
        counters: Tensor = fast.counters_of(values, fast.cells_of(kept, width, ROW_SEEDS), width, scale, LARGEST)
        return counters
    places = _places(kept, width)
    fixed = (places.signs * (values.double().clamp_(-LARGEST, LARGEST) * scale).round_()).to(torch.int64)
    sums = torch.zeros(ROWS * width, dtype=torch.int64, device=x.device)
    sums.index_add_(0, places.cells.view(-1), fixed.view(-1))
    return (sums.double() * math.ldexp(1.0, exponent - FIXED_BITS)).to(torch.float32)


def _that_come_apart(kept: Tensor, x: Tensor, width: int) -> Tensor:
    """`kept`, without the smaller half of what cannot be peeled, until all can."""
    while True:
        fast = fast_sparse(x.device)
        stuck: Tensor
        if fast and (found := fast.left_of(fast.cells_of(kept, width, ROW_SEEDS), width, ROUNDS)):
            stuck, _ = found
        else:
            _, stuck = _order(_places(kept, width).cells)
        if not stuck.numel():
            return kept
        falling = x[kept[stuck]].abs().sort(descending=True, stable=True).indices
        stays = torch.ones_like(kept, dtype=torch.bool)
        stays[stuck[falling[stuck.numel() // 2 :]]] = False
        kept = kept[stays]


def _order(cells: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """In what order elements can be taken off: it depends on their places alone.

    Returns:
        For each round, the elements that are alone in a cell, and the first row where they are, both int64 [members];
        and the elements that never are.
    """
    left = torch.arange(cells.shape[1], device=cells.device, dtype=torch.int64)
    elements = torch.zeros(int(cells.max()) + 1 if cells.numel() else 0, dtype=torch.int64, device=cells.device)
    elements.index_add_(0, cells.view(-1), torch.ones_like(cells).view(-1))
    rounds = []
    for _ in range(ROUNDS):
        alone = elements[cells[:, left]] == 1  # [3, left]
        found = alone.any(dim=0)
        members = left[found]
        if not members.numel():
            break
        rows = torch.where(alone[0], 0, torch.where(alone[1], 1, 2))[found]
        gone = cells[:, members].view(-1)
        elements.index_add_(0, gone, torch.full_like(gone, -1))
        rounds.append((members, rows))
        left = left[~found]
    return rounds, left


def _peel(counters: Tensor, kept: Tensor, width: int) -> Tensor:
    """The elements, fp64 [n], out of their counters fp64 [3·width], which are left as what was not explained."""
    fast = fast_sparse(counters.device, kept.device)
    stuck: Tensor
    numbers: Tensor
    if fast and (found := fast.left_of(fast.cells_of(kept, width, ROW_SEEDS), width, ROUNDS, counters)):
        stuck, numbers = found
    else:
        numbers, stuck = _peel_by_reference(counters, _places(kept, width))
    if stuck.numel():
        places = _places(kept[stuck], width)
        numbers[stuck] = (counters[places.cells] * places.signs).median(dim=0).values
    return numbers


def _peel_by_reference(counters: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """The elements, and which never were alone in a cell."""
    cells, signs = places.cells, places.signs
    rounds, stuck = _order(cells)
    numbers = torch.zeros(cells.shape[1], dtype=torch.float64, device=counters.device)
    for members, rows in rounds:
        found = counters[cells[rows, members]] * signs[rows, members]
        numbers[members] = found
        counters.index_add_(0, cells[:, members].view(-1), (signs[:, members] * -found).view(-1))
    return numbers, stuck


def _bitmap(kept: Tensor, numel: int) -> Tensor:
    """Places int64 → uint8 [⌈numel/8⌉]: bit i mod 8 of byte i div 8 is element i."""
    if (fast := fast_sparse(kept.device)) is not None:
        bitmap: Tensor = fast.bitmap_of(kept, numel)
        return bitmap
    bits = torch.zeros(-(-numel // 8) * 8, dtype=torch.uint8, device=kept.device)
    bits[kept] = 1
    return pack(bits.view(-1, 8), bits=1)


def _places_in(bitmap: Tensor, numel: int) -> Tensor:
    """uint8 [⌈numel/8⌉] → places int64, rising."""
    if (fast := fast_sparse(bitmap.device)) is not None:
        places: Tensor = fast.ones_of(bitmap)
        return places if not numel % 8 else places[places < numel]
    bits = torch.empty(bitmap.numel(), 8, dtype=torch.uint8, device=bitmap.device)
    unpack_into(bitmap, bits, bits=1)
    return bits.view(-1)[:numel].nonzero().view(-1)


SKETCH = SketchCodec(name="sketch", code=9, beta=1.0)
