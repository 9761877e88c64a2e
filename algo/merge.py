"""The merge rules of a window, and the arithmetic of its sum (protocol H, M).

The weights and the order of the sum are in `weights.py`, which needs no torch; who is in a window, the coordinator's
machine decides.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from farloop.algo.fragments import tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRule:
    """A way to make one delta of those in a window."""

    name: str
    summary: str
    linear: bool
    """A relay may sum for it: the merge of all deltas is the merge of weighted sums of some of them."""


MERGE_RULES: Final = {
    rule.name: rule for rule in (MergeRule(name="mean", summary="The mean, weighted by tokens.", linear=True),)
}


@torch.no_grad()
def add_(acc: Tensor, x: Tensor, weight: float) -> None:
    """acc ← fl(acc + fl(weight · x)), all in fp32; acc and x are [n], and `weight` is rounded to fp32 first.

    Two roundings on any device: `alpha=`, `addcmul` and `lerp` are avoided because a compiler may contract them into a
    fused multiply-add, which rounds once.
    """
    assert acc.dtype == x.dtype == torch.float32
    for acc_part, x_part in tiles(acc, x):
        acc_part.add_(x_part * weight)
