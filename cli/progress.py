"""Shows a run while it goes on: a live picture on a terminal, plain lines anywhere else.

Fed with statuses, as `/status` serves them. Time is the coordinator's own (`uptime_s`), so no clock is read here.
"""

import math
from collections import deque
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from farloop.cli.status_view import draw, fitting
from farloop.monitoring.status import NodeStatus, Status
from farloop.monitoring.status_summary import reduction
from farloop.monitoring.units import duration_text, factor_text, loss_text, percent_text, plural, size_text

LINE_EVERY_S = 10.0
"""Between two plain progress lines."""

PACE_WINDOW_S = 60.0
"""The time left is reckoned from the speed over this long."""

REFRESH_PER_S = 5


def progress_console(*, json: bool) -> Console:
    """Where progress belongs: standard error when standard output is for JSON, else standard output."""
    return Console(stderr=json, highlight=False)


class Display:
    """Shows the newest status. `update` never waits: a thread of rich's own repaints the picture.

    `link` is what the run's emulated or known link is called, if it is worth a word.
    """

    def __init__(self, console: Console, *, link: str = "") -> None:
        self._console = console
        self._link = link
        self._pace = Pace()
        self._shown: tuple[Status | None, float] = (None, math.inf)
        self._lines = PlainLines()
        self._live = self._start_live() if _can_paint(console) else None

    def update(self, status: Status) -> None:
        """Take in a new status."""
        eta_s = self._pace.update(status)
        self._shown = (status, eta_s)
        if self._live is None:
            for line in self._lines.update(status, eta_s):
                self._console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last picture standing and give the terminal back."""
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_live(self) -> Live:
        live = Live(console=self._console, get_renderable=self._picture, refresh_per_second=REFRESH_PER_S)
        live.start()
        return live

    def _picture(self) -> RenderableType:
        status, eta_s = self._shown
        width, height = self._console.size
        room = fitting(status, width=width, height=height)
        return draw(status, width=width, link=self._link, eta_s=eta_s, **room)


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
    """The same in lines for a log: one every ten seconds, and one for every score and every node that comes or goes."""

    def __init__(self) -> None:
        self._last_line_s = -math.inf
        self._evaluations = 0
        self._presence: dict[str, str] = {}
        self._alarms: list[str] = []
        self._run_state = ""

    def update(self, status: Status, eta_s: float) -> list[str]:
        """The lines that a new status is worth, oldest fact first."""
        clock = _clock_text(status["run"]["started_s"])
        facts = [*self._run_changes(status), *self._node_changes(status), *self._new_evaluations(status)]
        facts += [f"ALARM: {alarm}" for alarm in status["alarms"] if alarm not in self._alarms]
        self._alarms = list(status["alarms"])
        now = status["run"]["uptime_s"]
        if now < self._last_line_s or now - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now
            facts.append(_progress_line(status, eta_s))
        return [f"{clock}  {fact}" for fact in facts]

    def _run_changes(self, status: Status) -> list[str]:
        run = status["run"]
        if run["state"] == self._run_state:
            return []
        self._run_state = run["state"]
        codecs = f"{run['codec_up']} up, {run['codec_down']} down"
        return [f"run {run['name']} is {run['state']}: {run['method']}, {codecs}, H {run['h']}, {run['steps']:,} steps"]

    def _node_changes(self, status: Status) -> list[str]:
        before, self._presence = self._presence, {node["name"]: _presence(node) for node in status["nodes"]}
        changed = [node for node in status["nodes"] if before.get(node["name"]) != self._presence[node["name"]]]
        return [f"node {node['name']} {self._presence[node['name']]}" for node in changed]

    def _new_evaluations(self, status: Status) -> list[str]:
        evaluations = status["evaluations"]
        new, self._evaluations = evaluations[self._evaluations :], len(evaluations)
        return [
            f"validation loss {loss_text(evaluation['loss'])} at step {evaluation['position']:,.0f}"
            f" (first {loss_text(evaluations[0]['loss'])})"
            for evaluation in new
        ]


def _presence(node: NodeStatus) -> str:
    """Where a node stands, coarsely: training, waiting and evaluating alternate every round and are not news."""
    if not node["connected"]:
        return f"is away: {node['reason']}" if node["reason"] else "is away"
    if node["state"] in ("joining", "paused", "draining", "finished"):
        return f"is {node['state']}"
    return f"takes part ({node['device']})" if node["device"] else "takes part"


def _progress_line(status: Status, eta_s: float) -> str:
    nodes = status["nodes"]
    live = [node for node in nodes if node["connected"]]
    losses = [node["loss"] for node in live if node["loss"] is not None]
    up, down = sum(node["bytes_up"] for node in nodes), sum(node["bytes_down"] for node in nodes)
    steps = status["run"]["steps"]
    position = min(status["position"], steps)
    parts = [f"step {position:,.0f}/{steps:,} ({percent_text(position / steps)})"]
    parts += [f"loss {loss_text(sum(losses) / len(losses))}"] if losses else []
    parts += [f"{plural(len(live), 'node')}", f"{size_text(up)} up", f"{size_text(down)} down"]
    parts += [f"{factor_text(reduction(status))} less than fp32 data parallel"] if reduction(status) > 0 else []
    parts += [f"{duration_text(eta_s)} left"] if math.isfinite(eta_s) and status["run"]["state"] == "training" else []
    return ", ".join(parts)


def _clock_text(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _can_paint(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and console.encoding.startswith("utf")
