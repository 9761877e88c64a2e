"""Blobs: keys, sources of bytes, and reassembly."""

from bisect import bisect_left
from typing import Protocol

import xxhash

from farloop.algo.spec import BlobId
from farloop.wire.messages import pack

MAX_ISLANDS = 1024
"""Separate ranges that a reassembly remembers beyond its prefix; a peer that makes more has them dropped."""


def blob_key(blob: BlobId) -> bytes:
    """16 bytes that stand for a blob in its chunks: xxh3-128 of its fields as a msgpack array."""
    fields = [int(blob.kind), blob.fragment, blob.version, blob.node, blob.incarnation, blob.seq]
    key: bytes = xxhash.xxh3_128_digest(pack(fields))
    return key


def blob_digest(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of all bytes of a blob, as announced in Offer and Committed."""
    digest: int = xxhash.xxh3_64_intdigest(data)
    return digest


class BlobSource(Protocol):
    """Bytes that can be read in any order, again and again, until the transfer has ended."""

    @property
    def size(self) -> int:
        """Bytes in all."""
        ...

    def read(self, offset: int, num_bytes: int) -> memoryview:
        """Exactly the bytes [offset, offset + num_bytes). They must not change before the transfer has ended."""
        ...


class BytesSource:
    """A blob in memory; nothing is copied."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._view = memoryview(data).cast("B").toreadonly()

    @property
    def size(self) -> int:
        return len(self._view)

    def read(self, offset: int, num_bytes: int) -> memoryview:
        return self._view[offset : offset + num_bytes]


class Reassembly:
    """One blob on its way in: a buffer that takes any range, in any order, any number of times.

    It belongs to the application and outlives a session: handed to `Session.expect` of the next one, the transfer
    goes on at `received`.
    """

    def __init__(self, size: int, digest: int) -> None:
        self.size = size
        self.digest = digest
        self.received = 0
        """Bytes that have arrived without a gap."""
        self.data = bytearray(size)
        self._islands: list[tuple[int, int]] = []
        """Ranges [start, end) beyond the prefix: ascending, neither overlapping nor touching."""
        self._island_bytes = 0

    @property
    def arrived(self) -> int:
        """Bytes that have arrived, those beyond a gap included."""
        return self.received + self._island_bytes

    @property
    def complete(self) -> bool:
        return self.received == self.size

    def add(self, offset: int, chunk: memoryview) -> None:
        """Take in the bytes at `offset`; those of the prefix are skipped."""
        if not 0 <= offset <= offset + len(chunk) <= self.size:
            raise ValueError(f"range [{offset}, {offset + len(chunk)}) of a blob of {self.size} bytes")
        start, end = max(offset, self.received), offset + len(chunk)
        if start >= end:
            return
        if start > self.received and len(self._islands) >= MAX_ISLANDS:
            return
        self.data[start:end] = chunk[start - offset :]
        self._join(start, end)

    def clear(self) -> None:
        """Forget all bytes."""
        self.received = self._island_bytes = 0
        self._islands.clear()

    def verify(self) -> bool:
        """Whether the complete buffer has the announced digest."""
        return blob_digest(self.data) == self.digest

    def check(self) -> None:
        assert 0 <= self.received <= self.size == len(self.data)
        assert len(self._islands) <= MAX_ISLANDS
        edge = self.received
        for start, end in self._islands:
            assert edge < start < end <= self.size
            edge = end
        assert self._island_bytes == sum(end - start for start, end in self._islands)

    def _join(self, start: int, end: int) -> None:
        """Merge [start, end) with every range that it overlaps or touches, the prefix included."""
        first = bisect_left(self._islands, start, key=lambda island: island[1])
        last = first
        while last < len(self._islands) and self._islands[last][0] <= end:
            start, end = min(start, self._islands[last][0]), max(end, self._islands[last][1])
            last += 1
        self._island_bytes -= sum(there - here for here, there in self._islands[first:last])
        if start <= self.received:
            self.received = end
            del self._islands[first:last]
        else:
            self._islands[first:last] = [(start, end)]
            self._island_bytes += end - start
