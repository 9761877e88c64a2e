"""From settings to the run's specification and first anchors."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from farloop.algo.fragments import partition, plain_name, trainable_tensors
from farloop.algo.methods import Method, default_mix, method_named
from farloop.algo.outer_settings import PLAIN_AVERAGE, default_outer
from farloop.algo.sample_order import arrivals
from farloop.algo.schedule import num_rounds
from farloop.algo.spec import Fragment, Identity, RunSpec
from farloop.algo.terms import LearningRate, LearningRateShape, Rewarm, Terms
from farloop.algo.validation import check, check_learning_rate, check_rounds, given_as, may_own_tau
from farloop.coordinator.aggregator import first_anchor
from farloop.node.data import (
    Corpus,
    EvaluationSet,
    Share,
    check_tokenizers,
    data_name,
    load_corpus,
    load_mixture,
    num_samples,
)
from farloop.node.errors import CorpusError, ModelError
from farloop.node.model import PRESETS, VOCABULARY, build, config_json
from farloop.node.named_model import (
    HF,
    OWN,
    check_model_name,
    config_text,
    factory_weights,
    has_weights,
    hf_model,
    hf_weights,
    is_factory,
    model_folder,
)
from farloop.node.trainer import evaluation_name
from farloop.quant.codec_checks import check_codecs
from farloop.quant.digest import finite_digest
from farloop.quant.errors import NonFiniteError
from farloop.quant.registry import downlink_spelling
from farloop.wire.keys import check_name


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The table `[run]` of a RUN.toml. None: derived from the method and the size of the run."""

    name: str = "run"
    """Name of the run."""
    seed: int = 0
    """Seed of the initial weights and the sample order."""
    model: str = "tiny"
    """A built-in model (nano, micro, tiny, small or base), hf:FOLDER for a folder with the config.json of a causal
    language model, or package.module:factory for your own code."""
    init: Path | None = None
    """A safetensors file, or a folder of them, with the initial weights. Default: those in the folder of hf:FOLDER, or
    drawn from the seed. With a built-in model it replaces the model, which the nodes' own loops bring. They bring the
    data too, unless [data] names some: then the coordinator grants their samples."""
    nodes: int = 2
    """Nodes that the run waits for before it starts."""
    steps: int = 600
    """Inner steps of each node."""
    method: str = "streaming"
    """diloco, streaming, co2, decoupled, async, sparse or data-parallel; `farloop methods` compares them."""
    h: int | None = None
    """Inner steps between two sends of a fragment."""
    h_share_of: str | None = None
    """Nodes that do a share of the steps of a round, e.g. "rome=0.86 oslo=0.5"; at least one step per slot."""
    tau: int | None = None
    """Inner steps between a send and its merge. Where it is open and the method has one above 0, each node chooses its
    own by its link ([node] `adapt_tau`), and begins with the method's."""
    mix: float | None = None
    """Share of the local weights that a merge keeps, 0 to 1. Default: that of the method, at most 1/nodes."""
    lag: int | None = None
    """1: an update may arrive during the next round and is merged at its end; tau and mix are 0."""
    eager: bool = False
    """With lag = 1: continue as if the node's own latest delta were already merged (arXiv 2502.12996)."""
    blocks_per_fragment: int = 3
    """Transformer blocks per fragment, for methods that cut the model."""
    stages: str | None = None
    """First block of each pipeline stage but the first, e.g. "4,8". No fragment crosses a cut; embedding and head
    belong to stage 0. A node may hold some stages; nodes and quorum count per stage."""
    codec_up: str | None = None
    """Codec from the nodes to the coordinator: a name from `farloop codecs`, or with parameters, e.g. q4r:step=0.7."""
    codec_up_of: str | None = None
    """Nodes with another uplink codec, e.g. "rome=q4r oslo=q8", for slower links."""
    codec_down: str | None = None
    """Codec from the coordinator to the nodes."""
    outer_lr: float | None = None
    """Learning rate ν of the outer optimizer."""
    outer_momentum: float | None = None
    """Momentum μ of the outer optimizer."""
    outer_clip: float | None = None
    """co2: largest absolute element of the outer momentum. Default: 1 (arXiv 2401.16265)."""
    outer_buffer: int | None = None
    """async: deltas between two steps of the outer momentum. Default: the number of nodes (arXiv 2401.09135)."""
    outer_spread: float = 0.0
    """async: share of the momentum in each of these steps, 0 to 1/outer_buffer (same source; 0.1 is no better)."""
    outer_restart: int = 0
    """Outer steps after which the outer momentum is reset to zero; 0: never (arXiv 2605.28585)."""
    inner_optimizer: str = "adamw"
    """adamw, or muon for the matrices of layers and adamw for the rest, at the same learning rate."""
    screen: str = "norm"
    """Screening of deltas: norm (far too long, replayed or copied), full (also directions), or off."""
    norm_band: float = 8.0
    """Largest norm of a delta, as a multiple of the recent norm."""
    merge: str | None = None
    """Robust aggregation for untrusted nodes: clipped, median, trimmed or krum. Default: the mean."""
    control_variates: bool = False
    """Correct the steps of each node for its data distribution (arXiv 2308.08165), for shards that differ. Needs
    diloco, outer_momentum = 0 and a dense codec_up such as q4; costs one more fp32 copy of the model per node."""
    outer_correction: bool = True
    """If rounds differ in length, correct ν, μ and the delta for the work in each (arXiv 2609.36662)."""
    h_rule: str = "constant"
    """Length of rounds: constant, qsr (α/η)², linear α/η, cubic (α/η)³, or post-local."""
    h_alpha: float | None = None
    """α of qsr, linear and cubic. With lr·√h, qsr has h steps at the peak (arXiv 2310.14423)."""
    h_init: int | None = None
    """H during the warm-up of the learning rate. Default: h; post-local: 1 until h_switch."""
    h_max: int | None = None
    """Longest round. Default: unbounded. A crash can lose up to this many steps."""
    h_switch: int | None = None
    """post-local: position from which rounds have h steps."""
    lr: float = 2e-3
    """Peak of the inner learning rate."""
    min_lr: float = 2e-4
    """Learning rate at the start and the end."""
    warmup_steps: int | None = None
    """Schedule positions from min_lr to lr. Default: a tenth of the run, at most 100."""
    schedule: str = "cosine"
    """Learning rate after the warm-up: cosine, linear, step, wsd, infinite or constant."""
    drops: str | None = None
    """step: positions at which the learning rate is multiplied by drop_factor, e.g. "300,450"."""
    drop_factor: float = 0.1
    """step: factor of each drop."""
    decay_share: float = 0.2
    """wsd: share of the run, at its end, for the decay from lr to min_lr (arXiv 2405.18392)."""
    decay: str = "sqrt"
    """wsd: shape of the decay, sqrt or linear."""
    constant_lr: float | None = None
    """infinite: learning rate after the cool-down. Default: the mean of lr and min_lr."""
    cooldown_steps: int | None = None
    """infinite: positions from lr to constant_lr. Default: a quarter of the run."""
    anneal_at: int | None = None
    """infinite: position at which the decay to min_lr starts, until the end of the run. Default: never."""
    rewarms: str | None = None
    """Position and peak of each re-warm, e.g. "600:1e-3,900:5e-4". If it brings a text of [data] phases, also the share
    of samples still drawn from earlier data, e.g. "600:1e-3:0.05": 0.05 suits a weak shift (arXiv 2403.08763)."""
    rewarm_momentum: float = 0.0
    """Share of the outer momentum that is kept at a re-warm."""
    clip: float = 1.0
    """Largest global norm of an inner gradient."""
    weight_decay: float = 0.1
    """Weight decay of matrices in the inner optimizer."""
    batch_sequences: int = 8
    """Sequences per inner step of one node."""
    sequence_tokens: int = 128
    """Tokens per sequence."""
    quorum: int | None = None
    """Contributions that close a window. Default: all expected ones."""
    floor: int = 1
    """Fewest contributions that may be merged."""
    evaluate_every_rounds: int | None = None
    """Rounds between two evaluations. Default: about every 30 steps; with `init`: none, set it where loops have
    `join(evaluate=...)`."""
    evaluation_sequences: int = 64
    """Sequences of the fixed evaluation set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The table `[data]` of a RUN.toml or NODE.toml; both must name the same data."""

    path: Path | None = None
    """Token file (`farloop data build`), text file, JSONL file or folder. Default: the source of Python's standard
    library."""
    mixture: tuple[Share, ...] | None = None
    """Several of these in place of path, and their shares of the samples, e.g. [{path = "wiki.bin", weight = 3},
    {path = "code.bin", weight = 1}]."""
    max_bytes: int = 16_000_000
    """Most bytes to read from each text; a token file is used whole."""
    phases: tuple[Path, ...] | None = None
    """Data like path, one for each re-warm with a replay, in order. The evaluation set stays that of path."""
    digest: str | None = None
    """RUN.toml with init: a name for the dataset of your own loops, which each of them compares."""
    samples: int | None = None
    """With digest: its number of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A valid run."""

    config: RunConfig
    vocabulary: int  # different tokens of the data
    spec: RunSpec
    notes: list[str]  # derived settings worth telling the user
    evaluation: EvaluationSet | None

    @property
    def anchors(self) -> list[Tensor]:
        """Of version 0, fp32 [numel] each. Read or drawn anew every time: a plan outlives them, and a restart needs
        their digests alone."""
        tensors, _ = _first_weights(self.config, self.vocabulary)
        return [first_anchor(fragment, tensors) for fragment in self.spec.identity.layout.fragments]


