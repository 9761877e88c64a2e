"""The interface of a codec, and its traits.

A codec writes a *fragment*, a flat fp32 vector whose tensors start on multiples of 256, as a *payload* of bytes, and
reads it back. It is a frozen value: `codec_named("topk:k=128")` twice gives two equal codecs. It keeps nothing between
calls; what a sender must remember (a residual, the last payload) the sender passes in.

The size of a payload follows from the fragment alone. If the codec is `entropy_coded`, the blob around the payload is
compressed as a last step (`blob.py`).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from farloop.algo.spec import Fragment, TensorSlot
from farloop.quant.digest import digest
from farloop.quant.errors import BadPayload, NonFiniteError
from farloop.quant.norm import norm_sq

# --- The interface

INFINITY_BITS = 0x7F800000


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a codec promises. Tests check each promise; a run that needs one refuses a codec without it."""

    bits_per_element: float  # bits of a large fragment, scales included; before the entropy stage
    exact_decode: bool  # decoding gives the same fp32 numbers on every machine: anchors need that
    unbiased: bool  # the mean of the decoded numbers, over seeds, is what was encoded
    contraction: float
    """δ: E|x − decoded|² ≤ (1 − δ)|x|² for every x. 0: none is guaranteed, so a residual could grow without bound."""
    deterministic: bool  # the seed changes nothing
    summable: bool = False  # payloads can be added without decoding them
    entropy_coded: bool = False  # its blobs are compressed (zstd level 1)
    warm_start: bool = False  # encodes better when it sees its last payload again
    sparse: bool = False  # most of a delta stays in the residual, so a lost residual costs progress: it is kept on disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec(ABC):
    """One way to write a fragment as bytes."""

    name: str
    code: int  # its number on the wire, 1…255; never reused
    block: int = 1  # elements that share a scale; 1: there are no scales
    beta: float = 0.0  # error feedback: the share of what was lost that the sender adds to its next delta; 0 for none

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What it promises."""

    @abstractmethod
    def payload_bytes(self, fragment: Fragment) -> int:
        """Exact size of the payload of a fragment."""

    @abstractmethod
    def _encode_into(self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int, previous: Tensor | None) -> None:
        """`encode_into` of checked operands."""

    @abstractmethod
    def _tiles(self, payload: Tensor, fragment: Fragment, *, seed: int, device: torch.device) -> Iterator[Tensor]:
        """`decoded_tiles` of a payload of the right size."""

    @abstractmethod
    def _check(self, payload: Tensor, fragment: Fragment) -> None:
        """`validate` of a payload of the right size."""

    def encode_into(
        self, x: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0, previous: Tensor | None = None
    ) -> None:
        """Write the payload of x fp32 [numel] into out uint8 [payload_bytes], on any two devices.

        `seed` is below 2³² and known to the receiver. `previous` is the last payload that this sender wrote of this
        fragment, for the codecs that start from it.

        Raises:
            NonFiniteError: x holds a NaN or an infinity; `out` is meaningless then.
            ValueError: shape, dtype or memory layout are not as above.
        """
        self._require_operands(fragment, out, x=x)
        self._encode_into(x, out, fragment, seed=seed, previous=previous)

    def encode(self, x: Tensor, fragment: Fragment, *, seed: int = 0, previous: Tensor | None = None) -> Tensor:
        """The payload of x, uint8 on x's device. As `encode_into`."""
        out = torch.empty(self.payload_bytes(fragment), dtype=torch.uint8, device=x.device)
        self.encode_into(x, out, fragment, seed=seed, previous=previous)
        return out

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
        """Encode v = fl(x + fl(β·residual)); the residual becomes what v lost, fl(v − decoded), fp32 [numel].

        As `encode_into`; after an error the residual is meaningless too.
        """
        self._require_operands(fragment, out, x=x, residual=residual)
        residual.mul_(finite_weight(self.beta)).add_(x)
        self._encode_into(residual, out, fragment, seed=seed, previous=previous)
        self.decode_add_(out, residual, -1.0, fragment, seed=seed)

    def validate(self, payload: Tensor, fragment: Fragment) -> None:
        """Check a payload from outside.

        What passes decodes to finite numbers, in time and memory that follow from the fragment alone.
        Raises BadPayload: no encoder of this codec can have written these bytes.
        """
        if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
            raise ValueError("a payload is a contiguous, one-dimensional uint8 tensor")
        if payload.numel() != (right := self.payload_bytes(fragment)):
            raise BadPayload(f"{payload.numel()} bytes, {right} are right for {fragment.numel} elements")
        self._check(payload, fragment)

    def decode_into(self, payload: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0) -> None:
        """Write what a valid payload says into out fp32 [numel], on any two devices.

        It does not check the bytes: those from outside go through `validate` first.
        Raises ValueError: shape, dtype or memory layout are not as above.
        """
        self._require_operands(fragment, payload, out=out)
        start = 0
        for tile in self._tiles(payload, fragment, seed=seed, device=out.device):
            out[start : start + tile.numel()].copy_(tile)
            start += tile.numel()

    def decode(self, payload: Tensor, fragment: Fragment, *, seed: int = 0) -> Tensor:
        """fp32 [numel] on the payload's device. As `decode_into`."""
        out = torch.empty(fragment.numel, dtype=torch.float32, device=payload.device)
        self.decode_into(payload, out, fragment, seed=seed)
        return out

    def decoded_tiles(
        self, payload: Tensor, fragment: Fragment, *, seed: int = 0, device: torch.device | None = None
    ) -> Iterator[Tensor]:
        """The decoded numbers from first to last, in pieces of `TILE` elements and a shorter last one.

        All pieces may be the same buffer: use one, or change it, before asking for the next.
        """
        self._require_operands(fragment, payload)
        yield from self._tiles(payload, fragment, seed=seed, device=device or payload.device)

    def norm_sq(self, payload: Tensor, fragment: Fragment, *, seed: int = 0) -> float:
        """The squared norm of what a valid payload decodes to, without decoding all of it at once."""
        total = 0.0
        for tile in self.decoded_tiles(payload, fragment, seed=seed):
            total = norm_sq(tile, total)
        return total

    def decode_add_(self, payload: Tensor, acc: Tensor, weight: float, fragment: Fragment, *, seed: int = 0) -> None:
        """acc += weight · decoded, with two roundings: u = fl(w·t), acc = fl(acc + u), w = fl(weight).

        Raises ValueError: `weight` is not finite in fp32, or as `decode_into`.
        """
        self._require_operands(fragment, payload, acc=acc)
        w = torch.tensor(finite_weight(weight), dtype=torch.float32, device="cpu")
        start = 0
        for t in self._tiles(payload, fragment, seed=seed, device=acc.device):
            # Two operations, two roundings: `add_(t, alpha=weight)` may be compiled to a fused multiply-add.
            u = t.mul_(w)
            acc[start : start + u.numel()].add_(u)
            start += u.numel()

    def apply_into(self, payload: Tensor, base: Tensor, out: Tensor, fragment: Fragment, *, seed: int = 0) -> int:
        """out = fl(base + decoded), bit for bit as `decode_add_` with a weight of 1 does it; `out` may be `base`.
        Returns the digest of `out`. Raises as `decode_into`."""
        if out is not base:
            out.copy_(base)
        self.decode_add_(payload, out, 1.0, fragment, seed=seed)
        return digest(out)

    def sum_into(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        acc: Tensor,
        fragment: Fragment,
        *,
        seeds: Sequence[int],
    ) -> None:
        """acc = Σ weight · decoded, bit for bit as `decode_add_` of each in order to zero, but maybe faster."""
        acc.zero_()
        for payload, weight, seed in zip(payloads, weights, seeds, strict=True):
            self.decode_add_(payload, acc, weight, fragment, seed=seed)

    def _require_operands(self, fragment: Fragment, payload: Tensor, **vectors: Tensor) -> None:
        """Raise ValueError unless the payload has the right size and all vectors are fp32 [numel]."""
        for what, vector in vectors.items():
            require_flat(vector, torch.float32, what, numel=fragment.numel)
        require_flat(payload, torch.uint8, "a payload", numel=self.payload_bytes(fragment))


