"""`fp32`: the numbers themselves. Decoding returns every bit, the sign of zero too; what is not finite is refused."""

import torch
from torch import Tensor

from farloop.quant.codec import Codec
from farloop.quant.errors import BadPayload


def encode_tile(x: Tensor, magnitude: Tensor) -> tuple[Tensor, Tensor]:
    """No scales; the codes are the bytes of x."""
    return x.new_empty(0, dtype=torch.int16), x.view(torch.uint8)


def decode_tile_into(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    """As bytes, since `codes` need not be aligned."""
    out.view(torch.uint8).copy_(codes)


def check_tile(scales: Tensor, codes: Tensor) -> None:
    """Every value is finite."""
    magnitude = codes.clone().view(torch.int32) & 0x7FFFFFFF
    if int(magnitude.max()) >= 0x7F800000:
        raise BadPayload("a value is not finite")


FP32 = Codec(
    name="fp32",
    code=1,
    block=1,
    code_bits=32,
    scale_bits=0,
    exact_decode=True,
    unbiased=True,
    needs_residual=False,
    encode_tile=encode_tile,
    decode_tile_into=decode_tile_into,
    check_tile=check_tile,
)
