"""What the journal says, as a fold: every record's effect, and a summary in the place of all records before it."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_runs import plain_terms

from farloop.algo import schedule
from farloop.algo.spec import (
    BlobId,
    BlobKind,
    Contribution,
    Fragment,
    Identity,
    Layout,
    Lease,
    NodeId,
    RoundPlan,
    RunSpec,
)
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import HISTORY_VERSIONS, ROUNDS_KEPT, Ledger
from farloop.wire.messages import AnchorRef, Drop, Offer, Share
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")
ODD = Offer(
    blob=BlobId(kind=BlobKind.DELTA, fragment=0, version=1, node=A, incarnation=1, seq=1), size=1, digest=1, window=2
)
"""For a window that is not open."""


def begun(spec: RunSpec) -> Ledger:
    return Ledger.begin(rec.RunStarted(spec=spec, epoch=1))


def stored(node: NodeId, window: int, *, fragment: int = 0, seq: int = 1, incarnation: int = 1) -> rec.InputStored:
    blob = BlobId(
        kind=BlobKind.DELTA, fragment=fragment, version=window - 1, node=node, incarnation=incarnation, seq=seq
    )
    contribution = Contribution(node=node, incarnation=incarnation, base=window - 1, steps=10, tokens=10, norm_sq=1.0)
    return rec.InputStored(blob=blob, window=window, contributors=(contribution,), digest=5)


def committed(
    ledger: Ledger, fragment: int, *, size: int = 100, addends: tuple[BlobId, ...] = ()
) -> rec.WindowCommitted:
    """The next commit of a fragment."""
    terms = ledger.windows[fragment]
    return rec.WindowCommitted(
        fragment=fragment,
        version=terms.window,
        round=terms.round,
        merged=(),
        drops=(),
        blobs=tuple(rec.Addend(blob=blob, weight=1.0) for blob in addends),
        anchor_digest=1000 * fragment + terms.window,
        target_digest=1,
        momentum_digest=None,
        next_window=schedule.window_after(ledger.spec.terms, ledger.spec.identity.layout, terms, ledger.rounds),
        update_size=size,
        update_digest=7,
        outer_lr=0.6,
        outer_momentum=0.9,
        why="all came",
    )


def commit(ledger: Ledger, fragment: int, *, size: int = 100) -> None:
    ledger.apply(committed(ledger, fragment, size=size))
    while plan := ledger.next_round_to_fix():
        ledger.apply(rec.RoundFixed(round=plan))


def test_a_run_begins_with_window_1_of_every_fragment_and_two_rounds(spec: RunSpec) -> None:
    """B: the start is the commit of version 0 of everything."""
    ledger = begun(spec)
    ledger.check()
    assert (ledger.epoch, ledger.versions, ledger.finished) == (1, [0, 0], False)
    assert [(w.fragment, w.window, w.round) for w in ledger.windows.values()] == [(0, 1, 1), (1, 1, 0)]
    assert sorted(ledger.rounds) == [0, 1]
    assert ledger.current_round == 0


def test_a_commit_opens_the_next_window_and_decides_its_inputs(spec: RunSpec) -> None:
    ledger = begun(spec)
    other = stored(A, 1, fragment=0)
    for record in (stored(A, 1, fragment=1), stored(B, 1, fragment=1), other):
        ledger.apply(record)
    ledger.apply(committed(ledger, 1))
    ledger.check()
    assert ledger.versions == [0, 1]
    assert list(ledger.inputs) == [other.blob]
    assert (ledger.windows[1].window, ledger.windows[1].round) == (2, 1)
    assert ledger.current_round == 1
    assert ledger.anchor_digest(1, 1) == 1001


def test_commits_of_a_fragment_come_one_by_one(spec: RunSpec) -> None:
    ledger = begun(spec)
    record = committed(ledger, 1)
    ledger.apply(record)
    with pytest.raises(AssertionError, match="one by one"):
        ledger.apply(record)


def test_the_first_commit_of_round_r_fixes_round_r_plus_2(spec: RunSpec) -> None:
    """B: S and H of a round are decided once, two rounds ahead; none is left to decide where the run ends."""
    ledger = begun(spec)
    fixed = []
    for fragment in (1, 0, 1, 0, 1, 0):
        ledger.apply(committed(ledger, fragment))
        plan = ledger.next_round_to_fix()
        fixed.append(plan.index if plan else None)
        if plan:
            ledger.apply(rec.RoundFixed(round=plan))
            assert ledger.next_round_to_fix() is None
    assert fixed == [2, 3, None, None, None, None]
    assert [ledger.rounds[i] for i in range(4)] == [RoundPlan(index=i, start=10 * i, length=10) for i in range(4)]


def test_a_final_commit_leaves_no_window(spec: RunSpec) -> None:
    ledger = begun(spec)
    while ledger.windows:
        commit(ledger, min(ledger.windows, key=lambda f: (ledger.windows[f].round, -f)))
        ledger.check()
    assert ledger.versions == [4, 4], (
        "fragment 0 skips round 0 and is flushed at the end; fragment 1 has 4 regular sends"
    )
    assert ledger.current_round == 3
    assert ledger.outcome_reason(stored(A, 5).blob, 5) is Reason.UNKNOWN_WINDOW


def test_only_the_last_commits_are_remembered(spec: RunSpec) -> None:
    """R: history is at least 7 updates per fragment."""
    ledger = begun(dataclasses.replace(spec, terms=spec.terms.replace(steps=400)))
    for _ in range(HISTORY_VERSIONS + 5):
        commit(ledger, 1)
        ledger.check()
    assert [version for _, version in ledger.commits] == list(range(6, 6 + HISTORY_VERSIONS))
    assert HISTORY_VERSIONS >= 7
    assert ledger.anchor_digest(1, 5) is None and ledger.anchor_digest(1, 6) == 1006
    assert ledger.anchor_digest(1, 0) == 101, "version 0 is in the run's identity"


def test_a_stored_delta_waits_for_its_outcome(spec: RunSpec) -> None:
    """P: a restart re-opens the window with it."""
    ledger = begun(spec)
    record = stored(A, 1, fragment=1)
    ledger.apply(record)
    (offer,) = ledger.inputs.values()
    assert (offer.blob, offer.window, offer.contributors) == (record.blob, 1, record.contributors)
    ledger.apply(rec.InputDropped(blob=record.blob, reason=Reason.CORRUPT, detail=""))
    ledger.apply(rec.InputDropped(blob=record.blob, reason=Reason.CORRUPT, detail=""))
    assert not ledger.inputs


def test_a_delta_that_was_spooled_after_its_window_had_closed_is_none_for_the_next(spec: RunSpec) -> None:
    """A crash may come between the spool and the drop that the machine decides on (protocol E, P)."""
    ledger = begun(spec)
    ledger.apply(committed(ledger, 1))
    ledger.apply(stored(B, 1, fragment=1))
    assert not ledger.inputs
    ledger.check()


def test_of_two_deltas_of_one_node_the_first_to_be_spooled_counts(spec: RunSpec) -> None:
    """OVERLAP, where a crash comes before the second one's drop: a node that restarted may have two (protocol H)."""
    ledger = begun(spec)
    first, second = stored(A, 1), stored(A, 1, incarnation=2)
    ledger.apply(first)
    ledger.apply(second)
    ledger.apply(stored(A, 1, fragment=1))
    assert [blob.fragment for blob in ledger.inputs] == [0, 1] and first.blob in ledger.inputs
    ledger.apply(rec.InputDropped(blob=second.blob, reason=Reason.OVERLAP, detail=""))
    assert first.blob in ledger.inputs


