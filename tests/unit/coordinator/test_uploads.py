"""Covers `coordinator/uploads.py`: deltas on their way in (protocol P, Q, W).

What may come, what goes on where it stopped, what is void; every delta that came ends in one event, and its bytes are
kept until then.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from plain_runs import plain_offer
from virtual_files import VirtualFiles
from virtual_host import VirtualHost

from farloop.algo import schedule
from farloop.algo.spec import BlobId, NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.windows import Window
from farloop.coordinator.storage.storage_queue import StorageQueue
from farloop.coordinator.storage.store import Store
from farloop.coordinator.uploads import DeltaIntake, DeltaUploads, verify
from farloop.quant.blob import HEADER_BYTES, BlobHeader, Expected, Parsed, blob_bytes, pack_blob, parse_blob
from farloop.quant.digest import digest
from farloop.quant.registry import codec_named
from farloop.wire.blobs import Reassembly, blob_digest
from farloop.wire.messages import Offer, Role
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, Reason
from farloop.wire.session import Session, State

A, B = NodeId("a"), NodeId("b")


class Asked:
    """A session of which little is used: what it was asked for, and with what to go on; what is not wanted any more."""

    def __init__(self, most: int = 1000) -> None:
        self.expected: list[tuple[BlobId, Reassembly | None]] = []
        self.cancelled: list[BlobId] = []
        self.most = most

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        if blob in self.blobs:
            raise AlreadyUnderWay("it is expected already")
        if len(self.expected) >= self.most:
            raise LimitReached("1 blobs are expected")
        self.expected.append((blob, reassembly))
        return reassembly or Reassembly(size, digest)

    def cancel(self, blob: BlobId) -> None:
        self.cancelled.append(blob)

    @property
    def blobs(self) -> list[BlobId]:
        return [blob for blob, _ in self.expected]


class Door:
    """The deltas of a run that has just begun; `offer` is node a's of fragment 0."""

    def __init__(self, spec: RunSpec) -> None:
        self.layout, self.terms = spec.identity.layout, spec.terms
        self.windows = schedule.first_windows(spec.terms, self.layout)
        self.session = Asked()
        self.offer = self.of(A)
        self.limit()

    def limit(self, **bounds: int) -> None:
        self.intake = DeltaIntake(**bounds)

    def of(self, node: NodeId, fragment: int = 0, seq: int = 1, **blob: int) -> Offer:
        size = blob_bytes(codec_named(self.terms.codecs.up), self.layout.fragments[fragment])
        offer = plain_offer(node, fragment=fragment, seq=seq, size=size, digest=7)
        return dataclasses.replace(offer, blob=dataclasses.replace(offer.blob, **blob))

    def let_in(self, *offers: Offer, session: object = None, **terms: object) -> str | None:
        """What the last of them is told."""
        told = None
        for offer in offers:
            fragment = offer.blob.fragment
            window = Window(terms=dataclasses.replace(self.windows[fragment], **terms), expected={A})  # type: ignore[arg-type]
            told = self.intake.admit(
                session or self.session,  # type: ignore[arg-type]
                offer,
                window,
                self.layout.fragments[fragment],
                window.terms.codec_up,
                0.0,
            )
            self.intake.check()
        return told


@pytest.fixture
def door(spec: RunSpec) -> Door:
    return Door(spec)


# --- What may come


def test_a_delta_of_the_open_window_may_come_and_one_of_a_window_that_is_over_is_not_asked_for(door: Door) -> None:
    assert door.let_in(door.offer, window=2) is None
    assert door.intake.admit(door.session, door.offer, None, door.layout.fragments[0], "q4", 0.0) is None  # type: ignore[arg-type]
    assert door.session.expected == []
    assert door.let_in(door.offer) is None
    assert door.session.blobs == [door.offer.blob]
    assert door.intake.arrived(door.offer.blob) == door.offer


