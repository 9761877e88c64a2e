"""Records: typed, and the same bytes for ever (protocol B, H, P).

`python tests/unit/coordinator/test_records.py` writes the golden bytes anew: only for a new kind, or a new field with
a default. Bytes that are there already are in a journal.
"""

import dataclasses
import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from farloop.coordinator.decide import records as rec
from farloop.wire.messages import AnchorRef, Committed, Drop, Share, pack, unpack
from farloop.wire.reasons import Reason

GOLDEN = Path(__file__).parent / "golden" / "records-v1.json"

A, B, LIMA = NodeId("berlin"), NodeId("oslo"), NodeId("lima")
DELTA = BlobId(kind=BlobKind.DELTA, fragment=1, version=6, node=A, incarnation=2, seq=9)
LAYOUT = Layout(
    slots=1,
    fragments=(Fragment(index=0, slot=0, numel=256, tensors=(TensorSlot(name="w", shape=(3, 5), offset=0),)),),
)
MOST = (1 << 64) - 1
SPEC = RunSpec(
    identity=Identity(
        name="run", model="own", layout=LAYOUT, anchor_digests=(MOST,), data="own", num_samples=0,
        evaluation_set="none", seed=7,
    ),
    terms=Terms.from_flat(
        method="streaming", steps=100, h=10, tau=2, mix=0.5, codec_up="q4", codec_down="q4", outer_lr=0.6,
        outer_momentum=0.9, lr=LearningRate(), clip=1.0, weight_decay=0.1, batch_sequences=8, sequence_tokens=128,
        quorum=2,
    ),
    revision=3,
)  # fmt: skip
WINDOW = WindowTerms(fragment=1, window=8, round=4, tau=2, mix=0.5, codec_up="q4", codec_down="q4")
MERGED, DROPS = (Share(node=A, weight=0.25), Share(node=B, weight=0.75)), (Drop(node=LIMA, reason=Reason.LATE),)
EVALUATION = rec.EvaluationTaken(loss=1.5, versions=(7, 6), position=33.5)
STARTED = rec.NodeStarted(node=A, incarnation=2, round=4)
REVISION = Revision(number=4, terms=SPEC.terms, windows=(9, 1 << 40), round=6)
SAMPLES: tuple[rec.Record, ...] = (
    rec.RunStarted(spec=SPEC, epoch=1, rounds=(RoundPlan(index=0, start=0, length=12),)),
    rec.EpochClaimed(epoch=2),
    STARTED,
    rec.NodeLeft(node=B, reason=Reason.SILENT, consumed=48),
    rec.LeaseGranted(node=A, incarnation=2, lease=Lease(start=1 << 40, count=64), consumed=160),
    rec.RoundFixed(round=RoundPlan(index=5, start=50, length=10, node_steps=((B, 7),))),
    rec.InputStored(
        blob=DELTA, window=7, digest=MOST,
        contributors=(Contribution(node=A, incarnation=2, base=6, steps=10, tokens=10240, norm_sq=1e-3),),
    ),
    rec.InputDropped(blob=DELTA, reason=Reason.NON_FINITE, detail="element 17"),
    rec.WindowCommitted(
        fragment=1, version=7, round=3, merged=MERGED, drops=DROPS, blobs=(rec.Addend(blob=DELTA, weight=0.25),),
        anchor_digest=1, target_digest=MOST, momentum_digest=None, next_window=WINDOW, update_size=640,
        update_digest=1 << 63, outer_lr=0.6, outer_momentum=0.9, why="all 2 expected nodes came", delta_scale=0.25,
    ),
    rec.SnapshotTaken(fragment=1, version=7),
    EVALUATION,
    rec.RunFinished(),
    rec.LedgerSaved(
        spec=SPEC, epoch=2, versions=(7,), windows=(WINDOW,), rounds=(RoundPlan(index=4, start=40, length=10),),
        commits=(
            Committed(
                fragment=1, version=7, size=640, digest=1 << 63, anchor_digest=1, merged=MERGED, drops=DROPS,
                next_window=WINDOW, rounds=(),
            ),
        ),
        started=(STARTED,), inputs=(rec.InputStored(blob=DELTA, window=8, contributors=(), digest=3),),
        frontier=1 << 40, returned=(Lease(start=3, count=4),),
        held=(rec.LeasesHeld(node=A, incarnation=2, leases=(Lease(start=0, count=3),), consumed=2),),
        evaluations=(dataclasses.replace(EVALUATION, versions=(7,)),), finished=False,
    ),
    rec.EpochSeen(epoch=6),
    rec.Rewound(epoch=7),
    rec.AnchorFetched(anchor=AnchorRef(fragment=1, version=9, digest=MOST), node=A, blob_digest=1 << 63),
    rec.Adopted(
        epoch=8, anchors=(rec.AdoptedAnchor(fragment=1, version=9, digest=MOST, node=A, before=7),),
        windows=(dataclasses.replace(WINDOW, window=10, round=6),), rounds=(RoundPlan(index=6, start=60, length=10),),
        revisions=(REVISION,), frontier=1 << 41, returned=(Lease(start=3, count=4),), uncertain=4,
        lost=(AnchorRef(fragment=1, version=10, digest=5),), missing=(B,),
    ),
    rec.TermsChanged(revision=REVISION),
    rec.KeysChanged(time_s=1.75e9, added=(rec.AllowedKey(node=A, fingerprint="sha256:0123456789abcdef"),), removed=()),
)  # fmt: skip