def plan_run(config: RunConfig, data: DataConfig, corpus: Corpus | None = None, *, weights: bool = True) -> Plan:
    """Everything the nodes must agree on. `corpus`: that of `data`, if already loaded.

    `weights`: False takes names and shapes alone of a model hf:…, however large; the digests of its anchors are 0 then.

    Raises:
        ValueError: a setting is out of range, one sentence.
        CorpusError: there is no text to train on.
    """
    method = method_named(config.method)
    given = not loops_bring_data(config) or data.path is not None or data.mixture is not None
    corpora = _corpora(config, data, corpus) if given else []
    vocabulary = corpora[0].vocabulary if corpora else VOCABULARY
    tensors, model = _first_weights(config, vocabulary, weights=weights)
    layout = partition(
        [(name, tuple(tensor.shape)) for name, tensor in tensors.items()],
        pattern=method.pattern,
        blocks_per_fragment=config.blocks_per_fragment,
        stages=_stages(config.stages),
    )
    terms, notes = terms_of(config, method)
    check(terms, layout)
    check_codecs(terms)
    held = not any(tensor.is_meta for tensor in tensors.values())
    digests = tuple(_first_digest(fragment, tensors) if held else 0 for fragment in layout.fragments)
    del tensors
    evaluation, corpus_digest, samples = None, OWN, 0
    _check_phases(terms, data, brings_data=given)
    if not loops_bring_data(config):
        evaluation = EvaluationSet(
            corpora[0], sequences=config.evaluation_sequences, sequence_tokens=config.sequence_tokens
        )
        if len(evaluation) < config.evaluation_sequences:
            room = f"the validation text has room for {len(evaluation)} sequences, not {config.evaluation_sequences}"
            notes.append(f"{room}: evaluations use these")
    if corpora:
        corpus_digest, samples = data_name(corpora), num_samples(corpora[0], config.sequence_tokens)
    elif data.digest is not None and data.samples is not None:
        corpus_digest, samples = data.digest, data.samples
    identity = Identity(
        name=config.name,
        model=model,
        layout=layout,
        anchor_digests=digests,
        data=corpus_digest,
        num_samples=samples,
        evaluation_set=evaluation_name(evaluation) if evaluation else _own_evaluation(config),
        seed=config.seed,
    )
    return Plan(
        config=config,
        vocabulary=vocabulary,
        spec=RunSpec(identity=identity, terms=terms),
        notes=notes,
        evaluation=evaluation,
    )


