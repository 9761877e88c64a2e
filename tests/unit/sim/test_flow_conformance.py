"""The flow simulator's models against the real machines in the frames world: the same fate, the same commits."""

import pytest

from farloop.algo.spec import NodeId
from farloop.sim import scenario as frames
from farloop.sim.flow.scenario import Choice, Crash, FlowScenario, Group, MethodName, Model, Variant, cases
from farloop.sim.flow.simulator import play
from farloop.sim.network import LinkConditions
from farloop.sim.problems import terms_of
from farloop.sim.world import run

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
    choice = Choice(
        method=method, h=h, tau=tau, lag=lag, fragments=1 if method == "diloco" else 3, commit_s=0.002, liveness_s=2.0
    )
    scenario = FlowScenario(
        steps=steps,
        nodes=tuple(Group(name=name, rtt_s=0.002, repair_s=14.0) for name in NAMES),
        crashes=(Crash(group="c", at_s=crash_at - JOINED_S),) if crash_at else (),
        model=Model(parameters=300),
        variants=(Variant(name=method, choice=choice),),
    )
    return [
        (merge.fragment, merge.version, merge.nodes)
        for merge in play(cases(scenario)[0].setting, timeline=True).windows
    ]


@pytest.mark.parametrize(("method", "tau", "lag"), [("diloco", 0, 0), ("streaming", 1, 0), ("diloco", 0, 1)])
@pytest.mark.parametrize("crash_at", [None, 20.8, 21.6, 33.4])
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
