"""Covers `node/encoder.py` (protocol H, M, Q)."""

import queue

import pytest
import torch
from torch import nn

from farloop.algo.fragments import partition, trainable_tensors
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId
from farloop.node import events as ev
from farloop.node.encoder import Encoder, encode_delta
from farloop.node.errors import NonFiniteDelta
from farloop.node.replica import Replica
from farloop.quant.blob import Expected, parse_blob
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest
from farloop.wire.messages import Offer

A = NodeId("a")


@pytest.fixture
def replica() -> Replica:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(module)]
    return Replica(module, partition(shapes, pattern="whole"), gradients=False)


def command(*, codec: str = "q4", seq: int = 1) -> ev.Encode:
    blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=6, node=A, incarnation=2, seq=seq)
    return ev.Encode(blob=blob, window=7, codec=codec, steps=30, tokens=3000)


def delta_of(replica: Replica) -> torch.Tensor:
    numel = replica.layout.fragments[0].numel
    return torch.randn(numel, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("codec", ["q4", "q8", "bf16", "fp32", "e3m0"])
def test_a_delta_becomes_a_blob_that_the_coordinator_accepts_and_its_offer(replica: Replica, codec: str) -> None:
    """H, Q: base and window in the header, norm² of what it decodes to."""
    delta = delta_of(replica)
    numel = len(delta)
    offer, data = encode_delta(replica, command(codec=codec), delta.clone(), 5, 60)
    coder = codec_named(codec)
    expect = Expected(codecs=(coder,), fragment=0, numel=numel, version=7, base=6, newest_epoch=5)
    header, payload = parse_blob(data, expect)
    decoded = coder.decode(payload, numel)
    assert torch.equal(decoded, coder.decode(coder.encode(delta), numel))
    assert header.epoch == 5
    norm_sq = float(decoded.double().square().sum())
    assert offer.contributors[0].norm_sq == pytest.approx(norm_sq, rel=1e-12)
    assert offer == Offer(
        blob=command().blob,
        size=len(data),
        digest=blob_digest(data),
        window=7,
        contributors=(
            Contribution(node=A, incarnation=2, base=6, steps=30, tokens=3000, norm_sq=offer.contributors[0].norm_sq),
        ),
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_told_by_its_parameter_and_nothing_is_made_of_it(
    replica: Replica, value: float
) -> None:
    delta = delta_of(replica)
    slot = next(slot for slot in replica.layout.fragments[0].tensors if slot.name == "1.weight")
    delta[slot.offset + 3] = value
    with pytest.raises(NonFiniteDelta, match=r"parameter '1\.weight' holds NaN or Inf after inner step 60"):
        encode_delta(replica, command(), delta, 5, 60)


def test_the_buffer_goes_back_to_the_replica_whatever_happens(replica: Replica) -> None:
    first = replica.take(0)
    encode_delta(replica, command(), first, 1, 1)
    again = replica.take(0)
    assert again.data_ptr() == first.data_ptr()
    again[0] = float("nan")
    with pytest.raises(NonFiniteDelta):
        encode_delta(replica, command(), again, 1, 1)
    assert replica.take(0).data_ptr() == first.data_ptr()


def test_the_thread_reports_every_delta_in_the_order_it_was_taken_and_every_failure(replica: Replica) -> None:
    """X: the training thread hears of both."""
    reports: queue.SimpleQueue[int | str] = queue.SimpleQueue()
    encoder = Encoder(
        replica,
        lambda offer, data: reports.put(offer.blob.seq if len(data) == offer.size else -1),
        lambda error: reports.put(type(error).__name__),
    )
    broken = delta_of(replica)
    broken[0] = float("nan")
    encoder.submit(command(seq=1), delta_of(replica), 1, 1)
    encoder.submit(command(seq=2), broken, 1, 1)
    encoder.submit(command(seq=3, codec="no such codec"), delta_of(replica), 1, 1)
    encoder.submit(command(seq=4), delta_of(replica), 1, 1)
    encoder.close()
    assert [reports.get_nowait() for _ in range(4)] == [1, "NonFiniteDelta", "UnknownCodec", 4]
    assert reports.empty()
