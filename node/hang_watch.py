"""Finds the rank of a node that hangs or has failed, while others wait for it, and ends the node's processes.

Every rank notes what it does in torchrun's store, twice a second, from a thread. The first and the last rank read all
notes, so that each of them is seen by another. A rank hangs if it does not move for longer than the limit while another
one is ahead of it: by an inner step, or by a collective that it has begun and this one has not. Where no rank is ahead,
as in a long evaluation of all, none hangs.
"""

import logging
import os
import secrets
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from farloop.node.cluster import Cluster
from farloop.node.errors import RankFailed, lost_another
from farloop.runtime.log_queue import stack_of
from farloop.wire.messages import pack, unpack

_log = logging.getLogger(__name__)

EXIT_CODE = 7
BEAT_S = 0.5
END_S = 3.0  # for a rank to end by itself once another one has failed: it may be raising the same error
LEAVE_S = 10.0  # a rank whose store is gone may be about to leave: rank 0 may have left before it
SLOW = 10.0  # median steps, and limits of what takes longer than a step: an evaluation, and the first step

TRAINING, EXCHANGING, WAITING = "training", "exchanging", "waiting for the coordinator"
EVALUATING, LEFT = "evaluating", "left"


@dataclass(slots=True)
class Note:
    """What a rank is doing."""

    step: int = 0  # inner steps since its start
    phase: str = EXCHANGING
    turns: int = 0  # grows with every sign of life of the training thread
    begun: Mapping[str, int] = field(default_factory=dict)  # collectives that it has begun, by process group
    asked: bool = False  # to leave

    @property
    def place(self) -> list[Any]:
        """Changes as long as the rank moves."""
        return [self.step, self.phase, self.turns, dict(self.begun)]

    def ahead_of(self, other: "Note") -> bool:
        return self.step > other.step or any(count > other.begun.get(name, count) for name, count in self.begun.items())


class Judge:
    """Which ranks hang, of notes as they come. Pure: `now` is monotonic seconds."""

    def __init__(self, ranks: int, limit_s: float, now: float) -> None:
        self.notes = {rank: Note() for rank in range(ranks)}
        self._limit_s = limit_s
        self._heard = dict.fromkeys(self.notes, (b"", now))
        self._moved = dict.fromkeys(self.notes, now)
        self._steps: deque[float] = deque(maxlen=33)  # when the newest steps began

    def on_note(self, rank: int, data: bytes, now: float) -> None:
        """A note as it lies in the store; one that has not changed is no sign of life."""
        if data == self._heard[rank][0]:
            return
        self._heard[rank] = data, now
        step, phase, turns, begun, asked, _ = unpack(data)
        note, before = Note(step, phase, turns, begun, asked), self.notes[rank]
        if note.place != before.place:
            self._moved[rank] = now
        if rank == 0 and note.step > before.step:
            self._steps.append(now)
        self.notes[rank] = note

    def hung(self, now: float) -> dict[int, tuple[float, str]]:
        """For how long each hanging rank has stood, and how that is known."""
        gaps = [later - earlier for earlier, later in zip(self._steps, list(self._steps)[1:], strict=False)]
        limit = max(self._limit_s, SLOW * statistics.median(gaps)) if gaps else SLOW * self._limit_s
        found = {}
        for rank, note in self.notes.items():
            silent, still = now - self._heard[rank][1], now - self._moved[rank]
            if note.phase == LEFT:
                continue
            if silent > limit:
                found[rank] = silent, "it does not answer: stopped, or its machine is"
            elif still > (SLOW * self._limit_s if note.phase == EVALUATING else limit) and any(
                other.phase != LEFT and other.ahead_of(note) for other in self.notes.values()
            ):
                found[rank] = still, "others wait for it"
        return found


