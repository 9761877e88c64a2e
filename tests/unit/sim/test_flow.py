"""Laws that every flow case keeps, whatever goes wrong in it, and small cases worked out by hand."""

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

import pytest
import simulated_faults as frames
from faulty_world import run
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_runs import PLAIN_PROGRESS
from slow_cases import slow
from toy_problem import terms_of

from farloop.algo.methods import METHODS
from farloop.algo.spec import NodeId
from farloop.coordinator.observe.metrics import Metrics as CoordinatorMetrics
from farloop.node.metrics import Metrics as NodeMetrics
from farloop.sim.flow.links import SharedLink, Transfer
from farloop.sim.flow.outcome import Outcome
from farloop.sim.flow.scenario import (
    METHOD_NAMES,
    Crash,
    FlowScenario,
    Group,
    Hub,
    MethodName,
    Model,
    Outage,
    Published,
    Rules,
    Site,
    Sweep,
    Variant,
    cases,
)
from farloop.sim.flow.simulator import Stuck, play, run_all
from farloop.sim.network import LinkConditions
from farloop.sim.virtual_time import EventQueue

ROUGH = Group(
    count=6, step_sigma=0.2, spread=0.1, slow_share=0.05, slow_factor=4.0, crashes_per_hour=3.0, repair_s=90.0,
    outages_per_hour=3.0, outage_s=30.0, up_gbit_s=0.5, down_gbit_s=0.5, rtt_s=0.1, jitter_s=0.05, loss=0.02, site="s",
)  # fmt: skip


def flow(method: MethodName, *groups: Group, rules: Mapping[str, object] | None = None, **fields: object) -> Outcome:
    """The one case of a scenario with one variant; 600 steps unless told otherwise."""
    length = {} if "hours" in fields else {"steps": 600}
    made = Rules(**{"method": method, **(rules or {})})  # type: ignore[arg-type]
    variants = (Variant(name=method, rules=made),)
    scenario = FlowScenario(**{**length, "nodes": groups, "variants": variants, **fields})  # type: ignore[arg-type]
    (case,) = cases(scenario)
    return play(case.setting, timeline=True)


def rough(method: MethodName, seed: int = 0, **changes: object) -> Outcome:
    group = dataclasses.replace(ROUGH, **changes)  # type: ignore[arg-type]
    late = dataclasses.replace(group, name="late", count=1, joins_at_s=400.0, drains_at_s=2000.0)
    model, sites = Model(parameters=10**7), (Site(name="s", up_gbit_s=1.0),)
    return flow(method, group, late, hours=1, seed=seed, model=model, sites=sites)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_without_failures_and_limits_every_second_is_useful(method: MethodName) -> None:
    outcome = flow(method, Group(count=5, step_s=0.7))
    assert outcome.reached and outcome.goodput == pytest.approx(1.0, abs=1e-12)
    assert outcome.inner_steps == 5 * 600
    assert outcome.seconds == pytest.approx(600 * 0.7)
    assert (outcome.lost_steps, outcome.dropped, outcome.stale, outcome.crashes) == (0, 0, 0, 0)


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("examples", [3, *slow(20)])
def test_machine_seconds_are_conserved_whatever_goes_wrong(method: MethodName, examples: int) -> None:
    """Computing, idle and down are all there is: six nodes the whole hour, and one from 400 s until it has drained.

    That begins at 2000 s, takes longer if the node is down then, and ends with the hour at the latest.
    """

    @settings(max_examples=examples)
    @given(seed=st.integers(0, 1000))
    def are_conserved(seed: int) -> None:
        outcome = rough(method, seed)
        assert 6 * 3600 + 1500 - 1e-6 < outcome.machine_s < 6 * 3600 + 3200 + 1e-6
        assert 0.0 < outcome.useful_s <= outcome.compute_s * (1 + 1e-12)
        assert min(outcome.idle_s, outcome.down_s) >= 0.0

    are_conserved()


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_without_comers_and_goers_the_sum_is_exact(method: MethodName) -> None:
    group = dataclasses.replace(ROUGH, site=None)
    outcome = flow(method, group, hours=1, model=Model(parameters=10**7))
    assert outcome.compute_s + outcome.idle_s + outcome.down_s == pytest.approx(6 * 3600, rel=1e-12)
    assert outcome.crashes > 5


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_equal_settings_give_equal_outcomes_and_another_seed_gives_another(method: MethodName) -> None:
    assert rough(method) == rough(method)
    assert rough(method) != rough(method, seed=1)


