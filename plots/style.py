"""One style for all plots: colours, axes, notes beside points, and how a figure is saved.

A figure is an SVG, PNG or PDF by its file's name. Plots stand alone, so they are drawn for a white page.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, NullLocator, PercentFormatter

from farloop.config.exit_codes import writing

INK, MUTED, GRID, GOOD, WARN, PALE = "#1b1e23", "#646b75", "#e3e4e1", "#0b7d55", "#b86e00", "#9db7e8"
SERIES = ("#2563c9", "#0d8f72", "#b86e00", "#a8328a", "#6247cf", "#c2410c")


def style(*, ink: str = INK, muted: str = MUTED, grid: str = GRID, font_size: float = 10) -> dict[Any, Any]:
    ticks = {
        f"{axis}tick.{name}": value
        for axis in "xy"
        for name, value in (("color", muted), ("major.size", 0), ("major.pad", 6))
    }
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "farloop",
        "font.size": font_size,
        "text.color": ink,
        "axes.edgecolor": grid,
        "axes.labelcolor": muted,
        "axes.titlecolor": ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "axes.titlepad": 12,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "lines.solid_capstyle": "round",
        "lines.solid_joinstyle": "round",
        "legend.frameon": False,
        **ticks,
    }


@contextmanager
def figure(path: Path, width_in: float, height_in: float, *, note: str = "", font_size: float = 10) -> Iterator[Figure]:
    """A figure to draw into, saved at the end with a note below. Raises CommandError: it cannot be written."""
    with mpl.rc_context(style(font_size=font_size)):
        drawn = Figure(figsize=(width_in, height_in), layout="constrained")
        yield drawn
        if note:
            drawn.supxlabel(note, color=MUTED, fontsize=8.5, x=0.01, ha="left")
        with writing(path):
            drawn.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def color_of(number: int) -> str:
    return SERIES[number % len(SERIES)]


def ticks(axis: Axis, where: Locator | Sequence[float] | None, text: Callable[[float], str] | None = None) -> None:
    """Ticks at these places, none between them; `text` makes their labels."""
    if where is not None:
        axis.set_major_locator(where if isinstance(where, Locator) else FixedLocator(where))
    axis.set_minor_locator(NullLocator())
    if text is not None:
        axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def log_ticks(axis: Axis, text: Callable[[float], str]) -> None:
    """Ticks at the powers of ten."""
    ticks(axis, LogLocator(base=10, numticks=12), text)


def shares(axis: Axis) -> None:
    """Shares of one as whole per cents."""
    axis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def rows(axes: Axes, count: int, names: Sequence[str] | None = None, *, above: float = 0.7) -> None:
    """A vertical axis of rows, the first on top; `names` stand beside them."""
    if names:
        axes.set_yticks(range(count), names, color=INK)
    else:
        axes.set_yticks([])
    axes.set_ylim(max(1, count) - 0.45, -above)
    axes.grid(visible=False, axis="y")


def beside(axes: Axes, text: str, at: tuple[float, float], by: tuple[float, float], **look: Any) -> Any:
    """A text at a distance in points from a place."""
    return axes.annotate(text, at, xytext=by, textcoords="offset points", **look)
