"""Epochs only grow (protocol S)."""

import os
from pathlib import Path

import pytest

from farloop.coordinator.errors import Fenced, StorageFailed
from farloop.coordinator.storage.epoch import claim_epoch, require_epoch


def test_every_claim_is_one_higher(tmp_path: Path) -> None:
    assert [claim_epoch(tmp_path) for _ in range(3)] == [1, 2, 3]


def test_a_lost_file_does_not_turn_time_back(tmp_path: Path) -> None:
    claim_epoch(tmp_path)
    (tmp_path / "epoch").unlink()
    assert claim_epoch(tmp_path, seen=7) == 8
    assert claim_epoch(tmp_path, seen=2) == 9


def test_the_file_of_format_version_1_is_read(tmp_path: Path) -> None:
    (tmp_path / "epoch").write_bytes(b"farloop-epoch 1 41\n")
    assert claim_epoch(tmp_path) == 42
    assert (tmp_path / "epoch").read_bytes() == b"farloop-epoch 1 42\n"


@pytest.mark.parametrize(
    "content", [b"", b"41", b"farloop-epoch 2 41\n", b"farloop-epoch 1 41", b"farloop-epoch 1 -1\n", bytes(30)]
)
def test_another_content_is_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "epoch").write_bytes(content)
    with pytest.raises(StorageFailed, match="not an epoch file"):
        claim_epoch(tmp_path, seen=5)
    assert (tmp_path / "epoch").read_bytes() == content


def test_who_finds_a_higher_claim_than_its_own_is_fenced(tmp_path: Path) -> None:
    own = claim_epoch(tmp_path)
    require_epoch(tmp_path, own)
    assert claim_epoch(tmp_path) == own + 1
    with pytest.raises(Fenced, match="epoch 2 was claimed after ours, 1: another coordinator"):
        require_epoch(tmp_path, own)
    (tmp_path / "epoch").unlink()
    require_epoch(tmp_path, own)


def test_a_crash_before_the_rename_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim_epoch(tmp_path)
    with monkeypatch.context() as crash:

        def refuse(source: Path, target: Path) -> None:
            raise OSError(5, "Input/output error")

        crash.setattr(os, "replace", refuse)
        with pytest.raises(StorageFailed):
            claim_epoch(tmp_path)
    assert claim_epoch(tmp_path) == 2
