"""One node of the flow simulator, and its windows."""

from dataclasses import dataclass
from typing import Literal, Protocol

from farloop.algo.schedule import due_step, first_send_round, first_step
from farloop.sim.flow.outcome import Clock
from farloop.sim.flow.scenario import FailureTrace, Rules
from farloop.sim.virtual_time import EventQueue

# --- The node
#
# A small model of `node/machine.py`, not that machine: it counts steps and seconds where the machine handles every
# inner step and every message, which a thousand nodes could not afford. What it keeps are the rules that cost time: due
# steps and the full period before a first send (protocol A), one undecided delta per fragment (D), late updates (F),
# newcomers that start at a slot's boundary (I). What it leaves out are the end of the run (what is undecided then
# counts as if it were merged), samples, evaluation, and the learning rate. What arrives between two stops is merged at
# the next.


Stage = Literal["away", "joining", "ready", "training", "draining", "left"]


@dataclass(slots=True, eq=False, kw_only=True)
class Delta:
    """One fragment's work on its way to the coordinator, and what became of it."""

    node: int
    fragment: int
    window: int  # the version that it is meant to become part of
    round: int
    sent_at: int  # inner steps that its node had done
    steps: int
    seconds: float  # machine-seconds of compute in it
    stored: bool = False
    merged_in: int | None = None
    settled: bool = False


@dataclass(slots=True, kw_only=True)
class Held:
    version: int = 0
    newest: int = 0  # of what has arrived
    announced: int = 0  # with a lag: newest version that is known to be committed; its bytes may still be on their way
    sent: int = 0  # with a lag: window of the last delta
    arrived_at: float = 0.0
    merge_at: int | None = None
    owed: int = 0  # version that holds the last delta
    discard: bool = False  # the last delta was lost: the next merge takes the anchor alone
    steps_from: int = 0  # inner steps done when the work inside the next delta began
    seconds_from: float = 0.0


class Coordinator(Protocol):
    def upload(self, delta: Delta) -> None: ...
    def forget(self, delta: Delta) -> None:
        """The node died; what it was sending does not come any more."""

    def lost(self, steps: int) -> None:
        """Work on one fragment that no commit will contain."""

    def skipped(self) -> None: ...
    def turned(self, machines: int) -> None:
        """So many machines more, or fewer, compute from now on."""

    def gone(self, node: int) -> None:
        """It left in order."""


