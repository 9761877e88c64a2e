"""The validation-loss curve of the status page, as an SVG that style sheets colour and nothing has to load."""

import math
from collections.abc import Sequence

from farloop.monitoring.markup import NONE, Markup, joined, tag, text
from farloop.monitoring.units import count_text

WIDTH, HEIGHT = 720, 180
LEFT, RIGHT, TOP, BOTTOM = 34, 10, 10, 24
"""Margins, for the numbers at the axes."""

MOST_POINTS = 400
"""Of a curve; more are thinned out."""

Point = tuple[float, float | None]
"""A step and a loss; None breaks the line."""


def curve(points: Sequence[Point], *, last_step: float) -> Markup:
    """Loss over steps, from 0 to `last_step`; nothing before there are two losses."""
    losses = [loss for _, loss in points if loss is not None]
    if len(losses) < 2 or last_step <= 0:
        return NONE
    ticks = _ticks(min(losses), max(losses))
    low, high = min(ticks[0], *losses), max(ticks[-1], *losses)

    def x_of(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * min(step / last_step, 1.0)

    def y_of(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (loss - low) / (high - low))

    grid = [_rule(y_of(tick), f"{tick:g}") for tick in ticks]
    grid += [_below(x_of(step), count_text(step), step / last_step) for step in (0.0, last_step / 2, last_step)]
    path, pen = [], "M"
    for step, loss in thinned(points):
        if loss is None:
            pen = "M"
        else:
            path.append(f"{pen}{x_of(step):.1f} {y_of(loss):.1f}")
            pen = "L"
    step, loss = next((step, loss) for step, loss in reversed(points) if loss is not None)
    words = f"validation loss from {losses[0]:.3f} to {losses[-1]:.3f} at step {step:,.0f} of {last_step:,.0f}"
    return tag(
        "svg",
        *grid,
        tag("path", class_="line", d=" ".join(path)),
        tag("circle", class_="tip", cx=f"{x_of(step):.1f}", cy=f"{y_of(loss):.1f}", r="3"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=words,
    )


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """No more than `MOST_POINTS`, first and last kept."""
    if len(points) <= MOST_POINTS:
        return points
    return [points[round(index * (len(points) - 1) / (MOST_POINTS - 1))] for index in range(MOST_POINTS)]


def _ticks(low: float, high: float, wanted: int = 4) -> list[float]:
    """Round numbers from below `low` to above `high`: 1, 2 or 5 times a power of ten apart."""
    span = max(high - low, 1e-3 * max(abs(low), abs(high), 1e-3))
    power = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= wanted)
    first, last = math.floor(low / step), math.ceil(high / step)
    last = max(last, first + 1)  # all losses are one, and that is a round number
    return [index * step for index in range(first, last + 1)]


def _rule(y: float, label: str) -> Markup:
    line = tag("line", class_="grid", x1=str(LEFT), x2=str(WIDTH - RIGHT), y1=f"{y:.1f}", y2=f"{y:.1f}")
    return joined(line, tag("text", text(label), class_="y", x=str(LEFT - 6), y=f"{y:.1f}"))


def _below(x: float, label: str, share: float) -> Markup:
    anchor = "start" if share == 0 else "end" if share == 1 else "middle"
    return tag("text", text(label), class_="x", x=f"{x:.1f}", y=str(HEIGHT - 6), text_anchor=anchor)