@pytest.mark.parametrize(("fragments", "rounds"), [(1, 20), (3, 20)])
def test_bytes_are_those_of_the_deltas_and_updates(fragments: int, rounds: int) -> None:
    """1001 parameters in 3 fragments are 334 + 334 + 333; at 4.25 bits, whole bytes each."""
    rules = {"h": 30, "fragments": fragments, "tau": 0, "bits_up": 4.25, "bits_down": 8.0}
    outcome = flow("streaming", Group(count=4), rules=rules, model=Model(parameters=1001))
    up, down = ([532], [1001]) if fragments == 1 else ([178, 178, 177], [334, 334, 333])
    # The last slot is sent in every round, the others from the second on; no node needs the run's last update.
    assert outcome.bytes_up == 4 * (sum(up) * (rounds - 1) + up[-1])
    assert outcome.bytes_down == 4 * sum(down) * (rounds - 1)
    assert outcome.bytes_state == 0


def test_data_parallel_moves_its_gradients_at_every_step() -> None:
    outcome = flow("data-parallel", Group(count=4), model=Model(parameters=1000))
    assert (outcome.bytes_up, outcome.bytes_down) == (600 * 4 * 4000, 600 * 4 * 4000)


def test_diloco_stands_still_for_as_long_as_its_bytes_and_round_trips_take() -> None:
    """4 MB up through 8 Mbit/s, shared by two, and down at 16 Mbit/s each, ten times but for the last way down."""
    hub = Hub(up_gbit_s=0.008)
    group = Group(count=2, down_gbit_s=0.016, rtt_s=0.2)
    rules = {"h": 60, "bits_up": 16.0, "bits_down": 16.0, "commit_s": 0.5}
    outcome = flow("diloco", group, rules=rules, coordinator=hub, model=Model(parameters=2_000_000))
    up_s, down_s, trips_s = 8.0, 2.0, 1.5 * 0.2
    assert outcome.seconds == pytest.approx(600 + 10 * (up_s + trips_s + 0.5) + 9 * (down_s + 0.1))
    assert outcome.compute_s == pytest.approx(2 * 600)


def test_a_crashed_node_is_away_until_the_next_round_and_what_it_had_not_sent_is_lost() -> None:
    """Down from 75 s to 175 s; 15 steps since the send at 60 s are lost; it starts again with the round at 240 s, for
    a round takes 60 s and the others waited 10 s for it once, from 120 s to 130 s."""
    group, other = Group(name="a", repair_s=100.0), Group(name="b", count=2)
    outcome = flow("diloco", group, other, rules={"h": 60}, crashes=(Crash(group="a", at_s=75.5),))
    assert (outcome.lost_steps, outcome.crashes) == (15, 1)
    assert outcome.down_s == pytest.approx(100.0)
    nodes = [merge.nodes for merge in outcome.windows]
    assert nodes == [(0, 1, 2), (1, 2), (1, 2), *[(0, 1, 2)] * 7]
    assert [merge.at_s for merge in outcome.windows[:4]] == pytest.approx([60.0, 120.0, 180.0, 240.0])
    assert outcome.idle_s == pytest.approx(4.5)  # from 175.5 s to the boundary


