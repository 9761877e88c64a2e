"""Snapshots on their way out: what `serving.py` decides, carried out beside the order of commands.

Only the offer itself is a command: it goes out behind the commits that were told before it, so that a node never has
the bytes of a version that it has not heard of.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from farloop.algo.spec import BlobId, BlobKind
from farloop.coordinator import commits
from farloop.coordinator import events as ev
from farloop.coordinator.ledger import Ledger
from farloop.coordinator.peers import Peer
from farloop.coordinator.serving import Copy, Serving
from farloop.coordinator.store import Store
from farloop.quant.blob import blob_bytes
from farloop.quant.registry import codec_named
from farloop.wire.blobs import BytesSource
from farloop.wire.errors import AlreadyUnderWay, LimitReached
from farloop.wire.handshake import State
from farloop.wire.messages import Committed, Offer
from farloop.wire.session import Session

_log = logging.getLogger(__name__)


class Downloads:
    """All snapshots that one coordinator is asked for."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        in_compute: Callable[..., Awaitable[Any]],
        do: Callable[[list[ev.Command]], None],
    ) -> None:
        """`ledger` is the machine's: what has been told; `do` queues commands behind those that wait."""
        self._store, self._ledger, self._in_compute, self._do = store, ledger, in_compute, do
        self._serving = Serving()
        self._changed, self._told = asyncio.Event(), asyncio.Event()

    def ask(self, peer: Peer, fragment: int) -> None:
        """A node needs this fragment's anchor."""
        self._serving.ask(peer.number, fragment, self._ledger.versions[fragment])
        self._changed.set()

    def push(self, session: Session, number: int, committed: Committed) -> None:
        """Send the update of a commit that the node was told of, or have a snapshot take its place."""
        source = partial(self._store.update_source, committed.fragment, committed.version)
        if self._serving.push(session, number, committed, source, self._num_bytes(committed.fragment)):
            _log.info("snapshot in place of updates session=%d fragment=%d", number, committed.fragment)
            self._changed.set()

    def offer(self, session: Session, number: int) -> None:
        """Begin to send what was made ready for a session, if it is still open."""
        copy = self._serving.copy_for(number)
        if copy is None or session.state is not State.OPEN:
            return self.gone(number)
        offer = Offer(blob=copy.blob, size=len(copy.data), digest=copy.digest)
        try:
            session.send_blob(offer, BytesSource(copy.data), background=True)
        except (AlreadyUnderWay, LimitReached):  # when something has ended
            self._serving.put_off(number)

    def ended(self, peer: Peer, blob: BlobId) -> None:
        """A blob was sent, or is not wanted."""
        if blob.kind is BlobKind.SNAPSHOT:
            self._serving.done(peer.number)
        self._changed.set()

    def gone(self, session: int) -> None:
        """A session is over."""
        self._serving.gone(session)
        self._changed.set()

    def committed(self, fragment: int, version: int) -> None:
        """A commit is told of."""
        self._told.set()
        self._serving.committed(fragment, version)

    async def run(self) -> None:
        """Serve until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while turn := self._serving.next(self._ledger.versions, self._num_bytes):
                if turn.copy is None:
                    copy = Copy(*await self._in_compute(self._encode, turn.fragment))
                    while self._ledger.versions[turn.fragment] < copy.blob.version:
                        self._told.clear()
                        await self._told.wait()
                    self._serving.encoded(turn, copy)
                self._do([ev.OfferSnapshot(session=turn.session)])

    def _num_bytes(self, fragment: int) -> int:
        return blob_bytes(codec_named("fp32"), self._store.ledger.spec.identity.layout.fragments[fragment])

    def _encode(self, fragment: int) -> tuple[BlobId, bytearray, int]:
        layout = self._store.ledger.spec.identity.layout
        return commits.snapshot_blob(
            self._store.buffers[fragment], layout.fragments[fragment], self._store.ledger.epoch
        )
