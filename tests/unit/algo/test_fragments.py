"""The cut of a model: complete, disjoint, the same for all, laid out as protocol G and N say; and who holds what."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stories import StoryText, all_stories, check_story, python
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from farloop.algo import stages
from farloop.algo.fragments import (
    NamedShape,
    flatten_into,
    is_hidden_matrix,
    partition,
    tiles,
    trainable_tensors,
    view,
    zero_padding_,
)
from farloop.algo.spec import MAX_FRAGMENT_ELEMENTS, Fragment, Pattern

LAYERED: list[Pattern] = ["sequential", "strided", "balanced"]
PATTERNS = st.sampled_from(["whole", *LAYERED])


def transformer(num_blocks: int) -> list[NamedShape]:
    blocks = [
        (f"blocks.{i}.{name}", shape)
        for i in range(num_blocks)
        for name, shape in (("norm.weight", (16,)), ("attention.weight", (16, 48)), ("mlp.weight", (16, 64)))
    ]
    return [("embed.weight", (256, 16)), *blocks, ("norm.weight", (16,)), ("head.weight", (16, 256))]


def sized(**sizes: int) -> list[NamedShape]:
    return [(name, (256 * size,)) for name, size in sizes.items()]


def blocks_of(fragment: Fragment) -> list[int]:
    """The first number in the name of each tensor."""
    names = [tensor.name.split(".") for tensor in fragment.tensors]
    return sorted({int(next(word for word in name if word.isdigit())) for name in names})


@given(num_blocks=st.integers(1, 40), blocks_per_fragment=st.integers(1, 7), pattern=PATTERNS)
def test_every_tensor_lies_in_exactly_one_fragment_aligned_and_apart_from_the_others(
    num_blocks: int, blocks_per_fragment: int, pattern: Pattern
) -> None:
    """Invariant B24; and fragments of layers are within twice their mean size."""
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
    if pattern != "whole":
        sizes = [fragment.numel for fragment in layout.fragments[:-1]]
        assert len(sizes) * max(sizes) <= 2 * sum(sizes) <= 4 * len(sizes) * min(sizes)


@given(num_blocks=st.integers(1, 12), pattern=PATTERNS, stages=st.sampled_from([(), (1,)]), affine=st.booleans())
def test_statistics_lie_in_fragments_of_their_own_and_leave_the_others_as_they_are(
    num_blocks: int, pattern: Pattern, stages: tuple[int, ...], affine: bool
) -> None:
    """In their stage's last slot; and the last fragment is one of weights."""
    weights = [(name, shape) for name, shape in transformer(num_blocks) if affine or "norm" not in name]
    stages = stages if num_blocks > 1 else ()
    found = [(f"blocks.{i}.norm.{what}", (16,)) for i in range(num_blocks) for what in ("running_mean", "running_var")]
    with_them = partition([*found, *weights], pattern=pattern, stages=stages)
    without = partition(weights, pattern=pattern, stages=stages)
    averaged = [fragment for fragment in with_them.fragments if fragment.averaged]
    trained = [fragment for fragment in with_them.fragments if not fragment.averaged]
    assert [(f.stage, f.slot, f.tensors) for f in trained] == [(f.stage, f.slot, f.tensors) for f in without.fragments]
    assert with_them.fragments[-1] is trained[-1] and with_them.slots == without.slots
    assert [(f.stage, f.slot) for f in averaged] == [(stage, without.slots - 1) for stage in range(1 + len(stages))]
    for fragment in averaged:
        first = 0 if not stages or fragment.stage == 0 else stages[0]
        stop = stages[0] if stages and fragment.stage == 0 else num_blocks
        assert [tensor.name for tensor in fragment.tensors] == [name for name, _ in found[2 * first : 2 * stop]]


def test_strided_deals_the_blocks_out_and_sequential_keeps_neighbours() -> None:
    """Invariant C28: L = 24, 3 blocks per fragment."""
    strided, sequential = (partition(transformer(24), pattern=pattern).fragments for pattern in LAYERED[1::-1])
    assert [blocks_of(strided[k]) for k in (0, 7)] == [[0, 8, 16], [7, 15, 23]]
    assert [blocks_of(sequential[k]) for k in (0, 7)] == [[0, 1, 2], [21, 22, 23]]
    uneven = partition(transformer(10), pattern="sequential").fragments[:-1]
    assert [len(blocks_of(fragment)) for fragment in uneven] == [3, 2, 3, 2], "runs differ by at most one block"


