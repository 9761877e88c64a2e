"""Base classes of block formats, those without a zero code included."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.algo.spec import TILE, Fragment
from farloop.quant.codec import (
    Codec,
    KernelKey,
    Traits,
    finite_magnitude,
    finite_weight,
    require_flat,
    require_payload_size,
)
from farloop.quant.errors import BadPayload, NonFiniteError
from farloop.quant.formats.sparse import padding, within
from farloop.quant.kernels.dispatch import fast_path
from farloop.quant.packing import CODES_ALIGN

# --- Codecs of blocks: elements that lie side by side share a scale, and each has a code of a few bits.
#
# Everything these formats share stands here: sizes, the walk over tiles, the proof that all is finite. A format
# (`reference/q4.py`, …) brings only the arithmetic of its blocks. A faster path (`kernels/`) must write the same bytes:
# hardware chooses the kernel, never the bytes.
#
# A payload is `[scales bf16 × num_blocks][zeros up to a multiple of 64][codes]`, little-endian: tables in `README.md`.


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCodec(Codec):
    """A format of equal blocks, a power of two of at most 256 elements each."""

    code_bits: int
    scale_bits: int
    """16 (bf16), or 0 where there are no scales."""
    declared: Traits

    @property
    def traits(self) -> Traits:
        """What it promises."""
        return self.declared

    @abstractmethod
    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """(x fp32 [m·block], its bits without the sign) → (scales int16 [m] or [0], codes uint8).

        x[0] is element `start` of the fragment; all of x is finite.
        """

    @abstractmethod
    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor) -> None:
        """(scales int16 [m] or [0], codes uint8) → out fp32 [m·block], all of it written."""

    @abstractmethod
    def check_tile(self, scales: Tensor, codes: Tensor) -> None:
        """Raise BadPayload unless every element decodes to a finite number by exact arithmetic."""

    def payload_bytes(self, fragment: Fragment) -> int:
        """Scales, zeros up to a multiple of 64, codes."""
        return self._codes_start(fragment.numel) + self._code_bytes(self._num_blocks(fragment.numel))

    def encode_into(
        self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0, previous: Tensor | None = None
    ) -> None:
        """As `Codec.encode_into`, by the fastest path there is for where x lies."""
        self._require_encodable(x, out, fragment)
        fast = fast_path(self.kernel_key(), x.device, out.device)
        if fast is None:
            self.encode_by_reference(x, out, fragment, seed=seed)
            return
        bad = fast.encode(x, out, numel=fragment.numel, seed=seed, steps=self.steps(fragment))
        if bad >= 0:
            raise NonFiniteError(bad)

    def encode_by_reference(self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0) -> None:
        """The truth, in plain torch."""
        numel = fragment.numel
        out[self._scale_bytes(self._num_blocks(numel)) : self._codes_start(numel)] = 0
        # Tile by tile: temporaries stay small, and their memory warm. On 32 Mi elements and 2 cores with AVX-512, `q4`
        # takes 4.7 GB of fp32 a second like this, and 1.4 all at once.
        for start in range(0, numel, TILE):
            part = self._whole_blocks(x[start : start + TILE])
            magnitude = finite_magnitude(part, start)
            scales, codes = self.encode_tile(part, magnitude, start=start, fragment=fragment, seed=seed)
            scale_range, code_range = self._ranges(numel, start, part.numel())
            # As bytes: `out` may start at an odd address.
            out[scale_range].copy_(scales.view(torch.uint8))
            out[code_range].copy_(codes)

    def decode_into(self, payload: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0) -> None:
        """As `Codec.decode_into`; the seed changes nothing."""
        numel = fragment.numel
        require_flat(out, torch.float32, "out", numel=numel)
        require_flat(payload, torch.uint8, "payload", numel=self.payload_bytes(fragment))
        if (fast := fast_path(self.kernel_key(), payload.device, out.device)) is not None:
            fast.decode_into(payload, out, numel=numel)
            return
        self.decode_by_reference(payload, out)

    def decode_by_reference(self, payload: Tensor, out: Tensor) -> None:
        """The truth, in plain torch."""
        numel = out.numel()
        whole = numel - numel % self.block
        for start in range(0, whole, TILE):
            self._decode_at(payload, numel, start, out[start : min(start + TILE, whole)])
        if whole < numel:
            out[whole:] = self._last_block(payload, numel, out.device)[: numel - whole]

    def decoded_tiles(
        self, payload: Tensor, fragment: Fragment, *, seed: int = 0, device: torch.device | None = None
    ) -> Iterator[Tensor]:
        """As `Codec.decoded_tiles`, with one tile of memory."""
        numel = fragment.numel
        require_flat(payload, torch.uint8, "payload", numel=self.payload_bytes(fragment))
        padded = self._num_blocks(numel) * self.block
        buffer = torch.empty(min(TILE, padded), dtype=torch.float32, device=device or payload.device)
        fast = fast_path(self.kernel_key(), payload.device, buffer.device)
        for start in range(0, numel, TILE):
            tile = buffer[: min(TILE, numel - start)]
            if fast is not None:
                fast.decode_into(payload, tile, numel=numel, start=start)
            else:
                self._decode_at(payload, numel, start, buffer[: min(TILE, padded - start)])
            yield tile

    def validate(self, payload: Tensor, fragment: Fragment) -> None:
        """As `Codec.validate`: wrong length, a scale or value out of range, a pad that is not zero."""
        numel = fragment.numel
        require_payload_size(payload, self.payload_bytes(fragment), fragment)
        if bool(payload[self._scale_bytes(self._num_blocks(numel)) : self._codes_start(numel)].any()):
            raise BadPayload("the bytes between scales and codes are not zero")
        padded = self._num_blocks(numel) * self.block
        for start in range(0, numel, TILE):
            scales, codes = self._tile(payload, numel, start, min(TILE, padded - start), payload.device)
            self.check_tile(scales, codes)
        if numel < padded and bool(self._last_block(payload, numel, payload.device)[numel - padded :].any()):
            raise BadPayload("the tail of the last block is not zero")

    def encode_feedback_(
        self,
        x: Tensor,
        residual: Tensor,
        out: Tensor,
        fragment: Fragment,
        *,
        seed: int = 0,
        previous: Tensor | None = None,
    ) -> None:
        """As `Codec.encode_feedback_`, in one pass where there is a fast path."""
        self._require_encodable(x, out, fragment)
        require_flat(residual, torch.float32, "residual", numel=fragment.numel)
        fast = fast_path(self.kernel_key(), x.device, residual.device, out.device)
        if fast is None:
            Codec.encode_feedback_(self, x, residual, out, fragment, seed=seed)
            return
        steps = self.steps(fragment)
        bad = fast.encode(x, out, numel=fragment.numel, residual=residual, beta=self.beta, seed=seed, steps=steps)
        if bad >= 0:
            raise NonFiniteError(bad)

    def decode_add_(self, payload: Tensor, acc: Tensor, weight: float, fragment: Fragment, *, seed: int = 0) -> None:
        """As `Codec.decode_add_`, by the fastest path there is for where acc lies."""
        fast = fast_path(self.kernel_key(), payload.device, acc.device)
        if fast is None:
            Codec.decode_add_(self, payload, acc, weight, fragment, seed=seed)
            return
        self._require_decodable([payload], acc, fragment)
        fast.add([payload], [finite_weight(weight)], acc, overwrite=False)

    def sum_into(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        acc: Tensor,
        fragment: Fragment,
        *,
        seeds: Sequence[int],
    ) -> None:
        """As `Codec.sum_into`; a fast path reads all payloads of a tile while its sum is in the cache."""
        fast = fast_path(self.kernel_key(), acc.device, *(payload.device for payload in payloads)) if payloads else None
        if fast is None:
            Codec.sum_into(self, payloads, weights, acc, fragment, seeds=seeds)
            return
        self._require_decodable(payloads, acc, fragment)
        if not len(payloads) == len(weights) == len(seeds):
            raise ValueError(f"{len(payloads)} payloads, but {len(weights)} weights and {len(seeds)} seeds")
        fast.add(payloads, [finite_weight(weight) for weight in weights], acc, overwrite=True)

    def kernel_key(self) -> KernelKey:
        """What chooses its kernels."""
        return KernelKey(name=self.name)

    def steps(self, fragment: Fragment) -> Tensor | None:
        """What the encoder multiplies each block's own scale with, fp32 [num_blocks]; None: nothing."""
        return None

    def _require_encodable(self, x: Tensor, out: Tensor, fragment: Fragment) -> None:
        require_flat(x, torch.float32, "x", numel=fragment.numel)
        require_flat(out, torch.uint8, "out", numel=self.payload_bytes(fragment))

    def _require_decodable(self, payloads: Sequence[Tensor], acc: Tensor, fragment: Fragment) -> None:
        require_flat(acc, torch.float32, "acc", numel=fragment.numel)
        for payload in payloads:
            require_flat(payload, torch.uint8, "payload", numel=self.payload_bytes(fragment))

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


