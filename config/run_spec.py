"""From settings to the run's specification and first anchors."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from farloop.algo.digest import digest
from farloop.algo.fragments import partition, trainable_tensors, uncompiled_name
from farloop.algo.methods import Method, default_mix, method_named
from farloop.algo.outer_settings import PLAIN_AVERAGE, default_outer
from farloop.algo.sample_order import arrivals
from farloop.algo.schedule import num_rounds
from farloop.algo.spec import (
    Identity,
    InnerOptimizer,
    LearningRate,
    LearningRateShape,
    Rewarm,
    RoundRule,
    RunSpec,
    Screen,
    Terms,
)
from farloop.algo.validation import check, check_learning_rate, check_rounds, given_as
from farloop.coordinator.aggregator import first_anchor
from farloop.node.data import Corpus, CorpusError, EvaluationSet, load_corpus, num_samples
from farloop.node.model import PRESETS, build, config_json
from farloop.node.trainer import data_name, evaluation_name
from farloop.quant.codec_checks import check_codecs
from farloop.quant.registry import downlink_spelling
from farloop.wire.keys import check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The table `[run]` of a RUN.toml. What is None follows from the method and the size of the run."""

    name: str = "run"
    """What people call it."""
    seed: int = 0
    """Of the first weights and of the order of the samples."""
    model: str = "tiny"
    """A built-in model: nano, micro, tiny, small or base."""
    init: Path | None = None
    """A safetensors file with the first weights of a model of your own; takes the place of `model`, and of the data."""
    nodes: int = 2
    """Nodes that the run waits for before it starts."""
    steps: int = 600
    """Inner steps of each node."""
    method: str = "streaming"
    """diloco, streaming, co2, decoupled, async, sparse or data-parallel; `farloop methods` tells them apart."""
    h: int | None = None
    """Inner steps between two sends of a fragment."""
    h_share_of: str | None = None
    """Nodes that do a share of a round's steps, as "rome=0.86 oslo=0.5": a step per slot at least."""
    tau: int | None = None
    """Inner steps between a send and its merge."""
    mix: float | None = None
    """Share of the local weights that a merge keeps, 0 to 1; unless given, that of the method, and at most 1/nodes."""
    lag: int | None = None
    """1: an update has the whole next round to come, and is merged at its end; tau and mix are 0 then."""
    eager: bool = False
    """With lag = 1: train on as if the node's own latest delta were merged already (arXiv 2502.12996)."""
    blocks_per_fragment: int = 3
    """Transformer blocks of a fragment, where the method cuts the model."""
    stages: str | None = None
    """Where a pipeline cuts the model: the first block of every stage but the first, as "4,8". No fragment crosses a
    cut, embedding and head are of stage 0, and a node may hold some stages; nodes and quorum are of each."""
    codec_up: str | None = None
    """From the nodes to the coordinator: a name of `farloop codecs`, or one with parameters, as q4r:step=0.7."""
    codec_up_of: str | None = None
    """Nodes that send by another one, as "rome=q4r oslo=q8": behind thinner links than the others."""
    codec_down: str | None = None
    """... and back."""
    outer_lr: float | None = None
    """ν of the outer optimizer."""
    outer_momentum: float | None = None
    """μ of the outer optimizer."""
    outer_clip: float | None = None
    """co2: largest size of an element of the outer momentum; 1 unless given (arXiv 2401.16265)."""
    outer_buffer: int | None = None
    """async: deltas between two steps of the outer momentum; the number of nodes unless given (arXiv 2401.09135)."""
    outer_spread: float = 0.0
    """async: share of the momentum in each of these steps, 0 to 1/outer_buffer (same source; 0.1 is no better)."""
    outer_restart: int = 0
    """Outer steps after which the outer momentum begins anew from zero; 0 for never (arXiv 2605.28585)."""
    inner_optimizer: str = "adamw"
    """adamw, or muon for the matrices of layers with adamw for the rest, at the same learning rate."""
    screen: str = "norm"
    """What is looked for in deltas: norm (far too long, replayed or copied), full (directions as well), or off."""
    norm_band: float = 8.0
    """Times the usual length of late that a delta may have."""
    merge: str | None = None
    """For nodes that nobody vouches for, in the place of the mean: clipped, median, trimmed or krum."""
    control_variates: bool = False
    """Correct each node's steps for what its data differ from those of all (arXiv 2308.08165): for shards that are not
    alike, with diloco, outer_momentum = 0 and a dense codec_up as q4; one more fp32 copy of the model on each node."""
    outer_correction: bool = True
    """Where rounds differ in length, correct ν, μ and the delta for the work in each (arXiv 2609.36662)."""
    h_rule: str = "constant"
    """How long rounds are: constant, qsr (α/η)², linear α/η, cubic (α/η)³, or post-local."""
    h_alpha: float | None = None
    """α of qsr, linear and cubic; lr·√h starts qsr with h steps at the peak (arXiv 2310.14423)."""
    h_init: int | None = None
    """H while the learning rate warms up: h unless given; of post-local, before h_switch: 1."""
    h_max: int | None = None
    """Longest round; as long as the run unless given. What a crash can lose grows with it."""
    h_switch: int | None = None
    """post-local: position from which rounds have h steps."""
    lr: float = 2e-3
    """Peak of the inner learning rate."""
    min_lr: float = 2e-4
    """Where it starts and ends."""
    warmup_steps: int | None = None
    """Schedule positions from min_lr to lr; a tenth of the run, at most 100, unless given."""
    schedule: str = "cosine"
    """Of the learning rate after its warm-up: cosine, linear, step, wsd, infinite or constant."""
    drops: str | None = None
    """step: positions from which the learning rate is drop_factor of what it was, as "300,450"."""
    drop_factor: float = 0.1
    """step: what is left after a drop."""
    decay_share: float = 0.2
    """wsd: share of the run in which it falls from lr to min_lr, at the end (arXiv 2405.18392)."""
    decay: str = "sqrt"
    """wsd: sqrt or linear."""
    constant_lr: float | None = None
    """infinite: what is held after the cool-down; midway between lr and min_lr unless given."""
    cooldown_steps: int | None = None
    """infinite: positions from lr to constant_lr; a quarter of the run unless given."""
    anneal_at: int | None = None
    """infinite: position from which it falls to min_lr at the run's end; never unless given."""
    rewarms: str | None = None
    """Position and peak of every re-warm, as "600:1e-3,900:5e-4", and where it brings a text of [data] phases the share
    of samples still drawn from the data before, as "600:1e-3:0.05": 0.05 after a weak shift (arXiv 2403.08763)."""
    rewarm_momentum: float = 0.0
    """Share of the outer momentum that survives a re-warm."""
    clip: float = 1.0
    """Largest global norm of an inner gradient."""
    weight_decay: float = 0.1
    """Of matrices, in the inner optimizer."""
    batch_sequences: int = 8
    """Sequences of one inner step of one node."""
    sequence_tokens: int = 128
    """Tokens of a sequence."""
    quorum: int | None = None
    """Contributions that close a window; all that are expected unless given."""
    floor: int = 1
    """Fewest contributions that may be merged."""
    evaluate_every_rounds: int | None = None
    """Rounds between two evaluations; about every 30 steps unless given."""
    evaluation_sequences: int = 64
    """Sequences of the fixed evaluation set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The table `[data]` of a RUN.toml or NODE.toml; both must name the same text."""

    path: Path | None = None
    """Text file, JSONL file or folder; the source of Python's standard library unless given."""
    max_bytes: int = 16_000_000
    """How much of it is read at most, and of each of the phases."""
    phases: tuple[Path, ...] | None = None
    """Texts as that of path, one of each re-warm that has a replay, in order. The evaluation set stays that of path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run that can be begun."""

    spec: RunSpec
    anchors: list[Tensor]
    notes: list[str]
    """Choices that a person should know of."""
    evaluation: EvaluationSet | None


