"""One start of a node on virtual time: what `node/executor.py` and `node/library.py` do, without threads and sockets.

Machine, replica, codecs and sessions are the same. An inner step is a real optimizer step that takes as long as the
scenario says.
"""

import dataclasses
import random
from collections import deque
from collections.abc import Callable
from typing import assert_never

import torch
from torch import nn

from farloop.algo.methods import method_named
from farloop.algo.spec import BlobId, BlobKind
from farloop.node import events as ev
from farloop.node.control_variates import ControlVariates
from farloop.node.encoder import encode_anchor, encode_delta, finish, pack_at_once
from farloop.node.machine import NodeMachine
from farloop.node.replica import OwnDelta, Replica
from farloop.node.reports import PROGRESS_S, Announced, all_held, anchors_of
from farloop.node.sample_cursor import LeaseCursor
from farloop.node.state_dir import Residuals, run_of
from farloop.sim.dialler import Dial, Dialler
from farloop.sim.disk import Worker
from farloop.sim.hostile import Forger, SharedForgeries
from farloop.sim.problems import freeze_all_but
from farloop.sim.scenario import NodeSetup, Scenario
from farloop.sim.send_log import Merged, Send, SendLog
from farloop.sim.virtual_time import Process
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

DRAIN_S = 30.0
"""For a good-bye to get through."""

BUILD_S = 0.2
"""To build the model once the run's spec is known."""


