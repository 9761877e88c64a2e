"""Processes of one measurement: each in the folder of the measurement, with a log of its own there."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from farloop.config.exit_codes import CommandError

PATIENCE_S = 1800.0  # for all processes of one measurement
_POLL_S = 0.05


@contextmanager
def started(
    name: str, words: Sequence[str], out: Path, environ: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Python with these arguments, in `out`; its log is NAME.log. It is killed at the end of the context."""
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *words], cwd=out, stdout=log, stderr=log, env=environ)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()


def run_together(
    commands: Mapping[str, Sequence[str]], out: Path, environ: Mapping[str, str], *, of_ranks: bool = False
) -> dict[str, int]:
    """Run all to their ends, each as `started` does; the largest resident memory of each, in bytes.

    `of_ranks`: a name that ends in -NUMBER is the rank of that number, in its environment. Raises CommandError: a
    process failed, or took too long.
    """
    peaks: dict[str, int] = {}
    deadline = time.monotonic() + PATIENCE_S
    with ExitStack() as stack:
        running = {}
        for name, words in commands.items():
            rank = name.rpartition("-")[2]
            own = {"RANK": rank, "LOCAL_RANK": rank} if of_ranks and rank.isdigit() else {}
            running[name] = stack.enter_context(started(name, words, out, {**environ, **own}))
        while len(peaks) < len(running):
            for name in running.keys() - peaks.keys():
                pid, status, used = os.wait4(running[name].pid, os.WNOHANG)
                if not pid:
                    continue
                running[name].returncode = code = os.waitstatus_to_exitcode(status)
                if code:
                    raise CommandError(f"{name} ended with exit code {code}: see {out / f'{name}.log'}")
                peaks[name] = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            if time.monotonic() > deadline:
                raise CommandError(f"not finished after {PATIENCE_S:g} s: see the logs in {out}")
            time.sleep(_POLL_S)
    return peaks


def free_port() -> int:
    """Of this machine's loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
