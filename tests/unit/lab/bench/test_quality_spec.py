"""From the words of `farloop lab bench quality` to runs: spelling, grids, and plans on equal tokens."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from stories import StoryText, all_stories, check_story
from typer.testing import CliRunner

from farloop.algo.methods import METHODS
from farloop.cli.main import app
from farloop.config.exit_codes import CommandError
from farloop.config.settings import run_settings
from farloop.lab.bench import command as bench
from farloop.lab.bench.quality import QualityPlan
from farloop.lab.bench.quality_spec import (
    DEFAULT_VARIANTS,
    FRONTIER,
    Grid,
    asked_for,
    baseline_first,
    command_of,
    load_grid,
    parse_variant,
    plan_grid,
    share_of,
)
from farloop.node.settings import PRESETS, VOCABULARY, DataConfig

# --- words


@all_stories(__file__, "variants")
def test_variants(path: Path, story: StoryText, rewrite: bool) -> None:
    def parsed(spelled: str) -> str:
        try:
            return ", ".join(f"{key} {value}" for key, value in parse_variant(spelled.strip("'")).items())
        except CommandError as refused:
            assert "\n" not in str(refused)
            return str(refused)

    check_story(path, story, parsed, rewrite=rewrite)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_a_variant(method: str) -> None:
    assert parse_variant(f"{method} nodes=3") == {"method": method, "nodes": 3}


def test_settings_are_typed() -> None:
    assert run_settings(["min_lr=1e-5", "outer_correction=false"], origin="--set") == {
        "min_lr": 1e-5,
        "outer_correction": False,
    }


# --- grids

FILE = """
model = "nano"
steps = 30
global_batch = 8
seeds = 2
[set]
lr = 4e-3
outer_correction = false
[[variant]]
nodes = [2, 4]
method = "streaming"
codec = "q4"
h = [30, 60]
[[variant]]
method = "single"
"""


def grid_of(folder: Path, text: str) -> Grid:
    path = folder / "grid.toml"
    path.write_text(text)
    return load_grid(path)


def test_a_file_says_the_same_as_a_command_line(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, FILE)
    product = [f"streaming nodes={nodes} codec=q4 h={h}" for nodes in (2, 4) for h in (30, 60)]
    assert grid.variants == (*product, "single")
    assert grid.settings == ("lr=0.004", "outer_correction=false")
    assert (grid.model, grid.steps, grid.global_batch, grid.seeds) == ("nano", 30, 8, 2)


@all_stories(__file__, "grids")
def test_bad_files(tmp_path: Path, path: Path, story: StoryText, rewrite: bool) -> None:
    def refused(text: str) -> str:
        with pytest.raises(CommandError) as caught:
            grid_of(tmp_path, text)
        assert str(tmp_path / "grid.toml") in str(caught.value) and "\n" not in str(caught.value)
        what, is_not, _ = str(caught.value).replace(str(tmp_path), "").partition("is not TOML")
        return what + is_not  # why is Python's

    check_story(path, story, refused, rewrite=rewrite)


def test_the_baseline_is_data_parallel_or_one_node_or_the_first() -> None:
    for variants, expected in (
        (("streaming  nodes=2", "diloco"), ("streaming nodes=2", "diloco")),
        (("streaming nodes=2", "single"), ("single", "streaming nodes=2")),
        (("single", "data-parallel nodes=4"), ("data-parallel nodes=4", "single")),
        (("single", "nodes=4 method=data-parallel"), ("nodes=4 method=data-parallel", "single")),
    ):
        assert baseline_first(variants) == expected
    for variants in (DEFAULT_VARIANTS, FRONTIER):
        assert variants[0] == "data-parallel nodes=2" and len(set(variants)) == len(variants)
        assert {parse_variant(spelled)["method"] for spelled in variants} <= METHODS.keys()


def test_the_frontier_is_a_comparison_of_its_variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(bench, "quality", lambda variants, **options: asked.update(options, variants=variants))
    words = ["lab", "bench", "frontier", "--data", str(tmp_path), "--seeds", "1", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert asked["variants"] == list(FRONTIER) and (asked["data"], asked["seeds"]) == (tmp_path, 1)
    assert (asked["model"], asked["steps"], asked["out"]) == ("nano", 2160, tmp_path / "out")


def test_options_override_the_file_and_lists_add_to_it(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text("steps = 30\nseeds = 2\n[set]\nlr = 1e-3\n[[variant]]\nmethod = 'diloco'\n")
    lists: dict[str, list[str] | None] = {"variants": ["streaming"], "settings": ["h=15"]}
    grid = asked_for(path, {"steps": 60, "seeds": None}, lists)
    assert (grid.steps, grid.seeds, grid.settings) == (60, 2, ("lr=0.001", "h=15"))
    assert grid.variants == ("diloco", "streaming")
    assert asked_for(None, {}, dict.fromkeys(lists)).variants == DEFAULT_VARIANTS


def test_the_grid_of_the_paper_has_its_parameters_and_tokens_and_every_run_can_be_planned(text: Path) -> None:
    longer = text.with_name("longer.txt")
    longer.write_text(text.read_text() + text.read_text()[::-1])
    example = Path(__file__).parents[4] / "examples" / "paper-35m.toml"
    grid = asked_for(example, {}, {"settings": ["evaluation_sequences=1"]})
    assert grid.variants == ("data-parallel", "muon-data-parallel", "streaming nodes=2", "streaming nodes=4")
    first, *_, last = plan_grid(grid, data=DataConfig(path=longer), out=Path("somewhere")).variants
    of_bytes, terms = first.specs[0].identity.layout.num_parameters, last.specs[0].terms
    assert of_bytes + (32_000 - VOCABULARY) * PRESETS["medium"].dim == pytest.approx(35e6, rel=0.02)
    sequences = terms.schedule.steps * terms.admission.min_nodes * terms.inner.batch_sequences
    assert sequences * terms.inner.sequence_tokens == pytest.approx(700e6, rel=0.01)


def test_nodes_share_a_step_equally() -> None:
    grid = Grid(global_batch=16)
    assert [share_of(grid, nodes, "v") for nodes in (1, 2, 4)] == [16, 8, 4]
    with pytest.raises(CommandError, match=r"v: 3 nodes cannot share 16 .* take nodes=2, or --global-batch 15"):
        share_of(grid, 3, "v")


def test_the_command_repeats_the_grid() -> None:
    grid = Grid(
        variants=("single", "streaming nodes=2"), steps=7, global_batch=4, seeds=2, settings=("lr=1e-3",)
    )  # fmt: skip
    assert shlex.split(command_of(grid, options=["--data", "some text"])) == [
        "farloop", "lab", "bench", "quality", "--model", "micro", "--steps", "7", "--global-batch", "4", "--seeds", "2",
        "--set", "lr=1e-3", "--variant", "single", "--variant", "streaming nodes=2",
        "--data", "some text",
    ]  # fmt: skip


# --- plans


def planned(text: Path, *variants: str, settings: tuple[str, ...] = (), **fields: Any) -> QualityPlan:
    known = {"model": "nano", "steps": 60, "global_batch": 8, "seeds": 2, **fields}
    grid = Grid(variants=variants, settings=("sequence_tokens=16", "evaluation_sequences=4", *settings), **known)
    return plan_grid(grid, data=DataConfig(path=text), out=Path("somewhere"))


def test_every_variant_has_a_run_for_every_seed_and_pairs_begin_with_the_same_weights(text: Path) -> None:
    plan = planned(text, "diloco codec=fp32", "diloco codec=q4 h=15", settings=("seed=7",))
    assert plan.seeds == (7, 8) and plan.folder == Path("somewhere/runs")
    assert {spec.terms.schedule.h for spec in plan.variants[1].specs} == {15}
    first = [[spec.identity.anchor_digests for spec in variant.specs] for variant in plan.variants]
    assert first[0] == first[1]


def test_settings_for_all_yield_to_what_a_method_fixes(text: Path) -> None:
    plan = planned(text, "data-parallel", "diloco", "diloco evaluate_every_rounds=2", settings=("h=30",))
    schedules = [variant.specs[0].terms.schedule for variant in plan.variants]
    assert [(one.h, one.evaluate_every_rounds) for one in schedules] == [(1, 60), (30, 60), (30, 2)]


def test_every_variant_trains_the_same_tokens(text: Path) -> None:
    plan = planned(text, "data-parallel nodes=2", "single", *(f"{m} nodes=4" for m in METHODS))
    terms = [spec.terms for variant in plan.variants for spec in variant.specs]
    assert {one.schedule.steps * one.admission.min_nodes * one.inner.batch_sequences for one in terms} == {60 * 8}
    assert {one.schedule.steps for one in terms} == {60} and {one.admission.min_nodes for one in terms} == {1, 2, 4}


def test_the_learning_rate_ends_at_a_share_of_its_peak(text: Path) -> None:
    plan = planned(text, "single lr=0.01", "single lr=0.02", "single min_lr=0.001")
    ends = [variant.specs[0].terms.schedule.lr.minimum for variant in plan.variants]
    assert ends == pytest.approx([5e-4, 1e-3, 1e-3])
    given = planned(text, "single", settings=("min_lr=0.002",))
    assert given.variants[0].specs[0].terms.schedule.lr.minimum == 0.002


@all_stories(__file__, "plans")
def test_plans_that_cannot_be(text: Path, path: Path, story: StoryText, rewrite: bool) -> None:
    def refused(variant: str) -> str:
        with pytest.raises(CommandError) as caught:
            planned(text, variant, **story.settings)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    check_story(path, story, refused, rewrite=rewrite)
