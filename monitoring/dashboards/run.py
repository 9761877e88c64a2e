"""Run: is it learning, how fast, at what cost."""

from farloop.monitoring.dashboards.panels import GOOD_IF_HIGH, HAPPENED, C, Line, Page, some


def run() -> Page:
    """What a person looks at first."""
    page = Page(
        title="farloop / Run",
        uid="farloop-run",
        about="Is it learning, how fast, at what cost. Everything here comes from the coordinator's page.",
        annotations=HAPPENED,
    )
    page.number(
        "Validation loss",
        f"max(farloop_validation_loss_nats{C})",
        "none",
        "Of the anchors, which every node shares, in nats per token.",
        decimals=3,
    )
    page.number(
        "Done",
        f"max(farloop_position_steps{C}) / max(farloop_run_steps{C})",
        "percentunit",
        "Schedule position of the node that is furthest, of the steps that the run has.",
        decimals=1,
    )
    page.number(
        "Time left",
        f"clamp_min((max(farloop_run_steps{C}) - max(farloop_position_steps{C}))"
        f" / max(deriv(farloop_position_steps{C}[5m])), 0)",
        "s",
        "At the pace of the last five minutes.",
        graph=False,
    )
    page.number(
        "Tokens a second",
        f"sum(farloop_node_tokens_per_second{C})",
        "none",
        "Of all connected nodes.",
        decimals=0,
    )
    page.number(
        "Compute share",
        f"avg(farloop_node_compute_share_ratio{C} and farloop_node_connected{C} == 1)",
        "percentunit",
        "Share of the nodes' wall time not spent on farloop or waiting for others. Below 60 %: send more rarely (h), "
        "overlap more (tau) or with fewer bits (codec_up).",
        steps=GOOD_IF_HIGH,
        decimals=1,
    )
    page.number(
        "Cost in this time",
        f"sum(increase(farloop_egress_cost_total{C}[$__range]))",
        "none",
        "Bytes that left the coordinator and the nodes in the time shown, at [coordinator] egress_price_per_gb.",
        decimals=4,
    )

    page.row("Is it learning?")
    page.graph(
        "Loss",
        [
            Line(f"max(farloop_validation_loss_nats{C})", "validation", bold=True),
            Line(f"max by (node) (farloop_node_loss_nats{C})", "training, {{node}}"),
        ],
        "none",
        "Nats per token. Training loss is that of a node's last inner step: it jumps about.",
        low=None,
        height=9,
    )
    page.graph(
        "Do the nodes agree?",
        [Line(f"max by (node) (farloop_node_delta_cosine_ratio{C})", "{{node}}")],
        "none",
        "Cosine of a node's last delta with the mean of the others'. It falls as training goes on and H grows; a node "
        'far below the others has other data or a fault. Measured with screen = "full" and three nodes or more.',
        height=9,
        steps=((None, "red"), (-0.2, "transparent")),
        low=-0.3,
    )
    page.graph(
        "Norm of merged deltas",
        [Line(f"max by (fragment) (farloop_delta_norm{C})", "fragment {{fragment}}")],
        "none",
        "Of what a window added up to, before the outer step. Growth without end comes before divergence.",
    )
    page.graph(
        "Norm of each node's delta",
        [Line(f"max by (node) (avg_over_time(farloop_node_delta_norm{C}[30s]))", "{{node}}")],
        "none",
        "Of its last deltas that were merged, whatever their fragments: the mean over half a minute.",
    )

    page.row("How fast?")
    page.graph(
        "Tokens a second",
        [Line(f"max by (node) (farloop_node_tokens_per_second{C})", "{{node}}")],
        "none",
        "As every node reports it, one on top of the other.",
        stacked=True,
    )
    page.graph(
        "Inner step",
        [Line(f"1 / max by (node) (rate(farloop_node_inner_steps{C}[1m]) > 0)", "{{node}}")],
        "s",
        "Wall time of a step, all waiting included, over the last minute.",
    )
    page.graph(
        "H and what it follows from",
        [
            Line(f"max(farloop_h_steps{C})", "H"),
            Line(f"max(farloop_h_max_steps{C}) > 0", "H at most"),
            Line(f"max(farloop_learning_rate{C})", "learning rate", axis="right", unit="none", decimals=5),
        ],
        "none",
        "Inner steps between two sends of a fragment. Under a rule such as qsr it grows as the rate falls.",
        held=True,
    )
    page.graph(
        "Window, by phase",
        [
            Line(
                f"sum by (phase) (rate(farloop_window_seconds_sum{C}[$__rate_interval]))"
                f" / sum by (phase) (rate(farloop_window_seconds_count{C}[$__rate_interval]))",
                "{{phase}}",
            )
        ],
        "s",
        "Mean seconds: collecting deltas, merging them, making the commit durable. Collecting includes training; what "
        "merging and journal take is added to every round.",
        log=True,
        low=None,
    )

    page.row("At what cost?")
    page.graph(
        "Traffic, by kind",
        [
            Line(
                f"sum by (direction, kind) (rate(farloop_link_bytes_total{C}[$__rate_interval])) > 0",
                "{{kind}} {{direction}}",
            )
        ],
        "Bps",
        "All frames between the coordinator and its nodes; sent and received are the coordinator's.",
        stacked=True,
        width=8,
    )
    page.graph(
        "Bytes for a token",
        [
            Line(
                f"sum(rate(farloop_link_bytes_total{C}[1m])) / (sum(rate(farloop_node_tokens{C}[1m])) > 0)",
                "all traffic",
            )
        ],
        "bytes",
        "Both directions and snapshots, over the tokens that were trained on in the same minute.",
        width=8,
    )
    page.graph(
        "Cost",
        [
            Line(f"sum(farloop_egress_cost_total{C})", "since its start"),
            Line(f"sum(rate(farloop_egress_cost_total{C}[5m])) * 3600", "an hour", axis="right", unit="none"),
        ],
        "none",
        "At the price that is set; without one it is zero. The counter begins anew when the coordinator starts again.",
        width=8,
    )

    page.row("Who takes part?")
    page.graph(
        "Nodes",
        [Line(f"max by (state) (farloop_nodes{C})", "{{state}}")],
        "none",
        "Connected, training, expected in the last window, merged in it, in quarantine.",
        held=True,
        width=8,
    )
    page.graph(
        "Deltas that were expected and not merged",
        [
            Line(
                some(f"sum by (node, reason) (farloop_dropped_deltas_total{C}) > 0", "reason"),
                "{{reason}} {{node}}",
            )
        ],
        "none",
        "Since the coordinator's start, with the reason; the status page says more.",
        width=8,
        held=True,
        counts=True,
    )
    page.graph(
        "Staleness",
        [Line(f"max by (node) (farloop_node_staleness_versions{C})", "{{node}}")],
        "none",
        "Versions that a node's last merged delta was behind.",
        held=True,
        width=8,
        counts=True,
    )
    return page
