"""Squared norms that are the same number on every machine."""

from collections.abc import Iterable

import torch
from torch import Tensor

from farloop.algo.spec import TILE, Fragment
from farloop.quant.kernels.dispatch import fast_tile_sums
from farloop.quant.kernels.interface import NORM_TILE


def norm_sq(x: Tensor, total: float = 0.0) -> float:
    """Σ x² of x fp32 [numel] in fp64: a fixed tree inside each tile of 4096 elements, the tiles one after the other, to
    the `total` of those before."""
    if (fast := fast_tile_sums(x.device)) is not None:
        return total_of(fast(x.contiguous()), total)
    for start in range(0, x.numel(), TILE):
        total = total_of(sums_by_reference(x[start : start + TILE]), total)
    return total


def tensor_norms(pieces: Iterable[Tensor], fragment: Fragment) -> list[float]:
    """The norm of each tensor of a fragment whose fp32 numbers come in pieces of any length: √ of its `norm_sq`."""
    totals = [0.0] * len(fragment.tensors)
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    begun = [none] * len(fragment.tensors)  # of each tensor, the start of its next tile
    start = 0
    for piece in pieces:
        end = start + piece.numel()
        for k, tensor in enumerate(fragment.tensors):
            first, last = max(start, tensor.offset), min(end, tensor.offset + tensor.numel)
            if first >= last:
                continue
            part = torch.cat([begun[k].to(piece.device), piece[first - start : last - start]])
            whole = part.numel() - part.numel() % NORM_TILE
            totals[k] = norm_sq(part[:whole], totals[k])
            begun[k] = part[whole:].clone()  # the piece may be a buffer that is reused
        start = end
    return [norm_sq(rest, total) ** 0.5 for total, rest in zip(totals, begun, strict=True)]


def total_of(tile_sums: Iterable[float], total: float = 0.0) -> float:
    """The sums of tiles, one after the other."""
    for partial in tile_sums:
        # Not `sum`: from Python 3.12 on it compensates, which is another number.
        total += partial
    return total


def sums_by_reference(x: Tensor) -> list[float]:
    """The sum of squares of every tile of 4096 elements of x fp32 [n], the last filled up with zeros."""
    squares = x.double().square()  # exact: 24 + 24 significant bits
    tiles = torch.nn.functional.pad(squares, (0, -x.numel() % NORM_TILE)).view(-1, NORM_TILE)
    # Halves onto halves: elementwise additions, so that no library's own order of summation shows.
    while tiles.shape[1] > 1:
        low, high = tiles.chunk(2, dim=1)
        tiles = low.add_(high)
    sums: list[float] = tiles.view(-1).tolist()
    return sums