@pytest.mark.parametrize(("num_blocks", "slots"), [(24, 9), (48, 17), (108, 37)])
def test_the_embedding_has_a_slot_of_its_own_after_the_layers(num_blocks: int, slots: int) -> None:
    layout = partition(transformer(num_blocks), pattern="strided")
    assert layout.slots == slots and layout.fragments[-1].slot == slots - 1
    assert [tensor.name for tensor in layout.fragments[-1].tensors] == ["embed.weight", "norm.weight", "head.weight"]
    blocks_alone = [(name, shape) for name, shape in transformer(num_blocks) if name.startswith("blocks")]
    assert partition(blocks_alone, pattern="strided").slots == slots - 1


def test_blocks_are_counted_without_gaps_stack_after_stack_and_by_the_first_number_of_a_name() -> None:
    gapped: list[NamedShape] = [(f"{i}.weight", (16, 16)) for i in (0, 2, 4, 6)]  # nn.Sequential with activations
    layout = partition(gapped, pattern="strided", fragments=2)
    assert [blocks_of(fragment) for fragment in layout.fragments] == [[0, 4], [2, 6]]
    stacks: list[NamedShape] = [(f"{stack}.layers.{i}.w", (16,)) for stack in ("encoder", "decoder") for i in range(3)]
    first, second = partition(stacks, pattern="sequential").fragments
    assert {tensor.name.split(".")[0] for tensor in first.tensors} == {"encoder"}
    assert {tensor.name.split(".")[0] for tensor in second.tensors} == {"decoder"}
    experts: list[NamedShape] = [(f"layers.{i}.experts.{j}.w", (16,)) for i in range(2) for j in range(3)]
    layout = partition(experts, pattern="strided", blocks_per_fragment=1)
    assert [blocks_of(fragment) for fragment in layout.fragments] == [[0], [1]]


def test_unequal_blocks_and_a_model_without_any_are_balanced() -> None:
    unequal = [(f"layers.{i}.w", (256 * size,)) for i, size in enumerate((8, 1, 1, 1, 1, 4))]
    assert [f.numel for f in partition(unequal, pattern="balanced", fragments=2).fragments] == [256 * 8] * 2
    assert [f.numel for f in partition(sized(a=1, b=2, c=3, d=4), pattern="strided").fragments] == [256 * 5] * 2


