"""What the agent of several ranks makes of the codes that they ended with."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from command_line import farloop
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from farloop.cli import agent
from farloop.cli.agent import NO_USE, causes, outcome
from farloop.config.exit_codes import ExitCode

KILLED = -9


def ended(codes: Mapping[int, int]) -> dict[int, ProcessFailure]:
    """Ranks and their codes as torch gives them: in the order in which they ended, within one second."""
    return {rank: ProcessFailure(rank, 1000 + rank, code, "") for rank, code in codes.items()}


@pytest.mark.parametrize(
    ("codes", "restarts", "code"),
    [
        ({1: KILLED, 0: ExitCode.INTERRUPTED}, True, ExitCode.UNEXPECTED),  # the agent interrupted rank 0
        ({0: KILLED, 1: ExitCode.INTERRUPTED, 2: -15}, True, ExitCode.UNEXPECTED),
        ({1: ExitCode.UNREACHABLE, 0: ExitCode.INTERRUPTED}, True, ExitCode.UNREACHABLE),
        ({1: ExitCode.REFUSED, 0: ExitCode.INTERRUPTED}, False, ExitCode.REFUSED),
        ({0: ExitCode.INTERRUPTED, 1: ExitCode.UNEXPECTED}, False, ExitCode.INTERRUPTED),  # rank 0 was stopped
        ({0: ExitCode.UNEXPECTED, 1: ExitCode.USAGE}, False, ExitCode.USAGE),
    ],
)
def test_a_rank_that_the_agent_interrupted_is_not_the_cause(
    codes: Mapping[int, int], restarts: bool, code: ExitCode
) -> None:
    found = causes(ended(codes))
    assert (not NO_USE & set(found.values())) == restarts
    assert outcome(found) == code


def test_the_ranks_are_given_what_the_command_line_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[list[str]] = []
    monkeypatch.setattr(agent, "launch", lambda words, config: began.append(words) or ExitCode.DONE)
    file = tmp_path / "node.toml"
    file.write_text("[node]\nname = 'a'\ncoordinator = 'tcp://127.0.0.1:1'\n[data]\nmax_bytes = 300000\n")
    assert farloop("node", str(file), "--nproc", "2", "--set", "node.threads=3").exit_code == 0
    sets = ["--set=node.threads=3", "--set=node.nproc=2"]
    assert began == [["node", str(file), *sets, "--log-level", "info"]]
