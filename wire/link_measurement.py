"""What a link carries: probe bytes, and the kernel's TCP_INFO."""

import random
import struct
from typing import Final

from farloop.wire.blobs import Reassembly
from farloop.wire.limits import LARGEST_CHUNK
from farloop.wire.messages import Connection

# --- Bytes of a probe
#
# A probe is a blob like any other on its way, offered, credited and sent in the background, so that it is measured as
# blobs are, and yields as snapshots do. Noise, because something on the way may compress.


_PERIOD: Final = 1 << 20  # the noise repeats itself after so many bytes: more than any compressor on a link looks back
DIGEST: Final = 0  # what a probe's offer says: nobody checks it


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

    def _keep(self, offset: int, chunk: memoryview) -> None:
        """Nothing is kept."""


# --- TCP_INFO (Linux, include/uapi/linux/tcp.h)


INFO_BYTES: Final = 232  # asked for; an older kernel gives fewer

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
