"""Covers `coordinator/downloads.py`: many joiners, few copies, and no version that leaves a gap (protocol R)."""

from hypothesis import given, settings
from hypothesis import strategies as st

from farloop.algo.spec import BlobId, BlobKind
from farloop.coordinator.downloads import MOST_UPDATES, EncodedSnapshot, SnapshotRequest, SnapshotService
from farloop.wire.blobs import BlobSource, BytesSource
from farloop.wire.messages import Committed
from farloop.wire.reasons import LimitReached

SIZE = 100


def size_of(fragment: int) -> int:
    return SIZE


def copy_of(fragment: int, version: int) -> EncodedSnapshot:
    blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=fragment, version=version)
    return EncodedSnapshot(blob=blob, data=bytearray(SIZE), digest=0)


def take(serving: SnapshotService, versions: list[int]) -> SnapshotRequest | None:
    """The next turn, encoded where it must be."""
    turn = serving.next(versions, size_of)
    if turn is not None and turn.copy is None:
        serving.encoded(turn, copy_of(turn.fragment, versions[turn.fragment]))
    serving.check()
    return turn


def test_joiners_of_one_moment_share_one_copy() -> None:
    serving = SnapshotService()
    for session in range(50):
        serving.ask(session, 0, 7)
    made = [take(serving, [7]) for _ in range(50)]
    assert [turn.copy is None for turn in made if turn] == [True] + 49 * [False]
    assert serving.held_bytes == SIZE and take(serving, [7]) is None


def test_a_session_is_sent_one_snapshot_at_a_time_and_sessions_take_turns() -> None:
    serving = SnapshotService()
    for fragment in (0, 1):
        for session in (1, 2):
            serving.ask(session, fragment, 0)
    turns = []
    for _ in range(4):
        turn = take(serving, [0, 0])
        assert turn is not None
        turns.append((turn.session, turn.fragment))
        if len(turns) == 2:
            assert take(serving, [0, 0]) is None
            serving.done(1)
            serving.done(2)
    assert turns == [(1, 0), (2, 0), (1, 1), (2, 1)]


def test_what_is_asked_for_again_and_again_is_sent_once() -> None:
    """A Fetch can be repeated at will."""
    serving = SnapshotService()
    for _ in range(1000):
        serving.ask(1, 0, 0)
    assert take(serving, [0]) is not None
    serving.ask(1, 0, 0)
    serving.done(1)
    assert take(serving, [0]) is None
    serving.ask(1, 0, 0)
    assert take(serving, [0]) is not None, "what was lost since may be asked for anew"


def test_copies_are_bounded_and_a_joiner_that_is_late_takes_an_older_one() -> None:
    """The version that stood when it asked, or any after: it hears of all commits from its welcome on."""
    serving = SnapshotService(most_bytes=2 * SIZE)
    for session in range(5):
        serving.ask(session, 0, 0)
    first, second, third, fourth = (take(serving, [version]) for version in range(4))
    assert first and first.copy is None and second and second.copy is None
    assert third and third.copy and third.copy.blob.version == 1, "the newest of those at hand"
    assert fourth and fourth.copy and fourth.copy.blob.version == 1
    serving.ask(9, 0, 2)
    serving.gone(4)
    assert take(serving, [4]) is None, "for who asked at version 2 an older one will not do"
    serving.done(0)
    assert (turn := take(serving, [4])) and turn.session == 9 and turn.copy is None
    assert serving.held_bytes == 2 * SIZE


def test_one_copy_is_allowed_however_large() -> None:
    serving = SnapshotService(most_bytes=1)
    serving.ask(1, 0, 0)
    serving.ask(2, 1, 0)
    assert take(serving, [0, 0]) is not None
    assert take(serving, [0, 0]) is None
    serving.gone(1)
    assert take(serving, [0, 0]) is not None


def test_a_copy_is_kept_for_the_next_joiner_until_its_version_is_old() -> None:
    serving = SnapshotService()
    serving.ask(1, 0, 3)
    take(serving, [3])
    serving.done(1)
    assert serving.held_bytes == SIZE
    serving.committed(0, 4)
    assert serving.held_bytes == 0


def test_what_cannot_be_sent_now_is_sent_after_the_next_that_ends() -> None:
    serving = SnapshotService()
    serving.ask(1, 0, 0)
    take(serving, [0])
    serving.put_off(1)
    assert (turn := take(serving, [0])) and (turn.session, turn.fragment) == (1, 0)


