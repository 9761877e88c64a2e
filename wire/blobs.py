"""Blobs: keys, sources of bytes, and reassembly."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
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
    def size(self) -> int: ...

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


class Ranges:
    """Separate ranges [start, end) of a blob: ascending, neither overlapping nor touching."""

    def __init__(self, *ranges: tuple[int, int]) -> None:
        self._ranges = list(ranges)
        self.num_bytes = sum(end - start for start, end in ranges)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def first(self) -> tuple[int, int] | None:
        return self._ranges[0] if self._ranges else None

    def add(self, start: int, end: int) -> tuple[int, int]:
        """Merge [start, end) with every range that it overlaps or touches; the range that it is part of now."""
        first = last = bisect_left(self._ranges, start, key=lambda there: there[1])
        while last < len(self._ranges) and self._ranges[last][0] <= end:
            start, end = min(start, self._ranges[last][0]), max(end, self._ranges[last][1])
            last += 1
        self._put(first, last, (start, end))
        return start, end

    def remove(self, start: int, end: int) -> None:
        """Take out all bytes of [start, end) that are there."""
        first = last = bisect_right(self._ranges, start, key=lambda there: there[1])
        left: list[tuple[int, int]] = []
        while last < len(self._ranges) and self._ranges[last][0] < end:
            here, there = self._ranges[last]
            left += [part for part in ((here, min(start, there)), (max(end, here), there)) if part[0] < part[1]]
            last += 1
        self._put(first, last, *left)

    def clear(self) -> None:
        self._ranges.clear()
        self.num_bytes = 0

    def check(self) -> None:
        edge = -1
        for start, end in self._ranges:
            assert edge < start < end
            edge = end
        assert self.num_bytes == sum(end - start for start, end in self._ranges)

    def _put(self, first: int, last: int, *ranges: tuple[int, int]) -> None:
        self.num_bytes += sum(end - start for start, end in ranges)
        self.num_bytes -= sum(end - start for start, end in self._ranges[first:last])
        self._ranges[first:last] = ranges


class Reassembly:
    """One blob on its way in: a buffer that takes any range, in any order, any number of times. It belongs to the
    application and outlives a session: `Session.expect` of the next one goes on at `received`."""

    def __init__(self, size: int, digest: int, data: bytearray | None = None) -> None:
        """`data`: memory of this size for it; by default its own."""
        self.size = size
        self.digest = digest
        self.received = 0
        """Bytes that have arrived without a gap."""
        self.data = bytearray(size) if data is None else data
        self.islands = Ranges()
        """What has arrived beyond the prefix."""
        self._hasher = xxhash.xxh3_64()  # of the prefix: no byte of it changes, and it has just been in the cache

    @property
    def arrived(self) -> int:
        """Bytes that have arrived, those beyond a gap included."""
        return self.received + self.islands.num_bytes

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
        if start > self.received and len(self.islands) >= MAX_ISLANDS:
            return
        self._store(start, chunk[start - offset :])
        start, end = self.islands.add(start, end)
        if start <= self.received:
            self.islands.remove(start, end)
            self._hasher.update(memoryview(self.data)[self.received : end])
            self.received = end

    def clear(self) -> None:
        self.received = 0
        self._hasher.reset()
        self.islands.clear()

    def verify(self) -> bool:
        """Whether the complete buffer has the announced digest."""
        return self._hasher.intdigest() == self.digest

    def check(self) -> None:
        assert 0 <= self.received <= self.size
        assert len(self.islands) <= MAX_ISLANDS
        self.islands.check()
        assert all(self.received < start and end <= self.size for start, end in self.islands)

    def _store(self, offset: int, chunk: memoryview) -> None:
        self.data[offset : offset + len(chunk)] = chunk
