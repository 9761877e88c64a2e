"""The connection of two coordinators on ZeroMQ: the leader's ROUTER in a thread, and the standby's DEALER.

A pair has one key: each end shows it to the other, and no other is accepted. A node's key reads no journal.
"""

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from farloop.coordinator.errors import BindError, StartRefused, StorageError, StorageFailed
from farloop.coordinator.leadership import REPEAT_S, Term
from farloop.coordinator.net.zmq_router import require_keys
from farloop.coordinator.storage.files import Bytes
from farloop.coordinator.storage.mirror import Mirror, Replica, digests
from farloop.monitoring.addresses import Address, parse_tcp, resolved
from farloop.runtime.version import version_of
from farloop.wire.keys import load_secret

_log = logging.getLogger(__name__)

PING_S: Final = 0.5
JOIN_S: Final = 2.0
"""A standby to which no leader answers for so long tries the next of its peers."""
SILENCE_S: Final = 6.0
"""A standby takes over once it heard nothing of the leader for so long: more than `mirror.SILENCE_S`, so that the
leader goes on where both could."""
LOST_S: Final = 1.0  # ... or once the connection is broken for so long
FAILED_S: Final = 3.0  # a standby that cannot write asks again so often: less than `SILENCE_S`
_COPY_BYTES: Final = 1 << 16  # smaller parts are copied: that is cheaper than to share them
_BURST: Final = 256  # messages that are taken before others have their turn

_OPTIONS: Final = (
    (zmq.LINGER, 0),
    (zmq.SNDHWM, 0),
    (zmq.RCVHWM, 0),
    (zmq.HEARTBEAT_IVL, 1000),
    (zmq.HEARTBEAT_TIMEOUT, 10_000),  # a pause of the leader's process is no loss of the connection
    (zmq.TCP_MAXRT, 10_000),
)


