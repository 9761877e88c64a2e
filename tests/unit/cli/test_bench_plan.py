"""From a grid to runs that all train the same tokens."""

from pathlib import Path
from typing import Any

import pytest

from farloop.algo.methods import METHODS
from farloop.bench.quality import SEED_OFFSET
from farloop.bench.quality_spec import Grid, GridPlan, plan_grid
from farloop.config.exit_codes import CommandError
from farloop.config.run_spec import DataConfig

SMALLEST = ("sequence_tokens=16", "evaluation_sequences=4")


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"line {number} of a text\n" for number in range(500)))
    return path


def planned(text: Path, *variants: str, settings: tuple[str, ...] = (), **fields: Any) -> GridPlan:
    known = {"model": "nano", "steps": 60, "global_batch": 8, "seeds": 2, **fields}
    grid = Grid(variants=variants, settings=(*SMALLEST, *settings), **known)
    return plan_grid(grid, data=DataConfig(path=text), out=Path("somewhere"))


def test_every_variant_trains_the_same_tokens(text: Path) -> None:
    plan = planned(text, "data-parallel nodes=2", "single", *(f"{m} nodes=4" for m in METHODS)).plan
    terms = [spec.terms for variant in plan.variants for spec in variant.specs]
    assert {one.steps * one.min_nodes * one.batch_sequences for one in terms} == {60 * 8}
    assert {one.steps for one in terms} == {60}
    assert {one.min_nodes for one in terms} == {1, 2, 4}
    assert plan.seeds == (0, 1)


def test_the_learning_rate_ends_at_a_share_of_its_peak(text: Path) -> None:
    peaks = planned(text, "single lr=0.01", "single lr=0.02", "single min_lr=0.001").plan
    assert [v.specs[0].terms.lr.minimum for v in peaks.variants] == [pytest.approx(5e-4), pytest.approx(1e-3), 1e-3]
    given = planned(text, "single", settings=("min_lr=0.002",)).plan
    assert given.variants[0].specs[0].terms.lr.minimum == 0.002


@pytest.mark.parametrize(
    ("variant", "settings", "what"),
    [
        ("single steps=3", (), "steps is the same for all variants; set it with --steps"),
        ("single batch_sequences=3", (), "it is --global-batch shared by the nodes"),
        ("single", ("batch_sequences=3",), "say --global-batch instead"),
        ("diloco nodes=3", (), "diloco nodes=3: 3 nodes cannot share 8"),
        ("diloco nodes=0", (), "nodes is 0; the least is 1"),
        ("streaming tau=99", (), "streaming tau=99: tau is 99; streaming with h = 30 takes 0 to"),
        ("diloco codec=q5", (), "diloco codec=q5: .*q5"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(text: Path, variant: str, settings: tuple[str, ...], what: str) -> None:
    with pytest.raises(CommandError, match=what) as caught:
        planned(text, variant, settings=settings)
    assert "\n" not in str(caught.value)


def test_all_variants_are_tuned_by_the_same_number_of_runs_on_another_seed(text: Path) -> None:
    found = planned(
        text, "data-parallel nodes=2", "single", "streaming nodes=2", "async nodes=2", tune=("outer_lr=0.4,0.7,1",)
    )
    assert {len(trials) for trials in found.trials.values()} == {3}
    assert {t.spec.identity.seed for trials in found.trials.values() for t in trials} == {SEED_OFFSET}
    assert [set(t.settings) for t in found.trials["data-parallel nodes=2"]] == [{"lr"}] * 3
    assert [set(t.settings) for t in found.trials["single"]] == [{"lr"}] * 3
    assert [t.spec.terms.outer_lr for t in found.trials["streaming nodes=2"]] == [0.4, 0.7, 1.0]
    assert [t.spec.terms.outer_lr for t in found.trials["async nodes=2"]] == [0.4, 0.7, 1.0]


def test_two_knobs_make_as_many_runs_for_who_has_one(text: Path) -> None:
    found = planned(text, "data-parallel", "streaming", tune=("outer_lr=0.4,1", "peak_lr=1e-3,2e-3,4e-3"))
    assert [len(trials) for trials in found.trials.values()] == [6, 6]
    rates = [t.spec.terms.lr.peak for t in found.trials["data-parallel"]]
    assert rates == sorted(rates) and (rates[0], rates[-1]) == (1e-3, 4e-3)


def test_what_a_variant_spells_is_not_tuned(text: Path) -> None:
    found = planned(text, "streaming outer_lr=0.5 lr=1e-3", tune=("outer_lr=0.4,1",))
    assert found.trials == {"streaming outer_lr=0.5 lr=1e-3": ()}


def test_without_knobs_there_are_no_trials(text: Path) -> None:
    assert planned(text, "single").trials == {"single": ()}


def test_what_was_picked_goes_into_the_runs_and_not_into_the_label(text: Path) -> None:
    grid = Grid(variants=("streaming", "single"), model="nano", steps=60, settings=SMALLEST, seeds=1)
    picked = {"streaming": {"outer_lr": 0.3, "lr": 1e-3}}
    found = plan_grid(grid, data=DataConfig(path=text), out=Path("somewhere"), picked=picked)
    first, second = found.plan.variants
    assert (first.label, first.specs[0].terms.outer_lr, first.specs[0].terms.lr.peak) == ("streaming", 0.3, 1e-3)
    assert second.specs[0].terms.lr.peak != 1e-3
    assert found.trials == {}


def test_a_model_that_is_not_there_names_the_nearest(text: Path) -> None:
    with pytest.raises(CommandError, match="there is no 'nanno'; did you mean nano"):
        planned(text, "single", model="nanno")


def test_seeds_do_not_reach_that_of_the_tuning(text: Path) -> None:
    with pytest.raises(CommandError, match="at most 1000"):
        planned(text, "single", seeds=1001)
