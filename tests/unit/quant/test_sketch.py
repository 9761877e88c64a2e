"""Count sketches that are added and peeled, against a second implementation in plain Python."""

import dataclasses
import math
import statistics
import struct

import numpy as np
import pytest
import torch
from codec_cases import gaussian as gaussian_of
from codec_cases import lost, mix, of_shapes
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from slow_cases import examples
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.codec import flat
from farloop.quant.errors import BadPayload
from farloop.quant.formats import sketch
from farloop.quant.formats.sketch import SKETCH, SketchCodec
from farloop.quant.norm import norm_sq

SMALL = dataclasses.replace(SKETCH, min_numel=64, density=0.1)
"""Sketches what an oracle in plain Python can follow; a spelling must ask for at least 4096 elements."""

any_size = st.floats(width=32, allow_nan=False, allow_infinity=False)


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return gaussian_of(flat(numel), seed)


few_values = st.sampled_from([-1.0, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0])


def cells_of(i: int, width: int) -> list[tuple[int, int]]:
    """Counter and sign of an element in each row."""
    hashes = [mix((i * 0x9E3779B1 + mix(seed)) % 2**32) for seed in (0x3C6EF372, 0xA54FF53A, 0x510E527F)]
    return [(r * width + ((h % 2**31) * width >> 31), -1 if h >= 2**31 else 1) for r, h in enumerate(hashes)]


def rounds_of(elements: list[int], width: int) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """In every round, elements and the row where they are alone; then those that are never."""
    left = list(elements)
    rounds: list[list[tuple[int, int]]] = []
    while True:
        many: dict[int, int] = {}
        for i in left:
            for cell, _ in cells_of(i, width):
                many[cell] = many.get(cell, 0) + 1
        alone = [(i, [many[cell] == 1 for cell, _ in cells_of(i, width)]) for i in left]
        found = [(i, rows.index(True)) for i, rows in alone if any(rows)]
        if not found:
            return rounds, left
        rounds.append(found)
        left = [i for i, rows in alone if not any(rows)]


