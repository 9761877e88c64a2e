"""What the executor tells whoever watches a run."""

from farloop.algo.spec import NodeId
from farloop.coordinator.aggregator import Result
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.wire.reasons import Reason


class Observer:
    """Hears what happens in a run, and decides nothing; this one records nothing."""

    def on_event(self, event: ev.Event, machine: CoordinatorMachine) -> None: ...

    def on_command(self, command: ev.Command) -> None: ...

    def on_disconnect(self, node: NodeId | None, reason: Reason, detail: str, machine: CoordinatorMachine) -> None: ...

    def on_committed(self, record: rec.WindowCommitted, result: Result, merge_s: float, journal_s: float) -> None: ...

    def refresh(self, machine: CoordinatorMachine) -> None: ...
