"""Deltas on their way in: what may come, what goes on where it stopped, what is void (protocol Q, W)."""

import dataclasses

import pytest

from farloop.algo import schedule
from farloop.algo.spec import BlobId, BlobKind, Contribution, Fragment, NodeId, RunSpec
from farloop.coordinator.decide.windows import Window
from farloop.coordinator.uploads import DeltaIntake, expected_delta
from farloop.quant.blob import blob_bytes
from farloop.quant.registry import codec_named
from farloop.wire.blobs import Reassembly
from farloop.wire.messages import Offer, Role
from farloop.wire.reasons import AlreadyUnderWay, LimitReached
from farloop.wire.session import Session, State

A = NodeId("a")


class Asked:
    """A session of which little is used: what it was asked for, and with what to go on; what is not wanted any more."""

    def __init__(self) -> None:
        self.expected: list[tuple[BlobId, Reassembly | None]] = []
        self.cancelled: list[BlobId] = []

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        if any(known == blob for known, _ in self.expected):
            raise AlreadyUnderWay("it is expected already")
        self.expected.append((blob, reassembly))
        return reassembly or Reassembly(size, digest)

    def cancel(self, blob: BlobId) -> None:
        self.cancelled.append(blob)


@pytest.fixture
def fragment(spec: RunSpec) -> Fragment:
    return spec.identity.layout.fragments[0]


@pytest.fixture
def window(spec: RunSpec) -> Window:
    return Window(terms=schedule.first_windows(spec.terms, spec.identity.layout)[0], expected={A})


@pytest.fixture
def offer(spec: RunSpec, fragment: Fragment) -> Offer:
    blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=A, incarnation=1, seq=1)
    contribution = Contribution(node=A, incarnation=1, base=0, steps=1, tokens=1, norm_sq=1.0)
    size = blob_bytes(codec_named(spec.terms.codecs.up), fragment)
    return Offer(blob=blob, size=size, digest=7, window=1, contributors=(contribution,))


def open_with(session: Session) -> None:
    """As a greeted node's is."""
    session._handshake.state = State.OPEN
    session._handshake.epoch = 1


def let_in(intake: DeltaIntake, session: Asked, offer: Offer, window: Window | None, fragment: Fragment) -> str | None:
    codec_up = window.terms.codec_up if window else "q4"
    return intake.let_in(session, offer, window, fragment, codec_up, 0.0)  # type: ignore[arg-type]


def test_a_delta_of_the_open_window_may_come(offer: Offer, window: Window, fragment: Fragment) -> None:
    intake, session = DeltaIntake(), Asked()
    assert let_in(intake, session, offer, window, fragment) is None
    assert session.expected == [(offer.blob, None)]
    assert intake.arrived(offer.blob) == offer


def test_a_wrong_size_is_told_before_a_byte_is_taken(offer: Offer, window: Window, fragment: Fragment) -> None:
    session = Asked()
    large = dataclasses.replace(offer, size=offer.size + 1)
    told = let_in(DeltaIntake(), session, large, window, fragment)
    assert told is not None and f"{offer.size + 1} bytes offered, {offer.size} are a" in told
    assert session.expected == []


