"""A state folder that is written on two hosts: `MirroredFiles` of the leader, and the standby's `Replica`.

Every change that the store asks of the `Files` port is sent to the standbys in the order in which it is made, and
`sync` returns once every disk has it. At every sync a standby's folder is therefore, byte for byte, what a power cut at
that moment would have left of the leader's: what `Store.recover` is tested with.

A change is a head, `[number, kind, field, ...]` in JSON, and parts that are bytes:

    begin                       everything comes anew, into the folder `incoming`
    keep NAME                   a file of the old folder stays: it is equal
    mkdir NAME, create NAME, unlink NAME, rename NAME TO, truncate NAME LENGTH, write NAME OFFSET (+ the bytes)
    whole MARKS                 `incoming` takes the place of the old folder, with these marks; acknowledged
    mark MARKS                  the folder's marks; acknowledged
    sync NAME                   make it durable; acknowledged. Without a name: acknowledged at once

The standby asks to be let in by `["join", name, run, process, {file: [bytes, digest]}]`: its run's fingerprint,
what its process drew at its start, and what it has. It answers `["ack", number]`, and `["took", bytes]` as it goes on;
`["bye", why]` is its last word. `["refused", why]` ends it.
"""

import json
import logging
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import xxhash

from farloop.coordinator.errors import NoRoom, StorageError, StorageFailed
from farloop.coordinator.leadership import MARK, Leadership, mark
from farloop.coordinator.storage.files import DISK, Bytes, File, Files, Identity, Lock, disk_errors
from farloop.monitoring.status import StandbyStatus
from farloop.monitoring.units import duration_text

_log = logging.getLogger(__name__)

SILENCE_S: Final = 4.0
"""The leader goes on without a standby of which nothing was received for so long. Less than `zmq_mirror.SILENCE_S`, so
that the leader goes on where both could."""
STALLED_S: Final = 30.0  # ... or that answers, and has not taken anything of what was sent for so long
RIVAL_S: Final = 1.0  # a standby that is heard so long after another of its name asked lives: it pings twice a second
WINDOW_BYTES: Final = 8 << 20
"""Of snapshots that are sent and not taken yet: they must not stand before a commit."""
CHUNK_BYTES: Final = 1 << 20  # of a large write, and of a file that a new standby is given
NODES_SILENT_S: Final = 2.5  # nodes report every second
YIELD_S: Final = 8.0
"""How long a leader that hears neither standby nor nodes leaves the record as it is: more than a standby waits."""
CHECK_S: Final = 2.0  # between two looks at the record
ALONE_S: Final = 60.0  # without a standby in sync, or the record, before that is an alarm
CLOCK_OFF_S: Final = 60.0  # between two wall clocks before that is one

INCOMING: Final = "incoming"  # subfolder of a standby that is being given the state
_COMPLETE: Final = "complete"  # its file that says that it is whole, and which old files stay
_SNAPSHOTS: Final = "snapshots"
_MIRRORED: Final = re.compile(
    r"(epoch|objects|model\.safetensors|journal-[0-9]{6,}\.log)(\.tmp)?|snapshots(/[^/]+)?|(metrics|decisions)[^/]*\.jsonl"
)
"""The lock, the admin socket, the saved status and mapped buffers are each host's own."""
_REPORTS: Final = ".jsonl"
"""Files that the observer writes: they are brought after, and nothing waits for them."""

_OWN_NAME: Final = "give each a name of its own"
_Who = tuple[str, str]  # a standby's name, and what its process drew
Send = Callable[[bytes, Sequence[Bytes]], None]
"""Sends frames to a route. Any thread; never waits."""


def mirrored(root: Path, path: Path) -> str | None:
    """A path's name in a mirrored folder, as snapshots/f0-v8.safetensors, or . for the folder; None: it is not
    mirrored."""
    try:
        name = str(path.relative_to(root))
    except ValueError:
        return None
    return name if name == "." or _MIRRORED.fullmatch(name) else None


