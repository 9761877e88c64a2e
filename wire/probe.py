"""The bytes of a probe: noise at one end, nothing kept at the other.

A probe is a blob like any other on its way, offered, credited and sent in the background, so that it is measured as
blobs are, and yields as snapshots do. Noise, because something on the way may compress.
"""

import random
from typing import Final

from farloop.wire.blobs import Reassembly
from farloop.wire.limits import LARGEST_CHUNK

_PERIOD: Final = 1 << 20
"""The noise repeats itself after so many bytes: more than any compressor on a link looks back."""

DIGEST: Final = 0
"""What a probe's offer says: nobody checks it."""


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

    def add(self, offset: int, chunk: memoryview) -> None:
        """Only what comes in order counts; the rest comes again."""
        if offset <= self.received < offset + len(chunk) <= self.size:
            self.received = offset + len(chunk)

    def verify(self) -> bool:
        """There is nothing to be right or wrong."""
        return True

    def check(self) -> None:
        """Assert the invariants."""
        assert 0 <= self.received <= self.size and not self.data
