"""Which kernels run a block codec where. A faster path is chosen here, and nowhere else."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from farloop.quant.codec import KernelKey

_log = logging.getLogger(__name__)


class BlockKernels(Protocol):
    """One format's fused operations on one kind of device. The bytes are those of the reference."""

    def encode(
        self,
        x: Tensor,
        out: Tensor,
        *,
        numel: int,
        local: Tensor | None = None,
        residual: Tensor | None = None,
        beta: float = 0.0,
        seed: int = 0,
        steps: Tensor | None = None,
        start: int = 0,
    ) -> int:
        """Write the payload of the elements [start, start + len(x)), of `numel` in all, into the whole payload `out`.

        v = x, or cast(x, local's dtype) − local; then v = fl(v + fl(β·residual)), and the residual becomes
        fl(v − decoded). Missing elements of the last block count as 0.

        Returns the index in x of the first v that is not finite, or −1.
        """

    def add(self, payloads: Sequence[Tensor], weights: Sequence[float], acc: Tensor, *, overwrite: bool) -> None:
        """acc (+)= Σ fl(weight · decoded), payload after payload; `overwrite` begins at +0."""

    def outer(
        self,
        delta: Tensor,
        target: Tensor,
        momentum: Tensor | None,
        anchor: Tensor,
        *,
        lr: float,
        mu: float,
        out: Tensor,
        new_target: Tensor,
        new_momentum: Tensor | None,
        new_anchor: Tensor,
        seed: int = 0,
        steps: Tensor | None = None,
    ) -> int:
        """Nesterov step, payload of target − anchor, and the anchor plus what that decodes to, in one pass.

        All fp32 [numel] but out, the payload. The new ones may be the old ones. Without momentum: plain SGD.

        Returns the index of the first number that is not finite and cannot be encoded, or −1.
        """

    def decode_into(self, payload: Tensor, out: Tensor, *, numel: int, start: int = 0) -> None:
        """out = the decoded elements [start, start + len(out)) of a fragment of `numel`, every bit of them."""


def fast_path(key: KernelKey, *devices: torch.device) -> BlockKernels | None:
    """The kernels of this key where all operands lie on one device; None: the reference serves."""
    if any(device != devices[0] for device in devices):
        return None
    if devices[0].type == "cpu":
        return _cpu(key)
    return _gpu(key) if devices[0].type == "cuda" else None


def warm(names: Iterable[str]) -> float:
    """Compile what runs with these formats need on the CPU, or load it from disk; seconds that it took.

    To be called before training begins: the first call of a kernel would stall for as long.
    """
    try:
        from farloop.quant.kernels.cpu import kernels
    except ImportError:
        _log.warning("numba is not installed: codecs run in plain torch, several times slower")
        return 0.0
    return kernels.warm(names)


def fast_tile_sums(device: torch.device) -> Callable[[Tensor], list[float]] | None:
    """Sums of squares as `kernels.py` defines them, one number a tile; None: the reference serves."""
    if device.type != "cpu":
        return None
    try:
        from farloop.quant.kernels.cpu.kernels import tile_sums
    except ImportError:
        return None
    return tile_sums


def _cpu(key: KernelKey) -> BlockKernels | None:
    try:
        from farloop.quant.kernels.cpu.kernels import cpu_kernels
    except ImportError:
        return None
    return cpu_kernels(key.name, stochastic=key.stochastic, absolute=key.absolute)


def _gpu(key: KernelKey) -> BlockKernels | None:
    try:
        from farloop.quant.kernels.gpu.host import gpu_kernels
    except ImportError:
        _log.warning("triton is not installed: codecs run in plain torch on the GPU, several times slower")
        return None
    return gpu_kernels(key)
