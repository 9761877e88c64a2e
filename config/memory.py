"""How much memory and disk a run takes on either side, from its layout and terms alone: nothing is built for it.

P is the number of parameters, F the elements of the largest fragment (both with padding), N the processes of a node.
`farloop lab bench memory` compares these numbers with what two processes really take.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from farloop.algo.fragments import is_muon_matrix
from farloop.algo.methods import method_named
from farloop.algo.outer_optimizers import state_names
from farloop.algo.outer_settings import sums_increments
from farloop.algo.spec import RunSpec
from farloop.algo.terms import Terms
from farloop.algo.validation import ROBUST_RULES
from farloop.coordinator.commits import leaves_a_choice
from farloop.coordinator.downloads import MOST_BYTES
from farloop.coordinator.storage.files import File
from farloop.coordinator.storage.journal import SEGMENT_BYTES
from farloop.coordinator.storage.recovery import MOST_RECENT_BYTES
from farloop.coordinator.storage.snapshots import KEEP
from farloop.coordinator.storage.store import (
    COMMITS_A_SNAPSHOT,
    MOST_REPEATED,
    MOST_RESULT_BYTES,
    SNAPSHOT_EVERY,
    SNAPSHOT_LEAST,
    TAIL_RATIO,
)
from farloop.coordinator.uploads import MOST_BYTES as MOST_UPLOAD_BYTES
from farloop.node.model.inner_optimizer import MOST_AT_ONCE
from farloop.node.settings import SAVE_EVERY_ROUNDS
from farloop.quant.blob import blob_bytes
from farloop.quant.formats.blocks import BlockCodec
from farloop.quant.registry import codec_named

FP32 = 4

PROCESS_BYTES = 520 << 20
"""Of a coordinator that has imported torch and compiled the kernels, without a model: libraries, code and the heap's
slack. Measured with the CPU build of torch 2.13 under Linux, as below; the CUDA build takes up to 2 GB more."""

TRAINING_BYTES = 110 << 20
"""What a process that trains takes besides: torch's optimizers import its compiler, and the first step makes the
working memory of the matrix library."""

JOINS, BESIDE_A_SNAPSHOT = "snapshots for nodes that join", "commits while a snapshot is written"

Table = Mapping[str, int]
"""Bytes by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of the coordinator, and of each process of a node. Sums are peaks: no term is missing at the worst time."""

    coordinator_ram: Table
    coordinator_disk: Table
    node_host: Table  # of the first process, which owns the link; less by the anchors where they are on a device
    node_device: Table  # of each process; on CPUs it is host memory as well
    node_disk: Table  # of all processes; with [node] save_every_rounds or save_optimizer off it is less
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
    """What a run takes at its peak. Activations are not in it: they depend on the model's code. Parameters, gradients
    and moments are fp32, as those of `farloop node`; a loop of one's own may hold others.

    `ranks`: processes of a node, a device each. `shard`: what the node keeps is divided over them.
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
    whole = (2 + outer) * FP32 * largest.numel  # of a fragment on the coordinator
    coordinator_ram = {
        "process": PROCESS_BYTES,
        "anchors": FP32 * parameters,
        "targets": FP32 * parameters,
        "outer optimizer's state": outer * FP32 * parameters,
        "sum of a window's deltas": 0 if _has_no_sum(terms) else FP32 * largest.numel,
        # Commits over the old buffers take them for first versions, and while a snapshot of the fragment is written.
        "new buffers of commits": max(whole, min(MOST_RESULT_BYTES, (2 + outer) * FP32 * parameters)),
        BESIDE_A_SNAPSHOT: 0 if _is_in_place(terms) else whole,
        # At a run's end all fragments are sent at once.
        "payloads in flight": min(nodes * up, max(MOST_UPLOAD_BYTES, one_up)) + one_down,
        "newest updates": min(MOST_RECENT_BYTES, down),
        JOINS: min(FP32 * parameters, max(MOST_BYTES, FP32 * largest.numel)),
    }
    state, a_round = (2 + outer) * FP32 * parameters, nodes * up + down
    most = max(COMMITS_A_SNAPSHOT, 2 * MOST_REPEATED // (parameters + a_round))  # as long as all tails together allow
    rounds = max(SNAPSHOT_LEAST, min(SNAPSHOT_EVERY, most, 1 + TAIL_RATIO * state // a_round))  # between two snapshots
    # Fragments are saved in different rounds, so a segment may be kept for its last commit alone. It ends when it
    # is full, or when every fragment has a snapshot in it.
    segment = min(SEGMENT_BYTES, rounds * a_round)
    coordinator_disk = {
        "snapshots": KEEP * state + whole,
        "journal": KEEP * rounds * a_round + segment,
        "room ahead in the journal": 2 * File.allocation_step,  # of two segments while one follows the other
        "final model": FP32 * parameters,
    }
    part = ranks if shard else 1
    # As `Replica.can_apply_ahead` has it.
    ahead = max((f.numel for f in layout.fragments if f.numel <= parameters // 4), default=0)
    variates = (3 if sums_increments(terms) else 1) if terms.inner.control_variates else 0
    anchors = {
        "anchors": FP32 * parameters // part,
        "residuals": FP32 * parameters // part if codec_named(terms.codecs.up).beta else 0,
        "control variates": variates * FP32 * parameters // part,
        "starts of rounds": FP32 * parameters // part if terms.schedule.eager else 0,
        "weights during an evaluation": FP32 * parameters // part if shard else 0,
    }
    on_host = {
        "process": PROCESS_BYTES + TRAINING_BYTES,
        **anchors,
        "payloads in flight": up + one_down,
        "moments that are being written": 2 * FP32 * largest.numel // part if method.inner else 0,
    }
    moments, stepped = _of_inner(spec)
    trained = {
        "parameters": FP32 * parameters // part,
        "gradients": FP32 * parameters // part,
        "optimizer's moments": FP32 * moments // part,
        # The stack, its two forms of a step of Newton–Schulz and their products; of shards also what all ranks found.
        "muon's working memory": (5 + (ranks if shard else 0)) * FP32 * stepped,
        # Gradients are freed and made anew in every step, and do not fill the same places.
        "allocator's slack": 3 * parameters // part,
        "two encode buffers": 2 * FP32 * largest.numel // part,  # on CPUs one
        "an update that is applied ahead": 0 if shard else FP32 * ahead,
    }
    codec = codec_named(terms.codecs.up)
    node_disk = {"residuals": FP32 * parameters if codec.beta and codec.traits.sparse else 0}
    if method.inner:
        node_disk |= {
            "anchors": FP32 * parameters,
            "updates since": SAVE_EVERY_ROUNDS * down,
            "optimizer's moments": FP32 * moments,
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


def _of_inner(spec: RunSpec) -> tuple[int, int]:
    """Elements of the inner optimizer's state, without padding, and of the matrices that Muon steps together. Muon has
    one for each element of its matrices, AdamW two."""
    if not method_named(spec.terms.method).inner:
        return 0, 0
    rest, matrices = 0, Counter[str]()  # a large tensor may lie in several fragments
    for slot in (slot for fragment in spec.identity.layout.fragments for slot in fragment.tensors):
        if spec.terms.inner.optimizer == "muon" and is_muon_matrix(slot.name, slot.shape):
            matrices[slot.name] += slot.numel
        else:
            rest += slot.numel
    return 2 * rest + matrices.total(), min(matrices.total(), max((MOST_AT_ONCE, *matrices.values())))


def _has_no_sum(terms: Terms) -> bool:
    """Whether a commit sums, steps and encodes in one pass (`aggregator.commit`)."""
    up, down = codec_named(terms.codecs.up), codec_named(terms.codecs.down)
    alike = isinstance(up, BlockCodec) and up.name == down.name and not terms.codecs.up_of
    method = method_named(terms.method)
    plain = method.outer in ("nesterov", "sgd") and not terms.outer.restart
    mean = terms.outer.merge not in ROBUST_RULES and method.merge == "mean"
    return alike and plain and mean and not leaves_a_choice(terms)


def _is_in_place(terms: Terms) -> bool:
    """Whether it does so over the old buffers, because the scales of the payloads bound its numbers."""
    up = codec_named(terms.codecs.up)
    bounded = isinstance(up, BlockCodec) and up.layout.scale_bytes(1) > 0 and not up.kernel_key().absolute
    return bounded and _has_no_sum(terms)


def _there(terms: Table) -> Table:
    return {name: num_bytes for name, num_bytes in terms.items() if num_bytes}
