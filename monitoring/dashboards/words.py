"""What the dashboards share: whose series they show, and what they mark in time."""

C = '{instance=~"$coordinator"}'
"""Series of the chosen coordinators."""

CN = '{instance=~"$coordinator",node=~"$node"}'
"""What they tell of the chosen nodes."""

N = '{node=~"$node"}'
"""What the chosen nodes tell themselves."""

G = '{Hostname=~"$gpu_host"}'
"""NVIDIA's exporter on the chosen hosts."""

HAPPENED = (
    ("Coordinator restarted", f"changes(farloop_epoch{C}[1m]) > 0", "red"),
    ("Node restarted", f"changes(farloop_node_incarnation{C}[1m]) > 0", "orange"),
    ("H changed", f"changes(farloop_h_steps{C}[1m]) > 0", "blue"),
)
"""Annotations."""


def some(expr: str, label: str) -> str:
    """Series that are there only once something has happened; before, one that says "none"."""
    return f'{expr} or label_replace(vector(0), "{label}", "none", "", "")'
