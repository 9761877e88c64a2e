"""How the deltas of a window become one: weighted mean, and robust aggregation for untrusted nodes."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Final

import torch
from torch import Tensor

from farloop.algo.fragments import is_hidden_matrix, tiles
from farloop.algo.spec import Fragment

# --- Merge rules and their sum
#
# The weights and the order of the sum are in `weights.py`, which needs no torch; who is in a window, the coordinator's
# machine decides.


MERGE_RULES: Final = ("mean", "radial")
"""Ways to make one delta of those in a window: the weighted mean, which is linear; or the mean direction and the mean
length of every hidden matrix, and the mean of all else."""

Pieces = Callable[[], Iterable[Tensor]]
"""A flat fp32 vector from its first element to its last, piece by piece, as often as it is asked for."""

Norms = Callable[[Iterable[Tensor]], list[float]]
"""Norm of each tensor of a fragment that comes in pieces: by the tree of exact arithmetic where bits matter."""

# Deltas without anything in common have a mean direction of length 1/√M. One that is shorter than this says that they
# cancel: what is left of it is rounding, and to stretch that would be to step into a random direction.
_CANCELLED: Final = 2.0**-10

# Below it the reciprocal comes near the end of fp32. Such a delta counts as zero, which has no direction.
_NO_LENGTH: Final = 2.0**-100


@torch.no_grad()
def add_(acc: Tensor, x: Tensor, weight: float) -> None:
    """acc ← fl(acc + fl(weight · x)), all in fp32; acc and x are [n], and `weight` is rounded to fp32 first.

    Two roundings on any device: `alpha=`, `addcmul` and `lerp` are avoided because a compiler may contract them into a
    fused multiply-add, which rounds once.
    """
    assert acc.dtype == x.dtype == torch.float32
    for acc_part, x_part in tiles(acc, x):
        acc_part.add_(x_part * weight)


@torch.no_grad()
def radial_into(
    deltas: Sequence[Pieces], weights: Sequence[float], fragment: Fragment, out: Tensor, norms: Norms
) -> None:
    """out ← the deltas' radial-directional average (arXiv 2604.21428), fp32 [fragment.numel], in the order given.

    Of each hidden matrix, with φ(v) = v/‖v‖ and φ(0) = 0:

        (Σ w‖v‖ / Σ w) · φ(Σ w φ(v) / Σ w)

    The plain mean of M deltas with little in common is about √M times shorter than each; this one is as long as they
    are. If the directions cancel, the plain mean is taken. The paper prints a vector, Σ w v / Σ w, where a length
    belongs; the mean of the lengths is our reading.

    All other tensors are averaged plainly: embeddings (as in the paper) and the head, because their rows move with
    their tokens; gains and biases, because their deltas point the same way on all nodes.

    Every delta is read twice, or three times if directions cancel; nothing else of the size of `out` is allocated.
    """
    total = sum(weights)
    weights = [weight / total for weight in weights]
    out.zero_()
    if sum(weight > 0.0 for weight in weights) < 2:  # one delta is its own average, to the bit
        return _add_tensors(deltas, weights, fragment, out, [[1.0] * len(fragment.tensors) for _ in deltas])
    radial = {k for k, tensor in enumerate(fragment.tensors) if is_hidden_matrix(tensor.name, tensor.shape)}
    lengths = [norms(delta()) for delta in deltas]
    factors = [
        [1.0 if k not in radial else 1.0 / length if length > _NO_LENGTH else 0.0 for k, length in enumerate(of_delta)]
        for of_delta in lengths
    ]
    _add_tensors(deltas, weights, fragment, out, factors)
    directions, cancelled = norms(part for (part,) in tiles(out)), set()
    for k in sorted(radial):
        tensor, length = fragment.tensors[k], 0.0
        for weight, of_delta in zip(weights, lengths, strict=True):
            length += weight * of_delta[k]
        part = out[tensor.offset : tensor.offset + tensor.numel]
        if directions[k] > _CANCELLED:
            part.mul_(length / directions[k])
        else:
            part.zero_()
            cancelled.add(k)
    plain = [1.0 if k in cancelled else 0.0 for k in range(len(fragment.tensors))]
    _add_tensors(deltas, weights, fragment, out, [plain for _ in deltas])


def _add_tensors(
    deltas: Sequence[Pieces],
    weights: Sequence[float],
    fragment: Fragment,
    out: Tensor,
    factors: Sequence[Sequence[float]],
) -> None:
    """out ← out + Σ weight · factor of delta and tensor · delta; where that is 0, nothing is read or added."""
    for delta, weight, of_tensors in zip(deltas, weights, factors, strict=True):
        if weight == 0.0 or not any(of_tensors):
            continue
        start = 0
        for piece in delta():
            end = start + piece.numel()
            for tensor, factor in zip(fragment.tensors, of_tensors, strict=True):
                first, last = max(start, tensor.offset), min(end, tensor.offset + tensor.numel)
                if first < last and factor:
                    add_(out[first:last], piece[first - start : last - start], weight * factor)
            start = end


# --- Robust aggregation for untrusted nodes
#
# clipped longer deltas are cut to the median length, then averaged (Sun et al. 2019, arXiv 1911.07963) median of every
# coordinate the median (Yin et al. 2018, arXiv 1803.01498) trimmed of every coordinate the mean but of the f largest
# and smallest (the same) krum the mean of the m − f deltas closest to their neighbours (Blanchard et al. 2017, arXiv
# 1703.02757)
#
# m is how many deltas there are that hold a step, f how many of them may be hostile: a quarter, one at least. All need
# more honest deltas than hostile ones that agree with each other; where nodes differ by their data, each also leaves
# out a part of what honest ones know. The first and the last are weighted means, whose weights a commit's record keeps.
# The other two count every delta once, whatever its tokens are.
#
# Everything here is a function of the set of deltas: no order shows in it but in the last bit of a sum.


AGREE: Final = 0.1  # mean cosine of the pairs of deltas that have a direction in common
Gram = list[list[float]]  # inner products of all pairs of deltas, m × m


def hostile(count: int) -> int:
    """f: as many of `count` deltas as may be anything; 0 where none may."""
    return min(max(1, count // 4), (count - 1) // 2)


@torch.no_grad()
def gram(deltas: Sequence[Pieces]) -> Gram:
    """Inner products of flat fp32 vectors of one length, added up in fp64, read once and side by side."""
    count = len(deltas)
    total = torch.zeros(count, count, dtype=torch.float64, device="cpu")
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
    """Cosine of every delta to the mean direction of the others among `voices`; None if these have none.

    Directions count equally, whatever the deltas' lengths. The others must agree, by `AGREE` on average over their
    pairs: near an optimum, honest deltas of nodes with different data cancel, and each points against all others.
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
