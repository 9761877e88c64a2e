"""What the agent of several ranks makes of the codes that they ended with."""

from collections.abc import Mapping

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

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
        ({0: ExitCode.INTERRUPTED, 1: ExitCode.UNEXPECTED}, False, ExitCode.INTERRUPTED),  # somebody stopped rank 0
        ({0: ExitCode.UNEXPECTED, 1: ExitCode.USAGE}, False, ExitCode.USAGE),
    ],
)
def test_a_rank_that_the_agent_interrupted_is_not_the_cause(
    codes: Mapping[int, int], restarts: bool, code: ExitCode
) -> None:
    found = causes(ended(codes))
    assert (not NO_USE & set(found.values())) == restarts
    assert outcome(found) == code
