"""A node's and a coordinator's session over a perfect pipe."""

from collections.abc import Sequence

from plain_runs import PLAIN_HELLO, plain_spec

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire.blobs import blob_digest
from farloop.wire.events import MessageReceived
from farloop.wire.limits import Limits, Timing
from farloop.wire.messages import Message, Offer, Role, Welcome
from farloop.wire.outgoing import LinkKnown
from farloop.wire.session import Session, State
from farloop.wire.uplink import Uplink

WELCOME = Welcome(
    protocol=1, epoch=3, spec=plain_spec(), lane_token=b"one-time token", versions=(0,), windows=(), rounds=(),
    lanes=Limits().max_lanes,
)  # fmt: skip


def delta(seq: int = 1) -> BlobId:
    return BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=NodeId("a"), incarnation=1, seq=seq)


def update(version: int = 1) -> BlobId:
    return BlobId(kind=BlobKind.UPDATE, fragment=0, version=version)


def offer_of(blob: BlobId, data: bytes) -> Offer:
    return Offer(blob=blob, size=len(data), digest=blob_digest(data))


def carry(a: Session, b: Session, now: float) -> None:
    """Move frames between the two until both have nothing to say."""
    moved = True
    while moved:
        moved = False
        for source, target in ((a, b), (b, a)):
            for lane, parts in source.outgoing(now):
                target.receive(lane, parts, now)
                moved = True
            source.check()
            target.check()


def messages(session: Session) -> list[Message]:
    """What was delivered since the last call."""
    return [event.message for event in session.events() if isinstance(event, MessageReceived)]


def opened(
    limits: Limits | None = None,
    timing: Timing | None = None,
    *,
    known: Sequence[LinkKnown | None] = (None, None),
    uplinks: Sequence[Uplink | None] = (None, None),
) -> tuple[Session, Session]:
    """A node and a coordinator, open at time 0, with bulk lane 1 and nothing left to say. `known`: of either's link.
    `uplinks`: what either may send."""
    node, coordinator = (
        Session(role, 0.0, limits=limits, timing=timing, known=seen, uplink=uplink)
        for role, seen, uplink in zip((Role.NODE, Role.COORDINATOR), known, uplinks, strict=True)
    )
    node.send(PLAIN_HELLO, 0.0)
    for lane, parts in node.outgoing(0.0):
        coordinator.receive(lane, parts, 0.0)
    coordinator.send(WELCOME, 0.0)
    for lane, parts in coordinator.outgoing(0.0):
        node.receive(lane, parts, 0.0)
    for session in (node, coordinator):
        session.events()
        session.lane_opened(1)
        assert session.state is State.OPEN
    return node, coordinator
