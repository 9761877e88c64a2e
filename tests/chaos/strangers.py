"""Everybody who has no business at a coordinator's port, at once, while a run goes on.

By hand, to see what they cost a run of real processes: quiet and besieged spells take turns, so that whatever else the
machine does meets both alike. With --crowd: thousands of connections without a key and without a word, in their place.

    python tests/chaos/strangers.py --spells 6 --seconds 20
    python tests/chaos/strangers.py --crowd --spells 1 --seconds 20
"""

import argparse
import os
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import zmq

from farloop.algo.spec import NodeId
from farloop.wire.frames import ControlFrame
from farloop.wire.messages import Fetch, Hello, encode

if TYPE_CHECKING:
    from loopback import Run

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""How a peer of ZeroMQ begins (ZMTP 3.0)."""

HALF_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0")

GARBAGE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 64,
    GREETING + b"\x02" + (1 << 62).to_bytes(8, "big"),
    GREETING + os.urandom(512),
)

MOST_OPEN = 200
"""Connections that a thread holds open at a time."""


class Strangers:
    """A thread of each kind, from `with` to its end. `did` counts what they have done."""

    def __init__(self, port: int, server: bytes, stolen: tuple[bytes, bytes] | None = None) -> None:
        """`server`: the coordinator's public key. `stolen`: a key pair that is on its allow-list."""
        self.did: Counter[str] = Counter()
        self._port, self._server, self._stolen = port, server, stolen
        self._over = threading.Event()
        kinds: list[tuple[Callable[[], None], float]] = [
            (self._garbage, 20.0),
            (self._half_open, 20.0),
            (self._slow_loris, 20.0),
            (self._wrong_key, 5.0),
        ]
        if stolen:
            kinds += [(self._greetings, 20.0), (self._bad_frames, 20.0)]
        self._held: dict[str, list[socket.socket]] = {}
        self._context = zmq.Context()
        self._threads = [threading.Thread(target=self._repeat, args=kind, daemon=True) for kind in kinds]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        for held in self._held.values():
            for connection in held:
                connection.close()
        self._context.destroy(linger=0)

    def _repeat(self, act: Callable[[], None], per_s: float) -> None:
        while not self._over.wait(1 / per_s):
            with suppress(OSError):  # whoever hangs up, as the coordinator may
                act()
                self.did[act.__name__.strip("_")] += 1

    def _garbage(self) -> None:
        """Bytes that mean nothing, each on a connection of its own."""
        with self._connection() as connection:
            connection.sendall(GARBAGE[self.did["garbage"] % len(GARBAGE)])

    def _half_open(self) -> None:
        """Connections that never say a word."""
        self._hold("half-open", self._connection())

    def _slow_loris(self) -> None:
        """A greeting, one byte at a time."""
        held = self._held.get("loris", [])
        if len(held) < MOST_OPEN:
            self._hold("loris", self._connection())
        turn = self.did["slow_loris"]
        connection = held[turn % len(held)] if held else None
        if connection:
            connection.send(GREETING[turn // len(held) % len(GREETING) :][:1])

    def _wrong_key(self) -> None:
        """A handshake with an unauthorized key."""
        public, secret = zmq.curve_keypair()
        self._dial((public, secret), b"let me in")

    def _greetings(self) -> None:
        """New sessions, one after the other, with a key that is on the list: each is owed the whole model."""
        assert self._stolen
        hello = Hello(
            protocol_min=1, protocol_max=1, node=NodeId("thief"), incarnation=1, fingerprint=None, layout=None,
            epoch_seen=0, anchors=(), round=None,
        )  # fmt: skip
        self._dial(self._stolen, ControlFrame(run=0, epoch=0, seq=0, ack=0, body=encode(hello)).parts()[0])

    def _bad_frames(self) -> None:
        """With the same key: frames that are none, and messages of no session."""
        assert self._stolen
        fetch = ControlFrame(run=1, epoch=1, seq=1, ack=0, body=encode(Fetch(fragment=0))).parts()[0]
        self._dial(self._stolen, os.urandom(300) if self.did["bad_frames"] % 2 else fetch)

    def _dial(self, key: tuple[bytes, bytes], frame: bytes | bytearray | memoryview) -> None:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        dealer.curve_publickey, dealer.curve_secretkey = key
        dealer.curve_serverkey = self._server
        try:
            dealer.connect(f"tcp://127.0.0.1:{self._port}")
            dealer.send(frame)
            dealer.poll(30)
        finally:
            dealer.close()

    def _connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=5)

    def _hold(self, kind: str, connection: socket.socket) -> None:
        held = self._held.setdefault(kind, [])
        held.append(connection)
        if len(held) > MOST_OPEN:
            held.pop(0).close()


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


@contextmanager
def crowds(port: int) -> Iterator[Counter[str]]:
    """5,000 connections that say nothing and 1,500 that say half a greeting, from 200 addresses, again and again."""
    over, came = threading.Event(), Counter[str]()

    def besiege(kind: str, number: int, says: bytes) -> None:
        while not over.is_set():
            with crowd(port, number, 200, says) as held:
                came[kind] += len(held)
                over.wait(6.0)

    kinds = (("idle", 5000, b""), ("half greeted", 1500, HALF_GREETING))
    threads = [threading.Thread(target=besiege, args=kind) for kind in kinds]
    for thread in threads:
        thread.start()
    yield came
    over.set()
    for thread in threads:
        thread.join()


def main(spells: int, seconds: float, pace_s: float, *, crowded: bool) -> None:
    """Commits a second and open descriptors of the coordinator, in spells that take turns."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
    from keyring import authorize, keys_of, new_keys
    from loopback import PACED, Run, merged_since

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        run = Run(Path(folder), steps=100_000, **PACED)
        stack.callback(run.end)
        keys = new_keys(run, "coordinator", "a", "b", "thief")
        authorize(run, "a", "b", "thief")
        coordinator = run.start_coordinator()
        run.start_metronome("a", pace_s=pace_s, **keys_of(keys, "a"))
        run.start_node("b", **keys_of(keys, "b"))
        run.until("both train", lambda s: merged_since(s, [0, 0, 0], "b"))
        rates: dict[str, list[float]] = {"quiet": [], "besieged": []}
        done: Counter[str] = Counter()
        for spell in range(2 * spells):
            kind = "besieged" if spell % 2 else "quiet"
            with ExitStack() as siege:
                if spell % 2:
                    did = siege.enter_context(crowds(run.port) if crowded else strangers_at(run.port, keys))
                time.sleep(seconds / 10)  # what the spell before left behind is no part of this one
                before, at, most = commits(run), time.monotonic(), 0
                while time.monotonic() - at < seconds:
                    time.sleep(0.5)
                    most = max(most, len(list(Path(f"/proc/{coordinator.process.pid}/fd").iterdir())))
                rates[kind].append((commits(run) - before) / (time.monotonic() - at))
            if spell % 2:
                done += did if isinstance(did, Counter) else did.did
            sys.stdout.write(f"{kind:9s} {rates[kind][-1]:7.2f} commits/s, at most {most} descriptors\n")
            sys.stdout.flush()
        status = run.status()
        assert status is not None
        medians = {kind: statistics.median(values) for kind, values in rates.items()}
        for kind, values in rates.items():
            sys.stdout.write(f"{kind:9s} median {medians[kind]:.2f}, {min(values):.2f} to {max(values):.2f}\n")
        change = medians["besieged"] / medians["quiet"] - 1
        sys.stdout.write(f"change of the median {change:+.1%}\nstrangers {dict(done)}\n")
        lost = {node["name"]: node["lost_steps"] for node in status["nodes"]}
        sys.stdout.write(f"lost steps {lost}, alarms {status['alarms']}\n")


def strangers_at(port: int, keys: Path) -> Strangers:
    """With the coordinator's public key, and the thief's."""
    server, public, secret = (
        (keys / name).read_bytes().strip() for name in ("coordinator.pub", "thief.pub", "thief.key")
    )
    return Strangers(port, server, (public, secret))


def commits(run: "Run") -> int:
    """Of all fragments, so far."""
    status = run.status()
    assert status is not None
    return int(status["commits"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spells", type=int, default=6, help="of each kind")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each spell")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds of an inner step of the slower node")
    parser.add_argument("--crowd", action="store_true", help="silent connections, thousands, in their place")
    arguments = parser.parse_args()
    main(arguments.spells, arguments.seconds, arguments.pace, crowded=arguments.crowd)
