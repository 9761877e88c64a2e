"""A node's place in the samples it was granted: taken in the order of the grants, each once (protocol "Data leases").

Pure. What a sample is, `node/data.py` knows; who holds which, the coordinator.
"""

from farloop.algo.spec import Lease


class LeaseExhausted(Exception):
    """A node wants more samples than it still holds: wait for a grant."""

    def __init__(self, *, wanted: int, remaining: int) -> None:
        super().__init__(f"{wanted} samples wanted, {remaining} left of the leases")
        self.wanted = wanted
        self.remaining = remaining


class LeaseCursor:
    """The leases of one incarnation. A later one starts anew; what this one left, the coordinator grants again."""

    def __init__(self) -> None:
        self._leases: list[Lease] = []
        """All of the incarnation, kept to notice a sample that is granted twice."""
        self._current = 0
        """Index of the first lease that is not used up."""
        self._used = 0
        """Samples consumed of that one."""
        self._granted = 0
        self._watermark = 0

    @property
    def remaining(self) -> int:
        """Samples granted and not yet consumed."""
        return self._granted - self._watermark

    @property
    def watermark(self) -> int:
        """Samples consumed since the start of the incarnation."""
        return self._watermark

    def grant(self, lease: Lease) -> None:
        """Append a lease; one that is held is told again after a broken session, and changes nothing.

        Raises:
            ValueError: it is empty, or overlaps an earlier one; nothing was changed.
        """
        if lease.start < 0 or lease.count < 1:
            raise ValueError(f"a lease of {lease.count} samples from {lease.start} grants nothing")
        if lease in self._leases:
            return
        for held in self._leases:
            if lease.start < held.start + held.count and held.start < lease.start + lease.count:
                raise ValueError(
                    f"samples [{lease.start}, {lease.start + lease.count}) overlap an earlier lease "
                    f"[{held.start}, {held.start + held.count})"
                )
        self._leases.append(lease)
        self._granted += lease.count

    def take(self, n: int) -> list[int]:
        """Consume the next `n` positions, across lease borders. Raises LeaseExhausted, and takes none, if too few."""
        if n > self.remaining:
            raise LeaseExhausted(wanted=n, remaining=self.remaining)
        positions: list[int] = []
        while len(positions) < n:
            lease = self._leases[self._current]
            first = lease.start + self._used
            count = min(n - len(positions), lease.count - self._used)
            positions.extend(range(first, first + count))
            self._used += count
            if self._used == lease.count:
                self._current += 1
                self._used = 0
        self._watermark += n
        return positions