def plan_run(config: RunConfig, data: DataConfig, corpus: Corpus | None = None) -> Plan:
    """Everything the nodes must agree on. `corpus`: that of `data`, where the caller has read it already.

    Raises:
        ValueError: a setting is out of range, one sentence.
        CorpusError: there is no text to train on.
    """
    method = method_named(config.method)
    tensors, model = _first_weights(config)
    layout = partition(
        [(name, tuple(tensor.shape)) for name, tensor in tensors.items()],
        pattern=method.pattern,
        blocks_per_fragment=config.blocks_per_fragment,
        stages=_stages(config.stages),
    )
    terms, notes = terms_of(config, method)
    check(terms, layout)
    check_codecs(terms)
    anchors = [first_anchor(fragment, tensors) for fragment in layout.fragments]
    evaluation, corpus_digest, samples = None, "own", 0
    _check_phases(terms, data, brings_data=config.init is None)
    if config.init is None:
        corpus = corpus or load_corpus(data.path, max_bytes=data.max_bytes)
        later = [_later_corpus(path, data.max_bytes, config.sequence_tokens) for path in data.phases or ()]
        evaluation = EvaluationSet(
            corpus, sequences=config.evaluation_sequences, sequence_tokens=config.sequence_tokens
        )
        corpus_digest, samples = data_name([corpus, *later]), num_samples(corpus, config.sequence_tokens)
    identity = Identity(
        name=config.name,
        model=model,
        layout=layout,
        anchor_digests=tuple(digest(anchor) for anchor in anchors),
        data=corpus_digest,
        num_samples=samples,
        evaluation_set=evaluation_name(evaluation) if evaluation else "none",
        seed=config.seed,
    )
    return Plan(spec=RunSpec(identity=identity, terms=terms), anchors=anchors, notes=notes, evaluation=evaluation)


