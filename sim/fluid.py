"""Transfers that share links fairly: fluids in pipes, event by event, no packets.

Every transfer runs at the rate that max-min fairness gives it over all the links it crosses; whenever one begins or
ends, all rates are dealt anew. What is left out: slow start, loss, and that long paths get less of a shared link.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """A transfer."""

    name: str
    num_bytes: float
    links: tuple[str, ...]
    """It crosses all of them at once."""
    latency_s: float = 0.0
    """From its last byte sent to its last byte there."""
    after: tuple[str, ...] = ()
    """Flows that must have arrived before it begins."""


def play(flows: Sequence[Flow], bytes_per_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds until each flow has arrived.

    Raises:
        ValueError: a flow waits for one that does not exist, or for itself.
    """
    waits = {flow.name: set(flow.after) for flow in flows}
    by_name = {flow.name: flow for flow in flows}
    left = {flow.name: flow.num_bytes for flow in flows}
    running: set[str] = {name for name, others in waits.items() if not others}
    arriving: list[tuple[float, str]] = []
    arrived: dict[str, float] = {}
    now = 0.0
    while running or arriving:
        rates = fair_rates({name: by_name[name].links for name in sorted(running)}, bytes_per_s)
        ends = min((now + left[name] / rates[name] for name in running), default=math.inf)
        until = min(ends, arriving[0][0] if arriving else math.inf)
        for name in sorted(running):
            left[name] -= rates[name] * (until - now)
            if left[name] <= 1e-6 * by_name[name].num_bytes + 1e-12:
                running.discard(name)
                heapq.heappush(arriving, (until + by_name[name].latency_s, name))
        now = until
        while arriving and arriving[0][0] <= now:
            _, done = heapq.heappop(arriving)
            arrived[done] = now
            for name, others in waits.items():
                if done in others:
                    others.discard(done)
                    if not others:
                        running.add(name)
    if len(arrived) < len(flows):
        raise ValueError(f"{len(flows) - len(arrived)} flows wait for what never arrives")
    return arrived


def fair_rates(links: Mapping[str, tuple[str, ...]], bytes_per_s: Mapping[str, float]) -> dict[str, float]:
    """Max-min fair rates by progressive filling: the most crowded link is shared out first, then what is left."""
    free = dict(bytes_per_s)
    open_flows = dict(links)
    rates: dict[str, float] = {}
    while open_flows:
        users: dict[str, int] = {}
        for crossed in open_flows.values():
            for link in crossed:
                users[link] = users.get(link, 0) + 1
        share, narrow = min((free[link] / count, link) for link, count in users.items())
        for name in [name for name, crossed in open_flows.items() if narrow in crossed]:
            rates[name] = share
            for link in open_flows.pop(name):
                free[link] = max(0.0, free[link] - share)
    return rates
