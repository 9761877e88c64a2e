"""Covers `coordinator/uploads.py`: every delta ends in one event, and its bytes are kept until then (protocol P, Q)."""

import dataclasses
from pathlib import Path

import pytest
import torch
from virtual_host import VirtualHost

from farloop.algo.digest import digest
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RunSpec
from farloop.coordinator import uploads
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.windows import Window
from farloop.coordinator.storage.storage_queue import StorageQueue
from farloop.coordinator.storage.store import Store
from farloop.coordinator.uploads import DeltaUploads
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.registry import codec_named
from farloop.sim.virtual_files import VirtualFiles
from farloop.wire.blobs import Reassembly, blob_digest
from farloop.wire.messages import Offer
from farloop.wire.reasons import Reason

A = NodeId("a")
ANCHORS = [torch.zeros(512), torch.zeros(256)]


class Asked:
    """A session that is asked for bytes."""

    def __init__(self) -> None:
        self.asked_for: list[BlobId] = []

    def expect(self, blob: BlobId, size: int, digest: int, kept: Reassembly | None, now: float) -> Reassembly:
        self.asked_for.append(blob)
        return Reassembly(size, digest)


@pytest.fixture
def run(spec: RunSpec) -> RunSpec:
    digests = tuple(digest(anchor) for anchor in ANCHORS)
    return dataclasses.replace(spec, identity=dataclasses.replace(spec.identity, anchor_digests=digests))


def delta(spec: RunSpec, codec: str, *, window: int = 1) -> tuple[Offer, bytearray]:
    fragment, coder = spec.identity.layout.fragments[0], codec_named(codec)
    header = BlobHeader(codec=coder, fragment=fragment, version=window, base=window - 1, epoch=1)
    data = pack_blob(header, coder.encode(torch.ones(fragment.numel), fragment, seed=header.seed))
    blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=window - 1, node=A, incarnation=1, seq=window)
    share = Contribution(node=A, incarnation=1, base=window - 1, steps=10, tokens=10, norm_sq=1.0)
    offer = Offer(blob=blob, size=len(data), digest=blob_digest(data), window=window, contributors=(share,))
    return offer, data


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
        return self.uploads.let_in(self.session, offer, window)  # type: ignore[arg-type]

    def keep(self, offer: Offer, data: bytearray) -> ev.Event:
        told: list[ev.Event] = []
        self.uploads.keep(offer, data, told.append, self.fatal)
        self.run()
        (event,) = told
        return event


def test_a_delta_is_let_in_verified_durable_and_kept_until_it_is_forgotten(run: RunSpec) -> None:
    """P: durable before it counts."""
    desk, (offer, data) = Desk(run), delta(run, run.terms.codecs.up)
    assert desk.let_in(offer) is None and desk.session.asked_for == [offer.blob]
    assert desk.uploads.arrived(offer.blob) == offer
    kept = desk.keep(offer, data)
    assert isinstance(kept, ev.InputStored) and kept.offer.blob == offer.blob
    assert desk.store.read_input(offer.blob) == data
    draft = rec.WindowCommitted(
        fragment=0, version=1, round=0, merged=(), drops=(), blobs=(rec.Addend(blob=offer.blob, weight=0.5),),
        anchor_digest=0, target_digest=0, momentum_digest=None, next_window=None, update_size=0, update_digest=0,
        outer_lr=1.0, outer_momentum=0.0, why="",
    )  # fmt: skip
    assert desk.uploads.addends(draft) == [(data, 0.5)]
    assert desk.begin().addends(draft) == [(data, 0.5)], "durable without an outcome: it is here after a restart"
    desk.uploads.forget([offer.blob])
    with pytest.raises(KeyError):
        desk.uploads.addends(draft)


def test_wrong_bytes_are_dropped_with_a_reason_and_leave_no_trace(run: RunSpec) -> None:
    desk, (offer, data) = Desk(run), delta(run, run.terms.codecs.up)
    data[-1] ^= 1
    for event in (desk.keep(offer, data), desk.uploads.corrupt(offer)):
        assert isinstance(event, ev.InputFailed) and event.reason is Reason.CORRUPT
    large = desk.let_in(dataclasses.replace(offer, size=offer.size + 1))
    assert large is not None and large.reason is Reason.TOO_LARGE
    assert desk.store.ledger.inputs == {}


def test_an_unexpected_error_is_handed_on(run: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("on purpose")

    desk, (offer, data) = Desk(run), delta(run, run.terms.codecs.up)
    monkeypatch.setattr(uploads, "verify", fail)
    desk.uploads.keep(offer, data, lambda event: None, desk.fatal)
    desk.run()
    assert [type(error) for error in desk.errors] == [KeyError]


def test_a_delta_is_read_as_the_window_says_that_it_names(run: RunSpec) -> None:
    """B: its codec is that of the window's own terms, whatever the run's are by now."""
    desk = Desk(dataclasses.replace(run, terms=run.terms.replace(codec_up="q8")))
    desk.store.ledger.windows[0] = dataclasses.replace(desk.store.ledger.windows[0], codec_up="fp32")
    offer, data = delta(run, "fp32")
    assert desk.let_in(offer) is None and desk.session.asked_for == [offer.blob]
    assert isinstance(desk.keep(offer, data), ev.InputStored)
    failed = desk.keep(*delta(run, "q8"))
    assert isinstance(failed, ev.InputFailed) and failed.reason is Reason.CORRUPT
