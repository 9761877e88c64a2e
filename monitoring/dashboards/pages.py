"""The four Grafana dashboards, as tables of panels: title, query or lines, description."""

from pathlib import Path

from farloop.monitoring.dashboards.panels import (
    CONNECTED,
    GOOD_IF_HIGH,
    GOOD_IF_ZERO,
    ByNode,
    Column,
    Dashboard,
    Graph,
    Line,
    Number,
    Row,
    Words,
)  # fmt: skip

RUNBOOKS = Path(__file__).parents[1] / "runbooks"


def runbooks() -> str:
    """Every alert with its meaning and its runbook, as Markdown."""
    rows = ["| Alert | Meaning | Page |", "| --- | --- | --- |"]
    for path in sorted(RUNBOOKS.glob("*.md")):
        meaning = path.read_text().partition("## Meaning\n\n")[2].partition("\n")[0]
        first = meaning.split(". ")[0].rstrip(".")
        rows.append(f"| **{path.stem}** | {first}. | `monitoring/runbooks/{path.name}` |")
    return "\n".join(rows)


# fmt: off

RUN = Dashboard(
    "run",
    "Learning, speed and cost of the run. All data come from the coordinator's metrics.",
    [
        Number("Validation loss", "max(farloop_validation_loss_nats{C})",
            "Of the anchors, which every node shares, in nats per token.", decimals=3),
        Number("Done", "max(farloop_position_steps{C}) / max(farloop_run_steps{C})",
            "Schedule position of the node that is furthest, of the steps that the run has.", unit="percentunit",
            decimals=1),
        Number("Time left",
            "clamp_min((max(farloop_run_steps{C}) - max(farloop_position_steps{C})) / "
            "max(deriv(farloop_position_steps{C}[5m])), 0)", "At the pace of the last five minutes.", unit="s",
            graph=False),
        Number("Tokens a second", "sum(farloop_node_tokens_per_second{C})", "Of all connected nodes.", decimals=0),
        Number("Compute share", "avg(farloop_node_compute_share_ratio{C} and farloop_node_connected{C} == 1)",
            "Share of the nodes' wall time not spent on farloop or waiting for others. Below 60 %: send more rarely "
            "(h), overlap more (tau) or with fewer bits (codec_up).", unit="percentunit", steps=GOOD_IF_HIGH,
            decimals=1),
        Number("Cost in this time", "sum(increase(farloop_egress_cost_total{C}[$__range]))",
            "Bytes that left the coordinator and the nodes in the time shown, at [coordinator] egress_price_per_gb.",
            decimals=4),
        Row("Is it learning?"),
        Graph("Loss", [
            Line("validation", "max(farloop_validation_loss_nats{C})", bold=True),
            Line("training, {{node}}", "max by (node) (farloop_node_loss_nats{C})"),
        ], "Nats per token. Training loss is that of a node's last inner step: it jumps about.", height=9, low=None),
        Graph("Do the nodes agree?", [Line("{{node}}", "max by (node) (farloop_node_delta_cosine_ratio{C})")],
            "Cosine of a node's last delta with the mean of the others'. It falls as training goes on and H grows; a "
            "node far below the others has other data or a fault. Measured with screen = \"full\" and three nodes or "
            "more.", height=9, steps=((None, "red"), (-0.2, "transparent")), low=-0.3),
        Graph("Norm of merged deltas", [Line("fragment {{fragment}}", "max by (fragment) (farloop_delta_norm{C})")],
            "Norm of a window's merged delta, before the outer step. Growth without end comes before divergence."),
        Graph("Norm of each node's delta",
            [Line("{{node}}", "max by (node) (avg_over_time(farloop_node_delta_norm{C}[30s]))")],
            "Of its last deltas that were merged, whatever their fragments: the mean over half a minute."),
        Row("How fast?"),
        Graph("Tokens a second", [Line("{{node}}", "max by (node) (farloop_node_tokens_per_second{C})")],
            "As reported by every node, stacked.", stacked=True),
        Graph("Inner step", [Line("{{node}}", "1 / max by (node) (rate(farloop_node_inner_steps{C}[1m]) > 0)")],
            "Wall time of a step, all waiting included, over the last minute.", unit="s"),
        Graph("H and the learning rate", [
            Line("H", "max(farloop_h_steps{C})"),
            Line("H at most", "max(farloop_h_max_steps{C}) > 0"),
            Line("learning rate", "max(farloop_learning_rate{C})", axis="right", decimals=5),
        ], "Inner steps between two sends of a fragment. Under a rule such as qsr it grows as the rate falls.",
            held=True),
        Graph("Window, by phase", [
            Line("{{phase}}",
                 "sum by (phase) (rate(farloop_window_seconds_sum{C}[$__rate_interval]))"
                 " / sum by (phase) (rate(farloop_window_seconds_count{C}[$__rate_interval]))"),
        ],
            "Mean seconds: collecting deltas, merging them, making the commit durable. Collecting includes training; "
            "what merging and journal take is added to every round.", unit="s", low=None, log=True),
        Row("At what cost?"),
        Graph("Traffic, by kind", [
            Line("{{kind}} {{direction}}",
                 "sum by (direction, kind) (rate(farloop_link_bytes_total{C}[$__rate_interval])) > 0"),
        ], "All frames between the coordinator and its nodes; sent and received are the coordinator's.", unit="Bps",
            width=8, stacked=True),
        Graph("Bytes per token", [
            Line("all traffic",
                 "sum(rate(farloop_link_bytes_total{C}[1m])) / (sum(rate(farloop_node_tokens{C}[1m])) > 0)"),
        ], "Both directions and snapshots, over the tokens that were trained on in the same minute.", unit="bytes",
            width=8),
        Graph("Cost", [
            Line("since its start", "sum(farloop_egress_cost_total{C})"),
            Line("an hour", "sum(rate(farloop_egress_cost_total{C}[5m])) * 3600", axis="right"),
        ],
            "At the price that is set; without one it is zero. The counter begins anew when the coordinator starts "
            "again.", width=8),
        Row("Who takes part?"),
        Graph("Nodes", [Line("{{state}}", "max by (state) (farloop_nodes{C})")],
            "Connected, training, expected in the last window, merged in it, in quarantine.", width=8, held=True),
        Graph("Deltas that were expected and not merged", [
            Line("{{reason}} {{node}}", "sum by (node, reason) (farloop_dropped_deltas_total{C}) > 0", none="reason"),
        ], "Since the coordinator's start, with the reason; the status page says more.", width=8, held=True,
            counts=True),
        Graph("Staleness", [Line("{{node}}", "max by (node) (farloop_node_staleness_versions{C})")],
            "Versions that a node's last merged delta was behind.", width=8, held=True, counts=True),
    ],
)

