"""Covers `node/link.py`: what a link moved, by direction and kind (protocol, Figures)."""

from farloop.algo.spec import BlobKind
from farloop.node.link import Traffic, moved_by
from farloop.wire.messages import BytesByKind
from farloop.wire.session import Role, Session


def test_every_byte_of_a_session_is_of_one_kind_and_direction() -> None:
    session = Session(Role.NODE, 0.0)
    traffic = session.traffic
    traffic.sent_control.add(1)
    traffic.sent_blobs[BlobKind.DELTA].add(20)
    traffic.sent_blobs[BlobKind.PROBE].add(5)
    traffic.received_control.add(300)
    traffic.received_blobs[BlobKind.UPDATE].add(4_000)
    traffic.received_blobs[BlobKind.SNAPSHOT].add(50_000)
    traffic.sent_blobs[BlobKind.SNAPSHOT].add(600_000)
    traffic.stray.add(7_000_000)
    moved = moved_by(session)
    assert moved.up == BytesByKind(delta=20, snapshot=600_000, probe=5, control=1)
    assert moved.down == BytesByKind(update=4_000, snapshot=50_000, control=7_000_300)
    assert moved.state == 650_005
    assert (moved.up.total, moved.down.total) == (traffic.bytes_sent, traffic.bytes_received)


def test_the_bytes_of_all_sessions_add_up() -> None:
    first = Traffic(BytesByKind(delta=1, control=2), BytesByKind(update=3))
    second = Traffic(BytesByKind(delta=10, probe=4), BytesByKind(snapshot=5))
    both = Traffic(BytesByKind(delta=11, probe=4, control=2), BytesByKind(update=3, snapshot=5))
    assert first + second == both
