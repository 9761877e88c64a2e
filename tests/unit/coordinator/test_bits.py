"""L-GreCo's choice, made by the coordinator from the delta it has just merged."""

import dataclasses

import pytest
import torch
from coordinator_run import A, B, C
from plain_runs import plain_terms
from torch import Tensor

from farloop.algo.spec import Fragment, TensorSlot, WindowTerms
from farloop.coordinator.commits import as_chosen, next_codec, next_codecs, with_chosen
from farloop.quant.bit_rates import measure
from farloop.quant.codec import Codec
from farloop.quant.formats.q4r import Q4rCodec
from farloop.quant.registry import codec_named

SLOTS = tuple(
    TensorSlot(name=name, shape=shape, offset=offset)
    for name, shape, offset in (("0", (64, 64), 0), ("1", (128, 64), 4096), ("2", (100,), 12288))
)
NUMEL = 4096 + 8192 + 256
FRAGMENT = Fragment(index=0, slot=0, numel=NUMEL, tensors=SLOTS)


def gaussian(*scales: float) -> Tensor:
    """Of another size in every tensor."""
    x, generator = torch.zeros(NUMEL), torch.Generator().manual_seed(0)
    for slot, scale in zip(SLOTS, scales, strict=True):
        x[slot.offset : slot.offset + slot.numel] = torch.randn(slot.numel, generator=generator) * scale
    return x


DELTA = gaussian(1e-2, 1e-3, 1e-3)


def price(codec: Codec) -> tuple[int, float]:
    """Bits and squared error of the whole fragment."""
    assert isinstance(codec, Q4rCodec)
    steps = codec.step if len(codec.step) > 1 else codec.step * len(SLOTS)
    rates = [
        measure(codec_named(f"q4r:step={step}"), DELTA[slot.offset : slot.offset + slot.numel])
        for slot, step in zip(SLOTS, steps, strict=True)
    ]
    return sum(rate.bits for rate in rates), sum(rate.error for rate in rates)


@pytest.mark.parametrize("codec_up", ["q4", "q4r", "q4r:policy=absolute", "topk"])
def test_it_is_made_only_where_it_is_asked_for(codec_up: str) -> None:
    assert next_codec(codec_up, gaussian(1.0, 1.0, 1.0), FRAGMENT) is None


def test_large_tensors_get_fine_steps_and_small_ones_coarse_for_fewer_bits_at_no_more_error() -> None:
    chosen = next_codec("q4r:policy=l-greco", DELTA, FRAGMENT)
    assert chosen is not None
    codec = codec_named(chosen)
    assert isinstance(codec, Q4rCodec) and codec.policy == "relative"
    assert codec.step[0] < codec.step[1] and len(codec.step) == 3
    (bits, error), (uniform_bits, uniform_error) = price(codec), price(codec_named("q4r"))
    assert bits < 0.95 * uniform_bits and error <= uniform_error * (1 + 1e-6)


def test_alpha_is_how_much_the_error_may_grow() -> None:
    prices = []
    for alpha in ("1", "1.5", "3"):
        chosen = next_codec(f"q4r:policy=l-greco,alpha={alpha}", DELTA, FRAGMENT)
        assert chosen is not None and "alpha" not in chosen
        prices.append(price(codec_named(chosen)))
    _, error = price(codec_named("q4r"))
    assert all(spent <= alpha * error * (1 + 1e-6) for (_, spent), alpha in zip(prices, (1, 1.5, 3), strict=True))
    assert prices[0][0] > prices[1][0] > prices[2][0]


def test_the_other_settings_stay_and_a_delta_of_zeros_has_a_choice_too() -> None:
    chosen = next_codec("q4r:policy=l-greco,rounding=nearest,step=0.7", DELTA, FRAGMENT)
    assert chosen is not None and chosen.endswith("rounding=nearest")
    codec_named("q4r").validate(codec_named(chosen).encode(DELTA, FRAGMENT), FRAGMENT)  # decoders need not know
    assert next_codec("q4r:policy=l-greco", torch.zeros(NUMEL), FRAGMENT) is not None


