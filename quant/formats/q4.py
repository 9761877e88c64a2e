"""`q4`: int4 codes, blocks of 64, scale = −(element of largest magnitude) ÷ 8, nearest. 4.25 bits per element.

The default both ways. The signed scale gives that element the code −8, so that all 16 codes are used: 9.1e-3 of a
Gaussian's squared norm is lost, against 1.2e-2 with codes −7…7 (the "Q4_0" rule).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant import packing
from farloop.quant.codec import Traits
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.packing import Q4_BLOCK, from_bf16, largest_scale, to_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Q4Codec(BlockCodec):
    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """k = clamp(round(x ÷ s), −8, 7), ties to even, with s as it is stored; k + 8 is written."""
        absmax = magnitude.amax(dim=1)  # [m]
        # As integers, positive floats have their own order and lie above all negative ones. +a goes before −a in a tie.
        positive = x.view(torch.int32).amax(dim=1) == absmax
        a = absmax.view(torch.float32)
        scales = to_scale(torch.where(positive, -a, a) * 0.125, self.largest_scale)
        s = from_bf16(scales).unsqueeze(1)  # [m, 1]
        ratio = x / torch.where(s == 0, 1.0, s)
        codes = ratio.clamp_(-8, 7).round_().add_(8).to(torch.uint8)
        return scales, packing.pack(codes)

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor, *, seed: int) -> None:
        """k·s, exact: 4 and 8 significant bits."""
        packing.unpack_into(codes, out)
        out.sub_(8).mul_(scales)


Q4 = Q4Codec(
    name="q4",
    code=4,
    block=Q4_BLOCK,
    code_bits=4,
    largest_scale=largest_scale(8),
    signed_scales=True,
    declared=Traits(bits_per_element=4.25, exact_decode=True, unbiased=False, contraction=0.75, deterministic=True),
)