def test_nodes_start_and_leave(spec: RunSpec) -> None:
    ledger = begun(spec)
    ledger.apply(rec.NodeStarted(node=A, incarnation=3, round=2))
    assert ledger.started == {A: rec.NodeStarted(node=A, incarnation=3, round=2)}
    ledger.apply(rec.NodeLeft(node=A, reason=Reason.DRAINED))
    ledger.apply(rec.NodeLeft(node=B, reason=Reason.DRAINED))
    assert ledger.started == {}


def test_a_replay_gives_back_what_the_run_gave_back(spec: RunSpec) -> None:
    """Data leases: how much a node had used is known from its reports, which are not journaled; the record says it."""
    ledger = begun(spec)
    for record in (
        rec.NodeStarted(node=A, incarnation=1, round=0),
        rec.LeaseGranted(node=A, incarnation=1, lease=Lease(start=0, count=100)),
        rec.NodeLeft(node=A, reason=Reason.CLOSED, consumed=60),
        rec.NodeStarted(node=B, incarnation=1, round=0),
        rec.LeaseGranted(node=B, incarnation=1, lease=Lease(start=60, count=30)),
    ):
        ledger.apply(record)
    ledger.check()
    assert (ledger.leases.returned, ledger.leases.frontier) == ([Lease(start=90, count=10)], 100)


