"""Covers `node/encoder.py` (protocol H, M, Q)."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from farloop.algo.fragments import partition, trainable_tensors, zero_padding_
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId
from farloop.node import events as ev
from farloop.node.encoder import encode_delta, finish, pack_at_once
from farloop.node.errors import NonFiniteDelta
from farloop.node.replica import Replica
from farloop.quant.blob import Expected, parse_blob
from farloop.quant.registry import CODECS, codec_named
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
    fragment = replica.layout.fragments[0]
    delta = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(0))
    zero_padding_(fragment, delta)
    return delta


@pytest.mark.parametrize("codec", CODECS)
def test_a_delta_becomes_a_blob_that_the_coordinator_accepts_and_its_offer(replica: Replica, codec: str) -> None:
    """H, Q: base and window in the header, norm² of what it decodes to."""
    delta = delta_of(replica)
    fragment = replica.layout.fragments[0]
    encoded = encode_delta(replica, command(codec=codec), delta.clone(), 5, 60)
    offer, data = encoded.offer, encoded.data
    coder = codec_named(codec)
    expect = Expected(codecs=(coder,), fragment=fragment, version=7, base=6, newest_epoch=5)
    header, payload = parse_blob(data, expect)
    decoded = coder.decode(payload, fragment, seed=header.seed)
    again = coder.encode(delta, fragment, seed=header.seed)
    assert torch.equal(decoded, coder.decode(again, fragment, seed=header.seed))
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


WITH_RESIDUAL = [name for name in CODECS if codec_named(name).beta > 0.0]


@pytest.mark.parametrize("codec", WITH_RESIDUAL)
def test_what_was_lost_before_is_sent_now_and_what_is_lost_now_is_kept(replica: Replica, codec: str) -> None:
    """Error feedback: decoded + new residual = delta + β · old residual."""
    delta, fragment, coder = delta_of(replica), replica.layout.fragments[0], codec_named(codec)
    before = torch.randn(fragment.numel, generator=torch.Generator().manual_seed(1))
    zero_padding_(fragment, before)
    residual = before.clone()
    encoded = encode_delta(replica, command(codec=codec), delta.clone(), 5, 60, residual=residual)
    expect = Expected(codecs=(coder,), fragment=fragment, version=7, base=6, newest_epoch=5)
    header, payload = parse_blob(encoded.data, expect)
    decoded = coder.decode(payload, fragment, seed=header.seed)
    torch.testing.assert_close(decoded + residual, delta + coder.beta * before, rtol=1e-5, atol=1e-5)
    assert encoded.residual_ratio == pytest.approx(float(residual.norm() / delta.norm()), rel=1e-5)
    assert not encoded.at_once


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_told_by_its_parameter_and_nothing_is_made_of_it(
    replica: Replica, value: float
) -> None:
    delta = delta_of(replica)
    slot = next(slot for slot in replica.layout.fragments[0].tensors if slot.name == "1.weight")
    delta[slot.offset + 3] = value
    with pytest.raises(NonFiniteDelta, match=r"parameter '1\.weight' holds NaN or Inf after inner step 60"):
        encode_delta(replica, command(), delta, 5, 60)


def test_two_nodes_and_two_deltas_of_one_node_draw_other_random_numbers(replica: Replica) -> None:
    """Else the errors of stochastic rounding would add up instead of averaging out."""
    first, again = command(codec="q4r", seq=1), command(codec="q4r", seq=2)
    other = dataclasses.replace(first, blob=dataclasses.replace(first.blob, node=NodeId("b")))
    later = dataclasses.replace(first, blob=dataclasses.replace(first.blob, incarnation=3))
    coder, fragment, seeds, decoded = codec_named("q4r"), replica.layout.fragments[0], [], []
    for order in (first, again, other, later):
        data = encode_delta(replica, order, delta_of(replica), 5, 60).data
        expect = Expected(codecs=(coder,), fragment=fragment, version=7, base=6, newest_epoch=5)
        header, payload = parse_blob(data, expect)
        seeds.append(header.seed)
        decoded.append(coder.decode(payload, fragment, seed=header.seed))
    assert len(set(seeds)) == 4
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(decoded, 2))


def test_the_same_delta_sent_again_is_the_same_blob(replica: Replica) -> None:
    one, two = (encode_delta(replica, command(codec="q4r"), delta_of(replica), 5, 60) for _ in range(2))
    assert (one.offer, one.data) == (two.offer, two.data)


def test_the_buffer_goes_back_to_the_replica_whatever_happens(replica: Replica) -> None:
    first = replica.take(0)
    encode_delta(replica, command(), first, 1, 1)
    again = replica.take(0)
    assert again.data_ptr() == first.data_ptr()
    again[0] = float("nan")
    with pytest.raises(NonFiniteDelta):
        encode_delta(replica, command(), again, 1, 1)
    assert replica.take(0).data_ptr() == first.data_ptr()


ONE_PASS = ["fp32", "bf16", "q8", "q4", "q4r", "q4r:rounding=nearest", "e3m0"]


@pytest.mark.parametrize("codec", ONE_PASS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gradients", [False, True])
def test_taken_and_encoded_in_one_pass_it_is_the_same_blob(codec: str, dtype: torch.dtype, gradients: bool) -> None:
    """M: whatever path the bytes take."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(33, 20), nn.Linear(20, 7)).to(dtype)
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(module)]
    replica = Replica(module, partition(shapes, pattern="whole"), gradients=gradients)
    fragment = replica.layout.fragments[0]
    replica.anchors[0].copy_(torch.randn(fragment.numel))
    zero_padding_(fragment, replica.anchors[0])
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    packed = pack_at_once(replica, command(codec=codec), 5, 60)
    if gradients and dtype != torch.float32:
        assert packed is None
        return
    assert packed is not None
    one, other = finish(packed), encode_delta(replica, command(codec=codec), replica.take(0), 5, 60)
    assert (one.offer, one.data) == (other.offer, other.data)


@pytest.mark.parametrize("codec", ["q4:beta=0.5", "topk", "sign"])
def test_what_needs_more_than_one_pass_is_taken_first(replica: Replica, codec: str) -> None:
    """It has a residual, or no kernel."""
    assert pack_at_once(replica, command(codec=codec), 5, 60) is None


def test_in_one_pass_too_a_number_that_is_none_is_told_by_its_parameter(replica: Replica) -> None:
    with torch.no_grad():
        replica.parameters["1.weight"][0, 3] = float("nan")
    with pytest.raises(NonFiniteDelta, match=r"parameter '1\.weight' holds NaN or Inf after inner step 60"):
        pack_at_once(replica, command(), 5, 60)


def test_weights_that_do_not_lie_in_order_are_taken_first(replica: Replica) -> None:
    replica.parameters["1.weight"].data = torch.zeros(8, 4).t()
    assert pack_at_once(replica, command(), 5, 60) is None
