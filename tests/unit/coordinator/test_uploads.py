"""Covers `coordinator/uploads.py`: deltas on their way in (protocol P, Q, W).

What may come, what goes on where it stopped, what is void; every delta that came ends in one event, and its bytes are
kept until then.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_runs import plain_offer
from stories import Scripted, StoryText, all_stories, check_story
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

A = NodeId("a")


class Asked:
    """A session of which little is used: what it is to receive, and into which memory."""

    def __init__(self, most: int = 1000) -> None:
        self.expected: list[tuple[BlobId, Reassembly]] = []
        self.most = most

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        if blob in self.blobs:
            raise AlreadyUnderWay("it is expected already")
        if len(self.expected) >= self.most:
            raise LimitReached("1 blobs are expected")
        self.expected.append((blob, reassembly or Reassembly(size, digest)))
        return self.expected[-1][1]

    def cancel(self, blob: BlobId) -> None:
        self.expected = [one for one in self.expected if one[0] != blob]

    @property
    def blobs(self) -> list[BlobId]:
        return [blob for blob, _ in self.expected]


class Door(Scripted):
    """The deltas of a run that has just begun. `a0` is one of node a for fragment 0, `a0'2` of its second start; its
    stories have a few words of their own:

    offers a0 | offers a0 session=2 window=2 of=2 more=1    window: the open one; of: that it names; more: bytes
    asked | asked 2                                         what a session is to receive, and into which memory
    """

    def __init__(self, spec: RunSpec, *, session: int = 1000, **bounds: int) -> None:
        """`session`: how many deltas one expects at most. `bounds` of memory, in deltas."""
        self.layout, self.terms = spec.identity.layout, spec.terms
        self.windows = schedule.first_windows(spec.terms, self.layout)
        self.sessions: dict[int, Any] = {number: Asked(session) for number in (1, 2)}
        size = self.of("a0").size
        self.intake = DeltaIntake(**{name: count * size for name, count in bounds.items()})
        self.memories: dict[int, tuple[int, Reassembly]] = {}

    def of(self, delta: str, **changes: Any) -> Offer:
        name, _, start = delta.partition("'")
        size = blob_bytes(codec_named(self.terms.codecs.up), self.layout.fragments[int(name[1])])
        started = {"incarnation": int(start)} if start else {}
        return plain_offer(NodeId(name[0]), fragment=int(name[1]), size=size, digest=7, **started, **changes)

    def admit(self, offer: Offer, *, session: int = 1, window: int = 1, **terms: Any) -> str | None:
        fragment = offer.blob.fragment
        of_window = dataclasses.replace(self.windows[fragment], window=window, **terms)
        opened = Window(terms=of_window, expected={A}) if window else None
        where = self.layout.fragments[fragment]
        told = self.intake.admit(self.sessions[session], offer, opened, where, of_window.codec_up, 0.0)
        self.intake.check()
        return told

    def offers(self, delta: str, *, more: int = 0, of: int = 1, **changes: Any) -> str | None:
        offer = self.of(delta)
        return self.admit(dataclasses.replace(offer, size=offer.size + more, window=of), **changes)

    def asked(self, session: int = 1) -> list[str]:
        """Into a memory of the same number: it goes on where it stopped."""
        for _, memory in self.sessions[session].expected:
            self.memories.setdefault(id(memory), (len(self.memories) + 1, memory))
        expected = self.sessions[session].expected
        return [f"{self._name(blob)} into {self.memories[id(memory)][0]}" for blob, memory in expected]

    def arrived(self, delta: str) -> str:
        """Which offer that was."""
        self.sessions[1].cancel(self.of(delta).blob)
        return self._name_of(self.intake.arrived(self.of(delta).blob))

    def next(self) -> str:
        return self._name_of(self.intake.next())

    def outcome(self, delta: str) -> None:
        self.intake.on_outcome(self.of(delta).blob)

    def gone(self, node: str) -> None:
        self.intake.on_disconnect(NodeId(node))

    def held(self) -> float:
        """In deltas."""
        return self.intake.held_bytes / self.of("a0").size

    def _name_of(self, offer: Offer | None) -> str:
        return "none" if offer is None else self._name(offer.blob)

    def _name(self, blob: BlobId) -> str:
        return f"{blob.node}{blob.fragment}" + (f"'{blob.incarnation}" if blob.incarnation > 1 else "")


@all_stories(__file__, "uploads")
def test_stories(spec: RunSpec, path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Door(spec, **story.settings).told, rewrite=rewrite)


def test_the_memory_of_what_is_void_is_given_back(spec: RunSpec) -> None:
    """R, W: by deltas that are void a node could make the coordinator hold hundreds of each fragment."""
    door, session = Door(spec), Session(Role.COORDINATOR, 0.0)
    session._handshake.state, session._handshake.epoch = State.OPEN, 1
    door.sessions[1] = session
    offers = [door.of("a0", seq=seq) for seq in range(1, 5)]
    for offer in offers:
        door.admit(offer)
        with pytest.raises(AlreadyUnderWay, match="expected already"):
            session.expect(offer.blob, offer.size, offer.digest, None, 0.0)
    for offer in offers[:3]:  # nothing is expected of these any more
        session.expect(offer.blob, offer.size, offer.digest, None, 0.0)


def test_what_waits_for_a_crowded_session_ends_with_it(spec: RunSpec) -> None:
    door = Door(spec, session=1)
    under_way = door.of("a0", seq=99).blob
    door.sessions[1].expected.append((under_way, Reassembly(1, 1)))
    door.told("offers a0; gone a")
    door.intake.arrived(under_way)
    assert door.next() == "none"


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
