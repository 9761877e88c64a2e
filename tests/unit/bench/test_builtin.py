"""Covers `bench/training.py` where a re-warm brings new data; what else it does is seen in whole runs."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from farloop.algo.spec import LearningRate, NodeId, Rewarm, RunSpec
from farloop.bench.training import BuiltIn
from farloop.node.data import Corpus, Mixture, Samples, load_corpus
from farloop.node.errors import DataError
from farloop.node.model import GPT
from farloop.node.trainer import data_name
from farloop.sim.scenario import NodeSetup, Scenario
from farloop.sim.world import run

SpecOf = Callable[..., RunSpec]


@pytest.fixture
def newer(tmp_path: Path) -> Corpus:
    (tmp_path / "newer.txt").write_text("0123456789 " * 200)
    return load_corpus(tmp_path / "newer.txt")


@pytest.fixture
def spec(spec_of: SpecOf, corpus: Corpus, newer: Corpus) -> RunSpec:
    """New data alone from position 3 on, of 6."""
    plain = spec_of(steps=6)
    lr = LearningRate(warmup_steps=0, rewarms=(Rewarm(start=3, peak=1e-3, replay=0.0),))
    return dataclasses.replace(
        plain,
        terms=dataclasses.replace(plain.terms, lr=lr),
        identity=dataclasses.replace(plain.identity, data=data_name([corpus, newer])),
    )


def test_a_learner_trains_on_new_data_from_its_position_on(spec: RunSpec, corpus: Corpus, newer: Corpus) -> None:
    learner = BuiltIn(spec, corpus, phases=[newer]).learner(NodeId("a"), 0)
    places = [(corpus, 2.5), (newer, 3.0)]
    for text, at in places:
        tokens_BS = Samples(text, spec.terms.sequence_tokens, spec.identity.seed).batch([0])
        assert isinstance(learner.module, GPT)
        expected = learner.module.loss(tokens_BS).item()
        assert learner.backward([0], at) == pytest.approx(expected)


def test_a_simulated_node_asks_for_samples_at_its_schedule_position(
    spec: RunSpec, corpus: Corpus, newer: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    batch = Mixture.batch

    def noted(mixture: Mixture, positions: Sequence[int], at: float) -> Tensor:
        asked.append(at)
        return batch(mixture, positions, at)

    monkeypatch.setattr(Mixture, "batch", noted)
    nodes = tuple(NodeSetup(name=NodeId(name), seed=number) for number, name in enumerate("ab"))
    run(Scenario(terms=spec.terms, nodes=nodes, problem=BuiltIn(spec, corpus, phases=[newer]), frugal=True))
    assert sorted(asked) == [float(step) for step in range(6) for _ in nodes]


def test_a_run_with_later_data_is_not_played_without_it(spec: RunSpec, corpus: Corpus) -> None:
    with pytest.raises(DataError, match="phase 1 is missing"):
        BuiltIn(spec, corpus)
