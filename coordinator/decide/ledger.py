"""The coordinator's durable knowledge as a fold over journal records.

The running machine and a restart build it by the same `apply`, so that what was decided before a crash is what is
known after it. Sessions, expectations and deadlines are not durable: they live in `machine.py` and `membership.py`.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace

from farloop.algo import schedule
from farloop.algo.revisions import Revisions
from farloop.algo.spec import BlobId, Fragment, NodeId, Revision, RoundPlan, RunSpec, WindowTerms
from farloop.algo.stages import Part, fragments_of
from farloop.algo.terms import Terms
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.leases import Account, Leases, Owner
from farloop.coordinator.decide.screening import VERDICTS, Screening
from farloop.wire.messages import AnchorRef, Committed, Offer
from farloop.wire.reasons import Reason

HISTORY_VERSIONS = 16  # commits a fragment remembers for those who come back, at least 7 (protocol, Downlink)

ROUNDS_KEPT = 1024
"""Rounds before those of the open windows that are remembered: a restart repeats the commits of a few of them."""

EVALUATIONS_KEPT = 1024
KEY_CHANGES_KEPT = 256  # whole; of older ones what is still allowed

_BLOB_HEADER_BYTES = 64


def more_than_a_snapshot(fragment: Fragment) -> int:
    """The size noted for an update whose bytes are not here: larger than a snapshot, so it is never offered."""
    return 4 * fragment.numel + _BLOB_HEADER_BYTES + 1


@dataclass(slots=True)
class Ledger:
    spec: RunSpec  # with the newest terms; `terms_of` and `terms_in` give those of a window or round
    epoch: int = 0
    history: int = 0  # epoch in which the run was last rewound or adopted; 0 for never
    epoch_seen: int = 0  # highest epoch that a node had met and this state had not
    versions: list[int] = field(default_factory=list)
    windows: dict[int, WindowTerms] = field(default_factory=dict)
    """Terms of the open window of every fragment that is not final."""
    rounds: dict[int, RoundPlan] = field(default_factory=dict)
    commits: dict[tuple[int, int], Committed] = field(default_factory=dict)
    """Announcements of the last `HISTORY_VERSIONS` commits of each fragment."""
    started: dict[NodeId, rec.NodeStarted] = field(default_factory=dict)  # how the nodes that take part began
    frozen: dict[Part, rec.NodeStarted] = field(default_factory=dict)
    """How the first node with frozen weights began, by its part of the model: others must have the same."""
    inputs: dict[BlobId, Offer] = field(default_factory=dict)
    """Stored deltas without an outcome, in the order they came."""
    leases: Leases = field(default_factory=Leases)
    evaluations: list[rec.EvaluationTaken] = field(default_factory=list)
    finished: bool = False
    keys: list[rec.KeysChanged] = field(default_factory=list)
    screening: Screening = field(init=False)
    revisions: Revisions = field(init=False)
    _spooled: set[tuple[int, NodeId]] = field(default_factory=set, compare=False)  # (fragment, node) of `inputs`
    _served: dict[int, set[NodeId]] = field(default_factory=dict, compare=False)
    """Cache of `served` by fragment, built from the commits that are remembered."""

    def __post_init__(self) -> None:
        self.screening = Screening(self.spec)
        self.revisions = Revisions.of(self.spec)

    @classmethod
    def begin(cls, started: rec.RunStarted) -> "Ledger":
        """A new run: version 0 of every fragment, window 1 open, rounds 0 and 1 fixed."""
        spec = started.spec
        ledger = cls(spec=spec, epoch=started.epoch, versions=[0] * len(spec.identity.layout.fragments))
        ledger.rounds = {plan.index: plan for plan in started.rounds}
        windows = schedule.first_windows(spec.terms, spec.identity.layout, started.rounds)
        ledger.windows = {terms.fragment: terms for terms in windows}
        return ledger

    @classmethod
    def resume(cls, saved: rec.LedgerSaved) -> "Ledger":
        ledger = cls(spec=saved.spec, epoch=saved.epoch, versions=list(saved.versions), finished=saved.finished)
        ledger.history, ledger.epoch_seen = saved.history, saved.epoch_seen
        ledger.revisions = Revisions.of(saved.spec, saved.revisions)
        ledger.screening.revise(ledger.spec, ledger.revisions)
        ledger.windows = {terms.fragment: terms for terms in saved.windows}
        ledger.rounds = {plan.index: plan for plan in saved.rounds}
        ledger.commits = {(committed.fragment, committed.version): committed for committed in saved.commits}
        ledger.started = {started.node: started for started in saved.started}
        ledger.frozen = {started.holds: started for started in saved.frozen}
        ledger._set_inputs({stored.blob: stored.offer() for stored in saved.inputs})
        ledger._served = {fragment: ledger._remembered(fragment) for fragment in ledger.windows}
        ledger.evaluations = list(saved.evaluations)
        ledger.keys = list(saved.keys)
        ledger.screening.resume(saved)
        ledger.leases = Leases(
            frontier=saved.frontier,
            returned=list(saved.returned),
            held={(held.node, held.incarnation): _account(held) for held in saved.held},
            ended={(ended.node, ended.incarnation): _account(ended) for ended in saved.ended},
            returned_total=saved.returned_total,
            uncertain_total=saved.uncertain_total,
        )
        return ledger

    def saved(self) -> rec.LedgerSaved:
        """All of it as one record, for a journal to go on from."""
        leases = self.leases
        return rec.LedgerSaved(
            spec=self.spec,
            epoch=self.epoch,
            versions=tuple(self.versions),
            windows=tuple(self.windows.values()),
            rounds=tuple(self.rounds.values()),
            commits=tuple(self.commits.values()),
            started=tuple(self.started.values()),
            inputs=tuple(
                rec.InputStored.of(offer, self.screening.payloads.get(blob, 0)) for blob, offer in self.inputs.items()
            ),
            frontier=leases.frontier,
            returned=tuple(leases.returned),
            held=tuple(_leases_held(owner, account) for owner, account in leases.held.items()),
            evaluations=tuple(self.evaluations),
            finished=self.finished,
            ended=tuple(_leases_held(owner, account) for owner, account in leases.ended.items()),
            returned_total=leases.returned_total,
            uncertain_total=leases.uncertain_total,
            seen=self.screening.all_seen,
            standings=tuple(self.screening.standings.values()),
            history=self.history,
            epoch_seen=self.epoch_seen,
            revisions=self.revisions_needed(),
            frozen=tuple(self.frozen.values()),
            keys=tuple(self.keys),
        )

    def copy(self) -> "Ledger":
        """An independent copy; the frozen values in it are shared."""
        return Ledger.resume(self.saved())

    def apply(self, record: rec.Record) -> None:
        match record:
            case rec.EpochClaimed(epoch=epoch):
                self.epoch = epoch
            case rec.EpochSeen(epoch=epoch):
                self.epoch_seen = max(self.epoch_seen, epoch)
            case rec.Rewound(epoch=epoch):
                self.epoch = self.history = epoch
                self._set_inputs({})
            case rec.Adopted():
                self._adopt(record)
            case rec.NodeStarted(node=node):
                self.started[node] = record
                if record.frozen:
                    self.frozen.setdefault(record.holds, record)
            case rec.NodeLeft(node=node, consumed=consumed, stored=stored):
                if node in self.started:
                    incarnation = self.started.pop(node).incarnation
                    self.leases.watermark(node, incarnation, consumed)
                    self.leases.give_back(node, incarnation, stored)
            case rec.LeaseGranted(node=node, incarnation=incarnation, consumed=consumed, since=since):
                if since is not None:
                    self.leases.begin_anew(node, incarnation, since)
                self.leases.watermark(node, incarnation, consumed)
                self.leases.retire(node, incarnation, record.stored)
                self.leases.grant(node, incarnation, record.lease)
            case rec.RoundFixed(round=plan):
                self._fix(plan)
            case rec.InputStored():
                self._store(record)
            case rec.InputDropped(blob=blob):
                if (dropped := self.inputs.pop(blob, None)) is not None:
                    self._spooled.difference_update(_spools(dropped))
                self.screening.forget(blob)
            case rec.WindowCommitted():
                self._commit(record)
            case rec.EvaluationTaken():
                self.evaluations.append(record)
                if len(self.evaluations) > EVALUATIONS_KEPT:  # the older, the fewer: a curve needs no more
                    del self.evaluations[1 : EVALUATIONS_KEPT // 2 : 2]
            case rec.TermsChanged(revision=revision):
                self._revise(revision)
            case rec.KeysChanged():
                self.keys.append(record)
                allowed, old = self.allowed, self.keys[:-KEY_CHANGES_KEPT]
                still = [
                    replace(c, added=tuple(key for key in c.added if allowed.get(key) == c.time_s), removed=())
                    for c in old
                ]
                self.keys = [change for change in still if change.added] + self.keys[-KEY_CHANGES_KEPT:]
            case rec.RunFinished():
                self.finished = True
            case rec.RunStarted() | rec.LedgerSaved() | rec.SnapshotTaken() | rec.AnchorFetched():
                pass  # the first two open a journal, and say nothing new in it; the others matter to the store alone

    @property
    def allowed(self) -> dict[rec.AllowedKey, float]:
        """The keys that may come in, as far as was recorded, with when each was allowed."""
        since: dict[rec.AllowedKey, float] = {}
        for change in self.keys:
            for key in change.removed:
                since.pop(key, None)
            since |= dict.fromkeys(change.added, change.time_s)
        return since

    def keys_changed(self, keys: Set[rec.AllowedKey], time_s: float) -> rec.KeysChanged | None:
        """The record that these keys may come in from now on; None if they could already, and no others."""
        known = self.allowed.keys()
        added, removed = tuple(sorted(keys - known)), tuple(sorted(known - keys))
        return rec.KeysChanged(time_s=time_s, added=added, removed=removed) if added or removed else None

    def _store(self, stored: rec.InputStored) -> None:
        """Count a spooled delta if it came in time and none of its nodes has contributed yet.

        The machine decides the same when it hears of the delta, and journals a drop; a crash may come in between.
        """
        self.leases.stores(stored.blob.node, stored.blob.incarnation, stored.consumed)
        offer = stored.offer()
        if self.outcome_reason(stored.blob, stored.window) is None and self._spooled.isdisjoint(_spools(offer)):
            self.inputs[stored.blob] = offer
            self._spooled.update(_spools(offer))
            self.screening.on_stored(stored)

    def _set_inputs(self, inputs: dict[BlobId, Offer]) -> None:
        """Have these deltas without an outcome, and no others."""
        self.inputs, self._spooled = inputs, {spooled for offer in inputs.values() for spooled in _spools(offer)}

    def _commit(self, record: rec.WindowCommitted) -> None:
        fragment, version = record.fragment, record.version
        assert version == self.versions[fragment] + 1, "commits of a fragment come one by one"
        self.screening.on_committed(record, self.inputs, self.rounds)
        self.versions[fragment] = version
        if record.next_window is None:
            self.windows.pop(fragment, None)
        else:
            self.windows[fragment] = record.next_window
        stays = record.next_window is not None and record.next_window.round == record.round
        names = self._served.get(fragment, set()) | {share.node for share in record.merged}
        self._served[fragment] = names if stays else set()
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
        for addend in record.blobs:
            self.leases.stores(addend.blob.node, addend.blob.incarnation, addend.consumed)
        decided = {addend.blob for addend in record.blobs} | {refusal.blob for refusal in record.refused}
        self._set_inputs(
            {
                blob: offer
                for blob, offer in self.inputs.items()
                if blob not in decided
                and (blob.fragment != fragment or self.outcome_reason(blob, offer.window) is None)
            }
        )
        self.screening.settle(self.inputs)

    def _fix(self, plan: RoundPlan) -> None:
        self.rounds[plan.index] = plan
        oldest = min((terms.round for terms in self.windows.values()), default=plan.index) - ROUNDS_KEPT
        self.rounds = {index: fixed for index, fixed in self.rounds.items() if index >= oldest}

    def _adopt(self, record: rec.Adopted) -> None:
        """Continue from what nodes held. Nodes of another history count as new."""
        self.epoch = self.history = record.epoch
        self._set_inputs({})
        for revision in record.revisions:
            self._revise(revision)
        opened = {terms.fragment: terms for terms in record.windows}
        for anchor in record.anchors:
            fragment = anchor.fragment
            self.versions[fragment] = anchor.version
            self._served[fragment] = set()
            self.windows.pop(fragment, None)
            self.commits = {key: commit for key, commit in self.commits.items() if key[0] != fragment}
            self.commits[fragment, anchor.version] = Committed(
                fragment=fragment,
                version=anchor.version,
                size=more_than_a_snapshot(self.fragment(fragment)),
                digest=0,
                anchor_digest=anchor.digest,
                merged=(),
                drops=(),
                next_window=opened.get(fragment),
                rounds=(),
            )
        self.windows |= opened
        for plan in record.rounds:
            self._fix(plan)
        self.leases.begin_from(record.frontier, record.returned, record.uncertain)

    def _revise(self, revision: Revision) -> None:
        self.spec = replace(self.spec, terms=revision.terms, revision=revision.number)
        # Who comes back may need the windows that are remembered, and be a round behind.
        versions = [max(0, version - HISTORY_VERSIONS) for version in self.versions]
        self.revisions = self.revisions.and_then(revision).needed(versions, self.current_round - 1)
        self.screening.revise(self.spec, self.revisions)

    def revisions_needed(self) -> tuple[Revision, ...]:
        """Revisions that a node may still need; none if the terms never changed."""
        return self.revisions.kept if len(self.revisions.kept) > 1 else ()

    def terms_of(self, fragment: int, window: int, round_index: int | None = None) -> Terms:
        return self.revisions.of_window(fragment, window, round_index)

    def terms_at(self, window: WindowTerms) -> Terms:
        return self.terms_of(window.fragment, window.window, window.round)

    def floor_of(self, window: WindowTerms) -> int:
        """Fewest contributions of a window. A lower floor that was set later holds at once: it ends a hold."""
        return min(self.terms_at(window).admission.floor, self.spec.terms.admission.floor)

    def terms_in(self, round_index: int) -> Terms:
        return self.revisions.of_round(round_index)

    def next_round_to_fix(self) -> RoundPlan | None:
        """The round r + 2 that the first commit of a window of round r fixes; None once it is fixed."""
        newest = self.rounds[max(self.rounds)]
        reached = max((self.windows[f].round for f in self.windows), default=newest.index)
        return schedule.round_after(self.terms_in(newest.index + 1), newest) if newest.index < reached + 1 else None

    def served(self, fragment: int) -> set[NodeId]:
        return self._served.get(fragment, set())

    def _remembered(self, fragment: int) -> set[NodeId]:
        names: set[NodeId] = set()
        for version in range(self.versions[fragment], 0, -1):
            commit, before = self.commits.get((fragment, version)), self.commits.get((fragment, version - 1))
            opened = before.next_window if before else None
            if commit is None or (opened.round if opened else 0) != self.windows[fragment].round:
                break
            names |= {share.node for share in commit.merged}
        return names

    @property
    def current_round(self) -> int:
        """The round whose last slot is open, of the stage furthest behind; the last round once all are final."""
        return self.round_of_part(None)

    def round_of_part(self, part: Part) -> int:
        """As `current_round`, of some stages."""
        layout = self.spec.identity.layout
        last = [f.index for f in fragments_of(part, layout) if f.slot == layout.slots - 1]
        return min((self.windows[index].round for index in last if index in self.windows), default=max(self.rounds))

    def slot_at(self, round_index: int) -> int:
        """The first slot of the round with an uncommitted window; 0 in the first round and in past ones."""
        open_slots = [self.fragment(index).slot for index, terms in self.windows.items() if terms.round <= round_index]
        return min(open_slots, default=0) if round_index else 0

    def is_finished_for(self, part: Part) -> bool:
        return not any(f.index in self.windows for f in fragments_of(part, self.spec.identity.layout))

    def is_too_far_ahead(self, window: WindowTerms) -> bool:
        """Whether its stage would get more than a round ahead of another stage."""
        last, stage = self.spec.identity.layout.slots - 1, self.fragment(window.fragment).stage
        others = [f for f in map(self.fragment, self.windows) if f.slot == last and f.stage != stage]
        return any(self.windows[other.index].round < window.round - 1 for other in others)

    def holders(self, fragment: int) -> list[NodeId]:
        stage = self.fragment(fragment).stage
        return [node for node, one in self.started.items() if one.holds is None or stage in one.holds]

    def holds_of(self, node: NodeId) -> Part:
        """Stages that a node holds; None for the whole model."""
        started = self.started.get(node)
        return None if started is None else started.holds

    @property
    def h(self) -> int:
        """Inner steps of the current round; the run's H if only the last round is shorter."""
        terms = self.terms_in(self.current_round)
        return terms.schedule.h if terms.schedule.h_rule == "constant" else self.rounds[self.current_round].length

    def rounds_ahead(self) -> tuple[RoundPlan, ...]:
        return tuple(self.rounds[i] for i in range(self.current_round - 1, max(self.rounds) + 1) if i in self.rounds)

    def anchor_digest(self, fragment: int, version: int) -> int | None:
        """Digest of that version of the anchor; None if it is not remembered."""
        if version == 0:
            return self.spec.identity.anchor_digests[fragment]
        committed = self.commits.get((fragment, version))
        return committed.anchor_digest if committed else None

    def updates_after(self, fragment: int, held: AnchorRef | None) -> list[Committed] | None:
        """The commits from the anchor that a node holds to the current one; None if it needs a snapshot: not all are
        remembered, they are larger than a snapshot, or its anchor has another digest and so is of another history."""
        if held is None or held.digest != self.anchor_digest(fragment, held.version):
            return None
        missed = [self.commits.get((fragment, v)) for v in range(held.version + 1, self.versions[fragment] + 1)]
        known = [committed for committed in missed if committed is not None]
        if len(known) < len(missed) or sum(c.size for c in known) >= more_than_a_snapshot(self.fragment(fragment)):
            return None
        return known

    def made(self, fragment: int) -> set[NodeId] | None:
        """The nodes that made the fragment's version; None of the first weights."""
        committed = self.commits.get((fragment, self.versions[fragment]))
        return {share.node for share in committed.merged} if committed else None

    def round_of(self, fragment: int, version: int) -> int:
        """The round of the window that made this version; 0 if that is not remembered."""
        before = self.commits.get((fragment, version - 1))
        terms = before.next_window if before else None
        return terms.round if terms else 0

    def codec_of_deltas(self, fragment: int, window: int, node: NodeId) -> str:
        """Codec of a node's deltas for a window, late ones included: by the window's own terms, published with the
        commit before it. Forgotten windows use the terms of their time."""
        terms = self.windows.get(fragment)
        if terms is None or terms.window != window:
            before = self.commits.get((fragment, window - 1))
            terms = before.next_window if before else None
        return (terms or schedule.of_fragment(self.terms_of(fragment, window), self.fragment(fragment))).codec_of(node)

    def fragment(self, index: int) -> Fragment:
        return self.spec.identity.layout.fragments[index]

    def holds_one_of(self, node: NodeId, fragment: int) -> bool:
        """Whether a stored delta of this node has no outcome yet."""
        return (fragment, node) in self._spooled

    def outcome_reason(self, blob: BlobId, window: int) -> Reason | None:
        """Why a delta for `window` is refused now; None while its window is open and its base fits."""
        version, lag = self.versions[blob.fragment], self.spec.terms.schedule.lag
        staleness = self.terms_of(blob.fragment, version + 1).admission.max_staleness  # of the window that is open
        if window + staleness <= version:
            return Reason.LATE
        if window > version + 1 or blob.fragment not in self.windows:
            return Reason.UNKNOWN_WINDOW
        if not version - staleness - lag <= blob.version <= version:
            return Reason.STALE_BASE
        since = [self.commits.get((blob.fragment, v)) for v in range(blob.version + 1 + lag, version + 1)]
        for commit in (commit for commit in since if commit):  # one decided it, and its sender has not heard
            if any(share.node == blob.node for share in commit.merged):
                return Reason.OVERLAP
            for drop in commit.drops:
                if drop.node == blob.node and drop.reason in VERDICTS:
                    return drop.reason
        return None

    def check(self) -> None:
        for fragment, terms in self.windows.items():
            assert terms.window == self.versions[fragment] + 1
            assert terms.round in self.rounds
        assert all(self.outcome_reason(blob, offer.window) is None for blob, offer in self.inputs.items())
        assert self._spooled == {spooled for offer in self.inputs.values() for spooled in _spools(offer)}
        assert all(self.versions[fragment] - HISTORY_VERSIONS < version for fragment, version in self.commits)
        self.leases.check()


def _spools(offer: Offer) -> set[tuple[int, NodeId]]:
    return {(offer.blob.fragment, contribution.node) for contribution in offer.contributors}


def _account(held: rec.LeasesHeld) -> Account:
    return Account(leases=list(held.leases), retired=held.retired, consumed=held.consumed, stored=held.stored)


def _leases_held(owner: Owner, account: Account) -> rec.LeasesHeld:
    return rec.LeasesHeld(
        node=owner[0],
        incarnation=owner[1],
        leases=tuple(account.leases),
        consumed=account.consumed,
        stored=account.stored,
        retired=account.retired,
    )