def test_the_others_wait_for_a_silent_node_as_long_as_liveness_says() -> None:
    """A link is cut at 100 s; at 120 s its delta is missed; from then on it counts as silent after 30 s: at 130 s."""
    groups = Group(name="a"), Group(name="b", count=2)
    outage = Outage(group="a", at_s=100.0, for_s=1000.0)
    rules = {"h": 60, "liveness_s": 30.0}
    diloco = flow("diloco", *groups, rules=rules, outages=(outage,))
    assert [merge.at_s for merge in diloco.windows[:3]] == pytest.approx([60.0, 130.0, 190.0])
    assert diloco.windows[1].nodes == (1, 2)


def test_decoupled_nodes_go_on_behind_a_cut_link_and_their_work_is_merged_late() -> None:
    groups = Group(name="a"), Group(name="b", count=2)
    outage = Outage(group="a", at_s=100.0, for_s=90.0)
    rules = {"h": 60, "fragments": 1, "tau": 0, "per_node_h": False}
    outcome = flow("decoupled", *groups, rules=rules, outages=(outage,))
    assert outcome.goodput == pytest.approx(1.0) and outcome.idle_s == 0.0
    assert outcome.stale >= 1 and outcome.skipped >= 1
    assert [merge.at_s for merge in outcome.windows][:4] == pytest.approx([60.0, 120.0, 180.0, 240.0])


def test_the_clock_of_decoupled_does_not_run_ahead_of_its_fastest_node() -> None:
    """Late deltas ride along and make no quorum: else every one of them would use up a round."""
    outcome = flow("decoupled", Group(count=20, step_sigma=0.2), rules={"quorum": 1}, steps=3000)
    assert 0.97 * 3000 <= outcome.seconds <= 1.01 * 3000
    assert 0.0 < outcome.stale_share < 1.0


def test_a_node_that_no_window_waits_for_begins_again_from_the_anchor() -> None:
    """Nine times slower than the others, and staleness of two: it is always too late, but never out for good."""
    rules = {"h": 20, "fragments": 1, "tau": 0, "per_node_h": False, "max_staleness": 2, "quorum": 1}
    outcome = flow("decoupled", Group(count=3), Group(name="slow", step_s=9.0), rules=rules, steps=4000)
    assert outcome.goodput > 0.7 and outcome.lost_steps > 100
    assert sum(3 in merge.nodes for merge in outcome.windows) >= 1


def test_slow_nodes_do_fewer_steps_where_rounds_are_dealt_by_pace() -> None:
    groups = Group(count=3), Group(name="slow", step_s=2.0)
    dealt = flow("decoupled", *groups, rules={"h": 60})
    equal = flow("decoupled", *groups, rules={"h": 60, "per_node_h": False})
    assert dealt.stale_share < 0.2 < equal.stale_share
    assert dealt.merged > 1.2 * equal.merged


def test_a_cluster_loses_a_machine_and_starts_again_without_it() -> None:
    """Ten machines: 30 s down for all of them, then nine go on until the tenth is repaired at 400 s."""
    outcome = flow(
        "decoupled",
        Group(name="a", machines=10, repair_s=300.0),
        Group(name="b"),
        rules={"h": 60, "reconfigure_s": 30.0},
        crashes=(Crash(group="a", at_s=100.0),),
        hours=1,
    )
    assert outcome.down_s == pytest.approx(10 * 30 + 270)
    assert outcome.machine_s == pytest.approx(11 * 3600)


def test_who_leaves_in_order_counts_until_then_and_the_others_go_on() -> None:
    groups = Group(name="a", drains_at_s=90.0), Group(name="b")
    outcome = flow("diloco", *groups, rules={"h": 60})
    assert outcome.machine_s == pytest.approx(600 + 90)
    assert outcome.lost_steps == 30  # since its send at 60 s
    assert [merge.nodes for merge in outcome.windows] == [(0, 1), *[(1,)] * 9]


