"""How a model is cut into fragments, and their layout in a flat buffer."""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from farloop.algo.spec import (
    MAX_FRAGMENT_ELEMENTS,
    TENSOR_ALIGN,
    TILE,
    Fragment,
    Layout,
    Pattern,
    TensorSlot,
    is_statistic,
)

# --- Which tensors are matrices inside layers
#
# They are stepped and averaged by rules of their own (Muon, the radial average); all else is not.


_OUTSIDE: Final = frozenset({"head", "lm_head", "output", "shared", "wte", "wpe"})
"""Parts of the names that embeddings and heads have in common models, besides all with `embed` in them."""


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether the tensor maps one layer's features to another's: two dimensions or more, and no embedding or head.

    Rows of an embedding or a head belong to single tokens and move when their token occurs. In a numbered block only
    the name `embed` excludes a tensor: `output` and `head` are parts of attention there.
    """
    if len(shape) < 2:
        return False
    parts = name.lower().split(".")
    if any("embed" in part for part in parts):
        return False
    return any(part.isdecimal() for part in parts) or not _OUTSIDE.intersection(parts)


def is_muon_matrix(name: str, shape: Sequence[int]) -> bool:
    """Whether Muon steps the tensor: a hidden matrix of two dimensions."""
    return len(shape) == 2 and is_hidden_matrix(name, shape)


# --- Partition and flat layout
#
# Arithmetic over names and shapes, so every node that builds the same model cuts it the same way, whatever its
# parallelism. When a fragment is sent, and what is done to it, is decided elsewhere.


_ROWS: Final = 64  # rows that a split keeps together

NamedShape = tuple[str, tuple[int, ...]]


def trainable_tensors(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that require a gradient, in registration order; tied ones once, under their first name.

    Tied parameters are one object or cover the same memory. The parts that `torch.compile` and activation
    checkpointing add to names are removed, because nodes agree on names; unwrap other wrappers (DDP) first.
    """
    found: dict[tuple[int, int], tuple[str, nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            # Meta tensors and DTensors have no address: named_parameters has already tied those that are one object.
            address = parameter.data_ptr() or id(parameter)
            found.setdefault((address, parameter.numel()), (plain_name(name), parameter))
    return list(found.values())


def statistics_of(module: nn.Module, run: Container[str] | None = None) -> dict[str, Tensor]:
    """Its running statistics (the buffers running_mean and running_var), by name as `trainable_tensors` has it; those
    that a `run` has, where its names are given."""
    found = {plain_name(name): buffer for name, buffer in module.named_buffers() if is_statistic(name)}
    return {name: buffer for name, buffer in found.items() if run is None or name in run}


@contextmanager
def kept_ties(module: nn.Module) -> Iterator[None]:
    """Parameters and buffers that cover the same memory still do so after the block, which may give them other memory:
    that of the first trainable one then."""
    groups: dict[tuple[int, int], list[Tensor]] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_traceable_wrapper_subclass(tensor) and (address := tensor.data_ptr()):
            groups.setdefault((address, tensor.numel()), []).append(tensor)
    yield
    for tied in groups.values():
        first, *others = sorted(tied, key=lambda tensor: not tensor.requires_grad)
        for other in others:
            if other.data_ptr() != first.data_ptr():
                other.data = first.data.as_strided(other.shape, other.stride())


_WRAPPERS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})  # torch.compile, activation checkpointing


