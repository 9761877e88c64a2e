"""The node's decisions: when a fragment is sent, what is merged and how, when training waits, when it ends. Pure.

`NodeMachine` runs in the training thread, inside `step()`, so that sends and merges happen at exact inner steps
(protocol X). It never touches a tensor, a socket or a clock: events in, commands out (`node/events.py`).

    joining ──Ready──▶ ready ──Start──▶ training ──last position──▶ finishing ──all final──▶ finished
       └────────────────── DrainRequested ──▶ draining ──nothing undecided──▶ left
"""

import dataclasses
from typing import Literal, assert_never

from farloop.algo import schedule
from farloop.algo.parts import Part, fault_of, is_source
from farloop.algo.revisions import Revisions
from farloop.algo.spec import BlobId, BlobKind, NodeId, Revision, RoundPlan, RunSpec, Terms
from farloop.node import events as ev
from farloop.node.beginning_again import begin_again
from farloop.node.finishing import farewell, last_sends
from farloop.node.fragment_state import FragmentState, Undecided
from farloop.node.holding import Holding
from farloop.node.merging import merge_command, merging_when_going_on, merging_when_waiting
from farloop.node.outcomes import decided, forgotten, overtaken, settled
from farloop.node.recalled import asked, recalled
from farloop.node.rounds import end_round, jump
from farloop.node.turns import Turn
from farloop.node.waiting import waits_for
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

Stage = Literal["joining", "ready", "training", "finishing", "draining", "finished", "left", "stopped"]

RAMP_STEPS = 20
"""Inner steps over which a late joiner's learning rate grows to the schedule's: its moments are empty (protocol I)."""


