"""What the journal says, as a fold: every record's effect, and a summary in the place of all records before it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from coordinator_run import A, B
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_runs import plain_offer, plain_terms
from slow_cases import examples

from farloop.algo import schedule
from farloop.algo.outer_settings import PLAIN_AVERAGE, settings_of
from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import BlobId, Fragment, Identity, Layout, Lease, NodeId, RoundPlan, RunSpec
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import HISTORY_VERSIONS, KEY_CHANGES_KEPT, ROUNDS_KEPT, Ledger
from farloop.wire.messages import AnchorRef, Drop, Share
from farloop.wire.reasons import Reason


def begun(spec: RunSpec, **terms: Any) -> Ledger:
    spec = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
    return Ledger.begin(rec.RunStarted(spec=spec, epoch=1, rounds=opening_rounds(spec)))


def stored(node: NodeId, window: int, *, fragment: int = 1, **changes: Any) -> rec.InputStored:
    return rec.InputStored.of(plain_offer(node, window, fragment=fragment, digest=5, **changes))


def delta(node: NodeId, window: int, base: int | None = None) -> BlobId:
    """Of fragment 1; from the base before that window unless another is named."""
    blob = stored(node, window).blob
    return blob if base is None else dataclasses.replace(blob, version=base)


def committed(ledger: Ledger, fragment: int, **changes: Any) -> rec.WindowCommitted:
    """The next commit of a fragment."""
    terms = ledger.windows[fragment]
    plain = rec.WindowCommitted(
        fragment=fragment, version=terms.window, round=terms.round, merged=(), drops=(), blobs=(),
        anchor_digest=1000 * fragment + terms.window, target_digest=1, momentum_digest=None,
        next_window=schedule.window_after(ledger.spec.terms, ledger.spec.identity.layout, terms, ledger.rounds),
        update_size=100, update_digest=7, outer_lr=0.6, outer_momentum=0.9, why="all came",
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def commit(ledger: Ledger, *fragments: int, **changes: Any) -> None:
    for fragment in fragments:
        ledger.apply(committed(ledger, fragment, **changes))
        while plan := ledger.next_round_to_fix():
            ledger.apply(rec.RoundFixed(round=plan))
        ledger.check()


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


def test_only_the_last_commits_are_remembered(spec: RunSpec) -> None:
    """R: history is at least 7 updates per fragment."""
    ledger = begun(spec, steps=400)
    commit(ledger, *[1] * (HISTORY_VERSIONS + 5))
    assert [version for _, version in ledger.commits] == list(range(6, 6 + HISTORY_VERSIONS))
    assert HISTORY_VERSIONS >= 7
    assert [ledger.anchor_digest(1, version) for version in (0, 5, 6)] == [101, None, 1006], "0 is in the identity"


def test_a_delta_that_was_spooled_after_its_window_had_closed_is_none_for_the_next(spec: RunSpec) -> None:
    """A crash may come between the spool and the drop that the machine decides on (protocol E, P)."""
    ledger = begun(spec)
    ledger.apply(committed(ledger, 1))
    ledger.apply(stored(B, 1))
    assert not ledger.inputs
    ledger.check()


def test_of_two_deltas_of_one_node_the_first_to_be_spooled_counts(spec: RunSpec) -> None:
    """OVERLAP, where a crash comes before the second one's drop: a node that restarted may have two (protocol H)."""
    ledger = begun(spec)
    first, second = stored(A, 1, fragment=0), stored(A, 1, fragment=0, incarnation=2)
    for record in (first, second, stored(A, 1)):
        ledger.apply(record)
    assert [blob.fragment for blob in ledger.inputs] == [0, 1] and first.blob in ledger.inputs
    ledger.apply(rec.InputDropped(blob=second.blob, reason=Reason.OVERLAP, detail=""))
    assert first.blob in ledger.inputs


def test_nodes_start_and_leave_and_a_replay_gives_back_what_the_run_gave_back(spec: RunSpec) -> None:
    """Data leases: how much a node had used is known from its reports, which are not journaled; the record says it."""
    ledger = begun(spec)
    started = rec.NodeStarted(node=B, incarnation=3, round=2)
    for record in (
        rec.NodeStarted(node=A, incarnation=1, round=0),
        rec.LeaseGranted(node=A, incarnation=1, lease=Lease(start=0, count=100)),
        rec.LeaseGranted(node=A, incarnation=1, lease=Lease(start=100, count=50), consumed=80),
    ):
        ledger.apply(record)
    assert ledger.leases.outstanding(A, 1) == 70
    for record in (
        rec.NodeLeft(node=A, reason=Reason.CLOSED, consumed=90, stored=90),
        rec.NodeLeft(node=A, reason=Reason.DRAINED),
        started,
        rec.LeaseGranted(node=B, incarnation=3, lease=Lease(start=90, count=30)),
    ):
        ledger.apply(record)
    ledger.check()
    assert ledger.started == {B: started}
    assert (ledger.leases.returned, ledger.leases.frontier) == ([Lease(start=120, count=30)], 150)


