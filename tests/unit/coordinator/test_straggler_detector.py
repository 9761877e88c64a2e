"""Times of rounds against the node's own earlier rounds, and where links became slow."""

import dataclasses
import random
from pathlib import Path

from stories import Scripted, StoryText, all_stories, check_story

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.net.link_table import COORDINATOR, Ends, LinkTable
from farloop.coordinator.observe.straggler_monitor import RoundTimes, SlowLinks
from farloop.planner.anomalies import Kind, Samples, slow
from farloop.wire.meter import Burst

A = NodeId("a")


def delta(seq: int, fragment: int = 0) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=fragment, version=seq, node=A, incarnation=1, seq=seq)


class Paced(Scripted):
    """Node a. A round is of ten steps and a thousand bytes, ten seconds from the round before.

    rounds 8 | rounds 8 byte_s=0.008 strays=True      how long the last took, of how long was expected
    asked 1 600 0.0 | asked 2 400 1.0 fragment=1      a delta of so many bytes, at 0 s; it is whole, at 3 s
    whole 1 3.0 | broken | closed
    reported 7.0 10 10.0                              seconds blocked, steps, at 10 s
    forget | starts 2 | pace
    """

    def __init__(self) -> None:
        self.times, self.number = RoundTimes(), 0
        self.starts(1)

    def starts(self, incarnation: int) -> None:
        self.times.retain({A: incarnation} if incarnation else {})

    def rounds(self, count: int, *, byte_s: float = 0.001, strays: bool = False) -> str:
        for number in range(self.number, self.number + count):
            begin = 10.0 * number
            self.reported(begin, 10 * number, 2 * begin)
            self.reported(begin, 10 * number + 10, 2 * begin + 5.0)
            self.asked(number, 1000, begin)
            self.whole(number, begin + 1000 * byte_s)
            told = self.closed(strays=strays)
        self.number += count
        return told

    def reported(self, blocked_s: float, steps: int, now: float, *, trains: bool = True) -> None:
        self.times.reported(A, blocked_s, steps, now, trains=trains)

    def asked(self, seq: int, num_bytes: int, now: float, *, fragment: int = 0) -> None:
        self.times.asked(delta(seq, fragment), num_bytes, now)

    def whole(self, seq: int, now: float, *, fragment: int = 0) -> None:
        self.times.whole(delta(seq, fragment), now)

    def broken(self) -> None:
        self.times.broken(A)

    def closed(self, *, strays: bool = False) -> str:
        found = self.times.close([(Kind.LINK_SLOW, A)] if strays else []).get(A, {})
        told = [f"{kind.name} {part.taken_s:g} of {part.expected_s:g}" for kind, part in found.items()]
        return ", ".join(told) or "none"

    def forget(self) -> None:
        self.times.forget(Kind.LINK_SLOW, A)

    def pace(self) -> str:
        return f"{self.times.paces()[A].bytes_per_s:g} bytes a second" if A in self.times.paces() else "unknown"


@all_stories(__file__, "paces")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Paced().told, rewrite=rewrite)


def test_no_alarm_in_a_thousand_rounds_that_vary_by_a_fifth() -> None:
    """Four nodes, five runs: fewer than one false alarm in a thousand rounds."""
    nodes = [NodeId(name) for name in "abcd"]
    for seed in range(5):
        rand, pacing, rounds = random.Random(seed), RoundTimes(), list[dict[str, Samples]]()
        pacing.retain(dict.fromkeys(nodes, 1))
        for number in range(200):
            now = 100.0 * number
            for node in nodes:
                blob = dataclasses.replace(delta(number), node=node)
                compute_s, transfer_s = (mean * rand.lognormvariate(0.0, 0.2) for mean in (10.0, 5.0))
                pacing.reported(node, 0.0, 0, now, trains=False)
                pacing.reported(node, 0.0, 10 * number, now)
                pacing.reported(node, 0.0, 10 * number + 10, now + compute_s)
                pacing.asked(blob, 1000, now + compute_s)
                pacing.whole(blob, now + compute_s + transfer_s)
            rounds.append(pacing.close([]))
            assert slow(rounds[-5:]) == ()
        assert all(part.expected_s for one in rounds[-1].values() for part in one.values())


# --- Slow links

RATES = {"a": 1e6, "b": 2e6, "c": 8e6, "d": 0.5e6}
"""Unequal from the beginning: that is no reason to call any of them slow."""
PLACES = [*RATES, COORDINATOR]


def measured(slow: dict[Ends, float]) -> LinkTable:
    table = LinkTable()
    for node, usual in RATES.items():
        table.round_trips(node, COORDINATOR, [0.01])
        for ends in ((node, COORDINATOR), (COORDINATOR, node)):
            rate = usual / slow.get(ends, 1.0)
            burst = Burst(
                num_bytes=int(4 * rate), seconds=4.0, half_bytes=int(2 * rate), half_s=2.0, half_chunks=20,
                third_bytes_per_s=rate, fourth_bytes_per_s=rate,
            )  # fmt: skip
            table.burst(ends, burst, 1.0, probe=True)
    return table


class Slowed(Scripted):
    """`rounds 9 c-up=8.0 c-down=8.0`: in nine rounds these ways are 8 times as slow as usual; where that is told."""

    def __init__(self) -> None:
        self.known = SlowLinks()

    def rounds(self, count: int, **slow: float) -> list[str]:
        ways = {(way.split("-")[0], COORDINATOR) if way.endswith("up") else (COORDINATOR, way.split("-")[0]): factor
                for way, factor in slow.items()}  # fmt: skip
        for _ in range(count):
            self.known.on_round_end(measured(ways), list(RATES))
        return [f"{place}: {told}" for place in PLACES if (told := self.known.of(place))]


@all_stories(__file__, "slow_links")
def test_slow_links(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Slowed().told, rewrite=rewrite)
