"""Nodes that hold a stage of the model each, over real sockets: the stages' replicas agree, whoever dies."""

from pathlib import Path

import pytest
from loopback import TORCHRUN, NewRun, Run, assert_all_agree, merged_since, own_run
from safetensors.torch import load_file

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PART_NODE = Path(__file__).with_name("part_node.py")


def cut_run(new_run: NewRun, **settings: object) -> Run:
    """A run of a model of two stages: 3 fragments in the first one, 2 in the second."""
    return own_run(new_run, script=PART_NODE, blocks_per_fragment=1, stages="2", **settings)


@pytest.mark.slow
def test_two_pipelines_of_two_stages_agree_fragment_by_fragment_though_a_stage_dies(new_run: NewRun) -> None:
    """Streaming, 4 bits both ways; each node has the memory of its own stage alone."""
    run = cut_run(new_run, steps=150, method="streaming", h=6, tau=1, nodes=2, codec_up="q4", codec_down="q4")
    coordinator = run.start_coordinator()
    parts = {"a0": "0", "b0": "0", "a1": "1", "b1": "1"}
    nodes = {name: run.start(name, str(PART_NODE), "train", run.address, name, stage) for name, stage in parts.items()}

    before = run.until(
        "b1 is merged", lambda status: min(status["versions"]) > 1 and merged_since(status, [1] * 5, "b1")
    )
    assert before["run"].get("stages") == [2, 2]
    expected = [set(window["expected"]) for window in before["windows"]]
    assert all(names <= {"a0", "b0"} for names in expected[:3]) and all(names <= {"a1", "b1"} for names in expected[3:])
    nodes.pop("b1").kill()

    status = run.until_done(coordinator, *nodes.values())
    assert_all_agree(run, status, *nodes)
    commits = run.events("commit")
    versions = {fragment: [c["merged"] for c in commits if c["fragment"] == fragment] for fragment in range(5)}
    assert {len(merged) for merged in versions.values()} == {len(versions[0])}, "every fragment had all of its windows"
    assert all(set(merged) <= {"a0", "b0"} for fragment in (0, 1, 2) for merged in versions[fragment])
    assert versions[3][0] == ["a1", "b1"] and versions[3][-1] == versions[4][-1] == ["a1"]
    first, last = (load_file(run.folder / name) for name in ("own.safetensors", "state/model.safetensors"))
    assert first.keys() == last.keys() and not any((first[name] == last[name]).all() for name in first)


@pytest.mark.slow
def test_a_node_whose_ranks_have_half_of_the_layers_each_trains_with_nodes_of_a_stage(new_run: NewRun) -> None:
    """Lists of modules and a container of optimizers, as a trainer with pipeline parallelism has them."""
    run = cut_run(new_run, steps=60, method="streaming", h=6, tau=1, codec_up="q4", codec_down="q4")
    run.start_coordinator()
    train = (str(PART_NODE), "train", run.address)
    run.start("ranks", *TORCHRUN, "2", *train, "ranks", "ranks")
    run.start("a0", *train, "a0", "0"), run.start("a1", *train, "a1", "1")
    status = run.until_done(timeout_s=250.0)
    assert_all_agree(run, status, "ranks", "a0", "a1")
    merged = {fragment: [c["merged"] for c in run.events("commit") if c["fragment"] == fragment] for fragment in (0, 4)}
    assert ["a0", "ranks"] in merged[0] and ["a1", "ranks"] in merged[4]
    first, last = (load_file(run.folder / name) for name in ("own.safetensors", "state/model.safetensors"))
    assert not any((first[name] == last[name]).all() for name in first)
