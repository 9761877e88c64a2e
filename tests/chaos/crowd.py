"""Connections without a key and without a word at a coordinator's port, many at once, while a run goes on.

By hand, to see what they cost a run of real processes:

    python tests/chaos/crowd.py --idle 5000 --half 1500 --seconds 20
"""

import argparse
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0")
"""The first half of what a ZeroMQ peer says."""


@contextmanager
def crowd(port: int, num_connections: int, hosts: int, says: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections from 127.0.1.1 and so on, kept open at this end. Yields those that came about."""
    with ExitStack() as stack:
        held = []
        for number in range(num_connections):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(10.0)
            with suppress(OSError):  # the coordinator may hang up at any moment
                connection.bind((f"127.0.1.{1 + number % hosts}", 0))
                connection.connect(("127.0.0.1", port))
                if says:
                    connection.send(says)
                held.append(connection)
        yield held


def main(idle: int, half: int, hosts: int, seconds: float) -> None:
    """Commits a second before, while the crowd comes and comes again, and after."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
    from loopback import PACED, Run, merged_since

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = Run(Path(folder), steps=100_000, **PACED)
        stack.callback(run.end)
        coordinator = run.start_coordinator()
        run.start_metronome("a", pace_s=0.05)
        run.start_node("b")
        run.until("both train", lambda s: merged_since(s, [0, 0, 0], "b"))
        over, came = threading.Event(), [0, 0]

        def besiege(which: int, number: int, says: bytes) -> None:
            while not over.is_set():
                with crowd(run.port, number, hosts, says) as held:
                    came[which] += len(held)
                    over.wait(6.0)

        for name in ("before", "crowded", "after"):
            over.clear()
            threads = []
            if name == "crowded":
                threads = [
                    threading.Thread(target=besiege, args=(which, number, says))
                    for which, (number, says) in enumerate(((idle, b""), (half, GREETING)))
                ]
                for thread in threads:
                    thread.start()
            first, began = _commits(run), time.monotonic()
            most = 0
            while time.monotonic() - began < seconds:
                time.sleep(0.5)
                most = max(most, len(list(Path(f"/proc/{coordinator.process.pid}/fd").iterdir())))
            rate = (_commits(run) - first) / (time.monotonic() - began)
            sys.stdout.write(f"{name:8s} {rate:6.2f} commits/s, at most {most} descriptors\n")
            over.set()
            for thread in threads:
                thread.join()
        status = run.status()
        assert status is not None and coordinator.running
        lost = {node["name"]: node["lost_steps"] for node in status["nodes"]}
        sys.stdout.write(f"connections: {came[0]} idle, {came[1]} half greeted; lost steps {lost}\n")


def _commits(run: "object") -> int:
    status = run.until("it is there", lambda s: True)  # type: ignore[attr-defined]
    return sum(status["versions"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=5000, help="connections at once that say nothing")
    parser.add_argument("--half", type=int, default=1500, help="connections at once that say half a greeting")
    parser.add_argument("--hosts", type=int, default=200, help="addresses that they come from")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each spell")
    arguments = parser.parse_args()
    main(arguments.idle, arguments.half, arguments.hosts, arguments.seconds)
