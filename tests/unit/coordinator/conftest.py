"""A small run: two fragments in two slots, ten inner steps a round, four rounds."""

import pytest

from farloop.algo.spec import Fragment, Identity, Layout, LearningRate, RunSpec, TensorSlot, Terms


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
    terms = Terms(
        method="streaming",
        steps=40,
        h=10,
        tau=2,
        mix=0.5,
        codec_up="q4",
        codec_down="q4",
        outer_lr=0.6,
        outer_momentum=0.9,
        lr=LearningRate(peak=1e-2, minimum=1e-3, warmup_steps=4),
        clip=1.0,
        weight_decay=0.1,
        batch_sequences=4,
        sequence_tokens=16,
    )
    return RunSpec(identity=identity, terms=terms)
