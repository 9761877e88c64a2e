"""Everybody who has no business at a coordinator's port, at once, while a run goes on."""

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from farloop.algo.spec import NodeId
from farloop.wire.frames import ControlFrame
from farloop.wire.messages import Fetch, Hello, encode

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


def strangers_at(port: int, keys: Path) -> Strangers:
    """With the coordinator's public key, and the thief's."""
    server, public, secret = (
        (keys / name).read_bytes().strip() for name in ("coordinator.pub", "thief.pub", "thief.key")
    )
    return Strangers(port, server, (public, secret))