def test_a_grant_says_how_much_was_used_before_it(spec: RunSpec) -> None:
    """Data leases: at most one round per crash is uncertain."""
    ledger = begun(spec)
    ledger.apply(rec.NodeStarted(node=A, incarnation=1, round=0))
    ledger.apply(rec.LeaseGranted(node=A, incarnation=1, lease=Lease(start=0, count=100)))
    ledger.apply(rec.LeaseGranted(node=A, incarnation=1, lease=Lease(start=100, count=50), consumed=80))
    assert ledger.leases.outstanding(A, 1) == 70
    ledger.apply(rec.NodeLeft(node=A, reason=Reason.OLD_INCARNATION))
    assert ledger.leases.returned == [Lease(start=80, count=70)]


def test_evaluations_epochs_and_the_end_are_remembered(spec: RunSpec) -> None:
    ledger = begun(spec)
    taken = rec.EvaluationTaken(loss=2.5, versions=(1, 0), position=10.0)
    for record in (taken, rec.EpochClaimed(epoch=4), rec.RunFinished()):
        ledger.apply(record)
    assert (ledger.evaluations, ledger.epoch, ledger.finished) == ([taken], 4, True)


def test_records_for_others_say_nothing_new(spec: RunSpec) -> None:
    ledger, same = begun(spec), begun(spec)
    for record in (rec.RunStarted(spec=spec, epoch=9), rec.SnapshotTaken(fragment=0, version=8), ledger.saved()):
        ledger.apply(record)
    assert ledger == same


@pytest.mark.parametrize(
    ("window", "base", "reason"),
    [
        (3, 2, None),
        (2, 1, Reason.LATE),
        (1, 0, Reason.LATE),
        (4, 2, Reason.UNKNOWN_WINDOW),
        (3, 1, Reason.STALE_BASE),
        (3, 3, Reason.STALE_BASE),
    ],
)
def test_a_delta_is_for_the_open_window_and_from_its_base(
    spec: RunSpec, window: int, base: int, reason: Reason | None
) -> None:
    """D: a base older than current − max_staleness is refused, and so is one that is not there yet."""
    ledger = begun(spec)
    commit(ledger, 1)
    commit(ledger, 1)
    blob = dataclasses.replace(stored(A, 1, fragment=1).blob, version=base)
    assert ledger.outcome_reason(blob, window) is reason


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_bases_may_be_as_stale_as_the_terms_say(spec: RunSpec, staleness: int) -> None:
    ledger = begun(dataclasses.replace(spec, terms=spec.terms.replace(max_staleness=staleness)))
    commit(ledger, 1)
    commit(ledger, 1)
    blobs = [dataclasses.replace(stored(A, 1, fragment=1).blob, version=base) for base in range(3)]
    accepted = [blob.version for blob in blobs if ledger.outcome_reason(blob, 3) is None]
    assert accepted == list(range(2 - staleness, 3))


def test_a_version_vector_has_one_version_per_fragment(spec: RunSpec) -> None:
    ledger = begun(spec)
    assert [ledger.is_vector(versions) for versions in ((), (1,), (1, 2), (1, 2, 3))] == [False, False, True, False]


def ref(fragment: int, version: int, digest: int) -> AnchorRef:
    return AnchorRef(fragment=fragment, version=version, digest=digest)


def test_who_is_behind_gets_the_updates_it_missed_in_order(spec: RunSpec) -> None:
    """R"""
    ledger = begun(spec)
    for _ in range(3):
        commit(ledger, 1)
    for held in range(4):
        updates = ledger.updates_after(1, ref(1, held, 101 if held == 0 else 1000 + held))
        assert updates is not None
        assert [update.version for update in updates] == list(range(held + 1, 4))


def test_who_has_nothing_or_another_history_gets_a_snapshot(spec: RunSpec) -> None:
    """S: anchors are compared by digest."""
    ledger = begun(spec)
    commit(ledger, 1)
    assert ledger.updates_after(1, None) is None
    assert ledger.updates_after(1, ref(1, 1, 1234)) is None
    assert ledger.updates_after(1, ref(1, 0, 1001)) is None


