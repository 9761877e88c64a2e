"""Which samples a simulated run trained on, and what must be true of them (protocol "Data leases").

The journal says whose every position is; the diaries say what every start of a node really took. Nothing is skipped,
and nothing comes twice but what a start had trained on since its last stored delta, which the ledger counts.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from farloop.algo.spec import NodeId, Terms
from farloop.coordinator import records as rec
from farloop.coordinator.leases import Owner
from farloop.coordinator.ledger import Ledger
from farloop.sim.diary import Diary

Diaries = Mapping[Owner, Diary]


@dataclass(slots=True, kw_only=True)
class End:
    """A start gave back what it had not used: it left, or was away for too long."""

    owner: Owner
    stored: int
    """Samples in its stored deltas."""
    counted: int
    """Those that the ledger counts as uncertain: it is known to have used them, and they came back."""
    used: int | None = None
    """Where it lived on: all that it had used before it let go of them."""


class SampleBook:
    """The owner of every position, record by record."""

    def __init__(self, started: rec.RunStarted) -> None:
        self.ledger = Ledger.begin(started)
        self.positions: dict[Owner, list[int | None]] = {}
        """What each start was granted, in order; None where it used, by its own count, what it had given back."""
        self.trained: dict[int, Owner] = {}
        """Positions in stored deltas."""
        self.ends: list[End] = []
        self.wound_back = False
        """From there on samples are granted that a lost history had granted, and starts count theirs anew."""

    def take(self, record: rec.Record) -> None:
        """The next record of the journal."""
        leases, before = self.ledger.leases, self.ledger.leases.uncertain_total
        left = self.ledger.started.get(record.node) if isinstance(record, rec.NodeLeft) else None
        self.ledger.apply(record)
        self.ledger.leases.check()
        self.wound_back = self.wound_back or isinstance(record, rec.Rewound)
        if self.wound_back:
            return
        match record:
            case rec.LeaseGranted(node=node, incarnation=incarnation, lease=lease, since=since):
                granted = self.positions.setdefault((node, incarnation), [])
                if since is not None:
                    granted += [None] * (since - len(granted))
                    self._counts((node, incarnation), leases.uncertain_total - before, used=since)
                else:
                    self._never_used((node, incarnation))
                granted += range(lease.start, lease.start + lease.count)
            case rec.NodeLeft(node=node, stored=stored) if left is not None:
                owner = (node, left.incarnation)
                assert stored is not None
                for position in self._within(owner, stored, None):
                    self.trained.pop(position, None)
                self.positions[owner] = self.positions.get(owner, [])[:stored]
                for position in self._within(owner, 0, stored):  # its deltas may be stored by a commit alone (K)
                    self.trained.setdefault(position, owner)
                self.ends.append(End(owner=owner, stored=stored, counted=leases.uncertain_total - before))
            case rec.InputStored(blob=blob):
                self._counts((blob.node, blob.incarnation), leases.uncertain_total - before)
        for owner, stored in leases.stored.items():
            for position in self._within(owner, 0, stored):
                assert self.trained.setdefault(position, owner) == owner, "two starts brought the same sample"

    def check(self, diaries: Diaries, terms: Terms, liars: Collection[NodeId]) -> None:
        """Assert all that must be true at the end of a run.

        Of `liars` no delta may ever have been stored, so what they leave uncertain is not little.
        """
        leases = self.ledger.leases
        free = [p for lease in leases.returned for p in range(lease.start, lease.start + lease.count)]
        held = [p for owner in leases.held for p in self._within(owner, leases.stored.get(owner, 0), None)]
        assert sorted([*self.trained, *free, *held]) == list(range(leases.frontier)), "each is somewhere, once"
        assert leases.trained_total == len(self.trained)
        assert leases.granted_total == leases.frontier + leases.returned_total - leases.free
        for owner, granted in self.positions.items():
            taken = diaries[owner].samples
            for said, did in zip(granted, taken, strict=False):
                assert said is None or said == did, f"{owner} trains on what it was granted"
        self._check_repeats(diaries, terms, liars)

    def _check_repeats(self, diaries: Diaries, terms: Terms, liars: Collection[NodeId]) -> None:
        """What came twice is what was uncertain, which is little, and counted as far as it was told of."""
        longest = max(plan.length for plan in self.ledger.rounds.values())
        patience = terms.max_stale_rounds if terms.on_late_update == "continue" else 1
        # A round between two deltas, another before a joiner's first, and those that it goes on without an answer.
        most = (2 + patience + terms.lag) * longest * terms.batch_sequences
        uncertain = 0
        for end in self.ends:
            used = (len(diaries[end.owner].samples) if end.used is None else end.used) - end.stored
            assert 0 <= end.counted <= used, f"{end} counts more than it used"
            unbounded = terms.quorum is not None or end.owner[0] in liars  # a straggler's deltas may all come too late
            assert used <= most or unbounded, f"{end} leaves {used} samples uncertain, of {most} at most"
            assert end.used is None or end.counted == used, f"{end} has told of all"
            uncertain += used
        times = Counter(position for diary in diaries.values() for position in diary.samples)
        assert sum(times.values()) - len(times) <= uncertain, "what comes twice was uncertain"

    def _counts(self, owner: Owner, more: int, used: int | None = None) -> None:
        for end in reversed(self.ends):
            if end.owner == owner:
                end.counted, end.used = end.counted + more, used or end.used
                return

    def _never_used(self, owner: Owner) -> None:
        """A start that had given its samples back is granted others without having let go of any: it had heard of
        none, for the coordinator died between granting them and telling."""
        for end in self.ends:
            if end.owner == owner and end.used is None:
                end.used = end.stored

    def _within(self, owner: Owner, first: int, end: int | None) -> list[int]:
        return [position for position in self.positions.get(owner, [])[first:end] if position is not None]


def check_samples(
    records: Sequence[rec.Record],
    diaries: Mapping[NodeId, Sequence[Diary]],
    terms: Terms,
    *,
    liars: Collection[NodeId] = (),
) -> SampleBook:
    """Assert it of a run's journal and of the diaries of every start of every node; the book, for more questions.

    Of a run that was wound back only the coordinator's own book is held to its rules, after every record.
    """
    started = records[0]
    assert isinstance(started, rec.RunStarted)
    book = SampleBook(started)
    for record in records[1:]:
        book.take(record)
    if not book.wound_back:
        owners = {(name, i): diary for name, starts in diaries.items() for i, diary in enumerate(starts, 1)}
        book.check(owners, terms, liars)
    return book
