"""The decisions of the coordinator: events in, commands out (`events.py`).

What must survive a crash goes through the journal into the `Ledger`; nodes are told after the record that makes it
true. The caller passes the time. `membership.py` decides who takes part, `closing.py` when windows close.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final, assert_never

from farloop.algo import schedule
from farloop.algo.methods import method_named
from farloop.algo.spec import NodeId, Revision, WindowTerms
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.admission import delta_refusal, last_position, progress_untrue, samples_untrue
from farloop.coordinator.decide.adoption import Adoption, AdoptionSettings
from farloop.coordinator.decide.closing import QUARANTINE, Closing
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.membership import Membership
from farloop.coordinator.decide.revising import revision_of
from farloop.coordinator.decide.rollback import RollbackGuard, of_this_run
from farloop.coordinator.decide.roster import EXPIRE_S, Member, alarm_unheld_stages
from farloop.coordinator.decide.run_state import Decisions, RunState
from farloop.coordinator.decide.windows import Window
from farloop.coordinator.errors import NotNow
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

_MEMORY: Final = 16  # unanswered questions that are remembered: a node may leave before it answers


class Evaluations:
    """Evaluations that nodes were asked for; each may be answered once, by the node that was asked: all are kept for
    the whole run and shown. Versions are those of the last fragment."""

    def __init__(self, ledger: Ledger) -> None:
        """Any node may answer the questions of an earlier incarnation once: which node it asked is not known."""
        self._ledger, self._last = ledger, len(ledger.versions) - 1
        self._asked: dict[int, NodeId] = {}
        known = [evaluation.versions[self._last] for evaluation in ledger.evaluations]
        asks = ledger.spec.identity.evaluation_set != "none"
        self._before = range(max(known, default=0) + 1, ledger.versions[self._last] + 1 if asks else 0)

    @property
    def evaluator(self) -> NodeId | None:
        """The node that was asked last and has not answered."""
        return self._asked[max(self._asked)] if self._asked else None

    def ask(self, version: int, node: NodeId) -> None:
        self._asked[version] = node
        if len(self._asked) > _MEMORY:
            del self._asked[min(self._asked)]

    def asked(self, node: NodeId, versions: Sequence[int], position: float = 0.0) -> int | None:
        """The version for which this evaluation was asked; None if it was not, or if the run has no such position.

        A node that merges several versions at once answers with the newest.
        """
        ledger = self._ledger
        if len(versions) != len(ledger.versions) or not 0.0 <= position <= last_position(ledger):
            return None
        if not all(0 <= held <= current for held, current in zip(versions, ledger.versions, strict=True)):
            return None
        held = versions[self._last]
        if held in self._before:
            return held
        return max((version for version, who in self._asked.items() if who == node and version <= held), default=None)

    def answered(self, version: int) -> None:
        """The question of this version is answered, and the node's earlier ones."""
        if version in self._before:
            self._before = range(version + 1, self._before.stop)
        elif node := self._asked.get(version):
            self._asked = {v: who for v, who in self._asked.items() if who != node or v > version}


# --- The machine


REPORT, ANCHOR = "report of ", "anchor of "  # prefixes of alarms that the next report, or delta, of the node ends


