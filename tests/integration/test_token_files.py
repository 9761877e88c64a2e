"""Runs on token files: built by the command, read by daemons and by loops of one's own."""

import shutil
from collections import Counter
from itertools import takewhile
from pathlib import Path

import pytest
from loopback import FARLOOP, TEXT, NewRun, Run, assert_all_agree, assert_one_line
from safetensors.torch import load_file

from farloop.coordinator.decide.records import LeaseGranted, RunFinished
from farloop.node.data.token_file import Header, open_tokens, verify

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

MIXTURE: dict[str, object] = {"mixture": [{"path": "a.bin", "weight": 3.0}, {"path": "b.bin", "weight": 1.0}]}
EXAMPLES = Path(__file__).parents[2] / "examples"


def build(run: Run, out: str, *words: str) -> Header:
    """By `farloop data build` in a process of its own."""
    assert run.until_ended(run.start(f"build-{out}", *FARLOOP, "data", "build", *words, "--out", out)) == 0, run.logs()
    return verify(run.folder / out)


@pytest.mark.slow
def test_two_nodes_train_on_a_mixture_of_token_files_with_a_tokenizer_of_their_own(new_run: NewRun) -> None:
    run = new_run(steps=120, method="streaming")
    first = build(run, "a.bin", str(TEXT), "--train-tokenizer", "400")
    second = build(run, "b.bin", str(TEXT.with_name("ast.py")), "--tokenizer", "a.tokenizer.json")
    assert first.vocabulary == second.vocabulary == 400 and first.tokenizer == second.tokenizer
    run.tables["data"] = MIXTURE
    coordinator = run.start_coordinator()
    run.tables["data"] = {"path": "a.bin"}
    other = run.start_node("other")
    assert run.until_ended(other) == 3
    assert_one_line(other, "this node's corpus is", first.digest, "give every node the same")
    run.tables["data"] = MIXTURE
    a, b = run.start_node("a"), run.start_node("b")
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    losses = [event["loss"] for event in run.events("evaluation")]
    assert losses[-1] < losses[0] - 0.3, losses
    assert load_file(run.state_dir / "model.safetensors")["embed.weight"].shape == (400, 64)


@pytest.mark.slow
def test_loops_of_one_s_own_get_granted_samples_of_a_token_file(new_run: NewRun) -> None:
    run = new_run()
    shutil.copytree(EXAMPLES, run.folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    build(run, "tokens.bin", "examples")
    assert run.until_ended(run.start("init", "examples/own_loop.py", "init", "out/own.safetensors")) == 0
    run.state_dir = run.folder / "out" / "own" / "coordinator"
    ours = [f"coordinator.bind={run.address}", f"coordinator.http=127.0.0.1:{run.http}", "run.steps=30"]
    sets = [word for setting in [*ours, "data.path=tokens.bin"] for word in ("--set", setting)]
    run.start("coordinator", *FARLOOP, "coordinator", "examples/own-run.toml", *sets)
    nodes = [run.start(f"node-{name}", "examples/token_loop.py", run.address, name, "tokens.bin") for name in "ab"]
    status = run.until_done()
    assert_all_agree(run, status, "a", "b")
    assert [node["inner_steps"] for node in status["nodes"]] == [30, 30]
    assert all("step 29 of 30" in node.said for node in nodes)
    granted = Counter(  # a node that leaves at the end gives back what it has not used
        position
        for record in takewhile(lambda record: not isinstance(record, RunFinished), run.records())
        if isinstance(record, LeaseGranted)
        for position in range(record.lease.start, record.lease.start + record.lease.count)
    )
    assert len(granted) >= 2 * 30 * 32 and set(granted.values()) == {1}, "no sample has two owners"
    assert open_tokens(run.folder / "tokens.bin").header.vocabulary == 256
