"""Base class of block formats: elements side by side share a scale, and each has a code of a few bits.

It has what these formats share: sizes, the walk over tiles, the check that all numbers are finite. A format adds the
arithmetic of its blocks. Kernels write the same bytes faster (`kernels/`).

A payload is `[scales bf16 × num_blocks][zeros up to a multiple of 64][codes]`, little-endian: tables in `README.md`.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farloop.algo.spec import TILE, Fragment
from farloop.quant.codec import Codec, Traits, finite_magnitude, finite_weight, require_flat
from farloop.quant.errors import BadPayload, NonFiniteError
from farloop.quant.formats.sparse import padding, within
from farloop.quant.kernels.dispatch import fast_path
from farloop.quant.kernels.interface import BlockKernels, Encode, KernelKey
from farloop.quant.norm import total_of
from farloop.quant.packing import Layout, bf16_bits, check_scales, from_bf16, unpack_into


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCodec(Codec):
    """A format of equal blocks, a power of two of at most 256 elements each."""

    code_bits: int
    largest_scale: int = 0
    """Bits of the largest bf16 scale that an encoder writes; formats without scales check their values instead."""
    signed_scales: bool = False
    padding_code: int | None = None
    """For formats without a code for zero: what an encoder writes for zeros, hence for padding.

    Their decoder puts zeros wherever the fragment has no tensor, whatever the codes there. Otherwise anchors would
    leave zero between tensors, and every later delta would send that back.
    """
    declared: Traits
    layout: Layout = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", Layout(block=self.block, code_bits=self.code_bits))

    @property
    def traits(self) -> Traits:
        return self.declared

    @abstractmethod
    def encode_tile(
        self, x: Tensor, magnitude: Tensor, *, start: int, fragment: Fragment, seed: int
    ) -> tuple[Tensor, Tensor]:
        """(x fp32 [m, block], its bits without the sign) → (scales int16 [m], codes uint8 [bytes]).

        x[0, 0] is element `start` of the fragment; all of x is finite. Formats without scales return none, int16 [0].
        """

    @abstractmethod
    def decode_tile_into(self, scales: Tensor, codes: Tensor, out: Tensor, *, seed: int) -> None:
        """(scales fp32 [m, 1], codes uint8 [bytes]) → out fp32 [m, block], all of it written."""

    def check_tile(self, scales: Tensor, codes: Tensor) -> None:
        """Raise BadPayload unless every element decodes to a finite number by exact arithmetic. Every code is good."""
        check_scales(scales, self.largest_scale, signed=self.signed_scales)

    def payload_bytes(self, fragment: Fragment) -> int:
        return self.layout.payload_bytes(fragment.numel)

    def kernel_key(self) -> KernelKey:
        return KernelKey(name=self.name, layout=self.layout)

    def steps(self, fragment: Fragment) -> Tensor | None:
        """A number for each block that the encoder's arithmetic takes, fp32 [num_blocks]; None: that of its key."""
        return None

    def largest(self, payload: Tensor, fragment: Fragment) -> float:
        """No magnitude that a valid payload decodes to is larger. It reads the scales; without them it is infinity."""
        scales = bf16_bits(payload[: self.layout.scale_bytes(fragment.numel)])
        if not scales.numel():
            return math.inf
        return 2.0 ** (self.code_bits - 1) * float(from_bf16(scales.bitwise_and(0x7FFF).max()))

    # --- Operations: by kernels if there are any for the operands' device, else by the reference

    def _encode_into(self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int, previous: Tensor | None) -> None:
        self.encode_run(x, out, fragment, fragment, index=0, start=0, seed=seed)

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
        """As `Codec.encode_feedback_`; kernels do it in one pass."""
        self._require_operands(fragment, out, x=x, residual=residual)
        self.encode_run(x, out, fragment, fragment, index=0, start=0, seed=seed, residual=residual)

    def encode_run(
        self,
        x: Tensor,
        out: Tensor,
        fragment: Fragment,
        part: Fragment,
        *,
        index: int,
        start: int,
        seed: int = 0,
        residual: Tensor | None = None,
    ) -> None:
        """Write the elements of the fragment from `index` on, x fp32 [n], into the payload of a part of the fragment:
        `out` uint8 [payload_bytes(part)], of which x[0] is the element `start`.

        A part is some of the fragment's blocks of 256, side by side in a fragment of their own. Its payload has the
        scales and codes that the whole one has (`slices`). A residual fp32 [n] is added as by `encode_feedback_`.
        `index`, `start` and n are multiples of 256, and start ≤ index. Raises as `encode_into`.
        """
        numel = part.numel
        for what, vector in (("x", x), ("residual", residual)):
            if vector is not None:
                require_flat(vector, torch.float32, what, numel=x.numel())
        require_flat(out, torch.uint8, "a payload", numel=self.payload_bytes(part))
        operands = (x, out) if residual is None else (x, out, residual)
        if (fast := self._kernels(*operands, only_encode=residual is None)) is not None:
            call = Encode(
                x=x, out=out, numel=numel, residual=residual, beta=self.beta, seed=seed, steps=self.steps(fragment),
                start=start, ahead=index - start,
            )  # fmt: skip
            if (bad := fast.encode(call)) >= 0:
                raise NonFiniteError(index + bad)
            return
        if residual is None:
            self._encode_by_reference(x, out, fragment, numel, index=index, start=start, seed=seed)
            return
        residual.mul_(finite_weight(self.beta)).add_(x)
        self.encode_run(residual, out, fragment, part, index=index, start=start, seed=seed)
        for at in range(0, x.numel(), TILE):
            lost = residual[at : at + TILE]
            decoded = torch.empty_like(lost)
            self._decode_at(out, part, start + at, decoded, seed)
            lost.sub_(decoded)

    def slices(
        self, fragment: Fragment, part: Fragment, runs: Iterable[tuple[int, int, int]]
    ) -> Iterator[tuple[slice, slice]]:
        """Where the same bytes are in the payload of a fragment and in that of a part of it, whose runs of blocks are
        (first element in the fragment, first in the part, count)."""
        for index, start, count in runs:
            whole, own = (self.layout.parts(f.numel, at, count) for f, at in ((fragment, index), (part, start)))
            yield from zip(whole, own, strict=True)

    def decode_into(self, payload: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0) -> None:
        self._require_operands(fragment, payload, out=out)
        if (fast := self._kernels(payload, out)) is None:
            self.decode_by_reference(payload, out, fragment, seed=seed)
        else:
            fast.decode_into(payload, out, numel=fragment.numel)

    def _tiles(self, payload: Tensor, fragment: Fragment, *, seed: int, device: torch.device) -> Iterator[Tensor]:
        numel = fragment.numel
        buffer = torch.empty(min(TILE, numel), dtype=torch.float32, device=device)
        fast = self._kernels(payload, buffer)
        for start in range(0, numel, TILE):
            tile = buffer[: min(TILE, numel - start)]
            if fast is None:
                self._decode_at(payload, fragment, start, tile, seed)
            else:
                fast.decode_into(payload, tile, numel=numel, start=start)
            yield tile

    def decode_add_(self, payload: Tensor, acc: Tensor, weight: float, fragment: Fragment, *, seed: int = 0) -> None:
        if (fast := self._kernels(payload, acc)) is None:
            Codec.decode_add_(self, payload, acc, weight, fragment, seed=seed)
            return
        self._require_operands(fragment, payload, acc=acc)
        fast.add([payload], [finite_weight(weight)], acc, overwrite=False)

    def norm_sq(self, payload: Tensor, fragment: Fragment, *, seed: int = 0) -> float:
        """As `Codec.norm_sq`; kernels read the payload alone."""
        fast = self._kernels(payload)
        sums = None if fast is None else fast.tile_sums(payload, fragment.numel)
        return Codec.norm_sq(self, payload, fragment, seed=seed) if sums is None else total_of(sums)

    def apply_into(self, payload: Tensor, base: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0) -> int:
        """As `Codec.apply_into`; kernels do it in one pass."""
        self._require_operands(fragment, payload, base=base, out=out)
        fast = self._kernels(payload, base, out)
        found = None if fast is None else fast.apply(payload, base, out)
        return Codec.apply_into(self, payload, base, out, fragment, seed=seed) if found is None else found

    def sum_into(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        acc: Tensor,
        fragment: Fragment,
        *,
        seeds: Sequence[int],
    ) -> None:
        """As `Codec.sum_into`; kernels read all payloads of a tile while its sum is in the cache."""
        fast = self._kernels(acc, *payloads) if payloads else None
        if fast is None:
            Codec.sum_into(self, payloads, weights, acc, fragment, seeds=seeds)
            return
        for payload in payloads:
            self._require_operands(fragment, payload, acc=acc)
        if not len(payloads) == len(weights) == len(seeds):
            raise ValueError(f"{len(payloads)} payloads, but {len(weights)} weights and {len(seeds)} seeds")
        fast.add(payloads, [finite_weight(weight) for weight in weights], acc, overwrite=True)

    def _kernels(self, *operands: Tensor, only_encode: bool = False) -> BlockKernels | None:
        return fast_path(self.kernel_key(), *(operand.device for operand in operands), only_encode=only_encode)

    # --- The reference, in plain torch
    #
    # It works tile by tile, so temporaries stay small and their memory warm. On 32 Mi elements and 2 cores with
    # AVX-512, `q4` encodes 4.7 GB of fp32 a second like this, and 1.4 all at once.

    def encode_by_reference(self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0) -> None:
        """Define the bytes of `encode_into`."""
        self._encode_by_reference(x, out, fragment, fragment.numel, index=0, start=0, seed=seed)

    def _encode_by_reference(
        self, x: Tensor, out: Tensor, fragment: Fragment, numel: int, *, index: int, start: int, seed: int
    ) -> None:
        """x[0] is element `index` of the fragment, and element `start` of the `numel` whose payload is `out`."""
        layout = self.layout
        out[layout.gap(numel)] = 0
        for at in range(0, x.numel(), TILE):
            part = x[at : at + TILE]
            if missing := -part.numel() % self.block:
                part = torch.cat((part, part.new_zeros(missing)))
            magnitude = finite_magnitude(part, index + at).view(-1, self.block)
            part = part.view(-1, self.block)
            scales, codes = self.encode_tile(part, magnitude, start=index + at, fragment=fragment, seed=seed)
            at_scales, at_codes = layout.parts(numel, start + at, part.numel())
            out[at_scales].copy_(scales.view(torch.uint8))  # as bytes: `out` may start at an odd address
            out[at_codes].copy_(codes)

    def decode_by_reference(self, payload: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0) -> None:
        """Define the numbers of `decode_into`."""
        for start in range(0, fragment.numel, TILE):
            self._decode_at(payload, fragment, start, out[start : start + TILE], seed)

    def _decode_at(self, payload: Tensor, fragment: Fragment, start: int, out: Tensor, seed: int) -> None:
        """out = the decoded elements [start, start + len(out)); `start` is a block's first."""
        length = self.layout.padded(out.numel())
        whole = out if length == out.numel() else torch.empty(length, dtype=torch.float32, device=out.device)
        scales, codes = self._stored(payload, fragment.numel, start, length)
        self._decode_tile(scales.to(out.device), codes.to(out.device), whole, seed)
        if whole is not out:
            out.copy_(whole[: out.numel()])
        if self.padding_code is not None:
            for gap in within(padding(fragment, fragment.numel), start, out.numel()):
                out[gap] = 0.0

    def _decode_tile(self, scales: Tensor, codes: Tensor, out: Tensor, seed: int) -> None:
        self.decode_tile_into(from_bf16(scales).unsqueeze(1), codes, out.view(-1, self.block), seed=seed)

    def _stored(self, payload: Tensor, numel: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Scales, bf16 bits int16, and codes of the blocks of the elements [start, start + length)."""
        at_scales, at_codes = self.layout.parts(numel, start, length)
        return bf16_bits(payload[at_scales]), payload[at_codes]

    def _check(self, payload: Tensor, fragment: Fragment) -> None:
        numel, layout = fragment.numel, self.layout
        if bool(payload[layout.gap(numel)].any()):
            raise BadPayload("the bytes between scales and codes are not zero")
        padded = layout.padded(numel)
        for start in range(0, numel, TILE):
            length = min(TILE, padded - start)
            scales, codes = self._stored(payload, numel, start, length)
            self.check_tile(scales, codes)
            if self.padding_code is not None:
                self._check_padding(codes, self.padding_code, within(padding(fragment, padded), start, length))
        if self.padding_code is None and (missing := padded - numel):
            last = torch.empty(self.block, device=payload.device, dtype=torch.float32)
            self._decode_tile(*self._stored(payload, numel, padded - self.block, self.block), last, 0)
            if bool(last[-missing:].any()):
                raise BadPayload("the tail of the last block is not zero")

    def _check_padding(self, packed: Tensor, right: int, gaps: list[slice]) -> None:
        codes = packed.new_empty(packed.numel() * 8 // self.code_bits)
        unpack_into(packed, codes.view(-1, self.block), self.code_bits)
        if any(bool((codes[gap] != right).any()) for gap in gaps):
            raise BadPayload("the padding of a tensor is not zero")
