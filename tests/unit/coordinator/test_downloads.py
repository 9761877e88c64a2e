"""Covers `coordinator/downloads.py`: many joiners, few copies, and no version that leaves a gap (protocol R)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples

from farloop.algo.spec import BlobId, BlobKind
from farloop.coordinator.downloads import MOST_UPDATES, EncodedSnapshot, SnapshotRequest, SnapshotService
from farloop.wire.blobs import BlobSource, BytesSource
from farloop.wire.messages import Committed

SIZE = 100
"""Of every snapshot."""


class Serving(SnapshotService):
    """Encodes what it must at once."""

    def turn(self, *versions: int) -> SnapshotRequest | None:
        """The next, where the fragments are at these versions."""
        turn = self.next(versions, lambda fragment: SIZE)
        if turn is not None and turn.copy is None:
            self.encoded(turn, copy_of(turn.fragment, versions[turn.fragment]))
        self.check()
        return turn

    def sent(self, session: int) -> int:
        """The version of the copy that a session is being sent."""
        copy = self.copy_for(session)
        assert copy is not None
        return copy.blob.version

    def pushed(self, session: "Slow", fragment: int, version: int, size: int = 10) -> bool:
        """Whether an update for session 1 was dropped."""
        committed = Committed(
            fragment=fragment, version=version, size=size, digest=0, anchor_digest=0, merged=(), drops=(),
            next_window=None, rounds=(),
        )  # fmt: skip
        dropped = self.push(session, 1, committed, lambda: BytesSource(bytes(size)), SIZE)  # type: ignore[arg-type]
        self.check()
        return dropped


def copy_of(fragment: int, version: int) -> EncodedSnapshot:
    blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=fragment, version=version)
    return EncodedSnapshot(blob=blob, data=bytearray(SIZE), digest=0)


@pytest.fixture
def serving() -> Serving:
    return Serving()


def test_joiners_of_one_moment_share_one_copy_that_is_kept_until_its_version_is_old(serving: Serving) -> None:
    for session in range(50):
        serving.ask(session, 0, 7)
    made = [serving.turn(7) for _ in range(50)]
    assert [turn.copy is None for turn in made if turn] == [True] + 49 * [False]
    assert serving.held_bytes == SIZE and serving.turn(7) is None
    for session in range(50):
        serving.done(session)
    assert serving.held_bytes == SIZE, "for the next joiner"
    serving.committed(0, 8)
    assert serving.held_bytes == 0


def test_every_copy_that_is_no_longer_kept_is_told_once() -> None:
    gone: list[EncodedSnapshot] = []
    serving = Serving(SIZE, gone.append)  # there is room for one
    for version in (7, 8):
        serving.ask(1, 0, version)
        serving.turn(version)
        serving.done(1)
    assert [copy.blob.version for copy in gone] == [7]
    serving.committed(0, 9)
    assert [copy.blob.version for copy in gone] == [7, 8] and serving.held_bytes == 0


def test_a_session_is_sent_one_snapshot_at_a_time_and_sessions_take_turns(serving: Serving) -> None:
    for fragment in (0, 1):
        for session in (1, 2):
            serving.ask(session, fragment, 0)
    turns = []
    for _ in (0, 1):
        turns += [serving.turn(0, 0), serving.turn(0, 0)]
        assert serving.turn(0, 0) is None
        serving.done(1)
        serving.done(2)
    assert [(turn.session, turn.fragment) for turn in turns if turn] == [(1, 0), (2, 0), (1, 1), (2, 1)]


def test_what_is_asked_for_again_and_again_is_sent_once(serving: Serving) -> None:
    """A Fetch can be repeated at will."""
    for _ in range(1000):
        serving.ask(1, 0, 0)
    assert serving.turn(0) is not None
    serving.ask(1, 0, 0)
    serving.done(1)
    assert serving.turn(0) is None
    serving.ask(1, 0, 0)
    assert serving.turn(0) is not None, "what was lost since may be asked for anew"
    serving.put_off(1)
    assert (turn := serving.turn(0)) and turn.session == 1, "what cannot be sent now is sent after the next that ends"


def test_copies_are_bounded_and_a_joiner_that_is_late_takes_an_older_one() -> None:
    """The version that stood when it asked, or any after: it hears of all commits from its welcome on."""
    serving = Serving(most_bytes=2 * SIZE)
    for session in range(5):
        serving.ask(session, 0, 0)
    first, second, third, fourth = (serving.turn(version) for version in range(4))
    assert first and first.copy is None and second and second.copy is None
    assert third and third.copy and third.copy.blob.version == 1, "the newest of those at hand"
    assert fourth and fourth.copy and fourth.copy.blob.version == 1
    serving.ask(9, 0, 2)
    serving.gone(4)
    assert serving.turn(4) is None, "for who asked at version 2 an older one will not do"
    serving.done(0)
    assert (turn := serving.turn(4)) and turn.session == 9 and turn.copy is None
    assert serving.held_bytes == 2 * SIZE


def test_one_copy_is_allowed_however_large() -> None:
    serving = Serving(most_bytes=1)
    serving.ask(1, 0, 0)
    serving.ask(2, 1, 0)
    assert serving.turn(0, 0) is not None
    assert serving.turn(0, 0) is None
    serving.gone(1)
    assert serving.turn(0, 0) is not None


def test_a_session_that_ends_while_its_copy_is_made_leaves_nothing(serving: Serving) -> None:
    serving.ask(1, 0, 0)
    turn = serving.next([0], lambda fragment: SIZE)
    assert turn is not None
    serving.gone(1)
    serving.encoded(turn, copy_of(0, 0))
    serving.check()
    assert serving.copy_for(1) is None


@settings(max_examples=examples(60))
@given(st.data())
def test_every_request_is_served_in_the_end_with_a_version_that_will_do(data: st.DataObject) -> None:
    serving, versions = Serving(most_bytes=2 * SIZE), [0, 0]
    open_asks: dict[tuple[int, int], int] = {}
    sending: dict[int, int] = {}
    steps = st.tuples(st.sampled_from(["ask", "commit", "serve", "done", "gone"]), st.integers(0, 4), st.integers(0, 1))
    for step, session, fragment in data.draw(st.lists(steps, min_size=1, max_size=60)):
        if step == "ask":
            serving.ask(session, fragment, versions[fragment])
            if sending.get(session) != fragment:
                open_asks.setdefault((session, fragment), versions[fragment])
        elif step == "commit":
            versions[fragment] += 1
            serving.committed(fragment, versions[fragment])
        elif step == "serve" and (turn := serving.turn(*versions)):
            assert serving.sent(turn.session) >= open_asks.pop((turn.session, turn.fragment))
            sending[turn.session] = turn.fragment
        elif step == "done":
            serving.done(session)
            sending.pop(session, None)
        elif step == "gone":
            serving.gone(session)
            sending.pop(session, None)
            open_asks = {key: at for key, at in open_asks.items() if key[0] != session}
        serving.check()
    for session in sending:
        serving.done(session)
    while turn := serving.turn(*versions):
        open_asks.pop((turn.session, turn.fragment))
        serving.done(turn.session)
    assert not open_asks


# --- Sessions that are slow


class Slow:
    """A session that takes nothing: what is pushed at it stays."""

    def __init__(self) -> None:
        self.queued: dict[BlobId, int] = {}
        self.transfers = self

    def unacknowledged(self, kind: BlobKind) -> dict[BlobId, int]:
        return {blob: size for blob, size in self.queued.items() if blob.kind is kind}

    def push_blob(self, blob: BlobId, source: BlobSource) -> None:
        self.queued[blob] = source.size

    def cancel(self, blob: BlobId) -> None:
        del self.queued[blob]


def test_a_session_that_takes_no_updates_gets_a_snapshot_in_their_place(serving: Serving) -> None:
    """256 of them ended the coordinator: a joiner behind a thin link did that within a minute."""
    session = Slow()
    for version in range(1, 1001):
        for fragment in range(3):
            serving.pushed(session, fragment, version)
            assert len(session.queued) <= 3 * MOST_UPDATES
    for fragment in range(3):
        turn = serving.turn(1000, 1000, 1000)
        assert turn and turn.fragment == fragment
        assert serving.sent(1) == 1000, "it stands for all that was dropped"
        serving.done(1)
    assert serving.turn(1000, 1000, 1000) is None
    assert not serving.pushed(session, 0, 1001) and len(session.queued) == 1, "and updates follow it again"


def test_more_bytes_than_two_snapshots_are_dropped(serving: Serving) -> None:
    session = Slow()
    assert [serving.pushed(session, 0, version, SIZE) for version in (1, 2, 3)] == [False, False, True]
    assert session.queued == {}


def test_a_snapshot_has_what_was_committed_before_it_and_the_rest_is_pushed(serving: Serving) -> None:
    session = Slow()
    serving.ask(1, 0, 0)
    serving.pushed(session, 0, 1)
    assert session.queued == {}
    assert serving.turn(1) and serving.sent(1) == 1
    serving.pushed(session, 0, 2)
    assert [blob.version for blob in session.queued] == [2]
    version = 2
    while not serving.pushed(session, 0, version := version + 1):
        pass
    assert session.queued == {} and serving.turn(version) is None
    serving.done(1)
    assert serving.turn(version) and serving.sent(1) == version, "it fell behind again"
