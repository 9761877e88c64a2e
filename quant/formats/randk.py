"""`randk`: 16 of every 256 elements, drawn at random, times 16, in bf16. 1 bit per element, unbiased.

The compressor of MASHA1 (arXiv 2110.03313): Rand-k, Q(x) = (d/k)·Σ xᵢeᵢ over k of d places drawn without replacement.
Sender and receiver draw them from the seed, so no place is sent. E|x − Q(x)|² = (d/k − 1)·|x|², 15 times the squared
norm, which a mean over nodes divides by their number only. For comparison.

Temporaries are 2¹⁸ elements, and the entries.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.codec import Traits
from farloop.quant.errors import BadPayload
from farloop.quant.formats.sparse import Chunks, SparseCodec, chunks_of, require_finite
from farloop.quant.kernels.dispatch import fast_sparse
from farloop.quant.packing import BF16_LARGEST, bf16_bits, from_bf16, words

BLOCK = 256
ROUNDING = 0x5851F42D
"""Makes the seed of the rounding from that of the places: the words of drawn places are small, so not random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandkCodec(SparseCodec):
    fraction: float = 1 / 16  # of a block of d elements, k = ⌈d · fraction⌉ are sent

    @property
    def traits(self) -> Traits:
        return Traits(
            bits_per_element=16 * self._kept(BLOCK) / BLOCK,
            exact_decode=True,
            unbiased=True,
            contraction=0.0,
            deterministic=False,
        )

    def payload_bytes(self, fragment: Fragment) -> int:
        return 2 * sum(chunks.count * self._kept(chunks.length) for chunks in _chunks(fragment))

    def _encode_into(self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int, previous: Tensor | None) -> None:
        # Unbiased up to one rounding of (d/k)·x, and up to the largest bf16.
        require_finite(x)
        entry = 0
        for chunks in _chunks(fragment):
            index = self._drawn(chunks, seed, x.device)
            scaled = chunks.of(x).gather(1, index).view(-1) * (chunks.length / index.shape[1])
            bits = _to_bf16_by_lot(scaled, words(seed ^ ROUNDING, entry, scaled.numel(), x.device))
            out[2 * entry : 2 * (entry + scaled.numel())].copy_(bits.view(torch.uint8))
            entry += scaled.numel()

    def entries(
        self, payload: Tensor, fragment: Fragment, seed: int, device: torch.device
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The elements of each block, by the order of their places."""
        entry = 0
        for chunks in _chunks(fragment):
            places = chunks.places(self._drawn(chunks, seed, device)).view(-1)
            yield places, from_bf16(bf16_bits(payload[2 * entry : 2 * (entry + places.numel())]).to(device))
            entry += places.numel()

    def _check(self, payload: Tensor, fragment: Fragment) -> None:
        if bool(((bf16_bits(payload) & 0x7FFF) > BF16_LARGEST).any()):
            raise BadPayload("a number is not finite")

    def _kept(self, length: int) -> int:
        return math.ceil(length * self.fraction)

    def _drawn(self, chunks: Chunks, seed: int, device: torch.device) -> Tensor:
        """Rising places inside each block, int64 [count, k]: the k elements with the smallest words."""
        if (fast := fast_sparse(device)) is not None:
            places: Tensor = fast.drawn(chunks.start, chunks.count, chunks.length, self._kept(chunks.length), seed)
            return places
        lots = words(seed, chunks.start, chunks.count * chunks.length, device).view(chunks.count, chunks.length)
        # No two keys are equal: of equal words, the earlier elements are taken.
        key = (lots << 8) | torch.arange(chunks.length, device=device, dtype=torch.int64)
        drawn = key.topk(self._kept(chunks.length), dim=1, largest=False, sorted=False).values & (BLOCK - 1)
        return drawn.sort(dim=1).values


def _chunks(fragment: Fragment) -> Iterator[Chunks]:
    for tensor in fragment.tensors:
        yield from chunks_of(tensor.offset, tensor.numel, BLOCK)


def _to_bf16_by_lot(x: Tensor, lots: Tensor) -> Tensor:
    """x fp32, random words int64 → bf16 bits int16: up if the half that is cut off and 16 random bits carry."""
    bits = x.view(torch.int32)
    # An infinity, made by d/k, has the bits next to the largest number's: the clamp takes it too.
    magnitude = ((bits & 0x7FFFFFFF) + (lots & 0xFFFF).to(torch.int32)) >> 16
    return (magnitude.clamp_(max=BF16_LARGEST) | ((bits >> 16) & 0x8000)).to(torch.int16)


RANDK = RandkCodec(name="randk", code=8, block=BLOCK)
