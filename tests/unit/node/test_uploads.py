"""Covers `node/link.py`: every delta is offered in the end, however many are due at once."""

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.node.link import Uploads
from farloop.wire.blobs import BlobSource
from farloop.wire.messages import Offer
from farloop.wire.reasons import AlreadyUnderWay, LimitReached
from farloop.wire.session import State


class Taking:
    """A session that sends so many blobs at once."""

    state = State.OPEN

    def __init__(self, most: int) -> None:
        self.most = most
        self.sending: list[BlobId] = []
        self.offered: list[BlobId] = []

    def send_blob(self, offer: Offer, source: BlobSource) -> None:
        if offer.blob in self.sending:
            raise AlreadyUnderWay("it is being sent")
        if len(self.sending) >= self.most:
            raise LimitReached("no more at once")
        self.sending.append(offer.blob)
        self.offered.append(offer.blob)


def delta(fragment: int, seq: int) -> Offer:
    blob = BlobId(kind=BlobKind.DELTA, fragment=fragment, version=0, node=NodeId("a"), incarnation=1, seq=seq)
    return Offer(blob=blob, size=1, digest=0)


def test_the_257th_delta_is_offered_when_another_has_ended() -> None:
    uploads, session = Uploads(), Taking(256)
    for seq in range(300):
        uploads.offer(session, delta(seq, seq), bytearray(1))  # type: ignore[arg-type]
    assert len(session.offered) == 256 and len(uploads) == 44
    while session.sending:
        session.sending.pop(0)
        uploads.go_on(session)  # type: ignore[arg-type]
    assert [blob.seq for blob in session.offered] == list(range(300))
    assert len(uploads) == 0


def test_a_delta_that_is_offered_twice_is_sent_once() -> None:
    uploads, session = Uploads(), Taking(256)
    for _ in range(2):
        uploads.offer(session, delta(0, 1), bytearray(1))  # type: ignore[arg-type]
    assert len(session.offered) == 1 and len(uploads) == 0


def test_a_newer_delta_of_a_fragment_takes_the_place_of_one_that_waits() -> None:
    uploads, session = Uploads(), Taking(1)
    for offer in (delta(0, 1), delta(1, 2), delta(1, 3)):
        uploads.offer(session, offer, bytearray(1))  # type: ignore[arg-type]
    session.sending.clear()
    uploads.go_on(session)  # type: ignore[arg-type]
    assert [blob.seq for blob in session.offered] == [1, 3]


def test_what_waits_ends_with_its_session() -> None:
    uploads, session = Uploads(), Taking(0)
    uploads.offer(session, delta(0, 1), bytearray(1))  # type: ignore[arg-type]
    uploads.session_over()
    assert len(uploads) == 0
