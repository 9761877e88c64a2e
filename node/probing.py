"""The node's side of measuring its link: sends and ends probes as the coordinator asks, and reports what came in.

Whatever arrives is a measurement (`wire/meter.py`); it is told as it was seen, and judged by the coordinator, which
knows the round trip. Lives in the link's thread; reads no clock.
"""

import contextlib

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire import messages as msg
from farloop.wire.errors import AlreadyUnderWay, LimitReached
from farloop.wire.handshake import State
from farloop.wire.link_messages import MOST_SEEN, Connection, Observed, Probe, Seen
from farloop.wire.meter import HALF_LEAST_CHUNKS, enough
from farloop.wire.probe import DIGEST, Noise, Sink
from farloop.wire.session import Session

SINCE = 3
"""Version of the protocol from which on the coordinator wants to hear of it."""

LOOK_S = 5.0
"""Between two reports on the connection itself."""


class Probing:
    """Of one session."""

    def __init__(self) -> None:
        self._expected: Probe | None = None
        """A probe that is coming down, or will."""
        self._over = False
        """Whether it has come, or was ended."""
        self._sending: BlobId | None = None
        self._told_at = float("-inf")

    def asked(self, session: Session, probe: Probe) -> None:
        """The coordinator wants a probe, or none any more."""
        self._stop(session)
        if probe.num_bytes <= 0:
            return
        if probe.upward:
            blob = self._sending = _blob(probe)
            offer = msg.Offer(blob=blob, size=probe.num_bytes, digest=DIGEST)
            with contextlib.suppress(AlreadyUnderWay, LimitReached):  # too many blobs as it is: none is due
                session.send_blob(offer, Noise(probe.num_bytes, seed=probe.number), background=True)
        else:
            self._expected = probe

    def offered(self, session: Session, offer: msg.Offer, now: float) -> None:
        """The bytes of a probe are about to come."""
        probe = self._expected
        if probe is None or offer.blob.version != probe.number or not 0 < offer.size <= probe.num_bytes:
            return session.cancel(offer.blob)
        with contextlib.suppress(AlreadyUnderWay, LimitReached):  # offered twice; or others come first
            session.expect(offer.blob, offer.size, DIGEST, Sink(offer.size), now)

    def ended(self, blob: BlobId) -> None:
        """The bytes of a probe have all come, or all gone, or are not wanted any more."""
        if blob == self._sending:
            self._sending = None
        elif self._expected is not None and blob == _blob(self._expected):
            self._over = True

    def look(self, session: Session) -> Observed | None:
        """End a probe that has told enough; what is to be reported, if anything is."""
        if session.state is not State.OPEN or session.protocol < SINCE:
            return None
        probe, burst = self._expected, session.meter.burst()
        if probe is not None and burst is not None and enough(burst, probe.rtt_s):
            session.cancel(_blob(probe))
            self._over = True
        bursts = [burst for burst in session.meter.take() if burst.half_chunks >= HALF_LEAST_CHUNKS]
        if not bursts and not self._over:
            return None
        number = probe.number if probe is not None and self._over else 0
        if self._over:
            self._expected, self._over = None, False
        return Observed(links=(Seen(bursts=tuple(bursts[-MOST_SEEN:]), probe=number),))

    def is_due(self, now: float) -> bool:
        """Whether it is time to look at the connection again."""
        return now - self._told_at >= LOOK_S

    def connection(self, session: Session, told: Connection | None, now: float) -> Observed | None:
        """What the kernel says of the connection that carries blobs, as a report."""
        self._told_at = now
        if told is None or session.state is not State.OPEN or session.protocol < SINCE:
            return None
        return Observed(links=(Seen(bulk=told),))

    def _stop(self, session: Session) -> None:
        if self._sending is not None:
            session.cancel(self._sending)
        if self._expected is not None:
            session.cancel(_blob(self._expected))
            session.meter.take()
        self._sending, self._expected, self._over = None, None, False


def _blob(probe: Probe) -> BlobId:
    return BlobId(kind=BlobKind.PROBE, fragment=0, version=probe.number)