def test_whole_above_the_size_limit_is_several_fragments_of_one_slot() -> None:
    layout = partition([(f"w{i}", (MAX_FRAGMENT_ELEMENTS // 2,)) for i in range(5)], pattern="whole")
    assert [(len(fragment.tensors), fragment.slot) for fragment in layout.fragments] == [(2, 0), (2, 0), (1, 0)]


def test_a_slot_above_the_size_limit_shifts_no_other_slot() -> None:
    big = MAX_FRAGMENT_ELEMENTS // 2 + 256
    tensors: list[NamedShape] = [*((f"h.{i}.w", (big,)) for i in range(4)), ("head.w", (256,))]
    layout = partition(tensors, pattern="strided", fragments=2)
    assert [fragment.slot for fragment in layout.fragments] == [0, 0, 1, 1, 2]


# --- The tensors of a module


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


def test_wrappers_of_torch_change_no_name() -> None:
    """Or a node that compiles or checkpoints and one that does not could not be in one run."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    expected = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [name for name, _ in trainable_tensors(module)] == expected
    module[0].compile(backend="eager")
    module[1] = torch.compile(module[1], backend="eager")
    whole = torch.compile(module, backend="eager")
    assert [name for name, _ in whole.named_parameters()][2] == "_orig_mod.1._orig_mod.weight"
    assert [name for name, _ in trainable_tensors(whole)] == expected
    checkpointed = nn.Sequential(*map(checkpoint_wrapper, [nn.Linear(2, 3), nn.Linear(3, 1)]))
    assert next(name for name, _ in checkpointed.named_parameters()) == "0._checkpoint_wrapped_module.weight"
    assert [name for name, _ in trainable_tensors(checkpointed)] == expected


def test_flattening_fills_the_tensors_places_and_clears_the_rest() -> None:
    (fragment,) = partition([("a", (3, 5)), ("b", ()), ("c", (256,)), ("d", (2,))], pattern="whole").fragments
    tensors = {tensor.name: torch.randn(tensor.shape) for tensor in fragment.tensors}
    out = torch.full((fragment.numel,), torch.nan)
    flatten_into(fragment, tensors, out)
    assert all(torch.equal(view(out, tensor), tensors[tensor.name]) for tensor in fragment.tensors)
    assert int((out != 0).sum()) == 15 + 1 + 256 + 2
    ones = torch.ones(fragment.numel)
    zero_padding_(fragment, ones)
    assert torch.equal(ones, (out != 0).float())


def test_tiles_cover_flat_tensors_in_step_and_share_their_memory() -> None:
    a, b = torch.zeros(10), torch.arange(10.0)
    for part_a, part_b in tiles(a, b, size=4):
        part_a.copy_(part_b)
    assert torch.equal(a, b)
    assert [part.numel() for (part,) in tiles(a, size=4)] == [4, 4, 2]


HIDDEN = """blocks.0.attention.query.weight blocks.0.attention.output.weight blocks.3.head.weight 0.weight weight
model.layers.11.mlp.down_proj.weight transformer.h.2.attn.c_attn.weight encoder.layer.0.attention.output.dense.weight"""
OUTER = """embed.weight model.embed_tokens.weight transformer.wpe.weight transformer.wte.weight shared.weight
lm_head.weight head.weight output.weight bert.embeddings.word_embeddings.weight
encoder.layers.0.relative_embedding.weight"""


def test_matrices_inside_the_layers_are_told_from_embeddings_heads_and_vectors() -> None:
    for name in HIDDEN.split():
        shapes = [(16, 16), (16, 16, 3), (16,), ()]
        assert [is_hidden_matrix(name, shape) for shape in shapes] == [True, True, False, False], name
    for name in OUTER.split():
        assert not is_hidden_matrix(name, (256, 16)), name


# --- Stages


@given(num_blocks=st.integers(2, 24), blocks_per_fragment=st.integers(1, 4), pattern=PATTERNS, data=st.data())
def test_no_fragment_crosses_a_stage_and_each_stage_is_cut_as_if_it_were_a_model(
    num_blocks: int, blocks_per_fragment: int, pattern: Pattern, data: st.DataObject
) -> None:
    tensors = transformer(num_blocks)
    starts = sorted(data.draw(st.sets(st.integers(1, num_blocks - 1), min_size=1, max_size=4)))
    layout = partition(tensors, pattern=pattern, blocks_per_fragment=blocks_per_fragment, stages=starts)
    assert Counter(t.name for f in layout.fragments for t in f.tensors) == Counter(name for name, _ in tensors)
    assert layout.num_stages == len(starts) + 1
    for stage, (first, stop) in enumerate(itertools.pairwise([0, *starts, num_blocks])):
        own = [fragment for fragment in layout.fragments if fragment.stage == stage]
        named = {tensor.name for fragment in own for tensor in fragment.tensors}
        assert {int(name.split(".")[1]) for name in named if name.startswith("blocks.")} == set(range(first, stop))
        assert ("embed.weight" in named) == ("head.weight" in named) == (stage == 0)
        alone = [tensor for tensor in tensors if tensor[0] in named]
        cut = partition(alone, pattern=pattern, blocks_per_fragment=blocks_per_fragment)
        assert [fragment.tensors for fragment in own] == [fragment.tensors for fragment in cut.fragments]
        assert own[-1].slot == layout.slots - 1, "every stage ends the round"
        assert [f.slot for f in own] == sorted({f.slot for f in own}), "and sends one fragment at a time"


def test_the_fragments_of_a_stage_with_few_are_spread_over_the_round() -> None:
    layout = partition(transformer(10), pattern="sequential", blocks_per_fragment=2, stages=(6,))
    found = [(fragment.stage, fragment.slot) for fragment in layout.fragments]
    assert found == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 3)]


def test_a_cut_without_stages_is_the_one_that_it_has_always_been() -> None:
    """The layout is part of a run's identity."""
    layout = partition(transformer(24), pattern="strided")
    assert (layout.num_stages, layout.digest()) == (1, "804ac90a826d2200")


BLOCKS = [(f"blocks.{number}.weight", (16,)) for number in range(6)]
CUT = partition([("embed", (16,)), *BLOCKS], pattern="strided", blocks_per_fragment=1, stages=(2, 4))
UNCUT = partition(BLOCKS, pattern="strided", blocks_per_fragment=1)


@all_stories(__file__, "fragments")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(vars(stages), globals()), rewrite=rewrite)
