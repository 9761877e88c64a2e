"""`sign`: one bit per element, blocks of 256, scale = mean magnitude. 1.06 bits per element; needs error feedback.

1-bit SGD (Seide et al., Interspeech 2014) and 1-bit Adam (arXiv 2102.02888): the sender adds what a sign loses to its
next delta (`beta`), and updates to nodes feed their errors back, since an update is target − anchor. The frozen
variance of 1-bit Adam is not needed, because AdamW runs inside each node.

The scale s minimises Σ (|v| − s)², so it is the mean magnitude: |v|₂² − |v|₁²/n is lost, and |v|₁ ≥ |v|₂, so at least
1/n of the squared norm of every block arrives. With the rms, which is 1-bit Adam's choice, a block of one element and
255 zeros loses 2·(1 − 1/16) of its squared norm, and error feedback has no bound.

The bound is wide: under a constant Gaussian delta the residual grows for a thousand windows, to 27 times the delta,
because the scale has to reach the largest element before that element can arrive whole.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant import packing
from farloop.quant.codec import Traits
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.formats.sparse import padding, within
from farloop.quant.packing import BF16_LARGEST, SIGN_BLOCK, SMALLEST_SCALE, power_of_two, to_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class SignCodec(BlockCodec):
    def steps(self, fragment: Fragment) -> Tensor:
        """How many elements of each block are not padding."""
        return _elements(fragment, 0, self.layout.padded(fragment.numel))

    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Bit 1 for x < 0; zeros of either sign have bit 0, and so has a block whose scale is 0."""
        scales = _scales(magnitude, _elements(fragment, start, x.numel()).to(x.device))
        negative = (x < 0) & (scales != 0).unsqueeze(1)
        return scales, packing.pack(negative.to(torch.uint8), bits=1)

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor, *, seed: int) -> None:
        """±s, exact."""
        packing.unpack_into(codes, out, bits=1)
        out.mul_(-2.0).add_(1.0).mul_(scales)


def _elements(fragment: Fragment, start: int, length: int) -> Tensor:
    """How many elements of each block of [start, start + length) are not padding, fp32 [m]; at least 1."""
    real = torch.full((length // SIGN_BLOCK,), float(SIGN_BLOCK), dtype=torch.float32, device="cpu")
    for gap in within(padding(fragment, start + length), start, length):
        for block in range(gap.start // SIGN_BLOCK, -(-gap.stop // SIGN_BLOCK)):
            (missing,) = within([gap], block * SIGN_BLOCK, SIGN_BLOCK)
            real[block] -= missing.stop - missing.start
    return real.clamp_(min=1)


def _scales(magnitude: Tensor, elements: Tensor) -> Tensor:
    """Stored mean magnitudes int16 [m], of magnitudes as bits int32 [m, 256] and counts fp32 [m].

    The sum is one of integers of at most 22 bits, below 2³⁰ and so exact: every device may add as it likes.
    """
    absmax = magnitude.amax(dim=1)
    # Blocks below 2⁻¹⁰⁰ have scale 0 anyway; counting their exponents from there keeps all powers of two normal.
    exponent = (absmax >> 23).clamp_(min=SMALLEST_SCALE >> 7) - 127  # 2^e ≤ absmax < 2^(e+1)
    # Towards zero, so that m < 2²² and the mean of the largest numbers stays finite.
    m = (magnitude.view(torch.float32) * power_of_two(21 - exponent).unsqueeze(1)).to(torch.int32)
    mean = m.sum(dim=1, dtype=torch.int32).to(torch.float32) / elements
    return to_scale(mean * power_of_two(exponent - 21), BF16_LARGEST)


SIGN = SignCodec(
    name="sign",
    code=11,
    block=SIGN_BLOCK,
    beta=1.0,
    code_bits=1,
    largest_scale=BF16_LARGEST,
    padding_code=0,
    declared=Traits(
        bits_per_element=1.0625,
        exact_decode=True,
        unbiased=False,
        contraction=0.0039,  # 1/256, less what rounding a scale to bf16 costs: its error squared, 2⁻¹⁶ of that
        deterministic=True,
    ),
)