def test_a_late_comer_fetches_a_snapshot_and_starts_at_a_boundary() -> None:
    """8 MB at 8 Mbit/s are here at 98 s; the round that it starts with begins at 120 s."""
    groups = Group(name="a"), Group(name="b", joins_at_s=90.0, down_gbit_s=0.008)
    model = Model(parameters=2_000_000)
    rules = {"h": 60, "bits_down": 0.0}
    outcome = flow("diloco", *groups, rules=rules, model=model)
    assert outcome.bytes_state == 8_000_000
    assert [merge.nodes for merge in outcome.windows[:3]] == [(0,), (0,), (0, 1)]
    assert outcome.idle_s == pytest.approx(30.0)


def test_who_breaks_while_it_leaves_has_left() -> None:
    """Its delta of 60 s never gets through, so that at 90 s it still waits for it; at 100 s it breaks."""
    leaver = Group(name="a", drains_at_s=90.0, up_gbit_s=1e-6)
    crashes = (Crash(group="a", at_s=100.0),)
    outcome = flow("diloco", leaver, Group(name="b"), rules={"h": 60}, crashes=crashes)
    assert outcome.machine_s == pytest.approx(outcome.seconds + 100)
    assert outcome.bytes_up < 2 * 10 * 531_250_000


def test_a_run_that_everybody_left_says_so() -> None:
    with pytest.raises(Stuck, match="no node computes"):
        flow("diloco", Group(drains_at_s=100.0))


def lockstep(method: MethodName, *groups: Group, **fields: Any) -> Outcome:
    return flow(method, *groups, **{"steps": 1000, **fields})


CRASH = (Crash(group="a", at_s=100.5),)


def test_lock_step_stands_still_until_the_machine_is_back_and_the_run_has_started_again() -> None:
    """100 steps, half a step lost, 50 s of repair, 20 s of restart, 900 steps."""
    groups = Group(name="a", repair_s=50.0), Group(name="b", count=3)
    outcome = lockstep("data-parallel", *groups, rules={"restart_s": 20.0}, crashes=CRASH)
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
    outcome = lockstep("data-parallel", *groups, rules={"restart_s": 20.0, "checkpoint_steps": 30}, crashes=CRASH)
    assert outcome.seconds == pytest.approx(100.5 + 70 + 910)
    assert (outcome.lost_steps, outcome.inner_steps) == (40, 4 * 1010)
    assert outcome.useful_s == pytest.approx(4 * 1000)
    assert outcome.outer_steps == 1000


def test_elastic_goes_on_with_those_that_are_left_after_a_pause() -> None:
    """At 100.5 s a pause of 30 s; three go on until the fourth is back at 300.5 s, which is the end of a step."""
    groups = Group(name="a", repair_s=200.0), Group(name="b", count=3)
    outcome = lockstep("elastic", *groups, rules={"reconfigure_s": 30.0}, crashes=CRASH)
    assert outcome.seconds == pytest.approx(100.5 + 30 + 900)
    assert outcome.down_s == pytest.approx(200.0)
    assert outcome.idle_s == pytest.approx(3 * 30)
    assert outcome.useful_s == pytest.approx(4 * 100 + 3 * 170 + 4 * 730)


def test_a_cut_link_stops_all_of_data_parallel_and_is_left_behind_by_elastic() -> None:
    groups = Group(name="a"), Group(name="b", count=3)
    cut = (Outage(group="a", at_s=100.0, for_s=500.0),)
    stopped = lockstep("data-parallel", *groups, outages=cut)
    assert stopped.seconds == pytest.approx(1500.0) and stopped.idle_s == pytest.approx(4 * 500)
    elastic = lockstep("elastic", *groups, rules={"liveness_s": 10.0, "reconfigure_s": 30.0}, outages=cut)
    assert elastic.seconds == pytest.approx(1040.0)
    assert elastic.idle_s == pytest.approx(4 * 40 + 460)


def test_a_step_is_as_long_as_the_slowest_makes_it() -> None:
    outcome = lockstep("data-parallel", Group(name="a"), Group(name="b", step_s=3.0))
    assert outcome.seconds == pytest.approx(3000.0)
    assert outcome.goodput == pytest.approx(4 / 6)


