"""4-bit formats that are a table of 16 values times a scale, blocks of 64, nearest: `e3m0`, `e2m1`, `nf4`.

4.25 bits per element. They are kept for comparison with `q4`, which has the same size.

- `e3m0`: a sign and a power of two, scale = largest magnitude. The 4-bit format of Streaming DiLoCo (arXiv 2501.18512);
  block, scale and rounding are ours, because the paper names none. It loses 4 times what `q4` loses.
- `e2m1`: the 4-bit float of microscaling, ±{0, ½, 1, 1½, 2, 3, 4, 6}·s. Its values are those of MXFP4 and NVFP4; block
  and scale are those of the other formats here, to compare values with values. It loses a fifth more than `q4` on
  Gaussian numbers, and less on heavy tails.
- `nf4`: NormalFloat4 of QLoRA (arXiv 2305.14314), as bitsandbytes has it: quantiles of a Gaussian in 7 even steps of
  probability from 1 − 0.9677083 to ½, in 8 from there to 0.9677083, divided by the largest; scale = largest magnitude.
  Values and scale are rounded to bf16 here, so that products are exact; that costs nothing measurable.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant import packing
from farloop.quant.codec import Traits
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.packing import (
    BF16_LARGEST,
    E2M1_LARGEST_SCALE,
    E2M1_VALUES,
    E3M0_VALUES,
    NF4_VALUES,
    TABLE_BLOCK,
    from_bf16,
    to_scale,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCodec(BlockCodec):
    """Code i stands for values[i]·s, with s = absmax ÷ the largest value."""

    values: tuple[float, ...]
    """16 from smallest to largest; or 8 from zero on, for codes m + 8·(x < 0), of which 8 (−0) is never written."""

    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """The nearest value: of two equally near ones the greater, or with a sign the one farther from zero."""
        absmax = magnitude.amax(dim=1).view(torch.float32)  # [m]
        # By a tensor: on GPUs torch turns a division by a number into a product with its reciprocal, one bit off.
        scales = to_scale(absmax / torch.full_like(absmax, self.values[-1]), self.largest_scale)
        s = from_bf16(scales).unsqueeze(1)  # [m, 1]
        reach = torch.where(s == 0, torch.inf, s)  # zeros, and blocks that are too small, reach no positive threshold
        compared = magnitude.view(torch.float32) if self._has_sign else x
        codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
        for low, high in pairwise(self.values):
            codes += compared >= reach * ((low + high) / 2)  # exact: few significant bits times 8
        if self._has_sign:
            codes |= ((x < 0) & (codes > 0)).to(torch.uint8) << 3
        return scales, packing.pack(codes)

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor, *, seed: int) -> None:
        """Exact: at most 8 and 8 significant bits."""
        signed = (*self.values, *(-value for value in self.values)) if self._has_sign else self.values
        index = torch.empty(out.shape, dtype=torch.int32, device=out.device)
        packing.unpack_into(codes, index)
        torch.mul(torch.tensor(signed, device=out.device, dtype=torch.float32)[index], scales, out=out)

    @property
    def _has_sign(self) -> bool:
        return len(self.values) == 8


def _table(name: str, code: int, values: tuple[float, ...], largest_scale: int, contraction: float) -> TableCodec:
    traits = Traits(
        bits_per_element=4.25, exact_decode=True, unbiased=False, contraction=contraction, deterministic=True
    )
    return TableCodec(
        name=name,
        code=code,
        block=TABLE_BLOCK,
        code_bits=4,
        values=values,
        largest_scale=largest_scale,
        declared=traits,
    )


E3M0 = _table("e3m0", 5, E3M0_VALUES, BF16_LARGEST, contraction=0.85)

# Worst block: 63 elements just below s/4 and one of 6·s. They are lost: 63/16 of 36 + 63/16.
E2M1 = _table("e2m1", 14, E2M1_VALUES, E2M1_LARGEST_SCALE, contraction=0.9)

# Worst block: 63 elements just above half the first value below zero, and the largest. They are lost: 0.116.
NF4 = _table("nf4", 15, NF4_VALUES, BF16_LARGEST, contraction=0.88)
