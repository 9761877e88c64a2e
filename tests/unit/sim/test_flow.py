"""Laws that every flow case keeps, whatever goes wrong in it, and small cases worked out by hand."""

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farloop.sim.flow.outcome import Outcome
from farloop.sim.flow.scenario import (
    METHOD_NAMES,
    Choice,
    Crash,
    FlowScenario,
    Group,
    Hub,
    MethodName,
    Model,
    Outage,
    Setting,
    Site,
    Variant,
    cases,
)
from farloop.sim.flow.simulator import Stuck, play

ROUGH = Group(
    count=6,
    step_sigma=0.2,
    spread=0.1,
    slow_share=0.05,
    slow_factor=4.0,
    crashes_per_hour=3.0,
    repair_s=90.0,
    outages_per_hour=3.0,
    outage_s=30.0,
    up_gbit_s=0.5,
    down_gbit_s=0.5,
    rtt_s=0.1,
    jitter_s=0.05,
    loss=0.02,
    site="s",
)


def setting_of(
    method: MethodName, *groups: Group, choice: Mapping[str, object] | None = None, **fields: object
) -> Setting:
    """The one case of a scenario with one variant."""
    length = {} if "hours" in fields else {"steps": 600}
    made = Choice(**{"method": method, **(choice or {})})  # type: ignore[arg-type]
    variants = (Variant(name=method, choice=made),)
    scenario = FlowScenario(**{**length, "nodes": groups, "variants": variants, **fields})  # type: ignore[arg-type]
    (case,) = cases(scenario)
    return case.setting


def rough(method: MethodName, seed: int = 0, **changes: object) -> Outcome:
    group = dataclasses.replace(ROUGH, **changes)  # type: ignore[arg-type]
    late = dataclasses.replace(group, name="late", count=1, joins_at_s=400.0, drains_at_s=2000.0)
    return play(
        setting_of(
            method,
            group,
            late,
            hours=1,
            seed=seed,
            model=Model(parameters=10**7),
            sites=(Site(name="s", up_gbit_s=1.0),),
        )
    )


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_without_failures_and_limits_every_second_is_useful(method: MethodName) -> None:
    outcome = play(setting_of(method, Group(count=5, step_s=0.7)))
    assert outcome.reached and outcome.goodput == pytest.approx(1.0, abs=1e-12)
    assert outcome.inner_steps == 5 * 600
    assert outcome.seconds == pytest.approx(600 * 0.7)
    assert (outcome.lost_steps, outcome.dropped, outcome.stale, outcome.crashes) == (0, 0, 0, 0)


@pytest.mark.parametrize("method", METHOD_NAMES)
@settings(max_examples=8)
@given(seed=st.integers(0, 1000))
def test_machine_seconds_are_conserved_whatever_goes_wrong(method: MethodName, seed: int) -> None:
    """Computing, idle and down are all there is; six nodes the whole hour, one from 400 s to 2000 s at the most."""
    outcome = rough(method, seed)
    assert 6 * 3600 + 1500 - 1e-6 < outcome.machine_s < 6 * 3600 + 2000 + 1e-6
    assert 0.0 < outcome.useful_s <= outcome.compute_s * (1 + 1e-12)
    assert min(outcome.idle_s, outcome.down_s) >= 0.0


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_without_comers_and_goers_the_sum_is_exact(method: MethodName) -> None:
    group = dataclasses.replace(ROUGH, site=None)
    outcome = play(setting_of(method, group, hours=1, model=Model(parameters=10**7)))
    assert outcome.compute_s + outcome.idle_s + outcome.down_s == pytest.approx(6 * 3600, rel=1e-12)
    assert outcome.crashes > 5


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_equal_settings_give_equal_outcomes_and_another_seed_gives_another(method: MethodName) -> None:
    assert rough(method) == rough(method)
    assert rough(method) != rough(method, seed=1)


