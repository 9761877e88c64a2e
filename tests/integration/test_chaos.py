"""`farloop lab chaos`, as a person starts it: a short storm, and one that is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from loopback import FARLOOP, environment

from farloop.config.exit_codes import ExitCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

CHAOS = (sys.executable, *FARLOOP, "lab", "chaos", "--nodes", "2")

PROMISED = {"faults", "committed", "lost", "forks", "digests_equal", "recovery_s_mean", "recovery_s_max"}


def run_storm(folder: Path, *options: str) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    """A storm in FOLDER/storm that ends well, and what it tells."""
    out = folder / "storm"
    words = [*CHAOS, *options, "--json", "--out", str(out)]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr + logs(out)
    return done, json.loads(done.stdout)


def test_a_short_storm_loses_nothing_and_says_so_in_one_object(tmp_path: Path) -> None:
    out = tmp_path / "storm"
    done, told = run_storm(tmp_path, "--minutes", "0.3", "--seed", "5")
    assert done.stdout.count("\n") == 1
    assert set(told) >= PROMISED
    assert (told["lost"], told["forks"], told["digests_equal"], told["problems"]) == (0, 0, True, [])
    assert told["committed"] >= 300, "a run of 312 steps has a window in each of them"
    assert sum(told["faults"].values()) >= 2 and {"slow_joiner", "second_start"} & told["faults"].keys()
    assert "fill_disk is left out" in done.stderr
    lines = (out / "memory.csv").read_text().splitlines()
    assert {line.split(",")[1] for line in lines[1:]} == {"coordinator", "a", "b"}
    assert (out / "memory.svg").exists()


@pytest.mark.slow
def test_a_storm_with_an_object_store_that_fails_loses_nothing(tmp_path: Path) -> None:
    kinds = "store_away,store_slow,store_refuses,store_cuts,store_silent,store_spoils,kill_coordinator,kill_node"
    _, told = run_storm(tmp_path, "--minutes", "0.8", "--seed", "5", "--bulk", "store", "--faults", kinds)
    assert (told["lost"], told["forks"], told["digests_equal"], told["problems"]) == (0, 0, True, [])
    assert any(kind.startswith("store_") for kind in told["faults"])
    assert 0 < told["failed_requests"] < told["requests"]


@pytest.mark.slow
def test_a_storm_over_two_coordinators_loses_nothing(tmp_path: Path) -> None:
    """One fault of each kind."""
    _, told = run_storm(tmp_path, "--standby", "12", "--seed", "3")
    assert (told["lost"], told["forks"], told["problems"], told["faults"]) == (0, 0, [], 12)
    assert len(told["by_fault"]) == 12 and told["versions"] > 100


@pytest.mark.slow
def test_a_storm_over_two_coordinators_of_a_model_without_arithmetic(tmp_path: Path) -> None:
    _, told = run_storm(tmp_path, "--standby", "2", "--parameters", "1e5", "--seed", "3")
    assert (told["lost"], told["forks"], told["problems"], told["faults"]) == (0, 0, [], 2)
    assert told["parameters"] == 100_000 and told["versions"] > 100


@pytest.mark.slow
@pytest.mark.parametrize(("how", "last"), [(("--minutes", "5"), "b"), (("--standby", "9"), "m")])
def test_a_storm_that_is_stopped_leaves_no_process_behind_and_writes_what_it_saw(
    tmp_path: Path, how: tuple[str, str], last: str
) -> None:
    out = tmp_path / "storm"
    words = [*CHAOS, *how, "--out", str(out)]
    storm = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (out / f"{last}.log").exists():
        assert time.monotonic() < deadline and storm.poll() is None
        time.sleep(0.1)
    begun = processes_of(out)
    storm.send_signal(signal.SIGINT)
    told, _ = storm.communicate(timeout=120)
    assert storm.returncode == ExitCode.INTERRUPTED
    assert told.splitlines()[-1] == "stopped: every process is ended"
    assert begun and not processes_of(out)
    seen = json.loads((out / "chaos.json").read_text())
    assert seen["interrupted"] and (seen["lost"], seen["forks"], seen["problems"]) == (0, 0, [])


def processes_of(out: Path) -> list[int]:
    """Those that were started with a file of this folder."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it ended meanwhile
                continue
            if any(word.startswith(bytes(out) + b"/") for word in words):
                found.append(int(folder.name))
    return found


def logs(out: Path) -> str:
    """The ends of all logs."""
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in sorted(out.glob("*.log")))
