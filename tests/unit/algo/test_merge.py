"""The arithmetic of a window's sum (protocol M)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farloop.algo.merge import MERGE_RULES, add_


def test_the_product_is_rounded_before_the_sum() -> None:
    """A fused multiply-add would keep the product's low bits: here it would give 2⁻²⁴, not 0."""
    x = torch.full((1000,), 1.0 + 2.0**-12)
    acc = -x * x
    add_(acc, x, 1.0 + 2.0**-12)
    assert not acc.any()


@given(weight=st.floats(0.0, 1.0), seed=st.integers(0, 1000))
def test_the_sum_is_that_of_fp32_with_an_fp32_weight(weight: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    acc, x = torch.randn(100, generator=generator), torch.randn(100, generator=generator)
    # fp64 holds a product of two fp32 numbers exactly, so .float() is its one rounding.
    product = (x.double() * torch.tensor(weight, dtype=torch.float32).double()).float()
    expected = (acc.double() + product.double()).float()
    add_(acc, x, weight)
    assert torch.equal(acc, expected)


def test_more_than_a_tile_is_summed_to_the_end() -> None:
    count = (1 << 20) + 3
    acc = torch.ones(count)
    add_(acc, torch.ones(count), 0.5)
    assert bool((acc == 1.5).all())


def test_a_rule_is_found_by_its_own_name() -> None:
    assert all(rule.name == name for name, rule in MERGE_RULES.items())
    assert MERGE_RULES["mean"].linear


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_and_gpu_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    acc, x = torch.randn(1 << 20, generator=generator), torch.randn(1 << 20, generator=generator)
    on_gpu = acc.cuda()
    add_(on_gpu, x.cuda(), 1 / 3)
    add_(acc, x, 1 / 3)
    assert torch.equal(on_gpu.cpu(), acc)