def _check_phases(terms: Terms, data: DataConfig, *, brings_data: bool) -> None:
    """Every re-warm with a replay has its text, and the other way round. Raises ValueError, one sentence."""
    brought, texts = len(arrivals(terms.lr)), len(data.phases or ())
    if not brings_data and brought:
        raise ValueError("rewarms: one has a replay, but with init the nodes' own loops bring the data: leave it out")
    if brings_data and brought != texts:
        named = f"{texts} text{'' if texts == 1 else 's'}"
        raise ValueError(
            f"rewarms: {brought or 'none'} with a replay (as 600:1e-3:0.05, where 5 % of the samples stay those from "
            f"before), but [data] phases names {named}; every such re-warm brings one"
        )


def _later_corpus(path: Path, max_bytes: int, sequence_tokens: int) -> Corpus:
    """One that a re-warm brings. Raises CorpusError."""
    try:
        corpus = load_corpus(path, max_bytes=max_bytes)
    except CorpusError as error:
        raise CorpusError(f"phases: {error}") from error
    try:
        num_samples(corpus, sequence_tokens)
    except CorpusError as error:
        raise CorpusError(f"phases: {path}: {error}") from error
    return corpus


def _stages(text: str | None) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"[run] stages: the first block of every stage but the first is wanted, as 4,8, not {text!r}")
    return tuple(map(int, words))


def _given_of(key: str, text: str | None) -> Any:
    """What some nodes have of their own. Raises ValueError, one sentence."""
    given = given_as(key, text or "", ())
    for node, _ in given:
        try:
            check_name(node)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return given


def _first_weights(config: RunConfig) -> tuple[dict[str, Tensor], str]:
    """Named tensors of version 0, and how the identity names the model."""
    if config.init is not None:
        if not config.init.is_file():
            raise ValueError(f"[run] init: there is no file {config.init}")
        return {uncompiled_name(name): tensor for name, tensor in load_file(config.init).items()}, "own"
    if config.model not in PRESETS:
        raise ValueError(f"[run] model: there is no {config.model!r}; there are {', '.join(PRESETS)}")
    size = PRESETS[config.model]
    with torch.no_grad():
        module = build(size, config.seed)
    return {name: parameter.detach() for name, parameter in trainable_tensors(module)}, config_json(size)