@pytest.mark.parametrize(("fragments", "rounds"), [(1, 20), (3, 20)])
def test_bytes_are_those_of_the_deltas_and_updates(fragments: int, rounds: int) -> None:
    """1001 parameters in 3 fragments are 334 + 334 + 333; at 4.25 bits, whole bytes each."""
    choice = {"h": 30, "fragments": fragments, "tau": 0, "bits_up": 4.25, "bits_down": 8.0}
    outcome = play(setting_of("streaming", Group(count=4), choice=choice, model=Model(parameters=1001)))
    up, down = ([532], [1001]) if fragments == 1 else ([178, 178, 177], [334, 334, 333])
    # The last slot is sent in every round, the others from the second on; nobody needs the run's last update.
    assert outcome.bytes_up == 4 * (sum(up) * (rounds - 1) + up[-1])
    assert outcome.bytes_down == 4 * sum(down) * (rounds - 1)
    assert outcome.bytes_state == 0


def test_data_parallel_moves_its_gradients_at_every_step() -> None:
    outcome = play(setting_of("data-parallel", Group(count=4), model=Model(parameters=1000)))
    assert (outcome.bytes_up, outcome.bytes_down) == (600 * 4 * 4000, 600 * 4 * 4000)


def test_diloco_stands_still_for_as_long_as_its_bytes_and_round_trips_take() -> None:
    """4 MB up through 8 Mbit/s, shared by two, and down at 16 Mbit/s each, ten times but for the last way down."""
    hub = Hub(up_gbit_s=0.008)
    group = Group(count=2, down_gbit_s=0.016, rtt_s=0.2)
    choice = {"h": 60, "bits_up": 16.0, "bits_down": 16.0, "commit_s": 0.5}
    outcome = play(setting_of("diloco", group, choice=choice, coordinator=hub, model=Model(parameters=2_000_000)))
    up_s, down_s, trips_s = 8.0, 2.0, 1.5 * 0.2
    assert outcome.seconds == pytest.approx(600 + 10 * (up_s + trips_s + 0.5) + 9 * (down_s + 0.1))
    assert outcome.compute_s == pytest.approx(2 * 600)


def test_a_crashed_node_is_away_until_the_next_round_and_what_it_had_not_sent_is_lost() -> None:
    """Down from 75 s to 175 s; 15 steps since the send at 60 s are lost; it starts again with the round at 240 s, for
    a round takes 60 s and the others waited 10 s for it once, from 120 s to 130 s."""
    group, other = Group(name="a", repair_s=100.0), Group(name="b", count=2)
    setting = setting_of("diloco", group, other, choice={"h": 60}, crashes=(Crash(group="a", at_s=75.5),))
    outcome = play(setting, timeline=True)
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
    choice = {"h": 60, "liveness_s": 30.0}
    diloco = play(setting_of("diloco", *groups, choice=choice, outages=(outage,)), timeline=True)
    assert [merge.at_s for merge in diloco.windows[:3]] == pytest.approx([60.0, 130.0, 190.0])
    assert diloco.windows[1].nodes == (1, 2)


def test_decoupled_nodes_go_on_behind_a_cut_link_and_their_work_is_merged_late() -> None:
    groups = Group(name="a"), Group(name="b", count=2)
    outage = Outage(group="a", at_s=100.0, for_s=90.0)
    choice = {"h": 60, "fragments": 1, "tau": 0, "per_node_h": False}
    outcome = play(setting_of("decoupled", *groups, choice=choice, outages=(outage,)), timeline=True)
    assert outcome.goodput == pytest.approx(1.0) and outcome.idle_s == 0.0
    assert outcome.stale >= 1 and outcome.skipped >= 1
    assert [merge.at_s for merge in outcome.windows][:4] == pytest.approx([60.0, 120.0, 180.0, 240.0])


def test_the_clock_of_decoupled_does_not_run_ahead_of_its_fastest_node() -> None:
    """Late deltas ride along and make no quorum: else every one of them would use up a round."""
    outcome = play(setting_of("decoupled", Group(count=20, step_sigma=0.2), choice={"quorum": 1}, steps=3000))
    assert 0.97 * 3000 <= outcome.seconds <= 1.01 * 3000
    assert 0.0 < outcome.stale_share < 1.0


