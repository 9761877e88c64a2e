"""Rejections, drops and losses with code and sentence; metrics.jsonl."""

import json
import logging
import os
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.observe.metrics import Metrics
from farloop.monitoring.status import (
    BytesStatus,
    DecisionEvent,
    EventStatus,
    MetricsEvent,
    TotalsEvent,
    TotalsStatus,
    dumps,
    saved_status,
)
from farloop.monitoring.status_summary import named
from farloop.runtime.log_queue import FLUSH_S, BackgroundWriter
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

# --- Event log
#
# Every event goes through `EventLog.add`: to the log, to a counter by reason for alarms and graphs, and to the
# status's list of recent events.

_log = logging.getLogger(__name__)

KEEP = 64  # most events that the status shows
_LONGEST = 300  # characters of a detail that are kept: nodes write some of it
TOLD_EVERY_S = 60.0  # interval of log lines for one reason and origin of rejected peers, with a count
_ORIGINS = 16  # most origins logged per reason and interval: a stranger can change its key

Kind = Literal["refused", "delta", "dropped", "session", "left", "stalled", "anchor", "alarm", "over", "farewell"]
"""A greeting or a delta was refused; a window closed without a node; a session ended; a node left or stalled; its
anchor did not match; an alarm began or ended; this coordinator stops."""

_UNEXPECTED = frozenset({Reason.MALFORMED, Reason.WRONG_KEY, Reason.SUPERSEDED})
"""Reasons that are logged even for a session without a known node."""

_TAKEN_OVER = frozenset({Reason.OLD_INCARNATION, Reason.NOT_A_PARTICIPANT})  # reasons for which a node is removed
_LOUD: frozenset[Kind] = frozenset({"refused", "delta", "stalled", "anchor", "alarm"})