class CoordinatorMachine:
    """One incarnation of the coordinator of one run."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        now: float,
        liveness_s: float = 10.0,
        expire_s: float = EXPIRE_S,
        floor_share: float | None = None,
        drops_silent: bool = True,
        adopt: AdoptionSettings | None = None,
    ) -> None:
        """Continue from `ledger`. Nodes that take part have `liveness_s` to return before windows close without them,
        and `expire_s` more before others get their samples.

        `floor_share`: smallest share of the live nodes that must be merged (`closing.py`). `drops_silent`: windows
        close without a node that misses its deadline (`deadlines.py`). `adopt`: the ledger is an old copy's; continue
        from what nodes hold (`adoption.py`).
        """
        self._run = run = RunState(ledger, now)
        self.ledger, self.windows, self.members, self.alarms = ledger, run.windows, run.members, run.alarms
        self._cut_in_stages = ledger.spec.identity.layout.num_stages > 1
        self._decisions = Decisions(ledger)
        self._rollback = RollbackGuard(run, self._decisions)
        self._closing = Closing(run, self._decisions, floor_share=floor_share, drops_silent=drops_silent)
        self.grace, self.guard, self.deadlines = self._closing.grace, self._closing.guard, self._closing.node_deadlines
        self._membership = Membership(
            run, self._decisions, self._closing, self._rollback, gone_at=now + liveness_s, expire_s=expire_s
        )
        self._adoption = None if adopt is None else Adoption(ledger, self._decisions, self.alarms, adopt, now)
        self._evaluations = Evaluations(ledger)
        self._damaged: dict[NodeId, set[int]] = {}  # fragments whose anchors did not match and are not repaired yet
        if self._adoption is None:
            self._begin()

    def _begin(self) -> None:
        self._closing.show_quarantine()
        self._run.begun = any(self.ledger.versions)
        for terms in self.ledger.windows.values():
            self._open(terms)
        self._closing.fix_rounds()
        self._membership.start_ready(self._run.now, "none")
        self._closing.try_all()
        self._finish_if_done()

    @property
    def in_quarantine(self) -> dict[NodeId, str]:
        """Nodes whose deltas are measured but not merged, and why."""
        return self.ledger.screening.in_quarantine(self.ledger.started)

    @property
    def begun(self) -> bool:
        return self._run.begun

    @property
    def holding(self) -> str | None:
        """Why nothing is committed until a person decides, and what can be done; None otherwise."""
        return self._run.held if self._adoption is None else self._adoption.waits

    @property
    def awaited(self) -> list[NodeId]:
        """Nodes that are connected or may return."""
        return self._membership.awaited

    @property
    def all_left(self) -> bool:
        """Whether every node that has come to this start has left because the run is over."""
        return all(m.session is None and m.reason is Reason.RUN_FINISHED for m in self.members.values())

    def start(self) -> list[ev.Command]:
        """Commands of a restart: windows that can close at once."""
        return self._decisions.pop_commands()

    def stop(self) -> None:
        """This coordinator ends: no node is removed and no window closes because its sessions end. Stored deltas are
        durable; the next start closes what can close."""
        self._run.stopping = True

    def believes(self, node: NodeId, message: msg.Progress | msg.Evaluation) -> bool:
        """Whether a report or an evaluation is accepted from this node now."""
        member = self.members.get(node)
        if isinstance(message, msg.Progress):
            return progress_untrue(message, self.ledger, member.holds if member else None) is None
        trains = member is not None and member.stage == "training"
        return trains and self._evaluations.asked(node, message.versions, message.position) is not None

    @property
    def hold_claims(self) -> dict[NodeId, str]:
        """Nodes that prove this state to be an old copy, with their proofs."""
        return self._rollback.claims if self._adoption is None else {}

    def revision_for(self, given: Mapping[str, str]) -> Revision:
        """The revision to these terms. Raises ValueError or NotNow, one sentence, if the run cannot have them."""
        if self.holding is not None:
            raise NotNow(self.holding)
        closing = {fragment for fragment, window in self.windows.items() if window.state == "closing"}
        return revision_of(self.ledger, closing, self._membership.names, given)

    # --- events

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Take one event; return the commands, in order."""
        self._run.now = now
        if isinstance(event, ev.NodeHello):
            event = dataclasses.replace(event, hello=of_this_run(event.hello, self.ledger))
        if isinstance(event, ev.KeysAllowed):
            if (changed := self.ledger.keys_changed(event.keys, event.time_s)) is not None:
                self._decisions.record(changed)
            return self._decisions.pop_commands()
        if self._adoption is not None:
            return self._adopting(self._adoption, event, now)
        held = self.holding
        match event:
            case ev.NodeHello():
                if self._membership.is_new(event):
                    self._clear_alarms(event.node)
                    self._closing.node_deadlines.on_restart(event.node)
                self._membership.on_hello(event, now)
            case ev.NodeMessage(node=node, session=session, message=message):
                if member := self._membership.in_session(node, session):
                    member.heard_at = now
                    self._on_message(member, message, now)
            case ev.NodeDisconnected(node=node, session=session, reason=reason):
                if member := self._membership.in_session(node, session):
                    self._membership.on_disconnect(member, reason, now)
            case ev.InputStored(offer=offer, payload=payload):
                self._on_stored(offer, payload)
            case ev.InputFailed(offer=offer, reason=reason, detail=detail):
                self._drop(offer, reason, detail)
            case ev.CommitDone(record=record):
                self._on_committed(record)
            case ev.CommitFailed():
                self._closing.on_commit_failed(event)
            case ev.SumOverflow():
                self._closing.on_overflow(event)
            case ev.TermsGiven(revision=revision):
                self._decisions.record(rec.TermsChanged(revision=revision))
                self._membership.send_revision(revision)
                self.guard.begin_again()
                self._closing.try_all()
            case ev.HoldReleased():
                self._rollback.release(now, "the run was released, and goes on without it")
                self.guard.begin_again()
            case ev.NodeForgotten(node=node):
                self._clear_alarms(node)
                self._membership.forget(node)
            case ev.LeftOut(node=node):
                self._membership.leave_out(node)
            case ev.AnchorStored() | ev.AnchorFailed():
                pass  # of a session that ended as the run went on
            case _:
                assert_never(event)
        if held is None and self.holding is not None:
            self._membership.send_away(self.holding)
        elif held is not None and self.holding is None:  # the hold's time does not count toward deadlines
            self._membership.clock_jumped(self._rollback.held_s)
            self._closing.clock_jumped(self._rollback.held_s)
            self._closing.try_all()
        self._forget_the_gone()
        self._closing.poll()
        self._update_stage_alarms()
        return self._decisions.pop_commands()

    def _adopting(self, adoption: Adoption, event: ev.Event | None, now: float) -> list[ev.Command]:
        if not self._run.stopping and adoption.handle(event, now):
            self._adoption = None
            self._membership.clock_jumped(now - adoption.began_at)  # no node could connect meanwhile
            self._begin()
        return self._decisions.pop_commands()

    def next_timer(self) -> float | None:
        if self._adoption is not None:
            return None if self._run.stopping else self._adoption.wakes_at
        if self._run.stands_still:
            return None
        return min([*self._membership.deadlines(), *self._closing.deadlines()], default=None)

    def handle_timer(self, now: float) -> list[ev.Command]:
        """Act on deadlines that have passed: of nodes, of windows, of commits to retry."""
        self._run.now = now
        if self._adoption is not None:
            return self._adopting(self._adoption, None, now)
        if self._run.stands_still:
            return []
        self._membership.remove_overdue(now)
        self._forget_the_gone()
        self._closing.pass_time()
        self._membership.start_ready(now, "none")
        self._update_stage_alarms()
        return self._decisions.pop_commands()

    def clock_jumped(self, seconds: float) -> None:
        """This process stood still: every deadline moves."""
        if self._adoption is not None:
            self._adoption.clock_jumped(seconds)
        self._membership.clock_jumped(seconds)
        self._rollback.clock_jumped(seconds)
        self._closing.clock_jumped(seconds)

    def check(self) -> None:
        self.ledger.check()
        assert self._adoption is not None or set(self.windows) == set(self.ledger.windows)
        for fragment, window in self.windows.items():
            assert window.terms == self.ledger.windows[fragment]
            window.check()
        self._membership.check()

    def _on_message(self, member: Member, message: msg.Message, now: float) -> None:
        match message:
            case msg.Ready(history=history):
                if history == self.ledger.history:  # else its node has yet to hear that it must begin again
                    self._membership.on_ready(member, message, now)
            case msg.Offer():
                self._on_offer(member, message)
            case msg.Progress():
                self._on_progress(member, message, now)
            case msg.Evaluation():
                self._on_evaluation(member, message)
            case msg.Fetch(fragment=fragment, first=first):
                if 0 <= fragment < len(self.ledger.versions) and member.has(self.ledger.fragment(fragment)):
                    wrong = set[int]() if first else {fragment}
                    self._note_damage(member.name, self._damaged.get(member.name, set()) | wrong)
                    self._decisions.do(ev.SendSnapshot(node=member.name, fragment=fragment))
            case msg.Leave():
                self._membership.on_leave(member, message, now)
            case _:
                pass  # the session's own business

    def _on_progress(self, member: Member, progress: msg.Progress, now: float) -> None:
        """Ignore a report that cannot be true: it is no sign of progress."""
        if untrue := progress_untrue(progress, self.ledger, member.holds):
            self.alarms[f"{REPORT}{member.name}"] = untrue
            return
        self.alarms.pop(f"{REPORT}{member.name}", None)
        if more := samples_untrue(progress, member, self.ledger):
            self.alarms[f"{REPORT}{member.name}"] = more
        self._membership.on_progress(member, progress, now)

    def _on_evaluation(self, member: Member, evaluation: msg.Evaluation) -> None:
        """Take the evaluation of a node that was asked, once."""
        asked = self._evaluations.asked(member.name, evaluation.versions, evaluation.position)
        if asked is None or member.stage != "training":
            return
        self._evaluations.answered(asked)
        self._membership.evaluates(self._evaluations.evaluator)
        self._decisions.record(
            rec.EvaluationTaken(loss=evaluation.loss, versions=evaluation.versions, position=evaluation.position)
        )

    def _clear_alarms(self, node: NodeId) -> None:
        self._note_damage(node, set())
        self.alarms.pop(f"{REPORT}{node}", None)

    def _note_damage(self, node: NodeId, fragments: set[int]) -> None:
        """Set the fragments of a node whose anchors did not match and are not known to be repaired."""
        self._damaged.pop(node, None)
        self.alarms.pop(f"{ANCHOR}{node}", None)
        if fragments:
            self._damaged[node] = fragments
            which = ", ".join(str(fragment) for fragment in sorted(fragments))
            self.alarms[f"{ANCHOR}{node}"] = f"fragment {which} did not match its digest"

    def _forget_the_gone(self) -> None:
        """End the alarms of nodes that left or did not come back in time. One that comes back raises them again."""
        self._rollback.pass_time(self._run.now)
        if not (self._damaged or self.alarms):
            return
        for node in [node for node in self._damaged if not self._membership.is_awaited(node)]:
            self._note_damage(node, set())
        for alarm in [alarm for alarm in self.alarms if alarm.startswith(REPORT)]:
            if not self._membership.is_awaited(NodeId(alarm.removeprefix(REPORT))):
                del self.alarms[alarm]
        if any(a.startswith(QUARANTINE) and a.removeprefix(QUARANTINE) not in self.ledger.started for a in self.alarms):
            self._closing.show_quarantine()

    def _update_stage_alarms(self) -> None:
        if self._cut_in_stages and self.begun:
            alarm_unheld_stages(self.members.values(), self.ledger, self.alarms)

    # --- windows

    def _open(self, terms: WindowTerms) -> None:
        """Open a window, with the deltas that were late for earlier windows where the method takes them."""
        ours = self.ledger.terms_at(terms)
        counted = self._membership.expected(terms) if self._run.begun else ()
        expected = {n for n in counted if self._closing.node_deadlines.expects(n, self._run.now)}
        window = self.windows[terms.fragment] = Window(
            terms=terms,
            max_staleness=ours.admission.max_staleness,
            alone=method_named(self.ledger.spec.terms.method).alone,
            needs_steps=ours.schedule.on_late_update == "continue",
            opened_at=self._run.now,
            expected=expected,
        )
        self._closing.node_deadlines.on_opened(window)
        window.begin_with(self.ledger.inputs, ours.admission.quorum)
        self.grace.update(window, ours.admission.quorum, self._run.now)

    def _on_offer(self, member: Member, offer: msg.Offer) -> None:
        blob = offer.blob
        if blob in self.ledger.inputs:
            return self._decisions.send(member.name, msg.Stored(blob=blob))
        self._closing.node_deadlines.on_offer(offer)
        if blob.fragment in (ailing := self._damaged.get(member.name, set())):
            self._note_damage(member.name, ailing - {blob.fragment})  # a node sends nothing from an anchor that is lost
        refused = delta_refusal(offer, member, self.ledger, self.windows.get(blob.fragment))
        if refused is None:
            return self._decisions.do(ev.Receive(offer=offer))
        reason, detail = refused
        self._send_outcome(member.name, offer, reason, detail)
        # No window waits for another delta of a node whose claim cannot be true, or that came too late for it: a window
        # that is closing may have to open again.
        no_other = (Reason.CORRUPT, Reason.IMPLAUSIBLE, Reason.STALE_BASE, Reason.LATE)
        if reason in no_other and blob.node == member.name:
            self._give_up(offer, reason)

    def _send_outcome(self, node: NodeId, offer: msg.Offer, reason: Reason, detail: str) -> None:
        self._decisions.send(node, msg.Outcome(blob=offer.blob, reason=reason, detail=detail))

    def _on_stored(self, offer: msg.Offer, payload: int) -> None:
        window = self.windows.get(offer.blob.fragment)
        self.ledger.leases.stores(offer.blob.node, offer.blob.incarnation, offer.consumed)
        if offer.blob in self.ledger.inputs:
            return self._decisions.send(offer.blob.node, msg.Stored(blob=offer.blob))
        if window is None or not window.admits(offer) or window.is_too_late_for(offer):
            return self._drop(offer, Reason.LATE, Reason.LATE.sentence)
        if self.ledger.holds_one_of(offer.blob.node, offer.blob.fragment):
            return self._drop(offer, Reason.OVERLAP, Reason.OVERLAP.sentence)
        self.grace.on_delta(offer.blob.fragment, offer.window, self._run.now)
        self._closing.node_deadlines.on_delta(offer, self._run.now)
        self.ledger.apply(rec.InputStored.of(offer, payload))
        self._decisions.send(offer.blob.node, msg.Stored(blob=offer.blob))
        if window.state == "open":  # else the next one may begin with it
            window.add(offer)
            self.grace.update(window, self.ledger.terms_at(window.terms).admission.quorum, self._run.now)
        self._closing.try_all()  # what was seen of lateness says of others, too, that they have waited long enough
        self._membership.start_ready(self._run.now, "none")

    def _drop(self, offer: msg.Offer, reason: Reason, detail: str) -> None:
        """Decide a delta's outcome before its window closes."""
        blob = offer.blob
        self._decisions.record(rec.InputDropped(blob=blob, reason=reason, detail=detail))
        self._decisions.do(ev.Forget(blob=blob))
        self._send_outcome(blob.node, offer, reason, detail)
        self._give_up(offer, reason)

    def _give_up(self, offer: msg.Offer, reason: Reason) -> None:
        """Stop waiting for a node's delta, also where it was late already: it is not computed again."""
        node, window = offer.blob.node, self.windows.get(offer.blob.fragment)
        if window is None or window.terms.window != offer.window or node in window.contributors:
            return
        if not self._run.begun:  # later its nodes are counted, but not this one again
            window.expected.add(node)
        if node in window.expected:
            window.removed[node] = reason
            self._closing.try_one(offer.blob.fragment)

    def _on_committed(self, record: rec.WindowCommitted) -> None:
        """A commit is durable: publish it, start waiting nodes, open the next window, or end the run."""
        before, held = self.ledger.current_round, self.ledger.inputs
        closed = self.windows.pop(record.fragment)
        self.ledger.apply(record)
        self._closing.on_committed(record, closed)
        for blob in held.keys() - self.ledger.inputs.keys() - {addend.blob for addend in record.blobs}:
            self._decisions.do(ev.Forget(blob=blob))
        self._closing.fix_rounds()
        for refusal in record.refused:
            outcome = msg.Outcome(blob=refusal.blob, reason=refusal.reason, detail=refusal.detail)
            self._decisions.send(refusal.blob.node, outcome)
        self._closing.show_quarantine()
        self._publish(record, closed)
        self._membership.start_ready(self._run.now, "round" if self.ledger.current_round > before else "slot")
        if self.ledger.current_round > before:
            self._membership.top_up_all()
        if record.next_window:
            self._open(record.next_window)  # expects who has just started, too
            self._closing.try_one(record.fragment)
        self._closing.try_those_ahead()
        self._finish_if_done(record.fragment)

    def _finish_if_done(self, fragment: int | None = None) -> None:
        """End the run when every fragment is final, also after a restart; tell nodes whose fragments are all final."""
        if not self.ledger.windows and not self.ledger.finished:
            self._decisions.record(rec.RunFinished())
        for member in self._membership.connected:
            holds_it = fragment is None or member.has(self.ledger.fragment(fragment))
            if not self.ledger.windows or (holds_it and self.ledger.is_finished_for(member.holds)):
                self._decisions.send(member.name, msg.Finished())
        if not self.ledger.windows:
            self._decisions.do(ev.Finish())

    def _publish(self, record: rec.WindowCommitted, closed: Window) -> None:
        evaluator = self._evaluator(closed.terms)
        if evaluator is not None:
            self._evaluations.ask(record.version, evaluator)
            self._membership.evaluates(evaluator)
        committed = dataclasses.replace(
            self.ledger.commits[record.fragment, record.version], rounds=self.ledger.rounds_ahead(), evaluator=evaluator
        )
        self._decisions.do(ev.Publish(nodes=self._membership.audience(record.fragment), committed=committed))

    def _evaluator(self, terms: WindowTerms) -> NodeId | None:
        """The node to evaluate after this commit, the last of a round: the lowest live id that can."""
        following = self.ledger.windows.get(terms.fragment)
        stays = following is not None and following.round == terms.round
        spec = dataclasses.replace(self.ledger.spec, terms=self.ledger.terms_at(terms))
        if stays or not schedule.is_evaluated(spec, terms):
            return None
        return self._membership.evaluator()