def flat(numel: int) -> Fragment:
    """A fragment that is one plain vector, for callers without a model."""
    return Fragment(index=0, slot=0, numel=numel, tensors=(TensorSlot(name="x", shape=(numel,), offset=0),))


SharedPolicy = Literal["equal", "l-greco"]

L_GRECO_SHARES = (1.0, 0.25, 0.35, 0.5, 0.7, 1.41, 2.0, 2.83, 4.0)
"""Multiples of `topk`'s k and `lowrank`'s rank from which the coordinator may choose for a tensor. The first is the
equal choice."""


def of_tensors(given: tuple[int, ...], fragment: Fragment) -> tuple[int, ...]:
    """A number for each tensor of the fragment, where one may be given for all."""
    return given * len(fragment.tensors) if len(given) == 1 else given


def finite_weight(weight: float) -> float:
    """`weight` rounded to fp32. Raises ValueError if that is not finite."""
    rounded = torch.tensor(weight, dtype=torch.float32, device="cpu").item()
    if not math.isfinite(rounded):
        raise ValueError(f"a weight must be finite in fp32, not {weight}")
    return rounded


def require_flat(tensor: Tensor, dtype: torch.dtype, what: str, numel: int) -> None:
    """Raise ValueError unless the tensor is contiguous, one-dimensional, and of this length."""
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{what} must be a contiguous, one-dimensional {dtype} tensor, not {tensor.dtype} {list(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
    if tensor.numel() != numel:
        raise ValueError(f"{what} has {tensor.numel()} elements, {numel} are right")


def finite_magnitude(x: Tensor, start: int = 0) -> Tensor:
    """The bits of x fp32 without their signs, int32. `start` is the index of x[0] in what is encoded.

    Raises NonFiniteError: x holds a NaN or an infinity.
    """
    # On integer bits, because floating-point maxima may drop a NaN (SIMD and GPU do).
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    if magnitude.numel() and int(magnitude.max()) >= INFINITY_BITS:
        raise NonFiniteError(start + int((magnitude >= INFINITY_BITS).nonzero()[0]))
    return magnitude
