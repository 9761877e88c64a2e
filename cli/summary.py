"""What a finished run comes to: its figures, as `--json` prints them, and the table that ends a run on a terminal."""

from typing import NotRequired, TypedDict

from rich import box
from rich.table import Table
from rich.text import Text

from farloop.monitoring.status import BytesStatus
from farloop.monitoring.units import count_text, duration_text, factor_text, loss_text, percent_text, plural, size_text


class NodeSummary(TypedDict):
    """One node's part in the run; what is not known is left out."""

    name: str
    device: NotRequired[str]
    link: NotRequired[str]
    state: NotRequired[str]
    reason: NotRequired[str]
    inner_steps: NotRequired[int]
    tokens: NotRequired[int]
    loss: NotRequired[float | None]
    tokens_per_s: NotRequired[float]
    compute_share: NotRequired[float]
    blocked_s: NotRequired[float]
    lost_steps: NotRequired[int]
    skipped_turns: NotRequired[int]
    bytes_up: NotRequired[int]
    bytes_down: NotRequired[int]
    bytes_state: NotRequired[int]
    digests: NotRequired[list[str]]
    """Digests of its own anchors, in fragment order."""


class Summary(TypedDict):
    """The figures of a run. Byte counts are sums over nodes."""

    val_loss_start: float | None
    val_loss_end: float | None
    tokens: int
    inner_steps: int
    """Over all starts of all nodes."""
    merged_steps: int
    """Of them those that count for `reduction`: not lost, and not done twice."""
    outer_steps: int
    nodes: int
    method: str
    codec_up: str
    codec_down: str
    bytes_up: int
    bytes_down: int
    bytes_data_parallel_fp32: int
    """8 · parameters · merged steps: fp32 gradients up and their mean down, every step of every node."""
    bytes_total: int
    """`bytes_up` + `bytes_down`: all bytes of the run, of all kinds."""
    bytes_by_kind: BytesStatus
    """Both directions; their sum is `bytes_total`."""
    bytes_state: int
    """Of `bytes_total`: snapshots and probes."""
    reduction: float
    """`bytes_data_parallel_fp32` ÷ `bytes_total`."""
    digests_equal: bool | None
    """Whether every node ended with the coordinator's anchors, bit for bit; None when nobody compared."""
    compute_share: float
    """Share of the time that the training loops had for themselves, data loading included: the mean over nodes, each
    since its last start. farloop's own code, waiting and evaluation are the rest."""
    wall_s: float
    digests: list[str]
    """The coordinator's anchors, in fragment order."""
    parameters: int
    h: int
    steps: int
    seed: int
    command: str
    commit: NotRequired[str]
    machine: str
    node_table: list[NodeSummary]


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """The figures in words, most important first: label and value."""
    each_way = f"{size_text(summary['bytes_up'])} up, {size_text(summary['bytes_down'])} down"
    length = f"H {summary['h']}, {summary['steps']:,} steps"
    return [
        ("validation loss", f"{loss_text(summary['val_loss_start'])} → {loss_text(summary['val_loss_end'])}"),
        ("sent over the links", f"{size_text(summary['bytes_total'])}: {each_way}"),
        ("of these", bytes_text(summary["bytes_by_kind"])),
        ("fp32 data parallel would send", size_text(summary["bytes_data_parallel_fp32"])),
        ("reduction", f"{factor_text(summary['reduction'])} fewer bytes"),
        ("compute share", f"{percent_text(summary['compute_share'])} of the time was the training loop's"),
        ("wall time", duration_text(summary["wall_s"])),
        ("models equal", equality_text(summary)),
        ("trained", f"{count_text(summary['tokens'])} tokens in {plural(summary['inner_steps'], 'inner step')}, "
                    f"{plural(summary['outer_steps'], 'outer step')}, {plural(summary['nodes'], 'node')}"),
        ("method", f"{summary['method']}, {length}, {summary['codec_up']} up, {summary['codec_down']} down"),
        ("model", f"{count_text(summary['parameters'])} parameters, seed {summary['seed']}"),
    ]  # fmt: skip


def bytes_text(moved: BytesStatus) -> str:
    """All bytes by kind, in words."""
    return (
        f"{size_text(moved['delta'])} of deltas, {size_text(moved['update'])} of updates, "
        f"{size_text(moved['snapshot'])} of snapshots, {size_text(moved['probe'])} of probes, "
        f"{size_text(moved['control'])} of control"
    )


def equality_text(summary: Summary) -> str:
    """Whether all ended with the same model, in a sentence."""
    if summary["digests_equal"] is None:
        return "not compared"
    if not summary["digests_equal"]:
        return "NO, digests differ"
    fragments = plural(len(summary["digests"]), "fragment")
    return f"yes, bit for bit ({fragments}, coordinator and {plural(summary['nodes'], 'node')})"


def summary_table(summary: Summary) -> Table:
    """The end of a run on a terminal."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in summary_rows(summary):
        table.add_row(label, Text(value, style=_style(label, summary)))
    return table


def _style(label: str, summary: Summary) -> str:
    if label == "models equal":
        return {True: "green", False: "bold red", None: "yellow"}[summary["digests_equal"]]
    return "bold" if label in ("validation loss", "reduction", "compute share") else ""
