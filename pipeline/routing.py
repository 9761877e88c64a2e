"""Next hop, peers, sources, and microbatches in flight."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from farloop.algo.stages import Hop, Path, StageLayout, order_fault
from farloop.pipeline.messages import Ended, MicrobatchRoute, PipelineMessage

# --- Next hop: the planned one, another replica of the stage, past the stage, or nowhere
#
# The fallback is SWARM's (arXiv 2301.11913): the live replica with the least expected busy time. What may be skipped
# and swapped is bounded as in SkipPipe (arXiv 2502.19913, with the numbers of its published code, C2–C4).


LEAST_SHARE: Final = 0.5  # of the stages, that a microbatch visits at least, unless its path was planned shorter


@dataclass(frozen=True, slots=True, kw_only=True)
class Onward:
    """The next visit."""

    hop: Hop | None  # None: the way out is done, and the source computes the loss
    position: int  # place in the path of that visit
    rerouted: bool  # whether another replica replaces the planned one
    skipped: int  # planned visits skipped before it


def onward(
    layout: StageLayout,
    path: Path,
    position: int,
    visited: Sequence[Hop],
    load: Callable[[str], float | None],
    *,
    late_s: float,
) -> Onward | None:
    """The next visit after `visited`, from this position of the path on; None without a legal way.

    `load` returns the seconds until a node would begin, None if it cannot be reached. A planned hop is replaced by
    another replica if it would begin later than in `late_s` and the other one earlier.
    """
    stages = [hop.stage for hop in visited]
    least = min(-(-len(layout.stages) * LEAST_SHARE // 1), len(path.hops))
    for place in range(position, len(path.hops)):
        planned, skipped = path.hops[place], place - position
        waits = {node: wait for node in layout.stages[planned.stage].replicas if (wait := load(node)) is not None}
        if not waits:
            continue
        node = planned.node
        if waits.get(node, late_s + 1.0) > late_s:
            node = min(waits, key=lambda name: (waits[name], name != planned.node, name))
        legal = not order_fault([*stages, planned.stage])
        if skipped and not (legal and len(visited) + len(path.hops) - place >= least):
            return None
        hop = Hop(stage=planned.stage, node=node)
        return Onward(hop=hop, position=place, rerouted=node != planned.node, skipped=skipped)
    skipped = len(path.hops) - position
    if skipped and len(visited) < least:
        return None
    return Onward(hop=None, position=len(visited), rerouted=False, skipped=skipped)


# --- Peers: who is reachable, and how long a job would wait there

Standing = Literal["unseen", "up", "down"]


@dataclass(slots=True)
class Peer:
    """One other node."""

    standing: Standing = "unseen"
    word: PipelineMessage | None = None
    heard_at: float = 0.0
    sent: int = 0  # jobs sent to it since its last message


class Peers:
    """All other nodes of the layout."""

    def __init__(self, names: Iterable[str]) -> None:
        self._peers = {name: Peer() for name in names}
        self._over: dict[str, tuple[int, int]] = {}  # by source: its start, and its newest settled step

    def add(self, names: Iterable[str]) -> None:
        for name in names:
            self._peers.setdefault(name, Peer())

    def set(self, name: str, standing: Standing) -> None:
        if name in self._peers:
            self._peers[name].standing = standing
            if standing == "down":
                self._peers[name].word = None

    def on_message(self, name: str, word: PipelineMessage, now: float) -> None:
        if name in self._peers:
            peer = self._peers[name]
            peer.word, peer.heard_at, peer.sent = word, now, 0
            self.on_settled(name, word.incarnation, word.over)

    def on_settled(self, name: str, start: int, step: int) -> None:
        """A source has settled this step and those before."""
        self._over[name] = max((start, step), self._over.get(name, (-1, -1)))

    def is_settled(self, trip: MicrobatchRoute) -> bool:
        """Whether the trip's source is known to have settled it."""
        return (trip.start, trip.step) <= self._over.get(trip.source, (-1, -1))

    def sent(self, name: str) -> None:
        if name in self._peers:
            self._peers[name].sent += 1

    def standing(self, name: str) -> Standing:
        return self._peers[name].standing if name in self._peers else "down"

    def is_up(self, name: str) -> bool:
        return self.standing(name) == "up"

    def ready(self, name: str) -> bool:
        """Whether it can be reached and has met its own peers."""
        peer = self._peers.get(name)
        return peer is not None and peer.standing == "up" and peer.word is not None and peer.word.ready

    def unseen(self, names: Iterable[str]) -> bool:
        return any(self.standing(name) == "unseen" for name in names)

    def load(self, name: str, now: float) -> float | None:
        """Estimated seconds until a job sent now would begin; None if it cannot be reached."""
        peer = self._peers.get(name)
        if peer is None or peer.standing != "up":
            return None
        if peer.word is None:
            return 0.0
        jobs = peer.word.queued + peer.sent
        stands_still = peer.word.age_s + now - peer.heard_at if peer.word.queued else 0.0
        return jobs * peer.word.job_s + stands_still


