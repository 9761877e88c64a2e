"""How much memory and disk a run takes on either side, from its layout and terms alone: nothing is built for it.

P is the number of parameters, F the elements of the largest fragment (both with padding), N the processes of a node.
`farloop bench memory` compares these numbers with what two processes really take.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from farloop.algo.methods import method_named
from farloop.algo.outer_optimizers import state_names
from farloop.algo.spec import RunSpec
from farloop.coordinator.downloads import MOST_BYTES
from farloop.coordinator.storage.files import File
from farloop.coordinator.storage.journal import SEGMENT_BYTES
from farloop.coordinator.storage.recovery import MOST_RECENT_BYTES
from farloop.coordinator.storage.snapshots import KEEP
from farloop.coordinator.storage.store import MOST_RESULT_BYTES, SNAPSHOT_EVERY, SNAPSHOT_LEAST, TAIL_RATIO
from farloop.node.library import SAVE_EVERY_ROUNDS
from farloop.quant.blob import blob_bytes
from farloop.quant.registry import codec_named

FP32 = 4

PROCESS_BYTES = 520 << 20
"""Of a process that has imported torch and compiled the kernels, without a model: libraries, code and the heap's slack.
Measured with the CPU build of torch 2.13 under Linux; the CUDA build takes up to 2 GB more."""

JOINS = "snapshots for nodes that join"

Terms = Mapping[str, int]
"""Bytes by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the coordinator, and of each process of a node. Sums are peaks: no term is missing at the worst time."""

    coordinator_ram: Terms
    coordinator_disk: Terms
    node_host: Terms  # of the first process, which owns the link; with [node] anchors = "device" less by the anchors
    node_device: Terms  # of each process; on CPUs it is host memory as well
    node_disk: Terms  # of all processes; with [node] save_every_rounds or save_optimizer off it is less
    ranks: int

    def plain(self) -> dict[str, object]:
        """Sums and terms, ready for JSON."""
        tables = {
            "coordinator_ram": self.coordinator_ram,
            "coordinator_disk": self.coordinator_disk,
            "node_host": self.node_host,
            "node_device": self.node_device,
            "node_disk": self.node_disk,
        }
        sums = {f"{name}_bytes": sum(table.values()) for name, table in tables.items()}
        return {**sums, "ranks": self.ranks, "terms": {name: dict(table) for name, table in tables.items()}}


def memory_of(spec: RunSpec, *, ranks: int = 1, shard: bool = False) -> Memory:
    """What a run takes at its peak. Activations are not in it: they depend on the model's code.

    Parameters, gradients and moments are fp32, as those of `farloop node`; a loop of one's own may hold others.

    Args:
        ranks: processes of a node, a device each.
        shard: what the node keeps is divided over them.
    """
    layout, terms = spec.identity.layout, spec.terms
    parameters = sum(fragment.numel for fragment in layout.fragments)
    largest = max(layout.fragments, key=lambda fragment: fragment.numel)
    method = method_named(terms.method)
    outer = len(state_names(method.outer, terms.outer.momentum))
    up, down = (
        sum(blob_bytes(codec_named(spelling), fragment) for fragment in layout.fragments)
        for spelling in (terms.codecs.up, terms.codecs.down)
    )
    one_up, one_down = (blob_bytes(codec_named(spelling), largest) for spelling in (terms.codecs.up, terms.codecs.down))
    nodes = terms.admission.min_nodes
    results = max((2 + outer) * FP32 * largest.numel, min(MOST_RESULT_BYTES, (2 + outer) * FP32 * parameters))
    coordinator_ram = {
        "process": PROCESS_BYTES,
        "anchors": FP32 * parameters,
        "targets": FP32 * parameters,
        "outer optimizer's state": outer * FP32 * parameters,
        "one window: sum of its deltas": FP32 * largest.numel,
        "one window: new buffers": results,
        "a snapshot that is being written": (2 + outer) * FP32 * largest.numel,
        "payloads in flight": nodes * one_up + one_down,
        "newest updates": min(MOST_RECENT_BYTES, down),
        JOINS: min(FP32 * parameters, max(MOST_BYTES, FP32 * largest.numel)),
    }
    state, a_round = (2 + outer) * FP32 * parameters, nodes * up + down
    rounds = max(SNAPSHOT_LEAST, min(SNAPSHOT_EVERY, 1 + TAIL_RATIO * state // a_round))  # between two snapshots
    # Fragments are saved in different rounds, so a segment may be kept for its last commit alone. It ends when it
    # is full, or when every fragment has a snapshot in it.
    segment = min(SEGMENT_BYTES, rounds * a_round)
    coordinator_disk = {
        "snapshots": KEEP * state + (2 + outer) * FP32 * largest.numel,
        "journal": KEEP * rounds * a_round + segment,
        "room ahead in the journal": 2 * File.allocation_step,  # of two segments while one follows the other
        "final model": FP32 * parameters,
    }
    part = ranks if shard else 1
    anchors = {
        "anchors": FP32 * parameters // part,
        "residuals": FP32 * parameters // part if codec_named(terms.codecs.up).beta else 0,
        "control variates": FP32 * parameters // part if terms.inner.control_variates else 0,
        "starts of rounds": FP32 * parameters // part if terms.schedule.eager else 0,
        "weights during an evaluation": FP32 * parameters // part if shard else 0,
    }
    on_host = {"process": PROCESS_BYTES, **anchors, "payloads in flight": one_up + one_down}
    trained = {
        "parameters": FP32 * parameters // part,
        "gradients": FP32 * parameters // part,
        "optimizer's moments": 2 * FP32 * parameters // part if method.inner else 0,
        "encode buffers": 2 * FP32 * largest.numel // part,
    }
    codec = codec_named(terms.codecs.up)
    node_disk = {"residuals": FP32 * parameters if codec.beta and codec.traits.sparse else 0}
    if method.inner:
        node_disk |= {
            "anchors": FP32 * parameters,
            "updates since": SAVE_EVERY_ROUNDS * down,
            "optimizer's moments": 2 * FP32 * parameters,
            "file that replaces another": 2 * FP32 * largest.numel,
        }
    return Memory(
        coordinator_ram=_there(coordinator_ram),
        coordinator_disk=_there(coordinator_disk),
        node_host=_there(on_host),
        node_device=_there(trained),
        node_disk=_there(node_disk),
        ranks=ranks,
    )


def _there(terms: Terms) -> Terms:
    return {name: num_bytes for name, num_bytes in terms.items() if num_bytes}
