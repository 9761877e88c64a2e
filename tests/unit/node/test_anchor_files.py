"""Covers `node/model/anchor_files.py`: what a crash, another run, a full disk and other ranks make of it."""

import errno
import fcntl
import logging
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from node_story import at_once
from torch import Tensor

from farloop.node.model.anchor_files import AnchorFiles, Head
from farloop.quant.digest import digest
from farloop.runtime.system import DIRECT_BYTES

N = 1024
WHOLE = ((0, 0, N),)


def anchor(version: int) -> Tensor:
    return torch.arange(N, dtype=torch.float32) + version


def head(version: int, size: int = 4 * N, **given: object) -> Head:
    own = {"run": "run", "history": 0, "fragment": 3, "codec": "", **given}
    return Head(version=version, digest=digest(anchor(version)), size=size, **own)  # type: ignore[arg-type]


class Files(AnchorFiles):
    """Those of a node that is alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "anchors", at_once)

    def save(self, version: int, **given: object) -> bool:
        self.begin(3, version, WHOLE, lambda: anchor(version), lambda: 0)
        if done := self.finish_save():
            self.finish(head(version, **given))
        return done

    def update(self, version: int) -> None:
        self.add(head(version, 5, codec="q4"), b"bytes")

    def kept(self) -> Tensor:
        """The anchor that is found, read with its digest checked."""
        base, flat = self.base(3), torch.zeros(N)
        assert base is not None
        self.read(3, base.version, WHOLE, flat)
        assert digest(flat) == base.digest
        return flat


def test_an_anchor_and_the_updates_behind_it_are_found_again(tmp_path: Path) -> None:
    files = Files(tmp_path)
    assert files.is_due(3, 7, every=2) and files.save(7) and not files.is_due(3, 7, every=2)
    files.update(8)
    assert not files.is_due(3, 8, every=2) and files.is_due(3, 9, every=2)
    files.update(10)  # one is missing: it is of no use
    again = Files(tmp_path)
    assert again.find() == {3: head(8, 5, codec="q4")}
    assert torch.equal(again.kept(), anchor(7))
    assert list(again.updates(3)) == [(head(8, 5, codec="q4"), bytearray(b"bytes"))]
    again.save(9)
    assert [path.name for path in (tmp_path / "anchors").iterdir()] == ["3-9.anchor"]


@pytest.mark.parametrize("place", range(0, 180, 7))
def test_a_file_whose_head_has_a_flipped_bit_does_not_count(tmp_path: Path, place: int) -> None:
    files = Files(tmp_path)
    files.save(7)
    files.update(8)
    for name, left in (("3-8.update", {3: head(7)}), ("3-7.anchor", {})):
        path = tmp_path / "anchors" / name
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        assert Files(tmp_path).find() == left


def test_what_else_lies_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.save(7)
    for name in ("backup.update", "0-8 copy.anchor", "3-7.anchor~"):
        (tmp_path / "anchors" / name).write_bytes(b"x" * 5000)
    again = Files(tmp_path)
    assert again.find() == {3: head(7)}
    again.save(8)
    assert {path.name for path in (tmp_path / "anchors").iterdir()} == {
        "3-8.anchor", "backup.update", "0-8 copy.anchor", "3-7.anchor~",
    }  # fmt: skip


def test_ranks_that_begin_at_once_truncate_no_others_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as each of them may have found
    for start in (512, 0):
        files = Files(tmp_path)
        files.begin(3, 7, ((start, 0, 512),), partial(anchor(7).narrow, 0, start, 512), lambda: 0)
        assert files.finish_save()
    monkeypatch.undo()
    files.finish(head(7))
    assert torch.equal(_found(tmp_path), anchor(7))


def test_ranks_write_their_parts_and_other_ranks_read_theirs(tmp_path: Path) -> None:
    """Twice 512 elements in pieces of 256 that change places, then parts of 256 and 768."""
    two = [((0, 0, 256), (768, 256, 256)), ((256, 0, 512),)]
    for runs in two:
        files = Files(tmp_path)
        own = torch.cat([anchor(7)[start : start + count] for start, _, count in runs])
        files.begin(3, 7, runs, own.detach, lambda: 0)
        assert files.finish_save()
    files.finish(head(7))
    assert torch.equal(_found(tmp_path), anchor(7))
    for start, count in ((0, 256), (256, 768)):
        part = torch.zeros(count)
        Files(tmp_path).read(3, 7, ((start, 0, count),), part)
        assert torch.equal(part, anchor(7)[start : start + count])


@pytest.mark.parametrize("direct", [True, False])
def test_large_anchors_and_updates_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Past the page cache, or where the file system has no such writes; neither ends with a whole page."""
    if not direct:
        monkeypatch.setattr(fcntl, "fcntl", lambda fd, what, value=0: no_direct_writes(value))
    files, numel = AnchorFiles(tmp_path / "anchors", at_once), (DIRECT_BYTES >> 2) * 2 + 321
    large, update = torch.arange(numel, dtype=torch.float32), bytearray(os.urandom(DIRECT_BYTES + 77))
    files.begin(3, 7, ((0, 0, numel),), lambda: large)
    assert files.finish_save()
    files.finish(head(7, 4 * numel))
    files.add(head(8, len(update), codec="q4"), update)
    again, flat = AnchorFiles(tmp_path / "anchors", at_once), torch.zeros(numel)
    assert again.find() == {3: head(8, len(update), codec="q4")}
    again.read(3, 7, ((0, 0, numel),), flat)
    assert torch.equal(flat, large)
    assert [data for _, data in again.updates(3)] == [update]


