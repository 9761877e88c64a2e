"""From the words of `farloop bench quality` to runs: spelling, grids, and plans on equal tokens."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from farloop.algo.methods import METHODS
from farloop.bench.quality import SEED_OFFSET, QualityPlan
from farloop.bench.quality_spec import (
    Grid,
    GridPlan,
    asked_for,
    command_of,
    default_variants,
    load_grid,
    parse_knobs,
    parse_variant,
    plan_grid,
    plan_quality,
    run_settings,
    share_of,
    with_baseline,
)
from farloop.config.exit_codes import CommandError
from farloop.config.run_spec import DataConfig

# --- variants, settings and knobs


@pytest.mark.parametrize(
    ("spelled", "fields"),
    [
        ("fp32/q4", {"codec_up": "fp32", "codec_down": "q4"}),
        ("h=15 method=diloco", {"h": 15, "method": "diloco"}),
        (
            "mix=0.25 topk:k=128,beta=0.9/q4",
            {"codec_up": "topk:k=128,beta=0.9", "codec_down": "q4", "mix": 0.25},
        ),
        (
            "streaming nodes=4 h=30 codec=q4r:step=0.7 outer_lr=0.4 peak_lr=2e-3",
            {"method": "streaming", "nodes": 4, "h": 30, "codec_up": "q4r:step=0.7", "codec_down": "q4r:step=0.7",
             "outer_lr": 0.4, "lr": 2e-3},
        ),
        (
            "single lr=1e-3",
            {"method": "diloco", "nodes": 1, "codec_up": "fp32", "codec_down": "fp32", "outer_lr": 1.0,
             "outer_momentum": 0.0, "lr": 1e-3},
        ),
        *((f"{method} nodes=3", {"method": method, "nodes": 3}) for method in METHODS),
    ],
)  # fmt: skip
def test_a_variant_is_a_method_codecs_settings_or_several_of_these(spelled: str, fields: dict[str, Any]) -> None:
    assert parse_variant(spelled) == fields


@pytest.mark.parametrize(
    ("spelled", "what"),
    [
        ("", "empty variant"),
        ("q4", "codecs are spelled UP/DOWN, as q4/q4, or codec=q4 for both ways"),
        ("streamin nodes=2", "did you mean streaming?"),
        ("xyz", "neither a method nor UP/DOWN, as q4/q4, nor KEY=VALUE"),
        ("streaming diloco", "one method is wanted, not streaming and diloco"),
        ("q4/", "one pair of codecs"),
        ("q4/q4/q4", "one pair of codecs"),
        ("q4/q4 q8/q8", "one pair of codecs"),
        ("step=15", "no setting 'step'; did you mean steps?"),
        ("peek_lr=1e-3", "no setting 'peek_lr'; did you mean peak_lr?"),
        ("=15", "is not KEY=VALUE"),
        ("h=often", "a whole number is wanted"),
        ("seed=3", "seed is the same for all variants"),
        ("q4/q4 sequence_tokens=64", "sequence_tokens is the same for all variants"),
        ("init=/some/where", "init is the same for all variants"),
    ],
)
def test_a_bad_spelling_is_said_in_a_line(spelled: str, what: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse_variant(spelled)
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_fixed_says_how_it_is_set() -> None:
    for word, how in (("steps=3", "--steps"), ("batch_sequences=2", "--global-batch"), ("seed=2", "--set")):
        with pytest.raises(CommandError, match=how):
            parse_variant(word, fixed={"steps", "batch_sequences", "seed"})


def test_settings_are_typed_and_knobs_are_numbers_in_rising_order() -> None:
    settings = run_settings(["min_lr=1e-5", "outer_correction=false"], origin="--set")
    assert settings == {"min_lr": 1e-5, "outer_correction": False}
    nu, rate = parse_knobs(["outer_lr=0.8,0.4", "peak_lr=1e-3"])
    assert (nu.name, nu.values, rate.name, rate.values) == ("outer_lr", (0.4, 0.8), "lr", (1e-3,))


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("outer_lr", "KEY=VALUE,VALUE"),
        ("outer_lr=", "KEY=VALUE,VALUE"),
        ("outer_rl=1", "outer_rl cannot be tuned; did you mean outer_lr?"),
        ("h=15,30", "h cannot be tuned"),
        ("outer_lr=0.4,high", "'high' is not a number"),
        ("outer_lr=0.4,,1", "'' is not a number"),
        ("outer_lr=0.4,0", "a number above 0"),
        ("outer_lr=nan", "a number above 0"),
        ("outer_lr=0.4,0.40", "given twice"),
        ("lr=1e-3 peak_lr=2e-3", "lr is given twice"),
    ],
)
def test_a_bad_knob_is_said_in_a_line(word: str, what: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse_knobs(word.split())
    assert what in str(caught.value)


# --- grids


def grid_of(tmp_path: Path, text: str) -> Grid:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return load_grid(path)


def test_the_default_grid_is_eight_variants_of_methods_that_exist() -> None:
    variants = default_variants()
    assert len(variants) == 8
    assert variants[0].startswith("data-parallel")
    for spelled in variants:
        assert parse_variant(spelled)["method"] in METHODS


def test_a_file_says_the_same_as_a_command_line(tmp_path: Path) -> None:
    grid = grid_of(
        tmp_path,
        """
        model = "nano"
        steps = 30
        global_batch = 8
        seeds = 2
        [set]
        lr = 4e-3
        outer_correction = false
        [tune]
        outer_lr = [0.4, 1]
        [[variant]]
        nodes = [2, 4]
        method = "streaming"
        codec = "q4"
        h = [30, 60]
        [[variant]]
        method = "single"
        """,
    )
    assert grid.variants == (
        "streaming nodes=2 codec=q4 h=30",
        "streaming nodes=2 codec=q4 h=60",
        "streaming nodes=4 codec=q4 h=30",
        "streaming nodes=4 codec=q4 h=60",
        "single",
    )
    assert (grid.settings, grid.tune) == (("lr=0.004", "outer_correction=false"), ("outer_lr=0.4,1",))
    assert (grid.model, grid.steps, grid.global_batch, grid.seeds) == ("nano", 30, 8, 2)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("step = 3", "step: there is no such key; did you mean steps?"),
        ("variants = 3", "there is no such key; did you mean variant?"),
        ("steps = 0", "steps: the least is 1, not 0"),
        ("steps = '3'", "steps: a whole number is wanted, not '3'"),
        ("model = 3", "model: text in quotes is wanted"),
        ("variant = 3", r"a list of tables is wanted: \[\[variant\]\]"),
        ("tune = 3", r"a table is wanted: \[tune\]"),
        ("[tune]\nouter_lr = 3", "a list of numbers is wanted"),
        ("[[variant]]\nmethod = 'a b'", "without spaces"),
        ("steps = ", "is not TOML"),
    ],
)
def test_a_bad_file_is_said_in_a_line(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(CommandError, match=what) as caught:
        grid_of(tmp_path, text)
    assert str(tmp_path / "grid.toml") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_baseline_is_data_parallel_and_comes_first() -> None:
    assert with_baseline(("streaming  nodes=2",)) == ("data-parallel nodes=2", "streaming nodes=2")
    assert with_baseline(("streaming nodes=2", "single")) == ("single", "streaming nodes=2")
    assert with_baseline(("single", "data-parallel nodes=4")) == ("data-parallel nodes=4", "single")
    assert with_baseline(("single", "nodes=4 method=data-parallel")) == ("nodes=4 method=data-parallel", "single")


def test_options_are_stronger_than_the_file_and_lists_add_to_it(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text("steps = 30\nseeds = 2\n[set]\nlr = 1e-3\n[[variant]]\nmethod = 'diloco'\n")
    grid = asked_for(
        path,
        {"steps": 60, "seeds": None, "h": 15, "nodes": None},
        {"variants": ["streaming"], "tune": ["outer_lr=1"], "settings": ["clip=2"]},
    )
    assert (grid.steps, grid.seeds) == (60, 2)
    assert grid.settings == ("lr=0.001", "h=15", "clip=2")
    assert grid.variants == ("data-parallel nodes=2", "diloco", "streaming")
    assert grid.tune == ("outer_lr=1",)
    nothing: dict[str, list[str] | None] = {"variants": None, "tune": None, "settings": None}
    assert asked_for(None, {}, nothing).variants == default_variants()
    assert asked_for(None, {}, {**nothing, "variants": ["diloco"]}).variants == ("data-parallel nodes=2", "diloco")


def test_nodes_share_a_step_equally() -> None:
    grid = Grid(global_batch=16)
    assert [share_of(grid, nodes, "v") for nodes in (1, 2, 4)] == [16, 8, 4]
    with pytest.raises(CommandError, match=r"v: 3 nodes cannot share 16 .* take nodes=2, or --global-batch 15"):
        share_of(grid, 3, "v")


def test_the_command_repeats_the_grid() -> None:
    grid = Grid(
        variants=("single", "streaming nodes=2"), steps=7, global_batch=4, seeds=2, settings=("lr=1e-3",),
        tune=("outer_lr=0.4,1",),
    )  # fmt: skip
    words = shlex.split(command_of(grid, options=["--data", "some text"]))
    assert words[:3] == ["farloop", "bench", "quality"]
    options = list(zip(words[3::2], words[4::2], strict=True))
    assert options == [
        ("--model", "micro"), ("--steps", "7"), ("--global-batch", "4"), ("--seeds", "2"), ("--set", "lr=1e-3"),
        ("--tune", "outer_lr=0.4,1"), ("--variant", "single"), ("--variant", "streaming nodes=2"),
        ("--data", "some text"),
    ]  # fmt: skip


# --- plans

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
    assert {spec.terms.schedule.h for spec in plan.variants[1].specs} == {15}
    first = [[spec.identity.anchor_digests for spec in variant.specs] for variant in plan.variants]
    assert first[0] == first[1], "pairs begin with the same weights"
    assert plan.folder == Path("somewhere/runs")


def test_settings_for_all_are_stronger_than_the_quiet_ones(text: Path) -> None:
    (quiet,), (given,) = (plan_of(text, "q4/q4", **base).variants for base in ({}, {"min_lr": 1e-4}))
    assert (quiet.specs[0].terms.schedule.lr.minimum, given.specs[0].terms.schedule.lr.minimum) == (1e-5, 1e-4)


def test_what_a_method_fixes_is_not_asked_of_it(text: Path) -> None:
    """H = 30 for all is not for data parallel, which has no H."""
    plan = plan_of(text, "method=data-parallel", "q4/q4")
    assert [variant.specs[0].terms.schedule.h for variant in plan.variants] == [1, 30]
    with pytest.raises(CommandError, match="method=data-parallel h=2: data-parallel runs with h = 1 only"):
        plan_of(text, "method=data-parallel h=2")


def test_a_curve_has_some_fifteen_points(text: Path) -> None:
    plan = plan_of(text, "method=data-parallel", "q4/q4", "q4/q4 evaluate_every_rounds=2")
    assert [variant.specs[0].terms.schedule.evaluate_every_rounds for variant in plan.variants] == [4, 1, 2]


def test_what_a_run_cannot_be_names_the_variant(text: Path) -> None:
    with pytest.raises(CommandError, match=r"q5/q4: .*q5"):
        plan_of(text, "q5/q4")
    with pytest.raises(CommandError, match="named twice"):
        plan_of(text, "q4/q4", "q4/q4")


def planned(text: Path, *variants: str, settings: tuple[str, ...] = (), **fields: Any) -> GridPlan:
    known = {"model": "nano", "steps": 60, "global_batch": 8, "seeds": 2, **fields}
    grid = Grid(variants=variants, settings=("sequence_tokens=16", "evaluation_sequences=4", *settings), **known)
    return plan_grid(grid, data=DataConfig(path=text), out=Path("somewhere"))


def test_every_variant_trains_the_same_tokens(text: Path) -> None:
    plan = planned(text, "data-parallel nodes=2", "single", *(f"{m} nodes=4" for m in METHODS)).plan
    terms = [spec.terms for variant in plan.variants for spec in variant.specs]
    assert {one.schedule.steps * one.admission.min_nodes * one.inner.batch_sequences for one in terms} == {60 * 8}
    assert {one.schedule.steps for one in terms} == {60}
    assert {one.admission.min_nodes for one in terms} == {1, 2, 4}
    assert plan.seeds == (0, 1)


def test_the_learning_rate_ends_at_a_share_of_its_peak(text: Path) -> None:
    peaks = planned(text, "single lr=0.01", "single lr=0.02", "single min_lr=0.001").plan
    assert [v.specs[0].terms.schedule.lr.minimum for v in peaks.variants] == [
        pytest.approx(5e-4),
        pytest.approx(1e-3),
        1e-3,
    ]
    given = planned(text, "single", settings=("min_lr=0.002",)).plan
    assert given.variants[0].specs[0].terms.schedule.lr.minimum == 0.002


@pytest.mark.parametrize(
    ("variant", "grid", "what"),
    [
        ("single steps=3", {}, "steps is the same for all variants; set it with --steps"),
        ("single batch_sequences=3", {}, "it is --global-batch shared by the nodes"),
        ("single", {"settings": ("batch_sequences=3",)}, "say --global-batch instead"),
        ("diloco nodes=3", {}, "diloco nodes=3: 3 nodes cannot share 8"),
        ("diloco nodes=0", {}, "nodes is 0; the least is 1"),
        ("streaming tau=99", {}, "streaming tau=99: tau is 99; streaming with h = 30 takes 0 to"),
        ("diloco codec=q5", {}, "diloco codec=q5: .*q5"),
        ("single", {"model": "nanno"}, "there is no 'nanno'; did you mean nano"),
        ("single", {"seeds": 1001}, "at most 1000"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(text: Path, variant: str, grid: dict[str, Any], what: str) -> None:
    with pytest.raises(CommandError, match=what) as caught:
        planned(text, variant, **grid)
    assert "\n" not in str(caught.value)


def test_all_variants_are_tuned_by_the_same_number_of_runs_on_another_seed(text: Path) -> None:
    found = planned(
        text, "data-parallel nodes=2", "single", "streaming nodes=2", "async nodes=2", tune=("outer_lr=0.4,0.7,1",)
    )
    assert {len(trials) for trials in found.trials.values()} == {3}
    assert {t.spec.identity.seed for trials in found.trials.values() for t in trials} == {SEED_OFFSET}
    assert [set(t.settings) for t in found.trials["data-parallel nodes=2"]] == [{"lr"}] * 3
    assert [set(t.settings) for t in found.trials["single"]] == [{"lr"}] * 3
    assert [t.spec.terms.outer.lr for t in found.trials["streaming nodes=2"]] == [0.4, 0.7, 1.0]
    assert [t.spec.terms.outer.lr for t in found.trials["async nodes=2"]] == [0.4, 0.7, 1.0]


def test_two_knobs_make_as_many_runs_for_who_has_one(text: Path) -> None:
    found = planned(text, "data-parallel", "streaming", tune=("outer_lr=0.4,1", "peak_lr=1e-3,2e-3,4e-3"))
    assert [len(trials) for trials in found.trials.values()] == [6, 6]
    rates = [t.spec.terms.schedule.lr.peak for t in found.trials["data-parallel"]]
    assert rates == sorted(rates) and (rates[0], rates[-1]) == (1e-3, 4e-3)


def test_what_a_variant_spells_is_not_tuned(text: Path) -> None:
    found = planned(text, "streaming outer_lr=0.5 lr=1e-3", tune=("outer_lr=0.4,1",))
    assert found.trials == {"streaming outer_lr=0.5 lr=1e-3": ()}
    assert planned(text, "single").trials == {"single": ()}, "without knobs"


def test_what_was_picked_goes_into_the_runs_and_not_into_the_label(text: Path) -> None:
    grid = Grid(variants=("streaming", "single"), model="nano", steps=60, settings=("sequence_tokens=16",), seeds=1)
    picked = {"streaming": {"outer_lr": 0.3, "lr": 1e-3}}
    found = plan_grid(grid, data=DataConfig(path=text), out=Path("somewhere"), picked=picked)
    first, second = found.plan.variants
    assert (first.label, first.specs[0].terms.outer.lr, first.specs[0].terms.schedule.lr.peak) == (
        "streaming",
        0.3,
        1e-3,
    )
    assert second.specs[0].terms.schedule.lr.peak != 1e-3
    assert found.trials == {}
