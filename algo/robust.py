"""Merges for nodes that nobody vouches for: a few deltas, whatever they are, cannot carry the result away.

    clipped   longer deltas are cut to the median length, then averaged       (Sun et al. 2019, arXiv 1911.07963)
    median    of every coordinate the median                                  (Yin et al. 2018, arXiv 1803.01498)
    trimmed   of every coordinate the mean but of the f largest and smallest  (the same)
    krum      the mean of the m − f deltas closest to their neighbours        (Blanchard et al. 2017, arXiv 1703.02757)

m is how many deltas there are that hold a step, f how many of them may be hostile: a quarter, one at least. All need
more honest deltas than hostile ones that agree with each other; where nodes differ by their data, each also leaves out
a part of what honest ones know. The first and the last are weighted means, whose weights a commit's record keeps. The
other two count every delta once, whatever its tokens are.

Everything here is a function of the set of deltas: no order shows in it but in the last bit of a sum.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

import torch
from torch import Tensor

from farloop.algo.merge import Pieces

AGREE: Final = 0.1
"""Mean cosine of the pairs of deltas that have a direction in common."""

Gram = list[list[float]]
"""Inner products of all pairs of deltas, m × m."""


def hostile(count: int) -> int:
    """f: as many of `count` deltas as may be anything; 0 where none may."""
    return min(max(1, count // 4), (count - 1) // 2)


@torch.no_grad()
def gram(deltas: Sequence[Pieces]) -> Gram:
    """Inner products of flat fp32 vectors of one length, added up in fp64, read once and side by side."""
    count = len(deltas)
    total = torch.zeros(count, count, dtype=torch.float64)
    for pieces in zip(*(delta() for delta in deltas), strict=True):
        rows = torch.stack([piece.double() for piece in pieces])
        total += (rows @ rows.T).cpu()
    return [[float(value) for value in row] for row in total]


def weights_by(rule: str, products: Gram, weights: Sequence[float]) -> list[float]:
    """By what the deltas of a weighted rule are multiplied before they are added, given what each weighs by work."""
    norms = [max(products[i][i], 0.0) ** 0.5 for i in range(len(weights))]
    counted = [i for i, weight in enumerate(weights) if weight > 0.0]
    if rule == "clipped":
        longest = median(norms[i] for i in counted)
        return [w * min(1.0, longest / norm) if norm else w for w, norm in zip(weights, norms, strict=True)]
    assert rule == "krum"
    f = min(hostile(len(counted)), (len(counted) - 3) // 2)
    scores = krum_scores([[products[i][j] for j in counted] for i in counted], f)
    nearest = sorted(range(len(counted)), key=lambda k: (scores[k], k))[: len(counted) - f]
    chosen = {counted[k] for k in nearest}
    total = sum(weights[i] for i in chosen)
    return [weight / total if i in chosen else 0.0 for i, weight in enumerate(weights)]


def krum_scores(products: Gram, f: int) -> list[float]:
    """Of every delta the sum of squared distances to its m − f − 2 nearest others: a lonely one has a large score."""
    count = len(products)
    assert count >= 2 * f + 3, "Krum needs m ≥ 2f + 3"
    scores = []
    for i in range(count):
        distances = sorted(products[i][i] + products[j][j] - 2 * products[i][j] for j in range(count) if j != i)
        scores.append(sum(max(distance, 0.0) for distance in distances[: count - f - 2]))
    return scores


@torch.no_grad()
def coordinates_into(rule: str, deltas: Sequence[Pieces], out: Tensor) -> None:
    """out ← the median, or the trimmed mean, of every coordinate; fp32 [numel]."""
    count = len(deltas)
    f = (count - 1) // 2 if rule == "median" else hostile(count)
    start = 0
    for pieces in zip(*(delta() for delta in deltas), strict=True):
        rows = torch.stack(list(pieces)).sort(dim=0).values[f : count - f]
        part = out[start : start + rows.shape[1]]
        part.copy_(rows[0])
        for row in rows[1:]:
            part.add_(row)
        part.mul_(1.0 / len(rows))
        start += rows.shape[1]


def cosines(products: Gram, voices: Iterable[int]) -> list[float | None]:
    """Of every delta the cosine to the mean direction of the others among `voices`; None where these have none.

    Each voice has the same say, whatever its length: else a long one would be the direction that all are held against.

    The others must agree among themselves, by `AGREE` on average over their pairs. Where nodes differ by their data and
    the model is as good as it gets, honest deltas add up to nothing: then each points against all others, and none is
    wrong.
    """
    voices = [i for i in voices if products[i][i] > 0.0]
    found: list[float | None] = []
    for i in range(len(products)):
        others = [j for j in voices if j != i]
        scale = {j: products[j][j] ** -0.5 for j in others}
        pairs = [products[j][k] * scale[j] * scale[k] for j in others for k in others if j < k]
        if not pairs or products[i][i] <= 0.0 or sum(pairs) < AGREE * len(pairs):
            found.append(None)
            continue
        length = (len(others) + 2 * sum(pairs)) ** 0.5 * products[i][i] ** 0.5
        found.append(max(-1.0, min(1.0, sum(products[i][j] * scale[j] for j in others) / length)))
    return found
