"""`lattice`: int4 codes on a grid with a random shift, blocks of 256. 4.06 bits per element. For comparison.

QSDP (arXiv 2302.02390): the nearest point of δℤ + r·δ, with one shift r for all elements, drawn anew for every blob.
Over the draws the mean of what arrives is what was sent, and the error of every element is uniform on half a step
either way. Sender and receiver draw the shift from the seed, so no byte carries it.

One shift for all elements means one error for all: zeros all decode to the same r·δ. QSDP needs that for its theorem on
weights that live on the grid; for deltas, `q4` loses half as much at the same size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant import packing
from farloop.quant.codec import Traits
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.packing import LATTICE_BLOCK, LATTICE_LARGEST_SCALE, SMALLEST_SCALE, from_bf16, mix32


def shift_of(seed: int) -> float:
    """r = ½ − j/1024 with j the top 10 bits of a hash of the seed: in (−½, ½], and k + r is exact."""
    return 0.5 - (mix32(seed & 0xFFFFFFFF) >> 22) / 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LatticeCodec(BlockCodec):
    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """k = clamp(round(fl(x ÷ s) − r), −8, 7), ties to even, with s as it is stored; k + 8 is written."""
        scales = _scales(magnitude.amax(dim=1).view(torch.float32))
        s = from_bf16(scales).unsqueeze(1)  # [m, 1]
        ratio = x / torch.where(s == 0, 1.0, s)
        codes = ratio.sub_(shift_of(seed)).round_().clamp_(-8, 7).masked_fill_(s == 0, 0.0)
        return scales, packing.pack(codes.add_(8).to(torch.uint8))

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor, *, seed: int) -> None:
        """k·s + r·s = (1024·k + 512 − j)·s ÷ 1024, exact: 14 and 8 significant bits."""
        packing.unpack_into(codes, out)
        out.sub_(8).mul_(scales).add_(scales * shift_of(seed))


def _scales(absmax: Tensor) -> Tensor:
    """absmax ÷ 7 fp32 [m], rounded up to a bf16 s: int16 [m].

    7·s ≥ absmax, so that no element clips: |x ÷ s − r| ≤ 7.5, and only −7.5 is one, which rounds to −8. (7·s lies on
    absmax's fp32 grid. Were absmax larger, then by a step of that grid, and absmax ÷ 7 would lie over half a step of
    its own grid above s: fl(absmax ÷ 7) > s.)
    """
    # By a tensor: on GPUs torch turns a division by a number into a product with its reciprocal, one bit off.
    bits = (absmax / torch.full_like(absmax, 7.0)).view(torch.int32)
    scales = ((bits + 0xFFFF) >> 16).clamp_(max=LATTICE_LARGEST_SCALE)
    return torch.where(scales < SMALLEST_SCALE, 0, scales).to(torch.int16)


LATTICE = LatticeCodec(
    name="lattice",
    code=12,
    block=LATTICE_BLOCK,
    code_bits=4,
    largest_scale=LATTICE_LARGEST_SCALE,
    padding_code=8,
    declared=Traits(
        bits_per_element=4.0625,
        exact_decode=True,
        unbiased=True,
        # n·δ²/12 is lost on average, at most 256/12·(1.008/7)² = 0.45 of the largest element's square; 0.05 are for the
        # clipping of the largest numbers. For one seed alone it can be three times that.
        contraction=0.5,
        deterministic=False,
    ),
)