class EventLog:
    """Recent events of one coordinator. `now` is the observer's clock."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._recent: OrderedDict[tuple[Kind, str, str], tuple[float, EventStatus]] = OrderedDict()
        """Repeated events are one, counted, at the time of the last: they must not displace others."""
        self._told: OrderedDict[tuple[Reason, str], tuple[float, int]] = OrderedDict()
        """Rejections of peers: time of the last log line, and count since."""
        self._alarms: dict[str, str] = {}
        self._greeted: dict[ev.SessionId, str] = {}  # nodes whose sessions are neither accepted nor refused yet
        self._details: dict[str, str] = {}  # of Leaves that the journal has yet to say

    def add(self, kind: Kind, node: str, reason: Reason, detail: str, now: float) -> None:
        """Note an event. `detail`: place or values; may be empty."""
        self._log_event(kind, node, reason.code, reason.sentence, detail, now)

    def turned_away(self, reason: Reason, who: str, now: float) -> None:
        """A peer was rejected. Log lines of one reason and origin have a limited rate."""
        self._metrics.rejected_peers.labels(reason.code).inc()
        self._note("refused", "", reason.code, reason.sentence, who, now)
        key = (reason, who)
        told_at, since = self._told.get(key, (float("-inf"), 0))
        while self._told and next(iter(self._told.values()))[0] < now - TOLD_EVERY_S:
            self._told.popitem(last=False)
        if now - told_at < TOLD_EVERY_S:
            self._told[key] = (told_at, since + 1)
        elif sum(known is reason for known, _ in self._told) < _ORIGINS:
            self._told.pop(key, None)
            self._told[key] = (now, 0)
            again = f" again={since}" if since else ""
            _log.warning("rejected peer who=%r reason=%s why=%r%s", who, reason.name, reason.sentence, again)

    def on_event(self, event: ev.Event, machine: CoordinatorMachine, now: float) -> None:
        match event:
            case ev.NodeHello(session=session, node=node):
                self._greeted[session] = node
            case ev.NodeMessage(session=session, node=node, message=msg.Leave() as leave):
                member = machine.members.get(node)
                if member is not None and member.session == session:
                    if node in machine.ledger.started:
                        self._details[node] = leave.detail
                    else:
                        self.add("left", node, leave.reason, leave.detail, now)
            case ev.NodeMessage(node=node, message=msg.Fetch(fragment=fragment, first=False)):
                detail = f"fragment {fragment}; a snapshot is sent"
                self._log_event("anchor", node, "anchor_mismatch", "its anchor did not match its digest", detail, now)
            case _:
                pass

    def on_command(self, command: ev.Command, now: float) -> None:
        match command:
            case ev.Accept(session=session):
                self._greeted.pop(session, None)
            case ev.Refuse(session=session, refused=refused):
                node = self._greeted.pop(session, "")
                if refused.reason is Reason.HOLDING:  # it dials again every few seconds, and the alarm says all
                    self._note("refused", node, refused.reason.code, refused.reason.sentence, "", now)
                else:
                    self.add("refused", node, refused.reason, refused.detail, now)
            case ev.Tell(node=node, message=msg.Outcome(blob=blob, reason=reason, detail=detail)):
                said = "" if detail == reason.sentence else f": {detail}"
                self.add("delta", node, reason, f"fragment {blob.fragment}, base {blob.version}{said}", now)
            case ev.Tell(node=node, message=msg.Leave(reason=Reason.WRONG_FROZEN as reason, detail=detail)):
                self.add("refused", node, reason, detail, now)
            case ev.Record(record=rec.NodeLeft(node=node, reason=reason)):
                said = self._details.pop(node, "")
                detail = "a newer start took its place" if reason in _TAKEN_OVER else said
                self.add("left", node, reason, detail, now)
            case _:
                pass

    def on_committed(self, record: rec.WindowCommitted, now: float) -> None:
        for drop in record.drops:
            self.add("dropped", drop.node, drop.reason, f"fragment {record.fragment}, window {record.version}", now)

    def on_disconnect(
        self, node: str | None, reason: Reason, detail: str, machine: CoordinatorMachine, now: float
    ) -> None:
        """A session ended; `node` None: before it was accepted."""
        member = machine.members.get(NodeId(node)) if node else None
        if member is not None and member.stage == "left":
            return  # it said so itself
        if node or reason in _UNEXPECTED:
            self.add("session", node or "", reason, "" if detail == reason.sentence else detail, now)

    def alarms(self, alarms: Mapping[str, str], now: float) -> None:
        """Note alarms that began or ended, and count each kind."""
        for what, why in alarms.items():
            if what not in self._alarms:
                self._log_event("alarm", "", kind_of_alarm(what), f"{what}: {why}", "", now)
        for what in self._alarms.keys() - alarms.keys():
            self._log_event("over", "", kind_of_alarm(what), f"{what}: resolved", "", now)
        kinds = [kind_of_alarm(what) for what in alarms]
        for kind in {*kinds, *(kind_of_alarm(what) for what in self._alarms)}:
            self._metrics.alarm.labels(kind).set(kinds.count(kind))
        self._alarms = dict(alarms)

    def recent(self, now: float) -> list[EventStatus]:
        return [{**event, "age_s": max(0.0, now - at)} for at, event in self._recent.values()]

    def _log_event(self, kind: Kind, node: str, code: str, sentence: str, detail: str, now: float) -> None:
        node, detail = shown(node), shown(detail)
        level = logging.WARNING if kind in _LOUD else logging.INFO
        _log.log(
            level, "%s node=%s reason=%s why=%r detail=%r", kind, named(node) if node else "-", code, sentence, detail
        )
        self._note(kind, node, code, sentence, detail, now)

    def _note(self, kind: Kind, node: str, code: str, sentence: str, detail: str, now: float) -> None:
        self._metrics.events.labels(kind, code).inc()
        before = self._recent.pop((kind, node, code), None)
        count = before[1]["count"] + 1 if before else 1
        event: EventStatus = {
            "age_s": 0.0, "kind": kind, "node": node, "code": code, "sentence": sentence, "detail": detail,
            "count": count,
        }  # fmt: skip
        self._recent[kind, node, code] = now, event
        if len(self._recent) > KEEP:
            self._recent.popitem(last=False)


def shown(text: str) -> str:
    """A node's text on one line, without control characters."""
    kept = text[:_LONGEST] + ("…" if len(text) > _LONGEST else "")
    return "".join(character if character.isprintable() else "?" for character in kept)


def kind_of_alarm(what: str) -> str:
    """The alarm's first word, a bounded label: 'anchor of oslo' → 'anchor'."""
    return what.partition(" ")[0]


# --- `metrics.jsonl`: a line per event, for reports. The run never stops or waits for it.
#
# The newest lines are in the file of that name. One that has grown to `PART_BYTES` is put aside under a number, as
# `metrics-000003.jsonl`, higher numbers being later; of those the last `KEEP` stay. A line that cannot be written, on a
# full disk, is dropped whole and counted.

