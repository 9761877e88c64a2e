"""What `farloop lab codecs` and `lab bench codecs` print: tables of at most 110 columns, and the list as JSON."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from farloop.lab.bench.codec_quality import DISTRIBUTIONS, OUTER, QualityRow
from farloop.lab.bench.codec_speed import SpeedRow, Where
from farloop.lab.bench.codecs import OPS, CodecReport
from farloop.monitoring.units import NOTHING
from farloop.quant.codec import Codec
from farloop.quant.codec_checks import check_downlink
from farloop.quant.errors import UnsoundPairing
from farloop.quant.registry import CODECS, codec_named
from farloop.quant.spelling import PARAMETERS, downlink_spelling

TABLE_COLUMNS = 110

_DATA = {"gauss": "Gauss", "laplace": "Laplace", "student3": "Student t", OUTER: "outer"}


# --- the list of codecs


def codec_list(measured: CodecReport | None) -> RenderableType:
    """Every codec: its promises, what was measured of it, what it is, and its parameters."""
    table = _table()
    columns = ["codec", "bits", *(("error", "cosine", "encode", "decode") if measured else ())]
    columns += ["rounding", "keeps", "random", "β", "sums", "down"]
    for column in columns:
        table.add_column(column, justify="left" if column in ("codec", "rounding") else "right", no_wrap=True)
    for codec in CODECS.values():
        traits = codec.traits
        rounding = "none" if codec.name == "fp32" else "[green]unbiased[/]" if traits.unbiased else "biased"
        table.add_row(
            f"[bold]{codec.name}[/]",
            *(_measured_cells(codec.name, measured) if measured else [f"{traits.bits_per_element:.4g}"]),
            rounding,
            _share_text(traits.contraction),
            NOTHING if traits.deterministic else "yes",
            f"{codec.beta:g}" if codec.beta else NOTHING,
            "yes" if traits.summable else NOTHING,
            "yes" if fits_downlink(codec) else NOTHING,
        )
    return Group(table, _legend(measured), Text(), _descriptions())


def _measured_cells(name: str, measured: CodecReport) -> list[str]:
    quality = next((row for row in measured.quality if row.codec == name), None)
    speed = {row.op: row.gb_per_s for row in measured.speed if row.codec == name}
    if quality is None:
        return [f"{CODECS[name].traits.bits_per_element:.4g}", *[NOTHING] * 4]
    cells = [f"{quality.bits:.4g}", error_text(quality.rel_mse), f"{quality.cosine:.4f}"]
    return [*cells, *(_gb_text(speed[op]) if op in speed else NOTHING for op in ("encode", "decode"))]


def fits_downlink(codec: Codec) -> bool:
    """Whether anchors can be made by it, with the parameters that it has on the way down."""
    try:
        check_downlink(codec_named(downlink_spelling(codec.name)))
    except UnsoundPairing:
        return False
    return True


def _legend(measured: CodecReport | None) -> Text:
    lines = []
    if measured:
        copy = next((row.gb_per_s for row in measured.speed if row.op == "copy"), 0.0)
        lines += [
            "bits: per element of a blob. error: relative, squared; it and the cosine are of a Gaussian matrix, 1024².",
            f"encode, decode: GB/s of fp32 on one core of this machine, where a copy makes {_gb_text(copy)}; "
            f"{NOTHING} where time was up.",
        ]
    else:
        lines += ["bits: per element, before the entropy stage."]
    lines += [
        "keeps: so much of any delta's squared norm, or more. random: a seed decides what is written. β: of error",
        "feedback. sums: payloads are added without decoding. down: anchors can be made by it.",
    ]
    return Text("\n".join(f" {line}" for line in lines), style="dim")


def _descriptions() -> Table:
    """What every codec is, in the words of its own file, and what may stand after its colon."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for codec in CODECS.values():
        table.add_row(f"[bold]{codec.name}[/]", summary_of(codec))
        for name, default, meaning in _parameters(codec):
            table.add_row("", f"[cyan]{name}={default}[/]  [dim]{meaning}[/]")
    table.add_row("", "")
    table.add_row("any", f"[cyan]beta=0…1[/]  [dim]{PARAMETERS['fp32']['beta'].meaning}[/]")
    return table


def summary_of(codec: Codec) -> str:
    """The first sentence of the file that defines it."""
    text = (sys.modules[type(codec).__module__].__doc__ or "").partition("\n")[0]
    return text.removeprefix(f"`{codec.name}`: ").replace("`", "")


def _parameters(codec: Codec) -> Iterator[tuple[str, str, str]]:
    """(name, default, meaning) of those that not every codec has."""
    for name, parameter in PARAMETERS[codec.name].items():
        if name != "beta":
            yield name, parameter.write(parameter.default), parameter.meaning


