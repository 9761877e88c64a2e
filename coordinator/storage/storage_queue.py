"""The queue of storage calls: every call of the store runs in one worker, and its failures are classified here.

Snapshots are written in another one, beside everything else: one at a time, after their commit was told. There, what a
start did not need of the journal is verified.

`NoRoom` changed nothing. The call is repeated until there is room, and the run is held meanwhile (`run_state.py`). A
reservation is repeated by the machine, which is told. Any other error of storage is fatal: what is durable is unknown
until a restart reads it.
"""

from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from farloop.coordinator.aggregator import Result
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.closing import RETRY_S
from farloop.coordinator.decide.run_state import StorageHold
from farloop.coordinator.errors import NoRoom, StorageError
from farloop.coordinator.storage.copies import StateCopy
from farloop.coordinator.storage.store import Cut, Store
from farloop.runtime.ports import Action, Clock, Worker

_T = TypeVar("_T")

Failed = Callable[[Exception], None]

_AGAIN_S = 0.01  # between two tries to take the state
LOOK_S = 1.0  # after this long without any call it is checked that the state directory is still ours


@dataclass(slots=True)
class _Delta:
    record: rec.InputStored
    data: bytes | bytearray
    error: Exception | None = None  # why it is not durable, after its turn


class StorageQueue:
    """Runs the calls of one store. Each `done` is called once the result is durable."""

    def __init__(
        self,
        store: Store,
        worker: Worker,
        clock: Clock,
        alarms: MutableMapping[str, str],
        fatal: Failed,
        beside: Worker | None = None,
    ) -> None:
        """`alarms` gets what waits and why. `fatal` gets errors that end the process.

        `beside`: where snapshots are written; without it they are in `worker`, as a part of their commit.
        """
        self.hold = StorageHold(alarms)
        self._store, self._worker, self._clock, self._fatal = store, worker, clock, fatal
        self._gathered: SimpleQueue[_Delta] = SimpleQueue()
        self._beside = beside
        self._called_at = clock.now()
        self._given_up = False

    def append(self, record: rec.Record, done: Action) -> None:
        """Append a record, once there is room: its consequences must not be told before."""
        self._once_there_is_room("a record", partial(self._append, record), lambda _: done(), self._fatal)

    def adopt(self, record: rec.Adopted, done: Action) -> None:
        """Adopt what was fetched from nodes, once there is room."""
        self._once_there_is_room("what nodes hold", partial(self._store.adopt, record), lambda _: done(), self._fatal)

    def keep(self, record: rec.AnchorFetched, data: bytearray, done: Action, failed: Failed) -> None:
        """Store an anchor from a node, once there is room."""
        call = partial(self._append, record, data)
        self._once_there_is_room(f"an anchor of {record.node}", call, lambda _: done(), failed)

    def spool(self, record: rec.InputStored, data: bytearray, done: Action, failed: Failed) -> None:
        """Store a delta, once there is room: its node would not send a dropped delta again.

        Deltas that arrive while the disk is busy are appended together, with one sync.
        """
        what, delta = f"a delta of {record.blob.node}", _Delta(record, data)

        def over(_: None) -> None:  # this job, or one before it, has had its turn with the delta
            if delta.error is None:
                self.hold.end(what)
                done()
            elif isinstance(delta.error, NoRoom):
                self.hold.begin(what, delta.error)
                call = partial(self._append, record, data)
                self._pause(lambda: self._once_there_is_room(what, call, lambda _: done(), failed))
            else:
                failed(delta.error)

        self._gathered.put(delta)
        self._submit(self._append_gathered, over, failed)

    def reserve(self, fragment: int, codec_down: str, done: Callable[[int], None], refused: Failed) -> None:
        """Reserve room for an update, to be given to `commit` or `release`.

        Without room, `refused` gets NoRoom: try again later. The run is held until it succeeds.
        """
        what = _update(fragment)

        def reserved(room: int) -> None:
            self.hold.end(what)
            done(room)

        def failed(error: Exception) -> None:
            if not isinstance(error, NoRoom):
                return self._fatal(error)
            self.hold.begin(what, error)
            refused(error)

        self._submit(partial(self._store.reserve, fragment, codec_down), reserved, failed)

    def release(self, reserved: int) -> None:
        self._submit(partial(self._store.release, reserved), lambda _: None, self._fatal)

    def commit(
        self,
        draft: rec.WindowCommitted,
        result: Result,
        reserved: int,
        done: Callable[[rec.WindowCommitted], None],
        in_store: bool = False,
    ) -> None:
        def over(record: rec.WindowCommitted) -> None:
            done(record)
            self._next_snapshot()

        def call() -> rec.WindowCommitted:
            record = self._store.commit(draft, result, reserved, in_store)
            if self._beside is None:
                self._store.take_snapshots()
            return record

        self._once_there_is_room(_update(draft.fragment), call, over, self._fatal)

    def export(self, path: Path, done: Action) -> None:
        """Export the final model, once there is room."""
        self._once_there_is_room("the final model", partial(self._store.export, path), lambda _: done(), self._fatal)

    def cut(self, done: Callable[[StateCopy], None]) -> None:
        """Take the state between two calls, for a copy, at a moment at which no commit is being made."""

        def taken(copy: StateCopy | None) -> None:
            if copy is not None:
                done(copy)
            elif not self._given_up:
                self._clock.call_later(_AGAIN_S, partial(self.cut, done))

        self._submit(self._store.cut, taken, self._fatal)

    def look(self) -> None:
        """Check that the state directory is still ours, if nothing was written for a while; to be called regularly. A
        coordinator that writes nothing, because its run is held or it waits for nodes, would otherwise serve a
        directory that another one has taken over."""
        if self._clock.now() - self._called_at < LOOK_S:
            return
        self._called_at = self._clock.now()

        def failed(error: Exception) -> None:
            if not isinstance(error, NoRoom):  # no descriptor is free: the next look tells
                self._fatal(error)

        self._submit(self._store.require_ours, lambda _: None, failed)

    def verify_older(self) -> None:
        """Verify what the start did not verify of the journal, a segment at a time, beside all else. Call it once."""
        if self._beside is None or self._given_up or not self._store.unverified:
            return

        def verified(fault: StorageError | None) -> None:
            self._submit(partial(self._store.verified, fault), lambda _: self.verify_older(), self._fatal)

        def failed(error: Exception) -> None:
            if isinstance(error, NoRoom):
                self._pause(self.verify_older)
            else:
                self._fatal(error)

        self._beside.submit(self._store.verify_older, verified, failed)

    def give_up(self) -> None:
        """Drop what waits for room: no node was told of it, and a restart repeats it."""
        self._given_up = True

    def close(self) -> None:
        self.give_up()
        if self._beside is not None:
            self._beside.close()
        self._worker.close()
        self._store.close()

    def _next_snapshot(self) -> None:
        if self._beside is not None and not self._given_up:
            self._submit(self._store.next_snapshot, self._save, self._fatal)

    def _save(self, cut: Cut | None) -> None:
        if cut is None or self._beside is None:
            return

        def failed(error: Exception) -> None:
            if isinstance(error, NoRoom):
                saved(error)
            else:
                self._fatal(error)

        def saved(refused: NoRoom | None) -> None:
            self._submit(partial(self._store.saved, cut, refused), lambda _: self._next_snapshot(), self._fatal)

        self._beside.submit(partial(self._store.save, cut), saved, failed)

    def _once_there_is_room(
        self, what: str, call: Callable[[], _T], done: Callable[[_T], None], failed: Failed
    ) -> None:
        def over(result: _T) -> None:
            self.hold.end(what)
            done(result)

        def refused(error: Exception) -> None:
            if not isinstance(error, NoRoom):
                return failed(error)
            self.hold.begin(what, error)
            self._pause(lambda: self._submit(call, over, refused))

        self._submit(call, over, refused)

    def _pause(self, again: Action) -> None:
        def over() -> None:
            if not self._given_up:
                again()

        self._clock.call_later(RETRY_S, over)

    def _submit(self, call: Callable[[], _T], done: Callable[[_T], None], failed: Failed) -> None:
        if not self.hold:  # a call that finds no room fails before it syncs: it does not stand for a look
            self._called_at = self._clock.now()
        self._worker.submit(call, done, failed)

    # --- In the worker

    def _append(self, record: rec.Record, attachment: bytes | bytearray = b"") -> None:
        self._store.append(record, attachment)
        self._store.sync()

    def _append_gathered(self) -> None:
        """Append all waiting deltas with one sync."""
        batch: list[_Delta] = []
        with suppress(Empty):
            while True:
                batch.append(self._gathered.get_nowait())
        try:
            for delta in batch:
                try:
                    self._store.append(delta.record, delta.data)
                except NoRoom as error:
                    delta.error = error
            if any(delta.error is None for delta in batch):
                self._store.sync()
        except Exception as error:  # noqa: BLE001 - each of the batch is told of it
            for delta in batch:
                delta.error = error


def _update(fragment: int) -> str:
    return f"the update of fragment {fragment}"
