"""The tables [run] and [data] of a RUN.toml, and the terms that follow from them. Loads no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from farloop.algo.methods import METHODS, Method, default_mix
from farloop.algo.outer_settings import PLAIN_AVERAGE, default_outer, fewest_outer_steps
from farloop.algo.schedule import first_rounds, initial_h
from farloop.algo.terms import InnerOptimizer, LearningRate, LearningRateShape, Rewarm, Terms
from farloop.algo.validation import (
    INNER_OPTIMIZERS,
    MERGES,
    RULES,
    SCREENS,
    SHAPES,
    check_learning_rate,
    check_rounds,
    given_as,
    may_own_tau,
)
from farloop.monitoring.units import AtLeast, OneOf, ascii_number, is_digits
from farloop.node.settings import PRESETS, check_model_name
from farloop.quant.spelling import check_codec, downlink_spelling
from farloop.wire.keys import check_name

_MOST_NAME = 100  # characters


def _check_run_name(name: str) -> None:
    if not (0 < len(name) <= _MOST_NAME and name.isprintable() and name == name.strip()):
        raise ValueError(f"expected 1 to {_MOST_NAME} printable characters, no space first or last, got {name!r:.60}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The table `[run]` of a RUN.toml. None: derived from the method and the size of the run."""

    name: Annotated[str, _check_run_name] = "run"
    """Name of the run: at most 100 printable characters."""
    seed: Annotated[int, AtLeast(0)] = 0
    """Seed of the initial weights and the sample order."""
    model: Annotated[str, check_model_name] = "tiny"
    """A built-in model (nano, micro, tiny, small, medium or base), hf:FOLDER for a folder with the config.json of a
    causal language model, or package.module:factory for your own code."""
    init: Path | None = None
    """A safetensors file, or a folder of them, with the initial weights. Default: those in the folder of hf:FOLDER, or
    drawn from the seed. With a built-in model it replaces the model, which the nodes' own loops bring, and the data
    too, unless [data] names some."""
    buffers: Annotated[str, OneOf(("own", "average"))] = "own"
    """average: the running_mean and running_var of batch normalisation are merged, weighted as the weights are, and
    are in the run's model. They begin as those of init, or of the factory's model. own: no buffer is exchanged."""
    nodes: Annotated[int, AtLeast(1)] = 2
    """Nodes that the run waits for before it starts."""
    steps: Annotated[int, AtLeast(1)] = 600
    """Inner steps of each node."""
    method: Annotated[str, OneOf(METHODS)] = "streaming"
    """How nodes train and sync: see `farloop lab methods`."""
    h: Annotated[int | None, AtLeast(1)] = None
    """Inner steps between two sends of a fragment. Default: the method's, and at least one step for each slot."""
    bytes_goal: float | None = None
    """In place of h: how many times fewer bytes than data parallel in fp32 the run is to move, e.g. 200."""
    h_share_of: str | None = None
    """Nodes that do a share of the steps of a round, e.g. "rome=0.86 oslo=0.5"; at least one step per slot."""
    tau: int | None = None
    """Inner steps between a send and its merge. Open, where the method has one above 0: each node chooses its own
    by its link, from 1 on ([node] `adapt_tau`)."""
    mix: float | None = None
    """Share of the local weights that a merge keeps, 0 to 1. Default: that of the method, at most 1/nodes."""
    lag: int | None = None
    """1: an update may arrive during the next round and is merged at its end; tau and mix are 0."""
    eager: bool | None = None
    """With lag = 1: go on as if the own latest delta were already merged (arXiv 2502.12996). Default: with co2."""
    blocks_per_fragment: int = 3
    """Transformer blocks per fragment, for methods that cut the model."""
    stages: str | None = None
    """First block of each pipeline stage but the first, e.g. "4,8". No fragment crosses a cut; embedding and head
    belong to stage 0. A node may hold some stages; nodes and quorum count per stage."""
    bulk: Annotated[str, OneOf(("session", "store"))] = "session"
    """How deltas and updates travel. "session": through the coordinator's port. "store": by the object store of
    [coordinator] `bulk_url`; what that fails goes by the session."""
    codec_up: Annotated[str | None, check_codec] = None
    """Codec from the nodes to the coordinator: one of `farloop lab codecs`, perhaps with parameters: q4r:step=0.7."""
    codec_up_of: str | None = None
    """Nodes with another uplink codec, e.g. "rome=q4r oslo=q8", for slower links."""
    codec_down: Annotated[str | None, check_codec] = None
    """Codec from the coordinator to the nodes."""
    outer_lr: float | None = None
    """Learning rate ν of the outer optimizer."""
    outer_momentum: float | None = None
    """Momentum μ of the outer optimizer."""
    outer_clip: float | None = None
    """co2: largest element of the outer momentum, in root mean squares of the merged delta. Default: 6."""
    outer_buffer: int | None = None
    """async: deltas between two steps of the outer momentum. Default: the number of nodes (arXiv 2401.09135)."""
    outer_spread: float = 0.0
    """async: share of the momentum in each of these steps, 0 to 1/outer_buffer (same source; 0.1 is no better)."""
    outer_restart: int = 0
    """Outer steps after which the outer momentum is reset to zero; 0: never (arXiv 2605.28585)."""
    inner_optimizer: Annotated[str | None, OneOf(INNER_OPTIMIZERS)] = None
    """adamw, or muon for the matrices of layers and adamw for the rest, at the same learning rate. Default: muon; adamw
    with control_variates, where the nodes' own loops bring the model (init), or where it has no such matrices."""
    screen: Annotated[str, OneOf(SCREENS)] = "norm"
    """Screening of deltas: norm (far too long, replayed or copied), full (also directions), or off."""
    norm_band: float = 8.0
    """Largest norm of a delta, as a multiple of the recent norm."""
    merge: Annotated[str | None, OneOf(MERGES)] = None
    """Robust aggregation for untrusted nodes: clipped, median, trimmed or krum; or sum, for nodes that train disjoint
    parts of the weights. Default: the mean."""
    control_variates: bool = False
    """Correct the steps of each node for its data distribution (arXiv 2308.08165), for shards that differ. Needs
    outer_momentum = 0 and, but for scafcom, diloco and a dense codec_up such as q4; costs one more fp32 copy of the
    model per node, or three."""
    variates_rate: float = 0.5
    """control_variates: share of the last estimate that a round's replaces, above 0 and at most 1: α of SCALLION, β of
    SCAFCOM."""
    outer_correction: bool = True
    """If rounds differ in length, correct ν, μ and the delta for the work in each (arXiv 2609.36662)."""
    h_rule: Annotated[str, OneOf(RULES)] = "constant"
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
    schedule: Annotated[str, OneOf(SHAPES)] = "cosine"
    """Learning rate after the warm-up."""
    drops: str | None = None
    """step: positions at which the learning rate is multiplied by drop_factor, e.g. "300,450"."""
    drop_factor: float = 0.1
    """step: factor of each drop."""
    decay_share: float = 0.2
    """wsd: share of the run, at its end, for the decay from lr to min_lr (arXiv 2405.18392)."""
    decay: Annotated[str, OneOf(("sqrt", "linear"))] = "sqrt"
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
    evaluation_sequences: Annotated[int, AtLeast(1)] = 64
    """Sequences of the fixed evaluation set."""


