"""The status page of a run at `/`: a function from a status to one HTML document.

The page works without scripts. Its script fetches the page again every two seconds and replaces the parts marked
`data-live`. It loads nothing from elsewhere, and its content security policy allows only its own style and script:
most of what it shows, nodes say about themselves.
"""

import base64
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template

from farloop.monitoring import units
from farloop.monitoring.status import Status
from farloop.monitoring.status_summary import RunView, cleaned, validation_text, view_of

MOST_NODES = 200
MOST_WINDOWS = 128  # the rest is counted; `/status` has all of them
RELOAD_S = 5  # reload interval of a browser without scripts

_FILTERS: tuple[Callable[..., str], ...] = (
    units.count_text, units.duration_text, units.factor_text, units.loss_text, units.percent_text, units.plural,
    units.size_text, validation_text,
)  # fmt: skip


@lru_cache
def template(package: str, name: str) -> Template:
    """A template of a package, with texts escaped and the functions of `units` as filters."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update({function.__name__: function for function in _FILTERS})
    return environment.from_string(files(package).joinpath(name).read_text(encoding="utf-8"))


TYPE = "text/html; charset=utf-8"


@lru_cache
def _inline(kind: str) -> str:
    return files("farloop.monitoring").joinpath(f"page.{kind}").read_text(encoding="utf-8")


def policy() -> str:
    """The content security policy: the page runs its own script and style alone."""
    script, style = (base64.b64encode(hashlib.sha256(_inline(k).encode()).digest()).decode() for k in ("js", "css"))
    return (
        f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def headers() -> tuple[tuple[str, str], ...]:
    return ("Content-Security-Policy", policy()), ("Referrer-Policy", "no-referrer")


def page(status: Status | None) -> str:
    """The whole document; None before the coordinator has a status."""
    view = None if status is None else view_of(cleaned(status))
    return template("farloop.monitoring", "page.html").render(
        view=view,
        curve=view and curve_of(view),
        style=_inline("css"),
        script=_inline("js"),
        reload_s=RELOAD_S,
        most_nodes=MOST_NODES,
        most_windows=MOST_WINDOWS,
    )


# --- the curve of the validation loss

WIDTH, HEIGHT = 720, 180
LEFT, RIGHT, TOP, BOTTOM = 34, 10, 10, 24  # margins, for the numbers at the axes
MOST_POINTS = 400  # points of a curve; longer ones are thinned out
Point = tuple[float, float | None]  # a step and a loss; None breaks the line


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Loss over steps, in the units of an SVG of `WIDTH` by `HEIGHT`."""

    path: str
    tip: tuple[float, float]
    rules: tuple[tuple[float, str], ...]  # heights of the grid lines, with their numbers
    steps: tuple[tuple[float, str, str], ...]
    """Places below the axis, with their numbers and where the text is anchored."""
    label: str  # the same in words


def curve_of(view: RunView) -> Curve | None:
    points = [(score["position"], score["loss"]) for score in view.status["evaluations"]]
    return curve(points, last_step=max(view.steps, *(step for step, _ in points), 1))


def curve(points: Sequence[Point], *, last_step: float) -> Curve | None:
    """Loss over steps, from 0 to `last_step`; None for fewer than two losses."""
    scored = [(step, loss) for step, loss in points if loss is not None]
    if len(scored) < 2 or last_step <= 0:
        return None
    losses = [loss for _, loss in scored]
    ticks = _ticks(min(losses), max(losses))
    low, high = min(ticks[0], *losses), max(ticks[-1], *losses)

    def x_of(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(step / last_step, 1.0)

    def y_of(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (loss - low) / (high - low))

    path, pen = [], "M"
    for step, loss in units.thinned(points, MOST_POINTS):
        if loss is not None:
            path.append(f"{pen}{x_of(step):.1f} {y_of(loss):.1f}")
        pen = "M" if loss is None else "L"
    anchors = (("start", 0.0), ("middle", last_step / 2), ("end", last_step))
    step, loss = scored[-1]
    return Curve(
        path=" ".join(path),
        tip=(x_of(step), y_of(loss)),
        rules=tuple((y_of(tick), f"{tick:g}") for tick in ticks),
        steps=tuple((x_of(at), units.count_text(at), anchor) for anchor, at in anchors),
        label=f"validation loss from {losses[0]:.3f} to {losses[-1]:.3f} at step {step:,.0f} of {last_step:,.0f}",
    )


def _ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers from below `low` to above `high`: 1, 2 or 5 times a power of ten apart."""
    span = max(high - low, 1e-3 * max(abs(low), abs(high), 1e-3))
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= wanted)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)  # all losses are equal, and a round number
    return [index * step for index in range(first, last + 1)]