_TRAITS = ("bits_per_element", "exact_decode", "unbiased", "contraction", "deterministic", "summable", "sparse",
           "entropy_coded")  # fmt: skip


def codec_list_json(measured: CodecReport | None) -> list[dict[str, Any]]:
    return [
        {
            "codec": codec.name,
            "code": codec.code,
            "summary": summary_of(codec),
            "block": codec.block,
            "beta": codec.beta,
            **{name: getattr(codec.traits, name) for name in _TRAITS},
            "downlink": fits_downlink(codec),
            "parameters": [
                {"name": name, "default": default, "meaning": meaning} for name, default, meaning in _parameters(codec)
            ],
            "measured": _measured_json(codec.name, measured),
        }
        for codec in CODECS.values()
    ]


def _measured_json(name: str, measured: CodecReport | None) -> dict[str, float] | None:
    quality = next((row for row in measured.quality if row.codec == name), None) if measured else None
    if measured is None or quality is None:
        return None
    found = {"bits": quality.bits, "rel_mse": quality.rel_mse, "cosine": quality.cosine}
    return found | {f"{row.op}_gb_per_s": row.gb_per_s for row in measured.speed if row.codec == name}


# --- the benchmark


def report_tables(report: CodecReport) -> Iterator[RenderableType]:
    if report.quality:
        yield quality_table(report.quality)
        yield _note(
            "Relative squared errors of one encoding; bits per parameter as sent."
            + (f" outer: {report.outer}." if report.outer else "")
        )
    for where in dict.fromkeys(Where(device=row.device, threads=row.threads) for row in report.speed):
        yield speed_table(report.speed, where)
    if report.speed:
        first_s = sum(row.warmup_s for row in report.speed)
        yield _note(
            "GB/s of fp32, and the share of a copy's speed: a copy moves 8 bytes per element, decoding q4 4.5. sum8 "
            f"counts all eight vectors. First calls, which may compile, took {first_s:.1f} s in all and do not count."
        )


def quality_table(rows: Sequence[QualityRow]) -> Table:
    """A row per codec, a column per kind of data; bits and cosine are of the last kind."""
    data = [name for name in (*DISTRIBUTIONS, OUTER) if any(row.data == name for row in rows)]
    last = data[-1]
    table = _table("codec")
    table.add_column("bits", justify="right")
    for name in data:
        table.add_column(_DATA[name], justify="right")
    table.add_column("cosine", justify="right")
    found = {(row.codec, row.data): row for row in rows}
    for codec in dict.fromkeys(row.codec for row in rows):
        row = found.get((codec, last))
        if row is None:
            continue
        errors = [error_text(found[codec, name].rel_mse) if (codec, name) in found else NOTHING for name in data]
        table.add_row(codec, f"{row.bits:.2f}", *errors, f"{row.cosine:.4f}")
    return table


def speed_table(rows: Sequence[SpeedRow], where: Where) -> Table:
    """A row per codec, a column per operation, for one place."""
    here = [row for row in rows if Where(device=row.device, threads=row.threads) == where]
    found: Mapping[tuple[str, str], SpeedRow] = {(row.codec, row.op): row for row in here}
    copy = found.get(("memcpy", "copy"))
    ops = [op for op in OPS if any(row.op == op for row in here)]
    table = _table("codec")
    table.title = where.describe() + (f": GB/s, and % of a memcpy's {_gb_text(copy.gb_per_s)}" if copy else ": GB/s")
    table.title_justify, table.title_style = "left", "bold"
    table.padding = (0, 1, 0, 0)  # fits into 80 columns
    for op in ops:
        table.add_column(op, justify="right", no_wrap=True)
    for codec in dict.fromkeys(row.codec for row in here if row.op != "copy"):
        timed = [found.get((codec, op)) for op in ops]
        cells = [f"{_gb_text(r.gb_per_s)} [dim]{100 * r.ratio_to_memcpy:3.0f}[/]" if r else NOTHING for r in timed]
        table.add_row(codec, *cells)
    return table


def error_text(rel_mse: float) -> str:
    """`8.6e-3`, `.17`; 0 for none."""
    if rel_mse == 0:
        return "0"
    if rel_mse >= 0.0995:
        return f"{rel_mse:.2g}"
    mantissa, exponent = f"{rel_mse:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _share_text(share: float) -> str:
    if share == 0:
        return NOTHING
    return f"{100 * share:.0f} %" if share >= 0.0095 else f"{100 * share:.1g} %"


def _gb_text(gb_per_s: float) -> str:
    """Three digits, two below 1."""
    if gb_per_s >= 99.95:
        return f"{gb_per_s:.0f}"
    return f"{gb_per_s:.1f}" if gb_per_s >= 9.995 else f"{gb_per_s:.2f}"


def _note(text: str) -> Text:
    return Text(f" {text}", style="dim")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim", padding=(0, 1))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table
