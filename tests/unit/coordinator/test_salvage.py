"""Damage of a state folder: what a start passes over, what `verify` says, and what `salvage` makes of the rest."""

import dataclasses
import random
from pathlib import Path

import pytest
import stored_runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from power_cuts import extremes, image_of

from farloop.algo.digest import digest
from farloop.algo.spec import RunSpec
from farloop.coordinator.errors import JournalCorrupt, StateLocked, StateMismatch, StorageError
from farloop.coordinator.storage.recovery import refusal
from farloop.coordinator.storage.salvage import carry_out, finish, is_unfinished, salvage
from farloop.coordinator.storage.segment import SEGMENT_HEADER_BYTES, read_damaged, segment_numbers, segment_path
from farloop.coordinator.storage.store import Store
from farloop.coordinator.storage.verify import verify
from farloop.sim.virtual_files import AllOrNothing, Drawn, VirtualFiles

PLACE = Path("/state")
SEGMENT_BYTES = 12 << 10
A, B = stored_runs.NODES


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farloop.coordinator.storage.store.SNAPSHOT_EVERY", 4)
    monkeypatch.setattr("farloop.coordinator.storage.journal.RECORD_ROOM", 4096)
    monkeypatch.setattr("farloop.coordinator.storage.recovery.HISTORY_VERSIONS", 2)
    monkeypatch.setattr("farloop.coordinator.decide.ledger.HISTORY_VERSIONS", 2)
    monkeypatch.setattr("farloop.coordinator.storage.state_reader.LOOK_AGAIN_S", 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A run's disk, and what every version was."""

    files: VirtualFiles
    history: dict[tuple[int, int], int]
    """Digest of the anchor by fragment and version."""
    versions: list[int]

    def copy(self) -> VirtualFiles:
        return self.files.survivor(AllOrNothing(writes=True, names=True))


@pytest.fixture
def stored(spec: RunSpec) -> Stored:
    """Eleven rounds, a restart, and a delta without an outcome."""
    files = VirtualFiles()
    store = stored_runs.begun(PLACE, spec, segment_bytes=SEGMENT_BYTES, files=files)
    history: dict[tuple[int, int], int] = {}

    def rounds(count: int) -> None:
        for _ in range(count):
            for fragment in (0, 1):
                stored_runs.commit(store, fragment)
                history[fragment, store.buffers[fragment].version] = digest(store.buffers[fragment].anchor)

    history |= {(fragment, 0): digest(buffers.anchor) for fragment, buffers in enumerate(store.buffers)}
    rounds(9)
    store.close()
    again = Store.recover(PLACE, segment_bytes=SEGMENT_BYTES, files=files)
    assert again is not None
    store = again
    rounds(2)
    stored_runs.spool(store, 0, A)
    store.close()
    return Stored(files=files, history=history, versions=[11, 11])


def flip(files: VirtualFiles, path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(files.read_bytes(path))
    data[offset] ^= 1 << bit
    files.write_bytes(path, bytes(data))


def cut(files: VirtualFiles, path: Path, length: int) -> None:
    files.write_bytes(path, files.read_bytes(path)[:length])


def journal_of(files: VirtualFiles) -> list[Path]:
    return [segment_path(PLACE, number) for number in sorted(segment_numbers(PLACE, files))]


def started(files: VirtualFiles) -> Store | StorageError:
    """What a start comes to."""
    try:
        store = Store.recover(PLACE, segment_bytes=SEGMENT_BYTES, files=files)
    except StorageError as error:
        return error
    assert store is not None
    return store


def goes_on(store: Store | StorageError, stored: Stored) -> list[int]:
    """Its versions, which are those of the run; it commits one more of each fragment."""
    assert isinstance(store, Store), store
    for fragment, buffers in enumerate(store.buffers):
        assert digest(buffers.anchor) == stored.history[fragment, buffers.version]
    versions = list(store.ledger.versions)
    stored_runs.run_rounds(store, 1)
    store.close()
    return versions


def test_one_bit_anywhere_in_the_journal_never_ends_the_run(stored: Stored) -> None:
    """Of sixty bits: a start goes on where nothing needs the record; elsewhere salvage does, and says what is lost."""
    draw = random.Random(7)
    passed_over = salvaged = 0
    for _ in range(60):
        files = stored.copy()
        path = draw.choice(journal_of(files))
        flip(files, path, draw.randrange(len(files.read_bytes(path))), draw.randrange(8))
        before = {path: files.read_bytes(path) for path in journal_of(files)}
        store = started(files)
        if isinstance(store, Store):
            passed_over += 1
            assert goes_on(store, stored) == stored.versions
            continue
        assert before == {path: files.read_bytes(path) for path in journal_of(files)}, "a refusal changes nothing"
        found = salvage(PLACE, files)
        assert found.newest == tuple(stored.versions) and found.damage
        aside = carry_out(PLACE, found, files)
        assert {path.name: data for path, data in before.items()} == {
            name: files.read_bytes(aside / name) for name in files.names(aside) if name.endswith(".log")
        }, "nothing is deleted"
        assert verify(PLACE, files).faults == []
        assert goes_on(started(files), stored) == list(found.versions)
        salvaged += 1
    assert passed_over + salvaged == 60 and passed_over > 5 and salvaged > 5


def test_one_bit_never_ends_a_run_whose_journal_is_far_below_the_size_of_a_segment(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes and intervals of a real run. Damage before the older set of snapshots gives up no version."""
    monkeypatch.setattr("farloop.coordinator.storage.store.SNAPSHOT_EVERY", 8)
    monkeypatch.setattr("farloop.coordinator.storage.recovery.HISTORY_VERSIONS", 16)
    monkeypatch.setattr("farloop.coordinator.decide.ledger.HISTORY_VERSIONS", 16)
    files = VirtualFiles()
    store = stored_runs.begun(PLACE, spec, files=files)
    history = {(fragment, 0): digest(buffers.anchor) for fragment, buffers in enumerate(store.buffers)}
    for _ in range(23):
        for fragment in (0, 1):
            stored_runs.commit(store, fragment)
            history[fragment, store.buffers[fragment].version] = digest(store.buffers[fragment].anchor)
    store.close()
    run = Stored(files=files, history=history, versions=[23, 23])
    paths = journal_of(files)
    assert len(paths) == 3, "a new segment follows each set of snapshots"
    lengths = {path: len(files.read_bytes(path)) for path in paths}
    draw = random.Random(5)
    for index in range(60):
        at = sum(lengths.values()) * (2 * index + 1) // 120
        path = next(path for path in paths if at < (end := sum(lengths[p] for p in paths[: paths.index(path) + 1])))
        copy = run.copy()
        flip(copy, path, at - end + lengths[path], draw.randrange(8))
        store_or_refusal = started(copy)
        if isinstance(store_or_refusal, Store):
            assert goes_on(store_or_refusal, run) == run.versions
            continue
        found = salvage(PLACE, copy)
        if path == paths[0]:
            assert found.given_up == (), "every fragment has two snapshots behind the damage"
        carry_out(PLACE, found, copy)
        assert goes_on(started(copy), run) == list(found.versions)


def test_damage_that_snapshots_make_needless_is_passed_over_with_an_alarm(stored: Stored) -> None:
    files = stored.copy()
    first = journal_of(files)[0]
    flip(files, first, 60)
    store = started(files)
    assert isinstance(store, Store)
    assert list(store.alarms) == ["journal"] and first.name in store.alarms["journal"]
    assert goes_on(store, stored) == stored.versions
    report = verify(PLACE, stored.copy())
    assert (report.faults, report.refused) == ([], "")


def test_verify_tells_damage_that_a_start_passes_over_from_damage_that_it_refuses(stored: Stored) -> None:
    files = stored.copy()
    flip(files, journal_of(files)[0], 60)
    report = verify(PLACE, files)
    assert report.faults and report.refused == ""
    flip(files, journal_of(files)[-1], 60)
    report = verify(PLACE, files)
    assert report.faults and "journal-" in report.refused


def test_verify_looks_at_the_disk_and_not_at_the_cache(stored: Stored) -> None:
    """Rot on the disk of what this machine wrote itself, and still has in memory."""
    files = stored.copy()
    content = files._content(journal_of(files)[-1])
    content.disk[60] ^= 1
    assert verify(PLACE, files).faults


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_verify_calls_a_folder_good_only_if_a_start_accepts_it_and_knows_which_it_refuses(
    stored: Stored, data: st.DataObject
) -> None:
    """One code path: after any flip or cut of any file."""
    files = stored.copy()
    places = [*journal_of(files), PLACE / "epoch"]
    places += [PLACE / "snapshots" / name for name in sorted(files.names(PLACE / "snapshots"))]
    path = data.draw(st.sampled_from(places))
    size = len(files.read_bytes(path))
    if data.draw(st.booleans()):
        cut(files, path, data.draw(st.integers(0, size - 1)))
    else:
        flip(files, path, data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7)))
    report = verify(PLACE, files)
    store = started(files)
    accepted = isinstance(store, Store)
    assert accepted == (report.refused == ""), (report, store)
    if not report.faults:
        assert accepted
    if isinstance(store, Store):
        store.close()


def test_salvage_goes_back_to_where_everything_is_whole(stored: Stored) -> None:
    """The newest snapshots are newer than what is left of the journal: a start refuses, and those before them do."""
    files = stored.copy()
    while refusal(PLACE, files) is None:
        files.unlink(journal_of(files)[-1])
    assert isinstance(started(files), StateMismatch)
    found = salvage(PLACE, files)
    assert found.newest == (8, 8) and found.given_up
    assert 4 <= min(found.versions) < 8 and "before-salvage-1" not in files.names(PLACE)
    carry_out(PLACE, found, files)
    assert goes_on(started(files), stored) == list(found.versions)


def test_a_salvaged_run_has_an_epoch_above_all_that_were(stored: Stored) -> None:
    files = stored.copy()
    flip(files, journal_of(files)[-1], 60)
    files.write_bytes(PLACE / "epoch", b"rotten")
    found = salvage(PLACE, files)
    carry_out(PLACE, found, files)
    store = started(files)
    assert isinstance(store, Store) and store.ledger.epoch == 3
    store.close()


def repaired(files: VirtualFiles) -> Path:
    """What `farloop journal salvage --write` does."""
    return finish(PLACE, files) if is_unfinished(PLACE, files) else carry_out(PLACE, salvage(PLACE, files), files)


def test_a_salvage_that_is_cut_short_at_any_call_is_finished_by_the_next(stored: Stored) -> None:
    """By a kill, or by a power cut that leaves any part of what was not synced; no start goes on in between."""
    damaged = stored.copy()
    flip(damaged, journal_of(damaged)[-1], 60)
    damaged = damaged.survivor(AllOrNothing(writes=True, names=True))
    old = {path.name: damaged.read_bytes(path) for path in journal_of(damaged)}
    versions = list(salvage(PLACE, damaged).versions)
    draw = random.Random(3)
    seen: set[int] = set()
    half = 0

    def check(left: VirtualFiles) -> None:
        nonlocal half
        half += is_unfinished(PLACE, left)
        before = image_of(left)
        store = started(left.survivor(AllOrNothing(writes=True, names=True)))
        if isinstance(store, Store):
            assert goes_on(store, stored) == versions, "it was finished"
            return
        assert image_of(left) == before
        assert refusal(PLACE, left) is not None
        aside = repaired(left)
        assert old == {name: left.read_bytes(aside / name) for name in left.names(aside) if name.endswith(".log")}
        assert (verify(PLACE, left).faults, is_unfinished(PLACE, left)) == ([], False)
        assert goes_on(started(left), stored) == versions

    def cut_here(what: str = "", path: Path = PLACE) -> bool:
        for fate in [*extremes(), Drawn(draw.randrange)]:
            left = files.survivor(fate)
            if (image := image_of(left)) not in seen:
                seen.add(image)
                check(left)
        return True

    files = damaged
    files.on_call = cut_here
    carry_out(PLACE, salvage(PLACE, files), files)
    cut_here()
    assert len(seen) > 30 and half > 10


def test_nothing_but_salvage_goes_on_in_a_folder_that_is_half_salvaged(stored: Stored) -> None:
    files = stored.copy()
    flip(files, journal_of(files)[-1], 60)

    class Killed(Exception):
        pass

    def on_call(what: str, path: Path) -> bool:
        if (what, path) == ("mkdir", PLACE / "before-salvage-1" / "snapshots"):
            raise Killed
        return True

    found = salvage(PLACE, files)
    files.on_call = on_call
    with pytest.raises(Killed):
        carry_out(PLACE, found, files)
    files = files.killed()
    assert not journal_of(files), "an empty folder for who does not look"
    for go_on in (started, lambda files: carry_out(PLACE, found, files), lambda files: verify(PLACE, files)):
        with pytest.raises(StateMismatch, match="salvage /state --write"):
            result = go_on(files)
            if isinstance(result, StorageError):
                raise result
    assert finish(PLACE, files) == PLACE / "before-salvage-1"
    assert goes_on(started(files), stored) == list(found.versions)


def test_salvage_says_where_nothing_can_be_had(stored: Stored) -> None:
    files = stored.copy()
    for name in files.names(PLACE / "snapshots"):
        cut(files, PLACE / "snapshots" / name, 100)
    with pytest.raises(
        StateMismatch, match=r"no consistent state.*--restore URL.*copy of this folder.*--adopt-from-nodes"
    ):
        salvage(PLACE, files)


def test_salvage_says_what_is_left_where_the_only_record_that_names_the_run_is_damaged(spec: RunSpec) -> None:
    """A journal of one segment whose first record is damaged: every other command points to salvage."""
    files = VirtualFiles()
    store = stored_runs.begun(PLACE, spec, files=files)
    stored_runs.run_rounds(store, 1)
    store.close()
    path = segment_path(PLACE, 0)
    data = bytearray(files.read_bytes(path))
    data[SEGMENT_HEADER_BYTES + 40] ^= 1
    files.write_bytes(path, bytes(data))
    with pytest.raises(StateMismatch, match=r"000000\.log: at byte .*--restore URL.*--adopt-from-nodes") as raised:
        salvage(PLACE, files)
    assert isinstance(raised.value.__cause__, JournalCorrupt)


def test_salvage_does_not_touch_a_folder_in_use(stored: Stored) -> None:
    files = stored.copy()
    store = started(files)
    assert isinstance(store, Store)
    found = salvage(PLACE, files)
    with pytest.raises(StateLocked):
        carry_out(PLACE, found, files)
    store.close()


def test_a_damaged_journal_is_read_up_to_and_behind_the_damage(stored: Stored) -> None:
    files = stored.copy()
    whole = read_damaged(PLACE, files)
    flip(files, journal_of(files)[1], 100)
    found = read_damaged(PLACE, files)
    gaps = [item for item in found if item not in whole]
    assert len(gaps) == 1 and isinstance(gaps[0].fault, JournalCorrupt)  # type: ignore[union-attr]
    assert len(found) == len(whole), "one record is missing, and a gap is in its place"
