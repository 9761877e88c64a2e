"""How much of a link the blobs of a session fill, with raw TCP beside it: both over the same warm link, in turns.

    python -m farloop.bench.link serve tcp://0.0.0.0:7700
    python -m farloop.bench.link send tcp://HOST:7700 --mbit 200 --megabytes 2 --megabytes 16

A share is a blob's time at the given rate ÷ the time until its receiver has it: until its sender hears so, less half a
round trip. The coordinator's port + 1 is that of raw TCP.
"""

import argparse
import asyncio
import queue
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from farloop.algo.spec import BlobId, BlobKind, Identity, Layout, NodeId, RunSpec
from farloop.algo.terms import LearningRate, Terms
from farloop.coordinator.net.router import SessionRouter
from farloop.coordinator.net.sessions import Peer
from farloop.coordinator.net.zmq_router import ZmqRouter
from farloop.node.zmq_dealer import LinkConfig, LinkThread, split_address
from farloop.runtime.system import LoopClock
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.limits import Limits, Timing

A = NodeId("a")
PAUSE_S = 1.0  # between two blobs, as between two rounds: a connection that was idle begins slowly
PATIENCE_S = 300.0  # for one blob
REQUEST = struct.Struct("<?Q")  # raw TCP: whether the bytes go up, and how many
SPEC = RunSpec(
    identity=Identity(
        name="link", model="own", layout=Layout(slots=1, fragments=()), anchor_digests=(), data="own", num_samples=0,
        evaluation_set="none", seed=0,
    ),
    terms=Terms.from_flat(
        method="streaming", steps=1, h=1, tau=0, mix=0.0, codec_up="q4", codec_down="q4", outer_lr=1.0,
        outer_momentum=0.0, lr=LearningRate(), clip=1.0, weight_decay=0.0, batch_sequences=1, sequence_tokens=1,
    ),
)  # fmt: skip


# --- the coordinator's end


async def serve(endpoint: str) -> None:
    """Welcome a node, take every blob that it offers, and push one of n bytes for each Fetch of n."""
    host, port = split_address(endpoint)
    threading.Thread(target=serve_tcp, args=(host, port + 1), daemon=True).start()
    limits, versions = Limits(), iter(range(1, 1 << 30))
    router = ZmqRouter(endpoint=endpoint, key=None, allow=None, max_frame_bytes=limits.max_frame_bytes)

    def on_event(peer: Peer, event: wire_ev.SessionEvent) -> None:
        now = time.monotonic()
        with sessions.working_for(peer) as session:
            match event:
                case wire_ev.MessageReceived(message=msg.Hello(protocol_max=newest)):
                    welcome = msg.Welcome(
                        protocol=min(newest, msg.PROTOCOL_VERSIONS[1]), epoch=1, spec=SPEC, lane_token=peer.token,
                        versions=(), windows=(), rounds=(),
                    )  # fmt: skip
                    session.send(welcome, now)
                case wire_ev.MessageReceived(message=msg.Offer() as offer):
                    session.expect(offer.blob, offer.size, offer.digest, None, now)
                case wire_ev.BlobReceived(blob=blob):
                    session.send(msg.Stored(blob=blob), now)
                case wire_ev.MessageReceived(message=msg.Fetch(fragment=num_bytes)):
                    data = bytes(num_bytes)
                    committed = msg.Committed(
                        fragment=0, version=next(versions), size=num_bytes, digest=blob_digest(data), anchor_digest=0,
                        merged=(), drops=(), next_window=None, rounds=(),
                    )  # fmt: skip
                    session.send(committed, now)
                    session.push_blob(msg.update_id(committed), BytesSource(data))

    def failed(error: Exception) -> None:
        raise error

    sessions = SessionRouter(router, LoopClock(failed), on_event=on_event, limits=limits, timing=Timing())
    await router.run()


def serve_tcp(host: str, port: int) -> None:
    """Take bytes and say when they are here, or send some."""
    with socket.create_server((host, port)) as server:
        while True:
            connection, _ = server.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request := connection.recv(REQUEST.size, socket.MSG_WAITALL):
                up, num_bytes = REQUEST.unpack(request)
                if up:
                    take(connection, num_bytes)
                connection.sendall(bytes(1 if up else num_bytes))


# --- the node's end