def spectrum(*decays: float) -> Tensor:
    """Matrices whose singular values and elements fall at another pace in each, and a vector."""
    x, generator = torch.zeros(NUMEL), torch.Generator().manual_seed(0)
    for slot, decay in zip(SLOTS[:2], decays, strict=True):
        left, right = (torch.linalg.qr(torch.randn(side, 64, generator=generator)).Q for side in slot.shape)
        matrix = (left * decay ** torch.arange(64)) @ right.T
        x[slot.offset : slot.offset + slot.numel] = matrix.reshape(-1)
    return x


@pytest.mark.parametrize(
    ("codec", "delta"),
    [("topk:k=128", gaussian(1e-2, 1e-4, 1e-4)), ("lowrank:rank=4", spectrum(0.9, 0.5))],
    ids=["topk", "lowrank"],
)
def test_tensors_with_more_to_lose_get_a_larger_k_or_rank_and_fragments_fewer_bytes(codec: str, delta: Tensor) -> None:
    name = codec.partition(":")[0]
    chosen, equal = codec_named(next_codec(f"{codec},policy=l-greco", delta, FRAGMENT) or ""), codec_named(codec)
    shares = getattr(chosen, {"topk": "k", "lowrank": "rank"}[name])
    assert len(shares) == 3 and shares[0] > shares[1] and chosen.traits.contraction > 0
    lost = []
    for one in (chosen, equal):
        payload = one.encode(delta, FRAGMENT)
        one.validate(payload, FRAGMENT)
        out = torch.empty(NUMEL)
        one.decode_into(payload, out, FRAGMENT)
        lost.append(float((out - delta).square().sum()))
    assert chosen.payload_bytes(FRAGMENT) < equal.payload_bytes(FRAGMENT) and lost[0] < 1.05 * lost[1]
    assert next_codec(codec, delta, FRAGMENT) is None


def test_every_tensor_is_encoded_as_it_would_be_alone_with_its_k() -> None:
    codec = codec_named("topk:k=256/16/64")
    out, payload = torch.empty(NUMEL), codec.encode(DELTA, FRAGMENT)
    codec.decode_into(payload, out, FRAGMENT)
    for slot, k in zip(SLOTS, (256, 16, 64), strict=True):
        here = slice(slot.offset, slot.offset + slot.numel)
        alone = Fragment(index=0, slot=0, numel=slot.numel, tensors=(dataclasses.replace(slot, offset=0),))
        own, expected = codec_named(f"topk:k={k}"), torch.empty(slot.numel)
        own.decode_into(own.encode(DELTA[here], alone), expected, alone)
        assert torch.equal(out[here], expected)
    with pytest.raises(ValueError, match="zip"):
        codec_named("topk:k=256/16").encode(DELTA, FRAGMENT)


def test_who_has_a_codec_of_its_own_has_a_choice_where_that_asks_for_one() -> None:
    """And what was chosen stands where a window brought nothing new, until something else is asked for."""
    terms = plain_terms(codec_up="q8", codec_up_of=((A, "q4r:policy=l-greco"), (B, "q4")))
    chosen = next_codecs(terms, DELTA, FRAGMENT)
    assert set(chosen) == {"q4r:policy=l-greco"}
    asked = WindowTerms(
        fragment=0, window=2, round=1, tau=0, mix=0.0, codec_up="q8", codec_down="q8", codec_up_of=terms.codecs.up_of
    )
    opened = with_chosen(asked, chosen)
    assert [opened.codec_of(node) for node in (A, B, C)] == [*chosen.values(), "q4", "q8"]
    assert with_chosen(asked, as_chosen(terms, opened)) == opened
    other = dataclasses.replace(asked, codec_up="q4", codec_up_of=((A, "nf4"),))
    assert with_chosen(other, as_chosen(terms, opened)) == other
