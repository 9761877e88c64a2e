"""The last things that happened to nodes, deltas and alarms, as `farloop status` shows them."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farloop.monitoring.status import HappeningStatus
from farloop.monitoring.units import NOTHING, duration_text

SHOWN = 6

_STYLES = {"refused": "red", "alarm": "bold red", "anchor": "red", "stalled": "red", "delta": "yellow",
           "dropped": "yellow", "over": "green"}  # fmt: skip


def recent_table(happenings: Sequence[HappeningStatus], *, wide: bool, most: int = SHOWN) -> RenderableType:
    """The last of them in their order: age, whom it concerns, code, and sentence; on a narrow screen that folds."""
    table = Table.grid(expand=True, padding=(0, 2, 0, 0))
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column(no_wrap=True, max_width=16 if wide else 10, overflow="ellipsis")
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for happening in happenings[-most:]:
        sentence = Text(happening["sentence"])
        if happening["detail"]:
            sentence.append(f" ({happening['detail']})" if wide else "", style="dim")
        if happening["count"] > 1:
            sentence.append(f"  ×{happening['count']:,}", style="bold")
        code = happening["code"]
        style = _STYLES.get(happening["kind"], "cyan")
        kind = Text().append(f"{happening['kind']} ", style="dim")
        kind.append(code if code != happening["kind"] else "", style=style)
        age = duration_text(happening["age_s"]) + " ago"
        table.add_row(age, Text(happening["node"] or NOTHING, style="bold"), kind, sentence)
    return Group(Text("lately", style="dim"), table)
