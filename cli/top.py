"""The command top: a full-screen view of a run, whose nodes can be sorted and selected.

It draws with `status_view.py` and fetches the status in a thread: when the coordinator does not answer, the last view
stays, with a line that says so.
"""

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import ClassVar

from rich.console import JustifyMethod
from rich.terminal_theme import TerminalTheme
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.widgets import DataTable, Footer, Static

from farloop.cli.progress import Pace
from farloop.cli.status import fetch
from farloop.cli.status_view import WIDE, head, node_cells, recent_table
from farloop.config.exit_codes import CommandError
from farloop.monitoring.status import NodeStatus, Status
from farloop.monitoring.status_summary import NodeView, cleaned, view_of
from farloop.monitoring.units import NOTHING, count_text, duration_text, size_text

POLL_S = 1.0

_WIDTHS = {"node": 12, "state": 12, "step": 7, "loss": 6, "now": 0, "compute": 9, "tokens/s": 10, "up": 8, "down": 8,
           "heard": 8}  # fmt: skip
_FROM = {"tokens/s": WIDE, "heard": 112, "up": 124, "down": 134}
"""Columns of the terminal from which a column of the table is shown: what a node does now comes first."""
_LEFT = frozenset({"node", "state", "now"})
_PADDING = 2  # columns around each cell
_SCROLL_BAR = 2

DARK, LIGHT = "textual-dark", "textual-light"

_GREYS = ((0, 0, 0), (66, 66, 66), (96, 96, 96))
_COLOURS = ((160, 30, 25), (25, 96, 20), (115, 74, 0), (40, 80, 180), (108, 50, 145), (0, 86, 125))
"""Red, green, yellow, blue, magenta, cyan: dark enough to be read on the light background and on the table's rows."""
ON_LIGHT = TerminalTheme(
    (224, 224, 224), _GREYS[0], [_GREYS[0], *_COLOURS, _GREYS[1]], [_GREYS[2], *_COLOURS, _GREYS[1]]
)

SortKey = Callable[[NodeStatus], tuple[bool, float | str]]

SORTS: dict[str, SortKey] = {
    "node": lambda node: (False, node["name"]),
    "state": lambda node: (node["connected"], node["state"]),
    "step": lambda node: (False, node["inner_steps"]),
    "loss": lambda node: (node["loss"] is None, node["loss"] or 0.0),
    "compute": lambda node: (False, node["compute_share"]),
    "tokens/s": lambda node: (False, node["tokens_per_s"] if node["connected"] else 0.0),
    "up": lambda node: (False, node["bytes_up"]),
    "down": lambda node: (False, node["bytes_down"]),
    "heard": lambda node: (False, node["last_heard_s"]),
}
"""By what nodes can be sorted; `state` puts those that are away first."""