def plain_name(name: str) -> str:
    """The name of a parameter without the parts that torch's wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def partition(
    tensors: Sequence[NamedShape],
    *,
    pattern: Pattern,
    blocks_per_fragment: int = 3,
    fragments: int | None = None,
    stages: Sequence[int] = (),
) -> Layout:
    """Cut the tensors into fragments, each with its slot in the round.

    `whole` puts everything into slot 0. The other patterns give each of P layer fragments a slot, 0 … P−1, and what
    lies outside the blocks (embedding, head, last norm) the slot after them: Streaming DiLoCo (arXiv 2501.18512,
    Fig. 17) keeps it apart too. P is `fragments`, or ⌈blocks / blocks_per_fragment⌉. The paper's choice is `strided`
    with 3 blocks per fragment at every scale. In a model without numbered blocks every tensor counts as a block of
    its own and the pattern is `balanced`. A slot above the size limit is shared by several fragments.

    `stages` are the first blocks of all pipeline stages but the first: no fragment crosses one, and each stage is cut
    for itself, with what lies outside the blocks in stage 0, where losses end. Its fragments are spread evenly over the
    slots of the stage that has most, so that a node that holds one stage sends as evenly as one that holds all, and
    every stage has a fragment in the last slot, which ends a round.

    A tensor above the size limit is split along dimension 0 into the fewest parts of about equal size, each a slot of
    its own with its `rows`. Parts are multiples of 64 rows where the tensor has that many, so that the 64 × 64 squares
    of `topk` stay whole. Element-wise methods and codecs give the same numbers as without a split; rules that work on
    whole matrices (`lowrank`, the radial average, a step per tensor) see each part as a matrix.

    Running statistics change nothing of this. They are fragments of their own, in their stage's last slot and before
    its weights: evaluations follow the last fragment.

    Raises ValueError for no tensors, duplicate names, empty tensors, a single row above the limit, more fragments than
    blocks, and stages that are not of this model.
    """
    _check_tensors(tensors)
    if blocks_per_fragment < 1:
        raise ValueError(f"blocks_per_fragment: expected 1 or more, got {blocks_per_fragment}")
    if pattern == "whole" and fragments not in (None, 1):
        raise ValueError(f"the pattern 'whole' has 1 fragment, not {fragments}; for more take 'strided'")

    weights, statistics = ([t for t in tensors if is_statistic(t[0]) == which] for which in (False, True))
    blocks, numbers = _block_numbers(weights), _block_numbers(tensors)
    cut: list[list[list[NamedShape]]] = []
    for first, stop in _stages(stages, 1 + max(blocks.values(), default=-1)):
        own = [t for t in weights if (first <= blocks[t[0]] < stop if t[0] in blocks else first == 0)]
        cut.append([own] if pattern == "whole" else _groups(own, blocks, pattern, blocks_per_fragment, fragments))
        cut[-1][-1] = [t for t in statistics if first <= numbers.get(t[0], 0) < stop] + cut[-1][-1]
    return _layout(cut)


def _stages(starts: Sequence[int], num_blocks: int) -> list[tuple[int, int]]:
    """First block, and the one after the last, of every stage."""
    bounds = [0, *starts]
    if starts and not (list(bounds) == sorted(set(bounds)) and bounds[-1] < num_blocks):
        raise ValueError(
            f"stages begin at blocks {', '.join(map(str, starts))}; name the first block of every stage but the first, "
            f"in order, and this model has {num_blocks} numbered blocks"
        )
    return list(zip(bounds, [*starts, max(num_blocks, 1)], strict=True))


def _groups(
    tensors: Sequence[NamedShape],
    blocks: Mapping[str, int],
    pattern: Pattern,
    blocks_per_fragment: int,
    fragments: int | None,
) -> list[list[NamedShape]]:
    """The layer fragments of one stage, and what lies outside the blocks behind them."""
    layers = [tensor for tensor in tensors if tensor[0] in blocks]
    rest = [tensor for tensor in tensors if tensor[0] not in blocks]
    if not layers:
        layers, rest, pattern = rest, [], "balanced"
        blocks = {name: number for number, (name, _) in enumerate(layers)}

    first = min(blocks[name] for name, _ in layers)
    local = {name: blocks[name] - first for name, _ in layers}
    num_blocks = 1 + max(local.values())
    num_fragments = -(-num_blocks // blocks_per_fragment) if fragments is None else fragments
    most = len(layers) if pattern == "balanced" else num_blocks
    if not 1 <= num_fragments <= most:
        unit = "tensors" if pattern == "balanced" else "blocks"
        raise ValueError(f"{num_fragments} fragments cannot be cut from {most} {unit}; take 1 to {most}")

    groups: list[list[NamedShape]] = [[] for _ in range(num_fragments)]
    for tensor, group in zip(layers, _assign(layers, local, pattern, num_blocks, num_fragments), strict=True):
        groups[group].append(tensor)
    return [*groups, rest] if rest else groups


def whole_shapes(fragments: Iterable[Fragment]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that the fragments hold, by name; the parts of a split tensor add up."""
    shapes: dict[str, tuple[int, ...]] = {}
    for fragment in fragments:
        for tensor in fragment.tensors:
            before = shapes.get(tensor.name, (0,))[0] if tensor.rows else 0
            shapes[tensor.name] = (before + tensor.shape[0], *tensor.shape[1:]) if tensor.rows else tensor.shape
    return shapes


