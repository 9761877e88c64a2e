"""The learning rate and the rounds that the table `[run]` describes: text into positions, and what is left open."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, cast

from farloop.algo.spec import LearningRate, LearningRateShape, Rewarm

if TYPE_CHECKING:
    from farloop.cli.run import RunConfig


def learning_rate_of(config: "RunConfig") -> LearningRate:
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