def test_evaluations_epochs_and_the_end_are_remembered_and_records_for_others_say_nothing_new(spec: RunSpec) -> None:
    ledger, same = begun(spec), begun(spec)
    for record in (
        rec.RunStarted(spec=spec, epoch=9, rounds=()),
        rec.SnapshotTaken(fragment=0, version=8),
        ledger.saved(),
    ):
        ledger.apply(record)
    assert ledger == same
    taken = rec.EvaluationTaken(loss=2.5, versions=(1, 0), position=10.0)
    for record in (taken, rec.EpochClaimed(epoch=4), rec.RunFinished()):
        ledger.apply(record)
    assert (ledger.evaluations, ledger.epoch, ledger.finished) == ([taken], 4, True)


# --- which deltas may come


@pytest.mark.parametrize(
    ("staleness", "window", "base", "reason"),
    [
        (0, 3, 2, None),
        (0, 2, 1, Reason.LATE),
        (0, 1, 0, Reason.LATE),
        (0, 4, 2, Reason.UNKNOWN_WINDOW),
        (0, 3, 1, Reason.STALE_BASE),
        (0, 3, 3, Reason.STALE_BASE),
        (1, 3, 1, None),
        (1, 3, 0, Reason.STALE_BASE),
        (2, 3, 0, None),
    ],
)
def test_a_delta_is_for_the_open_window_and_from_its_base(
    spec: RunSpec, staleness: int, window: int, base: int, reason: Reason | None
) -> None:
    """D: a base older than current − max_staleness is refused, and so is one that is not there yet."""
    ledger = begun(spec, max_staleness=staleness)
    commit(ledger, 1, 1)
    assert ledger.outcome_reason(delta(A, window, base), window) is reason


@pytest.fixture
def patient(spec: RunSpec) -> Ledger:
    """A base may be two versions old; fragment 1 is at version 3, with commits of node a alone."""
    ledger = begun(spec, steps=100, max_staleness=2)
    commit(ledger, 1, 1, 1, merged=(Share(node=A, weight=1.0),))
    return ledger


def test_a_late_delta_has_no_outcome_while_its_base_is_within_reach(patient: Ledger) -> None:
    """D, E, H: window 4 is open. One of a node that was merged since its base holds that work again."""
    reasons = [[patient.outcome_reason(delta(node, window), window) for window in range(1, 6)] for node in (B, A)]
    assert reasons == [
        [Reason.LATE, None, None, None, Reason.UNKNOWN_WINDOW],
        [Reason.LATE, Reason.OVERLAP, Reason.OVERLAP, None, Reason.UNKNOWN_WINDOW],
    ]
    assert patient.outcome_reason(delta(B, 4, 0), 4) is Reason.STALE_BASE


def test_a_delta_that_a_window_refused_is_not_taken_by_the_next_one(patient: Ledger) -> None:
    """E: its sender had not heard, and sent it again. One that only came too late for a window may go into another."""
    for reason in (Reason.LATE, Reason.OUTLIER):
        commit(patient, 1, drops=(Drop(node=B, reason=reason),))
    reasons = [patient.outcome_reason(delta(B, window), window) for window in (4, 5, 6)]
    assert reasons == [Reason.OUTLIER, Reason.OUTLIER, None]
    assert patient.outcome_reason(delta(A, 5), 5) is None


def test_a_stored_late_delta_is_kept_from_commit_to_commit_until_it_is_too_old(patient: Ledger) -> None:
    """P, Q: and over a restart."""
    late = stored(B, 3)
    patient.apply(late)
    for kept in (True, False):
        assert patient.holds_one_of(B, 1) and not patient.holds_one_of(B, 0) and not patient.holds_one_of(A, 1)
        commit(patient, 1)
        assert (late.blob in patient.inputs) is kept
        patient = patient.copy()
    assert not patient.holds_one_of(B, 1)


