"""Covers `coordinator/net/link_table.py`: what is measured of links, and which link is probed when."""

import math
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from stories import Scripted, StoryText, all_stories, check_story

from farloop.coordinator.net.link_table import (
    AGAIN_S,
    COORDINATOR,
    FIRST_BYTES,
    FRESH_S,
    MOST_LINKS,
    PROBES_AN_HOUR,
    BandwidthProbe,
    Candidate,
    Ends,
    LinkTable,
    Running,
    suspects,
)
from farloop.coordinator.settings import QUIET_S
from farloop.monitoring.status import LinkStatus
from farloop.wire.messages import Connection, Transfer
from farloop.wire.meter import Burst, Insufficient

UP, DOWN = ("oslo", COORDINATOR), (COORDINATOR, "oslo")
BUDGET, NOW = 32 << 20, QUIET_S + 1.0


def burst(bytes_per_s: float, seconds: float = 4.0) -> Burst:
    half = int(bytes_per_s * seconds / 2)
    return Burst(
        num_bytes=2 * half, seconds=seconds, half_bytes=half, half_s=seconds / 2, half_chunks=16,
        third_bytes_per_s=bytes_per_s, fourth_bytes_per_s=bytes_per_s,
    )  # fmt: skip


class Told(Scripted):
    """The round trip to oslo is known. `up` is the way from oslo to the coordinator, `down` the other; `from=rome`.

    burst up 1e6 10.0 probe=True          of 4 seconds, at 10 s, by a transfer where it is no probe
    transfer oslo bergen 9 0.5 10.0       bytes and seconds that a message took between two nodes, at 10 s
    connection up 25                      as many of 1000 segments are sent again
    rows 30.0 | changed up
    """

    def __init__(self) -> None:
        self.table = LinkTable()
        self.table.round_trips("oslo", COORDINATOR, [0.05, 0.04, 0.09])

    def burst(self, way: str, rate: float, now: float, *, probe: bool = False, seconds: float = 4.0) -> str | None:
        found = self.table.burst(self._ends(way), burst(rate, seconds), now, probe=probe)
        return found.why if isinstance(found, Insufficient) else None

    def transfer(self, source: str, target: str, num_bytes: int, seconds: float | str, now: float) -> None:
        self.table.transfer((source, target), Transfer(num_bytes=num_bytes, seconds=float(seconds)), now)

    def connection(self, way: str, retransmits: int, rtt_s: float | str = 0.1) -> None:
        told = Connection(rtt_s=float(rtt_s), least_rtt_s=0.1, retransmits=retransmits, segments=1000, congestion="bbr")
        self.table.connection(self._ends(way), told)

    def changed(self, way: str) -> bool:
        return self.table.changed(self._ends(way))

    def rows(self, now: float) -> str:
        """Of links of which more is known than the round trip."""
        known = (row for row in self.table.rows(now) if row["bytes_per_s"] or row["congestion"] or row["why"])
        return "\n".join(map(self._row, known)) or "none"

    def _row(self, row: LinkStatus) -> str:
        rate = (
            f"{row['bytes_per_s']:g} by {row['measured_by']}, {row['age_s']} s old" if row["bytes_per_s"] else "unknown"
        )
        trip = [f"rtt {row['rtt_s']}, usually {row['rtt_median_s']}"] if row["rtt_s"] is not None else []
        lost = [f"{row['retransmit_ratio']:g} sent again by {row['congestion']}"] if row["congestion"] else []
        why = [row["why"]] if row["why"] else []
        provenance = [row["provenance"]] if row["provenance"] else []
        return ", ".join([f"{row['from']} to {row['to']}: {rate}", *provenance, *trip, *lost, *why])

    def _ends(self, way: str) -> Ends:
        if way in ("up", "down"):
            return UP if way == "up" else DOWN
        return way, COORDINATOR


@all_stories(__file__, "rates")
def test_rates(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Told().told, rewrite=rewrite)


def test_links_of_forgotten_nodes_are_dropped_and_entries_are_bounded() -> None:
    table = LinkTable()
    for node in ("oslo", "bergen"):
        table.round_trips(node, COORDINATOR, [0.01])
        table.burst((node, COORDINATOR), burst(1e6), 0.0, probe=False)
    table.retain(["bergen"])
    assert {row["from"] for row in table.rows(0.0)} == {"bergen", COORDINATOR}
    for index in range(MOST_LINKS + 100):
        table.connection((f"n{index}", COORDINATOR), Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=0, segments=1))
    assert len(table._directions) == MOST_LINKS


@given(
    st.dictionaries(
        st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")).filter(lambda ends: ends[0] != ends[1]),
        st.floats(1e3, 1e10),
        max_size=12,
    )
)
def test_a_link_far_slower_than_the_way_round_is_suspect(rates: dict[tuple[str, str], float]) -> None:
    """As the entry of SkipPipe's published table that is a thousandth of its neighbours."""
    skip_pipe = {("nl", "uk"): 0.000237e9, ("nl", "be"): 0.2425e9, ("be", "uk"): 0.2e9, ("uk", "nl"): 0.1e9}
    assert suspects(skip_pipe) == {("nl", "uk")}
    for ends in set(rates) - suspects(rates):
        assert ends not in suspects({**rates, ends: 10 * rates[ends]}), "a higher rate is never more suspect"
    assert suspects({ends: 1e6 for ends in rates}) == set()
    apart = {(COORDINATOR, "rome"): 1e6, ("rome", COORDINATOR): 1.0}
    assert suspects({**rates, **apart}) == suspects(rates), "no other node has a link with it"


