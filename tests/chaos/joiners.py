"""What joiners' downloads cost a node that waits for updates, on a thin link of the coordinator that all share.

By hand; real links and sockets, a coordinator that only sends. The same downloads once as they are sent, in the
background, and once as if they were updates.

    python tests/chaos/joiners.py --joiners 4 --link 16mbit/40ms
"""

import argparse
import queue
import statistics
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from farloop.algo.spec import BlobId, BlobKind
from farloop.chaos.relay import Link as Shape
from farloop.chaos.relay import Relay, RelayThread
from farloop.coordinator.net.sessions import Peer
from farloop.node.zmq_dealer import LinkConfig, LinkThread
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.events import BlobReceived
from farloop.wire.messages import Committed, Offer, Welcome, update_id

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from loopback import free_port
from test_link import Delivered, Station, named_hello, station, wait_for

SNAPSHOT = bytes(16 << 20)
UPDATE = bytes(256 << 10)
ALONE_S = 4.0
"""The downloads have the link for themselves, and fill it."""
EVERY_S = 0.6
"""Between two updates."""


def measure(shape: Shape, joiners: int, updates: int, *, background: bool) -> str:
    """One line: how long updates took, and how much of the link downloads had."""
    with ExitStack() as stack:
        port = free_port()
        there = stack.enter_context(station(f"tcp://127.0.0.1:{port}"))
        (relay,) = stack.enter_context(RelayThread(Relay(target_host="127.0.0.1", target_port=port, link=shape)))
        inboxes = {name: _connect(stack, relay, name) for name in ["live", *(f"joiner-{i}" for i in range(joiners))]}
        peers = {peer.who.split()[0]: peer for peer in there._peers}
        live, others = peers.pop("live"), list(peers.values())

        started, before = time.monotonic(), _arrived(others)
        there._loop.call_soon_threadsafe(_offer, there, others, background)
        time.sleep(ALONE_S)
        alone = (_arrived(others) - before) / (time.monotonic() - started)

        started, before, took = time.monotonic(), _arrived(others), list[float]()
        for version in range(1, updates + 1):
            pushed = time.monotonic()
            there._loop.call_soon_threadsafe(_push, there, live, version)
            wait_for(inboxes["live"], BlobReceived, 60.0)
            took.append(time.monotonic() - pushed)
            time.sleep(max(0.0, EVERY_S - took[-1]))
        beside = (_arrived(others) - before) / (time.monotonic() - started)
    shares = f"{alone / shape.bytes_per_s:4.0%} of the link alone, {beside / shape.bytes_per_s:4.0%} beside updates"
    how = "in the background" if background else "as if updates"
    updated = f"updates {statistics.median(took):.3f} s (to {max(took):.3f})"
    return f"{joiners} downloads {how:17s}: {updated}, downloads {shares}"


def _connect(stack: ExitStack, relay: Relay, name: str) -> Delivered:
    inbox: Delivered = queue.SimpleQueue()
    link = LinkThread(LinkConfig(coordinator=f"tcp://127.0.0.1:{relay.port}"))
    link.start(partial(named_hello, name), inbox.put)
    stack.callback(link.close)
    wait_for(inbox, Welcome)
    return inbox


def _arrived(peers: list[Peer]) -> int:
    return sum(peer.session.traffic.arrived_bytes for peer in peers)


def _offer(there: Station, peers: list[Peer], background: bool) -> None:
    blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=0, version=0)
    offer = Offer(blob=blob, size=len(SNAPSHOT), digest=blob_digest(SNAPSHOT))
    for peer in peers:
        peer.session.send_blob(offer, BytesSource(SNAPSHOT), background=background)
        there._link.flush(peer)


def _push(there: Station, peer: Peer, version: int) -> None:
    committed = Committed(
        fragment=0,
        version=version,
        size=len(UPDATE),
        digest=blob_digest(UPDATE),
        anchor_digest=0,
        merged=(),
        drops=(),
        next_window=None,
        rounds=(),
        evaluator=None,
    )
    peer.session.send(committed, time.monotonic())
    peer.session.push_blob(update_id(committed), BytesSource(UPDATE))
    there._link.flush(peer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--joiners", type=int, default=4)
    parser.add_argument("--link", type=Shape.parse, default="16mbit/40ms")
    parser.add_argument("--updates", type=int, default=15)
    arguments = parser.parse_args()
    for count, background in ((0, True), (arguments.joiners, False), (arguments.joiners, True)):
        sys.stdout.write(measure(arguments.link, count, arguments.updates, background=background) + "\n")
        sys.stdout.flush()
