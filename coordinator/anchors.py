"""Anchors that come up from nodes: let in, held against the digest that was named, journaled (protocol, Adoption)."""

from collections.abc import Awaitable, Callable
from typing import Any

from farloop.algo.spec import BlobId
from farloop.coordinator import commits
from farloop.coordinator import events as ev
from farloop.coordinator import records as rec
from farloop.coordinator.store import Store
from farloop.coordinator.upkeep import Upkeep
from farloop.quant.blob import blob_bytes
from farloop.quant.errors import BadBlob
from farloop.quant.registry import codec_named
from farloop.wire.blobs import blob_digest
from farloop.wire.errors import AlreadyUnderWay, LimitReached
from farloop.wire.messages import AnchorRef
from farloop.wire.session import Session


class Expected:
    """Those that were asked for, and are on their way. No I/O: the daemon and the simulator hand it sessions."""

    def __init__(self) -> None:
        self._refs: dict[BlobId, AnchorRef] = {}

    def let_in(self, session: Session, command: ev.ReceiveAnchor, size: int, now: float) -> ev.AnchorFailed | None:
        """Let it come over this session; `size`: what an anchor of this fragment has."""
        offer, ref = command.offer, command.anchor
        if offer.size != size:
            return ev.AnchorFailed(node=offer.blob.node, anchor=ref, spoiled=True)
        try:
            session.expect(offer.blob, offer.size, offer.digest, None, now)
        except AlreadyUnderWay:  # offered twice in one session
            return None
        except LimitReached:
            return ev.AnchorFailed(node=offer.blob.node, anchor=ref, spoiled=False)
        self._refs[offer.blob] = ref
        return None

    def arrived(self, blob: BlobId) -> AnchorRef | None:
        """All bytes are here, good or bad; None where nobody asked for them."""
        return self._refs.pop(blob, None)

    def would_fail(self, blob: BlobId) -> ev.AnchorFailed | None:
        """What to say if it cannot be kept; None where nobody asked for it."""
        ref = self._refs.get(blob)
        return None if ref is None else ev.AnchorFailed(node=blob.node, anchor=ref, spoiled=True)

    def ended(self, blob: BlobId, *, spoiled: bool) -> ev.AnchorFailed | None:
        """It stopped coming, or its bytes are not those that were announced."""
        ref = self.arrived(blob)
        return None if ref is None else ev.AnchorFailed(node=blob.node, anchor=ref, spoiled=spoiled)


class Anchors:
    """All of one start of the coordinator."""

    def __init__(self, store: Store, upkeep: Upkeep, in_compute: Callable[..., Awaitable[Any]]) -> None:
        self.expected = Expected()
        self._store, self._upkeep, self._in_compute = store, upkeep, in_compute

    def size(self, fragment: int) -> int:
        """Bytes of an anchor on its way."""
        return blob_bytes(codec_named("fp32"), self._store.ledger.spec.identity.layout.fragments[fragment])

    async def keep(self, blob: BlobId, data: bytearray) -> ev.Event | None:
        """Verify and journal one that is here; None where nobody asked for it. Raises StorageFailed."""
        ref = self.expected.arrived(blob)
        if ref is None:
            return None
        fragment = self._store.ledger.spec.identity.layout.fragments[ref.fragment]
        try:
            await self._in_compute(commits.fetched_anchor, data, fragment, ref)
        except BadBlob:
            return ev.AnchorFailed(node=blob.node, anchor=ref, spoiled=True)
        record = rec.AnchorFetched(anchor=ref, node=blob.node, blob_digest=blob_digest(data))
        await self._upkeep.keep(record, data)
        return ev.AnchorStored(record=record)
