"""`farloop methods`: the training methods as a table or JSON."""

import dataclasses
from typing import Any

from rich.table import Table

from farloop.algo.methods import METHODS, Method
from farloop.cli.options import table


def methods_table() -> Table:
    columns = ("method", "H", "overlap", "mix", "up", "down", "outer step", "what it does")
    rows = table(*columns, fold=columns)
    for method in METHODS.values():
        rows.add_row(
            method.name,
            str(method.h),
            _overlap(method),
            f"{method.mix:g}",
            method.codec_up,
            method.codec_down,
            method.outer,
            method.summary,
        )
    return rows


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
