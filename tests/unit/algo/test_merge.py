"""The arithmetic of a window's sum (protocol M), and the radial average."""

from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from farloop.algo.fragments import tiles, view, zero_padding_
from farloop.algo.merge_rules import MERGE_RULES, Pieces, add_, radial_into
from farloop.algo.spec import Fragment, TensorSlot


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
    assert MERGE_RULES["mean"].linear and not MERGE_RULES["radial"].linear


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_and_gpu_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    acc, x = torch.randn(1 << 20, generator=generator), torch.randn(1 << 20, generator=generator)
    on_gpu = acc.cuda()
    add_(on_gpu, x.cuda(), 1 / 3)
    add_(acc, x, 1 / 3)
    assert torch.equal(on_gpu.cpu(), acc)


FRAGMENT = Fragment(
    index=0,
    slot=0,
    numel=2048,
    tensors=(
        TensorSlot(name="blocks.0.weight", shape=(20, 50), offset=0),
        TensorSlot(name="blocks.1.weight", shape=(8, 30), offset=1024),
        TensorSlot(name="blocks.1.bias", shape=(30,), offset=1280),
        TensorSlot(name="embed.weight", shape=(40, 10), offset=1536),
    ),
)
HIDDEN = FRAGMENT.tensors[:2]
PLAIN = FRAGMENT.tensors[2:]


def noise(seed: int, scale: float = 1.0) -> Tensor:
    """A delta, fp32 [2048], padding zero."""
    x = torch.randn(2048, generator=torch.Generator().manual_seed(seed)) * scale
    zero_padding_(FRAGMENT, x)
    return x


def part(x: Tensor, tensor: TensorSlot) -> Tensor:
    return view(x, tensor).reshape(-1)


def pieces(x: Tensor, size: int = 700) -> Pieces:
    """In pieces that end where no tensor does, out of one buffer, as codecs do it."""
    buffer = torch.empty(size)

    def read() -> Iterator[Tensor]:
        for (chunk,) in tiles(x, size=size):
            buffer[: chunk.numel()] = chunk
            yield buffer[: chunk.numel()]

    return read


def norms(read: Iterable[Tensor]) -> list[float]:
    whole = torch.cat([piece.clone() for piece in read])
    return [float(part(whole, tensor).double().norm()) for tensor in FRAGMENT.tensors]


def radial(deltas: list[Tensor], weights: list[float]) -> Tensor:
    out = torch.full((2048,), torch.nan)
    radial_into([pieces(delta) for delta in deltas], weights, FRAGMENT, out, norms)
    return out


def mean(deltas: list[Tensor], weights: list[float]) -> Tensor:
    acc = torch.zeros(2048)
    for delta, weight in zip(deltas, weights, strict=True):
        add_(acc, delta, weight)
    return acc


def expected(deltas: list[Tensor], weights: list[float], tensor: TensorSlot) -> Tensor:
    """(Σ w‖v‖/Σw) · φ(Σ w φ(v)/Σ w), in fp64 and all at once."""
    vectors = [part(delta, tensor).double() for delta in deltas]
    length = sum(w * v.norm() for w, v in zip(weights, vectors, strict=True)) / sum(weights)
    direction = sum((w * v / v.norm() for w, v in zip(weights, vectors, strict=True)), torch.zeros(tensor.numel))
    return direction * (float(length) / float(direction.norm()))


weightings = st.lists(st.floats(0.01, 10.0), min_size=2, max_size=5)


@settings(deadline=None)  # the first call into torch is slow
@given(weights=weightings, seed=st.integers(0, 100))
def test_a_hidden_matrix_gets_the_mean_direction_at_the_mean_length(weights: list[float], seed: int) -> None:
    """A15."""
    deltas = [noise(100 * seed + i, scale=10.0 ** (i - 2)) for i in range(len(weights))]
    merged, shares = radial(deltas, weights), [weight / sum(weights) for weight in weights]
    for tensor in HIDDEN:
        lengths = [float(part(delta, tensor).double().norm()) for delta in deltas]
        actual, length = part(merged, tensor).double(), sum(s * x for s, x in zip(shares, lengths, strict=True))
        torch.testing.assert_close(actual, expected(deltas, weights, tensor), rtol=0, atol=1e-6 * length)
        assert float(actual.norm()) == pytest.approx(length, rel=1e-5)


@settings(deadline=None)  # the first call into torch is slow
@given(weights=weightings, scale=st.floats(1e-3, 1e3))
def test_the_scale_of_the_weights_does_not_matter(weights: list[float], scale: float) -> None:
    """A15."""
    deltas = [noise(i) for i in range(len(weights))]
    torch.testing.assert_close(
        radial(deltas, weights), radial(deltas, [scale * weight for weight in weights]), rtol=1e-5, atol=1e-6
    )


