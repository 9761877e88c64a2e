"""`farloop run set` on a run of real processes: it goes on under the new terms, through a crash, and ends equal."""

import json
import signal
import subprocess
import sys

import pytest
from loopback import FARLOOP, PACED, NewRun, Run, assert_all_agree

from farloop.cli.status import saved
from farloop.config.exit_codes import CommandError, ExitCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def set_terms(run: Run, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *FARLOOP, "run", "set", *words, "--state", str(run.state_dir), "--json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_run_changes_its_terms_survives_a_crash_and_ends_equal(new_run: NewRun) -> None:
    run = new_run(steps=150, **PACED)
    coordinator, a, b = run.start_coordinator(), run.start_metronome("a", pace_s=0.4), run.start_node("b")
    run.until("every fragment has two versions", lambda status: min(status["versions"]) >= 2)

    answer = set_terms(run, "outer_lr=0.3", "h=5", "codec_up=q8")
    assert answer.returncode == ExitCode.DONE, answer.stderr
    told = json.loads(answer.stdout)
    assert told["revision"] == 1 and {change["key"] for change in told["changes"]} == {"outer_lr", "h", "codec_up"}
    refused = set_terms(run, "seed=7")
    assert refused.returncode == ExitCode.USAGE and "identity, which never changes" in refused.stderr

    coordinator.kill()
    coordinator = run.start_coordinator()
    after = run.until("it is back", lambda status: status["run"]["epoch"] == 2)
    assert after["run"]["revision"] == 1 and len(after["run"]["changed"]) == 3
    run.until("rounds have the new length", lambda status: status["run"]["h"] == 5)
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert (status["run"]["codec_up"], status["run"]["h"], status["alarms"]) == ("q8", 5, [])
    assert [node["inner_steps"] for node in status["nodes"]] == [150, 150]
    assert [node["incarnation"] for node in status["nodes"]] == [1, 1]


def test_a_coordinator_without_pages_tells_its_status_through_its_folder(new_run: NewRun) -> None:
    run = new_run()
    run.tables["coordinator"]["http"] = ""
    coordinator = run.start_coordinator()
    run.until_said(coordinator.log, "run is=waiting")
    told = saved(run.state_dir)
    assert (told["run"]["state"], told["nodes"]) == ("waiting", [])
    coordinator.signal(signal.SIGSTOP)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CommandError, match=r"does not answer: .*; see its log"):
        patch.setattr("farloop.cli.status.TIMEOUT_S", 0.1)
        saved(run.state_dir)
    coordinator.kill()
    with pytest.raises(CommandError, match="no coordinator runs on"):
        saved(run.state_dir)
