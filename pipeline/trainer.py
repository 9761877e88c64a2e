"""A node that trains one stage of the built-in model: a caller of `join` whose step is a pipeline's step.

Inside a pipeline activations go from stage to stage; across pipelines the replicas of a stage sync its fragments
through the coordinator, as any nodes do, with whatever method the run has. Gradients are clipped stage by stage.
"""

import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from farloop.algo.spec import RunSpec
from farloop.algo.stages import StageLayout
from farloop.node.arguments import LoopOptions
from farloop.node.data.corpus import Corpus, Mixture
from farloop.node.errors import DataError, LayoutError
from farloop.node.library import Node, join_run
from farloop.node.link import LOOK_S
from farloop.node.model.built_in import GPT, build, from_json
from farloop.node.settings import NodeConfig, PipelineConfig
from farloop.node.trainer import check_data, corpora_of, inventory_of, mixed_precision
from farloop.pipeline.executor import Executor
from farloop.pipeline.layout import read_layout
from farloop.pipeline.link import PeerConfig
from farloop.pipeline.stage import StageJobs, StagePart
from farloop.wire.messages import MOST_SEEN, Observed

_log = logging.getLogger(__name__)


def train_stage(
    config: NodeConfig,
    pipeline: PipelineConfig,
    *,
    on_join: Callable[[Node], None] = lambda node: None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Take part in a run with one stage of the model, until it ends, SIGTERM comes, or all sources have left.

    `environ` may hold labels of a container.
    Raises NodeError, CorpusError, KeyFileError, EndpointError: one line each, for the person who started the node.
    """
    assert pipeline.layout is not None
    layout, addresses = read_layout(pipeline.layout)
    number = layout.stage_of(config.name)
    if number is None:
        raise LayoutError(f"{pipeline.layout}: no stage has the node {config.name}")
    is_source = number == 0
    corpora = corpora_of(config) if is_source else []

    def part_of(spec: RunSpec) -> StagePart:
        if is_source:
            check_data(spec, *corpora)
            _check_batch(spec, pipeline)
        return StagePart(_whole(spec, layout), layout.stages[number], source=is_source)

    node = join_run(config, LoopOptions(model=part_of, holds=(number,)), inventory_of(config, environ))
    with node:
        node.drain_on(signal.SIGINT)
        on_join(node)
        executor = _executor(node, config, pipeline, layout, addresses)
        executor.start()
        _log.info("training run=%s stage=%d listens=%s", node.spec.identity.name, number, executor.link.endpoint)
        try:
            _loop(node, executor, corpora, pipeline)
        finally:
            executor.close()
            _log.info("pipeline %s", " ".join(f"{k}={v}" for k, v in sorted(executor.machine.counted.items())))


def _executor(
    node: Node, config: NodeConfig, pipeline: PipelineConfig, layout: StageLayout, addresses: dict[str, str]
) -> Executor:
    spec, module, device = node.spec, node.module, node.cluster.device
    assert isinstance(module, StagePart) and node.executor is not None
    # An activation in fp32; no microbatch is longer than a batch.
    numel = spec.terms.inner.batch_sequences * spec.terms.inner.sequence_tokens * module.config.dim
    return Executor(
        layout=layout,
        addresses={name: to for name, to in addresses.items() if name != config.name},
        jobs=StageJobs(module, device=device, mixed=mixed_precision(device, spec.terms)),
        peer=PeerConfig(
            name=config.name,
            bind=pipeline.bind or addresses[config.name],
            key=config.key if pipeline.peers is not None else None,
            peers=pipeline.peers,
            liveness_s=pipeline.liveness_s,
            max_tensor_bytes=4 * numel + 4096,
        ),
        config=pipeline,
        incarnation=node.executor.machine.incarnation,
        run=int(spec.identity.fingerprint(), 16),
        wanted=lambda: not node.asked_to_leave,
    )


def _loop(node: Node, executor: Executor, corpora: Sequence[Corpus], pipeline: PipelineConfig) -> None:
    samples = Mixture(node.spec, corpora) if corpora else None
    # The first source sees to it that all follow a new layout file.
    conducts = executor.machine.name == executor.machine.layout.stages[0].replicas[0]
    watch = _Watch(pipeline.layout, executor) if conducts else None
    told_at = time.monotonic()
    while node.running:
        batches: Sequence[Tensor] = ()
        if samples is not None:
            batches = samples.batch(node.samples, node.position).chunk(pipeline.microbatches)
        if watch is not None:
            watch.poll()
        step = executor.step(batches, closes_round=node.closes_round)
        if step is None:
            return
        tokens = step.trained.tokens
        if node.executor is not None:
            if time.monotonic() - told_at >= LOOK_S:
                told_at, seen = time.monotonic(), executor.link.seen
                for place in range(0, len(seen), MOST_SEEN):
                    node.executor.link.send(Observed(links=seen[place : place + MOST_SEEN]))
            machine = executor.machine
            node.executor.metrics.piped(machine.counted, sum(executor.bytes_by_hop.values()), len(machine.desk.held))
            if node.executor.machine.takes_samples:
                # A rerouted microbatch may end a step later; of a source no step may have more than its samples.
                tokens = min(tokens, node.batch_tokens())
        node.step(loss=step.trained.loss, tokens=tokens)


class _Watch:
    """Looks whether the layout file has become another one."""

    def __init__(self, path: Path | None, executor: Executor) -> None:
        assert path is not None
        self._path, self._executor, self._seen = path, executor, self._stamp(path)

    def poll(self) -> None:
        """A file that cannot be used is told of once, and changes nothing."""
        stamp = self._stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            layout, addresses = read_layout(self._path)
        except LayoutError as error:
            return _log.warning("new layout rejected reason=%r", str(error))
        self._executor.offer(layout, addresses)

    @staticmethod
    def _stamp(path: Path) -> tuple[int, int]:
        try:
            found = path.stat()
        except OSError:
            return 0, 0
        return found.st_mtime_ns, found.st_size


def _whole(spec: RunSpec, layout: StageLayout) -> GPT:
    if not spec.identity.model.startswith("{"):
        raise LayoutError("a node of a pipeline trains a stage of a built-in model, and the run's is another")
    model = build(from_json(spec.identity.model), spec.identity.seed)
    if layout.stages[-1].stop != model.config.layers:
        raise LayoutError(f"the layout has {layout.stages[-1].stop} layers, the run's model {model.config.layers}")
    return model


def _check_batch(spec: RunSpec, pipeline: PipelineConfig) -> None:
    """Microbatches count alike, so each must be as large as the others."""
    batch, parts = spec.terms.inner.batch_sequences, pipeline.microbatches
    if batch % parts:
        raise DataError(
            f"the run's batch of {batch} sequences does not divide into {parts} microbatches; "
            f"[pipeline] microbatches may be {math.gcd(batch, parts)}"
        )
