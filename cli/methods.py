"""What a run can be made of, as a small table: the methods. The codecs are in `codec_tables.py`."""

import dataclasses
from typing import Any

from rich import box
from rich.table import Table

from farloop.algo.methods import METHODS, Method


def methods_table() -> Table:
    """Every method with its defaults."""
    table = _table("method", "H", "overlap", "mix", "up", "down", "outer step", "what it does")
    for method in METHODS.values():
        table.add_row(
            method.name,
            str(method.h),
            _overlap(method),
            f"{method.mix:g}",
            method.codec_up,
            method.codec_down,
            method.outer,
            method.summary,
        )
    return table


def methods_json() -> list[dict[str, Any]]:
    """The rows of `algo/methods.py`, as they are."""
    return [
        {key: sorted(value) if isinstance(value, frozenset) else value for key, value in row.items()}
        for row in (dataclasses.asdict(method) for method in METHODS.values())
    ]


def _overlap(method: Method) -> str:
    """How long an update may take before anybody waits for it."""
    if method.lag:
        return "a round"
    return {0: "none", 1: "1 step"}.get(method.tau, f"{method.tau} steps")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", padding=(0, 1))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