def test_the_exchange_takes_the_busiest_link_and_the_farthest_node() -> None:
    """4 MB of each of four nodes through 128 Mbit/s are 1 s, and as much back through their own 32 Mbit/s each."""
    groups = Group(name="a", count=3, down_gbit_s=0.032), Group(name="b", rtt_s=0.25, down_gbit_s=0.032)
    hub, model = Hub(up_gbit_s=0.128), Model(parameters=1_000_000)
    outcome = lockstep("data-parallel", *groups, coordinator=hub, model=model)
    assert outcome.seconds == pytest.approx(1000 * (1 + 1 + 1 + 2 * 0.25))


def test_a_crash_during_a_pause_begins_it_again() -> None:
    groups = Group(name="a", repair_s=500.0), Group(name="b", count=3)
    crashes = (*CRASH, Crash(group="b", at_s=120.0))
    outcome = lockstep("elastic", *groups, rules={"reconfigure_s": 30.0}, crashes=crashes, steps=400)
    assert outcome.timeline[:2] == ((0.0, 4.0), (100.5, 0.0))
    assert outcome.crashes == 4


def test_random_steps_cost_the_expected_maximum() -> None:
    """Of 100 lognormal durations with σ = 0.1 the greatest is about 2.5 σ above the mean."""
    outcome = lockstep("data-parallel", Group(count=100, step_sigma=0.1), steps=2000)
    assert outcome.seconds / 2000 == pytest.approx(1.28, abs=0.02)
    assert outcome.goodput == pytest.approx(1 / 1.28, abs=0.02)


class Log:
    """An agenda with a pipe, and the times at which things end."""

    def __init__(self, bytes_per_s: float = 100.0) -> None:
        self.agenda = EventQueue()
        self.pipe = SharedLink(self.agenda, bytes_per_s)
        self.ends: dict[str, float] = {}

    def note(self, name: str) -> None:
        assert name not in self.ends
        self.ends[name] = self.agenda.now

    def carry(self, name: str, size: int, at: float = 0.0) -> None:
        def begin() -> None:
            self.pipe.carry(size, lambda: self.note(name))

        self.agenda.at(at, begin)

    def play(self) -> dict[str, float]:
        while self.agenda.step():
            pass
        return self.ends


def test_who_comes_later_slows_the_first_only_from_then_on() -> None:
    """a: 500 bytes alone in 5 s, then 500 at half the rate until 15 s; b has 500 by then and 500 left, alone."""
    log = Log()
    log.carry("a", 1000)
    log.carry("b", 1000, at=5.0)
    assert log.play() == pytest.approx({"a": 15.0, "b": 20.0})


def test_what_is_given_up_frees_its_share() -> None:
    log = Log()
    log.carry("a", 1000)
    loads = [log.pipe.carry(1000, lambda: log.note("b"))]
    left: list[float] = []
    log.agenda.at(4.0, lambda: left.append(log.pipe.cancel(loads[0])))
    assert log.play() == pytest.approx({"a": 12.0})
    assert left == pytest.approx([800.0])


def test_a_cut_link_stands_still_and_forgets_nothing() -> None:
    log = Log()
    log.carry("a", 1000)
    log.agenda.at(3.0, lambda: log.pipe.set_cut(now_cut=True))
    log.agenda.at(50.0, lambda: log.pipe.set_cut(now_cut=False))
    assert log.play() == pytest.approx({"a": 57.0})


def test_the_slowest_link_on_the_way_tells() -> None:
    log = Log(100.0)
    own = [SharedLink(log.agenda, rate) for rate in (10.0, 1000.0)]
    for name, pipe in zip("ab", own, strict=True):
        Transfer([pipe, log.pipe], 1000, lambda name=name: log.note(name))  # type: ignore[misc]
    assert log.play() == pytest.approx({"a": 100.0, "b": 20.0})


