"""The compiled loops of formats that are not made of equal blocks write what plain torch writes, byte for byte."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from codec_cases import LARGE, MATRICES, MIXED, gaussian, hard_numbers, of_shapes, padded, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples
from torch import Tensor

from farloop.algo.spec import Fragment
from farloop.quant.codec import Codec, flat
from farloop.quant.formats import sketch, sparse
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.kernels.cpu.primitives import kernel_threads
from farloop.quant.registry import codec_named

SPELLINGS = ("topk", "topk:k=1", "topk:k=65", "topk:k=4096", "randk", "randk:fraction=0.5", "randk:fraction=1",
    "sketch:min_numel=4096", "sketch:min_numel=4096,density=0.5,room=1.3", "sketch:min_numel=4096,density=0.001",
    "ternary", "ternary:clip=0", "ternary:clip=1000", "sign", "lattice",
)  # fmt: skip
FRAGMENTS = [MIXED, MATRICES, LARGE, *(flat(numel) for numel in (1, 63, 257, 4095, 4097, 12345, 70001))]

pytestmark = pytest.mark.usefixtures("one_thread")
every_spelling = pytest.mark.parametrize("spelling", SPELLINGS)


@contextmanager
def reference(codec: Codec) -> Iterator[None]:
    modules = {sparse, sys.modules[BlockCodec.__module__ if isinstance(codec, BlockCodec) else type(codec).__module__]}
    with ExitStack() as patches:
        for module in modules:
            for name in {"fast_sparse", "fast_path"} & vars(module).keys():
                patches.enter_context(patch.object(module, name, lambda *devices, **how: None))
        yield


def check(codec: Codec, x: Tensor, fragment: Fragment, seed: int) -> None:
    with reference(codec):
        expected = codec.encode(x, fragment, seed=seed)
        numbers = codec.decode(expected, fragment, seed=seed)
    out = torch.full((expected.numel() + 1,), 0xA5, dtype=torch.uint8)[1:]  # at an odd address
    codec.encode_into(x, out, fragment, seed=seed)
    assert torch.equal(out, expected), fragment
    assert same_bits(codec.decode(out, fragment, seed=seed), numbers)


@every_spelling
def test_payloads_of_all_fragments(spelling: str) -> None:
    for fragment in FRAGMENTS:
        check(codec_named(spelling), gaussian(fragment), fragment, 2**32 - 5)


@every_spelling
def test_payloads_of_hard_numbers(spelling: str) -> None:
    """Zeros of both signs, subnormal numbers, the largest, equal magnitudes, every exponent."""
    x = hard_numbers()
    check(codec_named(spelling), x, flat(x.numel()), 7)
    fragment = of_shapes((64, 128), (300,))
    check(codec_named(spelling), padded(fragment, x[: fragment.numel].clone()), fragment, 7)


@every_spelling
@settings(max_examples=examples(10))
@given(
    words=st.lists(
        st.integers(0, 0xFF7FFFFF).filter(lambda word: word & 0x7F800000 != 0x7F800000), min_size=1, max_size=8
    ),
    numel=st.integers(1, 9000),
    seed=st.integers(0, 2**32 - 1),
)
def test_payloads_of_any_bit_patterns(spelling: str, words: list[int], numel: int, seed: int) -> None:
    patterns = torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)
    x = patterns[torch.arange(numel) * 7 % len(words)]
    x[100::700] = patterns[0]  # a few may be larger than many that are equal
    x[100::700].mul_(0.75).sub_(1.0)
    check(codec_named(spelling), x, flat(numel), seed)


@every_spelling
def test_any_number_of_threads_writes_the_same_bytes(spelling: str) -> None:
    codec, fragment = codec_named(spelling), of_shapes((1024, 512), (2**17 + 5,))
    x = gaussian(fragment)
    with kernel_threads(1):
        expected = codec.encode(x, fragment)
        numbers = codec.decode(expected, fragment)
    with kernel_threads(3):
        assert torch.equal(codec.encode(x, fragment), expected)
        assert same_bits(codec.decode(expected, fragment), numbers)


def test_elements_that_share_cells_are_told_apart_as_the_reference_does() -> None:
    """Too full a sketch leaves some stuck, and more than 255 elements in one cell are beyond the compiled loop."""
    generator = torch.Generator().manual_seed(1)
    for kept, width in ((torch.arange(0, 30_000, 3), 4000), (torch.arange(257), 1)):
        numbers = [torch.randn(3 * width, generator=generator.manual_seed(1)).double() for _ in range(2)]
        peeled = sketch._peel(numbers[0], kept, width)
        with reference(codec_named("sketch")):
            assert torch.equal(peeled, sketch._peel(numbers[1], kept, width))
        assert torch.equal(*numbers)
