"""Two pipelines of three stages, DiLoCo across, as `farloop plan` lays them out: six processes and a coordinator."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import FARLOOP, NewRun, Run, environment, node_of

from farloop.algo.stages import StageLayout
from farloop.local.processes import free_port
from farloop.pipeline.layout import read_layout

pytestmark = pytest.mark.integration

LONG_S = 240.0

INVENTORY = {
    "plan": {"stages": 3, "seed": 1},
    "model": {"layers": 4, "activation_bytes": 16e3, "microbatches": 2},  # of the model nano
    "nodes": [
        {"name": f"{island}{number}", "site": island, "layer_s": 0.002, "max_layers": 2}
        for island in "ab"
        for number in range(3)
    ],
    "links": [
        {"between": ["a", "a"], "latency_ms": 0.1, "gbit_s": 10.0},
        {"between": ["b", "b"], "latency_ms": 0.1, "gbit_s": 10.0},
        {"between": ["a", "b"], "latency_ms": 40.0, "mbit_s": 200.0},
    ],
}
"""Two islands, which hold the model only together."""


def planned(folder: Path) -> tuple[Path, dict[str, object]]:
    """The layout file that `farloop plan` writes, and what it tells of [run]."""
    inventory, layout = folder / "inventory.json", folder / "layout.json"
    nodes = [{**node, "address": f"tcp://127.0.0.1:{free_port()}"} for node in INVENTORY["nodes"]]
    inventory.write_text(json.dumps({**INVENTORY, "nodes": nodes}))
    words = [sys.executable, *FARLOOP, "plan", "--inventory", str(inventory), "--layout", str(layout), "--json"]
    found = json.loads(subprocess.run(words, env=environment(), check=True, capture_output=True, timeout=120).stdout)
    assert found["mode"] == "A" and found["epoch"] == 1, found
    return layout, found["run"]


def started(new_run: NewRun, folder: Path, **settings: object) -> tuple[Run, StageLayout]:
    """A run of what was planned."""
    file, cut = planned(folder)
    layout, _ = read_layout(file)
    shape = {"method": "streaming", "h": 4, "tau": 1, "codec_up": "q4", "codec_down": "q4"}
    run: Run = new_run(**shape, **cut, lr=5e-3, **settings)
    run.start_coordinator()
    for stage in layout.stages:
        for name in stage.replicas:
            run.start_stage(name, file, microbatches=2, liveness_s=20.0)
    return run, layout


@pytest.mark.timeout(600)
def test_a_stage_dies_and_the_run_goes_on(new_run: NewRun, tmp_path: Path) -> None:
    """The other pipeline's replica serves both, the loss falls, and all that live end with the same anchors."""
    run, layout = started(new_run, tmp_path, steps=60)
    sources, (stays, dies) = layout.stages[0].replicas, layout.stages[1].replicas
    widowed = next(path.source for path in layout.paths if dies in {hop.node for hop in path.hops})
    assert [len({hop.node[0] for hop in path.hops}) for path in layout.paths] == [1, 1], "pipelines stay on islands"
    run.until("some windows of every stage are committed", lambda now: min(now["versions"]) >= 3, LONG_S)
    (victim,) = (daemon for daemon in run.daemons if daemon.name == f"node-{dies}")
    victim.kill()
    living = [daemon for daemon in run.daemons if daemon.running]
    status = run.until_done(*living, timeout_s=LONG_S)
    assert status["run"]["state"] == "finished", run.logs()
    anchors = []
    for stage in layout.stages:
        first, *others = [node_of(status, name).get("digests", []) for name in stage.replicas if name != dies]
        assert all(digests == first for digests in others), f"{stage}\n{run.logs()}"
        anchors += first
    assert anchors == status["digests"], run.logs()
    losses = [node_of(status, name)["loss"] for name in sources]
    assert all(loss is not None and loss < 0.85 * math.log(256) for loss in losses), losses
    for source in sources:
        became = counted(run, source)
        assert became["completed"] + became["dropped"] == 2 * 60, became
    assert counted(run, widowed)["rerouted"] > 0, run.logs()
    # Whoever takes the dead stage's work has that much more to say about it.
    assert node_of(status, stays)["tokens"] > 1.2 * node_of(status, sources[0])["tokens"]


def counted(run: Run, name: str) -> dict[str, int]:
    """What became of a node's microbatches, as its log has it at the end."""
    (daemon,) = (daemon for daemon in run.daemons if daemon.name == f"node-{name}")
    words = next(line for line in daemon.said.splitlines() if "event=pipeline " in line).split("event=pipeline ")[1]
    return {key: int(value) for key, value in (word.split("=") for word in words.split())}