def _first_digest(fragment: Fragment, tensors: Mapping[str, Tensor]) -> int:
    """Of the anchor of version 0. Raises ValueError: a weight is no finite number."""
    try:
        return finite_digest(first_anchor(fragment, tensors))
    except NonFiniteError as error:
        name = fragment.tensor_at(error.index)
        raise ValueError(f"the first weights have NaN or Inf in {name!r}: begin from other weights") from None


def _own_evaluation(config: RunConfig) -> str:
    """Of a run whose loops bring model and data: they evaluate, by `join(evaluate=...)`, if the run says how often."""
    return "none" if config.evaluate_every_rounds is None else OWN


def _check_phases(terms: Terms, data: DataConfig, *, brings_data: bool) -> None:
    """Each re-warm with a replay needs its text, and vice versa. Raises ValueError, one sentence."""
    brought, texts = len(arrivals(terms.schedule.lr)), len(data.phases or ())
    if not brings_data and brought:
        raise ValueError("rewarms: one has a replay, but with init the nodes' own loops bring the data: leave it out")
    if brings_data and brought != texts:
        named = f"{texts} text{'' if texts == 1 else 's'}"
        raise ValueError(
            f"rewarms: {brought or 'none'} with a replay (as 600:1e-3:0.05, where 5 % of the samples stay those from "
            f"before), but [data] phases names {named}; every such re-warm brings one"
        )