def rows_of(tensor: Tensor, slot: TensorSlot) -> Tensor:
    """What the slot covers of the whole tensor, a view."""
    return tensor if slot.rows is None else tensor[slot.rows[0] : slot.rows[1]]


def view(flat: Tensor, tensor: TensorSlot) -> Tensor:
    """The tensor's own part of a flat fragment buffer, in its shape; no copy."""
    return flat[tensor.offset : tensor.offset + tensor.numel].view(tensor.shape)


def zero_padding_(fragment: Fragment, flat: Tensor) -> None:
    """Clear the elements that belong to no tensor: a buffer that served another fragment holds its numbers there."""
    starts = [*(tensor.offset for tensor in fragment.tensors), fragment.numel]
    for tensor, end in zip(fragment.tensors, starts[1:], strict=True):
        if tensor.offset + tensor.numel < end:
            flat[tensor.offset + tensor.numel : end].zero_()


def tiles(*flats: Tensor, size: int = TILE) -> Iterator[tuple[Tensor, ...]]:
    """Matching parts of flat tensors, `size` elements each: what is done part by part needs small temporaries only."""
    assert all(flat.dim() == 1 and flat.shape == flats[0].shape for flat in flats)
    for start in range(0, flats[0].numel(), size):
        yield tuple(flat[start : start + size] for flat in flats)


@torch.no_grad()
def flatten_into(fragment: Fragment, tensors: Mapping[str, Tensor], out: Tensor) -> None:
    """Copy the named tensors into `out`, fp32 [fragment.numel], padding zeroed: first anchors, raw gradients."""
    for tensor in fragment.tensors:
        source = rows_of(tensors[tensor.name], tensor)
        assert source.shape == tensor.shape, f"{tensor.name} has shape {tuple(source.shape)}, not {tensor.shape}"
        view(out, tensor).copy_(source)
    zero_padding_(fragment, out)


def _check_tensors(tensors: Sequence[NamedShape]) -> None:
    if all(is_statistic(name) for name, _ in tensors):
        raise ValueError("the model has no trainable tensors")
    seen: set[str] = set()
    for name, shape in tensors:
        if name in seen:
            raise ValueError(f"the tensor name {name!r} appears twice")
        seen.add(name)
        if _padded(shape) == 0:
            raise ValueError(
                f"the tensor {name!r} has no elements, its shape is {shape}: freeze it with requires_grad_(False), and "
                "leave it out of a weights file"
            )
        if (row := _padded(shape[1:])) > MAX_FRAGMENT_ELEMENTS:
            raise ValueError(
                f"one row of the tensor {name!r} has {row} elements with padding; tensors are split between rows of "
                f"dimension 0, and a fragment holds at most {MAX_FRAGMENT_ELEMENTS}"
            )


