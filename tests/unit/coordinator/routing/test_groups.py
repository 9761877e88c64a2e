"""Holmes' ranks: golden groups, and the invariants I1 to I4."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farloop.coordinator.routing.inventory import CardKind
from farloop.coordinator.routing.placement import Transport, blocks, logical_order, mesh, transport

IB, ROCE, PLAIN = CardKind.INFINIBAND, CardKind.ROCE_V2, CardKind.ETHERNET


def test_the_golden_example() -> None:
    kinds = [IB] * 4 + [ROCE] * 4
    found = mesh(kinds, [IB, ROCE], t=1, p=2, d=4)
    assert found.data == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found.pipeline == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_the_golden_example_shuffled() -> None:
    kinds = [IB if rank in (0, 2, 5, 7) else ROCE for rank in range(8)]
    assert mesh(kinds, [IB, ROCE], t=1, p=2, d=4).data == ((0, 2, 5, 7), (1, 3, 4, 6))


MESHES = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))


@settings(deadline=None)
@given(MESHES, st.data())
def test_every_rank_is_in_one_group_of_each_sort(sizes: tuple[int, int, int], data: st.DataObject) -> None:
    t, p, d = sizes
    kinds = data.draw(st.lists(st.sampled_from([IB, ROCE, PLAIN]), min_size=t * p * d, max_size=t * p * d))
    found = mesh(kinds, [IB, ROCE, PLAIN], t=t, p=p, d=d)
    for groups, size in ((found.tensor, t), (found.data, d), (found.pipeline, p)):
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(t * p * d))


@settings(deadline=None)
@given(MESHES, st.data())
def test_collectives_have_one_kind_where_counts_are_whole_stages(
    sizes: tuple[int, int, int], data: st.DataObject
) -> None:
    t, p, d = sizes
    stages = data.draw(st.lists(st.sampled_from([IB, ROCE, PLAIN]), min_size=p, max_size=p))
    kinds = [kind for kind in stages for _ in range(d * t)]
    random.Random(data.draw(st.integers(0, 99))).shuffle(kinds)
    found = mesh(kinds, [IB, ROCE, PLAIN], t=t, p=p, d=d)
    for group in (*found.tensor, *found.data):
        assert len({kinds[rank] for rank in group}) == 1


@settings(deadline=None)
@given(MESHES, st.data())
def test_few_groups_are_mixed_where_they_are_not(sizes: tuple[int, int, int], data: st.DataObject) -> None:
    t, p, d = sizes
    kinds = data.draw(st.lists(st.sampled_from([IB, ROCE, PLAIN]), min_size=t * p * d, max_size=t * p * d))
    found = mesh(kinds, [IB, ROCE, PLAIN], t=t, p=p, d=d)
    mixed = sum(len({kinds[rank] for rank in group}) > 1 for group in found.data)
    assert mixed <= (len(set(kinds)) - 1) * t


@settings(deadline=None)
@given(st.lists(st.sampled_from([IB, ROCE]), min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_permuted_ranks_of_a_kind_permute_the_groups(kinds: list[CardKind], rand: random.Random) -> None:
    """Ranks renumbered within their kind stand where those stood whose numbers they have."""
    order = logical_order(kinds, [IB, ROCE])
    shuffled = kinds[:]
    rand.shuffle(shuffled)
    again = logical_order(shuffled, [IB, ROCE])
    assert [kinds[rank] for rank in order] == [shuffled[rank] for rank in again]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([IB, IB], Transport.INFINIBAND),
        ([ROCE, ROCE], Transport.ROCE),
        ([CardKind.ROCE_V1], Transport.ROCE),
        ([CardKind.ROCE_V1, ROCE], Transport.SOCKET),
        ([IB, ROCE], Transport.SOCKET),
        ([PLAIN, CardKind.VIRTUAL], Transport.SOCKET),
        ([CardKind.IWARP, CardKind.IWARP], Transport.SOCKET),
        ([], Transport.SOCKET),
    ],
)
def test_rdma_only_for_groups_of_one_rdma_kind(kinds: list[CardKind], expected: Transport) -> None:
    assert transport(kinds) is expected


def test_wrong_sizes_and_unknown_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"t·p·d = 1·2·3 = 6; there are 8"):
        mesh([IB] * 8, [IB], t=1, p=2, d=3)
    with pytest.raises(ValueError, match=r"no <CardKind\.ROCE_V2"):
        logical_order([ROCE], [IB])


def test_blocks_are_as_even_as_possible() -> None:
    assert blocks((5, 3, 1, 0, 2), 2) == ((5, 3, 1), (0, 2))
