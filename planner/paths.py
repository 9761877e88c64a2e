"""Legal paths of a microbatch and their cost: SkipPipe's constraints and a closed form.

A chain is a source and the nodes that its microbatches visit after it, in order. Microbatches then return to the source
for the loss and retrace their path backwards (arXiv 2502.19913; the constraints are those of its published code).
"""

from collections.abc import Sequence
from dataclasses import dataclass

Numbers = Sequence[Sequence[float]]

TOO_LARGE_S = 1e5  # penalty of a stage that does not fit a node's memory: more than any plan takes


def path_length(stages: int, skip: float) -> int:
    """Stages that a microbatch visits of `stages`, stage 0 included: (1 − skip)·S to the nearest, at least 1."""
    return max(1, min(stages, int((1.0 - skip) * stages + 0.5)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Compute per node and amount of work."""

    layer_s: tuple[float, ...]  # [num_nodes], forward pass of one layer
    layers: tuple[int, ...]  # [num_stages]
    slots: tuple[int, ...]  # [num_nodes], microbatches between their forward and backward pass
    microbatches: int  # of every source
    backward: float = 1.5
    loss: float = 0.25
    gap_s: float = 0.0
    max_layers: tuple[int, ...] | None = None  # [num_nodes], what their memory holds; None: anything

    def forward_s(self, node: int, stage: int) -> float:
        """Seconds; TOO_LARGE_S more where the stage does not fit the node's memory."""
        layers = self.layers[stage]
        seconds = self.layer_s[node] * layers
        return seconds if self.max_layers is None or layers <= self.max_layers[node] else seconds + TOO_LARGE_S

    def in_flight(self, nodes: Sequence[int]) -> int:
        """Microbatches that a chain carries at a time."""
        return min(self.microbatches, *(self.slots[node] for node in nodes))


def latency_s(nodes: Sequence[int], stages: Sequence[int], work: Work, message_s: Numbers) -> float:
    """Of one microbatch that never waits: Σ c·(1 + backward) + loss + the closed cycle there and back."""
    compute = sum(work.forward_s(node, stage) for node, stage in zip(nodes, stages, strict=True))
    edges = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True)) if len(nodes) > 1 else []
    return (
        compute * (1.0 + work.backward)
        + work.forward_s(nodes[0], stages[0]) * work.loss
        + sum(message_s[u][v] + message_s[v][u] for u, v in edges)
    )


def chain_s(nodes: Sequence[int], stages: Sequence[int], work: Work, message_s: Numbers) -> float:
    """All microbatches of one source along a chain that no other source uses, a closed form.

    With m in flight and R = ⌈M/m⌉ rounds: R·latency + (m − 1)·b, where b is what the slowest node needs for one
    microbatch with its gap; or latency + (M − 1)·b where that node is never idle.
    """
    one = latency_s(nodes, stages, work, message_s)
    busiest = max(work.forward_s(node, stage) for node, stage in zip(nodes, stages, strict=True))
    between = (1.0 + work.backward) * busiest + work.gap_s
    flying = work.in_flight(nodes)
    rounds = -(-work.microbatches // flying)
    return max(rounds * one + (flying - 1) * between, one + (work.microbatches - 1) * between)
