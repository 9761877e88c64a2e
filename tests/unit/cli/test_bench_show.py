"""The table of a report, for a terminal and for a document."""

import io

from rich.console import Console

from farloop.bench.comparison import Comparison, Report
from farloop.bench.quality import Tried, Tuned
from farloop.bench.quality_tables import markdown, table, tuning_lines


def comparison(label: str, mean: float, half: float, *, nodes: int = 2, fewer: float | None = 1.0) -> Comparison:
    return Comparison(
        label=label, nodes=nodes, losses=(2.0, 2.1), mean_loss=2.05, spread=0.0707, differences_percent=(mean, mean),
        mean_percent=mean, low_percent=mean - half, high_percent=mean + half, bytes_up=1_000_000, bytes_down=2_000_000,
        fewer_bytes=fewer, syncs=14.0, tokens=819_200, cpu_s=41.0,
    )  # fmt: skip


TUNED = Tuned(
    label="streaming nodes=2",
    seed=1000,
    tried=(Tried(settings={"outer_lr": 0.4}, loss=2.125), Tried(settings={"outer_lr": 1.0}, loss=None)),
    picked={"outer_lr": 0.4},
    at_edge=("outer_lr",),
)

REPORT = Report(
    baseline="data-parallel nodes=2",
    seeds=(0, 1),
    confidence=0.95,
    variants=(
        comparison("data-parallel nodes=2", 0.0, 0.0),
        comparison("single", 0.1, 0.2, nodes=1, fewer=None),
        comparison("streaming nodes=2", 0.9, 0.4, fewer=210.4),
        comparison("diloco nodes=2", 4.0, 0.4, fewer=215.0),
    ),
    within_percent=1.0,
    tuned=(TUNED,),
    command="farloop bench quality --steps 7",
    machine="a machine",
    commit="abc",
)


def rows() -> dict[str, list[str]]:
    lines = [line for line in markdown(REPORT).splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def test_every_variant_has_its_row() -> None:
    assert list(rows()) == [variant.label for variant in REPORT.variants]
    assert rows()["streaming nodes=2"] == [
        "2.0500 ± 0.0707", "+0.90 ± 0.40 %", "open", "1.00 MB", "2.00 MB", "210×", "14", "41 s",
    ]  # fmt: skip


def test_verdicts_are_of_the_whole_interval() -> None:
    assert [cells[2] for cells in rows().values()] == ["", "yes", "open", "no"]


def test_one_node_moves_nothing() -> None:
    assert rows()["single"][3:7] == ["–", "–", "–", "–"]


def test_a_document_says_how_it_was_made_and_what_was_tried() -> None:
    text = markdown(REPORT)
    for said in ("2 seeds", "819 k tokens", "`farloop bench quality --steps 7`", "a machine; commit abc", "in ±1 %"):
        assert said in text
    assert f"* {tuning_lines([TUNED])[0]}" in text


def test_a_search_tells_what_it_took_of_what_and_that_it_was_at_an_edge() -> None:
    assert tuning_lines([TUNED]) == [
        "streaming nodes=2 takes outer_lr=0.4 (at the edge: outer_lr), "
        "of outer_lr=0.4: 2.1250, outer_lr=1: broke; seed 1000"
    ]


def test_a_terminal_shows_the_same_numbers() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(table(REPORT))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for cells in rows().values():
        assert all(cell in shown for cell in cells)
