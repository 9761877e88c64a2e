"""The nodes of a run: how they join, start, get samples, disconnect and leave. `closing.py` decides on windows.

    greeted ──▶ joining ──Ready──▶ ready ──a slot's boundary──▶ training ──Leave, or a newer start of it──▶ left
                                                                   │ ▲
                                            its session ends, ─────┘ └───── it greets again
                                 and in time no window waits for it

No window waits either for a connected node that reports no progress for too long, until it moves again. Decisions go
into `Decisions`; windows carry which nodes are expected and which were removed.
"""

import dataclasses
import logging
import math
from collections.abc import Iterable
from typing import Literal

from farloop.algo import schedule
from farloop.algo.spec import Lease, NodeId, Revision, RoundPlan, WindowTerms
from farloop.algo.stages import fragments_of, is_source, is_whole
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.admission import frozen_fault, refusal
from farloop.coordinator.decide.closing import Closing
from farloop.coordinator.decide.rollback import RollbackGuard, as_newcomer
from farloop.coordinator.decide.roster import CLOSED_GRACE_S, EXPIRE_S, MOST_MEMBERS, STALL_S, Member, too_few_to_begin
from farloop.coordinator.decide.run_state import Decisions, RunState
from farloop.coordinator.decide.windows import Window
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

_log = logging.getLogger(__name__)

Boundary = Literal["none", "slot", "round"]


