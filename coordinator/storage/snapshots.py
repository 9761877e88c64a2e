"""Snapshots: the durable state of a fragment, and the final model, as safetensors files.

Recovery begins with a snapshot and applies the later commits of the journal (protocol, Journal). A snapshot is saved
after its commit is durable, and the journal records it after the snapshot is durable. A checksum over its whole content
verifies it; the digests that its commit recorded are in it, for comparison with the journal.

The file is `snapshots/f<fragment>-v<version>.safetensors` in the state directory. Its metadata, all text:

    format_version   "1"
    fingerprint      of the run's identity
    fragment         decimal
    version          decimal
    digest.<name>    16 hex digits each
    checksum         16 hex digits: xxh3-64 over the canonical JSON of the other metadata, then, by tensor name, the
                     canonical JSON of [name, dtype, shape] and the tensor's bytes
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save as save_bytes
from torch import Tensor

from farloop.coordinator.aggregator import Buffers
from farloop.coordinator.errors import SnapshotCorrupt, StorageFailed
from farloop.coordinator.storage.files import DISK, SAFETENSORS, Files, no_room
from farloop.quant.digest import digest

_log = logging.getLogger(__name__)

FORMAT_VERSION = "1"

DTYPES = {kind: getattr(torch, name.removeprefix("torch.")) for name, kind in SAFETENSORS.items()}
"""What tensors may be of, by the format's names."""

KEEP = 2  # snapshots of a fragment that stay, so that one damaged file does not cost the run
_NAME = re.compile(r"f(0|[1-9][0-9]*)-v(0|[1-9][0-9]*)\.safetensors")
_DIGEST_PREFIX = "digest."
_HEADER_ROOM = 64 << 10  # room for names, shapes and metadata beyond the tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything the coordinator holds of one fragment at one version."""

    fingerprint: str
    fragment: int
    version: int
    tensors: Mapping[str, Tensor]
    """anchor, target, and the outer optimizer's state, as momentum: flat fp32 [numel] on the CPU when loaded."""
    digests: Mapping[str, int]  # what the commit recorded (protocol, Tiles): of the anchor, the target, the momentum


def snapshot_path(directory: Path, fragment: int, version: int) -> Path:
    return directory / "snapshots" / _file_name(fragment, version)


def save(directory: Path, snapshot: Snapshot, files: Files = DISK) -> Path:
    """Write a snapshot durably, then delete those of its fragment that are older than the last `KEEP`.
    The tensors must not change meanwhile.
    Raises NoRoom: nothing was changed. Raises StorageFailed: the disk refused; the older snapshots are untouched."""
    path = snapshot_path(directory, snapshot.fragment, snapshot.version)
    files.make_directory(path.parent)
    files.remove_temporaries(path.parent, f"f{snapshot.fragment}-v")
    _write(path, *_content(snapshot), files)
    _delete_older(directory, snapshot.fragment, snapshot.version, files)
    return path


def packed(snapshot: Snapshot) -> bytes:
    """The file's bytes. The tensors must not change meanwhile."""
    return save_bytes(*_content(snapshot))


def of_buffers(fingerprint: str, fragment: int, buffers: Buffers) -> Snapshot:
    return Snapshot(
        fingerprint=fingerprint,
        fragment=fragment,
        version=buffers.version,
        tensors={"anchor": buffers.anchor, "target": buffers.target, **buffers.outer},
        digests={"anchor": digest(buffers.anchor), "target": digest(buffers.target)},
    )


