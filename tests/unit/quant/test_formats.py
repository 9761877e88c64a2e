"""Formats against second implementations in plain Python, written from the tables of the README.

`sketch` and `lowrank` have files of their own.
"""

import dataclasses
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_cases import gaussian, lost, mix, of_shapes, padded, same_bits, uniform, word
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from slow_cases import examples
from stories import StoryText, all_stories, check_story, python
from torch import Tensor

from farloop.algo import spec
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.codec import flat
from farloop.quant.errors import BadPayload
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.formats.q4r import Q4rCodec
from farloop.quant.formats.ternary import TERNARY
from farloop.quant.formats.topk import TOPK
from farloop.quant.packing import NF4_VALUES
from farloop.quant.registry import CODECS, codec_named

pytestmark = pytest.mark.usefixtures("one_thread")

F = np.float32
Oracle = Callable[[np.ndarray, spec.Fragment, int], tuple[bytes, list[Fraction]]]
"""(numbers, their fragment, seed) → the payload and what it decodes to."""


# --- Formats of blocks with a scale each


def bits_of(x: float) -> int:
    return int(F(x).view(np.uint32))


def bf16(x: float) -> int:
    """Bits of x ≥ 0, nearest, ties to even."""
    return (bits_of(x) + 0x7FFF + (bits_of(x) >> 16 & 1)) >> 16


def from_bf16(bits: int) -> np.float32:
    return F(np.uint32(bits << 16).view(np.float32))


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a block stands."""

    first: int
    seed: int
    real: int
    """Elements of it that are no padding."""


@dataclass(frozen=True)
class Blocks:
    """A format of blocks, by the functions of its tables."""

    block: int
    bits: int
    largest: int
    scale: Callable[[list[np.float32], Place], int]
    """Bits, before the ends of the range."""
    code: Callable[[np.float32, np.float32, int, Place], int]
    value: Callable[[int, Place], Fraction]
    """In units of the scale."""
    zero: int = 0
    """The code in blocks without a scale."""
    group: int = 0
    """Codes that are packed together, if not a block."""
    has_zero: bool = True


def absmax(block: list[np.float32]) -> np.float32:
    return F(max(abs(v) for v in block))


def nearest_of(values: Sequence[float], v: Fraction, s: Fraction) -> int:
    return min(range(len(values)), key=lambda i: (abs(v - s * Fraction(values[i])), -i))


def signed_table(values: Sequence[float]) -> tuple[Callable[..., int], Callable[..., Fraction]]:
    def code(v: np.float32, s: np.float32, index: int, place: Place) -> int:
        m = nearest_of(values, abs(Fraction(float(v))), Fraction(float(s)))
        return m | (8 if v < 0 and m else 0)

    return code, lambda k, place: Fraction(values[k & 7]) * (-1 if k & 8 else 1)


def rounded(low: int, high: int) -> Callable[[np.float32, np.float32, int, Place], int]:
    """Nearest whole number of scales, in two's complement."""
    return lambda v, s, index, place: int(np.rint(np.clip(v / s, low, high))) - (low if low == -8 else 0) & 0xFF


def over(divisor: int) -> Callable[[list[np.float32], Place], int]:
    return lambda block, place: bf16(float(absmax(block) / F(divisor)))


def q4_scale(block: list[np.float32], place: Place) -> int:
    bits = min(bf16(float(absmax(block) / F(8))), 0x7DFF)
    return bits | 0x8000 if absmax(block) in block else bits


def q4r_scale(step: float, *, absolute: bool) -> Callable[[list[np.float32], Place], int]:
    def scale(block: list[np.float32], place: Place) -> int:
        a = absmax(block)
        if a < F(2.0**-100):
            return 0
        exponent = math.frexp(float(a))[1] - 1
        total = sum(int(np.rint(v * F(2.0 ** (10 - exponent)))) ** 2 for v in block)
        assert total < 2**31
        wanted = F(step) if absolute else F(np.sqrt(F(total)) * F(step)) * F(2.0 ** (exponent - 14))
        return bf16(float(max(wanted, a * F(0.144))))

    return scale


