"""Covers `coordinator/observe/metrics.py`: what alerts and dashboards need, bytes as counters, and a price."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import statuses
from prometheus_client.parser import text_string_to_metric_families

from farloop.algo.spec import BlobKind, NodeId, RunSpec
from farloop.coordinator.decide.records import AllowedKey
from farloop.coordinator.net.sessions import Peer
from farloop.coordinator.observe.metrics import Metrics, TrafficMetrics
from farloop.monitoring.status import DecisionEvent
from farloop.wire.reasons import Reason
from farloop.wire.traffic import Traffic

A = NodeId("a")
LINE: DecisionEvent = {
    "event": "decision", "t": 1.0, "epoch": 1, "fragment": 0, "version": 7, "round": 6, "final": False,
    "why": "all came", "open_s": 4.0, "quorum": 2, "quorum_s": 3.0, "grace_s": None, "floor": 1,
    "expected": ["a", "b"], "missing": [], "refused": [], "h": 10, "outer_lr": 1.0, "outer_momentum": 0.0,
    "delta_scale": 1.0, "codec_up": "q4", "codec_down": "q8", "update_bytes": 77, "anchor_digest": "0", "merge_s": 0.5,
    "journal_s": 0.25,
    "arrived": [
        {"node": "a", "after_s": 2.5, "base": 5, "window": 7, "weight": 1.0, "steps": 1, "tokens": 1, "norm": 0.5},
        {"node": "b", "after_s": -0.5, "base": 6, "window": 7, "weight": 1.0, "steps": 1, "tokens": 1, "norm": 0.25},
    ],
}  # fmt: skip


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    found: float | None = metrics.registry.get_sample_value(f"farloop_{name}", labels)
    return found


def test_names_are_as_prometheus_wants_them_and_say_what_they_are(metrics: Metrics) -> None:
    metrics.scored(1.0)
    families = list(text_string_to_metric_families(metrics.exposition().decode()))
    assert len(families) > 50
    for family in families:
        assert re.fullmatch(r"(farloop|process)_[a-z0-9_]+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        assert not family.name.endswith(("_ms", "_kb", "_mb", "_percent", "_created")), family.name


def test_a_closed_window_tells_its_phases_and_each_nodes_part(metrics: Metrics) -> None:
    metrics.window_closed(LINE)
    for phase, seconds in (("collecting", 4.0), ("to_quorum", 3.0), ("merging", 0.5), ("journal", 0.25)):
        assert value(metrics, "window_seconds_sum", phase=phase) == seconds
    assert value(metrics, "nodes", state="expected") == value(metrics, "nodes", state="merged") == 2
    for name, of_a, of_b in (
        ("staleness_versions", 1, 0), ("arrival_seconds", 2.5, 0), ("delta_norm", 0.5, 0.25)
    ):  # fmt: skip
        assert [value(metrics, f"node_{name}", node=node) for node in "ab"] == [of_a, of_b]
    assert value(metrics, "payload_bytes_total", kind="update", codec="q8") == 77


def test_a_key_is_as_old_as_the_oldest_of_its_node_and_gone_with_it(metrics: Metrics) -> None:
    old, new = (AllowedKey(node=NodeId("a"), fingerprint=name) for name in ("old", "new"))
    for allowed, age_s in (({old: 100.0, new: 300.0}, 300.0), ({new: 300.0}, 100.0), ({}, None)):
        metrics.set_keys(allowed.items(), 400.0)
        assert value(metrics, "key_age_seconds", node="a") == age_s


def test_a_node_that_is_lost_is_missed_and_one_that_left_on_purpose_is_not(metrics: Metrics) -> None:
    left: dict[str, Any] = {"connected": False, "state": "left", "reason": Reason.DRAINED.sentence}
    for changes, connected, tokens_per_s in (
        ({}, 1, 50),
        ({"connected": False, "reason": Reason.SILENT.sentence}, 0, 0),
        (left, None, 0),
        ({**left, "reason": Reason.OUT_OF_TIME.sentence}, None, 0),
        ({}, 1, 50),
    ):
        metrics.set_nodes([statuses.node("a", tokens_per_s=50.0, **changes)])
        assert value(metrics, "node_connected", node="a") == connected
        assert connected is None or value(metrics, "node_tokens_per_second", node="a") == tokens_per_s
    metrics.late_seconds.labels("a").set(30.0)
    metrics.set_nodes([statuses.node("b")])
    gone = ("connected", "last_message_seconds", "tokens_per_second", "arrival_seconds")
    assert [value(metrics, f"node_{name}", node="a") for name in gone] == [None] * 4, "it was forgotten"


def test_what_was_not_measured_is_not_shown_as_zero_and_what_alerts_ask_for_is(metrics: Metrics) -> None:
    assert value(metrics, "validation_loss_nats") is None
    metrics.scored(2.5)
    metrics.scored(2.25)
    assert value(metrics, "validation_loss_nats") == 2.25
    assert value(metrics, "events_total", kind="anchor", reason="anchor_mismatch") == 0
    assert value(metrics, "rejected_peers_total", reason="wrong_key") == 0


def test_the_disk_is_looked_at_on_a_request(metrics: Metrics, spec: RunSpec, tmp_path: Path) -> None:
    metrics.describe("r", spec.terms, "0.2.0", tmp_path)
    free, size = value(metrics, "storage_free_bytes"), value(metrics, "storage_size_bytes")
    assert free is not None and size is not None and 0 < free <= size
    assert value(metrics, "run_info", run="r", method="streaming", codec_up="q4", codec_down="q4", version="0.2.0") == 1


def test_a_node_has_the_version_that_it_runs_now(metrics: Metrics) -> None:
    nodes: Any = [{"name": name, "connected": True, "farloop": "0.1.0"} for name in ("a", "b")]
    metrics.set_versions(nodes)
    nodes[0]["farloop"], nodes[1]["connected"] = "0.2.0", False
    metrics.set_versions(nodes)
    assert value(metrics, "node_info", node="a", version="0.2.0") == 1
    assert (
        value(metrics, "node_info", node="a", version="0.1.0")
        is value(metrics, "node_info", node="b", version="0.1.0")
        is None
    )


# --- Traffic


def peer(number: int, traffic: Traffic, *, in_flight: int = 0) -> Peer:
    transfers = SimpleNamespace(live_in_flight=in_flight, background_in_flight=0, bytes_per_s=65536.0)
    session = SimpleNamespace(traffic=traffic, transfers=transfers)
    return cast(Peer, SimpleNamespace(number=number, session=session))


def test_bytes_are_counted_once_by_direction_and_kind_over_all_sessions(metrics: Metrics) -> None:
    traffic, again, links = Traffic(), Traffic(), TrafficMetrics(metrics, 2.0, "EUR")
    traffic.sent_blobs[BlobKind.UPDATE].add(1000)
    traffic.received_blobs[BlobKind.DELTA].add(500)
    traffic.rewinds, traffic.control_resends = 2, 1
    for _ in range(2):
        links.update({A: peer(1, traffic, in_flight=7)})
    assert value(metrics, "link_bytes_total", node="a", direction="sent", kind="update") == 1000
    assert value(metrics, "link_bytes_total", node="a", direction="received", kind="delta") == 500
    assert value(metrics, "link_in_flight_bytes", node="a") == 7
    assert value(metrics, "link_resends_total", node="a") == 3, "apart from bytes"
    links.update({})
    assert value(metrics, "link_in_flight_bytes", node="a") == 0, "it has no session"
    again.sent_blobs[BlobKind.UPDATE].add(10)
    links.update({A: peer(2, again)})
    assert value(metrics, "link_bytes_total", node="a", direction="sent", kind="update") == 1010
    assert value(metrics, "egress_cost_total", node="a", currency="EUR") == pytest.approx(1510 / 1e9 * 2.0)