def candidate(
    node: str = "oslo", *, upward: bool = True, age_s: float = math.inf, changed: bool = False, rtt_s: float = 0.05
) -> Candidate:
    return Candidate(node=node, upward=upward, rtt_s=rtt_s, age_s=age_s, changed=changed)


def prober(budget: int = BUDGET, run_bytes: int = 1 << 50) -> BandwidthProbe:
    """By default the run has moved more than any probe costs."""
    made = BandwidthProbe(budget, 0.0)
    for node in ("oslo", "rome", "a", "b", "c"):
        made.has_moved(node, run_bytes, 0)
    return made


class Probing(Scripted):
    """The run has moved more than any probe costs. `a` is a link that was never measured, `a31` one of 31 s ago, in
    quiet seconds beyond those in which a rate is fresh; `a!` one that seems changed, `a~` one of 300 ms.

    next 7.0 a b31                    which is probed
    busy 5.0 | ends 20.0 learned=True
    moved oslo 3e6 | asked oslo | retain rome
    """

    def __init__(self, *, budget: int = BUDGET, run_bytes: int = 1 << 50) -> None:
        self.probe = prober(budget, run_bytes)
        self.running: Running | None = None

    def next(self, now: float, *words: str) -> str:
        found = []
        for word in words:
            node, age, mark = re.fullmatch("([a-z]+)(-?[0-9]*)([!~]?)", word).groups()  # type: ignore[union-attr]
            found.append(
                candidate(
                    node, age_s=FRESH_S + float(age) if age else 1.0 if mark == "!" else math.inf,
                    changed=mark == "!", rtt_s=0.3 if mark == "~" else 0.05,
                )
            )  # fmt: skip
        running = self.probe.next(found, QUIET_S + now)
        if running is None:
            return "none"
        self.running = running
        return (
            f"{self.running.node} by {self.running.num_bytes} bytes, at most {self.running.ends_by - QUIET_S - now:g} s"
        )

    def busy(self, now: float) -> None:
        self.probe.busy(QUIET_S + now)

    def quiet(self) -> bool:
        assert self.running is not None
        return self.running.quiet

    def ends(self, now: float, *, learned: bool = True) -> None:
        self.probe.finish(QUIET_S + now, learned=learned)

    def moved(self, node: str, num_bytes: int) -> None:
        self.probe.has_moved(node, num_bytes, 0)

    def asked(self, node: str) -> None:
        self.probe.asked.add((node, True))

    def still_asked(self) -> list[str]:
        return sorted(node for node, _ in self.probe.asked)

    def retain(self, node: str) -> None:
        self.probe.retain([node])


@all_stories(__file__, "probes")
def test_probes(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Probing(**story.settings).told, rewrite=rewrite)


def test_after_a_probe_without_a_result_the_pause_doubles() -> None:
    waits, at, probe = list[float](), NOW, prober(1 << 40)
    for _ in range(9):
        begun = at
        while (running := probe.next([candidate()], at)) is None:
            at += 1.0
        waits.append(at - begun)
        probe.finish(at, learned=False)
        probe.has_moved("oslo", 1 << 60, 0)
        probe._nodes["oslo"].spent.clear()
        assert running.ends_by > at
    assert waits[1:4] == [AGAIN_S[0], 2 * AGAIN_S[0], 4 * AGAIN_S[0]] and waits[-1] == AGAIN_S[1]


def test_an_hour_costs_a_node_no_more_than_its_budget() -> None:
    probe, begun = prober(), 0
    for second in range(3600):
        if probe.next([candidate(changed=True)], NOW + second) is not None:
            begun += 1
            probe.finish(NOW + second, learned=True)
    assert begun == PROBES_AN_HOUR


@given(
    steps=st.lists(st.tuples(st.integers(0, 40 << 20), st.booleans(), st.booleans()), max_size=60),
    budget=st.integers(1, BUDGET),
)
def test_probes_take_one_percent_of_the_runs_bytes_after_one_small_probe_of_each_direction(
    steps: list[tuple[int, bool, bool]], budget: int
) -> None:
    probe, now, moved, probed = BandwidthProbe(budget, 0.0), NOW, 0, 0
    for run_bytes, learned, cancelled in steps:
        now += 2 * AGAIN_S[1]
        moved += run_bytes
        probe.has_moved("oslo", run_bytes, 0)
        running = probe.next([candidate(upward=True), candidate(upward=False)], now)
        if running is None:
            continue
        if cancelled:
            probe.busy(now - QUIET_S)
        probed += round(1.01 * running.num_bytes)
        probe.has_moved("oslo", 0, round(1.01 * running.num_bytes))
        probe.finish(now, learned=learned)
        assert probed <= 0.01 * moved + 1.02 * 2 * FIRST_BYTES
