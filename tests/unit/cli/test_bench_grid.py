"""A grid: the default one, a file's, and what a command line says on top."""

import shlex
from pathlib import Path

import pytest

from farloop.algo.methods import METHODS
from farloop.bench.quality_spec import (
    Grid,
    asked_for,
    command_of,
    default_variants,
    load_grid,
    parse_variant,
    share_of,
    with_baseline,
)
from farloop.config.exit_codes import CommandError

NO_LISTS: dict[str, list[str] | None] = {"variants": None, "tune": None, "settings": None}


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


def test_variants_take_the_place_of_the_default_ones() -> None:
    assert asked_for(None, {}, NO_LISTS).variants == default_variants()
    named = asked_for(None, {}, {**NO_LISTS, "variants": ["diloco"]})
    assert named.variants == ("data-parallel nodes=2", "diloco")


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
