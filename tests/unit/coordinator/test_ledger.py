"""What the journal says, as a fold: every record's effect, and a summary in the place of all records before it."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinator_run import A, B
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plain_runs import plain_offer, plain_terms
from slow_cases import examples
from stories import Scripted, StoryText, all_stories, check_story

from farloop.algo import schedule
from farloop.algo.outer_settings import PLAIN_AVERAGE, settings_of
from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import Fragment, Identity, Layout, Lease, NodeId, RunSpec
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import KEY_CHANGES_KEPT, ROUNDS_KEPT, Ledger
from farloop.wire.messages import AnchorRef, Drop, Share
from farloop.wire.reasons import Reason


def begun(spec: RunSpec, **terms: Any) -> Ledger:
    spec = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
    return Ledger.begin(rec.RunStarted(spec=spec, epoch=1, rounds=opening_rounds(spec)))


def stored(node: NodeId, window: int, *, fragment: int = 1, **changes: Any) -> rec.InputStored:
    return rec.InputStored.of(plain_offer(node, window, fragment=fragment, digest=5, **changes))


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


class Told(Scripted):
    """A ledger of terms of its own; of fragment 1, where no other is named. Its words:

    commits a update_size=1000 | commits ab drops=cLATE fragment=0 | commits n1,n2 stays=True
    next_round | fixes                      which is to be fixed; all that are
    stores b 3 | drops b 3 OVERLAP | holds_one b | inputs
    reason b 3 base=1                       why a delta for window 3 may not come
    starts a 0 | grants a 0 100 consumed=80 | leaves a CLOSED consumed=90 | left a | free
    resumes                                 from its summary
    served | updates 2 digest=7 | digest 5 | versions
    """

    def __init__(self, spec: RunSpec, **terms: Any) -> None:
        self.ledger = begun(spec, **terms)

    def commits(self, *merged: str, drops: str = "", fragment: int = 1, stays: bool = False, **changes: Any) -> None:
        names = merged[0].split(",") if merged and "," in merged[0] else [*"".join(merged)]
        changes["merged"] = tuple(Share(node=NodeId(name), weight=1.0) for name in names)
        changes["drops"] = (Drop(node=NodeId(drops[0]), reason=Reason[drops[1:]]),) if drops else ()
        if stays:
            window = self.ledger.windows[fragment]
            changes["next_window"] = dataclasses.replace(window, window=window.window + 1)
        self.ledger.apply(committed(self.ledger, fragment, **changes))
        self.ledger.check()

    def next_round(self) -> int | str:
        plan = self.ledger.next_round_to_fix()
        return plan.index if plan else "none"

    def fixes(self) -> None:
        while plan := self.ledger.next_round_to_fix():
            self.ledger.apply(rec.RoundFixed(round=plan))

    def closes(self, *merged: str, **changes: Any) -> None:
        """A commit, and the rounds that follow."""
        self.commits(*merged, **changes)
        self.fixes()

    def rounds(self) -> list[str]:
        return [f"{plan.start}+{plan.length}" for _, plan in sorted(self.ledger.rounds.items())]

    def stores(self, node: str, window: int, **changes: Any) -> None:
        self.ledger.apply(stored(NodeId(node), window, **changes))

    def drops(self, node: str, window: int, reason: str, **changes: Any) -> None:
        blob = stored(NodeId(node), window, **changes).blob
        self.ledger.apply(rec.InputDropped(blob=blob, reason=Reason[reason], detail=""))

    def inputs(self) -> list[str]:
        return [f"{blob.node} start {blob.incarnation} {blob.fragment}" for blob in self.ledger.inputs]

    def holds_one(self, node: str, fragment: int = 1) -> bool:
        return self.ledger.holds_one_of(NodeId(node), fragment)

    def reason(self, node: str, window: int, *, base: int | None = None) -> str:
        blob = stored(NodeId(node), window).blob
        blob = blob if base is None else dataclasses.replace(blob, version=base)
        reason = self.ledger.outcome_reason(blob, window)
        return reason.name if reason else "none"

    def starts(self, node: str, round_index: int, incarnation: int = 1) -> None:
        self.ledger.apply(rec.NodeStarted(node=NodeId(node), incarnation=incarnation, round=round_index))

    def grants(self, node: str, start: int, count: int, incarnation: int = 1, **known: int) -> None:
        lease = Lease(start=start, count=count)
        self.ledger.apply(rec.LeaseGranted(node=NodeId(node), incarnation=incarnation, lease=lease, **known))

    def leaves(self, node: str, reason: str, **known: int) -> None:
        self.ledger.apply(rec.NodeLeft(node=NodeId(node), reason=Reason[reason], **known))

    def left(self, node: str) -> int:
        return self.ledger.leases.outstanding(NodeId(node), 1)

    def started(self) -> list[str]:
        return [f"{node} start {known.incarnation} round {known.round}" for node, known in self.ledger.started.items()]

    def free(self) -> list[Lease]:
        return self.ledger.leases.returned

    def resumes(self) -> None:
        self.ledger = self.ledger.copy()

    def served(self, fragment: int = 1) -> int:
        return len(self.ledger.served(fragment))

    def updates(self, version: int, *, digest: int | None = None) -> list[int] | str:
        digest = digest or (101 if version == 0 else 1000 + version)
        found = self.ledger.updates_after(1, AnchorRef(fragment=1, version=version, digest=digest))
        return "a snapshot" if found is None else [update.version for update in found]

    def digest(self, version: int) -> str:
        return str(self.ledger.anchor_digest(1, version))


@all_stories(__file__, "ledger")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Told(spec, **story.settings).told, rewrite=rewrite)


# --- which deltas may come


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
