"""What the parts of the coordinator machine share: the run's state, the decisions of a call, and the storage hold."""

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, field

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.roster import Member
from farloop.coordinator.decide.windows import Window
from farloop.coordinator.errors import NoRoom
from farloop.wire.messages import Message

_log = logging.getLogger(__name__)

ALARM = "storage"  # raised while the storage hold lasts; says what is wrong and how to fix it


@dataclass(slots=True)
class RunState:
    ledger: Ledger  # written by `Decisions.record`, and by the machine when a delta or a commit is durable
    now: float  # monotonic seconds. Written by the machine when it is called.
    windows: dict[int, Window] = field(default_factory=dict)
    """The open windows by fragment. The machine adds and removes them, `Closing` closes them."""
    members: dict[NodeId, Member] = field(default_factory=dict)
    """Every node that ever greeted. Written by `Membership`."""
    alarms: dict[str, str] = field(default_factory=dict)  # each part writes under its own prefix
    held: str | None = None  # why nothing is committed until a person decides, and how. Written by `RollbackGuard`.
    begun: bool = True
    """Whether the run has a commit, or took as many nodes as it needs into its first round. No window closes before."""
    stopping: bool = False  # this coordinator ends. Written by the machine.

    @property
    def stands_still(self) -> bool:
        """Whether no window closes and no deadline passes."""
        return self.stopping or self.held is not None


class Decisions:
    """One list that all parts of a machine write to: the order in which they decide is that of the journal."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._commands: list[ev.Command] = []

    def do(self, command: ev.Command) -> None:
        self._commands.append(command)

    def send(self, node: NodeId, message: Message) -> None:
        self.do(ev.Tell(node=node, message=message))

    def record(self, record: rec.Record) -> None:
        """Apply a record to the ledger at once; it is in the journal before any later command runs. Raises ValueError:
        it has no valid encoding; nothing was changed."""
        try:
            rec.encode(record)
        except (OverflowError, ValueError) as error:
            raise ValueError(f"{type(record).__name__} cannot be written to the journal: {error}") from error
        self._ledger.apply(record)
        self.do(ev.Record(record=record))

    def pop_commands(self) -> list[ev.Command]:
        """All commands since the last call."""
        commands, self._commands = self._commands, []
        return commands


class StorageHold:
    """True while something waits."""

    def __init__(self, alarms: MutableMapping[str, str]) -> None:
        self._alarms = alarms
        self._waiting: dict[str, NoRoom] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, what: str, why: NoRoom) -> None:
        if not self._waiting:
            _log.warning("storage hold begin what=%r why=%r fix=%r", what, str(why), why.fix)
        self._waiting[what] = why
        self._update_alarm()

    def end(self, what: str) -> None:
        if self._waiting.pop(what, None) and not self._waiting:
            _log.info("storage hold end what=%r", what)
        self._update_alarm()

    def _update_alarm(self) -> None:
        if not self._waiting:
            self._alarms.pop(ALARM, None)
            return
        why = next(iter(self._waiting.values()))
        names = ", ".join(self._waiting)
        self._alarms[ALARM] = f"the run is held: {names} must wait: {why}; {why.fix}, and it goes on by itself"
