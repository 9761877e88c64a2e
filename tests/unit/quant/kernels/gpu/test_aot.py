"""Every kernel that a run launches, compiled for an H100 without one.

`cuobjdump`, which Triton ships with its assembler, counts registers and spills; the PTX shows how wide memory accesses
are and how each operation rounds.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow
from torch import Tensor

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.gpu.formats import FORMATS
from farloop.quant.kernels.gpu.host import GpuKernels, gpu_kernels, sum_launch
from farloop.quant.kernels.gpu.kernels import OPTIONS, Launch, digest_kernel, tile_sums_kernel
from farloop.quant.kernels.interface import Encode
from farloop.quant.registry import codec_named

SM_90 = GPUTarget("cuda", 90, 32)  # H100 and H200

_TYPES = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int16: "*i16", torch.int64: "*i64", torch.uint8: "*u8"}
_TYPES[torch.float64] = "*fp64"
_ENCODERS_OF_Q4R = ("q4r:rounding=nearest", "q4r:policy=absolute")  # besides the defaults, stochastic and relative

_ARITHMETIC = re.compile(r"\b((?:add|sub|mul|fma|mad|div|sqrt|rsqrt|rcp)\.[\w.]*f(?:32|64)(?:x2)?)\b")

_NUMEL = 1 << 15  # sizes become arguments, not code, but for their divisibility by 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One kernel as a GPU would run it."""

    codec: str  # as configuration spells it
    operation: str
    registers: int  # of a thread
    spilled_bytes: int  # of a thread: registers that live in memory
    shared_bytes: int  # of a program: tiles whose lanes change owners
    access_bits: Counter[tuple[str, int]]
    """How many loads (`ld`) and stores (`st`) of global memory there are, by their width for one thread."""
    rounding: Counter[str]  # how many fp32 operations there are, as PTX spells them: `add.rn.f32`, `div.rn.f32` …
    instructions: int  # of the machine code, for all elements of a thread
    fused: int  # Fused multiply-adds among them. Division and square root are made of them; nothing else may be.


def launches() -> dict[tuple[str, str], Launch]:
    """(spelling of a codec, operation) → what would be launched; the tensors are small and on the CPU."""
    found: dict[tuple[str, str], Launch] = {}
    for spelling in (*FORMATS, *_ENCODERS_OF_Q4R):
        codec = codec_named(spelling)
        path = gpu_kernels(codec.kernel_key()) if isinstance(codec, BlockCodec) else None
        assert path is not None
        operations = _encoders(path)
        if spelling in FORMATS:
            operations |= {"decode": _decode(path), "add": _add(path)}
        found |= {(spelling, operation): launch for operation, launch in operations.items()}
    x = torch.zeros(_NUMEL)
    sums, partials = torch.zeros(_NUMEL // 4096, dtype=torch.float64), torch.zeros(_NUMEL // 2048, dtype=torch.int64)
    found["norm", "sum"] = sum_launch(tile_sums_kernel, x, sums=sums, LEVELS=12)
    found["digest", "sum"] = sum_launch(digest_kernel, x, partials=partials, first_index=1 << 40)
    return found


def _encoders(path: GpuKernels) -> dict[str, Launch]:
    x = torch.zeros(_NUMEL)

    def encoder(numel: int, residual: Tensor | None = None) -> Launch:
        out, bad, steps = _buffers(path, numel)
        call = Encode(x=x[:numel], out=out, numel=numel, residual=residual, beta=0.9, steps=steps)
        return path.encode_launch(call, out, bad)

    return {
        "encode": encoder(_NUMEL),
        "encode, odd length": encoder(_NUMEL - 1),
        "encode, residual": encoder(_NUMEL, x),
    }


def _decode(path: GpuKernels) -> Launch:
    payload, _, _ = _buffers(path, _NUMEL)
    return path.decode_launch(payload, torch.zeros(_NUMEL), numel=_NUMEL, start=0)


def _add(path: GpuKernels) -> Launch:
    payload, _, _ = _buffers(path, _NUMEL)
    return path.add_launch(payload, 0.5, torch.zeros(_NUMEL))


def _buffers(path: GpuKernels, numel: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """A payload, the place for the index of a bad element, and for q4r the steps."""
    payload = torch.zeros(path.layout.payload_bytes(numel), dtype=torch.uint8)
    bad = torch.zeros(1, dtype=torch.int64)
    steps = torch.zeros(path.layout.num_blocks(numel)) if path.key.name == "q4r" else None
    return payload, bad, steps


def compiled(spelling: str, operation: str, options: Mapping[str, Any] = OPTIONS) -> Compiled:
    """Compile one of `launches` for an H100, specialised as a launch specialises."""
    launch = launches()[spelling, operation]
    source = triton.compiler.ASTSource(fn=launch.kernel, **_specialised(launch))
    built = triton.compile(source, target=SM_90, options={"num_warps": launch.warps, **options})
    ptx = built.asm["ptx"]
    usage, code = _machine_code(built.asm["cubin"])
    return Compiled(
        codec=spelling,
        operation=operation,
        registers=usage["REG"],
        spilled_bytes=usage["LOCAL"] + usage["STACK"],
        shared_bytes=built.metadata.shared,
        access_bits=_access_bits(ptx),
        rounding=Counter(_ARITHMETIC.findall(ptx)),
        instructions=len(code),
        fused=sum(name.startswith(("FFMA", "DFMA")) for name in code),
    )


def _specialised(launch: Launch) -> dict[str, Any]:
    """Signature, constants and attributes of the arguments, in the order of the kernel's parameters."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for parameter in launch.kernel.params:
        value = launch.arguments[parameter.name]
        place = (parameter.num,)
        if isinstance(value, tuple):
            kinds = []
            for index, item in enumerate(value):
                kinds.append(_kind(item))
                if _is_aligned(item):
                    attributes[*place, index] = [["tt.divisibility", 16]]
            signature[parameter.name] = tuple(kinds)
        elif parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[place] = value
        else:
            signature[parameter.name] = _kind(value)
            if _is_aligned(value) and not parameter.do_not_specialize:
                attributes[place] = [["tt.divisibility", 16]]
    return {"signature": signature, "constexprs": constants, "attrs": attributes}


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int)
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_aligned(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.data_ptr() % 16 == 0
    return isinstance(value, int) and value % 16 == 0


def _access_bits(ptx: str) -> Counter[tuple[str, int]]:
    """Of `ld.global.v4.b32` and the like: 4 · 32 bits."""
    found = re.findall(r"\b(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\b", ptx)
    return Counter((kind, int(lanes or 1) * int(width)) for kind, lanes, width in found)


def _machine_code(cubin: bytes) -> tuple[dict[str, int], list[str]]:
    """(resources by cuobjdump's names, the instructions' names)."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage, code = (
            subprocess.run([tool, what, file], check=True, capture_output=True, text=True).stdout
            for what in ("-res-usage", "-sass")
        )
    resources = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return resources, re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)", code, re.MULTILINE)


