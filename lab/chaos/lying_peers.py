"""Peers that break the protocol's promises, sent by a storm to its coordinator. One process, one behaviour.

    python -m farloop.lab.chaos.lying_peers BEHAVIOUR PORT

Silent peers hold a session and do no work. Lying peers make impossible claims. Both send well-formed frames, as a
broken or hostile node with a valid key would. A flood holds idle TCP connections and sends nothing.
"""

import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final

import typer
import zmq

from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId
from farloop.wire.blobs import blob_key
from farloop.wire.frames import BulkFrame, ControlFrame, lane_hello, parse_control
from farloop.wire.limits import Limits
from farloop.wire.messages import (
    PROTOCOL_VERSION,
    AnchorRef,
    BytesByKind,
    Evaluation,
    Heartbeat,
    Hello,
    Message,
    NodeState,
    Offer,
    Progress,
    Ready,
    Welcome,
    decode,
    encode,
)
from farloop.wire.reasons import RemoteProtocolError
from farloop.wire.session import run_tag

LONGEST_S: Final = 120.0  # after which a peer ends by itself

SOURCE: Final = "127.0.0.2"
"""Address that these peers come from, so that limits per address do not hit the honest nodes."""

FLOOD: Final = 2000  # connections that a flood holds

U64: Final = 2**64 - 1


