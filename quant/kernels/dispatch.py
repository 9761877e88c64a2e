"""Which kernels run a block codec on which device. Faster paths are chosen here, and nowhere else."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from farloop.quant.kernels.interface import BlockKernels, KernelKey

_log = logging.getLogger(__name__)

_left_out = set[tuple[str, str]]()
"""(format, `norm` or `digest`; device type) that the reference serves, although there are kernels."""


def leave_to_reference(name: str, device: torch.device) -> None:
    """Never run the kernels of this format, of `norm` or of `digest`, on such devices again."""
    _left_out.add((name, device.type))


@contextmanager
def by_reference(name: str) -> Iterator[None]:
    """Run no kernels of this format on a CPU within."""
    key = (name, "cpu")
    was_left_out = key in _left_out
    _left_out.add(key)
    try:
        yield
    finally:
        if not was_left_out:
            _left_out.discard(key)


def fast_path(key: KernelKey, *devices: torch.device, only_encode: bool = False) -> BlockKernels | None:
    """The kernels of this key if all operands lie on one device that has some; None: the reference serves.

    `only_encode`: on a CPU, those too of which nothing but `encode` without a residual may be called.
    """
    if any(device != devices[0] for device in devices) or (key.name, devices[0].type) in _left_out:
        return None
    if devices[0].type == "cpu":
        return _cpu(key, only_encode)
    return _gpu(key) if devices[0].type == "cuda" else None


def warm(names: Iterable[str]) -> float:
    """Compile the CPU kernels of these formats, or load them from disk; returns the seconds it took.

    Call it before training begins: otherwise the first call of a kernel stalls for that time.
    """
    kernels = _kernels_of("cpu")
    return 0.0 if kernels is None else kernels.warm(names)


def fast_tile_sums(device: torch.device) -> Callable[[Tensor], list[float]] | None:
    """Compiled sums of squares as `norm.py` defines them, one number a tile; None: the reference serves."""
    kernels = _sums("norm", device)
    return None if kernels is None else kernels.tile_sums


def fast_digest(device: torch.device) -> Callable[[Tensor, int], tuple[int, bool]] | None:
    """The compiled digest of `digest.py`, and whether all numbers are finite; None: the reference serves."""
    kernels = _sums("digest", device)
    return None if kernels is None else kernels.digest


def _sums(name: str, device: torch.device) -> ModuleType | None:
    """The module that has `tile_sums` and `digest`, unless what is called so is left out."""
    return None if (name, device.type) in _left_out else _kernels_of(device.type)


def fast_sparse(*devices: torch.device) -> ModuleType | None:
    """The functions of `kernels/cpu/sparse.py` if all operands are on the CPU; None: the reference serves."""
    if any(device.type != "cpu" for device in devices) or _kernels_of("cpu") is None:
        return None
    from farloop.quant.kernels.cpu import sparse

    return sparse


@cache
def _cpu(key: KernelKey, only_encode: bool) -> BlockKernels | None:
    kernels = _kernels_of("cpu")
    return None if kernels is None else kernels.cpu_kernels(key, only_encode=only_encode)


@cache
def _gpu(key: KernelKey) -> BlockKernels | None:
    kernels = _kernels_of("cuda")
    return None if kernels is None else kernels.gpu_kernels(key)


@cache
def _kernels_of(device_type: str) -> ModuleType | None:
    """The kernels of such devices; None where there are none, or, as the log says once, they cannot be imported."""
    try:
        if device_type == "cpu":
            from farloop.quant.kernels.cpu import kernels

            return kernels
        if device_type == "cuda":
            from farloop.quant.kernels.gpu import host

            return host
    except ImportError as error:
        _log.warning(
            "%s is not installed: codecs run in plain torch, several times slower device=%s", error.name, device_type
        )
    return None
