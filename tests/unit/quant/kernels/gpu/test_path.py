"""The path on a GPU: bytes by `byte_equality.py` in other processes, what it refuses in this one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from farloop.quant.codec import flat
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.gpu.host import GpuKernels, gpu_kernels
from farloop.quant.registry import codec_named

BYTE_EQUALITY = Path(__file__).with_name("byte_equality.py")


def run_byte_equality(which: str, **environment: str) -> None:
    options = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", which)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, BYTE_EQUALITY],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("which", ["q4r", "not q4r"])
def test_interpreted_kernels_give_the_bytes_of_the_reference(which: str) -> None:
    run_byte_equality(which, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_a_gpu_give_the_bytes_of_the_reference() -> None:
    run_byte_equality("", TRITON_INTERPRET="0")


def test_triton_is_not_loaded_before_it_is_asked_for() -> None:
    check = "import sys, farloop.quant.registry, farloop.quant.kernels.gpu; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def kernels(spelling: str = "q4") -> GpuKernels:
    codec = codec_named(spelling)
    assert isinstance(codec, BlockCodec)
    found = gpu_kernels(codec.kernel_key())
    assert found is not None
    return found


def encode_arguments(**changes: Any) -> dict[str, Any]:
    x = torch.zeros(300)
    return {
        "x": x,
        "out": torch.zeros(kernels().layout.payload_bytes(1024), dtype=torch.uint8),
        "numel": 1024,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"x": torch.zeros(300, dtype=torch.float64)}, "x must be"),
        ({"x": torch.zeros(600)[::2]}, "x must be"),
        ({"out": torch.zeros(577, dtype=torch.uint8)}, "out must be"),
        ({"local": torch.zeros(299)}, "local must be"),
        ({"local": torch.zeros(300, dtype=torch.int32)}, "local must be"),
        ({"residual": torch.zeros(300, dtype=torch.bfloat16)}, "residual must be"),
        ({"steps": torch.zeros(15)}, "steps must be"),
        ({"start": 64}, "no tensor's place"),
        ({"start": -256}, "no tensor's place"),
        ({"start": 768}, "no tensor's place"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        kernels().encode(**encode_arguments(**changes))


def test_sums_are_of_at_least_one_payload_and_as_many_weights() -> None:
    for payloads, weights in (([], []), ([torch.zeros(0, dtype=torch.uint8)], [1.0, 2.0])):
        with pytest.raises(ValueError, match="weights"):
            kernels().add(payloads, weights, torch.zeros(64), overwrite=True)


def test_without_a_momentum_there_is_no_mu() -> None:
    x = torch.zeros(64)
    out = torch.zeros(kernels().layout.payload_bytes(64), dtype=torch.uint8)
    with pytest.raises(ValueError, match="momentum"):
        kernels().outer(x, x, None, x, lr=0.7, mu=0.9, out=out, new_target=x, new_momentum=None, new_anchor=x)


def test_nothing_is_launched_for_an_empty_fragment() -> None:
    empty, out = torch.zeros(0), torch.zeros(0, dtype=torch.uint8)
    path = kernels()
    assert path.encode(empty, out, numel=0) == -1
    path.decode_into(out, empty, numel=0)
    path.add([out], [1.0], empty, overwrite=True)
    new: dict[str, Any] = {"new_target": empty, "new_momentum": empty, "new_anchor": empty}
    assert path.outer(empty, empty, empty, empty, lr=0.7, mu=0.9, out=out, **new) == -1


@pytest.mark.parametrize("spelling", ["fp32", "bf16", "q8", "q4", "q4r", "e3m0"])
def test_payloads_are_as_long_as_the_codec_says(spelling: str) -> None:
    for numel in (0, 1, 63, 64, 65, 255, 256, 257, 100_000):
        assert kernels(spelling).layout.payload_bytes(numel) == codec_named(spelling).payload_bytes(flat(numel))
