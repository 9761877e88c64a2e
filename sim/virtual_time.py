"""Virtual time: what happens when, and the processes that it happens to. Knows nothing of runs, links or nodes."""

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class EventQueue:
    """Actions in the order of their time; those of one instant in the order they were entered."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual monotonic seconds."""
        self._actions: list[tuple[float, int, Action]] = []
        self._entered = itertools.count()

    def at(self, when: float, action: Action) -> None:
        """Enter an action; one for the past happens now."""
        heapq.heappush(self._actions, (max(when, self.now), next(self._entered), action))

    def after(self, delay_s: float, action: Action) -> None:
        self.at(self.now + delay_s, action)

    def step(self) -> bool:
        """Do the next action; False where none is left."""
        if not self._actions:
            return False
        self.now, _, action = heapq.heappop(self._actions)
        action()
        return True


class Process:
    """A daemon as its operating system sees it: it can be killed, stopped, and continued."""

    def __init__(self, agenda: EventQueue) -> None:
        self.agenda = agenda
        self.ahead_s = 0.0
        """Its clock beyond the agenda's."""
        self.alive = True
        self.stopped = False
        self._held_frames: list[Action] = []
        self._held_timers: list[Action] = []

    @property
    def now(self) -> float:
        """What its monotonic clock says."""
        return self.agenda.now + self.ahead_s

    def after(self, delay_s: float, action: Action) -> None:
        """A timer or a finished job of this process: lost when it is dead, late when it is stopped."""
        self.agenda.after(delay_s, lambda: self._fire(action, self._held_timers))

    def deliver(self, action: Action) -> None:
        """Something readable arrives now; the kernel keeps it while the process is stopped."""
        self._fire(action, self._held_frames)

    def kill(self) -> None:
        self.alive = False
        self._held_frames.clear()
        self._held_timers.clear()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def go_on(self) -> None:
        """SIGCONT: what is readable goes in before due timers fire (protocol C)."""
        self.stopped = False
        held = [*self._held_frames, *self._held_timers]
        self._held_frames.clear()
        self._held_timers.clear()
        for action in held:
            self._fire(action, self._held_timers)

    def _fire(self, action: Action, held: list[Action]) -> None:
        if not self.alive:
            return
        if self.stopped:
            held.append(action)
        else:
            action()
