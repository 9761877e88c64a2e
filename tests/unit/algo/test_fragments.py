"""The cut of a model: complete, disjoint, the same for all, and laid out as protocol G and N say."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from farloop.algo.fragments import NamedShape, flatten_into, partition, tiles, trainable_tensors, view, zero_padding_
from farloop.algo.spec import MAX_FRAGMENT_ELEMENTS, Fragment, Pattern

LAYERED: list[Pattern] = ["sequential", "strided", "balanced"]


def transformer(num_blocks: int) -> list[NamedShape]:
    blocks = [
        (f"blocks.{i}.{name}", shape)
        for i in range(num_blocks)
        for name, shape in (("norm.weight", (16,)), ("attention.weight", (16, 48)), ("mlp.weight", (16, 64)))
    ]
    return [("embed.weight", (256, 16)), *blocks, ("norm.weight", (16,)), ("head.weight", (16, 256))]


def blocks_of(fragment: Fragment) -> list[int]:
    return sorted({int(tensor.name.split(".")[1]) for tensor in fragment.tensors})


@given(
    num_blocks=st.integers(1, 40),
    blocks_per_fragment=st.integers(1, 7),
    pattern=st.sampled_from(["whole", *LAYERED]),
)
def test_every_tensor_lies_in_exactly_one_fragment_aligned_and_apart_from_the_others(
    num_blocks: int, blocks_per_fragment: int, pattern: Pattern
) -> None:
    """Invariant B24."""
    tensors = transformer(num_blocks)
    layout = partition(tensors, pattern=pattern, blocks_per_fragment=blocks_per_fragment)

    placed = [(tensor.name, tensor.shape) for fragment in layout.fragments for tensor in fragment.tensors]
    assert Counter(placed) == Counter(tensors)
    for index, fragment in enumerate(layout.fragments):
        assert fragment.index == index
        end = 0
        for tensor in fragment.tensors:
            assert tensor.offset % 256 == 0 and tensor.offset >= end
            end = tensor.offset + tensor.numel
        assert fragment.numel % 256 == 0 and 0 <= fragment.numel - end < 256
    assert sorted({fragment.slot for fragment in layout.fragments}) == list(range(layout.slots))


@given(num_blocks=st.integers(1, 40), blocks_per_fragment=st.integers(1, 7), pattern=st.sampled_from(LAYERED))
def test_layer_fragments_are_within_twice_their_mean_size(
    num_blocks: int, blocks_per_fragment: int, pattern: Pattern
) -> None:
    """Invariant B24."""
    layout = partition(transformer(num_blocks), pattern=pattern, blocks_per_fragment=blocks_per_fragment)
    sizes = [fragment.numel for fragment in layout.fragments[:-1]]
    mean = sum(sizes) / len(sizes)
    assert max(sizes) <= 2 * mean and min(sizes) >= mean / 2


def test_strided_deals_the_blocks_out_and_sequential_keeps_neighbours() -> None:
    """Invariant C28: L = 24, 3 blocks per fragment."""
    strided = partition(transformer(24), pattern="strided")
    sequential = partition(transformer(24), pattern="sequential")
    assert blocks_of(strided.fragments[0]) == [0, 8, 16]
    assert blocks_of(strided.fragments[7]) == [7, 15, 23]
    assert blocks_of(sequential.fragments[0]) == [0, 1, 2]
    assert blocks_of(sequential.fragments[7]) == [21, 22, 23]


@pytest.mark.parametrize(("num_blocks", "slots", "smallest_gap"), [(24, 9, 11), (48, 17, 5), (108, 37, 2)])
def test_the_embedding_has_a_slot_of_its_own_after_the_layers(num_blocks: int, slots: int, smallest_gap: int) -> None:
    """Invariant C27: H = 100, gaps between slots 11, 5, 2 and at most one more."""
    layout = partition(transformer(num_blocks), pattern="strided")
    assert layout.slots == slots
    last = layout.fragments[-1]
    assert last.slot == slots - 1
    assert [tensor.name for tensor in last.tensors] == ["embed.weight", "norm.weight", "head.weight"]

    due = [-(-(slot + 1) * 100 // layout.slots) for slot in range(layout.slots)]  # protocol A
    gaps = {after - before for before, after in zip([0, *due], due, strict=False)}
    assert min(gaps) == smallest_gap and max(gaps) <= smallest_gap + 1


def test_a_model_of_blocks_alone_has_no_extra_slot() -> None:
    tensors = [(name, shape) for name, shape in transformer(6) if name.startswith("blocks")]
    assert partition(tensors, pattern="strided").slots == 2


@pytest.mark.parametrize("pattern", LAYERED)
def test_the_number_of_layer_fragments_can_be_asked_for(pattern: Pattern) -> None:
    layout = partition(transformer(7), pattern=pattern, fragments=5)
    assert layout.slots == 6 and len(layout.fragments) == 6


def test_sequential_runs_differ_by_at_most_one_block() -> None:
    layout = partition(transformer(10), pattern="sequential")
    assert [len(blocks_of(fragment)) for fragment in layout.fragments[:-1]] == [3, 2, 3, 2]


def test_balanced_evens_out_blocks_of_unequal_size() -> None:
    tensors: list[NamedShape] = [(f"layers.{i}.weight", (256 * size,)) for i, size in enumerate((8, 1, 1, 1, 1, 4))]
    layout = partition(tensors, pattern="balanced", fragments=2)
    assert [fragment.numel for fragment in layout.fragments] == [256 * 8, 256 * 8]


def test_blocks_are_counted_without_gaps_and_stack_after_stack() -> None:
    gapped: list[NamedShape] = [(f"{i}.weight", (16, 16)) for i in (0, 2, 4, 6)]  # nn.Sequential with activations
    assert [
        blocks_of_sequential(fragment) for fragment in partition(gapped, pattern="strided", fragments=2).fragments
    ] == [
        [0, 4],
        [2, 6],
    ]
    stacks: list[NamedShape] = [(f"{stack}.layers.{i}.w", (16,)) for stack in ("encoder", "decoder") for i in range(3)]
    first, second = partition(stacks, pattern="sequential").fragments
    assert {tensor.name.split(".")[0] for tensor in first.tensors} == {"encoder"}
    assert {tensor.name.split(".")[0] for tensor in second.tensors} == {"decoder"}


def blocks_of_sequential(fragment: Fragment) -> list[int]:
    return [int(tensor.name.split(".")[0]) for tensor in fragment.tensors]


def test_only_the_first_number_of_a_name_is_its_block() -> None:
    experts: list[NamedShape] = [(f"layers.{i}.experts.{j}.w", (16,)) for i in range(2) for j in range(3)]
    layout = partition(experts, pattern="strided", blocks_per_fragment=1)
    assert [blocks_of(fragment) for fragment in layout.fragments] == [[0], [1]]


def test_a_model_without_numbered_blocks_is_balanced_over_its_tensors() -> None:
    tensors: list[NamedShape] = [(name, (256 * size,)) for name, size in (("a", 1), ("b", 2), ("c", 3), ("d", 4))]
    layout = partition(tensors, pattern="strided")
    assert layout.slots == 2
    assert [fragment.numel for fragment in layout.fragments] == [256 * 5, 256 * 5]


def test_whole_above_the_size_limit_is_several_fragments_of_one_slot() -> None:
    tensors: list[NamedShape] = [(f"w{i}", (MAX_FRAGMENT_ELEMENTS // 2,)) for i in range(5)]
    layout = partition(tensors, pattern="whole")
    assert layout.slots == 1
    assert [len(fragment.tensors) for fragment in layout.fragments] == [2, 2, 1]
    assert {fragment.slot for fragment in layout.fragments} == {0}


def test_a_slot_above_the_size_limit_shifts_no_other_slot() -> None:
    big = MAX_FRAGMENT_ELEMENTS // 2 + 256
    tensors: list[NamedShape] = [*((f"h.{i}.w", (big,)) for i in range(4)), ("head.w", (256,))]
    layout = partition(tensors, pattern="strided", fragments=2)
    assert [fragment.slot for fragment in layout.fragments] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("tensors", "pattern", "fragments", "sentence"),
    [
        ([], "whole", None, "no trainable tensors"),
        ([("a", (2,)), ("a", (2,))], "whole", None, "'a' appears twice"),
        ([("a", (2, 0))], "whole", None, "'a' has no elements"),
        ([("a", (2, MAX_FRAGMENT_ELEMENTS + 1))], "whole", None, "one row of the tensor .a. has"),
        ([("a", (2,))], "whole", 2, "has 1 fragment, not 2"),
        (transformer(6), "strided", 7, "take 1 to 6"),
        (transformer(6), "sequential", 0, "take 1 to 6"),
        (transformer(6), "balanced", 19, "18 tensors; take 1 to 18"),
    ],
)
def test_an_impossible_cut_is_refused_in_a_sentence(
    tensors: list[NamedShape], pattern: Pattern, fragments: int | None, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        partition(tensors, pattern=pattern, fragments=fragments)


def test_no_blocks_per_fragment_is_refused() -> None:
    with pytest.raises(ValueError, match="the least is 1"):
        partition(transformer(3), pattern="strided", blocks_per_fragment=0)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.block = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.probe = nn.Linear(4, 8, bias=False)
        self.probe.weight = nn.Parameter(self.embed.weight.detach())  # another object over the same memory
        self.first_half = nn.Parameter(self.embed.weight.detach()[:4])  # the same address, but not the same tensor


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_tensors_appear_once_and_frozen_ones_not_at_all(device: str) -> None:
    """Invariant B24."""
    with torch.device(device):
        names = [name for name, _ in trainable_tensors(Tied())]
    expected = {"embed.weight", "block.weight", "first_half"}
    # On the meta device nothing has an address, so only the same object is known to be tied.
    assert set(names) == (expected if device == "cpu" else expected | {"probe.weight"})


def test_trainable_tensors_keep_the_order_of_registration() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert [name for name, _ in trainable_tensors(module)] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_compiled_module_has_the_names_of_the_one_that_it_was_made_from() -> None:
    """Or a node that compiles and one that does not could not be in one run."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    expected = [name for name, _ in trainable_tensors(module)]
    module[0].compile(backend="eager")
    module[1] = torch.compile(module[1], backend="eager")
    whole = torch.compile(module, backend="eager")
    assert [name for name, _ in whole.named_parameters()][2] == "_orig_mod.1._orig_mod.weight"
    assert [name for name, _ in trainable_tensors(whole)] == expected


