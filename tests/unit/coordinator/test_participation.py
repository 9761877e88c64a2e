"""A run does not go on with a few while many are live: it is said, and held (protocol, Participation)."""

import dataclasses
from typing import Any

import pytest
from coordinator_run import A, B, C, D, Run
from plain_runs import plain_progress

from farloop.algo.spec import RunSpec
from farloop.coordinator.decide.closing import ALARM, ROUNDS
from farloop.wire.messages import NodeState

NODES = (A, B, C, D)
REPORT = plain_progress(position=0.0, inner_steps=0, tokens=0, loss=None, tokens_per_s=0.0, compute_share=0.0)


class Served(Run):
    """Nodes that train; every window is served by those of them who are good, and refused to the others."""

    def __init__(self, spec: RunSpec, nodes: str = "abcd", **changes: Any) -> None:
        super().__init__(spec, nodes, at_once=True, **{"steps": 1000, **changes})

    def rounds(self, count: int, good: str) -> None:
        """Windows of each fragment, in the order of the slots that are due."""
        for fragment in (1, 0) * count:
            version = self.ledger.versions[fragment]
            for node in sorted(self.sessions, key=lambda node: node in good):
                if self.ledger.versions[fragment] == version and node in self.missing(fragment):
                    if node in good:
                        self.store(node, fragment)
                    else:
                        self.spoil(node, fragment)

    @property
    def round(self) -> int:
        return self.ledger.current_round

    @property
    def held(self) -> bool:
        return self.machine.guard.holds

    @property
    def alarm(self) -> str:
        return self.alarms.get(ALARM, "")


@pytest.fixture
def held(spec: RunSpec) -> Served:
    """Only a is merged."""
    run = Served(spec)
    run.rounds(12, "a")
    assert run.held
    return run


@pytest.mark.parametrize(("nodes", "good", "share"), [("abcd", "abcd", 1.0), ("abcd", "ab", 0.5), ("a", "a", 1.0)])
def test_half_of_them_is_enough(spec: RunSpec, nodes: str, good: str, share: float) -> None:
    run = Served(spec, nodes)
    run.rounds(15, good)
    assert run.round >= 12 and not run.held and not run.alarm and run.machine.guard.share() == share


def test_a_run_of_which_only_one_of_four_is_merged_is_held_and_says_who_is_left_out(spec: RunSpec) -> None:
    run = Served(spec)
    run.rounds(2, "abcd")
    run.rounds(20, "a")
    assert run.held
    assert run.alarm.startswith(f"3 of 4 live nodes were merged in none of the last {ROUNDS} rounds (b, c, d)")
    held_at = run.round
    assert held_at <= 2 + ROUNDS + 2, "not for long without them"
    run.rounds(5, "a")
    assert run.round == held_at and run.held


def test_a_run_goes_on_when_who_was_left_out_is_merged_again(held: Served) -> None:
    before = held.round
    for node in (B, C):  # back with fresh sessions: the windows that were held take them in again
        held.part(node)
        held.greet(node, round=before)
    held.rounds(4, "abc")
    assert not held.held and not held.alarm and held.round > before


def test_a_run_goes_on_when_who_was_left_out_leaves(held: Served) -> None:
    versions = list(held.ledger.versions)
    for node in (B, C, D):
        held.leave(node)
    assert not held.held and not held.alarm and held.ledger.versions != versions, "what was held is committed"


def test_when_no_node_is_left_nothing_is_wrong_any_more(held: Served) -> None:
    for node in NODES:
        held.part(node)
    assert not held.held and not held.alarm


@pytest.mark.parametrize("state", ["draining", "paused"])
def test_who_has_reason_not_to_send_is_not_missed(spec: RunSpec, state: NodeState) -> None:
    run = Served(spec)
    for node in (B, C, D):
        run.say(node, dataclasses.replace(REPORT, state=state))
    run.rounds(12, "a")
    assert not run.held and not run.alarm


def test_who_is_gone_is_not_missed(spec: RunSpec) -> None:
    """A run may shrink to one node."""
    run = Served(spec)
    run.play("b parts SILENT; c parts SILENT; d parts SILENT; 0s")
    run.rounds(12, "a")
    assert run.round >= 10 and not run.held and not run.alarm


def test_a_restart_gives_everybody_the_same_time_again(spec: RunSpec) -> None:
    run = Served(spec)
    run.rounds(ROUNDS, "a")
    run.restart()
    for node in NODES:
        run.greet(node, round=run.round)
    run.rounds(1, "a")
    assert not run.held
    run.rounds(12, "a")
    assert run.held


def test_with_a_quorum_it_is_said_and_nothing_is_held(spec: RunSpec) -> None:
    run = Served(spec, quorum=1)
    run.rounds(12, "a")
    assert run.round >= 10 and not run.held and run.alarm.endswith("the run goes on with the others")


@pytest.mark.parametrize(("share", "held"), [(0.0, False), (0.2, False), (0.3, True)])
def test_the_share_can_be_chosen(spec: RunSpec, share: float, held: bool) -> None:
    run = Served(spec, machine={"floor_share": share})
    run.rounds(14, "a")
    assert run.held is held


def test_a_window_that_lacks_nothing_any_more_says_nothing(spec: RunSpec) -> None:
    run = Served(spec, "ab", floor=2)
    run.play("a sends 1; b parts SILENT; 0s")
    lacking = "window 1 is held with 1 of the 2 contributions it needs, without b (silent)"
    assert run.alarms["floor of fragment 1"].startswith(lacking) and run.ledger.versions == [0, 0]
    run.play("b returns; b sends 1")
    assert run.ledger.versions[1] == 1 and "floor of fragment 1" not in run.alarms