def test_a_way_without_links_takes_no_time() -> None:
    log = Log()
    transfer = Transfer([log.pipe], 1000, lambda: log.note("a"))
    log.agenda.at(2.5, lambda: log.ends.update(carried=float(transfer.cancel())))
    assert log.play() == {"carried": 250.0}


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.0, 50.0)), min_size=1, max_size=20))
def test_a_busy_link_carries_at_its_full_rate_and_never_at_more(jobs: list[tuple[int, float]]) -> None:
    """The time at which everything is through is that of a queue of the same work: sharing wastes nothing."""
    log = Log()
    for number, (size, at) in enumerate(jobs):
        log.carry(str(number), size, at)
    ends = log.play()
    free_at = 0.0
    for size, at in sorted(jobs, key=lambda job: job[1]):
        free_at = max(free_at, at) + size / 100.0
    assert max(ends.values()) == pytest.approx(free_at)
    for number, (size, at) in enumerate(jobs):
        assert ends[str(number)] >= at + size / 100.0 - 1e-6


@given(st.lists(st.integers(1, 10_000), min_size=2, max_size=10))
def test_of_those_that_begin_together_the_smaller_ends_first(sizes: list[int]) -> None:
    log = Log()
    for number, size in enumerate(sizes):
        log.carry(str(number), size)
    ends = log.play()
    order = sorted(range(len(sizes)), key=lambda number: sizes[number])
    assert [ends[str(n)] for n in order] == sorted(ends.values())


def scenario_of(**fields: Any) -> FlowScenario:
    return FlowScenario(**{"steps": 100, **fields})


@pytest.mark.parametrize("method", ["diloco", "streaming", "decoupled"])
def test_what_stays_open_is_what_the_table_of_methods_says(method: MethodName) -> None:
    rules, row = Rules(method=method), METHODS[method]
    for name in ("h", "tau", "quorum", "max_staleness", "max_stale_rounds", "per_node_h"):
        assert getattr(rules, name) == getattr(row, name), name
    assert rules.waits == (row.on_late_update == "wait")


def test_what_is_given_wins() -> None:
    rules = Rules(method="decoupled", h=12, tau=0, quorum=4, per_node_h=False, bits_up=1.5)
    assert (rules.h, rules.tau, rules.quorum, rules.per_node_h, rules.bits_up) == (12, 0, 4, False, 1.5)


def test_a_swept_lag_takes_its_tau_along_unless_one_was_given() -> None:
    sweep, (open_, given) = (
        Sweep(key="lag", values=(0, 1)),
        (Rules(method="streaming"), Rules(method="streaming", tau=3)),
    )
    found = cases(scenario_of(variants=(Variant(name="x", rules=open_),), sweep=sweep))
    assert [(case.setting.rules.lag, case.setting.rules.tau) for case in found] == [
        (0, METHODS["streaming"].tau),
        (1, 0),
    ]
    with pytest.raises(ValueError, match="values: lag cannot be 1: tau is 3; with lag = 1 it is 0"):
        scenario_of(variants=(Variant(name="x", rules=given),), sweep=sweep)


def test_cases_are_swept_values_times_variants_times_seeds() -> None:
    variants = tuple(Variant(name=method, rules=Rules(method=method)) for method in METHOD_NAMES[:2])
    found = cases(
        scenario_of(nodes=(Group(),), variants=variants, sweep=Sweep(key="count", values=(2, 8)), repeats=2, seed=5)
    )
    assert [(case.value, case.variant, case.setting.seed) for case in found] == [
        (value, method, seed) for value in (2, 8) for method in METHOD_NAMES[:2] for seed in (5, 6)
    ]
    assert [case.setting.groups[0].count for case in found] == [2] * 4 + [8] * 4


def test_a_sweep_may_be_of_the_rules() -> None:
    sweep = Sweep(key="h", values=(10, 20))
    assert [case.setting.rules.h for case in cases(scenario_of(sweep=sweep))] == [10, 20]


