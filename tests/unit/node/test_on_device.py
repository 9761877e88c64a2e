"""A node whose weights are on an accelerator sends, keeps and merges the bits of one on a CPU.

Without a GPU the same story runs with anchors that are kept as if the weights were on another device.
"""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from farloop.algo.fragments import partition, trainable_tensors, zero_padding_
from farloop.algo.spec import BlobId, BlobKind, NodeId, WindowTerms
from farloop.node import events as ev
from farloop.node.encoder import Encoded, encode_delta, finish, pack_at_once
from farloop.node.replica import OwnDelta, Replica, matched_parameters
from farloop.node.shards import Weights
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.registry import CODECS as CODECS_THERE_ARE
from farloop.quant.registry import codec_named

EPOCH = 1
CODECS = ("fp32", "bf16", "q8", "q4", "e3m0", "q4r", "q4r:beta=0.9", "e2m1", "nf4")


def model(dtype: torch.dtype) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    module = nn.Sequential(nn.Linear(100, 331), nn.LayerNorm(331), nn.Linear(331, 250, bias=False))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator)
    return module.to(dtype)


def in_the_codecs_thread(replica: Replica, command: ev.Encode, residual: Tensor | None) -> Encoded:
    """As the executor does it."""
    done = list[Encoded]()
    if (packed := pack_at_once(replica, command, EPOCH, 1, residual)) is not None:
        return finish(packed)
    delta = replica.take(command.blob.fragment)
    job = replica.side.beside(lambda: done.append(encode_delta(replica, command, delta, EPOCH, 1, residual)))
    thread = threading.Thread(target=job)
    thread.start()
    for parameter in replica.parameters.values():
        parameter.detach().add_(0.0)  # training goes on
    thread.join()
    return done[0]


def of(device: str, anchors: Any, dtype: torch.dtype, *, apart: bool) -> Replica:
    module = model(dtype).to(device)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(module)]
    layout = partition(shapes, pattern="balanced", fragments=2)
    weights = Weights(layout, matched_parameters(module, layout), anchors=anchors)
    weights.apart = weights.apart or apart
    return Replica(module, layout, gradients=False, weights=weights)


def asked(index: int, version: int, codec: str) -> ev.Encode:
    blob = BlobId(kind=BlobKind.DELTA, fragment=index, version=version, node=NodeId("oslo"), incarnation=1)
    return ev.Encode(blob=blob, window=version + 1, codec=codec, steps=3, tokens=64)


@torch.no_grad()
def story(device: str, anchors: Any, dtype: torch.dtype, *, apart: bool = False) -> list[Any]:
    """Every blob, digest and weight of some rounds."""
    replica = of(device, anchors, dtype, apart=apart)
    layout, parameters = replica.layout, list(replica.parameters.values())
    found = list[Any]()
    for index in replica.anchors:
        assert not replica.first(index, 1)
        assert replica.first(index, replica.weights.digest(index, replica.anchors[index]))
    for number, spelling in enumerate(CODECS):
        codec = codec_named(spelling)
        for index, fragment in enumerate(layout.fragments):
            for parameter in parameters:
                parameter.mul_(1 + 2**-6)
            residual = torch.zeros(fragment.numel, device=replica.device) if codec.beta else None
            version = number + 1
            command = asked(index, number, spelling)
            sent = in_the_codecs_thread(replica, command, residual)
            found += [bytes(sent.data), sent.offer, None if residual is None else residual.cpu()]
            x = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(number)) * 1e-3
            zero_padding_(fragment, x)
            header = BlobHeader(codec=codec_named("q4"), fragment=fragment, version=version, base=number, epoch=EPOCH)
            down = pack_blob(header, header.codec.encode(x, fragment, seed=header.seed))
            replica.apply(index, version, down, "q4", EPOCH, 0)
            found += [replica.digests[index], replica.anchors[index].cpu().clone()]
            terms = WindowTerms(
                fragment=index, window=version, round=0, tau=0, mix=0.0, codec_up=spelling, codec_down="q4"
            )
            own = OwnDelta(blob=command.blob, terms=terms, data=sent.data)
            replica.merge(index, 0.5 * (number % 2), [own] if number % 3 else [], 0.3, EPOCH)
            learned = [
                replica.parsed(index, version, number, spelling, EPOCH, sent.data),
                replica.parsed(index, version, number, "q4", EPOCH, down),
            ]
            replica.learn(index, *learned, outer_lr=0.7, lr_sum=0.3, alpha=0.5)
            replica.correct(index, 0.01)
            found += [replica.drifts[index].cpu().clone(), *(p.detach().cpu().clone() for p in parameters)]
    with replica.anchors_in_place():
        found += [parameter.detach().cpu().clone() for parameter in parameters]
    found += [parameter.detach().cpu() for parameter in parameters]
    replica.versions[0] = 7
    snapshot = replica.anchor_blob(0, EPOCH)
    assert replica.install(0, 7, snapshot, EPOCH)
    return [*found, bytes(snapshot), replica.anchors[0].cpu()]


PLACES = [
    ("cpu", "host"),
    pytest.param("cuda", "host", marks=pytest.mark.gpu),
    pytest.param("cuda", "device", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("device", "anchors"), PLACES)
def test_blobs_anchors_and_weights_are_those_of_a_cpu(device: str, anchors: str, dtype: torch.dtype) -> None:
    require(device)
    expected, found = story("cpu", "device", dtype), story(device, anchors, dtype, apart=device == "cpu")
    assert len(found) == len(expected) > 100
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        same = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert same, f"number {place} differs: {str(one)[:200]} and {str(other)[:200]}"


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
            residual = torch.zeros_like(replica.anchors[0]) if codec_named(spelling).beta else None
            sent = in_the_codecs_thread(replica, asked(0, 0, spelling), residual)
            assert replica.parsed(0, 1, 0, spelling, EPOCH, sent.data).payload is not None
            assert residual is None or not residual.isnan().any()


def require(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
