"""The coordinator's executor: turns what sessions and storage report into events, and carries out the commands.

It never waits. Commands run one after the other in the order the machine gave them, so that a record is durable before
what follows from it is told; commits, uploads and downloads run beside them, each ending in one event. The daemon
(`daemon.py`) and the simulator (`sim/world.py`) run the same executor: time, workers, files and sockets are ports.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import assert_never

from farloop.algo.spec import BlobId, BlobKind, NodeId, WindowTerms
from farloop.coordinator import commits
from farloop.coordinator.aggregator import Result
from farloop.coordinator.bulk_plane import MOST_UNREAD, BulkPlane
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.downloads import Downloads
from farloop.coordinator.errors import MachineBroken
from farloop.coordinator.net.link_monitor import LinkMonitor
from farloop.coordinator.net.router import OF_THE_PROCESS, SessionRouter
from farloop.coordinator.net.sessions import Peer
from farloop.coordinator.observe.metrics import Metrics
from farloop.coordinator.observe.observer import Observer
from farloop.coordinator.observe.straggler_monitor import StragglerMonitor
from farloop.coordinator.storage.bucket import URL_S
from farloop.coordinator.storage.storage_queue import Failed, StorageQueue
from farloop.coordinator.storage.store import MOST_RESULT_BYTES, Store
from farloop.coordinator.uploads import AnchorUploads, DeltaUploads
from farloop.quant.errors import NonFiniteError
from farloop.runtime.ports import Action, Clock, Timer, Worker
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason
from farloop.wire.session import Session, State

_log = logging.getLogger(__name__)

TICK_S = 0.25  # between two looks at the clock, the sessions and the stragglers
STATUS_S = 1.0  # between two statuses: each costs time for every node
JUMP_S = 1.2  # after a look that comes this late the process has stood still: its deadlines are put off


class CoordinatorExecutor:
    """One start of the coordinator of one run. All methods are called in one thread."""

    def __init__(
        self,
        *,
        clock: Clock,
        compute: Worker,
        storage: StorageQueue,
        store: Store,
        machine: CoordinatorMachine,
        router: SessionRouter,
        fatal: Failed,
        adapt: str,
        observer: Observer | None = None,
        links: LinkMonitor | None = None,
        metrics: Metrics | None = None,
        bulk: BulkPlane | None = None,
        model_path: Path,
        changed: Action = lambda: None,
        on_event: Callable[[object], None] = lambda what: None,
        check: bool = False,
    ) -> None:
        """
        Args:
            bulk: the object store that deltas and updates go by; None: all go by sessions.
            fatal: gets the errors of workers that end the process.
            model_path: where the finished model is exported to.
            changed: called whenever `finished` or `idle` may have changed.
            on_event: called with every event that the machine has taken, every command as it is carried out, and
                what is found out about stragglers.
            check: assert the invariants after every event, and hide no error of what watches the run.
        """
        self.machine, self.storage = machine, storage
        self.finished = False  # whether the run is over and its model exported
        self.sessions: dict[NodeId, Peer] = {}  # open sessions of accepted nodes
        self.stragglers = StragglerMonitor(adapt, machine, self.happened, links=links, metrics=metrics, report=on_event)
        self._clock, self._compute, self._store, self._router = clock, compute, store, router
        self._observer, self._links, self._fatal, self._model_path = observer, links, fatal, model_path
        self._changed, self._on_event, self._check = changed, on_event, check
        self._peers: dict[int, Peer] = {}  # sessions that have greeted, by number
        self._commands: deque[ev.Command] = deque()
        self._drafts: deque[tuple[rec.WindowCommitted, int]] = deque()  # with a reservation each, to be computed
        self._result_bytes = 0  # of the commits that are being computed or made durable
        self._busy = False  # whether a command waits for storage
        self._scheduled = False  # whether `_go_on` is about to be called
        self._stopped = False
        self._timer: Timer | None = None
        self._due: float | None = None  # when the machine's timer was last armed for
        self._looked_at = clock.now()
        self._shown_at = float("-inf")  # when the observer's status was made
        self._bulk = bulk
        self._placed: dict[BlobId, msg.Offer] = {}  # deltas that nodes are writing to the store
        self._written: dict[tuple[NodeId, int], msg.Placed] = {}
        """By node and fragment, the last that was written before its offer was let in: that waits for others."""
        self._fetching: set[BlobId] = set()  # ... and those that are read from it
        self._unread: dict[int, set[BlobId]] = {}  # by session, updates that its node is reading there
        self._downloads = Downloads(store, machine.ledger, compute, self._run, fatal, bulk)
        self._deltas = DeltaUploads(store, storage, compute, clock)
        self._anchors = AnchorUploads(store, storage, compute, clock)

    def start(self) -> None:
        self._looked_at = self._clock.now()
        self._run(self.machine.start())
        self._tick()

    def stop(self) -> None:
        self._stopped = True
        self.storage.give_up()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def idle(self) -> bool:
        """No session is open, no node is expected back, and no command waits."""
        return not (self.sessions or self.machine.awaited or self._commands or self._busy)

    def say_goodbye(self, reason: Reason) -> None:
        for node in list(self.sessions):
            if peer := self._open_session_of(node):
                self._send(peer, msg.Leave(reason=reason))

    # --- Events

    def happened(self, event: ev.Event) -> None:
        """Give an event to the machine.

        An unexpected error in it is a bug. The ledger and the journal's records change together, so earlier decisions
        are valid and are carried out. If the invariants still hold, the error is raised to the event's cause; if not,
        the machine cannot be trusted.
        Raises MachineBroken: stop, and begin again from the journal.
        """
        now = self._clock.now()
        try:
            if self._observer is not None:
                self._observer.on_event(event, self.machine)
            self.stragglers.on_event(event, now)
        except Exception:
            if self._check:
                raise
            _log.exception("observer failed event=%s", type(event).__name__)
        try:
            commands = self.machine.handle(event, now)
        except Exception as error:
            self._run(self.machine.start())
            try:
                self.machine.check()
            except Exception as broken:
                raise MachineBroken(f"{type(event).__name__} broke the machine: {error}") from broken
            raise
        if self._check:
            self.machine.check()
        self._on_event(event)
        self._run(commands)

    def on_session_event(self, peer: Peer, event: wire_ev.SessionEvent) -> None:
        match event:
            case wire_ev.MessageReceived(message=msg.Hello() as hello):
                self._greet(peer, hello)
            case _ if self._links is not None and self._links.is_about_probe(event):
                pass
            case wire_ev.MessageReceived(message=msg.Placed() as placed):
                self._on_placed(peer, placed)
            case wire_ev.MessageReceived(message=message):
                self._on_message(peer, message)
            case wire_ev.BlobReceived(blob=BlobId(kind=BlobKind.SNAPSHOT) as blob, data=data):
                asked = self.sessions.get(blob.node)
                self._anchors.store(blob, data, partial(self._happened_to, asked), partial(self._fail, asked))
            case wire_ev.BlobCorrupt(blob=blob) | wire_ev.BlobIdle(blob=blob) if blob.kind is BlobKind.SNAPSHOT:
                if failed := self._anchors.on_failed(blob, spoiled=isinstance(event, wire_ev.BlobCorrupt)):
                    self.happened(failed)
            case wire_ev.BlobReceived(blob=blob, data=data):
                self.stragglers.pacing.whole(blob, self._clock.now())
                if offer := self._deltas.arrived(blob):
                    self._store_delta(offer, data)
            case wire_ev.BlobCorrupt(blob=blob):
                if offer := self._deltas.arrived(blob):
                    why = "the bytes do not have the announced digest"
                    self.happened(self._deltas.rejected(offer, Reason.CORRUPT, why))
            case wire_ev.BlobIdle(blob=blob):
                if offer := self._deltas.arrived(blob):
                    self.happened(self._deltas.rejected(offer, Reason.IDLE, Reason.IDLE.sentence))
            case wire_ev.SessionClosed(reason=reason, detail=detail):
                self._on_session_end(peer, reason, detail)
            case wire_ev.BlobSent(blob=blob) | wire_ev.BlobDeclined(blob=blob):
                self._snapshot_over(peer, blob)
                self._downloads.on_blob_end(peer.number, blob)
            case _:
                assert_never(event)
        if not isinstance(event, wire_ev.MessageReceived):
            self._receive_waiting()
        if self._check:
            self._deltas.check()
            self._downloads.check()

    def _receive_waiting(self) -> None:
        while waited := self._deltas.next():
            self._receive(waited)

    def _greet(self, peer: Peer, hello: msg.Hello) -> None:
        self._peers[peer.number] = peer
        if peer.owner is not None and hello.node != peer.owner:
            detail = f"the key is that of {peer.owner}, the node calls itself {hello.node}"
            refused = msg.Refused(reason=Reason.WRONG_KEY, detail=detail, retriable=False)
            return self._run([ev.Refuse(session=peer.number, refused=refused)])
        self.happened(ev.NodeHello(session=peer.number, node=hello.node, hello=hello))

    def _on_message(self, peer: Peer, message: msg.Message) -> None:
        if (node := peer.node) is None:
            return
        links, now = self._links, self._clock.now()
        if links is None or not links.on_message(peer, node, message, self.machine.members, now):
            self.happened(ev.NodeMessage(session=peer.number, node=node, message=message))

    def _on_session_end(self, peer: Peer, reason: Reason, detail: str) -> None:
        node = peer.node
        self._peers.pop(peer.number, None)
        self._drop_session(peer)
        try:
            self._downloads.gone(peer.number)
            self._unread.pop(peer.number, None)
            if node is not None:
                self._placed = {blob: offer for blob, offer in self._placed.items() if blob.node != node}
                self._written = {of: placed for of, placed in self._written.items() if of[0] != node}
                self._deltas.on_disconnect(node)
            if self._observer is not None:
                self._observer.on_disconnect(node, reason, detail, self.machine)
        finally:  # the machine is told, whatever goes wrong here
            if node is not None:
                self.happened(ev.NodeDisconnected(session=peer.number, node=node, reason=reason))

    def _drop_session(self, peer: Peer) -> None:
        if peer.node is not None and self.sessions.get(peer.node) is peer:
            del self.sessions[peer.node]
        peer.node = None
        self._changed()

    # --- Commands

    def _run(self, commands: list[ev.Command]) -> None:
        self._commands.extend(commands)
        self._changed()
        # Never at once: the cause of an event is still working for a session. And once for all events until then: each
        # look for the earliest deadline goes through all nodes.
        if not self._scheduled:
            self._scheduled = True
            self._clock.call_later(0.0, self._go_on)

    def _go_on(self) -> None:
        """Arm the machine's timer, and carry out commands until one has to wait for storage."""
        self._scheduled = False
        self._arm()
        while self._commands and not (self._busy or self._stopped):
            command = self._commands.popleft()
            if self._observer is not None:
                self._observer.on_command(command)
            self._on_event(command)
            self._execute(command)
        self._changed()

    def _release(self) -> None:
        """What a command waited for is durable."""
        self._busy = False
        self._go_on()

    def _execute(self, command: ev.Command) -> None:
        match command:
            case ev.Record(record=rec.Adopted() as record):
                self.storage.adopt(record, self._release)
                self._busy = True
            case ev.Record(record=record):
                self.storage.append(record, self._release)
                self._busy = True
            case ev.Accept(session=number, node=node, welcome=welcome):
                if peer := self._peers.get(number):
                    if old := self.sessions.get(node):
                        old.node = None
                    self.sessions[node], peer.node = peer, node
                    self._send(peer, dataclasses.replace(welcome, lane_token=peer.token))
            case ev.Refuse(session=number, refused=refused):
                if peer := self._peers.pop(number, None):
                    self._send(peer, refused)
            case ev.CloseSession(session=number, reason=reason, told=told):
                if peer := self._peers.pop(number, None):
                    self._drop_session(peer)
                    self._router.closed_by_us(peer, reason, told)
            case ev.Tell(node=node, message=message):
                if peer := self.sessions.get(node):
                    self._send(peer, message)
            case ev.Receive(offer=offer):
                self._receive(offer)
            case ev.ReceiveAnchor(offer=offer):
                if peer := self._open_session_of(offer.blob.node):
                    with self._router.working_for(peer) as session:
                        if failed := self._anchors.admit(session, command):
                            self.happened(failed)
            case ev.Publish(nodes=nodes, committed=committed):
                self._publish(nodes, committed)
                self._downloads.committed(committed.fragment, committed.version)
            case ev.SendSnapshot(node=node, fragment=fragment):
                if peer := self.sessions.get(node):
                    self._downloads.ask(peer.number, fragment)
            case ev.OfferSnapshot(session=number):
                if (peer := self._peers.get(number)) and peer.node is not None:
                    with self._router.working_for(peer) as session:
                        self._downloads.offer(session, number, peer.node, self._clock.now())
                else:
                    self._downloads.gone(number)
            case ev.Commit():
                self._commit(command)
            case ev.Forget(blob=blob):
                self._deltas.forget([blob])
            case ev.Finish():
                self.storage.export(self._model_path, self._exported)
                self._busy = True
            case _:
                assert_never(command)

    def _exported(self) -> None:
        self.finished = True
        self._release()

    def _send(self, peer: Peer, message: msg.Message) -> None:
        if peer.session.state in (State.OPENING, State.OPEN):
            with self._router.working_for(peer) as session:
                session.send(message, self._clock.now())

    def _open_session_of(self, node: NodeId) -> Peer | None:
        peer = self.sessions.get(node)
        return peer if peer is not None and peer.session.state is State.OPEN else None

    def _publish(self, nodes: tuple[NodeId, ...], committed: msg.Committed) -> None:
        place, bulk, blob = None, self._bulk, msg.update_id(committed)
        if bulk is not None and bulk.is_open() and (key := self._store.update_key(blob.fragment, blob.version)):
            place = bulk.place(blob, "GET", key)
        for node in nodes:
            if (peer := self._open_session_of(node)) is not None:
                with self._router.working_for(peer) as session:
                    if bulk is not None and place is not None and bulk.is_open(node) and self._reads(peer, blob):
                        session.send(place, self._clock.now())
                        session.send(committed, self._clock.now())
                        if (opens := committed.next_window) and (ahead := self._place_ahead(bulk, node, opens)):
                            session.send(ahead, self._clock.now())
                    else:
                        session.send(committed, self._clock.now())
                        self._downloads.push(session, peer.number, committed)

    def _place_ahead(self, bulk: BulkPlane, node: NodeId, opens: WindowTerms) -> msg.Place | None:
        """Where the node writes its delta to the next window: it need not offer that first, and wait for the answer."""
        blob = BlobId(
            kind=BlobKind.DELTA,
            fragment=opens.fragment,
            version=opens.window,
            node=node,
            incarnation=self.machine.members[node].incarnation,
        )
        offer = msg.Offer(blob=blob, size=0, digest=0, window=opens.window, ahead=self._store.ledger.epoch)
        return bulk.place(blob, "PUT", rec.object_key(rec.InputStored.of(offer)), ahead=offer.ahead)

    def _reads(self, peer: Peer, update: BlobId) -> bool:
        """Note that its node is to read an update from the store; False: it has too many of them to read."""
        unread = self._unread.setdefault(peer.number, set())
        if sum(blob.fragment == update.fragment for blob in unread) >= MOST_UNREAD:
            return False
        unread.add(update)
        return True

    def _snapshot_over(self, peer: Peer, blob: BlobId) -> None:
        """A node that holds a snapshot reads none of the updates in it."""
        if blob.kind is BlobKind.SNAPSHOT and (unread := self._unread.get(peer.number)):
            unread -= {b for b in unread if b.fragment == blob.fragment and b.version <= blob.version}

    # --- Uploads

    def _receive(self, offer: msg.Offer, *, by_store: bool = True) -> None:
        blob, bulk, window = offer.blob, self._bulk, self.machine.windows.get(offer.blob.fragment)
        if (peer := self._open_session_of(blob.node)) is None:
            return
        by_store = blob in self._fetching or (by_store and bulk is not None and bulk.is_open(blob.node))
        with self._router.working_for(peer) as session:
            failed = self._deltas.receive(session, offer, window, by_store=by_store)
            if failed is not None:
                return self.happened(failed)
            if (to_come := self._deltas.to_come(blob)) is not None:  # else it waits for room
                self.stragglers.pacing.asked(blob, to_come, self._clock.now())
            if by_store and blob not in self._fetching and self._deltas.memory(blob) is not None:
                self._place(session, offer)

    def _place(self, session: Session, offer: msg.Offer) -> None:
        """Let the node write its delta to the store; by the session if it cannot within the life of the URL."""
        assert self._bulk is not None
        if not offer.ahead:
            place = self._bulk.place(offer.blob, "PUT", rec.object_key(rec.InputStored.of(offer)))
            if place is None:
                return self._receive(offer, by_store=False)
            session.send(place, self._clock.now())
        self._placed[offer.blob] = offer
        early = self._written.pop((offer.blob.node, offer.blob.fragment), None)
        if early is not None and early.blob == offer.blob:
            return self._on_written(early)

        def expired() -> None:
            if self._placed.get(offer.blob) is offer and not self._stopped:
                self._not_placed(offer, "it was not written in time")

        self._clock.call_later(URL_S, expired)

    def _on_placed(self, peer: Peer, placed: msg.Placed) -> None:
        blob, bulk = placed.blob, self._bulk
        if peer.node is None or bulk is None:
            return
        if blob.kind is BlobKind.SNAPSHOT:
            if placed.detail:  # the node asks the session for it
                return bulk.failed(placed.detail, peer.node)
            self._snapshot_over(peer, blob)
            with self._router.working_for(peer) as session:
                self._downloads.on_read(session, peer.number, blob)
        elif blob in self._unread.get(peer.number, ()):
            self._unread[peer.number].discard(blob)
            if placed.detail:
                bulk.failed(placed.detail, peer.node)
                with self._router.working_for(peer) as session:
                    self._downloads.resend(session, peer.number, blob)
        elif blob in self._placed and blob.node == peer.node:
            self._on_written(placed)
        elif blob.node == peer.node and 0 <= blob.fragment < len(self._store.buffers):
            self._written[blob.node, blob.fragment] = placed

    def _on_written(self, placed: msg.Placed) -> None:
        assert self._bulk is not None
        if placed.detail:
            self._not_placed(self._placed[placed.blob], placed.detail)
        else:
            self._fetch(self._bulk, self._placed.pop(placed.blob))

    def _not_placed(self, offer: msg.Offer, why: str) -> None:
        assert self._bulk is not None
        del self._placed[offer.blob]
        self._bulk.failed(why, offer.blob.node)
        self._receive(offer, by_store=False)

    def _fetch(self, bulk: BulkPlane, offer: msg.Offer) -> None:
        """Read a delta that its node has written."""
        blob, into = offer.blob, self._deltas.memory(offer.blob)
        if into is None:  # it became void
            return

        def over(there: bool) -> None:
            self._fetching.discard(blob)
            if self._stopped or self._deltas.memory(blob) is not into:
                return
            if not there:
                return self._receive(offer, by_store=False)
            self.stragglers.pacing.whole(blob, self._clock.now())
            if self._deltas.arrived(blob):
                self._store_delta(offer, into, in_store=True)
            self._receive_waiting()

        self._fetching.add(blob)
        bulk.get(rec.object_key(rec.InputStored.of(offer)), into, offer.digest, blob.node, over)

    def _store_delta(self, offer: msg.Offer, data: bytearray, *, in_store: bool = False) -> None:
        peer = self.sessions.get(offer.blob.node)

        def failed(error: Exception) -> None:
            self._fail(peer, error, self._deltas.rejected(offer, Reason.FAULT, f"{type(error).__name__}: {error}"))

        try:
            self._deltas.store(offer, data, partial(self._happened_to, peer), failed, in_store=in_store)
        except Exception as error:  # noqa: BLE001 - the edge of a session
            failed(error)

    def _happened_to(self, peer: Peer | None, event: ev.Event) -> None:
        """Give the machine the result of a job for a session, which may be over."""
        try:
            self.happened(event)
        except OF_THE_PROCESS:
            raise
        except Exception as error:  # noqa: BLE001 - the edge of a session
            self._fail(peer, error)

    def _fail(self, peer: Peer | None, error: Exception, outcome: ev.Event | None = None) -> None:
        """A job for a session failed: report the outcome, and end the session if it is open."""
        if self._check or isinstance(error, OF_THE_PROCESS):
            return self._fatal(error)
        if peer is None:
            _log.error("job of an ended session failed", exc_info=error)
        else:
            with self._router.working_for(peer):
                raise error
        if outcome is not None:
            self._happened_to(peer, outcome)

    # --- Commits

    def _commit(self, command: ev.Commit) -> None:
        """Reserve room, compute, make durable: three jobs."""
        draft = command.draft

        def has_room(reserved: int) -> None:
            self._drafts.append((draft, reserved))
            self._compute_next()

        def refused(error: Exception) -> None:
            self.happened(ev.CommitFailed(fragment=draft.fragment, detail=str(error)))

        self.storage.reserve(draft.fragment, command.codec_down, has_room, refused)

    def _compute_next(self) -> None:
        """Compute the next commits, within a memory limit: at a run's end all fragments commit at once."""
        while self._drafts:
            num_bytes = self._num_result_bytes(self._drafts[0][0].fragment)
            if self._result_bytes and self._result_bytes + num_bytes > MOST_RESULT_BYTES:
                return
            self._result_bytes += num_bytes
            self._compute_now(*self._drafts.popleft())

    def _num_result_bytes(self, fragment: int) -> int:
        """Of the new buffers of a commit: anchor, target and the outer optimizer's state."""
        buffers = self._store.buffers[fragment]
        return (2 + len(buffers.outer)) * buffers.anchor.nbytes

    def _result_over(self, fragment: int) -> None:
        self._result_bytes = max(0, self._result_bytes - self._num_result_bytes(fragment))
        self._compute_next()

    def _compute_now(self, draft: rec.WindowCommitted, reserved: int) -> None:
        addends, apart = self._deltas.addends(draft), self._deltas.apart(draft)
        ledger, started = self._store.ledger, self._clock.now()

        def computed(result: Result) -> None:
            merge_s = self._clock.now() - started
            done = partial(self._committed, result, merge_s, self._clock.now())
            commit = partial(self.storage.commit, draft, result, reserved, done)
            if self._bulk is None or not self._bulk.is_open():
                return commit()
            # A record of what is in the store must not be durable before that is.
            self._bulk.put(rec.object_key(commits.completed(draft, result)), result.update, commit)

        def failed(error: Exception) -> None:
            if not isinstance(error, NonFiniteError):  # finite deltas can add up to more than fp32 holds
                return self._fatal(error)
            self.storage.release(reserved)
            self._result_over(draft.fragment)
            why = str(error)

            def overflowed(longest: BlobId | None) -> None:
                self.happened(ev.SumOverflow(fragment=draft.fragment, longest=longest, why=why))

            self._compute.submit(partial(commits.longest, ledger, draft, addends), overflowed, self._fatal)

        self._compute.submit(partial(self._store.compute, draft, addends, apart), computed, failed)

    def _committed(self, result: Result, merge_s: float, computed_at: float, record: rec.WindowCommitted) -> None:
        self._deltas.forget([addend.blob for addend in record.blobs])
        if self._observer is not None:
            self._observer.on_committed(record, result, merge_s, self._clock.now() - computed_at)
        self.happened(ev.CommitDone(record=record))
        self._result_over(record.fragment)

    # --- Time

    def _arm(self) -> None:
        due = self.machine.next_timer()
        if due == self._due or self._stopped:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due, self._timer = due, None
        if due is not None:
            self._timer = self._clock.call_later(max(0.0, due - self._clock.now()), self._timer_fired)

    def _timer_fired(self) -> None:
        self._due = self._timer = None
        self._run_timers()

    def _run_timers(self) -> None:
        now = self._clock.now()
        if now - self._looked_at > JUMP_S:  # this process stood still
            self.machine.clock_jumped(now - self._looked_at)
            self.stragglers.pacing.stood_still()
        self._looked_at = now
        due = self.machine.next_timer()
        commands = self.machine.handle_timer(now) if due is not None and due <= now else []
        if self._check:
            self.machine.check()
        self._run(commands)

    def _tick(self) -> None:
        if self._stopped:
            return
        self._clock.call_later(TICK_S, self._tick)
        self._run_timers()
        self.storage.look()
        if self._bulk is not None and self._store.obsolete and self._bulk.is_open():
            self._bulk.delete([self._store.obsolete.popleft() for _ in range(len(self._store.obsolete))])
        if self._clock.now() - self._shown_at >= STATUS_S:
            self._shown_at = self._clock.now()
            if self._observer is not None:
                self._observer.refresh(self.machine)
        if self._links is not None:
            self._links.poll(self.sessions, self.machine.members, self._clock.now())
        self.stragglers.poll(self._clock.now(), held=bool(self.storage.hold))
