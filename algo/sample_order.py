"""Which sample stands at a position of the stream: a seeded permutation, mixtures, and replay."""

import math
from collections.abc import Sequence

from farloop.algo.terms import LearningRate, Rewarm

# --- Sample order: a keyed permutation of [0, n) for every data pass
#
# The coordinator leases ranges of an endless stream of positions (protocol, Data leases); each node turns a position
# into a sample index here, alone and in O(1) memory, so no shuffled list is ever stored or sent. The permutation is a
# Feistel network over the smallest power of two that holds n, walked until it lands inside [0, n) (cycle walking: Black
# and Rogaway 2002, "Ciphers with arbitrary finite domains"). It shuffles; it hides nothing. Integers only, so every
# machine gets the same order.


_MASK64 = (1 << 64) - 1

_GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ ÷ golden ratio, odd: the increment of splitmix64 (Steele, Lea and Flood 2014)

_ROUNDS = 8
"""Four mix large halves well (Luby and Rackoff 1988); small n needs more until all orders are about as likely."""


def sample_index(position: int, n: int, seed: int) -> int:
    """Index in [0, n) of the sample at `position` of the endless stream; every data pass has its own order.

    Raises ValueError when `n` < 1 or `position` < 0.
    """
    if n < 1 or position < 0:
        raise ValueError(f"no sample at position {position} of a data pass of {n} samples")
    data_pass, place = divmod(position, n)
    return permute(place, n, splitmix64(splitmix64(seed) + data_pass))


def permute(place: int, n: int, key: int) -> int:
    """Image of `place` under the permutation of [0, n) that `key` (64 bits) selects.

    Raises ValueError when `place` is outside [0, n).
    """
    if not 0 <= place < n:
        raise ValueError(f"place {place} is outside [0, {n})")
    bits = (n - 1).bit_length()
    low_bits = bits // 2
    round_keys = [splitmix64(key + i * _GOLDEN) for i in range(1, _ROUNDS + 1)]
    # The domain is less than twice n, so this takes fewer than two turns on average; it ends because the walk follows a
    # cycle of the larger permutation, and `place`, which lies inside, is on that cycle.
    while True:
        place = _feistel(place, low_bits, bits - low_bits, round_keys)
        if place < n:
            return place


def splitmix64(z: int) -> int:
    """The output function (finaliser) of splitmix64: a bijection of 64-bit words; `z` is taken modulo 2⁶⁴."""
    z &= _MASK64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK64
    return z ^ (z >> 31)


def _feistel(word: int, low_bits: int, high_bits: int, round_keys: list[int]) -> int:
    """A bijection of words of `low_bits` + `high_bits` bits.

    Each round xors a hash of one half into the other. Without the usual swap the halves may differ in width.
    """
    low_mask, high_mask = (1 << low_bits) - 1, (1 << high_bits) - 1
    low, high = word & low_mask, word >> low_bits
    for i, round_key in enumerate(round_keys):
        if i % 2 == 0:
            high ^= splitmix64(round_key + low) & high_mask
        else:
            low ^= splitmix64(round_key + high) & low_mask
    return high << low_bits | low


# --- Part of a mixture
#
# Every block of `BLOCK` positions holds the same number of samples of each part, in an order of its own. A part's
# samples are so counted without a list, and a data pass over it has each of them once.


BLOCK = 10_000  # shares are exact to a hundredth of a percent

_PART_SALT = 0xBB67AE8584CAA73B
"""Fractional part of √3: keeps these orders apart from those of the samples."""


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each part in a block, by the largest remainders; at least one.

    Raises ValueError: a weight is not above 0, or so small beside the others that it has no sample in a block.
    """
    if not all(0.0 < weight < math.inf for weight in weights):
        raise ValueError(f"a weight is a number above 0, not {next(w for w in weights if not 0.0 < w < math.inf):g}")
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: (counts[number] - exact[number], number))
    for number in by_remainder[: BLOCK - sum(counts)]:
        counts[number] += 1
    if 0 in counts:
        few = weights[counts.index(0)]
        raise ValueError(f"a weight of {few:g} is less than a {BLOCK}th of all, {sum(weights):g}")
    return tuple(counts)


def part_of(position: int, counts: Sequence[int], seed: int) -> tuple[int, int]:
    """Number of the part that the sample at a position of the mixture's endless stream comes from, and which in the
    stream of that part it is. `counts`: as of `quotas`; of one part alone, its stream is that of the mixture."""
    if len(counts) == 1:
        return 0, position
    block, place = divmod(position, BLOCK)
    slot = permute(place, BLOCK, splitmix64(splitmix64(seed ^ _PART_SALT) + block))
    for number, count in enumerate(counts):
        if slot < count:
            return number, block * count + slot
        slot -= count
    raise AssertionError(f"{counts} are no quotas")


# --- Corpus of a sample: new data, or a replay of the old
#
# New data alone makes a model forget; a share of the old in the mix keeps what was learnt: 5 % after a weak shift, 25 %
# and more after a strong one (arXiv 2403.08763). The draw is a hash of the stream's position, so that every machine
# makes the same one, and no list is stored.


_SALT = 0x6A09E667F3BCC909
"""Fractional part of √2: keeps these draws apart from the permutation, which has the same seed."""


def arrivals(lr: LearningRate) -> tuple[Rewarm, ...]:
    """The re-warms that bring new data, in order: corpus k + 1 comes with the k-th of them."""
    return tuple(rewarm for rewarm in lr.rewarms if rewarm.replay is not None)


def source_of(sample: int, at: float, brought: Sequence[Rewarm], seed: int) -> int:
    """Number of the corpus that a sample comes from: 0 for the first, k for the one that `brought[k − 1]` brings. Once
    a phase has begun, its corpus with probability 1 − replay, else the mixture of the phases before.

    `sample`: position in the endless stream. `at`: schedule position of the inner step that takes it. `brought`: as of
    `arrivals`. `seed`: the run's.
    """
    number = sum(rewarm.start <= at for rewarm in brought)
    while number and _draw(sample, number, seed) < (brought[number - 1].replay or 0.0):
        number -= 1
    return number


def _draw(sample: int, number: int, seed: int) -> float:
    """In [0, 1), its own for every sample and phase."""
    word = splitmix64(splitmix64(splitmix64(seed ^ _SALT) + number) + sample)
    return (word >> 11) * 2.0**-53
