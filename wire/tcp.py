"""What the kernel tells of a TCP connection, from the bytes of TCP_INFO (Linux, include/uapi/linux/tcp.h)."""

import struct
from typing import Final

from farloop.wire.link_messages import Connection

INFO_BYTES: Final = 232
"""Asked for; an older kernel gives fewer."""

_FLAGS, _RTT, _TOTAL_RETRANS, _SEGS_OUT, _MIN_RTT, _DELIVERY_RATE = 7, 68, 100, 136, 148, 160
"""Offsets of what is read here."""

_LEAST_BYTES: Final = _DELIVERY_RATE + 8
_NO_MIN_RTT: Final = (1 << 32) - 1
_MICROSECONDS: Final = 1e6


def parse(info: bytes, congestion: str = "") -> Connection | None:
    """The connection; None where the kernel does not tell enough, or has not measured a round trip yet."""
    if len(info) < _LEAST_BYTES:
        return None
    rtt, least = _u32(info, _RTT), _u32(info, _MIN_RTT)
    if rtt == 0:
        return None
    (rate,) = struct.unpack_from("=Q", info, _DELIVERY_RATE)
    return Connection(
        rtt_s=rtt / _MICROSECONDS,
        least_rtt_s=(rtt if least in (0, _NO_MIN_RTT) else least) / _MICROSECONDS,
        retransmits=_u32(info, _TOTAL_RETRANS),
        segments=_u32(info, _SEGS_OUT),
        delivered_bytes_per_s=0.0 if info[_FLAGS] & 1 else float(rate),
        congestion=congestion,
    )


def _u32(info: bytes, offset: int) -> int:
    value: int = struct.unpack_from("=I", info, offset)[0]
    return value
