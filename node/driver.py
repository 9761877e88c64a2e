"""What rank 0 of a node does between two inner steps: it drives the executor, and waits where training has to."""

import contextlib
import logging
import math
import queue
import time
from collections.abc import Callable, Iterator

from farloop.algo.spec import RunSpec
from farloop.node.cluster import Decision
from farloop.node.errors import RunOver, Unreachable
from farloop.node.executor import Input, NodeExecutor
from farloop.node.state_dir import NodeState
from farloop.node.zmq_dealer import LinkThread
from farloop.runtime.system import ThreadWorker, yield_cores
from farloop.wire import messages as msg
from farloop.wire.limits import LAST_CALL_S
from farloop.wire.reasons import Reason

_log = logging.getLogger(__name__)

START_S, AGAIN_S = 10.0, 60.0  # after which a node that is ready says what it waits for, and says it again
_WAITS_FOR_START = (
    "waiting for the start: a run begins once all of its nodes are there; later a node starts with the next commit. "
    "A node whose loop is dead, but not its process, holds that up for 30 s or ten of its steps, or 5 minutes before "
    "its first step: end that process"
)
AHEAD_S = 1.0  # for how long decisions are made at once: for that long nothing that comes is looked at
MOST_STEPS = 64
WAIT_S = 0.2  # longest wait for an event before the node looks whether a report is due


class Driver:
    """Rank 0: drives the executor from the training thread, and waits there where training has to."""

    def __init__(
        self, link: LinkThread, state: NodeState, make: Callable[..., NodeExecutor], *, alone: bool = True
    ) -> None:
        """Begins to dial. `make`: given what the driver has itself. `alone`: the node has no other ranks, so nothing
        need be decided for several steps."""
        self._alone, self._decided, self._decided_at = alone, 0, 0.0
        self.link, self._state = link, state
        self.on_wait: Callable[[], None] = lambda: None  # called again and again while training waits here
        self.failed = False  # an error has ended training, and the coordinator was told
        self._inbox: queue.SimpleQueue[Input] = queue.SimpleQueue()
        self._worker = ThreadWorker("codec", self._inbox.put, yield_cores)
        self.executor = make(inbox=self._inbox, now=time.monotonic, worker=self._worker, link=link, state=state)

    def wait_for_spec(self) -> RunSpec:
        """Block until the coordinator has told the run.

        Raises RunOver: this node saw a run's end, and there is no coordinator any more.
        """
        over = self._state.finished
        deadline = time.monotonic() + LAST_CALL_S if over else math.inf
        while self.executor.machine.spec is None:
            with contextlib.suppress(Unreachable) if over else contextlib.nullcontext():
                self._wait()
            if time.monotonic() > deadline:
                raise RunOver(
                    f"run {over} is finished: this node saw its end, and no coordinator answers. "
                    "To take part in another run, start its coordinator first"
                )
        return self.executor.machine.spec

    def wait_for_start(self) -> list[Decision]:
        """Block until training begins, or the run is over. Returns what to do in the next steps, at least one."""
        with self.reporting_failure():
            tell_at = time.monotonic() + START_S
            while not self.executor.settle():
                self._wait()
                if time.monotonic() >= tell_at and self.executor.machine.stage == "ready":
                    tell_at = time.monotonic() + AGAIN_S
                    _log.warning(_WAITS_FOR_START)
            return self.executor.decisions(1)

    def after_step(self, tokens: int, loss: float | None, *, stepped: bool = True) -> list[Decision]:
        """What to do after the last step that is decided; blocks where the method says that training waits."""
        with self.reporting_failure():
            self.executor.step_done(tokens, loss, stepped=stepped)
            step_s = (time.monotonic() - self._decided_at) / max(1, self._decided)
            while not self.executor.settle():
                self._wait()
            most = max(1, min(MOST_STEPS, int(AHEAD_S / step_s))) if self._decided and not self._alone else 1
            decisions = self.executor.decisions(most)
            self._decided_at, self._decided = time.monotonic(), len(decisions)
            return decisions

    def between_steps(self, tokens: int, loss: float | None, *, stepped: bool) -> None:
        """After a step whose next one is decided already."""
        with self.reporting_failure():
            self.executor.step_done(tokens, loss, stepped=stepped)
            self.executor.resume()

    def drain(self, timeout_s: float) -> bool:
        """Wait for the outcome of what was sent, then say good-bye; False when that took too long."""
        machine = self.executor.machine
        self.executor.request_drain()
        deadline = time.monotonic() + timeout_s
        with self.reporting_failure():
            while not machine.ended and time.monotonic() < deadline:
                self._wait()
        if not machine.ended:
            self.executor.say_goodbye(msg.Leave(reason=Reason.OUT_OF_TIME))
        return self.link.flushed(max(1.0, deadline - time.monotonic())) and machine.ended

    def save_moments(self) -> None:
        """The optimizer's state of all fragments, after `drain`."""
        for _ in self.executor.save_moments():
            self.on_wait()

    def close(self, error: BaseException | None = None) -> None:
        """Stop all threads. The coordinator is told of the error first; not of an interrupt."""
        if isinstance(error, Exception):
            self._report_failure(error)
        self.link.close()
        self._worker.close()

    def _wait(self) -> None:
        """Wait for an event, or until a report may be due."""
        self.on_wait()
        with contextlib.suppress(queue.Empty):
            self.executor.on_input(self._inbox.get(timeout=WAIT_S))
        self.executor.report_if_due()

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Tell the coordinator of an error that ends training before it is raised."""
        try:
            yield
        except Exception as error:
            self._report_failure(error)
            raise

    def _report_failure(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            self.executor.say_failed(error)
            self.link.flushed(2.0)
