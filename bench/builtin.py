"""The built-in model and a corpus as a problem for the simulator: what `node/trainer.py` trains, in one process.

Samples are a function of the node and of its inner step alone, not of leases, whose order follows the time that
transfers take: runs that differ in a codec see the same samples in the same places, and can be compared in pairs.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from farloop.algo.delta import mix_fragment_into
from farloop.algo.digest import digest
from farloop.algo.fragments import trainable_tensors
from farloop.algo.spec import NodeId, RunSpec, Terms
from farloop.coordinator.aggregator import first_anchor
from farloop.node.corpus import Corpus
from farloop.node.data import EvaluationSet, Mixture
from farloop.node.inner import default_optimizer
from farloop.node.model import GPT, build, from_json
from farloop.node.trainer import EVALUATION_BATCH, check_data, mixed_precision

CURVE_SEQUENCES = 128
"""Of the evaluations on the way: enough to see the course of a run. The whole set is for its end."""

OnStep = Callable[[], None]
"""Called after every inner step of every node."""


class BuiltIn:
    """The run of a spec on a corpus. A learner's seed is its number, from 0 to `terms.min_nodes` − 1."""

    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus,
        on_step: OnStep = lambda: None,
        *,
        phases: Sequence[Corpus] = (),
        device: torch.device | None = None,
    ) -> None:
        """`phases`: what re-warms bring. `device`: of the nodes, the CPU unless given; on CUDA they train in bfloat16.

        Raises DataError unless the corpora are the run's.
        """
        self.spec = spec
        self._evaluation = check_data(spec, corpus, *phases)
        length = spec.terms.sequence_tokens
        self._glance = EvaluationSet(
            corpus, sequences=min(CURVE_SEQUENCES, len(self._evaluation)), sequence_tokens=length
        )
        self._samples = Mixture(spec, [corpus, *phases])
        self._on_step = on_step
        self._device = device or torch.device("cpu")

    def begin(self, terms: Terms) -> tuple[RunSpec, list[Tensor]]:
        """As the simulator asks; nodes bring their own samples."""
        identity = dataclasses.replace(self.spec.identity, num_samples=0)
        with torch.no_grad():
            tensors = dict(trainable_tensors(self._module("cpu")))
            anchors = [first_anchor(fragment, tensors) for fragment in identity.layout.fragments]
        assert identity.anchor_digests == tuple(digest(anchor) for anchor in anchors), (
            "not the first weights of the run"
        )
        return RunSpec(identity=identity, terms=terms), anchors

    def learner(self, node: NodeId, seed: int) -> "Learner":
        """As the simulator asks."""
        mixed = mixed_precision(self._device, self.spec.terms)
        return Learner(self._module(self._device), self._batch_of(seed), self._glance, self._on_step, mixed)

    @torch.no_grad()
    def losses(self, anchors: Sequence[Tensor]) -> tuple[float, float]:
        """Nats per byte of the model with these weights, fp32 [numel] per fragment.

        On the run's evaluation set; and on the part of it that is looked at on the way.
        """
        module = self._module(self._device)
        parameters = dict(trainable_tensors(module))
        for fragment, anchor in zip(self.spec.identity.layout.fragments, anchors, strict=True):
            mix_fragment_into(fragment, parameters, anchor.to(self._device), 0.0)
        return self._evaluation.loss(module, EVALUATION_BATCH), self._glance.loss(module, EVALUATION_BATCH)

    def _module(self, device: torch.device | str) -> GPT:
        return build(from_json(self.spec.identity.model), self.spec.identity.seed).to(device)

    def _batch_of(self, number: int) -> Callable[[int, float], Tensor]:
        terms = self.spec.terms

        def batch(inner_step: int, at: float) -> Tensor:
            first = (inner_step * terms.min_nodes + number) * terms.batch_sequences
            return self._samples.batch(range(first, first + terms.batch_sequences), at)

        return batch


class Learner:
    """One node's model and its samples."""

    def __init__(
        self,
        module: GPT,
        batch: Callable[[int, float], Tensor],
        evaluation: EvaluationSet,
        on_step: OnStep,
        mixed: torch.autocast,
    ) -> None:
        """`batch` gives the tokens of an inner step at a schedule position, int64 [B, S], which runs within `mixed`."""
        self._gpt, self._batch, self._evaluation, self._on_step = module, batch, evaluation, on_step
        self._mixed = mixed

    @property
    def module(self) -> nn.Module:
        return self._gpt

    def optimizer(self, terms: Terms) -> torch.optim.Optimizer:
        return default_optimizer(self._gpt, terms)

    def backward(self, samples: Sequence[int], at: float = 0.0) -> float:
        (inner_step,) = samples
        self._gpt.zero_grad(set_to_none=True)
        tokens_BS = self._batch(inner_step, at).to(self._gpt.embed.weight.device)
        with self._mixed:
            loss = self._gpt.loss(tokens_BS)
        torch.autograd.backward(loss)
        self._on_step()
        return loss.item()

    def evaluate(self) -> float:
        return self._evaluation.loss(self._gpt, EVALUATION_BATCH)