def test_a_snapshot_is_sent_where_it_is_fewer_bytes_or_updates_are_forgotten(spec: RunSpec) -> None:
    """R: fragment 1 has 256 elements, its snapshot 1088 bytes."""
    ledger = begun(dataclasses.replace(spec, terms=spec.terms.replace(steps=400)))
    commit(ledger, 1, size=1000)
    commit(ledger, 1, size=88)
    assert ledger.updates_after(1, ref(1, 0, 101)) is not None
    commit(ledger, 1, size=1)
    assert ledger.updates_after(1, ref(1, 0, 101)) is None
    assert ledger.updates_after(1, ref(1, 1, 1001)) is not None
    for _ in range(HISTORY_VERSIONS):
        commit(ledger, 1, size=1)
    assert ledger.updates_after(1, ref(1, 3, 1003)) is None
    assert ledger.updates_after(1, ref(1, 4, 1004)) is not None


def test_the_rounds_that_a_node_may_still_need(spec: RunSpec) -> None:
    """I: also the one before the current, which a node that is behind is in."""
    ledger = begun(spec)
    assert [plan.index for plan in ledger.rounds_ahead()] == [0, 1]
    for _ in range(3):
        commit(ledger, 1)
    assert ledger.current_round == 3
    assert [plan.index for plan in ledger.rounds_ahead()] == [2, 3]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ledger: ledger.versions.__setitem__(0, 1),
        lambda ledger: ledger.rounds.pop(1),
        lambda ledger: ledger.inputs.update({ODD.blob: ODD}),
        lambda ledger: setattr(ledger.leases, "returned", [Lease(start=0, count=1)]),
    ],
    ids=["a window of another version", "a round that is not fixed", "an input of no window", "a sample from nowhere"],
)
def test_what_must_not_be_is_noticed(spec: RunSpec, spoil: Callable[[Ledger], object]) -> None:
    ledger = begun(spec)
    ledger.check()
    spoil(ledger)
    with pytest.raises(AssertionError):
        ledger.check()


def small_run(fragments: int, slots: int) -> RunSpec:
    identity = Identity(
        name="run",
        model="own",
        layout=Layout(
            slots=slots,
            fragments=tuple(Fragment(index=i, slot=min(i, slots - 1), numel=256, tensors=()) for i in range(fragments)),
        ),
        anchor_digests=tuple(range(fragments)),
        data="own",
        num_samples=1000,
        evaluation_set="none",
        seed=0,
    )
    terms = plain_terms(steps=300, h=10, outer_lr=1.0, outer_momentum=0.0)
    return RunSpec(identity=identity, terms=terms)


nodes = st.sampled_from([A, B])


@settings(max_examples=40, stateful_step_count=40)
class Fold(RuleBasedStateMachine):
    """Any journal: at any place, its records so far and one summary of them lead to the same state ever after."""

    @initialize(fragments=st.integers(1, 3), slots=st.integers(1, 2))
    def begin(self, fragments: int, slots: int) -> None:
        self.whole = begun(small_run(fragments, min(fragments, slots)))
        self.resumed = self.whole.copy()
        self.seq = 0

    def apply(self, record: rec.Record) -> None:
        for ledger in (self.whole, self.resumed):
            ledger.apply(record)

    @rule()
    def summarise(self) -> None:
        saved = rec.decode(*rec.encode(self.resumed.saved()))
        assert isinstance(saved, rec.LedgerSaved)
        self.resumed = Ledger.resume(saved)

    @rule(node=nodes, incarnation=st.integers(1, 2))
    def start_node(self, node: NodeId, incarnation: int) -> None:
        if node not in self.whole.started:
            self.apply(rec.NodeStarted(node=node, incarnation=incarnation, round=self.whole.current_round))

    @rule(node=nodes, used=st.integers(0, 60), count=st.integers(1, 30))
    def grant(self, node: NodeId, used: int, count: int) -> None:
        if node in self.whole.started:
            incarnation = self.whole.started[node].incarnation
            for lease in self.whole.leases.propose(count):
                self.apply(rec.LeaseGranted(node=node, incarnation=incarnation, lease=lease, consumed=used))

    @rule(node=nodes, used=st.integers(0, 60))
    def leave(self, node: NodeId, used: int) -> None:
        self.apply(rec.NodeLeft(node=node, reason=Reason.CLOSED, consumed=used))

    @rule(node=nodes, fragment=st.integers(0, 2), ago=st.integers(0, 1))
    def store(self, node: NodeId, fragment: int, ago: int) -> None:
        if fragment in self.whole.windows:
            self.seq += 1
            window = max(1, self.whole.windows[fragment].window - ago)
            self.apply(stored(node, window, fragment=fragment, seq=self.seq))

    @precondition(lambda self: self.whole.inputs)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        blob = data.draw(st.sampled_from(list(self.whole.inputs)))
        self.apply(rec.InputDropped(blob=blob, reason=Reason.LATE, detail=""))

    @rule(fragment=st.integers(0, 2))
    def commit(self, fragment: int) -> None:
        if fragment in self.whole.windows and self.whole.windows[fragment].round + 1 in self.whole.rounds:
            self.apply(committed(self.whole, fragment))
        while plan := self.whole.next_round_to_fix():
            self.apply(rec.RoundFixed(round=plan))

    @rule(loss=st.floats(allow_nan=False))
    def evaluate(self, loss: float) -> None:
        self.apply(rec.EvaluationTaken(loss=loss, versions=tuple(self.whole.versions), position=1.0))

    @rule(epoch=st.integers(1, 9))
    def restart(self, epoch: int) -> None:
        self.apply(rec.EpochClaimed(epoch=epoch))

    @invariant()
    def both_know_the_same(self) -> None:
        self.whole.check()
        assert [(b, o.window) for b, o in self.resumed.inputs.items()] == [
            (b, o.window) for b, o in self.whole.inputs.items()
        ]
        assert self.resumed == self.whole


