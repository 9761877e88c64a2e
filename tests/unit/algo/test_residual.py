"""Whose residual the buffer holds: settled by outcomes, gone with a dropped delta, never sent twice (protocol E)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
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
    State,
    Tag,
    Tentative,
    Zero,
)
from farloop.algo.spec import BlobId, BlobKind, NodeId

FRAGMENT = 3
TAG = Tag(run="0123456789abcdef", fragment=FRAGMENT, codec="topk:k=64,beta=0.95", version=7)

Event = Callable[[Residual], list[Command]]


def fresh(*, durable: bool = True) -> Residual:
    return Residual(run=TAG.run, fragment=FRAGMENT, codec=TAG.codec, durable=durable)


def delta(seq: int, base: int = 6, incarnation: int = 1) -> BlobId:
    return BlobId(
        kind=BlobKind.DELTA, fragment=FRAGMENT, version=base, node=NodeId("a"), incarnation=incarnation, seq=seq
    )


def encoded(blob: BlobId) -> Event:
    return lambda residual: residual.encoded(blob)


def merged(blob: BlobId, version: int = 7) -> Event:
    return lambda residual: residual.merged(blob, version=version)


def dropped(blob: BlobId) -> Event:
    return lambda residual: residual.dropped(blob)


def restored(tag: Tag | None, version: int = 7) -> Event:
    return lambda residual: residual.restore(tag, version=version)


FIRST, SECOND = delta(1), delta(2, base=7)
RESET: Event = Residual.reset
SENT, MERGED = (encoded(FIRST), [Forget()]), (merged(FIRST), [Persist(tag=TAG)])
WAITS, HOLDS = Tentative(blob=FIRST), Settled(version=7)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        # It is settled once its delta is merged, and goes with a dropped one.
        ([SENT], WAITS),
        ([SENT, MERGED], HOLDS),
        ([SENT, (dropped(FIRST), [Zero()])], Empty()),
        ([SENT, (dropped(FIRST), [Zero()]), (merged(FIRST), [])], Empty()),
        # What is part of a blob is no longer on disk: after a crash it would be sent a second time.
        ([SENT, MERGED, (encoded(SECOND), [Forget()]), (encoded(delta(3)), [])], Tentative(blob=delta(3))),
        ([SENT, MERGED, (encoded(SECOND), [Forget()]), (dropped(SECOND), [Zero()])], Empty()),
        # A delta whose outcome never came is given up by the next.
        ([SENT, (encoded(SECOND), []), (merged(FIRST), []), (dropped(FIRST), [])], Tentative(blob=SECOND)),
        # Outcomes of other deltas, and repeated ones, change nothing.
        ([(merged(FIRST), []), (dropped(FIRST), [])], Empty()),
        *(
            ([SENT, (merged(other), []), (dropped(other), [])], WAITS)
            for other in (delta(2), delta(1, incarnation=0), delta(1, base=5))
        ),
        *(([SENT, MERGED, (merged(late, 9), []), (dropped(late), [])], HOLDS) for late in (FIRST, delta(2))),
        # A reset leaves nothing. An encoding that ends after it makes nothing usable: no outcome of its blob will come.
        ([(RESET, [Zero(), Forget()])], Empty()),
        ([SENT, (RESET, [Zero(), Forget()])], Empty()),
        ([SENT, MERGED, (RESET, [Zero(), Forget()])], Empty()),
        ([(RESET, [Zero(), Forget()]), (encoded(FIRST), [])], WAITS),
        # A copy on disk is taken up after a start, if it is of this run, fragment and codec and not too old.
        *(
            ([(restored(TAG, 7 + age), [Load()]), (encoded(SECOND), [Forget()])], Tentative(blob=SECOND))
            for age in range(R_STALE + 1)
        ),
        ([(restored(TAG), [Load()])], HOLDS),
        ([(restored(None), [])], Empty()),
        *(
            ([(restored(tag, version), [Forget()])], Empty())
            for tag, version in [
                (TAG, 7 + R_STALE + 1),
                (TAG, 6),
                (replace(TAG, version=-1), 0),
                (replace(TAG, run="fedcba9876543210"), 7),
                (replace(TAG, fragment=FRAGMENT + 1), 7),
                (replace(TAG, codec="topk:k=128,beta=0.95"), 7),
            ]
        ),
    ],
)
def test_what_is_done_with_a_residual(events: list[tuple[Event, list[Command]]], state: State) -> None:
    residual = fresh()
    for event, commands in events:
        assert event(residual) == commands
        residual.check()
    assert residual.state == state
    assert residual.usable == isinstance(state, Settled)


@pytest.mark.parametrize(
    ("events", "commands"),
    [([encoded(FIRST), merged(FIRST), RESET], [[], [], [Zero()]]), ([restored(TAG)], [[Forget()]])],
)
def test_only_a_durable_residual_goes_to_disk(events: list[Event], commands: list[list[Command]]) -> None:
    residual = fresh(durable=False)
    assert [event(residual) for event in events] == commands
    residual.check()


@pytest.mark.parametrize(
    ("events", "wrong"),
    [
        *(([event], restored(TAG)) for event in (encoded(FIRST), RESET, restored(TAG))),  # at a start alone
        ([], encoded(replace(FIRST, fragment=FRAGMENT + 1))),
        ([], encoded(replace(FIRST, kind=BlobKind.UPDATE))),
        ([encoded(SECOND)], merged(SECOND, 7)),  # a delta is part of a later version than its base
    ],
)
def test_what_cannot_happen_is_noticed_and_changes_nothing(events: list[Event], wrong: Event) -> None:
    residual = fresh()
    for event in events:
        event(residual)
    before = residual.state
    with pytest.raises(AssertionError):
        wrong(residual)
    assert residual.state == before


@pytest.mark.parametrize(("state", "copy"), [(WAITS, TAG), (HOLDS, None), (Empty(), TAG)])
def test_a_state_that_does_not_fit_the_disk_is_noticed(state: State, copy: Tag | None) -> None:
    residual = fresh()
    residual.state, residual.copy = state, copy
    with pytest.raises(AssertionError):
        residual.check()


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


@settings(max_examples=100, stateful_step_count=30)
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
