"""Deltas on their way from a node: what its session does not take yet waits here, and is offered when one has ended."""

import logging
from collections import OrderedDict

from farloop.algo.spec import BlobId
from farloop.wire.blobs import BytesSource
from farloop.wire.errors import AlreadyUnderWay, LimitReached, LocalProtocolError
from farloop.wire.handshake import State
from farloop.wire.messages import Offer
from farloop.wire.session import Session

_log = logging.getLogger(__name__)


class Uploads:
    """Of one link, over its sessions."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[BlobId, tuple[Offer, bytearray]] = OrderedDict()
        """In the order in which they came."""

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, session: Session, offer: Offer, data: bytearray) -> None:
        """Offer a delta, now or as soon as the session takes more. A newer one of its fragment takes its place."""
        for blob in [b for b in self._waiting if b.fragment == offer.blob.fragment and b.seq < offer.blob.seq]:
            del self._waiting[blob]
        self._waiting[offer.blob] = (offer, data)
        self.go_on(session)

    def go_on(self, session: Session) -> None:
        """Offer what waits, as far as the session takes it. To be called after each of its events."""
        while self._waiting and session.state is State.OPEN:
            blob, (offer, data) = next(iter(self._waiting.items()))
            try:
                session.send_blob(offer, BytesSource(data))
            except LimitReached:
                return
            except AlreadyUnderWay as error:  # offered twice, by a reconnection and by its encoder
                _log.debug("offer skipped reason=%s", error)
            except LocalProtocolError as error:
                _log.warning("delta not offered blob=%s reason=%r", blob, str(error))
            del self._waiting[blob]

    def session_over(self) -> None:
        """What matters of it is offered again in the next session, after its Welcome."""
        self._waiting.clear()
