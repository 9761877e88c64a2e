"""The referee's reader of a journal: it agrees with the coordinator's on good bytes, and no damage gets past it."""

import random
import shutil
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.segment import Segments, record_header, segment_header
from farloop.lab.chaos import journal_referee
from farloop.lab.chaos.journal_referee import Tail, Unreadable, read_journal

GOLDEN = Path(__file__).parents[2] / "coordinator" / "golden" / "state-v1"
SALT = 7
Body = tuple[int, bytes]


def commit(fragment: int, version: int, digest: int = 1) -> Body:
    return 9, msgpack.packb({"fragment": fragment, "version": version, "anchor_digest": digest})


def saved(*commits: tuple[int, int, int]) -> Body:
    names = ("fragment", "version", "anchor_digest")
    return 13, msgpack.packb({"commits": [dict(zip(names, one, strict=True)) for one in commits]})


def segment(folder: Path, number: int, first: int, *bodies: Body, durable: int | None = None, room: int = 0) -> Path:
    """A segment of these records, each with an attachment; `durable` is what the last one says of those before it."""
    data = segment_header(number, first, SALT)
    for sequence, (kind, body) in enumerate(bodies, start=first):
        known = durable if durable is not None and sequence == first + len(bodies) - 1 else 0
        head = record_header(kind, body, b"update", sequence=sequence, durable=known, salt=SALT)
        data += head + body + b"update"
    path = folder / f"journal-{number:06d}.log"
    path.write_bytes(data + bytes(room))
    return path


def test_it_finds_what_the_coordinators_reader_finds() -> None:
    expected: dict[tuple[int, int], str] = {}
    for entry in Segments(GOLDEN).entries:
        match entry.record:
            case rec.RunStarted(spec=spec):
                expected |= {(f, 0): f"{digest:016x}" for f, digest in enumerate(spec.identity.anchor_digests)}
            case rec.WindowCommitted(fragment=fragment, version=version, anchor_digest=digest):
                expected[fragment, version] = f"{digest:016x}"
            case _:
                pass
    found = read_journal(GOLDEN)
    assert (found.digests, found.newest, found.twice, found.unequal) == (expected, (2, 3), (), ())


def test_it_shares_no_code_with_the_coordinator() -> None:
    source = Path(journal_referee.__file__).read_text()
    assert "from farloop" not in source and "import farloop" not in source
    kinds = {"_RUN_STARTED": rec.RunStarted, "_WINDOW_COMMITTED": rec.WindowCommitted,
             "_LEDGER_SAVED": rec.LedgerSaved, "_ADOPTED": rec.Adopted}  # fmt: skip
    assert {name: vars(journal_referee)[name] for name in kinds} == {n: rec.KINDS[kind] for n, kind in kinds.items()}


def test_later_segments_go_on_and_a_second_commit_or_another_digest_is_told(tmp_path: Path) -> None:
    segment(tmp_path, 3, 40, saved((0, 5, 1), (1, 4, 2)), commit(0, 6, 3))
    segment(tmp_path, 4, 42, saved((0, 6, 3), (1, 4, 2)), commit(1, 5, 4), room=100)
    found = read_journal(tmp_path)
    assert (found.newest, found.twice, found.unequal) == ((6, 5), (), ())
    (tmp_path / "twice").mkdir()
    segment(tmp_path / "twice", 0, 0, commit(0, 1), commit(0, 1), commit(0, 2), commit(0, 2, 9))
    found = read_journal(tmp_path / "twice")
    assert (found.twice, found.unequal) == (((0, 1), (0, 2)), ((0, 2),))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_segment_is_seen(tmp_path: Path, missing: int) -> None:
    paths = [segment(tmp_path, number, number, commit(0, number + 1)) for number in range(3)]
    paths[missing].unlink()
    with pytest.raises(Unreadable):
        read_journal(tmp_path)


def test_a_damaged_record_that_was_durable_is_seen_and_a_torn_tail_is_not(tmp_path: Path) -> None:
    for durable in (0, 3):
        path = segment(tmp_path, 0, 0, *(commit(0, version) for version in (1, 2, 3, 4)), durable=durable, room=64)
        data = bytearray(path.read_bytes())
        data[data.index(commit(0, 2)[1])] ^= 1
        path.write_bytes(data)
        if not durable:
            assert read_journal(tmp_path).newest == (1,)
            continue
        with pytest.raises(Unreadable, match="was durable"):
            read_journal(tmp_path)


@given(st.integers(0, 10_000))
def test_no_flipped_bit_makes_another_history(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder, dice = tmp_path_factory.mktemp("state"), random.Random(seed)
    data = bytearray((GOLDEN / "journal-000000.log").read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    (folder / "journal-000000.log").write_bytes(data)
    try:
        found = read_journal(folder)
    except Unreadable:
        return
    assert found.digests.items() <= read_journal(GOLDEN).digests.items()


def test_a_tail_gives_each_record_once_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    path = segment(tmp_path, 0, 0, *(commit(0, version) for version in (1, 2, 3)))
    whole, tail = path.read_bytes(), Tail(tmp_path)
    found = []
    for end in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:end])
        found += tail.read()
    path.write_bytes(whole + bytes(50))
    found += tail.read()
    segment(tmp_path, 1, 3, saved((0, 3, 1)), commit(0, 4))
    found += tail.read()
    path.unlink()
    assert [version for _, version, _ in found + tail.read()] == [1, 2, 3, 3, 4]


def test_an_empty_folder_holds_no_run(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "epoch", tmp_path)
    assert read_journal(tmp_path).newest == ()
