"""The story of a node whose weights are on an accelerator, or not: every number of some rounds.

`test_on_device.py` compares those of a device with those of a CPU.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from farloop.algo.fragments import partition, trainable_tensors, zero_padding_
from farloop.algo.spec import BlobId, BlobKind, NodeId, WindowTerms
from farloop.node import events as ev
from farloop.node.cluster import Cluster
from farloop.node.model import encoder
from farloop.node.model.encoder import Encoded, finish, pack_at_once
from farloop.node.model.replica import OwnDelta, Replica, matched_parameters
from farloop.node.model.shards import Shards, Weights
from farloop.quant.blob import BlobHeader, pack_blob
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
    """As the executor does it, with a second delta of the fragment while the first is in the codec's thread, and a
    third as soon as the buffer of the first is free."""
    index, done, taken, give_back = command.blob.fragment, list[Encoded](), list[Tensor](), replica.give_back
    if (packed := pack_at_once(replica, command, EPOCH, 1, residual)) is not None:
        return finish(packed)

    def given_back(buffer: Tensor) -> None:
        give_back(buffer)
        with torch.cuda.stream(torch.cuda.default_stream()) if buffer.is_cuda else nullcontext():
            taken.append(replica.compute_delta(index))

    delta = replica.compute_delta(index)
    replica.give_back = given_back  # type: ignore[method-assign]
    job = replica.side.beside(lambda: done.append(encoder.encode_delta(replica, command, delta, EPOCH, 1, residual)))
    taken.append(replica.compute_delta(index))
    with ThreadPoolExecutor(1) as codec:
        encoded = codec.submit(job)
        for parameter in replica.parameters.values():
            parameter.detach().add_(0.0)  # training goes on
    encoded.result()
    replica.give_back = give_back  # type: ignore[method-assign]
    for buffer in taken:
        give_back(buffer)
    return done[0]


def of(device: str, anchors: Any, dtype: torch.dtype, *, apart: bool, sharded: bool = False) -> Replica:
    module = model(dtype).to(device)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(module)]
    layout = partition(shapes, pattern="balanced", fragments=2)
    parameters = matched_parameters(module, layout)
    weights = Weights(layout, parameters, anchors=anchors)
    if sharded:
        weights = Shards(Cluster(device=weights.device), module, layout, parameters, anchors=anchors)
    weights.apart = weights.apart or apart
    return Replica(module, layout, gradients=False, weights=weights)


def asked(index: int, version: int, codec: str) -> ev.Encode:
    blob = BlobId(kind=BlobKind.DELTA, fragment=index, version=version, node=NodeId("oslo"), incarnation=1)
    return ev.Encode(blob=blob, window=version + 1, codec=codec, steps=3, tokens=64)


@torch.no_grad()
def story(
    device: str,
    anchors: Any,
    dtype: torch.dtype,
    *,
    apart: bool = False,
    sharded: bool = False,
    codecs: tuple[str, ...] = CODECS,
) -> list[Any]:
    """Every blob, digest and weight of some rounds."""
    replica = of(device, anchors, dtype, apart=apart, sharded=sharded)
    layout, parameters = replica.layout, list(replica.parameters.values())
    found = list[Any]()
    for index in replica.anchors:
        assert not replica.first(index, 1)
        assert replica.first(index, replica.weights.digest(index, replica.anchors[index].read()))
    for number, spelling in enumerate(codecs):
        codec = codec_named(spelling)
        for index, fragment in enumerate(layout.fragments):
            for parameter in parameters:
                parameter.mul_(1 + 2**-6)
            residual = replica.zeros(index) if codec.beta else None
            version = number + 1
            command = asked(index, number, spelling)
            sent = in_the_codecs_thread(replica, command, residual)
            found += [bytes(sent.data), sent.offer, None if residual is None else residual.cpu()]
            x = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(number)) * 1e-3
            zero_padding_(fragment, x)
            header = BlobHeader(codec=codec_named("q4"), fragment=fragment, version=version, base=number, epoch=EPOCH)
            down = pack_blob(header, header.codec.encode(x, fragment, seed=header.seed))
            replica.apply(index, version, down, "q4", EPOCH, 0)
            found += [replica.digests[index], replica.anchors[index].read().cpu().clone()]
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
            found += [replica.drifts[index].read().cpu().clone(), *(p.detach().cpu().clone() for p in parameters)]
    with replica.anchors_in_place():
        found += [parameter.detach().cpu().clone() for parameter in parameters]
    found += [parameter.detach().cpu() for parameter in parameters]
    replica.versions[0] = 7
    snapshot = replica.anchor_blob(0, EPOCH)
    assert replica.install(0, 7, snapshot, EPOCH)
    return [*found, bytes(snapshot), replica.anchors[0].read().cpu()]
