"""Records: typed, and read with care (protocol B, H, P). Their bytes: unit/golden/test_full_forms.py."""

import dataclasses
from typing import get_args

import pytest
from stored_runs import SUMMARY

from farloop.coordinator.decide import records as rec
from farloop.wire.messages import pack, unpack

EVALUATION = rec.EvaluationTaken(loss=1.5, versions=(7, 6), position=33.5)


def test_every_record_has_a_number_of_its_own() -> None:
    assert set(rec.KINDS) == set(get_args(rec.Record))
    assert len(set(rec.KINDS.values())) == len(rec.KINDS)
    assert all(0 < kind < 256 for kind in rec.KINDS.values())


def test_an_infinite_loss_comes_back() -> None:
    infinite = dataclasses.replace(EVALUATION, loss=float("inf"))
    assert rec.decode(*rec.encode(infinite)) == infinite


def test_a_loss_that_is_no_number_is_equal_to_itself_once_it_is_read() -> None:
    """A journal that held NaN differed from what had been read of it, and no coordinator could start on it."""
    kind, data = rec.encode(EVALUATION)
    broken = {**unpack(data), "loss": float("nan")}
    assert (
        rec.decode(kind, pack(broken))
        == rec.decode(kind, pack(broken))
        == dataclasses.replace(EVALUATION, loss=float("inf"))
    )
    kind, data = rec.encode(SUMMARY)
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