def take(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(connection.recv(min(num_bytes, 1 << 20)))


def over_tcp(connection: socket.socket, num_bytes: int, *, up: bool) -> None:
    connection.sendall(REQUEST.pack(up, num_bytes))
    if up:
        connection.sendall(bytes(num_bytes))
    take(connection, 1 if up else num_bytes)


class Node:
    """A node in a session."""

    def __init__(self, coordinator: str) -> None:
        self._heard: queue.SimpleQueue[wire_ev.SessionEvent | Exception] = queue.SimpleQueue()
        self._sent = 0
        self._open = False  # before, the link dials again
        self.link = LinkThread(LinkConfig(coordinator=coordinator))
        self.link.start(self._hello, self._heard.put)
        self._wait(lambda event: isinstance(event, wire_ev.MessageReceived) and isinstance(event.message, msg.Welcome))
        self._open = True

    def carry(self, num_bytes: int, *, up: bool) -> None:
        """Send a blob, or be sent one."""
        if not up:
            self.link.send(msg.Fetch(fragment=num_bytes))
            return self._wait(lambda event: isinstance(event, wire_ev.BlobReceived))
        self._sent += 1
        blob = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=A, incarnation=1, seq=self._sent)
        data = bytearray(num_bytes)
        self.link.send_blob(msg.Offer(blob=blob, size=num_bytes, digest=blob_digest(data)), data)
        self._wait(lambda event: isinstance(event, wire_ev.MessageReceived) and isinstance(event.message, msg.Stored))

    def _hello(self) -> msg.Hello:
        oldest, newest = msg.PROTOCOL_VERSIONS
        return msg.Hello(
            protocol_min=oldest, protocol_max=newest, node=A, incarnation=1, fingerprint=None, layout=None,
            epoch_seen=0, anchors=(), round=None,
        )  # fmt: skip

    def _wait(self, is_it: Callable[[wire_ev.SessionEvent], bool]) -> None:
        while True:
            event = self._heard.get(timeout=PATIENCE_S)
            if isinstance(event, Exception) or (self._open and isinstance(event, wire_ev.SessionClosed)):
                raise RuntimeError(f"the session ended: {event}")
            if is_it(event):
                return


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def seconds(action: Callable[[], None]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def send(coordinator: str, mbit: float, megabytes: list[float], count: int, pause_s: float) -> None:
    """Print the shares of raw TCP and of farloop, up and down: median, and lowest to highest."""
    host, port = split_address(coordinator)
    node = Node(coordinator)
    with socket.create_connection((host, port + 1)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        half_s = min(seconds(partial(over_tcp, connection, 1, up=True)) for _ in range(5)) / 2
        say(f"round trip {2e3 * half_s:.1f} ms; the first blob each way is not counted")
        for size in megabytes:
            num_bytes, shares = int(size * 1e6), dict[str, list[float]]()
            at_rate_s = num_bytes * 8 / (mbit * 1e6)
            for n in range(count + 1):
                for up in (True, False):
                    for system, carry in (("TCP", partial(over_tcp, connection)), ("farloop", node.carry)):
                        time.sleep(pause_s)
                        took_s = seconds(partial(carry, num_bytes, up=up)) - half_s
                        if n:
                            shares.setdefault(f"{system} {'up' if up else 'down'}", []).append(at_rate_s / took_s)
            told = [
                f"{what} {statistics.median(found):.0%} ({min(found):.0%} to {max(found):.0%})"
                for what, found in shares.items()
            ]
            say(f"{size:g} MB: possible {at_rate_s / (at_rate_s + half_s):.0%}, {', '.join(told)}")
    node.link.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Share of a link that blobs fill, with raw TCP beside it.")
    parser.add_argument("end", choices=["serve", "send"])
    parser.add_argument("coordinator", help="tcp://HOST:PORT")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of the link, Mbit/s")
    parser.add_argument("--megabytes", type=float, action="append", help="size of a blob; repeatable")
    parser.add_argument("--count", type=int, default=5, help="blobs of each size each way")
    parser.add_argument("--pause-s", type=float, default=PAUSE_S, help="pause before each")
    chosen = parser.parse_args()
    if chosen.end == "serve":
        asyncio.run(serve(chosen.coordinator))
    else:
        send(chosen.coordinator, chosen.mbit, chosen.megabytes or [2.0, 16.0], chosen.count, chosen.pause_s)
