"""T4: a node of several ranks that loses one starts them all again, and takes part in the next round."""

import itertools
import json
import os
import re
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import loopback
import pytest
import tiny_run
import yaml
from loopback import FARLOOP, PACED, Daemon, NewRun, Run, assert_all_agree, merged_since, node_of, own_run
from slow_cases import slow
from test_commands import typed

from farloop.cli.doctor import connect
from farloop.config.exit_codes import ExitCode
from farloop.local.processes import free_port
from farloop.monitoring.addresses import Address
from farloop.monitoring.status import Status

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

DEADLINE_S = 300.0
HANGING_LOOP = Path(loopback.__file__).with_name("hanging_loop.py")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STRUCK_LOOP = Path(loopback.__file__).with_name("struck_loop.py")


def pids_of(agent: Daemon) -> dict[int, int]:
    """The processes of an agent's ranks, by rank."""
    found = {}
    for child in Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children").read_text().split():
        told = dict(line.partition("=")[::2] for line in Path(f"/proc/{child}/environ").read_text().split("\0"))
        if "RANK" in told:
            found[int(told["RANK"])] = int(child)
    return found


def kill(run: Run, agent: Daemon, rank: int) -> None:
    """Once the node has trained; it is back when its work is in a version newer than those of now."""
    before = run.until("it has merged", lambda status: merged_since(status, [0, 0, 0], "many"), DEADLINE_S)
    incarnation = node_of(before, "many")["incarnation"]
    os.kill(pids_of(agent)[rank], signal.SIGKILL)
    back = run.until("it is back", lambda status: node_of(status, "many")["incarnation"] == incarnation + 1, DEADLINE_S)
    run.until("its work is merged", lambda status: merged_since(status, back["versions"], "many"), DEADLINE_S)


@pytest.mark.parametrize("rank", [1, *slow(0)])
def test_a_node_of_two_ranks_is_back_after_one_was_killed(new_run: NewRun, rank: int) -> None:
    run = new_run(steps=150, **PACED)
    run.start_coordinator(), run.start_metronome("pace")
    many = run.start_node("many", nproc=2)
    kill(run, many, rank)
    run.hurry()
    status = run.until_done(timeout_s=DEADLINE_S)
    assert_all_agree(run, status, "many", "pace")
    assert re.search(rf'ranks failed" codes=".*{rank}: -9.*" restart="1 of 3"', many.said), many.said


def test_a_node_that_is_refused_ends_at_once_with_its_code_and_one_line(new_run: NewRun) -> None:
    run = new_run()
    run.start_coordinator()
    many = run.start_node("many", nproc=2, fingerprint="0123456789abcdef")
    assert run.until_ended(many, DEADLINE_S) == ExitCode.REFUSED
    assert many.said.count("farloop: error: ") == 1 and "restart=none" in many.said, many.said


def test_no_rank_survives_its_agent(new_run: NewRun) -> None:
    run = new_run(nodes=1)
    run.start_coordinator()
    many = run.start_node("many", nproc=2)
    run.until("it trains", lambda status: any(node["inner_steps"] for node in status["nodes"]), DEADLINE_S)
    ranks = pids_of(many)
    many.kill()
    deadline = time.monotonic() + DEADLINE_S
    while left := [pid for pid in ranks.values() if Path(f"/proc/{pid}/exe").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def start_loop(run: Run, *how: str, restarts: int = 1, loop: Path = HANGING_LOOP) -> Daemon:
    """A script of two ranks, under torchrun itself."""
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts))
    torchrun = ("-m", "torch.distributed.run", *options)
    return run.start("many", *torchrun, str(loop), *how, run.address)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("sleeps", r"rank hangs rank=1 host=\S+ phase='training' step=20 for=\d+s why='others wait for it'"),
        *slow(("stops", r"rank hangs rank=0 .* why='it does not answer")),
    ],
)
def test_a_rank_that_hangs_is_named_and_the_node_is_back(new_run: NewRun, how: str, line: str) -> None:
    """T5. torch takes half a minute to end a process that is stopped."""
    run = own_run(new_run, steps=40, method="diloco", h=10, nodes=1)
    run.start_coordinator()
    many = start_loop(run, how)
    status = run.until_done(many, timeout_s=DEADLINE_S)
    assert re.search(line, many.said), many.said
    assert "ends with code 7" in many.said and "hanging_loop.py" in many.said.partition("ends with code 7")[2], "stacks"
    assert node_of(status, "many")["incarnation"] == 2


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("fails", "rank 1 of this node has failed: FileNotFoundError: no base.safetensors here"),
        *slow(("fails-in-own-group", "FileNotFoundError: no base.safetensors here")),
        *slow(("differs", "parameter 'inward.weight' is torch.bfloat16 on rank 1 and torch.float32 on rank 0")),
        *slow(("leaves", "rank 1 of this node has failed: it has left, and rank 0 goes on")),
    ],
)
def test_a_rank_that_others_wait_for_in_vain_is_named(new_run: NewRun, how: str, line: str) -> None:
    run = own_run(new_run, steps=40, method="diloco", h=10, nodes=1)
    run.start_coordinator()
    many = start_loop(run, how, restarts=0)
    assert run.until_ended(many, DEADLINE_S) == 1
    assert line in many.said, many.said


