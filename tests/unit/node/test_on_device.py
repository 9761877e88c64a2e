"""A node whose weights are on an accelerator sends, keeps and merges the bits of one on a CPU.

Without a GPU the same story runs with anchors that are kept as if the weights were on another device, and on a pretend
CUDA device whose streams run as late as they may, or in a random order (`pretend_cuda.py`).
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from device_story import CODECS, EPOCH, asked, in_the_codecs_thread, of, story
from pretend_cuda import Device, Event, Stream
from torch import Tensor

from farloop.node import devices
from farloop.node import events as ev
from farloop.node.errors import NonFiniteDelta
from farloop.node.model import encoder
from farloop.node.model.encoder import Encoded, encode_delta
from farloop.node.model.replica import Replica
from farloop.quant.registry import CODECS as CODECS_THERE_ARE
from farloop.quant.registry import codec_named

PLACES = [
    ("cpu", "host"),
    pytest.param("cuda", "host", marks=pytest.mark.gpu),
    pytest.param("cuda", "device", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("device", "anchors"), PLACES)
def test_blobs_anchors_and_weights_are_those_of_a_cpu(device: str, anchors: str, dtype: torch.dtype) -> None:
    require(device)
    assert differs(story(device, anchors, dtype, apart=device == "cpu"), dtype) is None


@cache
def on_cpu(dtype: torch.dtype, codecs: tuple[str, ...]) -> list[Any]:
    return story("cpu", "device", dtype, codecs=codecs)


def differs(found: list[Any], dtype: torch.dtype, codecs: tuple[str, ...] = CODECS) -> str | None:
    """The first number that is not the one of a CPU."""
    assert len(found) == len(on_cpu(dtype, codecs)) > 20
    for place, (one, other) in enumerate(zip(found, on_cpu(dtype, codecs), strict=True)):
        if not (torch.equal(one, other) if isinstance(one, Tensor) else one == other):
            return f"number {place} differs: {str(one)[:200]} and {str(other)[:200]}"
    return None


@pytest.mark.parametrize("order", ["lazy", "random"])
@pytest.mark.parametrize("anchors", ["host", "device"])
@pytest.mark.parametrize("kind", ["whole fp32", "whole bf16", "sharded", "reference"])
def test_the_pretend_device_has_the_bits_of_a_cpu_in_every_order(kind: str, anchors: str, order: str) -> None:
    dtype = torch.bfloat16 if kind == "whole bf16" else torch.float32
    codecs = ("q4", "q8", "q4r:beta=0.9") if kind == "reference" else CODECS
    with Device(order, kernels=kind != "reference") as cuda:
        found = story("cuda", anchors, dtype, sharded=kind == "sharded", codecs=codecs)
    assert differs(found, dtype, codecs) is None and not cuda.races
    assert max(cuda.h2d.values()) > 0 and max(cuda.d2h.values()) > 0


def _no_wait(self: devices.SideStream, job: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with torch.cuda.stream(self._stream):  # type: ignore[arg-type]
            job()
            self._stream.synchronize()  # type: ignore[union-attr]

    return run


def _given_back_early(replica: Replica, command: ev.Encode, delta: Tensor, *rest: Any) -> Encoded:
    replica.give_back(delta)
    replica.give_back = lambda buffer: None  # type: ignore[method-assign]
    return encode_delta(replica, command, delta, *rest)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "the codec's thread begins before the delta is taken": (devices.SideStream, "beside", _no_wait),
    "a delta is given back before it is encoded": (encoder, "encode_delta", _given_back_early),
    "events are not waited for": (Event, "synchronize", lambda self: None),
    "no stream waits for an event": (Stream, "wait_event", lambda self, event: None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_missing_wait_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codecs = ("q4", "q8", "q4r:beta=0.9")
    assert differs(on_cpu(torch.float32, codecs), torch.float32, codecs) is None
    monkeypatch.setattr(*MUTANTS[mutant])
    with Device("lazy") as cuda, suppress(NonFiniteDelta):
        assert differs(story("cuda", "host", torch.float32, codecs=codecs), torch.float32, codecs) or cuda.races


@pytest.mark.parametrize(("device", "anchors"), PLACES)
@torch.no_grad()
def test_every_codec_encodes_what_lies_there(device: str, anchors: str) -> None:
    """Those that multiply matrices, or look at whole tensors, need not write the bytes of a CPU."""
    require(device)
    replica = of(device, anchors, torch.float32, apart=device == "cpu")
    for parameter in replica.parameters.values():
        parameter.add_(0.01)
    for name in CODECS_THERE_ARE:
        for spelling in (name, f"{name}:beta=0.5"):
            residual = torch.zeros_like(replica.anchors[0].read()) if codec_named(spelling).beta else None
            sent = in_the_codecs_thread(replica, asked(0, 0, spelling), residual)
            assert replica.parsed(0, 1, 0, spelling, EPOCH, sent.data).payload is not None
            assert residual is None or not residual.isnan().any()


def require(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
