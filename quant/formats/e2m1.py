"""`e2m1`: the 4-bit float of microscaling, ±{0, ½, 1, 1½, 2, 3, 4, 6}·s, blocks of 64. 4.25 bits per element.

To compare with. Its values are those of MXFP4 and NVFP4; block and scale are those of the other 4-bit formats here, to
compare values with values: it loses a fifth more than `q4` on Gaussian numbers, and less on heavy tails.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant import packing
from farloop.quant.codec import Traits
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.packing import check_scales, from_bf16, to_scale

BLOCK = 64
LARGEST_SCALE = 0x7E2A
"""Bits of the largest bf16 of which 6 times is finite, 1.328125·2¹²⁵."""

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midway between neighbours. Times a scale they are exact in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class E2m1Codec(BlockCodec):
    """The arithmetic of its blocks."""

    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Nearest, ties away from zero: 0, or m + 8·(x < 0) for ±s·VALUES[m], m = 1…7."""
        absmax = magnitude.view(-1, BLOCK).amax(dim=1).view(torch.float32)  # [m]
        # By a tensor: torch makes a division by a number a product with its reciprocal on GPUs, one bit off.
        scales = to_scale(absmax / torch.full_like(absmax, 6.0), LARGEST_SCALE)
        s = from_bf16(scales).unsqueeze(1)  # [m, 1]
        reach = torch.where(s == 0, torch.inf, s)
        blocks, size = x.view(-1, BLOCK), magnitude.view(torch.float32).view(-1, BLOCK)
        codes = torch.zeros(blocks.shape, dtype=torch.uint8, device=x.device)
        for threshold in _THRESHOLDS:
            codes += size >= reach * threshold
        codes |= ((blocks < 0) & (codes > 0)).to(torch.uint8) << 3
        return scales, packing.pack(codes)

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        """±VALUES[m]·s, exact: 2 and 8 significant bits. 8, which no encoder writes, is −0."""
        values = torch.tensor((*VALUES, *(-value for value in VALUES)), device=out.device)
        index = torch.empty(out.numel() // BLOCK, BLOCK, dtype=torch.int32, device=out.device)
        packing.unpack_into(codes, index)
        torch.mul(values[index], from_bf16(scales).unsqueeze(1), out=out.view(-1, BLOCK))

    def check_tile(self, scales: Tensor, codes: Tensor) -> None:
        """Every code is good; scales must be."""
        check_scales(scales, LARGEST_SCALE, signed=False)


E2M1 = E2m1Codec(
    name="e2m1",
    code=14,
    block=BLOCK,
    code_bits=4,
    scale_bits=16,
    declared=Traits(
        bits_per_element=4.25,
        exact_decode=True,
        unbiased=False,
        # Worst: 63 elements just below s/4 beside one of 6·s. They are lost: 63/16 of 36 + 63/16.
        contraction=0.9,
        deterministic=True,
    ),
)
