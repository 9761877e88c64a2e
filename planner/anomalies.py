"""Hanging nodes, slow nodes and slow links, detected from sync times (C4, arXiv 2406.04594).

Bulk-synchronous work is periodic and uniform, so a node that differs from its predicted times indicates a fault. All
durations are differences of one clock, divided by the prediction so that nodes with different H and bits are
comparable. At least four nodes are needed.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

LEAST_NODES = 4

Z_LIMIT = 3.5
Z_SCALE = 0.6745
"""Makes the median absolute deviation that of a normal distribution (Iglewicz and Hoaglin 1993, as is 3.5)."""

LEAST_DEVIATION = 0.04  # least deviation of the logarithms, about 4 %: smaller differences flag no node
ROUNDS, OF_ROUNDS = 3, 5  # a node is slow when that many of its last rounds were flagged
LEAST_EXCESS = 0.1  # least excess, as a share of the round's time
LIMIT_LOG2 = 0.7  # a row, column or cell of the delays that is slower by 2^0.7 = 1.6 is flagged
CELL_Z = 5.0  # a single cell has no median; it must also exceed the noise of all


class Kind(StrEnum):
    DEAD = "dead"
    NODE_HANG = "node hang"
    LINK_HANG = "link hang"
    NODE_SLOW = "node slow"
    LINK_SLOW = "link slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    last_done: int  # sequence number of the last sync that it completed; −1 before the first
    entered: bool  # it said that its compute is done
    heard: bool  # its heartbeats go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What a node's steps, or its transfers, took in a round, and what was predicted."""

    taken_s: float
    expected_s: float  # 0 for none
    spread: float = 0.0
    """Median absolute deviation of the logarithms of its own rounds: a node that varies must stray further."""


