"""`e3m0`: a sign and a power of two, blocks of 64, scale = largest magnitude. 4.25 bits per element.

The 4-bit format of Streaming DiLoCo (arXiv 2501.18512); block, scale and rounding are ours, for the paper names none.
Kept to compare with: it loses 4 times what `q4` loses, at the same size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant import packing
from farloop.quant.codec import Traits
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.packing import BF16_LARGEST, E3M0_BLOCK, check_scales, from_bf16, to_scale

_THRESHOLDS = (2.0**-7, *(1.5 * 2.0**-j for j in range(6, 0, -1)))
"""In units of the scale: midway between neighbours of 0, 2⁻⁶, 2⁻⁵, …, 2⁰. Times a scale they are exact in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class E3m0Codec(BlockCodec):
    """The arithmetic of its blocks."""

    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Nearest in linear space, ties away from zero: 0, or m + 8·(x < 0) for ±s·2^(m−7), m = 1…7."""
        absmax = magnitude.view(-1, E3M0_BLOCK).amax(dim=1).view(torch.float32)  # [m]
        scales = to_scale(absmax, BF16_LARGEST)
        s = from_bf16(scales).unsqueeze(1)  # [m, 1]
        reach = torch.where(s == 0, torch.inf, s)
        blocks, size = x.view(-1, E3M0_BLOCK), magnitude.view(torch.float32).view(-1, E3M0_BLOCK)
        codes = torch.zeros(blocks.shape, dtype=torch.uint8, device=x.device)
        for threshold in _THRESHOLDS:
            codes += size >= reach * threshold
        codes |= ((blocks < 0) & (codes > 0)).to(torch.uint8) << 3
        return scales, packing.pack(codes)

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        """±2^(m−7)·s, exact: the power of two is made of its bits. 8, which no encoder writes, is −0."""
        nibble = torch.empty(out.numel() // E3M0_BLOCK, E3M0_BLOCK, dtype=torch.int32, device=out.device)
        packing.unpack_into(codes, nibble)
        m = nibble & 7
        power = torch.where(m == 0, 0, (m + 120) << 23) | ((nibble & 8) << 28)
        torch.mul(power.view(torch.float32), from_bf16(scales).unsqueeze(1), out=out.view(-1, E3M0_BLOCK))

    def check_tile(self, scales: Tensor, codes: Tensor) -> None:
        """Every code is good; scales must be."""
        check_scales(scales, BF16_LARGEST, signed=False)


E3M0 = E3m0Codec(
    name="e3m0",
    code=5,
    block=E3M0_BLOCK,
    code_bits=4,
    scale_bits=16,
    declared=Traits(
        bits_per_element=4.25,
        exact_decode=True,
        unbiased=False,
        contraction=0.85,
        deterministic=True,
    ),
)