def others(layout: StageLayout, name: str) -> tuple[str, ...]:
    """All nodes of a layout but this one, in order of their names."""
    return tuple(sorted({node for stage in layout.stages for node in stage.replicas} - {name}))


# --- Sources: the nodes whose planned paths pass through this one
#
# A node steps when each of its sources has ended one more step. A microbatch of a later step waits until then; one from
# a source that this node does not follow, rerouted here, is served at once and counts for the current step. Steps are
# ordered by (incarnation of the source, step).

Position = tuple[int, int]


class Sources:
    """The sources that one node follows."""

    def __init__(self, node: str, layout: StageLayout) -> None:
        self._node = node
        self.sources: tuple[str, ...] = ()
        self._everybody: tuple[str, ...] = ()  # all sources of the layout
        self.ended: dict[str, Position] = {}  # newest step that each has ended
        self.used: dict[str, Position] = {}  # newest step of each that this node's steps contain
        self.next_epoch: dict[str, int] = {}
        self.left: set[str] = set()  # sources that have said good-bye
        self._microbatches: dict[str, int] = {}
        self.follow(layout)

    def follow(self, layout: StageLayout) -> None:
        passing = {path.source for path in layout.paths if any(hop.node == self._node for hop in path.hops)}
        self.sources = tuple(sorted(passing - {self._node}))
        self._everybody = tuple(sorted({path.source for path in layout.paths}))

    def admits(self, trip: MicrobatchRoute) -> bool:
        """Whether its work belongs to the present step. The first trip of a source sets the beginning."""
        if trip.source not in self.sources:
            return True
        used = self.used.get(trip.source)
        if used is None or trip.start > used[0]:
            self.used[trip.source] = used = (trip.start, trip.step - 1)
        return (trip.start, trip.step) <= (used[0], used[1] + 1)

    def on_step_ended(self, source: str, ended: Ended) -> None:
        position = ended.start, ended.step
        self.used.setdefault(source, (ended.start, ended.step - 1))
        self.next_epoch[source] = ended.next_epoch
        if position > self.ended.get(source, (-1, -1)):
            self.ended[source] = position
            self._microbatches[source] = ended.microbatches

    def closes(self, epoch: int, is_down: Callable[[str], bool]) -> bool:
        """Whether the node's step is over; sources that are away, or follow another layout, do not count."""
        followed = [source for source in self.sources if not is_down(source)]
        if not followed:  # no source is left: it ends with any source that sends it guests
            return any(self._has_ended(source) for source in self.ended)
        waited_for = [source for source in followed if not self._is_past(source, epoch)]
        news = [source for source in followed if self._has_ended(source)]
        return bool(news) and all(self._has_ended(source) for source in waited_for)

    def alone(self, is_down: Callable[[str], bool]) -> bool:
        """Whether all followed sources are away."""
        return bool(self.sources) and all(map(is_down, self.sources))

    @property
    def all_left(self) -> bool:
        """Whether all followed sources have left; for a spare node, all sources."""
        return set(self.sources or self._everybody) <= self.left

    def close(self) -> int:
        """Begin the next step. Returns the microbatches of the last one, of all followed sources."""
        news = [source for source in self.ended if self._has_ended(source)]
        followed = [source for source in news if source in self.sources] or news
        for source in news:
            self.used[source] = self.ended[source]
        return sum(self._microbatches[source] for source in followed)

    def all_past(self, epoch: int, is_down: Callable[[str], bool]) -> bool:
        """Whether all followed sources have left the layout of this epoch."""
        return all(self._is_past(source, epoch) for source in self.sources if not is_down(source))

    def _has_ended(self, source: str) -> bool:
        return self.ended.get(source, (-1, -1)) > self.used.get(source, (-1, -1))

    def _is_past(self, source: str, epoch: int) -> bool:
        """Its next step has a newer layout, and this node's steps contain all its ended ones."""
        return self.next_epoch.get(source, epoch) > epoch and not self._has_ended(source)


