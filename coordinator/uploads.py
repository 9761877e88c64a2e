"""Deltas and anchors from the offer to the journal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import xxhash
from torch import Tensor

from farloop.algo.spec import BlobId, Fragment, NodeId
from farloop.coordinator import commits
from farloop.coordinator.commits import Delta, spools_inputs
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.screening import measured
from farloop.coordinator.decide.windows import Window
from farloop.coordinator.storage.storage_queue import Failed, StorageQueue
from farloop.coordinator.storage.store import Store, read_when_possible
from farloop.quant.blob import Expected, blob_bytes, parse_blob
from farloop.quant.errors import BadBlob
from farloop.quant.registry import codec_named
from farloop.runtime.ports import Clock, Worker
from farloop.wire import messages as msg
from farloop.wire.blobs import Reassembly, blob_digest
from farloop.wire.messages import AnchorRef, Offer
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, Reason
from farloop.wire.session import Session

# --- Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A delta that matches its offer."""

    offer: Offer  # the offer, with the measured squared norm if it was measured
    delta: Delta
    payload: int = 0  # xxh3-64 of its encoded numbers; 0 where it was not taken


def is_measured(offer: Offer, ledger: Ledger) -> bool:
    """Whether the delta may be compared with others, or its node did not measure it: it knew older terms."""
    untold = spools_inputs(ledger.spec.terms) and any(share.norm_sq == 0.0 for share in offer.contributors)
    return untold or ledger.screening.measures(offer.blob.fragment, offer.window)


def verify(data: bytearray, offer: Offer, expect: Expected, measures: bool) -> Verified:
    """Check every number of a delta, and measure the delta if it may be compared with others.

    Raises BadBlob: it does not match its offer, or a number in it is not finite.
    """
    parsed = parse_blob(data, expect)
    header, payload, digest = parsed
    coded = header.codec.traits.entropy_coded
    delta = data if coded else parsed  # decompressed it would take more memory until its window closes
    if not measures:
        return Verified(offer=offer, delta=delta)
    norm_sq = header.codec.norm_sq(payload, expect.fragment, seed=header.seed)
    if coded:
        digest = xxhash.xxh3_64_intdigest(payload.numpy().data)
    return Verified(offer=measured(offer, norm_sq), delta=delta, payload=digest)


# --- Intake

MOST_BYTES: Final = 4 << 30  # limit of all deltas in progress; one is always allowed
MOST_BYTES_OF_A_NODE: Final = 1 << 30  # limit of the deltas of one node