class Node:
    """One incarnation after another of one node."""

    def __init__(
        self,
        *,
        index: int,
        machines: int,
        h: int,
        fate: FailureTrace,
        rules: Rules,
        agenda: EventQueue,
        coordinator: Coordinator,
    ) -> None:
        """`h`: its own inner steps of a round."""
        self.index, self.machines, self.h, self.fate, self.rules = index, machines, h, fate, rules
        self._agenda, self._coordinator = agenda, coordinator
        self.clock = Clock(machines, "absent")
        self.stage: Stage = "away"
        self.start_round: int | None = None
        self.start_slot = 0
        self._starts_with: int | None = None
        """Version of the last slot's fragment that has to be here before the first step."""
        self.round = 0
        self._step = 0
        self.steps = 0  # inner steps since the beginning
        self._held = [Held() for _ in range(rules.fragments)]
        self._undecided: dict[int, Delta] = {}
        self._unmerged: set[int] = set()
        self._sent: set[int] = set()  # fragments with a merge ahead
        self._owing: set[int] = set()
        """With a lag: fragments whose turn to be sent has come before the commit of their last delta."""
        self._life = 0
        self._segment: tuple[float, float, int] | None = None  # (begin, end, inner steps) of what is being computed
        self._due: dict[int, list[int]] = {}
        for slot in range(rules.fragments):
            self._due.setdefault(due_step(slot, rules.fragments, h), []).append(slot)
        self._stops = sorted(self._due)

    @property
    def counts(self) -> bool:
        """Whether windows expect it."""
        return self.stage == "training"

    @property
    def versions(self) -> list[int]:
        """What has arrived of every fragment."""
        return [held.newest for held in self._held]

    def join(self) -> None:
        """It is up, and waits for a snapshot."""
        self.stage = "joining"
        self._turn("idle")

    def ready(self, versions: list[int]) -> None:
        """The snapshot is here."""
        self.stage = "ready"
        for held, version in zip(self._held, versions, strict=True):
            held.newest = max(held.newest, version)

    def start(self, round_index: int, slot: int = 0) -> None:
        """The coordinator lets it in at this slot of the round, once the version that the round begins with is here."""
        self.stage, self.start_round, self._starts_with = "training", round_index, round_index
        self.start_slot = slot
        self._begin_if_there()

    def crash(self) -> None:
        """Everything that was not sent, or not received, is gone; its machines are down."""
        self._interrupt()
        for delta in self._undecided.values():
            if not delta.stored:
                self._coordinator.forget(delta)
                self._lose(delta)
        for held in self._held:
            self._lose_since(held)
        self._undecided.clear()
        self._unmerged.clear()
        self._owing.clear()
        leaving = self.stage == "draining"  # it will not be started again
        self.stage, self.start_round, self._starts_with = "left" if leaving else "away", None, None
        self._turn("absent" if leaving else "down")

    def miss(self, machines: int) -> None:
        """So many of its machines more, or fewer, are broken, and it can do without them."""
        before = self.clock.working
        self.clock.miss(machines, self._agenda.now)
        if self.clock.working != before:
            self._coordinator.turned(self.clock.working - before)

    def drain(self) -> None:
        """Leave in order: what was sent is waited for, what was not is lost."""
        if self.stage in ("away", "left"):
            self.stage = "left"
            return self._turn("absent")
        self._interrupt()
        for held in self._held:
            self._lose_since(held)
        self.stage = "draining"
        self._turn("idle")
        self._leave_if_done()

    def flush(self) -> float:
        """The end: machine-seconds that it would still get merged, over all fragments."""
        self._interrupt()
        seconds = sum(delta.seconds for delta in self._undecided.values() if not delta.settled and not delta.stored)
        if self.stage == "training":
            seconds += sum(self.clock.spans["compute"] - held.seconds_from for held in self._held)
        return seconds

    def updated(self, fragment: int, version: int) -> None:
        """An update, with all before it, is here."""
        held = self._held[fragment]
        if self.stage in ("away", "left") or version <= held.newest:
            return
        held.newest, held.arrived_at = version, self._agenda.now
        held.announced = max(held.announced, version)
        self._unmerged.add(fragment)
        if not self.rules.waits:
            self._decide(fragment, version)
        if self._starts_with is not None:
            return self._begin_if_there()
        if self.stage == "draining":
            return self._leave_if_done()
        self._resume(fragment)

    def announced(self, fragment: int, version: int) -> None:
        """With a lag: a version is committed, and its update is on its way. A turn that waited for it comes now."""
        if self.stage in ("away", "left"):
            return
        held = self._held[fragment]
        held.announced = max(held.announced, version)
        delta = self._undecided.get(fragment)
        if delta and delta.merged_in is None and version >= delta.window:
            self._lose(delta)
        if fragment in self._owing and self._segment is None and self.stage == "training":
            self._owing.discard(fragment)
            self._send(fragment)
            self._resume(fragment)

    def refused(self, delta: Delta) -> None:
        if self._undecided.get(delta.fragment) is not delta:
            return
        if not self.rules.waits:
            del self._undecided[delta.fragment]
            self._held[delta.fragment].discard = True
        if self.stage == "draining":
            self._undecided.pop(delta.fragment, None)
            return self._leave_if_done()
        self._resume(delta.fragment)

    def _resume(self, fragment: int) -> None:
        if self.stage == "training" and self._segment is None and self._starts_with is None:
            self._merge(fragment)
            self._go()

    # --- Computing

    def _begin_if_there(self) -> None:
        if self._starts_with is None or self._held[-1].newest < self._starts_with:
            return
        self.round, self._starts_with = self._starts_with, None
        self._step = first_step(self.start_slot, self.rules.fragments, self.h)
        for held in self._held:
            held.version, held.owed, held.merge_at, held.discard = held.newest, 0, None, False
            held.sent = held.announced = held.newest
            self._mark(held)
        self._owing.clear()
        self._unmerged.clear()
        self._sent.clear()
        self._go()

    def _go(self) -> None:
        if self._is_held_up():
            if self.clock.state != "idle":
                self._turn("idle")
            return
        if self.clock.state != "compute":
            self._turn("compute")
        steps, life = self._steps_ahead(), self._life
        seconds = self.fate.seconds_of(steps)
        self._segment = (self._agenda.now, self._agenda.now + seconds, steps)
        self._agenda.after(seconds, lambda: self._stop(steps) if life == self._life else None)

    def _steps_ahead(self) -> int:
        """Inner steps until the next at which something may be sent or merged."""
        ahead = next(stop for stop in self._stops if stop > self._step) - self._step
        if self.rules.waits:
            merges = [delta.sent_at + self.rules.tau for delta in self._undecided.values()]
        else:
            merges = [at for fragment in self._sent if (at := self._held[fragment].merge_at) is not None]
        return min([ahead, *(at - self.steps for at in merges if at > self.steps)])

    def _stop(self, steps: int) -> None:
        """A step boundary: encode all that is due, then merge all that is due (protocol, Windows)."""
        self._segment = None
        self._step += steps
        self.steps += steps
        self.clock.account(self._agenda.now)
        for fragment in sorted(self._unmerged):
            if self._held[fragment].arrived_at < self._agenda.now:  # an earlier boundary would have merged it
                self._merge(fragment)
        for fragment in self._due.get(self._step, ()):
            self._send(fragment)
        for fragment in sorted(self._unmerged):
            self._merge(fragment)
        if self._step == self.h:
            # A node that is behind jumps to the run's round (protocol, Round clock), of the last slot's open window.
            self.round, self._step = max(self.round + 1, self._held[-1].newest), 0
        self._go()

    def _is_held_up(self) -> bool:
        if self.rules.lag:
            late = any(self._held[f].version < delta.window - self.rules.lag for f, delta in self._undecided.items())
            return late or bool(self._owing)
        if self.rules.waits:
            return any(self.steps >= delta.sent_at + self.rules.tau for delta in self._undecided.values())
        return any(self.round > delta.round + self.rules.max_stale_rounds for delta in self._undecided.values())

    def _interrupt(self) -> None:
        """Training stops in the middle of a step: the steps that are complete count as done."""
        self._life += 1
        now = self._agenda.now
        self.clock.account(now)
        if self._segment:
            begin, end, steps = self._segment
            done = int(steps * (now - begin) / (end - begin) + 1e-9) if end > begin else steps
            self.steps += done
            self._segment = None

    # --- Sending and merging

    def _send(self, fragment: int) -> None:
        held, rules = self._held[fragment], self.rules
        if rules.lag and held.sent > held.announced:  # the terms of the next window come with the commit
            self._owing.add(fragment)
            return
        if not rules.lag and fragment in self._undecided:
            return self._coordinator.skipped()
        assert self.start_round is not None
        if self.round < first_send_round(self.start_round, fragment, rules.fragments, self.start_slot):
            return
        window = 1 + (max(held.sent, held.announced) if rules.lag else held.version)
        if held.version < held.owed or round_of(window, fragment, rules.fragments) > self.round:
            return
        if held.newest > held.version + rules.max_staleness + rules.lag:
            held.merge_at, held.discard = self.steps, True  # no window takes it any more: begin again from the anchor
            return
        delta = Delta(
            node=self.index,
            fragment=fragment,
            window=window,
            round=self.round,
            sent_at=self.steps,
            steps=self.steps - held.steps_from,
            seconds=self.clock.spans["compute"] - held.seconds_from,
        )
        self._mark(held)
        held.merge_at, held.sent = self.steps + rules.tau, window
        self._undecided[fragment] = delta
        self._sent.add(fragment)
        self._coordinator.upload(delta)

    def _merge(self, fragment: int) -> None:
        held, delta = self._held[fragment], self._undecided.get(fragment)
        if held.newest == held.version:
            return
        if self.rules.lag and delta is not None:
            if held.newest <= delta.window:  # right after its send: the version before its own
                held.version = max(held.version, min(held.newest, delta.window - self.rules.lag))
                return
            self._lose_since(held)  # others went on without it: it begins again from the anchor
            del self._undecided[fragment]
        elif not self.rules.waits:  # once after every send, τ steps later, or when the delta is decided
            if delta or held.newest < held.owed or held.merge_at is None or self.steps < held.merge_at:
                return
            if held.discard:
                self._lose_since(held)
        elif delta is None:
            self._lose_since(held)
        else:
            if self.steps < delta.sent_at + self.rules.tau or held.newest < delta.window:
                return
            if delta.merged_in is None:
                self._lose(delta)
                self._lose_since(held)
            del self._undecided[fragment]
        held.version, held.merge_at, held.discard = held.newest, None, False
        self._unmerged.discard(fragment)
        self._sent.discard(fragment)

    def _decide(self, fragment: int, version: int) -> None:
        """Where nothing is waited for, the announcement of a version settles a delta."""
        delta = self._undecided.get(fragment)
        if delta is None:
            return
        if delta.merged_in is not None and delta.merged_in <= version:
            self._held[fragment].owed = delta.merged_in
            del self._undecided[fragment]
        elif not delta.stored and version >= delta.window + self.rules.max_staleness:
            self._lose(delta)
            del self._undecided[fragment]
            self._held[fragment].discard = True

    def _leave_if_done(self) -> None:
        self._undecided = {f: d for f, d in self._undecided.items() if d.merged_in is None and not d.settled}
        if not self._undecided:
            self.stage = "left"
            self._turn("absent")
            self._coordinator.gone(self.index)

    def _lose(self, delta: Delta) -> None:
        if not delta.settled:
            delta.settled = True
            self._coordinator.lost(delta.steps)

    def _lose_since(self, held: Held) -> None:
        """What was done since the last send goes."""
        if self.stage == "training":
            self._coordinator.lost(self.steps - held.steps_from)
        self._mark(held)

    def _mark(self, held: Held) -> None:
        held.steps_from, held.seconds_from = self.steps, self.clock.spans["compute"]

    def _turn(self, state: Literal["compute", "idle", "down", "absent"]) -> None:
        before = self.clock.working
        self.clock.turn(state, self._agenda.now)
        if self.clock.working != before:
            self._coordinator.turned(self.clock.working - before)


