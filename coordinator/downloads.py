"""Snapshots for nodes that join or lost an anchor: whose turn it is, and the encoded copies that are kept for them.

Encoding reads the whole fragment, and a copy takes as much memory. So snapshots are made outside the order of commands,
one copy for all sessions that can use it, within a memory limit. A session is sent one at a time. Only the offer is a
command: it follows the commits that were announced before it, so that a node never gets a version that it has not heard
of.

A node hears of every commit from its Welcome on. So any version from the current one at its request on will do, and the
newest leaves it the least to catch up with.

If a session takes updates more slowly than they come, the updates of a fragment beyond a limit are dropped and replaced
by a snapshot. It yields to the updates of other fragments and contains all commits until it is made: a slow node gets
as many fragments up to date as its link carries.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator import commits
from farloop.coordinator.bulk_plane import BulkPlane
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.storage.storage_queue import Failed
from farloop.coordinator.storage.store import Store
from farloop.quant.blob import blob_bytes
from farloop.quant.registry import codec_named
from farloop.runtime.ports import Worker
from farloop.wire.blobs import BlobSource, BytesSource
from farloop.wire.messages import Committed, Offer, update_id
from farloop.wire.reasons import AlreadyUnderWay, LimitReached
from farloop.wire.session import Session, State

_log = logging.getLogger(__name__)

MOST_UPDATES: Final = 16
"""Updates of one fragment that may wait in a session: as many as are remembered for a node that returns."""

MOST_BYTES: Final = 2 << 30  # limit of the copies in memory. One copy is always allowed.


@dataclass(slots=True)
class EncodedSnapshot:
    blob: BlobId
    data: bytearray
    digest: int
    users: set[int] = field(default_factory=set)  # sessions that it is being sent to
    in_store: bool = False  # whether the object store has it

    @property
    def key(self) -> str:
        return f"f{self.blob.fragment}/v{self.blob.version}/snapshot-{self.digest:016x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRequest:
    """What to do next: send `copy`, or encode the fragment first where there is none."""

    session: int
    fragment: int
    copy: EncodedSnapshot | None


class SnapshotService:
    """Decides which session is sent which copy. Sans-I/O; sessions are numbers."""

    def __init__(self, dropped: Callable[[EncodedSnapshot], None], most_bytes: int = MOST_BYTES) -> None:
        """`dropped` is called with each copy that is no longer kept."""
        self._most_bytes, self._dropped = most_bytes, dropped
        self._asked: OrderedDict[int, OrderedDict[int, int]] = OrderedDict()
        """Session → fragment → lowest version that will do, in the order of turns."""
        self._under_way: dict[int, int] = {}  # session → the fragment that is being sent to it, or encoded for it
        self._copies: dict[tuple[int, int], EncodedSnapshot] = {}

    @property
    def held_bytes(self) -> int:
        return sum(len(copy.data) for copy in self._copies.values())

    def ask(self, session: int, fragment: int, version: int) -> None:
        """Request this fragment at `version` (the current one) or later. Repeating it changes nothing."""
        if self._under_way.get(session) != fragment:
            self._asked.setdefault(session, OrderedDict()).setdefault(fragment, version)

    def push(
        self, session: Session, number: int, committed: Committed, source: Callable[[], BlobSource], snapshot_bytes: int
    ) -> bool:
        """Send the update of an announced commit. True if the session is too far behind: then a snapshot of this
        version or a later one replaces all updates that it has not taken.

        Too far is more bytes of a fragment than two snapshots have, or more versions than are remembered.
        """
        fragment, version = committed.fragment, committed.version
        asked = self._asked.get(number, OrderedDict())
        if fragment in asked:  # a snapshot that is yet to be made, and will hold this update
            asked[fragment] = max(version, asked[fragment])
            return False
        waiting = {b: n for b, n in session.transfers.unacknowledged(BlobKind.UPDATE).items() if b.fragment == fragment}
        if len(waiting) < MOST_UPDATES and sum(waiting.values()) + committed.size <= 2 * snapshot_bytes:
            session.push_blob(update_id(committed), source())
            return False
        for blob in waiting:
            session.cancel(blob)
        self._asked.setdefault(number, OrderedDict())[fragment] = version  # behind one that is on its way, if any
        return True

    def next(self, versions: Sequence[int], num_bytes: Callable[[int], int]) -> SnapshotRequest | None:
        """Whose turn it is; None while no node asks, all that do are served, or there is no room for a copy.

        `versions`: the current one of every fragment. `num_bytes`: of an encoded copy of a fragment.
        """
        for session, wanted in self._asked.items():
            if session in self._under_way:
                continue
            for fragment, at_least in wanted.items():
                copy = self._usable(fragment, versions[fragment], at_least, num_bytes(fragment))
                if copy is not None or self._has_room(num_bytes(fragment)):
                    return self._start_request(session, fragment, copy, num_bytes(fragment))
        return None

    def encoded(self, turn: SnapshotRequest, copy: EncodedSnapshot) -> None:
        kept = self._copies.setdefault((turn.fragment, copy.blob.version), copy)
        if self._under_way.get(turn.session) == turn.fragment:
            kept.users.add(turn.session)

    def copy_for(self, session: int) -> EncodedSnapshot | None:
        return next((copy for copy in self._copies.values() if session in copy.users), None)

    def put_off(self, session: int) -> None:
        """Request the session's snapshot again: it could not be sent now."""
        copy = self.copy_for(session)
        self.done(session)
        if copy is not None:
            self.ask(session, copy.blob.fragment, copy.blob.version)

    def done(self, session: int) -> None:
        """The session's snapshot arrived, was declined, or could not be sent."""
        self._under_way.pop(session, None)
        for copy in self._copies.values():
            copy.users.discard(session)

    def gone(self, session: int) -> None:
        self._asked.pop(session, None)
        self.done(session)

    def committed(self, fragment: int, version: int) -> None:
        """Drop unused copies of former versions."""
        old = [key for key, copy in self._copies.items() if key[0] == fragment and key[1] < version and not copy.users]
        for key in old:
            self._dropped(self._copies.pop(key))

    def check(self) -> None:
        assert self.held_bytes <= self._most_bytes or len(self._copies) == 1
        for copy in self._copies.values():
            assert all(self._under_way[session] == copy.blob.fragment for session in copy.users)

    def _usable(self, fragment: int, current: int, at_least: int, num_bytes: int) -> EncodedSnapshot | None:
        """A copy of the current version, or an older one that will do if there is no room for a new one."""
        versions = [version for f, version in self._copies if f == fragment and at_least <= version]
        newest = max(versions, default=None)
        if newest is None or (newest < current and self._has_room(num_bytes)):
            return None
        return self._copies[fragment, newest]

    def _has_room(self, num_bytes: int) -> bool:
        used = sum(len(copy.data) for copy in self._copies.values() if copy.users)
        return not used or used + num_bytes <= self._most_bytes

    def _start_request(
        self, session: int, fragment: int, copy: EncodedSnapshot | None, num_bytes: int
    ) -> SnapshotRequest:
        wanted = self._asked[session]
        del wanted[fragment]
        self._asked.move_to_end(session)
        if not wanted:
            del self._asked[session]
        self._under_way[session] = fragment
        if copy is not None:
            copy.users.add(session)
        else:
            for key in [key for key, kept in self._copies.items() if not kept.users]:  # the oldest first
                if self.held_bytes + num_bytes > self._most_bytes:
                    self._dropped(self._copies.pop(key))
        return SnapshotRequest(session=session, fragment=fragment, copy=copy)


