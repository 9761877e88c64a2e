"""From the words of `farloop bench quality` to the runs of pairs."""

from pathlib import Path
from typing import Any

import pytest

from farloop.bench.quality import QualityPlan
from farloop.bench.quality_spec import plan_quality
from farloop.config.exit_codes import CommandError
from farloop.config.run_spec import DataConfig

SMALLEST = {"model": "nano", "nodes": 2, "steps": 60, "h": 30, "sequence_tokens": 16, "evaluation_sequences": 4}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(f"line {number} of a text\n" for number in range(500)))
    return path


def plan_of(text: Path, *variants: str, **base: Any) -> QualityPlan:
    return plan_quality(variants, {**SMALLEST, **base}, seeds=2, data=DataConfig(path=text), out=Path("somewhere"))


def test_every_variant_has_a_run_for_every_seed(text: Path) -> None:
    plan = plan_of(text, "fp32/fp32", "q4/q4   h=15", seed=7)
    assert [variant.label for variant in plan.variants] == ["fp32/fp32", "q4/q4 h=15"]
    assert plan.seeds == (7, 8)
    assert {spec.terms.h for spec in plan.variants[1].specs} == {15}
    first = [[spec.identity.anchor_digests for spec in variant.specs] for variant in plan.variants]
    assert first[0] == first[1], "pairs begin with the same weights"
    assert plan.folder == Path("somewhere/runs")


def test_settings_for_all_are_stronger_than_the_quiet_ones(text: Path) -> None:
    (quiet,), (given,) = (plan_of(text, "q4/q4", **base).variants for base in ({}, {"min_lr": 1e-4}))
    assert (quiet.specs[0].terms.lr.minimum, given.specs[0].terms.lr.minimum) == (1e-5, 1e-4)


def test_what_a_method_fixes_is_not_asked_of_it(text: Path) -> None:
    """H = 30 for all is not for data parallel, which has no H."""
    plan = plan_of(text, "method=data-parallel", "q4/q4")
    assert [variant.specs[0].terms.h for variant in plan.variants] == [1, 30]
    with pytest.raises(CommandError, match="method=data-parallel h=2: data-parallel runs with h = 1 only"):
        plan_of(text, "method=data-parallel h=2")


def test_a_curve_has_some_fifteen_points(text: Path) -> None:
    plan = plan_of(text, "method=data-parallel", "q4/q4", "q4/q4 evaluate_every_rounds=2")
    assert [variant.specs[0].terms.evaluate_every_rounds for variant in plan.variants] == [4, 1, 2]


def test_what_a_run_cannot_be_names_the_variant(text: Path) -> None:
    with pytest.raises(CommandError, match=r"q5/q4: .*q5"):
        plan_of(text, "q5/q4")
    with pytest.raises(CommandError, match="named twice"):
        plan_of(text, "q4/q4", "q4/q4")
