"""Squared norms, against one addition at a time, compiled and by the reference."""

from collections.abc import Iterator

import pytest
import torch
from slow_cases import mostly_slow
from torch import Tensor

from farloop.algo.fragments import partition, view
from farloop.algo.spec import TILE
from farloop.quant import norm
from farloop.quant.codec import flat
from farloop.quant.kernels.cpu.primitives import kernel_threads
from farloop.quant.norm import norm_sq, tensor_norms
from farloop.quant.registry import CODECS


def spread(numel: int) -> Tensor:
    """Numbers of many sizes, so that every order of summation rounds to another sum."""
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-6, 7, (numel,), generator=generator)


def oracle(x: Tensor) -> float:
    squares = [value * value for value in x.double().tolist()]
    total = 0.0
    for first in range(0, len(squares), 4096):
        tree = (squares[first : first + 4096] + [0.0] * 4096)[:4096]
        while len(tree) > 1:
            half = len(tree) // 2
            tree = [tree[i] + tree[i + half] for i in range(half)]
        total += tree[0]
    return total


@pytest.mark.parametrize("path", ["the reference", "the fastest"])
@pytest.mark.parametrize("numel", [0, 1, 2, 4095, 4096, 4097, 20_000, 3 * 2**17 + 5])
def test_sums_are_those_of_the_tree(numel: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "the reference":
        monkeypatch.setattr(norm, "fast_tile_sums", lambda device: None)
    expected = oracle(spread(numel))
    for threads in (1, 3):
        with kernel_threads(threads):
            assert norm_sq(spread(numel)) == expected


def test_a_second_tile_is_added_in_order() -> None:
    assert norm_sq(spread(TILE + 5000)) == oracle(spread(TILE + 5000))


def test_the_largest_numbers_do_not_overflow() -> None:
    top = torch.finfo(torch.float32).max
    assert norm_sq(torch.full((4,), top)) == 4 * top * top
    assert norm_sq(torch.tensor([1e-45])) == torch.tensor([1e-45]).double().item() ** 2


@pytest.mark.parametrize("name", mostly_slow(CODECS, "fp32", "q4", "q4r", "topk", "lowrank"))
@pytest.mark.parametrize("numel", [0, 65, TILE + 4097])
def test_a_payload_has_the_norm_of_its_numbers(name: str, numel: int) -> None:
    codec, fragment = CODECS[name], flat(numel)
    payload = codec.encode(spread(numel), fragment, seed=3)
    assert codec.norm_sq(payload, fragment, seed=3) == norm_sq(codec.decode(payload, fragment, seed=3))


@pytest.mark.parametrize("size", [100, 4096, 5000, TILE])
def test_norms_of_tensors_are_those_of_each_alone_however_it_is_cut(size: int) -> None:
    """Tensors that begin and end inside tiles and pieces, one over several tiles, one of a single element."""
    shapes = [("a", (300,)), ("b", (90, 100)), ("c", (1,)), ("d", (4096,)), ("e", (5, 1000))]
    [fragment] = partition(shapes, pattern="whole").fragments
    x = spread(fragment.numel)
    buffer = torch.empty(size)

    def pieces() -> Iterator[Tensor]:
        for start in range(0, fragment.numel, size):
            part = buffer[: min(size, fragment.numel - start)]
            part.copy_(x[start : start + size])  # one buffer for all, as codecs do it
            yield part

    assert tensor_norms(pieces(), fragment) == [norm_sq(view(x, t).reshape(-1)) ** 0.5 for t in fragment.tensors]