def test_the_codec_of_a_delta_is_that_of_the_window_which_it_names(spec: RunSpec) -> None:
    """B: of the open one, and of those before as long as their commits are remembered, in a summary too."""
    ledger = begun(spec)
    ledger.apply(rec.RoundFixed(round=schedule.first_rounds(spec.terms, count=3)[2]))
    for codec, own in (("q8", "bf16"), ("fp32", "nf4"), ("e3m0", None)):
        opened = committed(ledger, 0).next_window
        assert opened is not None
        own_codecs = ((B, own),) if own else ()
        commit(ledger, 0, next_window=dataclasses.replace(opened, codec_up=codec, codec_up_of=own_codecs))
    for known in (ledger, Ledger.resume(ledger.saved())):
        of_a, of_b = ([known.codec_of_deltas(0, window, node) for window in (1, 2, 3, 4)] for node in (A, B))
        assert of_a == [spec.terms.codecs.up, "q8", "fp32", "e3m0"]
        assert of_b == [spec.terms.codecs.up, "bf16", "nf4", "e3m0"], "its own, of the windows that say so"
        assert known.codec_of_deltas(1, 1, A) == spec.terms.codecs.up


def test_statistics_are_sent_in_fp32_by_every_node_whatever_the_codecs(spec: RunSpec) -> None:
    """Also for windows that are forgotten."""
    layout, terms = spec.identity.layout, spec.terms.replace(codec_up="q4", codec_up_of=((B, "q8"),))
    slot = dataclasses.replace(layout.fragments[1].tensors[0], name="0.running_var")
    statistics = dataclasses.replace(layout.fragments[1], tensors=(slot,))
    identity = dataclasses.replace(
        spec.identity, layout=dataclasses.replace(layout, fragments=(layout.fragments[0], statistics))
    )
    ledger = begun(dataclasses.replace(spec, identity=identity, terms=terms))
    ledger.apply(rec.RoundFixed(round=schedule.first_rounds(terms, count=3)[2]))
    for fragment, codecs in ((0, ["q4", "q8"]), (1, ["fp32", "fp32"])):
        following = committed(ledger, fragment).next_window
        assert following is not None
        outer = settings_of(terms, identity.layout, ledger.windows[fragment], ledger.rounds)
        assert (outer == PLAIN_AVERAGE) is (fragment == 1)
        assert [ledger.windows[fragment].codec_of(node) for node in (A, B)] == codecs
        assert [following.codec_of(node) for node in (A, B)] == codecs
        assert following.codec_down == (terms.codecs.down if fragment == 0 else "fp32")
        commit(ledger, fragment)
        assert [ledger.codec_of_deltas(fragment, 1, node) for node in (A, B)] == codecs


def test_who_has_served_a_round_is_known_however_many_they_are(spec: RunSpec) -> None:
    """More than commits are remembered; after a restart it is as many."""
    ledger = begun(spec)
    names = [NodeId(f"n{number:02}") for number in range(HISTORY_VERSIONS + 4)]
    for name in names:
        stays = dataclasses.replace(ledger.windows[1], window=ledger.windows[1].window + 1)
        ledger.apply(committed(ledger, 1, merged=(Share(node=name, weight=1.0),), next_window=stays))
    assert ledger.served(1) == set(names) and ledger.served(0) == set()
    assert ledger.copy().served(1) >= set(names[-HISTORY_VERSIONS + 1 :])
    commit(ledger, 1)
    assert ledger.served(1) == ledger.copy().served(1) == set()


# --- what who comes back is sent


def updates(ledger: Ledger, version: int, digest: int | None = None) -> list[int] | None:
    """Versions of fragment 1 that a node with this anchor is sent; None for a snapshot."""
    digest = digest or (101 if version == 0 else 1000 + version)
    found = ledger.updates_after(1, AnchorRef(fragment=1, version=version, digest=digest))
    return None if found is None else [update.version for update in found]


def test_who_is_behind_gets_the_updates_it_missed_in_order_and_another_history_a_snapshot(spec: RunSpec) -> None:
    """R, S: anchors are compared by digest."""
    ledger = begun(spec)
    commit(ledger, 1, 1, 1)
    assert [updates(ledger, held) for held in range(4)] == [[1, 2, 3], [2, 3], [3], []]
    assert ledger.updates_after(1, None) is updates(ledger, 1, 1234) is updates(ledger, 0, 1001) is None
    assert [plan.index for plan in ledger.rounds_ahead()] == [2, 3], "and I: the round that it may be in"