def test_machines_are_gathered_into_clusters() -> None:
    variants = (Variant(name="x", rules=Rules(clusters=4)),)
    (case,) = cases(scenario_of(nodes=(Group(count=12, machines=2),), variants=variants))
    (group,) = case.setting.groups
    assert (group.count, group.machines) == (4, 6)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Rules(h=0), "h: expected 1 or more, got 0"),
        (lambda: Rules(h=4, tau=4, fragments=2), "tau is 4; with h = 4 it is 3 at most"),
        (lambda: Rules(h=4, tau=0, fragments=5), "fragments is 5, more than the inner steps of a round"),
        (lambda: Rules(method="elastic", h=30), "h is 30; elastic takes only 1"),
        (lambda: Rules(liveness_s=-1.0), "liveness_s: expected 0 or more, got -1.0"),
        (lambda: Group(step_s=0.0), "step_s: expected a number above 0, got 0.0"),
        (lambda: Group(loss=1.0), "loss: expected 0 or more and below 1, got 1.0"),
        (lambda: Group(up_gbit_s=0.0), "up_gbit_s: expected a number above 0, got 0.0"),
        (lambda: Group(crashes_per_hour=float("nan")), "crashes_per_hour: expected 0 or more, got nan"),
        (lambda: Sweep(key="name", values=(1,)), "key: there is no 'name'; there are"),
        (lambda: FlowScenario(), "steps is missing"),
        (lambda: scenario_of(nodes=()), "nodes: there are none"),
        (lambda: scenario_of(nodes=(Group(site="paris"),)), "site 'paris' is not among the sites"),
        (lambda: scenario_of(nodes=(Group(), Group())), "nodes: the name 'nodes' is there twice"),
        (lambda: scenario_of(nodes=(Group(joins_at_s=5),)), "joins_at_s: one group must be there at the start"),
        (lambda: scenario_of(sweep=Sweep(key="h", values=(3.5,))), "values: h cannot be 3.5: it takes whole numbers"),
        (lambda: scenario_of(sweep=Sweep(key="h", values=(3,))), "values: h cannot be 3: fragments is 6, more than"),
        (
            lambda: scenario_of(nodes=(Group(count=5),), variants=(Variant(name="x", rules=Rules(clusters=2)),)),
            "clusters is 2, which does not divide the 5 of 'nodes'",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence_that_begins_with_the_key(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value).startswith(sentence)


SCENARIO = FlowScenario(
    hours=1,
    repeats=3,
    nodes=(Group(count=4, crashes_per_hour=2.0, repair_s=60.0),),
    variants=(Variant(name="x", rules=Rules(method="diloco")), Variant(name="y", rules=Rules())),
    sweep=Sweep(key="crashes_per_hour", values=(0.0, 2.0)),
    published=(Published(variant="y", value=2.0, goodput=0.5),),
)


def test_a_row_is_the_mean_of_its_seeds() -> None:
    heard: list[tuple[str, int]] = []
    rows = run_all(SCENARIO, watch=lambda case: heard.append((case.variant, case.setting.seed)))
    assert [(row.variant, row.value, row.published) for row in rows] == [
        ("x", 0.0, None),
        ("y", 0.0, None),
        ("x", 2.0, None),
        ("y", 2.0, 0.5),
    ]
    assert len(heard) == 12 and heard[:3] == [("x", 0), ("x", 1), ("x", 2)]
    figures = rows[2].figures()
    assert figures["goodput"] == statistics.fmean(o.goodput for o in rows[2].outcomes)
    assert figures["goodput_least"] < figures["goodput"] < figures["goodput_most"]
    shares = [figures[name] for name in ("goodput", "idle_share", "down_share", "lost_share")]
    assert sum(shares) == pytest.approx(1.0)
    assert figures["time_to_steps_s"] is None


def test_what_the_daemons_count_has_their_names() -> None:
    node = NodeMetrics(NodeId("a"))
    node.update(PLAIN_PROGRESS, versions={0: 0}, connected=True)
    known = {
        family.name for registry in (node.registry, CoordinatorMetrics().registry) for family in registry.collect()
    }
    row = run_all(SCENARIO)[-1]
    metrics = row.figures()["metrics"]
    assert set(metrics) <= known
    assert metrics["farloop_node_bytes"]["up"] == row.mean(lambda outcome: outcome.bytes_up) > 0


NAMES = [NodeId(name) for name in "abc"]

JOINED_S = 0.25
"""In the frames world nodes dial, greet and build their model first; a flow's clock starts with the first step."""

Commits = list[tuple[int, int, tuple[int, ...]]]


def real_commits(method: str, *, steps: int, h: int, tau: int, crash_at: float | None, lag: int = 0) -> Commits:
    faults = (frames.CrashNode(node=NAMES[2], at=crash_at, down_s=14.0),) if crash_at else ()
    outcome = run(
        frames.Scenario(
            terms=terms_of(method, steps=steps, h=h, tau=tau, min_nodes=3, **({"lag": 1, "mix": 0.0} if lag else {})),
            nodes=tuple(frames.NodeSetup(name=name, seed=seed, step_s=1.0) for seed, name in enumerate(NAMES)),
            faults=faults,
            weather=LinkConditions(latency_s=0.001, bytes_per_s=1e9),
            job_s=(1e-4, 1e-3),
        )
    )
    return [
        (commit.fragment, commit.version, tuple(sorted(NAMES.index(node) for node in commit.contributors)))
        for commit in outcome.commits
        if not commit.final
    ]


def flow_commits(method: MethodName, *, steps: int, h: int, tau: int, crash_at: float | None, lag: int = 0) -> Commits:
    rules = {"h": h, "tau": tau, "lag": lag, "fragments": 1 if method == "diloco" else 3, "commit_s": 0.002}
    rules["liveness_s"] = 2.0
    groups = [Group(name=name, rtt_s=0.002, repair_s=14.0) for name in NAMES]
    crashes = (Crash(group="c", at_s=crash_at - JOINED_S),) if crash_at else ()
    outcome = flow(method, *groups, rules=rules, steps=steps, crashes=crashes, model=Model(parameters=300))
    return [(merge.fragment, merge.version, merge.nodes) for merge in outcome.windows]


@pytest.mark.parametrize(("method", "tau", "lag"), [("diloco", 0, 0), ("streaming", 1, 0), ("diloco", 0, 1)])
@pytest.mark.parametrize("crash_at", [None, 20.8, *slow(21.6, 33.4)])
def test_models_and_machines_commit_the_same_windows_from_the_same_nodes(
    method: MethodName, tau: int, lag: int, crash_at: float | None
) -> None:
    """Y, with quorum = all; a node that dies, is missed, comes back, and is expected again where it has a delta."""
    real = real_commits(method, steps=72, h=6, tau=tau, crash_at=crash_at, lag=lag)
    flow = flow_commits(method, steps=72, h=6, tau=tau, crash_at=crash_at, lag=lag)
    assert len(real) >= 11 and flow[: len(real)] == real
    assert (crash_at is None) == all(nodes == (0, 1, 2) for _, _, nodes in real)


def test_decoupled_models_and_machines_close_the_same_windows_and_none_twice() -> None:
    """Who is in which depends on milliseconds; how many there are does not."""
    real = real_commits("decoupled", steps=72, h=6, tau=1, crash_at=None)
    flow = flow_commits("decoupled", steps=72, h=6, tau=1, crash_at=None)
    windows = {(fragment, version) for fragment, version, _ in flow}
    assert len(windows) == len(flow)
    assert {(fragment, version) for fragment, version, _ in real} <= windows
    shares = [sum(len(nodes) for _, _, nodes in found) / (3 * len(found)) for found in (real, flow)]
    assert min(shares) > 0.6
