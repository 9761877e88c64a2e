"""The largest of every chunk, against a second implementation in plain Python written from the README's section."""

import dataclasses
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from farloop.algo.spec import Fragment, TensorSlot
from farloop.quant.codec import Codec, flat
from farloop.quant.errors import BadPayload, NonFiniteError
from farloop.quant.formats.topk import TOPK

any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
usual_size = st.floats(-1, 1, width=32).filter(lambda value: value == 0 or abs(value) > 1e-20)
few_values = st.sampled_from([-1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0])  # many ties
SHAPES = [(), (1,), (63,), (64,), (65,), (200,), (7, 9), (64, 64), (128, 64), (64, 192), (2, 5, 7), (65, 64), (3, 1500)]


def fragment_of(*shapes: tuple[int, ...]) -> Fragment:
    tensors, offset = [], 0
    for index, shape in enumerate(shapes):
        tensors.append(TensorSlot(name=str(index), shape=shape, offset=offset))
        offset += -(-tensors[-1].numel // 256) * 256
    return Fragment(index=0, slot=0, numel=offset, tensors=tuple(tensors))


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def bf16(value: float) -> int:
    bits = struct.unpack("<I", struct.pack("<f", np.float32(value)))[0]
    rounded = min((bits + 0x7FFF + (bits >> 16 & 1)) >> 16, 0x7F7F)
    return rounded if rounded >= 0x0D80 else 0


def chunks_of(fragment: Fragment) -> list[list[int]]:
    """Elements of every chunk, in the order of their indices."""
    chunks = []
    for tensor in fragment.tensors:
        shape, n = tensor.shape, tensor.numel
        if len(shape) == 2 and not shape[0] % 64 and not shape[1] % 64:
            for top in range(0, shape[0], 64):
                for left in range(0, shape[1], 64):
                    rows = range(top, top + 64)
                    chunks.append([tensor.offset + r * shape[1] + c for r in rows for c in range(left, left + 64)])
        else:
            size = 64 if len(shape) < 2 and n < 65536 else 4096
            chunks += [[tensor.offset + i for i in range(first, min(first + size, n))] for first in range(0, n, size)]
    return chunks


def levels_of(sizes: list[float]) -> tuple[int, int, int]:
    """Bits of the two magnitudes, and how many elements have the larger one, of falling sizes."""
    e = max(math.frexp(sizes[0])[1] - 1, -126) if sizes[0] else -126
    m = [round(math.ldexp(size, 23 - e)) for size in sizes]
    k, best, chosen = len(m), -1.0, 1
    for s in range(1, k + 1):
        top, rest = float(sum(m[:s])), float(sum(m[s:]))
        kept = top * top / s + (rest * rest / (k - s) if s < k else 0.0)
        if kept > best:
            best, chosen = kept, s
    low = sum(m[chosen:]) / (k - chosen) if chosen < k else 0.0
    return bf16(math.ldexp(low, e - 23)), bf16(math.ldexp(sum(m[:chosen]) / chosen, e - 23)), chosen


def oracle(x: np.ndarray, fragment: Fragment, k: int) -> bytes:
    magnitudes, places, values = b"", 0, 0
    count = 0
    for chunk in chunks_of(fragment):
        kept = -(-k * len(chunk) // 4096)
        falling = sorted(range(len(chunk)), key=lambda i: (-abs(float(x[chunk[i]])), i))[:kept]
        low, high, s = levels_of([abs(float(x[chunk[i]])) for i in falling])
        magnitudes += struct.pack("<HH", low, high)
        for i in sorted(falling):
            places |= i << 12 * count
            values |= (int(x[chunk[i]] < 0) | 2 * (falling.index(i) < s)) << 2 * count
            count += 1
    magnitudes += bytes(-len(magnitudes) % 64)
    return magnitudes + places.to_bytes(-(-3 * count // 2), "little") + values.to_bytes(-(-count // 4), "little")


def decoded_by_oracle(payload: bytes, fragment: Fragment, k: int) -> np.ndarray:
    chunks = chunks_of(fragment)
    kept = [-(-k * len(chunk) // 4096) for chunk in chunks]
    start = -(-4 * len(chunks) // 64) * 64
    middle = start + -(-3 * sum(kept) // 2)
    places, values = int.from_bytes(payload[start:middle], "little"), int.from_bytes(payload[middle:], "little")
    out, first = np.zeros(fragment.numel, np.float32), 0
    for number, (chunk, k_of_chunk) in enumerate(zip(chunks, kept, strict=True)):
        for entry in range(first, first + k_of_chunk):
            value = values >> 2 * entry & 3
            bits = struct.unpack_from("<HH", payload, 4 * number)[value >> 1] << 16 | (value & 1) << 31
            out[chunk[places >> 12 * entry & 4095]] = struct.unpack("<f", struct.pack("<I", bits))[0]
        first += k_of_chunk
    return out


def check(x: np.ndarray, fragment: Fragment, k: int) -> None:
    codec = dataclasses.replace(TOPK, k=k)
    payload = codec.encode(torch.from_numpy(x), fragment)
    assert bytes(payload.tolist()) == oracle(x, fragment, k)
    codec.validate(payload, fragment)
    expected = decoded_by_oracle(bytes(payload.tolist()), fragment, k)
    assert np.array_equal(codec.decode(payload, fragment).numpy().view(np.int32), expected.view(np.int32))


@given(data=st.data(), k=st.sampled_from([1, 64, 100, 1000, 4096]))
@settings(deadline=None, max_examples=60)
def test_bytes_and_numbers_equal_the_oracle(data: st.DataObject, k: int) -> None:
    elements = data.draw(st.sampled_from([any_size, usual_size, few_values]))
    fragment = fragment_of(*data.draw(st.lists(st.sampled_from(SHAPES[:7]), min_size=0, max_size=3)))
    check(data.draw(hnp.arrays(np.float32, fragment.numel, elements=elements, fill=elements)), fragment, k)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k", [64, 700])
def test_every_shape_is_cut_as_specified(shape: tuple[int, ...], k: int) -> None:
    fragment = fragment_of((5,), shape, (130,))
    check(gaussian(fragment.numel).numpy(), fragment, k)


def test_pieces_do_not_show_in_the_bytes() -> None:
    """Wide and high matrices, and long runs, are worked on in several pieces."""
    fragment = fragment_of((256, 4096), (70_000,), (71, 4000))
    x = gaussian(fragment.numel)
    payload, together = TOPK.encode(x, fragment), 0.0
    for tensor in fragment.tensors:
        part = slice(tensor.offset, tensor.offset + tensor.numel)
        alone = fragment_of(tensor.shape)
        padded = torch.zeros(alone.numel)
        padded[: tensor.numel] = x[part]
        decoded = TOPK.decode(TOPK.encode(padded, alone), alone)[: tensor.numel]
        assert torch.equal(TOPK.decode(payload, fragment)[part], decoded)
        together += float(decoded.count_nonzero())
    assert together == pytest.approx(x.numel() / 64, rel=0.01)


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    decoded = TOPK.decode(TOPK.encode(torch.full((65536,), -0.5), flat(65536)), flat(65536)).view(-1, 4096)
    assert (decoded[:, :64] == -0.5).all()
    assert not decoded[:, 64:].any()


def test_padding_between_tensors_is_not_sent() -> None:
    fragment = fragment_of((100,), (64, 64))
    x = gaussian(fragment.numel)
    payload = TOPK.encode(x, fragment)
    x[100:256] = 7.0
    assert torch.equal(TOPK.encode(x, fragment), payload)
    assert not TOPK.decode(payload, fragment)[100:256].any()


def lost(x: Tensor, fragment: Fragment, codec: Codec) -> float:
    decoded = codec.decode(codec.encode(x, fragment), fragment).double()
    return float((x.double() - decoded).square().sum() / x.double().square().sum())


def test_gaussian_loss_is_as_published() -> None:
    fragment = fragment_of((1024, 1024))
    assert lost(gaussian(1 << 20), fragment, TOPK) == pytest.approx(0.88, rel=0.01)
    assert lost(gaussian(1 << 20), fragment, dataclasses.replace(TOPK, k=128)) == pytest.approx(0.80, rel=0.01)


@pytest.mark.parametrize("k", [1, 2, 64, 1000, 4096])
def test_the_contraction_holds_where_two_magnitudes_fit_worst(k: int) -> None:
    """The proof's worst sizes, √i − √(i−1), then a plateau."""
    root = torch.arange(k + 1, dtype=torch.float64).sqrt()
    x = torch.full((65536,), float(root[-1] - root[-2]))
    x.view(-1, 4096)[:, :k] = (root[1:] - root[:-1]).float()
    codec = dataclasses.replace(TOPK, k=k)
    assert lost(x, flat(65536), codec) <= 1 - codec.traits.contraction


@pytest.mark.parametrize("k", [1, 2, 64])
def test_the_contraction_is_nearly_reached(k: int) -> None:
    codec = dataclasses.replace(TOPK, k=k)
    kept = 1 - lost(torch.ones(65536), flat(65536), codec)
    assert kept == k / 4096
    assert codec.traits.contraction <= kept < 1.02 * codec.traits.contraction


@given(data=st.data(), k=st.sampled_from([1, 64, 1000]), power=st.integers(-99, 30))
@settings(deadline=None, max_examples=60)
def test_some_of_everything_is_kept(data: st.DataObject, k: int, power: int) -> None:
    """From 2⁻⁹⁹ on: chunks below 2⁻¹⁰⁰ are written as zeros."""
    elements = st.integers(-(2**20), 2**20).map(lambda value: float(value) ** 3)
    x = torch.from_numpy(data.draw(hnp.arrays(np.float32, st.integers(1, 200), elements=elements, fill=elements)))
    x *= 2.0**power
    if x.any():
        codec = dataclasses.replace(TOPK, k=k)
        assert lost(x, flat(x.numel()), codec) <= 1 - codec.traits.contraction


def test_the_residual_holds_what_was_not_sent_and_stays_bounded() -> None:
    fragment, codec = fragment_of((64, 128)), dataclasses.replace(TOPK, beta=1.0)
    x, residual, sent = gaussian(8192), torch.zeros(8192), torch.zeros(8192)
    payload = codec.encode(x, fragment)
    for _ in range(300):
        codec.encode_feedback_(x, residual, payload, fragment)
        codec.decode_add_(payload, sent, 1.0, fragment)
    torch.testing.assert_close(sent + residual, 300 * x, rtol=0, atol=1e-4)
    assert float(residual.norm()) < 60 * float(x.norm())
    assert float((sent / 300 - x).norm() / x.norm()) < 0.2


@pytest.mark.parametrize("weight", [0.3, -0.3, 0.0, -0.0, 1e-45])
def test_the_scatter_equals_the_arithmetic_of_every_codec(weight: float) -> None:
    """To the sign of zero."""
    fragment = fragment_of((64, 64), (100,))
    x = gaussian(fragment.numel)
    acc = gaussian(fragment.numel, 1)
    acc[::3] = -0.0
    expected, payload = acc.clone(), TOPK.encode(x, fragment)
    Codec.decode_add_(TOPK, payload, expected, weight, fragment)
    TOPK.decode_add_(payload, acc, weight, fragment)
    assert torch.equal(acc.view(torch.int32), expected.view(torch.int32))


def test_the_first_bad_element_is_named() -> None:
    fragment = fragment_of((64, 64), (10,))
    x = gaussian(fragment.numel)
    x[100:] = torch.nan
    with pytest.raises(NonFiniteError, match="element 100 "):
        TOPK.encode(x, fragment)


def changed(payload: Tensor, at: int, to: int) -> Tensor:
    payload = payload.clone()
    payload[at] = to
    return payload


def test_what_no_encoder_writes_is_refused() -> None:
    """One vector of 65 elements: chunks of 64 and 1, with 1 entry each; then 195 with k = 128: 2, 2, 2 and 1."""
    small, payload = flat(65), TOPK.encode(gaussian(65), flat(65))
    assert payload.numel() == 64 + 3 + 1
    for at, to, why in [
        (3, 0x7F, "out of range"),  # 0x7F.. of magnitude 1: an infinity or a NaN
        (3, 0xBF, "out of range"),  # negative
        (8, 1, "not zero"),
        (66, 0x10, "outside"),  # place 256 of a chunk of 1
        (67, 0x10, "not zero"),
    ]:
        bad = changed(payload, at, to)
        if why == "out of range":
            bad[2] = 0xFF
        with pytest.raises(BadPayload, match=why):
            TOPK.validate(bad, small)
    TOPK.validate(payload, small)
    codec, fragment = dataclasses.replace(TOPK, k=128), flat(193)
    good = codec.encode(gaussian(193), fragment)
    first = int(good[64]) | (int(good[65]) & 15) << 8
    twice = changed(changed(good, 65, first >> 8 | (first & 15) << 4), 66, first >> 4)
    for bad in (twice, changed(good, 66, 0xFF)):
        with pytest.raises(BadPayload, match="rise"):
            codec.validate(bad, fragment)
    with pytest.raises(BadPayload, match="rise"):
        codec.validate(torch.cat((good[2:4], good[:2], good[4:])), fragment)
    with pytest.raises(BadPayload, match="half byte"):
        codec.validate(changed(good, 64 + 10, 0xF0 | int(good[74])), fragment)
    with pytest.raises(BadPayload, match="are right"):
        codec.validate(good[:-1], fragment)


@given(data=st.data())
@settings(deadline=None, max_examples=80)
def test_hostile_bytes_are_refused_or_decode_to_finite_numbers(data: st.DataObject) -> None:
    fragment = fragment_of((data.draw(st.integers(1, 200)),), (3, 5))
    payload = TOPK.encode(gaussian(fragment.numel), fragment)
    if data.draw(st.booleans()):
        payload = torch.tensor(
            list(data.draw(st.binary(min_size=payload.numel(), max_size=payload.numel()))), dtype=torch.uint8
        )
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, payload.numel() - 1))] = data.draw(st.integers(0, 255))
    try:
        TOPK.validate(payload, fragment)
    except BadPayload:
        return
    decoded = TOPK.decode(payload, fragment)
    assert torch.isfinite(decoded).all()
    smaller = bytes(payload.tolist())[:2]  # of the first chunk's two magnitudes; nobody need have the larger
    assert smaller == b"\0" * 2 or decoded.any()
