"""The daemon's trainer: the built-in byte-level GPT on a corpus, as a plain caller of `join`."""

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from farloop.algo.methods import method_named
from farloop.algo.spec import RunSpec
from farloop.node.corpus import Corpus, load_corpus
from farloop.node.data import EvaluationSet, Samples
from farloop.node.errors import DataError
from farloop.node.library import Node, join
from farloop.node.model import GPT, build, from_json

_log = logging.getLogger(__name__)

EVALUATION_BATCH = 16
"""Sequences at a time: bounds memory, changes nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What is local to a node."""

    name: str
    """Unique in the run; with a key, the name of its public key on the coordinator's allow-list."""
    coordinator: str = "tcp://127.0.0.1:7700"
    """The coordinator's address."""
    key: Path | None = None
    """Secret key file."""
    server_key: Path | None = None
    """The coordinator's public key file: nobody else can play it."""
    state_dir: Path | None = None
    """Remembers starts and epochs; `.farloop/NAME` unless given."""
    fingerprint: str | None = None
    """Take part in this run only."""
    http: str = ""
    """Where /metrics, /healthz and /readyz are served, as host:port; an empty text serves nothing."""
    data: Path | None = None
    """Text file, JSONL file or folder; the standard library's source unless given."""
    data_bytes: int = 16_000_000
    """How much of it is read at most."""
    nproc: int = 1
    """Processes on this host, one per device, started by torchrun."""
    threads: int = 0
    """CPU threads per process; 0 leaves it to torch."""


def train(config: NodeConfig, *, on_join: Callable[[Node], None] = lambda node: None) -> None:
    """Take part in a run until it ends or SIGTERM comes.

    Raises:
        NodeError, CorpusError, KeyFileError, EndpointError: one line each, for the person who started the node.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    corpus = load_corpus(config.data, max_bytes=config.data_bytes)
    evaluation: list[EvaluationSet] = []

    def model_of(spec: RunSpec) -> GPT:
        evaluation.append(check_data(spec, corpus))
        return build(from_json(spec.identity.model), spec.identity.seed)

    def evaluate(module: nn.Module) -> float:
        assert isinstance(module, GPT)
        return evaluation[0].loss(module, EVALUATION_BATCH)

    node = join(
        config.coordinator,
        model_of,
        name=config.name,
        key=config.key,
        server_key=config.server_key,
        state_dir=config.state_dir,
        fingerprint=config.fingerprint,
        evaluate=evaluate,
        http=config.http,
    )
    with node:
        _log.info("training run=%s device=%r", node.spec.identity.name, node.cluster.describe())
        signal.signal(signal.SIGTERM, lambda *_: node.request_drain())
        signal.signal(signal.SIGINT, lambda *_: node.request_drain())
        on_join(node)
        _loop(node, corpus)


def check_data(spec: RunSpec, corpus: Corpus) -> EvaluationSet:
    """The run's evaluation set from this corpus. Raises DataError unless the corpus is the run's."""
    identity = spec.identity
    if identity.data == "own":
        raise DataError("the run's samples come from its nodes' own loops; the built-in trainer has none to bring")
    if corpus.digest != identity.data:
        raise DataError(
            f"this node's corpus is {corpus.digest}, the run's is {identity.data}; "
            "give every node the same files with [data] path (the default corpus follows the Python version)"
        )
    sequences = evaluation_sequences(identity.evaluation_set)
    evaluation = EvaluationSet(corpus, sequences=sequences, sequence_tokens=spec.terms.sequence_tokens)
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


def _loop(node: Node, corpus: Corpus) -> None:
    spec = node.spec
    samples = Samples(corpus, spec.terms.sequence_tokens, spec.identity.seed)
    device = node.cluster.device
    autocast = device.type == "cuda" and method_named(spec.terms.method).inner
    while node.running:
        batch = samples.batch(node.samples).to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            logits = node.model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        torch.autograd.backward(loss)
        node.step(loss=loss.item())
