"""Commands and records of one call of the machine, in order. Records take effect in the ledger at once."""

from farloop.algo.spec import NodeId
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.wire.messages import Message


class Decisions:
    """One list that all parts of a machine write to: the order in which they decide is that of the journal."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._commands: list[ev.Command] = []

    def do(self, command: ev.Command) -> None:
        """The shell is to do this, after all that came before."""
        self._commands.append(command)

    def tell(self, node: NodeId, message: Message) -> None:
        """A node is to hear this."""
        self.do(ev.Tell(node=node, message=message))

    def record(self, record: rec.Record) -> None:
        """This is so from now on: in the ledger at once, in the journal before any later command is carried out.
        Raises ValueError: no bytes can say it; nothing was changed. A ledger that knew it could not be written,
        either."""
        try:
            rec.encode(record)
        except (OverflowError, ValueError) as error:
            raise ValueError(f"{type(record).__name__} cannot be written to the journal: {error}") from error
        self._ledger.apply(record)
        self.do(ev.Record(record=record))

    def take(self) -> list[ev.Command]:
        """All commands since the last call."""
        commands, self._commands = self._commands, []
        return commands
