"""A link between two stages becomes slow while a run goes on: it is seen, planned round, and left."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from loopback import FARLOOP, NewRun, Run, environment, node_of
from test_stages import LONG_S

from farloop.config.sources import dump_toml
from farloop.local.processes import free_port
from farloop.monitoring.status import Status
from farloop.pipeline.layout import read_layout

pytestmark = [pytest.mark.integration, pytest.mark.slow]  # five processes, and times are compared

FAR_STAGE = Path(__file__).with_name("far_stage.py")
SOURCES, OTHERS = ("a0", "b0"), ("a1", "b1")
NEAR_S, FAR_S, SLOW_S = 0.01, 0.08, 0.6
STEPS = 5
"""That are timed."""


def distances(near_s: float, folder: Path) -> None:
    """Between the nodes of one letter so many seconds one way, FAR_S between the others; put in place at once."""
    delays: dict[str, dict[str, float]] = {}
    for source in SOURCES:
        for other in OTHERS:
            seconds = near_s if source[0] == other[0] else FAR_S
            delays.setdefault(source, {})[other] = delays.setdefault(other, {})[source] = seconds
    unfinished = folder / "unfinished.json"
    unfinished.write_text(json.dumps(delays))
    os.replace(unfinished, folder / "delays.json")


def inventory(**more: Any) -> dict[str, Any]:
    """Two stages of two nodes, which say so, for they are where their data are."""
    nodes = [
        {"name": name, "layer_s": 0.002, "stage": stage, "address": f"tcp://127.0.0.1:{free_port()}"}
        for stage, names in enumerate((SOURCES, OTHERS))
        for name in names
    ]
    return {
        "plan": {"mode": "C"},
        "model": {"layers": 4, "activation_bytes": 16e3, "microbatches": 2},
        "nodes": nodes,
        **more,
    }


def planned(folder: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, *FARLOOP, "plan", *words, "--layout", str(folder / "layout.json"), "--json"]
    ended = subprocess.run(command, env=environment(), capture_output=True, timeout=120, check=False, text=True)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def ways(folder: Path) -> set[tuple[str, ...]]:
    return {tuple(hop.node for hop in path.hops) for path in read_layout(folder / "layout.json")[0].paths}


def step_s(run: Run) -> float:
    """Of the slower source, over some steps."""

    def steps(status: Status) -> int:
        return min(node_of(status, name)["inner_steps"] for name in SOURCES)

    status = run.status()
    assert status is not None
    first, began = steps(status), time.monotonic()
    run.until("some steps are over", lambda now: steps(now) >= first + STEPS, LONG_S)
    return (time.monotonic() - began) / STEPS


def link_of(status: Status, source: str, target: str) -> dict[str, Any]:
    rows = (dict(row) for row in status["inventory"]["links"])
    return next((row for row in rows if (row["from"], row["to"]) == (source, target)), {})


@pytest.mark.timeout(900)
def test_a_link_that_becomes_slow_is_seen_and_left(new_run: NewRun, tmp_path: Path) -> None:
    distances(NEAR_S, tmp_path)
    links = [
        {"between": [source, other], "latency_s": NEAR_S if source[0] == other[0] else FAR_S, "mbit_s": 100.0}
        for source in SOURCES
        for other in OTHERS
    ]
    file = tmp_path / "inventory.json"
    file.write_text(json.dumps(inventory(links=links)))
    told = planned(tmp_path, "--inventory", str(file))
    assert ways(tmp_path) == {("a0", "a1"), ("b0", "b1")} and told["run"]["nodes"] == 2
    run = new_run(method="diloco", h=4, steps=2000, **told["run"])
    run.start_coordinator()
    for name in (*SOURCES, *OTHERS):
        path = run.node_toml(name, "", {})
        own = {"layout": str(tmp_path / "layout.json"), "microbatches": 2, "liveness_s": 20.0}
        path.write_text(path.read_text() + "\n" + dump_toml({"pipeline": own}))
        run.start(f"node-{name}", str(FAR_STAGE), str(path), str(tmp_path / "delays.json"))
    run.until("both pipelines train", lambda now: min(now["versions"]) >= 1, LONG_S)

    distances(SLOW_S, tmp_path)
    everything = [(source, other) for source in SOURCES for other in OTHERS]

    def seen(status: Status) -> bool:
        known = {ends: link_of(status, *ends).get("rtt_s") or 0.0 for ends in everything}
        return all(rtt_s >= 2 * (SLOW_S if a[0] == b[0] else FAR_S) for (a, b), rtt_s in known.items())

    status = run.until("all links are seen as they are now", seen, LONG_S)
    assert link_of(status, "a0", "a1")["measured_by"] == "transfer", "activations came over it"
    slow_s = step_s(run)

    model = {key: value for key, value in inventory().items() if key != "links"}
    file.write_text(json.dumps({**model, "nodes": [{**node, "stage": None} for node in model["nodes"]]}))
    told = planned(tmp_path, "--live", f"127.0.0.1:{run.http}", "--inventory", str(file))
    assert told["epoch"] == 2 and ways(tmp_path) == {("a0", "b1"), ("b0", "a1")}, told
    for source in SOURCES:
        run.until_said(run.folder / f"node-{source}.log", "epoch=2", LONG_S)
    fast_s = step_s(run)
    assert fast_s < 0.6 * slow_s, (slow_s, fast_s)
