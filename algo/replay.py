"""Which corpus a sample comes from, in a run whose re-warms bring new data: the new one, or a replay of the old. Pure.

New data alone makes a model forget; a share of the old in the mix keeps what was learnt: 5 % after a weak shift, 25 %
and more after a strong one (arXiv 2403.08763). The draw is a hash of the stream's position, so that every machine
makes the same one, and no list is stored.
"""

from collections.abc import Sequence

from farloop.algo.permutation import splitmix64
from farloop.algo.spec import LearningRate, Rewarm

_SALT = 0x6A09E667F3BCC909
"""Fractional part of √2: keeps these draws apart from the permutation, which has the same seed."""


def arrivals(lr: LearningRate) -> tuple[Rewarm, ...]:
    """The re-warms that bring new data, in order: corpus k + 1 comes with the k-th of them."""
    return tuple(rewarm for rewarm in lr.rewarms if rewarm.replay is not None)


def source_of(sample: int, at: float, brought: Sequence[Rewarm], seed: int) -> int:
    """Number of the corpus that a sample comes from: 0 for the first, k for the one that `brought[k − 1]` brings.

    Once a phase has begun, its corpus with probability 1 − replay, else the mixture of the phases before.

    Args:
        sample: position in the endless stream of samples.
        at: schedule position of the inner step that takes it.
        brought: as of `arrivals`.
        seed: the run's.
    """
    number = sum(rewarm.start <= at for rewarm in brought)
    while number and _draw(sample, number, seed) < (brought[number - 1].replay or 0.0):
        number -= 1
    return number


def _draw(sample: int, number: int, seed: int) -> float:
    """In [0, 1), its own for every sample and phase."""
    word = splitmix64(splitmix64(splitmix64(seed ^ _SALT) + number) + sample)
    return (word >> 11) * 2.0**-53
