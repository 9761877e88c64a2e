"""Sample leases: ranges of the endless stream of data passes, granted to nodes.

A position below the frontier is free (returned), held (granted, in no stored delta yet) or trained (its node has stored
a delta since it used it). A position is granted again only after it was returned, and returned positions are in no
stored delta.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from farloop.algo.spec import Lease, NodeId
from farloop.monitoring.status import SamplesStatus

LEASE_ROUNDS: Final = 3  # rounds of samples a node holds in advance: the one it trains in and two of outage
LEASE_STEPS: Final = 60  # inner steps of samples it holds at least: where rounds are short, grants would be many
ENDED_KEPT: Final = 64  # starts that gave back their samples and are remembered: one may yet be heard of
Owner = tuple[NodeId, int]  # one start of a node: its name and incarnation


@dataclass(slots=True)
class Account:
    """What one start of a node was granted and has done with it."""

    leases: list[Lease] = field(default_factory=list)  # grants that are not trained to their end
    retired: int = 0  # samples of the grants before those
    consumed: int = 0  # samples that it says it has used of its grants
    stored: int = 0  # samples that it had used when it made its newest stored delta

    @property
    def granted(self) -> int:
        return self.retired + sum(lease.count for lease in self.leases)

    def not_in(self, used: int) -> list[Lease]:
        """What is left of its grants after the first `used` samples."""
        taken, left = used - self.retired, []
        for lease in self.leases:
            kept = min(taken, lease.count)
            taken -= kept
            if lease.count > kept:
                left.append(Lease(start=lease.start + kept, count=lease.count - kept))
        return left


@dataclass(slots=True)
class Leases:
    """The coordinator's record of granted samples. A node uses its grants in the order it got them."""

    frontier: int = 0  # first position that was never granted
    returned: list[Lease] = field(default_factory=list)
    """Returned and not granted again yet, sorted by position, adjacent ranges joined."""
    held: dict[Owner, Account] = field(default_factory=dict)
    ended: dict[Owner, Account] = field(default_factory=dict)
    """Of past starts that returned their unused samples; `consumed` as far as is known, all grants retired."""
    returned_total: int = 0  # samples that ever came back, however often
    uncertain_total: int = 0  # returned samples that had been trained on, in no stored delta: they are trained on again

    @property
    def free(self) -> int:
        """Returned samples that wait to be granted again."""
        return sum(lease.count for lease in self.returned)

    @property
    def granted_total(self) -> int:
        """Samples that were ever granted, repeated grants included."""
        return self.frontier + self.returned_total - self.free

    @property
    def trained_total(self) -> int:
        """Samples whose node has stored a delta since it used them; each counts once."""
        return self.frontier - self.free - sum(account.granted - account.stored for account in self.held.values())

    def fates(self) -> SamplesStatus:
        """Counts of all samples by outcome; they only grow."""
        return {
            "granted": self.granted_total,
            "trained": self.trained_total,
            "returned": self.returned_total,
            "uncertain": self.uncertain_total,
        }

    def account(self, node: NodeId, incarnation: int) -> Account:
        """Of this start; an empty one if it holds nothing."""
        return self.held.get((node, incarnation)) or Account()

    def most_used(self, node: NodeId, incarnation: int) -> int:
        """Upper bound of the samples that this start used: its grants, or if those are forgotten, all grants."""
        owner = (node, incarnation)
        account = self.held.get(owner) or self.ended.get(owner)
        return self.granted_total if account is None else account.granted

    def outstanding(self, node: NodeId, incarnation: int) -> int:
        account = self.account(node, incarnation)
        return account.granted - account.consumed

    def unused(self, node: NodeId, incarnation: int) -> list[Lease]:
        """Its grants that are not used up, whole, in the order it got them."""
        account = self.account(node, incarnation)
        used, leases = account.consumed - account.retired, list(account.leases)
        while leases and leases[0].count <= used:
            used -= leases.pop(0).count
        return leases

    def top_up(self, node: NodeId, incarnation: int, longest: int, batch: int) -> list[Lease]:
        """The grants that a node lacks, if any, in rounds of up to `longest` steps of `batch` samples.

        Changes nothing.
        """
        wanted = max(LEASE_ROUNDS * longest, LEASE_STEPS) * batch
        short = wanted - self.outstanding(node, incarnation)
        return self.propose(short) if short >= wanted // LEASE_ROUNDS else []

    def propose(self, count: int) -> list[Lease]:
        """The next grants, `count` samples in all: returned ranges first, however small. Changes nothing."""
        leases: list[Lease] = []
        for lease in self.returned:
            if count > 0:
                leases.append(Lease(start=lease.start, count=min(count, lease.count)))
                count -= leases[-1].count
        if count > 0:
            leases.append(Lease(start=self.frontier, count=count))
        return leases

    def begin_anew(self, node: NodeId, incarnation: int, since: int) -> None:
        """A start that had returned everything is back, and says how many samples it has used.

        What it used beyond what was known when it returned them counts as returned all the same.
        """
        owner = (node, incarnation)
        assert not self.account(node, incarnation).leases
        since = min(since, self.most_used(node, incarnation))
        if (ended := self.ended.pop(owner, None)) is not None:
            self.uncertain_total += max(0, since - ended.consumed)
        self.held[owner] = Account(retired=since, consumed=since, stored=since)

    def grant(self, node: NodeId, incarnation: int, lease: Lease) -> None:
        if self.returned and self.returned[0].start == lease.start:
            first = self.returned.pop(0)
            if first.count > lease.count:
                self.returned.insert(0, Lease(start=lease.start + lease.count, count=first.count - lease.count))
        else:
            assert lease.start == self.frontier
            self.frontier += lease.count
        self.held.setdefault((node, incarnation), Account()).leases.append(lease)

    def watermark(self, node: NodeId, incarnation: int, consumed: int) -> None:
        """The node has used this many samples since its start; more than it was granted is not believed."""
        account = self.account(node, incarnation)
        account.consumed = max(account.consumed, min(consumed, account.granted))

    def stores(self, node: NodeId, incarnation: int, consumed: int | None) -> None:
        """A delta is stored; its node had used this many samples when it took it. None: it brings its own.

        Of a start that gave its samples back before, these had come back too early.
        """
        owner = (node, incarnation)
        if consumed is None:
            return
        if (account := self.held.get(owner)) is not None:
            self.watermark(node, incarnation, consumed)
            account.stored = max(account.stored, min(consumed, account.granted))
        elif (ended := self.ended.get(owner)) is not None:
            consumed = max(ended.consumed, min(consumed, ended.granted))
            self.uncertain_total += consumed - ended.consumed
            ended.consumed = consumed

    def retire(self, node: NodeId, incarnation: int, stored: int) -> None:
        """Forget grants that are in stored deltas: they never come back, and only their number matters."""
        self.stores(node, incarnation, stored)
        account = self.account(node, incarnation)
        stored = min(stored, account.granted)
        while account.leases and account.retired + account.leases[0].count <= stored:
            account.retired += account.leases.pop(0).count

    def give_back(self, node: NodeId, incarnation: int, stored: int) -> int:
        """Free the samples of a node that left and that are in none of its stored deltas. Returns how many.

        `stored`: samples in stored deltas.
        """
        owner = (node, incarnation)
        if (account := self.held.pop(owner, None)) is None:
            return 0
        used = min(stored, account.granted)
        free = account.not_in(used)
        self.returned = _joined([*self.returned, *free])
        self.uncertain_total += max(0, account.consumed - used)
        self.ended[owner] = Account(retired=account.granted, consumed=max(account.consumed, used))
        while len(self.ended) > ENDED_KEPT:
            del self.ended[next(iter(self.ended))]
        count = sum(lease.count for lease in free)
        self.returned_total += count
        return count

    def free_after_reports(
        self, unused: Mapping[Owner, Sequence[Lease]], granted_to: int
    ) -> tuple[int, tuple[Lease, ...], int]:
        """(frontier, free ranges, uncertain samples) if this record is an old copy and these owners report what they
        have left. Uncertain are samples of the free ranges that may have been trained on since the copy: those that
        were free in it, or held by an owner that reports nothing. Everything else granted since counts as trained, so
        that few samples come twice. Changes nothing."""
        told = [lease for leases in unused.values() for lease in leases]
        silent = list(self.returned)
        for owner in self.held.keys() - unused.keys():
            silent += self.held[owner].not_in(self.held[owner].stored)
        certain, free = _joined(told), _joined([*told, *silent])
        count = sum(lease.count for lease in free)
        frontier = max([self.frontier, granted_to, *(lease.start + lease.count for lease in free)])
        return frontier, tuple(free), count - sum(lease.count for lease in certain)

    def begin_from(self, frontier: int, returned: Sequence[Lease], uncertain: int) -> None:
        """Start over with these free ranges and no grants. What was not returned before counts as returned now."""
        self.returned_total += max(0, sum(lease.count for lease in returned) - self.free)
        self.frontier, self.returned = frontier, list(returned)
        self.uncertain_total += uncertain
        self.held.clear()
        self.ended.clear()

    def check(self) -> None:
        """No sample is in two places, none is beyond the frontier, and no node used more than it was granted."""
        ranges = sorted(
            (lease.start, lease.count)
            for leases in (self.returned, *(account.leases for account in self.held.values()))
            for lease in leases
        )
        for (start, count), (following, _) in itertools.pairwise(ranges):
            assert start + count <= following, "a sample is granted twice"
        assert not ranges or ranges[-1][0] + ranges[-1][1] <= self.frontier
        for account in self.held.values():
            assert account.stored <= account.consumed <= account.granted
            assert account.granted <= self.granted_total, "more than was granted in all"
        assert 0 <= self.trained_total <= self.frontier and self.uncertain_total >= 0


def _joined(leases: Iterable[Lease]) -> list[Lease]:
    """The ranges in order, joined where they touch or overlap."""
    joined: list[Lease] = []
    for lease in sorted(leases, key=lambda lease: (lease.start, lease.count)):
        before = joined[-1] if joined else None
        if before is not None and before.start + before.count >= lease.start:
            end = max(before.start + before.count, lease.start + lease.count)
            joined[-1] = Lease(start=before.start, count=end - before.start)
        else:
            joined.append(lease)
    return joined
