"""When a fragment is to be sent: a step boundary, seen against the windows that are open. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farloop.algo import schedule
from farloop.algo.revisions import Revisions
from farloop.algo.spec import Fragment, NodeId, RoundPlan, Terms, WindowTerms
from farloop.algo.validation import at_most
from farloop.node.fragment_state import FragmentState

if TYPE_CHECKING:
    from farloop.node.machine import NodeMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where a node stands: `step` of its own steps of `round` are done."""

    terms: Terms
    """Of the round."""
    slots: int
    start_round: int
    round: int
    step: int
    plan: RoundPlan | None
    """Of the round; None while it is not known."""
    node: NodeId
    following: RoundPlan | None = None
    """The round after it, where that is known."""
    revisions: Revisions | None = None
    """Of the run; None where `terms` are those of every window."""
    start_slot: int = 0

    @classmethod
    def of(cls, machine: "NodeMachine") -> "Turn":
        """Where this machine stands, once it has started."""
        assert machine.spec is not None and machine.start_round is not None
        return cls(
            terms=machine.terms_in(machine.round),
            slots=machine.spec.identity.layout.slots,
            start_round=machine.start_round,
            start_slot=machine.start_slot,
            round=machine.round,
            step=machine.step,
            plan=machine.rounds.get(machine.round),
            node=machine.name,
            following=machine.rounds.get(machine.round + 1),
            revisions=machine.revisions,
        )

    def is_due(self, state: FragmentState) -> bool:
        """Whether this step boundary is the one at which the fragment's delta is taken, if there can be one.

        A window whose round has passed is still served, at the slot's next turn: a node that starts or comes back late
        may be the only one left that can.
        """
        terms = state.terms
        if terms is None or self.plan is None or terms.round > self.round:
            return False
        if self.step != schedule.due_in(terms, state.fragment, self.slots, self.plan.steps_of(self.node)):
            return False
        return not terms.final or schedule.is_last(self.terms, self.plan)

    def may_send(self, state: FragmentState) -> bool:
        """Whether a delta of the fragment can be of use now: no window is known that could not take it, and the node
        has held the fragment for a full period."""
        terms = state.terms
        if terms is None or state.discard or not self.is_free(state):
            return False
        if state.version < state.owed or self.is_behind(state):
            return False
        first = schedule.first_send_round(self.start_round, state.fragment.slot, self.slots, self.start_slot)
        return terms.final or first <= self.round

    def is_behind(self, state: FragmentState) -> bool:
        """Whether the base is too old for the window that is open, and those after it."""
        if self.revisions is None:
            return state.is_behind(self.terms)
        newest = max(state.pending, default=state.version)
        return state.is_behind(self.revisions.of_window(state.fragment.index, newest + 1))

    def is_free(self, state: FragmentState) -> bool:
        """Whether no delta is in the way of another one: the local weights hold nothing of what was sent."""
        return not state.lost and (state.last is None or (state.last.merged and len(state.sent) <= self.terms.lag))

    def pass_by(self, state: FragmentState, inner_steps: int) -> None:
        """A turn comes at which the fragment cannot be sent, and updates are not waited for.

        It is merged all the same, or a base that has become too old would stay so: work on it is lost.
        """
        if state.merge_at is None and not state.sent:
            state.merge_at, state.discard = inner_steps, self.is_behind(state)

    def stand_still(self, state: FragmentState, inner_steps: int) -> None:
        """No step is done until something comes: neither a turn nor the end of the overlap would ever be reached."""
        if state.merge_at is not None:
            state.merge_at = min(state.merge_at, inner_steps)
        elif self.is_behind(state):
            self.pass_by(state, inner_steps)

    def overlap(self, tau: int) -> int:
        """τ in steps of this node: they are longer where there are fewer of them in a round. Where the next round has
        fewer yet, they are counted in those, or the next turn would come before the merge."""
        plans = [plan for plan in (self.plan, self.following) if plan is not None]
        return min((tau * plan.steps_of(self.node) // plan.length for plan in plans), default=tau)

    def own_overlap(self, tau: int) -> int:
        """A node's own τ, as far as its own steps of rounds that were made shorter since have room for it."""
        following = self.terms if self.revisions is None else self.revisions.of_round(self.round + 1)
        return min(tau, *(self.overlap(at_most(terms, self.slots)) for terms in (self.terms, following)))

    def holds_up(self, state: FragmentState, inner_steps: int) -> bool:
        """Whether training waits for what became of the last delta: at the end of the overlap, or rounds later."""
        last = state.last
        if self.terms.on_late_update == "wait":
            if last is not None and last.merged:
                return self.has_come_again(state.fragment, last.terms)
            return last is not None and last.is_due(inner_steps)
        if self.round <= state.sent_round + self.terms.max_stale_rounds:
            return False
        return last is not None or (state.owed > state.version and inner_steps >= (state.merge_at or 0))

    def has_come_again(self, fragment: Fragment, sent: WindowTerms) -> bool:
        """Whether the turn after that of a delta's own window has come."""
        if self.plan is None or self.round != sent.round + 1:
            return self.round > sent.round + 1
        return self.step >= schedule.due_step(fragment.slot, self.slots, self.plan.steps_of(self.node))

    def is_over(self, state: FragmentState) -> bool:
        """Whether the due step of the fragment's window has passed."""
        terms = state.terms
        if terms is None or terms.final or terms.round > self.round:
            return False
        if terms.round < self.round or self.plan is None:
            return terms.round < self.round
        return self.step >= schedule.due_in(terms, state.fragment, self.slots, self.plan.steps_of(self.node))


def newest_round(fragments: Iterable[FragmentState], slots: int) -> int:
    """The run's round as far as this node knows: that of the last slot's open window (protocol A: jump)."""
    newest = [
        max(state.terms_of.values(), key=lambda terms: terms.window).round
        for state in fragments
        if state.fragment.slot == slots - 1 and state.terms_of
    ]
    return min(newest, default=0)
