"""Terms of a run in which nothing is special: what a test does not name is not what it is about."""

import dataclasses
from typing import Any

from farloop.algo.spec import LearningRate, Terms

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
