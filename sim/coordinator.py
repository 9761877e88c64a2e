"""One start of the coordinator on virtual time: `coordinator/daemon.py` with the same machine, aggregator and sessions.

Commands run one after the other, so that a record is durable before what follows from it is told; commits and inputs
run beside them, each ending in exactly one event. The disk and the arithmetic each have a worker with a queue.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import assert_never

from farloop.algo.spec import BlobId, BlobKind, Fragment, NodeId, Revision, RunSpec
from farloop.coordinator import aggregator, commits
from farloop.coordinator.adoption_checks import adoption_of
from farloop.coordinator.change_terms import revision_asked_for
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import RETRY_S
from farloop.coordinator.decide.hold import StorageHold
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.downloads import EncodedSnapshot, SnapshotRequest, SnapshotService
from farloop.coordinator.errors import NoRoom
from farloop.coordinator.observe.straggler_detector import StragglerDetector
from farloop.coordinator.uploads import DeltaIntake, ExpectedAnchors, Verified, expected_delta, is_measured, verify
from farloop.quant.blob import blob_bytes
from farloop.quant.errors import BadBlob, NonFiniteError
from farloop.quant.registry import codec_named
from farloop.sim.disk import Disk, MemoryStore, Worker
from farloop.sim.router import Peer, Router
from farloop.sim.scenario import Scenario
from farloop.sim.virtual_time import Action, Process
from farloop.sim.watching import LOOK_S, look
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, Reason
from farloop.wire.session import State

JUMP_S = 1.2
"""A deadline that fires this late tells of a stop of our own process (protocol C)."""


class CoordinatorActor:
    """The daemon. `saw` is told every event that its machine takes, before the commands are carried out."""

    def __init__(
        self,
        process: Process,
        disk: Disk,
        spec: RunSpec,
        scenario: Scenario,
        rng: random.Random,
        saw: Callable[[object], None],
        *,
        rewind: bool = False,
        adopt_after_s: float | None = None,
    ) -> None:
        """`adopt_after_s`: go on from what nodes hold, and be as patient as that with those that are away."""
        self.process, self._rng, self._saw = process, rng, saw
        self.store = MemoryStore(disk, spec, rewind=rewind)
        self.machine = CoordinatorMachine(
            self.store.ledger.copy(),
            now=process.now,
            liveness_s=scenario.timing.liveness_s,
            expire_s=scenario.expire_s,
            floor_share=scenario.floor_share,
            drops_silent=scenario.drops_silent,
            adopt=None if adopt_after_s is None else adoption_of(adopt_after_s, self.store.fetched, newest=True),
        )
        self.hold = StorageHold(self.machine.alarms)
        self.finished = False
        self._storage = Worker(process, lambda: rng.uniform(*scenario.job_s))
        self._compute = Worker(process, lambda: rng.uniform(*scenario.job_s))
        self._commands: deque[ev.Command] = deque()
        self._busy = False
        self._peers: dict[int, Peer] = {}
        self._sessions: dict[NodeId, Peer] = {}
        self._intake = DeltaIntake()
        """Deltas that are here and not durable yet."""
        self._anchors = ExpectedAnchors()
        self._serving = SnapshotService()
        self._encoding = False
        """Whether a snapshot is being made."""
        self._inputs: dict[BlobId, bytes | bytearray] = {b: self.store.read_input(b) for b in self.store.ledger.inputs}
        self.router = Router(process, self._heard, scenario.limits, scenario.timing)
        self._timer: float | None = None
        self.watch = StragglerDetector(scenario.adapt)
        self.machine.check()
        self._run_commands(self.machine.start())
        if scenario.adapt != "off":
            self._look()

    def change_terms(self, given: Mapping[str, str]) -> Revision | str:
        """As somebody asks for at its door: the revision, or why there is none."""
        try:
            revision = revision_asked_for(self.machine, given)
        except ValueError as error:
            return str(error)
        self._happened(ev.TermsGiven(revision=revision))
        return revision

    def crash(self) -> None:
        """Die now, perhaps in the middle of a sync."""
        self._storage.interrupt(finished=self._rng.random() < 0.5)
        self.process.kill()

    @property
    def _now(self) -> float:
        return self.process.now

    # --- events

    def _happened(self, event: ev.Event) -> None:
        self.watch.saw(event, self.machine, self._now)
        commands = self.machine.handle(event, self._now)
        self.machine.check()
        self._saw(event)
        self._run_commands(commands)

    def _run_commands(self, commands: list[ev.Command]) -> None:
        self._commands.extend(commands)
        self._arm()
        self._go_on()

    def _heard(self, peer: Peer, event: wire_ev.SessionEvent) -> None:
        """What a session reports."""
        match event:
            case wire_ev.MessageReceived(message=msg.Hello() as hello):
                self._peers[peer.number] = peer
                self._happened(ev.NodeHello(session=peer.number, node=hello.node, hello=hello))
            case wire_ev.MessageReceived(message=message):
                node = self._node_of(peer)
                if node is None:
                    return
                self._happened(ev.NodeMessage(session=peer.number, node=node, message=message))
            case wire_ev.BlobReceived(blob=BlobId(kind=BlobKind.SNAPSHOT) as blob, data=data):
                self._compute.submit(lambda: None, partial(self._keep_anchor, blob, data))
            case wire_ev.BlobCorrupt(blob=blob) | wire_ev.BlobIdle(blob=blob) if blob.kind is BlobKind.SNAPSHOT:
                if failed := self._anchors.ended(blob, spoiled=isinstance(event, wire_ev.BlobCorrupt)):
                    self._happened(failed)
            case wire_ev.BlobReceived(blob=blob, data=data):
                self.watch.pacing.whole(blob, self._now)
                if offer := self._intake.arrived(blob):
                    self._verify(offer, data)
            case wire_ev.BlobCorrupt(blob=blob):
                if offer := self._intake.arrived(blob):
                    self._reject(offer, Reason.CORRUPT, "the bytes do not have the announced digest")
            case wire_ev.BlobIdle(blob=blob):
                if offer := self._intake.arrived(blob):
                    self._reject(offer, Reason.IDLE, Reason.IDLE.sentence)
            case wire_ev.SessionClosed(reason=reason):
                node = self._node_of(peer)
                self._peers.pop(peer.number, None)
                self._serving.gone(peer.number)
                self._serve()
                if node is not None:
                    self._drop_session(peer)
                    self._intake.parted(node)
                    self._happened(ev.NodeDisconnected(session=peer.number, node=node, reason=reason))
            case wire_ev.BlobSent(blob=blob) | wire_ev.BlobDeclined(blob=blob):
                if blob.kind is BlobKind.SNAPSHOT:
                    self._serving.done(peer.number)
                self._serve()
            case _:
                assert_never(event)
        if not isinstance(event, wire_ev.MessageReceived):
            while waited := self._intake.next():
                self._receive(waited)
        self._intake.check()

    def _node_of(self, peer: Peer) -> NodeId | None:
        return next((node for node, known in self._sessions.items() if known is peer), None)

    def _drop_session(self, peer: Peer) -> None:
        self._sessions = {node: known for node, known in self._sessions.items() if known is not peer}

    # --- commands

    def _go_on(self) -> None:
        """Carry out commands until one has to wait for a worker."""
        while self._commands and not self._busy and self.process.alive:
            command = self._commands.popleft()
            self._saw(command)
            self._execute(command)

    def _hold(self) -> None:
        self._busy = True

    def _release(self) -> None:
        self._busy = False
        self._go_on()

    def _execute(self, command: ev.Command) -> None:
        match command:
            case ev.Record(record=record):
                self._hold()
                self._append("a record", record, b"", self._release)
            case ev.ReceiveAnchor():
                self._receive_anchor(command)
            case ev.Accept(session=number, node=node, welcome=welcome):
                if peer := self._peers.get(number):
                    self._sessions[node] = peer
                    self._tell(peer, dataclasses.replace(welcome, lane_token=peer.token))
            case ev.Refuse(session=number, refused=refused):
                if peer := self._peers.pop(number, None):
                    self._tell(peer, refused)
            case ev.CloseSession(session=number, reason=reason):
                if peer := self._peers.pop(number, None):
                    self._drop_session(peer)
                    self.router.closed_by_us(peer, reason)
            case ev.Tell(node=node, message=message):
                if peer := self._sessions.get(node):
                    self._tell(peer, message)
            case ev.Receive(offer=offer):
                self._receive(offer)
            case ev.Publish(nodes=nodes, committed=committed):
                self._publish(nodes, committed)
                self._serving.committed(committed.fragment, committed.version)
            case ev.SendSnapshot(node=node, fragment=fragment):
                if peer := self._sessions.get(node):
                    self._serving.ask(peer.number, fragment, self.machine.ledger.versions[fragment])
                    self._serve()
            case ev.OfferSnapshot(session=number):
                self._offer_snapshot(number)
            case ev.Commit():
                self._commit(command)
            case ev.Forget(blob=blob):
                self._inputs.pop(blob, None)
            case ev.Finish():
                self.finished = True
            case _:
                assert_never(command)

    def _tell(self, peer: Peer, message: msg.Message) -> None:
        if peer.session.state in (State.OPENING, State.OPEN):
            peer.session.send(message, self._now)
            self.router.flush(peer)

    def _receive(self, offer: msg.Offer) -> None:
        peer = self._sessions.get(offer.blob.node)
        if peer is None or peer.session.state is not State.OPEN:
            return
        fragment = self._fragment(offer.blob.fragment)
        window = self.machine.windows.get(fragment.index)
        codec_up = self.machine.ledger.codec_of_deltas(fragment.index, offer.window, offer.blob.node)
        wrong = self._intake.let_in(peer.session, offer, window, fragment, codec_up, self._now)
        if wrong is not None:
            return self._reject(offer, Reason.TOO_LARGE, wrong)
        if (num_bytes := self._intake.to_come(offer.blob)) is not None:
            self.watch.pacing.asked(offer.blob, num_bytes, self._now)
        self.router.flush(peer)

    def _fragment(self, index: int) -> Fragment:
        return self.store.ledger.spec.identity.layout.fragments[index]

    def _reject(self, offer: msg.Offer, reason: Reason, detail: str) -> None:
        self._intake.settled(offer.blob)
        self._happened(ev.InputFailed(offer=offer, reason=reason, detail=detail))

    def _verify(self, offer: msg.Offer, data: bytearray) -> None:
        """Verify and spool a delta; durable before it counts (protocol P)."""
        ledger, fragment = self.store.ledger, self._fragment(offer.blob.fragment)
        codec_up = ledger.codec_of_deltas(fragment.index, offer.window, offer.blob.node)
        expect = expected_delta(offer, fragment, codec_up, ledger.epoch)

        def spool() -> None:
            try:
                found = verify(data, offer, expect, is_measured(offer, ledger))
            except BadBlob as error:
                return self._reject(offer, Reason.CORRUPT, str(error))
            self._spool(found, data)

        self._compute.submit(lambda: None, spool)

    def _spool(self, found: Verified, data: bytearray) -> None:
        offer = found.offer

        def stored() -> None:
            self._intake.settled(offer.blob)
            self._inputs[offer.blob] = data
            self._happened(ev.InputStored(offer=offer, payload=found.payload))

        if not commits.spools_inputs(self.store.ledger.spec.terms):
            return self._storage.submit(lambda: None, stored)
        self._append(f"a delta of {offer.blob.node}", rec.InputStored.of(offer, found.payload), data, stored)

    def _append(self, what: str, record: rec.Record, attachment: bytes | bytearray, then: Action) -> None:
        """Make a record durable, as soon as there is room for it."""
        failures: list[NoRoom] = []

        def append() -> None:
            try:
                if isinstance(record, rec.Adopted):
                    self.store.adopt(record)
                else:
                    self.store.append(record, attachment)
            except NoRoom as error:
                failures.append(error)

        def done() -> None:
            if failures:
                self.hold.begin(what, failures[0])
                return self.process.after(RETRY_S, lambda: self._append(what, record, attachment, then))
            self.hold.end(what)
            then()

        self._storage.submit(append, done)

    def _receive_anchor(self, command: ev.ReceiveAnchor) -> None:
        peer = self._sessions.get(command.offer.blob.node)
        if peer is None or peer.session.state is not State.OPEN:
            return
        size = blob_bytes(codec_named("fp32"), self._fragment(command.anchor.fragment))
        if failed := self._anchors.let_in(peer.session, command, size, self._now):
            return self._happened(failed)
        self.router.flush(peer)

    def _keep_anchor(self, blob: BlobId, data: bytearray) -> None:
        ref = self._anchors.arrived(blob)
        if ref is None:
            return
        try:
            commits.fetched_anchor(data, self._fragment(ref.fragment), ref)
        except BadBlob:
            return self._happened(ev.AnchorFailed(node=blob.node, anchor=ref, spoiled=True))
        record = rec.AnchorFetched(anchor=ref, node=blob.node, blob_digest=blob_digest(data))
        self._append(f"an anchor of {blob.node}", record, data, lambda: self._happened(ev.AnchorStored(record=record)))

    def _publish(self, nodes: tuple[NodeId, ...], committed: msg.Committed) -> None:
        for node in nodes:
            peer = self._sessions.get(node)
            if peer is None or peer.session.state is not State.OPEN:
                continue
            source = partial(self.store.update_source, committed.fragment, committed.version)
            size = blob_bytes(codec_named("fp32"), self._fragment(committed.fragment))
            peer.session.send(committed, self._now)
            if self._serving.push(peer.session, peer.number, committed, source, size):
                self._serve()
            self.router.flush(peer)

    def _serve(self) -> None:
        """Make and offer the snapshots whose turn it is, beside the order of commands."""

        def made(turn: SnapshotRequest) -> None:
            buffers, epoch = self.store.buffers[turn.fragment], self.store.ledger.epoch
            copy = EncodedSnapshot(*commits.snapshot_blob(buffers, self._fragment(turn.fragment), epoch))
            assert copy.blob.version <= self.machine.ledger.versions[turn.fragment], "nobody was told of it"
            self._encoding = False
            self._serving.encoded(turn, copy)
            self._run_commands([ev.OfferSnapshot(session=turn.session)])
            self._serve()

        codec = codec_named("fp32")
        while not self._encoding:
            turn = self._serving.next(self.machine.ledger.versions, lambda f: blob_bytes(codec, self._fragment(f)))
            if turn is None:
                return
            if turn.copy is not None:
                self._run_commands([ev.OfferSnapshot(session=turn.session)])
            else:
                self._encoding = True
                self._compute.submit(lambda: None, partial(made, turn))
        self._serving.check()

    def _offer_snapshot(self, session: int) -> None:
        peer, copy = self._peers.get(session), self._serving.copy_for(session)
        if peer is None or copy is None or peer.session.state is not State.OPEN:
            return self._serving.gone(session)
        offer = msg.Offer(blob=copy.blob, size=len(copy.data), digest=copy.digest)
        try:
            peer.session.send_blob(offer, BytesSource(copy.data), background=True)
        except (AlreadyUnderWay, LimitReached):  # when something has ended
            self._serving.put_off(session)
        self.router.flush(peer)

    def _commit(self, command: ev.Commit) -> None:
        """Reserve, compute, make durable: three jobs, the last of which is the commit (protocol O)."""
        draft, results, records = command.draft, list[aggregator.Result](), list[rec.WindowCommitted]()
        too_much: list[ev.SumOverflow] = []

        def reserved() -> None:
            what = f"the update of fragment {draft.fragment}"
            try:
                self.store.reserve(draft.fragment, command.codec_down)
            except NoRoom as error:
                self.hold.begin(what, error)
                failed = ev.CommitFailed(fragment=draft.fragment, version=draft.version, detail=str(error))
                return self._happened(failed)
            self.hold.end(what)
            self._compute.submit(compute, computed)

        def compute() -> None:
            try:
                results.append(self._compute_commit(command))
            except NonFiniteError as error:
                blame = commits.longest(self.store.ledger, draft, self._addends(draft))
                too_much.append(ev.SumOverflow.of(draft, blame, error))

        def computed() -> None:
            if too_much:
                return self._happened(too_much[0])
            self._storage.submit(lambda: records.append(self.store.commit(draft, results[0])), durable)

        def durable() -> None:
            for addend in draft.blobs:
                self._inputs.pop(addend.blob, None)
            self._happened(ev.CommitDone(record=records[0]))

        self._storage.submit(lambda: None, reserved)

    def _compute_commit(self, command: ev.Commit) -> aggregator.Result:
        draft = command.draft
        buffers = self.store.buffers[draft.fragment]
        apart = [self._inputs[blob] for blob in commits.apart(draft)]
        return commits.compute(self.store.ledger, buffers, draft, self._addends(draft), apart)

    def _addends(self, draft: rec.WindowCommitted) -> list[tuple[bytes | bytearray, float]]:
        return [(self._inputs[addend.blob], addend.weight) for addend in draft.blobs]

    # --- time

    def _look(self) -> None:
        """As the daemon does, some times a second; what is found and done is on the tape."""
        look(self.watch, self.machine, self._now, held=bool(self.hold), saw=self._saw, happened=self._happened)
        if not self.finished:
            self.process.after(LOOK_S, self._look)

    def _arm(self) -> None:
        due = self.machine.next_timer()
        if due is None or self._timer == due:
            return
        self._timer = due
        self.process.after(max(0.0, due - self._now), lambda: self._keep_time(due))

    def _keep_time(self, armed: float) -> None:
        if self._timer != armed:
            return
        self._timer = None
        if self._now - armed > JUMP_S:
            self.machine.clock_jumped(self._now - armed)
            self.watch.clock_jumped()
        due = self.machine.next_timer()
        commands = self.machine.handle_timer(self._now) if due is not None and due <= self._now else []
        self.machine.check()
        self._run_commands(commands)