def digests(root: Path, files: Files, known: dict[str, tuple[Identity, str]]) -> dict[str, tuple[int, str]]:
    """Bytes and xxh3-64 of every mirrored file that no coordinator changes any more: snapshots, and all segments but
    the last. `known`: kept between calls, so that each file is read once."""
    found = {}
    for name in _contents(root, files):
        path = root / name
        if name.endswith(".tmp") or not name.startswith((_SNAPSHOTS, "journal-")):
            continue
        with suppress(FileNotFoundError):
            identity = files.identity(path)
            if identity is None:
                continue
            if known.get(name, (None,))[0] != identity:
                digest = xxhash.xxh3_64()
                with closing(files.open(path)) as file:
                    reader = file.reader()
                    while data := reader.read(CHUNK_BYTES):
                        digest.update(data)
                known[name] = identity, digest.hexdigest()
            found[name] = identity[2], known[name][1]
    segments = sorted(name for name in found if name.startswith("journal-"))
    return {name: each for name, each in found.items() if name not in segments[-1:]}


def _contents(root: Path, files: Files) -> list[str]:
    """The names of mirrored files."""
    found = []
    for folder in (root, root / _SNAPSHOTS):
        if not files.is_directory(folder):
            continue
        for entry in sorted(files.names(folder)):
            name = mirrored(root, folder / entry)
            if name is not None and not files.is_directory(folder / entry):
                found.append(name)
    return found


@dataclass(slots=True, eq=False)
class _Standby:
    """One that is being written to."""

    name: str
    route: bytes
    heard_at: float
    moved_at: float  # when it last took something, or had nothing to take
    waits: bool = False  # whether a sync waits for it
    pending: set[int] = field(default_factory=set)  # what it has to acknowledge
    to_copy: dict[str, list[int]] = field(default_factory=dict)  # files that it is being given: next byte, and end
    reports: dict[str, Identity] = field(default_factory=dict)  # as they were when they were sent last
    sent: int = 0  # bytes of changes
    taken: int = 0


