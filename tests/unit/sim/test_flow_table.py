"""Rows are means over seeds, and speak of what the daemons count in the daemons' words."""

import statistics

import pytest
from plain_runs import PLAIN_PROGRESS

from farloop.algo.spec import NodeId
from farloop.coordinator.observe.metrics import Metrics as CoordinatorMetrics
from farloop.node.metrics import Metrics as NodeMetrics
from farloop.sim.flow.scenario import Choice, FlowScenario, Group, Published, Sweep, Variant
from farloop.sim.flow.sweep import run_all

SCENARIO = FlowScenario(
    hours=1,
    repeats=3,
    nodes=(Group(count=4, crashes_per_hour=2.0, repair_s=60.0),),
    variants=(Variant(name="x", choice=Choice(method="diloco")), Variant(name="y", choice=Choice())),
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
    node.saw(PLAIN_PROGRESS, versions={0: 0}, connected=True)
    known = {
        family.name for registry in (node.registry, CoordinatorMetrics().registry) for family in registry.collect()
    }
    row = run_all(SCENARIO)[-1]
    metrics = row.figures()["metrics"]
    assert set(metrics) <= known
    assert metrics["farloop_node_bytes"]["up"] == row.mean(lambda outcome: outcome.bytes_up) > 0
