"""What the sessions moved, as metrics: bytes by node, direction and kind, what was sent again, and what that costs.

Reads sessions, decides nothing. Every byte of a link leaves one of its two ends, whose provider may charge for it: a
byte costs once, whichever way it goes.
"""

from collections.abc import Mapping

from farloop.algo.spec import BlobKind, NodeId
from farloop.coordinator.metrics import Metrics
from farloop.coordinator.peers import Peer
from farloop.wire.traffic import Traffic

_GIGABYTE = 1e9


class Links:
    """Of one coordinator."""

    def __init__(self, metrics: Metrics, price: float) -> None:
        """`price`: of 10⁹ bytes that leave a site."""
        self._metrics, self._price = metrics, price
        self._seen: dict[int, dict[tuple[str, str], int]] = {}
        """Session → what was counted of it."""
        self._nodes: set[NodeId] = set()
        metrics.egress_price.set(price)

    def look(self, sessions: Mapping[NodeId, Peer]) -> None:
        """Count what has been moved since the last look, in the sessions that are open."""
        metrics, before = self._metrics, self._seen
        self._seen = {}
        for node, peer in sessions.items():
            traffic = peer.session.traffic
            counted = self._seen[peer.number] = counts(traffic)
            old = before.get(peer.number, {})
            moved = 0
            for (direction, kind), count in counted.items():
                # What came early is counted as stray until its blob is known: that count falls again.
                grown = max(0, count - old.get((direction, kind), 0))
                if direction == "resent":
                    metrics.link_resends.labels(node).inc(grown)
                else:
                    metrics.link_bytes.labels(node, direction, kind).inc(grown)
                    moved += grown
            metrics.egress_cost.labels(node).inc(moved / _GIGABYTE * self._price)
            in_flight = peer.session.live_in_flight + peer.session.background_in_flight
            metrics.link_in_flight.labels(node).set(in_flight)
            metrics.link_rate.labels(node).set(peer.session.bytes_per_s)
        for node in self._nodes - sessions.keys():
            metrics.link_in_flight.labels(node).set(0)
        self._nodes |= sessions.keys()


def counts(traffic: Traffic) -> dict[tuple[str, str], int]:
    """Bytes by direction and kind, and frames that were sent again, seen from the coordinator."""
    found = {("sent", "control"): traffic.sent_control.bytes, ("received", "control"): traffic.received_control.bytes}
    for kind in BlobKind:
        found["sent", kind.name.lower()] = traffic.sent_blobs[kind].bytes
        found["received", kind.name.lower()] = traffic.received_blobs[kind].bytes
    found["resent", ""] = traffic.rewinds + traffic.control_resends
    return found