NETWORK = Dashboard(
    "network",
    "Every link between the coordinator and a node, seen from the coordinator; nodes do not talk to each other.",
    [
        Number("To the nodes", "sum(rate(farloop_link_bytes_total{sent}[$__rate_interval]))",
            "Updates, snapshots and control frames.", unit="Bps", decimals=1),
        Number("From the nodes", "sum(rate(farloop_link_bytes_total{received}[$__rate_interval]))",
            "Deltas and control frames.", unit="Bps", decimals=1),
        Number("Moved in this time", "sum(increase(farloop_link_bytes_total{C}[$__range]))",
            "Both directions, over the range that is shown.", unit="bytes", decimals=1, graph=False),
        Number("On their way", "sum(farloop_link_in_flight_bytes{C})",
            "Sent and not acknowledged. It rises with every update, and falls to zero between two.", unit="bytes",
            decimals=1),
        Number("Sent again", "sum(increase(farloop_link_resends_total{C}[$__range]))",
            "Blobs begun again from what had arrived, and control frames repeated. Each was a link that broke or "
            "stood still.", steps=GOOD_IF_ZERO, decimals=0),
        Number("Longest silence", "max(farloop_node_last_message_seconds{C} and farloop_node_connected{C} == 1)",
            "Since the last message of a connected node. They report every second; after a few, a link is cut or a "
            "node hangs.", unit="s", steps=((None, "green"), (5, "orange"), (10, "red")), decimals=1),
        ByNode("Links", [
            Column("Connected", "max by (node) (farloop_node_connected{C})", "bool_yes_no", steps=CONNECTED),
            Column("To it", "sum by (node) (rate(farloop_link_bytes_total{sent}[1m]))", "Bps"),
            Column("From it", "sum by (node) (rate(farloop_link_bytes_total{received}[1m]))", "Bps"),
            Column("Acknowledged to it", "max by (node) (farloop_link_bytes_per_second{C})", "Bps"),
            Column("On their way", "max by (node) (farloop_link_in_flight_bytes{C})", "bytes"),
            Column("Sent again, 1 h",
                   "sum by (node) (increase(farloop_link_resends_total{C}[1h]))", steps=GOOD_IF_ZERO),
            Column("Delta after", "max by (node) (farloop_node_arrival_seconds{C})", "s"),
            Column("Silent for", "max by (node) (farloop_node_last_message_seconds{C})", "s"),
            Column("Cost", "sum by (node) (farloop_egress_cost_total{C})"),
        ],
            "A line for every node that this coordinator has met. \"Delta after\": from the opening of the last "
            "window to the node's delta.", height=6),
        Row("Traffic by direction"),
        Graph("To each node",
            [Line("{{node}}", "sum by (node) (rate(farloop_link_bytes_total{sent}[$__rate_interval]))")],
            "What leaves the coordinator. A snapshot to a joiner is a wide hill, updates are spikes.", unit="Bps"),
        Graph("From each node",
            [Line("{{node}}", "sum by (node) (rate(farloop_link_bytes_total{received}[$__rate_interval]))")],
            "What the nodes send.", unit="Bps"),
        Graph("Kinds of bytes", [
            Line("{{kind}} {{direction}}",
                 "sum by (kind, direction) (rate(farloop_link_bytes_total{C}[$__rate_interval])) > 0"),
        ], "Deltas come in, updates and snapshots go out, control goes both ways.", unit="Bps", stacked=True),
        Graph("Payload, by codec", [
            Line("{{kind}}, {{codec}}",
                 "sum by (kind, codec) (rate(farloop_payload_bytes_total{C}[$__rate_interval]))"),
        ], "Encoded deltas that were received, and updates that were made: once each, however many nodes take it.",
            unit="Bps"),
        Row("How well"),
        Graph("Acknowledged to each node", [Line("{{node}}", "max by (node) (farloop_link_bytes_per_second{C})")],
            "How fast blobs have lately been acknowledged, round trips included: what a link gives, where blobs are "
            "large enough to fill it. 64 KiB/s is assumed where nothing is known.", unit="Bps"),
        Graph("Delta after the opening of its window",
            [Line("{{node}}", "max by (node) (farloop_node_arrival_seconds{C})")],
            "Training and upload together. One node far above the others delays all that wait for it.", unit="s",
            held=True),
        Graph("On their way", [Line("{{node}}", "max by (node) (farloop_link_in_flight_bytes{C})")],
            "Sent and not acknowledged. Level and above zero for long: the transfer stands still.", unit="bytes"),
        Graph("Sent again", [Line("{{node}}", "sum by (node) (increase(farloop_link_resends_total{C}[1m]))")],
            "In the last minute.", counts=True),
    ],
)

