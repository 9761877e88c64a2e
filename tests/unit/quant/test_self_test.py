"""A codec is tried on a device before training: kernels that fail there, or write other bytes, are left out."""

import logging
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from farloop.cli.doctor import gpu_kernels
from farloop.quant import self_test
from farloop.quant.errors import UnsupportedHost
from farloop.quant.kernels import dispatch, gpu
from farloop.quant.kernels.interface import BlockKernels, KernelKey
from farloop.quant.registry import CODECS, codec_named
from farloop.quant.self_test import try_codecs

CPU = torch.device("cpu")
SPELLINGS = (*CODECS, "q4r:beta=0.9", "q4:beta=0.5")


class Failing:
    """Kernels of which one operation raises, or changes what was right."""

    def __init__(self, right: BlockKernels, operation: str, how: Exception | str) -> None:
        self._right, self._operation, self._how = right, operation, how

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == self._operation and isinstance(self._how, Exception):
                raise self._how
            found = getattr(self._right, name)(*args, **kwargs)
            if name == self._operation:
                (args[0].out if name == "encode" else args[1 if name == "decode_into" else 2]).view(torch.uint8)[
                    -300:
                ] ^= 1
            return found

        return call


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Replaces the CPU's kernels by those that fail, as a device's."""
    right = dispatch._cpu
    monkeypatch.setattr(dispatch, "_left_out", set())

    def replace(operation: str, how: Exception | str) -> None:
        def found(key: KernelKey, only_encode: bool) -> Any:
            kernels = right(key, only_encode)
            return None if kernels is None else Failing(kernels, operation, how)

        monkeypatch.setattr(dispatch, "_cpu", found)

    yield replace


def test_kernels_that_cannot_be_imported_are_said_once_and_the_reference_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(gpu, "host", raising=False)
    monkeypatch.setitem(sys.modules, "farloop.quant.kernels.gpu.host", None)
    monkeypatch.setattr(dispatch, "_kernels_of", cache(dispatch._kernels_of.__wrapped__))
    device = torch.device("cuda")
    assert dispatch.fast_digest(device) is dispatch.fast_tile_sums(device) is None
    (said,) = caplog.messages
    assert "farloop.quant.kernels.gpu.host is not installed: codecs run in plain torch" in said


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_codec_of_this_machine_passes(spelling: str) -> None:
    assert try_codecs([codec_named(spelling)], CPU) == {}


@pytest.mark.parametrize("operation", ["encode", "decode_into", "add"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        (RuntimeError("Failed to find C compiler. Please specify via CC"), "install a C compiler"),
        (OSError("cannot write the cache"), "cannot write the cache"),
        ("changed", "gives other bytes"),
    ],
)
def test_kernels_that_fail_are_left_out_with_one_warning(
    failing: Any, caplog: pytest.LogCaptureFixture, operation: str, how: Exception | str, said: str
) -> None:
    failing(operation, how)
    with caplog.at_level(logging.WARNING):
        faults = try_codecs([codec_named("q4")], CPU)
    assert said in faults["q4"]
    (record,) = caplog.records
    assert "q4 runs in plain torch on cpu" in record.message and said in record.message
    assert codec_named("q4")._kernels(torch.zeros(1)) is None  # type: ignore[attr-defined]
    assert codec_named("q8")._kernels(torch.zeros(1)) is not None  # type: ignore[attr-defined]
    assert try_codecs([codec_named("q4")], CPU) == {}


def test_a_device_on_which_the_reference_differs_too_is_refused(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failing("encode", "changed")
    monkeypatch.setattr(self_test, "leave_to_reference", lambda name, device: None)
    with pytest.raises(UnsupportedHost, match="q4 cannot run on cpu: encoding gives other bytes"):
        try_codecs([codec_named("q4")], CPU)
    assert gpu_kernels(CPU).level == "fail"


def test_doctor_tries_the_usual_codecs(failing: Any) -> None:
    assert gpu_kernels(CPU).level == "ok"
    failing("add", RuntimeError("no kernel image is available"))
    found = gpu_kernels(CPU)
    assert found.level == "warn" and "q8: no kernel image is available" in found.detail
