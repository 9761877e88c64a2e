"""Results of a flow case: machine-seconds by use, merged deltas, bytes sent, in the daemons' terms."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

State = Literal["compute", "idle", "down", "absent"]
"""What a machine does: computes; is up and waits; is broken, or being brought back; has not come yet, or has left."""


class Merge(NamedTuple):
    at_s: float
    fragment: int
    version: int
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One case from its beginning to its end. Seconds are machine-seconds unless said otherwise."""

    seconds: float  # of the clock
    reached: bool  # the wanted number of steps was made, at `seconds`
    outer_steps: int
    commits: int  # windows committed, of all fragments
    merged: int  # deltas merged
    stale: int = 0  # of them, those that came too late for the window they were meant for
    dropped: int = 0  # deltas that were sent, and that nothing was made of
    skipped: int = 0  # sends left out because the one before was not decided yet; the next covers both
    inner_steps: int  # of all nodes
    lost_steps: float  # of them, those that no commit contains; a fragment's steps count as its share of the model
    bytes_up: int
    bytes_down: int
    bytes_state: int  # snapshots and catch-up
    compute_s: float
    idle_s: float
    down_s: float
    useful_s: float  # of `compute_s`, what ended in a merged delta
    crashes: int
    timeline: tuple[tuple[float, float], ...] = ()
    """(clock second, machines that compute from then on), if it was asked for."""
    windows: tuple["Merge", ...] = ()  # every commit, in order, if it was asked for and there are such

    @property
    def machine_s(self) -> float:
        """All that there was: a machine that has not come yet, or has left, does not count."""
        return self.compute_s + self.idle_s + self.down_s

    @property
    def goodput(self) -> float:
        """Share of all machine-seconds that ended in a merged delta."""
        return self.useful_s / self.machine_s if self.machine_s else 0.0

    @property
    def lost_s(self) -> float:
        """Computed for nothing."""
        return max(0.0, self.compute_s - self.useful_s)

    @property
    def stale_share(self) -> float:
        return self.stale / self.merged if self.merged else 0.0

    def share(self, seconds: float) -> float:
        return seconds / self.machine_s if self.machine_s else 0.0

    @property
    def compute_share(self) -> float:
        """Of the machine-seconds that were up: the nodes' own figure."""
        up = self.compute_s + self.idle_s
        return self.compute_s / up if up else 0.0

    def metrics(self) -> dict[str, float | dict[str, float]]:
        """What the daemons count too, under their names, summed over the nodes (the ratio: over their seconds)."""
        return {
            "farloop_round": self.outer_steps,
            "farloop_commits": self.commits,
            "farloop_merged_deltas": self.merged,
            "farloop_dropped_deltas": self.dropped,
            "farloop_node_inner_steps": self.inner_steps,
            "farloop_node_lost_steps": self.lost_steps,
            "farloop_node_blocked_seconds": self.idle_s,
            "farloop_node_compute_share_ratio": self.compute_share,
            "farloop_node_bytes": {"up": self.bytes_up, "down": self.bytes_down, "state": self.bytes_state},
        }


class Clock:
    """Where one node's machine-seconds go."""

    __slots__ = ("_machines", "_since", "missing", "spans", "state")

    def __init__(self, machines: int, state: State) -> None:
        self._machines, self._since = machines, 0.0
        self.missing = 0  # machines of the node that are broken while it goes on without them
        self.state: State = state
        self.spans: dict[State, float] = {"compute": 0.0, "idle": 0.0, "down": 0.0, "absent": 0.0}

    @property
    def working(self) -> int:
        return self._machines - self.missing if self.state == "compute" else 0

    def account(self, now: float) -> None:
        passed, self._since = now - self._since, now
        if self.state in ("absent", "down"):
            self.spans[self.state] += passed * self._machines
        else:
            self.spans[self.state] += passed * (self._machines - self.missing)
            self.spans["down"] += passed * self.missing

    def turn(self, state: State, now: float) -> None:
        self.account(now)
        self.state = state

    def miss(self, count: int, now: float) -> None:
        """So many machines more, or fewer, are broken."""
        self.account(now)
        self.missing = min(self._machines, self.missing + count)
