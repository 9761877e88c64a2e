"""State directories of a coordinator that was killed after each kind of record: they are read as they were written.

`states.tar.xz` holds three simulated runs: a streaming one, one by co2, and one whose coordinator adopted its nodes'
anchors. Each run's directory was copied after the first record of each kind, at the end, and after the finished run was
rewound. `states.json` is what each copy held.

After an intended change of what a start makes of the same bytes, write `states.json` alone:
PYTHONPATH=tests/cases python tests/unit/golden/test_states.py
After an intended change of the bytes, write both:
PYTHONPATH=tests/cases python tests/unit/golden/test_states.py --archive
"""

import hashlib
import io
import json
import shutil
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.files import DISK, Files
from farloop.coordinator.storage.segment import Entry, Segments
from farloop.coordinator.storage.store import Store
from farloop.coordinator.storage.verify import verify
from farloop.quant.digest import digest

ARCHIVE = Path(__file__).with_name("states.tar.xz")
EXPECTED = Path(__file__).with_name("states.json")


def golden() -> dict[str, dict[str, Any]]:
    """What every copy held, by its folder in the archive."""
    found: dict[str, dict[str, Any]] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    return found


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive's files. Tests copy what they change."""
    return unpacked(tmp_path_factory.mktemp("states"))


def unpacked(folder: Path) -> Path:
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    return folder


def records_of(directory: Path, files: Files = DISK) -> list[rec.Record]:
    return [item.record for item in Segments(directory, files).items() if isinstance(item, Entry)]


def kinds_of(directory: Path, files: Files = DISK) -> set[str]:
    return {type(record).__name__ for record in records_of(directory, files)}


def encoded(record: rec.Record) -> bytes:
    kind, data = rec.encode(record)
    return bytes([kind]) + data


def read_only(directory: Path) -> dict[str, Any]:
    """What `farloop journal verify` finds, and a digest of the records as they would be encoded now."""
    report = verify(directory)
    return {
        "faults": [f"{fault.where}: {fault.what}" for fault in report.faults],
        "counts": [report.segments, report.records, report.deltas, report.updates, report.epochs, report.snapshots],
        "attached_bytes": report.attached_bytes,
        "epoch": report.epoch,
        "versions": report.versions,
        "records": hashlib.sha256(b"".join(map(encoded, records_of(directory)))).hexdigest()[:16],
    }


def recovered(store: Store) -> dict[str, Any]:
    """What a start holds that goes on from the directory."""
    return {
        "alarms": store.alarms,
        "epoch": store.ledger.epoch,
        "versions": store.ledger.versions,
        "ledger": hashlib.sha256(encoded(store.ledger.saved())).hexdigest()[:16],
        "buffers": [
            [buffers.version, *(f"{number:016x}" for number in (digest(buffers.anchor), digest(buffers.target)))]
            for buffers in store.buffers
        ],
        "outer": [f"{buffers.outer_digest() or 0:016x}" for buffers in store.buffers],
        "inputs": [hashlib.sha256(store.read_input(blob)).hexdigest()[:16] for blob in store.ledger.inputs],
    }


def held(directory: Path) -> dict[str, Any]:
    """Both, of a directory that may be changed."""
    seen = read_only(directory)
    store = Store.recover(directory)
    assert store is not None
    with closing(store):
        return {"read": seen, "start": recovered(store)}


@pytest.mark.parametrize("name", golden())
def test_a_golden_state_is_read_as_it_was_written(name: str, states: Path, tmp_path: Path) -> None:
    assert held(Path(shutil.copytree(states / name, tmp_path / "state"))) == golden()[name]


@pytest.mark.parametrize("name", [name for name in golden() if "/9" in name])
def test_an_earlier_starts_state_is_read_after_this_start_wrote_it(name: str, states: Path, tmp_path: Path) -> None:
    """The next start finds the same weights, in a segment that this version began."""
    directory = Path(shutil.copytree(states / name, tmp_path / "state"))
    first, second = held(directory)["start"], held(directory)["start"]
    assert (second.pop("epoch"), second.pop("ledger")) != (first.pop("epoch"), first.pop("ledger"))
    assert second == first
    assert verify(directory).faults == []


def test_every_kind_of_record_is_the_newest_of_some_copy(states: Path) -> None:
    assert {str(path.relative_to(states)) for path in states.glob("*/*")} == golden().keys()
    assert {kind for name in golden() for kind in kinds_of(states / name)} == {
        kind.__name__
        for kind in rec.KINDS
        if kind is not rec.KeysChanged  # simulated links have no keys
    }
    assert not any(copy["read"]["faults"] or copy["start"]["alarms"] for copy in golden().values())


# --- how the archive is made


def copies_of(run: str, scenario: Any) -> dict[str, Any]:
    """The disk of a simulated run after the first record of each kind, at its end and after a rewind, by its title."""
    from faulty_world import World
    from state_disk import FOLDER, StateDisk
    from virtual_files import AllOrNothing

    found, kinds, synced = dict[str, Any](), set[str](), StateDisk._after_sync

    def look(disk: StateDisk, path: Path) -> None:
        synced(disk, path)
        if path.suffix != ".log":
            return
        copy = disk.files.survivor(ALL)
        if new := kinds_of(FOLDER, copy) - kinds:
            found[f"{len(kinds):02d}-{'-'.join(sorted(new))}"] = copy
            kinds.update(new)

    ALL, world = AllOrNothing(writes=True, names=True), World(scenario)
    with mock.patch.object(StateDisk, "_after_sync", look):
        world.run()
    files = found["98-end"] = world.disk.files.survivor(ALL)
    files = found["99-rewound"] = files.survivor(ALL)
    for rewind in (False, True):
        store = Store.recover(FOLDER, rewind=rewind, files=files)
        assert store is not None and store.alarms == {}
        if not rewind:
            store.append(rec.EpochSeen(epoch=store.ledger.epoch + 3))
            store.sync()
        store.close()
    return {f"{run}/{title}": files for title, files in found.items()}


def pack(copies: dict[str, Any]) -> None:
    """The archive of these disks; the same bytes for the same files."""
    from state_disk import FOLDER

    with tarfile.open(ARCHIVE, "w:xz", preset=9) as tar:
        for name, files in copies.items():
            paths = [FOLDER / entry for entry in sorted(files.names(FOLDER)) if entry != "lock"]
            for path in paths:
                if files.is_directory(path):
                    paths += [path / entry for entry in sorted(files.names(path))]
                    continue
                data = files.read_bytes(path)
                member = tarfile.TarInfo(f"{name}/{path.relative_to(FOLDER)}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def main(scratch: Path, *, archive: bool) -> None:
    if archive:
        from random_scenarios import random_scenario, restored_scenario

        runs = {
            "streaming": random_scenario(125, faults=5),
            "co2": random_scenario(65, faults=5),
            "adopted": restored_scenario(66),
        }
        with mock.patch("farloop.coordinator.storage.store.SNAPSHOT_EVERY", 2):
            pack({name: files for run, scenario in runs.items() for name, files in copies_of(run, scenario).items()})
    states = unpacked(scratch / "states")
    copies = {str(path.relative_to(states)): held(path) for path in sorted(states.glob("*/*"))}
    lines = [f"{json.dumps(name)}: {json.dumps(copy)}" for name, copy in copies.items()]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder_of_runs:
        main(Path(folder_of_runs), archive="--archive" in sys.argv)
