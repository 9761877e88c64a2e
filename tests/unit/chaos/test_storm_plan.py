"""What a storm will do is drawn from its seed alone, and always leaves somebody standing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.chaos.storm_plan import (
    COORDINATOR,
    DISK,
    EVERY_S,
    FLOOD,
    JOINER,
    KINDS,
    OF_NODES,
    SETTLE_S,
    STRANGER,
    Fault,
    plan,
)

NODES = ("a", "b", "c", "d")

plans = st.builds(
    lambda seed, seconds, nodes: (seconds, NODES[:nodes], plan(seed, seconds=seconds, nodes=NODES[:nodes])),
    st.integers(0, 10_000),
    st.floats(1.0, 1800.0),
    st.integers(2, 4),
)


def test_a_seed_is_a_plan() -> None:
    one, again, other = (plan(seed, seconds=300.0, nodes=NODES) for seed in (1, 1, 2))
    assert one == again
    assert one != other


@given(plans)
def test_every_fault_ends_within_the_storm_and_comes_after_the_last(
    drawn: tuple[float, tuple[str, ...], list[Fault]],
) -> None:
    seconds, _, faults = drawn
    assert all(fault.lasts_s > 0 and fault.at_s + fault.lasts_s <= seconds + 1e-6 for fault in faults)
    gaps = [after.at_s - before.at_s for before, after in itertools.pairwise(faults)]
    assert all(gap >= EVERY_S[0] for gap in gaps)


@given(plans)
def test_nobody_is_hit_twice_at_a_time_and_one_node_is_always_left_alone(
    drawn: tuple[float, tuple[str, ...], list[Fault]],
) -> None:
    _, nodes, faults = drawn
    for fault in faults:
        under_way = [f for f in faults if f.at_s <= fault.at_s < f.at_s + f.lasts_s + SETTLE_S]
        targets = [f.target for f in under_way]
        assert len(targets) == len(set(targets))
        assert set(nodes) - set(targets)
        assert (fault.target in nodes) == (fault.kind in OF_NODES)
        assert fault.target in (*nodes, COORDINATOR, DISK, JOINER, STRANGER, FLOOD)


@pytest.mark.parametrize("seed", range(10))
def test_five_minutes_have_faults_of_every_kind(seed: int) -> None:
    assert {fault.kind for fault in plan(seed, seconds=300.0, nodes=NODES)} == set(KINDS)


def test_a_kind_that_cannot_happen_here_is_left_out() -> None:
    kinds = [kind for kind in KINDS if kind != "fill_disk"]
    assert {fault.kind for fault in plan(3, seconds=600.0, nodes=NODES, kinds=kinds)} == set(kinds)
