"""The plot of `farloop lab bench codecs`: error against bits, beside what theory allows.

SVG, PNG or PDF by the file's name, in the look of `style.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from farloop.lab.bench.codec_quality import OUTER, QualityRow
from farloop.lab.bench.codecs import CodecReport
from farloop.plots.style import GOOD, GRID, INK, MUTED, SERIES, beside, figure, ticks
from farloop.quant.registry import codec_named

_LEAST_ERROR, _MOST_ERROR = 4e-7, 2.0


def plot_quality(path: Path, report: CodecReport) -> None:
    """Relative error against bits, on a Gaussian and on outer gradients."""
    panels = [name for name in ("gauss", OUTER) if any(row.data == name for row in report.quality)]
    titles = {"gauss": "a Gaussian", OUTER: "outer gradients of a run"}
    note = "One encoding by itself, without error feedback; bits as sent, after the entropy stage."
    note += f" Outer gradients: {report.outer}." if report.outer else ""
    with figure(path, 6.6 * len(panels), 6.4, note=note) as drawn:
        for axes, name in zip(drawn.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            found = [row for row in report.quality if row.data == name and row.rel_mse > _LEAST_ERROR]
            _error_panel(axes, found, f"relative squared error on {titles[name]}")


def _error_panel(axes: Axes, found: Sequence[QualityRow], title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(min(0.2, 0.8 * min(row.bits for row in found)), 26)
    axes.set_ylim(_LEAST_ERROR, _MOST_ERROR)
    bits = np.linspace(0.01, 26, 800)
    axes.plot(bits, 4.0**-bits, color=MUTED, linewidth=1.2, zorder=1)
    axes.fill_between(bits, 1e-12, 4.0**-bits, color=GRID, alpha=0.45, linewidth=0, zorder=0)
    axes.annotate(
        "no code of a Gaussian\ncan lie below: 4^−bits", (2.0, 4e-5), color=MUTED, fontsize=9, ha="center", va="center"
    )
    for row in found:
        axes.plot([row.bits], [row.rel_mse], linestyle="", zorder=4, **_style(row.codec))
    ticks(axes.xaxis, [0.25, 0.5, 1, 2, 4, 8, 16], lambda value: f"{value:g}")
    ticks(axes.yaxis, None)
    axes.set_xlabel("bits per parameter")
    axes.set_title(title)
    looks = [("unbiased", "q4r"), ("biased", "q4")]
    handles = [Line2D([], [], linestyle="", label=label, **_style(name)) for label, name in looks]
    axes.legend(handles=handles, loc="lower left")
    _label(axes, [(row.bits, row.rel_mse, row.codec) for row in found])


def _style(codec: str) -> dict[str, Any]:
    if codec_named(codec).traits.unbiased:
        return {"marker": "D", "markersize": 6.5, "color": GOOD}
    return {"marker": "o", "markersize": 7.5, "color": SERIES[0]}


def _label(axes: Axes, points: Sequence[tuple[float, float, str]]) -> None:
    """Names beside their points, each where it covers neither a point nor a name."""
    whole = axes.figure
    assert isinstance(whole, Figure)
    places = axes.transData.transform([(x, y) for x, y, _ in points])  # [points, 2] in pixels
    scale = whole.dpi / 72
    taken = [(x - 6 * scale, y - 6 * scale, x + 6 * scale, y + 6 * scale) for x, y in places]
    frame = axes.get_window_extent()
    size = 9.5
    for (x, y), (bits, error, text) in zip(places, points, strict=True):
        width, height = (0.6 * size * len(text) + 4) * scale, 1.3 * size * scale
        box, (dx, dy) = _free_place((x, y), (width, height), scale, frame.extents, taken)
        taken.append(box)
        far = np.hypot(dx, dy) > 10 * scale
        line = {"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3} if far else None
        beside(
            axes, text, (bits, error), (((box[0] + box[2]) / 2 - x) / scale, ((box[1] + box[3]) / 2 - y) / scale),
            ha="center", va="center", fontsize=size, color=INK, zorder=6, arrowprops=line,
        )  # fmt: skip


Box = tuple[float, float, float, float]  # left, bottom, right and top, in pixels


def _free_place(
    point: tuple[float, float], size: tuple[float, float], scale: float, frame: Box, taken: Sequence[Box]
) -> tuple[Box, tuple[float, float]]:
    """The box nearest to the point that meets no other, and its way from there; the last one tried if there is none."""
    (x, y), (width, height) = point, size
    box, way = (x, y, x, y), (0.0, 0.0)
    for distance in (7, 16, 28, 42, 58, 76, 96):
        for angle in np.deg2rad((0, 180, 90, 270, 35, -35, 145, -145, 65, -65, 115, -115)):
            dx, dy = distance * scale * np.cos(angle), distance * scale * np.sin(angle)
            # The box begins where the ray from the point meets it: text to the right starts at its left edge.
            left = x + dx - width * (1 - np.cos(angle)) / 2
            low = y + dy - height * (1 - np.sin(angle)) / 2
            box, way = (left, low, left + width, low + height), (dx, dy)
            if _within(box, frame) and not any(_overlap(box, other) for other in taken):
                return box, way
    return box, way


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _within(box: Box, frame: Box) -> bool:
    return frame[0] <= box[0] and frame[1] <= box[1] and box[2] <= frame[2] and box[3] <= frame[3]