TestFold = Fold.TestCase


@given(st.integers(1, 3))
def test_a_copy_goes_its_own_way(fragments: int) -> None:
    ledger = begun(small_run(fragments, 1))
    copied = ledger.copy()
    assert copied == ledger
    commit(copied, 0)
    copied.leases.grant(A, 1, Lease(start=0, count=5))
    copied.started[A] = rec.NodeStarted(node=A, incarnation=1, round=0)
    assert ledger == begun(small_run(fragments, 1))


def test_what_is_remembered_does_not_grow_with_the_run() -> None:
    """P: a summary opens every segment, and is as long after weeks as after a day."""
    run = small_run(2, 2)
    terms = run.terms.replace(steps=10**9, h=2, batch_sequences=1)
    ledger, sizes = begun(dataclasses.replace(run, terms=terms)), []
    for number in range(3 * ROUNDS_KEPT):
        for fragment in (0, 1):
            while plan := ledger.next_round_to_fix():
                ledger.apply(rec.RoundFixed(round=plan))
            ledger.apply(committed(ledger, fragment))
        ledger.apply(rec.EvaluationTaken(loss=1.0, versions=tuple(ledger.versions), position=1.0))
        node, used = (A, B)[number % 2], 10 * (number // 2)
        if node not in ledger.started:
            ledger.apply(rec.NodeStarted(node=node, incarnation=1, round=ledger.current_round))
        for lease in ledger.leases.propose(10):
            ledger.apply(rec.LeaseGranted(node=node, incarnation=1, lease=lease, consumed=used, stored=used))
        if number % ROUNDS_KEPT == ROUNDS_KEPT - 1:
            sizes.append(len(rec.encode(ledger.saved())[1]))
    ledger.check()
    assert ledger.evaluations[0].versions == (1, 1), "the first is kept, and the newest"
    assert ledger.evaluations[-1].versions == tuple(ledger.versions)
    assert len(ledger.rounds) < ROUNDS_KEPT + 5
    assert sizes[2] < 1.1 * sizes[1]


# --- late deltas


def patient(spec: RunSpec, **terms: object) -> Ledger:
    """A run in which a base may be two versions old; fragment 1 is at version 3, with commits of node a alone."""
    changed = spec.terms.replace(steps=100, max_staleness=2, **terms)  # type: ignore[arg-type]
    ledger = begun(dataclasses.replace(spec, terms=changed))
    for _ in range(3):
        ledger.apply(dataclasses.replace(committed(ledger, 1), merged=(Share(node=A, weight=1.0),)))
        while plan := ledger.next_round_to_fix():
            ledger.apply(rec.RoundFixed(round=plan))
    return ledger


def test_a_late_delta_has_no_outcome_while_its_base_is_within_reach(spec: RunSpec) -> None:
    """D: window 4 is open."""
    ledger = patient(spec)
    reasons = [ledger.outcome_reason(stored(B, window, fragment=1).blob, window) for window in range(1, 6)]
    assert reasons == [Reason.LATE, None, None, None, Reason.UNKNOWN_WINDOW]


def test_a_delta_of_a_node_that_was_merged_since_its_base_holds_that_work_again(spec: RunSpec) -> None:
    """E, H: only one from the version that holds the last one is new."""
    ledger = patient(spec)
    reasons = [ledger.outcome_reason(stored(A, window, fragment=1).blob, window) for window in range(2, 5)]
    assert reasons == [Reason.OVERLAP, Reason.OVERLAP, None]


def test_a_delta_that_a_window_refused_is_not_taken_by_the_next_one(spec: RunSpec) -> None:
    """E: its sender had not heard, and sent it again. One that only came too late for a window may go into another."""
    ledger = patient(spec)
    for reason in (Reason.LATE, Reason.OUTLIER):
        ledger.apply(dataclasses.replace(committed(ledger, 1), drops=(Drop(node=B, reason=reason),)))
        while plan := ledger.next_round_to_fix():
            ledger.apply(rec.RoundFixed(round=plan))
    reasons = [ledger.outcome_reason(stored(B, window, fragment=1).blob, window) for window in (4, 5, 6)]
    assert reasons == [Reason.OUTLIER, Reason.OUTLIER, None]
    assert ledger.outcome_reason(stored(A, 5, fragment=1).blob, 5) is None


def test_a_base_that_does_not_fit_its_window_is_refused(spec: RunSpec) -> None:
    old = dataclasses.replace(stored(B, 4, fragment=1).blob, version=0)
    assert patient(spec).outcome_reason(old, 4) is Reason.STALE_BASE


def test_the_codec_of_a_delta_is_that_of_the_window_which_it_names(spec: RunSpec) -> None:
    """B: of the open one, and of those before as long as their commits are remembered, in a summary too."""
    ledger = begun(spec)
    for codec in ("q8", "fp32", "e3m0"):
        while plan := ledger.next_round_to_fix():
            ledger.apply(rec.RoundFixed(round=plan))
        record = committed(ledger, 0)
        assert record.next_window is not None
        own = {"q8": "bf16", "fp32": "nf4"}.get(codec)
        opened = dataclasses.replace(record.next_window, codec_up=codec, codec_up_of=((B, own),) if own else ())
        ledger.apply(dataclasses.replace(record, next_window=opened))
    for known in (ledger, Ledger.resume(ledger.saved())):
        of_a, of_b = ([known.codec_of_deltas(0, window, node) for window in (1, 2, 3, 4)] for node in (A, B))
        assert of_a == [spec.terms.codecs.up, "q8", "fp32", "e3m0"]
        assert of_b == [spec.terms.codecs.up, "bf16", "nf4", "e3m0"], "its own, of the windows that say so"
        assert known.codec_of_deltas(1, 1, A) == spec.terms.codecs.up


def test_a_stored_late_delta_is_kept_from_commit_to_commit_until_it_is_too_old(spec: RunSpec) -> None:
    """P, Q: and over a restart."""
    ledger = patient(spec)
    late = stored(B, 3, fragment=1)
    ledger.apply(late)
    for kept in (True, False):
        assert ledger.holds_one_of(B, 1) and not ledger.holds_one_of(B, 0) and not ledger.holds_one_of(A, 1)
        commit(ledger, 1)
        ledger.check()
        assert (late.blob in ledger.inputs) is kept
        ledger = ledger.copy()
    assert not ledger.holds_one_of(B, 1)


def test_who_has_served_a_round_is_known_however_many_they_are(spec: RunSpec) -> None:
    """More than commits are remembered; after a restart it is as many."""
    ledger = begun(spec)
    names = [NodeId(f"n{number:02}") for number in range(HISTORY_VERSIONS + 4)]
    for name in names:
        here = ledger.windows[1]
        stays = dataclasses.replace(here, window=here.window + 1)
        record = dataclasses.replace(committed(ledger, 1), merged=(Share(node=name, weight=1.0),), next_window=stays)
        ledger.apply(record)
    assert ledger.served(1) == set(names) and ledger.served(0) == set()
    assert ledger.copy().served(1) >= set(names[-HISTORY_VERSIONS + 1 :])
    commit(ledger, 1)
    assert ledger.served(1) == ledger.copy().served(1) == set()
