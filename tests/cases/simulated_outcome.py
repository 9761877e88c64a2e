"""Results and invariants of a simulated run."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from noted_node import NotedNode, SendLog
from torch import Tensor

from farloop.algo.revisions import Revisions
from farloop.algo.spec import BlobId, Layout, NodeId
from farloop.algo.stages import Part, fragments_of, is_in
from farloop.algo.terms import Terms
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.leases import Owner
from farloop.coordinator.decide.ledger import Ledger
from farloop.node.link import Traffic
from farloop.node.machine import Stage
from farloop.wire.messages import Drop, Share
from farloop.wire.reasons import Reason

# --- Which samples a simulated run trained on, and what must be true of them (protocol "Data leases").
#
# The journal says whose every position is; the diaries say what every start of a node really took. Nothing is skipped,
# and nothing comes twice but what a start had trained on since its last stored delta, which the ledger counts.


Diaries = Mapping[Owner, SendLog]


@dataclass(slots=True, kw_only=True)
class End:
    """A start gave back what it had not used: it left, or was away for too long."""

    owner: Owner
    stored: int  # samples in its stored deltas
    counted: int  # those that the ledger counts as uncertain: it is known to have used them, and they came back
    missed: int = 0  # rounds of which a window closed without it, since its last stored delta
    used: int | None = None  # where it lived on: all that it had used before it let go of them


class SampleBook:
    """The owner of every position, record by record."""

    def __init__(self, started: rec.RunStarted) -> None:
        self.ledger = Ledger.begin(started)
        self.positions: dict[Owner, list[int | None]] = {}
        """What each start was granted, in order; None where it used, by its own count, what it had given back."""
        self.trained: dict[int, Owner] = {}
        """Positions in stored deltas."""
        self.ends: list[End] = []
        self._missed: dict[NodeId, set[int]] = {}
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
                missed = len(self._missed.pop(node, ()))
                counted = leases.uncertain_total - before
                self.ends.append(End(owner=owner, stored=stored, counted=counted, missed=missed))
            case rec.WindowCommitted(round=round_index, drops=drops):
                for drop in drops:
                    self._missed.setdefault(drop.node, set()).add(round_index)
            case rec.InputStored(blob=blob):
                self._missed.pop(blob.node, None)
                self._counts((blob.node, blob.incarnation), leases.uncertain_total - before)
        for owner, account in leases.held.items():
            for position in self._within(owner, 0, account.stored):
                assert self.trained.setdefault(position, owner) == owner, "two starts brought the same sample"

    def check(self, diaries: Diaries, terms: Terms, liars: Collection[NodeId]) -> None:
        """Assert all that must be true at the end of a run.

        Of `liars` no delta may ever have been stored, so what they leave uncertain is not little.
        """
        leases = self.ledger.leases
        free = [p for lease in leases.returned for p in range(lease.start, lease.start + lease.count)]
        held = [p for owner, account in leases.held.items() for p in self._within(owner, account.stored, None)]
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
        patience = terms.schedule.max_stale_rounds if terms.schedule.on_late_update == "continue" else 1
        # A round between two deltas, another before a joiner's first, and those that it goes on without an answer.
        rounds = 2 + patience + terms.schedule.lag
        uncertain = 0
        for end in self.ends:
            # A delta that comes too late is dropped, and the work in it counts as uncertain with that of the next one.
            most = (rounds + end.missed) * longest * terms.inner.batch_sequences
            used = (len(diaries[end.owner].samples) if end.used is None else end.used) - end.stored
            assert 0 <= end.counted <= used, f"{end} counts more than it used"
            unbounded = (
                terms.admission.quorum is not None or end.owner[0] in liars
            )  # a straggler's deltas may all come too late
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
    records: Sequence[rec.Record], diaries: Diaries, terms: Terms, *, liars: Collection[NodeId] = ()
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
        book.check(diaries, terms, liars)
    return book


# --- What came out of a simulated run, and what must be true of every one, whatever went wrong in it.


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One outer step."""

    fragment: int
    version: int
    round: int
    merged: tuple[Share, ...]
    drops: tuple[Drop, ...]
    blobs: tuple[BlobId, ...]
    final: bool
    anchor_digest: int
    target_digest: int
    refused: tuple[rec.Refusal, ...] = ()

    @property
    def contributors(self) -> tuple[NodeId, ...]:
        return tuple(share.node for share in self.merged)


