"""Covers `node/metrics.py`."""

import dataclasses

from prometheus_client.parser import text_string_to_metric_families

from farloop.algo.spec import NodeId
from farloop.node.metrics import Metrics
from farloop.wire.messages import NodeState, Progress

PROGRESS = Progress(
    state="training",
    position=12.5,
    round=3,
    inner_steps=13,
    tokens=1300,
    loss=2.5,
    tokens_per_s=40.0,
    compute_share=0.75,
    blocked_s=1.5,
    lost_steps=4,
    sample_watermark=52,
    bytes_up=1000,
    bytes_down=2000,
    bytes_state=3000,
    skipped_turns=5,
    skipped_steps=2,
)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(metrics: Metrics) -> Samples:
    """Value by name and labels, the node's own left out."""
    found: Samples = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name.startswith("process_"):
                continue
            labels = dict(sample.labels)
            assert labels.pop("node") == "oslo"
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


BYTES = {
    (("direction", direction), ("kind", kind)): 0
    for direction in ("up", "down")
    for kind in ("delta", "update", "snapshot", "probe", "control")
} | {
    (("direction", "up"), ("kind", "delta")): 1000,
    (("direction", "down"), ("kind", "update")): 2000,
    (("direction", "down"), ("kind", "snapshot")): 3000,
}


def test_a_scrape_shows_the_last_report() -> None:
    metrics = Metrics(NodeId("oslo"))
    metrics.saw(PROGRESS, versions={0: 3, 1: -1}, connected=True)
    metrics.mismatches += 1
    metrics.spent({"training": 9.0, "blocked": 1.5}, 0.25)
    assert samples(metrics) == {
        ("farloop_node_connected", ()): 1,
        ("farloop_node_position_steps", ()): 12.5,
        ("farloop_node_tokens_per_second", ()): 40,
        ("farloop_node_compute_share_ratio", ()): 0.75,
        ("farloop_node_loss_nats", ()): 2.5,
        ("farloop_node_inner_steps_total", ()): 13,
        ("farloop_node_tokens_total", ()): 1300,
        ("farloop_node_alone", ()): 0.0,
        ("farloop_node_anchor_mismatches_total", ()): 1.0,
        ("farloop_node_blocked_seconds_total", ()): 1.5,
        ("farloop_node_lost_steps_total", ()): 4,
        ("farloop_node_skipped_steps_total", ()): 2,
        ("farloop_node_skipped_sends_total", ()): 5,
        ("farloop_node_time_seconds_total", (("activity", "training"),)): 9,
        ("farloop_node_time_seconds_total", (("activity", "blocked"),)): 1.5,
        ("farloop_node_codec_seconds_total", ()): 0.25,
        **{("farloop_node_bytes_total", key): value for key, value in BYTES.items()},
        ("farloop_node_fragment_version", (("fragment", "0"),)): 3,
        ("farloop_node_fragment_version", (("fragment", "1"),)): -1,
    }
    metrics.saw(dataclasses.replace(PROGRESS, inner_steps=14), versions={0: 3, 1: -1}, connected=False)
    assert samples(metrics)["farloop_node_inner_steps_total", ()] == 14
    assert samples(metrics)["farloop_node_connected", ()] == 0


def test_a_stage_of_a_pipeline_shows_what_became_of_its_microbatches() -> None:
    metrics = Metrics(NodeId("oslo"))
    metrics.saw(PROGRESS, versions={}, connected=True)
    assert not [name for name, _ in samples(metrics) if "pipeline" in name]
    metrics.piped({"completed": 8, "rerouted": 1}, 4096, 2)
    shown = {key: value for key, value in samples(metrics).items() if "pipeline" in key[0]}
    assert shown == {
        ("farloop_node_pipeline_microbatches_total", (("outcome", "completed"),)): 8,
        ("farloop_node_pipeline_microbatches_total", (("outcome", "rerouted"),)): 1,
        ("farloop_node_pipeline_sent_bytes_total", ()): 4096,
        ("farloop_node_pipeline_inputs", ()): 2,
    }


def test_what_is_not_known_is_not_shown() -> None:
    metrics = Metrics(NodeId("oslo"))
    assert samples(metrics) == {}
    metrics.saw(dataclasses.replace(PROGRESS, loss=None), versions={}, connected=True)
    assert ("farloop_node_loss_nats", ()) not in samples(metrics)


def test_a_node_is_ready_once_it_takes_part_and_says_what_it_waits_for() -> None:
    metrics = Metrics(NodeId("oslo"))
    assert metrics.standing == (False, "starting")
    cases: tuple[tuple[NodeState, bool], ...] = (
        ("joining", False),
        ("ready", False),
        ("training", True),
        ("waiting", True),
        ("draining", False),
        ("finished", False),
    )
    for state, started in cases:
        metrics.saw(dataclasses.replace(PROGRESS, state=state, detail="x"), versions={}, connected=True)
        assert metrics.standing == (started, f"{state}: x")
    metrics.saw(PROGRESS, versions={}, connected=True)
    assert metrics.standing == (True, "training")
