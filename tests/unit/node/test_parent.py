"""A rank does not outlive the agent that started it, also where that dies before the rank can ask for a signal."""

import os
import subprocess
import sys

import pytest

from farloop.node.parent import AGENT, end_with_torchrun

RANK = "import os; from farloop.node.parent import end_with_torchrun; end_with_torchrun(os.environ); print('goes on')"


@pytest.mark.parametrize(("agent", "goes_on"), [("", True), ("its parent", True), ("another", False)])
def test_a_rank_whose_agent_is_gone_ends_at_once(agent: str, goes_on: bool) -> None:
    agents = {"": {}, "its parent": {AGENT: str(os.getpid())}, "another": {AGENT: str(os.getppid())}}
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "x", **agents[agent]}
    ended = subprocess.run([sys.executable, "-c", RANK], env=environ, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == ((0, "goes on\n") if goes_on else (1, "")), ended.stderr


def test_other_processes_are_left_alone() -> None:
    end_with_torchrun({AGENT: "1"})
