"""Covers `node/model/encoder.py` (protocol H, M, Q)."""

import dataclasses
import itertools

import pytest
import torch
from slow_cases import mostly_slow
from torch import Tensor, nn

from farloop.algo.fragments import partition, trainable_tensors, zero_padding_
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId
from farloop.node import events as ev
from farloop.node.errors import NonFiniteDelta
from farloop.node.model.encoder import Encoded, encode_delta, finish, pack_at_once
from farloop.node.model.replica import Replica
from farloop.quant.blob import Expected, parse_blob
from farloop.quant.registry import CODECS, codec_named
from farloop.wire.blobs import blob_digest
from farloop.wire.messages import Offer

A = NodeId("a")


def replica_of(module: nn.Module, *, gradients: bool = False) -> Replica:
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(module)]
    return Replica(module, partition(shapes, pattern="whole"), gradients=gradients)


@pytest.fixture
def replica() -> Replica:
    return replica_of(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))


def command(codec: str = "q4", **blob: object) -> ev.Encode:
    plain = BlobId(kind=BlobKind.DELTA, fragment=0, version=6, node=A, incarnation=2, seq=1)
    name = dataclasses.replace(plain, **blob)  # type: ignore[arg-type]
    return ev.Encode(blob=name, window=7, codec=codec, steps=30, tokens=3000)


def random(replica: Replica, seed: int = 0) -> Tensor:
    fragment = replica.layout.fragments[0]
    delta = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(seed))
    zero_padding_(fragment, delta)
    return delta


def taken(replica: Replica, delta: Tensor) -> Tensor:
    """In a buffer that the encoder gives back."""
    return replica.buffers.acquire(len(delta)).copy_(delta)


def decoded(replica: Replica, encoded: Encoded, codec: str) -> tuple[int, Tensor]:
    """The seed, and what the coordinator reads, if it accepts the blob."""
    coder, fragment = codec_named(codec), replica.layout.fragments[0]
    expect = Expected(codecs=(coder,), fragment=fragment, version=7, base=6, newest_epoch=5)
    header, payload, _ = parse_blob(encoded.data, expect)
    assert header.epoch == 5
    return header.seed, coder.decode(payload, fragment, seed=header.seed)


@pytest.mark.parametrize("codec", mostly_slow(CODECS, "fp32", "q4", "q4r", "topk", "lowrank"))
def test_a_delta_becomes_a_blob_that_the_coordinator_accepts_and_its_offer(replica: Replica, codec: str) -> None:
    """H, Q: base and window in the header, norm² of what it decodes to."""
    delta, fragment, coder = random(replica), replica.layout.fragments[0], codec_named(codec)
    encoded = encode_delta(replica, command(codec), taken(replica, delta), 5, 60)
    seed, read = decoded(replica, encoded, codec)
    assert torch.equal(read, coder.decode(coder.encode(delta, fragment, seed=seed), fragment, seed=seed))
    (share,) = encoded.offer.contributors
    assert share.norm_sq == pytest.approx(float(read.double().square().sum()), rel=1e-12)
    expected = Contribution(node=A, incarnation=2, base=6, steps=30, tokens=3000, norm_sq=share.norm_sq)
    size, digest = len(encoded.data), blob_digest(encoded.data)
    assert encoded.offer == Offer(blob=command().blob, size=size, digest=digest, window=7, contributors=(expected,))
    untold = encode_delta(replica, dataclasses.replace(command(codec), measure=False), taken(replica, delta), 5, 60)
    assert untold.data == encoded.data and untold.offer.contributors == (dataclasses.replace(expected, norm_sq=0.0),)


@pytest.mark.parametrize("codec", [name for name in CODECS if codec_named(name).beta > 0.0])
def test_what_was_lost_before_is_sent_now_and_what_is_lost_now_is_kept(replica: Replica, codec: str) -> None:
    """Error feedback: decoded + new residual = delta + β · old residual."""
    delta, before = random(replica), random(replica, seed=1)
    residual = before.clone()
    encoded = encode_delta(replica, command(codec), taken(replica, delta), 5, 60, residual=residual)
    _, read = decoded(replica, encoded, codec)
    torch.testing.assert_close(read + residual, delta + codec_named(codec).beta * before, rtol=1e-5, atol=1e-5)
    assert encoded.residual_ratio == pytest.approx(float(residual.norm() / delta.norm()), rel=1e-5)
    assert not encoded.at_once


def test_two_nodes_and_two_deltas_of_one_node_draw_other_random_numbers(replica: Replica) -> None:
    """Else the errors of stochastic rounding would add up. The same delta sent again is the same blob."""
    orders = [command("q4r", **blob) for blob in ({}, {"seq": 2}, {"node": NodeId("b")}, {"incarnation": 3})]
    encoded = [encode_delta(replica, order, taken(replica, random(replica)), 5, 60) for order in [*orders, orders[0]]]
    assert (encoded[0].offer, encoded[0].data) == (encoded[-1].offer, encoded[-1].data)
    seeds, reads = zip(*(decoded(replica, each, "q4r") for each in encoded[:-1]), strict=True)
    assert len(set(seeds)) == 4
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(reads, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_number_that_is_none_is_told_by_its_parameter_and_nothing_is_made_of_it(
    replica: Replica, value: float, at_once: bool
) -> None:
    with torch.no_grad():
        replica.parameters["1.weight"][0, 3] = value
    with pytest.raises(NonFiniteDelta, match=r"parameter '1\.weight' holds NaN or Inf after inner step 60"):
        if at_once:
            pack_at_once(replica, command(), 5, 60)
        else:
            encode_delta(replica, command(), replica.compute_delta(0), 5, 60)


def test_the_buffer_goes_back_to_the_replica_whatever_happens(replica: Replica) -> None:
    first = replica.compute_delta(0)
    encode_delta(replica, command(), first, 1, 1)
    again = replica.compute_delta(0)
    assert again.data_ptr() == first.data_ptr()
    again[0] = float("nan")
    with pytest.raises(NonFiniteDelta):
        encode_delta(replica, command(), again, 1, 1)
    assert replica.compute_delta(0).data_ptr() == first.data_ptr()


@pytest.mark.parametrize("codec", ["fp32", "bf16", "q8", "q4", "q4r", "q4r:rounding=nearest", "e3m0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gradients", [False, True])
def test_taken_and_encoded_in_one_pass_it_is_the_same_blob(codec: str, dtype: torch.dtype, gradients: bool) -> None:
    """M: whatever path the bytes take."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(33, 20), nn.Linear(20, 7)).to(dtype)
    replica = replica_of(module, gradients=gradients)
    replica.anchors[0].write().copy_(random(replica))
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    packed = pack_at_once(replica, command(codec), 5, 60)
    if gradients and dtype != torch.float32:
        assert packed is None
        return
    assert packed is not None
    one, other = finish(packed), encode_delta(replica, command(codec), replica.compute_delta(0), 5, 60)
    assert (one.offer, one.data) == (other.offer, other.data)


@pytest.mark.parametrize("codec", ["q4:beta=0.5", "topk", "sign"])
def test_what_needs_more_than_one_pass_is_taken_first(replica: Replica, codec: str) -> None:
    """It has a residual, or no kernel, or its weights do not lie in order."""
    assert pack_at_once(replica, command(codec), 5, 60) is None
    assert pack_at_once(replica, command(), 5, 60) is not None
    replica.parameters["1.weight"].data = torch.zeros(8, 4).t()
    assert pack_at_once(replica, command(), 5, 60) is None
