"""Child processes of a command: started as a person would start them, watched, and always ended."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from farloop.config.exit_codes import CommandError, ExitCode, code_of
from farloop.config.sources import dump_toml
from farloop.monitoring.healthcheck import open_page
from farloop.monitoring.status import Status

STOP_S = 45.0  # how long a process may take to finish what it has begun
PAGE_TIMEOUT_S = 0.5  # a coordinator that stands still does not answer, and whoever asks goes on
FARLOOP = ("-m", "farloop.cli.main")  # the command, in whatever environment this Python has

_PORTS = range(15_000, 32_000)
"""Below those that systems give to outgoing connections: one of these could be taken by the very node that dials the
coordinator, while that is away."""
_held = deque[int]()
"""Descriptors that hold the ports given out. The oldest are let go, long after their servers have started."""
_MOST_HELD = 64


@dataclass(slots=True)
class Child:
    """One process and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def kill(self) -> None:
        """As a power cut would."""
        self.process.kill()
        self.process.wait()


class Children:
    """The processes, by name; none outlives the block."""

    def __init__(self, folder: Path, *, last: str = "coordinator", stop_s: float = STOP_S) -> None:
        """Logs go into `folder`. `last`: who is stopped after all others, for they need it to finish."""
        self._folder, self._last, self._stop_s = folder, last, stop_s
        self._children: dict[str, Child] = {}

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: object) -> None:
        alive = [child for child in self._children.values() if child.running]
        for group in ([c for c in alive if c.name != self._last], [c for c in alive if c.name == self._last]):
            for child in group:
                with suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGCONT)  # one that stands still hears nothing else
                    child.process.terminate()
            deadline = time.monotonic() + self._stop_s
            for child in group:
                try:
                    child.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    child.kill()

    def __iter__(self) -> Iterator[Child]:
        return iter(tuple(self._children.values()))

    def __getitem__(self, name: str) -> Child:
        return self._children[name]

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        threads: int | None = None,
        command: Sequence[str] = FARLOOP,
        cwd: Path | None = None,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> Child:
        """Begin a process; of one that ended it takes the name, and goes on in its log. `environ`: beside that of
        this process."""
        log = self._folder / f"{name}.log"
        own = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, *command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=cwd,
                env={**os.environ, **environ, **own},
                start_new_session=True,  # Ctrl-C reaches us alone; we stop them in order
            )
        child = self._children[name] = Child(name, process, log)
        return child

    def running(self, name: str) -> bool:
        return name in self._children and self._children[name].running

    def check(self, *, all_done: bool = False) -> None:
        """Raise CommandError if one ended badly; with `all_done`, wait for the rest first."""
        for child in self:
            code = child.process.wait(self._stop_s) if all_done else child.process.poll()
            if code:
                raise CommandError(
                    f"{child.name} ended with exit code {code}: {child.last_words()} (log: {child.log})", code_of(code)
                )


@contextmanager
def stop_on_signals() -> Iterator[list[int]]:
    """A list that is not empty once a person, or the system, asked us to stop."""
    seen: list[int] = []
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A free port of this machine. Raises CommandError."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Different ones, which no other process is given while this one lives: see `_reserved`.

    Raises CommandError: there are none.
    """
    found = list(islice(filter(_reserved, random.Random().sample(_PORTS, 200)), count))
    if len(found) < count:
        raise CommandError(f"no free port from {_PORTS[0]} to {_PORTS[-1]}", ExitCode.UNREACHABLE)
    return found


def _reserved(port: int) -> bool:
    """Whether the port was free, and is ours from here on.

    Between this and the start of the server another process, which looks for a port as well, must not find it. A UDP
    socket of the same number, which this process holds, says so, and stands in no TCP server's way.
    """
    holder = socket.socket(type=socket.SOCK_DGRAM)
    try:
        holder.bind(("127.0.0.1", port))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        holder.close()
        return False
    _held.append(holder.detach())
    if len(_held) > _MOST_HELD:
        os.close(_held.popleft())
    return True


def page(http: int, timeout_s: float = PAGE_TIMEOUT_S) -> Status | None:
    """The status page at a port of this machine, if it answers."""
    url = f"http://127.0.0.1:{http}/status"
    with suppress(OSError, ValueError), open_page(url, timeout_s) as answer:
        status: Status = json.load(answer)
        return status or None  # nothing is on the page before the first look at the run
    return None


def write_coordinator(
    path: Path,
    *,
    bind: int,
    http: int,
    state: Path,
    run: Mapping[str, object],
    data: Mapping[str, object],
    more: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Settings of a coordinator on these ports of this machine, and `more` of its section."""
    coordinator = {"bind": f"tcp://127.0.0.1:{bind}", "http": f"127.0.0.1:{http}", "state_dir": str(state.resolve())}
    path.write_text(dump_toml({"run": run, "data": data, "coordinator": coordinator | dict(more)}))
    return path


def write_node(out: Path, name: str, port: int, *, threads: int, data: Mapping[str, object]) -> Path:
    """OUT/node-NAME.toml, of a node that dials this port of this machine and has its state in OUT/nodes/NAME."""
    state = (out / "nodes" / name).resolve()
    node = {"name": name, "coordinator": f"tcp://127.0.0.1:{port}", "state_dir": str(state), "threads": threads}
    path = out / f"node-{name}.toml"
    path.write_text(dump_toml({"node": node, "data": data}))
    return path
