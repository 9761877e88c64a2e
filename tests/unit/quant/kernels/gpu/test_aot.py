"""Every kernel compiled for an H100, without one."""

import pytest

pytest.importorskip("triton")

from farloop.quant.kernels.gpu import aot
from farloop.quant.kernels.gpu.formats import FORMATS

KERNELS = list(aot.launches())
READ = {"encode": 1, "encode, odd length": 1, "encode, bf16 local": 1, "encode, bf16 local, residual": 2, "outer": 4}
WRITTEN = {"encode, bf16 local, residual": 1, "decode": 1, "add 1": 1, "sum 16": 1, "outer": 3}
"""Tensors of fp32, without the payload."""
READ["add 1"] = 1
REGISTERS = {"encode, odd length": 72, "encode, bf16 local, residual": 80, "sum 16": 96, "outer": 96}
"""More than 64 only where many operands are held at once, and nowhere so many that fewer than 20 warps run."""
ROUNDED = {f"{operation}.rn.f32" for operation in ("add", "sub", "mul", "div", "sqrt")}


@pytest.mark.parametrize(("codec", "operation"), KERNELS, ids=[" ".join(key).replace(",", "") for key in KERNELS])
def test_a_kernel_is_fit_for_a_gpu(codec: str, operation: str) -> None:
    kernel = aot.compiled(codec, operation)
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= REGISTERS.get(operation, 64)
    # Every operation rounds once, to nearest, with subnormals. In machine code a division or a root is 5 fused
    # operations, and 12 more for all of them where the short way fails; a product that is added would bring 16.
    assert set(kernel.rounding) <= ROUNDED
    assert kernel.fused <= 6 * (kernel.rounding["div.rn.f32"] + kernel.rounding["sqrt.rn.f32"])
    if operation != "encode, odd length":
        # 16 elements a thread in 4 accesses; what is narrower is 1 step for each block.
        assert kernel.access_bits["ld", 128] >= 4 * READ.get(operation, 0)
        assert kernel.access_bits["st", 128] >= 4 * WRITTEN.get(operation, 0)
        assert kernel.access_bits["ld", 32] <= ("q4r" in codec) and kernel.access_bits["st", 32] == 0


def test_contraction_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton's other setting the residual is added by a fused operation: other bytes."""
    monkeypatch.setattr(aot, "OPTIONS", {"enable_fp_fusion": True})
    kernel = aot.compiled("fp32", "encode, bf16 local, residual")
    assert kernel.rounding["fma.rn.f32"] > 0 and kernel.fused > 0


def test_every_format_has_every_operation() -> None:
    for name in FORMATS:
        assert {operation for codec, operation in KERNELS if codec == name} == {*READ, *WRITTEN}
