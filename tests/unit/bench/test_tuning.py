"""The same number of settings for every variant, and the best of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from farloop.algo.spec import RunSpec
from farloop.bench import quality
from farloop.bench.quality import (
    Knob,
    QualityPlan,
    RunFailed,
    RunResult,
    Trial,
    Tried,
    Variant,
    best_of,
    evenly_by_ratio,
    plan_of,
    run_key,
    settings_to_try,
    tune,
)

SpecOf = Callable[..., RunSpec]

NU = Knob(name="outer_lr", values=(0.4, 0.8, 1.0))
RATE = Knob(name="lr", values=(1e-3, 4e-3))


def test_every_combination_is_tried() -> None:
    points = settings_to_try((NU, RATE), rate=2e-3)
    assert len(points) == 6
    assert points[0] == {"outer_lr": 0.4, "lr": 1e-3}
    assert points[-1] == {"outer_lr": 1.0, "lr": 4e-3}


def test_who_lacks_a_knob_tries_as_many_learning_rates() -> None:
    """Around its default where none are given, else between those that are."""
    assert settings_to_try((NU,), without={"outer_lr"}, rate=2e-3) == ({"lr": 5e-4}, {"lr": 2e-3}, {"lr": 8e-3})
    both = settings_to_try((NU, RATE), without={"outer_lr"}, rate=2e-3)
    assert len(both) == 6
    assert (both[0], both[-1]) == ({"lr": 1e-3}, {"lr": 4e-3})


def test_a_learning_rate_that_a_variant_spells_stays() -> None:
    assert settings_to_try((NU, RATE), without={"lr"}, rate=None) == tuple({"outer_lr": v} for v in NU.values)
    assert settings_to_try((NU, RATE), without={"lr", "outer_lr"}, rate=None) == ()


def test_without_knobs_nothing_is_tried() -> None:
    assert settings_to_try((), rate=1e-3) == ()


def test_numbers_are_spread_evenly_by_ratio() -> None:
    assert evenly_by_ratio(1.0, 16.0, 5) == (1.0, 2.0, 4.0, 8.0, 16.0)
    assert evenly_by_ratio(1.0, 4.0, 1) == (2.0,)


def test_the_best_is_taken_and_an_edge_is_told() -> None:
    def tried(*losses: float | None) -> list[Tried]:
        return [Tried(settings={"outer_lr": v}, loss=loss) for v, loss in zip(NU.values, losses, strict=True)]

    inside, edge = best_of("a", 7, tried(2.0, 1.0, 3.0)), best_of("a", 7, tried(2.0, None, 3.0))
    assert (inside.picked, inside.at_edge, inside.seed) == ({"outer_lr": 0.8}, (), 7)
    assert (edge.picked, edge.at_edge) == ({"outer_lr": 0.4}, ("outer_lr",))
    with pytest.raises(RunFailed, match="a: not one of the 3 settings"):
        best_of("a", 7, tried(None, None, None))


def test_a_search_takes_its_best_and_survives_a_run_that_breaks(
    spec_of: SpecOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = (0.4, 0.8, 1.0)
    trials = {"a": [Trial(settings={"outer_lr": v}, spec=spec_of(outer_lr=v, seed=1000)) for v in values], "b": []}
    plan = QualityPlan(variants=(Variant(label="a", specs=(spec_of(),)),), folder=tmp_path)
    searches = plan_of(trials, plan)
    assert searches is not None
    assert [variant.label for variant in searches.variants] == [f"a, outer_lr={v:g}" for v in values]
    assert (searches.folder, searches.seeds) == (tmp_path, (1000,))
    losses = dict(zip(searches.runs, (3.0, 2.0), strict=False))

    def fake(plan: QualityPlan, **options: object) -> dict[str, RunResult]:
        assert options["broken_is_none"]
        return {
            key: RunResult(
                key=key,
                seed=1000,
                nodes=2,
                loss=loss,
                curve=(),
                bytes_up=1,
                bytes_down=1,
                moved=(),
                syncs=1.0,
                inner_steps=1,
                tokens=1,
                cpu_s=1.0,
            )
            for key, loss in losses.items()
        }

    monkeypatch.setattr(quality, "run_each", fake)
    (found,) = tune(searches, trials, jobs=1)
    assert [one.loss for one in found.tried] == [3.0, 2.0, None]
    assert found.picked == {"outer_lr": 0.8}
    assert run_key(trials["a"][1].spec) in losses


def test_with_nothing_to_try_there_is_no_plan(spec_of: SpecOf, tmp_path: Path) -> None:
    plan = QualityPlan(variants=(Variant(label="a", specs=(spec_of(),)),), folder=tmp_path)
    assert plan_of({"a": ()}, plan) is None