def load(path: Path, files: Files = DISK, *, fingerprint: str | None = None) -> Snapshot:
    """Read and verify a snapshot.
    Raises SnapshotCorrupt: it cannot be read, or is not what was saved under this name, or is of another run."""
    try:
        tensors, metadata = _read(path, files)
        if metadata.get("format_version") != FORMAT_VERSION:
            found = metadata.get("format_version")
            raise SnapshotCorrupt(path, f"format version {found} is unknown here; this farloop knows {FORMAT_VERSION}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SnapshotCorrupt(path, f"cannot be read: {error}") from error
    checksum = metadata.pop("checksum", None)
    if checksum != _checksum(tensors, metadata):
        raise SnapshotCorrupt(path, "its content does not match its checksum")
    try:
        snapshot = Snapshot(
            fingerprint=metadata["fingerprint"],
            fragment=int(metadata["fragment"]),
            version=int(metadata["version"]),
            tensors=tensors,
            digests={
                key.removeprefix(_DIGEST_PREFIX): int(value, 16)
                for key, value in metadata.items()
                if key.startswith(_DIGEST_PREFIX)
            },
        )
    except (KeyError, ValueError) as error:
        raise SnapshotCorrupt(path, f"its metadata are not a snapshot's: {error}") from error
    if path.name != _file_name(snapshot.fragment, snapshot.version):
        raise SnapshotCorrupt(path, f"holds fragment {snapshot.fragment}, version {snapshot.version}")
    if fingerprint not in (None, snapshot.fingerprint):
        raise SnapshotCorrupt(path, f"is of run {snapshot.fingerprint}, not {fingerprint}")
    return snapshot


def load_latest(
    directory: Path, fragment: int, *, fingerprint: str, files: Files = DISK, at_most: int | None = None
) -> Snapshot | None:
    """The newest snapshot of a fragment that is whole and of this run; None if there never was one. With `at_most`, of
    this version or an older one. A damaged one is passed over with a warning: an older one and more of the journal give
    the same state.
    Raises SnapshotCorrupt: there are some, and none is good; the newest one's fault."""
    newest_fault: SnapshotCorrupt | None = None
    for version in reversed(versions_of(directory, fragment, files)):
        if at_most is not None and version > at_most:
            continue
        path = snapshot_path(directory, fragment, version)
        try:
            return load(path, files, fingerprint=fingerprint)
        except SnapshotCorrupt as fault:
            _log.warning("snapshot refused path=%s reason=%r", path, fault.detail)
            newest_fault = newest_fault or fault
    if newest_fault is not None:
        raise newest_fault
    return None


def export(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, files: Files = DISK
) -> None:
    """Write named tensors as one safetensors file that other tools read: the final model.
    Raises NoRoom: nothing was changed. Raises StorageFailed: the disk refused; a former file is untouched."""
    files.make_directory(path.parent)
    saveable = {name: _saveable(tensor) for name, tensor in tensors.items()}
    _write(path, saveable, {"format": "pt", **(metadata or {})}, files)


def _content(snapshot: Snapshot) -> tuple[dict[str, Tensor], dict[str, str]]:
    tensors = {name: _saveable(tensor) for name, tensor in snapshot.tensors.items()}
    metadata = {
        "format_version": FORMAT_VERSION,
        "fingerprint": snapshot.fingerprint,
        "fragment": str(snapshot.fragment),
        "version": str(snapshot.version),
        **{_DIGEST_PREFIX + name: f"{digest:016x}" for name, digest in snapshot.digests.items()},
    }
    return tensors, {**metadata, "checksum": _checksum(tensors, metadata)}


def _read(path: Path, files: Files) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file, each tensor read into its place: a start holds the state once.

    Not mapped: a bad block under a mapped file would be the death of the process, perhaps much later.
    Raises OSError, ValueError, KeyError, TypeError: it is none.
    """
    with closing(files.open(path)) as file:
        size = file.identity()[2]
        length = int.from_bytes(file.read(0, 8), "little")
        if length > size - 8:
            raise ValueError("its header is cut off")
        header = json.loads(file.read(8, length))
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        tensors = {}
        for name, entry in header.items():
            begin, end = (8 + length + int(at) for at in entry["data_offsets"])
            shape = [int(extent) for extent in entry["shape"]]
            dtype = DTYPES[entry["dtype"]]
            if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != end - begin or end > size:
                raise ValueError(f"tensor {name} has other bytes than its shape")
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            if end > begin:
                view = tensor.reshape(-1).view(torch.uint8).numpy().data
                if file.read_into(begin, view) != end - begin:
                    raise ValueError(f"tensor {name} is cut off")
            tensors[str(name)] = tensor
        return tensors, metadata


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], files: Files) -> None:
    nbytes = sum(tensor.nbytes for tensor in tensors.values()) + _HEADER_ROOM
    files.require_free(path.parent, nbytes)
    with files.replacing(path) as temporary:
        try:
            files.write_tensors(temporary, tensors, metadata)
        except OSError as error:
            # Others write to the disk, too: that there was room before is no promise. Nothing has taken `path`'s place.
            raise no_room(path, error.errno, nbytes) or StorageFailed(path, f"write: {error}") from error


def _saveable(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    hasher = xxhash.xxh3_64(_canonical(dict(metadata)))
    for name in sorted(tensors):
        tensor = tensors[name]
        hasher.update(_canonical([name, str(tensor.dtype), list(tensor.shape)]))
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return str(hasher.hexdigest())


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _file_name(fragment: int, version: int) -> str:
    return f"f{fragment}-v{version}.safetensors"


def versions_of(directory: Path, fragment: int, files: Files = DISK) -> list[int]:
    folder = directory / "snapshots"
    names = files.names(folder) if files.is_directory(folder) else []
    return sorted(int(found[2]) for name in names if (found := _NAME.fullmatch(name)) and int(found[1]) == fragment)


def version_in(name: str) -> int | None:
    """The version in a file's name; None for other files."""
    found = _NAME.fullmatch(name)
    return int(found[2]) if found else None


def _delete_older(directory: Path, fragment: int, version: int, files: Files) -> None:
    """Keep this snapshot and the `KEEP` − 1 before it. Newer ones belong to an abandoned history and stay.

    Not durable: a deleted file may reappear after a power cut.
    """
    older = [found for found in versions_of(directory, fragment, files) if found < version]
    for found in older[: max(0, len(older) - (KEEP - 1))]:
        with suppress(FileNotFoundError):
            files.unlink(snapshot_path(directory, fragment, found))
