"""The kernels on a GPU: their bytes by `test_kernels.py` in other processes, what they refuse in this one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow

pytest.importorskip("triton")

from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.gpu.host import GpuKernels, gpu_kernels
from farloop.quant.kernels.interface import Encode
from farloop.quant.registry import codec_named

LAWS = Path(__file__).parents[1] / "test_kernels.py"


def run_laws(which: str, marks: str = "", **environment: str) -> None:
    options = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", which, "-m", marks)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, LAWS],
        env={**os.environ, "KERNELS": "triton", **environment},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("which", "marks"), [("absolute and nearest", "not slow"), *slow(("q4r", ""), ("not q4r", ""))]
)
def test_interpreted_kernels_give_the_bytes_of_the_reference(which: str, marks: str) -> None:
    run_laws(which, marks, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_a_gpu_give_the_bytes_of_the_reference() -> None:
    run_laws("", TRITON_INTERPRET="0")


def test_triton_is_not_loaded_before_it_is_asked_for() -> None:
    check = "import sys, farloop.quant.registry, farloop.quant.kernels.gpu; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def kernels(spelling: str = "q4") -> GpuKernels:
    codec = codec_named(spelling)
    assert isinstance(codec, BlockCodec)
    found = gpu_kernels(codec.kernel_key())
    assert found is not None
    return found


def encode_call(**changes: Any) -> Encode:
    out = torch.zeros(kernels().layout.payload_bytes(1024), dtype=torch.uint8)
    return Encode(**{"x": torch.zeros(300), "out": out, "numel": 1024, **changes})


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"x": torch.zeros(300, dtype=torch.float64)}, "x must be"),
        ({"x": torch.zeros(600)[::2]}, "x must be"),
        ({"out": torch.zeros(577, dtype=torch.uint8)}, "out must be"),
        ({"residual": torch.zeros(300, dtype=torch.bfloat16)}, "residual must be"),
        ({"steps": torch.zeros(15)}, "steps must be"),
        ({"start": 64}, "no tensor's place"),
        ({"start": -256}, "no tensor's place"),
        ({"start": 768}, "no tensor's place"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        kernels().encode(encode_call(**changes))


def test_a_sum_has_as_many_weights_as_payloads() -> None:
    with pytest.raises(ValueError, match="longer"):
        kernels().add([], [1.0], torch.zeros(64), overwrite=True)


def test_nothing_is_launched_for_an_empty_fragment() -> None:
    empty, out = torch.zeros(0), torch.zeros(0, dtype=torch.uint8)
    path = kernels()
    assert path.encode(Encode(x=empty, out=out, numel=0)) == -1
    path.decode_into(out, empty, numel=0)
    path.add([out], [1.0], empty, overwrite=True)


def test_the_steps_of_several_tensors_must_be_given() -> None:
    with pytest.raises(ValueError, match="steps"):
        kernels("q4r:step=0.5/2").encode(encode_call(out=torch.zeros(64 + 512, dtype=torch.uint8)))