def _corpora(config: RunConfig, data: DataConfig, corpus: Corpus | None) -> list[Corpus]:
    """The run's data, and those of each re-warm that brings some. Raises CorpusError."""
    if corpus is None and data.mixture is not None:
        try:
            corpus = load_mixture(data.mixture, max_bytes=data.max_bytes)
        except CorpusError as error:
            raise CorpusError(f"mixture: {error}") from error
    first = corpus or load_corpus(data.path, max_bytes=data.max_bytes)
    corpora = [first, *(_later_corpus(path, data.max_bytes, config.sequence_tokens) for path in data.phases or ())]
    try:
        check_tokenizers(corpora)
    except CorpusError as error:
        raise CorpusError(f"phases: {error}") from error
    return corpora


def _later_corpus(path: Path, max_bytes: int, sequence_tokens: int) -> Corpus:
    """The corpus of a re-warm. Raises CorpusError."""
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
    """Settings of single nodes. Raises ValueError, one sentence."""
    given = given_as(key, text or "", ())
    for node, _ in given:
        try:
            check_name(node)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return given


def loops_bring_data(config: RunConfig) -> bool:
    """Whether the nodes train in loops of their own, with own models: the run knows the weights alone, and the data
    only where [data] names some."""
    return config.init is not None and config.model in PRESETS


def _first_weights(config: RunConfig, vocabulary: int, *, weights: bool = True) -> tuple[Mapping[str, Tensor], str]:
    """Named tensors of version 0, and how the identity names the model. Raises ValueError, one sentence.

    `vocabulary`: that of the data; a built-in model takes it.
    """
    try:
        check_model_name(config.model)
        if config.model.startswith(HF):
            return _weights_of_hf(config, text := config_text(config.model), vocabulary, weights=weights), text
        if config.init is not None:
            return _weights(config.init, _tensors_in(config.init)), OWN
        if is_factory(config.model):
            return factory_weights(config.model, config.seed, vocabulary), OWN
    except ModelError as error:
        raise ValueError(f"[run] model: {error}") from error
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith("[run]") else f"[run] model: {error}") from error
    size = dataclasses.replace(PRESETS[config.model], vocabulary=vocabulary)
    if config.sequence_tokens > size.context:
        raise ValueError(
            f"[run] sequence_tokens: {config.model} reads at most {size.context}, not {config.sequence_tokens}"
        )
    with torch.no_grad():
        module = build(size, config.seed)
    return {name: parameter.detach() for name, parameter in trainable_tensors(module)}, config_json(size)


def _weights_of_hf(config: RunConfig, text: str, vocabulary: int, *, weights: bool) -> Mapping[str, Tensor]:
    """Weights of version 0 of the model in an identity's text. Raises ModelError or ValueError."""
    named = hf_model(text)
    named.check(vocabulary, config.sequence_tokens)
    if not weights:
        return dict(trainable_tensors(named.module))  # on the meta device: names and shapes
    if config.init is None:
        folder = model_folder(config.model)
        return hf_weights(text, folder if has_weights(folder) else None, config.seed)
    if config.init.is_dir() and has_weights(config.init):
        return hf_weights(text, config.init, config.seed)
    held = _tensors_in(config.init)
    wanted = {name: tuple(parameter.shape) for name, parameter in trainable_tensors(named.module)}
    for name, shape in wanted.items():
        if name not in held or tuple(held[name].shape) != shape:
            found = f"has shape {tuple(held[name].shape)}" if name in held else "is missing"
            raise ValueError(f"[run] init: {config.init}: the model's {name!r} of shape {shape} {found}")
    return _weights(config.init, {name: held[name] for name in wanted})


