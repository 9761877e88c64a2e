"""The kernels of block formats on a GPU: checks and sizes on the host, one launch for a fragment.

Importing this loads Triton. What it interprets (`TRITON_INTERPRET=1`) takes CPU tensors: tests then need no GPU.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farloop.quant.kernels.gpu.formats import FORMATS, Programs
from farloop.quant.kernels.gpu.kernels import (
    Launch,
    add_kernel,
    decode_kernel,
    digest_kernel,
    encode_kernel,
    tile_sums_kernel,
)
from farloop.quant.kernels.interface import NORM_TILE, BlockKernels, Encode, KernelKey
from farloop.quant.packing import Layout, mixed_seed

_ALIGN = 16  # bytes: a load of 128 bits needs it of an address
_TENSOR_ALIGN = 256  # elements: tensors of a fragment start on multiples of this
_NONE_BAD = 2**63 - 1


def gpu_kernels(key: KernelKey) -> "GpuKernels | None":
    """The kernels of this key, or None if its format has none on a GPU."""
    programs = FORMATS.get(key.name)
    return None if programs is None else GpuKernels(key=key, programs=programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels(BlockKernels):
    """Launches of Triton kernels, all operands on one GPU; what returns an index waits for the device.

    All operations raise ValueError if a shape, a dtype, a device or a memory layout is not as the interface says. Each
    `x_launch` returns what x launches; `first_bad` int64 [1] is lowered to the index that x returns.
    """

    key: KernelKey
    programs: Programs

    @property
    def layout(self) -> Layout:
        """Of the payloads."""
        return self.key.layout

    def encode(self, call: Encode) -> int:
        if call.x.numel() == 0:
            return -1
        payload = _aligned(call.out)
        first_bad = torch.full((1,), _NONE_BAD, dtype=torch.int64, device=call.x.device)
        _run(self.encode_launch(call, payload, first_bad), payload.device)
        if payload is not call.out:
            call.out.copy_(payload)
        index = int(first_bad)
        return -1 if index == _NONE_BAD else index

    def encode_launch(self, call: Encode, payload: Tensor, first_bad: Tensor) -> Launch:
        """`payload` is `call.out`, or an aligned copy."""
        assert call.local is None, "differences are taken on CPUs"
        device, length, layout = call.x.device, call.x.numel(), self.layout
        _require_place(call.start, length, call.numel)
        steps = call.steps
        if steps is not None:
            first = call.ahead // layout.block
            steps = steps[first : first + layout.num_blocks(call.numel)]
        _require(call.x, torch.float32, length, "x", device)
        _require(payload, torch.uint8, layout.payload_bytes(call.numel), "out", device)
        if call.residual is not None:
            _require(call.residual, torch.float32, length, "residual", device)
        end = -(-(call.start + length) // _TENSOR_ALIGN) * _TENSOR_ALIGN
        written = min(end, layout.padded(call.numel)) - call.start
        return Launch(
            kernel=encode_kernel,
            programs=self.programs.count(written),
            warps=self.programs.warps if call.residual is None else 4,
            arguments={
                "x": call.x,
                "residual": call.residual,
                "payload": payload,
                "first_bad": first_bad,
                "numel": length,
                "written": written,
                "first_row": call.start // self.programs.row,
                "scale_bytes": layout.scale_bytes(call.numel),
                "codes_start": layout.codes_start(call.numel),
                "beta": float(call.beta),
                **self._how(steps, call.seed, call.numel, device, call.ahead),
            },
        )

    def decode_into(self, payload: Tensor, out: Tensor, *, numel: int, start: int = 0) -> None:
        if out.numel():
            _run(self.decode_launch(_aligned(payload), out, numel=numel, start=start), out.device)

    def decode_launch(self, payload: Tensor, out: Tensor, *, numel: int, start: int) -> Launch:
        """For an aligned payload."""
        length, layout = out.numel(), self.layout
        _require_place(start, length, numel)
        _require(out, torch.float32, length, "out", out.device)
        _require(payload, torch.uint8, layout.payload_bytes(numel), "the payload", out.device)
        return Launch(
            kernel=decode_kernel,
            programs=self.programs.count(length),
            arguments={
                "payload": payload,
                "out": out,
                "numel": length,
                "padded": layout.padded(numel) - start,
                "first_row": start // self.programs.row,
                "codes_start": layout.codes_start(numel),
                "READ": self.programs.read,
                **self._shape(),
            },
        )

    def add(self, payloads: Sequence[Tensor], weights: Sequence[float], acc: Tensor, *, overwrite: bool) -> None:
        if overwrite:
            acc.zero_()
        for payload, weight in zip(payloads, weights, strict=True):
            if acc.numel():
                _run(self.add_launch(_aligned(payload), weight, acc), acc.device)

    def add_launch(self, payload: Tensor, weight: float, acc: Tensor) -> Launch:
        """For an aligned payload."""
        numel, layout = acc.numel(), self.layout
        _require(acc, torch.float32, numel, "acc", acc.device)
        _require(payload, torch.uint8, layout.payload_bytes(numel), "a payload", acc.device)
        return Launch(
            kernel=add_kernel,
            programs=self.programs.count(numel),
            arguments={
                "payload": payload,
                "weight": float(weight),
                "acc": acc,
                "numel": numel,
                "padded": layout.padded(numel),
                "codes_start": layout.codes_start(numel),
                "READ": self.programs.read,
                **self._shape(),
            },
        )

    def _shape(self) -> dict[str, object]:
        """Of a program."""
        return {"R": self.programs.rows, "H": self.programs.row // 2}

    def _how(
        self, steps: Tensor | None, seed: int, numel: int, device: torch.device, ahead: int = 0
    ) -> dict[str, object]:
        """The arguments of kernels that encode."""
        if steps is not None:
            steps = steps.to(device)
            _require(steps, torch.float32, self.layout.num_blocks(numel), "steps", device)
        elif self.key.step is None:
            raise ValueError("the steps of the blocks are missing")
        return {
            "steps": steps,
            "step": self.key.step if steps is None else 0.0,
            "seed": _mixed(seed, ahead),
            "WRITE": self.programs.write,
            "ABSOLUTE": self.key.absolute,
            "STOCHASTIC": self.key.stochastic,
            **self._shape(),
        }


def tile_sums(x: Tensor) -> list[float]:
    """Sums of squares of x fp32 [n] in fp64, one for each tile of 4096; the last tile is filled up with zeros."""
    sums = torch.empty(-(-x.numel() // NORM_TILE), dtype=torch.float64, device=x.device)
    if x.numel():
        _run(sum_launch(tile_sums_kernel, x, sums=sums, LEVELS=NORM_TILE.bit_length() - 1), x.device)
    return list(sums.tolist())


def digest(x: Tensor, first_index: int) -> tuple[int, bool]:
    """The digest of x fp32 [n], whose first element has this index, and whether all of x is finite."""
    partials = torch.empty((-(-x.numel() // NORM_TILE), 2), dtype=torch.int64, device=x.device)
    if x.numel():
        _run(sum_launch(digest_kernel, x, partials=partials, first_index=first_index), x.device)
    total, unusable = partials.sum(0).tolist()  # int64 sums wrap
    return total & ((1 << 64) - 1), not unusable


def sum_launch(kernel: Any, x: Tensor, **arguments: object) -> Launch:
    """What `tile_sums` and `digest` launch: a program for each tile."""
    _require(x, torch.float32, x.numel(), "x", x.device)
    return Launch(
        kernel=kernel,
        programs=-(-x.numel() // NORM_TILE),
        arguments={"x": x, "numel": x.numel(), "TILE": NORM_TILE, **arguments},
    )


def _mixed(seed: int, ahead: int = 0) -> int:
    """As an int32, the same bits."""
    mixed = mixed_seed(seed, ahead)
    return mixed - (1 << 32) if mixed >> 31 else mixed


def _require(tensor: Tensor, dtype: torch.dtype, numel: int, what: str, device: torch.device) -> None:
    if tensor.dtype != dtype or tensor.shape != (numel,) or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{what} must be a contiguous {dtype} [{numel}] on {device}, not {tensor.dtype} {list(tensor.shape)} with "
            f"strides {tensor.stride()} on {tensor.device}"
        )


def _require_place(start: int, length: int, numel: int) -> None:
    if start % _TENSOR_ALIGN or start < 0 or start + length > numel:
        raise ValueError(f"elements [{start}, {start + length}) are no tensor's place in a fragment of {numel}")


def _aligned(payload: Tensor) -> Tensor:
    """The payload itself, or a copy if it starts at an address that kernels cannot read from."""
    return payload if payload.data_ptr() % _ALIGN == 0 else payload.clone()


def _run(launch: Launch, device: torch.device) -> None:
    """On the device of the operands, which may differ from the current one."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        launch.run()
