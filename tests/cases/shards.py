"""What admission is tried on: a small classifier, trained for real on nodes that see other classes than each other.

Ten clouds of points in sixteen dimensions, a network of one hidden layer, AdamW: the lengths and directions of deltas
are those of training.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from toy_problem import inner_optimizer, layout_of

from farloop.algo.spec import Identity, NodeId, RunSpec
from farloop.algo.terms import Terms
from farloop.coordinator.aggregator import first_anchor
from farloop.quant.digest import digest

CLASSES = 10
_DIMENSIONS, _HIDDEN, _BATCH = 16, 32, 32
_SPREAD = 1.2  # of the points of a cloud, where their centres are about √(2 · 16) apart


def _network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(_DIMENSIONS, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, CLASSES))


def _points(classes: Tensor, generator: torch.Generator) -> Tensor:
    centres = torch.randn(CLASSES, _DIMENSIONS, generator=torch.Generator().manual_seed(5))
    return centres[classes] + _SPREAD * torch.randn(len(classes), _DIMENSIONS, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Node k of `nodes` sees the classes k, k + nodes, … and of the others a point in a while."""

    nodes: int
    foreign: float = 0.0  # share of a node's points that are of any class
    seed: int = 0

    def begin(self, terms: Terms) -> tuple[RunSpec, list[Tensor]]:
        module = _network()
        layout = layout_of(module, terms, blocks_per_fragment=1, together=False)
        tensors = dict(module.named_parameters())
        anchors = [first_anchor(fragment, tensors) for fragment in layout.fragments]
        identity = Identity(
            name="shards",
            model="own",
            layout=layout,
            anchor_digests=tuple(digest(anchor) for anchor in anchors),
            data="own",
            num_samples=0,
            evaluation_set="shards",
            seed=self.seed,
        )
        return RunSpec(identity=identity, terms=terms), anchors

    def learner(self, node: NodeId, seed: int) -> "Classifier":
        return Classifier(self, seed)


class Classifier:
    """What one node trains."""

    def __init__(self, shards: Shards, number: int) -> None:
        self.module = _network()
        self._shards, self._number = shards, number

    def optimizer(self, terms: Terms) -> torch.optim.Optimizer:
        return inner_optimizer(self.module, "adamw", terms)

    def backward(self, samples: Sequence[int], at: float = 0.0) -> float:
        shards = self._shards
        generator = torch.Generator().manual_seed(hash((shards.seed, self._number, samples[0])) % (1 << 62))
        own = torch.arange(self._number % shards.nodes, CLASSES, shards.nodes)
        classes = own[torch.randint(len(own), (_BATCH,), generator=generator)]
        foreign = torch.rand(_BATCH, generator=generator) < shards.foreign
        classes = torch.where(foreign, torch.randint(CLASSES, (_BATCH,), generator=generator), classes)
        self.module.zero_grad()
        loss = functional.cross_entropy(self.module(_points(classes, generator)), classes)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self) -> float:
        """Over all classes alike."""
        classes = torch.arange(CLASSES).repeat_interleave(100)
        points = _points(classes, torch.Generator().manual_seed(11))
        return float(functional.cross_entropy(self.module(points), classes))