def _block_numbers(tensors: Sequence[NamedShape]) -> dict[str, int]:
    """Block of each tensor whose name has a number in it: `blocks.<i>.…`, `model.layers.<i>.…`, `h.<i>.…`.

    The first number counts (a later one is an expert or a sub-layer). Blocks are numbered from 0 without gaps, stack
    after stack (encoder, decoder), so that `nn.Sequential` with activations in between is still dealt out evenly.
    """
    keys: dict[str, tuple[str, int]] = {}
    for name, _ in tensors:
        parts = name.split(".")
        place = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        if place is not None:
            keys[name] = (".".join(parts[:place]), int(parts[place]))
    stacks = {stack: number for number, stack in enumerate(dict.fromkeys(stack for stack, _ in keys.values()))}
    in_order = sorted(set(keys.values()), key=lambda key: (stacks[key[0]], key[1]))
    numbers = {key: number for number, key in enumerate(in_order)}
    return {name: numbers[key] for name, key in keys.items()}


def _assign(
    layers: Sequence[NamedShape], blocks: Mapping[str, int], pattern: Pattern, num_blocks: int, num_fragments: int
) -> list[int]:
    if pattern == "strided":
        return [blocks[name] % num_fragments for name, _ in layers]
    if pattern == "sequential":
        # Runs of consecutive blocks whose lengths differ by at most one.
        return [blocks[name] * num_fragments // num_blocks for name, _ in layers]
    # Greedy bin packing, largest first into the emptiest, as in Decoupled DiLoCo (arXiv 2604.21428).
    loads = [0] * num_fragments
    assigned = [0] * len(layers)
    for item in sorted(range(len(layers)), key=lambda item: (-_padded(layers[item][1]), item)):
        assigned[item] = loads.index(min(loads))
        loads[assigned[item]] += _padded(layers[item][1])
    return assigned


def _layout(stages: Sequence[Sequence[Sequence[NamedShape]]]) -> Layout:
    """One slot per group of the stage that has most; a group above the size limit becomes several fragments of its."""
    slots = max(len(groups) for groups in stages)
    cut = [
        (stage, -(-(number + 1) * slots // len(groups)) - 1, tensors)
        for stage, groups in enumerate(stages)
        for number, group in enumerate(groups)
        for tensors in _within_limit(group)
    ]
    return Layout(
        slots=slots,
        fragments=tuple(_fragment(index, stage, slot, tensors) for index, (stage, slot, tensors) in enumerate(cut)),
    )


def _within_limit(group: Sequence[NamedShape]) -> Iterator[list[TensorSlot]]:
    """The group's tensors in order, in as many fragments as the limit asks for; none has statistics and weights."""
    taken: list[TensorSlot] = []
    numel = 0
    for name, shape, rows in (part for tensor in group for part in _parts(*tensor)):
        is_other = bool(taken) and is_statistic(name) != is_statistic(taken[0].name)
        if is_other or numel + _padded(shape) > MAX_FRAGMENT_ELEMENTS:
            yield taken
            taken, numel = [], 0
        taken.append(TensorSlot(name=name, shape=shape, offset=numel, rows=rows))
        numel += _padded(shape)
    yield taken


def _parts(name: str, shape: Sequence[int]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, int] | None]]:
    """Name, shape and rows of a tensor's parts; the tensor itself where it is within the size limit."""
    shape = tuple(shape)
    if _padded(shape) <= MAX_FRAGMENT_ELEMENTS:
        yield name, shape, None
        return
    most = MAX_FRAGMENT_ELEMENTS // TENSOR_ALIGN * TENSOR_ALIGN // math.prod(shape[1:])  # rows of a part
    unit = _ROWS if most >= _ROWS else 1
    units, limit = -(-shape[0] // unit), most // unit
    num_parts = -(-units // limit)
    cuts = [min(units * part // num_parts * unit, shape[0]) for part in range(num_parts + 1)]
    for start, stop in pairwise(cuts):
        yield name, (stop - start, *shape[1:]), (start, stop)


def _fragment(index: int, stage: int, slot: int, tensors: Sequence[TensorSlot]) -> Fragment:
    numel = tensors[-1].offset + _padded(tensors[-1].shape)
    return Fragment(index=index, slot=slot, numel=numel, tensors=tuple(tensors), stage=stage)


def _padded(shape: Sequence[int]) -> int:
    return -(-math.prod(shape) // TENSOR_ALIGN) * TENSOR_ALIGN