def loops_bring_data(config: RunConfig) -> bool:
    """Whether the nodes train in loops of their own, with own models: the run knows the weights alone, and the data
    only where [data] names some."""
    return config.init is not None and config.model in PRESETS


# Terms that have the name and the value of a setting, or of the method's row.
_OF_CONFIG = (
    *("steps", "clip", "weight_decay", "batch_sequences", "sequence_tokens", "floor", "h_rule", "h_init"),
    *("h_max", "outer_correction", "rewarm_momentum", "outer_spread", "outer_restart"),
    *("variates_rate", "screen", "norm_band", "merge"),
)


_OF_METHOD = ("on_late_update", "max_stale_rounds", "max_staleness")


def terms_of(
    config: RunConfig, method: Method, *, slots: int = 1, has_matrices: bool = True
) -> tuple[Terms, list[str]]:
    """The run's terms, and notes about derived ones. `slots`: of the layout; an open h has a step for each.
    `has_matrices`: the model has some that Muon steps.
    Raises ValueError: learning rate or rounds are invalid, one sentence."""
    notes: list[str] = []
    h = max(method.h, 1 if "h" in method.fixed else slots) if config.h is None else config.h
    if config.steps < 1 or h < 1:
        raise ValueError(f"steps and h are at least 1, not {config.steps} and {h}")
    if h > config.steps and config.h_rule == "constant":
        notes.append(f"h = {h} is more than the {config.steps} steps of the run: its one round ends with it")
    every = max(1, round(30 / h)) if config.evaluate_every_rounds is None else config.evaluate_every_rounds
    lag = method.lag if config.lag is None else config.lag
    inner: InnerOptimizer = "adamw"
    variates = config.control_variates or method.control_variates
    if method.inner and config.inner_optimizer is None and not (variates or loops_bring_data(config)):
        inner = "muon" if has_matrices else "adamw"
        if not has_matrices:
            notes.append("the model has no matrices of layers for muon: inner_optimizer is adamw")
    terms = Terms.from_flat(
        **{name: getattr(config, name) for name in _OF_CONFIG},
        **{name: getattr(method, name) for name in _OF_METHOD},
        method=method.name,
        control_variates=variates,
        h=h,
        tau=(0 if lag else method.tau) if config.tau is None else config.tau,
        mix=(0.0 if lag else default_mix(method, config.nodes)) if config.mix is None else config.mix,
        lag=lag,
        eager=method.eager if config.eager is None else config.eager,
        inner_optimizer=config.inner_optimizer or inner,
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
    if config.tau is None:
        terms = terms.replace(tau=min(terms.schedule.tau, h - 1, initial_h(terms) - 1))
    terms = terms.replace(own_tau=config.tau is None and terms.schedule.tau > 0 and may_own_tau(terms))
    check_learning_rate(terms)
    check_rounds(terms, slots=1)
    outer_steps = len(first_rounds(terms, fewest_outer_steps(method.name)))  # more of them decide nothing
    outer = default_outer(config.nodes, h, outer_steps, method.name, terms.inner.optimizer)
    if outer.momentum == 0.0 != method.outer_momentum and config.outer_momentum is None:
        why = "h = 1 is too short" if h == 1 else f"{outer_steps} outer steps are too few"
        notes.append(f"{why} for momentum: plain averaging (outer_lr 1, momentum 0)")
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
    if not is_digits(word):
        raise ValueError(f"[run] {key}: expected schedule positions, as {example}, got {word!r}")
    return int(word)


def _rewarm(word: str) -> Rewarm:
    start, _, rest = word.partition(":")
    peak, brings, replay = rest.partition(":")
    try:
        return Rewarm(
            start=_position(start, "rewarms", "600:1e-3"),
            peak=float(ascii_number(peak)),
            replay=float(ascii_number(replay)) if brings else None,
        )
    except ValueError:
        raise ValueError(
            "[run] rewarms: expected position and peak of each re-warm, as 600:1e-3,900:5e-4, and the replay of one "
            f"that brings new data, as 600:1e-3:0.05, got {word!r}"
        ) from None


def _given_of(key: str, text: str | None) -> Any:
    """Settings of single nodes. Raises ValueError, one sentence."""
    given = given_as(key, text or "", ())
    for node, _ in given:
        try:
            check_name(node)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return given