class Top(App[None]):
    """A whole terminal full of one run."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "farloop top"
    CSS = """
    Screen { overflow: hidden; }
    #silent { background: $error; color: $text; padding: 0 1; display: none; }
    #head { padding: 0 1; max-height: 60%; }
    #nodes { height: auto; max-height: 50%; margin-top: 1; }
    #chosen { padding: 0 1; margin-top: 1; height: auto; color: $text-muted; text-wrap: nowrap;
              text-overflow: ellipsis; }
    #recent { padding: 0 1; margin-top: 1; height: 1fr; scrollbar-size-vertical: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "quit"),
        ("s", "sort(1)", "sort by the next"),
        ("S", "sort(-1)", "the one before"),
        ("r", "reverse", "reverse"),
        ("p", "pause", "pause"),
        ("t", "tone", "dark/light"),
    ]

    def __init__(
        self, first: Status, fetch_status: Callable[[], Status], *, is_light: bool = False, poll_s: float = POLL_S
    ) -> None:
        """`fetch_status` may block; it raises CommandError where there is no answer."""
        super().__init__()
        self.ansi_theme_light = ON_LIGHT
        self.theme = LIGHT if is_light else DARK
        self._view, self._fetch_status, self._poll_s = view_of(first), fetch_status, poll_s
        self._pace = Pace()
        self._eta_s = math.inf
        self._sort, self._descending, self._paused = "node", False, False
        self._asking = threading.Lock()

    def compose(self) -> ComposeResult:
        yield Static(id="silent", markup=False)
        yield Static(id="head")
        yield DataTable[Text](id="nodes", cursor_type="row", cell_padding=_PADDING // 2)
        yield Static(id="chosen")
        with VerticalScroll(id="recent", can_focus=True):
            yield Static(id="events")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one(DataTable).focus()
        self.show_status(self._view.status)
        self.set_interval(self._poll_s, self._ask)

    # --- what is told

    def show_status(self, status: Status) -> None:
        self._view, self._eta_s = view_of(status), self._pace.update(status)
        if self._is_up:
            self.query_one("#silent").display = False
            self._draw()

    def miss(self, why: str) -> None:
        """There was no answer; the last picture stays."""
        if not self._is_up:
            return
        silent = self.query_one("#silent", Static)
        over = self._view.status["run"]["state"] == "finished"
        told = "the run is over and its coordinator has ended; q leaves" if over else "no answer, this is the last one"
        silent.update(Text(told if over else f"{told}: {why}"))
        silent.display = True

    def _ask(self) -> None:
        if not self._paused and self._asking.acquire(blocking=False):
            self.run_worker(self._answer, thread=True)

    def _answer(self) -> None:
        """In a thread."""
        try:
            status = self._fetch_status()
        except CommandError as error:
            self.call_from_thread(self.miss, str(error))
        else:
            self.call_from_thread(self.show_status, status)
        finally:
            self._asking.release()

    # --- what is asked for

    def action_sort(self, by: int) -> None:
        """Sort by the next column."""
        names = [name for name in _WIDTHS if name in SORTS and name in self._columns()]
        here = names.index(self._sort) if self._sort in names else 0
        self._sort = names[(here + by) % len(names)]
        self._draw()

    def action_reverse(self) -> None:
        self._descending = not self._descending
        self._draw()

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._draw()

    def action_tone(self) -> None:
        self.theme = LIGHT if self.theme == DARK else DARK

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """A click on a column sorts by it; another one turns the order round."""
        name = str(event.column_key.value)
        if name in SORTS:
            self._descending = name == self._sort and not self._descending
            self._sort = name
            self._draw()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        if self._is_up:
            self._draw_chosen()

    def on_resize(self, event: Resize) -> None:
        """The terminal has another size, once this event is through."""
        self.call_after_refresh(self._draw)

    # --- what is shown

    def _columns(self) -> list[str]:
        return [name for name in _WIDTHS if self.size.width >= _FROM.get(name, 0)]

    @property
    def _is_up(self) -> bool:
        """Whether all parts of the screen are there: events may come before, and while it is taken down."""
        return len(self.query("#silent, #head, #nodes, #chosen, #events")) == 5

    def _draw(self) -> None:
        if not self._is_up:
            return
        width = self.size.width - 2
        paused = "paused" if self._paused else ""
        self.query_one("#head", Static).update(head(self._view, width=width, link=paused, eta_s=self._eta_s))
        self._draw_nodes()
        self._draw_chosen()
        none = Text("no recent refusals, drops or losses", style="dim")
        events = self._view.events[::-1]
        self.query_one("#events", Static).update(recent_table(events, wide=width >= WIDE) if events else none)

    def _draw_nodes(self) -> None:
        table, chosen = self.query_one(DataTable), self._chosen()
        columns = self._columns()
        taken = sum(_WIDTHS[name] + _PADDING for name in columns)
        widths = {name: _WIDTHS[name] or max(self.size.width - taken - _SCROLL_BAR, 8) for name in columns}
        with self.batch_update():
            table.clear(columns=True)
            for name in columns:
                mark = (" ▼" if self._descending else " ▲") if name == self._sort else ""
                justify: JustifyMethod = "left" if name in _LEFT else "right"
                table.add_column(Text(name + mark, justify=justify), key=name, width=widths[name])
            nodes = sorted(self._view.nodes, key=lambda node: SORTS[self._sort](node.status), reverse=self._descending)
            for node in nodes:
                cells = node_cells(node, self._view)
                for name, cell in cells.items():
                    cell.justify = "left" if name in _LEFT else "right"
                    cell.truncate(widths.get(name, 1), overflow="ellipsis")
                table.add_row(*(cells[name] for name in columns), key=node.name)
            names = [node.name for node in nodes]
            if chosen is not None and chosen.name in names:
                table.move_cursor(row=names.index(chosen.name))

    def _chosen(self) -> NodeView | None:
        table = self.query_one(DataTable)
        if not table.row_count:
            return None
        name = table.ordered_rows[table.cursor_row].key.value
        return next((node for node in self._view.nodes if node.name == name), None)

    def _draw_chosen(self) -> None:
        node = self._chosen()
        text = about(node) if node is not None else Text("no node has joined yet")
        self.query_one("#chosen", Static).update(text)


def about(view: NodeView) -> Text:
    """Up to three lines on one node: what has no column or does not fit into one; the least important comes last."""
    node = view.status
    text = Text()
    text.append(view.name, style="bold")
    text.append(f"  {node['device'] or NOTHING}, last message {view.heard} ago")
    text.append(f", start {node['incarnation']}" if node["incarnation"] > 1 else "")
    text.append(f", holds {view.part}" if view.part else "")
    facts = [
        f"round {node['round']:,}",
        f"{count_text(node['tokens'])} tokens",
        f"blocked {duration_text(node['blocked_s'])}",
        f"{view.up} up",
        f"{view.down} down",
        f"{size_text(node['bytes_state'])} of snapshots and probes",
    ]
    missed = {
        "steps lost": node["lost_steps"],
        "steps skipped": node["skipped_steps"],
        "sends skipped": node["skipped_turns"],
    }
    facts[2:2] = [f"{count:,} {what}" for what, count in missed.items() if count]
    facts[1:1] = [f"τ {node['tau']} by its link"] if "tau" in node else []
    text.append(f"\n{', '.join(facts)}")
    text.append(f"\n{view.now}" if view.now else "")
    return text


# --- the command


def is_light(environ: Mapping[str, str]) -> bool:
    """Whether the terminal says in COLORFGBG, as "0;15", that its background is light; many say nothing."""
    return environ.get("COLORFGBG", "").rpartition(";")[2] in ("7", "15")


def top(url: str, *, light: bool | None = None) -> None:
    """Show the run until `q`, dark or light; None: as the terminal says that it is, or else dark.

    Raises CommandError: no answer at `url`, it is no coordinator, or there is no terminal.
    """

    def fetch_status() -> Status:
        return cleaned(fetch(url))

    first = fetch_status()  # before the screen is taken: an address that is none is one line
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CommandError("farloop top needs a terminal; farloop status prints the same once")
    Top(first, fetch_status, is_light=is_light(os.environ) if light is None else light).run()