@dataclass(slots=True)
class DeltaIntake:
    """Deltas that were offered, have partly arrived, or are not durable yet. Does no I/O.

    It outlives sessions, so an interrupted transfer continues where it stopped. Memory is limited in all and per node:
    a delta beyond the limit is not refused, but gets its first credit later.
    """

    most_bytes: int = MOST_BYTES
    most_bytes_of_a_node: int = MOST_BYTES_OF_A_NODE
    buffer: Callable[[int], bytearray] = bytearray
    """Makes memory of this size."""
    _offers: dict[BlobId, Offer] = field(default_factory=dict)  # offers of the deltas in progress
    _partial: dict[BlobId, Reassembly] = field(default_factory=dict)
    _begun: dict[NodeId, dict[int, BlobId]] = field(default_factory=dict)
    """The same by node and fragment: a node has one delta of a fragment under way."""
    held_bytes: int = 0  # of all of them
    _keeping: set[BlobId] = field(default_factory=set)  # complete, and being made durable
    _waiting: dict[BlobId, Offer] = field(default_factory=dict)  # offers that wait for room, in order
    _crowded: dict[BlobId, Offer] = field(default_factory=dict)
    """Offers of sessions with too many transfers, until one of them ends."""
    _asleep: set[BlobId] = field(default_factory=set)  # partly arrived, without a session: they may be dropped

    def admit(
        self,
        session: Session,
        offer: Offer,
        window: Window | None,
        fragment: Fragment,
        codec_up: str,
        now: float,
        *,
        by_store: bool = False,
    ) -> str | None:
        """Receive a delta over this session, or by the store into `memory`. Returns a sentence if its size is wrong.

        `codec_up` is that of the window that the delta names; `window` is the open one, perhaps a later one. Nothing is
        requested if the window closed meanwhile, or if the bytes are here and `Stored` is on its way.
        """
        if window is None or not window.admits(offer) or offer.blob in self._keeping:
            return None
        codec = codec_named(codec_up)
        most = blob_bytes(codec, fragment)
        if offer.size > most or (offer.size < most and not codec.traits.entropy_coded):
            return f"{offer.size} bytes offered, {most} are a {codec_up} blob of this fragment"
        self._let_go_of_old(offer, window)
        kept = self._partial.get(offer.blob)
        if kept is None and not self._has_room(offer):
            self._waiting[offer.blob] = offer
            return None
        blob = offer.blob
        before = self._begun.get(blob.node, {}).get(blob.fragment)
        if before is not None and before != blob:  # it is void
            self._forget(before)
            session.cancel(before)  # else its memory stays with the session
        reassembly = kept or Reassembly(offer.size, offer.digest, self.buffer(offer.size))
        try:
            if not by_store:
                reassembly = session.expect(blob, offer.size, offer.digest, reassembly, now)
        except AlreadyUnderWay:  # offered twice in one session
            return None
        except LimitReached:
            self._crowded[blob] = offer
            return None
        if kept is not reassembly:
            self.held_bytes += reassembly.size - (kept.size if kept is not None else 0)
        self._partial[blob], self._offers[blob] = reassembly, offer
        self._begun.setdefault(blob.node, {})[blob.fragment] = blob
        self._asleep.discard(blob)
        return None

    def memory(self, blob: BlobId) -> bytearray | None:
        """Where its bytes go; None if none are awaited."""
        reassembly = self._partial.get(blob)
        return None if reassembly is None else reassembly.data

    def to_come(self, blob: BlobId) -> int | None:
        reassembly = self._partial.get(blob)
        return None if reassembly is None else reassembly.size - reassembly.received

    def next(self) -> Offer | None:
        """The first waiting offer for which there is room: to be let in again."""
        for blob, offer in self._waiting.items():
            if self._has_room(offer):
                return self._waiting.pop(blob)
        return None

    def on_disconnect(self, node: NodeId) -> None:
        """The node's session is over. It will repeat its offers; partial deltas may continue then."""
        self._waiting = {blob: offer for blob, offer in self._waiting.items() if blob.node != node}
        self._crowded = {blob: offer for blob, offer in self._crowded.items() if blob.node != node}
        self._asleep |= {blob for blob in self._partial if blob.node == node}

    def arrived(self, blob: BlobId) -> Offer | None:
        """All bytes arrived, good or bad. Returns the offer, kept until `on_outcome`; None if the delta became void."""
        for other in [other for other in self._crowded if other.node == blob.node]:
            self._waiting[other] = self._crowded.pop(other)
        if blob not in self._partial:
            return None
        self._keeping.add(blob)
        return self._forget(blob)

    def on_outcome(self, blob: BlobId) -> None:
        self._keeping.discard(blob)

    def check(self) -> None:
        assert self._partial.keys() == self._offers.keys() >= self._asleep
        assert {(b.node, b.fragment): b for b in self._partial} == {
            (node, fragment): blob for node, begun in self._begun.items() for fragment, blob in begun.items()
        }
        assert self.held_bytes == sum(reassembly.size for reassembly in self._partial.values())
        assert self.held_bytes <= self.most_bytes or len(self._partial) == 1
        assert not self._waiting or self._partial, "something is waited for"

    def _let_go_of_old(self, offer: Offer, window: Window) -> None:
        """Drop partial deltas without a session: late ones, and as many more as are in the way."""
        for blob in [b for b in self._asleep if b.fragment == offer.blob.fragment and b != offer.blob]:
            if not window.admits(self._offers[blob]):
                self._forget(blob)
        for blob in sorted(self._asleep - {offer.blob}, key=lambda other: (other.node, other.fragment, other.seq)):
            if self.held_bytes + offer.size > self.most_bytes:
                self._forget(blob)

    def _forget(self, blob: BlobId) -> Offer:
        """Nothing more of it is awaited. Returns its offer."""
        self.held_bytes -= self._partial.pop(blob).size
        begun = self._begun[blob.node]
        del begun[blob.fragment]
        if not begun:
            del self._begun[blob.node]
        self._asleep.discard(blob)
        return self._offers.pop(blob)

    def _has_room(self, offer: Offer) -> bool:
        """Whether there is room, without the delta that it replaces."""
        own = {fragment: self._partial[blob].size for fragment, blob in self._begun.get(offer.blob.node, {}).items()}
        others = self.held_bytes - own.pop(offer.blob.fragment, 0)
        fits = not own or sum(own.values()) + offer.size <= self.most_bytes_of_a_node
        return fits and (not others or others + offer.size <= self.most_bytes)


# --- Deltas

Done = Callable[[ev.Event], None]  # takes the event that ends an upload


