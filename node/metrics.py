"""Prometheus metrics, health and status pages of a node."""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from farloop.algo.spec import NodeId
from farloop.monitoring.addresses import parse_host_port
from farloop.monitoring.endpoint import HEALTH, METRICS, READY, Endpoint, EndpointError, Response
from farloop.node.reports import Activity
from farloop.runtime.log_queue import dropped_lines
from farloop.wire.messages import Progress
from farloop.wire.uplink import Uplink

# --- Metrics: `farloop_node_` prefix, base units, bounded labels
#
# The training thread hands in what it also reports to the coordinator, once a second; a scrape reads that one value.
# The coordinator shows the same facts of all of its nodes as gauges, for nodes that cannot be scraped.

_STARTED: Final = frozenset({"training", "waiting"})  # states of a node that takes part


class Metrics(Collector):
    """What is known of one node. One registry each and nothing global, so that a test can have several."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, node: NodeId, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._node = node
        self._clock = clock
        self._seen_at: float | None = None
        self._seen: tuple[Progress, Mapping[int, int], bool, bool, int, Uplink | None] | None = None
        """Replaced as a whole: scrapes come from other threads."""
        self._lost: dict[int, float] = {}
        self.mismatches = 0  # anchors that did not have their digest; a snapshot replaces each
        self._spent: tuple[Mapping[Activity, float], float] = {}, 0.0
        self._piped: tuple[Mapping[str, int], int, int] | None = None
        self.follows = ""
        """On a host without rank 0, once it trains: what `/readyz` says. Rank 0 reports for the node."""
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def update(
        self,
        progress: Progress,
        *,
        versions: Mapping[int, int],
        connected: bool,
        alone: bool = False,
        lanes: int = 0,
        uplink: Uplink | None = None,
    ) -> None:
        """Take the node's report, the version of every held anchor by fragment (−1: none yet), whether a session is
        open, whether the node trains alone, how many connections carry blobs, and the limit on what it sends."""
        self._seen = progress, dict(versions), connected, alone, lanes, uplink
        self._seen_at = self._clock()

    def spent(self, seconds: Mapping[Activity, float], codec_s: float) -> None:
        """Where the wall time went, and seconds of the thread that encodes beside the training."""
        self._spent = dict(seconds), codec_s  # replaced as a whole, as everything here

    def piped(self, became: Mapping[str, int], sent_bytes: int, inputs: int) -> None:
        """Of a stage of a pipeline: what became of microbatches so far, bytes of tensors sent, inputs kept now."""
        self._piped = dict(became), sent_bytes, inputs  # replaced as a whole, as everything here

    def lost_by_codec(self, fragment: int, ratio: float) -> None:
        """|residual| ÷ |delta| of the last encoding of a fragment, under a codec with error feedback."""
        self._lost = {**self._lost, fragment: ratio}  # replaced as a whole: scrapes come from other threads

    @property
    def standing(self) -> tuple[bool, str]:
        """Whether the node has joined and started, and its state in words."""
        if self._seen is None:
            return bool(self.follows), self.follows or "starting"
        progress = self._seen[0]
        words = f"{progress.state}: {progress.detail}" if progress.detail else progress.state
        return progress.state in _STARTED, words

    @property
    def silent_s(self) -> float:
        """Seconds since the training thread last reported; 0 before its first report. It reports each second while it
        trains or waits for others, so a long silence is a step (or an evaluation) that hangs."""
        return 0.0 if self._seen_at is None else self._clock() - self._seen_at

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        text: bytes = generate_latest(self.registry)
        return text

    def collect(self) -> Iterable[Metric]:
        """All metrics, as of the last report; none before it."""
        if self._seen is None:
            return
        progress, versions, connected, alone, lanes, uplink = self._seen
        yield self._gauge("connected", "1 while a session with the coordinator is open.", float(connected))
        yield self._gauge("lanes", "Connections to the coordinator that carry deltas and updates.", float(lanes))
        if uplink is not None:
            limit = uplink.bytes_per_s if math.isfinite(uplink.bytes_per_s) else 0.0
            yield self._gauge("uplink_limit_bytes_per_second", "Most that the node sends now; 0: no limit.", limit)
            yield self._counter("uplink_held_seconds", "Time in which blobs waited for that limit.", uplink.held_s)
        yield self._gauge("alone", "1 while it trains without the coordinator, or without the others.", float(alone))
        yield self._gauge("position_steps", "Schedule position: the run's clock.", progress.position)
        yield self._gauge("tokens_per_second", "Tokens trained on per second.", progress.tokens_per_s)
        yield self._gauge(
            "compute_share_ratio",
            "Share of wall time that the training loop had for itself; 1 is best.",
            progress.compute_share,
        )
        if progress.loss is not None:
            yield self._gauge("loss_nats", "Training loss of the last inner step.", progress.loss)
        yield self._counter("inner_steps", "Inner steps since the node's start.", progress.inner_steps)
        yield self._counter("tokens", "Tokens trained on since the node's start.", progress.tokens)
        yield self._counter(
            "blocked_seconds", "Time in which training waited for the link or other nodes.", progress.blocked_s
        )
        yield self._counter("lost_steps", "Inner steps, per fragment, that no commit contains.", progress.lost_steps)
        yield self._counter(
            "anchor_mismatches", "Anchors that did not match their digest and were replaced.", self.mismatches
        )
        yield self._counter(
            "skipped_steps",
            "Inner steps that changed no weight: no gradient, or NaN in it.",
            progress.skipped_steps,
        )
        yield self._counter(
            "skipped_sends", "Due sends that were skipped: too many deltas had no outcome yet.", progress.skipped_turns
        )
        yield self._counter("log_dropped_lines", "Log lines that were not read in time.", dropped_lines())
        moved = [
            ((direction, kind), count)
            for direction, counts in (("up", progress.sent), ("down", progress.received))
            for kind, count in asdict(counts).items()
        ]
        yield self._family(CounterMetricFamily, "bytes", "All bytes, up and down, by kind.", moved, "direction", "kind")
        seconds, codec_s = self._spent
        times = [((activity,), value) for activity, value in seconds.items()]
        yield self._family(CounterMetricFamily, "time_seconds", "Wall time by activity.", times, "activity")
        yield self._counter("codec_seconds", "Time in which the encoder thread worked.", codec_s)
        if self._piped is not None:
            yield from self._pipeline(*self._piped)
        held = [((str(fragment),), version) for fragment, version in versions.items()]
        meaning = "Version of the anchor; -1 before the first."
        yield self._family(GaugeMetricFamily, "fragment_version", meaning, held, "fragment")
        if self._lost:
            lost = [((str(fragment),), ratio) for fragment, ratio in sorted(self._lost.items())]
            meaning = "Norm of the residual of error feedback over that of the delta; a dense codec stays below 1."
            yield self._family(GaugeMetricFamily, "residual_ratio", meaning, lost, "fragment")

    def _pipeline(self, became: Mapping[str, int], sent_bytes: int, inputs: int) -> Iterable[Metric]:
        trips = [((outcome,), count) for outcome, count in sorted(became.items())]
        meaning = "Of a source: completed, dropped, reissued; of any stage: rerouted, skipped, repeated."
        yield self._family(CounterMetricFamily, "pipeline_microbatches", meaning, trips, "outcome")
        yield self._counter("pipeline_sent_bytes", "Activations and gradients sent to other stages.", sent_bytes)
        yield self._gauge("pipeline_inputs", "Microbatches whose input is kept for their backward pass.", inputs)

    def _gauge(self, name: str, meaning: str, value: float) -> Metric:
        return self._family(GaugeMetricFamily, name, meaning, [((), value)])

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        return self._family(CounterMetricFamily, name, meaning, [((), value)])

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        meaning: str,
        values: Iterable[tuple[tuple[str, ...], float]],
        *labels: str,
    ) -> Metric:
        family = kind(f"farloop_node_{name}", meaning, labels=["node", *labels])
        for key, value in values:
            family.add_metric([self._node, *key], value)
        return family


# --- HTTP: `/metrics`, `/healthz` and `/readyz`

STANDSTILL_S = 600.0
"""A training thread that has been silent for this long hangs. Long, for a first step may compile and an evaluation may
be large, and being killed costs what was trained since the last send."""


def serve(address: str, metrics: Metrics, names: str = "") -> Endpoint:
    """Serve the pages at host:port until the endpoint is closed. `names`: as `Endpoint` has it.

    `/healthz` answers 200 as long as training goes on, or waits for others; `/readyz` once the node has joined and
    training has begun. 503 otherwise, with the reason.
    Raises EndpointError: the address is none, or cannot be bound.
    """
    try:
        here = parse_host_port(address, listens=True)
    except ValueError as error:
        raise EndpointError(f"http: {error}") from error

    def text() -> Response:
        return Response(content_type=metrics.content_type, body=metrics.exposition())

    def alive() -> Response:
        if (silent_s := metrics.silent_s) > STANDSTILL_S:
            return Response(status=503, body=f"no inner step has ended for {silent_s:.0f} s\n".encode())
        return Response(body=b"alive\n")

    def ready() -> Response:
        started, words = metrics.standing
        return Response(status=200 if started else 503, body=f"{words}\n".encode())

    return Endpoint(here.host, here.port, {METRICS: text, HEALTH: alive, READY: ready}, names=names)
