"""The smallest problem worth training in a simulated run."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from farloop.algo.fragments import partition, trainable_tensors
from farloop.algo.methods import method_named
from farloop.algo.spec import Identity, Layout, NodeId, RunSpec
from farloop.algo.terms import LearningRate, Terms
from farloop.coordinator.aggregator import first_anchor
from farloop.quant.digest import digest

# The toy is a stack of blocks, and a noisy quadratic loss with a minimum for each node. Real parameters, a real layout
# and a real inner optimizer; a gradient costs microseconds. Nodes pull towards different minima, so that a lost,
# doubled or wrongly weighted delta shows in the anchors.


Inner = Literal["adamw", "sgd"]

_OF_METHOD = ["mix", "lag", "on_late_update", "max_stale_rounds", "max_staleness", "quorum"]
BATCH_SEQUENCES = 2
SEQUENCE_TOKENS = 8


class Stack(nn.Module):
    """Blocks between an embedding and a head. Weights lie between ½ and 1 in size, where differences are exact."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(3, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(blocks))
        self.head = nn.Parameter(torch.empty(4))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.copy_(sign * (0.5 + 0.5 * torch.rand(parameter.shape, generator=generator)))

    def flat(self) -> Tensor:
        """A copy of all weights, fp32 [numel]."""
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters()])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One node's data: loss ½‖θ − minimum − noise‖², the noise a function of the samples alone."""

    seed: int
    noise: float = 0.1

    def backward(self, module: Stack, samples: Sequence[int]) -> float:
        """Put the gradient of this batch on the parameters; returns the loss."""
        theta = module.flat()
        noise = torch.zeros_like(theta)
        for sample in samples:
            generator = torch.Generator().manual_seed(sample)
            noise.add_(torch.randn(theta.shape, generator=generator))
        gradient = theta - self.minimum(theta.numel()) - self.noise * noise / max(1, len(samples))
        start = 0
        for parameter in module.parameters():
            part = gradient[start : start + parameter.numel()]
            parameter.grad = part.view(parameter.shape).clone() if parameter.requires_grad else None
            start += parameter.numel()
        return 0.5 * float(gradient @ gradient)

    def minimum(self, numel: int) -> Tensor:
        """Where this node's loss is least, fp32 [numel]."""
        return torch.rand(numel, generator=torch.Generator().manual_seed(1000 + self.seed))


def inner_optimizer(module: nn.Module, kind: Inner, terms: Terms) -> torch.optim.Optimizer:
    """The optimizer that a node brings; its learning rate is set at every step."""
    if kind == "sgd":
        return torch.optim.SGD(module.parameters(), lr=terms.schedule.lr.peak, foreach=False)
    return torch.optim.AdamW(
        module.parameters(),
        lr=terms.schedule.lr.peak,
        betas=(0.9, 0.95),
        weight_decay=terms.inner.weight_decay,
        foreach=False,
    )


def terms_of(method: str, **choices: object) -> Terms:
    """Terms of a short run: the method's own choices in 4 bits or more, a constant learning rate, then `choices`."""
    row = method_named(method)
    codecs = {name: getattr(row, name).replace("q4r", "q4") for name in ("codec_up", "codec_down")}
    terms = Terms.from_flat(
        method=method,
        steps=12,
        h=min(row.h, 4),
        tau=min(row.tau, 1),
        **{name: getattr(row, name) for name in _OF_METHOD},
        **codecs,
        outer_lr=0.7,
        control_variates=row.control_variates,
        outer_momentum=0.0 if row.control_variates else 0.9,
        lr=LearningRate(peak=0.02, minimum=0.02, warmup_steps=0),
        clip=1e9,
        weight_decay=0.0,
        batch_sequences=BATCH_SEQUENCES,
        sequence_tokens=SEQUENCE_TOKENS,
        min_nodes=2,
    )
    return terms.replace(**choices)


def layout_of(
    module: nn.Module, terms: Terms, *, blocks_per_fragment: int, together: bool, stages: tuple[int, ...] = ()
) -> Layout:
    """The method's cut of the model; `together` sends all fragments in one slot."""
    shapes = [(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(module)]
    pattern = method_named(terms.method).pattern
    layout = partition(shapes, pattern=pattern, blocks_per_fragment=blocks_per_fragment, stages=stages)
    if not together:
        return layout
    fragments = tuple(dataclasses.replace(fragment, slot=0) for fragment in layout.fragments)
    return Layout(slots=1, fragments=fragments)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToyLearner:
    """A node's stack, its task and the optimizer that it brings."""

    module: Stack
    task: Task
    inner: Inner

    def optimizer(self, terms: Terms) -> torch.optim.Optimizer:
        return inner_optimizer(self.module, self.inner, terms)

    def backward(self, samples: Sequence[int], at: float = 0.0) -> float:
        return self.task.backward(self.module, samples)

    def evaluate(self) -> float:
        theta = self.module.flat()
        return 0.5 * float((theta - self.task.minimum(theta.numel())).square().sum())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """Stacks that are pulled towards the minima of their nodes; the fields are those of a `Scenario`."""

    blocks: int
    blocks_per_fragment: int
    stages: tuple[int, ...] = ()
    together: bool
    inner: Inner
    noise: float
    num_samples: int
    seed: int

    def begin(self, terms: Terms) -> tuple[RunSpec, list[Tensor]]:
        module = Stack(self.blocks)
        layout = layout_of(
            module, terms, blocks_per_fragment=self.blocks_per_fragment, together=self.together, stages=self.stages
        )
        tensors = dict(module.named_parameters())
        anchors = [first_anchor(fragment, tensors) for fragment in layout.fragments]
        identity = Identity(
            name="simulated",
            model="own",
            layout=layout,
            anchor_digests=tuple(digest(anchor) for anchor in anchors),
            data="own",
            num_samples=self.num_samples,
            evaluation_set="toy",
            seed=self.seed,
        )
        return RunSpec(identity=identity, terms=terms), anchors

    def learner(self, node: NodeId, seed: int) -> ToyLearner:
        return ToyLearner(module=Stack(self.blocks), task=Task(seed=seed, noise=self.noise), inner=self.inner)