class DeltaUploads(DeltaIntake):
    """Deltas from the offer to the commit: received, verified, made durable, and kept until their window merged them.

    Each accepted one ends in one event, or with its session. The machine decides which are accepted.
    """

    def __init__(self, store: Store, storage: StorageQueue, compute: Worker, clock: Clock) -> None:
        """Begins with the durable deltas that have no outcome."""
        super().__init__(buffer=store.pool.buffer)
        self._store, self._storage, self._compute, self._clock = store, storage, compute, clock
        self._held: dict[BlobId, Delta] = {
            b: read_when_possible(partial(store.read_input, b)) for b in store.ledger.inputs
        }

    def receive(
        self, session: Session, offer: msg.Offer, window: Window | None, *, by_store: bool = False
    ) -> ev.InputFailed | None:
        """Receive a delta over this session, or by the store, if the fragment's open window still admits it."""
        fragment = self._store.ledger.spec.identity.layout.fragments[offer.blob.fragment]
        codec_up = self._store.ledger.codec_of_deltas(fragment.index, offer.window, offer.blob.node)
        wrong = self.admit(session, offer, window, fragment, codec_up, self._clock.now(), by_store=by_store)
        return None if wrong is None else self.rejected(offer, Reason.TOO_LARGE, wrong)

    def store(self, offer: msg.Offer, data: bytearray, done: Done, failed: Failed, *, in_store: bool = False) -> None:
        """Verify and store a delta; it counts once it is durable. `failed` gets unexpected errors. `in_store`: its
        bytes are in the object store."""
        ledger = self._store.ledger
        expect = commits.expected(ledger, offer.blob, offer.window)

        def verified(found: Verified) -> None:
            def stored() -> None:
                self.on_outcome(offer.blob)
                self._held[offer.blob] = found.delta
                done(ev.InputStored(offer=found.offer, payload=found.payload))

            if commits.spools_inputs(ledger.spec.terms):
                attached = bytearray() if in_store else data
                self._storage.spool(rec.InputStored.of(found.offer, found.payload), attached, stored, failed)
            else:
                stored()

        def refused(error: Exception) -> None:
            if isinstance(error, BadBlob):
                done(self.rejected(offer, Reason.CORRUPT, str(error)))
            else:
                failed(error)

        self._compute.submit(partial(verify, data, offer, expect, is_measured(offer, ledger)), verified, refused)

    def addends(self, draft: rec.WindowCommitted) -> list[tuple[Delta, float]]:
        return [(self._held[addend.blob], addend.weight) for addend in draft.blobs]

    def apart(self, draft: rec.WindowCommitted) -> list[Delta]:
        """Deltas of nodes in quarantine, which are only measured."""
        return [self._held[blob] for blob in commits.apart(draft)]

    def forget(self, blobs: Sequence[BlobId]) -> None:
        for blob in blobs:
            self._held.pop(blob, None)

    def rejected(self, offer: msg.Offer, reason: Reason, detail: str) -> ev.InputFailed:
        """The event that ends this upload without the delta."""
        self.on_outcome(offer.blob)
        return ev.InputFailed(offer=offer, reason=reason, detail=detail)


# --- Anchors


class AnchorUploads:
    """Anchors from nodes: verified by their digest, and journaled."""

    def __init__(self, store: Store, storage: StorageQueue, compute: Worker, clock: Clock) -> None:
        self._store, self._storage, self._compute, self._clock = store, storage, compute, clock
        self._refs: dict[BlobId, AnchorRef] = {}  # requested anchors that are on their way

    def admit(self, session: Session, command: ev.ReceiveAnchor) -> ev.AnchorFailed | None:
        offer, ref = command.offer, command.anchor
        if offer.size != blob_bytes(codec_named("fp32"), self._fragment(ref)):
            return ev.AnchorFailed(node=offer.blob.node, anchor=ref, spoiled=True)
        try:
            session.expect(offer.blob, offer.size, offer.digest, None, self._clock.now())
        except AlreadyUnderWay:  # offered twice in one session
            return None
        except LimitReached:
            return ev.AnchorFailed(node=offer.blob.node, anchor=ref, spoiled=False)
        self._refs[offer.blob] = ref
        return None

    def on_failed(self, blob: BlobId, *, spoiled: bool) -> ev.AnchorFailed | None:
        """It stopped coming, or does not match. None if it was not requested."""
        ref = self._refs.pop(blob, None)
        return None if ref is None else ev.AnchorFailed(node=blob.node, anchor=ref, spoiled=spoiled)

    def store(self, blob: BlobId, data: bytearray, done: Done, failed: Callable[[Exception, ev.Event], None]) -> None:
        """Verify and journal a requested anchor. `failed` gets unexpected errors, with the event for the machine."""
        ref = self._refs.pop(blob, None)
        if ref is None:
            return
        spoiled = ev.AnchorFailed(node=blob.node, anchor=ref, spoiled=True)

        def verified(_: Tensor) -> None:
            record = rec.AnchorFetched(anchor=ref, node=blob.node, blob_digest=blob_digest(data))
            stored = ev.AnchorStored(record=record)
            self._storage.keep(record, data, lambda: done(stored), lambda error: failed(error, spoiled))

        def refused(error: Exception) -> None:
            if isinstance(error, BadBlob):
                done(spoiled)
            else:
                failed(error, spoiled)

        self._compute.submit(partial(commits.fetched_anchor, data, self._fragment(ref), ref), verified, refused)

    def _fragment(self, ref: AnchorRef) -> Fragment:
        return self._store.ledger.spec.identity.layout.fragments[ref.fragment]