def round_of(window: int, fragment: int, slots: int) -> int:
    """The round that a window is served in: only the last slot's first window is served in round 0."""
    return window - 1 + first_send_round(0, fragment, slots)


# --- Windows: the coordinator's rules, without journal, sessions and arithmetic
#
# A small model of `coordinator/decide/machine.py`, made for thousands of nodes: a delta costs it a few dictionary
# look-ups. The straggler grace is the coordinator's own (`coordinator/decide/closing.py`).


class Window:
    """One fragment's next outer step."""

    def __init__(self, fragment: int, number: int, expected: set[int], now: float) -> None:
        self.fragment, self.number, self.expected, self.opened_at = fragment, number, expected, now
        self.removed: set[int] = set()
        self.came: dict[int, Delta] = {}
        self.quorum_at: float | None = None
        self.closing = False
        self._missing = len(expected)
        self.timely = 0  # deltas that name this window, not an earlier one: those that count for a quorum

    @property
    def all_arrived(self) -> bool:
        return self._missing == 0

    def add(self, delta: Delta) -> None:
        self.came[delta.node] = delta
        self.timely += delta.window == self.number
        self._missing -= delta.node in self.expected and delta.node not in self.removed

    def remove(self, node: int) -> None:
        """It is not waited for any more."""
        if node in self.expected and node not in self.removed:
            self.removed.add(node)
            self._missing -= node not in self.came

    def expect(self, node: int) -> None:
        if node not in self.expected:
            self.expected.add(node)
            self._missing += node not in self.came
        self.welcome_back(node)

    def welcome_back(self, node: int) -> None:
        if node in self.removed:
            self.removed.discard(node)
            self._missing += node not in self.came
