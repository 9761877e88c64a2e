"""The delta of a node and its merge, for weights of any type and strides (protocol L)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from farloop.algo import local_update as delta_module
from farloop.algo.fragments import partition, view
from farloop.algo.local_update import delta_into, fragment_delta_into, mix_fragment_into, mix_into

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def delta_of(anchor: Tensor, local: Tensor) -> Tensor:
    out = torch.full((local.numel(),), torch.nan)
    delta_into(anchor, local, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_delta_is_the_cast_anchor_minus_the_local_weights_in_fp32(dtype: torch.dtype) -> None:
    anchor, local = numbers(6 * 7, seed=1), numbers(6, 7, seed=2).to(dtype)
    expected = anchor.to(dtype).float() - local.float().flatten()
    assert torch.equal(delta_of(anchor, local), expected)


def test_a_step_downhill_gives_a_delta_along_the_gradient() -> None:
    """The outer optimizer subtracts a delta, so it must point uphill, as the gradient does."""
    weight = nn.Parameter(numbers(5))
    anchor = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = 2.0 * weight.detach()  # of the sum of squares
    optimizer.step()
    torch.testing.assert_close(delta_of(anchor, weight), 0.1 * weight.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_node_that_has_not_moved_has_a_delta_of_zero(dtype: torch.dtype) -> None:
    """The rounding of the anchor to the local type never enters the delta."""
    anchor, local = numbers(64), torch.empty(8, 8, dtype=dtype)
    mix_into(local, anchor, 0.0)
    assert not delta_of(anchor, local).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_mixing_at_the_ends_copies_the_anchor_or_changes_nothing(dtype: torch.dtype) -> None:
    anchor, local = numbers(64, seed=1), numbers(8, 8, seed=2).to(dtype)
    before = local.clone()
    mix_into(local, torch.full((64,), torch.inf), 1.0)
    assert torch.equal(local, before)
    mix_into(local, anchor, 0.0)
    assert torch.equal(local.flatten(), anchor.to(dtype))


@given(a=st.floats(0.0, 1.0, exclude_min=True, exclude_max=True))
def test_mixing_rounds_each_product_and_the_sum_once(a: float) -> None:
    anchor, local = numbers(64, seed=1), numbers(64, seed=2)
    expected = local * a + anchor * (1.0 - a)
    mix_into(local, anchor, a)
    assert torch.equal(local, expected)


def test_bf16_weights_are_mixed_in_fp32_and_rounded_once() -> None:
    anchor, local = numbers(4096, seed=1), numbers(4096, seed=2).bfloat16()
    once = (local.float() * 0.3 + anchor * 0.7).bfloat16()
    thrice = local * 0.3 + anchor.bfloat16() * 0.7
    mix_into(local, anchor, 0.3)
    assert torch.equal(local, once) and not torch.equal(once, thrice)


@pytest.mark.parametrize("a", [0.0, 0.25])
def test_weights_that_are_not_contiguous_are_read_and_written_in_their_own_order(a: float) -> None:
    anchor = numbers(24, seed=1)
    contiguous, transposed = numbers(4, 6, seed=2), numbers(4, 6, seed=2).t().contiguous().t()
    assert not transposed.is_contiguous()
    assert torch.equal(delta_of(anchor, transposed), delta_of(anchor, contiguous))
    mix_into(contiguous, anchor, a)
    mix_into(transposed, anchor, a)
    assert torch.equal(transposed, contiguous)


def test_cutting_into_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    anchor, local = numbers(1000, seed=1), numbers(1000, seed=2)
    mixed = local.clone()
    mix_into(mixed, anchor, 0.3)
    whole = delta_of(anchor, local)
    monkeypatch.setattr(delta_module, "_CHUNK", 7)
    assert torch.equal(delta_of(anchor, local), whole)
    mix_into(local, anchor, 0.3)
    assert torch.equal(local, mixed)


def test_a_parameter_that_requires_grad_is_changed_in_place_without_a_graph() -> None:
    weight = nn.Parameter(numbers(16))
    mix_into(weight, numbers(16, seed=1), 0.5)
    assert weight.is_leaf and weight.grad_fn is None
    assert not delta_of(numbers(16, seed=1), weight).requires_grad


def test_a_fragment_is_measured_and_merged_tensor_by_tensor_with_its_padding_at_zero() -> None:
    (fragment,) = partition([("a", (3, 5)), ("b", (300,))], pattern="whole").fragments
    local = {"a": numbers(3, 5, seed=1), "b": numbers(300, seed=2).bfloat16()}
    anchor = torch.zeros(fragment.numel)
    for tensor in fragment.tensors:
        view(anchor, tensor).copy_(numbers(*tensor.shape, seed=3))

    out = torch.full((fragment.numel,), torch.nan)
    fragment_delta_into(fragment, anchor, local, out)
    for tensor in fragment.tensors:
        expected = view(anchor, tensor).to(local[tensor.name].dtype).float() - local[tensor.name].float()
        assert torch.equal(view(out, tensor), expected)
    assert int(out.count_nonzero()) == 15 + 300

    mix_fragment_into(fragment, local, anchor, 0.0)
    for tensor in fragment.tensors:
        assert torch.equal(local[tensor.name], view(anchor, tensor).to(local[tensor.name].dtype))