def no_direct_writes(flags: int) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "Invalid argument")
    return 0


def _found(folder: Path) -> Tensor:
    files = Files(folder)
    files.find()
    return files.kept()


class Crash(BaseException):
    """A power cut."""


def test_a_crash_anywhere_leaves_the_anchor_before_or_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call to the system in turn is the last."""
    versions, calls = list[int](), 0
    while True:
        folder = tmp_path / str(calls)
        files = Files(folder)
        files.save(7)
        files.update(8)
        left = calls

        def ask(name: str) -> None:
            real = getattr(os, name)

            def asked(*given: object) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Crash
                return real(*given)

            monkeypatch.setattr(os, name, asked)

        for name in ("pwrite", "fsync", "ftruncate", "unlink"):
            ask(name)
        try:
            files.save(9)
            crashed = False
        except Crash:
            crashed = True
        monkeypatch.undo()
        after = Files(folder)
        versions.append(after.find()[3].version)
        assert torch.equal(after.kept(), anchor(9 if versions[-1] == 9 else 7))
        if not crashed:
            break
        calls += 1
    assert versions == sorted(versions) and set(versions) == {8, 9} and calls >= 6


def test_other_runs_and_histories_are_deleted_by_the_first_anchor_of_this_one(tmp_path: Path) -> None:
    Files(tmp_path).save(50, run="other", fragment=3)
    Files(tmp_path).save(40, history=2)
    files = Files(tmp_path)
    files.save(7)
    assert [path.name for path in (tmp_path / "anchors").iterdir()] == ["3-7.anchor"]


@pytest.mark.parametrize("cut", [10, 5000])
def test_a_file_that_was_cut_short_does_not_count(tmp_path: Path, cut: int) -> None:
    Files(tmp_path).save(7)
    os.truncate(tmp_path / "anchors" / "3-7.anchor", cut)
    assert Files(tmp_path).find() == {}


def test_an_anchor_that_changes_while_it_is_written_is_dropped(tmp_path: Path) -> None:
    files, changes = Files(tmp_path), iter(range(9))
    files.begin(3, 7, WHOLE, lambda: anchor(7), lambda: next(changes))
    assert files.is_written and not files.finish_save()
    assert not list((tmp_path / "anchors").iterdir()) and files.is_due(3, 7, every=8)


def test_a_full_disk_is_one_warning_and_the_anchor_is_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = Files(tmp_path)
    files.save(7)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with caplog.at_level(logging.WARNING):
        files.update(8)
        assert files.is_due(3, 8, every=8) and not files.save(8)
    assert [record.getMessage() for record in caplog.records] == [
        "anchor not saved fragment=3: [Errno 28] No space left on device; a restart takes snapshots until it is"
    ]
    monkeypatch.undo()
    assert files.save(9) and Files(tmp_path).find()[3].version == 9
