"""One frame of every message, byte for byte (protocol Z).

`golden/frames-v1.txt` is what other implementations can test against. Regenerate with:
python tests/unit/wire/test_golden_frames.py
"""

import dataclasses
from pathlib import Path

import pytest

from farloop.algo.spec import (
    BlobId,
    BlobKind,
    Contribution,
    Fragment,
    Identity,
    Layout,
    Lease,
    NodeId,
    Revision,
    RoundPlan,
    RunSpec,
    TensorSlot,
    WindowTerms,
)
from farloop.algo.terms import LearningRate, Terms
from farloop.wire import messages as msg
from farloop.wire.blobs import blob_key
from farloop.wire.frames import BulkFrame, ControlFrame, parse_bulk, parse_control
from farloop.wire.limits import Limits
from farloop.wire.meter import Burst
from farloop.wire.reasons import Reason

GOLDEN = Path(__file__).parent / "golden" / "frames-v1.txt"

A = NodeId("a")
DELTA = BlobId(kind=BlobKind.DELTA, fragment=1, version=2, node=A, incarnation=3, seq=4)
LEASE = Lease(start=1000, count=512)
ROUND = RoundPlan(index=2, start=60, length=30, node_steps=((NodeId("b"), 15),))
WINDOW = WindowTerms(fragment=1, window=3, round=2, tau=5, mix=0.5, codec_up="q4", codec_down="q8")
SPEC = RunSpec(
    identity=Identity(
        name="golden", model="own",
        layout=Layout(
            slots=1,
            fragments=(Fragment(index=0, slot=0, numel=256, tensors=(TensorSlot(name="w", shape=(3, 4), offset=0),)),),
        ),
        anchor_digests=(0x0123456789ABCDEF,), data="own", num_samples=0, evaluation_set="none", seed=7,
    ),
    terms=Terms.from_flat(
        method="streaming", steps=300, h=30, tau=5, mix=0.5, codec_up="q4", codec_down="q8", outer_lr=0.5,
        outer_momentum=0.75, lr=LearningRate(peak=0.5, minimum=0.25, warmup_steps=10), clip=1.0, weight_decay=0.125,
        batch_sequences=8, sequence_tokens=128,
    ),
)  # fmt: skip
ANCHOR = msg.AnchorRef(fragment=0, version=5, digest=2**64 - 1)
REVISION = Revision(number=1, terms=SPEC.terms, windows=(4,), round=5)
TOKEN = bytes(range(8))
BURST = Burst(
    num_bytes=1 << 22, seconds=2.0, half_bytes=1 << 21, half_s=0.5, half_chunks=8, third_bytes_per_s=4e6,
    fourth_bytes_per_s=4e6,
)  # fmt: skip
BULK = msg.Connection(rtt_s=0.25, least_rtt_s=0.125, retransmits=3, segments=4096, congestion="bbr")
CONTRIBUTION = Contribution(node=A, incarnation=3, base=2, steps=30, tokens=30_720, norm_sq=1.5)
MESSAGES: tuple[msg.Message, ...] = (
    msg.Hello(
        protocol_min=1, protocol_max=1, node=A, incarnation=3, fingerprint="00000000deadbeef", layout=None,
        epoch_seen=2, anchors=(ANCHOR,), round=None, device="cpu",
    ),
    msg.Welcome(
        protocol=1, epoch=3, spec=SPEC, lane_token=TOKEN, versions=(2,), windows=(WINDOW,), rounds=(ROUND,)
    ),
    msg.Refused(reason=Reason.WRONG_RUN, detail="here aa, there bb", retriable=False),
    msg.LaneHello(lane_token=TOKEN),
    msg.Ready(),
    msg.Start(round=ROUND, lease=LEASE),
    msg.Offer(blob=DELTA, size=100_000, digest=2**63, window=3, contributors=(CONTRIBUTION,)),
    msg.Credit(blob=DELTA, received=0, limit=65_536),
    msg.Stored(blob=DELTA),
    msg.Outcome(blob=DELTA, reason=Reason.LATE, detail="window 3 closed"),
    msg.Committed(
        fragment=1, version=3, size=70_000, digest=1, anchor_digest=2, merged=(msg.Share(node=A, weight=0.5),),
        drops=(msg.Drop(node=NodeId("b"), reason=Reason.SILENT),), next_window=WINDOW, rounds=(ROUND,), evaluator=A,
    ),
    msg.Grant(lease=LEASE),
    msg.Fetch(fragment=1),
    msg.Progress(
        state="training", position=61.5, round=2, inner_steps=61, tokens=62_464, loss=None, tokens_per_s=1000.0,
        compute_share=0.75, blocked_s=0.5, lost_steps=0, sample_watermark=488, detail="",
        sent=msg.BytesByKind(delta=1, control=2), received=msg.BytesByKind(update=3),
    ),
    msg.Evaluation(loss=2.5, versions=(3,), position=60.0, seconds=0.5),
    msg.Leave(reason=Reason.DRAINED, detail="bye", anchors=(ANCHOR,)),
    msg.Finished(),
    msg.Heartbeat(),
    msg.Revised(revision=REVISION),
    msg.Held(
        anchors=(msg.AnchorRef(fragment=1, version=2, digest=2**64 - 1),), windows=(WINDOW,), final=(0,),
        rounds=(ROUND,), revisions=(REVISION,), unused=(LEASE,), granted_to=1512,
    ),
    msg.Recall(fragment=1),
    msg.Echo(number=1),
    msg.Echoed(number=1),
    msg.Probe(number=2, upward=True, num_bytes=1 << 25, rtt_s=0.125),
    msg.Observed(links=(msg.Seen(peer=NodeId("b"), bursts=(BURST,), probe=2, rtt_s=0.25, bulk=BULK),)),
    msg.Trial(padding=b"0123"),
    msg.Place(blob=DELTA, url="https://store.example/runs/00000000deadbeef/f1/v3?X-Amz-Signature=0123"),
    msg.Placed(blob=DELTA, detail="403 Forbidden"),
)  # fmt: skip
NAMED: dict[str, msg.Message] = {type(message).__name__: message for message in MESSAGES}
COMMITTED = NAMED["Committed"]
assert isinstance(COMMITTED, msg.Committed)
NAMED["Committed.codec_up_of"] = dataclasses.replace(
    COMMITTED, next_window=dataclasses.replace(WINDOW, codec_up_of=((NodeId("b"), "q4r"),))
)
CHUNK = bytes(range(32))
LIMITS = Limits()