PART_BYTES = 64 << 20
KEEP_POINTS = 16  # parts put aside, 1 GiB: about two weeks of four nodes, each with a line of 200 bytes a second
_LATEST_S = 1e10  # three centuries: a later time, or NaN, is damage
_END_BYTES = 1 << 20  # most bytes that are read to find the last line


class MetricsLog:
    """A run's metrics file, written by one process at a time, in a thread: the disk may hang. No method raises."""

    def __init__(self, path: Path, *, part_bytes: int = PART_BYTES, keep: int = KEEP_POINTS) -> None:
        self._path, self._part_bytes, self._keep = path, part_bytes, keep
        self._writer = BackgroundWriter[bytes](path.name, self._write)
        self._lost = 0
        self._fd: int | None = None
        self._size = 0  # bytes of whole lines; anything after them was cut short
        self._failing_since: int | None = None  # count of dropped lines when the current failure began

    @property
    def dropped(self) -> int:
        """Lines that were not written since this start."""
        return self._lost + self._writer.dropped

    def write(self, event: MetricsEvent | DecisionEvent) -> None:
        """Append a line, or drop it; returns at once."""
        self._writer.put(dumps(event).encode() + b"\n")

    def flush(self) -> bool:
        """Whether all lines have been written, or refused by the disk, within `FLUSH_S`."""
        return self._writer.flush(FLUSH_S)

    def close(self) -> None:
        """Write what waits, within `FLUSH_S`, and close the file; the next line opens it again."""
        if self._writer.close():
            self._close()
        else:
            _log.warning("lines dropped path=%s why='the disk does not answer'", self._path)

    def _write(self, line: bytes) -> None:
        try:
            self._append(line)
        except OSError as error:
            self._failed(error)
            return
        if self._failing_since is not None:
            _log.info("lines written again path=%s dropped=%d", self._path, self._lost - self._failing_since)
            self._failing_since = None

    def _close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    def _append(self, line: bytes) -> None:
        if self._fd is None:
            self._open()
        if self._size >= self._part_bytes:
            self._put_aside()
            self._open()
        assert self._fd is not None
        written = os.pwrite(self._fd, line, self._size)
        if written < len(line):
            # The rest did not fit either, or would not have been asked for: no half of it stays.
            os.ftruncate(self._fd, self._size)
            raise OSError(0, f"{len(line)} bytes did not fit")
        self._size += len(line)

    def _open(self) -> None:
        """Open the file, and end a line that a crash cut short."""
        self._close()
        fd = self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = self._size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            self._size += os.pwrite(fd, b"\n", size)

    def _put_aside(self) -> None:
        self._close()
        number = max(_parts(self._path), default=-1) + 1
        os.replace(self._path, self._path.with_name(f"{self._path.stem}-{number:06d}{self._path.suffix}"))
        for old, path in _parts(self._path).items():
            if old <= number - self._keep:
                path.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> None:
        if self._failing_since is None:
            self._failing_since = self._lost
            _log.warning("lines dropped path=%s why=%r", self._path, error.strerror)
        self._lost += 1
        self._close()  # a file that is gone is begun anew with the next line


def files(path: Path) -> list[Path]:
    """All files of a run's lines, oldest first; `path` is the newest, and may be a link."""
    path = Path(os.path.realpath(path))  # Path.resolve raises for a link to itself
    parts = _parts(path)
    return [parts[number] for number in sorted(parts)] + ([path] if path.exists() else [])


def last_time(path: Path) -> float:
    """`t` of the last whole line; 0 without one."""
    return next((float(event["t"]) for event in _newest_first(path) if "t" in event), 0.0)


def _newest_first(path: Path) -> Iterator[dict[str, Any]]:
    """The last events. Reads only the ends of files."""
    for part in reversed(files(path)):
        try:
            with part.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
                lines = file.read(_END_BYTES).splitlines()
        except OSError as error:
            _log.warning("clock and totals may fall back path=%s why=%r", part, error.strerror)
            continue
        yield from (event for line in reversed(lines) if (event := parsed(line)) is not None)


