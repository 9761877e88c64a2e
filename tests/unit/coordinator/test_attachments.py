"""Which bulk bytes of the journal are still wanted (protocol P, R)."""

from pathlib import Path

import pytest

from farloop.algo.spec import BlobId, BlobKind, NodeId, RunSpec
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import HISTORY_VERSIONS, Ledger
from farloop.coordinator.storage.journal import Journal
from farloop.coordinator.storage.recovery import Attachments
from farloop.coordinator.storage.segment import Attachment, Entry
from farloop.wire.messages import Offer

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


class Shelf:
    """A journal on paper: every version of a fragment, with one input, in the segment that bears its number."""

    def __init__(self, spec: RunSpec) -> None:
        self.ledger = Ledger.begin(rec.RunStarted(spec=spec, epoch=1))
        self.attachments = Attachments()
        self.sequence = 0

    def take(self, record: rec.Record, segment: int) -> None:
        place = Attachment(segment=segment, offset=100 * self.sequence, size=10)
        self.attachments.take(Entry(sequence=self.sequence, record=record, attachment=place))
        self.sequence += 1

    def store(self, node: NodeId, fragment: int, version: int, segment: int) -> BlobId:
        blob = BlobId(
            kind=BlobKind.DELTA, fragment=fragment, version=version - 1, node=node, incarnation=1, seq=version
        )
        self.take(rec.InputStored(blob=blob, window=version, contributors=(), digest=1), segment)
        return blob

    def commit(self, fragment: int, version: int, segment: int, *blobs: BlobId) -> None:
        self.ledger.versions[fragment] = version
        record = rec.WindowCommitted(
            fragment=fragment,
            version=version,
            round=0,
            merged=(),
            drops=(),
            blobs=tuple(rec.Addend(blob=blob, weight=1.0) for blob in blobs),
            anchor_digest=0,
            target_digest=0,
            momentum_digest=None,
            next_window=None,
            update_size=10,
            update_digest=0,
            outer_lr=1.0,
            outer_momentum=0.0,
            why="",
        )
        self.take(record, segment)

    def run(self, versions: int) -> None:
        for version in range(1, versions + 1):
            for fragment in (0, 1):
                self.commit(fragment, version, version, self.store(A, fragment, version, version))

    def forget(self, *restart_from: int) -> int:
        return self.attachments.forget(self.ledger, restart_from)


@pytest.fixture
def shelf(spec: RunSpec) -> Shelf:
    return Shelf(spec)


def test_the_last_commits_are_kept_and_one_for_a_machine_that_is_behind(shelf: Shelf) -> None:
    shelf.run(40)
    assert shelf.forget(39, 39) == 40 - HISTORY_VERSIONS
    assert shelf.attachments.update(0, 40 - HISTORY_VERSIONS).segment == 40 - HISTORY_VERSIONS
    with pytest.raises(KeyError):
        shelf.attachments.update(0, 39 - HISTORY_VERSIONS)


def test_everything_behind_the_oldest_snapshot_is_kept(shelf: Shelf) -> None:
    """A restart from it repeats these commits, from their updates and their inputs."""
    shelf.run(40)
    assert shelf.forget(39, 7) == 8
    assert shelf.forget(0, 0) == 8, "what was forgotten stays forgotten"


def test_the_fragment_that_is_furthest_behind_decides(shelf: Shelf) -> None:
    shelf.run(5)
    for version in range(6, 60):
        shelf.commit(1, version, version)
    assert shelf.forget(4, 58) == 1


def test_an_input_lies_before_its_commit(shelf: Shelf) -> None:
    shelf.run(19)
    early = shelf.store(B, 0, 20, 3)
    for fragment in (0, 1):
        shelf.commit(fragment, 20, 20, *([early] if fragment == 0 else []))
    assert shelf.forget(19, 19) == 3
    for version in range(21, 21 + HISTORY_VERSIONS):
        for fragment in (0, 1):
            shelf.commit(fragment, version, version)
    assert shelf.forget(30, 30) == 3, "20 is still kept for a machine that is behind"
    for fragment in (0, 1):
        shelf.commit(fragment, 37, 37)
    assert shelf.forget(36, 36) == 21 and shelf.attachments.input(early) is None


def test_an_undecided_input_is_kept_and_a_dropped_one_is_not(shelf: Shelf) -> None:
    undecided, dropped = shelf.store(C, 0, 1, 0), shelf.store(B, 0, 1, 0)
    shelf.run(40)
    shelf.ledger.inputs[undecided] = Offer(blob=undecided, size=10, digest=1, window=1)
    assert shelf.forget(39, 39) == 0
    assert shelf.attachments.input(undecided) is not None and shelf.attachments.input(dropped) is None
    del shelf.ledger.inputs[undecided]
    assert shelf.forget(39, 39) == 40 - HISTORY_VERSIONS


def test_what_is_being_read_is_kept_for_as_long(shelf: Shelf, tmp_path: Path) -> None:
    shelf.run(10)
    journal, _ = Journal.open(tmp_path)
    with journal:
        source = shelf.attachments.open_update(journal, 1, 4)
        for version in range(11, 50):
            for fragment in (0, 1):
                shelf.commit(fragment, version, version)
        assert source.size == 10
        assert shelf.forget(48, 48) == 4
        del source
        assert shelf.forget(48, 48) == 49 - HISTORY_VERSIONS
