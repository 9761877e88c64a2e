"""Transfers that share links: max-min fair, in order, and as predicted by formula where that is exact."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farloop.sim.bandwidth import Flow, fair_rates, play


def test_a_crowded_link_is_shared_evenly_and_the_rest_is_used() -> None:
    links = {"a": ("thin", "wide"), "b": ("wide",), "c": ("wide",)}
    assert fair_rates(links, {"thin": 1.0, "wide": 9.0}) == {"a": 1.0, "b": 4.0, "c": 4.0}


def test_who_ends_early_leaves_room() -> None:
    flows = [Flow(name="short", num_bytes=1.0, links=("l",)), Flow(name="long", num_bytes=3.0, links=("l",))]
    assert play(flows, {"l": 1.0}) == pytest.approx({"short": 2.0, "long": 4.0})


def test_flows_wait_for_others_and_for_the_way() -> None:
    first = Flow(name="up", num_bytes=2.0, links=("l",), latency_s=0.5)
    second = Flow(name="down", num_bytes=2.0, links=("l",), latency_s=0.5, after=("up",))
    assert play([first, second], {"l": 1.0}) == pytest.approx({"up": 2.5, "down": 5.0})


def test_what_never_begins_is_said() -> None:
    with pytest.raises(ValueError, match="1 flows wait for what never arrives"):
        play([Flow(name="a", num_bytes=1.0, links=("l",), after=("a",))], {"l": 1.0})


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(1.0, 100.0), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=8))
def test_no_link_carries_more_than_it_can(drawn: list[tuple[float, int, int]]) -> None:
    flows = [Flow(name=str(n), num_bytes=size, links=tuple({f"l{a}", f"l{b}"})) for n, (size, a, b) in enumerate(drawn)]
    rates = {f"l{k}": 1.0 + k for k in range(4)}
    arrived = play(flows, rates)
    last = max(arrived.values())
    for link, rate in rates.items():
        carried = sum(flow.num_bytes for flow in flows if link in flow.links)
        assert carried <= rate * last * (1 + 1e-5)
    fair = fair_rates({flow.name: flow.links for flow in flows}, rates)
    for link, rate in rates.items():
        assert sum(fair[flow.name] for flow in flows if link in flow.links) <= rate * (1 + 1e-9)
    for flow in flows:  # max-min: somewhere on its way a link is full
        assert any(
            sum(fair[other.name] for other in flows if link in other.links) >= rates[link] * (1 - 1e-9)
            for link in flow.links
        )
