"""The daemon's trainer: a model that the run or the node names, on a corpus, as a plain caller of `join`."""

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farloop.algo.methods import method_named
from farloop.algo.spec import RunSpec
from farloop.algo.terms import Terms
from farloop.node.arguments import LoopOptions
from farloop.node.data.corpus import Corpus, EvaluationSet, Mixture, load_corpus, load_mixture
from farloop.node.errors import DataError, TermsMismatch
from farloop.node.library import Node, join_run
from farloop.node.machine_info import read_inventory
from farloop.node.model.named import (
    LossOf,
    NamedModel,
    blocks_of,
    checkpoint_blocks_,
    materialise_,
    model_of_run,
    shard_blocks_,
)
from farloop.node.model.shards import unaveraged
from farloop.node.settings import NodeConfig
from farloop.wire.machine_info import Inventory

_log = logging.getLogger(__name__)

EVALUATION_BATCH = 16  # sequences at a time: bounds memory, changes nothing else


def train(
    config: NodeConfig, *, on_join: Callable[[Node], None] = lambda node: None, environ: Mapping[str, str] | None = None
) -> None:
    """Take part in a run until it ends or SIGTERM comes. `environ` may hold labels of a container (`machine_info.py`).
    Raises NodeError, CorpusError, KeyFileError, EndpointError: one line each, for the person who started the node."""
    if config.threads:
        torch.set_num_threads(config.threads)
    corpora = corpora_of(config)
    evaluation: list[EvaluationSet] = []
    trained: list[NamedModel] = []

    def model_of(spec: RunSpec) -> nn.Module:
        evaluation.append(check_data(spec, *corpora))
        named = model_of_run(spec.identity.model, spec.identity.seed, config.model)
        named.check(corpora[0].vocabulary, spec.terms.inner.sequence_tokens)
        trained.append(named)
        return prepared(named.module, config, spec)

    def evaluate(module: nn.Module) -> float:
        return evaluation[0].loss(module, EVALUATION_BATCH, trained[0].loss)

    node = join_run(config, LoopOptions(model=model_of, evaluate=evaluate), inventory_of(config, environ))
    with node:
        _log.info("training run=%s device=%r", node.spec.identity.name, node.cluster.describe())
        node.drain_on(signal.SIGINT)
        on_join(node)
        _loop(node, corpora, trained[0].loss, config.microbatch)


def corpora_of(config: NodeConfig) -> list[Corpus]:
    """The node's data, and those of each re-warm that brings some. Raises CorpusError."""
    data, most = config.data, config.data.max_bytes
    first = load_mixture(data.mixture, max_bytes=most) if data.mixture else load_corpus(data.path, max_bytes=most)
    return [first, *(load_corpus(path, max_bytes=most) for path in data.phases or ())]


def inventory_of(config: NodeConfig, environ: Mapping[str, str] | None) -> Inventory:
    """What the node tells of its machine. `environ`: as `train` has it."""
    return read_inventory(environ or {}, config.site, config.address, config.nics)


def check_data(spec: RunSpec, corpus: Corpus, *phases: Corpus) -> EvaluationSet:
    """The run's evaluation set from this corpus. Raises DataError unless the corpus is the run's.

    `phases`: the corpora that re-warms bring; they must be the run's as well.
    """
    identity = spec.identity
    if identity.data == "own":
        raise DataError("the run's samples come from its nodes' own loops; the built-in trainer has none to bring")
    first, *brought = identity.data.split("+")
    if corpus.digest != first:
        raise DataError(
            f"this node's corpus is {corpus.digest}, the run's is {first}; "
            "give every node the same files with [data] path (the default corpus follows the Python version)"
        )
    for number, (wanted, phase) in enumerate(zip_longest(brought, phases), start=1):
        if wanted is None or phase is None or phase.digest != wanted:
            raise DataError(
                f"this node's corpus of phase {number} is {phase.digest if phase else 'missing'}, the run's is "
                f"{wanted or 'none'}; give every node the same files with [data] phases"
            )
    sequences = evaluation_sequences(identity.evaluation_set)
    evaluation = EvaluationSet(corpus, sequences=sequences, sequence_tokens=spec.terms.inner.sequence_tokens)
    if evaluation_name(evaluation) != identity.evaluation_set:
        raise DataError(
            f"this node's evaluation set is {evaluation_name(evaluation)}, the run's is {identity.evaluation_set}; "
            "give every node the same version of farloop"
        )
    return evaluation


def evaluation_name(evaluation: EvaluationSet) -> str:
    """How an identity names the set: its size and digest."""
    return f"{len(evaluation)}x{evaluation.digest}"


def evaluation_sequences(name: str) -> int:
    """Size of the set of that name."""
    return int(name.partition("x")[0])


def mixed_precision(device: torch.device, terms: Terms) -> torch.autocast:
    """bfloat16 for the arithmetic of a step on CUDA, unless the card would only emulate it; none on the CPU, nor where
    raw gradients are exchanged."""
    enabled = device.type == "cuda" and method_named(terms.method).inner and _has_bf16()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


def _has_bf16() -> bool:
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def prepared(module: nn.Module, config: NodeConfig, spec: RunSpec) -> nn.Module:
    """The module with memory for its parameters, and the node's options applied. Raises TermsMismatch."""
    if config.checkpoint:
        checkpoint_blocks_(module)
    if config.compile:
        for block in blocks_of(module) or [module]:
            block.compile()
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if config.shard and ranks > 1:
        if not method_named(spec.terms.method).inner:
            raise TermsMismatch(f"the method {spec.terms.method} exchanges whole gradients: set [node] shard = false")
        shard_blocks_(module, device, ranks, computes=torch.bfloat16 if on_cuda and _has_bf16() else None)
        return module
    if config.shard:
        _log.warning("nothing is sharded: this node is one process; start more with [node] nproc")
    materialise_(module, device)
    return module


def _loop(node: Node, corpora: Sequence[Corpus], loss_of: LossOf, microbatch: int) -> None:
    spec = node.spec
    samples = Mixture(spec, corpora)
    device = node.cluster.device
    mixed = mixed_precision(device, spec.terms)
    while node.running:
        batch = samples.batch(node.samples, node.position).to(device, non_blocking=True)
        node.step(loss=backward(node.model, batch, loss_of, mixed, microbatch))


def backward(
    model: nn.Module, tokens_BS: Tensor, loss_of: LossOf, mixed: torch.autocast, microbatch: int = 0
) -> float | Tensor:
    """Forward and backward pass of a batch, `microbatch` sequences at a time (0: all). The mean loss, on its device.

    Gradients are averaged over ranks in the last backward pass alone.
    """
    parts = torch.split(tokens_BS, microbatch or len(tokens_BS))
    total: float | Tensor = 0.0
    for number, part_BS in enumerate(parts, start=1):
        share = len(part_BS) / len(tokens_BS)
        with nullcontext() if number == len(parts) else unaveraged(model):
            with mixed:
                loss = loss_of(model, part_BS)
            torch.autograd.backward(loss if len(parts) == 1 else loss * share)
        total += (loss.item() if loss.device.type == "cpu" else loss.detach()) * share
    return total
