"""Blobs by an object store in place of sessions: their URLs, what failed, and when the store is used again.

Whatever fails, the same blob goes by the session. No credentials leave this process: a node gets a URL for one request.
"""

import logging
from collections.abc import Callable, MutableMapping, Sequence
from typing import Final

from farloop.algo.spec import BlobId, NodeId
from farloop.coordinator.storage.bucket import CopyFailed
from farloop.coordinator.storage.objects import Sign
from farloop.runtime.ports import Buffer, Clock, Moved, Objects
from farloop.wire.blobs import blob_digest
from farloop.wire.messages import Place

Over = Callable[[str, Moved], None]

_log = logging.getLogger(__name__)

PAUSE_S: Final = 10.0  # that blobs go by the session after a failure
ALARM_S: Final = 60.0  # without a failure before the alarm ends
MOST_UNREAD: Final = 16  # updates of a fragment that a node has not read: the next ones go by the session
_WHAT: Final = "object store"
_OURS: Final = NodeId("")


class BulkPlane:
    """The store of one run, as its executor uses it."""

    def __init__(
        self,
        objects: Objects,
        sign: Sign,
        clock: Clock,
        alarms: MutableMapping[str, str],
        counted: Callable[[int, Moved], None] = lambda failures, moved: None,
    ) -> None:
        """`counted` gets failures and bytes."""
        self._objects, self._sign, self._clock = objects, sign, clock
        self._alarms, self._counted = alarms, counted
        self._paused: dict[NodeId, float] = {}  # until when; by node, since one may lie or sit behind a bad proxy
        self._failed_at = float("-inf")

    def is_open(self, node: NodeId = _OURS) -> bool:
        """Whether blobs of this node go by the store now."""
        now = self._clock.now()
        if _WHAT in self._alarms and now - self._failed_at > ALARM_S:
            del self._alarms[_WHAT]
        return now >= max(self._paused.get(_OURS, now), self._paused.get(node, now))

    def place(self, blob: BlobId, method: str, key: str, ahead: int = 0) -> Place | None:
        """Where a node is to write or read it; None: the URL cannot be signed."""
        url = self._signed(method, key)
        return None if url is None else Place(blob=blob, url=url, ahead=ahead)

    def put(self, key: str, data: Buffer, over: Callable[[bool], None]) -> None:
        """Write an object. `over` gets whether it is there."""
        self._begin("PUT", key, lambda url, done: self._objects.put(url, data, done), over)

    def get(self, key: str, into: bytearray, digest: int, node: NodeId, over: Callable[[bool], None]) -> None:
        """Read what a node says it wrote. A failure is of this node alone. `over` gets whether `into` holds it."""
        right = lambda data: blob_digest(data) == digest  # noqa: E731
        self._begin("GET", key, lambda url, done: self._objects.get(url, into, right, done), over, node)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete what nothing needs. What stays is for the store's lifecycle rule."""
        urls = []
        for key in keys:
            if (url := self._signed("DELETE", key)) is None:
                break
            urls.append(url)
        self._objects.delete(urls)

    def failed(self, why: str, node: NodeId = _OURS) -> None:
        self._counted(1, (0, 0))
        self._failed_at = self._clock.now()
        self._paused[node] = self._failed_at + PAUSE_S
        whom = f"node {node}" if node else "the coordinator"
        self._alarms[_WHAT] = f"it fails {whom}: {why}; what it fails goes by the session. farloop doctor checks it"
        _log.warning("object store failed for=%r why=%r", whom, why)

    def close(self) -> None:
        self._objects.close()

    def _begin(
        self,
        method: str,
        key: str,
        call: Callable[[str, Over], None],
        over: Callable[[bool], None],
        node: NodeId = _OURS,
    ) -> None:
        def done(why: str, moved: Moved) -> None:
            self._counted(0, moved)
            if why:
                self.failed(f"{method} {key}: {why}", node)
            over(not why)

        url = self._signed(method, key)
        if url is None:
            return over(False)
        call(url, done)

    def _signed(self, method: str, key: str) -> str | None:
        try:
            return self._sign(method, key)
        except CopyFailed as error:
            self.failed(str(error))
            return None
