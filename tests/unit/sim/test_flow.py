"""Laws that every flow case keeps, whatever goes wrong in it, and small cases worked out by hand."""

import dataclasses
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import simulated_faults as frames
from faulty_world import run
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_runs import PLAIN_PROGRESS
from slow_cases import slow
from stories import Scripted, StoryText, all_stories, check_story, literal
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


def told(line: str) -> str:
    """A story's line: a method with rules, what else the scenario has, groups of nodes and what happens to them.

    diloco h=60; steps 1000; model 1000000; hub up_gbit_s=0.008; a count=2 repair_s=100; a crashes 75.5; a cut 100 90

    Behind it stand what the outcome is, and the first commits: when, and of which nodes.
    """
    (method, *rules), *more = [part.split() for part in line.split("; ")]
    groups, crashes, outages, fields = list[Group](), list[Crash](), list[Outage](), dict[str, Any]()
    for name, *words in more:
        match name, words:
            case "steps" | "hours", [value]:
                fields[name] = int(value)
            case "model", [value]:
                fields["model"] = Model(parameters=int(value))
            case "hub", _:
                fields["coordinator"] = Hub(**fields_of(words))
            case _, ["crashes", at]:
                crashes.append(Crash(group=name, at_s=float(at)))
            case _, ["cut", at, seconds]:
                outages.append(Outage(group=name, at_s=float(at), for_s=float(seconds)))
            case _:
                groups.append(Group(name=name, **fields_of(words)))
    try:
        made = flow(method, *groups, rules=fields_of(rules), crashes=tuple(crashes), outages=tuple(outages), **fields)  # type: ignore[arg-type]
        return report(made, *(BYTES if "model" in fields else ()))
    except Stuck as stuck:
        return str(stuck)


def fields_of(words: list[str]) -> dict[str, Any]:
    return {key: literal(value) for key, value in (word.split("=") for word in words)}


def report(outcome: Outcome, *more: str) -> str:
    """Figures that are not 0, and in brackets commits, or the machines that compute from when on."""
    figures = {name: getattr(outcome, name) for name in (*FIGURES, *more)}
    shown = [f"{name} {round(value, 3):g}" for name, value in figures.items() if round(value, 3)]
    found = [f"{''.join(map(str, merge.nodes))} at {merge.at_s:g}" for merge in outcome.windows[:4]]
    found = found or [f"{machines:g} at {at:g}" for at, machines in outcome.timeline[:4]]
    return f"{', '.join(shown)} [{', '.join(found)}]"


FIGURES = (
    "seconds", "goodput", "machine_s", "idle_s", "down_s", "lost_s", "lost_steps", "inner_steps", "merged", "stale",
    "dropped", "skipped", "crashes",
)  # fmt: skip
BYTES = ("bytes_up", "bytes_down", "bytes_state")
"""Of scenarios with a model of their own."""


@all_stories(__file__, "flow")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, told, rewrite=rewrite)


@all_stories(__file__, "links")
def test_link_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, Log().told, rewrite=rewrite)


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
def test_equal_settings_give_equal_outcomes_and_another_seed_gives_another(method: MethodName) -> None:
    assert rough(method) == rough(method)
    assert rough(method) != rough(method, seed=1)


class Log(Scripted):
    """A link of so many bytes a second, and the times at which transfers of so many bytes end.

    carries a 1000 at=5.0 own=10.0      begins at 5 s; `own`: another link on the way, of this rate
    gives_up a 4.0 | cuts 3.0 50.0      at 4 s; from 3 to 50 s
    ends
    """

    def __init__(self, bytes_per_s: float = 100.0) -> None:
        self.agenda = EventQueue()
        self.pipe = SharedLink(self.agenda, bytes_per_s)
        self.ended: dict[str, float] = {}
        self.under_way: dict[str, Transfer] = {}

    def carries(self, name: str, size: int, *, at: float = 0.0, own: float | None = None) -> None:
        links = [*([SharedLink(self.agenda, own)] if own else []), self.pipe]

        def note() -> None:
            assert name not in self.ended
            self.ended[name] = self.agenda.now

        def begin() -> None:
            self.under_way[name] = Transfer(links, size, note)

        self.agenda.at(at, begin)

    def gives_up(self, name: str, at: float) -> None:
        def give_up() -> None:
            self.ended[f"{name} left"] = float(self.under_way[name].cancel())

        self.agenda.at(at, give_up)

    def cuts(self, at: float, until: float) -> None:
        self.agenda.at(at, lambda: self.pipe.set_cut(now_cut=True))
        self.agenda.at(until, lambda: self.pipe.set_cut(now_cut=False))

    def ends(self) -> dict[str, float]:
        while self.agenda.step():
            pass
        return {name: round(at, 6) for name, at in self.ended.items()}


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.0, 50.0)), min_size=1, max_size=20))
def test_a_busy_link_carries_at_its_full_rate_and_never_at_more(jobs: list[tuple[int, float]]) -> None:
    """The time at which everything is through is that of a queue of the same work: sharing wastes nothing."""
    log = Log()
    for number, (size, at) in enumerate(jobs):
        log.carries(str(number), size, at=at)
    ends = log.ends()
    free_at = 0.0
    for size, at in sorted(jobs, key=lambda job: job[1]):
        free_at = max(free_at, at) + size / 100.0
    assert max(ends.values()) == pytest.approx(free_at)
    for number, (size, at) in enumerate(jobs):
        assert ends[str(number)] >= at + size / 100.0 - 1e-6


def scenario_of(**fields: Any) -> FlowScenario:
    return FlowScenario(**{"steps": 100, **fields})


@pytest.mark.parametrize("method", ["diloco", "streaming", "decoupled"])
def test_what_stays_open_is_what_the_table_of_methods_says(method: MethodName) -> None:
    rules, row = Rules(method=method), METHODS[method]
    for name in ("h", "tau", "quorum", "max_staleness", "max_stale_rounds", "per_node_h"):
        assert getattr(rules, name) == getattr(row, name), name
    assert rules.waits == (row.on_late_update == "wait")


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
        (lambda: Group(step_s=0.0), "step_s: expected 0.000001 or more, got 0.0"),
        (lambda: Group(loss=1.0), "loss: expected 0 or more and below 1, got 1.0"),
        (lambda: Group(up_gbit_s=0.0), "up_gbit_s: expected a number above 0 (leave it out for no limit), got 0.0"),
        (lambda: Group(crashes_per_hour=float("nan")), "crashes_per_hour: expected 0 to 1000000, got nan"),
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
