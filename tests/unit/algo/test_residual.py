"""Whose residual the buffer holds: settled by outcomes, gone with a dropped delta, never sent twice (protocol E)."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from farloop.algo.error_feedback import (
    R_STALE,
    Command,
    Empty,
    Forget,
    Load,
    Persist,
    Residual,
    Settled,
    Tag,
    Tentative,
    Zero,
)
from farloop.algo.spec import BlobId, BlobKind, NodeId

FRAGMENT = 3
TAG = Tag(run="0123456789abcdef", fragment=FRAGMENT, codec="topk:k=64,beta=0.95", version=7)


def fresh(*, durable: bool = True) -> Residual:
    return Residual(run=TAG.run, fragment=FRAGMENT, codec=TAG.codec, durable=durable)


def delta(seq: int, base: int = 6, incarnation: int = 1) -> BlobId:
    return BlobId(
        kind=BlobKind.DELTA, fragment=FRAGMENT, version=base, node=NodeId("a"), incarnation=incarnation, seq=seq
    )


def test_a_residual_is_usable_once_its_delta_is_merged_and_not_before() -> None:
    residual = fresh(durable=False)
    assert (residual.state, residual.usable) == (Empty(), False)
    assert residual.encoded(delta(1)) == []
    assert (residual.state, residual.usable) == (Tentative(blob=delta(1)), False)
    assert residual.merged(delta(1), version=7) == []
    assert (residual.state, residual.usable) == (Settled(version=7), True)


def test_a_dropped_delta_takes_its_residual_along() -> None:
    residual = fresh()
    residual.encoded(delta(1))
    residual.merged(delta(1), version=7)
    residual.encoded(delta(2, base=7))
    assert residual.dropped(delta(2, base=7)) == [Zero()]
    assert (residual.state, residual.usable) == (Empty(), False)


def test_outcomes_of_other_deltas_and_repeated_ones_change_nothing() -> None:
    residual = fresh()
    for late in (delta(1), delta(2), delta(1, incarnation=0)):
        assert residual.merged(late, version=9) == residual.dropped(late) == []
    residual.encoded(delta(2))
    for late in (delta(1), delta(2, incarnation=0), delta(2, base=5)):
        assert residual.merged(late, version=9) == residual.dropped(late) == []
        assert residual.state == Tentative(blob=delta(2))
    residual.merged(delta(2), version=7)
    for late in (delta(1), delta(2)):
        assert residual.merged(late, version=9) == residual.dropped(late) == []
        assert residual.state == Settled(version=7)


def test_a_merge_that_comes_after_the_drop_does_not_bring_the_residual_back() -> None:
    residual = fresh()
    residual.encoded(delta(1))
    residual.dropped(delta(1))
    assert residual.merged(delta(1), version=7) == []
    assert not residual.usable


def test_a_delta_whose_outcome_never_came_is_given_up_by_the_next() -> None:
    residual = fresh()
    residual.encoded(delta(1))
    residual.encoded(delta(2))
    assert residual.merged(delta(1), version=7) == []
    assert residual.state == Tentative(blob=delta(2))


def test_an_encoding_that_ends_after_a_reset_makes_nothing_usable() -> None:
    """Its blob is forgotten, so that no outcome of it will come; the next encoder does not read what it wrote."""
    residual = fresh()
    residual.reset()
    residual.encoded(delta(1))
    assert not residual.usable
    residual.encoded(delta(2))
    assert not residual.usable


def test_only_a_durable_residual_goes_to_disk() -> None:
    for durable, wanted in ((True, [Persist(tag=TAG)]), (False, [])):
        residual = fresh(durable=durable)
        residual.encoded(delta(1))
        assert residual.merged(delta(1), version=7) == wanted
        residual.check()


def test_a_residual_that_is_part_of_a_blob_is_no_longer_on_disk() -> None:
    """After a crash it would be sent a second time, even where the blob was dropped."""
    residual = fresh()
    residual.encoded(delta(1))
    residual.merged(delta(1), version=7)
    assert residual.encoded(delta(2, base=7)) == [Forget()]
    assert residual.encoded(delta(3, base=7)) == []


def test_a_copy_of_an_earlier_start_that_nobody_asked_for_goes_with_the_first_delta() -> None:
    assert fresh().encoded(delta(1)) == [Forget()]
    assert fresh(durable=False).encoded(delta(1)) == []


@pytest.mark.parametrize("durable", [True, False])
def test_a_reset_leaves_nothing_in_memory_or_on_disk(durable: bool) -> None:
    wanted = [Zero(), Forget()] if durable else [Zero()]
    residual = fresh(durable=durable)
    assert residual.reset() == wanted
    residual.encoded(delta(1))
    assert (residual.reset(), residual.state) == (wanted, Empty())
    residual.encoded(delta(2))
    residual.merged(delta(2), version=7)
    assert (residual.reset(), residual.state) == (wanted, Empty())
    residual.check()


@pytest.mark.parametrize("age", range(R_STALE + 1))
def test_a_copy_on_disk_is_taken_up_after_a_start(age: int) -> None:
    residual = fresh()
    assert residual.restore(TAG, version=TAG.version + age) == [Load()]
    assert (residual.state, residual.usable) == (Settled(version=TAG.version), True)
    residual.check()
    assert residual.encoded(delta(1, base=7 + age)) == [Forget()]


@pytest.mark.parametrize(
    ("tag", "version"),
    [
        (TAG, TAG.version + R_STALE + 1),
        (TAG, TAG.version - 1),
        (replace(TAG, version=-1), 0),
        (replace(TAG, run="fedcba9876543210"), TAG.version),
        (replace(TAG, fragment=FRAGMENT + 1), TAG.version),
        (replace(TAG, codec="topk:k=128,beta=0.95"), TAG.version),
    ],
    ids=["stale", "of the future", "of no version", "run", "fragment", "codec"],
)
def test_a_copy_of_something_else_is_removed(tag: Tag, version: int) -> None:
    residual = fresh()
    assert residual.restore(tag, version=version) == [Forget()]
    assert residual.state == Empty()
    residual.check()


def test_a_codec_without_durable_residuals_takes_none_up() -> None:
    assert fresh(durable=False).restore(TAG, version=TAG.version) == [Forget()]


def test_where_nothing_is_on_disk_a_node_starts_without_a_residual() -> None:
    residual = fresh()
    assert residual.restore(None, version=7) == []
    assert residual.state == Empty()


def test_a_copy_is_restored_at_a_start_alone() -> None:
    used, reset, restored = fresh(), fresh(), fresh()
    used.encoded(delta(1))
    reset.reset()
    restored.restore(TAG, version=7)
    for residual in (used, reset, restored):
        before = residual.state
        with pytest.raises(AssertionError):
            residual.restore(TAG, version=7)
        assert residual.state == before


def test_what_is_no_delta_of_the_fragment_is_refused() -> None:
    for wrong in (replace(delta(1), fragment=FRAGMENT + 1), replace(delta(1), kind=BlobKind.UPDATE)):
        residual = fresh()
        with pytest.raises(AssertionError):
            residual.encoded(wrong)
        assert residual.state == Empty()


def test_a_delta_is_part_of_a_later_version_than_its_base() -> None:
    residual = fresh()
    residual.encoded(delta(1, base=7))
    with pytest.raises(AssertionError):
        residual.merged(delta(1, base=7), version=7)
    assert residual.state == Tentative(blob=delta(1, base=7))


def test_a_copy_beside_an_undecided_delta_is_noticed() -> None:
    residual = fresh()
    residual.encoded(delta(1))
    residual.copy = TAG
    with pytest.raises(AssertionError, match="part of what was sent"):
        residual.check()


def test_a_settled_residual_that_is_not_on_disk_is_noticed() -> None:
    residual = fresh()
    residual.state = Settled(version=7)
    with pytest.raises(AssertionError):
        residual.check()


@given(
    deltas=st.lists(st.lists(st.integers(-1000, 1000), min_size=4, max_size=4), max_size=20),
    keep=st.integers(0, 4),
)
def test_with_beta_one_and_all_merged_nothing_is_lost(deltas: list[list[int]], keep: int) -> None:
    """Σ decoded + residual = Σ delta; the codec sends the `keep` largest of four elements, halved."""
    residual, buffer, sent = fresh(), [0] * 4, [0] * 4
    for seq, taken in enumerate(deltas):
        v = [d + e if residual.usable else d for d, e in zip(taken, buffer, strict=True)]
        largest = sorted(range(4), key=lambda i: -abs(v[i]))[:keep]
        decoded = [v[i] // 2 if i in largest else 0 for i in range(4)]
        buffer = [a - b for a, b in zip(v, decoded, strict=True)]
        residual.encoded(delta(seq, base=seq))
        sent = [a + b for a, b in zip(sent, decoded, strict=True)]
        residual.merged(delta(seq, base=seq), version=seq + 1)
        total = [sum(column) for column in zip(*deltas[: seq + 1], strict=True)]
        assert [a + b for a, b in zip(sent, buffer, strict=True)] == total


Work = frozenset[int]
"""What is sent, as a set of grains that can be told apart: every inner step adds new ones, a codec sends some."""

GARBAGE: Work = frozenset({-1})


@dataclass(slots=True)
class Sent:
    """The coordinator's view of one delta, and the one outcome that it gets."""

    blob: BlobId
    payload: Work
    merged_in: int | None = None
    dropped: bool = False