# --- Microbatches in flight at their source
#
# Conservation: every microbatch of a step is waiting, under way, completed or dropped, and nothing else.


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A microbatch under way."""

    trip: MicrobatchRoute
    path: int
    since: float


@dataclass(slots=True)
class InFlight:
    """Microbatches of one source's step that are under way."""

    source: str
    start: int  # incarnation of the source
    credit: int  # most microbatches under way at once
    attempts: int  # trips that a microbatch is given before it is dropped
    step: int = -1
    microbatches: int = 0
    flying: dict[int, Flight] = field(default_factory=dict)
    completed: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # in this step, by reason
    reissued: int = 0  # trips of this step that were not the first of their microbatch
    _todo: deque[tuple[int, int]] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        """Whether every microbatch is settled."""
        return not self._todo and not self.flying

    @property
    def settled_step(self) -> int:
        """The newest settled step; −1 for none."""
        return self.step if self.is_done else self.step - 1

    def begin(self, microbatches: int) -> None:
        """The next step."""
        assert self.is_done, "the last step is not over"
        self.step, self.microbatches = self.step + 1, microbatches
        self._todo = deque((index, 0) for index in range(microbatches))
        self.completed, self.dropped, self.reissued = 0, Counter(), 0

    def next(self, paths: int, now: float) -> Flight | None:
        """One more trip, if there is credit, on the next of the paths in turn."""
        if not self._todo or len(self.flying) >= self.credit:
            return None
        index, attempt = self._todo.popleft()
        trip = MicrobatchRoute(source=self.source, start=self.start, step=self.step, index=index, attempt=attempt)
        flight = Flight(trip=trip, path=(index + attempt) % paths, since=now)
        self.flying[index] = flight
        return flight

    def is_flying(self, trip: MicrobatchRoute) -> bool:
        flight = self.flying.get(trip.index)
        return flight is not None and flight.trip == trip

    def complete(self, trip: MicrobatchRoute) -> None:
        del self.flying[trip.index]
        self.completed += 1

    def lose(self, trip: MicrobatchRoute, reason: str) -> bool:
        """The trip ended early. Returns whether the microbatch gets another one, else it is dropped."""
        del self.flying[trip.index]
        if trip.attempt + 1 < self.attempts:
            self._todo.appendleft((trip.index, trip.attempt + 1))
            self.reissued += 1
            return True
        self.dropped[reason] += 1
        return False

    def overdue(self, now: float, patience_s: float) -> list[MicrobatchRoute]:
        return [flight.trip for flight in self.flying.values() if now >= flight.since + patience_s]

    def next_overdue(self, patience_s: float) -> float | None:
        """When the next trip is overdue."""
        return min((flight.since + patience_s for flight in self.flying.values()), default=None)

    def check(self) -> None:
        indices = [*(index for index, _ in self._todo), *self.flying]
        assert len(indices) == len(set(indices)), indices
        settled = self.completed + self.dropped.total()
        assert len(indices) + settled == self.microbatches, (indices, settled, self.microbatches)
        assert len(self.flying) <= self.credit
