"""Terms, a spec and a greeting of a run in which nothing is special: what a test does not name is not its matter."""

import dataclasses
from typing import Any

from farloop.algo.spec import BlobId, BlobKind, Contribution, Identity, Layout, NodeId, RunSpec
from farloop.algo.terms import LearningRate, Terms
from farloop.wire.messages import BytesByKind, Hello, Offer, Progress

PLAIN = Terms.from_flat(
    method="streaming",
    steps=40,
    h=4,
    tau=0,
    mix=0.0,
    codec_up="q4",
    codec_down="q4",
    outer_lr=0.7,
    outer_momentum=0.9,
    lr=LearningRate(),
    clip=1.0,
    weight_decay=0.0,
    batch_sequences=1,
    sequence_tokens=1,
)


def plain_terms(**changes: Any) -> Terms:
    """`PLAIN`, but for these fields."""
    return PLAIN.replace(**changes)


def plain_spec(**changes: Any) -> RunSpec:
    """Of a run of a model that is not looked at; `changes` are of its terms."""
    identity = Identity(
        name="plain",
        model="own",
        layout=Layout(slots=1, fragments=()),
        anchor_digests=(),
        data="own",
        num_samples=0,
        evaluation_set="none",
        seed=7,
    )
    return RunSpec(identity=identity, terms=plain_terms(**changes))


PLAIN_HELLO = Hello(
    protocol_min=1,
    protocol_max=1,
    node=NodeId("a"),
    incarnation=1,
    fingerprint=None,
    layout=None,
    epoch_seen=0,
    anchors=(),
    round=None,
)
"""Of a node that comes for the first time."""


def plain_hello(**changes: Any) -> Hello:
    """`PLAIN_HELLO`, but for these fields."""
    return dataclasses.replace(PLAIN_HELLO, **changes)


PLAIN_PROGRESS = Progress(
    state="training", position=1.0, round=0, inner_steps=1, tokens=1, loss=1.0, tokens_per_s=1.0, compute_share=1.0,
    blocked_s=0.0, lost_steps=0, sample_watermark=0, sent=BytesByKind(), received=BytesByKind(),
)  # fmt: skip


def plain_progress(**changes: Any) -> Progress:
    """`PLAIN_PROGRESS`, but for these fields."""
    return dataclasses.replace(PLAIN_PROGRESS, **changes)


def plain_offer(
    node: NodeId,
    window: int = 1,
    *,
    fragment: int = 1,
    incarnation: int = 1,
    seq: int = 1,
    steps: int = 10,
    tokens: int = 640,
    norm_sq: float = 1.0,
    **changes: Any,
) -> Offer:
    """A node's own delta for a window, from the base before it."""
    blob = BlobId(
        kind=BlobKind.DELTA, fragment=fragment, version=window - 1, node=node, incarnation=incarnation, seq=seq
    )
    share = Contribution(
        node=node, incarnation=incarnation, base=window - 1, steps=steps, tokens=tokens, norm_sq=norm_sq
    )
    return Offer(**{"blob": blob, "size": 1, "digest": 1, "window": window, "contributors": (share,), **changes})