def test_flattening_fills_the_tensors_places_and_clears_the_rest() -> None:
    (fragment,) = partition([("a", (3, 5)), ("b", ()), ("c", (256,)), ("d", (2,))], pattern="whole").fragments
    tensors = {tensor.name: torch.randn(tensor.shape) for tensor in fragment.tensors}
    out = torch.full((fragment.numel,), torch.nan)
    flatten_into(fragment, tensors, out)
    for tensor in fragment.tensors:
        torch.testing.assert_close(view(out, tensor), tensors[tensor.name], rtol=0, atol=0)
    assert int((out != 0).sum()) == 15 + 1 + 256 + 2


def test_padding_is_cleared_without_touching_the_tensors() -> None:
    (fragment,) = partition([("a", (255,)), ("b", (256,)), ("c", (1,))], pattern="whole").fragments
    flat = torch.ones(fragment.numel)
    zero_padding_(fragment, flat)
    assert flat.nonzero().flatten().tolist() == [*range(255), *range(256, 513)]


def test_tiles_cover_flat_tensors_in_step_and_share_their_memory() -> None:
    a, b = torch.zeros(10), torch.arange(10.0)
    for part_a, part_b in tiles(a, b, size=4):
        part_a.copy_(part_b)
    assert torch.equal(a, b)
    assert [part.numel() for (part,) in tiles(a, size=4)] == [4, 4, 2]


