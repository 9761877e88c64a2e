"""Every method as a run of real processes: it learns, it decides by what it is told alone, and it is what its
simulation is."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from faulty_world import run as simulate
from loopback import TEXT, NewRun, Run, assert_all_agree
from simulated_faults import Scenario
from simulated_outcome import commit_of
from slow_cases import mostly_slow
from tapes import Tape, replay
from torch import Tensor, nn

from farloop.algo.fragments import trainable_tensors
from farloop.algo.methods import METHODS
from farloop.algo.spec import NodeId, RunSpec
from farloop.algo.terms import Terms
from farloop.coordinator.aggregator import first_anchor
from farloop.coordinator.decide import records as rec
from farloop.monitoring.status import Status
from farloop.node.data.corpus import EvaluationSet, Samples, load_corpus
from farloop.node.model.built_in import GPT, build
from farloop.node.model.inner_optimizer import default_optimizer
from farloop.node.settings import PRESETS
from farloop.node.trainer import EVALUATION_BATCH
from farloop.wire.limits import Limits

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

STEPS, H = 48, 12
"""Four rounds on the samples of each node's first grant: later ones would depend on who reports first."""


@pytest.mark.parametrize("method", mostly_slow(METHODS, "streaming"))
def test_a_run_learns_answers_its_tapes_again_and_is_what_its_simulation_is(new_run: NewRun, method: str) -> None:
    """Y. One run for all of it: to look at a run takes less time than to play it."""
    rounds = {"evaluate_every_rounds": H} if "h" in METHODS[method].fixed else {"h": H, "evaluate_every_rounds": 1}
    if "tau" not in METHODS[method].fixed and METHODS[method].tau:  # else nodes choose it by their links
        rounds["tau"] = METHODS[method].tau
    run = new_run(method=method, steps=STEPS, **rounds)
    run.on_tape = True
    run.start_coordinator(), run.start_node("a"), run.start_node("b")
    status = run.until_done()
    journal = run.records()
    assert_it_learns(run, status, journal)
    assert_every_delta_has_one_end(journal)
    for name in ("coordinator", "node-a", "node-b"):
        replay(Tape.loads((run.folder / f"{name}.tape").read_text()))
    if METHODS[method].on_late_update == "wait":
        assert_nothing_is_lost(status, journal)
        assert_its_simulation_is_the_same(journal)


# --- a run


def assert_it_learns(run: Run, status: Status, journal: Sequence[rec.Record]) -> None:
    """The last evaluation is well below the untrained model's loss, and all end with the same weights.

    The run's own first evaluation is no baseline: on a busy machine it comes after much of the training.
    """
    assert_all_agree(run, status, "a", "b")
    assert not status["alarms"], status["alarms"]
    losses = [event["loss"] for event in run.events("evaluation")]
    untrained = Nano(spec_of(journal)).learner(NodeId("a"), seed=0).evaluate()
    assert losses[-1] < untrained - 0.4, (untrained, losses)


def assert_every_delta_has_one_end(journal: Sequence[rec.Record]) -> None:
    """What was stored is part of one commit, or was dropped with a reason: nothing is lost without a word."""
    stored = {record.blob for record in journal if isinstance(record, rec.InputStored)}
    merged = Counter(addend.blob for commit in commits(journal) for addend in commit.blobs)
    dropped = {record.blob for record in journal if isinstance(record, rec.InputDropped)}
    assert set(merged.values()) == {1}
    assert not merged.keys() & dropped
    assert stored <= merged.keys() | dropped


def assert_nothing_is_lost(status: Status, journal: Sequence[rec.Record]) -> None:
    """Where training waits for updates, every step of every node is in them, and every window merges every node."""
    assert [(node["inner_steps"], node["lost_steps"]) for node in status["nodes"]] == [(STEPS, 0)] * 2
    assert all([share.node for share in commit.merged] == ["a", "b"] for commit in commits(journal))
    assert not any(isinstance(record, rec.InputDropped) for record in journal)


def spec_of(journal: Sequence[rec.Record]) -> RunSpec:
    (spec,) = (record.spec for record in journal if isinstance(record, rec.RunStarted))
    return spec


def commits(journal: Sequence[rec.Record]) -> list[rec.WindowCommitted]:
    return [record for record in journal if isinstance(record, rec.WindowCommitted)]


# --- the same run in virtual time


def assert_its_simulation_is_the_same(journal: Sequence[rec.Record]) -> None:
    """Per fragment, the same versions of the same deltas of the same nodes, and the same weights bit for bit.

    Between fragments the order is that of arrivals, which times decide.
    """
    spec = spec_of(journal)
    outcome = simulate(Scenario(terms=spec.terms, problem=Nano(spec), limits=Limits(), frugal=True))
    outcome.check()
    for fragment in spec.identity.layout.fragments:
        real = [commit_of(record) for record in commits(journal) if record.fragment == fragment.index]
        assert outcome.of(fragment.index) == tuple(real)


@dataclass(frozen=True)
class Nano:
    """What the processes train, as a problem for the simulator."""

    spec: RunSpec

    def begin(self, terms: Terms) -> tuple[RunSpec, list[Tensor]]:
        tensors = dict(trainable_tensors(self.module()))
        return self.spec, [first_anchor(fragment, tensors) for fragment in self.spec.identity.layout.fragments]

    def learner(self, node: NodeId, seed: int) -> "Learner":
        return Learner(self.module(), self.spec)

    def module(self) -> GPT:
        return build(PRESETS["nano"], self.spec.identity.seed)


class Learner:
    """What `node/trainer.py` does between two steps."""

    def __init__(self, module: GPT, spec: RunSpec) -> None:
        corpus, length = load_corpus(TEXT), spec.terms.inner.sequence_tokens
        self._gpt, self._samples = module, Samples(corpus, length, spec.identity.seed)
        self._evaluation = EvaluationSet(corpus, sequences=8, sequence_tokens=length)

    @property
    def module(self) -> nn.Module:
        return self._gpt

    def optimizer(self, terms: Terms) -> torch.optim.Optimizer:
        return default_optimizer(self._gpt, terms)

    def backward(self, samples: Sequence[int], position: float = 0.0) -> float:
        batch = self._samples.batch(samples)
        self._gpt.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self._gpt(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        torch.autograd.backward(loss)
        return loss.item()

    def evaluate(self) -> float:
        return self._evaluation.loss(self._gpt, EVALUATION_BATCH)
