"""The node's decisions: when a fragment is sent, what is merged and how, when training waits, when it ends.

`NodeMachine` runs in the training thread, inside `step()`, so that sends and merges happen at exact inner steps. It
never touches a tensor, a socket or a clock: events in, commands out (`node/events.py`).

    joining ──Ready──▶ ready ──Start──▶ training ──last position──▶ finishing ──all final──▶ finished
       └────────────────── DrainRequested ──▶ draining ──nothing undecided──▶ left
"""

import dataclasses
from typing import Literal, assert_never

from farloop.algo.methods import screens_deltas
from farloop.algo.revisions import Revisions
from farloop.algo.spec import BlobId, BlobKind, NodeId, RunSpec
from farloop.algo.stages import Part, fault_of, is_source
from farloop.algo.terms import Terms
from farloop.node import events as ev
from farloop.node.fragment_set import (
    FragmentSet,
    FragmentState,
    PendingDelta,
    decided,
    dropped,
    forgotten,
    merge_command,
    merging_when_going_on,
    merging_when_waiting,
    outcomes_up_to,
    overtaken,
)
from farloop.node.send_schedule import SendSchedule
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

Stage = Literal["joining", "ready", "training", "finishing", "draining", "finished", "left", "stopped"]


class NodeMachine:
    """One node of one run. `waiting` tells what training stands still for, if anything."""

    def __init__(
        self,
        *,
        name: NodeId,
        incarnation: int,
        epoch: int = 0,
        run: str = "",
        tau: int | None = None,
        adapt_tau: bool | None = False,
        holds: Part = None,
    ) -> None:
        """`epoch`: the highest that earlier starts of the node have met in `run`, a fingerprint; a coordinator of this
        run with a lower one is fenced.
        `tau`: the node's own overlap; the run's unless given. `adapt_tau`: whether `OverlapChosen` replaces it; None:
        as the run's terms say, if `tau` is None. `holds`: its part of the model."""
        self.name, self.incarnation, self.tau, self.holds = name, incarnation, tau, holds
        self._adapts = adapt_tau
        self.chosen_tau = 0  # the last that was chosen for this node's link; 0 before the first
        self.spec: RunSpec | None = None  # with the terms of the newest revision that was told
        self.revisions: Revisions | None = None  # what windows and rounds run under, once there is a spec
        self.epoch, self.run = epoch, run
        self.history = 0  # epoch in which the run was last wound back, as far as this node followed; 0 for never
        self.stands_by = False
        """Whether it told a coordinator with an old state what it holds: nothing moves before the session ends."""
        self.frozen = self.unsaved = 0
        self._current: tuple[int, ...] = ()
        """Versions as the last Welcome told them: a node that joins is ready once it has them."""
        self.samples_from = 0  # inner step from which samples of the leases are counted
        self.stage: Stage = "joining"
        self.connected = False
        self.fragments = FragmentSet()
        self.schedule = SendSchedule(name, slots=1)
        """Where the node stands in the run's rounds; of the run's slots once there is a spec."""
        self.inner_steps = 0
        self.tokens = 0
        self.lost_steps = 0
        self.skipped_turns = 0  # turns at which a fragment was due but had too many undecided deltas
        self._seq = 0
        self._sessions = 0
        self._quiet_steps = 0  # as of the last event; 0 where nobody asked
        self._commands: list[ev.Command] = []

    # --- Read by the executor

    @property
    def running(self) -> bool:
        return self.stage == "training"

    @property
    def ended(self) -> bool:
        return self.stage in ("finished", "left", "stopped")

    @property
    def position(self) -> float:
        """Schedule position of the next inner step."""
        return self.schedule.position

    @property
    def lr(self) -> float:
        """Learning rate of the next inner step: the schedule's, ramped for a late joiner."""
        return self.lr_after(0)

    def lr_after(self, ahead: int) -> float:
        """Learning rate of the inner step after `ahead` others of this round."""
        return self.schedule.lr_after(ahead, self._round_terms, self.inner_steps)

    @property
    def quiet_steps(self) -> int:
        """Inner steps up to the first after which something may be due; 1 or more, in the same round.

        Before it only an event can make something due, and an event may as well come later.
        """
        if not self.running or self.schedule.plan is None:
            return 1
        steps = self.schedule.steps_to_turn()
        for state in self.fragments:
            if state.lost or state.snapshot is not None or self.inner_steps <= state.joined_at:
                return 1
            if state.merge_at is not None:
                steps = min(steps, state.merge_at - self.inner_steps)
            if state.last is not None and not state.last.merged:
                steps = min(steps, state.last.sent_at + state.last.tau - self.inner_steps)
        return max(1, steps)

    def foresee(self) -> int:
        """As `quiet_steps`, and remembered: up to the next event, no fragment is looked at for those steps."""
        if self.running and not self._quiet_steps:
            self._quiet_steps = self.quiet_steps
        return self._quiet_steps or 1

    @property
    def waiting(self) -> str | None:
        """What training waits for, in words; None if it may continue."""
        if self.ended or self._quiet_steps:
            return None
        if self.stage == "joining":
            return "the first snapshot" if self.connected else "the coordinator"
        if self.stage == "ready":
            return "the start"
        if self.stage == "training":
            for state in self.fragments:
                if state.pending and self.inner_steps == state.joined_at:
                    return f"fragment {state.fragment.index}, version {max(state.pending)}"
            if self.schedule.plan is None:
                return f"the plan of round {self.schedule.round}"
        terms = self._round_terms if self.stage == "training" else None  # at the end, all that was sent is waited for
        for state in self.fragments:
            if state.lost and self.stage in ("training", "finishing"):
                return f"a snapshot of fragment {state.fragment.index}"
            if self.schedule.holds_up(state, terms, self.inner_steps) if terms is not None else state.sent:
                return f"fragment {state.fragment.index}, window {state.awaited()}"
        return "the last windows" if self.stage == "finishing" else None

    @property
    def versions(self) -> tuple[int, ...]:
        return self.fragments.versions

    @property
    def takes_samples(self) -> bool:
        """Whether the coordinator grants the samples that it trains on."""
        return self.spec is not None and bool(self.spec.identity.num_samples) and is_source(self.holds)

    @property
    def _round_terms(self) -> Terms:
        return self.terms_in(self.schedule.round)

    def terms_in(self, round_index: int) -> Terms:
        assert self.revisions is not None
        return self.revisions.of_round(round_index)

    def terms_of(self, fragment: int, window: int) -> Terms:
        """The terms of a window of this fragment; those of rounds may be another round's."""
        assert self.revisions is not None
        return self.revisions.of_window(fragment, window)

    def terms_at(self, state: FragmentState, version: int | None = None) -> Terms:
        """The terms of the window after this version; by default the newest announced one."""
        newest = max(state.pending, default=state.version) if version is None else version
        return self.terms_of(state.fragment.index, newest + 1)

    # --- events

    def set_digests(self, frozen: int, unsaved: int) -> None:
        """Of what of the model is not exchanged, as `Ready` tells them. Before the first snapshot arrives."""
        self.frozen, self.unsaved = frozen, unsaved

    def handle(self, event: ev.Event) -> list[ev.Command]:
        """Take one event; return what is to be done, in order."""
        if isinstance(event, ev.StepDone) and self._quiet_steps > 1:
            self._quiet_steps -= 1
            self._count_step(event.tokens)
            return []
        self._quiet_steps = 0
        match event:
            case ev.StepDone(tokens=tokens):
                self._step_done(tokens)
            case ev.OverlapChosen(tau=tau):
                self.chosen_tau = tau
            case ev.Received(message=message):
                self._received(message)
            case ev.BlobArrived(blob=blob):
                if useless := self.fragments[blob.fragment].on_arrived(blob):
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
        for state in self.fragments:
            state.check()
        if self.stage == "training":
            self.schedule.check()

    def _do(self, *commands: ev.Command) -> None:
        self._commands += commands

    def _received(self, message: msg.Message) -> None:
        match message:
            case msg.Welcome():
                self._welcomed(message)
            case msg.Start(round=plan, lease=lease, slot=slot) if self.stage == "ready":
                self.stage = "training"
                self.schedule.start(plan, slot)
                if lease:
                    self._do(ev.UseSamples(lease=lease))
            case msg.Grant(lease=lease):
                self._do(ev.UseSamples(lease=lease))
            case msg.Committed():
                self.schedule.learn(message.rounds)
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
                    state.overlapped |= reason is Reason.OVERLAP
                    self._decide(state)
            case msg.Revised(revision=revision) if self.spec is not None and self.revisions is not None:
                if revision.number > self.spec.revision:
                    self.spec = dataclasses.replace(self.spec, terms=revision.terms, revision=revision.number)
                    self.revisions = self.revisions.and_then(revision)
            case msg.Recall(fragment=fragment):
                if self.stands_by and fragment in self.fragments and self.fragments[fragment].version >= 0:
                    self._do(ev.SendAnchor(fragment=fragment))
            case msg.Finished():
                if self.stage in ("joining", "ready"):
                    self.stage = "finished"
                    self._do(ev.Tell(message=msg.Leave(reason=Reason.RUN_FINISHED)))
                elif self.stage == "training":  # the run ended without this node: nothing it does now can be merged
                    self.stage = "finishing"
            case msg.Refused(newest=newest) if newest and self.spec is None:
                self.incarnation = newest + 1
                self._do(ev.Renumber(incarnation=self.incarnation))
            case msg.Refused(reason=reason, detail=detail, retriable=retriable):
                if not retriable or (reason is Reason.OLD_INCARNATION and self.spec is not None):
                    self._stop(reason, detail)
            case msg.Leave(reason=(Reason.WRONG_FROZEN | Reason.OLD_INCARNATION) as reason, detail=detail):
                self._stop(reason, detail)
            case msg.Leave(reason=Reason.RUN_FINISHED):
                if not self.ended:  # nothing will come any more, whatever is still missing here
                    self.stage = "finished"
            case _:
                pass  # the session's own business

    def _welcomed(self, welcome: msg.Welcome) -> None:
        if welcome.recalls:
            return self._survey()
        run = welcome.spec.identity.fingerprint()
        if welcome.epoch < self.epoch and run == self.run:
            return self._stop(Reason.FENCED, f"epoch {welcome.epoch} after {self.epoch}")
        if self.spec is not None and run != self.run:
            return self._stop(Reason.WRONG_RUN, "the coordinator holds another run now")
        restarted = welcome.epoch > self.epoch
        self.connected, self.epoch, self._sessions = True, welcome.epoch, self._sessions + 1
        self.run = run  # after its epoch, for the link's thread reads them in the other order
        self._current = welcome.versions
        if self.spec is None:
            if fault := fault_of(self.holds, welcome.spec.identity.layout):
                return self._stop(Reason.WRONG_PART, f"this node {fault}")
            self.fragments, self.history = FragmentSet.begin(welcome.spec, self.holds), welcome.history
            self.schedule = SendSchedule(self.name, welcome.spec.identity.layout.slots)
            self._do(ev.Adopt())
        self.spec, self.revisions = welcome.spec, Revisions.of(welcome.spec, welcome.revisions)
        if self.ended:  # the good-bye was lost with the last session
            reason = Reason.RUN_FINISHED if self.stage == "finished" else Reason.DRAINED
            return self._do(ev.Tell(message=msg.Leave(reason=reason)))
        if welcome.history != self.history:
            self._begin_again(welcome.history)
        if welcome.leases is not None and self.schedule.start_round is not None:
            self._do(ev.KeepSamples(leases=welcome.leases))
        self.schedule.learn(welcome.rounds)
        self.fragments.learn(welcome)
        for state in self.fragments:
            current = welcome.versions[state.fragment.index]
            max_staleness = self.terms_at(state, current).admission.max_staleness
            for offer in state.offer_again(current, max_staleness, restarted=restarted):
                self._do(ev.SendBlob(offer=offer))
            if state.lost:  # what was asked for may have gone with the last session
                self._do(ev.Tell(message=msg.Fetch(fragment=state.fragment.index)))
        if self.stage == "ready":
            self._do(ev.Tell(message=msg.Ready(history=self.history, frozen=self.frozen, unsaved=self.unsaved)))

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

    def _count_step(self, tokens: int) -> None:
        self.inner_steps += 1
        self.schedule.step_done()
        self.tokens += tokens

    def _step_done(self, tokens: int) -> None:
        self._count_step(tokens)
        if self.stage != "training":
            return
        terms = self._round_terms
        for state in self.fragments:
            if self.schedule.is_due(state, terms):
                if self._may_send(state):
                    self._send(state)
                elif self._goes_on:
                    self.skipped_turns += bool(state.sent)
                    state.pass_by(self.inner_steps, behind=self._is_behind(state))
        assert self.spec is not None
        newest = self.fragments.newest_round(self.spec.identity.layout.slots)
        if self.schedule.finish_round(newest, self.spec.terms) == "last":
            self.stage = "finishing"

    def _send_overdue(self) -> bool:
        """While training waits, no turn comes: send now what others may wait for. Returns whether anything was sent."""
        if self.stage != "training" or self.inner_steps == self.fragments.joined_at or self.waiting is None:
            return False
        before = self._seq
        for state in self.fragments:
            if self._goes_on:
                state.stand_still(self.inner_steps, behind=self._is_behind(state))
                self._merge(state)
            if self.schedule.is_past_due(state) and self._may_send(state):
                self._send(state)
        return self._seq > before

    def _may_send(self, state: FragmentState) -> bool:
        return self.schedule.may_send(state, self._round_terms, behind=self._is_behind(state))

    def _is_behind(self, state: FragmentState) -> bool:
        """Whether the base is too old for the open window and later ones."""
        return state.is_behind(self.terms_at(state))

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
        if self.chosen_tau and self.chooses_tau:
            tau = self.own_tau(self.chosen_tau)
        else:
            tau = self.schedule.overlap(terms.tau if self.tau is None else self.own_tau(self.tau))
        state.sent.append(
            PendingDelta(blob=blob, terms=terms, sent_at=self.inner_steps, tau=tau, steps=steps, session=self._sessions)
        )
        state.merge_at, state.sent_round = self.inner_steps + tau, self.schedule.round
        if terms.mix == 1.0:  # nothing of the anchor will be mixed in: the next delta's work begins here
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
                measure=not screens_deltas(self.terms_of(state.fragment.index, terms.window)),
            )
        )

    @property
    def tau_is_open(self) -> bool:
        """Whether neither the run nor this node says what the overlap is, nor this node that it is chosen."""
        newest = None if self.revisions is None else self.revisions.newest
        return self._adapts is None and self.tau is None and newest is not None and newest.terms.schedule.own_tau

    @property
    def chooses_tau(self) -> bool:
        """Whether the overlap is chosen by what this node's link takes."""
        return bool(self._adapts) or self.tau_is_open

    def own_tau(self, tau: int) -> int:
        """An overlap of the node's own, as far as this round and the next have room for it."""
        return self.schedule.own_overlap(tau, self._round_terms, self.terms_in(self.schedule.round + 1))

    @property
    def _samples_used(self) -> int | None:
        """Samples of its leases used in the inner steps so far; None if it brings its own."""
        if self.spec is None or not self.takes_samples:
            return None
        return (self.inner_steps - self.samples_from) * self.spec.terms.inner.batch_sequences

    # --- merging

    @property
    def _goes_on(self) -> bool:
        """Whether training continues while an update is late."""
        return self.spec is not None and self.spec.terms.schedule.on_late_update == "continue"

    def _settle(self) -> None:
        self._flush()
        if self.spec is not None and self.stage == "training" and self.schedule.plan is None:
            self.schedule.catch_up(self.fragments.newest_round(self.spec.identity.layout.slots))
        for state in self.fragments:
            self._merge(state)
        if self._send_overdue():
            for state in self.fragments:
                self._merge(state)
        is_current = all(state.version >= self._current[state.fragment.index] for state in self.fragments)
        if self.stage == "joining" and self.spec and self.connected and is_current:
            self.stage = "ready"
            self._do(ev.Tell(message=msg.Ready(history=self.history, frozen=self.frozen, unsaved=self.unsaved)))
        self._flush()
        undecided = any(state.sent for state in self.fragments)
        if self.stage == "finishing" and not undecided and all(state.is_final for state in self.fragments):
            self.stage = "finished"  # it holds the last version of every fragment
            self._do(ev.Tell(message=msg.Leave(reason=Reason.RUN_FINISHED)))
        elif self.stage == "draining" and not undecided:
            self.stage = "left"
            self._do(ev.Tell(message=msg.Leave(reason=Reason.DRAINED)))

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
        self._do(*(self._application(state, version) for version in merging.versions))
        evaluate = any(state.pending[version].evaluator == self.name for version in merging.versions)
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
        commands, lost_steps = outcomes_up_to(state, version, self.name, self.spec.terms.schedule.lag)
        self.lost_steps += lost_steps
        self._do(*commands)

    def next_update(self, fragment: int) -> ev.Apply | None:
        """What a fragment's anchor takes next, if it is here; it may be due later."""
        state = self.fragments[fragment]
        versions = state.ready_versions()
        return self._application(state, versions[0]) if versions else None

    def _application(self, state: FragmentState, version: int) -> ev.Apply:
        digest = state.pending[version].anchor_digest
        codec = state.terms_for(version, self.terms_at(state, version - 1)).codec_down
        return ev.Apply(fragment=state.fragment.index, version=version, anchor_digest=digest, codec=codec)

    def _decide(self, state: FragmentState) -> None:
        if self._goes_on:
            self._do(*decided(state, self.terms_at(state).admission.max_staleness))

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

    # --- ends

    def _flush(self) -> None:
        if self.stage == "finishing":
            assert self.spec is not None
            for state in self.fragments:
                if self.schedule.may_flush(state, self._round_terms, lag=self.spec.terms.schedule.lag):
                    self._send(state)

    # --- another history

    def _survey(self) -> None:
        """A coordinator with an old state asks what this node holds.

        The node answers, and keeps its anchors until the session ends: what it said it held, it can send. Only the
        Welcome of a coordinator that continues changes what the node follows. The executor fills in anchors and
        samples.
        """
        if self.revisions is None:  # it holds nothing
            return
        self.connected, self.stands_by = False, True  # nothing but this is wanted of it
        windows = (state.terms_of.get(state.version + 1) for state in self.fragments)
        held = msg.Held(
            anchors=(),
            windows=tuple(terms for terms in windows if terms is not None),
            final=tuple(state.fragment.index for state in self.fragments if state.is_final),
            rounds=tuple(self.schedule.plans.values()),
            revisions=self.revisions.kept,
        )
        self._do(ev.Tell(message=held))

    def _begin_again(self, history: int) -> None:
        """Follow a run that was rewound, or continued from what nodes held, beginning with snapshots.

        Nothing of the former history is merged. All fragments begin anew, even if an anchor may be the same in both
        histories: the coordinator cannot know of one that is merged while the greeting is on its way. The node joins as
        a late one, under the same name and incarnation; its counts of steps and tokens continue.
        """
        for state in self.fragments:
            self._do(*dropped(state))
        self.fragments = self.fragments.begun_again(self.inner_steps)
        self.schedule.restart()
        self.history, self.samples_from = history, self.inner_steps
        if self.stage in ("ready", "training", "finishing"):
            self.stage = "joining"
        self._do(ev.Resync(history=history))
