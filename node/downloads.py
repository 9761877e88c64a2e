"""Blobs on their way to a node, over its sessions: what goes on where it stopped, and what will never come. Pure.

A transfer that broke off is continued if it is announced again (protocol Q). Not every one is: a snapshot may take the
place of updates, or a later one its own. What a session did not ask for again is let go with it at the latest, so that
a node holds half a blob only for as long as somebody may send the rest.
"""

import logging
from collections import OrderedDict

from farloop.algo.spec import BlobId, BlobKind
from farloop.wire.blobs import Reassembly
from farloop.wire.errors import AlreadyUnderWay, LimitReached, LocalProtocolError
from farloop.wire.handshake import State
from farloop.wire.session import Session

_log = logging.getLogger(__name__)


class Downloads:
    """All that is half here."""

    def __init__(self) -> None:
        self._partial: dict[BlobId, Reassembly] = {}
        self._coming: set[BlobId] = set()
        """Of those, what the present session brings."""
        self._waiting: OrderedDict[BlobId, tuple[int, int]] = OrderedDict()
        """Announced while the session took no more at once: their size and digest."""

    def __len__(self) -> int:
        return len(self._partial)

    def announced(self, session: Session, blob: BlobId, size: int, digest: int, now: float) -> bool:
        """Take a blob from this session, from where an earlier one left off, or as soon as the session takes more;
        False where it is coming already.

        Whatever came before it in the order of versions and is not on its way will not come: of a fragment, updates
        are announced in order, and a snapshot stands for all before it, its own version included, on its way or not.
        """
        if session.state is not State.OPEN:  # this end has said good-bye
            return False
        if blob.kind is BlobKind.SNAPSHOT:
            self._give_up_updates(session, blob)
        try:
            reassembly = session.expect(blob, size, digest, self._partial.get(blob), now)
        except AlreadyUnderWay:  # announced twice: once by catch-up, once live
            return False
        except LimitReached:
            self._waiting[blob] = (size, digest)
            return True
        except LocalProtocolError as error:
            _log.warning("announced and not taken blob=%s reason=%r", blob, str(error))
            return False
        self._waiting.pop(blob, None)
        for other in [b for b in self._partial if b.fragment == blob.fragment and b.version < blob.version]:
            if other not in self._coming:
                del self._partial[other]
        self._partial[blob] = reassembly
        self._coming.add(blob)
        return True

    def ended(self, session: Session, blob: BlobId, now: float) -> None:
        """All bytes are here, good or bad. What waited can come."""
        self._partial.pop(blob, None)
        self._coming.discard(blob)
        for waited, (size, digest) in list(self._waiting.items()):
            self.announced(session, waited, size, digest, now)
            if waited in self._waiting:
                break

    def session_over(self) -> None:
        """Keep what it was bringing, and nothing that was left from before."""
        self._partial = {blob: reassembly for blob, reassembly in self._partial.items() if blob in self._coming}
        self._coming.clear()
        self._waiting.clear()

    def _give_up_updates(self, session: Session, snapshot: BlobId) -> None:
        """The snapshot holds them: one that is behind is not sent them at all."""

        def holds(blob: BlobId) -> bool:
            same = blob.kind is BlobKind.UPDATE and blob.fragment == snapshot.fragment
            return same and blob.version <= snapshot.version

        for blob in [blob for blob in self._waiting if holds(blob)]:
            del self._waiting[blob]
        for blob in [blob for blob in self._coming if holds(blob)]:
            session.cancel(blob)
            self._coming.discard(blob)
            del self._partial[blob]