def test_a_snapshot_is_sent_where_it_is_fewer_bytes_or_updates_are_forgotten(spec: RunSpec) -> None:
    """R: fragment 1 has 256 elements, its snapshot 1088 bytes."""
    ledger = begun(spec, steps=400)
    commit(ledger, 1, update_size=1000)
    commit(ledger, 1, update_size=88)
    assert updates(ledger, 0) is not None
    commit(ledger, 1, update_size=1)
    assert updates(ledger, 0) is None and updates(ledger, 1) is not None
    commit(ledger, *[1] * HISTORY_VERSIONS, update_size=1)
    assert updates(ledger, 3) is None and updates(ledger, 4) is not None


# --- the fold


ODD = plain_offer(A, 2, fragment=0)
"""For a window that is not open."""


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


def small_run(fragments: int, slots: int, **terms: Any) -> RunSpec:
    layout = Layout(
        slots=slots,
        fragments=tuple(Fragment(index=i, slot=min(i, slots - 1), numel=256, tensors=()) for i in range(fragments)),
    )
    identity = Identity(
        name="run", model="own", layout=layout, anchor_digests=tuple(range(fragments)), data="own", num_samples=1000,
        evaluation_set="none", seed=0,
    )  # fmt: skip
    return RunSpec(identity=identity, terms=plain_terms(**{"steps": 300, "h": 10, **terms}))


nodes = st.sampled_from([A, B])


@settings(max_examples=examples(20), stateful_step_count=40)
class Fold(RuleBasedStateMachine):
    """Any journal: at any place, its records so far and one summary of them lead to the same state ever after. A copy
    goes its own way."""

    @initialize(fragments=st.integers(1, 3), slots=st.integers(1, 2))
    def begin(self, fragments: int, slots: int) -> None:
        self.whole = begun(small_run(fragments, min(fragments, slots)))
        self.resumed = self.whole.copy()
        self.seq = 0

    def apply(self, record: rec.Record) -> None:
        before = self.whole.copy()
        unchanged = rec.encode(before.saved())
        for ledger in (self.whole, self.resumed):
            ledger.apply(record)
        assert rec.encode(before.saved()) == unchanged

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

    @rule(epoch=st.integers(1, 9))
    def see(self, epoch: int) -> None:
        highest = max(epoch, self.whole.epoch_seen)
        self.apply(rec.EpochSeen(epoch=epoch))
        assert self.whole.epoch_seen == highest

    @rule(names=st.sets(st.sampled_from("abc")), time_s=st.floats(0, 1e9))
    def allow(self, names: set[str], time_s: float) -> None:
        keys = {rec.AllowedKey(node=NodeId(name), fingerprint=name) for name in names}
        if (changed := self.whole.keys_changed(keys, time_s)) is not None:
            self.apply(changed)
        assert self.whole.allowed.keys() == keys

    @invariant()
    def both_know_the_same(self) -> None:
        self.whole.check()
        whole, resumed = (
            [(blob, offer.window) for blob, offer in ledger.inputs.items()] for ledger in (self.whole, self.resumed)
        )
        assert resumed == whole and self.resumed == self.whole


TestFold = Fold.TestCase


def test_of_many_changes_of_the_keys_the_newest_stay_whole_and_of_older_ones_what_is_allowed(spec: RunSpec) -> None:
    ledger, first = begun(spec), rec.AllowedKey(node=A, fingerprint="first")
    for number in range(3 * KEY_CHANGES_KEPT):
        keys = {first, rec.AllowedKey(node=B, fingerprint=str(number))}
        changed = ledger.keys_changed(keys, float(number))
        assert changed is not None and ledger.keys_changed(ledger.allowed.keys(), 0.0) is None
        ledger.apply(changed)
    assert ledger.allowed[first] == 0.0 and len(ledger.keys) == KEY_CHANGES_KEPT + 1
    assert ledger.keys[0] == rec.KeysChanged(time_s=0.0, added=(first,), removed=())


def test_what_is_remembered_does_not_grow_with_the_run() -> None:
    """P: a summary opens every segment, and is as long after weeks as after a day."""
    ledger, sizes = begun(small_run(2, 2, steps=10**9, h=2)), []
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
    assert [ledger.evaluations[i].versions for i in (0, -1)] == [(1, 1), tuple(ledger.versions)], "the first is kept"
    assert len(ledger.rounds) < ROUNDS_KEPT + 5
    assert sizes[2] < 1.1 * sizes[1]