def test_a_node_that_no_window_waits_for_begins_again_from_the_anchor() -> None:
    """Nine times slower than the others, and staleness of two: it is always too late, but never out for good."""
    choice = {"h": 20, "fragments": 1, "tau": 0, "per_node_h": False, "max_staleness": 2, "quorum": 1}
    setting = setting_of("decoupled", Group(count=3), Group(name="slow", step_s=9.0), choice=choice, steps=4000)
    outcome = play(setting, timeline=True)
    assert outcome.goodput > 0.7 and outcome.lost_steps > 100
    assert sum(3 in merge.nodes for merge in outcome.windows) >= 1


def test_slow_nodes_do_fewer_steps_where_rounds_are_dealt_by_pace() -> None:
    groups = Group(count=3), Group(name="slow", step_s=2.0)
    dealt = play(setting_of("decoupled", *groups, choice={"h": 60}))
    equal = play(setting_of("decoupled", *groups, choice={"h": 60, "per_node_h": False}))
    assert dealt.stale_share < 0.2 < equal.stale_share
    assert dealt.merged > 1.2 * equal.merged


def test_a_cluster_loses_a_machine_and_starts_again_without_it() -> None:
    """Ten machines: 30 s down for all of them, then nine go on until the tenth is repaired at 400 s."""
    setting = setting_of(
        "decoupled",
        Group(name="a", machines=10, repair_s=300.0),
        Group(name="b"),
        choice={"h": 60, "reconfigure_s": 30.0},
        crashes=(Crash(group="a", at_s=100.0),),
        hours=1,
    )
    outcome = play(setting)
    assert outcome.down_s == pytest.approx(10 * 30 + 270)
    assert outcome.machine_s == pytest.approx(11 * 3600)


def test_who_leaves_in_order_counts_until_then_and_the_others_go_on() -> None:
    groups = Group(name="a", drains_at_s=90.0), Group(name="b")
    outcome = play(setting_of("diloco", *groups, choice={"h": 60}), timeline=True)
    assert outcome.machine_s == pytest.approx(600 + 90)
    assert outcome.lost_steps == 30  # since its send at 60 s
    assert [merge.nodes for merge in outcome.windows] == [(0, 1), *[(1,)] * 9]


def test_a_late_comer_fetches_a_snapshot_and_starts_at_a_boundary() -> None:
    """8 MB at 8 Mbit/s are here at 98 s; the round that it starts with begins at 120 s."""
    groups = Group(name="a"), Group(name="b", joins_at_s=90.0, down_gbit_s=0.008)
    model = Model(parameters=2_000_000)
    choice = {"h": 60, "bits_down": 0.0}
    outcome = play(setting_of("diloco", *groups, choice=choice, model=model), timeline=True)
    assert outcome.bytes_state == 8_000_000
    assert [merge.nodes for merge in outcome.windows[:3]] == [(0,), (0,), (0, 1)]
    assert outcome.idle_s == pytest.approx(30.0)


def test_who_breaks_while_it_leaves_has_left() -> None:
    """Its delta of 60 s never gets through, so that at 90 s it still waits for it; at 100 s it breaks."""
    leaver = Group(name="a", drains_at_s=90.0, up_gbit_s=1e-6)
    crashes = (Crash(group="a", at_s=100.0),)
    outcome = play(setting_of("diloco", leaver, Group(name="b"), choice={"h": 60}, crashes=crashes))
    assert outcome.machine_s == pytest.approx(outcome.seconds + 100)
    assert outcome.bytes_up < 2 * 10 * 531_250_000


def test_a_run_that_everybody_left_says_so() -> None:
    with pytest.raises(Stuck, match="nobody computes"):
        play(setting_of("diloco", Group(drains_at_s=100.0)))