# --- stages


@given(
    num_blocks=st.integers(2, 24),
    blocks_per_fragment=st.integers(1, 4),
    pattern=st.sampled_from(["whole", *LAYERED]),
    data=st.data(),
)
def test_no_fragment_crosses_a_stage_and_each_stage_is_cut_as_if_it_were_a_model(
    num_blocks: int, blocks_per_fragment: int, pattern: Pattern, data: st.DataObject
) -> None:
    tensors = transformer(num_blocks)
    starts = sorted(data.draw(st.sets(st.integers(1, num_blocks - 1), min_size=1, max_size=4)))
    layout = partition(tensors, pattern=pattern, blocks_per_fragment=blocks_per_fragment, stages=starts)
    assert Counter(t.name for f in layout.fragments for t in f.tensors) == Counter(name for name, _ in tensors)
    assert layout.num_stages == len(starts) + 1
    bounds = [0, *starts, num_blocks]
    for stage, (first, stop) in enumerate(itertools.pairwise(bounds)):
        own = [fragment for fragment in layout.fragments if fragment.stage == stage]
        named = {tensor.name for fragment in own for tensor in fragment.tensors}
        numbered = [int(name.split(".")[1]) for name in named if name.startswith("blocks.")]
        assert set(numbered) == set(range(first, stop))
        assert ("embed.weight" in named) == ("head.weight" in named) == (stage == 0)
        alone = [tensor for tensor in tensors if tensor[0] in named]
        cut = partition(alone, pattern=pattern, blocks_per_fragment=blocks_per_fragment)
        assert [fragment.tensors for fragment in own] == [fragment.tensors for fragment in cut.fragments]
        assert own[-1].slot == layout.slots - 1, "every stage ends the round"
        assert [f.slot for f in own] == sorted({f.slot for f in own}), "and sends one fragment at a time"


def test_the_fragments_of_a_stage_with_few_are_spread_over_the_round() -> None:
    layout = partition(transformer(10), pattern="sequential", blocks_per_fragment=2, stages=(6,))
    assert [(fragment.stage, fragment.slot) for fragment in layout.fragments] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 3)
    ]  # fmt: skip


def test_a_cut_without_stages_is_the_one_that_it_has_always_been() -> None:
    """The layout is part of a run's identity: its digest stands in the journals of runs that go on."""
    layout = partition(transformer(24), pattern="strided")
    assert layout.num_stages == 1
    assert layout.digest() == "794a4ec45d16ca9c"


@pytest.mark.parametrize("starts", [(0,), (3, 3), (4, 2), (6,), (-1,)])
def test_stages_that_the_model_does_not_have_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="this model has 6 numbered blocks"):
        partition(transformer(6), pattern="strided", stages=starts)


def test_a_model_without_numbered_blocks_has_no_stages() -> None:
    with pytest.raises(ValueError, match="0 numbered blocks"):
        partition([("a", (4,)), ("b", (4,))], pattern="balanced", stages=(1,))