def test_of_a_compressed_blob_the_size_is_bounded_from_above_alone(
    offer: Offer, window: Window, fragment: Fragment
) -> None:
    window = Window(terms=dataclasses.replace(window.terms, codec_up="q4r"), expected={A})
    most = blob_bytes(codec_named("q4r"), fragment)
    for size, taken in ((most + 1, False), (most, True), (most // 2, True)):
        session = Asked()
        told = let_in(DeltaIntake(), session, dataclasses.replace(offer, size=size), window, fragment)
        assert (told is None, bool(session.expected)) == (taken, taken)


def test_nothing_is_asked_for_once_the_window_is_over(offer: Offer, window: Window, fragment: Fragment) -> None:
    session = Asked()
    later = Window(terms=dataclasses.replace(window.terms, window=2))
    for over in (None, later):
        assert let_in(DeltaIntake(), session, offer, over, fragment) is None
    assert session.expected == []


def test_a_transfer_goes_on_in_the_next_session_where_it_stopped(
    offer: Offer, window: Window, fragment: Fragment
) -> None:
    """Q."""
    intake, first, second = DeltaIntake(), Asked(), Asked()
    let_in(intake, first, offer, window, fragment)
    let_in(intake, second, offer, window, fragment)
    (_, kept) = second.expected[0]
    assert kept is not None and kept.digest == offer.digest


def test_an_offer_made_twice_in_a_session_is_taken_once(offer: Offer, window: Window, fragment: Fragment) -> None:
    intake, session = DeltaIntake(), Asked()
    assert [let_in(intake, session, offer, window, fragment) for _ in range(2)] == [None, None]
    assert len(session.expected) == 1


def test_what_a_node_began_before_is_void(offer: Offer, window: Window, fragment: Fragment) -> None:
    """Q: it has one delta of a fragment under way."""
    intake, session = DeltaIntake(), Asked()
    let_in(intake, session, offer, window, fragment)
    newer = dataclasses.replace(offer, blob=dataclasses.replace(offer.blob, incarnation=2, seq=1))
    let_in(intake, session, newer, window, fragment)
    assert intake.arrived(offer.blob) is None
    assert intake.arrived(newer.blob) == newer
    let_in(intake, again := Asked(), offer, window, fragment)
    assert again.expected == [(offer.blob, None)]


def test_the_memory_of_what_is_void_is_given_back(offer: Offer, window: Window, fragment: Fragment) -> None:
    """R, W: by deltas that nobody wants any more a node could make the coordinator hold hundreds of each fragment."""
    intake, session = DeltaIntake(), Session(Role.COORDINATOR, 0.0)
    open_with(session)
    for seq in range(1, 5):
        blob = dataclasses.replace(offer.blob, seq=seq)
        let_in(intake, session, dataclasses.replace(offer, blob=blob), window, fragment)  # type: ignore[arg-type]
        with pytest.raises(AlreadyUnderWay, match="expected already"):
            session.expect(blob, offer.size, offer.digest, None, 0.0)
    for seq in range(1, 4):  # nothing is expected of these any more
        session.expect(dataclasses.replace(offer.blob, seq=seq), offer.size, offer.digest, None, 0.0)


def test_a_transfer_that_goes_on_is_not_cancelled(offer: Offer, window: Window, fragment: Fragment) -> None:
    intake, session, again = DeltaIntake(), Asked(), Asked()
    let_in(intake, session, offer, window, fragment)
    let_in(intake, again, offer, window, fragment)
    assert session.cancelled == again.cancelled == []


def test_while_it_is_made_durable_it_is_not_asked_for_again(offer: Offer, window: Window, fragment: Fragment) -> None:
    intake, session = DeltaIntake(), Asked()
    let_in(intake, session, offer, window, fragment)
    intake.arrived(offer.blob)
    let_in(intake, again := Asked(), offer, window, fragment)
    assert again.expected == []
    intake.settled(offer.blob)
    let_in(intake, again, offer, window, fragment)
    assert again.expected == [(offer.blob, None)]


def offer_of(offer: Offer, node: str, fragment: int = 0, seq: int = 1) -> Offer:
    """The same delta from another node."""
    blob = dataclasses.replace(offer.blob, node=NodeId(node), fragment=fragment, seq=seq)
    return dataclasses.replace(offer, blob=blob)


def test_a_delta_beyond_the_memory_for_all_waits_for_its_credit_and_is_not_refused(
    offer: Offer, window: Window, fragment: Fragment
) -> None:
    intake, session = DeltaIntake(most_bytes=2 * offer.size), Asked()
    a, b, c, d = (offer_of(offer, name) for name in "abcd")
    for one in (a, b, c, d):
        assert let_in(intake, session, one, window, fragment) is None
        intake.check()
    assert [blob for blob, _ in session.expected] == [a.blob, b.blob]
    assert intake.next() is None
    intake.arrived(b.blob)
    assert intake.next() == c and intake.next() == d, "the daemon lets each in before it asks for the next"
    let_in(intake, session, c, window, fragment)
    assert intake.held_bytes == 2 * offer.size


def test_one_node_has_a_memory_of_its_own_and_does_not_take_that_of_others(
    offer: Offer, window: Window, fragment: Fragment
) -> None:
    intake, session = DeltaIntake(most_bytes_of_a_node=offer.size), Asked()
    let_in(intake, session, offer_of(offer, "a"), window, fragment)
    second = offer_of(offer, "a", fragment=1)
    let_in(intake, session, second, window, fragment)
    let_in(intake, session, offer_of(offer, "b"), window, fragment)
    assert [(blob.node, blob.fragment) for blob, _ in session.expected] == [("a", 0), ("b", 0)]
    intake.arrived(offer_of(offer, "a").blob)
    assert intake.next() == second


def test_one_delta_may_always_come_however_large(offer: Offer, window: Window, fragment: Fragment) -> None:
    intake, session = DeltaIntake(most_bytes=1, most_bytes_of_a_node=1), Asked()
    let_in(intake, session, offer, window, fragment)
    assert len(session.expected) == 1
    intake.check()


def test_what_a_gone_session_left_half_done_makes_room(offer: Offer, window: Window, fragment: Fragment) -> None:
    """It would go on where it stopped, and nobody waits for that."""
    intake, session = DeltaIntake(most_bytes=offer.size), Asked()
    let_in(intake, session, offer_of(offer, "a"), window, fragment)
    let_in(intake, session, offer_of(offer, "b"), window, fragment)
    intake.parted(NodeId("b"))
    assert intake.next() is None, "b will offer it again"
    intake.parted(NodeId("a"))
    let_in(intake, session, offer_of(offer, "c"), window, fragment)
    assert [blob.node for blob, _ in session.expected] == ["a", "c"]
    intake.check()


def test_what_a_gone_session_left_of_a_window_that_is_over_is_let_go(
    offer: Offer, window: Window, fragment: Fragment
) -> None:
    intake, session = DeltaIntake(), Asked()
    let_in(intake, session, offer_of(offer, "a"), window, fragment)
    intake.parted(NodeId("a"))
    later = Window(terms=dataclasses.replace(window.terms, window=2), expected={A})
    newer = dataclasses.replace(offer_of(offer, "b"), window=2)
    let_in(intake, session, newer, later, fragment)
    assert intake.held_bytes == offer.size


def test_the_bytes_must_say_what_the_offer_said(spec: RunSpec, offer: Offer, fragment: Fragment) -> None:
    expect = expected_delta(offer, fragment, spec.terms.codecs.up, 3)
    assert (expect.fragment, expect.version, expect.base) == (fragment, 1, 0)
    assert (expect.newest_epoch, [codec.name for codec in expect.codecs]) == (3, [spec.terms.codecs.up])


class Crowded(Asked):
    """It takes one delta at a time."""

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        if any(known != blob for known, _ in self.expected):
            raise LimitReached("1 blobs are expected")
        return super().expect(blob, size, digest, reassembly, now)


def test_a_delta_beyond_what_a_session_takes_at_once_comes_later_and_is_not_taken_for_one_offered_twice(
    offer: Offer, spec: RunSpec, fragment: Fragment
) -> None:
    """It was never asked for again, and its window waited for it for ever."""
    intake, session = DeltaIntake(), Crowded()
    other = spec.identity.layout.fragments[1]
    terms = schedule.first_windows(spec.terms, spec.identity.layout)
    first, second = (Window(terms=terms[index], expected={A}) for index in (0, 1))
    later = dataclasses.replace(
        offer,
        blob=dataclasses.replace(offer.blob, fragment=1, seq=2),
        size=blob_bytes(codec_named(spec.terms.codecs.up), other),
    )
    let_in(intake, session, offer, first, fragment)
    let_in(intake, session, later, second, other)
    intake.check()
    assert [blob for blob, _ in session.expected] == [offer.blob]
    assert intake.next() is None, "nothing of this node has ended"
    session.expected.clear()
    intake.arrived(offer.blob)
    assert intake.next() == later
    let_in(intake, session, later, second, other)
    assert intake.arrived(later.blob) == later


def test_what_waits_for_a_crowded_session_ends_with_it(offer: Offer, window: Window, fragment: Fragment) -> None:
    intake, session = DeltaIntake(), Crowded()
    session.expected.append((dataclasses.replace(offer.blob, seq=99), None))
    let_in(intake, session, offer, window, fragment)
    intake.parted(A)
    intake.arrived(dataclasses.replace(offer.blob, seq=99))
    assert intake.next() is None
