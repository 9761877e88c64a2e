"""Covers `coordinator/observe/metrics.py`: what alerts and dashboards rest on."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from farloop.algo.spec import RunSpec
from farloop.coordinator.observe.metrics import Metrics
from farloop.monitoring.status import DecisionEvent, NodeStatus
from farloop.wire.reasons import Reason

LINE: DecisionEvent = {
    "event": "decision",
    "t": 1.0,
    "epoch": 1,
    "fragment": 0,
    "version": 7,
    "round": 6,
    "final": False,
    "why": "all came",
    "open_s": 4.0,
    "quorum": 2,
    "quorum_s": 3.0,
    "grace_s": None,
    "floor": 1,
    "expected": ["a", "b"],
    "arrived": [
        {"node": "a", "after_s": 2.5, "base": 5, "window": 7, "weight": 1.0, "steps": 1, "tokens": 1, "norm": 0.5},
        {"node": "b", "after_s": -0.5, "base": 6, "window": 7, "weight": 1.0, "steps": 1, "tokens": 1, "norm": 0.25},
    ],
    "missing": [],
    "refused": [],
    "h": 10,
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "delta_scale": 1.0,
    "codec_up": "q4",
    "codec_down": "q8",
    "update_bytes": 77,
    "anchor_digest": "0",
    "merge_s": 0.5,
    "journal_s": 0.25,
}


def node(**changes: object) -> NodeStatus:
    status: NodeStatus = {
        "name": "a",
        "state": "training",
        "connected": True,
        "incarnation": 3,
        "device": "cpu",
        "position": 12.5,
        "round": 1,
        "inner_steps": 12,
        "tokens": 600,
        "loss": 2.0,
        "tokens_per_s": 50.0,
        "compute_share": 0.9,
        "blocked_s": 0.0,
        "lost_steps": 2,
        "bytes_up": 0,
        "bytes_down": 0,
        "bytes_state": 0,
        "detail": "",
        "reason": "",
        "last_heard_s": 0.5,
    }
    status.update(changes)  # type: ignore[typeddict-item]
    return status


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    found: float | None = metrics.registry.get_sample_value(name, labels)
    return found


def test_names_are_as_prometheus_wants_them_and_say_what_they_are() -> None:
    metrics = Metrics()
    metrics.scored(1.0)
    families = list(text_string_to_metric_families(metrics.exposition().decode()))
    assert len(families) > 50
    for family in families:
        assert re.fullmatch(r"(farloop|process)_[a-z0-9_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert not family.name.endswith(("_ms", "_kb", "_mb", "_percent", "_created")), family.name


def test_a_closed_window_tells_its_phases_and_each_nodes_part() -> None:
    metrics = Metrics()
    metrics.window_closed(LINE)
    for phase, seconds in (("collecting", 4.0), ("to_quorum", 3.0), ("merging", 0.5), ("journal", 0.25)):
        assert value(metrics, "farloop_window_seconds_sum", phase=phase) == seconds
    assert value(metrics, "farloop_nodes", state="expected") == value(metrics, "farloop_nodes", state="merged") == 2
    assert [value(metrics, "farloop_node_staleness_versions", node=n) for n in "ab"] == [1, 0]
    assert [value(metrics, "farloop_node_arrival_seconds", node=n) for n in "ab"] == [2.5, 0]
    assert [value(metrics, "farloop_node_delta_norm", node=n) for n in "ab"] == [0.5, 0.25]
    assert value(metrics, "farloop_payload_bytes_total", kind="update", codec="q8") == 77


def test_a_node_that_is_lost_is_missed_and_one_that_left_on_purpose_is_not() -> None:
    metrics = Metrics()
    metrics.saw_nodes([node()])
    assert value(metrics, "farloop_node_connected", node="a") == 1
    assert value(metrics, "farloop_node_tokens_per_second", node="a") == 50
    metrics.saw_nodes([node(connected=False, reason=Reason.SILENT.sentence)])
    assert value(metrics, "farloop_node_connected", node="a") == 0
    assert value(metrics, "farloop_node_tokens_per_second", node="a") == 0
    for _ in range(2):
        metrics.saw_nodes([node(connected=False, state="left", reason=Reason.DRAINED.sentence)])
        assert value(metrics, "farloop_node_connected", node="a") is None
    metrics.saw_nodes([node()])
    assert value(metrics, "farloop_node_connected", node="a") == 1


def test_a_loss_that_nobody_has_measured_yet_is_not_shown_as_zero() -> None:
    metrics = Metrics()
    assert value(metrics, "farloop_validation_loss_nats") is None
    metrics.scored(2.5)
    metrics.scored(2.25)
    assert value(metrics, "farloop_validation_loss_nats") == 2.25


def test_what_alerts_ask_for_is_there_before_it_happens() -> None:
    metrics = Metrics()
    assert value(metrics, "farloop_happenings_total", kind="anchor", reason="anchor_mismatch") == 0
    assert value(metrics, "farloop_turned_away_total", reason="wrong_key") == 0


def test_the_disk_is_looked_at_when_somebody_asks(spec: RunSpec, tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.describe("r", spec.terms, tmp_path)
    free, size = value(metrics, "farloop_storage_free_bytes"), value(metrics, "farloop_storage_size_bytes")
    assert free is not None and size is not None and 0 < free <= size
    assert (
        value(
            metrics,
            "farloop_run_info",
            run="r",
            method=spec.terms.method,
            codec_up=spec.terms.codec_up,
            codec_down=spec.terms.codec_down,
        )
        == 1
    )
