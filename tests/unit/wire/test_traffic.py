"""farloop.wire.traffic: the figures behind bytes_up and bytes_down."""

import pytest

from farloop.algo.spec import BlobKind
from farloop.wire.traffic import Traffic, wire_bytes


@pytest.mark.parametrize(("sizes", "num_bytes"), [((0,), 2), ((255,), 257), ((256,), 265), ((56, 1000), 58 + 1009)])
def test_wire_bytes_include_the_framing_of_zeromq(sizes: tuple[int, ...], num_bytes: int) -> None:
    assert wire_bytes([bytes(size) for size in sizes]) == num_bytes


@pytest.mark.parametrize(
    ("sizes", "num_bytes"), [((10,), 45), ((222,), 257), ((223,), 265), ((56, 10**5), 91 + 100042)]
)
def test_wire_bytes_include_what_curve_adds_to_every_part(sizes: tuple[int, ...], num_bytes: int) -> None:
    assert wire_bytes([bytes(size) for size in sizes], curve=True) == num_bytes


@pytest.mark.parametrize(("curve", "sent", "received"), [(False, 107, 107), (True, 567, 301)])
def test_the_greetings_of_a_connection_are_control(curve: bool, sent: int, received: int) -> None:
    """As counted on a connection between a DEALER and a ROUTER of libzmq 4.3.5."""
    traffic = Traffic(curve=curve)
    traffic.connected()
    assert (traffic.sent.control, traffic.received.control) == (sent, received)
    assert (traffic.bytes_sent, traffic.bytes_received) == (sent, received)


def test_all_classes_are_summed() -> None:
    traffic = Traffic()
    traffic.sent_control.add(10)
    traffic.sent_blobs[BlobKind.DELTA].add(100)
    traffic.received_control.add(1)
    traffic.received_blobs[BlobKind.SNAPSHOT].add(20)
    traffic.stray.add(300)
    assert traffic.bytes_sent == 110
    assert traffic.bytes_received == 321


def test_a_stray_frame_that_finds_its_blob_is_counted_once() -> None:
    traffic = Traffic()
    traffic.stray.add(300)
    traffic.stray.add(50)
    traffic.adopt(BlobKind.UPDATE, 300)
    assert (traffic.stray.frames, traffic.stray.bytes) == (1, 50)
    assert traffic.received_blobs[BlobKind.UPDATE].bytes == 300
    assert traffic.bytes_received == 350
