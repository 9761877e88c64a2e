"""What a run can be made of, as small tables: methods, codecs."""

from rich import box
from rich.table import Table

from farloop.algo.methods import METHODS


def methods_table() -> Table:
    """Every method with its defaults."""
    table = _table("method", "H", "τ", "mix", "up", "down", "what it does")
    for method in METHODS.values():
        table.add_row(
            method.name,
            str(method.h),
            str(method.tau),
            f"{method.mix:g}",
            method.codec_up,
            method.codec_down,
            method.summary,
        )
    return table


def codecs_table() -> Table:
    """Every codec with its price and what it is fit for."""
    from farloop.quant.registry import CODECS  # torch: only for who asks

    table = _table("codec", "bits per element", "than fp32", "block", "up", "down")
    for codec in CODECS.values():
        bits = codec.bits_per_element
        block = f"{codec.block} share a scale" if codec.scale_bits else "no scales"
        table.add_row(codec.name, f"{bits:g}", f"{32 / bits:.3g}× less", block, "yes", _yes(codec.exact_decode))
    return table


def _yes(holds: bool) -> str:
    return "yes" if holds else "no, it rounds"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", padding=(0, 1))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