class Mirror:
    """The leader's end. Its socket calls `received`; `tick` is called all the time in a thread of its own."""

    def __init__(
        self, root: Path, leadership: Leadership, files: Files = DISK, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.root, self.leadership, self.inner, self._now = root, leadership, files, now
        self.send: Send = lambda route, frames: None
        self.nodes_silent_s: Callable[[], float] = lambda: 0.0
        """Since any node was heard of; 0 while none is connected. Any thread."""
        self.lock = threading.RLock()  # holds the order of changes
        self._membership = threading.RLock()  # held while the record and `_standbys` are changed to agree
        self._moved = threading.Condition(threading.Lock())  # a standby took something, or the state below changed
        self._standbys: dict[bytes, _Standby] = {}
        self._joining: dict[_Who, tuple[bytes, dict[str, tuple[int, str]], float]] = {}  # route, files, when it asked
        self._known_routes = dict[bytes, _Who]()
        self._heard_at = dict[_Who, float]()  # by any of its routes
        self._versions = dict[str, str]()  # of farloop, by name of the standby
        self._clocks_off = dict[str, float]()  # seconds, likewise
        self._digests: dict[str, tuple[Identity, str]] = {}
        self._sequence = 0
        self._bytes = 0
        self._checked_at = self._read_at = now()
        self._waits_for = ""  # the standby that a sync waits for
        self.error: StorageError | None = None
        self._ends = 0  # of this mirror: 1 once it is closed
        self.serves = False  # whether standbys can ask to be let in
        self.lets_in = False  # whether they are: not while this host recovers the state, which takes all its cores
        self._alone_since = now()

    # --- What the standbys say

    def received(self, route: bytes, head: list[Any]) -> None:
        """A standby's message, in the socket's thread."""
        now, found = self._now(), self._standbys.get(route)
        if found is not None:
            found.heard_at = now
        if (who := self._known_routes.get(route)) is not None:
            with self._moved:
                self._heard_at[who] = now
        match head:
            case ["join", str(name), str(run), str(process), dict(held)]:
                self._asks(route, name, run, process, held)
            case ["version", str(name), str(version)]:
                self._versions[name] = version
            case ["clock", str(name), float(clock_s)]:
                self._clocks_off[name] = clock_s - datetime.now(UTC).timestamp()
            case ["ping"] if route in self._known_routes:
                self.send(route, [b'["pong"]'])
            case ["ping"]:
                self.send(route, [b'["unknown"]'])  # it came back over another connection, or was left behind
            case ["bye", str(why)] if who is not None:
                if why:
                    _log.warning("standby cannot go on name=%s why=%r", who[0], why)
                with self._moved:  # whoever waits for it waits no longer
                    self._heard_at.pop(who, None)
                    self._joining.pop(who, None)
                    self._known_routes.pop(route, None)
                    if found is not None:
                        found.heard_at = -math.inf
                    self._moved.notify_all()
            case ["ack", int(number)] if found is not None:
                with self._moved:
                    found.pending.discard(number)
                    found.moved_at = now
                    self._moved.notify_all()
            case ["took", int(taken)] if found is not None:
                with self._moved:
                    found.taken, found.moved_at = taken, now
                    self._moved.notify_all()
            case _:
                pass

    def _asks(self, route: bytes, name: str, run: str, process: str, held: dict[str, Any]) -> None:
        """To be let in."""
        now, leads = self._now(), self.leadership.term
        if run != leads.run:
            why = f"{leads.leader} leads another run (fingerprint {leads.run}, not {run})"
            self._refuse(route, name, f"{why}: [coordinator] peers are to be the coordinators of one run")
        elif name == leads.leader:
            why = f"another coordinator of the name {name} leads since term {leads.term}"
            self._refuse(route, name, f"{why}: {_OWN_NAME}")
        else:
            who, files = (name, process), {file: (size, digest) for file, (size, digest) in held.items()}
            with self._moved:
                heard = {other: at for other, at in self._heard_at.items() if now - at <= SILENCE_S}
                routes = self._known_routes.items()
                known = {at: other for at, other in routes if other != who and (other in heard or at in self._standbys)}
                self._heard_at, self._known_routes = heard | {who: now}, known | {route: who}
                self._joining[who] = route, files, now

    def tick(self) -> None:
        """Let those in that asked for it, and look at the record. In a thread of its own."""
        try:
            while self.lets_in and (asks := self._next_to_let_in()) is not None:
                name, route, held = asks
                try:
                    self._let_in(name, route, held)
                except (OSError, NoRoom) as error:  # as where no file can be opened: it asks again
                    _log.warning("standby not let in name=%s why=%r", name, str(error))
                    self._forget(route)
            if self._check_is_due():
                self._check_record()
                for standby in list(self._standbys.values()):
                    self._bring_reports(standby)
        except (OSError, NoRoom) as error:
            _log.warning("reports not brought why=%r", str(error))
        except StorageError as error:
            self.fail(error)

    def _check_is_due(self) -> bool:
        return self._now() - self._checked_at >= CHECK_S

    def _check_record(self) -> bool:
        """Look at the record; whether it was read, and this process leads. Raises Deposed."""
        try:
            self.leadership.check()
        finally:
            self._checked_at = self._now()  # after it: a store that swallows requests does not hold up a copy
        if self.leadership.why_unchecked:
            return False
        self._read_at = self._now()
        return True

    def fail(self, error: StorageError) -> None:
        """End this leader: whatever waits or is to be told fails."""
        with self._moved:
            if self.error is None:
                _log.error("this leader ends why=%r", str(error))
            self.error = self.error or error
            self._moved.notify_all()

    def close(self) -> None:
        """Nothing is told any more: what waits for a standby fails, and later changes are made here alone."""
        self.leadership.close()
        with self.lock, self._moved:
            self._ends += 1
            self.lets_in = False
            self._standbys.clear()
            self._moved.notify_all()

    def status(self) -> StandbyStatus:
        """For the status page. Any thread."""
        with self._moved:
            lags = [each.sent - each.taken for each in self._standbys.values()]
            joining = sorted(each.name for each in self._standbys.values() if not each.waits)
        in_sync = list(self.leadership.term.in_sync)
        if in_sync:
            self._alone_since = self._now()
        return {
            "term": self.leadership.term.term,
            "in_sync": in_sync,
            "joining": joining,
            "farloop": {name: self._versions.get(name, "") for name in (*in_sync, *joining)},
            "lag_bytes": max(lags, default=0),
            "bytes": self._bytes,
        }

    def alarms(self) -> dict[str, str]:
        """What needs attention. Any thread."""
        found = {}
        if self.serves and not self.leadership.term.in_sync and self._now() - self._alone_since > ALONE_S:
            found["standby"] = "none is in sync: should this host be lost, the run stops; start one, or read its log"
        off = {name: off_s for name, off_s in dict(self._clocks_off).items() if abs(off_s) > CLOCK_OFF_S}
        for name in off.keys() & {each.name for each in list(self._standbys.values())}:
            apart = f"{duration_text(abs(off[name]))} {'ahead of' if off[name] > 0 else 'behind'} this host's"
            found["clock"] = f"{name}'s is {apart}: set both by NTP; no decision needs them, an object store may"
        if why := self.leadership.why_held:
            whom = f"standby {self._waits_for} does not answer" if self._waits_for else "a standby asks to be let in"
            found["leads_by"] = f"{whom}, and the record of the leader cannot be changed: {why}; mend either of the two"
        elif (why := self.leadership.why_unchecked) and self._now() - self._read_at > ALONE_S:
            what = "the record of the leader cannot be read or put right"
            found["leads_by"] = f"{what}: should this host be lost, no standby takes over; mend it: {why}"
        return found

    # --- Changes

    @property
    def has_standbys(self) -> bool:
        return bool(self._standbys)

    def tell(self, kind: str, *fields: str | int, parts: Sequence[Bytes] = (), to: _Standby | None = None) -> int:
        """Send a change to all standbys, or to one. Call it with the lock held. Returns its number."""
        if not self._standbys and to is None:
            return 0
        self._sequence += 1
        size = sum(memoryview(part).nbytes for part in parts)
        frames = [json.dumps([self._sequence, kind, *fields], allow_nan=False).encode(), *parts]
        for standby in [to] if to else list(self._standbys.values()):
            with self._moved:
                if standby.sent == standby.taken and not standby.pending:
                    standby.moved_at = self._now()
                standby.sent += size
                self._bytes += size
                if kind in ("sync", "whole", "mark"):
                    standby.pending.add(self._sequence)
            self.send(standby.route, frames)
        return self._sequence

    def sync(self, name: str, local: Callable[[], None]) -> None:
        """Make a file durable here, by `local`, and on all standbys that are in sync.
        Raises Deposed, StorageFailed."""
        with self.lock:
            number = self.tell("sync", name)
        local()
        self.wait(number)

    def require_ours(self) -> None:
        """Raises Deposed: a standby has taken over. StorageFailed."""
        with self.lock:
            number = self.tell("sync", "")
        self.wait(number)

    def wait(self, number: int) -> None:
        """Until all that have to acknowledge this have done so, or the run goes on without them."""
        while (lost := self._first_lost(number)) is not None:
            self._waits_for = lost.name
            try:
                self._leave_behind(lost)
            finally:
                self._waits_for = ""

    def _first_lost(self, number: int) -> _Standby | None:
        """Wait for acknowledgements; None: all are there."""
        with self._moved:
            ends = self._ends
            while True:
                if self.error is not None:
                    raise self.error
                if self._ends != ends:
                    raise StorageFailed(self.root, "this coordinator stops")
                late = [each for each in self._standbys.values() if each.waits and number in each.pending]
                if not late:
                    return None
                for each in late:
                    if self._is_lost(each):
                        return each
                self._moved.wait(0.05)

    def wait_for_window(self, to: _Standby | None = None, most_s: float = math.inf) -> None:
        """Before more of a snapshot is sent to all standbys, or before more is given to one."""
        until = self._now() + most_s
        with self._moved:
            while self.error is None and self._now() < until and self._is_full(to):
                self._moved.wait(0.05)

    def _is_full(self, to: _Standby | None) -> bool:
        there = list(self._standbys.values())
        return any(
            each.sent - each.taken > WINDOW_BYTES and not self._is_lost(each)
            for each in there
            if to is None or each is to
        )

    def _is_lost(self, standby: _Standby) -> bool:
        now, has_to_take = self._now(), bool(standby.pending) or standby.sent != standby.taken
        return now - standby.heard_at > SILENCE_S or (has_to_take and now - standby.moved_at > STALLED_S)

    def _leave_behind(self, standby: _Standby, *, rejoins: bool = False) -> None:
        """Go on without a standby: first in the record, then here. Raises Deposed.
        `rejoins`: it asks to be let in over another connection, so that this one has ended."""
        until = self._now() + YIELD_S
        with self._moved:  # where nodes are silent, too, this host is cut off: the standby may lead, and should
            while self.nodes_silent_s() > NODES_SILENT_S and self._is_lost(standby) and self._now() < until:
                self._moved.wait(0.05)
        while not self._membership.acquire(timeout=0.2):
            if not rejoins and not self._is_lost(standby):
                return
        try:
            if self._standbys.get(standby.route) is not standby or not (rejoins or self._is_lost(standby)):
                return
            others = tuple(name for name in self.leadership.term.in_sync if name != standby.name)
            # One that comes back over the same connection has missed nothing, where the store is away
            alone = self.leadership.set_in_sync(others, unless=lambda: not rejoins and not self._is_lost(standby))
            if alone and self._forget(standby.route):
                _log.warning("standby left behind name=%s note='the run goes on without it'", standby.name)
        except StorageError as error:
            self.fail(error)
            raise
        finally:
            self._membership.release()

    def _forget(self, route: bytes) -> bool:
        """Nothing more goes to it, and no sync waits for it; whether it was there."""
        with self.lock, self._moved:
            self._known_routes.pop(route, None)
            was = self._standbys.pop(route, None)
            self._moved.notify_all()
        return was is not None

    # --- Letting in

    def _refuse(self, route: bytes, name: str, why: str) -> None:
        _log.warning("standby refused name=%s why=%r", name, why)
        self.send(route, [json.dumps(["refused", why], allow_nan=False).encode()])

    def _next_to_let_in(self) -> tuple[str, bytes, dict[str, tuple[int, str]]] | None:
        """A standby that asks, while no other process of its name is heard: the record has names, so that the one that
        is behind could take over. After its own restart it waits until its last process is known to be gone."""
        with self._moved:
            for who, (route, held, asked_at) in list(self._joining.items()):
                name = who[0]
                others = (at for other, at in self._heard_at.items() if other[0] == name and other != who)
                last = max(others, default=-math.inf)
                if last > asked_at + RIVAL_S:
                    self._refuse(route, name, f"another standby of the name {name} is connected: {_OWN_NAME}")
                    self._known_routes.pop(route, None)
                    del self._joining[who]
                    self._heard_at.pop(who, None)  # it may be silent since it asked
                elif self._now() - last > SILENCE_S:
                    del self._joining[who]
                    return name, route, held
        return None

    def _let_in(self, name: str, route: bytes, held: dict[str, tuple[int, str]]) -> None:
        for before in [each for each in list(self._standbys.values()) if each.name == name]:
            self._leave_behind(before, rejoins=True)  # its connection broke: what was on its way to it is lost
        own = digests(self.root, self.inner, self._digests)
        standby = self._begin(name, route, {file for file, each in held.items() if own.get(file) == each})
        while self._copy_chunk(standby):
            if self._check_is_due():
                self._check_record()
        leads = self._check_record()
        while not leads:  # another may lead, and have let this standby in: then its folder is not to be replaced
            with self._moved:
                if self.error is not None:
                    raise self.error
                self._moved.wait(0.05)
            if self._is_lost(standby) and self._forget(standby.route):
                _log.warning("standby not let in name=%s why='it is silent'", name)
            if standby.route not in self._standbys:
                return
            leads = self._check_is_due() and self._check_record()
        with self.lock:
            if standby.route not in self._standbys:
                return
            standby.waits = True
            # Whatever folder is older than this moment is of no use from now on, also another of this name
            new = secrets.token_hex(8)
            either = f"{self.leadership.term.mark} {new}"
            mark(self.root, either, self.inner)
            numbers = [self.tell("whole" if it is standby else "mark", either, to=it) for it in self._standbys.values()]
        for number in numbers:
            self.wait(number)
        with self._membership:
            if standby.route not in self._standbys:
                return
            names = {*self.leadership.term.in_sync, name}
            self.leadership.set_in_sync(tuple(sorted(names)), mark=new)
        _log.info("standby in sync name=%s term=%d bytes=%d", name, self.leadership.term.term, standby.sent)

    def _begin(self, name: str, route: bytes, equal: set[str]) -> _Standby:
        """At one moment: every change from now on reaches it, and it knows which files there are."""
        with self.lock:
            standby = _Standby(name=name, route=route, heard_at=self._now(), moved_at=self._now())
            self.tell("begin", to=standby)
            if self.inner.is_directory(self.root / _SNAPSHOTS):
                self.tell("mkdir", _SNAPSHOTS, to=standby)
            for file in _contents(self.root, self.inner):
                if file.endswith(_REPORTS):
                    continue
                if file in equal:
                    self.tell("keep", file, to=standby)
                elif (identity := self.inner.identity(self.root / file)) is not None:
                    self.tell("create", file, to=standby)
                    standby.to_copy[file] = [0, identity[2]]
            with self._moved:
                self._standbys[route] = standby
        _log.info("standby joins name=%s files=%d equal=%d", name, len(standby.to_copy) + len(equal), len(equal))
        return standby

    def _copy_chunk(self, standby: _Standby) -> bool:
        """Give it the next bytes; whether there are more."""
        self.wait_for_window(standby, CHECK_S)  # then the record is looked at
        if self.error is not None:
            raise self.error
        if self._is_full(standby):
            return True
        if standby.route in self._standbys and self._is_lost(standby):
            self._leave_behind(standby)  # or not: it may be heard again meanwhile
        with self.lock:
            if not standby.to_copy or standby.route not in self._standbys:
                return False
            name, (at, end) = next(iter(standby.to_copy.items()))
            with closing(self.inner.open(self.root / name)) as file:
                data = file.read(at, min(CHUNK_BYTES, end - at))
            if data:
                self.tell("write", name, at, parts=[data], to=standby)
                standby.to_copy[name][0] += len(data)
            else:
                del standby.to_copy[name]
        return True

    def _bring_reports(self, standby: _Standby) -> None:
        """What the observer wrote since the last time."""
        there = {name for name in _contents(self.root, self.inner) if name.endswith(_REPORTS)}
        for name in standby.reports.keys() - there:
            with self.lock:
                self.tell("unlink", name, to=standby)
                del standby.reports[name]
        for name in sorted(there):
            before = standby.reports.get(name)
            with suppress(FileNotFoundError), closing(self.inner.open(self.root / name)) as file:
                now = file.identity()
                grew = before is not None and before[:2] == now[:2] and before[2] <= now[2]
                at = before[2] if before is not None and grew else 0
                with self.lock:
                    if not grew:
                        self.tell("create", name, to=standby)
                    while at < now[2] and (data := file.read(at, min(CHUNK_BYTES, now[2] - at))):
                        self.tell("write", name, at, parts=[data], to=standby)
                        at += len(data)
                standby.reports[name] = (*now[:2], at, now[3])

    def renamed(self, name: str, target: str | None) -> None:
        for standby in self._standbys.values():
            if (rest := standby.to_copy.pop(name, None)) is not None and target is not None:
                standby.to_copy[target] = rest

    def unlinked(self, name: str) -> None:
        for standby in self._standbys.values():
            standby.to_copy.pop(name, None)


class MirroredFile(File):
    """A file of the leader."""

    def __init__(self, inner: File, mirror: Mirror) -> None:
        self._inner, self._mirror = inner, mirror
        self.allocation_step = inner.allocation_step

    @property
    def path(self) -> Path:
        return self._inner.path

    @path.setter
    def path(self, path: Path) -> None:
        self._inner.path = path

    @property
    def _name(self) -> str | None:
        return mirrored(self._mirror.root, self._inner.path)

    def write(self, parts: Sequence[Bytes], offset: int) -> None:
        """In pieces, so that a commit need not wait for all of a snapshot."""
        mirror = self._mirror
        name = self._name
        for piece, at in _pieces(parts, offset) if mirror.has_standbys else [(parts, offset)]:
            is_snapshot = name is not None and name.startswith(_SNAPSHOTS)
            if is_snapshot:
                mirror.wait_for_window()
            with mirror.lock:
                if name is not None:
                    # A snapshot's buffers are used again after its sync, which a standby that joins does not hold up.
                    mirror.tell("write", name, at, parts=[bytes(part) for part in piece] if is_snapshot else piece)
                self._inner.write(piece, at)

    def truncate(self, length: int) -> None:
        with self._mirror.lock:
            if (name := self._name) is not None:
                self._mirror.tell("truncate", name, length)
            self._inner.truncate(length)

    def sync(self) -> None:
        self._sync(self._inner.sync)

    def sync_and_forget(self) -> None:
        self._sync(self._inner.sync_and_forget)

    def _sync(self, local: Callable[[], None]) -> None:
        if (name := self._name) is None:
            local()
        else:
            self._mirror.sync(name, local)

    def identity(self) -> Identity:
        return self._inner.identity()

    def read(self, offset: int, num_bytes: int) -> bytes:
        return self._inner.read(offset, num_bytes)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        return self._inner.read_into(offset, buffer)

    def allocate(self, offset: int, num_bytes: int) -> None:
        self._inner.allocate(offset, num_bytes)

    def require_writable(self) -> None:
        self._inner.require_writable()

    def close(self) -> None:
        self._inner.close()


def _pieces(parts: Sequence[Bytes], offset: int) -> Iterator[tuple[list[memoryview], int]]:
    """Cut what is written into pieces of `CHUNK_BYTES`."""
    piece, size = list[memoryview](), 0
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            taken = view[: CHUNK_BYTES - size]
            piece.append(taken)
            view, size = view[len(taken) :], size + len(taken)
            if size == CHUNK_BYTES:
                yield piece, offset
                offset, piece, size = offset + size, [], 0
    if piece:
        yield piece, offset


class MirroredFiles(Files):
    """The leader's file system."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror, self._inner = mirror, mirror.inner

    def _name(self, path: Path) -> str | None:
        return mirrored(self.mirror.root, path)

    def require_ours(self) -> None:
        self.mirror.require_ours()

    def open(self, path: Path, *, write: bool = False) -> File:
        return MirroredFile(self._inner.open(path, write=write), self.mirror)

    def create(self, path: Path) -> File:
        with self.mirror.lock:
            file = self._inner.create(path)
            if (name := self._name(path)) is not None:
                self.mirror.tell("create", name)
        return MirroredFile(file, self.mirror)

    def write_bytes(self, path: Path, data: bytes) -> None:
        with self.mirror.lock:
            self._inner.write_bytes(path, data)
            if (name := self._name(path)) is not None:
                self.mirror.tell("create", name)
                self.mirror.tell("write", name, 0, parts=[data])

    def mkdir(self, path: Path) -> None:
        with self.mirror.lock:
            self._inner.mkdir(path)
            if (name := self._name(path)) is not None:
                self.mirror.tell("mkdir", name)

    def rename(self, source: Path, target: Path) -> None:
        with self.mirror.lock:
            self._inner.rename(source, target)
            name, to = self._name(source), self._name(target)
            if name is not None:
                self.mirror.tell(*(("rename", name, to) if to is not None else ("unlink", name)))
                self.mirror.renamed(name, to)

    def unlink(self, path: Path) -> None:
        with self.mirror.lock:
            self._inner.unlink(path)
            if (name := self._name(path)) is not None:
                self.mirror.tell("unlink", name)
                self.mirror.unlinked(name)

    def is_directory(self, path: Path) -> bool:
        return self._inner.is_directory(path)

    def names(self, directory: Path) -> list[str]:
        return self._inner.names(directory)

    def identity(self, path: Path) -> Identity | None:
        return self._inner.identity(path)

    def lock(self, path: Path) -> Lock:
        return self._inner.lock(path)

    def read_bytes(self, path: Path) -> bytes:
        return self._inner.read_bytes(path)

    def require_free(self, path: Path, num_bytes: int) -> None:
        self._inner.require_free(path, num_bytes)

    def forget(self, path: Path) -> None:
        self._inner.forget(path)


# --- The standby's end


class Replica:
    """Applies what the leader does to its folder. One thread; snapshots are synced in another."""

    def __init__(self, root: Path, files: Files = DISK, *, beside: bool = True) -> None:
        """`beside`: sync snapshots in a thread, so that a commit does not wait for them."""
        self.root, self.files = root, files
        self._base = root
        self._kept: set[str] | None = None  # of the old folder, while `incoming` is being filled
        self._open: dict[str, File] = {}
        self._later = ThreadPoolExecutor(1, "sync snapshots") if beside else None
        self.taken = 0  # bytes of changes
        self.whole = 0  # the number of the copy that is whole; 0: none since the start
        self._copies = 0
        self._fault: OSError | StorageError | None = None  # of the thread that syncs snapshots
        finish_incoming(root, files)

    def apply(self, head: list[Any], parts: Sequence[Bytes], ack: Callable[[int], None]) -> None:
        """Apply one change. `ack`: called with the number of what has to be acknowledged, once it is durable; any
        thread. Raises OSError, StorageError: this folder is of no use before the next `begin`."""
        number, kind, *fields = head
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        name = fields[0] if fields else ""
        self.taken += sum(memoryview(part).nbytes for part in parts)
        match kind:
            case "begin":
                self._begin()
            case "keep":
                assert self._kept is not None
                self._kept.add(name)
            case "mkdir":
                self.files.make_directory(self._path(name))
            case "create":
                self._forget(name)
                self.files.write_bytes(self._path(name), b"")
            case "write":
                self._file(name).write(parts, fields[1])
            case "truncate":
                self._file(name).truncate(fields[1])
            case "rename":
                self._forget(name)
                self._forget(fields[1])
                self.files.rename(self._path(name), self._path(fields[1]))
            case "unlink":
                self._forget(name)
                if self._kept is not None and name in self._kept:
                    self._kept.remove(name)
                else:
                    with suppress(FileNotFoundError):
                        self.files.unlink(self._path(name))
            case "whole":
                self._finish(name)
                ack(number)
            case "mark":
                mark(self.root, name, self.files)
                ack(number)
            case "sync" if name and name.startswith(_SNAPSHOTS) and self._later is not None and self.whole:
                self._later.submit(self._sync_later, name, partial(ack, number))
            case "sync":
                if name:
                    self._sync(name)
                ack(number)
            case _:
                raise StorageFailed(self.root, f"the leader made a change that is not known here: {kind}")

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()
        if self._later is not None:
            self._later.shutdown()

    def _begin(self) -> None:
        for name in list(self._open):
            self._forget(name)
        self._base, self._kept, self.whole, self.taken = self.root / INCOMING, set(), 0, 0
        clear_incoming(self.root, self.files)
        self.files.make_directory(self._base / _SNAPSHOTS)

    def _finish(self, marks: str) -> None:
        """All that came takes the place of what was here: by one file that says so, then step by step."""
        assert self._kept is not None
        for name in list(self._open):
            self._forget(name)
        mark(self._base, marks, self.files)
        for name in _incoming(self.root, self.files):
            with closing(self.files.open(self._base / name)) as file:
                file.sync()
        for folder in (self._base / _SNAPSHOTS, self._base):
            with closing(self.files.open(folder)) as directory:
                directory.sync()
        stay = sorted({*self._kept, *_incoming(self.root, self.files)})
        with self.files.replacing(self._base / _COMPLETE) as temporary:
            self.files.write_bytes(temporary, json.dumps(stay, allow_nan=False).encode())
        finish_incoming(self.root, self.files)
        self._copies += 1
        self._base, self._kept, self.whole = self.root, None, self._copies

    def _sync(self, name: str) -> None:
        with closing(self.files.open(self._path(name))) as file:
            file.sync()

    def _sync_later(self, name: str, done: Callable[[], None]) -> None:
        """In the thread beside: a fault is raised by the next change."""
        try:
            self._sync(name)
        except (OSError, StorageError) as error:
            self._fault = error
        else:
            done()

    def _path(self, name: str) -> Path:
        if ".." in PurePosixPath(name).parts or mirrored(self.root, self.root / name) is None:
            raise StorageFailed(self.root, f"the leader names a file that is not its to change: {name}")
        return self._base / name

    def _file(self, name: str) -> File:
        if name not in self._open:
            if len(self._open) >= 16:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = self.files.open(self._path(name), write=True)
        return self._open[name]

    def _forget(self, name: str) -> None:
        if (file := self._open.pop(name, None)) is not None:
            file.close()


def _incoming(root: Path, files: Files) -> list[str]:
    base = root / INCOMING
    return [name for name in _contents(base, files) if name != _COMPLETE]


def clear_incoming(root: Path, files: Files = DISK) -> None:
    """Delete what a standby was being given."""
    base = root / INCOMING
    if files.is_directory(base):
        for name in [name for name in (_COMPLETE, MARK, *_incoming(root, files)) if files.identity(base / name)]:
            files.unlink(base / name)


def finish_incoming(root: Path, files: Files = DISK) -> None:
    """Let the state that a standby was given take the place of the old one, if it is whole, and delete it if not. Can
    be repeated after every crash. Raises OSError, StorageError."""
    base = root / INCOMING
    if not files.is_directory(base):
        return
    if files.identity(base / _COMPLETE) is None:
        clear_incoming(root, files)
        return
    try:
        with disk_errors(base / _COMPLETE, "read", room=True):
            stay = set(json.loads(files.read_bytes(base / _COMPLETE)))
    except (ValueError, TypeError) as error:
        failed = StorageFailed(base / _COMPLETE, "does not say which files stay")
        failed.next_step = "give an empty --state DIR: as a standby it is given all"
        raise failed from error
    files.make_directory(root / _SNAPSHOTS)
    for name in _contents(root, files):
        if name not in stay:
            files.unlink(root / name)
    for name in _incoming(root, files):
        files.rename(base / name, root / name)
    if files.identity(base / MARK) is not None:
        files.rename(base / MARK, root / MARK)
    for folder in (root / _SNAPSHOTS, root):
        with closing(files.open(folder)) as directory:
            directory.sync()
    files.delete(base / _COMPLETE)
