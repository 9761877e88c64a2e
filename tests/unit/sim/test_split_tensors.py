"""Tensors above the size limit of a fragment are split between rows, and train to the same bits as whole ones."""

import math
from itertools import pairwise

import pytest
import torch
from faulty_world import run
from hypothesis import given
from hypothesis import strategies as st
from shards import Shards
from simulated_faults import Scenario
from torch import Tensor
from toy_problem import terms_of

from farloop.algo import fragments as under_test
from farloop.algo.fragments import NamedShape, flatten_into, partition, rows_of, view, whole_shapes
from farloop.algo.spec import MAX_FRAGMENT_ELEMENTS, Layout
from farloop.algo.terms import Terms


def assert_cut_in_order(layout: Layout, shapes: dict[str, tuple[int, ...]], limit: int) -> None:
    """Every row of every tensor is in one slot, in order, and no fragment is above the limit."""
    assert whole_shapes(layout.fragments) == shapes
    assert layout.num_parameters == sum(map(math.prod, shapes.values()))
    assert all(fragment.numel <= limit for fragment in layout.fragments)
    for name, shape in shapes.items():
        slots = [slot for fragment in layout.fragments for slot in fragment.tensors if slot.name == name]
        if slots[0].rows is None:
            assert [slot.shape for slot in slots] == [shape]
        else:
            rows = [slot.rows for slot in slots if slot.rows]
            assert (rows[0][0], rows[-1][1]) == (0, shape[0])
            assert all(before[1] == after[0] for before, after in pairwise(rows))
            assert [slot.shape for slot in slots] == [(stop - start, *shape[1:]) for start, stop in rows]


@given(st.lists(st.lists(st.integers(1, 40), min_size=0, max_size=3), min_size=1, max_size=5))
def test_any_tensors_are_cut_in_order_and_within_the_limit(shapes: list[list[int]]) -> None:
    limit = 2048  # a row has at most 40 · 40 elements
    tensors: list[NamedShape] = [(f"w{number}", tuple(shape)) for number, shape in enumerate(shapes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(under_test, "MAX_FRAGMENT_ELEMENTS", limit)
        layout = partition(tensors, pattern="whole")
    assert_cut_in_order(layout, dict(tensors), limit)
    values = {name: torch.randn(shape) for name, shape in tensors}
    for fragment in layout.fragments:
        flat = torch.empty(fragment.numel)
        flatten_into(fragment, values, flat)
        assert all(torch.equal(view(flat, slot), rows_of(values[slot.name], slot)) for slot in fragment.tensors)


def test_one_row_above_the_limit_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"one row of the tensor 'a' has \d+ elements with padding; tensors are split"):
        partition([("a", (2, MAX_FRAGMENT_ELEMENTS + 1))], pattern="whole")


@pytest.mark.parametrize("method", ["diloco", "streaming"])
def test_a_run_with_split_tensors_ends_with_the_same_bits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Element-wise methods do not see where a tensor is split: the executors, journal and snapshots carry the parts."""
    terms = terms_of(method, codec_up="fp32", codec_down="fp32", steps=24)
    whole, num_whole = final_weights(terms)
    monkeypatch.setattr(under_test, "MAX_FRAGMENT_ELEMENTS", 256)
    split, num_split = final_weights(terms)
    assert num_whole < num_split
    assert whole.keys() == split.keys()
    assert all(torch.equal(whole[name], split[name]) for name in whole)


def final_weights(terms: Terms) -> tuple[dict[str, Tensor], int]:
    """The run's last anchors by parameter, and how many fragments they are."""
    problem = Shards(nodes=2)
    spec, _ = problem.begin(terms)
    outcome = run(Scenario(terms=terms, problem=problem))
    outcome.check()
    fragments = spec.identity.layout.fragments
    named = {name: torch.full(shape, torch.nan) for name, shape in whole_shapes(fragments).items()}
    for fragment, anchor in zip(fragments, outcome.anchors, strict=True):
        for slot in fragment.tensors:
            rows_of(named[slot.name], slot).copy_(view(anchor, slot))
    return named, len(fragments)