# --- Block formats that have no code for zero. Padding is zero all the same: the layout says where it is.
#
# Without that, anchors would leave zero where no tensor lies, and every delta after it would send that back.


@dataclass(frozen=True, slots=True, kw_only=True)
class ZerolessCodec(BlockCodec):
    """A format whose decoder puts zeros where the fragment has none of its tensors, whatever the codes there."""

    padding_code: int
    """What an encoder writes for zeros, so what stands where padding is."""

    @abstractmethod
    def unpack(self, codes: Tensor) -> Tensor:
        """Packed codes → uint8 [m, block]."""

    def shift_tile_(self, scales: Tensor, tile: Tensor, *, seed: int) -> None:
        """What the seed adds to a decoded tile fp32 [m·block]; nothing, unless a format overrides it."""

    def decode_into(self, payload: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0) -> None:
        """As `Codec.decode_into`."""
        require_flat(out, torch.float32, "out", numel=fragment.numel)
        start = 0
        for tile in self.decoded_tiles(payload, fragment, seed=seed, device=out.device):
            out[start : start + tile.numel()].copy_(tile)
            start += tile.numel()

    def decoded_tiles(
        self, payload: Tensor, fragment: Fragment, *, seed: int = 0, device: torch.device | None = None
    ) -> Iterator[Tensor]:
        """As `Codec.decoded_tiles`, with one tile of memory."""
        numel = fragment.numel
        require_flat(payload, torch.uint8, "payload", numel=self.payload_bytes(fragment))
        padded = self._num_blocks(numel) * self.block
        gaps = padding(fragment, numel)
        buffer = torch.empty(min(TILE, padded), dtype=torch.float32, device=device or payload.device)
        for start in range(0, numel, TILE):
            tile = buffer[: min(TILE, padded - start)]
            scales, codes = self._tile(payload, numel, start, tile.numel(), tile.device)
            self.decode_tile_into(scales, codes, tile)
            self.shift_tile_(scales, tile, seed=seed)
            tile = tile[: numel - start]
            for gap in within(gaps, start, tile.numel()):
                tile[gap] = 0.0
            yield tile

    def validate(self, payload: Tensor, fragment: Fragment) -> None:
        """As `Codec.validate`: wrong length, a scale out of range, a pad that is not what an encoder writes."""
        numel = fragment.numel
        require_payload_size(payload, self.payload_bytes(fragment), fragment)
        num_blocks = self._num_blocks(numel)
        if bool(payload[self._scale_bytes(num_blocks) : self._codes_start(numel)].any()):
            raise BadPayload("the bytes between scales and codes are not zero")
        padded = num_blocks * self.block
        gaps = padding(fragment, padded)
        for start in range(0, numel, TILE):
            length = min(TILE, padded - start)
            scales, packed = self._tile(payload, numel, start, length, payload.device)
            self.check_tile(scales, packed)
            codes = self.unpack(packed).view(-1)
            for gap in within(gaps, start, length):
                if bool((codes[gap] != self.padding_code).any()):
                    raise BadPayload("the padding of a tensor is not zero")
