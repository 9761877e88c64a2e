"""The fast path of the block formats on a GPU: checks and sizes on the host, one launch for a fragment.

Importing this loads Triton. What Triton interprets (`TRITON_INTERPRET=1`) takes CPU tensors: that is how tests compare
bytes without a GPU.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from farloop.quant.codec import KernelKey
from farloop.quant.kernels.gpu.kernels import Launch, add_kernel, decode_kernel, encode_kernel, outer_kernel
from farloop.quant.kernels.gpu.layout import LAYOUTS, Layout
from farloop.quant.packing import mix32

PAYLOADS_PER_LAUNCH = 16
"""Of a weighted sum; more go in several launches, which add in the same order."""

_ALIGN = 16  # bytes: what a load of 128 bits asks of an address
_TENSOR_ALIGN = 256  # elements: tensors of a fragment start on multiples of this (protocol N)
_NONE_BAD = 2**63 - 1


def gpu_kernels(key: KernelKey) -> "GpuKernels | None":
    """The kernels of this key, or None where its format has none on a GPU."""
    layout = LAYOUTS.get(key.name)
    if layout is None:
        return None
    return GpuKernels(layout=layout, step=key.step, absolute=key.absolute, stochastic=key.stochastic)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKernels:
    """One format's operations: the `BlockKernels` of `farloop.quant.kernels.dispatch`, all operands on one GPU.

    All of them raise ValueError where a shape, a dtype, a device or a memory layout is not as said.
    """

    layout: Layout
    step: float | None = 1.0
    """q4r: of every block, where no `steps` are given; None: they must be."""
    absolute: bool = False
    """q4r: steps are scales, not multiples of a block's rms."""
    stochastic: bool = False
    """q4r: how codes are rounded."""

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
        """Encode x fp32 [n] as the elements [start, start + n) of a fragment of `numel` into its payload `out`.

        v = x, or cast(x, local's dtype) − local; then v = fl(v + fl(β·residual)), and the residual becomes
        fl(v − decoded). local is fp32, bf16 or fp16 [n], residual fp32 [n], steps fp32 [num_blocks of the fragment].
        Where the fragment goes on after the n-th element, the elements up to the next multiple of 256 are padding:
        they are written too, as zeros.

        Returns the index in x of the first v that is not finite, or −1. It waits for the device.
        """
        if x.numel() == 0:
            return -1
        payload = _aligned(out)
        first_bad = _none_bad(x.device)
        launch = self.encode_launch(
            x,
            payload,
            first_bad,
            numel=numel,
            local=local,
            residual=residual,
            beta=beta,
            seed=seed,
            steps=steps,
            start=start,
        )
        _run(launch, x.device)
        if payload is not out:
            out.copy_(payload)
        return _index(first_bad)

    def encode_launch(
        self,
        x: Tensor,
        payload: Tensor,
        first_bad: Tensor,
        *,
        numel: int,
        local: Tensor | None,
        residual: Tensor | None,
        beta: float,
        seed: int,
        steps: Tensor | None,
        start: int,
    ) -> Launch:
        """What `encode` launches; first_bad int64 [1] is lowered to the index that it returns."""
        length, layout = x.numel(), self.layout
        _require_place(start, length, numel)
        _require(x, torch.float32, length, "x", x.device)
        _require(payload, torch.uint8, layout.payload_bytes(numel), "out", x.device)
        if residual is not None:
            _require(residual, torch.float32, length, "residual", x.device)
        if local is not None:
            if local.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(f"local must be fp32, bf16 or fp16, not {local.dtype}")
            _require(local, local.dtype, length, "local", x.device)
            # As integers: what a kernel does with bf16 must not depend on who executes it.
            local = local.view(torch.int16) if local.dtype == torch.bfloat16 else local
        end = -(-(start + length) // _TENSOR_ALIGN) * _TENSOR_ALIGN
        written = min(end, layout.padded(numel)) - start
        return Launch(
            kernel=encode_kernel,
            programs=layout.programs(written),
            num_warps=layout.num_warps,
            arguments={
                "x": x,
                "local": local,
                "residual": residual,
                "payload": payload,
                "first_bad": first_bad,
                "numel": length,
                "written": written,
                "first_row": start // layout.row,
                "scale_bytes": layout.scale_bytes(numel),
                "codes_start": layout.codes_start(numel),
                "beta": float(beta),
                **self._how(steps, seed, numel, x.device),
            },
        )

    def decode_into(self, payload: Tensor, out: Tensor, *, numel: int, start: int = 0) -> None:
        """out fp32 [n] = the decoded elements [start, start + n) of a fragment of `numel`, every bit of them."""
        if out.numel():
            _run(self.decode_launch(_aligned(payload), out, numel=numel, start=start), out.device)

    def decode_launch(self, payload: Tensor, out: Tensor, *, numel: int, start: int) -> Launch:
        """What `decode_into` launches."""
        length, layout = out.numel(), self.layout
        _require_place(start, length, numel)
        _require(out, torch.float32, length, "out", out.device)
        _require(payload, torch.uint8, layout.payload_bytes(numel), "the payload", out.device)
        return Launch(
            kernel=decode_kernel,
            programs=layout.programs(length),
            num_warps=layout.num_warps,
            arguments={
                "payload": payload,
                "out": out,
                "numel": length,
                "padded": layout.padded(numel) - start,
                "first_row": start // layout.row,
                "codes_start": layout.codes_start(numel),
                "READ": layout.device_functions.read,
                "R": layout.rows,
                "H": layout.row // 2,
            },
        )

    def add(self, payloads: Sequence[Tensor], weights: Sequence[float], acc: Tensor, *, overwrite: bool) -> None:
        """acc (+)= Σ fl(w · decoded), payload after payload, acc fp32 [numel]; `overwrite` begins at +0."""
        if len(payloads) != len(weights) or not payloads:
            raise ValueError(f"{len(payloads)} payloads and {len(weights)} weights")
        if acc.numel() == 0:
            return
        for first in range(0, len(payloads), PAYLOADS_PER_LAUNCH):
            part = slice(first, first + PAYLOADS_PER_LAUNCH)
            aligned = [_aligned(payload) for payload in payloads[part]]
            _run(self.add_launch(aligned, weights[part], acc, overwrite=overwrite and first == 0), acc.device)

    def add_launch(
        self, payloads: Sequence[Tensor], weights: Sequence[float], acc: Tensor, *, overwrite: bool
    ) -> Launch:
        """What `add` launches for at most 16 payloads."""
        numel, layout = acc.numel(), self.layout
        _require(acc, torch.float32, numel, "acc", acc.device)
        for payload in payloads:
            _require(payload, torch.uint8, layout.payload_bytes(numel), "a payload", acc.device)
        return Launch(
            kernel=add_kernel,
            programs=layout.programs(numel),
            num_warps=layout.num_warps,
            arguments={
                "payloads": tuple(payloads),
                "weights": tuple(float(weight) for weight in weights),
                "acc": acc,
                "numel": numel,
                "padded": layout.padded(numel),
                "codes_start": layout.codes_start(numel),
                "READ": layout.device_functions.read,
                "K": len(payloads),
                "OVERWRITE": overwrite,
                "R": layout.rows,
                "H": layout.row // 2,
            },
        )

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
        """The coordinator's step in one pass; all are fp32 [numel] but out, and the new ones may be the old ones.

        m' = fl(fl(μ·m) + d), g = fl(fl(fl(μ·m') + d)·ν), t' = fl(t − g), as `algo.outer_optimizers` does it; without a
        momentum g = fl(d·ν). The payload is that of d' = fl(t' − a), and a' = fl(a + decoded).

        Returns the index of the first d' that is not finite (the new tensors are of no use then), or −1. It waits for
        the device.
        """
        if delta.numel() == 0:
            return -1
        payload = _aligned(out)
        first_bad = _none_bad(delta.device)
        launch = self.outer_launch(
            delta,
            target,
            momentum,
            anchor,
            payload,
            first_bad,
            lr=lr,
            mu=mu,
            new_target=new_target,
            new_momentum=new_momentum,
            new_anchor=new_anchor,
            seed=seed,
            steps=steps,
        )
        _run(launch, delta.device)
        if payload is not out:
            out.copy_(payload)
        return _index(first_bad)

    def outer_launch(
        self,
        delta: Tensor,
        target: Tensor,
        momentum: Tensor | None,
        anchor: Tensor,
        payload: Tensor,
        first_bad: Tensor,
        *,
        lr: float,
        mu: float,
        new_target: Tensor,
        new_momentum: Tensor | None,
        new_anchor: Tensor,
        seed: int,
        steps: Tensor | None,
    ) -> Launch:
        """What `outer` launches; first_bad as for `encode_launch`."""
        numel, layout = delta.numel(), self.layout
        tensors = {
            "delta": delta,
            "target": target,
            "momentum": momentum,
            "anchor": anchor,
            "new_target": new_target,
            "new_momentum": new_momentum,
            "new_anchor": new_anchor,
        }
        if (momentum is None) != (new_momentum is None) or (momentum is None and mu != 0.0):
            raise ValueError("momentum without a tensor for it, or the other way round")
        for name, tensor in tensors.items():
            if tensor is not None:
                _require(tensor, torch.float32, numel, name, delta.device)
        _require(payload, torch.uint8, layout.payload_bytes(numel), "out", delta.device)
        return Launch(
            kernel=outer_kernel,
            programs=layout.programs(numel),
            num_warps=layout.num_warps,
            arguments={
                **tensors,
                "payload": payload,
                "first_bad": first_bad,
                "numel": numel,
                "padded": layout.padded(numel),
                "scale_bytes": layout.scale_bytes(numel),
                "codes_start": layout.codes_start(numel),
                "lr": float(lr),
                "mu": float(mu),
                **self._how(steps, seed, numel, delta.device),
            },
        )

    def _how(self, steps: Tensor | None, seed: int, numel: int, device: torch.device) -> dict[str, object]:
        """The arguments that say how WRITE encodes."""
        layout = self.layout
        if steps is not None:
            steps = steps.to(device)
            _require(steps, torch.float32, layout.num_blocks(numel), "steps", device)
        elif self.step is None:
            raise ValueError("the steps of the blocks are missing")
        mixed = mix32(seed & 0xFFFFFFFF)
        return {
            "steps": steps,
            "step": self.step if steps is None else 0.0,
            "seed": mixed - (1 << 32) if mixed >> 31 else mixed,  # as an int32, the same bits
            "WRITE": layout.device_functions.write,
            "ABSOLUTE": self.absolute,
            "STOCHASTIC": self.stochastic,
            "R": layout.rows,
            "H": layout.row // 2,
        }


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
    """The payload itself, or a copy where it starts at an address that kernels cannot read from."""
    return payload if payload.data_ptr() % _ALIGN == 0 else payload.clone()


def _none_bad(device: torch.device) -> Tensor:
    return torch.full((1,), _NONE_BAD, dtype=torch.int64, device=device)


def _index(first_bad: Tensor) -> int:
    index = int(first_bad)
    return -1 if index == _NONE_BAD else index


def _run(launch: Launch, device: torch.device) -> None:
    """On the device of the operands, which need not be the current one."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        launch.run()
