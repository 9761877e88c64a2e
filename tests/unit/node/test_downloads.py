"""Covers `node/link.py`: what of a broken session is kept, and for how long (protocol Q)."""

import dataclasses

from farloop.algo.spec import BlobId, BlobKind
from farloop.node.link import Downloads
from farloop.wire.blobs import Reassembly
from farloop.wire.reasons import AlreadyUnderWay, LimitReached
from farloop.wire.session import State


class Asked:
    """A session of which only `expect` and `cancel` are used."""

    state = State.OPEN

    def __init__(self, most: int = 256) -> None:
        self.expected: dict[BlobId, Reassembly | None] = {}
        self.most = most

    def cancel(self, blob: BlobId) -> None:
        del self.expected[blob]

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        if blob in self.expected:
            raise AlreadyUnderWay("it is expected already")
        if len(self.expected) >= self.most:
            raise LimitReached("no more at once")
        self.expected[blob] = reassembly
        return reassembly or Reassembly(size, digest)


def update(version: int, fragment: int = 0) -> BlobId:
    return BlobId(kind=BlobKind.UPDATE, fragment=fragment, version=version)


def snapshot(version: int) -> BlobId:
    return dataclasses.replace(update(version), kind=BlobKind.SNAPSHOT)


def announce(downloads: Downloads, session: Asked, *blobs: BlobId) -> list[bool]:
    return [downloads.announced(session, blob, 8, 1, 0.0) for blob in blobs]  # type: ignore[arg-type]


def end(downloads: Downloads, session: Asked, blob: BlobId) -> None:
    session.expected.pop(blob, None)
    downloads.ended(session, blob, 0.0)  # type: ignore[arg-type]


def test_a_transfer_that_broke_off_goes_on_in_the_next_session() -> None:
    downloads, again = Downloads(), Asked()
    announce(downloads, Asked(), update(1), update(2))
    downloads.session_over()
    announce(downloads, again, update(1), update(2))
    assert all(kept is not None for kept in again.expected.values())


def test_a_blob_announced_twice_in_a_session_comes_once() -> None:
    downloads = Downloads()
    assert announce(downloads, Asked(), update(1)) == [True]
    session = Asked()
    assert announce(downloads, session, update(2), update(2)) == [True, False]


def test_updates_that_a_snapshot_stands_for_are_not_kept() -> None:
    """They were cut off with the last session, and nobody will send their rest."""
    downloads = Downloads()
    announce(downloads, Asked(), update(1), update(2), update(1, fragment=1))
    downloads.session_over()
    announce(downloads, Asked(), snapshot(3))
    assert len(downloads) == 2, "the snapshot, and the other fragment's"


def test_what_this_session_brings_is_kept_whatever_is_announced_after_it() -> None:
    downloads = Downloads()
    announce(downloads, Asked(), update(1), update(2), update(3))
    assert len(downloads) == 3


def test_what_no_session_asks_for_again_goes_with_the_next() -> None:
    downloads = Downloads()
    announce(downloads, Asked(), snapshot(9))
    downloads.session_over()
    announce(downloads, Asked(), update(1, fragment=1))
    downloads.session_over()
    assert len(downloads) == 1


def test_what_is_here_is_not_half_here() -> None:
    downloads, session = Downloads(), Asked()
    announce(downloads, session, update(1), update(2))
    end(downloads, session, update(1))
    downloads.session_over()
    end(downloads, session, update(2))
    assert len(downloads) == 0


def test_a_snapshot_takes_the_place_of_the_updates_that_it_holds_even_of_those_on_their_way() -> None:
    """R: a coordinator has dropped those of a node that is behind, and they would be expected for ever."""
    downloads, session = Downloads(), Asked()
    announce(downloads, session, update(1), update(2), update(3), update(1, fragment=1))
    announce(downloads, session, snapshot(2))
    assert session.expected.keys() == {update(3), update(1, fragment=1), snapshot(2)}
    assert len(downloads) == 3


def test_more_blobs_than_a_session_takes_at_once_all_come_in_the_end() -> None:
    downloads, session = Downloads(), Asked(most=2)
    wanted = [update(1, fragment) for fragment in range(300)]
    assert all(announce(downloads, session, *wanted))
    came = []
    while session.expected:
        blob = next(iter(session.expected))
        came.append(blob)
        end(downloads, session, blob)
    assert came == wanted
    assert len(downloads) == 0


def test_what_waits_and_a_snapshot_holds_is_never_asked_for() -> None:
    downloads, session = Downloads(), Asked(most=2)
    announce(downloads, session, update(1), update(2), update(3), update(4))
    announce(downloads, session, snapshot(3))
    assert session.expected.keys() == {snapshot(3)}
    end(downloads, session, snapshot(3))
    assert session.expected.keys() == {update(4)}


def test_a_thousand_broken_sessions_leave_no_more_than_one_does() -> None:
    downloads = Downloads()
    for version in range(1000):
        announce(downloads, Asked(), *(update(version, fragment) for fragment in range(4)))
        downloads.session_over()
    assert len(downloads) == 4
