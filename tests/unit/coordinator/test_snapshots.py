"""Snapshots: whole or not there, verified, the last two kept (protocol P, Z).

`python tests/unit/coordinator/test_snapshots.py` writes the golden snapshot anew: only with a new format version.
"""

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from farloop.coordinator.errors import DiskFull, SnapshotCorrupt, StorageFailed
from farloop.coordinator.storage import files
from farloop.coordinator.storage.snapshots import Snapshot, export, load, load_latest, save, snapshot_path

GOLDEN = Path(__file__).parent / "golden" / "snapshot-v1.hex"
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
    return {path.name for path in (directory / "snapshots").iterdir()}


def latest(directory: Path, fragment: int = 2) -> Snapshot | None:
    return load_latest(directory, fragment, fingerprint=RUN)


def test_a_snapshot_comes_back_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path, sample(8))
    assert path == tmp_path / "snapshots" / "f2-v8.safetensors"
    assert same(load(path), sample(8))
    assert same(latest(tmp_path), sample(8))


@pytest.mark.parametrize(
    "tensors",
    [
        {"anchor": torch.zeros(3)},
        {"anchor": torch.zeros(0), "step": torch.tensor(7), "m": torch.ones(2, 2), "v": torch.ones(3).bfloat16()},
        {},
    ],
    ids=["no momentum", "other state", "nothing"],
)
def test_any_optimizer_state_can_be_saved(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    snapshot = Snapshot(fingerprint=RUN, fragment=0, version=1, tensors=tensors, digests={})
    assert same(load(save(tmp_path, snapshot)), snapshot)


def test_views_of_one_buffer_and_strided_tensors_are_saved_by_value(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {"left": flat[:6], "right": flat[6:], "columns": torch.arange(6.0).view(2, 3).t()}
    snapshot = Snapshot(fingerprint=RUN, fragment=0, version=1, tensors=tensors, digests={})
    assert same(load(save(tmp_path, snapshot)), snapshot)


def test_what_was_loaded_does_not_depend_on_the_file(tmp_path: Path) -> None:
    path = save(tmp_path, sample(8))
    found = load(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert same(found, sample(8))


def test_a_fragment_without_a_snapshot_has_none(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    save(tmp_path, sample(8, fragment=22))
    assert latest(tmp_path) is None


def test_the_last_two_of_each_fragment_stay(tmp_path: Path) -> None:
    save(tmp_path, sample(1, fragment=22))
    for version in (0, 8, 96, 104):
        save(tmp_path, sample(version))
    assert present(tmp_path) == {"f22-v1.safetensors", "f2-v96.safetensors", "f2-v104.safetensors"}
    assert same(latest(tmp_path), sample(104))


def test_saving_an_older_version_deletes_neither_it_nor_a_newer_one(tmp_path: Path) -> None:
    for version in (16, 24, 8):
        save(tmp_path, sample(version))
    assert present(tmp_path) == {"f2-v8.safetensors", "f2-v16.safetensors", "f2-v24.safetensors"}


def test_the_same_version_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, sample(8, fingerprint="another"))
    save(tmp_path, sample(8))
    assert same(latest(tmp_path), sample(8))


def test_a_crash_before_the_rename_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    save(tmp_path, sample(8))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # the dead do not clean up
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, sample(16))
    assert present(tmp_path) == {"f2-v8.safetensors", "f2-v16.safetensors.tmp"}
    assert same(latest(tmp_path), sample(8))
    save(tmp_path, sample(24))
    assert present(tmp_path) == {"f2-v8.safetensors", "f2-v24.safetensors"}


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, nbytes: int) -> None:
        raise DiskFull(path, nbytes, 0)

    save(tmp_path, sample(8))
    monkeypatch.setattr(files, "require_free", full)
    with pytest.raises(DiskFull) as caught:
        save(tmp_path, sample(16))
    assert caught.value.needed_bytes >= 3 * 6 * 4
    assert present(tmp_path) == {"f2-v8.safetensors"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_up_while_a_snapshot_is_written_is_no_failure_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(tensors: object, path: Path, metadata: object) -> None:
        raise error

    save(tmp_path, sample(8))
    monkeypatch.setattr(files, "save_file", refuse)
    with pytest.raises(DiskFull):
        save(tmp_path, sample(16))
    assert present(tmp_path) == {"f2-v8.safetensors"}


def test_a_refused_write_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tensors: object, path: Path, metadata: object) -> None:
        raise OSError(5, "Input/output error")

    save(tmp_path, sample(8))
    monkeypatch.setattr(files, "save_file", refuse)
    with pytest.raises(StorageFailed):
        save(tmp_path, sample(16))
    assert present(tmp_path) == {"f2-v8.safetensors"}


def test_any_flip_or_cut_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, sample(8))
    whole = path.read_bytes()
    for at in range(len(whole)):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(SnapshotCorrupt):
                load(path)


