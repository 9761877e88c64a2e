"""Damage of a state folder: what a start passes over, what `verify` says, and what `salvage` makes of the rest."""

import dataclasses
import random
from pathlib import Path

import pytest
import stored_runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from power_cuts import extremes, image_of
from slow_cases import examples
from virtual_files import AllOrNothing, Drawn, VirtualFiles

from farloop.algo.spec import RunSpec
from farloop.coordinator.decide.records import KINDS, InputStored, Record, WindowCommitted, WindowTerms, decode
from farloop.coordinator.errors import JournalCorrupt, StateLocked, StateMismatch, StorageError
from farloop.coordinator.leadership import mark, marked
from farloop.coordinator.storage.journal import Journal
from farloop.coordinator.storage.recovery import refusal
from farloop.coordinator.storage.salvage import carry_out, finish, is_unfinished, salvage
from farloop.coordinator.storage.segment import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    Entry,
    Segments,
    segment_numbers,
    segment_path,
)
from farloop.coordinator.storage.snapshots import snapshot_path, versions_of
from farloop.coordinator.storage.store import Store
from farloop.coordinator.storage.verify import verify
from farloop.quant.digest import digest

PLACE = Path("/state")
SEGMENT_BYTES = 12 << 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    stored_runs.shorten(monkeypatch, snapshot_every=4, history=2)


@dataclasses.dataclass
class Stored:
    """A run's disk, and what every version was."""

    files: VirtualFiles = dataclasses.field(default_factory=VirtualFiles)
    history: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    """Digest of the anchor by fragment and version."""

    def commit(self, store: Store, rounds: int) -> None:
        self.history |= {(fragment, 0): digest(b.anchor) for fragment, b in enumerate(store.buffers) if not b.version}
        for fragment in [0, 1] * rounds:
            stored_runs.commit(store, fragment)
            self.history[fragment, store.buffers[fragment].version] = digest(store.buffers[fragment].anchor)

    def copy(self) -> VirtualFiles:
        return self.files.survivor(AllOrNothing(writes=True, names=True))


VERSIONS = [11, 11]


@pytest.fixture
def stored(spec: RunSpec) -> Stored:
    """Eleven rounds, a restart, and a delta without an outcome."""
    stored = Stored()
    store = stored_runs.begun(PLACE, spec, segment_bytes=SEGMENT_BYTES, files=stored.files)
    stored.commit(store, 9)
    store.close()
    store = stored_runs.recovered(PLACE, segment_bytes=SEGMENT_BYTES, files=stored.files)
    stored.commit(store, 2)
    stored_runs.spool(store, 0, stored_runs.NODES[0])
    store.close()
    return stored


def flip(files: VirtualFiles, path: Path, offset: int = 60, bit: int = 0) -> None:
    data = bytearray(files.read_bytes(path))
    data[offset] ^= 1 << bit
    files.write_bytes(path, bytes(data))


def cut(files: VirtualFiles, path: Path, length: int) -> None:
    files.write_bytes(path, files.read_bytes(path)[:length])


def journal_of(files: VirtualFiles) -> list[Path]:
    return [segment_path(PLACE, number) for number in sorted(segment_numbers(PLACE, files))]


def logs(files: VirtualFiles, place: Path) -> dict[str, bytes]:
    return {name: files.read_bytes(place / name) for name in files.names(place) if name.endswith(".log")}


def started(files: VirtualFiles) -> Store | StorageError:
    """What a start comes to."""
    try:
        return stored_runs.recovered(PLACE, segment_bytes=SEGMENT_BYTES, files=files)
    except StorageError as error:
        return error


def verify_the_rest(store: Store) -> None:
    """What the start did not look at, as its daemon does while the run goes on."""
    while store.unverified:
        store.verified(store.verify_older())


def goes_on(store: Store | StorageError, stored: Stored) -> list[int]:
    """Its versions, which are those of the run; it commits one more of each fragment."""
    assert isinstance(store, Store), store
    for fragment, buffers in enumerate(store.buffers):
        assert digest(buffers.anchor) == stored.history[fragment, buffers.version]
    versions = list(store.ledger.versions)
    stored_runs.run_rounds(store, 1)
    store.close()
    return versions


