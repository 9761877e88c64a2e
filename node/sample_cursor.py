"""A node's position in the samples it was granted: taken in the order of the grants, each once."""

from collections import deque
from collections.abc import Collection
from typing import Final

from farloop.algo.spec import Lease

USED_KEPT: Final = 1024  # leases that are used up and still known by their range


class LeaseExhausted(Exception):
    """A node wants more samples than it still holds: wait for a grant."""

    def __init__(self, *, wanted: int, remaining: int) -> None:
        super().__init__(f"{wanted} samples wanted, {remaining} left of the leases")
        self.wanted = wanted
        self.remaining = remaining


class LeaseCursor:
    """The leases of one incarnation. The coordinator grants again what it left."""

    def __init__(self) -> None:
        self._ahead: deque[Lease] = deque()  # those that are not used up
        self._used = 0  # samples consumed of the first
        self._behind: deque[Lease] = deque(maxlen=USED_KEPT)
        """The last that are: to notice a sample that is granted twice."""
        self._watermark = 0

    @property
    def remaining(self) -> int:
        """Samples granted and not yet consumed."""
        return sum(lease.count for lease in self._ahead) - self._used

    @property
    def unused(self) -> tuple[Lease, ...]:
        """What is left of the leases, in their order."""
        left, used = [], self._used
        for lease in self._ahead:
            left.append(Lease(start=lease.start + used, count=lease.count - used))
            used = 0
        return tuple(left)

    @property
    def granted_to(self) -> int:
        """One past the last sample of all leases that are known."""
        return max((lease.start + lease.count for lease in (*self._behind, *self._ahead)), default=0)

    @property
    def watermark(self) -> int:
        """Samples consumed since the start of the incarnation."""
        return self._watermark

    def begin_again(self) -> None:
        """Drop every lease: the coordinator knows none of them, and grants anew."""
        self._ahead.clear()
        self._behind.clear()
        self._used = self._watermark = 0

    def grant(self, lease: Lease) -> None:
        """Append a lease; one that is held already is sent again after a broken session and changes nothing.

        Raises ValueError: it is empty, or overlaps an earlier one; nothing was changed.
        """
        if lease.start < 0 or lease.count < 1:
            raise ValueError(f"a lease of {lease.count} samples from {lease.start} grants nothing")
        held = [*self._behind, *self._ahead]
        if lease in held:
            return
        for other in held:
            if lease.start < other.start + other.count and other.start < lease.start + lease.count:
                raise ValueError(
                    f"samples [{lease.start}, {lease.start + lease.count}) overlap an earlier lease "
                    f"[{other.start}, {other.start + other.count})"
                )
        self._ahead.append(lease)

    def keep(self, leases: Collection[Lease]) -> None:
        """Use only samples of these leases, as far as granted: others may belong to another node by now.

        They may come again, too: what is not kept is forgotten, with what was consumed of it.
        """
        if self._ahead and self._ahead[0] not in leases:
            self._used = 0
        self._ahead = deque(lease for lease in self._ahead if lease in leases)
        self._behind = deque((lease for lease in self._behind if lease in leases), maxlen=USED_KEPT)

    def take(self, n: int) -> list[int]:
        """Consume the next `n` positions, across lease borders. Raises LeaseExhausted, and takes none, if too few."""
        if n > self.remaining:
            raise LeaseExhausted(wanted=n, remaining=self.remaining)
        positions: list[int] = []
        while len(positions) < n:
            lease = self._ahead[0]
            first = lease.start + self._used
            count = min(n - len(positions), lease.count - self._used)
            positions.extend(range(first, first + count))
            self._used += count
            if self._used == lease.count:
                self._behind.append(self._ahead.popleft())
                self._used = 0
        self._watermark += n
        return positions