def test_a_session_that_ends_while_its_copy_is_made_leaves_nothing() -> None:
    serving = SnapshotService()
    serving.ask(1, 0, 0)
    turn = serving.next([0], size_of)
    assert turn is not None
    serving.gone(1)
    serving.encoded(turn, copy_of(0, 0))
    serving.check()
    assert serving.copy_for(1) is None


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_request_is_served_in_the_end_with_a_version_that_will_do(data: st.DataObject) -> None:
    serving, versions = SnapshotService(most_bytes=2 * SIZE), [0, 0]
    open_asks: dict[tuple[int, int], int] = {}
    sending: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 60))):
        step, session = (
            data.draw(st.sampled_from(["ask", "commit", "serve", "done", "gone"])),
            data.draw(st.integers(0, 4)),
        )
        fragment = data.draw(st.integers(0, 1))
        if step == "ask":
            serving.ask(session, fragment, versions[fragment])
            if sending.get(session) != fragment:
                open_asks.setdefault((session, fragment), versions[fragment])
        elif step == "commit":
            versions[fragment] += 1
            serving.committed(fragment, versions[fragment])
        elif step == "serve" and (turn := take(serving, versions)):
            copy = serving.copy_for(turn.session)
            assert copy is not None and copy.blob.version >= open_asks.pop((turn.session, turn.fragment))
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
    while turn := take(serving, versions):
        open_asks.pop((turn.session, turn.fragment))
        serving.done(turn.session)
    assert not open_asks


class Slow:
    """A session that takes nothing: what is pushed at it stays."""

    def __init__(self, most: int = 1000) -> None:
        self.queued: dict[BlobId, int] = {}
        self.most = most

    def unacknowledged(self, kind: BlobKind) -> dict[BlobId, int]:
        return {blob: size for blob, size in self.queued.items() if blob.kind is kind}

    def push_blob(self, blob: BlobId, source: BlobSource) -> None:
        if len(self.queued) >= self.most:
            raise LimitReached("no more at once")
        self.queued[blob] = source.size

    def cancel(self, blob: BlobId) -> None:
        del self.queued[blob]


def push(serving: SnapshotService, session: Slow, fragment: int, version: int, size: int = 10) -> bool:
    committed = Committed(
        fragment=fragment,
        version=version,
        size=size,
        digest=0,
        anchor_digest=0,
        merged=(),
        drops=(),
        next_window=None,
        rounds=(),
    )
    source = BytesSource(bytes(size))
    told = serving.push(session, 1, committed, lambda: source, SIZE)  # type: ignore[arg-type]
    serving.check()
    return told


def test_a_session_that_takes_no_updates_gets_a_snapshot_in_their_place() -> None:
    """256 of them ended the coordinator: a joiner behind a thin link did that within a minute."""
    serving, session = SnapshotService(), Slow()
    for version in range(1, 1001):
        for fragment in range(3):
            push(serving, session, fragment, version)
            assert len(session.queued) <= 3 * MOST_UPDATES
    for fragment in range(3):
        turn = take(serving, [1000, 1000, 1000])
        assert turn and turn.fragment == fragment
        copy = serving.copy_for(1)
        assert copy and copy.blob.version == 1000, "it stands for all that was dropped"
        serving.done(1)
    assert take(serving, [1000] * 3) is None
    assert not push(serving, session, 0, 1001) and len(session.queued) == 1, "and updates follow it again"


def test_updates_of_more_bytes_than_two_snapshots_are_dropped() -> None:
    serving, session = SnapshotService(), Slow()
    assert not push(serving, session, 0, 1, SIZE) and not push(serving, session, 0, 2, SIZE)
    assert push(serving, session, 0, 3, SIZE)
    assert session.queued == {}


def test_a_session_that_can_be_pushed_no_more_gets_a_snapshot() -> None:
    serving, session = SnapshotService(), Slow(most=5)
    assert [push(serving, session, fragment, 1) for fragment in range(7)] == 5 * [False] + 2 * [True]


def test_what_is_committed_while_a_snapshot_is_asked_for_is_in_it_and_what_comes_later_is_pushed() -> None:
    serving, session = SnapshotService(), Slow()
    serving.ask(1, 0, 0)
    push(serving, session, 0, 1)
    assert session.queued == {}
    assert take(serving, [1]) and serving.copy_for(1).blob.version == 1  # type: ignore[union-attr]
    push(serving, session, 0, 2)
    assert [blob.version for blob in session.queued] == [2]


def test_a_session_that_falls_behind_while_it_is_sent_a_snapshot_is_sent_another_after_it() -> None:
    serving, session = SnapshotService(), Slow()
    serving.ask(1, 0, 0)
    take(serving, [0])
    version = 0
    while not push(serving, session, 0, version := version + 1):
        pass
    assert session.queued == {} and take(serving, [version]) is None
    serving.done(1)
    assert take(serving, [version]) and serving.copy_for(1).blob.version == version  # type: ignore[union-attr]
