"""Data parallel by hand: what a crash costs everybody, with and without elasticity."""

from typing import Any

import pytest

from farloop.sim.flow.outcome import Outcome
from farloop.sim.flow.scenario import Choice, Crash, FlowScenario, Group, Hub, MethodName, Model, Outage, Variant, cases
from farloop.sim.flow.simulator import play


def outcome_of(method: MethodName, *groups: Group, choice: dict[str, Any] | None = None, **fields: Any) -> Outcome:
    variants = (Variant(name=method, choice=Choice(method=method, **(choice or {}))),)
    scenario = FlowScenario(**{"steps": 1000, **fields}, nodes=groups, variants=variants)
    return play(cases(scenario)[0].setting, timeline=True)


CRASH = (Crash(group="a", at_s=100.5),)


def test_lock_step_stands_still_until_the_machine_is_back_and_the_run_has_started_again() -> None:
    """100 steps, half a step lost, 50 s of repair, 20 s of restart, 900 steps."""
    groups = Group(name="a", repair_s=50.0), Group(name="b", count=3)
    outcome = outcome_of("data-parallel", *groups, choice={"restart_s": 20.0}, crashes=CRASH)
    assert outcome.seconds == pytest.approx(100.5 + 50 + 20 + 900)
    assert outcome.down_s == pytest.approx(50.0)
    assert outcome.idle_s == pytest.approx(3 * 50 + 4 * 20)
    assert (outcome.useful_s, outcome.lost_s) == pytest.approx((4 * 1000, 4 * 0.5))
    assert outcome.lost_steps == 0  # the half step was none
    assert [machines for _, machines in outcome.timeline] == [4.0, 0.0, 4.0]
    assert [second for second, _ in outcome.timeline] == pytest.approx([0.0, 100.5, 170.5])


def test_what_came_after_the_last_checkpoint_is_done_again() -> None:
    """Checkpoints at 30, 60 and 90: ten steps of four nodes are lost."""
    groups = Group(name="a", repair_s=50.0), Group(name="b", count=3)
    outcome = outcome_of("data-parallel", *groups, choice={"restart_s": 20.0, "checkpoint_steps": 30}, crashes=CRASH)
    assert outcome.seconds == pytest.approx(100.5 + 70 + 910)
    assert (outcome.lost_steps, outcome.inner_steps) == (40, 4 * 1010)
    assert outcome.useful_s == pytest.approx(4 * 1000)
    assert outcome.outer_steps == 1000


def test_elastic_goes_on_with_those_that_are_left_after_a_pause() -> None:
    """At 100.5 s a pause of 30 s; three go on until the fourth is back at 300.5 s, which is the end of a step."""
    groups = Group(name="a", repair_s=200.0), Group(name="b", count=3)
    outcome = outcome_of("elastic", *groups, choice={"reconfigure_s": 30.0}, crashes=CRASH)
    assert outcome.seconds == pytest.approx(100.5 + 30 + 900)
    assert outcome.down_s == pytest.approx(200.0)
    assert outcome.idle_s == pytest.approx(3 * 30)
    assert outcome.useful_s == pytest.approx(4 * 100 + 3 * 170 + 4 * 730)


def test_a_cut_link_stops_all_of_data_parallel_and_is_left_behind_by_elastic() -> None:
    groups = Group(name="a"), Group(name="b", count=3)
    cut = (Outage(group="a", at_s=100.0, for_s=500.0),)
    stopped = outcome_of("data-parallel", *groups, outages=cut)
    assert stopped.seconds == pytest.approx(1500.0) and stopped.idle_s == pytest.approx(4 * 500)
    elastic = outcome_of("elastic", *groups, choice={"liveness_s": 10.0, "reconfigure_s": 30.0}, outages=cut)
    assert elastic.seconds == pytest.approx(1040.0)
    assert elastic.idle_s == pytest.approx(4 * 40 + 460)


def test_a_step_is_as_long_as_the_slowest_makes_it() -> None:
    outcome = outcome_of("data-parallel", Group(name="a"), Group(name="b", step_s=3.0))
    assert outcome.seconds == pytest.approx(3000.0)
    assert outcome.goodput == pytest.approx(4 / 6)


def test_the_exchange_takes_the_busiest_link_and_the_farthest_node() -> None:
    """4 MB of each of four nodes through 128 Mbit/s are 1 s, and as much back through their own 32 Mbit/s each."""
    groups = Group(name="a", count=3, down_gbit_s=0.032), Group(name="b", rtt_s=0.25, down_gbit_s=0.032)
    hub, model = Hub(up_gbit_s=0.128), Model(parameters=1_000_000)
    outcome = outcome_of("data-parallel", *groups, coordinator=hub, model=model)
    assert outcome.seconds == pytest.approx(1000 * (1 + 1 + 1 + 2 * 0.25))


def test_a_crash_during_a_pause_begins_it_again() -> None:
    groups = Group(name="a", repair_s=500.0), Group(name="b", count=3)
    crashes = (*CRASH, Crash(group="b", at_s=120.0))
    outcome = outcome_of("elastic", *groups, choice={"reconfigure_s": 30.0}, crashes=crashes, steps=400)
    assert outcome.timeline[:2] == ((0.0, 4.0), (100.5, 0.0))
    assert outcome.crashes == 4


def test_random_steps_cost_the_expected_maximum() -> None:
    """Of 100 lognormal durations with σ = 0.1 the greatest is about 2.5 σ above the mean."""
    outcome = outcome_of("data-parallel", Group(count=100, step_sigma=0.1), steps=2000)
    assert outcome.seconds / 2000 == pytest.approx(1.28, abs=0.02)
    assert outcome.goodput == pytest.approx(1 / 1.28, abs=0.02)
