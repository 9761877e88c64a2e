"""One frame of every message, byte for byte (protocol Z).

`golden/frames-v1.txt` is what other implementations can test against. A new message gets its frame, with the body that
`unit/golden/full_forms.txt` has, by: python tests/unit/wire/test_golden_frames.py
"""

from pathlib import Path

import pytest

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.wire import messages as msg
from farloop.wire.blobs import blob_key
from farloop.wire.frames import BulkFrame, ControlFrame, parse_bulk, parse_control
from farloop.wire.limits import Limits

GOLDEN = Path(__file__).parent / "golden" / "frames-v1.txt"
FULL_FORMS = Path(__file__).parents[1] / "golden" / "full_forms.txt"

DELTA = BlobId(kind=BlobKind.DELTA, fragment=1, version=2, node=NodeId("a"), incarnation=3, seq=4)
BULK = BulkFrame(run=0xDEADBEEF, epoch=3, key=blob_key(DELTA), offset=65_536, chunk=memoryview(bytes(range(32))))
LIMITS = Limits()


def lines_of(path: Path) -> dict[str, bytes]:
    """Name → bytes; a bulk frame's two parts one after the other."""
    return {name: bytes.fromhex(data) for name, data in map(str.split, path.read_text().splitlines())}


def framed(body: bytes) -> bytes:
    """A frame of this message, with the numbers that its kind has in all golden frames."""
    message = msg.decode(body)
    run, epoch = (0, 0) if isinstance(message, msg.Hello | msg.Refused | msg.Trial) else (0xDEADBEEF, 3)
    seq, ack = (0, 0) if isinstance(message, msg.Hello | msg.Heartbeat | msg.Trial) else (9, 8)
    return b"".join(ControlFrame(run=run, epoch=epoch, seq=seq, ack=ack, body=msg.encode(message)).parts())


FRAMES = lines_of(GOLDEN)
OF_MESSAGES = [name for name in FRAMES if name != "bulk"]
"""`Committed.codec_up_of` is another one of Committed."""


def test_every_message_has_a_golden_frame() -> None:
    assert {name.partition(".")[0] for name in OF_MESSAGES} == {kind.__name__ for kind in msg.NUMBERS}


@pytest.mark.parametrize("name", OF_MESSAGES)
def test_a_frame_is_read_and_written_as_the_same_bytes(name: str) -> None:
    """Values of fields stand beside their names: what is read otherwise is written otherwise."""
    body = parse_control([FRAMES[name]], LIMITS).body
    assert type(msg.decode(body)).__name__ == name.partition(".")[0]
    assert framed(body).hex() == FRAMES[name].hex()


def test_golden_bytes_give_the_chunk_and_it_gives_them() -> None:
    data = FRAMES["bulk"]
    assert b"".join(BULK.parts()) == data
    frame = parse_bulk([data[:56], data[56:]], LIMITS)
    assert (frame.run, frame.epoch, frame.key, frame.offset) == (BULK.run, BULK.epoch, BULK.key, BULK.offset)
    assert frame.chunk == BULK.chunk


if __name__ == "__main__":
    bodies = {name.removeprefix("message."): data for name, data in lines_of(FULL_FORMS).items() if "message." in name}
    new = {name: framed(body) for name, body in bodies.items() if name not in FRAMES}
    GOLDEN.write_text("".join(f"{name} {data.hex()}\n" for name, data in {**new, **FRAMES}.items()))
