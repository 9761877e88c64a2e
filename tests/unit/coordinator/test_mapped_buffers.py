"""Buffers in mapped files: the same numbers as in memory, in memory only while they are used."""

import errno
import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from stored_runs import begun, recovered, run_rounds

from farloop.algo.spec import RunSpec
from farloop.coordinator.aggregator import Buffers
from farloop.coordinator.storage.mapped_buffers import MappedBuffers
from farloop.coordinator.storage.store import Store
from farloop.lab.bench.memory import status_bytes


def buffers(numel: int) -> Buffers:
    anchor = torch.arange(numel, dtype=torch.float32)
    return Buffers(version=3, anchor=anchor, target=anchor + 1, outer={"momentum": anchor + 2})


def same(one: Buffers, other: Buffers) -> bool:
    pairs = [(one.anchor, other.anchor), (one.target, other.target)]
    pairs += [(tensor, other.outer[name]) for name, tensor in one.outer.items()]
    return one.version == other.version and all(torch.equal(here, there) for here, there in pairs)


def test_mapped_buffers_are_equal_have_no_names_and_need_no_memory(tmp_path: Path) -> None:
    (tmp_path / "mapped-left").write_bytes(b"of a process that was killed")
    place, given, before = MappedBuffers(tmp_path), buffers(8 << 20), status_bytes("VmRSS")
    kept = place(given)
    assert status_bytes("VmRSS") - before < 32 << 20, "of 96 MiB"
    assert same(kept, given) and not list(tmp_path.iterdir())


def test_where_the_disk_is_full_they_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    given = buffers(1000)
    assert MappedBuffers(tmp_path)(given) is given
    assert "buffers stay in memory" in caplog.text and not list(tmp_path.iterdir())


def test_a_run_goes_on_with_the_same_numbers(tmp_path: Path, spec: RunSpec) -> None:
    """Begun, committed and recovered in mapped files, beside one in memory."""
    usual, mapped = begun(tmp_path / "usual", spec), begun(tmp_path / "mapped", spec)
    with closing(usual), closing(mapped):
        mapped._place = MappedBuffers(mapped.directory)
        for store in (usual, mapped):
            run_rounds(store, 3)
        assert all(map(same, usual.buffers, mapped.buffers))
    again = Store.recover(tmp_path / "mapped", place=MappedBuffers(tmp_path / "mapped"))
    assert again is not None
    with closing(again), closing(recovered(tmp_path / "usual")) as expected:
        assert all(map(same, expected.buffers, again.buffers))
