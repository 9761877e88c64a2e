"""Terms, a spec and a greeting of a run in which nothing is special: what a test does not name is not its matter."""

import dataclasses
from typing import Any

from farloop.algo.spec import Identity, Layout, LearningRate, NodeId, RunSpec, Terms
from farloop.wire.messages import Hello

PLAIN = Terms(
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
    return dataclasses.replace(PLAIN, **changes)


def plain_spec(**changes: Any) -> RunSpec:
    """Of a run of a model that nobody looks at; `changes` are of its terms."""
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
