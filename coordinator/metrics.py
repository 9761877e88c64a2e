"""Every Prometheus metric of the coordinator, declared once: `farloop_` prefix, base units, bounded labels."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from farloop.monitoring.status import SamplesStatus


class Metrics:
    """One registry per process; nothing global, so that a test can have several."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.position = Gauge(
            "farloop_position_steps", "Highest schedule position of the live nodes.", registry=registry
        )
        self.round = Gauge("farloop_round", "The run's current round.", registry=registry)
        self.steps = Gauge("farloop_run_steps", "Schedule positions of the whole run.", registry=registry)
        self.h = Gauge("farloop_h_steps", "Inner steps between two sends of a fragment.", registry=registry)
        self.epoch = Gauge("farloop_epoch", "Incarnation of the coordinator's state.", registry=registry)
        self.version = Gauge("farloop_fragment_version", "Committed version.", ["fragment"], registry=registry)
        self.loss = Gauge("farloop_validation_loss_nats", "Loss of the anchors per byte token.", registry=registry)
        self.nodes = Gauge("farloop_nodes", "Nodes by what they are.", ["state"], registry=registry)
        self.alarms = Gauge("farloop_alarms", "What needs attention now; the status page says what.", registry=registry)
        self.commits = Counter("farloop_commits", "Windows committed.", registry=registry)
        self.merged = Counter("farloop_merged_deltas", "Deltas merged.", ["node"], registry=registry)
        self.drops = Counter(
            "farloop_dropped_deltas", "Deltas expected and not merged.", ["node", "reason"], registry=registry
        )
        self.refusals = Counter("farloop_refusals", "Greetings refused.", ["reason"], registry=registry)
        self.turned_away = Counter(
            "farloop_turned_away", "Greetings, frames and keys that were not heard.", ["reason"], registry=registry
        )
        self.alarm = Gauge("farloop_alarm", "Alarms that are on now, by their first word.", ["kind"], registry=registry)
        self.happenings = Counter(
            "farloop_happenings", "Refusals, drops, ends and alarms.", ["kind", "reason"], registry=registry
        )
        self.participation = Gauge(
            "farloop_participation_ratio", "Share of the live nodes that were merged lately.", registry=registry
        )
        self.participation_held = Gauge(
            "farloop_participation_held", "1 while too few live nodes are merged to commit.", registry=registry
        )
        self.update_bytes = Counter("farloop_update_bytes", "Encoded updates committed.", registry=registry)
        self.delta_norm = Gauge("farloop_delta_norm", "Norm of the last merged delta.", ["fragment"], registry=registry)
        buckets = (0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60)
        self.merge_seconds = Histogram(
            "farloop_merge_seconds", "Summing, stepping and encoding one window.", registry=registry, buckets=buckets
        )
        self.journal_seconds = Histogram(
            "farloop_journal_seconds", "Making one commit durable.", registry=registry, buckets=buckets
        )
        self.storage_held = Gauge(
            "farloop_storage_held", "1 while nothing is committed: the state folder takes no more.", registry=registry
        )
        self.samples = Counter(
            "farloop_samples", "Samples of the leases by what became of them.", ["fate"], registry=registry
        )
        self._samples: dict[str, int] = {}
        self.history_held = Gauge(
            "farloop_history_held", "1 while nothing is committed: the state looks like an old copy.", registry=registry
        )
        self.copy_lag = Gauge(
            "farloop_copy_lag_seconds", "Age of the newest copy in the object store.", registry=registry
        )
        self.dropped_lines = Counter(
            "farloop_dropped_timeline_lines", "Lines that metrics.jsonl did not take.", registry=registry
        )
        labels = ["node"]
        self.node_loss = Gauge("farloop_node_loss_nats", "Training loss.", labels, registry=registry)
        self.node_tokens = Gauge("farloop_node_tokens", "Tokens trained on since its start.", labels, registry=registry)
        self.node_steps = Gauge("farloop_node_inner_steps", "Inner steps since its start.", labels, registry=registry)
        self.node_share = Gauge(
            "farloop_node_compute_share_ratio", "Share of wall time not spent on farloop.", labels, registry=registry
        )
        self.node_blocked = Gauge("farloop_node_blocked_seconds", "Training stood still.", labels, registry=registry)
        self.node_bytes = Gauge(
            "farloop_node_bytes", "Bytes of all frames since its start.", ["node", "direction"], registry=registry
        )

    def count_samples(self, fates: SamplesStatus) -> None:
        """What became of the samples so far, from the ledger's numbers."""
        for fate, count in (
            ("granted", fates["granted"]),
            ("trained", fates["trained"]),
            ("returned", fates["returned"]),
            ("uncertain", fates["uncertain"]),
        ):
            self.samples.labels(fate).inc(max(0, count - self._samples.get(fate, 0)))
            self._samples[fate] = count

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        text: bytes = generate_latest(self.registry)
        return text