@pytest.mark.parametrize(("codec", "more", "taken"), [("q4", 1, False), ("q4", -1, False), ("q4r", 1, False),
                                                      ("q4r", 0, True), ("q4r", -300, True)])  # fmt: skip
def test_a_wrong_size_is_told_before_a_byte_is_taken(door: Door, codec: str, more: int, taken: bool) -> None:
    """Of a compressed blob the size is bounded from above alone."""
    size = blob_bytes(codec_named(codec), door.layout.fragments[0]) + more
    told = door.let_in(dataclasses.replace(door.offer, size=size), codec_up=codec)
    assert (told is None, bool(door.session.expected)) == (taken, taken)
    assert told is None or f"{size} bytes offered" in told


def test_a_transfer_goes_on_in_the_next_session_where_it_stopped(door: Door) -> None:
    """Q. An offer made twice in a session is taken once."""
    second = Asked()
    door.let_in(door.offer, door.offer)
    door.let_in(door.offer, session=second)
    assert door.session.blobs == [door.offer.blob]
    ((_, kept),) = second.expected
    assert kept is not None and kept.digest == door.offer.digest
    assert kept is door.session.expected[0][1]
    assert door.session.cancelled == second.cancelled == []


def test_what_a_node_began_before_is_void(door: Door) -> None:
    """Q: it has one delta of a fragment under way."""
    newer, again = door.of(A, incarnation=2), Asked()
    door.let_in(door.offer, newer)
    assert door.intake.arrived(door.offer.blob) is None
    assert door.intake.arrived(newer.blob) == newer
    door.let_in(door.offer, session=again)
    assert again.blobs == [door.offer.blob] and again.expected[0][1] is not door.session.expected[0][1]


def test_the_memory_of_what_is_void_is_given_back(door: Door) -> None:
    """R, W: by deltas that are void a node could make the coordinator hold hundreds of each fragment."""
    session = Session(Role.COORDINATOR, 0.0)
    session._handshake.state, session._handshake.epoch = State.OPEN, 1
    offers = [door.of(A, seq=seq) for seq in range(1, 5)]
    for offer in offers:
        door.let_in(offer, session=session)
        with pytest.raises(AlreadyUnderWay, match="expected already"):
            session.expect(offer.blob, offer.size, offer.digest, None, 0.0)
    for offer in offers[:3]:  # nothing is expected of these any more
        session.expect(offer.blob, offer.size, offer.digest, None, 0.0)


def test_while_it_is_made_durable_it_is_not_asked_for_again(door: Door) -> None:
    again = Asked()
    door.let_in(door.offer)
    door.intake.arrived(door.offer.blob)
    door.let_in(door.offer, session=again)
    assert again.expected == []
    door.intake.on_outcome(door.offer.blob)
    door.let_in(door.offer, session=again)
    assert again.blobs == [door.offer.blob] and again.expected[0][1] is not door.session.expected[0][1]


# --- Bounds of memory


def test_a_delta_beyond_the_memory_for_all_waits_for_its_credit_and_is_not_refused(door: Door) -> None:
    door.limit(most_bytes=2 * door.offer.size)
    a, b, c, d = (door.of(NodeId(name)) for name in "abcd")
    assert door.let_in(a, b, c, d) is None
    assert door.session.blobs == [a.blob, b.blob]
    assert door.intake.next() is None
    door.intake.arrived(b.blob)
    assert door.intake.next() == c and door.intake.next() == d, "the daemon lets each in before it asks for the next"
    door.let_in(c)
    assert door.intake.held_bytes == 2 * door.offer.size


def test_one_node_has_a_memory_of_its_own_and_does_not_take_that_of_others(door: Door) -> None:
    door.limit(most_bytes_of_a_node=door.offer.size)
    first, second, other = door.of(A), door.of(A, fragment=1), door.of(B)
    door.let_in(first, second, other)
    assert door.session.blobs == [first.blob, other.blob]
    door.intake.arrived(first.blob)
    assert door.intake.next() == second