# --- What a start and verify say


def test_one_bit_anywhere_in_the_journal_never_ends_the_run(stored: Stored) -> None:
    """Of 15 bits: a start goes on where nothing needs the record; elsewhere salvage does, and says what is lost."""
    draw = random.Random(7)
    passed_over = 0
    for _ in range(15):
        files = stored.copy()
        path = draw.choice(journal_of(files))
        flip(files, path, draw.randrange(len(files.read_bytes(path))), draw.randrange(8))
        before = logs(files, PLACE)
        store = started(files)
        if isinstance(store, Store):
            passed_over += 1
            assert goes_on(store, stored) == VERSIONS
            continue
        assert before == logs(files, PLACE), "a refusal changes nothing"
        found = salvage(PLACE, files)
        assert found.newest == tuple(VERSIONS) and found.damage
        assert logs(files, carry_out(PLACE, found, files)) == before, "nothing is deleted"
        assert verify(PLACE, files).faults == []
        assert goes_on(started(files), stored) == list(found.versions)
    assert 1 < passed_over < 14


def test_one_bit_never_ends_a_run_whose_journal_is_far_below_the_size_of_a_segment(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes and intervals of a real run. Damage before the older set of snapshots gives up no version."""
    stored_runs.shorten(monkeypatch, snapshot_every=8, history=16)
    run = Stored()
    store = stored_runs.begun(PLACE, spec, files=run.files)
    run.commit(store, 23)
    store.close()
    paths = journal_of(run.files)
    assert len(paths) == 3, "a new segment follows each set of snapshots"
    places = [(path, offset) for path in paths for offset in range(len(run.files.read_bytes(path)))]
    draw = random.Random(5)
    for path, offset in places[len(places) // 20 :: len(places) // 10]:
        files = run.copy()
        flip(files, path, offset, draw.randrange(8))
        store_or_refusal = started(files)
        if isinstance(store_or_refusal, Store):
            assert goes_on(store_or_refusal, run) == [23, 23]
            continue
        found = salvage(PLACE, files)
        if path == paths[0]:
            assert found.given_up == (), "every fragment has two snapshots behind the damage"
        carry_out(PLACE, found, files)
        assert goes_on(started(files), run) == list(found.versions)


def test_a_start_reads_no_more_of_a_longer_journal(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that no segment was deleted from. The rest is verified later, and what is wrong with it is an alarm."""
    monkeypatch.setattr(Journal, "prune", lambda self, before: None)
    read, size, segment_bytes = list[int](), list[int](), 64 << 10
    for rounds in (13, 49):
        run = Stored()
        store = stored_runs.begun(PLACE, spec, segment_bytes=segment_bytes, files=run.files)
        run.commit(store, rounds)
        stored_runs.spool(store, 0, stored_runs.NODES[0])
        store.close()
        files = run.copy()
        size.append(sum(len(files.read_bytes(path)) for path in journal_of(files)))
        files.bytes_read.clear()
        store = stored_runs.recovered(PLACE, segment_bytes=segment_bytes, files=files)
        read.append(sum(files.bytes_read.values()))
        assert [segment_path(PLACE, number) for number in store.unverified] == journal_of(files)[:-2]
        verify_the_rest(store)
        assert set(journal_of(files)[:-1]) <= set(files.bytes_read) and store.alarms == {}
        assert goes_on(store, run) == [rounds, rounds]
    assert size[1] > 4 * size[0] and read[1] < 1.2 * read[0]


@pytest.mark.parametrize(
    ("kind", "goes_on_with_it"),
    [
        ("WindowCommitted", True),
        ("InputStored", False),
        ("InputStored, undecided", False),
        ("InputStored, undecided, its record", False),
        ("WindowCommitted, its record", False),
    ],
)
def test_of_older_segments_a_start_verifies_what_it_uses(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch, kind: str, goes_on_with_it: bool
) -> None:
    """What is attached: an update that only a node may ask for, the delta of a commit that is repeated, and one of the
    open window. And the record, where the damage leaves another that can be decoded."""
    stored_runs.shorten(monkeypatch, snapshot_every=40, history=16)
    run = Stored()
    store = stored_runs.begun(PLACE, spec, segment_bytes=SEGMENT_BYTES, files=run.files)
    if "undecided" in kind:
        stored_runs.spool(store, 1, stored_runs.NODES[0])
    for _ in range(20):
        stored_runs.commit(store, 0)
    store.close()
    first = Segments(PLACE, run.files).items_of(0)
    entries = [item for item in first if isinstance(item, Entry) and type(item.record).__name__ in kind]
    entry = entries[0 if "," in kind else -1]
    if "its record" in kind:
        begin = entry.offset + RECORD_HEADER_BYTES
        body = run.files.read_bytes(journal_of(run.files)[0])[begin : entry.attachment.offset]
        at = next(at for at in range(len(body)) if is_another(entry.record, body, at))
        flip(run.files, journal_of(run.files)[0], begin + at)
    else:
        flip(run.files, journal_of(run.files)[0], entry.end - 1)
    store = started(run.files)
    assert isinstance(store, Store) == goes_on_with_it
    if isinstance(store, Store):
        assert store.alarms == {}
        verify_the_rest(store)
        assert "journal-000000.log" in store.alarms["journal"]


def is_another(record: Record, body: bytes, at: int) -> bool:
    """Whether the lowest bit of this byte leaves a record of another delta, or of another codec."""
    try:
        found = decode(KINDS[type(record)], body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])
    except ValueError:
        return False
    match found, record:
        case InputStored(), InputStored():
            return found.blob != record.blob
        case WindowCommitted(next_window=WindowTerms() as there), WindowCommitted(next_window=WindowTerms() as here):
            return there.codec_down != here.codec_down
        case _:
            return False


