"""Comparing in pairs: the numbers against hand-made ones, and the figure of them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from farloop.algo.spec import RunSpec
from farloop.bench.comparison import compare, report
from farloop.bench.quality import QualityPlan, RunResult, Variant
from farloop.plots.style import plot

SpecOf = Callable[..., RunSpec]


def result(loss: float, seed: int, *, up: int = 10, nodes: int = 2) -> RunResult:
    return RunResult(
        key="k", seed=seed, nodes=nodes, loss=loss, curve=((2.0, loss + 1), (4.0, loss)), bytes_up=up, bytes_down=20,
        moved=(up // 2, up + 20), syncs=2.0, inner_steps=8, tokens=128, cpu_s=1.0,
    )  # fmt: skip


RESULTS = {
    "fp32/fp32": (result(2.0, 0, up=80), result(4.0, 1, up=80)),
    "q4/q4": (result(2.02, 0), result(4.08, 1, up=12)),
}


def test_a_difference_is_in_percent_of_its_own_pair() -> None:
    """+1 % and +2 %: mean 1.5, standard deviation 1/√2, error ½, and t is 12.7062 for one degree of freedom."""
    baseline, variant = compare(RESULTS)
    assert variant.differences_percent == pytest.approx((1.0, 2.0))
    assert variant.mean_percent == pytest.approx(1.5)
    assert (variant.low_percent, variant.high_percent) == pytest.approx((1.5 - 6.3531, 1.5 + 6.3531), abs=1e-4)
    assert (variant.mean_loss, variant.bytes_up, variant.bytes_down) == (pytest.approx(3.05), 11, 20)
    assert (baseline.mean_percent, baseline.low_percent, baseline.high_percent) == (0.0, 0.0, 0.0)


def test_a_bound_holds_where_the_whole_interval_lies_inside() -> None:
    variant = dataclasses.replace(compare(RESULTS)[1], low_percent=-0.1, high_percent=0.5)
    assert variant.within(0.5)
    assert not variant.within(0.49)
    assert not dataclasses.replace(variant, low_percent=-0.6).within(0.5)


def test_one_seed_has_a_difference_and_no_interval() -> None:
    variant = compare({label: runs[:1] for label, runs in RESULTS.items()})[1]
    assert variant.mean_percent == pytest.approx(1.0)
    assert variant.low_percent is None and variant.high_percent is None
    assert not variant.within(100.0)


def test_the_spread_is_that_of_the_seeds() -> None:
    """Of 2 and 4: √2."""
    assert compare(RESULTS)[0].spread == pytest.approx(2**0.5)
    assert compare({label: runs[:1] for label, runs in RESULTS.items()})[0].spread is None


def test_fewer_bytes_are_those_that_the_baseline_moved() -> None:
    """100 a node, both ways, beside 30 and 32."""
    baseline, variant = compare(RESULTS)
    assert baseline.fewer_bytes == 1.0
    assert variant.fewer_bytes == pytest.approx(100 / 31)


def test_a_node_alone_moves_nothing_to_be_compared() -> None:
    alone = {**RESULTS, "single": tuple(result(2.0, seed, nodes=1) for seed in (0, 1))}
    assert compare(alone)[2].fewer_bytes is None


def test_beside_a_single_node_bytes_are_counted_against_data_parallel_in_fp32() -> None:
    """4 bytes a parameter, up and down, at each step."""
    single = tuple(result(2.0, seed, nodes=1) for seed in (0, 1))
    baseline, variant = compare({"single": single, "q4/q4": RESULTS["q4/q4"]}, parameters=1000)
    assert baseline.fewer_bytes is None
    assert variant.fewer_bytes == pytest.approx(8 * 1000 * single[0].inner_steps / 31)


def test_the_report_says_what_was_compared(spec_of: SpecOf, tmp_path: Path) -> None:
    specs = tuple(spec_of(seed=seed) for seed in (0, 1))
    plan = QualityPlan(variants=(Variant(label="fp32/fp32", specs=specs),), folder=tmp_path)
    found = report(plan, compare(RESULTS), within_percent=0.5, command="farloop …", machine="a machine", commit="abc")
    assert (found.baseline, found.seeds, found.confidence) == ("fp32/fp32", (0, 1), 0.95)
    assert (found.command, found.machine, found.commit, found.tuned) == ("farloop …", "a machine", "abc", ())
    assert [variant.label for variant in found.variants] == ["fp32/fp32", "q4/q4"]


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_figure_names_every_variant(tmp_path: Path, seeds: int, suffix: str) -> None:
    results = {label: runs[:seeds] for label, runs in RESULTS.items()}
    path = tmp_path / "new" / f"quality.{suffix}"
    plot(path, compare(results), results, within_percent=0.5, caption="nano, 2 nodes")
    content = path.read_bytes()
    if suffix == "svg":
        assert all(label.encode() in content for label in (*results, "nano, 2 nodes"))
    else:
        assert content.startswith(b"\x89PNG")


def test_a_baseline_alone_has_a_figure_too(tmp_path: Path) -> None:
    alone = {"q4/q4": RESULTS["q4/q4"]}
    plot(tmp_path / "alone.svg", compare(alone), alone, within_percent=0.5, caption="")
    assert (tmp_path / "alone.svg").exists()
