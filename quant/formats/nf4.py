"""`nf4`: 16 quantiles of a Gaussian times the largest magnitude, blocks of 64. 4.25 bits per element. To compare with.

NormalFloat4 of QLoRA (arXiv 2305.14314), as bitsandbytes has it: quantiles in 7 even steps of probability from 1 −
0.9677083 to ½, in 8 from there to 0.9677083, divided by the largest. They are rounded to bf16 here, and the scale too,
so that products are exact; that costs nothing that could be measured.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant import packing
from farloop.quant.codec import Traits
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.packing import BF16_LARGEST, check_scales, from_bf16, to_scale

BLOCK = 64

VALUES = (
    -1.0,
    -0.6953125,
    -0.5234375,
    -0.39453125,
    -0.28515625,
    -0.1845703125,
    -0.0908203125,
    0.0,
    0.07958984375,
    0.1611328125,
    0.24609375,
    0.337890625,
    0.44140625,
    0.5625,
    0.72265625,
    1.0,
)
_THRESHOLDS = tuple((low + high) / 2 for low, high in pairwise(VALUES))
"""Midway between neighbours. Times a scale they are exact in fp32: at most 10 and 8 significant bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nf4Codec(BlockCodec):
    """The arithmetic of its blocks."""

    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """The index of the nearest value, of two the higher."""
        absmax = magnitude.view(-1, BLOCK).amax(dim=1).view(torch.float32)  # [m]
        scales = to_scale(absmax, BF16_LARGEST)
        s = from_bf16(scales).unsqueeze(1)  # [m, 1]
        reach = torch.where(s == 0, torch.inf, s)  # all below −∞ and none above ∞: the 7 of zero
        blocks = x.view(-1, BLOCK)
        codes = torch.zeros(blocks.shape, dtype=torch.uint8, device=x.device)
        for threshold in _THRESHOLDS:
            codes += blocks >= reach * threshold
        return scales, packing.pack(codes)

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        """VALUES[code]·s, exact: 8 and 8 significant bits."""
        values = torch.tensor(VALUES, device=out.device)
        index = torch.empty(out.numel() // BLOCK, BLOCK, dtype=torch.int32, device=out.device)
        packing.unpack_into(codes, index)
        torch.mul(values[index], from_bf16(scales).unsqueeze(1), out=out.view(-1, BLOCK))

    def check_tile(self, scales: Tensor, codes: Tensor) -> None:
        """Every code is good; scales must be."""
        check_scales(scales, BF16_LARGEST, signed=False)


NF4 = Nf4Codec(
    name="nf4",
    code=15,
    block=BLOCK,
    code_bits=4,
    scale_bits=16,
    declared=Traits(
        bits_per_element=4.25,
        exact_decode=True,
        unbiased=False,
        # Worst: 63 elements just above half the first value below zero, beside the largest. They are lost: 0.116.
        contraction=0.88,
        deterministic=True,
    ),
)