class NodeMachine:
    """One node of one run. `waiting` tells what training stands still for, if anything."""

    def __init__(
        self, *, name: NodeId, incarnation: int, epoch: int = 0, tau: int | None = None, holds: Part = None
    ) -> None:
        """`epoch`: the highest that earlier starts of the node have met; a coordinator with a lower one is fenced.
        `tau`: the node's own overlap; the run's unless given. `holds`: its part of the model."""
        self.name, self.incarnation, self.tau, self.holds = name, incarnation, tau, holds
        self.spec: RunSpec | None = None
        """With the terms of the newest revision that was told."""
        self.revisions: Revisions | None = None
        """What windows and rounds run under, once there is a spec."""
        self.epoch = epoch
        self.history = 0
        """Epoch in which the run was last wound back, as far as this node followed; 0 for never."""
        self.stands_by = False
        """Whether it told a coordinator over an old copy what it holds: nothing moves before the session ends."""
        self.samples_from = 0
        """Inner step from which samples of the leases are counted."""
        self.stage: Stage = "joining"
        self.connected = False
        self.fragments = Holding()
        self.rounds: dict[int, RoundPlan] = {}
        self.start_round: int | None = None
        self.start_slot = 0
        self.round = 0
        self.step = 0
        """Own steps done in the current round."""
        self.inner_steps = 0
        self.tokens = 0
        self.lost_steps = 0
        self.skipped_turns = 0
        """Turns at which a fragment was due and not sent, for too many of its deltas were undecided (protocol D)."""
        self.skipped_positions = 0
        """Schedule positions jumped over while behind (protocol A)."""
        self.reached = 0.0
        """Schedule position where the last round ended."""
        self._seq = 0
        self._sessions = 0
        self._commands: list[ev.Command] = []

    # --- what the shell reads

    @property
    def running(self) -> bool:
        """Whether inner steps are wanted."""
        return self.stage == "training"

    @property
    def ended(self) -> bool:
        return self.stage in ("finished", "left", "stopped")

    @property
    def position(self) -> float:
        """Schedule position of the next inner step (protocol A)."""
        if self.spec is None or self.start_round is None:
            return 0.0
        if self.round not in self.rounds:
            return self.reached
        return schedule.position_in(self.rounds[self.round], self.name, self.step)

    @property
    def lr(self) -> float:
        """Learning rate of the next inner step: the schedule's, ramped for a late joiner."""
        assert self.spec is not None
        ramp = 1.0 if not (self.start_round or self.start_slot) else min(1.0, (self.inner_steps + 1) / RAMP_STEPS)
        return ramp * schedule.learning_rate(self.terms_in(self.round), self.position)

    @property
    def waiting(self) -> str | None:
        """What training stands still for, in words; None when it may go on."""
        return waits_for(self)

    @property
    def versions(self) -> tuple[int, ...]:
        return self.fragments.versions

    @property
    def takes_samples(self) -> bool:
        """Whether the coordinator grants it the samples that it trains on; else they come from elsewhere."""
        return self.spec is not None and bool(self.spec.identity.num_samples) and is_source(self.holds)

    def terms_in(self, round_index: int) -> Terms:
        """What belongs to this round, by the run's terms."""
        assert self.revisions is not None
        return self.revisions.of_round(round_index)

    def terms_of(self, fragment: int, window: int) -> Terms:
        """What a window of this fragment runs under; of what belongs to rounds, it may say another one's."""
        assert self.revisions is not None
        return self.revisions.of_window(fragment, window)

    def terms_at(self, state: FragmentState, version: int | None = None) -> Terms:
        """What the window runs under that follows this version: the newest that was announced, unless given."""
        newest = max(state.pending, default=state.version) if version is None else version
        return self.terms_of(state.fragment.index, newest + 1)

    # --- events

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Take one event; return what is to be done, in order."""
        match event:
            case ev.StepDone(tokens=tokens):
                self._step_done(tokens)
            case ev.Received(message=message):
                self._received(message)
            case ev.BlobArrived(blob=blob):
                if useless := self.fragments[blob.fragment].came(blob):
                    self._do(ev.ForgetBlob(blob=useless))
            case ev.Disconnected():
                self.connected = self.stands_by = False
            case ev.DeltaEncoded(offer=offer, offered=offered):
                self._encoded(offer, offered=offered)
            case ev.AnchorMismatch(fragment=fragment):
                self.fragments[fragment].lost = True
                self._do(ev.Tell(message=msg.Fetch(fragment=fragment)))
            case ev.DrainRequested():
                if not self.ended:
                    self.stage = "draining"
            case _:
                assert_never(event)
        self._settle()
        commands, self._commands = self._commands, []
        return commands

    def check(self) -> None:
        """All invariants."""
        for state in self.fragments:
            state.check()
        if self.stage == "training":
            assert self.start_round is not None
            assert self.round not in self.rounds or self.step < self.rounds[self.round].steps_of(self.name)

    def _do(self, *commands: ev.Command) -> None:
        self._commands += commands

    def _received(self, message: msg.Message) -> None:
        match message:
            case msg.Welcome():
                self._welcomed(message)
            case msg.Start(round=plan, lease=lease, slot=slot) if self.stage == "ready":
                self._start(plan, slot)
                if lease:
                    self._do(ev.UseSamples(lease=lease))
            case msg.Grant(lease=lease):
                self._do(ev.UseSamples(lease=lease))
            case msg.Committed():
                self._learn_rounds(message.rounds)
                self.fragments[message.fragment].announce(message)
                self._decide(self.fragments[message.fragment])
            case msg.Stored(blob=blob):
                if undecided := self.fragments[blob.fragment].named(blob):
                    undecided.stored = True
            case msg.Outcome(blob=blob, reason=reason):
                state = self.fragments[blob.fragment]
                undecided = state.named(blob)
                # An offer that was made twice, around a reconnection, is refused once it has been merged.
                if undecided and state.undecided_is_in(undecided) is None:
                    undecided.dropped = reason
                    self._decide(state)
            case msg.Revised(revision=revision):
                self._revised(revision)
            case msg.Recall(fragment=fragment):
                self._do(*asked(self, fragment))
            case msg.Finished():
                if self.stage in ("joining", "ready"):
                    self.stage = "finished"
                    self._do(ev.Tell(message=msg.Leave(reason=Reason.RUN_FINISHED)))
                elif self.stage == "training":  # the run ended without this node: nothing it does now can be merged
                    self.stage = "finishing"
            case msg.Refused(reason=reason, detail=detail, retriable=retriable):
                if not retriable:
                    self._stop(reason, detail)
            case msg.Leave(reason=Reason.RUN_FINISHED):
                if not self.ended:  # nothing will come any more, whatever is still missing here
                    self.stage = "finished"
            case _:
                pass  # the session's own business

    def _start(self, plan: RoundPlan, slot: int) -> None:
        assert self.spec is not None
        self.stage, self.start_round, self.round, self.start_slot = "training", plan.index, plan.index, slot
        self.step = schedule.first_step(slot, self.spec.identity.layout.slots, plan.steps_of(self.name))
        self._learn_rounds((plan,))

    def _welcomed(self, welcome: msg.Welcome) -> None:
        if welcome.recalls:
            return self._do(*recalled(self))
        if welcome.epoch < self.epoch:
            return self._stop(Reason.FENCED, f"epoch {welcome.epoch} after {self.epoch}")
        if self.spec is not None and self.spec.identity.fingerprint() != welcome.spec.identity.fingerprint():
            return self._stop(Reason.WRONG_RUN, "the coordinator holds another run now")
        restarted = welcome.epoch > self.epoch
        self.connected, self.epoch, self._sessions = True, welcome.epoch, self._sessions + 1
        if self.spec is None:
            if fault := fault_of(self.holds, welcome.spec.identity.layout):
                return self._stop(Reason.WRONG_PART, f"this node {fault}")
            self.fragments, self.history = Holding.begin(welcome.spec, self.holds), welcome.history
            self._do(ev.Adopt())
        self.spec, self.revisions = welcome.spec, Revisions.of(welcome.spec, welcome.revisions)
        if self.ended:  # the good-bye was lost with the last session
            reason = Reason.RUN_FINISHED if self.stage == "finished" else Reason.DRAINED
            return self._do(ev.Tell(message=msg.Leave(reason=reason)))
        if welcome.history != self.history:
            self._do(*begin_again(self, welcome.history))
        if welcome.leases is not None and self.start_round is not None:
            self._do(ev.KeepSamples(leases=welcome.leases))
        self._learn_rounds(welcome.rounds)
        self.fragments.learn(welcome)
        for state in self.fragments:
            current = welcome.versions[state.fragment.index]
            max_staleness = self.terms_at(state, current).max_staleness
            for offer in state.offer_again(current, max_staleness, restarted=restarted):
                self._do(ev.SendBlob(offer=offer))
            if state.lost:  # what was asked for may have gone with the last session
                self._do(ev.Tell(message=msg.Fetch(fragment=state.fragment.index)))
        if self.stage == "ready":
            self._do(ev.Tell(message=msg.Ready(history=self.history)))

    def _revised(self, revision: Revision) -> None:
        """They hold from windows and a round on that were not told of yet."""
        assert self.spec is not None and self.revisions is not None
        if revision.number > self.spec.revision:
            self.spec = dataclasses.replace(self.spec, terms=revision.terms, revision=revision.number)
            self.revisions = self.revisions.and_then(revision)

    def _learn_rounds(self, plans: tuple[RoundPlan, ...]) -> None:
        self.rounds |= {plan.index: plan for plan in plans}

    def _encoded(self, offer: msg.Offer, *, offered: bool) -> None:
        if undecided := self.fragments[offer.blob.fragment].named(offer.blob):
            undecided.offer = offer
            if self.connected and not (offered and undecided.session == self._sessions):
                self._do(ev.SendBlob(offer=offer))
        else:  # a snapshot took its base away while it was being encoded
            self._do(ev.ForgetBlob(blob=offer.blob))

    def _stop(self, reason: Reason, detail: str) -> None:
        self.stage = "stopped"
        self._do(ev.Stop(reason=reason, detail=detail))

    # --- an inner step

    def _step_done(self, tokens: int) -> None:
        self.inner_steps += 1
        self.step += 1
        self.tokens += tokens
        if self.stage != "training":
            return
        turn = Turn.of(self)
        for state in self.fragments:
            if turn.is_due(state):
                if turn.may_send(state):
                    self._send(state)
                elif self._goes_on:
                    self.skipped_turns += bool(state.sent)
                    turn.pass_by(state, self.inner_steps)
        end_round(self)

    def _send_overdue(self) -> bool:
        """While training stands still no turn comes: what others may be waiting for is sent now, or all would wait.

        Returns whether anything was.
        """
        if self.stage != "training" or self.inner_steps == self.fragments.joined_at or self.waiting is None:
            return False
        turn, before = Turn.of(self), self._seq
        for state in self.fragments:
            if self._goes_on:
                turn.stand_still(state, self.inner_steps)
                self._merge(state)
            if turn.is_over(state) and turn.may_send(state):
                self._send(state)
        return self._seq > before

    def _send(self, state: FragmentState) -> None:
        terms = state.terms
        assert terms is not None
        if state.last is not None:  # with a lag: what became of the one before is announced by now
            self._settle_sent(state, max(state.pending, default=state.version))
        self._seq += 1
        blob = BlobId(
            kind=BlobKind.DELTA,
            fragment=state.fragment.index,
            version=state.version,
            node=self.name,
            incarnation=self.incarnation,
            seq=self._seq,
        )
        steps, tokens = self.inner_steps - state.counted_from, self.tokens - state.tokens_from
        turn = Turn.of(self)
        tau = turn.overlap(terms.tau if self.tau is None else turn.own_overlap(self.tau))
        state.sent.append(
            Undecided(blob=blob, terms=terms, sent_at=self.inner_steps, tau=tau, steps=steps, session=self._sessions)
        )
        state.merge_at, state.sent_round = self.inner_steps + tau, self.round
        if terms.mix == 1.0:  # nothing of the anchor will be mixed in: the next delta's work begins here (protocol H)
            state.counted_from, state.tokens_from = self.inner_steps, self.tokens
        self._do(
            ev.Encode(
                blob=blob,
                window=terms.window,
                codec=terms.codec_of(self.name),
                steps=steps,
                tokens=tokens,
                consumed=self._samples_used,
                history=self.history,
            )
        )

    @property
    def _samples_used(self) -> int | None:
        """Samples of its leases in the inner steps that are done; None for who brings its own."""
        if self.spec is None or not self.takes_samples:
            return None
        return (self.inner_steps - self.samples_from) * self.spec.terms.batch_sequences

    # --- merging

    @property
    def _goes_on(self) -> bool:
        """Whether training goes on where an update is late (protocol F)."""
        return self.spec is not None and self.spec.terms.on_late_update == "continue"

    def _settle(self) -> None:
        """Merge what is due, then see whether the stage changes."""
        self._flush()
        jump(self)
        for state in self.fragments:
            self._merge(state)
        if self._send_overdue():
            for state in self.fragments:
                self._merge(state)
        if self.stage == "joining" and self.spec and self.connected and min(self.versions) >= 0:
            self.stage = "ready"
            self._do(ev.Tell(message=msg.Ready(history=self.history)))
        self._flush()
        if end := farewell(self.stage, self.fragments):
            self.stage, reason = end
            self._do(ev.Tell(message=msg.Leave(reason=reason)))

    def _merge(self, state: FragmentState) -> None:
        if self.stands_by:
            return None
        if state.snapshot is not None:
            return self._install(state)
        if self.spec is None or state.lost:
            return
        decide = merging_when_going_on if self._goes_on else merging_when_waiting
        merging = decide(state, self.terms_at(state), self.inner_steps, training=self.stage == "training")
        if merging is None:
            return
        if merging.loses_steps and merging.mix == 0.0:
            self.lost_steps += self.inner_steps - state.merged_at
        evaluate = self._apply(state, merging.versions)
        version = merging.versions[-1] if merging.versions else state.version
        self._settle_sent(state, version)
        if state.last is not None:
            state.last.merged = True
        state.merge_at, state.discard = None, False
        state.advance(version, self.inner_steps, self.tokens, mixed=merging.mix < 1.0)
        sent_for = state.last.terms.window - 1 if state.last else None
        self._do(merge_command(state, self.terms_at(state, sent_for), merging.mix))
        if evaluate and self.stage in ("training", "finishing"):
            self._do(ev.Evaluate(versions=self.versions))

    def _settle_sent(self, state: FragmentState, version: int) -> None:
        assert self.spec is not None
        commands, lost_steps = settled(state, version, self.name, self.spec.terms.lag)
        self.lost_steps += lost_steps
        self._do(*commands)

    def _apply(self, state: FragmentState, versions: list[int]) -> bool:
        """Bring the anchor to the last of the versions; whether this node is to evaluate one of them."""
        assert self.spec is not None
        for version in versions:
            digest = state.pending[version].anchor_digest
            codec = state.terms_for(version, self.terms_at(state, version - 1)).codec_down
            self._do(ev.Apply(fragment=state.fragment.index, version=version, anchor_digest=digest, codec=codec))
        return any(state.pending[version].evaluator == self.name for version in versions)

    def _decide(self, state: FragmentState) -> None:
        if self._goes_on:
            self._do(*decided(state, self.terms_at(state).max_staleness))

    def _install(self, state: FragmentState) -> None:
        version, state.snapshot = state.snapshot, None
        assert version is not None and self.spec is not None
        if version < state.version or (version == state.version and not state.lost):
            return self._do(forgotten(state, BlobKind.SNAPSHOT, version))
        state.lost = False
        self.lost_steps += self.inner_steps - state.merged_at
        state.discard = False
        self._do(*overtaken(state, version, self.terms_at(state, version)))
        codec = state.terms_for(version + 1, self.terms_at(state, version)).codec_of(self.name)
        self._do(ev.Install(fragment=state.fragment.index, version=version, codec=codec))
        state.advance(version, self.inner_steps, self.tokens, mixed=True)
        self._do(ev.Merge(fragment=state.fragment.index, mix=0.0))
        self._merge(state)

    def _flush(self) -> None:
        if self.stage == "finishing":
            for state in last_sends(self):
                self._send(state)