def stochastic(v: np.float32, s: np.float32, index: int, place: Place) -> int:
    return int(min(max(np.floor(v / s + F(uniform(place.seed, place.first + index))), -8), 7)) + 8


def minus_8(k: int, place: Place) -> Fraction:
    return Fraction(k - 8)


def q4r(step: float = 1.0, *, random: bool = True, absolute: bool = False) -> Blocks:
    code = stochastic if random else rounded(-8, 7)
    return Blocks(256, 4, 0x7DFF, q4r_scale(step, absolute=absolute), code, minus_8, zero=8, group=64)


def sign_scale(block: list[np.float32], place: Place) -> int:
    a = float(absmax(block))
    if a < 2.0**-100:
        return 0
    e = math.frexp(a)[1] - 1
    total = sum(int(abs(Fraction(float(v))) * Fraction(2) ** (21 - e)) for v in block)
    return bf16(float(F(total) / F(max(1, place.real))) * 2.0 ** (e - 21))


def shift(place: Place) -> Fraction:
    return Fraction(512 - (mix(place.seed) >> 22), 1024)


def nf4_code(v: np.float32, s: np.float32, index: int, place: Place) -> int:
    return nearest_of(NF4_VALUES, Fraction(float(v)), Fraction(float(s)))


def sign_code(v: np.float32, s: np.float32, index: int, place: Place) -> int:
    return int(v < 0)


