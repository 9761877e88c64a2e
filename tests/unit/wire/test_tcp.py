"""TCP_INFO from bytes that are laid out as the kernel does it."""

import struct

from farloop.wire.link_measurement import INFO_BYTES, parse
from farloop.wire.messages import Connection


def info(*, rtt_us: int, least_us: int, retransmits: int, segments: int, rate: int, app_limited: bool) -> bytes:
    data = bytearray(INFO_BYTES)
    data[7] = 1 if app_limited else 0
    for offset, value in ((68, rtt_us), (100, retransmits), (136, segments), (148, least_us)):
        struct.pack_into("=I", data, offset, value)
    struct.pack_into("=Q", data, 160, rate)
    return bytes(data)


def test_a_connection_is_read() -> None:
    told = parse(
        info(rtt_us=25_000, least_us=20_000, retransmits=7, segments=1000, rate=12_500_000, app_limited=False), "bbr"
    )
    assert told == Connection(
        rtt_s=0.025,
        least_rtt_s=0.02,
        retransmits=7,
        segments=1000,
        delivered_bytes_per_s=12_500_000.0,
        congestion="bbr",
    )


def test_a_rate_that_the_sender_limited_itself_tells_nothing_of_the_link() -> None:
    told = parse(info(rtt_us=1, least_us=1, retransmits=0, segments=1, rate=99, app_limited=True))
    assert told is not None and told.delivered_bytes_per_s == 0.0


def test_a_round_trip_that_was_not_measured_yet_is_none() -> None:
    assert parse(info(rtt_us=0, least_us=0, retransmits=0, segments=1, rate=0, app_limited=True)) is None
    told = parse(info(rtt_us=30_000, least_us=2**32 - 1, retransmits=0, segments=1, rate=0, app_limited=True))
    assert told is not None and told.least_rtt_s == told.rtt_s == 0.03


def test_an_older_kernel_that_tells_less_tells_nothing() -> None:
    assert parse(bytes(104)) is None and parse(b"") is None
