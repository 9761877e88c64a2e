"""Control variates for nodes whose data differ: they take out of local training what pulls each to its own minimum.

With several inner steps between two merges a node drifts toward the minimum of its own data, and the mean of such
drifts does not lead to the minimum of all data together. SCAFFOLD (arXiv 1910.06378) adds c − c_i to each local
gradient: c_i is node i's estimate of its own mean gradient, c the mean of these. SCALLION and SCAFCOM (arXiv
2308.08165) send one compressed increment for both. With K steps at the inner rate η, y_i after them, the anchor x:

    δ_i = α·((x − y_i)/(ηK) − c);  c_i ← c_i + C(δ_i);  c ← c + mean C(δ_i);  x ← x − γ·(c + mean C(δ_i))

(SCALLION, for unbiased codecs C. SCAFCOM, for biased ones, smooths the gradient estimate before: v_i ← (1 − β)·v_i +
β·(…), δ_i = v_i − c_i, one more copy. Without compression it is SCALLION with α = β. The paper's text was not at hand;
the formulas are as its abstract, its reviews and an open re-implementation have them.)

Ours, so that neither message nor memory grows: a node uses c − c_i only, so it keeps only that, d_i, one copy. Of the
increments above c drops out, and with deltas Δ_i = x − y_i, their mean Δ̄, and Ση over the steps of a delta for ηK,

    d_i ← d_i + α·(Δ̄ − Δ_i)/Ση          after a merge, deltas as decoded, so that the d_i of all nodes sum to 0
    y ← y − η·d_i                        after every inner step

which is SCALLION whose codec is applied to deltas instead of increments. Taking d_i from the weights rather than adding
it to the gradient is the same with SGD; with Adam the deltas are in units of its steps, and so must the correction be.

What an uplink codec loses stays in d_i and comes with the next delta: d_i feeds errors back by itself. A residual would
add them once more, and a delta of which most stays behind sets d_i to many times what it should be: with top-k and
α = 1 nodes diverge, so codecs are checked (`quant/soundness.py`). A downlink codec's loss, the difference e of target
and anchor, is in the mean of the d_i as α·e/(ν·Ση), and moves the next deltas back by α·e: of the feedback that the
downlink has by itself, 1 − α is left.

Limits. Every node must be in every merge (quorum = all): who was absent would need the change of c. A node must know Δ̄:
with an outer optimizer without momentum the update says it; with momentum it does not, and nothing here guesses. With
AdamW inside there is no theorem. Which runs can have it: `validation.py`; who does it when: `node/drift.py`.
"""

import torch
from torch import Tensor

from farloop.algo.fragments import tiles


@torch.no_grad()
def correct_(local: Tensor, drift: Tensor, lr: float) -> None:
    """local ← local − lr · drift after an inner step at that rate; drift is d_i, fp32 [local.numel()].

    Local weights may be of any floating type and strides.
    """
    if not local.is_contiguous():  # without a flat view it is taken whole, by its strides
        local.sub_(drift.view(local.shape) * lr)
        return
    for local_part, drift_part in tiles(local.view(-1), drift):
        local_part.sub_(drift_part * lr)


@torch.no_grad()
def learn_(drift: Tensor, delta: Tensor, merged: Tensor, *, lr_sum: float, alpha: float = 1.0) -> None:
    """drift ← drift + α·(merged − delta)/Ση, all fp32 [n]; it begins as zeros.

    Args:
        delta: the node's own, as decoded from what it sent.
        merged: the plain mean of all nodes' deltas, this one's among them.
        lr_sum: of the inner steps inside the delta; the same on all nodes.
        alpha: 1 forgets the last estimate at once; less averages out the noise of gradients and codecs.

    Raises:
        ValueError: no rate, or α outside (0, 1].
    """
    if not lr_sum > 0.0:
        raise ValueError(f"the learning rates inside a delta sum to {lr_sum}; without a step there is nothing to learn")
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"alpha is {alpha}; it must be above 0 and at most 1")
    factor = alpha / lr_sum
    for drift_part, delta_part, merged_part in tiles(drift, delta, merged):
        drift_part.add_((merged_part - delta_part).mul_(factor))


def merged_by_plain_step(update: Tensor, outer_lr: float) -> Tensor:
    """Δ̄, fp32 [n], from what an outer step without momentum has added to the anchor: −update/ν."""
    return update * (-1.0 / outer_lr)