def test_a_segment_that_was_deleted_before_it_was_verified_is_no_damage(spec: RunSpec) -> None:
    run = Stored()
    store = stored_runs.begun(PLACE, spec, segment_bytes=SEGMENT_BYTES, files=run.files)
    run.commit(store, 9)
    store.close()
    store = stored_runs.recovered(PLACE, segment_bytes=SEGMENT_BYTES, files=run.files)
    left, fault = len(store.unverified), store.verify_older()
    assert left > 0 and fault is None
    run.commit(store, 9)  # with snapshots, after which they are deleted
    assert not set(store.unverified) & segment_numbers(PLACE, run.files)
    verify_the_rest(store)
    assert store.alarms == {}


def test_a_damaged_newest_snapshot_makes_a_start_read_on(stored: Stored) -> None:
    files = stored.copy()
    store = started(files.survivor(AllOrNothing(writes=True, names=True)))
    assert isinstance(store, Store) and store.unverified
    for fragment in (0, 1):
        flip(files, snapshot_path(PLACE, fragment, versions_of(PLACE, fragment, files)[-1]), 600)
    store = started(files)
    assert isinstance(store, Store) and store.unverified == []
    assert goes_on(store, stored) == VERSIONS


def test_verify_looks_at_the_disk_and_not_at_the_cache(stored: Stored) -> None:
    """Rot on the disk of what this machine wrote itself, and still has in memory."""
    files = stored.copy()
    files._content(journal_of(files)[-1]).disk[60] ^= 1
    assert verify(PLACE, files).faults