class Downloads:
    """All snapshots and updates that one coordinator sends."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        compute: Worker,
        run: Callable[[list[ev.Command]], None],
        fatal: Failed,
        bulk: BulkPlane | None,
    ) -> None:
        """`ledger` is the machine's: what nodes were told. `run` queues commands after those that wait. `bulk`: where
        copies are written once for all nodes."""
        self._store, self._ledger, self._compute = store, ledger, compute
        self._run, self._fatal, self._bulk = run, fatal, bulk
        self._serving = SnapshotService(dropped=self._forget_object)
        self._encoding = False  # whether a copy is being made; one at a time is
        self._untold: tuple[SnapshotRequest, EncodedSnapshot] | None = None
        """A copy of a version that is durable but not announced yet."""

    def ask(self, session: int, fragment: int) -> None:
        self._serving.ask(session, fragment, self._ledger.versions[fragment])
        self._advance()

    def push(self, session: Session, number: int, committed: Committed) -> None:
        """Send the update of an announced commit, or a snapshot in its place, also of one that would have to be read
        from the object store first."""
        if not self._store.has_at_hand(committed.fragment, committed.version):
            return self.ask(number, committed.fragment)
        source = partial(self._store.update_source, committed.fragment, committed.version)
        if self._serving.push(session, number, committed, source, self._num_bytes(committed.fragment)):
            _log.info("snapshot instead of updates session=%d fragment=%d", number, committed.fragment)
            self._advance()

    def resend(self, session: Session, number: int, blob: BlobId) -> None:
        """Send an announced update, which the object store did not give the node, by the session."""
        committed = self._ledger.commits.get((blob.fragment, blob.version))
        if committed is None:
            return self.ask(number, blob.fragment)
        with suppress(AlreadyUnderWay):
            self.push(session, number, committed)

    def offer(self, session: Session, number: int, node: NodeId, now: float) -> None:
        """Send the prepared snapshot to a session, if it is still open. One that the object store has is read there;
        the session waits with its bytes, until the node asks for them because it cannot."""
        copy = self._serving.copy_for(number)
        if copy is None or session.state is not State.OPEN:
            return self.gone(number)
        offer = Offer(blob=copy.blob, size=len(copy.data), digest=copy.digest)
        bulk = self._bulk if copy.in_store else None
        if bulk is not None and bulk.is_open(node) and (place := bulk.place(copy.blob, "GET", copy.key)):
            session.send(place, now)
        try:
            session.send_blob(offer, BytesSource(copy.data), background=True)
        except (AlreadyUnderWay, LimitReached):  # when something has ended
            self._serving.put_off(number)

    def on_read(self, session: Session, number: int, blob: BlobId) -> None:
        """The node has read its snapshot in the object store."""
        if (copy := self._serving.copy_for(number)) is not None and copy.blob == blob:
            session.cancel(blob)
            self.on_blob_end(number, blob)

    def on_blob_end(self, session: int, blob: BlobId) -> None:
        if blob.kind is BlobKind.SNAPSHOT:
            self._serving.done(session)
        self._advance()

    def gone(self, session: int) -> None:
        self._serving.gone(session)
        self._advance()

    def committed(self, fragment: int, version: int) -> None:
        self._serving.committed(fragment, version)
        if self._untold is not None:
            self._encoded(*self._untold)

    def check(self) -> None:
        self._serving.check()

    def _advance(self) -> None:
        while not self._encoding and (turn := self._serving.next(self._ledger.versions, self._num_bytes)):
            if turn.copy is None:
                self._encoding = True
                self._compute.submit(partial(self._encode, turn.fragment), partial(self._made, turn), self._fatal)
            else:
                self._run([ev.OfferSnapshot(session=turn.session)])

    def _made(self, turn: SnapshotRequest, copy: EncodedSnapshot) -> None:
        def over(there: bool) -> None:
            copy.in_store = there
            self._encoded(turn, copy)

        if self._bulk is not None and self._bulk.is_open():
            self._bulk.put(copy.key, copy.data, over)
        else:
            over(False)

    def _forget_object(self, copy: EncodedSnapshot) -> None:
        if copy.in_store and self._bulk is not None:
            self._bulk.delete([copy.key])

    def _encoded(self, turn: SnapshotRequest, copy: EncodedSnapshot) -> None:
        if self._ledger.versions[turn.fragment] < copy.blob.version:
            self._untold = turn, copy
            return
        self._untold, self._encoding = None, False
        self._serving.encoded(turn, copy)
        self._run([ev.OfferSnapshot(session=turn.session)])
        self._advance()

    def _num_bytes(self, fragment: int) -> int:
        return blob_bytes(codec_named("fp32"), self._store.ledger.spec.identity.layout.fragments[fragment])

    def _encode(self, fragment: int) -> EncodedSnapshot:
        ledger = self._store.ledger
        return EncodedSnapshot(
            *commits.snapshot_blob(self._store.buffers[fragment], ledger.fragment(fragment), ledger.epoch)
        )
