"""Which code a node of several ranks ends with."""

import pytest

from farloop.cli import ranks
from farloop.cli.ranks import follows_rank_0, outcome, rank_of
from farloop.config.exit_codes import CommandError, ExitCode


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({0: 3, 1: 1}, ExitCode.REFUSED),
        ({1: 1, 0: 4}, ExitCode.BROKEN_NUMBERS),
        ({1: 2}, ExitCode.USAGE),
        ({1: 1}, ExitCode.UNEXPECTED),
        ({0: -9, 1: 1}, ExitCode.UNEXPECTED),
        ({0: 77}, ExitCode.UNEXPECTED),
    ],
)
def test_the_rank_that_knows_decides(codes: dict[int, int], code: ExitCode) -> None:
    assert outcome(codes) is code


def test_only_a_process_of_torchrun_has_a_rank() -> None:
    assert rank_of({}) is None
    assert rank_of({"RANK": "3"}) is None
    assert rank_of({"WORLD_SIZE": "4", "RANK": "3"}) == 3


def test_a_rank_that_lost_rank_0_says_so_in_a_line_and_rank_0_and_other_errors_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks, "LINGER_S", 0.0)
    with pytest.raises(CommandError, match="rank 2 lost rank 0"), follows_rank_0(2):
        raise RuntimeError("[gloo/pair.cc:553] Connection closed by peer")
    with pytest.raises(RuntimeError, match="Connection closed"), follows_rank_0(0):
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(RuntimeError, match="out of memory"), follows_rank_0(2):
        raise RuntimeError("CUDA out of memory")
