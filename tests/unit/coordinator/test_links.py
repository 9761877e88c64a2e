"""Covers `coordinator/observe/metrics.py`: bytes become counters and a price."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from farloop.algo.spec import BlobKind, NodeId
from farloop.coordinator.net.sessions import Peer
from farloop.coordinator.observe.metrics import Metrics, TrafficMetrics
from farloop.wire.traffic import Traffic

A = NodeId("a")


def peer(number: int, traffic: Traffic, *, in_flight: int = 0) -> Peer:
    session: Any = SimpleNamespace(
        traffic=traffic, live_in_flight=in_flight, background_in_flight=0, bytes_per_s=65536.0
    )
    return cast(Peer, SimpleNamespace(number=number, session=session))


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    found: float | None = metrics.registry.get_sample_value(name, labels)
    return found


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
