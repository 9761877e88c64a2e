"""`q8`: int8 codes, blocks of 256, scale = largest magnitude ÷ 127, nearest. 8.06 bits per element.

The conservative codec: 4.9e-5 of a Gaussian's squared norm is lost.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.codec import Traits
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.packing import Q8_BLOCK, from_bf16, largest_scale, to_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Q8Codec(BlockCodec):
    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """k = clamp(round(x ÷ s), −127, 127), ties to even, with s as it is stored."""
        absmax = magnitude.amax(dim=1).view(torch.float32)  # [m]
        # By a tensor: on GPUs torch turns a division by a number into a product with its reciprocal, one bit off.
        scales = to_scale(absmax / torch.full_like(absmax, 127.0), self.largest_scale)
        s = from_bf16(scales).unsqueeze(1)  # [m, 1]
        ratio = x / torch.where(s == 0, 1.0, s)
        codes = ratio.clamp_(-127, 127).round_().to(torch.int8)
        return scales, codes.view(torch.uint8).view(-1)

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor, *, seed: int) -> None:
        """k·s, exact: 8 and 8 significant bits."""
        out.copy_(codes.view(torch.int8).view(out.shape)).mul_(scales)


Q8 = Q8Codec(
    name="q8",
    code=3,
    block=Q8_BLOCK,
    code_bits=8,
    largest_scale=largest_scale(128),  # for −128, which no encoder writes but a peer may send
    declared=Traits(bits_per_element=8.0625, exact_decode=True, unbiased=False, contraction=0.99, deterministic=True),
)
