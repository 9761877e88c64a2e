"""`bf16`: the upper half of fp32, rounded to nearest, ties to even. Magnitudes above the largest bf16 become it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.codec import Traits
from farloop.quant.errors import BadPayload
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.packing import BF16_LARGEST, bf16_bits, from_bf16, to_bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Bf16Codec(BlockCodec):
    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """No scales; the codes are bf16 values."""
        return x.new_empty(0, dtype=torch.int16), to_bf16(x.view(-1)).view(torch.uint8)

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor, *, seed: int) -> None:
        """Exact: a shift."""
        out.view(-1).copy_(from_bf16(bf16_bits(codes)))

    def check_tile(self, scales: Tensor, codes: Tensor) -> None:
        """Every value is finite."""
        if int((bf16_bits(codes) & 0x7FFF).max()) > BF16_LARGEST:
            raise BadPayload("a value is not finite")


BF16 = Bf16Codec(
    name="bf16",
    code=2,
    code_bits=16,
    declared=Traits(bits_per_element=16.0, exact_decode=True, unbiased=False, contraction=0.9999, deterministic=True),
)
