"""Snapshots: whole or not there, verified, the last two kept (protocol P, Z).

`PYTHONPATH=tests/cases python tests/unit/coordinator/test_snapshots.py` writes the golden snapshot anew: only with a
new format version.
"""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch
from disk_faults import die_at_the_rename, refuse
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored_runs import GOLDEN

from farloop.coordinator.errors import DiskFull, SnapshotCorrupt, StorageFailed
from farloop.coordinator.storage.snapshots import Snapshot, export, load, load_latest, save, snapshot_path

RUN = "0123456789abcdef"


def sample(version: int, *, fragment: int = 2, fingerprint: str = RUN) -> Snapshot:
    anchor = torch.arange(6, dtype=torch.float32) + version
    return Snapshot(
        fingerprint=fingerprint,
        fragment=fragment,
        version=version,
        tensors={"anchor": anchor, "target": anchor / 3, "momentum": -anchor},
        digests={"anchor": (1 << 64) - 1, "target": 1, "momentum": 0},
    )


def same(found: Snapshot | None, expected: Snapshot) -> bool:
    return (
        found is not None
        and (found.fingerprint, found.fragment, found.version, found.digests)
        == (expected.fingerprint, expected.fragment, expected.version, expected.digests)
        and found.tensors.keys() == expected.tensors.keys()
        and all(torch.equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
        and all(found.tensors[name].dtype == tensor.dtype for name, tensor in expected.tensors.items())
    )


def present(directory: Path) -> set[str]:
    """Names without their suffix; what is not whole has another."""
    return {path.name.removesuffix(".safetensors") for path in (directory / "snapshots").iterdir()}


def latest(directory: Path) -> Snapshot | None:
    return load_latest(directory, 2, fingerprint=RUN)


# --- Saved and loaded


FLAT = torch.arange(12.0)


@pytest.mark.parametrize(
    "tensors",
    [
        {"anchor": torch.zeros(3)},
        {"anchor": torch.zeros(0), "step": torch.tensor(7), "m": torch.ones(2, 2), "v": torch.ones(3).bfloat16()},
        {},
        {"left": FLAT[:6], "right": FLAT[6:], "columns": FLAT[:6].view(2, 3).t()},
    ],
    ids=["no momentum", "other state", "nothing", "views and strides"],
)
def test_any_optimizer_state_is_saved_by_value(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    snapshot = Snapshot(fingerprint=RUN, fragment=0, version=1, tensors=tensors, digests={})
    assert same(load(save(tmp_path, snapshot)), snapshot)


def test_the_last_two_of_each_fragment_stay_and_those_newer_than_what_is_saved(tmp_path: Path) -> None:
    save(tmp_path, sample(1, fragment=22))
    for version in (0, 8, 96, 104):
        save(tmp_path, sample(version))
    assert present(tmp_path) == {"f22-v1", "f2-v96", "f2-v104"}
    assert same(latest(tmp_path), sample(104))
    save(tmp_path, sample(88))
    assert present(tmp_path) == {"f22-v1", "f2-v88", "f2-v96", "f2-v104"}


# --- The disk refuses


def test_a_crash_before_the_rename_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, sample(8))
    with monkeypatch.context() as patch:
        die_at_the_rename(patch)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, sample(16))
    assert present(tmp_path) == {"f2-v8", "f2-v16.safetensors.tmp"}
    assert same(latest(tmp_path), sample(8))
    save(tmp_path, sample(24))
    assert present(tmp_path) == {"f2-v8", "f2-v24"}


@pytest.mark.parametrize(
    ("call", "error", "raised"),
    [
        ("require_free", DiskFull(Path("disk"), 3 * 6 * 4, 0), DiskFull),
        ("os.pwritev", OSError(errno.ENOSPC, "No space left on device"), DiskFull),
        ("os.pwritev", OSError(errno.EIO, "Input/output error"), StorageFailed),
    ],
)
def test_what_the_disk_refuses_leaves_the_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception, raised: type[Exception]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    save(tmp_path, sample(8))
    monkeypatch.setattr(f"farloop.coordinator.storage.files.{call}", fail)
    with pytest.raises(raised):
        save(tmp_path, sample(16))
    assert present(tmp_path) == {"f2-v8"}


# --- Damage


def test_any_flip_or_cut_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, sample(8))
    whole = path.read_bytes()
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(SnapshotCorrupt):
                load(path)


def test_a_snapshot_of_another_run_name_or_format_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, sample(8, fingerprint="fedcba9876543210"))
    with pytest.raises(SnapshotCorrupt, match="of run fedcba9876543210, not 0123456789abcdef"):
        latest(tmp_path)
    moved = path.rename(snapshot_path(tmp_path, 2, 9))
    with pytest.raises(SnapshotCorrupt, match="holds fragment 2, version 8"):
        load(moved)
    for metadata, named in (({"format_version": "2"}, "2"), ({"format": "pt"}, "None"), (None, "None")):
        save_file({"anchor": torch.zeros(1)}, path, metadata=metadata)
        with pytest.raises(SnapshotCorrupt, match=f"format version {named} is unknown"):
            load(path)


def test_the_golden_snapshot_is_still_understood(tmp_path: Path) -> None:
    path = tmp_path / "f2-v8.safetensors"
    path.write_bytes(bytes.fromhex((GOLDEN / "snapshot-v1.hex").read_text()))
    assert same(load(path), sample(8))


# --- The exported model


def test_an_exported_model_is_read_by_other_tools_and_has_the_permissions_of_any_file(tmp_path: Path) -> None:
    tensors = {"embed.weight": FLAT[:6].view(2, 3), "norm.weight": FLAT[8:10].bfloat16()}
    path = tmp_path / "out" / "model.safetensors"
    export(path, tensors, {"run": "demo"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "run": "demo"}
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode
    assert [found.name for found in path.parent.iterdir()] == ["model.safetensors"]


def test_a_refused_export_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    export(path, {"w": torch.zeros(1)})
    monkeypatch.setattr(os, "replace", refuse())
    with pytest.raises(StorageFailed):
        export(path, {"w": torch.ones(1)})
    assert torch.equal(load_file(path)["w"], torch.zeros(1))
    assert [found.name for found in tmp_path.iterdir()] == ["model.safetensors"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        data = save(Path(folder), sample(8)).read_bytes()
    hexes = "".join(data[at : at + 32].hex() + "\n" for at in range(0, len(data), 32))
    (GOLDEN / "snapshot-v1.hex").write_text(hexes)
