"""Virtual time: what happens when, and the processes that it happens to. Knows nothing of runs, links or nodes."""

import contextlib
import heapq
import itertools
from collections.abc import Callable

from farloop.runtime.ports import Action, T


class EventQueue:
    """Actions in the order of their time; those of one instant in the order they were entered."""

    def __init__(self) -> None:
        self.now = 0.0  # virtual monotonic seconds
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
        self.ahead_s = 0.0  # its clock beyond the agenda's
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

    def resume(self) -> None:
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


class PowerCut(BaseException):
    """The process dies in the middle of a job. No Exception: nothing in a daemon may catch it."""


class VirtualTimer:
    """An action of a virtual process that is due later."""

    def __init__(self, action: Action) -> None:
        self._action: Action | None = action

    def cancel(self) -> None:
        self._action = None

    def fire(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


class VirtualClock:
    """The clock port of a process in virtual time."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def now(self) -> float:
        return self._process.now

    def minute_of_day(self) -> int:
        """The simulation begins at midnight."""
        return int(self._process.now // 60) % 1440

    def call_later(self, delay_s: float, action: Action) -> VirtualTimer:
        timer = VirtualTimer(action)
        self._process.after(max(0.0, delay_s), timer.fire)
        return timer


class VirtualWorker:
    """The worker port in virtual time: a job runs when its time is over, and a crash may catch one half-way."""

    def __init__(
        self, process: Process, duration_s: Callable[[], float], post: Callable[[Action], object] = lambda act: act()
    ) -> None:
        """`post` is handed what became of a job: the `put` of an inbox, where the executor has one."""
        self._process, self._duration_s, self._post = process, duration_s, post
        self.seconds = 0.0
        self._jobs: list[tuple[Action, list[Action]]] = []  # jobs, and what each leaves to be called in the process
        self._working = False

    def submit(self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        """`job` may raise PowerCut, which kills the process."""
        report: list[Action] = []

        def run() -> None:
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - the edge of the worker: whoever submitted the job is told
                told = error
                report.append(lambda: failed(told))
            else:
                report.append(lambda: done(result))

        self._jobs.append((run, report))
        if len(self._jobs) == 1:
            self._process.after(self._duration_s(), self._finish)

    def interrupt(self, *, finished: bool) -> None:
        """The process dies: the job under way is finished or was never begun; those that wait never run."""
        if self._jobs and finished and not self._working:
            with contextlib.suppress(PowerCut):
                self._jobs[0][0]()
        self._jobs.clear()

    def close(self) -> None:
        pass

    def _finish(self) -> None:
        run, report = self._jobs[0]
        self._working = True
        try:
            run()
        except PowerCut:
            return
        finally:
            self._working = False
        del self._jobs[0]
        if self._jobs:
            self._process.after(self._duration_s(), self._finish)
        for action in report:
            self._post(action)
