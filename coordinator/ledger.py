"""The coordinator's durable knowledge, as a fold over journal records. Pure.

The running machine and a restart build it by the same `apply`, so that what was decided before a crash is what is
known after it. Sessions, expectations and deadlines are not durable: they live in `coordinator/machine.py`.
"""

from dataclasses import dataclass, field

from farloop.algo import schedule
from farloop.algo.spec import BlobId, NodeId, RoundPlan, RunSpec, WindowTerms
from farloop.coordinator import records as rec
from farloop.coordinator.leases import Leases
from farloop.wire.messages import Committed, Offer
from farloop.wire.reasons import Reason

HISTORY_VERSIONS = 16
"""Commits a fragment remembers for those who come back (protocol R asks for 7 at least)."""


@dataclass(slots=True)
class Ledger:
    """What the journal says so far."""

    spec: RunSpec
    epoch: int = 0
    versions: list[int] = field(default_factory=list)
    windows: dict[int, WindowTerms] = field(default_factory=dict)
    """Terms of the open window of every fragment that is not final."""
    rounds: dict[int, RoundPlan] = field(default_factory=dict)
    commits: dict[tuple[int, int], Committed] = field(default_factory=dict)
    """Announcements of the last `HISTORY_VERSIONS` commits of each fragment."""
    started: dict[NodeId, tuple[int, int]] = field(default_factory=dict)
    """(incarnation, first round) of the nodes that take part."""
    inputs: dict[BlobId, Offer] = field(default_factory=dict)
    """Stored deltas without an outcome."""
    leases: Leases = field(default_factory=Leases)
    evaluations: list[rec.EvaluationTaken] = field(default_factory=list)
    finished: bool = False

    @classmethod
    def begin(cls, started: rec.RunStarted) -> "Ledger":
        """A new run: version 0 of everything, window 1 open, rounds 0 and 1 fixed (protocol B)."""
        spec = started.spec
        ledger = cls(spec=spec, epoch=started.epoch, versions=[0] * len(spec.identity.layout.fragments))
        ledger.rounds = {plan.index: plan for plan in schedule.first_rounds(spec.terms)}
        ledger.windows = {w.fragment: w for w in schedule.first_windows(spec.terms, spec.identity.layout)}
        return ledger

    def apply(self, record: rec.Record) -> None:
        """Take the next record of the journal."""
        match record:
            case rec.EpochClaimed(epoch=epoch):
                self.epoch = epoch
            case rec.NodeStarted(node=node, incarnation=incarnation, round=round_index):
                self.started[node] = (incarnation, round_index)
            case rec.NodeLeft(node=node):
                if node in self.started:
                    self.leases.give_back(node, self.started.pop(node)[0])
            case rec.LeaseGranted(node=node, incarnation=incarnation, lease=lease):
                self.leases.grant(node, incarnation, lease)
            case rec.RoundFixed(round=plan):
                self.rounds[plan.index] = plan
            case rec.InputStored(blob=blob, window=window, contributors=contributors, digest=digest):
                self.inputs[blob] = Offer(blob=blob, size=0, digest=digest, window=window, contributors=contributors)
            case rec.InputDropped(blob=blob):
                self.inputs.pop(blob, None)
            case rec.WindowCommitted():
                self._commit(record)
            case rec.EvaluationTaken():
                self.evaluations.append(record)
            case rec.RunFinished():
                self.finished = True
            case rec.RunStarted() | rec.SnapshotTaken():
                pass  # the first opens the journal; the second matters to the store alone

    def _commit(self, record: rec.WindowCommitted) -> None:
        fragment, version = record.fragment, record.version
        assert version == self.versions[fragment] + 1, "commits of a fragment come one by one"
        self.versions[fragment] = version
        if record.next_window is None:
            self.windows.pop(fragment, None)
        else:
            self.windows[fragment] = record.next_window
        self.inputs = {
            blob: offer for blob, offer in self.inputs.items() if blob.fragment != fragment or offer.window > version
        }
        self.commits[fragment, version] = Committed(
            fragment=fragment,
            version=version,
            size=record.update_size,
            digest=record.update_digest,
            anchor_digest=record.anchor_digest,
            merged=record.merged,
            drops=record.drops,
            next_window=record.next_window,
            rounds=(),
        )
        self.commits.pop((fragment, version - HISTORY_VERSIONS), None)

    def next_round_to_fix(self) -> RoundPlan | None:
        """The round that the first commit of a window of round r fixes: r + 2 (protocol B); None when it is fixed."""
        newest = self.rounds[max(self.rounds)]
        reached = max((self.windows[f].round for f in self.windows), default=newest.index)
        return schedule.round_after(self.spec.terms, newest) if newest.index < reached + 1 else None

    @property
    def current_round(self) -> int:
        """The round whose last slot is open; the last round once that is final."""
        last_slot = self.spec.identity.layout.slots - 1
        fragments = self.spec.identity.layout.fragments
        still_open = [self.windows[f.index].round for f in fragments if f.slot == last_slot and f.index in self.windows]
        return min(still_open, default=max(self.rounds))

    def rounds_ahead(self) -> tuple[RoundPlan, ...]:
        """The fixed rounds that a node may still need."""
        return tuple(plan for index, plan in sorted(self.rounds.items()) if index >= self.current_round - 1)

    def anchor_digest(self, fragment: int, version: int) -> int | None:
        """Digest of that version of the anchor, as far as it is remembered."""
        if version == 0:
            return self.spec.identity.anchor_digests[fragment]
        committed = self.commits.get((fragment, version))
        return committed.anchor_digest if committed else None

    def outcome_reason(self, blob: BlobId, window: int) -> Reason | None:
        """Why a delta for `window` cannot be taken any more; None while its window is open and its base fits."""
        version = self.versions[blob.fragment]
        if window <= version:
            return Reason.LATE
        if window > version + 1 or blob.fragment not in self.windows:
            return Reason.UNKNOWN_WINDOW
        if not version - self.spec.terms.max_staleness <= blob.version <= version:
            return Reason.STALE_BASE
        return None

    def check(self) -> None:
        """The invariants."""
        for fragment, terms in self.windows.items():
            assert terms.window == self.versions[fragment] + 1
            assert terms.round in self.rounds
        assert all(offer.window > self.versions[blob.fragment] for blob, offer in self.inputs.items())
        self.leases.check()
