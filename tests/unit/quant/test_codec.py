"""Laws that every codec obeys, and the walk over tiles. Protocol M, N; invariants B25, D39."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from farloop.algo.spec import TILE
from farloop.quant.codec import Codec
from farloop.quant.errors import BadPayload, NonFiniteError
from farloop.quant.registry import CODECS

LENGTHS = [0, 1, 63, 64, 65, 255, 256, 257, 4096]

LARGEST_ERROR = {
    "fp32": 0.0,
    "bf16": 2.0**-8,
    "q8": 0.013,  # half a step is 0.4 %; the last 1.2 % below fp32's largest number are out of reach
    "q4": 0.126,  # half a step is 6.3 %, a whole one where +8 would be needed
    "e3m0": 0.251,  # midway between a half and one
}
"""In units of the block's largest magnitude."""

LARGEST_FLUSHED = 127 * 2.0**-100
"""Blocks whose scale would be below 2⁻¹⁰⁰ become zero."""

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
finite_arrays = hnp.arrays(
    np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def at_odd_address(data: Tensor) -> Tensor:
    """The same bytes, one byte after an aligned address."""
    moved = torch.empty(data.numel() + 1, dtype=torch.uint8)[1:]
    assert moved.data_ptr() % 2 == 1
    return moved.copy_(data)


@every_codec
@pytest.mark.parametrize("numel", [*LENGTHS, TILE, TILE + 1, (1 << 31) + 64])
def test_payload_size_is_scales_then_alignment_then_codes(codec: Codec, numel: int) -> None:
    blocks = (numel + codec.block - 1) // codec.block
    scales = {"fp32": 0, "bf16": 0}.get(codec.name, 2 * blocks)
    codes = blocks * codec.block * {"fp32": 32, "bf16": 16, "q8": 8, "q4": 4, "e3m0": 4}[codec.name] // 8
    assert codec.payload_bytes(numel) == (scales + 63) // 64 * 64 + codes


@every_codec
def test_bytes_on_the_wire_follow_the_declared_bits(codec: Codec) -> None:
    """B25: measured against expected within 1 %."""
    for numel in (64 << 10, 1 << 20):
        measured = codec.encode(gaussian(numel)).numel()
        assert measured == pytest.approx(codec.bits_per_element * numel / 8, rel=0.01)


@pytest.mark.parametrize("name", ["q4", "e3m0"])
def test_four_bits_are_between_3_5_and_4_times_smaller_than_bf16(name: str) -> None:
    """B25."""
    assert 3.5 < CODECS["bf16"].payload_bytes(1 << 20) / CODECS[name].payload_bytes(1 << 20) < 4


@every_codec
@given(array=finite_arrays)
@settings(deadline=None, max_examples=60)
def test_whatever_is_finite_is_encoded_validly_and_decodes_near_it(codec: Codec, array: np.ndarray) -> None:
    x = torch.from_numpy(array)
    payload = codec.encode(x)
    codec.validate(payload, x.numel())
    decoded = codec.decode(payload, x.numel())
    assert torch.isfinite(decoded).all()
    for first in range(0, x.numel(), codec.block):
        block, got = x[first : first + codec.block].double(), decoded[first : first + codec.block].double()
        assert ((block - got).abs() <= block.abs().max() * LARGEST_ERROR[codec.name] + LARGEST_FLUSHED).all()


@every_codec
@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_come_back_as_zeros(codec: Codec, numel: int, zero: float) -> None:
    payload = codec.encode(torch.full((numel,), zero))
    codec.validate(payload, numel)
    assert not codec.decode(payload, numel).any()


@every_codec
def test_padding_inside_a_block_decodes_to_zero(codec: Codec) -> None:
    """Protocol N."""
    x = gaussian(1024)
    x[100:256] = 0.0
    x[700:768] = 0.0
    assert not codec.decode(codec.encode(x), 1024)[x == 0].any()


@every_codec
@given(
    array=finite_arrays.filter(lambda array: array.size > 0),
    bad=st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]),
    where=st.integers(0, 10_000),
)
@settings(deadline=None, max_examples=25)
def test_one_bad_element_is_refused_and_named(codec: Codec, array: np.ndarray, bad: float, where: int) -> None:
    x = torch.from_numpy(array.copy())
    x[where % x.numel() :: 2] = bad
    with pytest.raises(NonFiniteError) as refusal:
        codec.encode(x)
    assert refusal.value.index == where % x.numel()


@every_codec
@pytest.mark.parametrize("bits", [0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF])
def test_every_kind_of_nan_is_found_in_a_later_tile(codec: Codec, bits: int) -> None:
    x = gaussian(TILE + 130)
    x.view(torch.int32)[TILE + 129] = bits
    assert x[-1].isnan()
    with pytest.raises(NonFiniteError, match=f"element {TILE + 129}"):
        codec.encode(x)