def test_every_record_has_a_number_of_its_own_and_a_sample() -> None:
    assert set(rec.KINDS) == set(get_args(rec.Record)) == {type(sample) for sample in SAMPLES}
    assert len(set(rec.KINDS.values())) == len(rec.KINDS)
    assert all(0 < kind < 256 for kind in rec.KINDS.values())


def test_the_bytes_are_those_of_format_version_1() -> None:
    assert _current() == json.loads(GOLDEN.read_text())


def test_golden_bytes_are_still_understood() -> None:
    """An infinite loss comes back, too."""
    infinite = dataclasses.replace(EVALUATION, loss=float("inf"))
    assert rec.decode(*rec.encode(infinite)) == infinite
    golden = json.loads(GOLDEN.read_text())
    assert tuple(rec.decode(kind, bytes.fromhex(data)) for kind, data in golden.values()) == SAMPLES


def test_a_loss_that_is_no_number_is_equal_to_itself_once_it_is_read() -> None:
    """A journal that held NaN differed from what had been read of it, and no coordinator could start on it."""
    kind, data = rec.encode(EVALUATION)
    broken = {**unpack(data), "loss": float("nan")}
    assert (
        rec.decode(kind, pack(broken))
        == rec.decode(kind, pack(broken))
        == dataclasses.replace(EVALUATION, loss=float("inf"))
    )
    (saved,) = (sample for sample in SAMPLES if isinstance(sample, rec.LedgerSaved))
    kind, data = rec.encode(saved)
    broken = {**unpack(data), "evaluations": [broken]}
    assert rec.decode(kind, pack(broken)) == rec.decode(kind, pack(broken))


def test_an_unknown_field_is_ignored() -> None:
    assert rec.decode(2, pack({"epoch": 4, "colour": "blue"})) == rec.EpochClaimed(epoch=4)


@pytest.mark.parametrize(
    ("kind", "data", "sentence"),
    [
        (0, b"\x80", "kind 0 is unknown"),
        (200, b"\x80", "kind 200 is unknown"),
        (2, b"", "not msgpack"),
        (2, b"\x80", "EpochClaimed.epoch: Field required"),
        (2, pack({"epoch": "now"}), "EpochClaimed.epoch"),
        (2, pack([1]), "EpochClaimed"),
        (4, pack({"node": "a", "reason": 9999}), "NodeLeft.reason"),
        (2, b"\x81\x90\xc0", "unhashable"),
    ],
)
def test_what_is_not_a_record_is_refused_with_a_sentence(kind: int, data: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        rec.decode(kind, data)


@given(kind=st.integers(0, 255), data=st.binary(max_size=64))
def test_any_bytes_are_a_record_or_a_value_error(kind: int, data: bytes) -> None:
    try:
        record = rec.decode(kind, data)
    except ValueError:
        return
    assert type(record) in rec.KINDS


def _current() -> dict[str, list[int | str]]:
    encoded = {type(sample).__name__: rec.encode(sample) for sample in SAMPLES}
    return {name: [kind, data.hex()] for name, (kind, data) in encoded.items()}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(_current(), indent=1) + "\n")
