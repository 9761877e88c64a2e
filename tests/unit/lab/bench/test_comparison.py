"""Comparisons in pairs, against numbers from tables and by hand; their tables and figures."""

import dataclasses
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from farloop.algo.spec import RunSpec
from farloop.lab.bench.comparison import Comparison, Report, compare, half_width, report, table
from farloop.lab.bench.quality import QualityPlan, RunResult, Variant
from farloop.lab.plots.quality import frontier, plot_frontier

SpecOf = Callable[..., RunSpec]


def result(loss: float, seed: int = 0, *, up: int = 10, **changes: Any) -> RunResult:
    known: dict[str, Any] = {
        "key": "k", "seed": seed, "nodes": 2, "loss": loss, "bytes_up": up, "bytes_down": 20,
        "syncs": 2.0, "inner_steps": 8, "tokens": 128, "cpu_s": 1.0,
    }  # fmt: skip
    return RunResult(**(known | changes))


RESULTS = {
    "fp32/fp32": (result(2.0, 0, up=80), result(4.0, 1, up=80)),
    "q4/q4": (result(2.02, 0), result(4.08, 1, up=12)),
}
ONE_SEED = {label: runs[:1] for label, runs in RESULTS.items()}
SINGLE = (result(2.0, 0, nodes=1), result(2.0, 1, nodes=1))


def test_a_difference_is_in_percent_of_its_own_pair() -> None:
    """+1 % and +2 %: mean 1.5, standard deviation 1/√2, error ½, and t is 12.7062 for one degree of freedom."""
    baseline, variant = compare(RESULTS)
    assert variant.differences_percent == pytest.approx((1.0, 2.0))
    assert variant.mean_percent == pytest.approx(1.5)
    assert (variant.low_percent, variant.high_percent) == pytest.approx((1.5 - 6.3531, 1.5 + 6.3531), abs=1e-4)
    assert (variant.mean_loss, variant.bytes_up, variant.bytes_down) == (pytest.approx(3.05), 11, 20)
    assert (baseline.mean_percent, baseline.low_percent, baseline.high_percent) == (0.0, 0.0, 0.0)
    assert baseline.spread == pytest.approx(2**0.5)


def test_one_seed_has_a_difference_and_no_interval() -> None:
    variant = compare(ONE_SEED)[1]
    assert variant.mean_percent == pytest.approx(1.0)
    assert (variant.low_percent, variant.high_percent, variant.spread) == (None, None, None)
    assert not variant.within(100.0)


@pytest.mark.parametrize(
    ("samples", "quantile"),
    [(2, 12.7062), (3, 4.3027), (4, 3.1824), (5, 2.7764), (6, 2.5706), (10, 2.2622), (11, 2.2281), (31, 2.0423)],
)
def test_the_quantiles_are_those_of_the_tables(samples: int, quantile: float) -> None:
    """The standard deviation of 0 and n - 1 ones is 1/√n, so that the error is 1/n."""
    assert samples * half_width([0.0] + [1.0] * (samples - 1)) == pytest.approx(quantile, abs=5e-5)
    assert half_width([0.5] * samples) == 0.0
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / math.sqrt(3))


def test_a_bound_holds_where_the_whole_interval_lies_inside() -> None:
    variant = dataclasses.replace(compare(RESULTS)[1], low_percent=-0.1, high_percent=0.5)
    assert variant.within(0.5) and not variant.within(0.49)
    assert not dataclasses.replace(variant, low_percent=-0.6).within(0.5)


def test_fewer_bytes_are_those_that_the_baseline_moved() -> None:
    """100 a node, both ways, beside 30 and 32. Where a node alone is the baseline, it is fp32 data parallel."""
    assert [one.fewer_bytes for one in compare({**RESULTS, "single": SINGLE})] == [1.0, pytest.approx(100 / 31), None]
    against = compare({"single": SINGLE, "q4/q4": RESULTS["q4/q4"]}, parameters=1000)
    assert [one.fewer_bytes for one in against] == [None, pytest.approx(8 * 1000 * SINGLE[0].inner_steps / 31)]


def test_data_parallel_with_muon_is_a_second_yardstick() -> None:
    """Losses are 2.02 and 4.08 beside 1 and 2 of its own."""
    half = tuple(dataclasses.replace(run, loss=run.loss / 2) for run in RESULTS["q4/q4"])
    found = compare({**RESULTS, "muon-data-parallel lr=1e-3": half})
    assert [one.to_muon_percent for one in found[1:]] == pytest.approx([100.0, 0.0])
    assert compare(RESULTS)[1].to_muon_percent is None


