"""Snapshots on their way out: what `serving.py` decides, carried out beside the order of commands.

Only the offer itself is a command: it goes out behind the commits that were told before it, so that a node never has
the bytes of a version that it has not heard of.
"""

import asyncio
from collections.abc import Awaitable, Callable
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
from farloop.wire.errors import LocalProtocolError
from farloop.wire.handshake import State
from farloop.wire.messages import Offer


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

    def offer(self, peer: Peer | None, session: int) -> None:
        """Begin to send what was made ready for a session, if it is still there."""
        copy = self._serving.copy_for(session)
        if peer is None or copy is None or peer.session.state is not State.OPEN:
            return self.gone(session)
        offer = Offer(blob=copy.blob, size=len(copy.data), digest=copy.digest)
        try:
            peer.session.send_blob(offer, BytesSource(copy.data), background=True)
        except LocalProtocolError:  # as many blobs as a session may have are on their way
            self._serving.put_off(session)

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
