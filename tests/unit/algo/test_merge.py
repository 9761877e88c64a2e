"""How the contributions of a window become one delta: their weights and order (protocol H), the sum (protocol M), the
radial average, and merges that a few hostile deltas cannot carry away."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from farloop.algo.fragments import tiles, view, zero_padding_
from farloop.algo.merge_rules import (
    Pieces,
    add_,
    coordinates_into,
    cosines,
    gram,
    hostile,
    krum_scores,
    radial_into,
    weights_by,
)
from farloop.algo.spec import Contribution, Fragment, NodeId, TensorSlot
from farloop.algo.validation import ROBUST_RULES
from farloop.algo.weights import MOST_TIMES, WEIGHT_RULES, quality_weights, reach, sum_key, token_weights

WeightRule = Callable[[Sequence[Sequence[Contribution]]], list[float]]

# --- Weights

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
EVERY_RULE = pytest.mark.parametrize("rule", WEIGHT_RULES.values())


def contribution(node: NodeId, tokens: int, steps: int = 10, norm: float = 1.0) -> Contribution:
    return Contribution(node=node, incarnation=1, base=0, steps=steps, tokens=tokens, norm_sq=norm * norm)


def by(rule: WeightRule, *tokens: int) -> list[float]:
    """Weights of nodes that did ten steps each."""
    return rule([[contribution(A, count)] for count in tokens])


@pytest.mark.parametrize(
    ("rule", "tokens", "weights"),
    [
        (token_weights, (100, 300), [0.25, 0.75]),
        (token_weights, (100, 400), [0.2, 0.8]),  # up to the bound a larger batch weighs what it is
        (token_weights, (100, 200, 800), [1 / 11, 2 / 11, 8 / 11]),
        (token_weights, (1, 640, 640), [1 / 1281, 640 / 1281, 640 / 1281]),  # nor does a small claim take others down
        (quality_weights, (100, 300), [0.1, 0.9]),
    ],
)
def test_a_weight_is_a_share_of_the_tokens(rule: WeightRule, tokens: tuple[int, ...], weights: list[float]) -> None:
    assert by(rule, *tokens) == weights


def test_quality_is_the_share_of_tokens_times_tokens_a_step() -> None:
    """Equal tokens in half the steps weigh twice as much (arXiv 2604.21428)."""
    assert quality_weights([[contribution(A, 100, steps=10)], [contribution(B, 100, steps=5)]]) == [1 / 3, 2 / 3]


@EVERY_RULE
@pytest.mark.parametrize("count", [1, 2, 3, 7, 10])
def test_equal_counters_weigh_exactly_the_same(rule: WeightRule, count: int) -> None:
    """A16."""
    assert by(rule, *[12345] * count) == [1 / count] * count


@EVERY_RULE
def test_who_did_no_step_weighs_nothing_and_dilutes_nothing(rule: WeightRule) -> None:
    """A16, B23: a zero delta of a joiner is not a vote; where no node did a step all weigh the same."""
    assert rule([[contribution(A, 100)], [contribution(B, 100, steps=0)], [contribution(C, 100)]]) == [0.5, 0.0, 0.5]
    assert rule([[contribution(A, 5, steps=0)], [contribution(B, 0)]]) == [0.5, 0.5]
    assert by(rule, -5, 10) == [0.0, 1.0] and by(rule, -5, -5) == [0.5, 0.5]


def test_a_relayed_blob_weighs_as_much_as_all_in_it_and_an_empty_window_has_no_weights() -> None:
    relayed = [contribution(A, 100), contribution(B, 200), contribution(C, 700, steps=0)]
    assert token_weights([relayed, [contribution(NodeId("d"), 300)]]) == [0.5, 0.5]
    with pytest.raises(AssertionError):
        token_weights([])


@EVERY_RULE
@given(reports=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1 << 62)), min_size=1, max_size=20))
def test_weights_of_every_rule_sum_to_one(rule: WeightRule, reports: list[tuple[int, int]]) -> None:
    """B23; and at the same number of steps they are in the order of the tokens."""
    weights = rule([[contribution(A, tokens, steps=steps)] for steps, tokens in reports])
    assert sum(weights) == pytest.approx(1.0, abs=1e-12) and min(weights) >= 0.0
    weights = by(rule, *(tokens for _, tokens in reports))
    assert sorted(weights) == [weight for _, weight in sorted(zip((t for _, t in reports), weights, strict=True))]


@EVERY_RULE
@pytest.mark.parametrize("honest", [1, 2, 3, 4, 9])
def test_a_node_that_claims_any_number_of_tokens_has_a_bounded_weight(rule: WeightRule, honest: int) -> None:
    """Where samples are not granted, a claim of 2^40 tokens a step was a weight of 1."""
    weights = by(rule, *[640] * honest, 10 << 40)
    times = MOST_TIMES if rule is token_weights else MOST_TIMES**2
    assert weights[-1] == pytest.approx(times / (honest + times)) and len(set(weights[:-1])) == 1


def test_the_reach_is_the_longest_delta_at_the_most_steps() -> None:
    def moved(norm: float, steps: int) -> Contribution:
        return contribution(A, 1, steps, norm)

    assert reach([[moved(3.0, 10)], [moved(2.0, 5)]]) == 4.0, "in 10 steps the second would have come to 4"
    assert reach([[moved(3.0, 10), moved(5.0, 10)]]) == 5.0
    assert reach([[moved(3.0, 0)]]) == reach([]) == 0.0
    for norm_sq in (-1.0, math.nan, math.inf):  # may be in a journal from before such deltas were refused
        odd = dataclasses.replace(moved(1.0, 10), norm_sq=norm_sq)
        assert reach([[odd], [moved(2.0, 5)]]) == 4.0 and reach([[odd]]) == 0.0


def test_the_smallest_node_id_of_a_set_is_its_place_in_the_sum() -> None:
    """H: ids are compared as text, so that every machine sorts alike."""
    assert sum_key([contribution(C, 1), contribution(A, 1), contribution(B, 1)]) == A
    assert sum_key([contribution(NodeId("node-10"), 1), contribution(NodeId("node-9"), 1)]) == "node-10"


# --- The sum


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cpu_and_gpu_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    acc, x = torch.randn(1 << 20, generator=generator), torch.randn(1 << 20, generator=generator)
    on_gpu = acc.cuda()
    add_(on_gpu, x.cuda(), 1 / 3)
    add_(acc, x, 1 / 3)
    assert torch.equal(on_gpu.cpu(), acc)


# --- The radial average

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
HIDDEN, PLAIN = FRAGMENT.tensors[:2], FRAGMENT.tensors[2:]


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


def radial(deltas: list[Tensor], weights: list[float], size: int = 700) -> Tensor:
    out = torch.full((2048,), torch.nan)
    radial_into([pieces(delta, size) for delta in deltas], weights, FRAGMENT, out, norms)
    return out


def mean(deltas: list[Tensor], weights: list[float]) -> Tensor:
    acc = torch.zeros(2048)
    for delta, weight in zip(deltas, weights, strict=True):
        add_(acc, delta, weight)
    return acc


def expected_radial(deltas: list[Tensor], weights: list[float], tensor: TensorSlot) -> Tensor:
    """(Σ w‖v‖/Σw) · φ(Σ w φ(v)/Σ w), in fp64 and all at once."""
    vectors = [part(delta, tensor).double() for delta in deltas]
    length = sum(w * v.norm() for w, v in zip(weights, vectors, strict=True)) / sum(weights)
    direction = sum((w * v / v.norm() for w, v in zip(weights, vectors, strict=True)), torch.zeros(tensor.numel))
    return direction * (float(length) / float(direction.norm()))


@given(weights=st.lists(st.floats(0.01, 10.0), min_size=2, max_size=5), times=st.floats(1e-3, 1e3))
def test_a_hidden_matrix_gets_the_mean_direction_at_the_mean_length(weights: list[float], times: float) -> None:
    """A15; and the scale of the weights does not matter."""
    deltas = [noise(i, scale=10.0 ** (i - 2)) for i in range(len(weights))]
    merged = radial(deltas, weights)
    torch.testing.assert_close(radial(deltas, [times * w for w in weights]), merged, rtol=1e-5, atol=1e-6)
    for tensor in HIDDEN:
        expected = expected_radial(deltas, weights, tensor)
        actual, length = part(merged, tensor).double(), float(expected.norm())
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * length)
        lengths = [float(part(delta, tensor).double().norm()) for delta in deltas]
        mean_length = sum(w * n for w, n in zip(weights, lengths, strict=True)) / sum(weights)
        assert float(actual.norm()) == pytest.approx(mean_length, rel=1e-5)


def test_embeddings_and_vectors_are_averaged_plainly_and_padding_stays_zero() -> None:
    deltas, weights = [noise(i) for i in range(3)], [0.25, 0.25, 0.5]
    merged, plain = radial(deltas, weights), mean(deltas, weights)
    assert all(torch.equal(part(merged, tensor), part(plain, tensor)) for tensor in PLAIN)
    assert not any(torch.equal(part(merged, tensor), part(plain, tensor)) for tensor in HIDDEN)
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


def test_a_delta_of_zero_has_no_direction_but_a_length() -> None:
    """A15: φ(0) = 0."""
    assert not radial([torch.zeros(2048)] * 2, [0.5, 0.5]).any()
    merged = radial([noise(1), torch.zeros(2048)], [0.5, 0.5])
    for tensor in HIDDEN:
        torch.testing.assert_close(part(merged, tensor), part(noise(1), tensor) * 0.5, rtol=1e-5, atol=1e-7)


def test_opposite_deltas_fall_back_to_the_mean() -> None:
    """A15: 3v and −v have no mean direction; their mean is v. What all but cancels is not stretched."""
    deltas, weights = [noise(1) * 3, -noise(1), noise(1), -noise(1) * 3], [0.375, 0.375, 0.125, 0.125]
    merged, plain = radial(deltas, weights), mean(deltas, weights)
    for tensor in HIDDEN:
        assert torch.equal(part(merged, tensor), part(plain, tensor))
        assert float(part(merged, tensor).norm()) == pytest.approx(0.5 * float(part(noise(1), tensor).norm()), rel=1e-4)
    nearly = radial([noise(1), -noise(1) * (1 + 2.0**-20)], [0.5, 0.5])
    assert float(nearly.abs().max()) < 1e-4


def test_one_tensor_may_cancel_and_another_not() -> None:
    first, other = noise(1), noise(2)
    view(other, HIDDEN[0]).copy_(-view(first, HIDDEN[0]))
    merged = radial([first, other], [0.5, 0.5])
    assert not part(merged, HIDDEN[0]).any()
    expected = expected_radial([first, other], [1.0, 1.0], HIDDEN[1])
    torch.testing.assert_close(part(merged, HIDDEN[1]).double(), expected, rtol=1e-4, atol=1e-6)


def test_tiny_deltas_do_not_overflow() -> None:
    assert bool(radial([noise(1, 1e-38), noise(2, 1e-38)], [0.5, 0.5]).isfinite().all())


@given(size=st.integers(1, 3000))
def test_how_it_is_cut_into_pieces_does_not_show(size: int) -> None:
    deltas, weights = [noise(i) for i in range(3)], [0.2, 0.3, 0.5]
    assert torch.equal(radial(deltas, weights, size), radial(deltas, weights))


# --- Merges that bear hostile deltas

NUMEL = 50
COUNTS, SEEDS = st.integers(5, 9), st.integers(0, 1 << 30)
RULES = st.sampled_from(sorted(ROBUST_RULES))


def deltas_of(seed: int, count: int) -> list[Tensor]:
    return list(torch.randn(count, NUMEL, generator=torch.Generator().manual_seed(seed)))


def read(*deltas: Tensor) -> list[Pieces]:
    return [lambda delta=delta: iter(delta.split(17)) for delta in deltas]


def merged_by(rule: str, deltas: list[Tensor]) -> Tensor:
    """By a rule, of deltas that weigh the same."""
    out = torch.full((NUMEL,), torch.nan)
    if not ROBUST_RULES[rule].weighted:
        coordinates_into(rule, read(*deltas), out)
        return out
    weights = weights_by(rule, gram(read(*deltas)), [1 / len(deltas)] * len(deltas))
    return sum((weight * delta for weight, delta in zip(weights, deltas, strict=True)), torch.zeros(NUMEL))


@given(RULES, SEEDS, COUNTS)
def test_the_order_of_deltas_never_shows_and_equal_deltas_give_that_delta(rule: str, seed: int, count: int) -> None:
    deltas = deltas_of(seed, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    torch.testing.assert_close(merged_by(rule, deltas), merged_by(rule, [deltas[k] for k in order]))
    torch.testing.assert_close(merged_by(rule, deltas[:1] * count), deltas[0])


@given(RULES, SEEDS, COUNTS, st.sampled_from([-1e30, -1e6, 1e6, 1e30]))
def test_below_the_breakdown_point_hostile_deltas_are_harmless(rule: str, seed: int, count: int, factor: float) -> None:
    """f of m deltas may be anything: the merge stays within the reach of the honest ones. The mean does not."""
    f = min(hostile(count), (count - 3) // 2)
    honest = deltas_of(seed, count - f)
    bad = [factor * delta for delta in deltas_of(seed + 1, f)]
    longest = max(float(delta.norm()) for delta in honest)
    assert float(merged_by(rule, honest + bad).norm()) <= longest * NUMEL**0.5
    assert float(torch.stack(honest + bad).double().mean(dim=0).norm()) > 100 * longest


def test_each_coordinate_is_a_median_or_a_mean_without_the_extremes() -> None:
    deltas = [torch.tensor(pair) for pair in ([1.0, 9.0], [2.0, 8.0], [6.0, -4.0], [100.0, 0.0])]
    out = torch.empty(2)
    coordinates_into("median", read(*deltas), out)
    assert out.tolist() == [4.0, 4.0] == [median([1, 2, 6, 100]), median([9, 8, -4, 0])]
    coordinates_into("trimmed", read(*deltas), out)
    assert out.tolist() == [4.0, 4.0]
    coordinates_into("median", read(*deltas[:3]), out)
    assert out.tolist() == [2.0, 8.0]


def test_longer_deltas_are_cut_to_the_median_length() -> None:
    products = gram(read(torch.ones(4), 2 * torch.ones(4), 1000 * torch.ones(4)))
    assert weights_by("clipped", products, [0.25, 0.25, 0.5]) == [0.25, 0.25, 0.5 * 4 / 2000]
    assert weights_by("clipped", gram(read(*[torch.zeros(4)] * 3)), [0.5, 0.5, 0.0]) == [0.5, 0.5, 0.0]


def test_krum_leaves_out_who_is_far_from_everybody() -> None:
    """The score of Blanchard et al.: squared distances to the m − f − 2 nearest others."""
    products = gram(read(*(torch.tensor([float(x)]) for x in (0, 1, 2, 3, 50))))
    assert krum_scores(products, 1) == [1 + 4, 1 + 1, 1 + 1, 1 + 4, 47**2 + 48**2]
    assert weights_by("krum", products, [0.2] * 5) == pytest.approx([0.25, 0.25, 0.25, 0.25, 0.0])


@given(SEEDS, COUNTS)
def test_inner_products_are_those_of_the_whole_vectors(seed: int, count: int) -> None:
    deltas = deltas_of(seed, count)
    rows = torch.stack(deltas).double()
    torch.testing.assert_close(torch.tensor(gram(read(*deltas)), dtype=torch.float64), rows @ rows.T)


def test_a_delta_that_points_against_all_others_is_seen_however_long_it_is() -> None:
    """Without it the others agree. What has no voice is held against those that have one; no sum accuses a node."""
    honest = [torch.ones(NUMEL) + 0.5 * delta for delta in deltas_of(3, 3)]
    found = cosines(gram(read(*honest, -1000 * honest[0])), range(4))
    assert found[3] is not None and found[3] < -0.8 and found[:3] == [None] * 3
    found = cosines(gram(read(*honest, -torch.ones(NUMEL))), range(3))
    assert found[3] is not None and found[3] < -0.9 and all(cosine and cosine > 0.5 for cosine in found[:3])
    deltas = deltas_of(4, 4)
    centred = [delta - torch.stack(deltas).mean(dim=0) for delta in deltas]
    assert cosines(gram(read(*centred)), range(4)) == [None] * 4
