"""Deltas on their way in: what was offered, what is half here, what is here and not durable yet. No I/O.

The daemon and the simulator hand it sessions and bytes; it outlives sessions, so that a transfer that broke off goes
on where it stopped (protocol Q).
"""

from dataclasses import dataclass, field

from farloop.algo.spec import BlobId, Fragment
from farloop.coordinator.windows import Window
from farloop.quant.blob import Expected, blob_bytes
from farloop.quant.registry import codec_named
from farloop.wire.blobs import Reassembly
from farloop.wire.errors import LocalProtocolError
from farloop.wire.messages import Offer
from farloop.wire.session import Session


@dataclass(slots=True)
class Intake:
    """One per coordinator."""

    _offers: dict[BlobId, Offer] = field(default_factory=dict)
    """Of the deltas that are under way."""
    _partial: dict[BlobId, Reassembly] = field(default_factory=dict)
    _keeping: set[BlobId] = field(default_factory=set)
    """Here, and being made durable."""

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
        kept = self._partial.get(offer.blob)
        try:
            reassembly = session.expect(offer.blob, offer.size, offer.digest, kept, now)
        except LocalProtocolError:  # offered twice in one session: it is coming already
            return None
        # A node has one delta of a fragment under way: what it began before is void.
        blob = offer.blob
        for other in [b for b in self._partial if (b.node, b.fragment) == (blob.node, blob.fragment)]:
            del self._partial[other], self._offers[other]
        self._partial[blob], self._offers[blob] = reassembly, offer
        return None

    def arrived(self, blob: BlobId) -> Offer | None:
        """All bytes are here, good or bad: their offer, being kept until `settled`; None where it has become void."""
        if blob not in self._partial:
            return None
        del self._partial[blob]
        self._keeping.add(blob)
        return self._offers.pop(blob)

    def settled(self, blob: BlobId) -> None:
        """The delta is durable, or was refused."""
        self._keeping.discard(blob)


def expected_delta(offer: Offer, fragment: Fragment, codec_up: str, epoch: int) -> Expected:
    """What the bytes of an offered delta must say of themselves; `codec_up` is that of the window which it names."""
    return Expected(
        codecs=(codec_named(codec_up),),
        fragment=fragment,
        version=offer.window,
        base=offer.blob.version,
        newest_epoch=epoch,
    )
