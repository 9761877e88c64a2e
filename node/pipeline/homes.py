"""Whose steps a node follows: the sources whose planned paths pass through it. Pure.

A node takes its own step when each of them has ended one more of its own. A microbatch of their next step waits until
then; one of any other source, a guest that lost its way elsewhere, is served at once and counts for the step it falls
into. Steps are ordered by (incarnation of the source, step).
"""

from collections.abc import Callable

from farloop.algo.layout import Layout
from farloop.node.pipeline.words import Ended, Trip

Position = tuple[int, int]


class Homes:
    """Of one node."""

    def __init__(self, node: str, layout: Layout) -> None:
        self._node = node
        self.sources: tuple[str, ...] = ()
        self._everybody: tuple[str, ...] = ()
        """All sources of the layout."""
        self.ended: dict[str, Position] = {}
        """Newest step that each has ended."""
        self.used: dict[str, Position] = {}
        """... and the newest that this node's steps contain."""
        self.next_epoch: dict[str, int] = {}
        self.left: set[str] = set()
        """Sources that have said good-bye."""
        self._microbatches: dict[str, int] = {}
        self.follow(layout)

    def follow(self, layout: Layout) -> None:
        """Another layout."""
        passing = {path.source for path in layout.paths if any(hop.node == self._node for hop in path.hops)}
        self.sources = tuple(sorted(passing - {self._node}))
        self._everybody = tuple(sorted({path.source for path in layout.paths}))

    def admits(self, trip: Trip) -> bool:
        """Whether its work belongs to the present step. The first one of a source that is met sets the beginning."""
        if trip.source not in self.sources:
            return True
        used = self.used.get(trip.source)
        if used is None or trip.start > used[0]:
            self.used[trip.source] = used = (trip.start, trip.step - 1)
        return (trip.start, trip.step) <= (used[0], used[1] + 1)

    def heard(self, source: str, ended: Ended) -> None:
        """A source ended a step."""
        position = ended.start, ended.step
        self.used.setdefault(source, (ended.start, ended.step - 1))
        self.next_epoch[source] = ended.next_epoch
        if position > self.ended.get(source, (-1, -1)):
            self.ended[source] = position
            self._microbatches[source] = ended.microbatches

    def closes(self, epoch: int, is_down: Callable[[str], bool]) -> bool:
        """Whether the node's step is over: nobody is waited for who is away, or gone on to another layout."""
        followed = [source for source in self.sources if not is_down(source)]
        if not followed:  # nobody is left: it goes along with whoever sends it guests
            return any(self._has_ended(source) for source in self.ended)
        waited_for = [source for source in followed if not self._is_past(source, epoch)]
        news = [source for source in followed if self._has_ended(source)]
        return bool(news) and all(self._has_ended(source) for source in waited_for)

    def alone(self, is_down: Callable[[str], bool]) -> bool:
        """Whether all whom the node follows are away."""
        return bool(self.sources) and all(map(is_down, self.sources))

    @property
    def all_left(self) -> bool:
        """Whether nobody whom the node follows will send it anything more; of a spare node, nobody at all."""
        return set(self.sources or self._everybody) <= self.left

    def close(self) -> int:
        """The next step begins; the microbatches of the one that is over, of all followed sources."""
        news = [source for source in self.ended if self._has_ended(source)]
        followed = [source for source in news if source in self.sources] or news
        for source in news:
            self.used[source] = self.ended[source]
        return sum(self._microbatches[source] for source in followed)

    def all_past(self, epoch: int, is_down: Callable[[str], bool]) -> bool:
        """Whether everybody who is followed has left the layout of this epoch."""
        return all(self._is_past(source, epoch) for source in self.sources if not is_down(source))

    def _has_ended(self, source: str) -> bool:
        return self.ended.get(source, (-1, -1)) > self.used.get(source, (-1, -1))

    def _is_past(self, source: str, epoch: int) -> bool:
        """Its next step follows a newer layout, and all that it has ended is in this node's steps."""
        return self.next_epoch.get(source, epoch) > epoch and not self._has_ended(source)
