"""Blobs on their way to a node, over its sessions: what goes on where it stopped, and what will never come. Pure.

A transfer that broke off is continued if it is announced again (protocol Q). Not every one is: a snapshot may take the
place of updates, or a later one its own. What a session did not ask for again is let go with it at the latest, so that
a node holds half a blob only for as long as somebody may send the rest.
"""

from farloop.algo.spec import BlobId
from farloop.wire.blobs import Reassembly
from farloop.wire.errors import LocalProtocolError
from farloop.wire.session import Session


class Downloads:
    """All that is half here."""

    def __init__(self) -> None:
        self._partial: dict[BlobId, Reassembly] = {}
        self._coming: set[BlobId] = set()
        """Of those, what the present session brings."""

    def __len__(self) -> int:
        return len(self._partial)

    def announced(self, session: Session, blob: BlobId, size: int, digest: int, now: float) -> bool:
        """Take a blob from this session, from where an earlier one left off; False where it is coming already.

        Whatever came before it in the order of versions and is not on its way will not come: of a fragment, updates
        are announced in order, and a snapshot stands for all before it.
        """
        try:
            reassembly = session.expect(blob, size, digest, self._partial.get(blob), now)
        except LocalProtocolError:  # announced twice: once by catch-up, once live
            return False
        for other in [b for b in self._partial if b.fragment == blob.fragment and b.version < blob.version]:
            if other not in self._coming:
                del self._partial[other]
        self._partial[blob] = reassembly
        self._coming.add(blob)
        return True

    def ended(self, blob: BlobId) -> None:
        """All bytes are here, good or bad."""
        self._partial.pop(blob, None)
        self._coming.discard(blob)

    def session_over(self) -> None:
        """Keep what it was bringing, and nothing that was left from before."""
        self._partial = {blob: reassembly for blob, reassembly in self._partial.items() if blob in self._coming}
        self._coming.clear()
