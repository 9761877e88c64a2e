"""What kernels of a block format do: one interface, for every backend.

A backend writes the bytes of the reference (`formats/`): hardware chooses the kernel, never the bytes. All operands of
a call lie on one device.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from farloop.quant.packing import Layout

NORM_TILE = 4096  # elements of one sum of squares of `norm.py`; a power of two that divides `algo.spec.TILE`


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelKey:
    """What selects the kernels of a codec. Everything but name and layout concerns `q4r` only."""

    name: str
    layout: Layout
    stochastic: bool = False  # how codes are rounded
    absolute: bool = False  # steps are scales, not multiples of a block's rms
    step: float | None = 1.0  # of every block, for a call without steps; None: the call must bring them


@dataclass(frozen=True, slots=True, kw_only=True)
class Encode:
    """Write the payload of the elements [start, start + n), of `numel` in all, into the whole payload `out`.

    v = x, or cast(x, local's dtype) − local; then v = fl(v + fl(β·residual)), and the residual becomes
    fl(v − decoded). The elements after the n-th up to the next multiple of 256 count as 0 and are written too: they are
    the padding of a tensor, or of the last block.
    """

    x: Tensor  # fp32 [n]
    out: Tensor  # uint8 [payload bytes of `numel`], at any address
    numel: int
    local: Tensor | None = None  # fp32, bf16 or fp16 [n]; on CPUs alone
    residual: Tensor | None = None  # fp32 [n]
    beta: float = 0.0
    seed: int = 0
    steps: Tensor | None = None  # fp32 [num_blocks of the fragment]
    start: int = 0  # a multiple of 256
    ahead: int = 0
    """Where `out` is the payload of a part of a fragment: x begins at the fragment's element start + ahead, from which
    random numbers and steps are counted; a multiple of 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """Nesterov step, payload of target − anchor, and the anchor plus what that payload decodes to, in one pass.

    m' = fl(fl(μ·m) + d), g = fl(fl(fl(μ·m') + d)·ν), t' = fl(t − g), as `algo.outer_optimizers` does it; without a
    momentum (plain SGD) μ is 0 and g = fl(d·ν). `out` becomes the payload of d' = fl(t' − a), and a' = fl(a + decoded).
    d is fl(scale · delta), or fl(scale · Σ fl(weight · decoded)) of payloads of the same format. All tensors but `out`
    and the payloads are fp32 [numel]; the new ones may be the old ones.
    """

    delta: Tensor | None = None  # None: the sum of the payloads
    payloads: Sequence[Tensor] = ()
    weights: Sequence[float] = ()
    scale: float = 1.0
    target: Tensor
    momentum: Tensor | None
    anchor: Tensor
    lr: float
    mu: float
    out: Tensor
    new_target: Tensor
    new_momentum: Tensor | None
    new_anchor: Tensor
    seed: int = 0
    steps: Tensor | None = None
    measured: bool = True  # otherwise it finds out nothing: no sums, digests of 0, and no bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an outer step's pass finds out besides: of the unscaled delta, and of the new tensors."""

    tile_sums: list[float]
    """Sums of squares of the delta, one for each `NORM_TILE` elements, as `norm.py` defines them."""
    anchor_digest: int
    target_digest: int
    momentum_digest: int  # 0 without a momentum
    largest: float  # magnitude in the new tensors; infinity if one is not finite


class BlockKernels(ABC):
    """Fused operations of one codec on one kind of device."""

    @abstractmethod
    def encode(self, call: Encode) -> int:
        """Returns the index in x of the first v that is not finite, or −1; after an error, `out` is meaningless."""

    def outer(self, step: OuterStep) -> int | Found:
        """Returns the index of the first d' that is not finite: all outputs are meaningless then. Else what was found
        out. On CPUs alone, where coordinators compute."""
        raise NotImplementedError

    @abstractmethod
    def add(self, payloads: Sequence[Tensor], weights: Sequence[float], acc: Tensor, *, overwrite: bool) -> None:
        """acc (+)= Σ fl(weight · decoded), payload after payload, acc fp32 [numel]; `overwrite` begins at +0."""

    def apply(self, payload: Tensor, base: Tensor, out: Tensor) -> int | None:
        """out = fl(base + decoded), fp32 [numel], and its digest, in one pass; `out` may be `base`. None: not done."""
        return None

    def tile_sums(self, payload: Tensor, numel: int) -> list[float] | None:
        """Sums of squares of what a payload decodes to, one for each `NORM_TILE` elements, as `norm.py` defines them;
        None: decode it, and sum that."""
        return None

    @abstractmethod
    def decode_into(self, payload: Tensor, out: Tensor, *, numel: int, start: int = 0) -> None:
        """out = the decoded elements [start, start + len(out)) of a fragment of `numel`, every bit of them."""