Samples = Mapping[Kind, Sample]
"""Of one round of a node: its steps under `NODE_SLOW`, its transfers under `LINK_SLOW`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    kind: Kind
    node: str
    reason: str
    factor: float = math.inf  # how many times slower than expected


def hung(progress: Mapping[str, Progress]) -> Finding | None:
    """The culprit of a sync past its deadline: the node that completed the least; the others wait for it.

    Of several: a dead node, then a hanging node, then a hanging link; then by name.
    """
    if not progress:
        return None
    least = min(one.last_done for one in progress.values())

    def kind_of(one: Progress) -> Kind:
        return Kind.DEAD if not one.heard else Kind.LINK_HANG if one.entered else Kind.NODE_HANG

    order = {
        Kind.DEAD: "its heartbeats have stopped",
        Kind.NODE_HANG: "it is alive and did not finish its steps",
        Kind.LINK_HANG: "it began to send and nothing whole arrived",
    }
    behind = ((kind_of(one), name) for name, one in progress.items() if one.last_done == least)
    kind, node = min(behind, key=lambda found: (list(order).index(found[0]), found[1]))
    reason = f"sync {least + 1} is past its deadline and {node} is behind: {order[kind]}"
    return Finding(kind=kind, node=node, reason=reason)


def deadline_s(history_s: Sequence[float], slack_s: float) -> float:
    """When a sync counts as hanging: max(3·median, 99th percentile) + slack."""
    ordered = sorted(history_s)
    return max(3.0 * statistics.median(ordered), ordered[max(0, math.ceil(0.99 * len(ordered)) - 1)]) + slack_s


def slow(rounds: Sequence[Mapping[str, Samples]]) -> tuple[Finding, ...]:
    """Nodes and links that were flagged in ROUNDS of the last OF_ROUNDS rounds, the newest last; by name."""
    last = rounds[-OF_ROUNDS:]
    flags: dict[tuple[Kind, str], list[float]] = {}
    for samples in last:
        if len(samples) < LEAST_NODES:
            continue
        whole = statistics.median(sum(part.taken_s for part in one.values()) for one in samples.values())
        for kind in (Kind.NODE_SLOW, Kind.LINK_SLOW):
            parts = {name: one[kind] for name, one in samples.items()}
            for name, factor in _outliers(parts, LEAST_EXCESS * whole).items():
                flags.setdefault((kind, name), []).append(factor)
    found = []
    for (kind, name), factors in sorted(flags.items(), key=lambda item: (item[0][1], item[0][0])):
        if len(factors) >= ROUNDS:
            factor = statistics.median(factors)
            what = "computes" if kind is Kind.NODE_SLOW else "sends"
            found.append(
                Finding(
                    kind=kind, node=name, factor=factor,
                    reason=f"{name} {what} {factor:.1f} times as long as predicted, "
                    f"in {len(factors)} of the last {len(last)} rounds",
                )
            )  # fmt: skip
    return tuple(found)


def _outliers(samples: Mapping[str, Sample], least_excess_s: float) -> dict[str, float]:
    """Factors of outliers: robust z of log(taken/expected) above the limit, and an excess."""
    logs = {
        name: math.log(max(one.taken_s, 1e-9) / one.expected_s) for name, one in samples.items() if one.expected_s > 0.0
    }
    if len(logs) < LEAST_NODES:
        return {}
    middle = statistics.median(logs.values())
    spread = max(LEAST_DEVIATION, statistics.median(abs(log - middle) for log in logs.values()))
    return {
        name: math.exp(log)
        for name, log in logs.items()
        if Z_SCALE * (log - middle) / max(spread, samples[name].spread) > Z_LIMIT
        and samples[name].taken_s - samples[name].expected_s > least_excess_s
    }


class Place(StrEnum):
    SEND = "send side"
    RECEIVE = "receive side"
    HOST = "card or host"
    PATH = "path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """A slow part of the matrix: of a path both ends, else only `source` or `target`."""

    place: Place
    source: int | None
    target: int | None
    factor: float


def localise(delay_s: Mapping[tuple[int, int], float]) -> tuple[Slow, ...]:
    """What is slow in a matrix of delays per byte, by (sender, receiver), of those that were measured. L =
    log₂(M/median): a row whose median is above the limit is its sender, a column its receiver, both the host; a cell
    that neither explains is its path."""
    cells = {(u, v): value for (u, v), value in delay_s.items() if u != v and value}
    if len(cells) < LEAST_NODES:
        return ()
    middle = statistics.median(cells.values())
    logs = {cell: math.log2(value / middle) for cell, value in cells.items()}
    spread = statistics.median(abs(log) for log in logs.values()) / Z_SCALE
    sent, received = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for (u, v), log in logs.items():
        sent[u].append(log)
        received[v].append(log)
    rows = {u: statistics.median(of_one) for u, of_one in sent.items()}
    columns = {v: statistics.median(of_one) for v, of_one in received.items()}
    senders = {u for u, log in rows.items() if log > LIMIT_LOG2}
    receivers = {v for v, log in columns.items() if log > LIMIT_LOG2}
    found = [
        Slow(place=Place.HOST, source=u, target=u, factor=2.0 ** max(rows[u], columns[u])) for u in senders & receivers
    ]
    found += [Slow(place=Place.SEND, source=u, target=None, factor=2.0 ** rows[u]) for u in senders - receivers]
    found += [Slow(place=Place.RECEIVE, source=None, target=v, factor=2.0 ** columns[v]) for v in receivers - senders]
    found += [
        Slow(place=Place.PATH, source=u, target=v, factor=2.0**log)
        for (u, v), log in logs.items()
        if u not in senders and v not in receivers and log > max(LIMIT_LOG2, CELL_Z * spread)
    ]
    order = list(Place)
    return tuple(sorted(found, key=lambda one: (order.index(one.place), one.source or 0, one.target or 0)))


UNREACHABLE_S = 1e6  # stands for no link in sums and differences: eleven days, more than any plan takes

SUSPECT_FACTOR = 3.0
"""A link that is slower by this factor than a way over a third node is not believed (one published table has a link
that is 1024 times slower than its neighbours, a slip of units)."""


def suspects(seconds: Sequence[Sequence[float]]) -> tuple[tuple[int, int], ...]:
    """Links that take more than SUSPECT_FACTOR times the best way over a third node, in order."""
    direct: NDArray[np.float64] = np.array(seconds, dtype=np.float64).reshape(len(seconds), len(seconds))
    over = direct.copy()
    np.fill_diagonal(over, np.inf)
    found: list[tuple[int, int]] = []
    for u, row in enumerate(over):
        around = (row[:, None] + over).min(axis=0)  # [to]
        slow = (row < UNREACHABLE_S) & (row > SUSPECT_FACTOR * around)
        found += [(u, int(v)) for v in np.flatnonzero(slow)]
    return tuple(found)


class Action(StrEnum):
    """Mitigations, the mildest first."""

    REPROBE = "re-probe the link"
    LIGHTEN = "fewer bits or a longer H"
    REROUTE = "another way"
    DROP = "leave it out of the round"
    EVICT = "let it go"


EVICT_AFTER = 3  # rounds without the node before it is evicted


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    action: Action
    reason: str


def next_step(finding: Finding, taken: Sequence[Action], *, another_way: bool = False) -> Step:
    """The next mitigation after those taken for the same fault.

    A dead or hanging node is left out at once; a slow node has no link to probe; rerouting needs another way.
    """
    match finding.kind:
        case Kind.DEAD | Kind.NODE_HANG:
            ladder = [Action.DROP]
        case Kind.LINK_HANG:
            ladder = [Action.REPROBE, *([Action.REROUTE] if another_way else []), Action.DROP]
        case Kind.NODE_SLOW:
            ladder = [Action.LIGHTEN, Action.DROP]
        case _:
            ladder = [Action.REPROBE, Action.LIGHTEN, *([Action.REROUTE] if another_way else []), Action.DROP]
    dropped = sum(action is Action.DROP for action in taken)
    if dropped >= EVICT_AFTER:
        return Step(action=Action.EVICT, reason=f"{finding.reason}; it was left out of {dropped} rounds before")
    action = next((rung for rung in ladder if rung not in taken), Action.DROP)
    before = f"; tried before: {', '.join(taken)}" if taken else ""
    return Step(action=action, reason=f"{finding.reason}{before}")
