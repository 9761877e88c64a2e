"""TCP_INFO of connections that lose packets, laid out as the kernel does it."""

import struct

from farloop.wire.link_measurement import INFO_BYTES


def resent(
    tries: int, *, acked: int = 17, sent: int = 5_808, resent: int = 2_896, rto_ms: int = 1_600, num_bytes: int = 232
) -> bytes:
    """Two full segments of 1,448 bytes are under way after a greeting of 16, as a kernel showed them on a way that
    drops packets of over 1,300 bytes."""
    data = bytearray(INFO_BYTES)
    data[2] = tries
    for offset, value in ((8, 1_000 * rto_ms), (16, 1_448)):
        struct.pack_into("=I", data, offset, value)
    for offset, value in ((120, acked), (200, sent + acked - 17), (208, resent)):
        struct.pack_into("=Q", data, offset, value)
    return bytes(data[:num_bytes])
