"""The coordinator's Prometheus metrics, link traffic included."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from shutil import disk_usage

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from farloop.algo.spec import BlobKind, NodeId
from farloop.algo.terms import Terms
from farloop.coordinator.decide.records import AllowedKey
from farloop.coordinator.net.sessions import Peer
from farloop.monitoring.status import (
    DecisionEvent,
    InventoryStatus,
    MachineStatus,
    NodeStatus,
    SamplesStatus,
    StandbyStatus,
    UplinkStatus,
)
from farloop.runtime.log_queue import BackgroundWriter, dropped_lines
from farloop.wire.reasons import Reason
from farloop.wire.traffic import Traffic

# --- Metrics: `farloop_` prefix, base units, bounded labels

_ON_PURPOSE = frozenset({Reason.DRAINED.sentence, Reason.OUT_OF_TIME.sentence, Reason.RUN_FINISHED.sentence})
"""Reasons to leave after which the run does not wait for the node."""

MOST_SERIES = 512  # directions of links that have series; the status tells of all

# Else every counter has a second series, of which Prometheus makes nothing.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """One registry per process; nothing global, so that a test can have several."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        ProcessCollector(registry=registry)
        self.info = gauge(
            "farloop_run_info",
            "Name, method and codecs of the run, and the coordinator's version of farloop; always 1.",
            ["run", "method", "codec_up", "codec_down", "version"],
        )
        self._node_info = gauge(
            "farloop_node_info", "Version of farloop that a connected node runs; always 1.", ["node", "version"]
        )
        self.position = gauge("farloop_position_steps", "Highest schedule position of the live nodes.")
        self.round = gauge("farloop_round", "The run's current round.")
        self.steps = gauge("farloop_run_steps", "Schedule positions of the whole run.")
        self.h = gauge("farloop_h_steps", "Inner steps between two sends of a fragment.")
        self.h_max = gauge("farloop_h_max_steps", "The longest that H may become; 0: no bound.")
        self.learning_rate = gauge("farloop_learning_rate", "Learning rate at the run's position; H grows as it falls.")
        self.epoch = gauge("farloop_epoch", "Incarnation of the coordinator's state.")
        self.version = gauge("farloop_fragment_version", "Committed version.", ["fragment"])
        self._loss = Gauge("farloop_validation_loss_nats", "Loss of the anchors per token.", registry=None)
        self._scored = False
        self.nodes = gauge(
            "farloop_nodes",
            "Nodes by state; expected and merged count the window that closed last.",
            ["state"],
        )
        self._objects = counter(
            "farloop_object_store_bytes", "Bytes between coordinator and object store, by direction.", ["direction"]
        )
        self._object_failures = counter(
            "farloop_object_store_failures", "Blobs that it failed; they went by a session."
        )
        self.alarms = gauge("farloop_alarms", "What needs attention now; the status page says what.")
        self.commits = counter("farloop_commits", "Windows committed.")
        self.merged = counter("farloop_merged_deltas", "Deltas merged.", ["node"])
        self.drops = counter("farloop_dropped_deltas", "Deltas expected and not merged.", ["node", "reason"])
        self.refusals = counter("farloop_refusals", "Greetings refused.", ["reason"])
        self.rejected_peers = counter(
            "farloop_rejected_peers", "Greetings, frames and keys that were rejected.", ["reason"]
        )
        self.alarm = gauge("farloop_alarm", "Alarms that are on now, by their first word.", ["kind"])
        self.events = counter("farloop_events", "Refusals, drops, ends and alarms.", ["kind", "reason"])
        self.participation = gauge("farloop_participation_ratio", "Share of the live nodes that were merged lately.")
        self.participation_held = gauge(
            "farloop_participation_held", "1 while too few live nodes are merged to commit."
        )
        self._anomalies = gauge(
            "farloop_anomalies",
            "1 while a node, or its link, is slower than its own rounds before, or hangs.",
            ["kind", "node"],
        )
        self.anomaly_actions = counter(
            "farloop_anomaly_actions", "Actions against anomalies: done, or only advised.", ["action", "how"]
        )
        self.update_bytes = counter("farloop_update_bytes", "Encoded updates committed.")
        self.delta_norm = gauge("farloop_delta_norm", "Norm of the last merged delta.", ["fragment"])
        buckets = (0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60)
        self.merge_seconds = histogram(
            "farloop_merge_seconds", "Summing, stepping and encoding one window.", buckets=buckets
        )
        self.journal_seconds = histogram("farloop_journal_seconds", "Making one commit durable.", buckets=buckets)
        self.window_seconds = histogram(
            "farloop_window_seconds",
            "Duration of windows, by phase: until the quorum, until the end of waiting, until the commit.",
            ["phase"],
            buckets=(0.01, 0.05, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600),
        )
        self.payload_bytes = counter(
            "farloop_payload_bytes", "Encoded deltas received and updates made.", ["kind", "codec"]
        )
        self.late_seconds = gauge(
            "farloop_node_arrival_seconds",
            "Time from the opening of the last window that merged the node to its delta; 0 if it came before.",
            ["node"],
        )
        self.staleness = gauge(
            "farloop_node_staleness_versions", "Staleness of the node's last merged delta, in versions.", ["node"]
        )
        self.node_norm = gauge("farloop_node_delta_norm", "Norm of the node's last merged delta.", ["node"])
        self.cosine = gauge(
            "farloop_node_delta_cosine_ratio",
            "Cosine of the node's last merged delta with the mean of the others, of three or more.",
            ["node"],
        )
        self.link_bytes = counter(
            "farloop_link_bytes",
            "Bytes of all frames between the coordinator and a node, framing included, seen from the coordinator.",
            ["node", "direction", "kind"],
        )
        self.link_resends = counter(
            "farloop_link_resends", "Blobs resumed after an interruption, and control frames sent again.", ["node"]
        )
        self.link_in_flight = gauge(
            "farloop_link_in_flight_bytes", "Bytes sent to the node and not yet acknowledged.", ["node"]
        )
        self.link_rate = gauge(
            "farloop_link_bytes_per_second",
            "Recent rate of acknowledged blobs to the node; at least 65536 is assumed.",
            ["node"],
        )
        self.egress_price = gauge("farloop_egress_price_per_gigabyte", "Price of 10⁹ bytes; 0: not set.", ["currency"])
        self.egress_cost = counter(
            "farloop_egress_cost", "Cost of the bytes that left the coordinator and the nodes.", ["node", "currency"]
        )
        self._uplink_limit = gauge(
            "farloop_uplink_limit_bytes_per_second", "Most that the coordinator sends now; 0: no limit."
        )
        self._uplink_held = counter("farloop_uplink_held_seconds", "Time in which blobs waited for that limit.")
        self.storage_free = gauge("farloop_storage_free_bytes", "Free on the file system of the state folder.")
        self.storage_size = gauge("farloop_storage_size_bytes", "Size of the file system of the state folder.")
        self.storage_held = gauge(
            "farloop_storage_held", "1 while nothing is committed: the state folder cannot be written."
        )
        self.samples = counter("farloop_samples", "Samples of the leases by outcome.", ["outcome"])
        self.rollback_held = gauge(
            "farloop_rollback_held", "1 while nothing is committed: the state looks like an old copy."
        )
        self.copy_lag = gauge("farloop_copy_lag_seconds", "Age of the newest copy in the object store.")
        self.copy_interval = gauge("farloop_copy_interval_seconds", "Time between two copies, of the settings.")
        self.standbys = gauge("farloop_standbys_in_sync", "Standbys that have all that nodes were told.")
        self.standby_lag = gauge("farloop_standby_lag_bytes", "Sent to a standby and not written there.")
        self.term = gauge("farloop_leader_term", "Term of the leader's record: one more with each change.")
        self.status_age = gauge("farloop_status_age_seconds", "Age of the status page: it is made every second.")
        self._dropped_lines = counter("farloop_log_dropped_lines", "Lines that could not be written.", ["file"])
        # What alerts ask for is there from the start: a series that begins at one has not grown.
        self.events.labels("anchor", "anchor_mismatch")
        self.rejected_peers.labels(Reason.WRONG_KEY.code)
        self._key_age = gauge("farloop_key_age_seconds", "Since the oldest key of the node was allowed here.", ["node"])
        self._shown: dict[Gauge, AbstractSet[tuple[str, ...]]] = {}  # labels of the series that a gauge has now
        self._counted: dict[Counter, float] = {}
        labels = ["node"]
        self.node_loss = gauge("farloop_node_loss_nats", "Training loss.", labels)
        self.node_tokens = gauge("farloop_node_tokens", "Tokens trained on since its start.", labels)
        self.node_steps = gauge("farloop_node_inner_steps", "Inner steps since its start.", labels)
        self.node_share = gauge("farloop_node_compute_share_ratio", "Share of wall time of its training loop.", labels)
        self.node_blocked = gauge("farloop_node_blocked_seconds", "Training stood still.", labels)
        self.node_connected = gauge("farloop_node_connected", "1 while a session with the node is open.", labels)
        self.node_sessions = counter("farloop_node_sessions", "Sessions that were opened with the node.", labels)
        self.node_last_message = gauge(
            "farloop_node_last_message_seconds", "Time since the node's last message.", labels
        )
        self.node_position = gauge("farloop_node_position_steps", "Schedule position: the run's clock.", labels)
        self.node_rate = gauge("farloop_node_tokens_per_second", "Tokens trained on per second.", labels)
        self.node_incarnation = gauge("farloop_node_incarnation", "Which start of the node this is.", labels)
        self.node_lost = gauge("farloop_node_lost_steps", "Inner steps, per fragment, that no commit contains.", labels)
        self.node_skipped = gauge(
            "farloop_node_skipped_sends", "Due sends that were skipped: too many deltas had no outcome yet.", labels
        )
        ends = ["source", "target"]
        self._links = {
            "rtt_s": gauge("farloop_link_round_trip_seconds", "Shortest of the last round trips.", ends),
            "bytes_per_s": gauge(
                "farloop_link_measured_bytes_per_second", "Rate at the receiver after TCP slow start.", ends
            ),
            "age_s": gauge("farloop_link_measurement_age_seconds", "Time since the rate was last measured.", ends),
            "retransmit_ratio": gauge(
                "farloop_link_retransmit_ratio", "Segments that the sender's kernel sent again.", ends
            ),
        }
        self.node_bytes = gauge(
            "farloop_node_bytes", "All bytes since its start, up from it and down to it.", ["node", "direction", "kind"]
        )
        self.node_bytes_of = cache(self.node_bytes.labels)  # ten of each report; they are never removed

    def count_samples(self, samples: SamplesStatus) -> None:
        for outcome in ("granted", "trained", "returned", "uncertain"):
            self._count_to(self.samples.labels(outcome), samples[outcome])

    def scored(self, loss: float) -> None:
        """The anchors' loss. Before the first there is no series: a zero would look like a perfect model."""
        if not self._scored:
            self._scored = True
            self.registry.register(self._loss)
        self._loss.set(loss)

    def describe(self, run: str, terms: Terms, version: str, folder: Path) -> None:
        self.info.labels(run, terms.method, terms.codecs.up, terms.codecs.down, version).set(1)
        self._disk = BackgroundWriter[Path]("disk usage", self._measure, 1)  # a file system may not answer
        self._folder = folder
        self._measure(folder)

    def close(self) -> None:
        self._disk.close()

    def _measure(self, folder: Path) -> None:
        with suppress(OSError):  # the storage says so
            usage = disk_usage(folder)
            self.storage_free.set(usage.free)
            self.storage_size.set(usage.total)

    def set_logs(self, dropped: int) -> None:
        """How many lines of metrics.jsonl were dropped so far; and look at logs and disk."""
        for file, count in (("metrics.jsonl", dropped), ("stderr", dropped_lines())):
            self._count_to(self._dropped_lines.labels(file), count)
        self._disk.put(self._folder)

    def window_closed(self, line: DecisionEvent) -> None:
        phases = {
            "collecting": line["open_s"],
            "to_quorum": line["quorum_s"],
            "merging": line.get("merge_s"),
            "journal": line.get("journal_s"),
        }
        for phase, seconds in phases.items():
            if seconds is not None:
                self.window_seconds.labels(phase).observe(seconds)
        self.nodes.labels("expected").set(len(line["expected"]))
        self.nodes.labels("merged").set(len(line["arrived"]))
        self.payload_bytes.labels("update", line["codec_down"]).inc(line["update_bytes"])
        for delta in line["arrived"]:
            node = delta["node"]
            self.staleness.labels(node).set(line["version"] - 1 - delta["base"])
            self.node_norm.labels(node).set(delta["norm"])
            if (after_s := delta["after_s"]) is not None:
                self.late_seconds.labels(node).set(max(0.0, after_s))

    def set_nodes(self, nodes: Sequence[NodeStatus]) -> None:
        """How every node is now, as the coordinator last heard of it.

        One that left on purpose, or was forgotten, is not missed: no alarm is to wait for its return.
        """
        missed = [node for node in nodes if node["connected"] or node["reason"] not in _ON_PURPOSE]
        self._show(self.node_connected, {(node["name"],): node["connected"] for node in missed})
        self._show(self.node_last_message, {(node["name"],): node["last_heard_s"] for node in missed})
        rates: dict[tuple[str, ...], float] = {
            (node["name"],): node["tokens_per_s"] if node["connected"] else 0.0 for node in missed
        }
        for labels in self._show(self.node_rate, rates):
            with suppress(KeyError):
                self.late_seconds.remove(*labels)
        for node in missed:
            name = node["name"]
            self.node_position.labels(name).set(node["position"])
            self.node_incarnation.labels(name).set(node["incarnation"])
            self.node_lost.labels(name).set(node["lost_steps"])
            self.node_skipped.labels(name).set(node["skipped_turns"])

    def set_links(self, inventory: InventoryStatus) -> None:
        """The links as they are known now: series by both ends for each measured direction, at most `MOST_SERIES`."""
        links = inventory["links"][:MOST_SERIES]
        for name, gauge in self._links.items():
            values = {(link["from"], link["to"]): link[name] for link in links}  # type: ignore[literal-required]
            self._show(gauge, {ends: value for ends, value in values.items() if value is not None})

    def set_versions(self, machines: Sequence[MachineStatus]) -> None:
        self._show(self._node_info, {(told["name"], told["farloop"]): 1 for told in machines if told["connected"]})

    def set_keys(self, allowed: Iterable[tuple[AllowedKey, float]], now_s: float) -> None:
        """How long the oldest key of each node has been allowed. `allowed`: since when each was."""
        ages_s: dict[tuple[str, ...], float] = {}
        for key, since_s in allowed:
            ages_s[key.node,] = max(ages_s.get((key.node,), 0.0), now_s - since_s)
        self._show(self._key_age, ages_s)

    def count_objects(self, failures: int, moved: tuple[int, int]) -> None:
        self._object_failures.inc(failures)
        for direction, num_bytes in zip(("sent", "received"), moved, strict=True):
            self._objects.labels(direction).inc(num_bytes)

    def set_uplink(self, uplink: UplinkStatus) -> None:
        self._uplink_limit.set(uplink["bytes_per_s"] or 0.0)
        self._count_to(self._uplink_held, uplink["held_s"])

    def set_anomalies(self, found: Sequence[tuple[str, str]]) -> None:
        """Who is slow or hangs now, as (kind, node)."""
        self._show(self._anomalies, dict.fromkeys(found, 1))

    def set_standbys(self, status: StandbyStatus) -> None:
        self.standbys.set(len(status["in_sync"]))
        self.standby_lag.set(status["lag_bytes"])
        self.term.set(status["term"])

    def _show(self, gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> AbstractSet[tuple[str, ...]]:
        """Have series of these labels alone. Returns the labels of those that went. Scrapes are in another thread."""
        for labels, value in values.items():
            gauge.labels(*labels).set(value)
        gone = self._shown.get(gauge, frozenset()) - values.keys()
        for labels in gone:
            gauge.remove(*labels)
        self._shown[gauge] = values.keys()
        return gone

    def _count_to(self, counter: Counter, total: float) -> None:
        """Count up to what was counted elsewhere."""
        counter.inc(max(0.0, total - self._counted.get(counter, 0.0)))
        self._counted[counter] = total

    def exposition(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text


def standby_metrics(*, in_sync: bool = False, in_memory: bool = False, silence_s: float = 0.0, taken: int = 0) -> bytes:
    """The text that Prometheus scrapes while a coordinator stands by."""
    registry = CollectorRegistry()
    for name, text, value in (
        ("in_sync", "1: has all that the leader told.", in_sync),
        ("in_memory", "1: repeats each commit, and leads without reading.", in_memory),
        ("silence_seconds", "Since the leader was heard of.", silence_s),
        ("taken_bytes", "Written since it joined.", taken),
    ):
        Gauge(f"farloop_standby_{name}", text, registry=registry).set(value)
    exposed: bytes = generate_latest(registry)
    return exposed


# --- Traffic of the sessions
#
# Every byte of a link leaves one of its two ends, whose provider may charge for it: a byte costs once, in either
# direction.

_GIGABYTE = 1e9
_KINDS = [(kind, kind.name.lower()) for kind in BlobKind]


class TrafficMetrics:
    def __init__(self, metrics: Metrics, price: float, currency: str) -> None:
        """`price`: of 10⁹ bytes that leave a site."""
        self._metrics, self._price, self._currency = metrics, price, currency
        self._seen: dict[int, dict[tuple[str, str], int]] = {}  # session → what was counted of it
        self._nodes: set[NodeId] = set()
        metrics.egress_price.labels(currency).set(price)

    def update(self, sessions: Mapping[NodeId, Peer]) -> None:
        """Count what has been moved since the last look, in the sessions that are open."""
        metrics, before = self._metrics, self._seen
        self._seen = {}
        for node, peer in sessions.items():
            counted = self._seen[peer.number] = counts(peer.session.traffic)
            old = before.get(peer.number, {})
            moved = 0
            for (direction, kind), count in counted.items():
                if count == (before_it := old.get((direction, kind))):  # most: several hundred nodes have thousands
                    continue
                # What came early is counted as stray until its blob is known: that count falls again.
                grown = max(0, count - (before_it or 0))
                if direction == "resent":
                    metrics.link_resends.labels(node).inc(grown)
                else:
                    metrics.link_bytes.labels(node, direction, kind).inc(grown)
                    moved += grown
            metrics.egress_cost.labels(node, self._currency).inc(moved / _GIGABYTE * self._price)
            in_flight = peer.session.transfers.live_in_flight + peer.session.transfers.background_in_flight
            metrics.link_in_flight.labels(node).set(in_flight)
            metrics.link_rate.labels(node).set(peer.session.transfers.bytes_per_s)
        for node in self._nodes - sessions.keys():
            metrics.link_in_flight.labels(node).set(0)
        self._nodes |= sessions.keys()


def counts(traffic: Traffic) -> dict[tuple[str, str], int]:
    """Bytes by direction and kind, and frames that were sent again, seen from the coordinator."""
    found = {("sent", "control"): traffic.sent_control.bytes, ("received", "control"): traffic.received_control.bytes}
    for kind, name in _KINDS:
        found["sent", name] = traffic.sent_blobs[kind].bytes
        found["received", name] = traffic.received_blobs[kind].bytes
    found["resent", ""] = traffic.rewinds + traffic.control_resends
    return found