class Peer:
    """A session's frames, without a session's rules."""

    def __init__(self, port: int, name: str, *, acknowledges: bool = True) -> None:
        self.name = NodeId(name)
        self.incarnation = time.monotonic_ns()
        self.welcome: Welcome | None = None
        self._address = f"tcp://{SOURCE}:0;127.0.0.1:{port}"
        self._acknowledges = acknowledges
        self._context = zmq.Context()
        self._control = self._dealer()
        self._sent, self._heard = 0, 0
        self._lane: zmq.Socket[bytes] | None = None

    def _dealer(self) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self._address)
        return dealer

    def greet(self, *, epoch_seen: int = 0, anchors: tuple[AnchorRef, ...] = ()) -> None:
        """Say Hello, as a new start of the node."""
        self.incarnation += 1
        self.welcome, self._sent, self._heard, self._lane = None, 0, 0, None
        self._control.close()
        self._control = self._dealer()
        hello = Hello(
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            node=self.name,
            incarnation=self.incarnation,
            fingerprint=None,
            layout=None,
            epoch_seen=epoch_seen,
            anchors=anchors,
            round=None,
        )
        self._control.send(ControlFrame(run=0, epoch=0, seq=0, ack=0, body=encode(hello)).parts()[0])
        self.listen(3.0)

    def greet_ready(self) -> None:
        """And, once welcome, say that it is ready to train."""
        self.greet()
        if self.welcome is not None:
            self.say(Ready(history=self.welcome.history))

    def say(self, message: Message) -> None:
        """A message of the open session; a heartbeat has no number."""
        assert self.welcome is not None
        numbered = not isinstance(message, Heartbeat)
        self._sent += numbered
        frame = ControlFrame(
            run=run_tag(self.welcome),
            epoch=self.welcome.epoch,
            seq=self._sent if numbered else 0,
            ack=self._heard if self._acknowledges else 0,
            body=encode(message),
        )
        with suppress(zmq.Again):
            self._control.send(frame.parts()[0], zmq.NOBLOCK)

    def bulk(self, blob: BlobId, chunk: bytes) -> None:
        """Bytes of a blob, on a lane of their own."""
        assert self.welcome is not None
        run, epoch = run_tag(self.welcome), self.welcome.epoch
        if self._lane is None:
            self._lane = self._dealer()
            self._lane.send_multipart(lane_hello(run, epoch, self.welcome.lane_token, 1))
        frame = BulkFrame(run=run, epoch=epoch, key=blob_key(blob), offset=0, chunk=memoryview(chunk))
        with suppress(zmq.Again):
            self._lane.send_multipart(frame.parts(), zmq.NOBLOCK)

    def listen(self, seconds: float) -> None:
        """Hear what comes for so long; less where this opens the session."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not self._control.poll(int(1000 * left) + 1):
                return
            try:
                frame = parse_control([self._control.recv()], Limits())
                message = decode(frame.body)
            except RemoteProtocolError:
                continue
            if frame.seq == self._heard + 1:
                self._heard += 1
            if isinstance(message, Welcome) and self.welcome is None:
                self.welcome = message
                return

    @property
    def is_open(self) -> bool:
        return self.welcome is not None


# --- Silent peers


def mute(peer: Peer) -> Iterator[float]:
    """Greets and says nothing more; greets again when it was forgotten."""
    while True:
        peer.greet()
        yield 12.0


def deaf(peer: Peer) -> Iterator[float]:
    """Is ready to train, and acknowledges nothing that it is told: no message, and no byte of a blob."""
    while True:
        peer.greet_ready()
        for _ in range(100):
            if peer.is_open:
                peer.say(Heartbeat())
            yield 0.5


def idle(peer: Peer) -> Iterator[float]:
    """Trains, by its own word, and sends no delta."""
    peer.greet_ready()
    for steps in range(10_000):
        _progress(peer, steps, "training")
        yield 0.5


def undecided(peer: Peer) -> Iterator[float]:
    """Goes back and forth, drains and does not, and sends no delta."""
    peer.greet_ready()
    for turn in range(10_000):
        _progress(peer, 5 + turn % 2, "draining" if turn % 20 > 15 else "training")
        yield 0.5


# --- Lying peers


def counters(peer: Peer) -> Iterator[float]:
    """Numbers that cannot be, in greeting after greeting: beyond what a message may hold, and within."""
    while True:
        for number in (U64, 2**63 - 1, 2**53, 2**40, 10**6):
            peer.greet_ready()
            if peer.is_open:
                _progress(peer, number, "training", watermark=number, tokens=number, position=float(number))
                peer.say(Evaluation(loss=float("-inf"), versions=(number,) * 3, position=-1.0, seconds=0.0))
            yield 1.0


def offers(peer: Peer) -> Iterator[float]:
    """Offers of what it does not have: unknown fragments, impossible sizes, the same again and again."""
    peer.greet()
    for turn in range(100_000):
        if not peer.is_open:
            peer.greet()
        else:
            for number in range(20):
                fragment, size = (10**6, 1 << 60) if number % 2 else (0, 1 << 20)
                peer.say(_offer(peer, fragment=fragment, version=turn % 3, size=size, seq=number % 5))
        yield 0.2


def digests(peer: Peer) -> Iterator[float]:
    """Deltas that are not what their offers say: other bytes, other digests, impossible steps and tokens."""
    peer.greet()
    for turn in range(100_000):
        if not peer.is_open:
            peer.greet()
        else:
            assert peer.welcome is not None
            version = peer.welcome.versions[0] if turn == 0 else turn
            offer = _offer(peer, fragment=0, version=version, size=4096, seq=turn)
            peer.say(offer)
            peer.bulk(offer.blob, bytes([turn % 256]) * 4096)
        yield 0.3


def epochs(peer: Peer) -> Iterator[float]:
    """Claims epochs and versions that no other node has seen."""
    while True:
        peer.greet(epoch_seen=1000)
        yield 1.0
        peer.greet(anchors=tuple(AnchorRef(fragment=f, version=10**6, digest=f) for f in range(3)))
        yield 1.0
        peer.greet(epoch_seen=2**32 - 1, anchors=(AnchorRef(fragment=10**9, version=U64, digest=U64),))
        yield 1.0


def names(peer: Peer) -> Iterator[float]:
    """A name that fills memory, and some that are none."""
    for name in ("n" * 900_000, "", "../../etc", "a\nb"):
        peer.name = NodeId(name)
        peer.greet()
        yield 1.0
    yield LONGEST_S


Behaviour = Callable[[Peer], Iterator[float]]

SILENT: Final[Mapping[str, Behaviour]] = {act.__name__: act for act in (deaf, idle, mute, undecided)}
LYING: Final[Mapping[str, Behaviour]] = {act.__name__: act for act in (counters, offers, digests, epochs, names)}


def _offer(peer: Peer, *, fragment: int, version: int, size: int, seq: int) -> Offer:
    blob = BlobId(
        kind=BlobKind.DELTA, fragment=fragment, version=version, node=peer.name, incarnation=peer.incarnation, seq=seq
    )
    by = Contribution(
        node=peer.name, incarnation=peer.incarnation, base=version, steps=2**40, tokens=2**62, norm_sq=1e30
    )
    return Offer(blob=blob, size=size, digest=U64, window=version + 1, contributors=(by,), consumed=U64)


def _progress(
    peer: Peer, steps: int, state: NodeState, *, watermark: int = 0, tokens: int = 0, position: float = 0.0
) -> None:
    if not peer.is_open:
        return
    peer.say(
        Progress(
            state=state,
            position=position,
            round=0,
            inner_steps=steps,
            tokens=tokens,
            loss=None,
            tokens_per_s=0.0,
            compute_share=0.0,
            blocked_s=0.0,
            lost_steps=0,
            sample_watermark=watermark,
            sent=BytesByKind(),
            received=BytesByKind(),
        )
    )


def flood(port: int) -> None:
    """Hold many connections that say nothing, and open what was closed again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = FLOOD if hard == resource.RLIM_INFINITY else min(FLOOD, hard - 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count + 100, hard))
    held: list[socket.socket] = []
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until:
        for _ in range(200):
            if len(held) >= count:
                held.pop(0).close()
            with suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", port), timeout=1.0, source_address=(SOURCE, 0)))
        time.sleep(0.2 if len(held) < count else 1.0)


def main(behaviour: str, port: int) -> None:
    """Behave so until ended."""
    if behaviour == "flood":
        flood(port)
        return
    act = {**SILENT, **LYING}[behaviour]
    # The same name each time: a run must forgive the next start of a node for what the last did.
    peer = Peer(port, f"x-{behaviour}", acknowledges=behaviour != "deaf")
    until = time.monotonic() + LONGEST_S
    for pause in act(peer):
        if time.monotonic() > until:
            return
        ends = time.monotonic() + pause
        while (left := ends - time.monotonic()) > 0:
            opened = peer.is_open
            peer.listen(min(left, 0.5))
            if opened:
                if behaviour != "mute":
                    peer.say(Heartbeat())
            else:
                time.sleep(min(0.1, max(0.0, left)))


if __name__ == "__main__":
    typer.run(main)