NODE = Dashboard(
    "node",
    "Where a node's time goes, what it loses, and its GPUs. The first row comes from the coordinator, and is there "
    "for nodes that Prometheus cannot reach; the rest are the nodes' own pages.",
    [
        Number("Connected", "max by (node) (farloop_node_connected{CN})", "To the coordinator.", unit="bool_yes_no",
            steps=CONNECTED, graph=False, legend="{{node}}"),
        Number("Training loss", "max by (node) (farloop_node_loss_nats{CN})", "Of its last inner step.", decimals=2,
            legend="{{node}}"),
        Number("Tokens a second", "max by (node) (farloop_node_tokens_per_second{CN})", "As it reports.", decimals=0,
            legend="{{node}}"),
        Number("Compute share", "max by (node) (farloop_node_compute_share_ratio{CN})",
            "Share of its wall time not spent on farloop, or waiting.", unit="percentunit", steps=GOOD_IF_HIGH,
            decimals=0, legend="{{node}}"),
        Number("Lost steps", "max by (node) (farloop_node_lost_steps{CN})",
            "Inner steps, per fragment, that no commit contains: work that came too late, or was done in vain.",
            steps=((None, "green"), (100, "orange")), decimals=0, legend="{{node}}"),
        Number("Start", "max by (node) (farloop_node_incarnation{CN})", "Which start of the node this is.",
            decimals=0, graph=False, legend="{{node}}"),
        Row("Time by activity"),
        Graph("Wall time",
            [Line("{{activity}}", "sum by (node, activity) (rate(farloop_node_time_seconds_total{N}[1m]))")],
            "training: the user's step; farloop: taking deltas and merging; blocked: waiting for the link or for "
            "others; evaluation: scoring the anchors.", unit="percentunit", stacked=True),
        Graph("Inner step",
            [Line("{{node}}", "1 / (sum by (node) (rate(farloop_node_inner_steps_total{N}[1m])) > 0)")],
            "Wall time of a step, all waiting included.", unit="s"),
        Graph("Training loss", [Line("{{node}}", "max by (node) (farloop_node_loss_nats{CN})")],
            "Nats per token, of its last inner step.", width=8, low=None),
        Graph("Encoding during training",
            [Line("{{node}}", "sum by (node) (rate(farloop_node_codec_seconds_total{N}[$__rate_interval]))")],
            "Share of one core that the encoder's thread takes. At 100 % deltas queue up behind it.",
            unit="percentunit", width=8),
        Graph("Residual of the codec", [Line("{{node}}", "max by (node) (farloop_node_residual_ratio{N})")],
            "Norm of the residual over that of the delta, of the worst fragment, under error feedback. A dense codec "
            "stays below 1.", width=8, steps=((None, "transparent"), (1, "red"))),
        Row("Its part of the run"),
        Graph("Behind the coordinator, in versions", [
            Line("{{node}}",
                 "max by (node) (max by (fragment) (farloop_fragment_version{C})"
                 " - on (fragment) group_right () max by (node, fragment) (farloop_node_fragment_version{N}))"),
        ], "Of the fragment that is furthest behind. One or two while updates are on their way.", width=8,
            counts=True),
        Graph("Bytes",
            [Line("{{direction}}", "sum by (node, direction) (rate(farloop_node_bytes_total{N}[$__rate_interval]))")],
            "All bytes that its link carried: deltas, updates, snapshots, probes and control.", unit="Bps", width=8),
        Graph("What went wrong", [
            Line("lost steps", "sum by (node) (increase(farloop_node_lost_steps_total{N}[5m]))"),
            Line("skipped sends", "sum by (node) (increase(farloop_node_skipped_sends_total{N}[5m]))"),
            Line("mismatches", "sum by (node) (increase(farloop_node_anchor_mismatches_total{N}[5m]))"),
            Line("trains alone", "max by (node) (farloop_node_alone{N})"),
        ], "In the last five minutes.", width=8, counts=True),
        Row("Its process"),
        Graph("Memory", [
            Line("{{node}}",
                 "process_resident_memory_bytes * on (job, instance)"
                 " group_left (node) max by (job, instance, node) (farloop_node_codec_seconds_total{N} * 0 + 1)"),
        ], "Resident, of the process that talks to the coordinator.", unit="bytes"),
        Graph("Processor", [
            Line("{{node}}",
                 "rate(process_cpu_seconds_total[1m]) * on (job, instance)"
                 " group_left (node) max by (job, instance, node) (farloop_node_codec_seconds_total{N} * 0 + 1)"),
        ], "Cores in use."),
        Row("Its GPUs (NVIDIA's exporter)"),
        Graph("Utilization", [Line("{{Hostname}} GPU {{gpu}}", "max by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL{G})")],
            "Share of time with a kernel running. Waves with the period of H mean that the GPUs wait for the "
            "network.", unit="percent", width=8, high=100),
        Graph("Tensor cores",
            [Line("{{Hostname}} GPU {{gpu}}", "max by (Hostname, gpu) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{G})")],
            "Share of cycles in which they work: closer to what is learned than utilization.", unit="percentunit",
            width=8, high=1),
        Graph("Memory in use", [
            Line("{{Hostname}} GPU {{gpu}}",
                 "max by (Hostname, gpu) (DCGM_FI_DEV_FB_USED{G} / (DCGM_FI_DEV_FB_USED{G} + DCGM_FI_DEV_FB_FREE{G}))"),
        ], "Of the GPU's own. farloop keeps its anchors in the host's memory.", unit="percentunit", width=8, high=1),
        Graph("Power", [Line("{{Hostname}} GPU {{gpu}}", "max by (Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE{G})")],
            "Falls while training waits.", unit="watt", width=8),
        Graph("Temperature", [Line("{{Hostname}} GPU {{gpu}}", "max by (Hostname, gpu) (DCGM_FI_DEV_GPU_TEMP{G})")],
            "A GPU that throttles makes its node the straggler.", unit="celsius", width=8,
            steps=((None, "transparent"), (85, "red"))),
        Graph("Last XID error",
            [Line("{{Hostname}} GPU {{gpu}}", "max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS{G})")],
            "0: none. The driver's error number, as NVIDIA lists them.", width=8, held=True, counts=True),
    ],
    per_node=True,
)

