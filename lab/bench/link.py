"""How much of a link the blobs of a session fill, with raw TCP beside it: both over the same warm link, in turns. And
how long a control message takes beside blobs that fill the link.

    python -m farloop.lab.bench.link serve tcp://0.0.0.0:7700
    python -m farloop.lab.bench.link send tcp://HOST:7700 --mbit 200 --megabytes 2 --megabytes 16 --lanes 1 --lanes 4
    python -m farloop.lab.bench.link control tcp://HOST:7700 --mbit 10 --megabytes 1

A share is a blob's time at the given rate ÷ the time until its receiver has it: until its sender hears so, less half a
round trip. The coordinator's port + 1 is that of raw TCP, which has a connection for the bytes and one for messages.
"""

import argparse
import asyncio
import contextlib
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
from farloop.coordinator.net.sessions import UNLIMITED, Peer
from farloop.coordinator.net.zmq_router import ZmqRouter
from farloop.monitoring.addresses import Address, parse_tcp
from farloop.node.link import LinkConfig
from farloop.node.zmq_dealer import LinkThread
from farloop.runtime.system import LoopClock
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.limits import Limits, Timing

A = NodeId("a")
PAUSE_S = 1.0  # between two blobs, as between two rounds: a connection that was idle begins slowly
PATIENCE_S = 300.0  # for one blob
REQUEST = struct.Struct("<?Q")  # raw TCP: whether the bytes go up, and how many
EVERY_S = 0.05  # between two control messages, whether or not the one before was answered
AT_ONCE = 3  # blobs under way while they are sent: the link never waits for the next
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


async def serve(endpoint: str, congestion: str) -> None:
    """Welcome a node, take each blob that it offers, push one of n bytes for each Fetch of n, answer each Ready."""
    here = parse_tcp(endpoint)
    threading.Thread(target=serve_tcp, args=(here.host, here.port + 1, congestion), daemon=True).start()
    limits, versions = Limits(), iter(range(1, 1 << 30))
    router = ZmqRouter(
        endpoint=endpoint, key=None, allow=None, max_frame_bytes=limits.max_frame_bytes, congestion=congestion
    )

    def on_event(peer: Peer, event: wire_ev.SessionEvent) -> None:
        now = time.monotonic()
        with sessions.working_for(peer) as session:
            match event:
                case wire_ev.MessageReceived(message=msg.Hello()):
                    welcome = msg.Welcome(
                        protocol=msg.PROTOCOL_VERSION, epoch=1, spec=SPEC, lane_token=peer.token, versions=(),
                        windows=(), rounds=(),
                    )  # fmt: skip
                    session.send(welcome, now)
                case wire_ev.MessageReceived(message=msg.Offer() as offer):
                    session.expect(offer.blob, offer.size, offer.digest, None, now)
                case wire_ev.BlobReceived(blob=blob):
                    session.send(msg.Stored(blob=blob), now)
                case wire_ev.MessageReceived(message=msg.Ready(history=number)):
                    session.send(msg.Stored(blob=_delta(number)), now)
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

    sessions = SessionRouter(
        router, LoopClock(failed), on_event=on_event, limits=limits, timing=Timing(), rates=UNLIMITED
    )
    await router.run()


def serve_tcp(host: str, port: int, congestion: str) -> None:
    with socket.create_server((host, port), family=Address(host=host, port=port).family) as server:
        choose(server, congestion)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer_tcp, args=(connection,), daemon=True).start()


