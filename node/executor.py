"""Rank 0 of a node: machine, link, replica and encoder brought together in the training thread.

The link's thread and the encoder's put what happened into one inbox; `after_step` takes it out at the step boundary,
lets the machine decide and carries the commands out (protocol X).
"""

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Iterator
from typing import assert_never

import torch
from torch import nn

from farloop.algo.digest import digest
from farloop.algo.methods import method_named
from farloop.algo.spec import BlobId, BlobKind, NodeId, RunSpec
from farloop.algo.stages import Part
from farloop.node import events as ev
from farloop.node.cluster import Cluster, Decision
from farloop.node.control_variates import ControlVariates
from farloop.node.encoder import Encoded, Encoder, encode_anchor, pack_at_once
from farloop.node.errors import LayoutMismatch, NodeError, NonFiniteDelta, Refused, Unreachable
from farloop.node.link import NodeLink
from farloop.node.machine import NodeMachine
from farloop.node.metrics import Metrics
from farloop.node.replica import OwnDelta, Replica
from farloop.node.reports import SENTENCES, Activity, Isolation, IsolationKind, Reports, StageLog, TimeAccount, all_held
from farloop.node.sample_cursor import LeaseCursor
from farloop.node.state_dir import NodeState, Residuals, run_of
from farloop.node.zmq_dealer import LinkConfig
from farloop.quant.blob import pack_anchor
from farloop.quant.registry import warm_for
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

_log = logging.getLogger(__name__)

Inbox = queue.SimpleQueue[ev.Event | wire_ev.SessionEvent | Encoded | Exception]


