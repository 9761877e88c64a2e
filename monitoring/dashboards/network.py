"""Network: every link between the coordinator and a node, as the coordinator sees it."""

from farloop.monitoring.dashboards.panels import GOOD_IF_ZERO, HAPPENED, C, Column, Line, Page


def network() -> Page:
    """Links, and what they carry."""
    sent = '{instance=~"$coordinator",direction="sent"}'
    received = '{instance=~"$coordinator",direction="received"}'
    page = Page(
        title="farloop / Network",
        uid="farloop-network",
        about="Every link between the coordinator and a node, seen from the coordinator; nodes do not talk to each "
        "other.",
        annotations=HAPPENED,
    )
    page.number(
        "To the nodes",
        f"sum(rate(farloop_link_bytes_total{sent}[$__rate_interval]))",
        "Bps",
        "Updates, snapshots and control frames.",
        decimals=1,
    )
    page.number(
        "From the nodes",
        f"sum(rate(farloop_link_bytes_total{received}[$__rate_interval]))",
        "Bps",
        "Deltas and control frames.",
        decimals=1,
    )
    page.number(
        "Moved in this time",
        f"sum(increase(farloop_link_bytes_total{C}[$__range]))",
        "bytes",
        "Both directions, over the range that is shown.",
        decimals=1,
        graph=False,
    )
    page.number(
        "On their way",
        f"sum(farloop_link_in_flight_bytes{C})",
        "bytes",
        "Sent and not acknowledged. It rises with every update, and falls to zero between two.",
        decimals=1,
    )
    page.number(
        "Sent again",
        f"sum(increase(farloop_link_resends_total{C}[$__range]))",
        "none",
        "Blobs begun again from what had arrived, and control frames repeated. Each was a link that broke or stood "
        "still.",
        steps=GOOD_IF_ZERO,
        decimals=0,
    )
    page.number(
        "Longest silence",
        f"max(farloop_node_heard_seconds{C} and farloop_node_connected{C} == 1)",
        "s",
        "Since the last message of a connected node. They report every second; after a few, a link is cut or a node "
        "hangs.",
        steps=((None, "green"), (5, "orange"), (10, "red")),
        decimals=1,
    )
    page.by_node(
        "Links",
        [
            Column(
                "Connected", f"max by (node) (farloop_node_connected{C})", "bool_yes_no", ((None, "red"), (1, "green"))
            ),
            Column("To it", f"sum by (node) (rate(farloop_link_bytes_total{sent}[1m]))", "Bps"),
            Column("From it", f"sum by (node) (rate(farloop_link_bytes_total{received}[1m]))", "Bps"),
            Column("Acknowledged to it", f"max by (node) (farloop_link_bytes_per_second{C})", "Bps"),
            Column("On their way", f"max by (node) (farloop_link_in_flight_bytes{C})", "bytes"),
            Column(
                "Sent again, 1 h", f"sum by (node) (increase(farloop_link_resends_total{C}[1h]))", "none", GOOD_IF_ZERO
            ),
            Column("Delta after", f"max by (node) (farloop_node_arrival_seconds{C})", "s"),
            Column("Silent for", f"max by (node) (farloop_node_heard_seconds{C})", "s"),
            Column("Cost", f"sum by (node) (farloop_egress_cost_total{C})", "none"),
        ],
        'A line for every node that this coordinator has met. "Delta after": from the opening of the last window to '
        "the node's delta.",
        height=6,
    )
    page.row("How much, which way")
    page.graph(
        "To each node",
        [Line(f"sum by (node) (rate(farloop_link_bytes_total{sent}[$__rate_interval]))", "{{node}}")],
        "Bps",
        "What leaves the coordinator. A snapshot to a joiner is a wide hill, updates are spikes.",
    )
    page.graph(
        "From each node",
        [Line(f"sum by (node) (rate(farloop_link_bytes_total{received}[$__rate_interval]))", "{{node}}")],
        "Bps",
        "What the nodes send.",
    )
    page.graph(
        "Kinds of bytes",
        [
            Line(
                f"sum by (kind, direction) (rate(farloop_link_bytes_total{C}[$__rate_interval])) > 0",
                "{{kind}} {{direction}}",
            )
        ],
        "Bps",
        "Deltas come in, updates and snapshots go out, control goes both ways.",
        stacked=True,
    )
    page.graph(
        "Payload, by codec",
        [Line(f"sum by (kind, codec) (rate(farloop_payload_bytes_total{C}[$__rate_interval]))", "{{kind}}, {{codec}}")],
        "Bps",
        "Encoded deltas that were received, and updates that were made: once each, however many nodes take it.",
    )
    page.row("How well")
    page.graph(
        "Acknowledged to each node",
        [Line(f"max by (node) (farloop_link_bytes_per_second{C})", "{{node}}")],
        "Bps",
        "How fast blobs have lately been acknowledged, round trips included: what a link gives, where blobs are "
        "large enough to fill it. 64 KiB/s is assumed where nothing is known.",
    )
    page.graph(
        "Delta after the opening of its window",
        [Line(f"max by (node) (farloop_node_arrival_seconds{C})", "{{node}}")],
        "s",
        "Training and upload together. One node far above the others holds up whoever waits for it.",
        held=True,
    )
    page.graph(
        "On their way",
        [Line(f"max by (node) (farloop_link_in_flight_bytes{C})", "{{node}}")],
        "bytes",
        "Sent and not acknowledged. Level and above zero for long: the transfer stands still.",
    )
    page.graph(
        "Sent again",
        [Line(f"sum by (node) (increase(farloop_link_resends_total{C}[1m]))", "{{node}}")],
        "none",
        "In the last minute.",
        counts=True,
    )
    return page
