"""Which samples belong to whom: ranges of the endless stream of data passes, granted to nodes. Pure.

No position is granted twice unless it came back unconsumed (protocol "Data leases").
"""

import itertools
from dataclasses import dataclass, field

from farloop.algo.spec import Lease, NodeId


@dataclass(slots=True)
class Leases:
    """The coordinator's book of granted samples. A node consumes its grants in the order it got them."""

    frontier: int = 0
    """First position that was never granted."""
    returned: list[Lease] = field(default_factory=list)
    held: dict[tuple[NodeId, int], list[Lease]] = field(default_factory=dict)
    """Grants by (node, incarnation)."""
    consumed: dict[tuple[NodeId, int], int] = field(default_factory=dict)
    """Samples that each says it has used of its grants."""

    def outstanding(self, node: NodeId, incarnation: int) -> int:
        """Granted and, as far as is known, not used yet."""
        owner = (node, incarnation)
        return sum(lease.count for lease in self.held.get(owner, ())) - self.consumed.get(owner, 0)

    def propose(self, count: int) -> Lease:
        """The next grant of at most `count` samples; what came back goes first. Changes nothing."""
        assert count > 0
        if self.returned:
            first = self.returned[0]
            return Lease(start=first.start, count=min(count, first.count))
        return Lease(start=self.frontier, count=count)

    def grant(self, node: NodeId, incarnation: int, lease: Lease) -> None:
        """Book a proposed grant."""
        if self.returned and self.returned[0].start == lease.start:
            first = self.returned.pop(0)
            if first.count > lease.count:
                self.returned.insert(0, Lease(start=lease.start + lease.count, count=first.count - lease.count))
        else:
            assert lease.start == self.frontier
            self.frontier += lease.count
        self.held.setdefault((node, incarnation), []).append(lease)

    def watermark(self, node: NodeId, incarnation: int, consumed: int) -> None:
        """The node has used this many samples since its start."""
        owner = (node, incarnation)
        if owner in self.held:
            self.consumed[owner] = max(consumed, self.consumed.get(owner, 0))

    def give_back(self, node: NodeId, incarnation: int) -> int:
        """The node is gone: what it did not use is free again. Returns the number of samples."""
        owner = (node, incarnation)
        used, free = self.consumed.pop(owner, 0), []
        for lease in self.held.pop(owner, ()):
            taken = min(used, lease.count)
            used -= taken
            if lease.count > taken:
                free.append(Lease(start=lease.start + taken, count=lease.count - taken))
        self.returned = sorted([*self.returned, *free], key=lambda lease: lease.start)
        return sum(lease.count for lease in free)

    def check(self) -> None:
        """Everything below the frontier is held or returned, once."""
        ranges = sorted(
            [(lease.start, lease.count) for leases in self.held.values() for lease in leases]
            + [(lease.start, lease.count) for lease in self.returned]
        )
        for (start, count), (following, _) in itertools.pairwise(ranges):
            assert start + count <= following, "a sample is granted twice"
        assert not ranges or ranges[-1][0] + ranges[-1][1] <= self.frontier
