"""`fp32`: the numbers themselves. Decoding returns every bit, the sign of zero too. NaNs and infinities are refused."""

from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.codec import Traits
from farloop.quant.errors import BadPayload
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.dispatch import fast_digest

FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Codec(BlockCodec):
    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """No scales; the codes are the bytes of x."""
        return x.new_empty(0, dtype=torch.int16), x.view(-1).view(torch.uint8)

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor, *, seed: int) -> None:
        """As bytes, since `codes` need not be aligned."""
        out.view(-1).view(torch.uint8).copy_(codes)

    def check_tile(self, scales: Tensor, codes: Tensor) -> None:
        """Every value is finite."""
        fast = fast_digest(codes.device) if codes.data_ptr() % FP32_BYTES == 0 else None
        if fast is not None:
            if not fast(codes.view(torch.float32), 0)[1]:
                raise BadPayload("a value is not finite")
            return
        magnitude = codes.clone().view(torch.int32) & 0x7FFFFFFF
        if int(magnitude.max()) >= 0x7F800000:
            raise BadPayload("a value is not finite")


FP32 = Fp32Codec(
    name="fp32",
    code=1,
    code_bits=32,
    declared=Traits(bits_per_element=32.0, exact_decode=True, unbiased=True, contraction=1.0, deterministic=True),
)
