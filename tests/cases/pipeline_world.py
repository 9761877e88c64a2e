"""The nodes of a pipeline on virtual time: the machines that run for real, with links and stages that only take time.

Predicts how long a step takes, and shows that every microbatch is accounted for whatever dies or is late.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from farloop.algo.stages import StageLayout
from farloop.node.settings import PipelineConfig
from farloop.pipeline import events as ev
from farloop.pipeline.machine import PipelineMachine
from farloop.pipeline.messages import Kind, Leave, Message, PipelineMessage, Work
from farloop.sim.virtual_time import EventQueue, Process

BEAT_S = 2.0  # between two words of a node: of jobs that take a second or so
Delay = Callable[[str, str], float]  # seconds from one node to another


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds that a stage computes; the shares are those of SkipPipe's cost model (arXiv 2502.19913)."""

    forward_s: float = 1.0
    loss_s: float = 0.25
    backward_s: float = 1.5

    def of(self, kind: Kind) -> float:
        return {Kind.FORWARD: self.forward_s, Kind.LOSS: self.loss_s, Kind.BACKWARD: self.backward_s}[kind]


@dataclass(slots=True, kw_only=True)
class Record:
    """What one node did."""

    summaries: list[ev.Summary] = field(default_factory=list)
    over_at: list[float] = field(default_factory=list)  # when each step was over
    began_at: list[float] = field(default_factory=list)
    visits: Counter[Kind] = field(default_factory=Counter)
    peak_inputs: int = 0
    finished: bool = False  # it has taken its steps, or the sources that it follows have
    stopped: str = ""
    notes: list[str] = field(default_factory=list)


class World:
    """All nodes of a layout, each of which takes so many steps."""

    def __init__(
        self,
        layout: StageLayout,
        *,
        steps: int,
        microbatches: int,
        costs: Mapping[str, Costs] | Costs | None = None,
        delay: Delay = lambda u, v: 0.0,
        config: PipelineConfig | None = None,
    ) -> None:
        """`microbatches` of each source and step."""
        self.agenda = EventQueue()
        self.layout, self.steps, self.microbatches = layout, steps, microbatches
        self.nodes = [name for stage in layout.stages for name in stage.replicas]
        self._costs, self._delay, self._config = costs or Costs(), delay, config or PipelineConfig()
        self.records: dict[str, Record] = {}
        self.machines: dict[str, PipelineMachine] = {}
        self.processes: dict[str, Process] = {}
        self._timers: dict[str, float] = {}
        self._lives: Counter[str] = Counter()
        for name in self.nodes:
            self._start(name)
        for name in self.nodes:
            self._connect(name)
        for name in self.nodes:
            self.processes[name].after(0.0, partial(self._begin, name))

    def run(self, until_s: float = float("inf")) -> None:
        """Until every living node has finished or stopped, but for spare ones, or until this time."""
        while not self._all_done() and self.agenda.now < until_s and self.agenda.step():
            pass

    # --- nodes

    def _start(self, name: str) -> None:
        self._lives[name] += 1
        self.processes[name] = Process(self.agenda)
        self.machines[name] = PipelineMachine(
            name=name, layout=self.layout, incarnation=self._lives[name], config=self._config
        )
        self.records[name] = Record()
        self._timers.pop(name, None)
        self._beat(name)

    def _connect(self, name: str) -> None:
        for other in self.nodes:
            if other != name and self.processes[other].alive:
                for one, another in ((name, other), (other, name)):
                    self._deliver(one, another, ev.Up(peer=one))

    def _begin(self, name: str) -> None:
        record, machine = self.records[name], self.machines[name]
        if len(record.began_at) == self.steps:
            record.finished = True
            for other in self.nodes:
                if other != name:
                    self._send(name, other, Leave(start=self._lives[name]))
        elif not record.stopped:
            record.began_at.append(self.agenda.now)
            source = machine.stage == 0 and bool(machine.layout.paths_from(name))
            self._handle(name, ev.StepBegan(microbatches=self.microbatches if source else 0))

    def _beat(self, name: str) -> None:
        machine = self.machines[name]
        for other in self.nodes:
            if other != name:
                self._send(name, other, self._word(name, machine))
        self.processes[name].after(BEAT_S, lambda: self._beat(name))

    def _word(self, name: str, machine: PipelineMachine) -> PipelineMessage:
        return PipelineMessage(
            incarnation=self._lives[name],
            epoch=machine.epoch,
            ready=machine.ready,
            queued=machine.queued,
            job_s=machine.job_s,
            age_s=max(0.0, self.agenda.now - machine.busy_at),
            over=machine.flights.settled_step if machine.flights is not None else -1,
        )

    # --- events and commands

    def _handle(self, name: str, event: ev.Event | None) -> None:
        process, machine = self.processes[name], self.machines[name]
        if not process.alive or self.records[name].stopped:
            return
        now = self.agenda.now
        commands = machine.handle_timer(now) if event is None else machine.handle(event, now)
        machine.check()
        record = self.records[name]
        record.peak_inputs = max(record.peak_inputs, len(machine.desk.held))
        for command in commands:
            self._carry_out(name, command)
        if (timer := machine.next_timer()) is not None and timer != self._timers.get(name):
            self._timers[name] = timer
            process.after(max(0.0, timer - now), lambda: self._handle(name, None))

    def _carry_out(self, name: str, command: ev.Command) -> None:
        record, process = self.records[name], self.processes[name]
        match command:
            case ev.Compute(work=work):
                costs = self._costs if isinstance(self._costs, Costs) else self._costs[name]
                process.after(costs.of(work.kind), lambda: self._computed(name, work))
            case ev.Send(to=to, work=work):
                self._deliver(name, to, ev.Arrived(sender=name, work=work))
            case ev.Tell(to=to, message=message):
                self._send(name, to, message)
            case ev.Over(summary=summary):
                record.summaries.append(summary)
                record.over_at.append(self.agenda.now)
                process.after(0.0, lambda: self._begin(name))
            case ev.Note(text=text):
                record.notes.append(text)
            case ev.Stop(reason=reason):
                record.stopped = reason
            case ev.Finish():
                record.finished = True
            case ev.Discard() | ev.Meet() | ev.Adopt():
                pass
            case _:
                assert_never(command)

    def _computed(self, name: str, work: Work) -> None:
        self.records[name].visits[work.kind] += 1
        self._handle(name, ev.Computed(work=work))

    def _send(self, name: str, to: str, message: Message) -> None:
        self._deliver(name, to, ev.MessageArrived(sender=name, message=message))

    def _deliver(self, name: str, to: str, event: ev.Event) -> None:
        life = self._lives[to]

        def arrive() -> None:
            if self._lives[to] == life:
                self._handle(to, event)

        self.agenda.after(self._delay(name, to), arrive)

    def _all_done(self) -> bool:
        def is_spare(name: str) -> bool:  # on no path
            return not any(hop.node == name for path in self.machines[name].layout.paths for hop in path.hops)

        return all(
            record.finished or record.stopped or not self.processes[name].alive or is_spare(name)
            for name, record in self.records.items()
        )
