"""What was refused, dropped, lost or left, and why: each with a code and a sentence, told in three places at once.

In the log as it happens, in a counter by reason for alarms and graphs, and in a short list for who looks at the status.
Whatever ends a node's part in something comes through `Happenings.told`: no reason is known in one place alone.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from farloop.algo.spec import NodeId
from farloop.coordinator import events as ev
from farloop.coordinator import records as rec
from farloop.coordinator.machine import CoordinatorMachine
from farloop.coordinator.metrics import Metrics
from farloop.monitoring.gist import named
from farloop.monitoring.status import HappeningStatus
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

_log = logging.getLogger(__name__)

KEEP = 64
"""Happenings that the status shows at most."""

_LONGEST = 300
"""Characters of a detail that are kept: some of it comes from nodes."""

Kind = Literal["refused", "delta", "dropped", "session", "left", "stalled", "anchor", "alarm", "over", "farewell"]
"""A greeting was refused; a delta was, before its window closed; a window closed without a node; a session ended; a
node left; it stands still; its anchor did not match; an alarm began, or is over; this coordinator says good-bye."""

_UNEXPECTED = frozenset({Reason.MALFORMED, Reason.WRONG_KEY, Reason.SUPERSEDED})
"""Why a session ends that is worth a line even if no node was known by it; the rest are strangers who hung up."""

_TAKEN_OVER = frozenset({Reason.OLD_INCARNATION, Reason.NOT_A_PARTICIPANT})
"""Why a node has left that did not say so itself."""

_LOUD: frozenset[Kind] = frozenset({"refused", "delta", "stalled", "anchor", "alarm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Happening:
    at: float
    kind: Kind
    node: str
    code: str
    sentence: str
    detail: str
    count: int


class Happenings:
    """All of one coordinator. `now` is the observer's clock."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._recent: OrderedDict[tuple[Kind, str, str], _Happening] = OrderedDict()
        """What repeats itself is one happening, counted, at the time of the last: it must not push out the others."""
        self._alarms: dict[str, str] = {}
        self._greeted: dict[ev.SessionId, str] = {}
        """Who greeted in sessions that are neither accepted nor refused yet."""

    def told(self, kind: Kind, node: str, reason: Reason, detail: str, now: float) -> None:
        """Something ended, for this reason. `detail`: where, or with what values; may be empty."""
        self._tell(kind, node, reason.code, reason.sentence, detail, now)

    def turned_away(self, reason: Reason, who: str, now: float) -> None:
        """Somebody was not heard. `Refusals` writes the log: whoever floods the port does not flood that too."""
        self._note("refused", "", reason.code, reason.sentence, who, now)

    # --- what is seen

    def saw(self, event: ev.Event, machine: CoordinatorMachine, now: float) -> None:
        """An event on its way to the machine."""
        match event:
            case ev.Greeted(session=session, node=node):
                self._greeted[session] = node
            case ev.Heard(session=session, node=node, message=msg.Leave() as leave):
                member = machine.members.get(node)
                if member is not None and member.session == session and node not in machine.ledger.started:
                    self.told("left", node, leave.reason, leave.detail, now)  # else the journal says it
            case ev.Heard(node=node, message=msg.Fetch(fragment=fragment, first=False)):
                detail = f"fragment {fragment}; a snapshot is sent"
                self._tell("anchor", node, "anchor_mismatch", "its anchor did not match its digest", detail, now)
            case _:
                pass

    def carries_out(self, command: ev.Command, now: float) -> None:
        """A command of the machine, as it is carried out."""
        match command:
            case ev.Accept(session=session):
                self._greeted.pop(session, None)
            case ev.Refuse(session=session, refused=refused):
                node = self._greeted.pop(session, "")
                if refused.reason is Reason.HOLDING:  # it dials again every few seconds, and the alarm says all
                    self._note("refused", node, refused.reason.code, refused.reason.sentence, "", now)
                else:
                    self.told("refused", node, refused.reason, refused.detail, now)
            case ev.Tell(node=node, message=msg.Outcome(blob=blob, reason=reason, detail=detail)):
                said = "" if detail == reason.sentence else f": {detail}"
                self.told("delta", node, reason, f"fragment {blob.fragment}, base {blob.version}{said}", now)
            case ev.Record(record=rec.NodeLeft(node=node, reason=reason)):
                detail = "a newer start took its place" if reason in _TAKEN_OVER else ""
                self.told("left", node, reason, detail, now)
            case _:
                pass

    def committed(self, record: rec.WindowCommitted, now: float) -> None:
        """A window closed, with these and without those."""
        for drop in record.drops:
            self.told("dropped", drop.node, drop.reason, f"fragment {record.fragment}, window {record.version}", now)

    def parted(self, node: str | None, reason: Reason, detail: str, machine: CoordinatorMachine, now: float) -> None:
        """A session ended; `node` None: before it was anybody's."""
        member = machine.members.get(NodeId(node)) if node else None
        if member is not None and member.stage == "left":
            return  # it said so itself
        if node or reason in _UNEXPECTED:
            self.told("session", node or "", reason, "" if detail == reason.sentence else detail, now)

    def alarms(self, alarms: Mapping[str, str], now: float) -> None:
        """These are on now: what began is told, and what is over, and how many of each kind there are."""
        for what, why in alarms.items():
            if what not in self._alarms:
                self._tell("alarm", "", kind_of_alarm(what), f"{what}: {why}", "", now)
        for what in self._alarms.keys() - alarms.keys():
            self._tell("over", "", kind_of_alarm(what), f"{what}: mended", "", now)
        kinds = [kind_of_alarm(what) for what in alarms]
        for kind in {*kinds, *(kind_of_alarm(what) for what in self._alarms)}:
            self._metrics.alarm.labels(kind).set(kinds.count(kind))
        self._alarms = dict(alarms)

    # --- what is shown

    def recent(self, now: float) -> list[HappeningStatus]:
        """The last ones, oldest first."""
        return [
            {
                "age_s": max(0.0, now - happening.at),
                "kind": happening.kind,
                "node": happening.node,
                "code": happening.code,
                "sentence": happening.sentence,
                "detail": happening.detail,
                "count": happening.count,
            }
            for happening in self._recent.values()
        ]

    def _tell(self, kind: Kind, node: str, code: str, sentence: str, detail: str, now: float) -> None:
        node, detail = _shown(node), _shown(detail)
        level = logging.WARNING if kind in _LOUD else logging.INFO
        _log.log(
            level, "%s node=%s reason=%s why=%r detail=%r", kind, named(node) if node else "-", code, sentence, detail
        )
        self._note(kind, node, code, sentence, detail, now)

    def _note(self, kind: Kind, node: str, code: str, sentence: str, detail: str, now: float) -> None:
        self._metrics.happenings.labels(kind, code).inc()
        before = self._recent.pop((kind, node, code), None)
        self._recent[kind, node, code] = _Happening(
            at=now,
            kind=kind,
            node=node,
            code=code,
            sentence=sentence,
            detail=detail,
            count=before.count + 1 if before else 1,
        )
        if len(self._recent) > KEEP:
            self._recent.popitem(last=False)


def _shown(text: str) -> str:
    """What a node said, as it may go to a terminal and into a log: in one line, without control characters."""
    kept = text[:_LONGEST] + ("…" if len(text) > _LONGEST else "")
    return "".join(character if character.isprintable() else "?" for character in kept)


def kind_of_alarm(what: str) -> str:
    """Its first word: 'storage', 'anchor of oslo' → 'anchor'. Few, and known beforehand: a label of a metric."""
    return what.partition(" ")[0]
