"""The planner's experiments, with small sizes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from farloop.bench.routing import modes, planning, relaying, slow_link, small_paths
from farloop.cli.main import app


def test_the_mode_turns_once() -> None:
    rows, star = modes()
    assert star == pytest.approx(3.82, abs=0.005)
    assert [row.chosen for row in rows] == ["B" if row.h < star else "A" for row in rows]
    assert all((row.inside_s < row.across_s) == (row.chosen == "A") for row in rows)


def test_the_small_instance_has_its_known_optimum() -> None:
    found = small_paths()
    assert found.paths[:2] == (("0", "2", "4"), ("1", "3", "5"))
    assert (found.step_ms, found.full_ms) == pytest.approx((157.5, 222.5)) and found.random_ms >= found.step_ms


def test_relays_are_twice_as_fast_and_the_formula_is_right() -> None:
    found = relaying()
    assert found.star_simulated_s == pytest.approx(found.star_s, rel=0.02)
    assert found.relay_simulated_s == pytest.approx(found.relay_s, rel=0.02)
    assert found.star_simulated_s > 2.0 * found.relay_simulated_s


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_link_is_named_within_three_rounds_and_the_new_plan_is_faster(seed: int) -> None:
    found = slow_link(seed=seed)
    assert found.slow_from <= found.found_at < found.slow_from + 3 and found.found.startswith("n3 sends")
    slowed = found.round_s[found.slow_from : found.replanned_at]
    assert max(found.round_s[found.replanned_at :]) < 0.8 * min(slowed)
    assert found.path_new_s < 0.9 * found.path_old_s


def test_planning_is_timed_by_the_clock_that_is_given() -> None:
    ticks = iter([10.0, 13.0])
    (row,) = planning([20], clock=lambda: next(ticks))
    assert row.plan_s == 3.0 and row.same_again and row.random_s > row.step_s


def test_the_command_writes_its_findings(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["bench", "routing", "--nodes", "20", "--out", str(tmp_path), "--json"])
    assert ended.exit_code == 0, ended.output
    found = json.loads((tmp_path / "routing.json").read_text())
    assert json.loads(ended.stdout) == found and found["planning"][0]["nodes"] == 20
    assert (tmp_path / "routing.svg").is_file() and (tmp_path / "routing.png").is_file()


def test_sizes_that_are_none_are_refused() -> None:
    ended = CliRunner().invoke(app, ["bench", "routing", "--nodes", "20,x"])
    assert ended.exit_code == 2 and "--nodes is a list of numbers of at least 12" in ended.output