def parsed(line: bytes | str) -> dict[str, Any] | None:
    """The event of a line; None for a line that a crash cut short or that is damaged."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(t := event.get("t", 0.0), int | float):
        return None
    return event if 0.0 <= t <= _LATEST_S else None


def _parts(path: Path) -> dict[int, Path]:
    """Older parts by number. Raises OSError: an empty answer would overwrite the oldest."""
    name = re.compile(re.escape(path.stem) + r"-(\d{6,})" + re.escape(path.suffix))
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return {}
    return {int(match[1]): path.with_name(other) for other in names if (match := name.fullmatch(other))}


# --- What all starts of all nodes have done

BYTE_KINDS = tuple(BytesStatus.__annotations__)
_COUNTERS = ("inner_steps", "lost_steps", "tokens", "bytes_up", "bytes_down", *BYTE_KINDS)


class Totals:
    """Counters that never go back, although a node that starts again counts from 0; forgotten nodes stay in them."""

    def __init__(self, parameters: int = 0) -> None:
        """`parameters` of the model: a node that does not hold a part of it holds it all."""
        self.all, self.of = Counter[str](), defaultdict[str, Counter[str]](Counter)
        self._latest: dict[str, dict[str, int]] = {}
        self._parameters = defaultdict[str, int](lambda: parameters)
        self.began_at: float | None = None
        """Seconds since the run's start when training began; None before."""

    @classmethod
    def resumed(cls, path: Path, parameters: int) -> "Totals":
        """Go on from the last totals of a metrics file and the progress after them, or from the status of the last
        orderly end where the file has none; nodes may have gone on meanwhile."""
        totals, told = cls(parameters), list[dict[str, Any]]()
        for event in _newest_first(path):
            told.append(event)
            if event.get("event") == "totals":
                break
        else:
            status = saved_status(path.parent)
            began = last_time(path) - status["run"]["started_s"] if status and status["run"]["started_s"] else None
            told = [{**status, "event": "totals", "began_at": began}] if status else []
        for event in reversed(told):
            try:
                if event.get("event") == "totals":
                    totals._read(event)
                elif event.get("event") == "progress":
                    totals.update(str(event["node"]), event)
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
                _log.warning("totals lack a damaged line path=%s why=%r", path, error)
        return totals

    def _read(self, event: Mapping[str, Any]) -> None:
        totals, latest = event["totals"], {node["name"]: _counters(node) for node in event["nodes"]}
        moved = {**totals["bytes_by_kind"], **{name: totals[name] for name in ("tokens", "bytes_up", "bytes_down")}}
        counted = Counter({counter: int(count) for counter, count in moved.items()})
        for node, steps in totals["nodes"].items():
            own = Counter({name: int(steps[name]) for name in ("inner_steps", "lost_steps")})
            counted, self.of[node], self._parameters[node] = counted + own, own, int(steps["parameters"])
        self.all, self._latest, self.began_at = counted, latest, event["began_at"]

    def event(self, t: float) -> TotalsEvent:
        """All that `resumed` needs."""
        nodes = [{"name": node, **counters} for node, counters in self._latest.items()]
        return {"event": "totals", "t": t, "began_at": self.began_at, "totals": self.status({}), "nodes": nodes}

    def update(self, node: str, told: Mapping[str, Any]) -> None:
        """All counters of a start began at 0 together: where one has fallen, none of them goes on from before."""
        values, before = _counters(told), self._latest.get(node, {})
        if any(values[counter] < count for counter, count in before.items()):
            before = {}
        self._latest[node] = values
        for sums in (self.all, self.of[node]):
            sums.update({counter: count - before.get(counter, 0) for counter, count in values.items()})

    def status(self, parts: Mapping[str, int]) -> TotalsStatus:
        """The totals as the status has them; `parts`: the parameters of each node that holds a part of the model."""
        self._parameters.update(parts)
        return {
            "tokens": self.all["tokens"],
            "bytes_up": self.all["bytes_up"],
            "bytes_down": self.all["bytes_down"],
            "bytes_by_kind": cast(BytesStatus, {kind: self.all[kind] for kind in BYTE_KINDS}),
            "nodes": {
                node: {
                    "inner_steps": sums["inner_steps"],
                    "lost_steps": sums["lost_steps"],
                    "parameters": self._parameters[node],
                }
                for node, sums in self.of.items()
            },
        }


def _counters(told: Mapping[str, Any]) -> dict[str, int]:
    found = {**told, **told.get("bytes_by_kind", {})}
    return {counter: int(found[counter]) for counter in _COUNTERS}