@settings(max_examples=50)
@given(data=st.binary(max_size=300))
def test_garbage_is_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("garbage") / "f0-v0.safetensors"
    path.write_bytes(data)
    with pytest.raises(SnapshotCorrupt):
        load(path)


def test_a_damaged_one_is_passed_over_for_the_older(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, sample(8))
    damaged = save(tmp_path, sample(16))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert same(latest(tmp_path), sample(8))
    assert f"snapshot refused path={damaged}" in caplog.text


def test_it_is_an_error_if_all_are_damaged_and_names_the_newest(tmp_path: Path) -> None:
    paths = [save(tmp_path, sample(version)) for version in (8, 16)]
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(SnapshotCorrupt) as caught:
        latest(tmp_path)
    assert caught.value.path == paths[1]


def test_a_snapshot_of_another_run_is_refused(tmp_path: Path) -> None:
    save(tmp_path, sample(8, fingerprint="fedcba9876543210"))
    with pytest.raises(SnapshotCorrupt, match="of run fedcba9876543210, not 0123456789abcdef"):
        latest(tmp_path)


def test_a_snapshot_under_another_name_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, sample(8))
    moved = path.rename(snapshot_path(tmp_path, 2, 9))
    with pytest.raises(SnapshotCorrupt, match="holds fragment 2, version 8"):
        load(moved)


def test_another_format_version_and_a_foreign_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "f0-v0.safetensors"
    for metadata, named in (({"format_version": "2"}, "2"), ({"format": "pt"}, "None"), (None, "None")):
        save_file({"anchor": torch.zeros(1)}, path, metadata=metadata)
        with pytest.raises(SnapshotCorrupt, match=f"format version {named} is unknown"):
            load(path)


def test_the_golden_snapshot_is_still_understood(tmp_path: Path) -> None:
    path = tmp_path / "f2-v8.safetensors"
    path.write_bytes(bytes.fromhex(GOLDEN.read_text()))
    assert same(load(path), sample(8))


def test_an_exported_model_is_read_by_other_tools(tmp_path: Path) -> None:
    flat = torch.arange(20.0)
    tensors = {"embed.weight": flat[:6].view(2, 3), "norm.weight": flat[8:10].bfloat16()}
    path = tmp_path / "out" / "model.safetensors"
    export(path, tensors, {"run": "demo"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "run": "demo"}
    assert [found.name for found in path.parent.iterdir()] == ["model.safetensors"]


def test_an_exported_model_has_the_permissions_of_any_other_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    export(tmp_path / "model.safetensors", {"w": torch.zeros(1)})
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_refused_export_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(5, "Input/output error")

    path = tmp_path / "model.safetensors"
    export(path, {"w": torch.zeros(1)})
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StorageFailed):
        export(path, {"w": torch.ones(1)})
    assert torch.equal(load_file(path)["w"], torch.zeros(1))
    assert [found.name for found in tmp_path.iterdir()] == ["model.safetensors"]


def _regenerate(directory: Path) -> None:
    data = save(directory, sample(8)).read_bytes()
    GOLDEN.write_text("".join(data[at : at + 32].hex() + "\n" for at in range(0, len(data), 32)))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        _regenerate(Path(place))