# --- tests

KERNELS = list(launches())
KINDS = {"q4", "q4r", "norm", "digest"}
"""Codecs with and without chance, and what is not of a codec. `make test-slow` compiles all of them."""
READ = {"encode": 1, "encode, odd length": 1, "encode, residual": 2, "add": 1}
WRITTEN = {"encode, residual": 1, "decode": 1, "add": 1}
"""Tensors of fp32, without the payload."""
REGISTERS = {"encode": 96, "encode, odd length": 96, "encode, residual": 80, "sum": 96, "add": 80}
"""More than 64 only where many operands are held at once, and nowhere so many that fewer than 20 warps run."""
ROUNDED = {f"{operation}.rn.f32" for operation in ("add", "sub", "mul", "div", "sqrt")} | {"add.rn.f64", "mul.rn.f64"}


@pytest.mark.parametrize(
    ("codec", "operation"),
    [key if key[0] in KINDS else slow(key)[0] for key in KERNELS],
    ids=[" ".join(key).replace(",", "") for key in KERNELS],
)
def test_a_kernel_is_fit_for_a_gpu(codec: str, operation: str) -> None:
    kernel = compiled(codec, operation)
    assert kernel.spilled_bytes == 0
    assert kernel.registers <= REGISTERS.get(operation, 64)
    # Every operation rounds once, to nearest, with subnormals. In machine code a division or a root is 5 fused
    # operations, and 12 more for all of them where the short way fails; a product that is added would bring 16.
    assert set(kernel.rounding) <= ROUNDED
    made_of_them = kernel.rounding["div.rn.f32"] + kernel.rounding["sqrt.rn.f32"]
    assert kernel.fused <= (max(6 * made_of_them, 5 * made_of_them + 12) if made_of_them else 0)
    if operation != "encode, odd length":
        # 16 elements a thread in 4 accesses; what is narrower is 1 step for each block.
        assert kernel.access_bits["ld", 128] >= 4 * READ.get(operation, 0)
        assert kernel.access_bits["st", 128] >= 4 * WRITTEN.get(operation, 0)
        assert kernel.access_bits["ld", 32] <= ("q4r" in codec)
        assert kernel.access_bits["st", 32] == 0


def test_contraction_would_be_seen() -> None:
    """With Triton's other setting the residual is added by a fused operation: other bytes."""
    kernel = compiled("fp32", "encode, residual", {"enable_fp_fusion": True})
    assert kernel.rounding["fma.rn.f32"] > 0 and kernel.fused > 0
