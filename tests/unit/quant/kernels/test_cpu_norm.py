"""Compiled sums of squares, against one addition at a time."""

import pytest
import torch
from torch import Tensor

from farloop.quant.kernels.cpu.kernels import tile_sums


def spread(numel: int) -> Tensor:
    """Numbers of many sizes, so that every order of summation rounds to another sum."""
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-6, 7, (numel,), generator=generator)


def oracle(x: Tensor) -> list[float]:
    squares = [value * value for value in x.double().tolist()]
    sums = []
    for first in range(0, len(squares), 4096):
        tree = (squares[first : first + 4096] + [0.0] * 4096)[:4096]
        while len(tree) > 1:
            half = len(tree) // 2
            tree = [tree[i] + tree[i + half] for i in range(half)]
        sums.append(tree[0])
    return sums


@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 20_000])
def test_sums_are_those_of_the_tree(numel: int) -> None:
    assert tile_sums(spread(numel)) == oracle(spread(numel))


def test_any_number_of_threads_gives_the_same_sums() -> None:
    x = spread(3 * 2**17 + 5)
    sums = [tile_sums(x, threads=threads) for threads in (1, 2, 3)]
    assert sums[0] == sums[1] == sums[2] == oracle(x)


@pytest.mark.parametrize("extreme", [1e-45, 3.4028234663852886e38])
def test_extreme_numbers_have_exact_squares(extreme: float) -> None:
    x = torch.tensor([extreme])
    assert tile_sums(x) == [x.double().item() ** 2]
