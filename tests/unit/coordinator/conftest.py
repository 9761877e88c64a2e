"""A small run: two fragments in two slots, ten inner steps a round, four rounds."""

import pytest
from plain_runs import plain_terms

from farloop.algo.spec import Fragment, Identity, Layout, RunSpec, TensorSlot
from farloop.algo.terms import LearningRate


@pytest.fixture(scope="session")
def spec() -> RunSpec:
    layout = Layout(
        slots=2,
        fragments=(
            Fragment(index=0, slot=0, numel=512, tensors=(TensorSlot(name="body", shape=(2, 200), offset=0),)),
            Fragment(index=1, slot=1, numel=256, tensors=(TensorSlot(name="head", shape=(100,), offset=0),)),
        ),
    )
    identity = Identity(
        name="small",
        model="own",
        layout=layout,
        anchor_digests=(100, 101),
        data="own",
        num_samples=0,
        evaluation_set="none",
        seed=7,
    )
    terms = plain_terms(
        h=10,
        tau=2,
        mix=0.5,
        outer_lr=0.6,
        lr=LearningRate(peak=1e-2, minimum=1e-3, warmup_steps=4),
        weight_decay=0.1,
        batch_sequences=4,
        sequence_tokens=16,
    )
    return RunSpec(identity=identity, terms=terms)