class NodeActor:
    """The daemon. `saw` is told every event that its machine takes, and every command."""

    def __init__(
        self,
        process: Process,
        setup: NodeSetup,
        scenario: Scenario,
        dial: Dial,
        rng: random.Random,
        incarnation: int,
        epoch_seen: int,
        saw: Callable[[ev.Event | ev.Command], None],
        board: SharedForgeries,
    ) -> None:
        self.process, self.setup = process, setup
        self.machine = NodeMachine(name=setup.name, incarnation=incarnation, tau=setup.tau, holds=setup.holds)
        self.replica: Replica | None = None
        self._residuals: Residuals
        """Once the run is known."""
        self._drift: ControlVariates
        """As well."""
        self.diary = SendLog()
        self.epoch_seen = epoch_seen
        """Survives a crash, as `node/state_dir.py` does."""
        self.stopped_by: tuple[Reason, str] | None = None
        self.gone = False
        """Whether it has said good-bye and closed its link."""
        self._scenario, self._saw = scenario, saw
        self._learner = scenario.trains().learner(setup.name, setup.seed)
        self._optimizer: torch.optim.Optimizer | None = None
        self._samples = LeaseCursor()
        self._inbox: deque[ev.Event | wire_ev.SessionEvent] = deque()
        self._busy = False
        """Inside an inner step, or building the model: events wait."""
        self._blobs: dict[BlobId, bytearray] = {}
        self._held: tuple[int, tuple[msg.AnchorRef, ...]] = (0, ())
        """A history, and the anchors of it that are held."""
        self._announced = Announced()
        self._encoder = Worker(process, lambda: rng.uniform(*scenario.job_s))
        self._reported = 0.0
        self._began_at = process.now
        self._rng, self._slowed, self._worked_s = rng, 1.0, 0.0
        self._leaves_at: float | None = None
        self._forger = Forger(setup.deceit, board, setup.seed)
        self.link = Dialler(process, dial, self._hello, self._put, rng, scenario.limits, scenario.timing)
        self.link.start()

    @property
    def waiting(self) -> str | None:
        """What training stands still for, in words."""
        if self._busy or self.machine.ended:
            return None
        return self.machine.waiting or ("samples" if self._starved() else None)

    def drain(self) -> None:
        """As SIGTERM asks."""
        self._put(ev.DrainRequested())

    def slow_down(self, factor: float) -> None:
        """Inner steps take so many times as long from the next one on."""
        self._slowed = factor

    def spoil(self, fragment: int) -> None:
        """Flip a bit of an anchor; of another one, where it does not hold that."""
        if self.replica is not None:
            anchors = self.replica.anchors
            anchors.get(fragment, anchors[min(anchors)])[0] += 1.0

    @property
    def _now(self) -> float:
        return self.process.now

    # --- inbox

    def _put(self, event: ev.Event | wire_ev.SessionEvent) -> None:
        if isinstance(event, wire_ev.MessageReceived):
            self._announced.heard(event.message)
        self._inbox.append(event)
        if not self._busy:
            self._settle()

    def _settle(self) -> None:
        """Take all that has come; go on with training unless the machine, or an empty lease, says to wait."""
        while self._inbox and not self._busy:
            self._take(self._inbox.popleft())
            if self.replica is None and self.machine.spec is not None:
                self._build()
        if self._busy or self.gone:
            return
        self._report_if_due()
        if self.machine.ended:
            self._leave()
        elif self.machine.waiting is None and self.machine.running and not self._starved():
            self._begin_step()

    def _take(self, event: ev.Event | wire_ev.SessionEvent) -> None:
        match event:
            case wire_ev.MessageReceived(message=message):
                if self.replica is not None:
                    self._drift.heard(message)
                self._handle(ev.Received(message=message))
            case wire_ev.BlobReceived(blob=blob, data=data):
                self._blobs[blob] = data
                self._handle(ev.BlobArrived(blob=blob))
            case wire_ev.SessionClosed(reason=reason):
                self._handle(ev.Disconnected(reason=reason))
            case wire_ev.BlobCorrupt(blob=blob):
                self._handle(ev.AnchorMismatch(fragment=blob.fragment))
            case wire_ev.BlobIdle() | wire_ev.BlobSent() | wire_ev.BlobDeclined():
                pass
            case _:
                self._handle(event)

    def _handle(self, event: ev.Event) -> None:
        commands = self.machine.handle(event)
        self.machine.check()
        self._saw(event)
        for command in commands:
            self._saw(command)
            self._carry_out(command)

    # --- training

    def _build(self) -> None:
        spec = self.machine.spec
        assert spec is not None
        gradients, layout = not method_named(spec.terms.method).inner, spec.identity.layout
        if self.machine.holds is not None:
            freeze_all_but(self.machine.holds, self._learner.module, layout)
        self.replica = Replica(self._learner.module, layout, gradients=gradients, holds=self.machine.holds)
        self._optimizer = self._learner.optimizer(spec.terms)
        self._drift = ControlVariates(self.replica, spec.terms, self.machine.terms_of)
        run = run_of(spec, self.machine.history)
        self._residuals = Residuals(run, layout, None, lambda job: job())
        self._wait_busily(BUILD_S, lambda: None)

    def _wait_busily(self, seconds: float, then: Callable[[], None]) -> None:
        self._busy = True

        def done() -> None:
            then()
            self._busy = False
            self._settle()

        self.process.after(seconds, done)

    def _begin_step(self) -> None:
        assert self.machine.spec is not None
        if not self.machine.inner_steps:
            self._began_at = self._now
        samples = [self.machine.inner_steps]
        if self.machine.takes_samples:
            samples = self._samples.take(self.machine.spec.terms.batch_sequences)
            self.diary.samples += samples
        self._note_weights()
        step_s = self.setup.step_s * self._slowed
        if self.setup.step_wobble:
            step_s *= self._rng.lognormvariate(0.0, self.setup.step_wobble)
        self._worked_s += step_s
        self._wait_busily(step_s, lambda: self._step(samples))

    def _step(self, samples: list[int]) -> None:
        assert self.machine.spec is not None and self._optimizer is not None
        terms = self.machine.spec.terms
        self.diary.losses.append(self._learner.backward(samples, self.machine.position))
        self.diary.learning_rates.append(self.machine.lr)
        if method_named(terms.method).inner:
            nn.utils.clip_grad_norm_(self._learner.module.parameters(), terms.clip)
            for group in self._optimizer.param_groups:
                group["lr"] = self.machine.lr
            self._optimizer.step()
        self._drift.stepped(self.machine.lr)
        self._handle(ev.StepDone(tokens=self._tokens))
        while self._inbox:
            self._take(self._inbox.popleft())

    @property
    def _tokens(self) -> int:
        """Of one inner step."""
        assert self.machine.spec is not None
        terms = self.machine.spec.terms
        return self.setup.tokens or terms.batch_sequences * terms.sequence_tokens

    def _note_weights(self) -> None:
        if not self._scenario.frugal:
            parameters = self._learner.module.parameters()
            self.diary.weights.append(nn.utils.parameters_to_vector(parameters).detach())

    def _starved(self) -> bool:
        spec = self.machine.spec
        if spec is None or not self.machine.takes_samples or not self.machine.running:
            return False
        return self._samples.remaining < spec.terms.batch_sequences

    def _leave(self) -> None:
        """Ended: close the link once the farewell is through, or has had its time."""
        self._leaves_at = self._leaves_at if self._leaves_at is not None else self._now + DRAIN_S
        if self.link.flushed or self._now >= self._leaves_at:
            self.gone = True
            self._note_weights()
            self.link.close()
        else:
            self.process.after(0.02, self._settle)

    # --- commands

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Adopt():
                pass
            case ev.Encode():
                self._encode(command)
            case ev.SendBlob(offer=offer):
                self.link.send_blob(offer, self._blobs[offer.blob])
            case ev.SendAnchor(fragment=fragment):
                assert self.replica is not None
                self.link.send_blob(*encode_anchor(self.replica, fragment, self.machine.name, self.machine.epoch))
            case ev.ForgetBlob(blob=blob, merged_in=merged_in):
                data = self._blobs.pop(blob, None)
                if blob.kind is BlobKind.DELTA:
                    self.diary.settled.append((blob, merged_in))
                    self._residuals.settled(blob, merged_in)
                    self._drift.settled(blob, merged_in, data, self.machine.epoch)
            case ev.Apply():
                self._apply(command)
            case ev.Install():
                self._install(command)
            case ev.Merge():
                self._merge(command)
            case ev.Evaluate(versions=versions):
                self._evaluate(versions)
            case ev.KeepSamples(leases=leases):
                self._samples.keep(leases)
                self.link.send(self._progress())
            case ev.UseSamples(lease=lease):
                self._samples.grant(lease)
            case ev.Tell(message=message):
                if isinstance(message, msg.Leave):
                    self.link.send(self._progress())
                    message = dataclasses.replace(message, anchors=self._held[1])
                if isinstance(message, msg.Held):
                    message = all_held(message, self.replica, self._samples)
                self.link.send(message)
            case ev.Resync(history=history):
                self._begin_again(history)
            case ev.Stop(reason=reason, detail=detail):
                self.stopped_by = (reason, detail)
            case _:
                assert_never(command)

    def _encode(self, command: ev.Encode) -> None:
        assert self.replica is not None
        replica, epoch, inner_step = self.replica, self.machine.epoch, self.machine.inner_steps
        self._drift.sent(command)
        packed = pack_at_once(replica, command, epoch, inner_step)
        delta = replica.take(command.blob.fragment) if packed is None else None
        device = replica.anchors[command.blob.fragment].device
        residual = self._residuals.for_delta(command.blob, command.codec, device)
        previous = self._residuals.previous(command.blob, command.codec)
        self.diary.sends.append(
            Send(
                inner_step=inner_step,
                position=self.machine.position,
                fragment=command.blob.fragment,
                window=command.window,
                base=command.blob.version,
                steps=command.steps,
                tokens=command.tokens,
            )
        )

        def done() -> None:
            if packed is not None:
                encoded = finish(packed)
            else:
                assert delta is not None
                encoded = encode_delta(replica, command, delta, epoch, inner_step, residual, previous)
            encoded = self._forger.sent(encoded, replica.layout.fragments[command.blob.fragment], epoch)
            self._blobs[encoded.offer.blob] = encoded.data
            if encoded.at_once:
                self.link.send_blob(encoded.offer, encoded.data)
            self._residuals.encoded(encoded.offer.blob, encoded.codec, encoded.payload)
            self._put(ev.DeltaEncoded(offer=encoded.offer, offered=encoded.at_once))

        self._encoder.submit(lambda: None, done)

    def _apply(self, command: ev.Apply) -> None:
        assert self.replica is not None
        fragment, version, epoch = command.fragment, command.version, self.machine.epoch
        data = self._blobs.pop(BlobId(kind=BlobKind.UPDATE, fragment=fragment, version=version))
        self.diary.applied.append((fragment, version))
        self._drift.applied(command, data)
        if not self.replica.apply(fragment, version, data, command.codec, epoch, command.anchor_digest):
            self.diary.mismatches += 1
            self._inbox.append(ev.AnchorMismatch(fragment=fragment))

    def _install(self, command: ev.Install) -> None:
        assert self.replica is not None
        fragment, version = command.fragment, command.version
        data = self._blobs.pop(BlobId(kind=BlobKind.SNAPSHOT, fragment=fragment, version=version))
        if not self.replica.install(fragment, version, data, self.machine.epoch):
            self.diary.mismatches += 1
            self._inbox.append(ev.AnchorMismatch(fragment=fragment))
            return
        self._residuals.installed(fragment, version, command.codec, self.replica.anchors[fragment].device)

    def _merge(self, command: ev.Merge) -> None:
        assert self.replica is not None
        fragment, mix = command.fragment, command.mix
        own = [OwnDelta(blob=blob, terms=terms, data=self._blobs[blob]) for blob, terms in command.own]
        self.replica.merge(fragment, mix, own, command.factor, self.machine.epoch)
        self._drift.merged(fragment)
        version = self.machine.fragments[fragment].version
        self.diary.merges.append(
            Merged(
                inner_step=self.machine.inner_steps,
                fragment=fragment,
                version=version,
                mix=mix,
                sends=len(self.diary.sends),
            )
        )
        self._held = (self.machine.history, anchors_of(self.replica))
        self.epoch_seen = max(self.epoch_seen, self.machine.epoch)

    def _begin_again(self, history: int) -> None:
        self._samples.begin_again()
        self._held = (history, ())
        self.diary.applied.clear()  # versions come again, with another content
        spec = self.machine.spec
        if self.replica is not None and spec is not None:
            self.replica.begin_again()
            self._residuals.begin_again(run_of(spec, history))
            self._drift = ControlVariates(self.replica, spec.terms, self.machine.terms_of)

    def _evaluate(self, versions: tuple[int, ...]) -> None:
        assert self.replica is not None
        with self.replica.anchors_in_place():
            loss = self._learner.evaluate()
        position = self.machine.position
        self.link.send(msg.Evaluation(loss=loss, versions=versions, position=position, seconds=0.0))

    # --- what is told of it

    def _hello(self) -> msg.Hello:
        machine = self.machine
        history, anchors, announced = self._announced.beside(*self._held)
        return msg.Hello(
            protocol_min=msg.PROTOCOL_VERSIONS[0],
            protocol_max=self.setup.protocol,
            node=machine.name,
            incarnation=machine.incarnation,
            fingerprint=None if machine.spec is None else machine.spec.identity.fingerprint(),
            layout=None if self.replica is None else self.replica.layout.digest(),
            epoch_seen=max(self.epoch_seen, machine.epoch),
            anchors=anchors,
            round=machine.schedule.round if machine.schedule.start_round is not None else None,
            history=history,
            announced=announced,
            holds=machine.holds,
        )

    def _report_if_due(self) -> None:
        if self._now - self._reported >= PROGRESS_S and self.machine.spec is not None:
            self.link.send(self._progress())
            self._reported = self._now

    def _progress(self) -> msg.Progress:
        machine = self.machine
        return msg.Progress(
            state="waiting" if self.waiting else "training",
            position=machine.position,
            round=machine.schedule.round,
            inner_steps=machine.inner_steps,
            tokens=machine.tokens,
            loss=None,
            tokens_per_s=self._tokens / self.setup.step_s if machine.spec else 0.0,
            compute_share=1.0,
            blocked_s=max(0.0, self._now - self._began_at - self._worked_s),
            lost_steps=machine.lost_steps,
            sample_watermark=self._samples.watermark,
            bytes_up=0,
            bytes_down=0,
            bytes_state=0,
            skipped_turns=machine.skipped_turns,
            samples_left=self._samples.remaining if machine.takes_samples else None,
        )