def answer_tcp(connection: socket.socket) -> None:
    """Take bytes and say when they are here, or send some."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(ConnectionError):
        while request := connection.recv(REQUEST.size, socket.MSG_WAITALL):
            up, num_bytes = REQUEST.unpack(request)
            if up:
                receive(connection, num_bytes)
            connection.sendall(bytes(1 if up else num_bytes))


# --- the node's end


def choose(connection: socket.socket, congestion: str) -> None:
    """Set its congestion control; those of a listening socket have its."""
    if congestion:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def receive(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        num_bytes -= len(connection.recv(min(num_bytes, 1 << 20)))


def tcp_transfer(connection: socket.socket, num_bytes: int, *, up: bool) -> None:
    connection.sendall(REQUEST.pack(up, num_bytes))
    if up:
        connection.sendall(bytes(num_bytes))
    receive(connection, 1 if up else num_bytes)


def control_over_tcp(
    host: str, port: int, congestion: str, num_bytes: int, *, up: bool, for_s: float
) -> tuple[list[float], float]:
    """As `Node.control`, over two connections."""
    took, begin = list[float](), time.monotonic()
    moved = (0, begin)
    asked: queue.SimpleQueue[float | None] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        bulk, control = (stack.enter_context(socket.create_connection((host, port))) for _ in range(2))
        control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        choose(bulk, congestion)

        def carry() -> None:
            nonlocal moved
            under_way = 0
            while (goes_on := time.monotonic() < begin + for_s) or under_way:
                if goes_on and under_way < AT_ONCE:
                    bulk.sendall(REQUEST.pack(up, num_bytes) + bytes(num_bytes if up else 0))
                    under_way += 1
                    continue
                receive(bulk, 1 if up else num_bytes)
                under_way -= 1
                if goes_on:
                    moved = moved[0] + num_bytes, time.monotonic()

        def hear() -> None:
            while (asked_at := asked.get()) is not None:
                receive(control, 1)
                took.append(time.monotonic() - asked_at)

        threads = [threading.Thread(target=work) for work in (carry, hear)]
        for thread in threads:
            thread.start()
        while (now := time.monotonic()) < begin + for_s:
            asked.put(now)
            control.sendall(REQUEST.pack(False, 1))
            time.sleep(EVERY_S)
        asked.put(None)
        for thread in threads:
            thread.join()
    return took, moved[0] / max(moved[1] - begin, EVERY_S)


class Node:
    """A node in a session of so many bulk lanes; 0: as it measures."""

    def __init__(self, coordinator: str, congestion: str, lanes: int = 0) -> None:
        self._heard: queue.SimpleQueue[wire_ev.SessionEvent | Exception] = queue.SimpleQueue()
        self._sent = self._asked = 0
        self._open = False  # before, the link dials again
        self.link = LinkThread(LinkConfig(coordinator=coordinator, congestion=congestion, lanes=lanes))
        self.link.start(self._hello, self._heard.put)
        self._wait(lambda event: isinstance(event, wire_ev.MessageReceived) and isinstance(event.message, msg.Welcome))
        self._open = True

    def carry(self, num_bytes: int, *, up: bool) -> None:
        """Send a blob, or be sent one."""
        self._begin(num_bytes, up=up)
        self._wait(_arrived)

    def control(self, num_bytes: int, *, up: bool, for_s: float) -> tuple[list[float], float]:
        """Seconds until each control message was answered, beside blobs one after the other, and their bytes/s."""
        begin, asked, took, under_way = time.monotonic(), dict[int, float](), list[float](), 0
        arrived, arrived_at = 0, begin
        while (now := time.monotonic()) < begin + for_s or asked or under_way:
            busy = now < begin + for_s
            while busy and under_way < AT_ONCE:
                self._begin(num_bytes, up=up)
                under_way += 1
            if busy and now >= begin + EVERY_S * (len(asked) + len(took)):
                self._asked -= 1
                asked[self._asked] = now
                self.link.send(msg.Ready(history=self._asked))
            with contextlib.suppress(queue.Empty):
                event = self._next(EVERY_S / 10 if busy else PATIENCE_S)
                if isinstance(event, wire_ev.MessageReceived) and isinstance(event.message, msg.Stored):
                    number = event.message.blob.seq
                    if number in asked:
                        took.append(time.monotonic() - asked.pop(number))
                        continue
                if _arrived(event):
                    under_way -= 1
                    if time.monotonic() < begin + for_s:
                        arrived, arrived_at = arrived + num_bytes, time.monotonic()
        return took, arrived / max(arrived_at - begin, EVERY_S)

    def _begin(self, num_bytes: int, *, up: bool) -> None:
        if not up:
            return self.link.send(msg.Fetch(fragment=num_bytes))
        self._sent += 1
        data = bytearray(num_bytes)
        self.link.send_blob(msg.Offer(blob=_delta(self._sent), size=num_bytes, digest=blob_digest(data)), data)

    def _hello(self) -> msg.Hello:
        return msg.Hello(
            protocol_min=msg.PROTOCOL_VERSION, protocol_max=msg.PROTOCOL_VERSION, node=A, incarnation=1,
            fingerprint=None, layout=None, epoch_seen=0, anchors=(), round=None,
        )  # fmt: skip

    def _wait(self, is_it: Callable[[wire_ev.SessionEvent], bool]) -> None:
        while not is_it(self._next(PATIENCE_S)):
            pass

    def _next(self, timeout_s: float) -> wire_ev.SessionEvent:
        event = self._heard.get(timeout=timeout_s)
        if isinstance(event, Exception) or (self._open and isinstance(event, wire_ev.SessionClosed)):
            raise RuntimeError(f"the session ended: {event}")
        return event


def _delta(number: int) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=A, incarnation=1, seq=number)


def _arrived(event: wire_ev.SessionEvent) -> bool:
    """Whether a blob has arrived, at either end."""
    stored = isinstance(event, wire_ev.MessageReceived) and isinstance(event.message, msg.Stored)
    return stored or isinstance(event, wire_ev.BlobReceived)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def seconds(action: Callable[[], None]) -> float:
    began = time.monotonic()
    action()
    return time.monotonic() - began


def send(
    coordinator: str,
    congestion: str,
    mbit: float,
    megabytes: list[float],
    count: int,
    pause_s: float,
    lanes: list[int],
) -> None:
    """Print the shares of raw TCP and of farloop, up and down: median, and lowest to highest."""
    there = parse_tcp(coordinator)
    nodes = {number: Node(coordinator, congestion, number) for number in lanes}
    with socket.create_connection((there.host, there.port + 1)) as connection:
        choose(connection, congestion)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        systems: dict[str, Callable[..., None]] = {"TCP": partial(tcp_transfer, connection)}
        systems |= {f"farloop, {number or 'measured'} lanes": node.carry for number, node in nodes.items()}
        half_s = min(seconds(partial(tcp_transfer, connection, 1, up=True)) for _ in range(5)) / 2
        say(f"round trip {2e3 * half_s:.1f} ms; the first blob each way is not counted")
        for size in megabytes:
            num_bytes, shares = int(size * 1e6), dict[str, list[float]]()
            at_rate_s = num_bytes * 8 / (mbit * 1e6)
            for n in range(count + 1):
                for up in (True, False):
                    for system, carry in systems.items():
                        time.sleep(pause_s)
                        there_and_back_s = seconds(partial(carry, num_bytes, up=up))
                        half_s = min(half_s, there_and_back_s / 2)  # no exchange is quicker than a round trip
                        took_s = there_and_back_s - half_s
                        if n:
                            shares.setdefault(f"{system} {'up' if up else 'down'}", []).append(at_rate_s / took_s)
            told = [
                f"{what} {statistics.median(found):.0%} ({min(found):.0%} to {max(found):.0%})"
                for what, found in shares.items()
            ]
            say(f"{size:g} MB: possible {at_rate_s / (at_rate_s + half_s):.0%}; {'; '.join(told)}")
    for number, node in nodes.items():
        say(f"lanes asked for: {number}, open at the end: {node.link.num_lanes}")
        node.link.close()


def control(coordinator: str, congestion: str, mbit: float, megabytes: list[float], for_s: float) -> None:
    """Print how long control messages take, there and back, beside raw TCP and beside blobs, up and down."""
    there = parse_tcp(coordinator)
    node = Node(coordinator, congestion)
    for size in megabytes:
        for up in (True, False):
            node.carry(int(size * 1e6), up=up)  # from here on the link is known, as from session to session
            for system, measure in (
                ("TCP", partial(control_over_tcp, there.host, there.port + 1, congestion)),
                ("farloop", node.control),
            ):
                took, bytes_per_s = measure(int(size * 1e6), up=up, for_s=for_s)
                ranks = [sorted(took)[int(share * (len(took) - 1))] for share in (0.5, 0.99, 1.0)]
                median, high, most = (f"{1e3 * rank:.0f} ms" for rank in ranks)
                share = f"{bytes_per_s * 8 / (mbit * 1e6):.0%} of the link"
                way = "up" if up else "down"
                say(f"{size:g} MB {way}, {system}: p50 {median}, p99 {high}, longest {most} of {len(took)}; {share}")
    node.link.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Share of a link that blobs fill, with raw TCP beside it.")
    parser.add_argument("end", choices=["serve", "send", "control"])
    parser.add_argument("coordinator", help="tcp://HOST:PORT")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of the link, Mbit/s")
    parser.add_argument("--megabytes", type=float, action="append", help="size of a blob; repeatable")
    parser.add_argument("--count", type=int, default=5, help="blobs of each size each way")
    parser.add_argument("--lanes", type=int, action="append", help="connections for blobs, 0: measured; repeatable")
    parser.add_argument("--pause-s", type=float, default=PAUSE_S, help="pause before each")
    parser.add_argument("--for-s", type=float, default=30.0, help="control: time that each way is measured for")
    parser.add_argument("--congestion", default="", help="congestion control of this end, as cubic; the system's")
    chosen = parser.parse_args()
    end, sizes = (chosen.coordinator, chosen.congestion), chosen.megabytes
    if chosen.end == "serve":
        asyncio.run(serve(*end))
    elif chosen.end == "control":
        control(*end, chosen.mbit, sizes or [1.0], chosen.for_s)
    else:
        send(*end, chosen.mbit, sizes or [2.0, 16.0], chosen.count, chosen.pause_s, chosen.lanes or [0])