def _tensors_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file or of a folder of them, mapped. Raises ValueError, SafetensorError.

    Of a folder, an output layer that is a copy of the embedding is left out: it is the second name of a tied tensor.
    """
    if path.is_file():
        return {plain_name(name): tensor for name, tensor in load_file(path).items()}
    if not path.is_dir():
        raise ValueError(f"[run] init: there is no file {path}")
    index = path / "model.safetensors.index.json"
    files = sorted(path.glob("*.safetensors"))
    if index.is_file():
        try:
            files = [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"[run] init: {index} is no index of safetensors files: {error}") from error
    if not files:
        raise ValueError(f"[run] init: the folder {path} holds no safetensors files")
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise ValueError(f"[run] init: {index.name} names {file.name}, which is not in {path}")
        tensors |= {plain_name(name): tensor for name, tensor in load_file(file).items()}
    for name in [name for name in tensors if name in ("lm_head.weight", "output.weight")]:
        first = next((other for other in tensors if "embed" in other or other.endswith("wte.weight")), name)
        if first != name and torch.equal(tensors[first], tensors[name]):
            del tensors[name]
    return tensors


def _weights(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `path`. Raises ValueError for one that is not in floating point."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(
                f"[run] init: {path}: {name!r} is {str(tensor.dtype).removeprefix('torch.')}, and weights in floating "
                "point are wanted: save those that are trained, without buffers and not quantised"
            )
    return tensors


# Terms that have the name and the value of a setting, or of the method's row.
_OF_CONFIG = (
    *("steps", "eager", "clip", "weight_decay", "batch_sequences", "sequence_tokens", "floor", "h_rule", "h_init"),
    *("h_max", "outer_correction", "rewarm_momentum", "outer_spread", "outer_restart", "inner_optimizer"),
    *("control_variates", "screen", "norm_band", "merge"),
)
_OF_METHOD = ("on_late_update", "max_stale_rounds", "max_staleness")


def terms_of(config: RunConfig, method: Method) -> tuple[Terms, list[str]]:
    """The run's terms, and notes about derived ones.

    Raises:
        ValueError: learning rate or rounds are invalid, one sentence.
    """
    notes: list[str] = []
    h = method.h if config.h is None else config.h
    if config.steps < 1 or h < 1:
        raise ValueError(f"steps and h are at least 1, not {config.steps} and {h}")
    every = max(1, round(30 / h)) if config.evaluate_every_rounds is None else config.evaluate_every_rounds
    lag = method.lag if config.lag is None else config.lag
    terms = Terms.from_flat(
        **{name: getattr(config, name) for name in _OF_CONFIG},
        **{name: getattr(method, name) for name in _OF_METHOD},
        method=method.name,
        h=h,
        tau=(0 if lag else method.tau) if config.tau is None else config.tau,
        mix=(0.0 if lag else default_mix(method, config.nodes)) if config.mix is None else config.mix,
        lag=lag,
        codec_up=config.codec_up or method.codec_up,
        codec_up_of=_given_of("codec_up_of", config.codec_up_of),
        codec_down=downlink_spelling(config.codec_down or method.codec_down),
        outer_lr=PLAIN_AVERAGE.lr,
        outer_momentum=PLAIN_AVERAGE.momentum,
        lr=learning_rate_of(config),
        quorum=method.quorum if config.quorum is None else config.quorum,
        min_nodes=config.nodes,
        evaluate_every_rounds=every,
        h_alpha=config.h_alpha or 0.0,
        h_switch=config.h_switch or 0,
        h_share_of=_given_of("h_share_of", config.h_share_of),
    )
    terms = terms.replace(own_tau=config.tau is None and terms.schedule.tau > 0 and may_own_tau(terms))
    check_learning_rate(terms)
    check_rounds(terms, slots=1)
    outer_steps = num_rounds(terms)
    outer = default_outer(config.nodes, h, outer_steps, method.name)
    if outer.momentum != method.outer_momentum and config.outer_momentum is None:
        notes.append(f"{outer_steps} outer steps are too few for momentum: plain averaging (outer_lr 1, momentum 0)")
    outer_lr = outer.lr if config.outer_lr is None else config.outer_lr
    outer_momentum = outer.momentum if config.outer_momentum is None else config.outer_momentum
    clip = outer.clip if config.outer_clip is None else config.outer_clip
    buffer = outer.buffer if config.outer_buffer is None else config.outer_buffer
    settled = terms.replace(outer_lr=outer_lr, outer_momentum=outer_momentum, outer_clip=clip, outer_buffer=buffer)
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
