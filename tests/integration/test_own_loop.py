"""The example of a user's own loop, run as its first lines say."""

import shutil
from pathlib import Path

import pytest
from loopback import FARLOOP, NewRun, assert_all_agree

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_example_of_an_own_loop_trains_to_the_end(new_run: NewRun) -> None:
    run = new_run()
    shutil.copytree(EXAMPLES, run.folder / "examples")
    assert run.until_ended(run.start("init", "examples/own_loop.py", "init", "out/own.safetensors")) == 0
    run.state_dir = run.folder / "out" / "own" / "coordinator"
    address = f"tcp://127.0.0.1:{run.port}"
    ours = [f"coordinator.bind={address}", f"coordinator.http=127.0.0.1:{run.http}", "run.steps=60"]
    sets = [word for setting in ours for word in ("--set", setting)]
    run.start("coordinator", *FARLOOP, "coordinator", "examples/own-run.toml", *sets)
    for name in ("a", "b"):
        run.start(f"node-{name}", "examples/own_loop.py", "train", address, name)
    status = run.until_done()
    assert_all_agree(run, status, "a", "b")
    assert all(node["inner_steps"] == 60 for node in status["nodes"])
    losses = [event["loss"] for event in run.events("progress") if event["loss"] is not None]
    assert losses[-1] < losses[0], losses
