"""`farloop demo`, as a person starts it."""

import json
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from loopback import FARLOOP, TEXT, NewRun, Run, environment

from farloop.config.exit_codes import ExitCode
from farloop.monitoring.units import loss_text, size_text

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DEMO = (*FARLOOP, "demo")

PROMISED = {
    "val_loss_start", "val_loss_end", "tokens", "inner_steps", "outer_steps", "nodes", "method", "codec_up",
    "codec_down", "bytes_up", "bytes_down", "bytes_total", "bytes_by_kind", "bytes_data_parallel_fp32", "bytes_state",
    "merged_steps", "reduction", "digests_equal", "compute_share", "wall_s",
}  # fmt: skip


def farloop(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *FARLOOP, *words]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300)


@dataclass(frozen=True)
class Shown:
    """What a demo left, and what it printed."""

    out: Path
    done: subprocess.CompletedProcess[str]

    @property
    def summary(self) -> dict[str, Any]:
        return cast(dict[str, Any], json.loads(self.done.stdout))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command where the demo ran."""
        return farloop(self.out.parent, *words)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    out = tmp_path_factory.mktemp("shown") / "demo"
    options = ["--model", "nano", "--steps", "60", "--data", str(TEXT), "--json", "--out", str(out)]
    return Shown(out, farloop(out.parent, "demo", *options))


def test_the_demo_prints_one_json_object_and_leaves_a_report(shown: Shown) -> None:
    out, done = shown.out, shown.done
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert set(summary) >= PROMISED
    assert summary["digests_equal"] is True
    assert (summary["nodes"], summary["inner_steps"], summary["outer_steps"]) == (2, 120, 4)
    assert summary["val_loss_end"] < summary["val_loss_start"]
    *_, scored, last = [
        line for line in done.stderr.splitlines() if "validation loss" in line or " step 60/60 " in line
    ]
    assert f"validation loss {loss_text(summary['val_loss_end'])} at step 60" in scored, done.stderr
    assert f"{size_text(summary['bytes_up'])} up, {size_text(summary['bytes_down'])} down" in last, done.stderr
    total = summary["bytes_total"]
    assert total == summary["bytes_up"] + summary["bytes_down"] == sum(summary["bytes_by_kind"].values())
    assert set(summary["bytes_by_kind"]) == {"delta", "update", "snapshot", "probe", "control"}
    assert summary["bytes_data_parallel_fp32"] == 8 * summary["parameters"] * 120
    assert summary["reduction"] == pytest.approx(summary["bytes_data_parallel_fp32"] / total)
    assert (out / "model.safetensors").exists()
    assert_stands_alone((out / "report.html").read_text())
    assert_resuming_changes_nothing(shown)


def assert_resuming_changes_nothing(shown: Shown) -> None:
    """A finished run is told again; an option that would say otherwise than its begin is refused."""
    again, other = (shown.run("demo", "--resume", str(shown.out), *more) for more in (["--json"], ["--steps", "90"]))
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout)
    assert {key: told[key] for key in PROMISED} == {key: shown.summary[key] for key in PROMISED}
    assert other.returncode == ExitCode.USAGE
    assert other.stderr.strip().splitlines() == [
        "farloop: error: --resume keeps the options of the run; leave out --steps"
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)  # several runs, one after the other
def test_the_baseline_is_what_was_measured(shown: Shown) -> None:
    """By the command that the report names; and then the report, which takes no run of other settings."""
    said, _, commands = shown.summary["baseline"].partition("; to compare: ")
    assert said == "not measured" and "baseline_loss" not in shown.summary

    def run(command: str) -> dict[str, Any]:
        done = shown.run(*shlex.split(command)[1:], "--json")
        assert done.returncode == 0, done.stderr
        return cast(dict[str, Any], json.loads(done.stdout))

    measure, again = commands.split(" && ")
    baseline, told = run(measure), run(again)
    assert baseline["method"] == "data-parallel" and "baseline" not in baseline
    assert told["baseline_loss"] == baseline["val_loss_end"]
    other = shown.out.with_name(f"{shown.out.name}-data-parallel") / "demo.json"
    other.write_text(other.read_text().replace('"seed": 0', '"seed": 1'))
    told = run(again)
    assert "holds a run of other settings" in told["baseline"] and "baseline_loss" not in told


@pytest.mark.slow
def test_ctrl_c_stops_the_demo_and_resume_finishes_it(new_run: NewRun, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    run = new_run()
    # Each of the 20 rounds waits for two round trips: the run cannot be over before it is stopped.
    paced = ["--method", "diloco", "--steps", "40", "--h", "2", "--link", "100mbit/100ms"]
    demo = run.start("demo", *DEMO, "--model", "nano", *paced, "--data", str(TEXT), "--out", str(out))
    watch(run, out)
    run.until("it trains", lambda status: min(status["versions"]) >= 1)
    demo.signal(signal.SIGINT)
    assert run.until_ended(demo) == ExitCode.INTERRUPTED
    assert f"farloop demo --resume {out}" in demo.last_line
    kept = json.loads((out / "state" / "status.json").read_text())
    assert kept["run"]["state"] == "training"

    resumed = run.start("resumed", *DEMO, "--resume", str(out), "--json")
    assert run.until_ended(resumed) == 0, run.logs()
    summary = json.loads(resumed.last_line)
    assert summary["digests_equal"] is True
    assert summary["outer_steps"] == 20
    assert (out / "report.html").exists()


def watch(run: Run, out: Path) -> None:
    """Look at the demo's own coordinator."""
    run.until_said(out / "coordinator.log", "status http")
    run.http = int(tomllib.loads((out / "run.toml").read_text())["coordinator"]["http"].rpartition(":")[2])


def assert_stands_alone(page: str) -> None:
    """A report that can be mailed: nothing is loaded from anywhere."""
    loads = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)|url\(([^)]+)\)|@import\s+(\S+)""", page)
    outside = [target for found in loads for target in found if target and not target.startswith(("data:", "#"))]
    assert not outside
    assert "<svg" in page or "data:image" in page
