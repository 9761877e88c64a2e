"""A member's stages, and what makes windows wait for it (protocol I, V)."""

from typing import Any

import pytest
from coordinator_run import A
from plain_runs import plain_hello, plain_progress

from farloop.coordinator.decide.roster import Member


def training(round_index: int = 3) -> Member:
    member = Member(name=A, incarnation=1)
    member.connect(1, plain_hello(round=round_index), 5.0)
    return member


@pytest.mark.parametrize("change", [{"gone_at": 1.0}, {"absent": True}, {"start_round": None}])
def test_what_must_not_be_is_noticed(change: dict[str, Any]) -> None:
    """A connected node on its way out; one that trains without a first round."""
    odd = training()
    for name, value in change.items():
        setattr(odd, name, value)
    with pytest.raises(AssertionError):
        odd.check()


def told(*reports: tuple[float, int, float], tokens_per_step: int = 0) -> Member:
    """A node that reports at these times: inner steps, seconds blocked."""
    node = training()
    for at, steps, blocked_s in reports:
        node.report(plain_progress(inner_steps=steps, tokens=tokens_per_step * steps, blocked_s=blocked_s), at)
    return node


@pytest.mark.parametrize(
    ("law", "reports", "steps_per_s"),
    [
        ("the first step tells nothing", [(1.0, 0, 0.0), (2.0, 1, 0.0)], 0.0),
        ("it is known from the second on", [(1.0, 0, 0.0), (2.0, 1, 0.0), (4.0, 3, 0.0)], 1.0),
        # A: else who waits for slow nodes would look as slow as they are, and all would do the same steps
        ("time in which it stood still is not held against it", [(1.0, 1, 0.0), (9.0, 2, 7.0)], 1.0),
        ("reports between two steps tell nothing", [(1, 1, 0.0), (2.0, 1, 0.0), (3.0, 1, 0.0), (5.0, 3, 0.0)], 0.5),
        ("it follows what was measured last", [(1.0, 1, 0.0), (2.0, 2, 0.0), (3.0, 5, 0.0)], 2.0),
    ],
)
@pytest.mark.parametrize("tokens_per_step", [1000, 4000])
def test_a_node_s_speed(
    law: str, reports: list[tuple[float, int, float]], steps_per_s: float, tokens_per_step: int
) -> None:
    """A: H of a node is ⌊H · speed ÷ best speed⌋ steps: of steps, whatever the batch."""
    assert told(*reports, tokens_per_step=tokens_per_step).steps_per_s == steps_per_s, law


def test_steps_that_go_back_or_come_again_are_no_progress() -> None:
    """V: a node that reports 5, 6, 5, 6, … would never have stalled."""
    node = told((10.0, 5, 0.0), (11.0, 6, 0.0), (12.0, 5, 0.0), (13.0, 6, 0.0), (14.0, 6, 0.0))
    assert (node.progress_at, node.seconds_per_step) == (11.0, 1.0), "measured once"
    node.report(plain_progress(inner_steps=7), 15.0)
    assert node.progress_at == 15.0
