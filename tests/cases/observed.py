"""A coordinator's machine with nodes, at a time that tests move by hand, for tests of what is told about a run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from plain_runs import plain_hello, plain_offer

from farloop.algo.schedule import opening_rounds
from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.wire import messages as msg


def begun(spec: RunSpec) -> Ledger:
    return Ledger.begin(rec.RunStarted(spec=spec, epoch=1, rounds=opening_rounds(spec)))


class Watched:
    """A machine; observers override `on_event`, `on_command` and `on_committed`. Commits are done at once."""

    def __init__(self, ledger: Ledger, now: float = 0.0) -> None:
        self.now = now
        self.machine = CoordinatorMachine(ledger, now=now)

    def on_event(self, event: ev.Event) -> None:
        """Before the machine handles it."""

    def on_command(self, command: ev.Command) -> None:
        """Of all commands."""

    def on_committed(self, record: rec.WindowCommitted) -> None:
        """Before the machine hears that it is done."""

    def handle(self, event: ev.Event) -> list[ev.Command]:
        self.on_event(event)
        return self.follow(self.machine.handle(event, self.now))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.follow(self.machine.handle_timer(self.now))

    def follow(self, commands: list[ev.Command]) -> list[ev.Command]:
        for command in commands:
            self.on_command(command)
            if isinstance(command, ev.Commit):
                record = dataclasses.replace(command.draft, update_size=77, anchor_digest=5)
                self.on_committed(record)
                self.handle(ev.CommitDone(record=record))
        return commands

    def join(self, node: NodeId, session: int = 1, **hello: Any) -> list[ev.Command]:
        message = plain_hello(node=node, device="cpu", **hello)
        return self.handle(ev.NodeHello(session=session, node=node, hello=message))

    def say(self, node: NodeId, message: msg.Message, session: int = 1) -> list[ev.Command]:
        return self.handle(ev.NodeMessage(session=session, node=node, message=message))

    def offer(self, node: NodeId, fragment: int = 1) -> msg.Offer:
        """The node's delta for the open window."""
        window = self.machine.windows[fragment].terms.window
        return plain_offer(node, window, fragment=fragment, seq=window, norm_sq=4.0)

    def deliver(self, node: NodeId, fragment: int = 1) -> None:
        self.handle(ev.InputStored(offer=self.offer(node, fragment)))


def lines_of(file: Path) -> list[dict[str, Any]]:
    """The events in a file of lines; none if it is not there."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