class HangWatch:
    """The thread of one rank. A cluster of one has none."""

    def __init__(self, cluster: Cluster, limit_s: float) -> None:
        """All ranks call this together. `limit_s`: 0 for no watch."""
        self.note = Note()
        self.on_ask: Callable[[], None] = lambda: None
        """Called on rank 0 when any rank has been asked to leave."""
        self._rank, self._size = cluster.rank, cluster.size
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if cluster.alone or not limit_s:
            return
        told = cluster.gather([socket.gethostname(), secrets.token_hex(8)])
        self._hosts = [host for host, _ in told]
        # A connection of its own: one that waits for a key would hold up the beats.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store: Any = PrefixStore(f"farloop/watch/{told[0][1]}", store.clone())
        self._beats = 0
        self._publish()
        cluster.all_agree(True)  # from here on all notes are there
        self._judge = Judge(self._size, limit_s, time.monotonic())
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        """The training thread: say what comes next."""
        self.note.phase = phase
        self.note.turns += 1

    def stepped(self) -> None:
        """The training thread: an inner step is over."""
        self.note.step += 1
        self.enter(TRAINING)

    def failed(self, error: BaseException) -> RankFailed | None:
        """The rank ends by an error: tell the others, which end as well. What another rank has told, where the error
        is that it is gone."""
        if self._thread is None or not isinstance(error, Exception):
            return None
        with suppress(RuntimeError):  # the store is gone with its host
            if lost_another(error):
                return self._failed_rank() or self._left_rank()
            told = [self._rank, f"{type(error).__name__}: {error}", getattr(error, "exit_code", 1)]
            self._store.compare_set("failed", "", pack(told))
        return None

    def _failed_rank(self) -> RankFailed | None:
        """The first rank that has told of an error."""
        return RankFailed(*unpack(self._store.get("failed"))) if self._store.check(["failed"]) else None

    def _left_rank(self) -> RankFailed | None:
        for rank, data in enumerate(self._store.multi_get([str(rank) for rank in range(self._size)])):
            if unpack(bytes(data))[1] == LEFT:
                why = f"it has left, and rank {self._rank} goes on: let all ranks take the same steps, then leave"
                return RankFailed(rank, why, 1)
        return None

    def stop(self) -> None:
        """The rank leaves. More than once is harmless."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(LEAVE_S)
            self._thread = None

    def _watch(self) -> None:
        try:
            while not self._stopped.wait(BEAT_S):
                self._beat()
            self.note.phase = LEFT
            self._publish()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: it ends the process
            if not self._stopped.wait(LEAVE_S):
                self._end(f"the store of the node's ranks is gone: {error}")

    def _beat(self) -> None:
        self._publish()
        if self._store.check(["hung"]):
            self._end(f"the node is started again: {self._store.get('hung').decode()}")
        if (first := self._failed_rank()) and first.rank != self._rank and not self._stopped.wait(END_S):
            _log.error("rank %d ends with code %d: %s", self._rank, first.exit_code, first)
            self._exit(first.exit_code)
        if self._rank not in (0, self._size - 1):
            return
        now = time.monotonic()
        for rank, data in enumerate(self._store.multi_get([str(rank) for rank in range(self._size)])):
            self._judge.on_note(rank, bytes(data), now)
        if self._rank == 0 and any(note.asked for note in self._judge.notes.values()):
            self.on_ask()
        if found := self._judge.hung(now if self._rank == 0 else now - 4 * BEAT_S):
            self._accuse(found)

    def _accuse(self, found: Mapping[int, tuple[float, str]]) -> None:
        for rank, (seconds, how) in found.items():
            note = self._judge.notes[rank]
            _log.error(
                "rank hangs rank=%d host=%s phase=%r step=%d for=%.0fs why=%r",
                rank, self._hosts[rank], note.phase, note.step, seconds, how,
            )  # fmt: skip
        self._store.set("hung", f"rank {' and '.join(map(str, found))} hangs")

    def _publish(self) -> None:
        self._beats += 1
        self.note.begun = dict(_collectives())
        self._store.set(str(self._rank), pack([*self.note.place, self.note.asked, self._beats]))

    def _end(self, why: str) -> None:
        """End the process, whatever its training thread does; torchrun starts the node again."""
        _log.error("rank %d ends with code %d: %s; the stacks of its threads follow", self._rank, EXIT_CODE, why)
        for thread in threading.enumerate():
            _log.error("stack thread=%r: %s", thread.name, stack_of(thread))
        self._exit(EXIT_CODE)

    def _exit(self, code: int) -> NoReturn:
        logging.shutdown()
        os._exit(code)


def _collectives() -> Iterable[tuple[str, int]]:
    """How many collectives this process has begun in each of its groups. Only counters are read: nothing waits."""
    groups: list[tuple[Any, str]] = list(dist.distributed_c10d._world.pg_names.items())
    for group, name in groups:
        with suppress(RuntimeError):  # of a backend that does not count
            yield name, group._get_sequence_number_for_group()
