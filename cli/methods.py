"""`farloop lab methods`: the training methods as a table or JSON, and which one suits a link."""

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from farloop.algo.methods import METHODS, Method
from farloop.cli.options import table
from farloop.cli.simulate import SCALES
from farloop.config.exit_codes import CommandError
from farloop.monitoring.units import percent_text, rate_text


def methods_table() -> Group:
    """A row for each, and below them what each does."""
    rows = table("method", "H", "overlap", "mix", "up", "down", "outer step", left=("method",))
    for method in METHODS.values():
        rows.add_row(
            method.name,
            str(method.h),
            _overlap(method),
            f"{method.mix:g}",
            method.codec_up,
            method.codec_down,
            method.outer,
        )
    return Group(rows, *(Padding(Text(f"{one.name}: {one.summary}"), (0, 2)) for one in METHODS.values()))


def methods_json() -> list[dict[str, Any]]:
    """The rows of `algo/methods.py`, as they are."""
    return [
        {key: sorted(value) if isinstance(value, frozenset) else value for key, value in row.items()}
        for row in (dataclasses.asdict(method) for method in METHODS.values())
    ]


def _overlap(method: Method) -> str:
    """How long an update may take before its node waits."""
    if method.lag:
        return "a round"
    return {0: "none", 1: "1 step"}.get(method.tau, f"{method.tau} steps")


# --- which one suits a link

BUSY = 0.95  # share of the time that a node should compute

LAYERS, LAYERS_PER_FRAGMENT = 24, 3  # of the model, supposed

LADDER = (
    *(("streaming", 15), ("streaming", 30), ("streaming", 60), ("co2", 15)),
    *(("streaming", 120), ("co2", 60), ("streaming", 300)),
)
"""Methods and H, by the loss that docs/quality.md has of them or of their like, the least first."""

_WORDS = {
    "bits_per_s": re.compile(r"([0-9.]+) ?([kmg])bit(?:/s)?", re.ASCII),
    "params": re.compile(r"([0-9.]+) ?([kmbt])(?: parameters)?", re.ASCII),
    "step_s": re.compile(r"([0-9.]+) ?(ms|s)(?: step[a-z]*| a step)?", re.ASCII),
    "nodes": re.compile(r"([0-9]+) nodes?()", re.ASCII),
}


@dataclass(frozen=True, slots=True)
class Situation:
    """What `--for` names."""

    bits_per_s: float  # of the slowest node's link, in each direction
    params: float
    nodes: float = 2
    step_s: float = 1.0  # of an inner step


@dataclass(frozen=True, slots=True)
class Choice:
    """A method in a situation."""

    method: str
    h: int
    tau: int  # of streaming, the shortest that suits, at most a quarter of a round: a node finds it by itself
    fewer_bytes: float  # than data parallel in fp32
    needed_bits_per_s: float  # of a node's link, to compute `BUSY` of the time, with the longest overlap
    busy: float  # share of the time that a node computes


def situation(text: str) -> Situation:
    """Read `200mbit, 4 nodes, 1b, 2s`, in any order. Raises CommandError."""
    example = "write a rate and a size, and a number of nodes and the seconds of a step: '200mbit, 1b, 4 nodes, 0.5s'"
    given, scales = dict[str, float](), {**SCALES, "ms": 1e-3, "s": 1.0}
    for word in (word.strip().lower() for word in text.split(",")):
        found = ((name, match) for name, pattern in _WORDS.items() if (match := pattern.fullmatch(word)))
        try:
            ((name, match),) = ((name, match) for name, match in found if name not in given)
            given[name] = float(match[1]) * scales[match[2]]
        except ValueError:
            raise CommandError(f"--for: {word!r} is not understood, or is a second one; {example}") from None
    if missing := [what for what, name in (("rate", "bits_per_s"), ("size", "params")) if name not in given]:
        raise CommandError(f"--for: there is no {' and no '.join(missing)}; {example}")
    if not all(0.0 < value < math.inf for value in given.values()):
        raise CommandError(f"--for takes numbers above 0, not {text!r}")
    return Situation(**given)


def choices(where: Situation) -> list[Choice]:
    """Those of `LADDER` for a situation, in its order."""
    return [_choice(METHODS[name], h, where) for name, h in LADDER]


def recommended(found: Sequence[Choice]) -> Choice:
    """The first with which a node computes `BUSY` of the time; where there is none, the busiest."""
    return next((one for one in found if one.busy >= BUSY), max(found, key=lambda one: one.busy))


def _choice(method: Method, h: int, where: Situation) -> Choice:
    from farloop.quant.blob import typical_bytes
    from farloop.quant.codec import flat
    from farloop.quant.registry import codec_named
    from farloop.sim.bandwidth import Training, required_gbit_s, utilization

    sizes = [
        8.0 * typical_bytes(codec_named(codec), flat(1 << 20)) / (1 << 20)
        for codec in (method.codec_up, method.codec_down)
    ]
    streams = method.pattern == "strided"

    def busy(plan: Training) -> float:
        return float(utilization(plan, [where.bits_per_s / 1e9])[0])

    plans = [
        Training(
            params=where.params,
            layers=LAYERS,
            step_s=where.step_s,
            method="streaming" if streams else "diloco",
            h=h,
            bits=max(sizes),
            layers_per_fragment=LAYERS_PER_FRAGMENT,
            overlap=tau,
            lag=method.lag,
        )
        for tau in (range(method.tau, h // 4 + 1) if streams else [method.tau])
    ]
    best = max(plans, key=lambda plan: (min(busy(plan), BUSY), -plan.overlap))
    needed = 1e9 * required_gbit_s(plans[-1], [BUSY])[BUSY]
    return Choice(method.name, h, best.overlap, 64.0 * h / sum(sizes), needed, busy(best))


def choices_table(found: Sequence[Choice]) -> Table:
    """A row for each, the recommended one marked."""
    best = recommended(found)
    rows = table(
        "", "method", "H", "τ", "fewer bytes", f"rate for {percent_text(BUSY)}", "computes", left=("", "method")
    )
    for one in found:
        rows.add_row(
            "→" if one is best else "",
            one.method,
            str(one.h),
            str(one.tau),
            f"{one.fewer_bytes:,.0f}×",
            rate_text(one.needed_bits_per_s),
            percent_text(one.busy),
        )
    return rows


def advice(where: Situation, found: Sequence[Choice]) -> list[str]:
    """Lines below the table: the settings, and what the coordinator's own link has to carry."""
    best = recommended(found)
    lines = [f'[run] method = "{best.method}", h = {best.h}']
    if best.busy < BUSY:
        lines.append(f"No method keeps a node busy on this link: it waits {percent_text(1.0 - best.busy)} of the time.")
    mean = 64.0 * where.params / best.fewer_bytes / where.step_s / 2 * where.nodes * best.busy
    lines.append(f"The coordinator's link carries {rate_text(mean)} each way, on average (nodes: {where.nodes:,.0f}).")
    lines.append(f"Supposed: {LAYERS} layers, nodes and links alike; latency left out. Of unequal nodes: decoupled.")
    return lines
