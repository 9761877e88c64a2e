"""Tapes of machines: what one was told and what it answered, call by call; and the same told to a fresh one.

A machine that decides by anything but what it is told, be it a clock, a random number or the order of a set, answers
otherwise when it is told again. A tape goes through text and can be replayed in another process, where strings hash to
other numbers.
"""

import dataclasses
import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any
from unittest import mock

from farloop.coordinator import daemon
from farloop.coordinator.decide import events as coordinator_ev
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.records import LedgerSaved
from farloop.node import events as node_ev
from farloop.node import executor
from farloop.node.machine import NodeMachine
from farloop.sim import world as simulated_world

TOLD_BY = {
    CoordinatorMachine: {"start", "handle", "handle_timer", "clock_jumped", "stop"},
    NodeMachine: {"handle", "set_digests"},
}
"""Methods by which a machine is told: all that a tape has to hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """What a machine was made of: by name, and a coordinator's ledger as it was then."""

    ledger: LedgerSaved | None
    named: tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a machine."""

    method: str
    told: tuple[object, ...]
    answer: tuple[object, ...]
    """Commands."""
    shows: tuple[object, ...]
    """What a shell reads of the machine afterwards."""


@dataclass(slots=True)
class Tape:
    """A machine's life."""

    began: Began
    calls: list[Call] = dataclasses.field(default_factory=list)

    def dumps(self) -> str:
        """One line for what it was made of, and one for every call."""
        return "\n".join(json.dumps(_to_json(part)) for part in (self.began, *self.calls)) + "\n"

    @classmethod
    def loads(cls, text: str) -> "Tape":
        """The way back."""
        began, *calls = (_from_json(json.loads(line)) for line in text.splitlines())
        return cls(began, calls)


class Diverged(AssertionError):
    """A machine did not answer as its tape says."""


def replay(tape: Tape) -> None:
    """Tell a fresh machine all of it. Raises Diverged at the first answer that differs."""
    machine = _fresh(tape.began)
    for number, call in enumerate(tape.calls):
        answer = tuple(getattr(machine, call.method)(*call.told) or ())
        machine.check()
        for what, told, again in (("answer", call.answer, answer), ("shows", call.shows, _shown(machine))):
            if told != again:
                differ = [pair for pair in zip(told, again, strict=False) if pair[0] != pair[1]]
                raise Diverged(
                    f"call {number} of {len(tape.calls)}, {call.method}{call.told}: {what} has {len(told)} parts on "
                    f"tape and {len(again)} now; the first that differ: {differ[:1]}"
                )


def _fresh(began: Began) -> NodeMachine | CoordinatorMachine:
    named: dict[str, Any] = dict(began.named)
    if began.ledger is None:
        return NodeMachine(**named)
    return CoordinatorMachine(Ledger.resume(began.ledger), **named)


def _shown(machine: NodeMachine | CoordinatorMachine) -> tuple[object, ...]:
    if isinstance(machine, CoordinatorMachine):
        return (machine.next_timer(), tuple(machine.awaited), tuple(machine.ledger.versions))
    rate = machine.lr if machine.running else None
    return (machine.stage, machine.waiting, machine.position, rate, machine.versions, machine.lost_steps)


# --- recording


class TapedNode(NodeMachine):
    """A node's machine that keeps a tape."""

    def __init__(self, tapes: list[Tape], **named: Any) -> None:
        self.tape = Tape(Began(ledger=None, named=tuple(named.items())))
        tapes.append(self.tape)
        super().__init__(**named)

    def set_digests(self, frozen: int, unsaved: int) -> None:
        super().set_digests(frozen, unsaved)
        _note(self, self.tape, "set_digests", (frozen, unsaved), ())

    def handle(self, event: node_ev.Event) -> list[node_ev.Command]:
        answer = super().handle(event)
        _note(self, self.tape, "handle", (event,), answer)
        return answer


class TapedCoordinator(CoordinatorMachine):
    """A coordinator's machine that keeps a tape."""

    def __init__(self, tapes: list[Tape], ledger: Ledger, **named: Any) -> None:
        self.tape = Tape(Began(ledger=ledger.saved(), named=tuple(named.items())))
        tapes.append(self.tape)
        super().__init__(ledger, **named)

    def start(self) -> list[coordinator_ev.Command]:
        answer = super().start()
        _note(self, self.tape, "start", (), answer)
        return answer

    def handle(self, event: coordinator_ev.Event, now: float) -> list[coordinator_ev.Command]:
        answer = super().handle(event, now)
        _note(self, self.tape, "handle", (event, now), answer)
        return answer

    def handle_timer(self, now: float) -> list[coordinator_ev.Command]:
        answer = super().handle_timer(now)
        _note(self, self.tape, "handle_timer", (now,), answer)
        return answer

    def clock_jumped(self, seconds: float) -> None:
        super().clock_jumped(seconds)
        _note(self, self.tape, "clock_jumped", (seconds,), ())

    def stop(self) -> None:
        super().stop()
        _note(self, self.tape, "stop", (), ())


def _note(
    machine: NodeMachine | CoordinatorMachine,
    tape: Tape,
    method: str,
    told: tuple[object, ...],
    answer: Sequence[object],
) -> None:
    tape.calls.append(Call(method=method, told=told, answer=tuple(answer), shows=_shown(machine)))


@contextmanager
def recording() -> Iterator[list[Tape]]:
    """Machines that are made meanwhile, by daemons or by the simulator's actors, are on tape."""
    tapes: list[Tape] = []
    with ExitStack() as stack:
        for shell in (daemon, simulated_world):
            stack.enter_context(mock.patch.object(shell, "CoordinatorMachine", partial(TapedCoordinator, tapes)))
        stack.enter_context(mock.patch.object(executor, "NodeMachine", partial(TapedNode, tapes)))
        yield tapes


# --- text


def _to_json(value: object) -> Any:
    """Values of the machines' words: frozen dataclasses of plain values, enums, bytes and tuples."""
    if isinstance(value, Enum):
        return {"enum": _path(type(value)), "name": value.name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, tuple):
        return [_to_json(item) for item in value]
    assert dataclasses.is_dataclass(value) and not isinstance(value, type), f"{value!r} is no word of a machine"
    fields = {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return {"type": _path(type(value)), "fields": fields}


def _from_json(value: Any) -> Any:
    match value:
        case list():
            return tuple(_from_json(item) for item in value)
        case {"enum": path, "name": name}:
            return _class_at(path)[name]
        case {"bytes": digits}:
            return bytes.fromhex(digits)
        case {"type": path, "fields": fields}:
            return _class_at(path)(**{name: _from_json(item) for name, item in fields.items()})
        case _:
            return value


def _path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_at(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
