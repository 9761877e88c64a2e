"""Deltas on their way in: what was offered, what is half here, what is here and not durable yet. No I/O.

The daemon and the simulator hand it sessions and bytes; it outlives sessions, so that a transfer that broke off goes
on where it stopped (protocol Q). Memory is bounded over all nodes, and for each: a delta beyond that is not refused,
its first credit comes later.
"""

from dataclasses import dataclass, field
from typing import Final

from farloop.algo.spec import BlobId, Fragment, NodeId
from farloop.coordinator.windows import Window
from farloop.quant.blob import Expected, blob_bytes
from farloop.quant.registry import codec_named
from farloop.wire.blobs import Reassembly
from farloop.wire.errors import AlreadyUnderWay, LimitReached
from farloop.wire.messages import Offer
from farloop.wire.session import Session

MOST_BYTES: Final = 4 << 30
"""Of all deltas that are under way; one may always come."""

MOST_BYTES_OF_A_NODE: Final = 1 << 30
"""... and of those of one node."""


@dataclass(slots=True)
class Intake:
    """One per coordinator."""

    most_bytes: int = MOST_BYTES
    most_bytes_of_a_node: int = MOST_BYTES_OF_A_NODE
    _offers: dict[BlobId, Offer] = field(default_factory=dict)
    """Of the deltas that are under way."""
    _partial: dict[BlobId, Reassembly] = field(default_factory=dict)
    _keeping: set[BlobId] = field(default_factory=set)
    """Here, and being made durable."""
    _waiting: dict[BlobId, Offer] = field(default_factory=dict)
    """Offered, and not asked for until there is room; in the order in which they came."""
    _crowded: dict[BlobId, Offer] = field(default_factory=dict)
    """Offered by nodes whose sessions take no more at once, until something of theirs has ended."""
    _asleep: set[BlobId] = field(default_factory=set)
    """Half here, with a session that is over: they may be let go."""

    @property
    def held_bytes(self) -> int:
        """Memory for what is half here."""
        return sum(reassembly.size for reassembly in self._partial.values())

    def let_in(
        self, session: Session, offer: Offer, window: Window | None, fragment: Fragment, codec_up: str, now: float
    ) -> str | None:
        """Let a delta come over this session; a sentence where its size is wrong, None otherwise.

        `codec_up` is that of the window which the delta names, `window` the open one, perhaps a later one. Nothing is
        asked for where the window closed while the decision waited for its turn, or where the bytes are here and
        `Stored` is on its way.
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
        # A node has one delta of a fragment under way: what it began before is void.
        blob = offer.blob
        for other in [b for b in self._partial if (b.node, b.fragment) == (blob.node, blob.fragment) and b != blob]:
            self._forget(other)
            session.cancel(other)  # else its memory stays with the session
        try:
            reassembly = session.expect(blob, offer.size, offer.digest, kept, now)
        except AlreadyUnderWay:  # offered twice in one session
            return None
        except LimitReached:
            self._crowded[blob] = offer
            return None
        self._partial[blob], self._offers[blob] = reassembly, offer
        self._asleep.discard(blob)
        return None

    def to_come(self, blob: BlobId) -> int | None:
        """Bytes that a delta still has to bring; None where none are asked for."""
        reassembly = self._partial.get(blob)
        return None if reassembly is None else reassembly.size - reassembly.received

    def next(self) -> Offer | None:
        """The first of those that waited which there is room for now: to be let in again."""
        for blob, offer in self._waiting.items():
            if self._has_room(offer):
                return self._waiting.pop(blob)
        return None

    def parted(self, node: NodeId) -> None:
        """The node's session is over: what it offered it will offer again, and what is half here may go on then."""
        self._waiting = {blob: offer for blob, offer in self._waiting.items() if blob.node != node}
        self._crowded = {blob: offer for blob, offer in self._crowded.items() if blob.node != node}
        self._asleep |= {blob for blob in self._partial if blob.node == node}

    def arrived(self, blob: BlobId) -> Offer | None:
        """All bytes are here, good or bad: their offer, being kept until `settled`; None where it has become void."""
        for other in [other for other in self._crowded if other.node == blob.node]:
            self._waiting[other] = self._crowded.pop(other)
        if blob not in self._partial:
            return None
        del self._partial[blob]
        self._asleep.discard(blob)
        self._keeping.add(blob)
        return self._offers.pop(blob)

    def settled(self, blob: BlobId) -> None:
        """The delta is durable, or was refused."""
        self._keeping.discard(blob)

    def check(self) -> None:
        """Assert the invariants."""
        assert self._partial.keys() == self._offers.keys() >= self._asleep
        assert self.held_bytes <= self.most_bytes or len(self._partial) == 1
        assert not self._waiting or self._partial, "something is waited for"

    def _let_go_of_old(self, offer: Offer, window: Window) -> None:
        """Of those whose session is over: the ones that came too late, and as many more as stand in the way."""
        for blob in [b for b in self._asleep if b.fragment == offer.blob.fragment and b != offer.blob]:
            if not window.admits(self._offers[blob]):
                self._forget(blob)
        for blob in sorted(self._asleep - {offer.blob}, key=lambda other: (other.node, other.fragment, other.seq)):
            if self.held_bytes + offer.size > self.most_bytes:
                self._forget(blob)

    def _forget(self, blob: BlobId) -> None:
        del self._partial[blob], self._offers[blob]
        self._asleep.discard(blob)

    def _has_room(self, offer: Offer) -> bool:
        """What it takes the place of, counts as gone: a node has one delta of a fragment under way."""
        blob = offer.blob
        others = {b: r.size for b, r in self._partial.items() if (b.node, b.fragment) != (blob.node, blob.fragment)}
        own = [size for other, size in others.items() if other.node == blob.node]
        fits = not own or sum(own) + offer.size <= self.most_bytes_of_a_node
        return fits and (not others or sum(others.values()) + offer.size <= self.most_bytes)


def expected_delta(offer: Offer, fragment: Fragment, codec_up: str, epoch: int) -> Expected:
    """What the bytes of an offered delta must say of themselves; `codec_up` is that of the window which it names."""
    return Expected(
        codecs=(codec_named(codec_up),),
        fragment=fragment,
        version=offer.window,
        base=offer.blob.version,
        newest_epoch=epoch,
    )
