"""What a link carries: probe bytes, and the kernel's TCP_INFO."""

import random
import sys
from typing import Final

from farloop.wire.blobs import Reassembly
from farloop.wire.limits import LARGEST_CHUNK
from farloop.wire.messages import Connection

# --- Bytes of a probe
#
# A probe is a blob like any other on its way, offered, credited and sent in the background, so that it is measured as
# blobs are, and yields as snapshots do. Noise, because something on the way may compress.


_PERIOD: Final = 1 << 20  # the noise repeats itself after so many bytes: more than any compressor on a link looks back
DIGEST: Final = 0  # what a probe's offer says; it is not checked


class Noise:
    """A source of any size in little memory (see `BlobSource`)."""

    def __init__(self, size: int, *, seed: int = 0) -> None:
        self.size = size
        noise = random.Random(seed).randbytes(_PERIOD)
        self._noise = memoryview(noise * (LARGEST_CHUNK // _PERIOD + 2)).toreadonly()

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Bytes of the noise; at most one chunk."""
        start = offset % _PERIOD
        return self._noise[start : start + num_bytes]


class Sink(Reassembly):
    """Counts what has come and keeps nothing."""

    def __init__(self, size: int) -> None:
        super().__init__(0, DIGEST)
        self.size = size

    def verify(self) -> bool:
        """There is nothing to be right or wrong."""
        return True

    def _store(self, offset: int, chunk: memoryview) -> None:
        """Nothing is kept."""


# --- TCP_INFO (Linux, include/uapi/linux/tcp.h)


INFO_BYTES: Final = 232  # asked for; an older kernel gives fewer

_RETRANSMITS, _FLAGS, _RTO, _SND_MSS, _RTT, _TOTAL_RETRANS, _BYTES_ACKED = 2, 7, 8, 16, 68, 100, 120
_SEGS_OUT, _MIN_RTT, _DELIVERY_RATE, _BYTES_SENT, _BYTES_RETRANS, _RCV_OOOPACK = 136, 148, 160, 200, 208, 224
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
    return Connection(
        rtt_s=rtt / _MICROSECONDS,
        least_rtt_s=(rtt if least in (0, _NO_MIN_RTT) else least) / _MICROSECONDS,
        retransmits=_u32(info, _TOTAL_RETRANS),
        segments=_u32(info, _SEGS_OUT),
        delivered_bytes_per_s=0.0 if info[_FLAGS] & 1 else float(_u64(info, _DELIVERY_RATE)),
        congestion=congestion,
    )


LARGE_LOST: Final = "large packets are lost and small ones pass, so a part of the way has a smaller MTU"
MTU_FIX: Final = (
    "lower the MTU of the network cards at both ends (ip link set dev NAME mtu 1280), or set net.ipv4.tcp_mtu_probing "
    "= 1 there"
)
LOST_TRIES: Final = 3  # full segments that were sent again this often in a row, each time after twice the pause


def large_lost(info: bytes, before: bytes = b"", silent_s: float = 0.0) -> bool:
    """Whether full segments do not reach the peer while small packets do: a part of the way has a smaller MTU, and the
    sender is not told.

    Args:
        info: the connection's TCP_INFO.
        before: that of the look before. Once large segments have passed, only one that is sent again between two looks
            counts: right after an outage, connections recover one after the other.
        silent_s: how long ago the peer was heard, on any connection: later than the first of the tries.
    """
    tries, stuck_s = _unanswered(info)
    if tries < LOST_TRIES or silent_s >= stuck_s:
        return False
    fresh = _u64(info, _BYTES_ACKED) < 2 * _u32(info, _SND_MSS)
    return fresh or LOST_TRIES <= _unanswered(before)[0] < tries


def lacks_large(info: bytes) -> bool:
    """Whether segments came after a missing one: on a new connection that stays silent, a large one was lost."""
    return len(info) > _RCV_OOOPACK and _u32(info, _RCV_OOOPACK) > 0


def _unanswered(info: bytes) -> tuple[int, float]:
    """How often in a row a full segment was sent again, and for how many seconds at least; (0, 0.0) for none."""
    if len(info) <= _RCV_OOOPACK:
        return 0, 0.0
    under_way = _u64(info, _BYTES_SENT) - _u64(info, _BYTES_RETRANS) - _u64(info, _BYTES_ACKED) + 1  # + 1: of the SYN
    if under_way < _u32(info, _SND_MSS):
        return 0, 0.0
    return info[_RETRANSMITS], _u32(info, _RTO) / _MICROSECONDS * (1 - 0.5 ** info[_RETRANSMITS])


def _u64(info: bytes, offset: int) -> int:
    return int.from_bytes(info[offset : offset + 8], sys.byteorder)


def _u32(info: bytes, offset: int) -> int:
    return int.from_bytes(info[offset : offset + 4], sys.byteorder)
