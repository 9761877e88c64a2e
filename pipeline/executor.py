"""Runs one stage in the training thread.

The link's thread puts messages into an inbox; `step` takes them, lets the machine decide and carries its commands out,
one job at a time, until the step is over. The gradients are then means, and the caller's optimizer steps.
"""

import contextlib
import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never, cast

from torch import Tensor

from farloop.algo.stages import StageLayout
from farloop.node.errors import LayoutError
from farloop.node.settings import Normalise, PipelineConfig
from farloop.pipeline import events as ev
from farloop.pipeline import messages
from farloop.pipeline.events import PipelineBroken
from farloop.pipeline.link import PeerConfig, PeerLink
from farloop.pipeline.machine import PipelineMachine
from farloop.pipeline.messages import FramedMessage, Leave, Message, MicrobatchRoute, PipelineMessage, Work
from farloop.pipeline.stage import StageJobs, Trained, from_bytes, to_bytes
from farloop.wire.reasons import RemoteProtocolError

_log = logging.getLogger(__name__)

LOOK_S = 0.1  # interval at which a waiting step checks whether to go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    trained: Trained
    summary: ev.Summary
    seconds: float


class Executor:
    """One node of a pipeline, from `start` to `close`."""

    def __init__(
        self,
        *,
        layout: StageLayout,
        addresses: Mapping[str, str],
        jobs: StageJobs,
        peer: PeerConfig,
        config: PipelineConfig,
        incarnation: int = 0,
        run: int = 0,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """`wanted`: False ends a step that waits.

        Raises LayoutError: the layout has a fault, or no stage for this node.
        Raises KeyFileError: a key file cannot be used.
        """
        try:
            self.machine = PipelineMachine(name=peer.name, layout=layout, incarnation=incarnation, config=config)
        except ValueError as error:
            raise LayoutError(str(error)) from error
        self.jobs = jobs
        self.bytes_by_hop: dict[str, int] = {}  # bytes of tensors sent, by receiver
        self._addresses, self._incarnation, self._run = dict(addresses), incarnation, run
        self._config, self._wanted = config, wanted
        self._inbox: queue.SimpleQueue[tuple[str, FramedMessage | Message | bool]] = queue.SimpleQueue()
        self._events: deque[ev.Event] = deque()
        self._tensors: dict[Work, Tensor] = {}  # received tensors that wait for their work
        self._results: dict[MicrobatchRoute, Tensor] = {}  # results that wait to be sent or used here
        self._summary: ev.Summary | None = None
        self._finished = False
        self._told = (0, False, 0, 0.0, 0.0, -1)
        """Epoch, ready, queued, job_s, busy_at, over; replaced as a whole, for the link's thread reads it."""
        self.link = PeerLink(peer, run, lambda name, come: self._inbox.put((name, come)), self._word)

    def start(self) -> None:
        """Listen, and dial the others. Raises PeerBindError."""
        self.link.start()
        self.link.dial(self._addresses)

    def close(self) -> None:
        """Say good-bye and stop the link's thread."""
        for name in self._addresses:
            self.link.send(name, messages.message(Leave(start=self._incarnation), self._run))
        self.link.close()

    def step(self, microbatches: Sequence[Tensor] = (), *, closes_round: bool = True) -> Step | None:
        """One step: from the source's microbatches, tokens [B, S] each, to mean gradients in the parameters.

        Returns None when this node, or the sources that it follows, make no more steps; the gradients are
        then meaningless. Raises PipelineBroken: all sources that this stage follows are gone.
        """
        if self._finished:
            return None
        began = time.monotonic()
        self.jobs.load(microbatches)
        self._summary = None
        self._handle(ev.StepBegan(microbatches=len(microbatches), closes_round=closes_round))
        while self._summary is None and not self._finished:
            self._turn()
            if self._summary is None and self.machine.waiting and not self._wanted():
                return None
        if self._summary is None:
            return None
        trained = self.jobs.finish(self._share(self._summary), cast(Normalise, self._config.normalise))
        return Step(trained=trained, summary=self._summary, seconds=time.monotonic() - began)

    def offer(self, layout: StageLayout, addresses: Mapping[str, str]) -> None:
        self._events.append(ev.Offered(layout=layout, addresses=dict(addresses)))

    def _share(self, summary: ev.Summary) -> int:
        """This node's visits if every microbatch visited every stage and replicas shared them evenly."""
        layout = self.machine.layout
        if self.machine.stage == 0:
            return summary.microbatches
        followed = max(1, len(self.machine.homes.sources))
        sources = len({path.source for path in layout.paths})
        replicas = len(layout.stages[self.machine.stage].replicas)
        return round(summary.microbatches / followed * sources / replicas)

    # --- inbox and commands

    def _turn(self) -> None:
        """Take everything that arrived, then the finished job, or wait."""
        timer = self.machine.next_timer()
        pause = LOOK_S if timer is None else max(0.0, min(LOOK_S, timer - time.monotonic()))
        with contextlib.suppress(queue.Empty):
            self._on_link_event(*(self._inbox.get_nowait() if self._events else self._inbox.get(timeout=pause)))
            while not self._inbox.empty():
                self._on_link_event(*self._inbox.get_nowait())
        if self._events:
            self._handle(self._events.popleft())
        if timer is not None and time.monotonic() >= timer:
            self._do(self.machine.handle_timer(time.monotonic()))

    def _on_link_event(self, name: str, come: FramedMessage | Message | bool) -> None:
        match come:
            case bool():
                self._handle(ev.Up(peer=name) if come else ev.Down(peer=name))
            case FramedMessage(work=work, info=info, data=data):
                try:
                    self._tensors[work] = from_bytes(info, data, self.jobs.device, self._config.codec)
                except RemoteProtocolError as error:
                    return _log.warning("bad tensor of %s reason=%r", name, str(error))
                self._handle(ev.Arrived(sender=name, work=work))
            case _:
                self._handle(ev.MessageArrived(sender=name, message=come))

    def _handle(self, event: ev.Event) -> None:
        self._do(self.machine.handle(event, time.monotonic()))

    def _do(self, commands: list[ev.Command]) -> None:
        machine = self.machine
        over = machine.flights.settled_step if machine.flights is not None else -1
        self._told = (machine.epoch, machine.ready, machine.queued, machine.job_s, machine.busy_at, over)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: ev.Command) -> None:
        match command:
            case ev.Compute(work=work):
                given = self._tensors.pop(work, None)
                result = self.jobs.do(work, given if given is not None else self._results.pop(work.trip, None))
                if result is not None:
                    self._results[work.trip] = result
                self._events.append(ev.Computed(work=work))
            case ev.Send(to=to, work=work):
                info, data = to_bytes(self._results.pop(work.trip), self._config.codec)
                self.bytes_by_hop[to] = self.bytes_by_hop.get(to, 0) + info.size
                self.link.send(to, messages.parcel(work, replace(info, sent_s=time.monotonic()), data, self._run))
            case ev.Tell(to=to, message=message):
                self.link.send(to, messages.message(message, self._run))
            case ev.Discard(trip=trip):
                self.jobs.forget(trip)
                self._results.pop(trip, None)
                for work in [work for work in self._tensors if work.trip == trip]:
                    del self._tensors[work]
            case ev.Over(summary=summary):
                self._summary = summary
            case ev.Meet(addresses=addresses):
                self._addresses |= addresses
                self.link.dial(addresses)
            case ev.Adopt(layout=layout):
                _log.info("layout epoch=%d", layout.epoch)
            case ev.Note(text=text):
                _log.warning("%s", text)
            case ev.Finish():
                self._finished = True
            case ev.Stop(reason=reason):
                raise PipelineBroken(reason)
            case _:
                assert_never(command)

    def _word(self) -> PipelineMessage:
        """In the link's thread."""
        epoch, ready, queued, job_s, busy_at, over = self._told
        return PipelineMessage(
            incarnation=self._incarnation,
            epoch=epoch,
            ready=ready,
            queued=queued,
            job_s=job_s,
            age_s=max(0.0, time.monotonic() - busy_at) if queued else 0.0,
            over=over,
        )
