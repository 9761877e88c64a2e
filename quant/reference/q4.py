"""`q4`: int4 codes, blocks of 64, scale = −(element of largest magnitude) ÷ 8, nearest. 4.25 bits per element.

The default both ways. The signed scale gives that element the code −8, so that all 16 codes are used: 9.1e-3 of a
Gaussian's squared norm is lost, against 1.2e-2 with codes −7…7 (the "Q4_0" rule).
"""

import torch
from torch import Tensor

from farloop.quant.codec import Codec
from farloop.quant.reference import nibbles
from farloop.quant.reference.scales import check_scales, from_bf16, largest_scale, to_scale

BLOCK = 64
_LARGEST_SCALE = largest_scale(8)


def encode_tile(x: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """k = clamp(round(x ÷ s), −8, 7), ties to even, with s as it is stored; k + 8 is written."""
    absmax = magnitude.view(-1, BLOCK).amax(dim=1)  # [m]
    # As integers, positive floats have their own order and lie above all negative ones. +a goes before −a in a tie.
    positive = x.view(torch.int32).view(-1, BLOCK).amax(dim=1) == absmax
    a = absmax.view(torch.float32)
    scales = to_scale(torch.where(positive, -a, a) * 0.125, _LARGEST_SCALE)
    s = from_bf16(scales).unsqueeze(1)  # [m, 1]
    ratio = x.view(-1, BLOCK) / torch.where(s == 0, 1.0, s)
    codes = ratio.clamp_(-8, 7).round_().add_(8).to(torch.uint8)
    return scales, nibbles.pack(codes)


def decode_tile_into(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    """k·s, exact: 4 and 8 significant bits."""
    blocks = out.view(-1, BLOCK)
    nibbles.unpack_into(codes, blocks)
    blocks.sub_(8).mul_(from_bf16(scales).unsqueeze(1))


def check_tile(scales: Tensor, codes: Tensor) -> None:
    """Every code is good; scales must be."""
    check_scales(scales, _LARGEST_SCALE, signed=True)


Q4 = Codec(
    name="q4",
    code=4,
    block=BLOCK,
    code_bits=4,
    scale_bits=16,
    exact_decode=True,
    unbiased=False,
    needs_residual=False,
    encode_tile=encode_tile,
    decode_tile_into=decode_tile_into,
    check_tile=check_tile,
)