def commit_of(record: rec.WindowCommitted) -> Commit:
    return Commit(
        fragment=record.fragment,
        version=record.version,
        round=record.round,
        merged=record.merged,
        drops=record.drops,
        blobs=tuple(addend.blob for addend in record.blobs),
        final=record.next_window is None,
        anchor_digest=record.anchor_digest,
        target_digest=record.target_digest,
        refused=record.refused,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutcome:
    """One start of one node."""

    alive: bool
    incarnation: int  # the last one: a start that meets a newer one takes another number
    stage: Stage
    holds: Part
    versions: tuple[int, ...]
    anchor_digests: tuple[int, ...]  # of the fragments that it holds, in order
    inner_steps: int
    tokens: int
    lost_steps: int
    skipped_turns: int
    skipped_positions: int
    start_round: int | None
    stopped_by: tuple[Reason, str] | None
    moved: Traffic
    diary: SendLog

    @classmethod
    def of(cls, actor: NotedNode, *, alive: bool) -> Self:
        machine = actor.machine
        return cls(
            alive=alive,
            incarnation=machine.incarnation,
            stage=machine.stage,
            holds=machine.holds,
            versions=machine.versions,
            anchor_digests=tuple(actor.replica.digests.values()) if actor.replica else (),
            inner_steps=machine.inner_steps,
            tokens=machine.tokens,
            lost_steps=machine.lost_steps,
            skipped_turns=machine.skipped_turns,
            skipped_positions=machine.schedule.skipped_positions,
            start_round=machine.schedule.start_round,
            stopped_by=actor.stopped_by,
            moved=actor.link.moved,
            diary=actor.diary,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A run from its beginning to its end."""

    layout: Layout
    commits: tuple[Commit, ...]  # in the journal's order
    lost: tuple[Commit, ...]  # those that a restored copy of the state did not have: a history that some nodes had seen
    versions: tuple[int, ...]
    anchors: tuple[Tensor, ...]
    anchor_digests: tuple[int, ...]
    target_digests: tuple[int, ...]
    recovered: tuple[tuple[int, int], ...] | None
    """Digests of every fragment's anchor and target after one more start from the disk; None where nothing went wrong
    in the run, and a start was not tried."""
    nodes: dict[NodeId, tuple[NodeOutcome, ...]]  # every start of every node, in order
    liars: frozenset[NodeId]  # nodes that sent something else than they had
    alarms: int  # commits whose optimizer state came out different when a restart repeated them
    evaluations: tuple[rec.EvaluationTaken, ...]
    records: tuple[rec.Record, ...]  # the journal
    tape: tuple[tuple[float, str, object], ...]
    seconds: float

    def of(self, fragment: int) -> tuple[Commit, ...]:
        return tuple(commit for commit in self.commits if commit.fragment == fragment)

    @property
    def diaries(self) -> Diaries:
        """Of every start."""
        return {(name, start.incarnation): start.diary for name, starts in self.nodes.items() for start in starts}

    def check(self) -> None:
        """Assert what no fault may break."""
        for fragment in self.layout.fragments:
            self._check_versions(fragment.index)
        blobs = [blob for commit in self.commits for blob in commit.blobs]
        for blob in blobs:
            fragment = self.layout.fragments[blob.fragment]
            assert all(is_in(fragment, start.holds) for start in self.nodes[blob.node]), f"{blob} is not its node's"
        assert len(set(blobs)) == len(blobs), "no delta is merged twice"
        refused = [refusal.blob for commit in self.commits for refusal in commit.refused]
        assert len({*blobs, *refused}) == len(blobs) + len(refused), "a delta has one outcome"
        for commit in self.commits:
            weights = [share.weight for share in commit.merged]
            averages = abs(sum(weights) - 1.0) < 1e-12
            assert averages or all(weight == 1.0 for weight in weights), "a mean, a sum, or nothing is merged"
            assert len(set(commit.contributors)) == len(commit.merged), "a node contributes once"
            assert not set(commit.contributors) & {drop.node for drop in commit.drops}, "merged or dropped, not both"
        held = tuple(zip(self.anchor_digests, self.target_digests, strict=True))
        assert self.recovered in (None, held), "what is durable is what was held"
        self._check_bases()
        assert any(isinstance(record, rec.RunFinished) for record in self.records)
        for name, starts in self.nodes.items():
            for start in starts:
                self._check_start(name, start)
        stale = max(revision.terms.schedule.max_stale_rounds for revision in self.revisions.kept)
        if not self.lost:  # an old copy grants again what it does not know that it granted, noticed or not
            check_samples(self.records, self.diaries, self.terms.replace(max_stale_rounds=stale), liars=self.liars)

    def _check_versions(self, fragment: int) -> None:
        """They rise by one, but where the run went on from what nodes held; and that was what had been committed."""
        version, final, digests = 0, False, (0, 0)
        lost = {commit.version: commit.anchor_digest for commit in self.lost if commit.fragment == fragment}
        for record in self.records:
            match record:
                case rec.WindowCommitted() if record.fragment == fragment:
                    assert record.version == version + 1, "versions rise by one"
                    assert not final, "the end is final"
                    version, final = record.version, record.next_window is None
                    digests = record.anchor_digest, record.target_digest
                case rec.Adopted(anchors=anchors, windows=windows):
                    for anchor in (anchor for anchor in anchors if anchor.fragment == fragment):
                        assert version == anchor.before < anchor.version, "nothing that was durable is given up"
                        assert lost.get(anchor.version, anchor.digest) == anchor.digest, "a version has one digest"
                        version, digests = anchor.version, (anchor.digest, anchor.digest)
                        final = fragment not in {terms.fragment for terms in windows}
                case _:
                    pass
        assert final, "the end is final"
        assert (self.anchor_digests[fragment], self.target_digests[fragment]) == digests

    @property
    def terms(self) -> Terms:
        started = self.records[0]
        assert isinstance(started, rec.RunStarted)
        return started.spec.terms

    @property
    def revisions(self) -> Revisions:
        """All that the terms ever were."""
        started = self.records[0]
        assert isinstance(started, rec.RunStarted)
        revisions = Revisions.of(started.spec)
        for record in self.records:
            if isinstance(record, rec.TermsChanged):
                revisions = revisions.and_then(record.revision)
        return revisions

    def _check_bases(self) -> None:
        """No delta is too old, and none holds again what an earlier one of its sender brought: its base has that."""
        merged_in: dict[tuple[int, NodeId, int], int] = {}
        lag, revisions = self.terms.schedule.lag, self.revisions
        for commit in self.commits:
            staleness = revisions.of_window(commit.fragment, commit.version).admission.max_staleness
            for blob in commit.blobs:
                sender = (blob.fragment, blob.node, blob.incarnation)
                assert commit.version - 1 - staleness - lag <= blob.version < commit.version, "a fresh base"
                # With a lag the base is a round older, but what was sent in between has left the weights.
                assert blob.version >= merged_in.get(sender, 0) - lag, f"{blob} holds the same work again"
                merged_in[sender] = commit.version

    def _check_start(self, name: NodeId, start: NodeOutcome) -> None:
        if start.stage == "finished" and start.start_round is not None and not start.diary.mismatches:
            held = [fragment.index for fragment in fragments_of(start.holds, self.layout)]
            assert start.versions == tuple(self.versions[f] for f in held), f"{name} holds all final versions"
            assert start.anchor_digests == tuple(self.anchor_digests[f] for f in held), (
                f"{name} holds the run's anchors"
            )
        assert start.diary.mismatches or len(set(start.diary.applied)) == len(start.diary.applied)
        for before, after in itertools.pairwise(start.diary.merges):
            assert before.inner_step <= after.inner_step
        merged = {(blob, commit.version) for commit in (*self.commits, *self.lost) for blob in commit.blobs}
        believed = {(blob, version) for blob, version in start.diary.settled if version is not None}
        assert believed <= merged, f"{name} is not mistaken about what became of its deltas"
        for fragment in self.layout.fragments:
            self._check_steps(fragment.index, start)

    def _check_steps(self, fragment: int, start: NodeOutcome) -> None:
        """A delta's steps are those since the last merge that mixed the anchor in, or since the last send."""
        begins = 0
        diary, steps = start.diary, 0
        merges = [merge for merge in diary.merges if merge.fragment == fragment and merge.mix < 1.0]
        for number, send in enumerate(diary.sends):
            if send.fragment != fragment:
                continue
            begins = max([begins, *(merge.inner_step for merge in merges if merge.sends <= number)])
            assert send.steps == send.inner_step - begins, f"{send} counts its steps"
            steps += send.steps
            begins = send.inner_step if self.terms.schedule.mix == 1.0 else begins
        assert steps <= start.inner_steps, "no work is in two deltas"
