"""Progress of a run: a live view on a terminal, plain lines anywhere else.

Time is the coordinator's own (`uptime_s`), so no clock is read here.
"""

import math
from collections import deque
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from farloop.cli.status_view import draw, fitting
from farloop.monitoring.status import NodeStatus, Status
from farloop.monitoring.status_summary import RunView, view_of
from farloop.monitoring.units import duration_text, loss_text, plural

LINE_EVERY_S = 10.0  # between two plain progress lines
PACE_WINDOW_S = 60.0  # the time left is reckoned from the speed over this long

REFRESH_PER_S = 5


def progress_console(*, json: bool) -> Console:
    """Where progress belongs: standard error when standard output is for JSON, else standard output."""
    return Console(stderr=json, highlight=False)


class Display:
    """Shows the newest status; a thread of rich's own repaints the view. `link` describes the run's emulated link."""

    def __init__(self, console: Console, *, link: str = "") -> None:
        self._console = console
        self._link = link
        self._pace = Pace()
        self._shown: tuple[RunView | None, float] = (None, math.inf)
        self._lines = PlainLines()
        self._waits_for = ""
        self._live: Live | None = None
        if console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf"):
            self._live = Live(console=console, get_renderable=self._picture, refresh_per_second=REFRESH_PER_S)
            self._live.start()

    def update(self, status: Status, *, last: bool = False) -> None:
        """Take in a new status. The last one of a run is a line in any case."""
        view, eta_s = view_of(status), self._pace.update(status)
        self._shown, self._waits_for = (view, eta_s), ""
        if self._live is None:
            for line in self._lines.update(view, eta_s, last=last):
                self._console.print(line, markup=False, soft_wrap=True)

    def wait(self, why: str) -> None:
        """Nothing new is known, and why: said once, and beside the last status until there is a new one."""
        if self._live is None and not self._waits_for:
            self._console.print(why, markup=False, soft_wrap=True)
        self._waits_for = why

    def close(self) -> None:
        """Leave the last picture standing and give the terminal back."""
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _picture(self) -> RenderableType:
        view, eta_s = self._shown
        width, height = self._console.size
        room = fitting(view, width=width, height=height - bool(self._waits_for))
        drawn = draw(view, width=width, link=self._link, eta_s=eta_s, **room)
        return Group(Text(self._waits_for, "bold yellow"), drawn) if self._waits_for else drawn


class Pace:
    """How long the run will still take, from how fast it was lately."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def update(self, status: Status) -> float:
        """Seconds left; infinite while the speed is unknown."""
        now, position = status["run"]["uptime_s"], status["position"]
        if self._points and now < self._points[-1][0]:
            self._points.clear()  # another coordinator process: its time starts anew
        self._points.append((now, position))
        while len(self._points) > 2 and self._points[1][0] <= now - PACE_WINDOW_S:
            self._points.popleft()
        then, before = self._points[0]
        if position <= before:
            return math.inf
        return max(status["run"]["steps"] - position, 0.0) * (now - then) / (position - before)


class PlainLines:
    """Progress as lines of a log: one every ten seconds, and one per evaluation, alarm, and change of a node."""

    def __init__(self) -> None:
        self._last_line_s = -math.inf
        self._evaluations = 0
        self._presence: dict[str, str] = {}
        self._alarms: list[str] = []
        self._run_state = ""

    def update(self, view: RunView, eta_s: float, *, last: bool = False) -> list[str]:
        """The lines for a new status."""
        run = view.status["run"]
        facts = list[str]()
        if view.state != self._run_state:
            self._run_state = view.state
            facts.append(f"run {view.name} is {view.state}: {', '.join(view.facts)}, {view.steps:,} steps")
        before, self._presence = self._presence, {node.name: _presence(node.status) for node in view.nodes}
        facts += [f"node {name} {what}" for name, what in self._presence.items() if before.get(name) != what]
        facts += self._new_evaluations(view)
        facts += [f"ALARM: {alarm}" for alarm in view.alarms if alarm not in self._alarms]
        self._alarms = list(view.alarms)
        now = run["uptime_s"]
        if last or now < self._last_line_s or now - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now
            facts.append(_progress_line(view, eta_s))
        seconds = int(run["started_s"])
        clock = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        return [f"{clock}  {fact}" for fact in facts]

    def _new_evaluations(self, view: RunView) -> list[str]:
        scores = view.status["evaluations"]
        new, self._evaluations = scores[self._evaluations :], len(scores)
        return [
            f"validation loss {loss_text(score['loss'])} at step {score['position']:,.0f}"
            + (f" (first {loss_text(first['loss'])} at step {first['position']:,.0f})" if score is not first else "")
            for first in scores[:1]
            for score in new
        ]


def _presence(node: NodeStatus) -> str:
    """A node's state, coarsely: training and waiting alternate every round and are not reported."""
    if not node["connected"]:
        return f"is away: {node['reason']}" if node["reason"] else "is away"
    if node["state"] in ("joining", "draining", "finished"):
        return f"is {node['state']}"
    return f"takes part ({node['device']})" if node["device"] else "takes part"


def _progress_line(view: RunView, eta_s: float) -> str:
    parts = [f"step {view.position:,.0f}/{view.steps:,} ({view.done})"]
    parts += [f"loss {loss_text(view.training_loss)}"] if view.training_loss is not None else []
    parts += [plural(view.live, "node"), f"{view.up} up", f"{view.down} down"]
    parts += [f"{view.fewer} less than fp32 data parallel"] if view.fewer else []
    parts += [f"{duration_text(eta_s)} left"] if math.isfinite(eta_s) and view.state == "training" else []
    return ", ".join(parts)
