"""The end of a run, for those that come after it: nodes, commands, and a coordinator on the finished state."""

import json
import re
import signal
import time

import pytest
from loopback import DEADLINE_S, FARLOOP, POLL_S, NewRun, Run, assert_one_line

from farloop.config.admin_client import change_terms
from farloop.config.exit_codes import CommandError, ExitCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def small(new_run: NewRun, **coordinator: object) -> Run:
    run = new_run(name="tokyo", steps=8, nodes=1, method="streaming", h=4, tau=1)
    run.tables["coordinator"] |= coordinator
    return run


def test_who_comes_after_the_end_learns_of_it_and_ends_well(new_run: NewRun) -> None:
    """M: a node that finds no coordinator pauses for up to 7.5 s: a restarted coordinator serves longer."""
    run = small(new_run)
    run.until_done(run.start_coordinator(), run.start_node("a"))
    assert json.loads((run.folder / "a" / "node.json").read_text())["finished"].startswith("tokyo (fingerprint ")
    late, again = run.start_node("late"), run.start_node("a")
    assert run.until_ended(again) == ExitCode.DONE
    assert "farloop: run tokyo (fingerprint" in again.last_line and "no coordinator answers" in again.last_line
    assert late.running and 'event="no link"' in late.said and "give_up=never" in late.said
    told = (run.state_dir / "status.json").read_bytes()
    coordinator = run.start_coordinator()
    assert [run.until_ended(daemon) for daemon in (late, coordinator)] == [ExitCode.DONE] * 2, run.logs()
    assert (run.state_dir / "status.json").read_bytes() == told
    assert "event=finished" in late.last_line and "run tokyo is finished" in coordinator.last_line


def test_a_coordinator_may_serve_on_after_the_end(new_run: NewRun) -> None:
    run = small(new_run, after_end="serve")
    coordinator = run.start_coordinator()
    for name in ("a", "late"):
        assert run.until_ended(run.start_node(name)) == ExitCode.DONE, run.logs()
    run.until("its page says so", lambda status: status["run"]["state"] == "finished")
    ended = rf'run tokyo is finished after 8 steps; .*init = "{run.state_dir}/model.safetensors"'
    with pytest.raises(CommandError, match=ended) as live:
        change_terms(["steps=30"], run.state_dir, dry_run=False)
    coordinator.signal(signal.SIGTERM)
    assert run.until_ended(coordinator) == ExitCode.DONE and "run tokyo is finished" in coordinator.last_line
    with pytest.raises(CommandError, match=ended) as later:
        change_terms(["steps=30"], run.state_dir, dry_run=False)
    assert live.value.code == later.value.code == ExitCode.REFUSED
    run.tables["run"]["steps"] = 30
    more = run.start_coordinator()
    assert run.until_ended(more) == ExitCode.REFUSED
    assert_one_line(more, "run tokyo is finished after 8 steps", f'init = "{run.state_dir}/model.safetensors"')


@pytest.mark.slow
def test_a_node_gives_up_at_its_start_and_later_and_ends_as_told_after_a_signal(new_run: NewRun) -> None:
    run = new_run(steps=100_000, nodes=1, method="streaming", h=4, tau=1)
    early = run.start_node("early", give_up=0.2)
    assert run.until_ended(early) == ExitCode.UNREACHABLE
    assert_one_line(early, f"no session with the coordinator {run.address} for 0.2 s", "is the coordinator running")
    coordinator = run.start_coordinator()
    run.until("it serves", lambda status: True)
    a = run.start_node("a", give_up=5.0)
    run.until("it trains", lambda status: sum(status["versions"]) > 2)
    left = run.start_node("left", leave_code=130)
    run.until("both train", lambda status: len([node for node in status["nodes"] if node["inner_steps"]]) == 2)
    left.signal(signal.SIGTERM)
    assert run.until_ended(left) == ExitCode.INTERRUPTED and "event=left" in left.last_line
    coordinator.kill()
    assert run.until_ended(a) == ExitCode.UNREACHABLE
    assert_one_line(a, "for 5 s, after which this node gives up")


@pytest.mark.slow
def test_signals_while_a_command_is_loaded_or_waits_end_it_at_once_with_130(new_run: NewRun) -> None:
    run = small(new_run)
    words = {
        "coordinator": ["coordinator", str(run.write_toml())],
        "node": ["node", str(run.node_toml("a", "", {}))],
        "status": ["status", "--url", "127.0.0.1:1"],
    }
    moments = [
        ("status", r"\| farloop.cli\n"),
        ("status", r"rich.console\n"),
        ("coordinator", r"\| +numpy\n"),
        ("coordinator", r"torch.optim\n"),
        ("node", r"torch._C\n"),
        ("node", r"\| +zmq\n"),
        ("node", "event=joining"),
    ]
    begun = [
        (run.start(f"{who}-{number}", "-X", "importtime", *FARLOOP, *words[who]), moment, number)
        for number, (who, moment) in enumerate(moments)
    ]
    deadline = time.monotonic() + DEADLINE_S
    for daemon, moment, number in begun:
        while daemon.running and not re.search(moment, daemon.said) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        daemon.signal((signal.SIGTERM, signal.SIGINT)[number % 2])
    for daemon, _, number in begun:
        if daemon.running:
            daemon.signal((signal.SIGTERM, signal.SIGINT)[number % 2])
        assert run.until_ended(daemon) == ExitCode.INTERRUPTED, daemon.said
        said = [line for line in daemon.said.splitlines() if not line.startswith("import time:")]
        assert "Traceback" not in daemon.said and said[-1] == "farloop: interrupted", said
