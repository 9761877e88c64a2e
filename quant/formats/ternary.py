"""`ternary`: −1, 0 or 1 times one scale per tensor, at random, then zstd. 1.23 bits per element; no error feedback.

TernGrad (arXiv 1705.07878): t = sign(x) with probability |x| ÷ s, else 0, so the mean of t·s is x. The fewer elements
are as large as s, the more noise there is, so the paper first clips at 2.5 standard deviations; clipping loses
something, and only `clip=0` is unbiased. The mean squared error of an element is |x|·(s − |x|): in sum about the
squared norm, without a bound below it, so a residual could grow forever.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import TILE, Fragment
from farloop.quant import packing
from farloop.quant.codec import Codec, Traits
from farloop.quant.errors import BadPayload
from farloop.quant.formats.sparse import largest_bits, spans
from farloop.quant.kernels.dispatch import fast_sparse
from farloop.quant.norm import norm_sq
from farloop.quant.packing import BF16_LARGEST, SMALLEST_SCALE, aligned, bf16_bits, check_scales, from_bf16, uniform16

GROUP = 64  # elements whose codes are packed together; tensors start on multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class TernaryCodec(Codec):
    """Payload: `[scales bf16 × tensors][zeros up to a multiple of 64][codes, 2 bits each]`; 1 is s, 2 is −s."""

    clip: float = 2.5  # In units of the rms of a tensor; 0 for no clipping. The paper's choice.

    @property
    def traits(self) -> Traits:
        return Traits(
            bits_per_element=2.0,
            exact_decode=True,
            unbiased=self.clip == 0,
            contraction=0.0,
            deterministic=False,
            entropy_coded=True,
        )

    def payload_bytes(self, fragment: Fragment) -> int:
        return _codes_start(fragment) + -(-fragment.numel // GROUP) * GROUP // 4

    def _encode_into(self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int, previous: Tensor | None) -> None:
        scales = torch.tensor(self._scales(x, fragment), dtype=torch.int16, device=x.device)
        out[: 2 * scales.numel()].copy_(scales.view(torch.uint8))
        out[2 * scales.numel() : _codes_start(fragment)] = 0
        if (fast := fast_sparse(x.device, out.device)) is not None:
            for span, s in zip(spans(fragment), from_bf16(scales).tolist(), strict=True):
                whole = span.start + (span.stop - span.start) // GROUP * GROUP
                fast.thrown(x[span.start : whole], s, seed, span.start, out[_code_range(fragment, span.start, whole)])
                if whole < span.stop:
                    last = _whole_groups(x[whole : span.stop]).view(-1)
                    fast.thrown(last, s, seed, whole, out[_code_range(fragment, whole, whole + GROUP)])
            return
        for start in range(0, fragment.numel, TILE):
            groups = _whole_groups(x[start : start + TILE])
            s = _scale_of_groups(scales, fragment, start, groups.shape[0])
            u = uniform16(seed, start, groups.numel(), x.device).view(-1, GROUP)
            # Not clipped beforehand: above s, the ratio is above every u.
            chosen = (groups.abs() / torch.where(s == 0, 1.0, s) > u) & (s != 0)
            codes = chosen.to(torch.uint8) << (groups < 0).to(torch.uint8)
            out[_code_range(fragment, start, start + groups.numel())].copy_(packing.pack(codes, bits=2))

    def _tiles(self, payload: Tensor, fragment: Fragment, *, seed: int, device: torch.device) -> Iterator[Tensor]:
        scales = _stored_scales(payload, fragment).to(device)
        for start in range(0, fragment.numel, TILE):
            codes = _codes(payload, fragment, start).to(scales.device)
            s = _scale_of_groups(scales, fragment, start, codes.shape[0])
            t = (codes & 1).to(torch.float32).sub_(codes >> 1)
            yield t.mul_(s).view(-1)[: fragment.numel - start]

    def _check(self, payload: Tensor, fragment: Fragment) -> None:
        check_scales(_stored_scales(payload, fragment), BF16_LARGEST)
        if bool(payload[2 * len(fragment.tensors) : _codes_start(fragment)].any()):
            raise BadPayload("the bytes between scales and codes are not zero")
        for start in range(0, fragment.numel, TILE):
            codes = _codes(payload, fragment, start)
            if bool((codes == 3).any()):
                raise BadPayload("3 is no code")
            if bool(codes.view(-1)[fragment.numel - start :].any()):
                raise BadPayload("the tail of the last group is not zero")

    def _scales(self, x: Tensor, fragment: Fragment) -> list[int]:
        """Bits of the stored scale of every tensor: the largest magnitude that is left after clipping, rounded up."""
        scales = []
        for tensor, span in zip(fragment.tensors, spans(fragment), strict=True):
            square = norm_sq(x[span]) if self.clip > 0 and tensor.numel > 0 else math.inf
            if math.isfinite(square):
                # σ about zero: about the mean, a tensor whose elements are all alike would be clipped to nothing.
                # norm_sq adds in one order everywhere, and IEEE rounds a root, a quotient and a product alike.
                sigma = math.sqrt(square / tensor.numel)
                limit = int(torch.tensor(self.clip * sigma, dtype=torch.float32, device="cpu").view(torch.int32))
                bits = 0
                for start in range(span.start, span.stop, TILE):
                    if bits < limit:  # most tensors have an element above it, and a look at the first ones is enough
                        bits = max(bits, largest_bits(x, slice(start, min(start + TILE, span.stop))))
                bits = min(bits, limit)
            else:
                bits = largest_bits(x, span)
            bits = min((bits + 0xFFFF) >> 16, BF16_LARGEST)
            scales.append(bits if bits >= SMALLEST_SCALE else 0)
        return scales


def _scale_of_groups(scales: Tensor, fragment: Fragment, start: int, num_groups: int) -> Tensor:
    """The scale of each group of the tile at `start`: bf16 bits int16 [tensors] → fp32 [num_groups, 1]."""
    offsets = torch.tensor([tensor.offset for tensor in fragment.tensors], device=scales.device, dtype=torch.int64)
    groups = torch.arange(start, start + num_groups * GROUP, GROUP, device=scales.device, dtype=torch.int64)
    return from_bf16(scales)[torch.bucketize(groups, offsets, right=True) - 1].unsqueeze(1)


def _codes_start(fragment: Fragment) -> int:
    return aligned(2 * len(fragment.tensors))


def _code_range(fragment: Fragment, start: int, stop: int) -> slice:
    """Where the codes of the elements [start, stop) lie in a payload; both are multiples of `GROUP`."""
    first = _codes_start(fragment)
    return slice(first + start // 4, first + stop // 4)


def _stored_scales(payload: Tensor, fragment: Fragment) -> Tensor:
    return bf16_bits(payload[: 2 * len(fragment.tensors)])


def _codes(payload: Tensor, fragment: Fragment, start: int) -> Tensor:
    """Codes of the tile at `start`, uint8 [groups, 64]."""
    num_groups = -(-min(TILE, fragment.numel - start) // GROUP)
    codes = torch.empty(num_groups, GROUP, dtype=torch.uint8, device=payload.device)
    packing.unpack_into(payload[_code_range(fragment, start, start + codes.numel())], codes, bits=2)
    return codes


def _whole_groups(part: Tensor) -> Tensor:
    """fp32 [groups, 64], with zeros added up to the end of the last."""
    missing = -part.numel() % GROUP
    return (torch.cat((part, part.new_zeros(missing))) if missing else part).view(-1, GROUP)


TERNARY = TernaryCodec(name="ternary", code=10)
