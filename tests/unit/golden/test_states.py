"""State directories of a coordinator that was killed after each kind of record: they are read as they were written.

`states.tar.xz` holds three runs of two nodes (a streaming one, one by co2 whose deltas are in part dropped, one whose
coordinator adopted its nodes' anchors). Each run's directory was copied after the first record of each kind, at the
end, and after the finished run was rewound. `states.json` is what each copy held.

Later versions must read this archive, so it is not written again: a new format gets a second archive. Where a new field
of the ledger changes what a start says of the same bytes, write `states.json` alone:
PYTHONPATH=tests/cases python tests/unit/golden/test_states.py
How the archive was made, by records of simulated runs that a real store wrote:
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
from farloop.coordinator.storage.state_reader import read_journal
from farloop.coordinator.storage.store import Store
from farloop.coordinator.storage.verify import verify
from farloop.quant.digest import digest

ARCHIVE = Path(__file__).with_name("states.tar.xz")
EXPECTED = Path(__file__).with_name("states.json")


def released() -> dict[str, dict[str, Any]]:
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


def records_of(directory: Path) -> list[rec.Record]:
    return [entry.record for scan in read_journal(directory) for entry in scan.entries]


def kinds_of(directory: Path) -> set[str]:
    return {type(record).__name__ for record in records_of(directory)}


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


@pytest.mark.parametrize("name", released())
def test_a_released_state_is_read_as_it_was_written(name: str, states: Path, tmp_path: Path) -> None:
    assert held(Path(shutil.copytree(states / name, tmp_path / "state"))) == released()[name]


@pytest.mark.parametrize("name", [name for name in released() if "/9" in name])
def test_a_state_of_an_earlier_start_is_still_read_after_this_start_wrote_to_it(
    name: str, states: Path, tmp_path: Path
) -> None:
    """The next start finds the same weights, in a segment that this version began."""
    directory = Path(shutil.copytree(states / name, tmp_path / "state"))
    first, second = held(directory)["start"], held(directory)["start"]
    assert (second.pop("epoch"), second.pop("ledger")) != (first.pop("epoch"), first.pop("ledger"))
    assert second == first
    assert verify(directory).faults == []


def test_every_kind_of_record_is_the_newest_of_some_copy(states: Path) -> None:
    assert {str(path.relative_to(states)) for path in states.glob("*/*")} == released().keys()
    assert {kind for name in released() for kind in kinds_of(states / name)} == {kind.__name__ for kind in rec.KINDS}
    assert not any(copy["read"]["faults"] or copy["start"]["alarms"] for copy in released().values())


# --- how the archive was made


class Recorder:
    """A real state directory that is given the records of a simulated run, and its copies."""

    def __init__(self, scratch: Path, name: str, started: rec.RunStarted, anchors: Any) -> None:
        self.directory, self._copies = scratch / "live" / name, scratch / "copies" / name
        self._kinds: set[str] = set()
        self.store = Store.create(self.directory, started.spec, anchors)
        self.copy_new_kinds()

    def write(self, record: rec.Record, attachment: bytes) -> None:
        """As the daemon does."""
        match record:
            case rec.EpochClaimed(epoch=epoch) | rec.Rewound(epoch=epoch):
                self.start_again(rewind=isinstance(record, rec.Rewound))
                assert self.store.ledger.epoch == epoch
            case rec.WindowCommitted():
                self._commit(record, attachment)
            case rec.Adopted():
                self.store.adopt(record)
            case _:
                self.store.append(record, attachment)
                self.store.sync()
        self.copy_new_kinds()

    def start_again(self, *, rewind: bool) -> None:
        self.store.close()
        again = Store.recover(self.directory, rewind=rewind)
        assert again is not None and again.alarms == {}
        self.store = again

    def _commit(self, record: rec.WindowCommitted, update: bytes) -> None:
        from farloop.coordinator import commits
        from farloop.coordinator.aggregator import Result

        ledger, before = self.store.ledger, self.store.buffers[record.fragment]
        inputs = [(self.store.read_input(addend.blob), addend.weight) for addend in record.blobs]
        codecs = commits.codecs_of(ledger, record)
        buffers, same = commits.repeat(ledger, before, record, update, inputs, codecs)
        assert same
        result = mock.create_autospec(Result, instance=True, buffers=buffers, update=update)
        with mock.patch.object(commits, "completed", lambda draft, _: draft):
            self.store.commit(record, result, self.store.reserve(record.fragment, codecs.down))

    def copy_new_kinds(self) -> None:
        """Copy the directory if it has a kind of record that no copy has."""
        if new := kinds_of(self.directory) - self._kinds:
            self.copy(f"{len(self._kinds):02d}-{'-'.join(sorted(new))}")
            self._kinds |= new

    def copy(self, title: str) -> None:
        from farloop.coordinator.storage.journal import Journal

        copy = shutil.copytree(self.directory, self._copies / title)
        Journal.open(copy)[0].close()  # gives back the room that is set aside behind the last record
        (copy / "lock").unlink()


def record_runs(scratch: Path) -> Path:
    """Copies of all runs: their folder."""
    from faulty_world import World
    from random_scenarios import random_scenario, restored_scenario

    runs = {
        "streaming": random_scenario(125, faults=5),
        "co2": random_scenario(65, faults=5),
        "adopted": restored_scenario(109, faults=1),
    }
    for name, scenario in runs.items():
        world = World(scenario)
        world.run()
        (started, _), *entries = world.disk.entries
        assert isinstance(started, rec.RunStarted)
        recorder = Recorder(scratch, name, started, list(world.disk.anchors))
        for written, attachment in entries:
            recorder.write(written, attachment)
        recorder.copy("98-end")
        recorder.write(rec.EpochSeen(epoch=recorder.store.ledger.epoch + 3), b"")
        recorder.start_again(rewind=True)
        recorder.copy("99-rewound")
        recorder.store.close()
    return scratch / "copies"


def pack(folder: Path, archive: Path) -> None:
    """The same bytes for the same files."""
    with tarfile.open(archive, "w:xz", preset=9) as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            member, data = tarfile.TarInfo(str(path.relative_to(folder))), path.read_bytes()
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def main(scratch: Path, *, archive: bool) -> None:
    if archive:
        if ARCHIVE.exists():
            raise SystemExit(f"{ARCHIVE} exists, and later versions must read it; a new format gets another archive")
        with mock.patch("farloop.coordinator.storage.store.SNAPSHOT_EVERY", 2):
            pack(record_runs(scratch), ARCHIVE)
    states = unpacked(scratch / "states")
    copies = {str(path.relative_to(states)): held(path) for path in sorted(states.glob("*/*"))}
    lines = [f"{json.dumps(name)}: {json.dumps(copy)}" for name, copy in copies.items()]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder_of_runs:
        main(Path(folder_of_runs), archive="--archive" in sys.argv)
