"""One rank of a node of several processes: started by `farloop node` (`cli/agent.py`) or torchrun."""

import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import typer

from farloop.config.exit_codes import CommandError, ExitCode
from farloop.node.errors import RankFailed, lost_another

LINGER_S = 2.0  # time for the rank that failed to end with its own code before another one makes the agent stop all


def rank_of(environ: Mapping[str, str]) -> int | None:
    """The rank of this process under torchrun, else None."""
    return int(environ.get("RANK", "0")) if "WORLD_SIZE" in environ else None


@contextmanager
def lets_others_report(rank: int) -> Iterator[None]:
    """Around the work of a rank: if it lost another one, let that one report and end first, because its code counts."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, RankFailed) and not lost_another(error):
            raise
        try:
            time.sleep(LINGER_S)
        except KeyboardInterrupt:  # the agent has seen the other one end, and stops all
            raise typer.Exit(ExitCode.UNEXPECTED) from None
        if isinstance(error, RankFailed):
            raise
        raise CommandError(f"rank {rank} lost another rank of the node", ExitCode.UNEXPECTED) from error


def end_rank(code: int) -> NoReturn:
    """End the process at once, after its work.

    Interpreter shutdown aborts one time in five after use of gloo (torch 2.13, "terminate called without an active
    exception"), which torchrun takes for a failure.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
