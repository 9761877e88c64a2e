"""What a codec is: a layout of bytes, and three functions that work on one tile of it.

Everything that formats share stands here: sizes, the walk over tiles, the proof that all is finite, the exact weighted
sum. A format (`reference/q4.py`, …) brings only the arithmetic of its blocks. A faster path brings the same three
functions and must write the same bytes: hardware chooses the kernel, never the bytes.

A payload is `[scales bf16 × num_blocks][zeros up to a multiple of 64][codes]`, little-endian: tables in `README.md`.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farloop.algo.spec import TILE
from farloop.quant.errors import BadPayload, NonFiniteError

CODES_ALIGN = 64
"""The codes start on a multiple of this many bytes: one cache line, and the widest vector load there is."""

_INFINITY_BITS = 0x7F800000

EncodeTile = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(x fp32 [m·block], magnitude int32 [m·block]) → (scales int16 [m] or [0], codes uint8). `magnitude` is x's bits
without the sign, all of them below infinity's."""

DecodeTile = Callable[[Tensor, Tensor, Tensor], None]
"""(scales int16 [m] or [0], codes uint8, out fp32 [m·block]): writes all of `out`."""

CheckTile = Callable[[Tensor, Tensor], None]
"""(scales, codes): raises BadPayload unless every element decodes to a finite number by exact arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """One way to write a flat fp32 fragment as bytes."""

    name: str
    code: int
    """Its number on the wire, 1…255; never reused."""
    block: int
    """Elements that share a scale; 1 where there are no scales. A power of two of at most 256."""
    code_bits: int
    scale_bits: int
    """16 (bf16), or 0 where there are no scales."""
    exact_decode: bool
    """Decoding does not round (code × scale is exact in fp32): asked of everything that anchors are made of."""
    unbiased: bool
    """Its errors have mean zero, whatever is encoded."""
    needs_residual: bool
    """It loses so much that the sender has to add the loss to its next delta (error feedback)."""
    encode_tile: EncodeTile = field(repr=False)
    decode_tile_into: DecodeTile = field(repr=False)
    check_tile: CheckTile = field(repr=False)

    @property
    def bits_per_element(self) -> float:
        """Bits on the wire, scales included; without header and alignment."""
        return self.code_bits + self.scale_bits / self.block

    def payload_bytes(self, numel: int) -> int:
        """Exact size of the payload of `numel` elements."""
        return self._codes_start(numel) + self._code_bytes(self._num_blocks(numel))

    def encode(self, x: Tensor) -> Tensor:
        """The payload of x, uint8 on x's device. As `encode_into`."""
        out = torch.empty(self.payload_bytes(x.numel()), dtype=torch.uint8, device=x.device)
        self.encode_into(x, out)
        return out

    def encode_into(self, x: Tensor, out: Tensor) -> None:
        """Write the payload of x fp32 [numel] into out uint8 [payload_bytes(numel)], on any two devices.

        Raises:
            NonFiniteError: x holds a NaN or an infinity; `out` is meaningless then.
            ValueError: shape, dtype or memory layout are not as above.
        """
        _require_flat(x, torch.float32, "x")
        numel = x.numel()
        _require_flat(out, torch.uint8, "out", numel=self.payload_bytes(numel))
        out[self._scale_bytes(self._num_blocks(numel)) : self._codes_start(numel)] = 0
        # Tile by tile: temporaries stay small, and their memory warm. On 32 Mi elements and 2 cores with AVX-512, `q4`
        # takes 4.7 GB of fp32 a second like this, and 1.4 all at once.
        for start in range(0, numel, TILE):
            part = self._whole_blocks(x[start : start + TILE])
            # On integer bits, because floating-point maxima may drop a NaN (SIMD and GPU do).
            magnitude = part.view(torch.int32) & 0x7FFFFFFF
            if int(magnitude.max()) >= _INFINITY_BITS:
                raise NonFiniteError(start + int((magnitude >= _INFINITY_BITS).nonzero()[0]))
            scales, codes = self.encode_tile(part, magnitude)
            scale_range, code_range = self._ranges(numel, start, part.numel())
            # As bytes: `out` may start at an odd address.
            out[scale_range].copy_(scales.view(torch.uint8))
            out[code_range].copy_(codes)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """fp32 [numel] on the payload's device. As `decode_into`."""
        out = torch.empty(numel, dtype=torch.float32, device=payload.device)
        self.decode_into(payload, out)
        return out

    def decode_into(self, payload: Tensor, out: Tensor) -> None:
        """Write what a valid payload, uint8 [payload_bytes(numel)], says into out fp32 [numel], on any two devices.

        Bytes from outside go through `validate` first; what is decoded here is believed.

        Raises:
            ValueError: shape, dtype or memory layout are not as above.
        """
        _require_flat(out, torch.float32, "out")
        numel = out.numel()
        _require_flat(payload, torch.uint8, "payload", numel=self.payload_bytes(numel))
        whole = numel - numel % self.block
        for start in range(0, whole, TILE):
            self._decode_at(payload, numel, start, out[start : min(start + TILE, whole)])
        if whole < numel:
            out[whole:] = self._last_block(payload, numel, out.device)[: numel - whole]

    def decoded_tiles(self, payload: Tensor, numel: int, device: torch.device | None = None) -> Iterator[Tensor]:
        """The decoded numbers from first to last, in pieces of `TILE` elements and a shorter last one.

        All pieces are the same buffer: use one, or change it, before asking for the next.
        """
        _require_flat(payload, torch.uint8, "payload", numel=self.payload_bytes(numel))
        padded = self._num_blocks(numel) * self.block
        buffer = torch.empty(min(TILE, padded), dtype=torch.float32, device=device or payload.device)
        for start in range(0, numel, TILE):
            self._decode_at(payload, numel, start, buffer[: min(TILE, padded - start)])
            yield buffer[: min(TILE, numel - start)]

    def decode_add_(self, payload: Tensor, acc: Tensor, weight: float) -> None:
        """acc += weight · decoded by the arithmetic of protocol M: u = fl(w·t), acc = fl(acc + u), w = fl(weight).

        Raises:
            ValueError: `weight` is not finite in fp32, or as `decode_into`.
        """
        _require_flat(acc, torch.float32, "acc")
        w = torch.tensor(weight, dtype=torch.float32)
        if not math.isfinite(w.item()):
            raise ValueError(f"a weight must be finite in fp32, not {weight}")
        start = 0
        for t in self.decoded_tiles(payload, acc.numel(), acc.device):
            # Two operations, two roundings: `add_(t, alpha=weight)` may be compiled to a fused multiply-add.
            u = t.mul_(w)
            acc[start : start + u.numel()].add_(u)
            start += u.numel()

    def validate(self, payload: Tensor, numel: int) -> None:
        """Believe a payload of `numel` elements from outside, or raise.

        What passes decodes to finite numbers, without overflow and without subnormal products of code and scale.

        Raises:
            BadPayload: wrong length, a scale or value that is out of range, a pad that is not zero.
        """
        if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
            raise ValueError("a payload is a contiguous, one-dimensional uint8 tensor")
        if payload.numel() != self.payload_bytes(numel):
            raise BadPayload(f"{payload.numel()} bytes, {self.payload_bytes(numel)} are right for {numel} elements")
        if bool(payload[self._scale_bytes(self._num_blocks(numel)) : self._codes_start(numel)].any()):
            raise BadPayload("the bytes between scales and codes are not zero")
        padded = self._num_blocks(numel) * self.block
        for start in range(0, numel, TILE):
            scales, codes = self._tile(payload, numel, start, min(TILE, padded - start), payload.device)
            self.check_tile(scales, codes)
        if numel < padded and bool(self._last_block(payload, numel, payload.device)[numel - padded :].any()):
            raise BadPayload("the tail of the last block is not zero")

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _scale_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.scale_bits // 8

    def _code_bytes(self, num_blocks: int) -> int:
        return num_blocks * self.block * self.code_bits // 8

    def _codes_start(self, numel: int) -> int:
        return -(-self._scale_bytes(self._num_blocks(numel)) // CODES_ALIGN) * CODES_ALIGN

    def _ranges(self, numel: int, start: int, length: int) -> tuple[slice, slice]:
        """Where scales and codes of the elements [start, start + length) lie in a payload of `numel` elements."""
        first, last = start // self.block, (start + length) // self.block
        codes_start = self._codes_start(numel)
        return (
            slice(self._scale_bytes(first), self._scale_bytes(last)),
            slice(codes_start + self._code_bytes(first), codes_start + self._code_bytes(last)),
        )

    def _tile(
        self, payload: Tensor, numel: int, start: int, length: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        scale_range, code_range = self._ranges(numel, start, length)
        # The copy is what makes a view of wider integers legal: received bytes may start at an odd address.
        scales = payload[scale_range].to(device, copy=True).view(torch.int16)
        return scales, payload[code_range].to(device)

    def _decode_at(self, payload: Tensor, numel: int, start: int, out: Tensor) -> None:
        scales, codes = self._tile(payload, numel, start, out.numel(), out.device)
        self.decode_tile_into(scales, codes, out)

    def _last_block(self, payload: Tensor, numel: int, device: torch.device) -> Tensor:
        last = torch.empty(self.block, dtype=torch.float32, device=device)
        self._decode_at(payload, numel, numel - numel % self.block, last)
        return last

    def _whole_blocks(self, part: Tensor) -> Tensor:
        """`part`, with zeros added up to the end of its last block."""
        missing = -part.numel() % self.block
        return torch.cat((part, part.new_zeros(missing))) if missing else part


def _require_flat(tensor: Tensor, dtype: torch.dtype, what: str, numel: int | None = None) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be a contiguous, one-dimensional {dtype} tensor, not {tensor.dtype} {list(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{what} has {tensor.numel()} elements, {numel} are right")
