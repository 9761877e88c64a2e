"""The node's side of a probe, on sessions without a link between them."""

import dataclasses
from collections.abc import Callable

import pytest
from plain_runs import plain_hello, plain_spec

from farloop.algo.spec import BlobId, BlobKind
from farloop.node.link import LOOK_S, Probing
from farloop.wire.events import BlobDeclined, BlobReceived, BlobSent, MessageReceived
from farloop.wire.link_measurement import DIGEST, Noise, Sink
from farloop.wire.messages import Connection, Message, Observed, Offer, Probe, Seen, Welcome
from farloop.wire.session import Role, Session

BUDGET = 4 << 20
BLOB = BlobId(kind=BlobKind.PROBE, fragment=0, version=7)
UP = Probe(number=7, upward=True, num_bytes=BUDGET, rtt_s=0.02)
DOWN = dataclasses.replace(UP, upward=False)

Pair = tuple[Session, Session]


def opened(protocol: int = 3) -> Pair:
    """A node's session and a coordinator's."""
    welcome = Welcome(
        protocol=protocol, epoch=3, spec=plain_spec(), lane_token=b"t", versions=(0,), windows=(), rounds=()
    )
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    node.send(plain_hello(), 0.0)
    carry(node, coordinator, 0.0)
    coordinator.send(welcome, 0.0)
    carry(node, coordinator, 0.0)
    for session in (node, coordinator):
        session.events()
        session.lane_opened(1)
    return node, coordinator


def carry(
    a: Session, b: Session, now: float, *, step_s: float = 0.0, each: Callable[[float], None] | None = None
) -> float:
    """Everything that both have to say, frame by frame; each takes `step_s`."""
    moved = True
    while moved:
        moved = False
        for source, target in ((a, b), (b, a)):
            for lane, parts in source.outgoing(now, max_chunks=1):
                now += step_s if lane else 0.0
                target.receive(lane, parts, now)
                moved = True
                if each is not None:
                    each(now)
    return now


def messages(session: Session) -> list[Message]:
    return [event.message for event in session.events() if isinstance(event, MessageReceived)]


def test_bytes_that_are_asked_for_go_up_in_the_background() -> None:
    node, coordinator = opened()
    probing = Probing()
    probing.asked(node, UP)
    carry(node, coordinator, 0.0)
    assert messages(coordinator) == [Offer(blob=BLOB, size=BUDGET, digest=DIGEST)]
    sink = coordinator.expect(BLOB, BUDGET, DIGEST, Sink(BUDGET), 0.0)
    carry(node, coordinator, 0.0)
    assert sink.complete and node.background_in_flight == 0
    assert BlobSent(blob=BLOB) in node.events()


def test_a_probe_that_comes_is_reported_with_its_number_and_what_was_seen() -> None:
    node, coordinator = opened()
    probing, reports = Probing(), list[Observed]()
    probing.asked(node, DOWN)
    coordinator.send_blob(Offer(blob=BLOB, size=BUDGET, digest=DIGEST), Noise(BUDGET), background=True)
    carry(node, coordinator, 0.0)
    (offer,) = messages(node)
    assert isinstance(offer, Offer)
    probing.offered(node, offer, 0.0)

    def look(now: float) -> None:
        for event in node.events():
            if isinstance(event, BlobReceived):
                probing.ended(event.blob)
        if (report := probing.look(node)) is not None:
            reports.append(report)

    carry(node, coordinator, 0.0, step_s=0.25, each=look)
    (report,) = reports
    (seen,) = report.links
    assert (seen.peer, seen.probe) == ("", 7)
    (burst,) = seen.bursts
    assert burst.half_bytes / burst.half_s == pytest.approx((256 << 10) / 0.25)
    assert burst.seconds < 4.0  # ended before the budget was used
    assert messages(coordinator) == [] and node.meter.take() == []


def test_a_probe_that_told_nothing_is_reported_all_the_same() -> None:
    node, coordinator = opened()
    probing = Probing()
    probing.asked(node, dataclasses.replace(DOWN, num_bytes=1000))
    coordinator.send_blob(Offer(blob=BLOB, size=1000, digest=DIGEST), Noise(1000), background=True)
    carry(node, coordinator, 0.0)
    (offer,) = messages(node)
    assert isinstance(offer, Offer)
    probing.offered(node, offer, 0.0)
    carry(node, coordinator, 0.0)
    assert probing.look(node) is None
    probing.ended(BLOB)
    assert probing.look(node) == Observed(links=(Seen(probe=7),))
    assert probing.look(node) is None


def test_bytes_that_nobody_asked_for_are_declined() -> None:
    node, coordinator = opened()
    coordinator.send_blob(Offer(blob=BLOB, size=BUDGET, digest=DIGEST), Noise(BUDGET), background=True)
    carry(node, coordinator, 0.0)
    (offer,) = messages(node)
    assert isinstance(offer, Offer)
    Probing().offered(node, offer, 0.0)
    carry(node, coordinator, 0.0)
    assert coordinator.events() == [BlobDeclined(blob=BLOB)]


@pytest.mark.parametrize("probe", [UP, DOWN])
def test_a_probe_that_is_called_off_leaves_nothing(probe: Probe) -> None:
    node, coordinator = opened()
    probing = Probing()
    probing.asked(node, probe)
    carry(node, coordinator, 0.0)
    probing.asked(node, dataclasses.replace(probe, num_bytes=0))
    coordinator.events()
    if probe.upward:
        coordinator.expect(BLOB, BUDGET, DIGEST, Sink(BUDGET), 0.0)
    carry(node, coordinator, 0.0)
    assert not coordinator.meter.busy and probing.look(node) is None
    node.check()


def test_an_older_coordinator_hears_nothing() -> None:
    node, _ = opened(protocol=2)
    probing = Probing()
    told = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=0, segments=9)
    assert probing.look(node) is None and probing.connection(node, told, 0.0) is None


def test_the_connection_is_told_every_few_seconds() -> None:
    node, _ = opened()
    probing = Probing()
    told = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=0, segments=9)
    assert probing.is_due(0.0)
    assert probing.connection(node, told, 0.0) == Observed(links=(Seen(bulk=told),))
    assert not probing.is_due(LOOK_S - 0.1) and probing.is_due(LOOK_S)
    assert probing.connection(node, None, LOOK_S) is None