@every_codec
def test_tiles_are_encoded_as_if_they_were_alone(codec: Codec) -> None:
    """Protocol N: whoever owns a range of tiles writes its bytes without the others."""
    numel = TILE + 4096 + 65
    x = gaussian(numel)
    whole, first, second = codec.encode(x), codec.encode(x[:TILE]), codec.encode(x[TILE:])
    scales = [part * codec.scale_bits // 8 for part in (TILE // codec.block, -(-(numel - TILE) // codec.block))]
    codes = [TILE * codec.code_bits // 8, second.numel() - (scales[1] + 63) // 64 * 64]
    expected = torch.cat((first[: scales[0]], second[: scales[1]]))
    expected = torch.cat(
        (expected, expected.new_zeros(-expected.numel() % 64), first[-codes[0] :], second[-codes[1] :])
    )
    assert torch.equal(whole, expected)
    assert torch.equal(
        codec.decode(whole, numel), torch.cat((codec.decode(first, TILE), codec.decode(second, numel - TILE)))
    )


@every_codec
@pytest.mark.parametrize("numel", LENGTHS)
def test_every_byte_of_both_buffers_is_written(codec: Codec, numel: int) -> None:
    x = gaussian(numel)
    payload = codec.encode(x)
    poisoned = torch.full_like(payload, 0xA5)
    codec.encode_into(x, poisoned)
    assert torch.equal(poisoned, payload)
    out = torch.full((numel,), torch.nan)
    codec.decode_into(payload, out)
    assert torch.equal(out, codec.decode(payload, numel))
    assert torch.isfinite(out).all()


@every_codec
@pytest.mark.parametrize("numel", [1, 65, 1000])
def test_payloads_may_lie_at_odd_addresses(codec: Codec, numel: int) -> None:
    x = gaussian(numel)
    payload = codec.encode(x)
    odd = at_odd_address(payload)
    codec.validate(odd, numel)
    assert torch.equal(codec.decode(odd, numel), codec.decode(payload, numel))
    codec.encode_into(x, odd.fill_(0xA5))
    assert torch.equal(odd, payload)


@every_codec
def test_the_input_is_not_changed(codec: Codec) -> None:
    x = gaussian(1000)
    codec.encode(x)
    assert torch.equal(x, gaussian(1000))


@every_codec
def test_the_number_of_threads_changes_no_byte(codec: Codec) -> None:
    x, threads = gaussian(200_000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = codec.encode(x)
        torch.set_num_threads(2)
        assert torch.equal(codec.encode(x), alone)
    finally:
        torch.set_num_threads(threads)


@every_codec
def test_tensors_of_another_form_are_refused(codec: Codec) -> None:
    payload, out = codec.encode(gaussian(256)), torch.empty(256)
    for x in (torch.zeros(512)[::2], torch.zeros(16, 16), torch.zeros(256, dtype=torch.float64)):
        with pytest.raises(ValueError, match="x must be"):
            codec.encode(x)
        with pytest.raises(ValueError, match="out must be"):
            codec.decode_into(payload, x)
        with pytest.raises(ValueError, match="acc must be"):
            codec.decode_add_(payload, x, 1.0)
    for wrong in (payload[:-1], torch.cat((payload, payload[:1]))):
        with pytest.raises(ValueError, match="are right"):
            codec.encode_into(out, wrong)
        with pytest.raises(ValueError, match="are right"):
            codec.decode_into(wrong, out)
        with pytest.raises(ValueError, match="are right"):
            codec.decode_add_(wrong, out, 1.0)
        with pytest.raises(BadPayload, match="are right for 256 elements"):
            codec.validate(wrong, 256)


@every_codec
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_hostile_bytes_are_refused_or_decode_to_finite_numbers(codec: Codec, data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, 130))
    size = codec.payload_bytes(numel)
    payload = codec.encode(gaussian(numel)).clone()
    if data.draw(st.booleans()):
        payload = torch.tensor(list(data.draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.validate(payload, numel)
    except BadPayload:
        return
    assert torch.isfinite(codec.decode(payload, numel)).all()


@pytest.mark.parametrize("name", ["q8", "q4", "e3m0"])
def test_bytes_that_must_be_zero_are_checked(name: str) -> None:
    codec = CODECS[name]
    numel = codec.block + 1
    good = codec.encode(gaussian(numel))
    between, tail = good.clone(), good.clone()
    between[4] = 1  # two scales of two bytes each, then zeros up to byte 64
    with pytest.raises(BadPayload, match="between scales and codes"):
        codec.validate(between, numel)
    tail[-1] ^= 1
    with pytest.raises(BadPayload, match="tail of the last block"):
        codec.validate(tail, numel)


@every_codec
def test_bad_numbers_in_a_later_tile_are_found(codec: Codec) -> None:
    numel = TILE + 16384
    payload = codec.encode(gaussian(numel))
    at = TILE // codec.block * codec.scale_bits // 8 if codec.scale_bits else TILE * codec.code_bits // 8
    payload[at : at + 4] = 0xFF  # a NaN in every width
    with pytest.raises(BadPayload, match=r"out of range|not finite"):
        codec.validate(payload, numel)


@every_codec
@given(weight=st.floats(-2, 2, width=32), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=20)
def test_the_weighted_sum_rounds_twice(codec: Codec, weight: float, seed: int) -> None:
    """Protocol M, against IEEE arithmetic done one operation at a time by numpy."""
    acc = gaussian(700, seed + 1)
    payload = codec.encode(gaussian(700, seed))
    t = codec.decode(payload, 700).numpy()
    expected = acc.numpy() + np.float32(weight) * t
    codec.decode_add_(payload, acc, weight)
    assert np.array_equal(acc.numpy(), expected)


def test_a_fused_multiply_add_would_be_seen() -> None:
    """The law above can fail: on its data a single rounding gives other numbers."""
    acc, t = gaussian(700, 1).numpy(), CODECS["q4"].decode(CODECS["q4"].encode(gaussian(700)), 700).numpy()
    w = np.float32(1 / 3)
    fused = (acc.astype(np.float64) + np.float64(w) * t.astype(np.float64)).astype(np.float32)
    assert not np.array_equal(acc + w * t, fused)


@every_codec
def test_a_weight_is_rounded_to_fp32_first(codec: Codec) -> None:
    payload = codec.encode(gaussian(700))
    one, other = gaussian(700, 1), gaussian(700, 1)
    codec.decode_add_(payload, one, 1 / 3)
    codec.decode_add_(payload, other, float(np.float32(1 / 3)))
    assert torch.equal(one, other)


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 1e39])
def test_a_weight_must_be_finite(weight: float) -> None:
    acc = torch.zeros(64)
    with pytest.raises(ValueError, match="finite"):
        CODECS["q4"].decode_add_(CODECS["q4"].encode(torch.ones(64)), acc, weight)
    assert not acc.any()


@every_codec
def test_the_weighted_sum_walks_tiles_and_the_tail(codec: Codec) -> None:
    numel = TILE + 65
    payload, acc = codec.encode(gaussian(numel)), gaussian(numel, 1)
    expected = acc + codec.decode(payload, numel) * 0.25
    codec.decode_add_(payload, acc, 0.25)
    assert torch.equal(acc, expected)


def sums_in_all_orders(accumulate_in: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Means of four decoded deltas of very unlike size, summed in all 24 orders, and Σ|u| of every element."""
    codec, numel = CODECS["q4"], 512
    payloads = [codec.encode(gaussian(numel, seed) * 10.0**seed) for seed in range(4)]
    sums = []
    for order in itertools.permutations(payloads):
        acc = torch.zeros(numel)
        for payload in order:
            codec.decode_add_(payload, acc, 0.25)
            acc = acc.to(accumulate_in).float()
        sums.append(acc)
    return sums, sum((codec.decode(payload, numel).abs() * 0.25 for payload in payloads), torch.zeros(numel))


def largest_difference_in_ulps(sums: list[Tensor], size: Tensor) -> float:
    spread = torch.stack(sums).double()
    return float(((spread.amax(0) - spread.amin(0)) / (size.double() * 2.0**-23).clamp(min=2.0**-149)).max())


def test_the_order_of_summation_costs_less_than_one_ulp_per_term() -> None:
    """D39, first half: fp32."""
    assert largest_difference_in_ulps(*sums_in_all_orders(torch.float32)) <= 4


def test_accumulating_in_bf16_breaks_the_law() -> None:
    """D39, second half: the law can fail."""
    assert largest_difference_in_ulps(*sums_in_all_orders(torch.bfloat16)) > 4


def test_a_fixed_order_of_summation_gives_the_same_bits() -> None:
    """D39."""
    first, second = sums_in_all_orders(torch.float32)[0], sums_in_all_orders(torch.float32)[0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class LargestAllocation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the largest tensor that an operation returned in memory of its own."""

    def __init__(self, *own: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {tensor.untyped_storage().data_ptr() for tensor in own}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@every_codec
def test_no_temporary_is_larger_than_a_tile(codec: Codec) -> None:
    numel = 3 * TILE
    x, acc, payload = torch.zeros(numel), torch.zeros(numel), torch.zeros(codec.payload_bytes(numel), dtype=torch.uint8)
    with LargestAllocation(x, acc, payload) as largest:
        codec.encode_into(x, payload)
        codec.validate(payload, numel)
        codec.decode_into(payload, acc)
        codec.decode_add_(payload, acc, 0.5)
    assert 0 < largest.bytes <= 4 * TILE
