"""The plots of `farloop lab bench codecs`: error against bits beside what theory allows, and speed beside a plain copy.

SVG, PNG or PDF by the file's name, in the look of `style.py`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from farloop.lab.bench.codec_quality import OUTER, QualityRow
from farloop.lab.bench.codec_speed import SpeedRow, Where
from farloop.lab.bench.codecs import CodecReport
from farloop.plots.style import GOOD, GRID, INK, MUTED, SERIES, beside, figure, shares, ticks
from farloop.quant.registry import CODECS, codec_named

BARS = ("encode", "decode", "add", "fused")
"""Operations that have a bar. The sum of eight is left out: it counts eight vectors, and would set the scale."""

MOST_PANELS = 3

Bar = tuple[str, str, float]  # (codec, operation, place on the y axis)
_MOST_SHARE = 2.5  # bars end here; what they stand for is written beside them

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


def plot_speed(path: Path, report: CodecReport) -> None:
    """Bars for every codec, as a share of a copy's speed; one panel for one thread, for all, and for the GPU."""
    places, bars = _panels(report), _bars(report)
    size = ", ".join(f"{count >> 20} Mi elements" for count in sorted(set(report.elements.values())))
    note = f"GB/s of fp32 next to the bars. {size}. {report.machine}{f', {report.gpu}' if report.gpu else ''}."
    with figure(path, 1.8 + 4.9 * len(places), 1.6 + 0.13 * bars[-1][2], note=note) as drawn:
        all_axes = drawn.subplots(1, len(places), squeeze=False, sharey=True)[0]
        for axes, where in zip(all_axes, places, strict=True):
            found = [row for row in report.speed if Where(device=row.device, threads=row.threads) == where]
            _speed_panel(axes, where, bars, {(row.codec, row.op): row for row in found})
        handles, labels = all_axes[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper right", ncols=len(BARS) + 1)


def _speed_panel(axes: Axes, where: Where, bars: Sequence[Bar], found: Mapping[tuple[str, str], SpeedRow]) -> None:
    for number, op in enumerate(BARS):
        mine = [(y, found[name, op]) for name, bar, y in bars if bar == op and (name, op) in found]
        lengths = [min(row.ratio_to_memcpy, _MOST_SHARE) for _, row in mine]
        axes.barh([y for y, _ in mine], lengths, 0.86, color=SERIES[number], label=op, linewidth=0, zorder=2)
        for (y, row), length in zip(mine, lengths, strict=True):
            look = {"va": "center", "fontsize": 7, "color": MUTED, "zorder": 4}
            beside(axes, _speed_text(row.gb_per_s), (length, y), (3, -0.3), **look)
    axes.axvline(1.0, color=INK, linewidth=1.1, zorder=2.5, label="memcpy")
    middles = {name: [y for other, _, y in bars if other == name] for name, _, _ in bars}
    axes.set_yticks([sum(ys) / len(ys) for ys in middles.values()], list(middles))
    for label in axes.get_yticklabels():
        label.set_color(INK if _is_ours(label.get_text()) else MUTED)
    axes.set_ylim(bars[-1][2] + 1, -1)
    axes.set_xlim(0, 1.12 * min(_MOST_SHARE, max(1.0, *(r.ratio_to_memcpy for r in found.values() if r.op in BARS))))
    axes.grid(visible=False, axis="y")
    shares(axes.xaxis)
    copy = found.get(("memcpy", "copy"))
    axes.set_title(f"{where.describe()}: share of memcpy" + (f", {copy.gb_per_s:.3g} GB/s" if copy else ""))


def _bars(report: CodecReport) -> list[Bar]:
    """Ours first; a codec takes as much room as it has bars."""
    names = sorted(dict.fromkeys(row.codec for row in report.speed), key=lambda name: not _is_ours(name))
    y, bars = 0.0, list[Bar]()
    for name in names:
        for op in BARS:
            if any(row.codec == name and row.op == op for row in report.speed):
                bars.append((name, op, y))
                y += 1
        y += 0.9 if bars and bars[-1][0] == name else 0.0
    return bars


def _panels(report: CodecReport) -> list[Where]:
    """One thread, all threads, the GPU."""
    places = list(dict.fromkeys(Where(device=row.device, threads=row.threads) for row in report.speed))
    on_cpu = sorted((place for place in places if place.device == "cpu"), key=lambda place: place.threads)
    ends = list(dict.fromkeys([*on_cpu[:1], *on_cpu[-1:]]))
    return [*ends, *(place for place in places if place.device != "cpu")][:MOST_PANELS]


def _speed_text(gb_per_s: float) -> str:
    return f"{gb_per_s:.0f}" if gb_per_s >= 99.5 else f"{gb_per_s:.3g}" if gb_per_s >= 1 else f"{gb_per_s:.2f}"


def _is_ours(codec: str) -> bool:
    return codec.partition(":")[0] in CODECS and " " not in codec  # "q4 reference" is a yardstick
