"""Where the journal's bulk bytes are, and which of them somebody can still ask for. No files.

A restart asks for the inputs and updates behind a snapshot, a node that comes back for the updates that the ledger
remembers, a session for the rest of what it is sending (protocol P, R).
"""

import threading
import weakref
from collections.abc import Sequence

from farloop.algo.spec import BlobId
from farloop.coordinator import records as rec
from farloop.coordinator.journal import Journal
from farloop.coordinator.ledger import HISTORY_VERSIONS, Ledger
from farloop.coordinator.segment import Attachment, Entry


class UpdateSource:
    """An update's bytes, read from the journal as the downlink goes on (protocol R). While it lives, they do."""

    def __init__(self, journal: Journal, attachment: Attachment) -> None:
        self._journal, self.attachment = journal, attachment

    @property
    def size(self) -> int:
        return self.attachment.size

    def read(self, offset: int, num_bytes: int) -> memoryview:
        return memoryview(self._journal.read(self.attachment, offset, num_bytes))


class Attachments:
    """The places of deltas and updates in one journal. One thread owns it; `open_update` is any thread's."""

    def __init__(self) -> None:
        self._inputs: dict[BlobId, Attachment] = {}
        self._updates: dict[tuple[int, int], Attachment] = {}
        self._addends: dict[tuple[int, int], tuple[BlobId, ...]] = {}
        """The inputs of each commit in `_updates`."""
        self._anchors: dict[tuple[int, int], tuple[rec.AnchorFetched, Attachment]] = {}
        """By fragment and version, what came up from nodes: adopted, or it may yet be."""
        self._sources: weakref.WeakSet[UpdateSource] = weakref.WeakSet()
        self._lock = threading.Lock()
        """Held while a source is opened, and while it is decided what may go."""

    def take(self, entry: Entry) -> None:
        """A record is in the journal."""
        match entry.record:
            case rec.InputStored(blob=blob):
                self._inputs[blob] = entry.attachment
            case rec.WindowCommitted(fragment=fragment, version=version, blobs=blobs):
                self._updates[fragment, version] = entry.attachment
                self._addends[fragment, version] = tuple(addend.blob for addend in blobs)
            case rec.AnchorFetched(anchor=anchor):
                self._anchors[anchor.fragment, anchor.version] = entry.record, entry.attachment
            case _:
                pass

    @property
    def fetched(self) -> dict[int, rec.AnchorFetched]:
        """By fragment, the newest anchors that came up from nodes and are in the journal."""
        return {fragment: record for (fragment, _), (record, _) in sorted(self._anchors.items(), key=lambda at: at[0])}

    def anchor(self, fragment: int, version: int) -> tuple[rec.AnchorFetched, Attachment]:
        """One of them, and where it is."""
        return self._anchors[fragment, version]

    def input(self, blob: BlobId) -> Attachment | None:
        """Where a delta is; None if it was not spooled, or nobody can need it any more."""
        return self._inputs.get(blob)

    def has_update(self, fragment: int, version: int) -> bool:
        """Whether that update can be read."""
        return (fragment, version) in self._updates

    def update(self, fragment: int, version: int) -> Attachment:
        """Where an update is."""
        return self._updates[fragment, version]

    def open_update(self, journal: Journal, fragment: int, version: int) -> UpdateSource:
        """A reader of an update, which stays in the journal for as long as the reader is kept."""
        with self._lock:
            source = UpdateSource(journal, self._updates[fragment, version])
            self._sources.add(source)
        return source

    def forget(self, ledger: Ledger, restart_from: Sequence[int]) -> int:
        """Drop the places of what nobody can ask for; return the first segment that is still wanted.

        Wanted are undecided inputs; the commits that a restart may have to repeat, from version `restart_from` of each
        fragment on; those that a ledger remembers (the machine's own may be one commit behind `ledger`); the inputs
        of these commits; anchors of nodes that no snapshot holds yet; and what is being read.
        """
        oldest = [
            min(version - HISTORY_VERSIONS, snapshot + 1)
            for version, snapshot in zip(ledger.versions, restart_from, strict=True)
        ]
        kept = [key for key in self._updates if key[1] >= oldest[key[0]]]
        blobs = {*ledger.inputs, *(blob for key in kept for blob in self._addends[key])}
        self._addends = {key: self._addends[key] for key in kept}
        self._inputs = {blob: attachment for blob, attachment in self._inputs.items() if blob in blobs}
        with self._lock:
            self._updates = {key: self._updates[key] for key in kept}
            read = [source.attachment for source in self._sources]
        self._anchors = {key: found for key, found in self._anchors.items() if key[1] > restart_from[key[0]]}
        anchors = [attachment for _, attachment in self._anchors.values()]
        wanted = [*self._updates.values(), *self._inputs.values(), *anchors, *read]
        return min(attachment.segment for attachment in wanted)
