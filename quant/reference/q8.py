"""`q8`: int8 codes, blocks of 256, scale = largest magnitude ÷ 127, nearest. 8.06 bits per element.

The conservative codec: 4.9e-5 of a Gaussian's squared norm is lost.
"""

import torch
from torch import Tensor

from farloop.quant.codec import Codec
from farloop.quant.reference.scales import check_scales, from_bf16, largest_scale, to_scale

BLOCK = 256
_LARGEST_SCALE = largest_scale(128)
"""For −128, which no encoder writes but a peer may send."""


def encode_tile(x: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """k = clamp(round(x ÷ s), −127, 127), ties to even, with s as it is stored."""
    absmax = magnitude.view(-1, BLOCK).amax(dim=1).view(torch.float32)  # [m]
    # Divided by a tensor: torch turns a division by a number into a product with its reciprocal on GPUs, one bit off.
    scales = to_scale(absmax / torch.full_like(absmax, 127.0), _LARGEST_SCALE)
    s = from_bf16(scales).unsqueeze(1)  # [m, 1]
    ratio = x.view(-1, BLOCK) / torch.where(s == 0, 1.0, s)
    codes = ratio.clamp_(-127, 127).round_().to(torch.int8)
    return scales, codes.view(torch.uint8).view(-1)


def decode_tile_into(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    """k·s, exact: 8 and 8 significant bits."""
    blocks = out.view(-1, BLOCK)
    blocks.copy_(codes.view(torch.int8).view(-1, BLOCK))
    blocks.mul_(from_bf16(scales).unsqueeze(1))


def check_tile(scales: Tensor, codes: Tensor) -> None:
    """Every code is good; scales must be."""
    check_scales(scales, _LARGEST_SCALE, signed=False)


Q8 = Codec(
    name="q8",
    code=3,
    block=BLOCK,
    code_bits=8,
    scale_bits=16,
    exact_decode=True,
    unbiased=False,
    needs_residual=False,
    encode_tile=encode_tile,
    decode_tile_into=decode_tile_into,
    check_tile=check_tile,
)