def test_one_delta_may_always_come_however_large(door: Door) -> None:
    door.limit(most_bytes=1, most_bytes_of_a_node=1)
    door.let_in(door.offer)
    assert door.session.blobs == [door.offer.blob]


def test_what_a_gone_session_left_half_done_makes_room(door: Door) -> None:
    """It would go on where it stopped, and no window waits for that."""
    door.limit(most_bytes=door.offer.size)
    door.let_in(door.of(A), door.of(B))
    door.intake.on_disconnect(B)
    assert door.intake.next() is None, "b will offer it again"
    door.intake.on_disconnect(A)
    door.let_in(door.of(NodeId("c")))
    assert [blob.node for blob in door.session.blobs] == ["a", "c"]
    door.intake.on_disconnect(NodeId("c"))
    door.let_in(dataclasses.replace(door.of(B), window=2), window=2)
    assert door.intake.held_bytes == door.offer.size, "nor is what is left of a window that is over kept"


def test_a_delta_beyond_what_a_session_takes_at_once_comes_later(door: Door) -> None:
    """It was never asked for again, and its window waited for it for ever."""
    door.session.most = 1
    later = door.of(A, fragment=1, seq=2)
    door.let_in(door.offer, later)
    assert door.session.blobs == [door.offer.blob]
    assert door.intake.next() is None, "nothing of this node has ended"
    door.session.expected.clear()
    door.intake.arrived(door.offer.blob)
    assert door.intake.next() == later
    door.let_in(later)
    assert door.intake.arrived(later.blob) == later


def test_what_waits_for_a_crowded_session_ends_with_it(door: Door) -> None:
    door.session.most = 1
    under_way = door.of(A, seq=99)
    door.session.expected.append((under_way.blob, None))
    door.let_in(door.offer)
    door.intake.on_disconnect(A)
    door.intake.arrived(under_way.blob)
    assert door.intake.next() is None


# --- What came

ANCHORS = [torch.zeros(512), torch.zeros(256)]


@pytest.fixture
def run(spec: RunSpec) -> RunSpec:
    digests = tuple(digest(anchor) for anchor in ANCHORS)
    return dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, anchor_digests=digests))


def delta(spec: RunSpec, codec: str) -> tuple[Offer, bytearray]:
    fragment, coder = spec.identity.layout.fragments[0], codec_named(codec)
    header = BlobHeader(codec=coder, fragment=fragment, version=1, base=0, epoch=1)
    data = pack_blob(header, coder.encode(torch.ones(fragment.numel), fragment, seed=header.seed))
    return plain_offer(A, fragment=0, size=len(data), digest=blob_digest(data)), data