COORDINATOR = Dashboard(
    "coordinator",
    "The process that holds the global model: its windows, journal, disk and alarms, and the peers that it refused.",
    [
        Number("Alarms", "sum(farloop_alarms{C})", "Of the coordinator itself; /status says which and what to do.",
            steps=GOOD_IF_ZERO, decimals=0),
        Number("Commits held",
            'max({__name__=~"farloop_(storage|participation|rollback)_held",instance=~"$coordinator"})',
            "Whether nothing is committed: the disk takes no more, too few nodes are merged, or the state looks old.",
            unit="bool_yes_no", steps=GOOD_IF_ZERO, graph=False),
        Number("Participation", "min(farloop_participation_ratio{C})",
            "Share of the live nodes that were merged in the last rounds.", unit="percentunit", steps=GOOD_IF_HIGH,
            decimals=0),
        Number("Start", "max(farloop_epoch{C})", "Number of the coordinator's start on this state folder.",
            decimals=0, graph=False),
        Number("Running for", "time() - max(process_start_time_seconds{C})", "Since its process started.", unit="s",
            graph=False),
        Number("Free disk", "min(farloop_storage_free_bytes{C} / farloop_storage_size_bytes{C})",
            "Of the file system of the state folder. When it is full the run is held, and loses nothing.",
            unit="percentunit", steps=((None, "red"), (0.1, "orange"), (0.2, "green")), decimals=0),
        Row("Windows"),
        Graph("Commits per minute", [Line("windows", "sum(rate(farloop_commits_total{C}[1m])) * 60")],
            "All fragments together.", width=8),
        Graph("Open for", [
            Line("median",
                 "histogram_quantile(0.5, sum by (le, phase) (rate(farloop_window_seconds_bucket{collecting}[5m])))"),
            Line("p95",
                 "histogram_quantile(0.95, sum by (le, phase) (rate(farloop_window_seconds_bucket{collecting}[5m])))"),
        ], "From the opening of a window to the end of collecting.", unit="s", width=8),
        Graph("Version of each fragment",
            [Line("fragment {{fragment}}", "max by (fragment) (farloop_fragment_version{C})")],
            "They climb together; one that stays behind waits for a delta.", width=8, low=None, held=True),
        Row("Duration of a commit"),
        Graph("Merging", [
            Line("median", "histogram_quantile(0.5, sum by (le) (rate(farloop_merge_seconds_bucket{C}[5m])))"),
            Line("p95", "histogram_quantile(0.95, sum by (le) (rate(farloop_merge_seconds_bucket{C}[5m])))"),
        ], "Summing, the outer step and encoding of one window.", unit="s", width=8),
        Graph("Journal", [
            Line("median", "histogram_quantile(0.5, sum by (le) (rate(farloop_journal_seconds_bucket{C}[5m])))"),
            Line("p95", "histogram_quantile(0.95, sum by (le) (rate(farloop_journal_seconds_bucket{C}[5m])))"),
        ], "Making one commit durable: two fsyncs. No node is told of a commit before.", unit="s", width=8,
            steps=((None, "transparent"), (1, "red"))),
        Graph("Samples", [Line("{{outcome}}", "sum by (outcome) (rate(farloop_samples_total{C}[1m]))")],
            "By the second: granted to nodes, trained on, given back; uncertain: trained on, in no stored delta.",
            width=8),
        Row("Refused, dropped and lost"),
        Graph("Events",
            [Line("{{kind}} {{reason}}", "sum by (kind, reason) (farloop_events_total{C}) > 0", none="kind")],
            "Since its start. delta: refused; dropped: a window closed without it; session: a connection ended; "
            "left; anchor: it did not match its digest.", width=8, held=True, counts=True),
        Graph("Not let in", [
            Line("refused: {{reason}}", "sum by (reason) (farloop_refusals_total{C}) > 0", none="reason"),
            Line("rejected: {{reason}}", "sum by (reason) (farloop_rejected_peers_total{C}) > 0", none="reason"),
        ], "Since its start. Refused: a node that greeted; rejected: an unknown key, a broken frame, a flood.",
            width=8, held=True, counts=True),
        Graph("Alarms and alerts", [
            Line("alarm: {{kind}}", "sum by (kind) (farloop_alarm{C}) > 0", none="kind"),
            Line("alert: {{alertname}}",
                 'sum by (alertname) (ALERTS{alertname=~"Farloop.*",alertstate="firing"})', none="alertname"),
        ], "Alarms are the coordinator's own words, alerts are rules of Prometheus; each alert has a runbook.",
            width=8, held=True, counts=True),
        Row("Its machine"),
        Graph("Disk", [
            Line("free", "min(farloop_storage_free_bytes{C})"),
            Line("size", "min(farloop_storage_size_bytes{C})"),
        ], "Of the file system of the state folder.", unit="bytes", width=6),
        Graph("Memory and processor", [
            Line("resident", "max(process_resident_memory_bytes{C})"),
            Line("cores in use", "max(rate(process_cpu_seconds_total{C}[1m]))", axis="right"),
        ], "Of its process. Anchors, momenta and the deltas of open windows are in memory.", unit="bytes", width=6),
        Graph("Copies and reports", [
            Line("age of the newest copy", "max(farloop_copy_lag_seconds{C})"),
            Line("lines lost", "sum(increase(farloop_log_dropped_lines_total{C}[5m]))", axis="right"),
        ],
            "Copies of the state to an object store, where that is set; lines of metrics.jsonl that the disk did not "
            "take in the last five minutes.", unit="s", width=6),
        Graph("Standby", [
            Line("bytes behind", "max(farloop_standby_lag_bytes{C})"),
            Line("standbys in sync", "max(farloop_standbys_in_sync{C})", axis="right"),
        ], "Other coordinators that have all that nodes were told; bytes on their way to one.", unit="bytes", width=6),
        Row("If an alert fires"),
        Words("Runbooks", runbooks, height=18),
    ],
)

DASHBOARDS = (RUN, NETWORK, NODE, COORDINATOR)