def test_embeddings_and_vectors_are_averaged_plainly() -> None:
    deltas, weights = [noise(i) for i in range(3)], [0.25, 0.25, 0.5]
    merged, plain = radial(deltas, weights), mean(deltas, weights)
    assert all(torch.equal(part(merged, tensor), part(plain, tensor)) for tensor in PLAIN)
    assert not any(torch.equal(part(merged, tensor), part(plain, tensor)) for tensor in HIDDEN)


def test_padding_stays_zero() -> None:
    merged = radial([noise(1), noise(2)], [0.5, 0.5])
    before = merged.clone()
    zero_padding_(FRAGMENT, merged)
    assert torch.equal(merged, before)


def test_one_delta_is_its_own_average_to_the_bit() -> None:
    """A15, M = 1; and one that is alone with any weight."""
    assert torch.equal(radial([noise(1)], [1.0]), noise(1))
    assert torch.equal(radial([noise(1), noise(2)], [1.0, 0.0]), noise(1))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_deltas_are_their_own_average(count: int) -> None:
    """A4 (fp)."""
    torch.testing.assert_close(radial([noise(1)] * count, [1 / count] * count), noise(1), rtol=1e-5, atol=1e-7)


def test_the_average_of_many_is_as_long_as_each_where_the_mean_is_not() -> None:
    """Near-orthogonal deltas: the mean shrinks like 1/√M."""
    deltas = [noise(i) for i in range(16)]
    merged, plain = radial(deltas, [1 / 16] * 16), mean(deltas, [1 / 16] * 16)
    for tensor in HIDDEN:
        length = float(part(deltas[0], tensor).norm())
        assert float(part(merged, tensor).norm()) == pytest.approx(length, rel=0.2)
        assert float(part(plain, tensor).norm()) == pytest.approx(length / 4, rel=0.2)


def test_nothing_from_nothing() -> None:
    """A15: φ(0) = 0."""
    assert not radial([torch.zeros(2048)] * 2, [0.5, 0.5]).any()


def test_a_delta_of_zero_has_no_direction_but_a_length() -> None:
    merged = radial([noise(1), torch.zeros(2048)], [0.5, 0.5])
    for tensor in HIDDEN:
        torch.testing.assert_close(part(merged, tensor), part(noise(1), tensor) * 0.5, rtol=1e-5, atol=1e-7)


def test_opposite_deltas_fall_back_to_the_mean() -> None:
    """A15: 3v and −v have no mean direction; their mean is v."""
    merged = radial([noise(1) * 3, -noise(1), noise(1), -noise(1) * 3], [0.375, 0.375, 0.125, 0.125])
    plain = mean([noise(1) * 3, -noise(1), noise(1), -noise(1) * 3], [0.375, 0.375, 0.125, 0.125])
    for tensor in HIDDEN:
        assert torch.equal(part(merged, tensor), part(plain, tensor))
        assert float(part(merged, tensor).norm()) == pytest.approx(0.5 * float(part(noise(1), tensor).norm()), rel=1e-4)


def test_directions_that_all_but_cancel_are_not_stretched() -> None:
    """What is left of v − v·(1 + 2⁻²³) is rounding."""
    merged = radial([noise(1), -noise(1) * (1 + 2.0**-20)], [0.5, 0.5])
    assert float(merged.abs().max()) < 1e-4


def test_one_tensor_may_cancel_and_another_not() -> None:
    other = noise(2)
    part(other, HIDDEN[0]).neg_()
    first = noise(1)
    view(other, HIDDEN[0]).copy_(-view(first, HIDDEN[0]))
    merged = radial([first, other], [0.5, 0.5])
    assert not part(merged, HIDDEN[0]).any()
    torch.testing.assert_close(
        part(merged, HIDDEN[1]).double(), expected([first, other], [1.0, 1.0], HIDDEN[1]), rtol=1e-4, atol=1e-6
    )


def test_tiny_deltas_do_not_overflow() -> None:
    merged = radial([noise(1, 1e-38), noise(2, 1e-38)], [0.5, 0.5])
    assert bool(merged.isfinite().all())


@settings(deadline=None)  # the first call into torch is slow
@given(size=st.integers(1, 3000))
def test_how_it_is_cut_into_pieces_does_not_show(size: int) -> None:
    out = torch.empty(2048)
    radial_into([pieces(noise(i), size) for i in range(3)], [0.2, 0.3, 0.5], FRAGMENT, out, norms)
    assert torch.equal(out, radial([noise(i) for i in range(3)], [0.2, 0.3, 0.5]))
