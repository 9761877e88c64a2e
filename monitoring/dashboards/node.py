"""Node: where one cluster's time goes, with its GPUs beside it."""

from farloop.monitoring.dashboards.panels import CN, GOOD_IF_HIGH, HAPPENED, G, Line, N, Page


def node() -> Page:
    """One node, or several beside each other."""
    page = Page(
        title="farloop / Node",
        uid="farloop-node",
        about="Where a node's time goes, what it loses, and its GPUs. The first row comes from the coordinator, and is "
        "there for nodes that Prometheus cannot reach; the rest are the nodes' own pages.",
        annotations=HAPPENED,
        per_node=True,
    )
    page.number(
        "Connected",
        f"max by (node) (farloop_node_connected{CN})",
        "bool_yes_no",
        "To the coordinator.",
        steps=((None, "red"), (1, "green")),
        graph=False,
        legend="{{node}}",
    )
    page.number(
        "Training loss",
        f"max by (node) (farloop_node_loss_nats{CN})",
        "none",
        "Of its last inner step.",
        decimals=2,
        legend="{{node}}",
    )
    page.number(
        "Tokens a second",
        f"max by (node) (farloop_node_tokens_per_second{CN})",
        "none",
        "As it reports.",
        decimals=0,
        legend="{{node}}",
    )
    page.number(
        "Compute share",
        f"max by (node) (farloop_node_compute_share_ratio{CN})",
        "percentunit",
        "Share of its wall time not spent on farloop, or waiting.",
        steps=GOOD_IF_HIGH,
        decimals=0,
        legend="{{node}}",
    )
    page.number(
        "Lost steps",
        f"max by (node) (farloop_node_lost_steps{CN})",
        "none",
        "Inner steps, per fragment, that no commit contains: work that came too late, or was done in vain.",
        decimals=0,
        legend="{{node}}",
        steps=((None, "green"), (100, "orange")),
    )
    page.number(
        "Start",
        f"max by (node) (farloop_node_incarnation{CN})",
        "none",
        "Which start of the node this is.",
        decimals=0,
        legend="{{node}}",
        graph=False,
    )

    page.row("Where its time goes")
    page.graph(
        "Wall time",
        [
            Line(
                f"sum by (node, activity) (rate(farloop_node_time_seconds_total{N}[1m]))",
                "{{activity}}",
            )
        ],
        "percentunit",
        "training: the user's step; farloop: taking deltas and merging; blocked: waiting for the link or "
        "for others; evaluation: scoring the anchors.",
        stacked=True,
    )
    page.graph(
        "Inner step",
        [Line(f"1 / (sum by (node) (rate(farloop_node_inner_steps_total{N}[1m])) > 0)", "{{node}}")],
        "s",
        "Wall time of a step, all waiting included.",
    )
    page.graph(
        "Training loss",
        [Line(f"max by (node) (farloop_node_loss_nats{CN})", "{{node}}")],
        "none",
        "Nats per token, of its last inner step.",
        low=None,
        width=8,
    )
    page.graph(
        "Encoding beside the training",
        [Line(f"sum by (node) (rate(farloop_node_codec_seconds_total{N}[$__rate_interval]))", "{{node}}")],
        "percentunit",
        "Share of one core that the encoder's thread takes. At 100 % deltas queue up behind it.",
        width=8,
    )
    page.graph(
        "What the codec holds back",
        [Line(f"max by (node) (farloop_node_residual_ratio{N})", "{{node}}")],
        "none",
        "Norm of the residual over that of the delta, of the worst fragment, under error feedback. A dense "
        "codec stays below 1.",
        width=8,
        steps=((None, "transparent"), (1, "red")),
    )

    page.row("Its part of the run")
    page.graph(
        "Behind the coordinator, in versions",
        [
            Line(
                'max by (node) (max by (fragment) (farloop_fragment_version{instance=~"$coordinator"})'
                " - on (fragment) group_right ()"
                ' max by (node, fragment) (farloop_node_fragment_version{node=~"$node"}))',
                "{{node}}",
            )
        ],
        "none",
        "Of the fragment that is furthest behind. One or two while updates are on their way.",
        width=8,
        counts=True,
    )
    page.graph(
        "Bytes",
        [
            Line(
                f"sum by (node, direction) (rate(farloop_node_bytes_total{N}[$__rate_interval]))",
                "{{direction}}",
            )
        ],
        "Bps",
        "All bytes that its link carried: deltas, updates, snapshots, probes and control.",
        width=8,
    )
    page.graph(
        "What went wrong",
        [
            Line(f"sum by (node) (increase(farloop_node_lost_steps_total{N}[5m]))", "lost steps"),
            Line(f"sum by (node) (increase(farloop_node_skipped_turns_total{N}[5m]))", "skipped turns"),
            Line(f"sum by (node) (increase(farloop_node_anchor_mismatches_total{N}[5m]))", "mismatches"),
            Line(f"max by (node) (farloop_node_alone{N})", "trains alone"),
        ],
        "none",
        "In the last five minutes.",
        width=8,
        counts=True,
    )

    whose = "* on (job, instance) group_left (node) max by (job, instance, node) (farloop_node_codec_seconds_total"
    page.row("Its process")
    page.graph(
        "Memory",
        [Line(f"process_resident_memory_bytes {whose}{N} * 0 + 1)", "{{node}}")],
        "bytes",
        "Resident, of the process that talks to the coordinator.",
    )
    page.graph(
        "Processor",
        [Line(f"rate(process_cpu_seconds_total[1m]) {whose}{N} * 0 + 1)", "{{node}}")],
        "none",
        "Cores in use.",
    )

    page.row("Its GPUs (NVIDIA's exporter)")
    page.graph(
        "Utilization",
        [Line(f"max by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL{G})", "{{Hostname}} GPU {{gpu}}")],
        "percent",
        "Share of time with a kernel running. Waves with the period of H mean that the GPUs wait for the network.",
        width=8,
        high=100,
    )
    page.graph(
        "Tensor cores",
        [Line(f"max by (Hostname, gpu) (DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{G})", "{{Hostname}} GPU {{gpu}}")],
        "percentunit",
        "Share of cycles in which they work: closer to what is learned than utilization.",
        width=8,
        high=1,
    )
    page.graph(
        "Memory in use",
        [
            Line(
                f"max by (Hostname, gpu) (DCGM_FI_DEV_FB_USED{G} / (DCGM_FI_DEV_FB_USED{G} + DCGM_FI_DEV_FB_FREE{G}))",
                "{{Hostname}} GPU {{gpu}}",
            )
        ],
        "percentunit",
        "Of the GPU's own. farloop keeps its anchors in the host's memory.",
        width=8,
        high=1,
    )
    page.graph(
        "Power",
        [Line(f"max by (Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE{G})", "{{Hostname}} GPU {{gpu}}")],
        "watt",
        "Falls while training waits.",
        width=8,
    )
    page.graph(
        "Temperature",
        [Line(f"max by (Hostname, gpu) (DCGM_FI_DEV_GPU_TEMP{G})", "{{Hostname}} GPU {{gpu}}")],
        "celsius",
        "A GPU that throttles makes its node the straggler.",
        width=8,
        steps=((None, "transparent"), (85, "red")),
    )
    page.graph(
        "Last XID error",
        [Line(f"max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS{G})", "{{Hostname}} GPU {{gpu}}")],
        "none",
        "0: none. The driver's error number, as NVIDIA lists them.",
        width=8,
        held=True,
        counts=True,
    )
    return page
