"""Covers `node/moved.py`: which bytes are the run's, and which are its state (protocol, Figures)."""

from farloop.algo.spec import BlobKind
from farloop.node.moved import Moved, moved_by
from farloop.wire.handshake import Role
from farloop.wire.session import Session


def test_snapshots_are_counted_apart_and_everything_else_is_up_or_down() -> None:
    session = Session(Role.NODE, 0.0)
    traffic = session.traffic
    traffic.sent_control.add(1)
    traffic.sent_blobs[BlobKind.DELTA].add(20)
    traffic.received_control.add(300)
    traffic.received_blobs[BlobKind.UPDATE].add(4_000)
    traffic.received_blobs[BlobKind.SNAPSHOT].add(50_000)
    traffic.sent_blobs[BlobKind.SNAPSHOT].add(600_000)
    traffic.stray.add(7_000_000)
    assert moved_by(session) == Moved(up=21, down=7_004_300, state=650_000)
    assert sum((21, 7_004_300, 650_000)) == traffic.bytes_sent + traffic.bytes_received


def test_the_bytes_of_all_sessions_add_up() -> None:
    assert Moved(1, 2, 3) + Moved(10, 20, 30) == Moved(11, 22, 33)
