"""`q4r`: `q4`'s codes with a step of your choice, then zstd: 1.5 to 3.5 bits per element by one number.

The encoder sets the scale of a block of 256 to `step` · rms, and the entropy coder makes small codes cheap: a coarser
scale beats fewer bits. Rounding is stochastic by default: it is unbiased, so nothing lost has to be remembered, and it
costs nothing in training down to 2 bits. Nearest rounding has half the error and a bias: use it with error feedback,
and for updates to nodes, because `target − anchor` is an error feedback.

Steps below about 0.45 make no difference: 7 steps reach at least the largest element of a block.

`policy=absolute` uses `step` itself as the scale of all blocks, which divides an error over unequal blocks with the
fewest bits (reverse water-filling). With `policy=l-greco` the coordinator publishes a step for every tensor (arXiv
2210.17357); the encoder treats it as `relative`.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant import packing
from farloop.quant.codec import Traits
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.interface import KernelKey
from farloop.quant.packing import (
    Q4R_BLOCK,
    Q4R_GROUP,
    Q4R_LEAST_SCALE,
    Q4R_SMALLEST_MAGNITUDE,
    from_bf16,
    largest_scale,
    power_of_two,
    to_scale,
    uniform16,
)

L_GRECO_FACTORS = (1.0, 0.5, 0.6, 0.7, 0.84, 1.19, 1.41, 1.68, 2.0)
"""Multiples of the step from which the coordinator may choose for a tensor. The first is the uniform choice."""

Rounding = Literal["stochastic", "nearest"]
Policy = Literal["relative", "absolute", "l-greco"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Q4rCodec(BlockCodec):
    step: tuple[float, ...] = (1.0,)
    """Distance of neighbouring codes in units of a block's rms, or as it is (`absolute`); one, or one per tensor."""
    rounding: Rounding = "stochastic"
    policy: Policy = "relative"
    alpha: float = 1.0  # of l-greco: the squared error that it may spend, in units of that of an equal step

    @property
    def traits(self) -> Traits:
        """What it promises; the contraction depends on the step."""
        return replace(
            self.declared,
            unbiased=self.rounding == "stochastic",
            deterministic=self.rounding == "nearest",
            contraction=self._contraction(),
        )

    def _contraction(self) -> float:
        """1 − the larger of the two losses below, and a hundredth for the rounding of scales.

        With s = step · rms an element loses at most s²/4, on average rms²·step²/4. With s = 0.144·|a|, a the largest:
        255 elements of f·s lose f·(1 − f)·s² each of (48 + 255·f²)·s², at most 0.76 of it.
        """
        if self.policy == "absolute":
            return 0.0
        largest = max(self.step) * (max(L_GRECO_FACTORS) if self.policy == "l-greco" else 1.0)
        return max(0.0, 1 - max(largest * largest / 4, 0.76) - 0.01)

    def kernel_key(self) -> KernelKey:
        return KernelKey(
            name=self.name,
            layout=self.layout,
            stochastic=self.rounding == "stochastic",
            absolute=self.policy == "absolute",
            step=self.step[0] if len(self.step) == 1 else None,
        )

    def steps(self, fragment: Fragment) -> Tensor | None:
        """fp32 [num_blocks], since blocks never cross tensors; None for one step, which kernels have in their key.
        Raises ValueError: there are several steps, but not one for each tensor."""
        if len(self.step) == 1:
            return None
        return self._steps(fragment, 0, self.layout.num_blocks(fragment.numel), torch.device("cpu"))

    def _steps(self, fragment: Fragment, first: int, count: int, device: torch.device) -> Tensor:
        """Of the blocks [first, first + count)."""
        if len(self.step) == 1:
            return torch.full((count,), self.step[0], device=device, dtype=torch.float32)
        if len(self.step) != len(fragment.tensors):
            raise ValueError(f"{len(self.step)} steps for {len(fragment.tensors)} tensors")
        steps = torch.empty(count, device=device, dtype=torch.float32)
        for tensor, step in zip(fragment.tensors, self.step, strict=True):
            steps[max(0, tensor.offset // Q4R_BLOCK - first) :] = step
        return steps

    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """k = clamp(round(x ÷ s), −8, 7) with s as it is stored; k + 8 is written."""
        steps = self._steps(fragment, start // Q4R_BLOCK, x.shape[0], x.device)  # [m]
        scales = self._scales(x, magnitude.amax(dim=1), steps)
        s = from_bf16(scales).unsqueeze(1)  # [m, 1]
        ratio = x / torch.where(s == 0, 1.0, s)
        if self.rounding == "nearest":
            codes = ratio.round_()
        else:
            codes = ratio.add_(uniform16(seed, start, x.numel(), x.device).view(x.shape)).floor_()
        codes.clamp_(-8, 7).masked_fill_(s == 0, 0.0)
        return scales, packing.pack(codes.add_(8).to(torch.uint8).view(-1, Q4R_GROUP))

    def _scales(self, blocks: Tensor, absmax: Tensor, steps: Tensor) -> Tensor:
        """Stored scales, int16 [m], of blocks fp32 [m, 256]; absmax is the bits of the largest magnitudes, int32 [m].

        Every scale is large enough for code 7 to reach the largest element: clipping would be a bias.

        The mean square is taken of integers of 11 bits: their sum is exact, so every device may add as it likes.
        """
        if self.policy == "absolute":
            wanted = steps
        else:
            exponent = (absmax >> 23) - 127  # 2^e ≤ absmax < 2^(e+1)
            m = (blocks * power_of_two(10 - exponent).unsqueeze(1)).round_().to(torch.int32)
            total = m.square_().sum(dim=1, dtype=torch.int32)
            # rms = √(total ÷ 256)·2^(e−10), and the product with a power of two is exact.
            wanted = torch.sqrt(total.to(torch.float32)) * steps * power_of_two(exponent - 14)
        scales = to_scale(torch.maximum(wanted, absmax.view(torch.float32) * Q4R_LEAST_SCALE), self.largest_scale)
        return torch.where(absmax < Q4R_SMALLEST_MAGNITUDE, 0, scales).to(torch.int16)

    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor, *, seed: int) -> None:
        """k·s, exact: 4 and 8 significant bits."""
        packing.unpack_into(codes, out.view(-1, Q4R_GROUP))
        out.sub_(8).mul_(scales)


Q4R = Q4rCodec(
    name="q4r",
    code=6,
    block=Q4R_BLOCK,
    code_bits=4,
    largest_scale=largest_scale(8),
    declared=Traits(
        bits_per_element=4.0625,
        exact_decode=True,
        unbiased=True,
        contraction=0.0,
        deterministic=False,
        entropy_coded=True,
    ),
)