class Membership:
    """All members of one incarnation of the coordinator."""

    def __init__(
        self,
        run: RunState,
        decisions: Decisions,
        closing: Closing,
        rollback: RollbackGuard,
        *,
        gone_at: float,
        expire_s: float = EXPIRE_S,
    ) -> None:
        """Nodes that take part have until `gone_at` to return; `expire_s` later their samples go to others. `closing`
        closes windows that no longer wait for any node."""
        self._run, self._ledger, self._windows, self.members = run, run.ledger, run.windows, run.members
        self._decisions, self._closing, self._rollback = decisions, closing, rollback
        self._expire_s = expire_s
        self._ready = set[NodeId]()  # who may start; and some who no longer may
        for name, started in run.ledger.started.items():
            self.members[name] = Member(
                name=name,
                incarnation=started.incarnation,
                process=started.process,
                holds=started.holds,
                stage="training",
                start_round=started.round,
                start_slot=started.slot,
                gone_at=gone_at,
                expires_at=gone_at + expire_s,
                reason=Reason.CLOSED,
            )

    # --- members

    @property
    def awaited(self) -> list[NodeId]:
        """Nodes that are connected or may return: they must hear that the run is over."""
        return sorted(name for name in self.members if self.is_awaited(name))

    def is_awaited(self, node: NodeId) -> bool:
        member = self.members.get(node)
        return member is not None and (member.session is not None or member.gone_at is not None)

    @property
    def connected(self) -> list[Member]:
        return [m for m in self.members.values() if m.session is not None and m.stage != "left"]

    def audience(self, fragment: int) -> tuple[NodeId, ...]:
        return tuple(sorted(m.name for m in self.connected if m.has(self._ledger.fragment(fragment))))

    def in_session(self, node: NodeId, session: ev.SessionId) -> Member | None:
        """The member with this session; None if another session took its place."""
        member = self.members.get(node)
        return member if member and member.session == session else None

    def expected(self, terms: WindowTerms) -> set[NodeId]:
        fragment, slots = self._ledger.fragment(terms.fragment), self._ledger.spec.identity.layout.slots
        holders = [m for m in self.members.values() if m.counts and m.has(fragment)]
        return {
            m.name
            for m in holders
            if m.start_round is not None
            and schedule.is_expected(terms, m.start_round, fragment.slot, slots, m.start_slot)
        }

    def evaluator(self) -> NodeId | None:
        """The lowest live node id that holds the whole model and can measure its loss."""
        layout = self._ledger.spec.identity.layout
        able = (m for m in self.connected if m.counts and m.can_evaluate and is_whole(m.holds, layout))
        return min((m.name for m in able), default=None)

    def evaluates(self, node: NodeId | None) -> None:
        """Mark the node that evaluates: it may take longer than an inner step."""
        for member in self.members.values():
            member.evaluates = member.name == node

    # --- joining

    def is_new(self, event: ev.NodeHello) -> bool:
        member = self.members.get(event.node)
        return member is None or event.hello.incarnation > member.incarnation

    def on_hello(self, event: ev.NodeHello, now: float) -> None:
        """Handle a session's first message: let the node in, or say why not."""
        hello, name = event.hello, event.node
        member = self.members.get(name)
        refused = refusal(hello, name, self._ledger, member) or self._rollback.refusal(name, hello, now)
        if refused:
            return self._decisions.do(ev.Refuse(session=event.session, refused=refused))
        if hello.history != self._ledger.history:
            hello = as_newcomer(hello)
        if hello.round is not None:  # no later one was ever told of
            hello = dataclasses.replace(hello, round=min(max(0, hello.round), max(self._ledger.rounds)))
        newer = member is None or hello.incarnation > member.incarnation
        if member and member.session is not None:
            told = f"start {hello.incarnation} of {name} has joined, this is {member.incarnation}" if newer else ""
            why = Reason.OLD_INCARNATION if newer else Reason.SUPERSEDED
            self._decisions.do(ev.CloseSession(session=member.session, reason=why, told=told))
        if member is None or newer:
            if member:
                self._leave(member, Reason.OLD_INCARNATION)
            member = self.members[name] = Member(
                name=name, incarnation=hello.incarnation, process=hello.process, holds=hello.holds
            )
            self._forget_one()
        elif hello.round is None and name in self._ledger.started:
            self._leave(member, Reason.NOT_A_PARTICIPANT)  # it never heard of its start: it will get another
        member.connect(event.session, hello, now)
        if member.stage == "training":
            if name not in self._ledger.started:
                self._record_start(member)
            self._expect_again(member, now)
        restores = self._restorable(hello)
        welcome = dataclasses.replace(self._welcome(member), restores=tuple(restores))
        self._decisions.do(ev.Accept(session=event.session, node=name, welcome=welcome))
        if self._ledger.finished or (self._ledger.windows and self._ledger.is_finished_for(member.holds)):
            self._decisions.send(name, msg.Finished())
        if member.stage == "training":
            self._grant_again(member)
        for fragment in fragments_of(member.holds, self._ledger.spec.identity.layout):
            held = next((ref for ref in hello.anchors if ref.fragment == fragment.index), restores.get(fragment.index))
            self._catch_up(name, fragment.index, held)
        if not self._run.begun:
            self.start_ready(now, "none")

    def _restorable(self, hello: msg.Hello) -> dict[int, msg.AnchorRef]:
        """By fragment, the anchors on the node's disk from which it can go on with updates. They prove nothing about
        this state (`rollback.py`): others come as snapshots."""
        ledger, saved = self._ledger, hello.saved
        if saved is None or (saved.run, saved.history) != (ledger.spec.identity.fingerprint(), ledger.history):
            return {}
        held = {ref.fragment for ref in hello.anchors}
        own = {fragment.index for fragment in fragments_of(hello.holds, ledger.spec.identity.layout)} - held
        return {
            ref.fragment: ref
            for ref in saved.anchors
            if ref.fragment in own and ledger.updates_after(ref.fragment, ref) is not None
        }

    def _forget_one(self) -> None:
        """Bound the number of members: without keys, any number of names can be claimed."""
        gone = [m for m in self.members.values() if m.session is None and m.stage != "training"]
        if len(self.members) > MOST_MEMBERS and len(gone) > 1:  # the one that has just come has no session yet
            del self.members[min(gone[:-1], key=lambda m: m.heard_at).name]

    def _welcome(self, member: Member) -> msg.Welcome:
        ledger = self._ledger
        held = tuple(ledger.leases.unused(member.name, member.incarnation))
        return msg.Welcome(
            protocol=msg.PROTOCOL_VERSION,
            epoch=ledger.epoch,
            spec=ledger.spec,
            lane_token=b"",  # the shell's to draw: it is a secret, and this machine has no randomness
            versions=tuple(ledger.versions),
            windows=tuple(ledger.windows[f] for f in sorted(ledger.windows)),
            rounds=ledger.rounds_ahead(),
            leases=held if ledger.spec.identity.num_samples and is_source(member.holds) else None,
            history=ledger.history,
            revisions=ledger.revisions_needed(),
        )

    @property
    def names(self) -> set[NodeId]:
        """The nodes that take part or may return."""
        return {m.name for m in self.members.values() if m.stage != "left"}

    def send_revision(self, revision: Revision) -> None:
        """Tell connected nodes of new terms; others hear of them in their Welcome."""
        for member in self.connected:
            self._decisions.send(member.name, msg.Revised(revision=revision))

    def _expect_again(self, member: Member, now: float) -> None:
        for window in self._windows.values():
            if window.removed.get(member.name) in (Reason.CLOSED, Reason.SILENT, Reason.STALLED):
                del window.removed[member.name]
                member.awaited_since = now

    def _catch_up(self, node: NodeId, fragment: int, held: msg.AnchorRef | None) -> None:
        """Send what the node's anchor of a fragment lacks."""
        if held is None and self._ledger.versions[fragment] == 0:
            return  # it may have the same weights already, and asks if not
        updates = self._ledger.updates_after(fragment, held)
        if updates is None:
            self._decisions.do(ev.SendSnapshot(node=node, fragment=fragment))
        for committed in updates or ():
            self._decisions.do(ev.Publish(nodes=(node,), committed=committed))

    # --- starting

    def on_ready(self, member: Member, told: msg.Ready, now: float) -> None:
        if member.stage != "joining":
            return
        if fault := frozen_fault(told.frozen, member, self._ledger):
            self._decisions.send(member.name, msg.Leave(reason=Reason.WRONG_FROZEN, detail=fault))
            member.disconnect(Reason.WRONG_FROZEN, now, 0.0)
            return self._leave(member, Reason.WRONG_FROZEN)
        member.stage, member.frozen, member.unsaved = "ready", told.frozen, told.unsaved
        other = next((m for m in self.members.values() if m.unsaved and m.holds == member.holds), member)
        if other.unsaved != member.unsaved:
            what = "tables of whole numbers, or buffers that no state_dict holds"
            fix = "build them from one seed; after model.to_empty compute rotary frequencies anew"
            _log.warning("nodes %s and %s differ in %s: %s", member.name, other.name, what, fix)
        self._ready.add(member.name)
        self.start_ready(now, "none")

    def start_ready(self, now: float, boundary: Boundary) -> None:
        """Start ready nodes: at the run's beginning, at a boundary of slots or rounds, or at once if a window would
        otherwise never reach its floor. After a crash at the run's beginning, it begins with the nodes that are ready,
        that train already, or whose deltas are stored."""
        begins = not self._run.begun
        if not self._ready and not begins:
            return
        self._ready = {name for name in self._ready if name in self.members and self.members[name].stage == "ready"}
        ready = [m for name, m in self.members.items() if name in self._ready and m.session is not None]
        ready = [m for m in ready if not self._ledger.is_finished_for(m.holds)]
        if begins:
            sent = {blob.node for blob in self._ledger.inputs}
            train = [m for m in self.members.values() if m.counts and (m.session is not None or m.name in sent)]
            if too_few_to_begin([*ready, *train], self._ledger):
                return
            self._run.begun = True
        elif not ready:
            return
        alone = ready if begins else [m for m in ready if self._is_needed(m)]
        for member in sorted(ready, key=lambda m: m.name):
            plan = self._ledger.rounds[self._ledger.round_of_part(member.holds)]
            if member in alone or boundary == "round":
                self._start(member, plan, 0, now)
            elif boundary == "slot" and (slot := self._slot_for(member, plan)):
                self._start(member, plan, slot, now)
        if begins:
            alone = [m for m in self.members.values() if m.counts]
        for window in self._windows.values():
            names = {m.name for m in alone if m.has(self._ledger.fragment(window.terms.fragment))}
            if names and window.state == "open" and not window.missing:
                names = names & self.expected(window.terms) or names
                if begins:
                    names -= window.refused_nodes
                window.expected |= names
                window.removed = {n: r for n, r in window.removed.items() if n not in names}
        if begins:
            self._closing.try_all()

    def _is_needed(self, member: Member) -> bool:
        """Whether one of its windows cannot close without it: too few nodes train that hold the fragment."""
        windows = [w for w in self._windows.values() if member.has(self._ledger.fragment(w.terms.fragment))]
        floor = self._ledger.floor_of
        return any(not self._is_served(w) or w.short_of(floor(w.terms)) is not None for w in windows)

    def _is_served(self, window: Window) -> bool:
        fragment = self._ledger.fragment(window.terms.fragment)
        return any(m.counts and m.has(fragment) for m in self.members.values())

    def _start(self, member: Member, plan: RoundPlan, slot: int, now: float) -> None:
        member.start(plan.index, slot, now)
        member.let_go = True
        self._record_start(member)
        leases = self._grant(member)
        self._decisions.send(member.name, msg.Start(round=plan, lease=leases[0] if leases else None, slot=slot))
        self._send_grants(member, leases[1:])

    def _slot_for(self, member: Member, plan: RoundPlan) -> int:
        """The slot of the round with which a node can start; 0 if it waits for the next round, as a pipeline stage
        does, and every node in the last round."""
        ledger = self._ledger
        if member.holds is not None or ledger.spec.terms.schedule.lag:
            return 0
        return 0 if schedule.is_last(ledger.spec.terms, plan) else ledger.slot_at(plan.index)

    def _record_start(self, member: Member) -> None:
        assert member.start_round is not None
        self._decisions.record(
            rec.NodeStarted(
                node=member.name,
                incarnation=member.incarnation,
                process=member.process,
                round=member.start_round,
                holds=member.holds,
                slot=member.start_slot,
                frozen=member.frozen,
            )
        )

    # --- samples

    def on_progress(self, member: Member, progress: msg.Progress, now: float) -> None:
        member.report(progress, now)
        if member.stalled and member.progress_at == now:
            member.absent, member.reason = False, Reason.NONE
            self._expect_again(member, now)
        book, owner = self._ledger.leases, (member.name, member.incarnation)
        book.watermark(*owner, progress.sample_watermark)
        if not member.let_go and member.session is not None and not progress.samples_left:
            since = min(progress.sample_watermark, book.most_used(*owner))
            self._send_grants(member, self._grant(member, since=since))
            member.let_go = True
        self._top_up(member)

    def top_up_all(self) -> None:
        for member in self.members.values():
            self._top_up(member)

    def _top_up(self, member: Member) -> None:
        if member.counts and member.session is not None and member.let_go:
            self._send_grants(member, self._grant(member))

    def _grant_again(self, member: Member) -> None:
        """Send a node's grants again: they may have been lost with the last session. The samples of a node that was
        away for long may belong to others; how many it used is not known before it says that it uses no more of
        them."""
        book, owner = self._ledger.leases, (member.name, member.incarnation)
        brings_own = not self._ledger.spec.identity.num_samples or not is_source(member.holds)
        member.let_go = bool(book.account(*owner).leases) or brings_own
        self._send_grants(member, book.unused(*owner))
        self._top_up(member)

    def _grant(self, member: Member, *, since: int | None = None) -> list[Lease]:
        """Grant samples for some rounds, if the node needs any. `since`: of a new record."""
        spec, book, owner = self._ledger.spec, self._ledger.leases, (member.name, member.incarnation)
        if not spec.identity.num_samples or not is_source(member.holds):
            return []
        longest = max([spec.terms.schedule.h, *(plan.length for plan in self._ledger.rounds_ahead())])
        leases = book.top_up(*owner, longest, spec.terms.inner.batch_sequences)
        for lease in leases:
            self._decisions.record(
                rec.LeaseGranted(
                    node=member.name,
                    incarnation=member.incarnation,
                    lease=lease,
                    consumed=since or book.account(*owner).consumed,
                    stored=since or book.account(*owner).stored,
                    since=since,
                )
            )
            since = None
        return leases

    def _send_grants(self, member: Member, leases: Iterable[Lease]) -> None:
        for lease in leases:
            self._decisions.send(member.name, msg.Grant(lease=lease))

    # --- disconnecting and leaving

    def send_away(self, why: str) -> None:
        """The run is held: end all sessions; nodes dial again until it continues."""
        for member in self.connected:
            self._decisions.send(member.name, msg.Leave(reason=Reason.HOLDING, detail=why))

    def on_disconnect(self, member: Member, reason: Reason, now: float) -> None:
        member.disconnect(reason, now, CLOSED_GRACE_S if reason is Reason.CLOSED else 0.0, self._expire_s)

    def on_leave(self, member: Member, leave: msg.Leave, now: float) -> None:
        member.anchors, member.detail = leave.anchors, leave.detail
        member.disconnect(leave.reason, now, 0.0)
        self._leave(member, leave.reason)
        self.start_ready(now, "none")

    def forget(self, node: NodeId) -> None:
        """The node, which is not connected, is missed no more. If it greets again, it is a newcomer."""
        self._leave(self.members[node], self.members[node].reason)
        del self.members[node]

    def remove_overdue(self, now: float) -> None:
        """Stop waiting for nodes that did not return in time or that stall; free the samples of those long away."""
        for member in self.members.values():
            if member.gone_at is not None and member.gone_at <= now:
                self._remove(member, member.reason)
            elif self._ledger.windows and member.stalls_at is not None and member.stalls_at <= now:
                self._remove(member, Reason.STALLED)
            if self._ledger.windows and member.expires_at is not None and member.expires_at <= now:
                self._leave(member, member.reason)

    def deadlines(self) -> list[float]:
        """The first of them alone."""
        first, runs = math.inf, bool(self._ledger.windows)
        for member in self.members.values():
            if member.gone_at is not None:
                first = min(first, member.gone_at)
            if runs and member.expires_at is not None:
                first = min(first, member.expires_at)
            if runs and member.progress_at + STALL_S < first and (stalls_at := member.stalls_at) is not None:
                first = min(first, stalls_at)
        return [] if first == math.inf else [first]

    def clock_jumped(self, seconds: float) -> None:
        for member in self.members.values():
            member.progress_at += seconds
            member.awaited_since += seconds
            if member.gone_at is not None:
                member.gone_at += seconds
            if member.expires_at is not None:
                member.expires_at += seconds

    def _leave(self, member: Member, reason: Reason) -> None:
        self._remove(member, reason)
        member.stage, member.expires_at = "left", None
        if member.name in self._ledger.started:
            account = self._ledger.leases.account(member.name, member.incarnation)
            self._decisions.record(
                rec.NodeLeft(node=member.name, reason=reason, consumed=account.consumed, stored=account.stored)
            )

    def _remove(self, member: Member, reason: Reason) -> None:
        member.gone_at, member.absent, member.reason = None, True, reason
        for fragment, window in self._windows.items():
            if member.name in window.missing:
                window.removed[member.name] = reason
                self._closing.try_one(fragment)

    def leave_out(self, node: NodeId) -> None:
        """Open windows stop waiting for the node; its delta is still merged if it comes in time."""
        for fragment, window in list(self._windows.items()):
            if window.state == "open" and node in window.missing:
                window.removed[node] = Reason.LATE
                self._closing.try_one(fragment)

    def check(self) -> None:
        for member in self.members.values():
            member.check()
