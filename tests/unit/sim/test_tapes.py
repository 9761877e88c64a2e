"""Machines decide by what they are told alone: told again, they answer the same, whatever went wrong in the run."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from faulty_world import run
from simulated_faults import (
    CrashCoordinator,
    CrashNode,
    CutLink,
    DrainNode,
    NodeSetup,
    PauseCoordinator,
    Scenario,
    SpoilAnchor,
)
from slow_cases import mostly_slow
from tapes import TOLD_BY, Call, Diverged, Tape, recording, replay
from toy_problem import terms_of

from farloop.algo.methods import METHODS
from farloop.algo.spec import NodeId
from farloop.coordinator.decide import events as coordinator_ev
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.node.machine import NodeMachine
from farloop.sim.network import HOSTILE_LINK

A, B, C, D = (NodeId(name) for name in "abcd")
NODES = (
    NodeSetup(name=A, seed=0),
    NodeSetup(name=B, seed=1, step_s=0.13),
    NodeSetup(name=C, seed=2, step_s=0.3),
    NodeSetup(name=D, seed=3, joins_at=2.0),
)
FAULTS = (
    CutLink(node=B, at=0.9, for_s=0.5, reset=True),
    CrashNode(node=C, at=1.8, down_s=8.0),
    PauseCoordinator(at=2.8, for_s=3.2),  # while it counts the seconds that c has to come back
    CrashCoordinator(at=8.0, down_s=0.5),
    SpoilAnchor(node=A, at=9.0),
    DrainNode(node=B, at=11.0),
)


def recorded(scenario: Scenario) -> list[Tape]:
    with recording() as tapes:
        run(scenario).check()
    return tapes


BESIDE: dict[str, dict[str, Any]] = {
    "streaming a round late": {"method": "streaming", "lag": 1},
    "decoupled by qsr": {"method": "decoupled", "h_rule": "qsr", "h_alpha": 0.06, "h_max": 8},
}
"""Options under which a machine takes other ways than under its method's defaults."""

DAYS = {name: {"method": name} for name in METHODS} | BESIDE


@pytest.mark.parametrize("choices", mostly_slow(DAYS.values(), DAYS["streaming"], DAYS["async"]), ids=DAYS)
def test_every_machine_of_a_bad_day_answers_its_tape_again(choices: dict[str, Any]) -> None:
    """Y."""
    terms = terms_of(**{"steps": 60, "min_nodes": 3, **choices})
    tapes = recorded(Scenario(terms=terms, nodes=NODES, faults=FAULTS, weather=HOSTILE_LINK, seed=3, num_samples=1000))
    coordinators = [tape for tape in tapes if tape.began.ledger]
    assert (len(coordinators), len(tapes)) == (2, 2 + len(NODES) + 1), "who was killed began anew"
    assert {call.method for tape in coordinators for call in tape.calls} == TOLD_BY[CoordinatorMachine] - {"stop"}
    for tape in tapes:
        copy = Tape.loads(tape.dumps())
        assert copy == tape, "nothing of it is lost in its text"
        replay(copy)


@pytest.fixture(scope="module")
def short() -> list[Tape]:
    """The tapes of a run in which nothing goes wrong: the coordinator's first."""
    return recorded(Scenario(terms=terms_of("decoupled")))


def other_time(call: Call) -> Call:
    return dataclasses.replace(call, told=(*call.told[:-1], 1e6))


def other_answer(call: Call) -> Call:
    return dataclasses.replace(call, answer=call.answer[:-1])


def other_looks(call: Call) -> Call:
    return dataclasses.replace(call, shows=(*call.shows[:-1], (9, 9, 9)))


@pytest.mark.parametrize("change", [other_time, other_answer, other_looks])
def test_a_machine_that_answers_otherwise_is_noticed(short: list[Tape], change: Callable[[Call], Call]) -> None:
    """The replay itself: it says where the two part."""
    tape = short[0]
    number = next(
        number
        for number, call in enumerate(tape.calls)
        if call.told and isinstance(call.told[0], coordinator_ev.InputStored) and len(call.answer) > 0
    )
    calls = [*tape.calls[:number], change(tape.calls[number]), *tape.calls[number + 1 :]]
    with pytest.raises(Diverged, match=rf"call \d+ of {len(calls)}, handle\(InputStored"):
        replay(Tape(tape.began, calls))


@pytest.mark.parametrize("machine", TOLD_BY)
def test_a_tape_holds_all_that_a_machine_can_be_told(machine: Any) -> None:
    """A new way to tell it something has to be on tape too."""
    methods = {name for name, value in vars(machine).items() if callable(value) and not name.startswith("_")}
    reads = {
        CoordinatorMachine: {"check", "next_timer", "believes", "revision_for"},
        NodeMachine: {"check", "foresee", "lr_after", "next_update", "own_tau", "terms_in", "terms_of", "terms_at"},
    }[machine]
    assert methods == TOLD_BY[machine] | reads