def kept_of(x: np.ndarray, density: float, width: int) -> list[int]:
    budget = math.ceil(x.size * density)
    top = math.sqrt(norm_sq(torch.from_numpy(x)) / x.size / density)
    if top == 0:
        return []
    thresholds = [top]
    while len(thresholds) < 25:
        thresholds.append(thresholds[-1] * 0.8)
    within = [np.float32(min(max(t, 2.0**-149), float(np.finfo(np.float32).max))) for t in thresholds]
    above = [[i for i in range(x.size) if abs(x[i]) >= t] for t in within]
    fitting = [found for found in above if len(found) <= budget]
    kept = fitting[-1] if fitting else []
    if len(fitting) < 25:
        kept = sorted(kept + [i for i in above[len(fitting)] if i not in kept][: budget - len(kept)])
    while stuck := rounds_of(kept, width)[1]:
        falling = sorted(stuck, key=lambda i: (-abs(float(x[i])), i))
        kept = [i for i in kept if i not in falling[len(falling) // 2 :]]
    return kept


def oracle(x: np.ndarray, fragment: Fragment, codec: SketchCodec) -> bytes:
    dense, sketches, bitmaps = b"", b"", b""
    for tensor in fragment.tensors:
        part = x[tensor.offset : tensor.offset + tensor.numel]
        if tensor.numel < codec.min_numel:
            dense += part.tobytes()
            continue
        width = math.ceil(math.ceil(part.size * codec.density) * codec.room / 3) + 16
        kept = kept_of(part, codec.density, width)
        values = {i: min(max(float(part[i]), -(2.0**100)), 2.0**100) for i in kept}
        e = math.frexp(max(map(abs, values.values())))[1] if kept else 0
        sums = [0] * (3 * width)
        for i in kept:
            for cell, sign in cells_of(i, width):
                sums[cell] += sign * round(math.ldexp(values[i], 45 - e))
        sketches += np.array([math.ldexp(total, e - 45) for total in sums], np.float32).tobytes()
        bitmaps += sum(1 << i for i in kept).to_bytes(-(-part.size // 8), "little")
    return dense + sketches + bitmaps


def peeled_by_oracle(counters: list[float], elements: list[int], width: int) -> dict[int, float]:
    rounds, stuck = rounds_of(elements, width)
    numbers = {}
    for members in rounds:
        for i, row in members:
            cell, sign = cells_of(i, width)[row]
            numbers[i] = counters[cell] * sign
        for i, _ in members:
            for cell, sign in cells_of(i, width):
                counters[cell] -= sign * numbers[i]
    return numbers | {i: statistics.median(counters[c] * s for c, s in cells_of(i, width)) for i in stuck}


@given(data=st.data())
@settings(max_examples=examples(20))
def test_bytes_equal_the_oracle(data: st.DataObject) -> None:
    codec = dataclasses.replace(SMALL, density=data.draw(st.sampled_from([0.01, 0.1, 0.5])))
    fragment = of_shapes(*data.draw(st.lists(st.sampled_from([(), (63,), (64,), (9, 12)]), min_size=1, max_size=3)))
    elements = data.draw(st.sampled_from([any_size, few_values]))
    x = data.draw(hnp.arrays(np.float32, fragment.numel, elements=elements, fill=elements))
    payload = codec.encode(torch.from_numpy(x), fragment)
    assert bytes(payload.tolist()) == oracle(x, fragment, codec)
    codec.validate(payload, fragment)


@pytest.mark.parametrize("power", [1, 3, 9])
def test_bytes_of_a_whole_sketch_equal_the_oracle(power: int) -> None:
    """Light to heavy tails; small, uneven and large tensors."""
    fragment = of_shapes((50,), (1501,), (20, 30), (7,))
    x = gaussian(fragment.numel).pow(power) * 1000
    payload = SMALL.encode(x, fragment)
    assert bytes(payload.tolist()) == oracle(x.numpy(), fragment, SMALL)
    SMALL.validate(payload, fragment)


@given(seed=st.integers(0, 10_000), density=st.sampled_from([0.05, 0.3, 0.8]))
@settings(max_examples=examples(15))
def test_what_is_in_a_payload_is_read_as_the_oracle_reads_it(seed: int, density: float) -> None:
    """Made-up counters and bitmaps, from those that come apart to those that do not."""
    generator = np.random.default_rng(seed)
    width = math.ceil(math.ceil(300 * SMALL.density) * SMALL.room / 3) + 16
    elements = np.flatnonzero(generator.random(300) < density).tolist()
    counters = generator.standard_normal(3 * width).astype(np.float32)
    bitmap = sum(1 << i for i in elements).to_bytes(38, "little")
    payload = torch.tensor(list(counters.tobytes() + bitmap), dtype=torch.uint8)
    expected = np.zeros(300)
    for i, number in peeled_by_oracle(counters.astype(np.float64).tolist(), elements, width).items():
        expected[i] = number
    np.testing.assert_allclose(SMALL.decode(payload, flat(300)).numpy(), expected, rtol=1e-6, atol=1e-9)


SHAPES_OF_NUMBERS = {
    "gaussian": gaussian(65536),
    "constant": torch.full((65536,), -0.25),
    "one": torch.zeros(65536).index_fill_(0, torch.tensor([40_000]), 3.0),
    "heavy": gaussian(65536).pow(9),
    "two sizes": torch.where(gaussian(65536) > 0, 1.0, 0.81),
    "falling": 1 / torch.arange(1.0, 65537.0),
    "rising": torch.arange(65536.0),
    "tiny": gaussian(65536) * 1e-38,
    "large": gaussian(65536) * 1e30,
}


@pytest.mark.parametrize("name", SHAPES_OF_NUMBERS)
@pytest.mark.parametrize("density", [0.001, 0.05, 0.5])
def test_some_of_everything_is_kept(name: str, density: float) -> None:
    codec = dataclasses.replace(SKETCH, density=density)
    assert lost(codec, SHAPES_OF_NUMBERS[name], flat(65536)) <= 1 - codec.traits.contraction


def pair_in_the_same_cells(numel: int, width: int) -> tuple[int, int]:
    seen: dict[tuple[int, ...], int] = {}
    for i in range(numel):
        cells = tuple(cell for cell, _ in cells_of(i, width))
        if cells in seen:
            return seen[cells], i
        seen[cells] = i
    raise AssertionError


@pytest.mark.parametrize(("first", "second"), [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)])
def test_of_two_that_share_all_counters_the_larger_one_is_sent(first: float, second: float) -> None:
    numel = 1000
    a, b = pair_in_the_same_cells(numel, math.ceil(100 * 1.5 / 3) + 16)
    x = torch.zeros(numel)
    x[a], x[b], x[(a + 1) % numel] = first, second, 5.0
    expected = x.clone()
    expected[b if first >= second else a] = 0
    assert torch.equal(SMALL.decode(SMALL.encode(x, flat(numel)), flat(numel)), expected)


def test_few_rounds_of_peeling_mean_fewer_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on a stranger's bitmap binds the encoder too."""
    monkeypatch.setattr(sketch, "ROUNDS", 2)
    x = gaussian(65536)
    payload = SKETCH.encode(x, flat(65536))
    decoded = SKETCH.decode(payload, flat(65536))
    kept = decoded != 0
    assert 500 < int(kept.sum()) < 3277
    torch.testing.assert_close(decoded[kept], x[kept])


def test_huge_numbers_become_2_to_the_100() -> None:
    x = torch.full((65536,), float(np.finfo(np.float32).max))
    payload = SKETCH.encode(x, flat(65536))
    SKETCH.validate(payload, flat(65536))
    decoded = SKETCH.decode(payload, flat(65536))
    torch.testing.assert_close(decoded[decoded != 0], torch.full((3277,), 2.0**100))


def test_what_no_sender_writes_is_refused() -> None:
    fragment = of_shapes((5,), (301,))
    good = SMALL.encode(gaussian(fragment.numel), fragment)
    width = math.ceil(31 * 1.5 / 3) + 16
    bitmap = 20 + 12 * width
    assert good.numel() == bitmap + 38
    SMALL.validate(good, fragment)
    empty = int((good[20:bitmap].clone().view(torch.float32) == 0).nonzero()[0])
    for part, data, why in [
        (slice(0, 4), struct.pack("<f", math.nan), "not finite"),
        (slice(20, bitmap), struct.pack("<f", math.inf) * 3 * width, "not zero|not finite"),
        (slice(20 + 4 * empty, 24 + 4 * empty), struct.pack("<f", 1.0), "no element"),
        (slice(20 + 4 * empty, 24 + 4 * empty), struct.pack("<f", -0.0), "no element"),
        (slice(bitmap, bitmap + 37), b"\xff" * 37, "cannot come apart"),
        (slice(bitmap + 37, bitmap + 38), b"\x20", "after the last element"),
    ]:
        bad = good.clone()
        bad[part] = torch.tensor(list(data), dtype=torch.uint8)
        with pytest.raises(BadPayload, match=why):
            SMALL.validate(bad, fragment)
    with pytest.raises(BadPayload, match="are right"):
        SMALL.validate(good[:-1], fragment)


def test_counters_whose_differences_overflow_are_refused() -> None:
    x = gaussian(65536)
    payload = SKETCH.encode(x, flat(65536))
    counters = payload[: 12 * 1655].clone().view(torch.float32)
    payload[: 12 * 1655] = torch.where(counters == 0, 0.0, 3e38 * counters.sign()).view(torch.uint8)
    with pytest.raises(BadPayload, match="not finite"):
        SKETCH.validate(payload, flat(65536))
