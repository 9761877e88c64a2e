"""The node's executor: takes events, lets the machine decide, and carries its commands out on tensors and the link.

It never waits and starts no thread. The link and the compute worker put events into its inbox from their own threads;
`settle` takes them in the training thread, between two inner steps. `node/library.py` drives it and blocks the training
loop where `settle` says so; `sim/node.py` drives it in virtual time.
"""

import logging
import queue
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, assert_never

import torch
from torch import nn

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.algo.stages import Part
from farloop.node import events as ev
from farloop.node.cluster import Decision
from farloop.node.errors import LayoutMismatch, NodeError, NonFiniteDelta, Refused
from farloop.node.link import REPEAT_S, Deliver, Greeting, Traffic
from farloop.node.machine import NodeMachine
from farloop.node.metrics import Metrics
from farloop.node.model.anchor_files import AnchorFiles, Head
from farloop.node.model.control_variates import ControlVariates
from farloop.node.model.encoder import Encoded, encode_anchor, encode_delta, finish, pack_at_once
from farloop.node.model.replica import OwnDelta, Replica, replica_of
from farloop.node.model.residuals import Residuals, run_of
from farloop.node.model.shards import Weights
from farloop.node.reports import Activity, Isolation, Reports, StageLog, TimeAccount, all_held
from farloop.node.send_schedule import LeaseCursor, OverlapChooser
from farloop.node.settings import NodeConfig
from farloop.node.state_dir import NodeState
from farloop.runtime.ports import Worker
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.bounds import MOST_WORDS
from farloop.wire.reasons import Reason
from farloop.wire.uplink import Uplink

_log = logging.getLogger(__name__)

Input = ev.Event | wire_ev.SessionEvent | Encoded | Exception | Callable[[], None]
"""What the inbox takes. An exception is raised by `settle`; an action is what a worker reports, and is called."""


_IN_PLACE = bytearray()
"""Stands for the snapshot whose numbers the anchor already has: they were the first weights."""


class Link(Protocol):
    """The node's link to the coordinator. Nothing here waits."""

    def start(self, hello: Greeting, deliver: Deliver) -> None:
        """Begin to dial. Both are called in the link's thread."""

    @property
    def moved(self) -> Traffic:
        """All bytes so far."""

    @property
    def num_lanes(self) -> int:
        """Connections that carry blobs now."""

    @property
    def uplink(self) -> Uplink | None:
        """The limit on what it sends, if there is one."""

    def send(self, message: msg.Message) -> None:
        """Queue a message; dropped where no session is open."""

    def send_blob(self, offer: msg.Offer, data: bytearray) -> None:
        """Offer a delta or an anchor; dropped where no session is open."""


