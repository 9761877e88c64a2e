"""Built-in training and recorded outer gradients for benchmarks."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from farloop.algo.adamw import is_decayed
from farloop.algo.fragments import flatten_into, partition, trainable_tensors
from farloop.algo.local_update import fragment_delta_into, mix_fragment_into
from farloop.algo.outer_optimizers import step_
from farloop.algo.outer_settings import default_outer
from farloop.algo.spec import Fragment, NodeId, RunSpec, to_plain
from farloop.algo.terms import Terms
from farloop.config.exit_codes import writing
from farloop.coordinator.aggregator import first_anchor
from farloop.monitoring.status import dumps
from farloop.node.data.corpus import Corpus, EvaluationSet, Mixture, Samples, load_corpus
from farloop.node.model.built_in import GPT, build, from_json
from farloop.node.model.inner_optimizer import default_optimizer
from farloop.node.settings import PRESETS
from farloop.node.trainer import EVALUATION_BATCH, check_data, mixed_precision
from farloop.quant.digest import digest

# --- threads


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Torch, our kernels, and what shares torch's OpenMP, use so many threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def default_threads(cores: int) -> tuple[int, ...]:
    """1, 2, 4, … and all cores."""
    powers = [1 << k for k in range(cores.bit_length()) if 1 << k < cores]
    return (*powers, cores)


# --- the built-in model as a problem for the simulator
#
# Samples depend on the node and its inner step alone, not on leases, whose order follows transfer times. So runs that
# differ in a codec see the same samples in the same steps, and can be compared in pairs.

OnStep = Callable[[], None]  # called after every inner step of every node


class BuiltIn:
    """The run of a spec on a corpus. A learner's seed is its number, from 0 to `terms.admission.min_nodes` − 1."""

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
        self._samples = Mixture(spec, [corpus, *phases])
        self._on_step = on_step
        self._device = device or torch.device("cpu")

    def begin(self, terms: Terms) -> tuple[RunSpec, list[Tensor]]:
        """As the simulator asks; nodes bring their own samples."""
        identity = dataclasses.replace(self.spec.identity, num_samples=0)
        with torch.no_grad():
            tensors = dict(trainable_tensors(self._module("cpu")))
            anchors = [first_anchor(fragment, tensors) for fragment in identity.layout.fragments]
        assert identity.anchor_digests == tuple(map(digest, anchors)), "not the first weights of the run"
        return RunSpec(identity=identity, terms=terms), anchors

    def learner(self, node: NodeId, seed: int) -> "Learner":
        mixed = mixed_precision(self._device, self.spec.terms)
        return Learner(self._module(self._device), self._batch_of(seed), self._evaluation, self._on_step, mixed)

    @torch.no_grad()
    def loss(self, anchors: Sequence[Tensor]) -> float:
        """Nats per byte of the model with these weights, fp32 [numel] per fragment, on the run's evaluation set."""
        module = self._module(self._device)
        parameters = dict(trainable_tensors(module))
        for fragment, anchor in zip(self.spec.identity.layout.fragments, anchors, strict=True):
            mix_fragment_into(fragment, parameters, anchor.to(self._device), 0.0)
        return self._evaluation.loss(module, EVALUATION_BATCH)

    def _module(self, device: torch.device | str) -> GPT:
        return build(from_json(self.spec.identity.model), self.spec.identity.seed).to(device)

    def _batch_of(self, number: int) -> Callable[[int, float], Tensor]:
        terms = self.spec.terms

        def batch(inner_step: int, at: float) -> Tensor:
            first = (inner_step * terms.admission.min_nodes + number) * terms.inner.batch_sequences
            return self._samples.batch(range(first, first + terms.inner.batch_sequences), at)

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


# --- outer gradients of a short DiLoCo run (arXiv 2311.08105)
#
# Codecs are judged on real deltas: random numbers have neither the shapes nor the spectra that structured codecs (low
# rank, top-k, sketches) exploit. The deltas of the last two rounds are kept.