@settings(max_examples=200, stateful_step_count=30)
class Feedback(RuleBasedStateMachine):
    """A node and its disk, a coordinator, and a network that delays, repeats and loses outcomes; β = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.version, self.incarnation, self.seq, self.grains = 0, 1, 0, 0
        self.sent: list[Sent] = []
        self.gone: Work = frozenset()
        """Grains that were given up: with a drop, a reset, a crash, or a delta whose outcome never came."""
        self.disk: tuple[Tag, Work] | None = None

    @initialize(durable=st.booleans())
    def start(self, durable: bool) -> None:
        self.durable = durable
        self.residual, self.buffer = fresh(durable=durable), GARBAGE

    @property
    def undecided(self) -> list[Sent]:
        return [sent for sent in self.sent if sent.merged_in is None and not sent.dropped]

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Zero():
                    self.buffer = frozenset()
                case Persist(tag=tag):
                    self.disk = (tag, self.buffer)
                case Forget():
                    self.disk = None
                case Load():
                    assert self.disk is not None
                    self.buffer = self.disk[1]

    @property
    def held(self) -> Work:
        """What the buffer holds and the machine vouches for."""
        return frozenset() if self.residual.state == Empty() else self.buffer

    @rule(data=st.data(), outcome=st.sampled_from(["merged", "dropped", "open"]))
    def send(self, data: st.DataObject, outcome: str) -> None:
        """The buffer is read where it is usable, and overwritten; mostly the outcome comes at once."""
        work = frozenset(range(self.grains, self.grains + 3))
        self.grains += 3
        if self.residual.usable:
            assert self.sent[-1].merged_in is not None, "the residual of a delta that may yet be dropped"
            work |= self.buffer
        else:
            self.gone |= self.held
        payload = frozenset(data.draw(st.sets(st.sampled_from(sorted(work)))))
        self.buffer = work - payload
        self.seq += 1
        blob = delta(self.seq, base=self.version, incarnation=self.incarnation)
        self.carry_out(self.residual.encoded(blob))
        self.sent.append(Sent(blob=blob, payload=payload))
        if outcome != "open":
            self.decide(self.sent[-1], outcome == "merged")
            self.tell(self.sent[-1])

    def decide(self, sent: Sent, merge: bool) -> None:
        """At the coordinator; the node does not know yet."""
        if merge:
            self.version += 1
            sent.merged_in = self.version
        else:
            sent.dropped = True

    def tell(self, sent: Sent) -> None:
        """An outcome arrives."""
        held, blob = self.held, sent.blob
        is_current = self.residual.state == Tentative(blob=blob)
        if sent.merged_in is not None:
            self.carry_out(self.residual.merged(blob, version=sent.merged_in))
            assert self.held == held
            assert not is_current or self.residual.usable
        else:
            self.carry_out(self.residual.dropped(blob))
            assert self.held == (frozenset() if is_current else held)
            self.gone |= held - self.held

    @rule(merge=st.booleans(), data=st.data())
    def decide_any(self, merge: bool, data: st.DataObject) -> None:
        if undecided := self.undecided:
            self.decide(data.draw(st.sampled_from(undecided)), merge)

    @rule(data=st.data())
    def tell_any(self, data: st.DataObject) -> None:
        """In any order, any number of times."""
        if decided := [sent for sent in self.sent if sent not in self.undecided]:
            self.tell(data.draw(st.sampled_from(decided)))

    @rule()
    def rejoin(self) -> None:
        """A snapshot comes, and what was being encoded for the old anchor is written after it."""
        self.gone |= self.held
        self.carry_out(self.residual.reset())
        assert self.buffer == frozenset() and self.disk is None
        self.buffer = GARBAGE

    @rule(away=st.integers(0, R_STALE + 2))
    def crash_and_restart(self, away: int) -> None:
        self.version += away
        self.incarnation += 1
        held = self.held
        settled = self.residual.state if isinstance(self.residual.state, Settled) else None
        self.residual, self.buffer = fresh(durable=self.durable), GARBAGE
        self.carry_out(self.residual.restore(self.disk[0] if self.disk else None, version=self.version))
        expected = self.durable and settled is not None and self.version - settled.version <= R_STALE
        assert self.held == (held if expected else frozenset())
        self.gone |= held - self.held

    @invariant()
    def the_machine_agrees_with_the_disk(self) -> None:
        self.residual.check()
        assert self.residual.copy == (self.disk[0] if self.disk else None)
        assert self.disk is None or self.disk[1] == self.buffer

    @invariant()
    def every_grain_is_in_one_place(self) -> None:
        """Sent once, or still held, or given up: so with nothing given up, Σ decoded + residual = Σ delta; and what a
        dropped payload held never enters again."""
        assert GARBAGE.isdisjoint(self.held)
        places = [*(sent.payload for sent in self.sent), self.held, self.gone]
        assert sorted(grain for place in places for grain in place) == list(range(self.grains))


TestFeedback = Feedback.TestCase