@pytest.mark.slow
@pytest.mark.parametrize("point", ["encode", "merge"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_within_a_fragment_costs_one_window_at_most(new_run: NewRun, point: str, rank: int) -> None:
    """T4. Steps that no delta holds are done again: alone in its run, a node does them besides the run's own."""
    run = own_run(new_run, steps=40, method="streaming", h=10, tau=2, nodes=1)
    run.start_coordinator()
    many = start_loop(run, point, str(rank), loop=STRUCK_LOOP)
    status = run.until_done(many, timeout_s=DEADLINE_S)
    assert_all_agree(run, status, "many")
    assert (run.folder / "struck").exists() and node_of(status, "many")["incarnation"] == 2
    steps = (run.folder / "steps").read_text().split()
    assert 40 <= len(steps) <= 50, steps


@pytest.mark.parametrize("rank", [1, *slow(0)])
def test_a_signal_to_any_rank_of_a_loop_ends_the_node_in_order(new_run: NewRun, rank: int) -> None:
    run = own_run(new_run, steps=100_000, method="diloco", h=10, nodes=1)
    run.start_coordinator()
    many = start_loop(run, "goes")
    run.until("it trains", lambda status: any(node["inner_steps"] for node in status["nodes"]), DEADLINE_S)
    os.kill(pids_of(many)[rank], signal.SIGTERM)
    assert run.until_ended(many, DEADLINE_S) == 0
    run.until("it said good-bye", lambda status: "after finishing its work" in node_of(status, "many")["reason"], 30.0)


def answers(url: str) -> bool:
    try:
        return urlopen(url, timeout=30).status == 200
    except HTTPError:
        return False


@pytest.mark.slow
def test_a_node_of_two_hosts_goes_on_with_one_and_takes_the_other_back(new_run: NewRun) -> None:
    """Two agents on this machine are the hosts. torch waits for half a minute before it goes on with fewer."""
    run = new_run(steps=100_000, **PACED)
    run.start_coordinator(), run.start_metronome("pace")
    place, *pages = (free_port() for _ in range(3))
    first = run.start_node("many", nproc=1, hosts="1:2", rendezvous=f"127.0.0.1:{place}", http=f"127.0.0.1:{pages[0]}")
    while connect(Address(host="127.0.0.1", port=place)) is not None:  # the first to come keeps the store
        time.sleep(0.05)
    own = ("--set", f"node.state_dir={run.folder / 'second'}", "--set", f"node.http=127.0.0.1:{pages[1]}")

    def until_hosts(count: int, incarnation: int) -> None:
        def there(status: Status) -> bool:
            many = [node for node in status["nodes"] if node["name"] == "many"]
            return any((n["device"][0], n["incarnation"]) == (str(count), incarnation) for n in many)

        status = run.until(f"{count} hosts at start {incarnation}", there, DEADLINE_S)
        run.until("its work is merged", lambda now: merged_since(now, status["versions"], "many"), DEADLINE_S)

    for start in (1, 3):
        second = run.start("second", *FARLOOP, "node", str(run.folder / "node-many.toml"), *own)
        until_hosts(2, start)
        for page, path in itertools.product(pages, ("healthz", "readyz", "metrics")):  # of the host without rank 0 too
            tiny_run.until(partial(answers, f"http://127.0.0.1:{page}/{path}"))  # rank 0 reports once a second
        second.kill()
        until_hosts(1, start + 1)
    folders = [run.folder / name / "node.json" for name in ("many", "second")]
    assert [json.loads(path.read_text())["incarnation"] for path in folders] == [4, 3]
    first.signal(signal.SIGTERM)
    assert run.until_ended(first, DEADLINE_S) == 0


RUN_BY_HAND = {
    "sbatch": 'exec bash "$@"',
    "scontrol": "echo 127.0.0.1; echo 127.0.0.2",
    "srun": 'shift 2; "$@" & "$@" && wait $!',
    "farloop": f'exec {sys.executable} -m farloop.cli.main "$@"',
}
"""What a batch script calls, as a cluster of two hosts would have it."""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["slurm.sh", "skypilot.yaml"])
def test_a_script_for_a_scheduler_starts_one_node_on_two_hosts(new_run: NewRun, script: str) -> None:
    run = new_run(nodes=1, steps=60)
    run.start_coordinator()
    run.node_toml("many", "", {}).rename(run.folder / "node.toml")
    for name, body in RUN_BY_HAND.items():
        (run.folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (run.folder / name).chmod(0o755)
    text = (EXAMPLES / script).read_text()
    if script == "skypilot.yaml":  # which runs it on every host
        (run.folder / "host.sh").write_text(yaml.safe_load(text)["run"])
        text = "srun --on --all bash host.sh"
    (run.folder / "examples").mkdir()
    (run.folder / "examples" / "slurm.sh").write_text(text)
    given = {"HOSTS": "2", "PORT": str(free_port()), "GPUS": "1", "SLURM_JOB_NODELIST": "node[1-2]"}
    given |= {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    environ = [f"{name}={value}" for name, value in given.items()]
    (submit,) = typed("A SLURM site")  # or the same for skypilot.yaml
    job = run.start("script", "-c", STARTER, submit, *environ, f"PATH={run.folder}{os.pathsep}{os.environ['PATH']}")
    try:
        status = run.until_done(timeout_s=DEADLINE_S)
        assert run.until_ended(job, DEADLINE_S) == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGTERM)
    assert_all_agree(run, status, "many")
    assert node_of(status, "many")["device"].startswith("2")


STARTER = """
import os, sys
os.execvpe("sh", ["sh", "-c", sys.argv[1]], os.environ | dict(one.split("=", 1) for one in sys.argv[2:]))
"""
