"""Decisions of one pipeline node: its job queue, admission of microbatches, steps."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from farloop.algo.stages import Hop, StageLayout
from farloop.node.settings import PipelineConfig
from farloop.pipeline import events as ev
from farloop.pipeline.layout import Letters, Switching, why_not
from farloop.pipeline.messages import (
    Ended,
    Forget,
    Kind,
    Leave,
    Lost,
    Message,
    MicrobatchRoute,
    PipelineMessage,
    Prepare,
    Prepared,
    Switch,
    Work,
)
from farloop.pipeline.routing import InFlight, Peers, Sources, onward, others

# --- Checks of incoming work


@dataclass(slots=True, kw_only=True)
class AdmittedWork:
    """A trip whose input is kept here."""

    visited: tuple[Hop, ...]  # up to this node
    next: str | None = None  # receiver of its output; None while it is computed
    looped: tuple[Hop, ...] | None = None  # at its source: all its visits, once its loss is requested


def fault_of(work: Work, layout: StageLayout, stage: int) -> str:
    """Why a node of this stage cannot do this forward work; empty if it can."""
    if work.epoch != layout.epoch:
        return f"layout {work.epoch}, here it is {layout.epoch}"
    paths = layout.paths_from(work.trip.source)
    if not work.path < len(paths) or not 0 < work.position < len(paths[work.path].hops):
        return "no such path"
    if paths[work.path].hops[work.position].stage != stage:
        return "another stage's"
    if not work.visited or work.visited[0] != Hop(stage=0, node=work.trip.source):
        return "it does not begin at its source"
    stages = [hop.stage for hop in work.visited]
    if stage in stages or len(set(stages)) != len(stages) or not exist(work.visited, layout):
        return "visits that cannot be"
    return ""


def fits(work: Work, held: AdmittedWork | None, layout: StageLayout, *, at_source: bool) -> bool:
    """Whether loss or backward work belongs to a trip that waits for it here."""
    if held is None or held.next is None or work.visited[: len(held.visited)] != held.visited:
        return False
    if work.kind is Kind.LOSS:
        return at_source and held.looped is None and exist(work.visited, layout)
    if at_source:
        return held.looped == work.visited and work.position == 0
    return work.position == len(held.visited) - 1


def exist(hops: Sequence[Hop], layout: StageLayout) -> bool:
    """Whether the layout has all of these nodes in these stages."""
    return all(hop.stage < len(layout.stages) and hop.node in layout.stages[hop.stage].replicas for hop in hops)


# --- The job queue, and inputs that are kept

GONE = 256  # trips that ended early and are remembered: far more than are ever on their way


class JobQueue:
    """One job at a time, first come first served; forward work waits while too many inputs are kept."""

    def __init__(self) -> None:
        self.queue: list[Work] = []
        self.running: Work | None = None
        self.held: dict[MicrobatchRoute, AdmittedWork] = {}  # trips whose input is kept here
        self.early: list[tuple[str, Work]] = []  # work of a later step or layout, with its sender
        self.gone: deque[MicrobatchRoute] = deque(maxlen=GONE)
        """Trips that ended early, the newest last: work of them may still come."""

    def next(self, *, full: bool, here: Hop) -> Work | None:
        """Begin the next job; None while one runs or none can begin. `full`: no further input can be kept."""
        if self.running is not None:
            return None
        for place, work in enumerate(self.queue):
            if work.kind is not Kind.FORWARD or not full:
                self.running = self.queue.pop(place)
                if work.kind is Kind.FORWARD:
                    self.held.setdefault(work.trip, AdmittedWork(visited=(*work.visited, here)))
                return work
        return None

    def knows(self, trip: MicrobatchRoute) -> bool:
        """Whether work of this trip came already."""
        return trip in self.held or self.waits(trip)

    def waits(self, trip: MicrobatchRoute) -> bool:
        return any(work.trip == trip for work in self.queue) or any(work.trip == trip for _, work in self.early)

    def runs(self, trip: MicrobatchRoute) -> bool:
        return self.running is not None and self.running.trip == trip

    def forget(self, trip: MicrobatchRoute) -> bool:
        """Drop the trip. Returns whether nothing of it is running."""
        self.held.pop(trip, None)
        self.gone.append(trip)
        self.queue = [work for work in self.queue if work.trip != trip]
        self.early = [(sender, work) for sender, work in self.early if work.trip != trip]
        return not self.runs(trip)

    def trips(self, of: Callable[[MicrobatchRoute], bool]) -> list[MicrobatchRoute]:
        known = {*self.held, *(work.trip for work in self.queue), *(work.trip for _, work in self.early)}
        return sorted(trip for trip in known if of(trip))

    def check(self, epoch: int) -> None:
        trips = [work.trip for work in self.queue]
        assert len(trips) == len(set(trips)), "a trip waits twice"
        assert self.running is None or self.running.trip not in trips, "a trip waits while it is computed"
        for work in self.queue:
            assert work.epoch == epoch and (work.kind is Kind.FORWARD or work.trip in self.held)


# --- The machine
#
# One job at a time, first come first served. A forward is admitted while the node keeps fewer inputs than its memory
# allows; a source sends while it has credit. The executor and the simulator carry the commands out.
#
#     Began ──▶ forward, loss and backward work, as it comes ──▶ Over ──▶ the optimizer steps ──▶ Began …

EMA = 0.1  # smoothing of the seconds per job (SWARM's α)
ATTEMPTS = 3  # trips that a microbatch is given before it is dropped
ASSEMBLE_S = 120.0  # how long a node waits at its start for those that it has never met
ORPHAN_S = 120.0  # how long it waits for a source, once all that it follows are gone


class PipelineMachine:
    def __init__(self, *, name: str, layout: StageLayout, config: PipelineConfig, incarnation: int = 0) -> None:
        """Raises ValueError where the layout has a fault, or no stage for this node."""
        if fault := next(layout.faults(), ""):
            raise ValueError(f"layout {layout.epoch}: {fault}")
        if (stage := layout.stage_of(name)) is None:
            raise ValueError(f"layout {layout.epoch} has no stage for {name}")
        self.name, self.layout, self.stage = name, layout, stage
        self.config = config
        self.peers = Peers(others(layout, name))
        self.homes = Sources(name, layout)
        self.flights: InFlight | None = None  # of a source
        if stage == 0:
            self.flights = InFlight(source=name, start=incarnation, credit=config.credit, attempts=ATTEMPTS)
        self.switching = Switching()
        self.desk = JobQueue()
        self.counted: Counter[str] = Counter()
        """Since the start: completed, dropped, reissued (of a source); rerouted, skipped, repeated."""
        self.job_s = 0.0  # recent seconds per job
        self.busy_at = 0.0  # when a job began or ended last
        self.step = -1
        self._touched: set[str] = set()  # of a source: nodes visited by this step's trips
        self._open, self._closes_round, self._goes_over = False, False, False
        self._assemble_by: float | None = None
        self._assembled = False
        self._orphan_since: float | None = None
        self._now = 0.0
        self._commands: list[ev.Command] = []

    # --- Read by the executor

    @property
    def epoch(self) -> int:
        return self.layout.epoch

    @property
    def ready(self) -> bool:
        """Whether it has met all nodes that it may send to, or has waited long enough."""
        return not self.peers.unseen(others(self.layout, self.name)) or self._waited_enough

    @property
    def queued(self) -> int:
        """Jobs that wait, with the running one."""
        return len(self.desk.queue) + (self.desk.running is not None)

    @property
    def waiting(self) -> str | None:
        """What the step waits for, in words."""
        if not self._open or self.desk.running is not None:
            return None
        if self.flights is not None:
            return None if self._assembled else "the other stages"
        return "a source that comes back" if self._orphan_since is not None else "microbatches"

    # --- events

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """Take one event; return what is to be done, in order."""
        self._now = now
        match event:
            case ev.StepBegan():
                self._begin(event)
            case ev.Arrived(sender=sender, work=work):
                self._on_arrived(sender, work)
            case ev.Computed(work=work):
                self._on_computed(work)
            case ev.MessageArrived():
                self._on_message(event)
            case ev.Up(peer=peer):
                self.peers.set(peer, "up")
                self.homes.left.discard(peer)
            case ev.Down(peer=peer):
                self.peers.set(peer, "down")
                self._forget_all(lambda trip: trip.source == peer)
                for trip in [trip for trip, held in self.desk.held.items() if held.next == peer]:
                    self._lose(trip, f"{peer} is gone")
                self._post(self.switching.answered(peer, self._reachable()))
            case ev.Offered(layout=layout, addresses=addresses):
                if refusal := self._prepare(layout, addresses):
                    self._do(ev.Note(text=f"layout {layout.epoch} is not followed: {refusal}"))
                else:
                    self._post(self.switching.conduct(self._reachable()))
            case _:
                assert_never(event)
        return self._advance()

    def next_timer(self) -> float | None:
        """When to call `handle_timer`."""
        if not self._open:
            return None
        times = [self.flights.next_overdue(self.config.patience_s)] if self.flights is not None else []
        if not self._assembled or not self.ready:
            times.append(self._assemble_by)
        if self._orphan_since is not None:
            times.append(self._orphan_since + ORPHAN_S)
        return min((time for time in times if time is not None), default=None)

    def handle_timer(self, now: float) -> list[ev.Command]:
        self._now = now
        if self.flights is not None:
            for trip in self.flights.overdue(now, self.config.patience_s):
                self._lose(trip, "late")
        if self._orphan_since is not None and now >= self._orphan_since + ORPHAN_S:
            self._orphan_since = None
            sources = ", ".join(self.homes.sources)
            self._do(ev.Stop(reason=f"the sources that this stage follows ({sources}) are gone"))
        return self._advance()

    def check(self) -> None:
        self.desk.check(self.epoch)
        if self.flights is not None:
            self.flights.check()
            assert set(self.desk.held) <= {flight.trip for flight in self.flights.flying.values()}
        else:
            assert len(self.desk.held) <= self.config.memory, "more inputs than memory"
        for trip in self.desk.held:
            assert trip.source == self.name or not self._is_down(trip.source), "an input of a source that is gone"

    # --- a step

    def _begin(self, began: ev.StepBegan) -> None:
        assert not self._open, "the last step is not over"
        self._assemble_by = self._now + ASSEMBLE_S if self._assemble_by is None else self._assemble_by
        self.step += 1
        self._switch_layout_if_due()
        self._open, self._closes_round = True, began.closes_round
        if self.flights is not None:
            self.flights.begin(began.microbatches)
        self._retry_early()

    def _advance(self) -> list[ev.Command]:
        if not self._assembled:
            mine = {hop.node for path in self.layout.paths_from(self.name) for hop in path.hops} - {self.name}
            self._assembled = all(self.peers.ready(node) or self._is_down(node) for node in mine) or self._waited_enough
        self._switch_layout_if_due()
        if self._open:
            self._issue()
            full = self.flights is None and len(self.desk.held) >= self.config.memory
            if work := self.desk.next(full=full, here=Hop(stage=self.stage, node=self.name)):
                self.busy_at = self._now
                self._do(ev.Compute(work=work))
            self._close_if_done()
        commands, self._commands = self._commands, []
        return commands

    def _issue(self) -> None:
        paths = self.layout.paths_from(self.name)
        if self.flights is None or not self._assembled or not paths:
            return
        while flight := self.flights.next(len(paths), self._now):
            work = Work(kind=Kind.FORWARD, epoch=self.epoch, trip=flight.trip, path=flight.path, position=0, visited=())
            self.desk.queue.append(work)

    def _close_if_done(self) -> None:
        if self.desk.running is not None:
            return
        if self.flights is not None:
            if self.flights.is_done and (self.layout.paths_from(self.name) or not self.flights.microbatches):
                self._close_source(self.flights)
            return
        if self.homes.closes(self.epoch, self._is_down):
            self._open, self._orphan_since = False, None
            self._do(ev.Over(summary=ev.Summary(step=self.step, microbatches=self.homes.close())))
        elif self.homes.all_left and not self.desk.queue:
            self._open = False
            self._do(ev.Finish())
        elif not self.homes.alone(self._is_down):
            self._orphan_since = None
        elif self._orphan_since is None:
            self._orphan_since = self._now

    def _close_source(self, flights: InFlight) -> None:
        self._goes_over = self.switching.committed and self._closes_round
        next_epoch = self.switching.epoch if self._goes_over and self.switching.epoch is not None else self.epoch
        ended = Ended(start=flights.start, step=flights.step, microbatches=flights.microbatches, next_epoch=next_epoch)
        planned = {hop.node for path in self.layout.paths_from(self.name) for hop in path.hops}
        for node in sorted((planned | self._touched) - {self.name}):
            self._send_message(node, ended)
        self._touched.clear()
        self._open = False
        became = {"completed": flights.completed, "dropped": flights.dropped.total(), "reissued": flights.reissued}
        self.counted.update(became)
        self._do(ev.Over(summary=ev.Summary(step=self.step, microbatches=flights.microbatches, **became)))

    # --- work

    def _on_arrived(self, sender: str, work: Work) -> None:
        if work.epoch > self.epoch and work.epoch == self.switching.epoch:
            self.desk.early.append((sender, work))
        elif work.kind is not Kind.FORWARD:
            self._on_backward(work)
        elif self._is_down(work.trip.source) or self.peers.is_settled(work.trip) or work.trip in self.desk.gone:
            self._do(ev.Discard(trip=work.trip))  # its source takes it for lost in time, or has
        elif fault := fault_of(work, self.layout, self.stage):
            self._do(ev.Discard(trip=work.trip))
            self._send_message(work.trip.source, Lost(trip=work.trip, epoch=self.epoch, reason=fault))
        elif self.desk.knows(work.trip):
            self.counted["repeated"] += 1
        elif self.homes.admits(work.trip):
            self.desk.queue.append(work)
        else:
            self.desk.early.append((sender, work))

    def _on_backward(self, work: Work) -> None:
        """Accept loss and backward work of known trips; of others it comes too late."""
        held, at_source = self.desk.held.get(work.trip), self.flights is not None
        busy = self.desk.waits(work.trip) or self.desk.runs(work.trip)
        if busy or not fits(work, held, self.layout, at_source=at_source):
            self.counted["repeated"] += 1
            return None if held is not None else self._do(ev.Discard(trip=work.trip))
        if work.kind is Kind.LOSS:
            assert held is not None
            held.looped = work.visited
            self._touched |= {hop.node for hop in work.visited}
        self.desk.queue.append(work)

    def _on_computed(self, work: Work) -> None:
        assert self.desk.running == work, "it was not asked for"
        self.desk.running = None
        took_s = self._now - self.busy_at
        self.job_s = took_s if self.job_s == 0.0 else (1 - EMA) * self.job_s + EMA * took_s
        self.busy_at = self._now
        held = self.desk.held.get(work.trip)
        if held is None:  # forgotten meanwhile
            return self._do(ev.Discard(trip=work.trip))
        match work.kind:
            case Kind.FORWARD:
                self._send_onward(work, held)
            case Kind.LOSS:
                self._go_back(work, work.visited, len(work.visited) - 1)
            case Kind.BACKWARD:
                del self.desk.held[work.trip]
                if self.flights is not None:
                    self.flights.complete(work.trip)
                else:
                    self._go_back(work, work.visited, work.position - 1)
                self._do(ev.Discard(trip=work.trip))
            case _:
                assert_never(work.kind)

    def _send_onward(self, work: Work, held: AdmittedWork) -> None:
        """Forward: to the next stage, or back to the source for the loss."""
        path = self.layout.paths_from(work.trip.source)[work.path]
        position, late_s = work.position + 1, self.config.late_s
        step = onward(self.layout, path, position, held.visited, self._load, late_s=late_s)
        if step is None:
            return self._lose(work.trip, "no way on")
        self.counted.update(rerouted=int(step.rerouted), skipped=step.skipped)
        held.next = step.hop.node if step.hop is not None else work.trip.source
        kind = Kind.FORWARD if step.hop is not None else Kind.LOSS
        out = replace(work, kind=kind, position=step.position, visited=held.visited)
        if held.next == self.name:  # the only stage: its loss is computed here
            held.looped = held.visited
            self.desk.queue.append(out)
        else:
            self._send(held.next, out)

    def _go_back(self, work: Work, visited: tuple[Hop, ...], position: int) -> None:
        """Backward: to the node at this place of the visits."""
        out = replace(work, kind=Kind.BACKWARD, position=position, visited=visited)
        to = visited[position].node
        if to == self.name:
            self.desk.queue.append(out)
        elif self.peers.is_up(to):
            self._send(to, out)
        else:
            self._lose(work.trip, "a node of its way is gone")

    # --- losses

    def _lose(self, trip: MicrobatchRoute, reason: str) -> None:
        """End the trip here. Its source decides about the microbatch."""
        self._forget(trip)
        if self.flights is None or trip.source != self.name:
            return self._send_message(trip.source, Lost(trip=trip, epoch=self.epoch, reason=reason))
        if self.flights.is_flying(trip):
            what = "goes once more" if self.flights.lose(trip, reason) else "is dropped"
            self._do(ev.Note(text=f"microbatch {trip.index} of step {trip.step} {what}: {reason}"))
            for peer in others(self.layout, self.name):
                self._send_message(peer, Forget(trip=trip))

    def _forget(self, trip: MicrobatchRoute) -> None:
        if self.desk.forget(trip):
            self._do(ev.Discard(trip=trip))

    def _forget_all(self, of: Callable[[MicrobatchRoute], bool]) -> None:
        for trip in self.desk.trips(of):
            self._forget(trip)

    # --- messages

    def _on_message(self, told: ev.MessageArrived) -> None:
        sender = told.sender
        match told.message:
            case PipelineMessage() as word:
                self.peers.on_message(sender, word, self._now)
                self._forget_all(self.peers.is_settled)
                if word.epoch > self.epoch:
                    self.homes.next_epoch[sender] = max(word.epoch, self.homes.next_epoch.get(sender, 0))
            case Lost(trip=trip, epoch=epoch, reason=reason):
                if self.flights is not None and trip.source == self.name and self.flights.is_flying(trip):
                    self._lose(trip, f"{sender}: {reason}"[:200])
                if epoch < self.epoch:  # it has missed the switch
                    self._post(self.switching.once_more(sender, self.layout))
            case Leave():
                self.homes.left.add(sender)
            case Forget(trip=trip):
                if trip.source == sender:
                    self._forget(trip)
            case Ended() as ended:
                self.homes.on_step_ended(sender, ended)
                self.peers.on_settled(sender, ended.start, ended.step)
                self._forget_all(self.peers.is_settled)
            case Prepare(layout=layout, addresses=addresses):
                refusal = self._prepare(layout, addresses)
                self._send_message(sender, Prepared(epoch=layout.epoch, refusal=refusal))
            case Prepared(epoch=epoch, refusal=refusal):
                if epoch == self.switching.epoch:
                    self._post(self.switching.answered(sender, self._reachable(), refused=bool(refusal)))
                if refusal:
                    self._do(ev.Note(text=f"{sender} cannot follow layout {epoch}: {refusal[:200]}"))
            case Switch(epoch=epoch):
                self.switching.commit(epoch)
            case _:
                assert_never(told.message)

    # --- another layout

    def _prepare(self, layout: StageLayout, addresses: dict[str, str]) -> str:
        """Prepare a layout. Returns why not, in words; empty if prepared."""
        refusal = why_not(layout, self.layout, self.name)
        if not refusal:
            self.switching.prepare(layout, addresses)
            self.peers.add(others(layout, self.name))
            self._do(ev.Meet(addresses={name: to for name, to in addresses.items() if name != self.name}))
        return refusal

    def _switch_layout_if_due(self) -> None:
        layout = self.switching.layout
        if layout is None or self.desk.running is not None:
            return
        due = self.flights is not None and self._goes_over and self.flights.is_done
        if self.flights is None:
            told = self.switching.committed or any(e >= layout.epoch for e in self.homes.next_epoch.values())
            due = told and self.homes.all_past(self.epoch, self._is_down)
        if due:
            for trip in sorted({*self.desk.held, *(work.trip for work in self.desk.queue)}):
                self._lose(trip, "a new layout")
            self.layout, self._goes_over = layout, False
            self._assembled, self._assemble_by = False, self._now + ASSEMBLE_S
            self.switching.finish()
            self.homes.follow(layout)
            self._do(ev.Adopt(layout=layout))
            self._retry_early()

    def _retry_early(self) -> None:
        early, self.desk.early = self.desk.early, []
        for sender, work in early:
            self._on_arrived(sender, work)

    # --- small things

    def _load(self, node: str) -> float | None:
        return self.queued * self.job_s if node == self.name else self.peers.load(node, self._now)

    def _is_down(self, node: str) -> bool:
        standing = self.peers.standing(node)
        return standing == "down" or (standing == "unseen" and self._waited_enough)

    @property
    def _waited_enough(self) -> bool:
        return self._assemble_by is not None and self._now >= self._assemble_by

    def _send(self, to: str, work: Work) -> None:
        self.peers.sent(to)
        self._do(ev.Send(to=to, work=work))

    def _reachable(self) -> list[str]:
        return [peer for peer in others(self.layout, self.name) if self.peers.is_up(peer)]

    def _send_message(self, to: str, message: Message) -> None:
        if self.peers.is_up(to):
            self._do(ev.Tell(to=to, message=message))

    def _post(self, letters: Letters) -> None:
        for to, message in letters:
            self._send_message(to, message)

    def _do(self, command: ev.Command) -> None:
        self._commands.append(command)