def terms_of(config: RunConfig, method: Method) -> tuple[Terms, list[str]]:
    """The run's terms, and the choices in them that a person should know of.

    Raises:
        ValueError: it cannot have such a learning rate or such rounds, one sentence.
    """
    notes: list[str] = []
    h = method.h if config.h is None else config.h
    if config.steps < 1 or h < 1:
        raise ValueError(f"steps and h are at least 1, not {config.steps} and {h}")
    every = max(1, round(30 / h)) if config.evaluate_every_rounds is None else config.evaluate_every_rounds
    lag = method.lag if config.lag is None else config.lag
    terms = Terms(
        method=method.name,
        steps=config.steps,
        h=h,
        tau=(0 if lag else method.tau) if config.tau is None else config.tau,
        mix=(0.0 if lag else default_mix(method, config.nodes)) if config.mix is None else config.mix,
        lag=lag,
        eager=config.eager,
        codec_up=config.codec_up or method.codec_up,
        codec_up_of=_given_of("codec_up_of", config.codec_up_of),
        codec_down=downlink_spelling(config.codec_down or method.codec_down),
        outer_lr=PLAIN_AVERAGE.lr,
        outer_momentum=PLAIN_AVERAGE.momentum,
        lr=learning_rate_of(config),
        clip=config.clip,
        weight_decay=config.weight_decay,
        batch_sequences=config.batch_sequences,
        sequence_tokens=config.sequence_tokens,
        on_late_update=method.on_late_update,
        max_stale_rounds=method.max_stale_rounds,
        max_staleness=method.max_staleness,
        quorum=method.quorum if config.quorum is None else config.quorum,
        floor=config.floor,
        min_nodes=config.nodes,
        evaluate_every_rounds=every,
        h_rule=cast(RoundRule, config.h_rule),
        h_alpha=config.h_alpha or 0.0,
        h_init=config.h_init,
        h_max=config.h_max,
        h_switch=config.h_switch or 0,
        outer_correction=config.outer_correction,
        rewarm_momentum=config.rewarm_momentum,
        outer_spread=config.outer_spread,
        outer_restart=config.outer_restart,
        inner_optimizer=cast(InnerOptimizer, config.inner_optimizer),
        control_variates=config.control_variates,
        screen=cast(Screen, config.screen),
        norm_band=config.norm_band,
        merge=config.merge,
        h_share_of=_given_of("h_share_of", config.h_share_of),
    )
    check_learning_rate(terms)
    check_rounds(terms, slots=1)
    outer_steps = num_rounds(terms)
    outer = default_outer(config.nodes, h, outer_steps, method.name)
    if outer.momentum == 0.0 and outer.kind not in ("sgd", "adamw") and config.outer_momentum is None:
        notes.append(f"{outer_steps} outer steps are too few for momentum: plain averaging (outer_lr 1, momentum 0)")
    outer_lr = outer.lr if config.outer_lr is None else config.outer_lr
    outer_momentum = outer.momentum if config.outer_momentum is None else config.outer_momentum
    clip = outer.clip if config.outer_clip is None else config.outer_clip
    buffer = outer.buffer if config.outer_buffer is None else config.outer_buffer
    settled = replace(terms, outer_lr=outer_lr, outer_momentum=outer_momentum, outer_clip=clip, outer_buffer=buffer)
    return settled, notes


def learning_rate_of(config: RunConfig) -> LearningRate:
    """The run's learning rate. Raises ValueError, one sentence, for text that names no positions."""
    infinite = config.schedule == "infinite"
    constant = (config.lr + config.min_lr) / 2 if infinite and config.constant_lr is None else config.constant_lr
    cooldown = config.steps // 4 if infinite and config.cooldown_steps is None else config.cooldown_steps
    return LearningRate(
        peak=config.lr,
        minimum=config.min_lr,
        warmup_steps=min(100, config.steps // 10) if config.warmup_steps is None else config.warmup_steps,
        shape=cast(LearningRateShape, config.schedule),  # whether it is one is asked by `check_learning_rate`
        drops=tuple(_position(word, "drops", "300,450") for word in _words(config.drops)),
        drop_factor=config.drop_factor,
        decay_share=config.decay_share,
        decay=cast(Literal["sqrt", "linear"], config.decay),
        constant=constant or 0.0,
        cooldown_steps=cooldown or 0,
        anneal_at=config.anneal_at,
        rewarms=tuple(_rewarm(word) for word in _words(config.rewarms)),
    )


def _words(text: str | None) -> Iterator[str]:
    return (word.strip() for word in text.split(",")) if text else iter(())


def _position(word: str, key: str, example: str) -> int:
    if not word.isdecimal():
        raise ValueError(f"[run] {key}: schedule positions are wanted, as {example}, not {word!r}")
    return int(word)


def _rewarm(word: str) -> Rewarm:
    start, _, rest = word.partition(":")
    peak, brings, replay = rest.partition(":")
    try:
        return Rewarm(
            start=_position(start, "rewarms", "600:1e-3"), peak=float(peak), replay=float(replay) if brings else None
        )
    except ValueError:
        raise ValueError(
            "[run] rewarms: position and peak of each re-warm are wanted, as 600:1e-3,900:5e-4, and the replay of one "
            f"that brings new data, as 600:1e-3:0.05, not {word!r}"
        ) from None
