"""What a storm will do is drawn from its seed alone, and always leaves a node standing; the links it damages."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.lab.chaos.storm_plan import (
    COORDINATOR,
    DISK,
    EVERY_S,
    FLOOD,
    JOINER,
    KINDS,
    OF_NODES,
    SETTLE_S,
    STORE,
    STRANGER,
    plan,
)
from farloop.local.relay import BUFFER_BYTES, MAX_SLICE_BYTES, MIN_SLICE_BYTES, Link, LinkError

NODES = ("a", "b", "c", "d")


@given(st.integers(0, 10_000), st.floats(1.0, 1800.0), st.integers(2, 4))
def test_no_node_is_hit_twice_at_a_time_one_node_is_left_alone_and_every_fault_ends_within_the_storm(
    seed: int, seconds: float, count: int
) -> None:
    nodes = NODES[:count]
    faults = plan(seed, seconds=seconds, nodes=nodes)
    assert faults == plan(seed, seconds=seconds, nodes=nodes)
    assert all(after.at_s - before.at_s >= EVERY_S[0] for before, after in itertools.pairwise(faults))
    for fault in faults:
        assert fault.lasts_s > 0 and fault.at_s + fault.lasts_s <= seconds + 1e-6
        targets = [f.target for f in faults if f.at_s <= fault.at_s < f.at_s + f.lasts_s + SETTLE_S]
        assert len(targets) == len(set(targets)) and set(nodes) - set(targets)
        assert (fault.target in nodes) == (fault.kind in OF_NODES)
        assert fault.target in (*nodes, COORDINATOR, DISK, JOINER, STRANGER, FLOOD, STORE)


@pytest.mark.parametrize("seed", range(10))
def test_five_minutes_have_faults_of_every_kind_that_can_happen(seed: int) -> None:
    faults = plan(seed, seconds=300.0, nodes=NODES)
    assert {fault.kind for fault in faults} == set(KINDS) and faults != plan(seed + 1, seconds=300.0, nodes=NODES)
    kinds = [kind for kind in KINDS if kind != "fill_disk"]
    assert {fault.kind for fault in plan(seed, seconds=600.0, nodes=NODES, kinds=kinds)} == set(kinds)


# --- links; their behaviour in real time is in tests/integration/test_relay.py


def test_a_link_is_read_with_its_rate_in_bits_and_its_round_trip_in_seconds() -> None:
    for text, bits_per_s, rtt_s in (
        ("50mbit/50ms", 50e6, 0.05),
        ("1gbit/0ms", 1e9, 0.0),
        ("256kbit/1.5s", 256e3, 1.5),
        (" 2.5MBIT/120ms ", 2.5e6, 0.12),
    ):
        link = Link.parse(text)
        assert (link.bits_per_s, link.rtt_s, link.bytes_per_s) == pytest.approx((bits_per_s, rtt_s, bits_per_s / 8))


@pytest.mark.parametrize(
    "text",
    ["", "50mbit", "50/50ms", "50mbit/50", "50MB/50ms", "-5mbit/1ms", "nanmbit/1ms", "0mbit/5ms", "1mbit/61s",
     "9999gbit/1ms", "50mbit/50ms/50ms", "5 0mbit/50ms", "1e3mbit/50ms", "٥٠mbit/50ms", "5_0mbit/50ms"],
)  # fmt: skip
def test_a_wrong_link_is_refused_in_one_line_with_an_example(text: str) -> None:
    with pytest.raises(LinkError) as caught:
        Link.parse(text)
    message = str(caught.value)
    assert f"'{text}'" in message and "for example 50mbit/50ms" in message and "\n" not in message


@given(st.integers(1, 10**8), st.integers(0, 60_000))
def test_a_link_reads_back_the_same_and_its_buffer_holds_what_is_on_its_way(kbit: int, rtt_ms: int) -> None:
    link = Link(bits_per_s=kbit * 1e3, rtt_s=rtt_ms / 1e3)
    again = Link.parse(str(link))
    assert (again.bits_per_s, again.rtt_s) == pytest.approx((link.bits_per_s, link.rtt_s), rel=1e-5)
    assert MIN_SLICE_BYTES <= link.slice_bytes <= MAX_SLICE_BYTES
    assert link.buffer_bytes >= link.bytes_per_s * link.rtt_s + BUFFER_BYTES - 1
