"""The planner's experiments, with small sizes. What docs/routing.md quotes is in tests/unit/docs/test_outputs.py."""

import functools
import json
from pathlib import Path

import pytest
from command_line import farloop
from safetensors.torch import save_file

from farloop.algo.stages import StageLayout
from farloop.lab.bench import pipeline
from farloop.lab.bench.pipeline_node import MODEL, Told
from farloop.lab.bench.routing import Flow, planning, play, slow_link
from farloop.node.model.built_in import build
from farloop.pipeline.stage import StagePart


def test_flows_share_a_link() -> None:
    up = [Flow(name=name, num_bytes=size, links=("l",), latency_s=0.5) for name, size in (("short", 1), ("long", 3))]
    assert play(up, {"l": 1.0}) == pytest.approx({"short": 2.5, "long": 4.5})


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_link_is_named_within_three_rounds_and_the_new_plan_is_faster(seed: int) -> None:
    found = slow_link(seed=seed)
    assert found.slow_from <= found.found_at < found.slow_from + 3 and found.found.startswith("n3 sends")
    slowed = found.round_s[found.slow_from : found.replanned_at]
    assert max(found.round_s[found.replanned_at :]) < 0.8 * min(slowed)
    assert found.path_new_s < 0.9 * found.path_old_s


def test_planning_is_timed_and_beats_chance() -> None:
    (row,) = planning([20])
    assert row.plan_s > 0.0 and row.same_again and row.random_s > row.step_s


def told_nothing(layout: StageLayout, folder: Path, *, steps: int, microbatches: int, **_: object) -> dict[str, Told]:
    """As `run_nodes`: processes of which each step takes a second, and whose loss falls, faster without skips."""
    falls = 0.9 if len({len(path.hops) for path in layout.paths} | {4}) == 1 else 0.95
    told = {}
    for stage in layout.stages:
        for name in stage.replicas:
            file = str(folder / f"{name}.safetensors")
            save_file(dict(StagePart(build(MODEL, seed=0), stage, source=stage.first == 0).state_dict()), file)
            losses = [5.0 * falls**step for step in range(steps)]
            told[name] = Told(seconds=[9.0] + [1.0] * (steps - 1), losses=losses, weights=file)
    return told


def test_the_command_writes_its_findings_with_what_processes_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "run_nodes", told_nothing)
    small = functools.partial(pipeline.processes, steps=3, learning_steps=12)
    monkeypatch.setattr(pipeline, "processes", small)
    ended = farloop("lab", "bench", "routing", "--nodes", "20", "--out", str(tmp_path), "--processes")
    assert ended.exit_code == 0, ended.output
    written = json.loads((tmp_path / "routing.json").read_text())
    assert written["planning"][0]["nodes"] == 20 and (tmp_path / "routing.png").is_file()
    assert "a step of eight processes" in (tmp_path / "routing.svg").read_text()
    found = written["processes"]
    assert [1e3 * made["predicted_s"] for made in found["steps"].values()] == pytest.approx([222.5, 317.5, 157.5])
    assert {made["measured_s"] for made in found["steps"].values()} == {1.0}, "the first step is not counted"
    assert found["parity"] > 0.01 and found["skipping"]["skipped"] == 0.25
    assert "paths as planned: 1000.0 ms measured, 157.5 predicted (+535 %)" in ended.output
    ended = farloop("lab", "bench", "routing", "--nodes", "20", "--out", str(tmp_path), "--json")
    assert json.loads(ended.stdout) == json.loads((tmp_path / "routing.json").read_text())