class NodeExecutor:
    """Everything of a node but the training loop itself. All but `request_drain` is for the training thread."""

    def __init__(
        self,
        config: NodeConfig,
        *,
        inbox: queue.SimpleQueue[Input],
        now: Callable[[], float],
        worker: Worker,
        link: Link,
        state: NodeState,
        device: str = "",
        holds: Part = None,
        files: AnchorFiles | None = None,
        can_evaluate: bool = True,
        check: bool = False,
        observe: Callable[[ev.Event | ev.Command], None] = lambda what: None,
    ) -> None:
        """Begin to dial.

        Args:
            config: of this node.
            inbox: takes events from other threads, and from signal handlers.
            now: monotonic seconds.
            worker: encodes deltas and writes residuals; it reports into `inbox`.
            link: the connection to the coordinator.
            state: what survives a restart.
            device: what the node trains on, for the coordinator's displays.
            holds: the node's part of the model; all of it unless given.
            files: where anchors are saved, if anywhere.
            can_evaluate: whether `evaluate` will be set.
            check: assert the machine's invariants after every event, and that steps lead to nothing where it says so.
            observe: called with every event that the machine has taken, and every command before it is carried out.
        """
        name = NodeId(config.name)
        self.machine = NodeMachine(
            name=name,
            incarnation=state.incarnation,
            epoch=state.epoch,
            run=state.run,
            tau=config.tau,
            adapt_tau=config.adapt_tau,
            holds=holds,
        )
        self.account = TimeAccount()
        self.metrics = Metrics(name, clock=now)
        self.samples = LeaseCursor()
        self.replica: Replica | None = None
        self.evaluate: Callable[[], float] | None = None
        self.look_ahead = 0
        """Of how many steps after the next `decision` tells the samples, as far as they are granted."""
        self._inbox, self._now, self._worker, self.link, self._state = inbox, now, worker, link, state
        self._check, self._observe = check, observe
        self._overlap = OverlapChooser(1)
        self._stages = StageLog()
        self._reports = Reports(
            self.machine, self.account, self.samples, state, device, config.fingerprint, can_evaluate=can_evaluate
        )
        self._isolation = Isolation(name)
        self._was_isolated = ""
        self._held_told_at = float("-inf")
        self._counts_time = False
        """Whether time is accounted for: from the end of the first inner step to the end of the last."""
        self._blobs: dict[BlobId, bytearray] = {}
        self._merged: list[int] = []
        self._at_zero: set[int] = set()
        """Fragments that the last Welcome had at version 0, until it is known whether this node's weights are those."""
        self._residuals: Residuals | None = None
        self._variates: ControlVariates | None = None
        self._files, self._save_every = files, config.save_every_rounds
        self._restorable: set[int] = set()
        """Fragments of which a Welcome said that the anchor on disk will do, until it is read."""
        self._unsaved: dict[int, None] = {}  # merged fragments that may have to be saved, the newest merge last
        self._saving: Head | None = None
        if files is not None and (found := files.find()):
            self._reports.saved = _as_saved(found)
        link.start(self._reports.hello, self._deliver)

    def attach(self, module: nn.Module, weights: Weights | None = None, frozen: int = 0, unsaved: int = 0) -> None:
        """Set the model; the run's spec must be known. `frozen`, `unsaved`: as `Ready`. Raises as `replica_of`."""
        spec = self.machine.spec
        assert spec is not None
        self.machine.set_digests(frozen, unsaved)
        self.replica = replica_of(module, spec, self.machine.holds, weights)
        self._reports.layout = spec.identity.layout.digest()
        if self.replica.gradients:  # anchors change at every step
            self._files = None
        self.replica.files = self._files
        run = run_of(spec, self.machine.history)
        self._overlap = OverlapChooser(spec.identity.layout.slots)
        self._residuals = Residuals(run, self.replica.zeros, self._state.folder, self._in_worker)
        self._variates = ControlVariates(self.replica, spec.terms, self.machine.terms_of)
        for parameter in self.replica.parameters.values():
            if torch.finfo(parameter.dtype).bits < 32:
                _log.warning(
                    "parameters are %s without fp32 masters: small steps and merges are lost in rounding. Keep them "
                    "fp32, and compute in bfloat16 with torch.autocast, or with MixedPrecisionPolicy(param_dtype="
                    "torch.bfloat16) in fully_shard",
                    parameter.dtype,
                )
                break

    # --- what the driver calls

    def settle(self) -> bool:
        """Take all events. Returns whether training may continue; `decision` then says how. Leaves an empty inbox.

        False while training waits for the coordinator, an update or samples. A node that drains does not wait here:
        SIGTERM must work while the coordinator is away. Until a model is attached, events after the Welcome stay in the
        inbox.

        Raises NodeError: this node cannot continue; `say_failed` tells the coordinator.
        """
        self._count_as("farloop")
        while not self._inbox.empty() and (self.replica is not None or self.machine.spec is None):
            self.on_input(self._inbox.get_nowait())
        self._restore()
        self._begin_with_own_weights()
        self._save()
        self.report_if_due()
        if self.waiting is None or self.machine.stage == "draining":
            return True
        self._count_as("blocked" if self.machine.running else None)
        return False

    def decision(self) -> Decision:
        """What to do in the next step after `settle` returned True. Takes its samples."""
        return self.decisions(1)[0]

    def decisions(self, most: int) -> list[Decision]:
        """As `decision` for several steps, at most so many: nothing is due before the end of the last of them."""
        spec, machine = self.machine.spec, self.machine
        assert spec is not None
        steps, running = 1, machine.running
        quiet = machine.quiet_steps if self._check else machine.foresee()
        if most > 1 and not spec.terms.inner.control_variates:  # those correct the weights of all ranks at every step
            steps = min(most, quiet)
        positions: list[int] = []
        batch = 0
        if running and machine.takes_samples:
            batch = spec.terms.inner.batch_sequences
            steps = min(steps, self.samples.remaining // batch)
            positions = self.samples.consume(steps * batch) + self.samples.peek(self.look_ahead * batch)
        if running and self.replica is not None and self.replica.weights.apart:
            for state in [state for state in machine.fragments if machine.schedule.is_next(state)][:1]:
                self.replica.copy_ahead(state.fragment.index)
        merged, self._merged = tuple(dict.fromkeys(self._merged)), []
        self._count_as("training" if running else None)
        self._counts_time = self._counts_time and running
        return [
            Decision(
                running=running,
                lr=machine.lr_after(k) if running else 0.0,
                merged=() if k else merged,
                samples=tuple(positions[k * batch : (k + 1) * batch]),
                ahead=tuple(positions[(k + 1) * batch : (k + 1 + self.look_ahead) * batch]),
                position=machine.schedule.position_after(k),
            )
            for k in range(steps)
        ]

    def step_done(self, tokens: int, loss: float | None, *, stepped: bool = True) -> None:
        """An inner step is over; call `settle` next. `stepped`: False if it changed no weight, for want of a gradient
        that is finite; it counts as a step of the round."""
        assert self._variates is not None
        self._counts_time = True
        self._count_as("farloop")
        self._reports.loss = loss if loss is not None else self._reports.loss
        if stepped:
            self._variates.stepped(self.machine.lr)
        else:
            self._reports.skipped_steps += 1
        if self.machine.chooses_tau:
            self._choose_tau()
        self._handle(ev.StepDone(tokens=tokens))

    def _choose_tau(self) -> None:
        """Choose the overlap again. Unless this node was told to, no longer than a quarter of a round: what is merged
        later helps less. One step less is within what the length of a step wavers by, and changes nothing."""
        machine = self.machine
        step_s = self.account.seconds("training", self._now()) / (machine.inner_steps + 1)
        tau = self._overlap.choose(step_s)
        if tau is None or machine.spec is None:
            return
        if machine.tau_is_open:
            schedule = machine.spec.terms.schedule
            tau = min(tau, max(schedule.tau, schedule.h // 4))
        tau = machine.own_tau(tau)
        if tau not in (machine.chosen_tau, machine.chosen_tau - 1):
            before = f" was={machine.chosen_tau}" if machine.chosen_tau else ""
            _log.info("overlap chosen tau=%d%s why='updates come in time over this link'", tau, before)
            self._handle(ev.OverlapChosen(tau=tau))

    def resume(self) -> None:
        """After an inner step whose next one is decided already: take no event."""
        self.report_if_due()
        self._count_as("training")

    def request_drain(self) -> None:
        """Finish what is in progress, then leave. From any thread, or a signal handler."""
        self._inbox.put(ev.DrainRequested())

    def say_goodbye(self, leave: msg.Leave) -> None:
        """Send the last report and the Leave."""
        self._stages.log_changes(self.machine)
        self.link.send(self.progress())
        self.link.send(self._reports.farewell(leave))
        if skipped := self._reports.skipped_steps:
            why = "no gradient, or NaN or Inf in it"
            _log.warning("steps changed no weight count=%d of=%d why=%r", skipped, self.machine.inner_steps, why)

    def say_failed(self, error: Exception) -> None:
        """Tell the coordinator that this node ends by an error."""
        reason = Reason.NON_FINITE if isinstance(error, NonFiniteDelta) else Reason.FAILED
        told = str(error) if isinstance(error, NodeError) else f"{type(error).__name__}: {error}"
        self.link.send(msg.Leave(reason=reason, detail=" ".join(told.split())[:MOST_WORDS]))

    @property
    def waiting(self) -> str | None:
        """What training waits for, in words; None if it may continue."""
        return self.machine.waiting or ("samples to be granted" if self._starved() else None)

    def progress(self) -> msg.Progress:
        """A report for the coordinator and the metrics."""
        return self._reports.progress(self.link.moved, self.waiting, self._now(), self._isolated())

    # --- events

    def on_input(self, item: Input) -> None:
        """Take one event now. Raises as `settle`."""
        match item:
            case Exception():
                raise item
            case wire_ev.MessageReceived(message=message):
                self._isolation.on_message(message, self.machine.schedule.round)
                if self._variates is not None:
                    self._variates.on_message(message)
                self._handle(ev.Received(message=message))
                if isinstance(message, msg.Start):
                    self._reports.saved = None
                    self._state.see_end("")
                if isinstance(message, msg.Welcome) and not message.recalls:
                    if (saved := self._reports.saved) is not None:
                        _log.info("anchors on disk: going on from %d of %d", len(message.restores), len(saved.anchors))
                    self._restorable = set(message.restores)
                    self._at_zero = {fragment for fragment, version in enumerate(message.versions) if version == 0}
            case wire_ev.BlobReceived(blob=blob, data=data):
                self._blobs[blob] = data
                self._handle(ev.BlobArrived(blob=blob))
                self._apply_ahead(blob)
            case wire_ev.SessionClosed(reason=reason, detail=detail):
                if self.machine.connected and not self.machine.ended:
                    _log.info("session ended reason=%s detail=%r", reason.name, detail or reason.sentence)
                self._handle(ev.Disconnected(reason=reason))
            case wire_ev.BlobCorrupt(blob=blob):
                _log.warning("corrupt blob=%s: requesting a snapshot", blob)
                self._handle(ev.AnchorMismatch(fragment=blob.fragment))
            case wire_ev.BlobIdle() | wire_ev.BlobSent() | wire_ev.BlobDeclined():
                pass
            case Encoded(offer=offer, codec=codec, payload=payload):
                assert self._residuals is not None
                self._residuals.encoded(offer.blob, codec, payload)
                if item.residual_ratio is not None:
                    self.metrics.lost_by_codec(offer.blob.fragment, item.residual_ratio)
                self._handle(ev.DeltaEncoded(offer=offer, offered=item.at_once))
            case _ if callable(item):
                item()
            case _:
                self._handle(item)

    def _handle(self, event: ev.Event) -> None:
        machine, quiet, ahead = self.machine, 0, (0.0, 0.0)
        if self._check and isinstance(event, ev.StepDone):
            quiet, ahead = machine.quiet_steps, (machine.lr_after(1), machine.schedule.position_after(1))
        commands = machine.handle(event)
        if self._check:
            machine.check()
        if quiet > 1:
            assert not commands and machine.waiting is None and machine.quiet_steps == quiet - 1, "nothing was due"
            assert (machine.lr, machine.position) == ahead
        self._observe(event)
        if machine.stage == "finished" and machine.spec is not None:
            identity = machine.spec.identity
            self._state.see_end(f"{identity.name} (fingerprint {identity.fingerprint()})")
        for command in commands:
            self._observe(command)
            self._carry_out(command)

    def _deliver(self, event: wire_ev.SessionEvent | Exception) -> None:
        """In the link's thread."""
        self._time_link(event)
        if isinstance(event, wire_ev.MessageReceived):
            self._reports.announced.on_message(event.message)
            if isinstance(event.message, msg.Start):
                self._reports.starts_in = event.message.round.index
        self._inbox.put(event)

    def _time_link(self, event: wire_ev.SessionEvent | Exception) -> None:
        """Note what the chosen overlap follows from."""
        match event:
            case wire_ev.MessageReceived(message=msg.Stored(blob=blob)):
                self._overlap.on_stored(blob.fragment, self._now())
            case wire_ev.MessageReceived(message=msg.Committed(fragment=fragment)):
                self._overlap.on_announced(fragment, self._now())
            case wire_ev.BlobReceived(blob=BlobId(kind=BlobKind.UPDATE, fragment=fragment)):
                self._overlap.on_arrived(fragment, self._now())
            case wire_ev.SessionClosed():
                self._overlap.on_disconnect()
            case _:
                pass

    # --- commands

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Adopt():
                pass  # the driver sees that the spec is known, and builds the model
            case ev.Encode():
                self._encode(command)
            case ev.SendBlob(offer=offer):
                self.link.send_blob(offer, self._blobs[offer.blob])
            case ev.SendAnchor(fragment=fragment):
                assert self.replica is not None
                self.link.send_blob(*encode_anchor(self.replica, fragment, self.machine.name, self.machine.epoch))
            case ev.ForgetBlob(blob=blob, merged_in=merged_in):
                data = self._blobs.pop(blob, None)
                if blob.kind is BlobKind.DELTA and self._residuals is not None and self._variates is not None:
                    self._residuals.on_outcome(blob, merged_in)
                    self._variates.on_outcome(blob, merged_in, data, self.machine.epoch)
            case ev.Apply():
                self._apply(command)
            case ev.Install():
                self._install(command)
            case ev.Merge(fragment=fragment, mix=mix, factor=factor):
                assert self.replica is not None and self._variates is not None
                own = [OwnDelta(blob=blob, terms=terms, data=self._blobs[blob]) for blob, terms in command.own]
                self.replica.merge(fragment, mix, own, factor, self.machine.epoch)
                self._variates.merged(fragment)
                self._merged.append(fragment)
                self._unsaved.pop(fragment, None)
                self._unsaved[fragment] = None
                self._reports.hold(self.replica)
                self._state.see_epoch(self.machine.run, self.machine.epoch)
            case ev.Evaluate(versions=versions):
                self._evaluate(versions)
            case ev.KeepSamples(leases=leases):
                self.samples.retain(leases)
                self.link.send(self.progress())  # new ones are granted once it is known that no others are used
            case ev.UseSamples(lease=lease):
                self.samples.grant(lease)
            case ev.Tell(message=message):
                if isinstance(message, msg.Leave):
                    return self.say_goodbye(message)
                if isinstance(message, msg.Held):
                    message = all_held(message, self.replica, self.samples)
                self.link.send(message)
            case ev.Resync(history=history):
                self._resync(history)
            case ev.Renumber(incarnation=incarnation):
                _log.warning(
                    "the coordinator knows another start of this node with this number or a higher one: %s is new, old "
                    "or a copy; going on as start %d. If the other still runs, it ends: give each machine its own name",
                    self._state.folder,
                    incarnation,
                )
                self._state.renumber(incarnation)
            case ev.Stop(reason=reason, detail=detail):
                text = "; ".join(filter(None, [f"{reason.sentence}: {detail}", _FIXES.get(reason)]))
                differs = reason in (Reason.WRONG_LAYOUT, Reason.WRONG_PART, Reason.WRONG_FROZEN)
                raise LayoutMismatch(text) if differs else Refused(text)
            case _:
                assert_never(command)

    def _encode(self, command: ev.Encode) -> None:
        """Take the delta now; the worker encodes it while training goes on."""
        assert self.replica is not None and self._residuals is not None and self._variates is not None
        self._variates.sent(command)
        self._overlap.on_sent(command.blob.fragment, self._now())
        replica, epoch, step = self.replica, self.machine.epoch, self.machine.inner_steps
        residual = self._residuals.for_delta(command.blob, command.codec)
        if (packed := pack_at_once(replica, command, epoch, step, residual)) is not None:
            return self._in_worker(lambda: self._encoded(finish(packed)))
        delta = replica.compute_delta(command.blob.fragment)
        previous = self._residuals.previous(command.blob, command.codec)
        self._in_worker(
            replica.side.beside(
                lambda: self._encoded(encode_delta(replica, command, delta, epoch, step, residual, previous))
            )
        )

    def _encoded(self, encoded: Encoded) -> None:
        """In the worker's thread. The next step boundary may be far off: what can leave before it does."""
        self._blobs[encoded.offer.blob] = encoded.data
        self._inbox.put(encoded)
        if encoded.at_once:
            self.link.send_blob(encoded.offer, encoded.data)

    def _in_worker(self, job: Callable[[], None]) -> None:
        """Submit a job to the worker; an error ends training."""
        self._worker.submit(job, lambda _: None, _raise)

    def _apply(self, command: ev.Apply) -> None:
        assert self.replica is not None and self._variates is not None
        fragment, version, epoch = command.fragment, command.version, self.machine.epoch
        data = self._blobs.pop(BlobId(kind=BlobKind.UPDATE, fragment=fragment, version=version))
        self._variates.applied(command, data)
        if not self.replica.apply(fragment, version, data, command.codec, epoch, command.anchor_digest):
            return self._mismatched(fragment, version)
        if self._files is not None:
            self._files.add(self._head(fragment, len(data), command.codec), data)

    def _apply_ahead(self, blob: BlobId) -> None:
        """Have the worker apply an update that came before its merge is due; the training thread then has to merge."""
        replica, data = self.replica, self._blobs.get(blob)
        if (
            replica is None
            or data is None
            or blob.kind is not BlobKind.UPDATE
            or not replica.can_apply_ahead(blob.fragment)
        ):
            return
        command, epoch = self.machine.next_update(blob.fragment), self.machine.epoch
        if command is not None and command.version == blob.version:
            self._in_worker(lambda: replica.apply_ahead(blob.fragment, blob.version, data, command.codec, epoch))

    def _install(self, command: ev.Install) -> None:
        assert self.replica is not None and self._residuals is not None
        fragment, version = command.fragment, command.version
        data = self._blobs.pop(BlobId(kind=BlobKind.SNAPSHOT, fragment=fragment, version=version))
        if data is not _IN_PLACE and not self.replica.install(fragment, version, data, self.machine.epoch):
            return self._mismatched(fragment, version)
        self._residuals.installed(fragment, version, command.codec)

    def _mismatched(self, fragment: int, version: int) -> None:
        _log.error("anchor mismatch fragment=%d version=%d: requesting a snapshot", fragment, version)
        self.metrics.mismatches += 1
        self._inbox.put(ev.AnchorMismatch(fragment=fragment))  # not handled here: the machine is in the middle of one

    def _begin_with_own_weights(self) -> None:
        """Use the model's first weights as the anchor if they have the digest of version 0; else ask for it."""
        if self.replica is None or self.machine.spec is None:
            return
        wanted, self._at_zero = self._at_zero, set()
        digests = self.machine.spec.identity.anchor_digests
        for index in sorted(i for i in wanted if self.replica.versions.get(i, 0) < 0):
            if not self.replica.first(index, digests[index]):
                _log.info("requesting a snapshot fragment=%d reason='initial weights differ'", index)
                self.link.send(msg.Fetch(fragment=index, first=True))
                continue
            blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=index, version=0)
            self.on_input(wire_ev.BlobReceived(blob=blob, data=_IN_PLACE))

    # --- anchors on disk

    def _restore(self) -> None:
        """Read the anchors from which the coordinator goes on; ask for a snapshot where one is damaged."""
        if self.replica is None or not self._restorable:
            return
        wanted, self._restorable = self._restorable, set()
        moments = 0
        for index in sorted(wanted):
            if self.replica.versions.get(index, 0) >= 0:  # a snapshot of it came, or it was read in the last session
                continue
            if not self._read(self.replica, index):
                _log.warning("anchor on disk is damaged fragment=%d: requesting a snapshot", index)
                if self._files is not None:
                    self._files.forget([index])
                self._handle(ev.AnchorMismatch(fragment=index))
                continue
            moments += self.replica.moments is not None and self.replica.moments.load(index)
            blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=index, version=self.replica.versions[index])
            self.on_input(wire_ev.BlobReceived(blob=blob, data=_IN_PLACE))
        _log.info("anchors on disk: read, with the optimizer's state of %d fragments", moments)

    def _read(self, replica: Replica, index: int) -> bool:
        """The newest anchor that is on disk; False if it is damaged."""
        base = None if self._files is None else self._files.base(index)
        if self._files is None or base is None or not replica.load(index, base.version, base.digest):
            return False
        return all(
            replica.apply(index, update.version, data, update.codec, self.machine.epoch, update.digest)
            for update, data in self._files.updates(index)
        )

    def _save(self) -> None:
        """Save one anchor at a time, the last merged first: it has the longest time until it changes again."""
        if self._files is None or self.replica is None:
            return
        if self._files.is_written:
            head, self._saving = self._saving, None
            self.replica.end_save(head)
            if head is not None and head.kind == "anchor" and self.replica.moments is not None:
                self._saving = self.replica.moments.save(head)
        while self._unsaved and not self._files.is_busy:
            index, _ = self._unsaved.popitem()
            version = self.replica.versions[index]
            if version < 0:
                continue
            head = self._head(index, 4 * self.replica.layout.fragments[index].numel)
            if self._files.is_due(index, version, self._save_every):
                self._saving = head
                self.replica.save(index)
            elif self.replica.moments is not None and self._files.optimizer(index) is None:
                self._saving = self.replica.moments.save(head)  # it had none when the anchor was saved

    def save_moments(self) -> Iterator[None]:
        """Save the optimizer's state as it is now, and wait for it, a fragment at a turn: this node leaves a run that
        goes on. Where the state that is on disk is of the same version, it stays."""
        files, replica = self._files, self.replica
        if files is None or replica is None or replica.moments is None or self.machine.stage == "finished":
            return
        if files.is_busy:
            head, self._saving = self._saving, None
            replica.end_save(head)
        for index, version in replica.versions.items():
            kept = files.optimizer(index)
            if version < 0 or (kept is not None and kept.version == version):
                continue
            if files.base(index) is None:  # every copy so far was dropped, because the anchor changed meanwhile
                replica.save(index)
                replica.end_save(self._head(index, 4 * replica.layout.fragments[index].numel))
            if (head := replica.moments.save(self._head(index, 0))) is not None:
                replica.end_save(head)
            yield

    def _head(self, fragment: int, size: int, codec: str = "") -> Head:
        """Of a file with the fragment's anchor as it is now, or with the update that led to it."""
        assert self.replica is not None and self.machine.spec is not None
        return Head(
            run=self.machine.spec.identity.fingerprint(),
            history=self.machine.history,
            fragment=fragment,
            version=self.replica.versions[fragment],
            digest=self.replica.digests[fragment],
            size=size,
            codec=codec,
        )

    def _resync(self, history: int) -> None:
        _log.warning("another history of the run has begun history=%d: requesting snapshots of all fragments", history)
        self.samples.begin_again()
        self._reports.begin_again(history)
        spec = self.machine.spec
        if self.replica is not None and self._residuals is not None and spec is not None:
            self.replica.begin_again()
            if self._files is not None:
                self._files.forget(self.replica.own)
            self._saving = None
            self._residuals.begin_again(run_of(spec, history))
            self._variates = ControlVariates(self.replica, spec.terms, self.machine.terms_of)

    def _evaluate(self, versions: tuple[int, ...]) -> None:
        assert self.replica is not None and self.evaluate is not None
        started, before = self._now(), self.account.activity
        self._count_as("evaluation")
        with self.replica.anchors_in_place():
            loss = self.evaluate()
        self._count_as(before)
        seconds, position = self._now() - started, self.machine.position
        self.link.send(msg.Evaluation(loss=loss, versions=versions, position=position, seconds=seconds))

    # --- time and reports

    def _count_as(self, activity: Activity | None) -> None:
        if self._counts_time:
            self.account.turn(activity, self._now())

    def _starved(self) -> bool:
        spec = self.machine.spec
        if spec is None or not self.machine.takes_samples or not self.machine.running:
            return False
        return self.samples.remaining < spec.terms.inner.batch_sequences

    def _isolated(self) -> str:
        machine = self.machine
        trains = machine.running and machine.inner_steps > 0
        return self._isolation.how(
            trains=trains, connected=machine.connected, round_index=machine.schedule.round, now=self._now()
        )

    def report_if_due(self) -> None:
        """Send a report to the coordinator, and to the metrics, once a second."""
        self._stages.log_changes(self.machine)
        now = self._now()
        if not self._reports.is_due(now):
            return
        if self.machine.stands_by and now - self._held_told_at >= REPEAT_S:
            self._held_told_at = now
            _log.warning("run held why=%r", _RECALLED)
        progress, isolated = self.progress(), self._isolated()
        if isolated != self._was_isolated:
            if isolated:
                _log.warning("isolated begin how=%r", isolated)
            else:
                _log.info("isolated end was=%r", self._was_isolated)
            self._was_isolated = isolated
        versions = {state.fragment.index: state.version for state in self.machine.fragments}
        self.metrics.update(
            progress,
            versions=versions,
            connected=self.machine.connected,
            alone=bool(isolated),
            lanes=self.link.num_lanes,
            uplink=self.link.uplink,
        )
        self.metrics.spent(self.account.all_seconds(now), self._worker.seconds)
        self.link.send(progress)
        self._reports.reported(now)


_RECALLED = (
    "the coordinator goes on from what the nodes hold (--adopt-from-nodes) and has asked this one; nothing is merged "
    "until it has enough: its status names what it waits for"
)

_FIXES = {
    Reason.PROTOCOL_VERSION: "install the same version of farloop on both",
    Reason.WRONG_RUN: "check the coordinator's address, and the fingerprint: without one a node takes any run",
    Reason.WRONG_LAYOUT: "build the model that the run began with, or begin a new run with this one",
    Reason.WRONG_FROZEN: "load the same base model on every node; buffers that training changes are left out with "
    "join(buffers='own')",
    Reason.WRONG_PART: "give the stages that the run's layout has",
    Reason.WRONG_KEY: "on the coordinator: farloop keys authorize NAME.pub, and give the node that name",
    Reason.NAME_TAKEN: "stop the other process of this name, or give this node another name",
    Reason.OLD_INCARNATION: "if it runs on another machine, give one of the two another name",
    Reason.FENCED: "the coordinator runs on an old copy of its state: see its alarms, then start this node again",
}
"""What an operator does about it. Other details say it themselves."""


def _as_saved(heads: Mapping[int, Head]) -> msg.SavedAnchors:
    refs = tuple(
        msg.AnchorRef(fragment=index, version=head.version, digest=head.digest) for index, head in sorted(heads.items())
    )
    one = next(iter(heads.values()))
    return msg.SavedAnchors(run=one.run, history=one.history, anchors=refs)


def _raise(error: Exception) -> None:
    raise error
