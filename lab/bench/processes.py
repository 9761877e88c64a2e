"""Processes of one measurement: each in the folder of the measurement, with a log of its own there."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from farloop.config.exit_codes import CommandError, code_of
from farloop.local.relay import Link, Relay, RelayThread

PATIENCE_S = 1800.0  # for all processes of one measurement
_POLL_S = 0.05


@contextmanager
def emulated(link: str, port: int, count: int) -> Iterator[Sequence[int]]:
    """Ports of this machine from which each of `count` nodes reaches `port` over a link of its own, given as RATE/RTT;
    if that is empty, the port itself."""
    if not link:
        yield [port] * count
        return
    relays = [Relay(target_host="127.0.0.1", target_port=port, link=Link.parse(link)) for _ in range(count)]
    with RelayThread(*relays):
        yield [relay.port for relay in relays]


@contextmanager
def started(
    name: str, words: Sequence[str], out: Path, environ: Mapping[str, str] | None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Python with these arguments, in `out`; its log is NAME.log. It is killed at the end of the context. Without
    `environ` it has that of this process."""
    with (out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *words], cwd=out, stdout=log, stderr=log, env=environ)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()


def run_together(
    commands: Mapping[str, Sequence[str]],
    out: Path,
    environ: Mapping[str, str] | None = None,
    *,
    of_ranks: bool = False,
) -> dict[str, int]:
    """Run all to their ends, each as `started` does; the largest resident memory of each, in bytes, 0 where the system
    does not tell. It is what was last seen while they ran: what the kernel tells of a process that has ended includes
    what its parent held when it was started.

    `of_ranks`: a name that ends in -NUMBER is the rank of that number, in its environment. Raises CommandError: a
    process failed, or took too long.
    """
    peaks, seen = dict[str, int](), dict.fromkeys(commands, 0)
    deadline = time.monotonic() + PATIENCE_S
    with ExitStack() as stack:
        running = {}
        for name, words in commands.items():
            rank = name.rpartition("-")[2]
            own = {"RANK": rank, "LOCAL_RANK": rank} if of_ranks and rank.isdigit() else {}
            given = None if environ is None else {**environ, **own}
            running[name] = stack.enter_context(started(name, words, out, given))
        while len(peaks) < len(running):
            for name in running.keys() - peaks.keys():
                seen[name] = max(seen[name], status_bytes("VmHWM", str(running[name].pid)))
                if (code := running[name].poll()) is None:
                    continue
                if code:
                    log = out / f"{name}.log"
                    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                    raise CommandError(f"{name} ended with exit code {code}: {last}: see {log}", code_of(code))
                peaks[name] = seen[name]
            if time.monotonic() > deadline:
                raise CommandError(f"not finished after {PATIENCE_S:g} s: see the logs in {out}")
            time.sleep(_POLL_S)
    return peaks


def free_port() -> int:
    """Of this machine's loopback."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones of this machine's loopback."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def status_bytes(field: str, process: str = "self") -> int:
    """A field of its /proc/PROCESS/status; 0 where that does not tell: not on Linux, or the process has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) << 10
    return 0
