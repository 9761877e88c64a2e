"""Covers `coordinator/uploads.py`: every delta ends in one event, and its bytes are kept until then (protocol P, Q)."""

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from farloop.algo.digest import digest
from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.windows import Window
from farloop.coordinator.storage.storage_queue import StorageQueue
from farloop.coordinator.storage.store import Store
from farloop.coordinator.uploads import DeltaUploads
from farloop.quant.blob import BlobHeader, pack_blob
from farloop.quant.registry import codec_named
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


async def in_place(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


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


def play(folder: Path, spec: RunSpec, story: Callable[[Store, DeltaUploads], Any]) -> None:
    async def whole() -> None:
        store = Store.create(folder, spec, ANCHORS)
        upkeep = StorageQueue(store, {})
        try:
            await story(store, DeltaUploads(store, upkeep, in_place))
        finally:
            await upkeep.close()

    asyncio.run(whole())


def test_a_delta_is_let_in_verified_durable_and_kept_until_it_is_forgotten(tmp_path: Path, run: RunSpec) -> None:
    """P: durable before it counts."""
    offer, data = delta(run, run.terms.codec_up)

    async def story(store: Store, inputs: DeltaUploads) -> None:
        session = Asked()
        window = Window(terms=store.ledger.windows[0], expected={A})
        assert inputs.let_in(session, offer, window) is None  # type: ignore[arg-type]
        assert session.asked_for == [offer.blob]
        assert inputs.arrived(offer.blob) == offer
        kept = await inputs.keep(offer, data)
        assert isinstance(kept, ev.InputStored) and kept.offer.blob == offer.blob
        assert store.read_input(offer.blob) == data
        draft = rec.WindowCommitted(
            fragment=0, version=1, round=0, merged=(), drops=(), blobs=(rec.Addend(blob=offer.blob, weight=0.5),),
            anchor_digest=0, target_digest=0, momentum_digest=None, next_window=None, update_size=0, update_digest=0,
            outer_lr=1.0, outer_momentum=0.0, why="",
        )  # fmt: skip
        assert inputs.addends(draft) == [(data, 0.5)]
        inputs.forget([offer.blob])
        with pytest.raises(KeyError):
            inputs.addends(draft)

    play(tmp_path / "state", run, story)


def test_what_is_durable_without_an_outcome_is_here_after_a_restart(tmp_path: Path, run: RunSpec) -> None:
    offer, data = delta(run, run.terms.codec_up)

    async def story(store: Store, inputs: DeltaUploads) -> None:
        await inputs.keep(offer, data)
        again = DeltaUploads(store, StorageQueue(store, {}), in_place)
        assert list(again._bytes.items()) == [(offer.blob, bytes(data))]

    play(tmp_path / "state", run, story)


def test_wrong_bytes_are_dropped_with_a_reason_and_leave_no_trace(tmp_path: Path, run: RunSpec) -> None:
    offer, data = delta(run, run.terms.codec_up)
    data[-1] ^= 1

    async def story(store: Store, inputs: DeltaUploads) -> None:
        kept, told = await inputs.keep(offer, data), inputs.corrupt(offer)
        for event in (kept, told):
            assert isinstance(event, ev.InputFailed) and event.reason is Reason.CORRUPT
        too_many = dataclasses.replace(offer, size=offer.size + 1)
        window = Window(terms=store.ledger.windows[0], expected={A})
        large = inputs.let_in(Asked(), too_many, window)  # type: ignore[arg-type]
        assert large is not None and large.reason is Reason.TOO_LARGE
        assert store.ledger.inputs == {}

    play(tmp_path / "state", run, story)


def test_a_delta_is_read_as_the_window_says_that_it_names(tmp_path: Path, run: RunSpec) -> None:
    """B: its codec is that of the window's own terms, whatever the run's are by now."""
    terms = dataclasses.replace(run.terms, codec_up="q8")

    async def story(store: Store, inputs: DeltaUploads) -> None:
        session = Asked()
        store.ledger.windows[0] = dataclasses.replace(store.ledger.windows[0], codec_up="fp32")
        window = Window(terms=store.ledger.windows[0], expected={A})
        offer, data = delta(run, "fp32")
        assert inputs.let_in(session, offer, window) is None  # type: ignore[arg-type]
        assert session.asked_for == [offer.blob]
        assert isinstance(await inputs.keep(offer, data), ev.InputStored)
        failed = await inputs.keep(*delta(run, "q8"))
        assert isinstance(failed, ev.InputFailed) and failed.reason is Reason.CORRUPT

    play(tmp_path / "state", dataclasses.replace(run, terms=terms), story)