def test_the_report_says_what_was_compared(spec_of: SpecOf, tmp_path: Path) -> None:
    specs = tuple(spec_of(seed=seed) for seed in (0, 1))
    plan = QualityPlan(variants=(Variant(label="fp32/fp32", specs=specs),), folder=tmp_path)
    found = report(plan, RESULTS, within_percent=0.5, command="farloop …")
    assert (found.baseline, found.seeds, found.confidence) == ("fp32/fp32", (0, 1), 0.95)
    assert found.command == "farloop …"
    assert found.variants == compare(RESULTS)


# --- tables


def comparison(label: str, mean: float, half: float, *, nodes: int = 2, fewer: float | None = 1.0) -> Comparison:
    return Comparison(
        label=label, nodes=nodes, losses=(2.0, 2.1), mean_loss=2.05, spread=0.0707, differences_percent=(mean, mean),
        mean_percent=mean, low_percent=mean - half, high_percent=mean + half, to_muon_percent=None,
        bytes_up=1_000_000, bytes_down=2_000_000, fewer_bytes=fewer, syncs=14.0, tokens=819_200, cpu_s=41.0,
    )  # fmt: skip


REPORT = Report(
    baseline="data-parallel nodes=2", seeds=(0, 1), confidence=0.95, within_percent=1.0,
    command="farloop lab bench quality --steps 7",
    variants=(
        comparison("data-parallel nodes=2", 0.0, 0.0),
        comparison("single", 0.1, 0.2, nodes=1, fewer=None),
        comparison("streaming nodes=2", 0.9, 0.4, fewer=210.4),
        comparison("diloco nodes=2", 4.0, 0.4, fewer=215.0),
    ),
)  # fmt: skip


def test_every_variant_has_its_row_and_a_verdict_of_the_whole_interval() -> None:
    shown = table(REPORT)
    rows = {first: rest for first, *rest in zip(*(column.cells for column in shown.columns), strict=True)}
    assert list(rows) == [variant.label for variant in REPORT.variants]
    assert rows["streaming nodes=2"] == [
        "2.0500 ± 0.0707", "+0.90 ± 0.40 %", "[yellow]open[/]", "–", "1.00 MB", "2.00 MB", "210×", "14", "41 s",
    ]  # fmt: skip
    assert [row[2] for row in rows.values()] == ["", "[green]yes[/]", "[yellow]open[/]", "[red]no[/]"]
    assert rows["single"][3:7] == ["–", "–", "–", "–"], "one node sends nothing"
    console = Console(file=io.StringIO(), width=140, record=True)
    console.print(shown)
    assert all(cell in console.export_text(clear=False) for cell in rows["data-parallel nodes=2"])


# --- figures

LADDER = {label: (result(1.0),) for label in ("data-parallel nodes=2", *(f"streaming nodes={n}" for n in range(2, 12)))}


@pytest.mark.parametrize("suffix", ["svg", "png"])
@pytest.mark.parametrize("results", [RESULTS, ONE_SEED, {"q4/q4": RESULTS["q4/q4"]}, {"single": SINGLE}, LADDER])
def test_a_figure_names_every_variant(tmp_path: Path, results: dict[str, tuple[RunResult, ...]], suffix: str) -> None:
    path = tmp_path / "new" / f"ends.{suffix}"
    seeds = len(next(iter(results.values())))
    compared = compare({**results, "single": SINGLE[:seeds], "q4": RESULTS["q4/q4"][:seeds]}, parameters=1000)
    plot_frontier(path, compared, title="a model", caption="nano, 2 nodes")
    if suffix == "svg":
        assert all(word in path.read_text() for word in (*results, "a model", "nano, 2 nodes", "single"))
    else:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_front_has_what_no_other_beats_in_bytes_without_more_loss() -> None:
    points = [
        comparison("data parallel", 0.0, 0.1, fewer=1.0),
        comparison("worse at equal bytes", 3.0, 0.1, fewer=200.0),
        comparison("good", -1.0, 0.1, fewer=200.0),
        comparison("few bytes", 4.0, 0.1, fewer=800.0),
        comparison("beaten in both", 5.0, 0.1, fewer=700.0),
    ]
    assert [found.label for found in frontier(points)] == ["good", "few bytes"]
    assert [found.label for found in frontier(points[:2])] == ["data parallel", "worse at equal bytes"]
