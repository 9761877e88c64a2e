"""What a node knows of the others: who can be reached, and how long a job would wait there. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from farloop.algo.layout import Layout
from farloop.node.pipeline.words import Trip, Word

Standing = Literal["unseen", "up", "down"]


@dataclass(slots=True)
class Peer:
    """One other node."""

    standing: Standing = "unseen"
    word: Word | None = None
    heard_at: float = 0.0
    sent: int = 0
    """Jobs sent to it since its last word."""


class Peers:
    """All others of the layout."""

    def __init__(self, names: Iterable[str]) -> None:
        self._peers = {name: Peer() for name in names}
        self._over: dict[str, tuple[int, int]] = {}
        """Of sources: start and number of the newest step that each has settled."""

    def meet(self, names: Iterable[str]) -> None:
        """Others that a new layout has."""
        for name in names:
            self._peers.setdefault(name, Peer())

    def set(self, name: str, standing: Standing) -> None:
        """It can, or cannot, be reached."""
        if name in self._peers:
            self._peers[name].standing = standing
            if standing == "down":
                self._peers[name].word = None

    def heard(self, name: str, word: Word, now: float) -> None:
        """Its load."""
        if name in self._peers:
            peer = self._peers[name]
            peer.word, peer.heard_at, peer.sent = word, now, 0
            self.settled(name, word.incarnation, word.over)

    def settled(self, name: str, start: int, step: int) -> None:
        """A source wants nothing of this step any more, nor of those before."""
        self._over[name] = max((start, step), self._over.get(name, (-1, -1)))

    def is_over(self, trip: Trip) -> bool:
        """Whether its source wants nothing of a trip any more, as far as it has said so here."""
        return (trip.start, trip.step) <= self._over.get(trip.source, (-1, -1))

    def sent(self, name: str) -> None:
        """One more job is on its way there."""
        if name in self._peers:
            self._peers[name].sent += 1

    def standing(self, name: str) -> Standing:
        """Of one that is not known: down."""
        return self._peers[name].standing if name in self._peers else "down"

    def is_up(self, name: str) -> bool:
        return self.standing(name) == "up"

    def ready(self, name: str) -> bool:
        """Whether it can be reached and has said that it has met its own peers."""
        peer = self._peers.get(name)
        return peer is not None and peer.standing == "up" and peer.word is not None and peer.word.ready

    def unseen(self, names: Iterable[str]) -> bool:
        """Whether one of them has not been met yet."""
        return any(self.standing(name) == "unseen" for name in names)

    def load(self, name: str, now: float) -> float | None:
        """Seconds until a job sent now would begin, as far as it is known; None where it cannot be reached."""
        peer = self._peers.get(name)
        if peer is None or peer.standing != "up":
            return None
        if peer.word is None:
            return 0.0
        jobs = peer.word.queued + peer.sent
        stands_still = peer.word.age_s + now - peer.heard_at if peer.word.queued else 0.0
        return jobs * peer.word.job_s + stands_still


def others(layout: Layout, name: str) -> tuple[str, ...]:
    """All nodes of a layout but this one, in order of their names."""
    return tuple(sorted({node for stage in layout.stages for node in stage.replicas} - {name}))
