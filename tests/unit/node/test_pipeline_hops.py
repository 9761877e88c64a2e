"""Where a microbatch goes next."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_layouts import layout_of

from farloop.algo.stages import Hop
from farloop.node.pipeline.routing import Limits, Onward, is_legal, onward

LAYOUT = layout_of(["a", "bB", "cC", "d"], ["abcd"])
(PATH,) = LAYOUT.paths
LATE_S = 10.0


def step(loads: Mapping[str, float], position: int = 1, visited: str = "a") -> Onward | None:
    """The next visit where only these nodes can be reached."""
    hops = [Hop(stage="abcd".index(name.lower()), node=name) for name in visited]
    return onward(LAYOUT, PATH, position, hops, lambda node: loads.get(node), late_s=LATE_S, limits=Limits())


@pytest.mark.parametrize(
    ("stages", "legal"),
    [
        ([0, 1, 2, 3], True),
        ([0, 2, 1, 3], True),
        ([0, 2, 1, 4, 3], True),
        ([0, 4], True),
        ([0, 5], False),  # five steps forward
        ([0, 3, 1], False),  # two back at once
        ([0, 2, 1, 4, 3, 6, 5], False),  # back three times
        ([1, 2], False),
        ([0, 1, 1], False),
        ([], False),
    ],
)
def test_swaps_and_jumps_are_bounded_as_skippipe_has_them(stages: list[int], legal: bool) -> None:
    assert is_legal(stages, Limits()) == legal


def test_the_planned_node_is_taken_while_it_can_be_reached() -> None:
    assert step({"b": 3.0, "B": 0.0}) == Onward(hop=Hop(stage=1, node="b"), position=1, rerouted=False, skipped=0)


def test_a_dead_node_gives_way_to_its_least_loaded_replica() -> None:
    assert step({"B": 3.0}) == Onward(hop=Hop(stage=1, node="B"), position=1, rerouted=True, skipped=0)


def test_a_late_node_gives_way_to_one_that_would_begin_sooner() -> None:
    taken = step({"b": LATE_S + 1, "B": 2.0})
    assert taken is not None and taken.hop == Hop(stage=1, node="B")
    kept = step({"b": LATE_S + 1, "B": LATE_S + 5})
    assert kept is not None and kept.hop == Hop(stage=1, node="b")


def test_a_stage_that_nobody_holds_is_skipped() -> None:
    assert step({"c": 0.0, "d": 0.0}) == Onward(hop=Hop(stage=2, node="c"), position=2, rerouted=False, skipped=1)


def test_the_last_stages_may_be_skipped_too() -> None:
    assert step({}, position=3, visited="abc") == Onward(hop=None, position=3, rerouted=False, skipped=1)


def test_who_would_visit_less_than_half_of_the_stages_has_no_way_on() -> None:
    assert step({}) is None
    assert step({"d": 0.0}) is not None  # two of four


def test_at_the_end_of_its_path_it_goes_back_to_its_source() -> None:
    assert step({}, position=4, visited="abcd") == Onward(hop=None, position=4, rerouted=False, skipped=0)


@given(st.dictionaries(st.sampled_from("bBcCd"), st.floats(0.0, 50.0)), st.integers(1, 4))
def test_whatever_is_chosen_is_live_legal_and_ahead(loads: dict[str, float], position: int) -> None:
    taken = step(loads, position, "abcd"[:position])
    if taken is None or taken.hop is None:
        return
    assert taken.hop.node in loads
    assert taken.position == position + taken.skipped
    assert is_legal([*range(position), taken.hop.stage], Limits())
