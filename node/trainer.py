"""The daemon's trainer: a model that the run or the node names, on a corpus, as a plain caller of `join`."""

import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farloop.algo.methods import method_named
from farloop.algo.spec import RunSpec
from farloop.algo.terms import Terms
from farloop.node.data import Corpus, EvaluationSet, Mixture, Share, load_corpus, load_mixture
from farloop.node.devices import Where
from farloop.node.errors import DataError, TermsMismatch
from farloop.node.library import SAVE_EVERY_ROUNDS, Node, join, unaveraged
from farloop.node.machine_info import OperatorLabels, look_around
from farloop.node.named_model import (
    LossOf,
    NamedModel,
    blocks_of,
    checkpoint_blocks_,
    materialise_,
    model_of_run,
    shard_blocks_,
)
from farloop.node.zmq_dealer import LinkConfig
from farloop.wire.uplink import UplinkLimit

_log = logging.getLogger(__name__)

EVALUATION_BATCH = 16  # sequences at a time: bounds memory, changes nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """What is local to a node."""

    name: str
    """Unique in the run; with a key, the name of its public key on the coordinator's allow-list."""
    coordinator: str = "tcp://127.0.0.1:7700"
    """The coordinator's address."""
    key: Path | None = None
    """Secret key file; turns on encryption."""
    server_key: Path | None = None
    """Public key file of the coordinator."""
    state_dir: Path | None = None
    """Folder for starts, epochs, residuals and anchors. Default: `.farloop/NAME`."""
    save_every_rounds: int = SAVE_EVERY_ROUNDS
    """Rounds between two whole copies of an anchor in `state_dir`, beside which each update is kept: a restarted node
    takes the updates that it missed, and no snapshots. 0: nothing is kept."""
    save_optimizer: bool = True
    """Save the inner optimizer's state beside each of these copies. Off: a restarted node begins with empty moments."""
    fingerprint: str | None = None
    """Join only the run with this fingerprint."""
    http: str = ""
    """Address of /metrics, /healthz and /readyz, as host:port; empty: none."""
    http_names: str = ""
    """Comma-separated public host names under which these pages may be requested, e.g. oslo.example.com. IP addresses
    and private names are always allowed; * allows any name."""
    data: Path | None = None
    """Token file, text file, JSONL file or folder. Default: the source of Python's standard library."""
    data_mixture: tuple[Share, ...] = ()
    """Several of these in place of `data`."""
    data_bytes: int = 16_000_000
    """Most bytes to read from each text."""
    data_phases: tuple[Path, ...] = ()
    """The text of each re-warm that brings new data, in order."""
    give_up: float = 0.0
    """Seconds without a session with the coordinator, at the start or later, after which the node ends with code 5. 0:
    never."""
    leave_code: int = 0
    """Exit code after a signal before the run's end: 130 for a supervisor that takes 0 for the end of the work, as a
    Kubernetes Job does."""
    nproc: int = 1
    """Processes on this host, one per device."""
    restarts: int = 3
    """How often, within an hour of their start, all processes are started again after one of them has died."""
    hang_timeout: float = 60.0
    """Seconds for which all other processes of the node may wait for one, and at least ten steps, before it counts as
    hanging: all are started again. 0: for ever."""
    hosts: str = "1"
    """Hosts of this node, as 4, or 3:4 to go on with 3 when one is lost. Start the same command on each."""
    rendezvous: str = ""
    """Where the hosts of this node meet, as HOST:PORT of one of them. Keep the port from others: who reaches it can run
    code on all of them."""
    model: str = ""
    """Your model, as package.module:factory or hf:FOLDER. Default: what the run names. Code is loaded from here alone,
    never because a run says so."""
    microbatch: int = 0
    """Sequences in one forward pass of a process; gradients add up over a batch. 0: all of its part of the batch."""
    checkpoint: bool = False
    """Activation checkpointing: every block keeps its inputs alone and is computed again in the backward pass."""
    compile: bool = False
    """Compile every block with torch.compile."""
    shard: bool = False
    """Shard parameters, gradients and the optimizer over the processes (FSDP2: every block, then the rest)."""
    anchors: str = "auto"
    """Where anchors and residuals are kept: in host memory, or on the device, which takes 4 bytes a parameter of its
    memory each and saves copies; auto: on the device if two steps leave the room. On CPUs it is the same."""
    threads: int = 0
    """CPU threads per process; 0: torch decides."""
    tau: int | None = None
    """Inner steps between a send and its merge on this node. Default: the run's (arXiv 2501.18512)."""
    adapt_tau: bool | None = None
    """Choose `tau` again at every send: the shortest with which no update comes late because of this node's link, as
    far as the run's rounds have room for it. It begins with `tau`. Default: where `tau` is open here and in the run, up
    to a quarter of a round."""
    site: str = ""
    """Label of the place; nodes of one site are close to each other. Default: from the labels of the container."""
    address: str = ""
    """Address at which other nodes reach this one, as tcp://host:port; empty: outbound connections only."""
    nics: str = ""
    """Network cards that the machine hides or misreports: `eth0=roce-v2/100gbit, eth1=ethernet`."""
    congestion: str = ""
    """Congestion control of its TCP connections, e.g. bbr. Default: the system's."""
    lanes: int = 0
    """Connections that carry deltas and updates, from 1 to 16. 0: as many as the link is measured to need."""
    bulk_source: str = ""
    """Address of this machine from which deltas leave and on which updates arrive, as 10.0.0.5, where it has
    several. It needs keys. Default: the system's choice, as for control messages."""
    max_uplink: str = ""
    """Most that the node sends, as 20mbit; empty: as fast as the link."""
    quiet_hours: str = ""
    """Hours of the day, in local time, in which it sends at most `quiet_uplink`, as 08:00-18:00 or 22:00-06:00."""
    quiet_uplink: str = ""
    """Most that it sends in the quiet hours, as 2mbit."""

    @property
    def uplink(self) -> UplinkLimit:
        """What the node may send. Raises ValueError."""
        return UplinkLimit.parse(self.max_uplink, self.quiet_hours, self.quiet_uplink)


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
        http_names=config.http_names,
        link=link_of(config, environ or {}),
        give_up_s=config.give_up,
        tau=config.tau,
        adapt_tau=config.adapt_tau,
        anchors=cast(Where, config.anchors),
        save_every_rounds=config.save_every_rounds,
        save_optimizer=config.save_optimizer,
        hang_timeout_s=config.hang_timeout,
    )
    with node:
        _log.info("training run=%s device=%r", node.spec.identity.name, node.cluster.describe())
        signal.signal(signal.SIGTERM, lambda *_: node.request_drain())
        signal.signal(signal.SIGINT, lambda *_: node.request_drain())
        on_join(node)
        _loop(node, corpora, trained[0].loss, config.microbatch)


def corpora_of(config: NodeConfig) -> list[Corpus]:
    """The node's data, and those of each re-warm that brings some. Raises CorpusError."""
    most = config.data_bytes
    mixture = config.data_mixture
    first = load_mixture(mixture, max_bytes=most) if mixture else load_corpus(config.data, max_bytes=most)
    return [first, *(load_corpus(path, max_bytes=most) for path in config.data_phases)]


def link_of(config: NodeConfig, environ: Mapping[str, str]) -> LinkConfig:
    """How its link is kept, and what it tells of its machine. `environ`: as `train` has it."""
    seen = look_around(environ, OperatorLabels.of(config.site, config.address, config.nics))
    return LinkConfig(
        coordinator=config.coordinator,
        congestion=config.congestion,
        lanes=config.lanes,
        bulk_source=config.bulk_source,
        uplink=config.uplink,
        inventory=seen,
    )


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
    """Forward and backward pass of a batch, `microbatch` sequences at a time (0: all). Returns the mean loss; on a
    device it stays there.

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
