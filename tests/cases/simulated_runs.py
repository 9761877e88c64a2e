"""Whole simulated runs, each with its checks."""

import dataclasses
from typing import Any

from faulty_world import run
from simulated_faults import Fault, Scenario
from simulated_outcome import Outcome
from toy_problem import terms_of

_FIELDS = {field.name for field in dataclasses.fields(Scenario)}


def scenario_of(method: str, *faults: Fault, **given: Any) -> Scenario:
    """What is given by the name of a field of `Scenario` is that field; everything else is of the terms."""
    fields = {name: value for name, value in given.items() if name in _FIELDS}
    choices = {name: value for name, value in given.items() if name not in _FIELDS}
    return Scenario(terms=terms_of(method, **choices), faults=faults, **fields)


def simulate(method: str, *faults: Fault, **given: Any) -> Outcome:
    """The outcome of `scenario_of` the same, with the invariants of every run checked."""
    outcome = run(scenario_of(method, *faults, **given))
    outcome.check()
    return outcome
