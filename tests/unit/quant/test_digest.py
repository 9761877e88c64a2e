"""The digest of an anchor against the definition in whole numbers, and the clean-up of first anchors."""

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farloop.quant import digest as digest_module
from farloop.quant.digest import box_digest, canonicalise_, combine, digest, finite_digest
from farloop.quant.errors import NonFiniteError

MASK = (1 << 64) - 1


def reference(values: list[float], first_index: int = 0) -> int:
    """Protocol N, in Python's integers."""
    total = 0
    for index, value in enumerate(values, first_index):
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        total += bits * (mix(index) | 1)
    return total & MASK


def mix(z: int) -> int:
    """The finaliser of splitmix64."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


fp32 = st.floats(width=32, allow_nan=False)


@given(values=st.lists(fp32, max_size=40), first_index=st.integers(0, 1 << 40))
def test_the_digest_is_the_definition(values: list[float], first_index: int) -> None:
    assert digest(torch.tensor(values), first_index) == reference(values, first_index)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("values", "golden"),
    [
        ([], 0x0),
        ([1.0], 0x3F800000),
        ([0.0, 1.0], 0x357ABBF64D800000),
        ([1.0, 0.0], 0x3F800000),
        ([1.0, -2.0, 3.5, -0.0, float("inf")], 0x68C3D7A4E9200000),
        (range(100_000), 0x8E11FB1CA1BE4D00),
    ],
    ids=range(6),
)
def test_golden_digests(values: list[float], golden: int, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled or not; elements that change places show, and padding with zeros does not."""
    if not fast:
        monkeypatch.setattr(digest_module, "fast_digest", lambda device: None)
    assert digest(torch.tensor(values, dtype=torch.float32)) == golden
    assert digest(torch.tensor([*values, 0.0, 0.0], dtype=torch.float32)) == golden


@given(cuts=st.lists(st.integers(0, 1000), max_size=5), first_index=st.integers(0, 1 << 30))
def test_parts_combine_to_the_digest_of_the_whole(cuts: list[int], first_index: int) -> None:
    x = numbers(1000)
    ends = [0, *sorted(cuts), 1000]
    parts = [digest(x[a:b], first_index + a) for a, b in itertools.pairwise(ends)]
    assert combine(reversed(parts)) == digest(x, first_index)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("index", [0, 4095, 4096, 9000])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_found(wrong: float, index: int, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fast:
        monkeypatch.setattr(digest_module, "fast_digest", lambda device: None)
    x = numbers(9001)
    assert finite_digest(x, 7) == digest(x, 7)
    x[index] = wrong
    with pytest.raises(NonFiniteError) as raised:
        finite_digest(x, 7)
    assert raised.value.index == index


@given(shape=st.lists(st.integers(1, 7), max_size=4), data=st.data(), chunk=st.sampled_from([1, 5, 1000]))
def test_boxes_combine_to_the_digest_of_the_tensor(shape: list[int], data: st.DataObject, chunk: int) -> None:
    whole = numbers(math.prod(shape)).view(shape)
    cuts = [data.draw(st.integers(0, extent)) for extent in shape]
    found = list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest_module, "_CPU_CHUNK", chunk)
        for sides in itertools.product((0, 1), repeat=len(shape)):
            box, offset = whole, [cut * side for cut, side in zip(cuts, sides, strict=True)]
            for dimension, (first, side) in enumerate(zip(offset, sides, strict=True)):
                cut, extent = cuts[dimension], shape[dimension]
                box = box.narrow(dimension, first, extent - cut if side else cut)
            found.append(box_digest(box.double(), offset, shape))
    assert combine(found) == digest(whole.reshape(-1))


def test_subnormals_and_negative_zeros_become_zero_and_nothing_else_changes() -> None:
    smallest = 2.0**-126
    kept = torch.tensor([smallest, -smallest, 1.0, -3.0, torch.inf, -torch.inf, torch.nan, 0.0])
    cleared = torch.tensor([2.0**-127, -(2.0**-127), 2.0**-149, -0.0, smallest - 2.0**-149])
    x = torch.cat([kept, cleared])
    canonicalise_(x)
    assert torch.equal(x.view(torch.int32), torch.cat([kept, torch.zeros(5)]).view(torch.int32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_and_gpu_give_one_digest() -> None:
    x = numbers((1 << 20) + 13)
    assert digest(x.cuda(), 5) == digest(x, 5)


def numbers(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count))