@settings(max_examples=examples(10), suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    assert isinstance(store, Store) == (report.refused == ""), (report, store)
    assert isinstance(store, Store) or report.faults
    if isinstance(store, Store):
        store.close()


# --- Salvage


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


def test_a_salvaged_folder_does_not_lead_before_one_that_has_all(stored: Stored) -> None:
    """It did by its mark, and the standby that had all was given what was left here."""
    for damaged in (True, False):
        files = stored.copy()
        mark(PLACE, "5e1d", files)
        if damaged:
            flip(files, journal_of(files)[-1])
        carry_out(PLACE, found := salvage(PLACE, files), files)
        assert (bool(found.given_up), marked(PLACE, files)) == (damaged, ["salvaged" if damaged else "5e1d"])


def test_a_salvaged_run_has_an_epoch_above_all_that_were_and_one_in_use_is_not_touched(stored: Stored) -> None:
    files = stored.copy()
    flip(files, journal_of(files)[-1])
    files.write_bytes(PLACE / "epoch", b"rotten")
    carry_out(PLACE, salvage(PLACE, files), files)
    store = started(files)
    assert isinstance(store, Store) and store.ledger.epoch == 3
    with pytest.raises(StateLocked):
        salvage(PLACE, files)  # what it prunes between two reads would be said to be lost
    store.close()
    found, store = salvage(PLACE, files), started(files)
    with pytest.raises(StateLocked):
        carry_out(PLACE, found, files)


def test_a_salvage_that_is_cut_short_at_any_call_is_finished_by_the_next(stored: Stored) -> None:
    """By a kill, or by a power cut that leaves any part of what was not synced; no start goes on in between."""
    damaged = stored.copy()
    flip(damaged, journal_of(damaged)[-1])
    damaged = damaged.survivor(AllOrNothing(writes=True, names=True))
    old = logs(damaged, PLACE)
    versions = list(salvage(PLACE, damaged).versions)
    draw = random.Random(3)
    seen: dict[int, bool] = {}
    """Every disk that was left, and whether the salvage was unfinished on it."""

    def check(left: VirtualFiles) -> None:
        before = image_of(left)
        store = started(left.survivor(AllOrNothing(writes=True, names=True)))
        if isinstance(store, Store):
            assert goes_on(store, stored) == versions, "it was finished"
            return
        assert image_of(left) == before
        assert refusal(PLACE, left) is not None
        # What `farloop journal salvage --write` does:
        aside = finish(PLACE, left) if is_unfinished(PLACE, left) else carry_out(PLACE, salvage(PLACE, left), left)
        assert logs(left, aside) == old
        assert (verify(PLACE, left).faults, is_unfinished(PLACE, left)) == ([], False)
        assert goes_on(started(left), stored) == versions

    def cut_here(what: str = "", path: Path = PLACE) -> bool:
        for fate in draw.sample([*extremes(), Drawn(draw.randrange)], 2):
            left = damaged.survivor(fate)
            if (image := image_of(left)) not in seen:
                seen[image] = is_unfinished(PLACE, left)
                check(left)
        return True

    damaged.on_call = cut_here
    carry_out(PLACE, salvage(PLACE, damaged), damaged)
    cut_here()
    assert len(seen) > 15 and sum(seen.values()) > 5


def test_nothing_but_salvage_goes_on_in_a_folder_that_is_half_salvaged(stored: Stored) -> None:
    files = stored.copy()
    flip(files, journal_of(files)[-1])
    found = salvage(PLACE, files)

    class Killed(Exception):
        pass

    def on_call(what: str, path: Path) -> bool:
        if (what, path) == ("mkdir", PLACE / "before-salvage-1" / "snapshots"):
            raise Killed
        return True

    files.on_call = on_call
    with pytest.raises(Killed):
        carry_out(PLACE, found, files)
    files = files.killed()
    assert not journal_of(files), "an empty folder for who does not look"
    assert "salvage /state --write" in str(started(files))
    for go_on in (lambda: carry_out(PLACE, found, files), lambda: verify(PLACE, files)):
        with pytest.raises(StateMismatch, match="salvage /state --write"):
            go_on()
    assert finish(PLACE, files) == PLACE / "before-salvage-1"
    assert goes_on(started(files), stored) == list(found.versions)


def test_salvage_says_where_nothing_can_be_had(stored: Stored, spec: RunSpec) -> None:
    files = stored.copy()
    for name in files.names(PLACE / "snapshots"):
        cut(files, PLACE / "snapshots" / name, 100)
    words = r"no consistent state.*--restore URL.*copy of this folder.*--adopt-from-nodes"
    with pytest.raises(StateMismatch, match=words):
        salvage(PLACE, files)
    files = VirtualFiles()
    store = stored_runs.begun(PLACE, spec, files=files)
    stored_runs.run_rounds(store, 1)
    store.close()
    flip(files, segment_path(PLACE, 0), SEGMENT_HEADER_BYTES + 40)  # of the only record that names the run
    with pytest.raises(StateMismatch, match=r"000000\.log: at byte .*--restore URL.*--adopt-from-nodes") as raised:
        salvage(PLACE, files)
    assert isinstance(raised.value.__cause__, JournalCorrupt)
