"""Eager updates (arXiv 2502.12996): a node trains on as if its own latest delta were merged already.

Where the merge of a round arrives a round late, a node's own part of it is old although the node has the new one in
hand. The paper puts the new one in its place; with M nodes, after the round t whose merge is not there yet,

    Δ̃_m = Δ̄_old + w_m · (Δ_m,new − Δ_m,old),  w_m = 1/M

The paper's nodes run the outer optimizer themselves, each on its own Δ̃_m and from its own weights, which hold Δ_m,old
since the round before: hence the difference. Here the coordinator runs the one there is, on the merge of all, and its
target Θ holds each delta once, Δ_m,old among them. What a node has to add is the new one alone: each of our outer
optimizers moves the target by a multiple (`outer_settings.step_gain`) of a delta at once, so it goes on from

    start_m = Θ − gain · w_m · Δ_m,new

Without outer momentum that is the paper's sequence; with it, the paper's nodes also remember their own part a round
earlier than the others', and ours do not: there is one momentum, of the true merges. The next delta must be measured
from `start_m`, not from the anchor: else it would hold the correction, and be merged with it.

Pure arithmetic on flat fp32; every delta here is the decoded one, as it is merged. A radial merge is not linear, and
with it the correction is an approximation.
"""

import torch
from torch import Tensor

from farloop.algo.fragments import tiles


@torch.no_grad()
def eager_start_into(anchor: Tensor, fresh: Tensor, out: Tensor, *, share: float, gain: float) -> None:
    """out ← anchor − gain · share · fresh, all fp32 [n]: where a node goes on from, and measures its next delta from.

    `fresh` is what it has sent and is not in the anchor, the sum where that is several; `share` the weight that it
    expects to have. `out` may be `anchor` itself.
    """
    factor = gain * share
    for anchor_part, fresh_part, out_part in tiles(anchor, fresh, out):
        torch.sub(anchor_part, fresh_part * factor, out=out_part)
