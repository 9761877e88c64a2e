"""Shared links as rates, and the places that they join."""

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from farloop.algo.schedule import steps_by_rate
from farloop.sim.flow.node import Coordinator, Delta, Node
from farloop.sim.flow.scenario import FailureTrace, Group, Setting, bytes_per_s
from farloop.sim.virtual_time import EventQueue

# --- Links: transfers share a link evenly; the slowest link of a path decides
#
# A transfer is through once every link on its way has carried all of it, each at an even share of its rate. That is
# exact where one link is the bottleneck of everything on it, and a little hopeful otherwise: what a transfer cannot use
# of one link because another holds it back is not handed to its neighbours, and a link ahead of a cut one goes on.
# Packets, windows and congestion are not simulated; loss and round trips come in as a rate and a delay.


Action = Callable[[], None]


class LinkLoad:
    """What one link has to carry of one transfer."""

    __slots__ = ("cancelled", "done", "finish")

    def __init__(self, finish: float, done: Action) -> None:
        self.finish, self.done, self.cancelled = finish, done, False


class SharedLink:
    """One direction of one link: n transfers get 1/n of its rate each.

    Fair queueing by virtual time: a clock that runs at rate/n counts the bytes that every transfer has got since the
    beginning, so that a transfer ends when the clock shows its start plus its size. Exact, and O(log n) an event.
    """

    def __init__(self, agenda: EventQueue, bytes_per_s: float) -> None:
        self._agenda, self._bytes_per_s = agenda, bytes_per_s
        self._virtual = 0.0
        self._seen_at = agenda.now
        self._queue: list[tuple[float, int, LinkLoad]] = []
        self._entered = itertools.count()
        self._busy = 0
        self._armed = 0
        self._cut = False

    def carry(self, size: int, done: Action) -> LinkLoad:
        self._advance()
        load = LinkLoad(self._virtual + size, done)
        heapq.heappush(self._queue, (load.finish, next(self._entered), load))
        self._busy += 1
        self._arm()
        return load

    def cancel(self, load: LinkLoad) -> float:
        """Give up; returns the bytes that were still to come."""
        self._advance()
        left = max(0.0, load.finish - self._virtual)
        if not load.cancelled and load.done is not _nothing:
            load.cancelled = True
            self._busy -= 1
            self._arm()
        return left

    def set_cut(self, *, now_cut: bool) -> None:
        """Nothing passes, until it does again."""
        self._advance()
        self._cut = now_cut
        self._arm()

    def _advance(self) -> None:
        now = self._agenda.now
        if self._busy and not self._cut:
            self._virtual += (now - self._seen_at) * self._bytes_per_s / self._busy
        self._seen_at = now

    def _arm(self) -> None:
        self._armed += 1
        while self._queue and self._queue[0][2].cancelled:
            heapq.heappop(self._queue)
        if not self._queue or self._cut:
            return
        left = max(0.0, self._queue[0][0] - self._virtual)
        armed = self._armed
        self._agenda.after(left * self._busy / self._bytes_per_s, lambda: self._fire(armed))

    def _fire(self, armed: int) -> None:
        if armed != self._armed:
            return
        self._seen_at = self._agenda.now
        self._virtual = max(self._virtual, self._queue[0][0])  # the clock itself would be off by a rounding
        through: list[Action] = []
        while self._queue and (self._queue[0][2].cancelled or self._queue[0][0] <= self._virtual):
            load = heapq.heappop(self._queue)[2]
            if not load.cancelled:
                self._busy -= 1
                through.append(load.done)
                load.done = _nothing
        self._arm()
        for done in through:
            done()


def _nothing() -> None:
    """Stands for what has been done."""


class Transfer:
    """Bytes on their way over several links. `carried` counts those that have left."""

    def __init__(self, pipes: Sequence[SharedLink], size: int, done: Action) -> None:
        """`done` comes as soon as the last link has carried everything, at once where there is none."""
        self.size = size
        self._done = done
        self._ahead = len(pipes)
        self._loads = [(pipe, pipe.carry(size, self._passed)) for pipe in pipes]

    def _passed(self) -> None:
        self._ahead -= 1
        if not self._ahead:
            self._done()

    def cancel(self) -> int:
        """Give up; returns the bytes that its first link had carried."""
        left = [pipe.cancel(load) for pipe, load in self._loads]
        self._done = _nothing
        return self.size - round(left[0]) if left else self.size


# --- Nodes and their links


@dataclass(slots=True, kw_only=True)
class FlowHost:
    node: Node
    group: Group
    up: list[SharedLink]  # its own first, then those that it shares
    down: list[SharedLink]
    cut: int = 0  # outages that hold now
    cuts: int = 0  # times that its link was cut
    silent: bool = False  # the coordinator has given it up for the time being
    life: int = 0
    crashes: int = 0
    uploads: dict[Delta, Transfer] = field(default_factory=dict)
    downloads: dict[int, tuple[Transfer, bool]] = field(default_factory=dict)
    """What is on its way to it, and whether that is state."""
    next_download: int = 0


def lay_out(setting: Setting, agenda: EventQueue, coordinator: Coordinator) -> list[FlowHost]:
    """All nodes of the setting, in its order, with their own links and those that they share."""

    def shared(up_gbit_s: float | None, down_gbit_s: float | None) -> tuple[list[SharedLink], list[SharedLink]]:
        limits = (up_gbit_s, down_gbit_s)
        up, down = ([SharedLink(agenda, bytes_per_s(rate))] if rate is not None else [] for rate in limits)
        return up, down

    scenario = setting.scenario
    hub_up, hub_down = shared(scenario.coordinator.up_gbit_s, scenario.coordinator.down_gbit_s)
    sites = {site.name: shared(site.up_gbit_s, site.down_gbit_s) for site in scenario.sites}
    groups = [group for group in setting.groups for _ in range(group.count)]
    fates = [FailureTrace(group, seed=setting.seed, index=index) for index, group in enumerate(groups)]
    fastest = min(fate.step_s for fate in fates)
    places = []
    for index, (group, fate) in enumerate(zip(groups, fates, strict=True)):
        rules = setting.rules
        h = max(rules.fragments, steps_by_rate(rules.h, fastest, fate.step_s)) if rules.per_node_h else rules.h
        node = Node(
            index=index, machines=group.machines, h=h, fate=fate, rules=rules, agenda=agenda, coordinator=coordinator
        )
        site_up, site_down = sites[group.site] if group.site else ([], [])
        may_be_cut = group.outages_per_hour > 0 or any(outage.group == group.name for outage in scenario.outages)
        own_up, own_down = (
            [SharedLink(agenda, group.bytes_per_s(rate))] if rate is not None or may_be_cut else []
            for rate in (group.up_gbit_s, group.down_gbit_s)
        )
        up, down = [*own_up, *site_up, *hub_up], [*own_down, *site_down, *hub_down]
        places.append(FlowHost(node=node, group=group, up=up, down=down))
    return places