def golden_frames() -> dict[str, bytes]:
    """Name → bytes of every frame; a bulk frame's two parts one after the other."""
    frames = {}
    for name, message in NAMED.items():
        opens = isinstance(message, msg.Hello | msg.Refused | msg.Trial)
        run, epoch = (0, 0) if opens else (0xDEADBEEF, 3)
        seq, ack = (0, 0) if isinstance(message, msg.Hello | msg.Heartbeat | msg.Trial) else (9, 8)
        frame = ControlFrame(run=run, epoch=epoch, seq=seq, ack=ack, body=msg.encode(message))
        frames[name] = b"".join(frame.parts())
    bulk = BulkFrame(run=0xDEADBEEF, epoch=3, key=blob_key(DELTA), offset=65_536, chunk=memoryview(CHUNK))
    frames["bulk"] = b"".join(bulk.parts())
    return frames


def recorded_frames() -> dict[str, bytes]:
    """Name → bytes of the frames in the file."""
    lines = GOLDEN.read_text().splitlines()
    return {name: bytes.fromhex(digits) for name, digits in (line.split() for line in lines)}


def test_every_message_has_a_golden_frame() -> None:
    assert {type(message) for message in MESSAGES} == set(msg.NUMBERS)
    assert recorded_frames().keys() == golden_frames().keys()


@pytest.mark.parametrize("name", golden_frames())
def test_a_frame_has_its_golden_bytes(name: str) -> None:
    assert golden_frames()[name].hex() == recorded_frames()[name].hex()


@pytest.mark.parametrize("name", NAMED)
def test_golden_bytes_give_the_message(name: str) -> None:
    frame = parse_control([recorded_frames()[name]], LIMITS)
    assert msg.decode(frame.body) == NAMED[name]


def test_golden_bytes_give_the_chunk() -> None:
    data = recorded_frames()["bulk"]
    frame = parse_bulk([data[:56], data[56:]], LIMITS)
    assert (frame.run, frame.epoch, frame.key, frame.offset) == (0xDEADBEEF, 3, blob_key(DELTA), 65_536)
    assert frame.chunk == CHUNK


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{name} {data.hex()}\n" for name, data in golden_frames().items()))