def lattice_scale(block: list[np.float32], place: Place) -> int:
    return -(-bits_of(float(absmax(block) / F(7))) // 65536)


def lattice_code(v: np.float32, s: np.float32, index: int, place: Place) -> int:
    return min(7, max(-8, int(np.rint(v / s - F(float(shift(place))))))) + 8


E3M0 = [0.0, *(2.0**power for power in range(-6, 1))]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
BLOCKS = {
    "q8": Blocks(256, 8, 0x7BFF, over(127), rounded(-127, 127), lambda k, place: Fraction(k - 256 if k > 127 else k)),
    "q4": Blocks(64, 4, 0x7DFF, q4_scale, rounded(-8, 7), minus_8, zero=8),
    "e3m0": Blocks(64, 4, 0x7F7F, over(1), *signed_table(E3M0)),
    "e2m1": Blocks(64, 4, 0x7E2A, over(6), *signed_table(E2M1)),
    "nf4": Blocks(64, 4, 0x7F7F, over(1), nf4_code, lambda k, place: Fraction(NF4_VALUES[k]), zero=7),
    "q4r": q4r(),
    "q4r:step=0.3": q4r(0.3),
    "q4r:step=1e30": q4r(1e30),
    "q4r:rounding=nearest": q4r(random=False),
    "q4r:step=1.6,rounding=nearest": q4r(1.6, random=False),
    "q4r:step=0.7,policy=l-greco": q4r(0.7),
    "q4r:step=0.1,policy=absolute": q4r(0.1, absolute=True),
    "q4r:step=1e-30,policy=absolute,rounding=nearest": q4r(1e-30, random=False, absolute=True),
    "sign": Blocks(256, 1, 0x7F7F, sign_scale, sign_code, lambda k, place: Fraction(1 - 2 * k), has_zero=False),
    "lattice": Blocks(
        256, 4, 0x7DF0, lattice_scale, lattice_code, lambda k, place: k - 8 + shift(place), zero=8, has_zero=False
    ),
}


def packed(codes: list[int], bits: int, group: int) -> bytes:
    """Byte j of a group holds the codes j, j + group/k, … of the k in it."""
    k, out = 8 // bits, bytearray()
    for first in range(0, len(codes), group):
        part = codes[first : first + group]
        out += bytes(sum(part[j + p * group // k] << p * bits for p in range(k)) for j in range(group // k))
    return bytes(out)


def by_blocks(table: Blocks) -> Oracle:
    def oracle(x: np.ndarray, fragment: spec.Fragment, seed: int) -> tuple[bytes, list[Fraction]]:
        real = [False] * (-(-x.size // table.block) * table.block)
        for tensor in fragment.tensors:
            real[tensor.offset : tensor.offset + tensor.numel] = [True] * tensor.numel
        scales, codes, values = b"", [], []
        for first in range(0, x.size, table.block):
            block = [F(v) for v in (*x[first : first + table.block], *[0.0] * table.block)][: table.block]
            place = Place(first=first, seed=seed, real=sum(real[first : first + table.block]))
            bits = table.scale(block, place)
            sign, bits = bits & 0x8000, min(bits & 0x7FFF, table.largest)
            bits = bits | sign if bits >= 0x0D80 else 0
            s = from_bf16(bits)
            k = [table.code(v, s, index, place) if bits else table.zero for index, v in enumerate(block)]
            for index, code in enumerate(k):
                keeps = table.has_zero or real[first + index]
                values.append(table.value(code, place) * Fraction(float(s)) if keeps else Fraction(0))
            scales += bits.to_bytes(2, "little")
            codes += k
        payload = scales + bytes(-len(scales) % 64) + packed(codes, table.bits, table.group or table.block)
        return payload, values[: x.size]

    return oracle


# --- The other formats


def fp32(x: np.ndarray, fragment: spec.Fragment, seed: int) -> tuple[bytes, list[Fraction]]:
    return x.tobytes(), [Fraction(float(v)) for v in x]


def bf16_oracle(x: np.ndarray, fragment: spec.Fragment, seed: int) -> tuple[bytes, list[Fraction]]:
    bits = [min(bf16(abs(float(v))), 0x7F7F) | (0x8000 if np.signbit(v) else 0) for v in x]
    return struct.pack(f"<{x.size}H", *bits), [Fraction(float(from_bf16(b))) for b in bits]


def fixed_tree(x: np.ndarray) -> float:
    """Σ x² in fp64: halves of tiles of 4096 onto each other, then tile after tile."""
    total = 0.0
    for first in range(0, x.size, 4096):
        tile = np.zeros(4096)
        tile[: x[first : first + 4096].size] = x[first : first + 4096].astype(np.float64) ** 2
        while tile.size > 1:
            tile = tile[: tile.size // 2] + tile[tile.size // 2 :]
        total += float(tile[0])
    return total


def ternary(clip: float) -> Oracle:
    def oracle(x: np.ndarray, fragment: spec.Fragment, seed: int) -> tuple[bytes, list[Fraction]]:
        scales, codes, values = b"", [0] * (-(-x.size // 64) * 64), [Fraction(0)] * x.size
        ends = [*(tensor.offset for tensor in fragment.tensors[1:]), fragment.numel]
        for tensor, end in zip(fragment.tensors, ends, strict=True):
            part = x[tensor.offset : end]
            bound = np.abs(part).max(initial=F(0))
            if clip and tensor.numel:
                bound = min(bound, F(clip * math.sqrt(fixed_tree(part) / tensor.numel)))
            bits = min(-(-bits_of(float(bound)) // 65536), 0x7F7F)
            bits = bits if bits >= 0x0D80 else 0
            scales += bits.to_bytes(2, "little")
            s = from_bf16(bits)
            for i in range(tensor.offset, end):
                if bits and np.abs(x[i]) / s > F(uniform(seed, i)):
                    codes[i] = 2 if x[i] < 0 else 1
                    values[i] = Fraction(float(s)) * (-1 if x[i] < 0 else 1)
        return scales + bytes(-len(scales) % 64) + packed(codes, 2, 64), values

    return oracle


def randk(fraction: float) -> Oracle:
    def oracle(x: np.ndarray, fragment: spec.Fragment, seed: int) -> tuple[bytes, list[Fraction]]:
        payload, values = b"", [Fraction(0)] * x.size
        for tensor in fragment.tensors:
            for first in range(0, tensor.numel, 256):
                block = range(tensor.offset + first, tensor.offset + min(first + 256, tensor.numel))
                kept = math.ceil(len(block) * fraction)
                for i in sorted(sorted(block, key=lambda i: (word(seed, i), i))[:kept]):
                    bits = bits_of(x[i] * F(len(block) / kept))
                    up = (bits & 0x7FFFFFFF) + word(seed ^ 0x5851F42D, len(payload) // 2) % 65536
                    stored = min(up >> 16, 0x7F7F) | bits >> 16 & 0x8000
                    payload += struct.pack("<H", stored)
                    values[i] = Fraction(float(from_bf16(stored)))
        return payload, values

    return oracle


def chunks_of(fragment: spec.Fragment) -> list[list[int]]:
    """Elements of every chunk of `topk`, in the order of their indices."""
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
    levels = [min(bf16(math.ldexp(mean, e - 23)), 0x7F7F) for mean in (low, sum(m[:chosen]) / chosen)]
    small, large = (bits if bits >= 0x0D80 else 0 for bits in levels)
    return small, large, chosen


def topk(k: int) -> Oracle:
    def oracle(x: np.ndarray, fragment: spec.Fragment, seed: int) -> tuple[bytes, list[Fraction]]:
        magnitudes, places, codes, count = b"", 0, 0, 0
        values = [Fraction(0)] * x.size
        for chunk in chunks_of(fragment):
            kept = -(-k * len(chunk) // 4096)
            falling = sorted(range(len(chunk)), key=lambda i: (-abs(float(x[chunk[i]])), i))[:kept]
            low, high, s = levels_of([abs(float(x[chunk[i]])) for i in falling])
            magnitudes += struct.pack("<HH", low, high)
            for i in sorted(falling):
                negative, larger = int(x[chunk[i]] < 0), falling.index(i) < s
                places |= i << 12 * count
                codes |= (negative | 2 * larger) << 2 * count
                values[chunk[i]] = Fraction(float(from_bf16(high if larger else low))) * (-1) ** negative
                count += 1
        magnitudes += bytes(-len(magnitudes) % 64)
        packed_places = places.to_bytes(-(-3 * count // 2), "little")
        return magnitudes + packed_places + codes.to_bytes(-(-count // 4), "little"), values

    return oracle


ORACLES: dict[str, Oracle] = {
    "fp32": fp32,
    "bf16": bf16_oracle,
    **{spelling: by_blocks(table) for spelling, table in BLOCKS.items()},
    **{f"ternary:clip={clip}": ternary(clip) for clip in (0, 0.5, 2.5, 1000)},
    **{f"randk:fraction={fraction}": randk(fraction) for fraction in (1 / 256, 1 / 16, 0.1, 1.0)},
    **{f"topk:k={k}": topk(k) for k in (1, 64, 1000, 4096)},
}

any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)
ties = [0.0, 0.0625, 0.1875, 0.25, 0.5, 0.75, 0.9375, 1.0, 1.25, 1.5, 1.75, 2.5, 3.0, 3.5, 5.0, 6.0]
few_values = st.sampled_from(
    [
        *(sign * v for v in ties for sign in (1, -1)),
        *((low + high) / 2 for low, high in pairwise(NF4_VALUES)),
        *(1.5 * 2.0**-j for j in range(9)),
    ]
)
fragments = st.one_of(
    st.integers(0, 300).map(flat),
    st.lists(st.sampled_from([(), (1,), (63,), (64,), (200,), (257,), (7, 9), (2, 5, 7)]), min_size=1, max_size=2).map(
        lambda shapes: of_shapes(*shapes)
    ),
)


def check(spelling: str, x: np.ndarray, fragment: spec.Fragment, seed: int) -> None:
    codec = codec_named(spelling)
    payload = codec.encode(torch.from_numpy(x), fragment, seed=seed)
    with np.errstate(all="ignore"):
        expected, values = ORACLES[spelling](x, fragment, seed)
    assert bytes(payload.tolist()) == expected
    codec.validate(payload, fragment)
    decoded = codec.decode(payload, fragment, seed=seed)
    assert [Fraction(v) for v in decoded.tolist()] == values
    if isinstance(codec, BlockCodec):  # not by its kernels
        again, numbers = torch.full_like(payload, 0xA5), torch.full_like(decoded, torch.nan)
        codec.encode_by_reference(torch.from_numpy(x), again, fragment, seed=seed)
        codec.decode_by_reference(payload, numbers, fragment, seed=seed)
        assert torch.equal(again, payload) and same_bits(numbers, decoded)


def test_every_format_has_a_second_implementation() -> None:
    """Those of `lowrank` and `sketch` are in test_lowrank.py and test_sketch.py."""
    assert {spelling.partition(":")[0] for spelling in ORACLES} == set(CODECS) - {"lowrank", "sketch"}


@pytest.mark.parametrize("spelling", ORACLES)
@given(data=st.data(), fragment=fragments, seed=st.integers(0, 2**32 - 1))
@settings(max_examples=examples(10))
def test_bytes_and_numbers_are_those_of_the_second_implementation(
    spelling: str, data: st.DataObject, fragment: spec.Fragment, seed: int
) -> None:
    """Decoding is exact: the numbers are compared as fractions."""
    elements = data.draw(st.sampled_from([st.floats(-1, 1, width=32), any_size, few_values]))
    x = data.draw(hnp.arrays(np.float32, fragment.numel, elements=elements, fill=elements))
    check(spelling, padded(fragment, torch.from_numpy(x)).numpy(), fragment, seed)


@pytest.mark.parametrize("spelling", ["topk:k=64", "topk:k=1000", "randk:fraction=0.1"])
@pytest.mark.parametrize("shape", [(65,), (64, 64), (128, 64), (64, 192), (65, 64), (3, 1500)], ids=str)
def test_matrices_are_cut_as_specified(spelling: str, shape: tuple[int, ...]) -> None:
    fragment = of_shapes((5,), shape, (130,))
    check(spelling, gaussian(fragment).numpy(), fragment, 7)


@pytest.mark.parametrize("options", ["", ",rounding=nearest", ",policy=absolute"])
def test_every_tensor_has_its_own_step_of_q4r(options: str) -> None:
    fragment, steps = of_shapes((256,), (3, 200), (5,)), (0.5, 1.0, 2.0)
    x, codec = gaussian(fragment) * 1e3, codec_named(f"q4r:step=0.5/1/2{options}")
    payload = codec.encode(x, fragment, seed=9)
    for tensor, step in zip(fragment.tensors, steps, strict=True):
        table = q4r(step, random="nearest" not in options, absolute="absolute" in options)
        whole, _ = by_blocks(table)(x.numpy(), fragment, 9)
        first, end = tensor.offset // 256, -(-(tensor.offset + tensor.numel) // 256)
        for part in (slice(2 * first, 2 * end), slice(64 + 128 * first, 64 + 128 * end)):
            assert bytes(payload[part].tolist()) == whole[part]


def test_pieces_and_tiles_do_not_show_in_the_bytes_of_sparse_formats() -> None:
    """Wide and high matrices and long runs are worked on in several pieces."""
    fragment = of_shapes((256, 4096), (70_000,), (71, 4000))
    x = gaussian(fragment)
    payload = TOPK.encode(x, fragment)
    decoded = TOPK.decode(payload, fragment)
    for tensor in fragment.tensors:
        alone, part = of_shapes(tensor.shape), slice(tensor.offset, tensor.offset + tensor.numel)
        own = torch.zeros(alone.numel)
        own[: tensor.numel] = x[part]
        assert torch.equal(decoded[part], TOPK.decode(TOPK.encode(own, alone), alone)[: tensor.numel])
    numel = (1 << 18) + 700
    x, codec = gaussian(flat(numel)), CODECS["randk"]
    sent = codec.decode(codec.encode(x, flat(numel), seed=9), flat(numel), seed=9)
    where = sent.nonzero().view(-1)
    assert where.numel() == (numel // 256) * 16 + math.ceil(188 / 16)
    torch.testing.assert_close(sent[where][:-12], 16 * x[where][:-12], rtol=2**-7, atol=0)


# --- What is published of them


@pytest.mark.parametrize(
    ("spelling", "bits"), [("step=0.7", 2.71), ("step=1", 2.23), ("step=1.6", 1.73), ("step=1,rounding=nearest", 2.19)]
)
def test_bits_of_q4r_after_sealing_are_as_published(spelling: str, bits: float) -> None:
    """zstd comes within 0.03 of the entropy; the scales are another 0.03."""
    codec, fragment = codec_named(f"q4r:{spelling}"), flat(1 << 22)
    header = BlobHeader(codec=codec, fragment=fragment, version=1, base=0, epoch=1)
    blob = pack_blob(header, codec.encode(gaussian(fragment), fragment, seed=header.seed))
    assert bits - 0.05 < 8 * len(blob) / fragment.numel <= bits


def one_among(others: float, one: float, numel: int) -> Tensor:
    x = torch.full((numel,), others)
    x[17] = one
    return x


@pytest.mark.parametrize(
    ("spelling", "x", "least"),
    [
        ("e2m1", one_among(0.2499, 6.0, 64), 0.09),
        ("nf4", one_among(-0.0454, 1.0, 64), 0.11),
        ("sign", one_among(0.0, 1.99, 256), 255 / 256 - 1e-6),
        ("topk:k=1", torch.ones(65536), 1 - 1.02 / 4096),
        ("topk:k=64", torch.ones(65536), 1 - 64 / 4096 - 1e-6),
    ],
)
def test_the_worst_delta_loses_nearly_what_is_declared(spelling: str, x: Tensor, least: float) -> None:
    codec = codec_named(spelling)
    assert least < lost(codec, x, flat(x.numel())) <= 1 - codec.traits.contraction


@pytest.mark.parametrize("k", [1, 2, 64, 1000, 4096])
def test_the_contraction_of_topk_holds_where_two_magnitudes_fit_worst(k: int) -> None:
    """The proof's worst sizes, √i − √(i−1), then a plateau."""
    root = torch.arange(k + 1, dtype=torch.float64).sqrt()
    x = torch.full((65536,), float(root[-1] - root[-2]))
    x.view(-1, 4096)[:, :k] = (root[1:] - root[:-1]).float()
    codec = dataclasses.replace(TOPK, k=(k,))
    assert lost(codec, x, flat(65536)) <= 1 - codec.traits.contraction


# --- Ends of the range


@pytest.mark.parametrize(("spelling", "table"), [(name, BLOCKS[name]) for name in CODECS if name in BLOCKS])
def test_every_code_of_the_largest_scale_is_finite(spelling: str, table: Blocks) -> None:
    """Those that no encoder writes, too."""
    codec = CODECS[spelling]
    payload = codec.encode(torch.ones(256), flat(256))
    payload[: 512 // table.block].view(torch.int16)[:] = table.largest
    for byte in range(256):
        payload[64:] = byte
        codec.validate(payload, flat(256))
        assert torch.isfinite(codec.decode(payload, flat(256), seed=byte)).all()


# --- What no encoder writes


@pytest.mark.parametrize("name", [name for name in CODECS if name in BLOCKS])
@pytest.mark.parametrize("bits", [0x7F80, 0x7FFF, 0x8000, 0xFFFF, 0x0D7F, 0x0001, 0xBF80, None])
def test_scales_that_no_encoder_writes_are_refused(name: str, bits: int | None) -> None:
    """None stands for the first scale above the format's largest."""
    codec = CODECS[name]
    payload = codec.encode(torch.ones(256), flat(256))
    bits = bits or BLOCKS[name].largest + 1
    payload[:2] = torch.tensor([bits & 0xFF, bits >> 8])
    if (name, bits) == ("q4", 0xBF80):
        codec.validate(payload, flat(256))  # a negative scale
        return
    with pytest.raises(BadPayload, match="out of range"):
        codec.validate(payload, flat(256))


def edited(spelling: str, fragment: spec.Fragment, edits: dict[int, int]) -> None:
    """A good payload with other bytes in these places."""
    codec = codec_named(spelling)
    payload = codec.encode(gaussian(fragment), fragment)
    codec.validate(payload, fragment)
    for at, byte in edits.items():
        payload[at] = byte
    codec.validate(payload, fragment)


def loss(spelling: str) -> float:
    fragment = of_shapes((1024, 1024))
    return float(f"{lost(codec_named(spelling), gaussian(fragment), fragment, seed=9):.2g}")


@all_stories(__file__, "formats")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(globals()), rewrite=rewrite)


# --- What is particular


def test_the_scale_of_q8_is_a_quotient_not_a_product_with_the_reciprocal() -> None:
    """One of the few numbers where the two differ after the rounding to bf16: 3f81 and 3f80."""
    x = torch.tensor([float.fromhex("0x1.fdfc02p+6")])
    assert CODECS["q8"].encode(x, flat(1))[:2].tolist() == [0x81, 0x3F]
    check("q8", x.numpy(), flat(1), 0)


small_vectors = hnp.arrays(np.float32, st.integers(1, 140), elements=st.one_of(st.floats(-1, 1, width=32), any_size))


@given(small_vectors)
@settings(max_examples=examples(20))
def test_values_of_e3m0_are_zero_or_a_power_of_two_times_the_scale(x: np.ndarray) -> None:
    """Stable and odd, too; inside the range the error is at most a third."""
    codec, fragment, tensor = CODECS["e3m0"], flat(x.size), torch.from_numpy(x)
    payload = codec.encode(tensor, fragment)
    scales = payload[: 2 * -(-x.size // 64)].clone().view(torch.bfloat16).double().repeat_interleave(64)[: x.size]
    decoded = codec.decode(payload, fragment)
    ratio = (decoded.double() / torch.where(scales == 0, 1.0, scales)).abs()
    assert set(ratio.tolist()) <= {0.0, *(2.0**k for k in range(-6, 1))}
    assert torch.equal(codec.encode(decoded, fragment), payload)
    assert torch.equal(codec.decode(codec.encode(-tensor, fragment), fragment), -decoded)
    size = tensor.double().abs()
    inside = (scales > 0) & (size >= scales * 2.0**-6) & (size <= scales)
    assert ((decoded.double() - tensor.double()).abs() <= size / 3)[inside].all()


def test_traits_of_q4r_follow_from_its_parameters() -> None:
    def traits(spelling: str) -> tuple[bool, bool, float]:
        codec = codec_named(f"q4r:{spelling}")
        assert isinstance(codec, Q4rCodec)
        return codec.traits.unbiased, codec.traits.deterministic, codec.traits.contraction

    assert traits("step=1")[:2] == (True, False) and traits("rounding=nearest")[:2] == (False, True)
    assert 0.2 < traits("step=1")[2] == traits("step=1.7")[2]
    # A tensor may get twice the step of l-greco; of several steps, the worst counts.
    for none in ("policy=absolute", "step=2", "policy=l-greco", "step=1/2.5/1"):
        assert traits(none)[2] == 0.0
    assert traits("policy=l-greco,step=0.8")[2] > 0.2


def test_clipping_by_ternary_is_a_bias_and_the_traits_say_so() -> None:
    x, unclipped = one_among(0.0, 5.0, 256), codec_named("ternary:clip=0")
    x[100:200] = 0.01
    means = [
        sum(float(codec.decode(codec.encode(x, flat(256), seed=seed), flat(256))[17]) for seed in range(200)) / 200
        for codec in (TERNARY, unclipped)
    ]
    assert means[0] < 1 and means[1] == 5.0
    assert (TERNARY.traits.unbiased, unclipped.traits.unbiased) == (False, True)
    constant = torch.full((256,), -0.5)
    assert torch.equal(TERNARY.decode(TERNARY.encode(constant, flat(256)), flat(256)), constant)