class Desk(VirtualHost):
    """The uploads of a run that has just begun."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self.store = Store.create(Path("/state"), spec, ANCHORS, files=VirtualFiles())
        self.queue = StorageQueue(self.store, self.storage, self.clock, {}, self.fatal)
        self.uploads, self.session = self.begin(), Asked()

    def begin(self) -> DeltaUploads:
        return DeltaUploads(self.store, self.queue, self.compute, self.clock)

    def let_in(self, offer: Offer) -> ev.InputFailed | None:
        window = Window(terms=self.store.ledger.windows[0], expected={A})
        return self.uploads.receive(self.session, offer, window)  # type: ignore[arg-type]

    def keep(self, offer: Offer, data: bytearray) -> list[ev.Event]:
        told: list[ev.Event] = []
        self.uploads.store(offer, data, told.append, self.fatal)
        self.run()
        return told


def test_a_delta_is_let_in_verified_durable_and_kept_until_it_is_forgotten(run: RunSpec) -> None:
    """P: durable before it counts."""
    desk, (offer, data) = Desk(run), delta(run, run.terms.codecs.up)
    assert desk.let_in(offer) is None and desk.session.blobs == [offer.blob]
    assert desk.uploads.arrived(offer.blob) == offer
    (kept,) = desk.keep(offer, data)
    assert isinstance(kept, ev.InputStored) and kept.offer.blob == offer.blob
    assert desk.store.read_input(offer.blob) == data
    draft = rec.WindowCommitted(
        fragment=0, version=1, round=0, merged=(), drops=(), blobs=(rec.Addend(blob=offer.blob, weight=0.5),),
        anchor_digest=0, target_digest=0, momentum_digest=None, next_window=None, update_size=0, update_digest=0,
        outer_lr=1.0, outer_momentum=0.0, why="",
    )  # fmt: skip
    ((found, weight),) = desk.uploads.addends(draft)
    assert isinstance(found, Parsed) and found.payload.numpy().tobytes() == data[HEADER_BYTES:] and weight == 0.5
    assert desk.begin().addends(draft) == [(data, 0.5)], "durable without an outcome: it is here after a restart"
    desk.uploads.forget([offer.blob])
    with pytest.raises(KeyError):
        desk.uploads.addends(draft)


@pytest.mark.parametrize("codec", ["q4", "q4r"])
def test_a_delta_is_kept_as_it_came_and_known_by_its_numbers(run: RunSpec, codec: str) -> None:
    """A compressed one is decompressed when its window closes: many may wait until then."""
    offer, data = delta(run, codec)
    fragment, named = run.identity.layout.fragments[0], (codec_named(codec),)
    expect = Expected(codecs=named, fragment=fragment, version=offer.window, base=offer.blob.version, newest_epoch=1)
    found, parsed = verify(data, offer, expect, measures=True), parse_blob(data, expect)
    if codec == "q4r":
        assert found.delta is data and len(parsed.payload) > len(data) - HEADER_BYTES
    else:
        assert isinstance(found.delta, Parsed) and found.delta.payload.data_ptr() == parsed.payload.data_ptr()
    assert found.payload == blob_digest(parsed.payload.numpy().tobytes())


@pytest.mark.parametrize("screen", ["off", "norm"])
def test_a_norm_that_a_node_leaves_to_the_coordinator_is_measured(run: RunSpec, screen: str) -> None:
    """Nodes that know older terms do so where nothing is screened any more."""
    desk = Desk(dataclasses.replace(run, terms=run.terms.replace(screen=screen)))
    offer, data = delta(run, run.terms.codecs.up)
    (share,) = offer.contributors
    assert share.norm_sq > 0.0
    untold = dataclasses.replace(offer, contributors=(dataclasses.replace(share, norm_sq=0.0),))
    (kept,) = desk.keep(untold, data)
    assert isinstance(kept, ev.InputStored) and kept.offer.contributors[0].norm_sq == pytest.approx(512.0)


def test_wrong_bytes_are_dropped_with_a_reason_and_leave_no_trace(run: RunSpec) -> None:
    desk, (offer, data) = Desk(run), delta(run, run.terms.codecs.up)
    data[-1] ^= 1
    (event,) = desk.keep(offer, data)
    assert isinstance(event, ev.InputFailed) and event.reason is Reason.CORRUPT
    large = desk.let_in(dataclasses.replace(offer, size=offer.size + 1))
    assert large is not None and large.reason is Reason.TOO_LARGE
    assert desk.store.ledger.inputs == {}


def test_a_delta_is_read_as_the_window_says_that_it_names(run: RunSpec) -> None:
    """B: its codec is that of the window's own terms, whatever the run's are by now."""
    desk = Desk(dataclasses.replace(run, terms=run.terms.replace(codec_up="q8")))
    desk.store.ledger.windows[0] = dataclasses.replace(desk.store.ledger.windows[0], codec_up="fp32")
    offer, data = delta(run, "fp32")
    assert desk.let_in(offer) is None and desk.session.blobs == [offer.blob]
    (kept,), (failed,) = desk.keep(offer, data), desk.keep(*delta(run, "q8"))
    assert isinstance(kept, ev.InputStored)
    assert isinstance(failed, ev.InputFailed) and failed.reason is Reason.CORRUPT
