"""A node's position in the run's rounds and in the samples it was granted, and when a fragment is due to be sent."""

import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import Final, Literal

from farloop.algo import schedule
from farloop.algo.spec import Fragment, Lease, NodeId, RoundPlan, WindowTerms
from farloop.algo.terms import Terms
from farloop.algo.validation import at_most
from farloop.node.fragment_set import FragmentState

RAMP_STEPS: Final = 20
"""Inner steps over which a late joiner's learning rate grows to the schedule's: its moments are empty."""

ROUNDS_KEPT: Final = 4  # past rounds that are remembered: their windows may be open, and a coordinator may ask for them
USED_KEPT: Final = 1024  # leases that are used up and still known by their range


class SendSchedule:
    """A node's place in the run: it has done `step` of its own steps of `round`.

    The terms that a question depends on are arguments: those of the round, unless noted.
    """

    def __init__(self, node: NodeId, slots: int) -> None:
        """`slots`: of the run's layout."""
        self._node, self._slots = node, slots
        self.plans: dict[int, RoundPlan] = {}  # of the rounds that are known, by index
        self.start_round: int | None = None  # None before the start
        self.start_slot = 0
        self.round = 0
        self.step = 0  # own steps done in the current round
        self.reached = 0.0  # schedule position where the last round ended
        self.skipped_positions = 0  # schedule positions jumped over while behind

    # --- from one boundary to the next

    def start(self, plan: RoundPlan, slot: int) -> None:
        self.start_round, self.round, self.start_slot = plan.index, plan.index, slot
        self.step = schedule.first_step(slot, self._slots, plan.steps_of(self._node))
        self.learn((plan,))

    def restart(self) -> None:
        """Forget the rounds and wait for another start; counts of positions continue."""
        self.plans = {}
        self.start_round, self.start_slot, self.round, self.step = None, 0, 0, 0

    def learn(self, plans: Iterable[RoundPlan]) -> None:
        self.plans |= {plan.index: plan for plan in plans}

    def step_done(self) -> None:
        self.step += 1

    def finish_round(self, newest: int, terms: Terms) -> Literal["same", "next", "last"]:
        """Begin the next round if this one is over: the run's `newest` if this node is behind.

        `terms` are the run's newest, which say where it ends. Returns whether this node is in the same round, the next
        one, or past the last.
        """
        plan = self.plans[self.round]
        if self.step < plan.steps_of(self._node):
            return "same"
        if schedule.is_last(terms, plan):
            return "last"
        following = max(self.round + 1, newest)
        skipped = sum(p.length for r, p in self.plans.items() if self.round < r < following)
        self.skipped_positions += skipped
        self.reached = float(plan.start + plan.length) + skipped
        self.round, self.step = following, 0
        self.plans = {r: p for r, p in self.plans.items() if r >= following - ROUNDS_KEPT}
        return "next"

    def catch_up(self, newest: int) -> None:
        """Leave a round whose plan will not come: the run went on while this node was not connected."""
        if self.plan is None and newest > self.round and (plan := self.plans.get(newest)):
            self.skipped_positions += plan.start - int(self.reached)
            self.round = newest

    def check(self) -> None:
        assert self.start_round is not None
        assert self.plan is None or self.step < self.plan.steps_of(self._node)

    # --- where the node stands

    @property
    def plan(self) -> RoundPlan | None:
        """Of the current round; None while it is not known."""
        return self.plans.get(self.round)

    @property
    def position(self) -> float:
        """Schedule position of the next inner step."""
        return self.position_after(0)

    def position_after(self, ahead: int) -> float:
        """Schedule position of the inner step after `ahead` others of this round."""
        if self.start_round is None:
            return 0.0
        return self.reached if self.plan is None else schedule.position_in(self.plan, self._node, self.step + ahead)

    def lr_after(self, ahead: int, terms: Terms, inner_steps: int) -> float:
        """Learning rate of the inner step after `ahead` others of this round; ramped for a node that joined late."""
        ramp = 1.0
        if self.start_round or self.start_slot:
            ramp = min(1.0, (inner_steps + ahead + 1) / RAMP_STEPS)
        return ramp * schedule.learning_rate(terms, self.position_after(ahead))

    def steps_to_turn(self) -> int:
        """Inner steps to the next turn of any slot; the last one's is the round's end."""
        assert self.plan is not None
        steps = self.plan.steps_of(self._node)
        turns = (schedule.due_step(slot, self._slots, steps) for slot in range(self._slots))
        return min(turn for turn in turns if turn > self.step) - self.step

    def is_next(self, state: FragmentState) -> bool:
        """Whether the next turn is the fragment's."""
        window, plan = state.terms, self.plan
        if window is None or plan is None:
            return False
        return self._due_step(window, state.fragment, plan) == self.step + self.steps_to_turn()

    def overlap(self, tau: int) -> int:
        """τ in steps of this node, which take longer if it does fewer per round. If it does fewer still in the next
        round, in those: the next turn must not come before the merge."""
        plans = [plan for plan in (self.plan, self.plans.get(self.round + 1)) if plan is not None]
        return min((tau * plan.steps_of(self._node) // plan.length for plan in plans), default=tau)

    def own_overlap(self, tau: int, terms: Terms, following: Terms) -> int:
        """A node's own τ, limited to rounds that were made shorter since. `following`: terms of the next round."""
        return min(tau, *(self.overlap(at_most(each, self._slots)) for each in (terms, following)))

    # --- when a fragment is sent

    def is_due(self, state: FragmentState, terms: Terms) -> bool:
        """Whether the fragment's delta is due at this step boundary.

        A window of a past round is still served, at the slot's next turn: a node that starts or returns late may be the
        only one that can.
        """
        window, plan = state.terms, self.plan
        if window is None or plan is None or window.round > self.round:
            return False
        if self.step != self._due_step(window, state.fragment, plan):
            return False
        return not window.final or schedule.is_last(terms, plan)

    def may_send(self, state: FragmentState, terms: Terms, *, behind: bool) -> bool:
        """Whether the coordinator could still use a delta of the fragment that is sent now: no known window rejects it,
        and the node has held the fragment for a full period. The coordinator's side of the last part is
        `schedule.is_expected`.

        `behind`: its base is too old for the open window.
        """
        window = state.terms
        if (
            window is None
            or state.discard
            or not state.is_free(terms.schedule.lag)
            or state.version < state.owed
            or behind
        ):
            return False
        assert self.start_round is not None
        first = schedule.first_send_round(self.start_round, state.fragment.slot, self._slots, self.start_slot)
        return window.final or first <= self.round

    def may_flush(self, state: FragmentState, terms: Terms, *, lag: int) -> bool:
        """Whether the fragment's remaining work is sent at the run's end: earlier deltas are merged or merely late.

        A regular window that is still open had no other node to serve it, since this one started late: it is sent, too,
        or the run would never end. `lag`: that of the run, where `terms` may have been revised.
        """
        has_window = state.terms is not None and state.final is None
        return has_window and state.is_free(terms.schedule.lag) and len(state.pending) <= lag

    def is_past_due(self, state: FragmentState) -> bool:
        """Whether the due step of the fragment's window has passed."""
        window = state.terms
        if window is None or window.final or window.round > self.round:
            return False
        if window.round < self.round or self.plan is None:
            return window.round < self.round
        return self.step >= self._due_step(window, state.fragment, self.plan)

    def holds_up(self, state: FragmentState, terms: Terms, inner_steps: int) -> bool:
        """Whether training waits for the outcome of the last delta: at the end of the overlap, or rounds later."""
        last = state.last
        if terms.schedule.on_late_update == "wait":
            if last is not None and last.merged:
                return self._has_come_again(state.fragment, last.terms)
            return last is not None and last.is_due(inner_steps)
        if self.round <= state.sent_round + terms.schedule.max_stale_rounds:
            return False
        return last is not None or (state.owed > state.version and inner_steps >= (state.merge_at or 0))

    def _has_come_again(self, fragment: Fragment, sent: WindowTerms) -> bool:
        """Whether the turn after that of a delta's own window has come."""
        if self.plan is None or self.round != sent.round + 1:
            return self.round > sent.round + 1
        return self.step >= schedule.due_step(fragment.slot, self._slots, self.plan.steps_of(self._node))

    def _due_step(self, window: WindowTerms, fragment: Fragment, plan: RoundPlan) -> int:
        return schedule.due_in(window, fragment, self._slots, plan.steps_of(self._node))


# --- The overlap that a node's own link needs


class OverlapChooser:
    """Finds the shortest overlap with which no update comes late because of this node's link or the coordinator's work.

    That is the time up, from the send to the coordinator's acknowledgement; the least time from there to an announced
    commit, which other nodes may hold up; and the time down. Times are monotonic seconds, and those of the last two
    rounds count. One thread calls `on_sent` and `choose`, another one the rest.
    """

    def __init__(self, slots: int) -> None:
        """`slots`: of the run's layout."""
        self._sent: dict[int, float] = {}  # by fragment, the last time
        self._stored: dict[int, float] = {}
        self._told: dict[int, float] = {}
        self._up, self._commit, self._down = (deque[float](maxlen=2 * slots) for _ in range(3))

    def on_sent(self, fragment: int, now: float) -> None:
        self._stored.pop(fragment, None)
        self._sent[fragment] = now

    def on_stored(self, fragment: int, now: float) -> None:
        if (begun := self._sent.pop(fragment, None)) is not None:
            self._up.append(now - begun)
            self._stored[fragment] = now

    def on_announced(self, fragment: int, now: float) -> None:
        self._told[fragment] = now
        if (begun := self._stored.pop(fragment, None)) is not None:
            self._commit.append(now - begun)

    def on_arrived(self, fragment: int, now: float) -> None:
        if (begun := self._told.pop(fragment, None)) is not None:
            self._down.append(now - begun)

    def on_disconnect(self) -> None:
        """The session is over: what was on its way tells nothing of the link."""
        self._sent, self._stored, self._told = {}, {}, {}

    def choose(self, step_s: float) -> int | None:
        """In inner steps, 1 or more, with one to spare; None before anything is known."""
        if not (self._up and self._commit and self._down) or step_s <= 0.0:
            return None
        return math.ceil((max(self._up) + min(self._commit) + max(self._down)) / step_s) + 1


# --- Samples: taken in the order of the grants, each once


class LeaseExhausted(Exception):
    """A node wants more samples than it still holds: wait for a grant."""


class LeaseCursor:
    """The leases of one incarnation. The coordinator grants again what it left."""

    def __init__(self) -> None:
        self._ahead: deque[Lease] = deque()  # those that are not used up
        self._used = 0  # samples consumed of the first
        self._behind: deque[Lease] = deque(maxlen=USED_KEPT)
        """The last that are: to notice a sample that is granted twice."""
        self.watermark = 0  # samples consumed since the start of the incarnation

    @property
    def remaining(self) -> int:
        """Samples granted and not yet consumed."""
        return sum(lease.count for lease in self._ahead) - self._used

    @property
    def unused(self) -> tuple[Lease, ...]:
        """What is left of the leases, in their order."""
        left, used = [], self._used
        for lease in self._ahead:
            left.append(Lease(start=lease.start + used, count=lease.count - used))
            used = 0
        return tuple(left)

    @property
    def granted_to(self) -> int:
        """One past the last sample of all leases that are known."""
        return max((lease.start + lease.count for lease in (*self._behind, *self._ahead)), default=0)

    def begin_again(self) -> None:
        """Drop every lease: the coordinator knows none of them, and grants anew."""
        self._ahead.clear()
        self._behind.clear()
        self._used = self.watermark = 0

    def grant(self, lease: Lease) -> None:
        """Append a lease; one that is held already is sent again after a broken session and changes nothing.

        Raises ValueError: it is empty, or overlaps an earlier one; nothing was changed.
        """
        if lease.start < 0 or lease.count < 1:
            raise ValueError(f"a lease of {lease.count} samples from {lease.start} grants nothing")
        held = [*self._behind, *self._ahead]
        if lease in held:
            return
        for other in held:
            if lease.start < other.start + other.count and other.start < lease.start + lease.count:
                raise ValueError(
                    f"samples [{lease.start}, {lease.start + lease.count}) overlap an earlier lease "
                    f"[{other.start}, {other.start + other.count})"
                )
        self._ahead.append(lease)

    def retain(self, leases: Collection[Lease]) -> None:
        """Use only samples of these leases, as far as granted: others may belong to another node by now.

        They may come again, too: what is not kept is forgotten, with what was consumed of it.
        """
        if self._ahead and self._ahead[0] not in leases:
            self._used = 0
        self._ahead = deque(lease for lease in self._ahead if lease in leases)
        self._behind = deque((lease for lease in self._behind if lease in leases), maxlen=USED_KEPT)

    def peek(self, n: int) -> list[int]:
        """The next `n` positions, or as many as are granted; consumes none."""
        positions: list[int] = []
        for lease in self.unused:
            if len(positions) < n:
                positions.extend(range(lease.start, lease.start + min(lease.count, n - len(positions))))
        return positions

    def consume(self, n: int) -> list[int]:
        """Consume the next `n` positions, across lease borders. Raises LeaseExhausted, and takes none, if too few."""
        if n > self.remaining:
            raise LeaseExhausted(f"{n} samples wanted, {self.remaining} left of the leases")
        positions: list[int] = []
        while len(positions) < n:
            lease = self._ahead[0]
            first = lease.start + self._used
            count = min(n - len(positions), lease.count - self._used)
            positions.extend(range(first, first + count))
            self._used += count
            if self._used == lease.count:
                self._behind.append(self._ahead.popleft())
                self._used = 0
        self.watermark += n
        return positions