class MirrorServer:
    """The leader's socket, in a thread of its own, and the thread that lets standbys in."""

    def __init__(self, endpoint: str, key: Path | None, mirror: Mirror) -> None:
        """An empty endpoint: there are no standbys, and only the record is looked at.
        Raises BindError, KeyFileError."""
        self._mirror = mirror
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._authenticator: ThreadAuthenticator | None = None
        self._queue: SimpleQueue[list[Bytes | zmq.Frame]] = SimpleQueue()
        self._woken, self._wake = os.pipe()
        self._over = threading.Event()
        try:
            if endpoint:
                self._bind(endpoint, key)
        except zmq.ZMQError as error:
            self._release()
            raise BindError(endpoint, error, "mirror") from error
        except BaseException:
            self._release()
            raise
        mirror.send, mirror.serves = self._send, bool(endpoint)
        self._threads = [
            threading.Thread(target=self._guarded, args=(self._run,), name="mirror", daemon=True),
            threading.Thread(target=self._guarded, args=(self._let_in,), name="let standbys in", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _bind(self, endpoint: str, key: Path | None) -> None:
        for option, value in _OPTIONS:
            self._router.setsockopt(option, value)
        if key is not None:
            secret = load_secret(key)
            public = zmq.curve_public(secret)
            self._authenticator = ThreadAuthenticator(self._context)
            require_keys(self._router, secret, self._authenticator, lambda key: key == public)
        here = resolved(parse_tcp(endpoint, listens=True))
        self._router.setsockopt(zmq.IPV6, here.is_ipv6)
        self._router.bind(f"tcp://{here}")

    def close(self) -> None:
        """End all connections. What waits for a standby fails."""
        self._mirror.close()
        self._over.set()
        os.write(self._wake, b"x")
        for thread in self._threads:  # either may be sending
            thread.join()
        self._release()

    def _release(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._router.close()
        self._context.term()
        os.close(self._woken)
        os.close(self._wake)

    def _send(self, route: bytes, frames: Sequence[Bytes]) -> None:
        if self._over.is_set():
            return
        shared = [
            zmq.Frame(part, copy=False) if memoryview(part).nbytes >= _COPY_BYTES else bytes(part) for part in frames
        ]
        self._queue.put([route, *shared])
        os.write(self._wake, b"x")

    def _guarded(self, work: Callable[[], None]) -> None:
        """A fault of a thread ends the leader: without it nothing may be told."""
        try:
            work()
        except Exception as error:
            self._mirror.fail(StorageFailed(self._mirror.root, f"mirroring failed: {error!r}"))
            raise

    def _let_in(self) -> None:
        while not self._over.wait(0.05):
            self._mirror.tick()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._over.is_set():
            ready = dict(poller.poll(1000))
            if self._woken in ready:
                os.read(self._woken, 1 << 16)
                with suppress(Empty):
                    while True:
                        self._router.send_multipart(self._queue.get_nowait(), copy=False)
            with suppress(zmq.Again):
                for _ in range(_BURST):
                    route, *frames = self._router.recv_multipart(zmq.DONTWAIT)
                    try:
                        self._mirror.received(route, json.loads(frames[0]))
                    except (ValueError, TypeError, IndexError, RecursionError) as error:
                        _log.warning("bad message of a standby why=%r", str(error))


def _dealer(context: "zmq.Context[zmq.Socket[bytes]]", secret: bytes | None) -> "zmq.Socket[bytes]":
    dealer = context.socket(zmq.DEALER)
    for option, value in (*_OPTIONS, (zmq.RECONNECT_IVL, -1)):
        dealer.setsockopt(option, value)
    if secret is not None:
        dealer.curve_secretkey = secret
        dealer.curve_publickey = dealer.curve_serverkey = zmq.curve_public(secret)
    return dealer


def _connect(dealer: "zmq.Socket[bytes]", peer: Address) -> None:
    found = resolved(peer)
    dealer.setsockopt(zmq.IPV6, found.is_ipv6)
    dealer.connect(f"tcp://{found}")


def leading_peer(peers: Sequence[Address], key: Path | None) -> Address | None:
    """The first of these at which a leader answers a standby within `JOIN_S`. Raises KeyFileError."""
    secret = load_secret(key) if key is not None else None
    for peer in peers:
        with suppress(OSError, zmq.ZMQError), zmq.Context() as context, _dealer(context, secret) as dealer:
            socket.create_connection((peer.host, peer.port), JOIN_S).close()  # fails at once where nobody listens
            _connect(dealer, peer)
            dealer.send(b'["ping"]')
            if dealer.poll(int(1000 * JOIN_S)):
                return peer
    return None


class MirrorClient:
    """The standby's end: applies what the leader does, in the thread that runs it."""

    def __init__(self, root: Path, peers: Sequence[Address], key: Path | None, own: Term) -> None:
        """`peers`: where leaders listen for standbys. `own`: the record by which this process would lead.
        Raises KeyFileError."""
        self._root, self._peers, self._own = root, list(peers), own
        self._secret = load_secret(key) if key is not None else None
        self._replica = Replica(root)
        self._known: dict[str, Any] = {}  # digests that were computed before
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._acks: SimpleQueue[tuple[int, int]] = SimpleQueue()  # number of the connection, and of the change
        self._dials = 0
        self.heard_at = time.monotonic()
        """When the leader was last heard of."""
        self.lost_at: float | None = None
        """When its connection broke; None while it has not."""
        self._failed = ""  # why the folder cannot be written; empty while it can
        self._peer = self._peers[0]  # that was dialled last
        self._joined_at = float("-inf")
        self._unheard = dict[Address, str]()  # peers at which no leader was heard since the last one was, and why
        self._told_at = float("-inf")

    @property
    def is_without_leader(self) -> bool:
        """Whether the leader's silence is long enough to take over, where the record allows it. Any thread."""
        now, lost_at = time.monotonic(), self.lost_at
        return now - self.heard_at > SILENCE_S or (lost_at is not None and now - lost_at > LOST_S)

    @property
    def is_in_sync(self) -> bool:
        """Whether the folder has all that the leader told, as far as this end knows: the record decides."""
        return self._replica.whole > 0 and not self.is_without_leader

    @property
    def trouble(self) -> str:
        """Why it is not in sync; empty where that is not known. Any thread."""
        unheard = dict(self._unheard)
        if self._failed or not {*self._peers} <= unheard.keys():
            return self._failed
        return f"no leader at {', '.join(f'{peer} ({why})' for peer, why in unheard.items())}"

    @property
    def whole(self) -> int:
        """The number of the copy that the folder has whole; 0 while it is being given one, and before."""
        return self._replica.whole

    @property
    def taken(self) -> int:
        return self._replica.taken

    def run(self, over: Callable[[], bool]) -> None:
        """Until `over`, which is asked several times a second, says so. What the leader sent until then is applied.
        Raises StartRefused: the leader refuses this standby."""
        pinged_at, taken = float("-inf"), 0
        try:
            while not over():
                now = time.monotonic()
                # Before silence is measured: `over` may have waited for the record's store for longer than that
                if self._socket is not None and not self._receive():
                    self._hang_up()
                is_heard = self.lost_at is None and self.heard_at >= self._joined_at
                patience_s = SILENCE_S + JOIN_S if is_heard else JOIN_S
                if self._socket is None and now - self._joined_at < (FAILED_S if self._failed else PING_S):
                    time.sleep(0.02)
                    continue
                if self._socket is None or now - max(self.heard_at, self._joined_at) > patience_s:
                    self._join()
                    self._joined_at = pinged_at = time.monotonic()
                    taken = self._replica.taken
                    continue
                if now - pinged_at > PING_S:
                    pinged_at = now
                    self._ping()
                with suppress(Empty):
                    while True:
                        dial, number = self._acks.get_nowait()
                        if dial == self._dials:
                            self._say(["ack", number])
                if self._replica.taken != taken:
                    taken = self._replica.taken
                    self._say(["took", taken])
            if not self.is_without_leader:
                self._leave()
        finally:
            self._hang_up()
            self._replica.close()
            self._context.term()

    def _join(self) -> None:
        """Dial the next peer, and ask to be let in."""
        self._hang_up()
        if self._dials and self.heard_at < self._joined_at:
            self._unheard.setdefault(self._peer, "no answer")
            if self.trouble and time.monotonic() - self._told_at > REPEAT_S:
                self._told_at = time.monotonic()
                _log.warning("standby is not let in why=%r", self.trouble)
        own = self._own
        held = digests(self._root, self._replica.files, self._known)
        self._peer = self._peers[self._dials % len(self._peers)]
        self._dials += 1
        self._socket = _dealer(self._context, self._secret)
        self._monitor = self._socket.get_monitor_socket(int(zmq.EVENT_DISCONNECTED))
        try:
            _connect(self._socket, self._peer)
        except (OSError, zmq.ZMQError) as error:
            _log.info("peer not dialled peer=%s why=%r", self._peer, str(error))
            return
        self._say(["join", own.leader, own.run, own.process, held])
        self._say(["version", own.leader, version_of()])
        self._ping()

    def _ping(self) -> None:
        self._say(["ping"])
        self._say(["clock", self._own.leader, datetime.now(UTC).timestamp()])

    def _leave(self, why: str = "") -> None:
        """Say that this standby goes, or why it cannot go on: nothing waits for it any more."""
        self._say(["bye", why])
        if self._socket is not None:
            self._socket.linger = 1000  # milliseconds

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close()
            self._socket = None

    def _say(self, message: list[Any]) -> None:
        if self._socket is not None:
            with suppress(zmq.Again):  # the connection has just ended, which its monitor tells
                self._socket.send(json.dumps(message, allow_nan=False).encode(), zmq.DONTWAIT)

    def _receive(self) -> bool:
        """Take what is there; whether the connection goes on."""
        assert self._socket is not None
        self._socket.poll(20)
        with suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.DONTWAIT)["event"]
                if event != zmq.EVENT_DISCONNECTED:
                    continue
                if self.heard_at < self._joined_at:
                    self._unheard[self._peer] = "it ends the connection: are [coordinator] key here and there the same?"
                else:
                    self.lost_at = self.lost_at or time.monotonic()  # a try that fails later is no new loss
                return False
        with suppress(zmq.Again):
            for _ in range(_BURST):
                frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
                self.heard_at, self.lost_at = time.monotonic(), None
                self._unheard.clear()
                head = json.loads(frames[0].bytes)
                if head == ["unknown"]:
                    return False
                if head[0] == "refused":
                    raise StartRefused(self._root, head[1])
                if head != ["pong"] and not self._apply(head, [frame.buffer for frame in frames[1:]]):
                    return False
        return True

    def _apply(self, head: list[Any], parts: Sequence[Bytes]) -> bool:
        dial = self._dials
        try:
            self._replica.apply(head, parts, lambda number: self._acks.put((dial, number)))
        except (OSError, StorageError) as error:
            if not self._failed:
                _log.error("standby cannot write why=%r note='it is not in sync; trying again'", str(error))
            self._failed = str(error)
            self._leave(self._failed)
            return False
        if head[1] == "whole":
            self._failed = ""
            _log.info("standby is whole bytes=%d", self._replica.taken)
        return True
