"""Deltas from the offer to the commit: let in, verified, made durable, kept until their window has merged them.

What half of them is here is `intake.py`'s to know; which are wanted, the machine's to decide.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from farloop.algo.spec import BlobId, NodeId
from farloop.coordinator import commits
from farloop.coordinator import events as ev
from farloop.coordinator import records as rec
from farloop.coordinator.delta import Verified, is_measured, verify
from farloop.coordinator.intake import Intake, expected_delta
from farloop.coordinator.store import Store
from farloop.coordinator.upkeep import Upkeep
from farloop.coordinator.windows import Window
from farloop.quant.errors import BadBlob
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason
from farloop.wire.session import Session

InCompute = Callable[..., Awaitable[Any]]
"""Calls a function with its arguments in the thread that does the arithmetic."""


class Inputs:
    """All deltas of one incarnation of the coordinator. Each that is let in ends in one event, or with its session."""

    def __init__(self, store: Store, upkeep: Upkeep, in_compute: InCompute) -> None:
        """Those that are durable and without an outcome are here at once."""
        self._store, self._upkeep, self._in_compute = store, upkeep, in_compute
        self._intake = Intake()
        self._bytes: dict[BlobId, bytes | bytearray] = {b: store.read_input(b) for b in store.ledger.inputs}

    def let_in(self, session: Session, offer: msg.Offer, window: Window | None) -> ev.InputFailed | None:
        """Let a delta come over this session, if the fragment's open window still admits it."""
        fragment = self._store.ledger.spec.identity.layout.fragments[offer.blob.fragment]
        codec_up = self._store.ledger.codec_of_deltas(fragment.index, offer.window, offer.blob.node)
        wrong = self._intake.let_in(session, offer, window, fragment, codec_up, time.monotonic())
        return None if wrong is None else self._rejected(offer, Reason.TOO_LARGE, wrong)

    def to_come(self, blob: BlobId) -> int | None:
        """Bytes that a delta still has to bring; None where none are asked for."""
        return self._intake.to_come(blob)

    def arrived(self, blob: BlobId) -> msg.Offer | None:
        """All bytes of a delta are here; its offer, to be given to `keep` or `corrupt`. None where it became void."""
        return self._intake.arrived(blob)

    def next(self) -> msg.Offer | None:
        """A delta that waited, and that there is room for now: to be let in again."""
        return self._intake.next()

    def parted(self, node: NodeId) -> None:
        """The node's session is over."""
        self._intake.parted(node)

    async def keep(self, offer: msg.Offer, data: bytearray) -> ev.InputStored | ev.InputFailed:
        """Verify and spool a delta; durable before it counts (protocol P). Raises StorageFailed."""
        ledger = self._store.ledger
        fragment = ledger.spec.identity.layout.fragments[offer.blob.fragment]
        codec_up = ledger.codec_of_deltas(fragment.index, offer.window, offer.blob.node)
        try:
            expect = expected_delta(offer, fragment, codec_up, ledger.epoch)
            measures = is_measured(offer, ledger)
            found: Verified = await self._in_compute(verify, data, offer, expect, measures)
        except BadBlob as error:
            return self._rejected(offer, Reason.CORRUPT, str(error))
        if commits.spools_inputs(ledger.spec.terms):
            await self._upkeep.spool(rec.InputStored.of(found.offer, found.payload), data)
        self._intake.settled(offer.blob)
        self._bytes[offer.blob] = data
        return ev.InputStored(offer=found.offer, payload=found.payload)

    def corrupt(self, offer: msg.Offer) -> ev.InputFailed:
        """The bytes do not have the digest that was announced."""
        return self._rejected(offer, Reason.CORRUPT, "the bytes do not have the announced digest")

    def idle(self, offer: msg.Offer) -> ev.InputFailed:
        """Its bytes stopped coming."""
        return self._rejected(offer, Reason.IDLE, Reason.IDLE.sentence)

    def broken(self, offer: msg.Offer, error: Exception) -> ev.InputFailed:
        """It could not be kept, for a reason that nobody foresaw."""
        return self._rejected(offer, Reason.FAULT, f"{type(error).__name__}: {error}")

    def addends(self, draft: rec.WindowCommitted) -> list[tuple[bytes | bytearray, float]]:
        """The deltas of a commit, with their weights, in the order of the sum."""
        return [(self._bytes[addend.blob], addend.weight) for addend in draft.blobs]

    def apart(self, draft: rec.WindowCommitted) -> list[bytes | bytearray]:
        """Those of nodes in quarantine, which are measured alone."""
        return [self._bytes[blob] for blob in commits.apart(draft)]

    def forget(self, blobs: Sequence[BlobId]) -> None:
        """They were merged, or dropped."""
        for blob in blobs:
            self._bytes.pop(blob, None)

    def _rejected(self, offer: msg.Offer, reason: Reason, detail: str) -> ev.InputFailed:
        self._intake.settled(offer.blob)
        return ev.InputFailed(offer=offer, reason=reason, detail=detail)