_LONG_RUN = 100  # outer steps: the outer optimizer is that of a run of some length


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The run they come from: under a minute on two cores."""

    model: str = "tiny"
    nodes: int = 4
    h: int = 30  # inner steps of a round
    rounds: int = 6
    batch_sequences: int = 4
    sequence_tokens: int = 128
    lr: float = 2e-3  # of the inner AdamW, after a linear warm-up of one round
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise ValueError(f"two rounds or more are needed, for the one before the last, not {self.rounds}")

    def describe(self) -> str:
        return f"{self.model} model, {self.nodes} nodes, H {self.h}, round {self.rounds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterGradients:
    """What every node would have sent in a round, and in the round before."""

    fragment: Fragment  # the whole model
    deltas: tuple[Tensor, ...]  # fp32 [numel] of each node, padding zero
    before: tuple[Tensor, ...]  # the same nodes a round earlier


def outer_gradients(settings: Settings, *, folder: Path | None = None) -> OuterGradients:
    """The deltas of `settings`, from `folder` where they were put there before.

    Raises CorpusError: there is no text to train on.
    Raises CommandError: `folder` cannot be written.
    """
    corpus = load_corpus(max_bytes=4_000_000)
    content = dumps([dataclasses.asdict(settings), corpus.digest, torch.__version__], sort_keys=True)
    key = hashlib.sha256(content.encode()).hexdigest()[:12]
    path = folder / f"outer-gradients-{key}.safetensors" if folder else None
    model = build(PRESETS[settings.model], settings.seed)
    shapes = [(name, tuple(tensor.shape)) for name, tensor in trainable_tensors(model)]
    (fragment,) = partition(shapes, pattern="whole").fragments
    if path is not None and path.exists():
        with safe_open(path, framework="pt") as file:
            deltas, before = (
                tuple(file.get_tensor(f"node{n}.{part}") for n in range(settings.nodes)) for part in _PARTS
            )
        return OuterGradients(fragment=fragment, deltas=deltas, before=before)
    # Products of matrices this small are no faster on two threads, and on a busy machine much slower.
    with cpu_threads(1):
        found = _train(settings, corpus, fragment)
    if path is not None:
        tensors = {f"node{n}.{part}": t for part in _PARTS for n, t in enumerate(getattr(found, part))}
        metadata = {"settings": dumps(to_plain(settings)), "torch": torch.__version__}
        unfinished = path.with_suffix(".part")
        with writing(path):
            unfinished.write_bytes(save(tensors, metadata))
            unfinished.replace(path)
    return found


_PARTS = ("deltas", "before")


def _train(settings: Settings, corpus: Corpus, fragment: Fragment) -> OuterGradients:
    models = [build(PRESETS[settings.model], settings.seed) for _ in range(settings.nodes)]
    nodes = [_Node(model, number, settings, corpus) for number, model in enumerate(models)]
    outer = default_outer(settings.nodes, settings.h, _LONG_RUN)
    anchor = torch.empty(fragment.numel, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        flatten_into(fragment, dict(trainable_tensors(models[0])), anchor)
    momentum = torch.zeros_like(anchor)
    before = deltas = tuple[Tensor, ...]()
    for _ in range(settings.rounds):
        before = deltas
        deltas = tuple(node.train_round(fragment, anchor) for node in nodes)
        step_(anchor, {"momentum": momentum}, torch.stack(deltas).mean(dim=0), outer, version=1)
        for node in nodes:
            mix_fragment_into(fragment, node.parameters, anchor, 0.0)
    return OuterGradients(fragment=fragment, deltas=deltas, before=before)


class _Node:
    """One model with its optimizer, whose moments outlive the rounds."""

    def __init__(self, model: GPT, number: int, settings: Settings, corpus: Corpus) -> None:
        self._model, self._number, self._settings = model, number, settings
        self._samples = Samples(corpus, settings.sequence_tokens, settings.seed)
        self._inner_step = 0
        self.parameters = dict(trainable_tensors(model))
        tensors = list(self.parameters.values())
        groups = [
            {"params": [t for t in tensors if is_decayed(tuple(t.shape))], "weight_decay": 0.1},
            {"params": [t for t in tensors if not is_decayed(tuple(t.shape))], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))

    def train_round(self, fragment: Fragment, anchor: Tensor) -> Tensor:
        """H inner steps, then anchor − local, fp32 [numel]."""
        batch, nodes = self._settings.batch_sequences, self._settings.nodes
        for _ in range(self._settings.h):
            first = (self._inner_step * nodes + self._number) * batch
            self._inner_step += 1
            for group in self._optimizer.param_groups:
                group["lr"] = self._settings.lr * min(1.0, self._inner_step / self._settings.h)
            self._optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(self._model.loss(self._samples.batch(range(first, first + batch))))
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
        delta = torch.empty(fragment.numel, dtype=torch.float32, device="cpu")
        fragment_delta_into(fragment, anchor, self.parameters, delta)
        return delta
