"""The relay's link specification; its behaviour in real time is in tests/integration/test_relay.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.chaos.relay import BUFFER_BYTES, MAX_SLICE_BYTES, MIN_SLICE_BYTES, Link, LinkError


@pytest.mark.parametrize(
    ("text", "bits_per_s", "rtt_s"),
    [
        ("50mbit/50ms", 50e6, 0.05),
        ("1gbit/0ms", 1e9, 0.0),
        ("256kbit/1.5s", 256e3, 1.5),
        (" 2.5MBIT/120ms ", 2.5e6, 0.12),
    ],
)
def test_a_link_reads_its_rate_in_bits_and_its_round_trip_in_seconds(
    text: str, bits_per_s: float, rtt_s: float
) -> None:
    link = Link.parse(text)
    assert link.bits_per_s == pytest.approx(bits_per_s)
    assert link.rtt_s == pytest.approx(rtt_s)
    assert link.bytes_per_s == pytest.approx(bits_per_s / 8)


@pytest.mark.parametrize(
    "text",
    ["", "50mbit", "50/50ms", "50mbit/50", "50MB/50ms", "-5mbit/1ms", "nanmbit/1ms", "0mbit/5ms", "1mbit/61s",
     "9999gbit/1ms", "50mbit/50ms/50ms", "5 0mbit/50ms", "1e3mbit/50ms"],
)  # fmt: skip
def test_a_wrong_link_is_refused_in_one_line_with_an_example(text: str) -> None:
    with pytest.raises(LinkError) as caught:
        Link.parse(text)
    message = str(caught.value)
    assert f"'{text}'" in message
    assert "for example 50mbit/50ms" in message
    assert "\n" not in message


@given(st.integers(1, 10**8), st.integers(0, 60_000))
def test_a_link_written_out_reads_back_the_same(kbit: int, rtt_ms: int) -> None:
    link = Link(bits_per_s=kbit * 1e3, rtt_s=rtt_ms / 1e3)
    again = Link.parse(str(link))
    assert again.bits_per_s == pytest.approx(link.bits_per_s, rel=1e-5)
    assert again.rtt_s == pytest.approx(link.rtt_s, rel=1e-5)


@given(st.integers(1, 10**8), st.integers(0, 60_000))
def test_slices_are_short_and_the_buffer_holds_what_is_on_its_way(kbit: int, rtt_ms: int) -> None:
    link = Link(bits_per_s=kbit * 1e3, rtt_s=rtt_ms / 1e3)
    assert MIN_SLICE_BYTES <= link.slice_bytes <= MAX_SLICE_BYTES
    assert link.buffer_bytes >= link.bytes_per_s * link.rtt_s + BUFFER_BYTES - 1
