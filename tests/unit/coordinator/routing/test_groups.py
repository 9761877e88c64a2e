"""Which transport the ranks of a group share, and stages of consecutive ranks."""

import pytest

from farloop.coordinator.routing.inventory import CardKind
from farloop.coordinator.routing.placement import Transport, blocks, transport

IB, ROCE, PLAIN = CardKind.INFINIBAND, CardKind.ROCE_V2, CardKind.ETHERNET


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


def test_blocks_are_as_even_as_possible() -> None:
    assert blocks((5, 3, 1, 0, 2), 2) == ((5, 3, 1), (0, 2))
