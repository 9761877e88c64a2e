"""Covers `coordinator/downloads.py`: many joiners, few copies, and no version that leaves a gap (protocol R)."""

from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import examples
from stories import Scripted, StoryText, all_stories, check_story

from farloop.algo.spec import BlobId, BlobKind
from farloop.coordinator.downloads import MOST_UPDATES, EncodedSnapshot, SnapshotRequest, SnapshotService
from farloop.wire.blobs import BlobSource, BytesSource
from farloop.wire.messages import Committed

SIZE = 100
"""Of every snapshot."""


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


class Serving(SnapshotService, Scripted):
    """Encodes what it must at once; session 1 is slow. `7` is version 7 of fragment 0, `3 0 7` what session 3 asks for
    in its stories, which have these words beside those of the service:

    turn 7 9        the next, where the fragments are at these versions
    push 0 7        whether an update for session 1 was dropped
    given_up        copies that are no longer kept
    """

    def __init__(self, copies: float = 1000) -> None:
        """There is room for so many."""
        self.given_up: list[int] = []
        super().__init__(lambda copy: self.given_up.append(copy.blob.version), int(copies * SIZE))
        self.slow = Slow()

    def turn(self, *versions: int) -> SnapshotRequest | None:
        turn = self.next(versions, lambda fragment: SIZE)
        if turn is not None and turn.copy is None:
            self.encoded(turn, copy_of(turn.fragment, versions[turn.fragment]))
        self.check()
        return turn

    def begin(self, *versions: int) -> None:
        """A copy is made."""
        self.begun, self.versions = self.next(versions, lambda fragment: SIZE), versions

    def end(self) -> None:
        assert self.begun is not None
        self.encoded(self.begun, copy_of(self.begun.fragment, self.versions[self.begun.fragment]))
        self.check()

    def sent(self, session: int) -> int:
        """The version of the copy that a session is being sent."""
        copy = self.copy_for(session)
        return -1 if copy is None else copy.blob.version

    def push(self, fragment: int, version: int, size: int = 10) -> bool:  # type: ignore[override]
        committed = Committed(
            fragment=fragment, version=version, size=size, digest=0, anchor_digest=0, merged=(), drops=(),
            next_window=None, rounds=(),
        )  # fmt: skip
        dropped = super().push(self.slow, 1, committed, lambda: BytesSource(bytes(size)), SIZE)  # type: ignore[arg-type]
        self.check()
        return dropped

    def pushed(self) -> list[str]:
        """What waits for session 1."""
        return [f"{blob.fragment}.{blob.version}" for blob in self.slow.queued]

    def text(self, found: Any) -> str:
        if not isinstance(found, SnapshotRequest):
            return super().text(found)
        kept = f", kept version {found.copy.blob.version}" if found.copy is not None else ""
        return f"{found.session} gets {found.fragment}{kept}"


def copy_of(fragment: int, version: int) -> EncodedSnapshot:
    blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=fragment, version=version)
    return EncodedSnapshot(blob=blob, data=bytearray(SIZE), digest=0)


@all_stories(__file__, "downloads")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Serving(**story.settings).told, rewrite=rewrite)


def test_what_is_asked_for_again_and_again_is_sent_once() -> None:
    """A Fetch can be repeated at will."""
    serving = Serving()
    for _ in range(1000):
        serving.ask(1, 0, 0)
    assert serving.turn(0) is not None
    serving.ask(1, 0, 0)
    serving.done(1)
    assert serving.turn(0) is None
    serving.ask(1, 0, 0)
    assert serving.turn(0) is not None, "what was lost since may be asked for anew"


@settings(max_examples=examples(60))
@given(st.data())
def test_every_request_is_served_in_the_end_with_a_version_that_will_do(data: st.DataObject) -> None:
    serving, versions = Serving(2), [0, 0]
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


def test_a_session_that_takes_no_updates_gets_a_snapshot_in_their_place() -> None:
    """256 of them ended the coordinator: a joiner behind a thin link did that within a minute."""
    serving = Serving()
    for version in range(1, 1001):
        for fragment in range(3):
            serving.push(fragment, version)
            assert len(serving.slow.queued) <= 3 * MOST_UPDATES
    for fragment in range(3):
        turn = serving.turn(1000, 1000, 1000)
        assert turn and turn.fragment == fragment
        assert serving.sent(1) == 1000, "it stands for all that was dropped"
        serving.done(1)
    assert serving.turn(1000, 1000, 1000) is None
    assert not serving.push(0, 1001) and serving.pushed() == ["0.1001"], "and updates follow it again"
