"""Covers `coordinator/observe/metrics.py`: what alerts and dashboards need, bytes as counters, and a price."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from farloop.algo.spec import BlobKind, NodeId, RunSpec
from farloop.coordinator.net.sessions import Peer
from farloop.coordinator.observe.metrics import Metrics, TrafficMetrics
from farloop.monitoring.status import DecisionEvent, NodeStatus
from farloop.wire.reasons import Reason
from farloop.wire.traffic import Traffic

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
    assert value(metrics, "farloop_events_total", kind="anchor", reason="anchor_mismatch") == 0
    assert value(metrics, "farloop_rejected_peers_total", reason="wrong_key") == 0


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
            codec_up=spec.terms.codecs.up,
            codec_down=spec.terms.codecs.down,
        )
        == 1
    )


A = NodeId("a")


def peer(number: int, traffic: Traffic, *, in_flight: int = 0) -> Peer:
    session: Any = SimpleNamespace(
        traffic=traffic, live_in_flight=in_flight, background_in_flight=0, bytes_per_s=65536.0
    )
    return cast(Peer, SimpleNamespace(number=number, session=session))


def test_bytes_are_counted_once_by_direction_and_kind_over_all_sessions() -> None:
    metrics, traffic = Metrics(), Traffic()
    links = TrafficMetrics(metrics, 2.0)
    traffic.sent_blobs[BlobKind.UPDATE].add(1000)
    traffic.received_blobs[BlobKind.DELTA].add(500)
    for _ in range(2):
        links.look({A: peer(1, traffic, in_flight=7)})
    assert value(metrics, "farloop_link_bytes_total", node="a", direction="sent", kind="update") == 1000
    assert value(metrics, "farloop_link_bytes_total", node="a", direction="received", kind="delta") == 500
    assert value(metrics, "farloop_link_in_flight_bytes", node="a") == 7
    again = Traffic()
    again.sent_blobs[BlobKind.UPDATE].add(10)
    links.look({A: peer(2, again)})
    assert value(metrics, "farloop_link_bytes_total", node="a", direction="sent", kind="update") == 1010
    assert value(metrics, "farloop_egress_cost_total", node="a") == pytest.approx(1510 / 1e9 * 2.0)


def test_what_was_sent_again_is_counted_apart_from_bytes() -> None:
    metrics, traffic = Metrics(), Traffic()
    links = TrafficMetrics(metrics, 0.0)
    traffic.rewinds, traffic.control_resends = 2, 1
    links.look({A: peer(1, traffic)})
    assert value(metrics, "farloop_link_resends_total", node="a") == 3
    assert value(metrics, "farloop_egress_cost_total", node="a") == 0


def test_a_node_without_a_session_has_nothing_on_its_way() -> None:
    metrics = Metrics()
    links = TrafficMetrics(metrics, 0.0)
    links.look({A: peer(1, Traffic(), in_flight=7)})
    links.look({})
    assert value(metrics, "farloop_link_in_flight_bytes", node="a") == 0
