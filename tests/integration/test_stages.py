"""Two pipelines of three stages, DiLoCo across: six stage processes and a coordinator, over real sockets."""

import math
from pathlib import Path

import pytest
from loopback import NewRun, Run, free_port, node_of

from farloop.algo.layout import Hop, Layout, Stage
from farloop.algo.layout import Path as Way
from farloop.node.pipeline.layout_file import layout_json

pytestmark = pytest.mark.integration

NODES = ("a0", "a1", "a2", "b0", "b1", "b2")
CUT = (0, 1, 3, 4)
"""Of the four layers of the model nano."""

LONG_S = 240.0


def two_pipelines(epoch: int = 1) -> Layout:
    stages = tuple(Stage(first=CUT[i], stop=CUT[i + 1], replicas=(f"a{i}", f"b{i}")) for i in range(3))
    ways = tuple(Way(hops=tuple(Hop(stage=i, node=f"{row}{i}") for i in range(3))) for row in "ab")
    return Layout(epoch=epoch, stages=stages, paths=ways)


def layout_file(folder: Path) -> Path:
    path = folder / "layout.json"
    path.write_text(layout_json(two_pipelines(), {name: f"tcp://127.0.0.1:{free_port()}" for name in NODES}))
    return path


def started(new_run: NewRun, **settings: object) -> Run:
    shape = {"method": "streaming", "stages": "1,3", "h": 4, "tau": 1, "codec_up": "q4", "codec_down": "q4"}
    run: Run = new_run(**shape, lr=5e-3, **settings)
    layout = layout_file(run.folder)
    run.start_coordinator()
    for name in NODES:
        run.start_stage(name, layout, microbatches=2, liveness_s=20.0)
    return run


@pytest.mark.timeout(600)
def test_a_stage_dies_and_the_run_goes_on(new_run: NewRun) -> None:
    """The other pipeline's replica serves both, the loss falls, and all that live end with the same anchors."""
    run = started(new_run, steps=60)
    run.until("some windows of every stage are committed", lambda now: min(now["versions"]) >= 3, LONG_S)
    (victim,) = (daemon for daemon in run.daemons if daemon.name == "node-b1")
    victim.kill()
    living = [daemon for daemon in run.daemons if daemon.running]
    status = run.until_done(*living, timeout_s=LONG_S)
    assert status["run"]["state"] == "finished", run.logs()
    for number in range(3):
        held = [node_of(status, f"{row}{number}") for row in "ab" if f"{row}{number}" != "b1"]
        anchors = status["digests"][:2] if number == 0 else [status["digests"][1 + number]]
        assert all(node.get("digests") == anchors for node in held), f"{held}\n{run.logs()}"
    losses = [node_of(status, name)["loss"] for name in ("a0", "b0")]
    assert all(loss is not None and loss < 0.85 * math.log(256) for loss in losses), losses
    for source in ("a0", "b0"):
        became = counted(run, source)
        assert became["completed"] + became["dropped"] == 2 * 60, became
    assert counted(run, "b0")["rerouted"] > 0, run.logs()
    # Whoever takes the dead stage's work has that much more to say about it.
    assert node_of(status, "a1")["tokens"] > 1.2 * node_of(status, "a0")["tokens"]


def counted(run: Run, name: str) -> dict[str, int]:
    """What became of a node's microbatches, as its log has it at the end."""
    (daemon,) = (daemon for daemon in run.daemons if daemon.name == f"node-{name}")
    words = next(line for line in daemon.said.splitlines() if "event=pipeline " in line).split("event=pipeline ")[1]
    return {key: int(value) for key, value in (word.split("=") for word in words.split())}
