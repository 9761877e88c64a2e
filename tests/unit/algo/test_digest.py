"""The digest of an anchor against the definition in whole numbers, and the clean-up of first anchors."""

import itertools
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farloop.algo import digest as digest_module
from farloop.algo.digest import canonicalise_, combine, digest

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


def test_the_reference_mixes_as_splitmix64_does() -> None:
    """The generator's well-known first three outputs from seed 0: its state grows by the golden gamma."""
    gamma = 0x9E3779B97F4A7C15
    outputs = [mix(n * gamma & MASK) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


fp32 = st.floats(width=32, allow_nan=False)


@given(values=st.lists(fp32, max_size=40), first_index=st.integers(0, 1 << 40))
def test_the_digest_is_the_definition(values: list[float], first_index: int) -> None:
    assert digest(torch.tensor(values), first_index) == reference(values, first_index)


@pytest.mark.parametrize(
    ("values", "golden"),
    [
        ([], 0x0),
        ([1.0], 0x3F800000),
        ([0.0, 1.0], 0x357ABBF64D800000),
        ([1.0, -2.0, 3.5, -0.0, float("inf")], 0x68C3D7A4E9200000),
    ],
)
def test_golden_digests(values: list[float], golden: int) -> None:
    assert digest(torch.tensor(values)) == golden


def test_the_digest_of_many_elements_is_golden_across_chunks() -> None:
    x = torch.arange(100_000, dtype=torch.float32)
    assert digest(x) == reference(x.tolist()) == 0x8E11FB1CA1BE4D00


@given(cuts=st.lists(st.integers(0, 1000), max_size=5), first_index=st.integers(0, 1 << 30))
def test_parts_combine_to_the_digest_of_the_whole(cuts: list[int], first_index: int) -> None:
    x = numbers(1000)
    ends = [0, *sorted(cuts), 1000]
    parts = [digest(x[a:b], first_index + a) for a, b in itertools.pairwise(ends)]
    assert combine(reversed(parts)) == digest(x, first_index)


@pytest.mark.parametrize("chunk", [1, 7, 999, 1000, 5000])
def test_the_digest_does_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    whole = digest(numbers(1000))
    monkeypatch.setattr(digest_module, "_CPU_CHUNK", chunk)
    assert digest(numbers(1000)) == whole


@given(index=st.integers(0, 999), bit=st.integers(0, 31))
def test_any_flipped_bit_changes_the_digest(index: int, bit: int) -> None:
    x = numbers(1000)
    before = digest(x)
    x.view(torch.int32)[index] ^= torch.tensor(1 << bit).to(torch.int32)
    assert digest(x) != before


@given(first=st.integers(0, 998), second=st.integers(0, 998))
def test_two_elements_that_change_places_change_the_digest(first: int, second: int) -> None:
    x = numbers(1000)
    before = digest(x)
    second += second >= first
    x[[first, second]] = x[[second, first]]
    assert digest(x) != before


def test_padding_does_not_show() -> None:
    x = numbers(100)
    assert digest(torch.cat([x, torch.zeros(156)])) == digest(x)


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