class NodeExecutor:
    """Owns everything of a node that is not the training loop itself."""

    def __init__(
        self,
        name: NodeId,
        link: LinkConfig,
        cluster: Cluster,
        memory: NodeState,
        fingerprint: str | None,
        tau: int | None = None,
        holds: Part = None,
    ) -> None:
        """Raises BadAddress or KeyFileError. Begins to dial at once. `tau`: the node's own overlap; `holds`: its part
        of the model."""
        self.machine = NodeMachine(name=name, incarnation=memory.incarnation, epoch=memory.epoch, tau=tau, holds=holds)
        self.clock = TimeAccount()
        self.metrics = Metrics(name)
        self.samples = LeaseCursor()
        self.replica: Replica | None = None
        self.evaluate: Callable[[], float] | None = None
        self._memory = memory
        self._transitions = StageLog()
        self._reports = Reports(self.machine, self.clock, self.samples, memory, cluster, fingerprint)
        self._alone, self._was_alone = Isolation(name), ""
        self._inbox: Inbox = queue.SimpleQueue()
        self._blobs: dict[BlobId, bytearray] = {}
        self._merged: list[int] = []
        self._at_zero: set[int] = set()
        """Fragments at version 0 as the coordinator let this node in, until it is known whether they are here."""
        self._encoder: Encoder | None = None
        self._residuals: Residuals | None = None
        self._drift: ControlVariates | None = None
        self.link = NodeLink(link, self._reports.hello, self._deliver)
        self.link.start()

    # --- the way in

    def wait_for_spec(self, timeout_s: float | None) -> RunSpec:
        """What the run is.

        Raises:
            Refused, Unreachable.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self.machine.spec is None:
            self._wait_once()
            if deadline is not None and time.monotonic() > deadline:
                raise Unreachable(f"no answer from the coordinator within {timeout_s:g} s; is its address right?")
        return self.machine.spec

    def attach(self, module: nn.Module) -> None:
        """The model whose weights are exchanged. Raises LayoutMismatch."""
        assert self.machine.spec is not None
        layout = self.machine.spec.identity.layout
        gradients = not method_named(self.machine.spec.terms.method).inner
        self.replica = Replica(module, layout, gradients=gradients, holds=self.machine.holds)
        self._reports.layout = layout.digest()
        warm_for(self.machine.spec.terms)
        self._encoder = Encoder(self.replica, self._encoded, self._inbox.put)
        run = run_of(self.machine.spec, self.machine.history)
        self._residuals = Residuals(run, layout, self._memory.folder, self._encoder.run_before_the_next)
        self._drift = ControlVariates(self.replica, self.machine.spec.terms, self.machine.terms_of)
        for parameter in self.replica.parameters.values():
            if parameter.dtype != torch.float32:
                _log.warning("parameters are %s without fp32 masters: small steps may be lost", parameter.dtype)
                break

    def wait_for_start(self) -> Decision:
        """Block until training begins, or the run is over."""
        with self._end_told():
            self._settle()
            return self._decide()

    # --- one inner step

    def after_step(self, tokens: int, loss: float | None, *, stepped: bool = True) -> Decision:
        """What happens between two inner steps; blocks where the method says that training waits.

        `stepped`: False where the step was skipped, its gradient not being finite. It counts as a step of the round.
        """
        self._reports.loss = loss if loss is not None else self._reports.loss
        assert self._drift is not None
        if stepped:
            self._drift.stepped(self.machine.lr)
        else:
            self._reports.skipped_steps += 1
        with self._end_told():
            self._do(self.machine.handle(ev.StepDone(tokens=tokens)))
            self._settle()
            return self._decide()

    def request_drain(self) -> None:
        """Finish what is begun, then leave. From any thread, and from a signal handler."""
        self._inbox.put(ev.DrainRequested())

    def drain(self, timeout_s: float) -> bool:
        """Wait for the outcome of what was sent, say good-bye; False when that took too long."""
        self.request_drain()
        deadline = time.monotonic() + timeout_s
        with self._end_told():
            while not self.machine.ended and time.monotonic() < deadline:
                self._wait_once()
        if not self.machine.ended:
            self._say_good_bye(msg.Leave(reason=Reason.DRAINED, detail="without the outcome of what it had sent"))
        return self.link.flushed(max(1.0, deadline - time.monotonic())) and self.machine.ended

    def close(self) -> None:
        """Stop all threads."""
        self.link.close()
        if self._encoder is not None:
            self._encoder.close()

    def progress(self) -> msg.Progress:
        """How it goes, for the coordinator and the metrics."""
        return self._reports.progress(self.link.moved, self._waiting, time.monotonic(), SENTENCES[self._how_alone()])

    def _how_alone(self) -> IsolationKind:
        machine = self.machine
        trains = machine.running and machine.inner_steps > 0
        return self._alone.how(
            trains=trains, connected=machine.connected, round_index=machine.schedule.round, now=time.monotonic()
        )

    @contextlib.contextmanager
    def _end_told(self) -> Iterator[None]:
        """An error that ends training is told to the coordinator first, from whichever thread it came."""
        try:
            yield
        except Exception as error:
            reason = Reason.NON_FINITE if isinstance(error, NonFiniteDelta) else Reason.NONE
            self.link.send(msg.Leave(reason=reason, detail=str(error)))
            self.link.flushed(2.0)
            raise

    # --- inbox and commands

    def _settle(self) -> None:
        """Take all that has come; wait while the machine, or an empty lease, says so. Leaves an empty inbox.

        A node that drains waits in `drain`, which has a deadline: SIGTERM must work while the coordinator is away.
        """
        while True:
            while not self._inbox.empty():
                self._take(self._inbox.get_nowait())
            self._begin_with_own_weights()
            self._report_if_due()
            if self._waiting is None or self.machine.stage == "draining":
                return
            with self._counted_as("blocked" if self.machine.running else None):
                self._wait_once()

    @property
    def _waiting(self) -> str | None:
        """What training stands still for, in words; None when it may go on."""
        return self.machine.waiting or ("samples to be granted" if self._starved() else None)

    @contextlib.contextmanager
    def _counted_as(self, activity: Activity | None) -> Iterator[None]:
        """Where the time inside the block goes; before the first inner step it is not counted at all."""
        before = self.clock.activity
        if before is not None:
            self.clock.turn(activity, time.monotonic())
        yield
        if before is not None:
            self.clock.turn(before, time.monotonic())

    def _starved(self) -> bool:
        spec = self.machine.spec
        if spec is None or not self.machine.takes_samples or not self.machine.running:
            return False
        return self.samples.remaining < spec.terms.batch_sequences

    def _wait_once(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._take(self._inbox.get(timeout=0.2))
        self._report_if_due()

    def _decide(self) -> Decision:
        spec, running = self.machine.spec, self.machine.running
        assert spec is not None
        samples: tuple[int, ...] = ()
        if running and self.machine.takes_samples:
            samples = tuple(self.samples.take(spec.terms.batch_sequences))
        merged, self._merged = tuple(dict.fromkeys(self._merged)), []
        lr = self.machine.lr if running else 0.0
        return Decision(running=running, lr=lr, merged=merged, samples=samples, position=self.machine.position)

    def _take(self, event: ev.Event | wire_ev.SessionEvent | Encoded | Exception) -> None:
        match event:
            case Exception():
                raise event
            case wire_ev.MessageReceived(message=message):
                self._alone.heard(message, self.machine.schedule.round)
                if self._drift is not None:
                    self._drift.heard(message)
                self._do(self.machine.handle(ev.Received(message=message)))
                if isinstance(message, msg.Welcome) and not message.recalls:
                    self._at_zero = {fragment for fragment, version in enumerate(message.versions) if version == 0}
            case wire_ev.BlobReceived(blob=blob, data=data):
                self._blobs[blob] = data
                self._do(self.machine.handle(ev.BlobArrived(blob=blob)))
            case wire_ev.SessionClosed(reason=reason, detail=detail):
                if self.machine.connected and not self.machine.ended:
                    _log.info("session over reason=%s detail=%r", reason.name, detail or reason.sentence)
                self._do(self.machine.handle(ev.Disconnected(reason=reason)))
            case wire_ev.BlobCorrupt(blob=blob):
                _log.warning("corrupt blob=%s: a snapshot is asked for", blob)
                self._do(self.machine.handle(ev.AnchorMismatch(fragment=blob.fragment)))
            case wire_ev.BlobIdle() | wire_ev.BlobSent() | wire_ev.BlobDeclined():
                pass
            case Encoded(offer=offer, codec=codec, payload=payload):
                assert self._residuals is not None
                self._residuals.encoded(offer.blob, codec, payload)
                if event.residual_ratio is not None:
                    self.metrics.lost_by_codec(offer.blob.fragment, event.residual_ratio)
                self._do(self.machine.handle(ev.DeltaEncoded(offer=offer, offered=event.at_once)))
            case _:
                self._do(self.machine.handle(event))

    def _encoded(self, encoded: Encoded) -> None:
        """In the encoder's thread. The next step boundary may be far off: what can leave before it does."""
        self._blobs[encoded.offer.blob] = encoded.data
        self._inbox.put(encoded)
        if encoded.at_once:
            self.link.send_blob(encoded.offer, encoded.data)

    def _do(self, commands: list[ev.Command]) -> None:
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Adopt():
                pass  # `wait_for_spec` returns, and the caller builds the model
            case ev.Encode(blob=blob):
                assert self.replica is not None and self._encoder is not None and self._residuals is not None
                assert self._drift is not None
                self._drift.sent(command)
                epoch, step = self.machine.epoch, self.machine.inner_steps
                if (packed := pack_at_once(self.replica, command, epoch, step)) is not None:
                    return self._encoder.submit_packed(packed)
                delta = self.replica.take(blob.fragment)
                residual = self._residuals.for_delta(blob, command.codec, delta.device)
                previous = self._residuals.previous(blob, command.codec)
                self._encoder.submit(command, delta, epoch, step, residual, previous)
            case ev.SendBlob(offer=offer):
                self.link.send_blob(offer, self._blobs[offer.blob])
            case ev.SendAnchor(fragment=fragment):
                assert self.replica is not None
                self.link.send_blob(*encode_anchor(self.replica, fragment, self.machine.name, self.machine.epoch))
            case ev.ForgetBlob(blob=blob, merged_in=merged_in):
                data = self._blobs.pop(blob, None)
                if blob.kind is BlobKind.DELTA and self._residuals is not None and self._drift is not None:
                    self._residuals.settled(blob, merged_in)
                    self._drift.settled(blob, merged_in, data, self.machine.epoch)
            case ev.Apply():
                self._apply(command)
            case ev.Install():
                self._install(command)
            case ev.Merge(fragment=fragment, mix=mix, factor=factor):
                assert self.replica is not None
                own = [OwnDelta(blob=blob, terms=terms, data=self._blobs[blob]) for blob, terms in command.own]
                self.replica.merge(fragment, mix, own, factor, self.machine.epoch)
                assert self._drift is not None
                self._drift.merged(fragment)
                self._merged.append(fragment)
                self._remember_anchors()
            case ev.Evaluate(versions=versions):
                self._evaluate(versions)
            case ev.KeepSamples(leases=leases):
                self.samples.keep(leases)
                self.link.send(self.progress())  # new ones are granted once it is known that no others are used
            case ev.UseSamples(lease=lease):
                self.samples.grant(lease)
            case ev.Tell(message=message):
                if isinstance(message, msg.Leave):
                    return self._say_good_bye(message)
                if isinstance(message, msg.Held):
                    message = all_held(message, self.replica, self.samples)
                self.link.send(message)
            case ev.Resync(history=history):
                self._begin_again(history)
            case ev.Stop(reason=reason, detail=detail):
                raise _stop_error(reason, detail)
            case _:
                assert_never(command)

    def _apply(self, command: ev.Apply) -> None:
        fragment, version, epoch = command.fragment, command.version, self.machine.epoch
        assert self.replica is not None and self._drift is not None
        data = self._blobs.pop(BlobId(kind=BlobKind.UPDATE, fragment=fragment, version=version))
        self._drift.applied(command, data)
        if not self.replica.apply(fragment, version, data, command.codec, epoch, command.anchor_digest):
            self._mismatched(fragment, version)

    def _install(self, command: ev.Install) -> None:
        fragment, version = command.fragment, command.version
        assert self.replica is not None and self._residuals is not None
        data = self._blobs.pop(BlobId(kind=BlobKind.SNAPSHOT, fragment=fragment, version=version))
        if not self.replica.install(fragment, version, data, self.machine.epoch):
            return self._mismatched(fragment, version)
        self._residuals.installed(fragment, version, command.codec, self.replica.anchors[fragment].device)

    def _begin_with_own_weights(self) -> None:
        """An anchor of version 0 that the local weights are, by its digest, need not cross the link."""
        wanted, self._at_zero = self._at_zero, set()
        if self.replica is None or self.machine.spec is None:
            self._at_zero = wanted
            return
        digests = self.machine.spec.identity.anchor_digests
        for index in sorted(i for i in wanted if self.replica.versions.get(i, 0) < 0):
            first = self.replica.first(index)
            if digest(first) != digests[index]:
                _log.info("a snapshot is asked for fragment=%d reason='its first weights are others'", index)
                self.link.send(msg.Fetch(fragment=index, first=True))
                continue
            data = pack_anchor(first, self.replica.layout.fragments[index], 0, self.machine.epoch)
            self._take(wire_ev.BlobReceived(blob=BlobId(kind=BlobKind.SNAPSHOT, fragment=index, version=0), data=data))

    def _begin_again(self, history: int) -> None:
        _log.warning("another history of the run has begun history=%d: this node begins anew from snapshots", history)
        self.samples.begin_again()
        self._reports.begin_again(history)
        spec = self.machine.spec
        if self.replica is not None and self._residuals is not None and spec is not None:
            self.replica.begin_again()
            self._residuals.begin_again(run_of(spec, history))
            self._drift = ControlVariates(self.replica, spec.terms, self.machine.terms_of)

    def _mismatched(self, fragment: int, version: int) -> None:
        _log.error("anchor mismatch fragment=%d version=%d: a snapshot is asked for", fragment, version)
        self.metrics.anchor_mismatched()
        self._inbox.put(ev.AnchorMismatch(fragment=fragment))

    def _evaluate(self, versions: tuple[int, ...]) -> None:
        if self.evaluate is None:
            return
        assert self.replica is not None
        started = time.monotonic()
        with self._counted_as("evaluation"), self.replica.anchors_in_place():
            loss = self.evaluate()
        seconds, position = time.monotonic() - started, self.machine.position
        self.link.send(msg.Evaluation(loss=loss, versions=versions, position=position, seconds=seconds))

    # --- what is told

    def _remember_anchors(self) -> None:
        assert self.replica is not None
        self._reports.hold(self.replica)
        self._memory.see_epoch(self.machine.epoch)

    def _deliver(self, event: wire_ev.SessionEvent | Exception) -> None:
        """In the link's thread."""
        if isinstance(event, wire_ev.MessageReceived):
            self._reports.announced.heard(event.message)
        match event:
            case wire_ev.MessageReceived(message=msg.Start(round=plan)):
                self._reports.starts_in(plan.index)
        self._inbox.put(event)

    def _report_if_due(self) -> None:
        self._transitions.saw(self.machine)
        now = time.monotonic()
        if self._reports.is_due(now):
            progress, alone = self.progress(), self._how_alone()
            if alone != self._was_alone:
                _log.warning("alone how=%r", SENTENCES[alone]) if alone else _log.info("no longer alone")
                self._was_alone = alone
            versions = {state.fragment.index: state.version for state in self.machine.fragments}
            connected = self.machine.connected
            self.metrics.saw(progress, versions=versions, connected=connected, alone=bool(alone))
            self.metrics.spent(self.clock.all_seconds(now), self._encoder.seconds if self._encoder else 0.0)
            self.link.send(progress)
            self._reports.reported(now)

    def _say_good_bye(self, leave: msg.Leave) -> None:
        self._transitions.saw(self.machine)
        self.link.send(self.progress())  # the last word on bytes and tokens
        self.link.send(self._reports.farewell(leave))


_MENDS = {
    Reason.PROTOCOL_VERSION: "install the same version of farloop on both",
    Reason.WRONG_RUN: "check the coordinator's address, and the fingerprint: without one a node takes any run",
    Reason.WRONG_LAYOUT: "build the model that the run began with, or begin a new run with this one",
    Reason.WRONG_PART: "give the stages that the run's layout has",
    Reason.WRONG_KEY: "on the coordinator: farloop keys authorize NAME.pub, and give the node that name",
    Reason.NAME_TAKEN: "stop the other process of this name, or give this node another name",
    Reason.OLD_INCARNATION: "stop the newer process of this name, or give this node another name",
    Reason.FENCED: "the coordinator runs on an old copy of its state: see its alarms, then start this node again",
}
"""What a person does about it. Other details say it themselves."""


def _stop_error(reason: Reason, detail: str) -> NodeError:
    text = f"{reason.sentence}: {detail}"
    if mend := _MENDS.get(reason):
        text = f"{text}; {mend}"
    return LayoutMismatch(text) if reason in (Reason.WRONG_LAYOUT, Reason.WRONG_PART) else Refused(text)
