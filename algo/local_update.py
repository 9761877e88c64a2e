"""Tensor arithmetic of a node: delta, merge, eager update, control variates."""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from farloop.algo.fragments import rows_of, tiles, view, zero_padding_
from farloop.algo.spec import TILE, Fragment

# --- Delta and merge: delta = anchor − local; local ← a·local + (1 − a)·anchor
#
# Local weights may be of any floating type and strides; anchors and deltas are flat fp32. All on one device.


# Elements at a time. Accelerator: temporaries are bounded (16 MiB in fp32), and launches not too short. CPU: they stay
# in the cache; 25 M elements are mixed in 12 ms then, and in 26 to 95 with temporaries of 16 MiB.
_ACCELERATOR_CHUNK: Final = 4 * TILE
_CPU_CHUNK: Final = TILE // 4


@torch.no_grad()
def delta_into(anchor: Tensor, local: Tensor, out: Tensor) -> None:
    """out ← cast(anchor, local's dtype) − local, in fp32; anchor and out are fp32 [local.numel()].

    The anchor is rounded as `mix_into` rounds it into the local weights, so that a bf16 node that has not trained has a
    delta of exactly zero. Positive where training went downhill.
    """
    assert anchor.dtype == out.dtype == torch.float32
    for local_part, anchor_part, out_part in _pieces(local, anchor, out):
        if local_part.dtype == torch.float32:
            torch.sub(anchor_part, local_part, out=out_part)
        else:
            out_part.copy_(anchor_part.to(local_part.dtype))
            out_part.sub_(local_part)


@torch.no_grad()
def mix_into(local: Tensor, anchor: Tensor, a: float) -> None:
    """local ← a·local + (1 − a)·anchor, in fp32, then rounded to local's dtype; anchor is fp32 [local.numel()].

    a = 0 copies the anchor exactly, a = 1 keeps the local weights. The optimizer's moments stay (arXiv 2311.08105).
    """
    assert anchor.dtype == torch.float32 and 0.0 <= a <= 1.0
    if a == 1.0:
        return
    for local_part, anchor_part in _pieces(local, anchor):
        if a == 0.0:
            local_part.copy_(anchor_part)
        elif local_part.dtype == torch.float32:
            local_part.mul_(a).add_(anchor_part * (1.0 - a))
        else:
            mixed = local_part.to(torch.float32) * a
            mixed.add_(anchor_part * (1.0 - a))
            local_part.copy_(mixed)


def fragment_delta_into(fragment: Fragment, anchor: Tensor, local: Mapping[str, Tensor], out: Tensor) -> None:
    """The flat delta of a fragment, padding zeroed; anchor and out are fp32 [fragment.numel]."""
    for tensor in fragment.tensors:
        delta_into(view(anchor, tensor).view(-1), rows_of(local[tensor.name], tensor), view(out, tensor).view(-1))
    zero_padding_(fragment, out)


def mix_fragment_into(fragment: Fragment, local: Mapping[str, Tensor], anchor: Tensor, a: float) -> None:
    """Merge a fragment's anchor, fp32 [fragment.numel], into the local weights."""
    for tensor in fragment.tensors:
        mix_into(rows_of(local[tensor.name], tensor), view(anchor, tensor).view(-1), a)


def _pieces(local: Tensor, *flats: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Matching parts of local and the flat tensors, sharing memory with them."""
    if local.is_contiguous():
        return tiles(local.view(-1), *flats, size=_CPU_CHUNK if local.device.type == "cpu" else _ACCELERATOR_CHUNK)
    return [
        (local, *(flat.view(local.shape) for flat in flats))
    ]  # without a flat view it is taken whole, by its strides


# --- Eager updates (arXiv 2502.12996): the own latest delta counts as merged at once
#
# Where the merge of a round arrives a round late, a node's own part of it is old although the node has the new one in
# hand. The paper puts the new one in its place; with M nodes, after the round t whose merge is not there yet,
#
#     Δ̃_m = Δ̄_old + w_m · (Δ_m,new − Δ_m,old),  w_m = 1/M
#
# The paper's nodes run the outer optimizer themselves, each on its own Δ̃_m and from its own weights, which hold
# Δ_m,old since the round before: hence the difference. Here the coordinator runs the one there is, on the merge of all,
# and its target Θ holds each delta once, Δ_m,old among them. What a node has to add is the new one alone: each of our
# outer optimizers moves the target by a multiple (`outer_optimizers.step_gain`) of a delta at once, so it goes on from
#
#     start_m = Θ − gain · w_m · Δ_m,new
#
# Without outer momentum that is the paper's sequence; with it, the paper's nodes also remember their own part a round
# earlier than the others', and ours do not: there is one momentum, of the true merges. The next delta must be measured
# from `start_m`, not from the anchor: else it would hold the correction, and be merged with it.
#
# Arithmetic on flat fp32; every delta here is the decoded one, as it is merged. A radial merge is not linear, and
# with it the correction is an approximation.


@torch.no_grad()
def eager_start_into(anchor: Tensor, fresh: Tensor, out: Tensor, *, factor: float) -> None:
    """out ← anchor − factor · fresh, all fp32 [n]: the start of an eager node, and the base of its next delta.

    `fresh` is the sum of its deltas that the anchor lacks; `factor` its expected weight times
    `outer_optimizers.step_gain`. `out` may be `anchor`.
    """
    for anchor_part, fresh_part, out_part in tiles(anchor, fresh, out):
        torch.sub(anchor_part, fresh_part * factor, out=out_part)


# --- Control variates: correct for the difference between a node's data and all data
#
# With several inner steps between two merges a node drifts toward the minimum of its own data, and the mean of such
# drifts does not lead to the minimum of all data together. SCAFFOLD (arXiv 1910.06378) adds c − c_i to each local
# gradient: c_i is node i's estimate of its own mean gradient, c the mean of these. SCALLION and SCAFCOM (arXiv
# 2308.08165) send one compressed increment for both. With K steps at the inner rate η, y_i after them, the anchor x:
#
#     δ_i = α·((x − y_i)/(ηK) − c);  c_i ← c_i + C(δ_i);  c ← c + mean C(δ_i);  x ← x − γ·(c + mean C(δ_i))
#
# (SCALLION, for unbiased codecs C. SCAFCOM, for biased ones, smooths the gradient estimate before: v_i ← (1 − β)·v_i +
# β·(…), δ_i = v_i − c_i, one more copy. Without compression it is SCALLION with α = β. The paper's text was not at
# hand; the formulas are as its abstract, its reviews and an open re-implementation have them.)
#
# SCAFCOM is here as written (`increment_`, `learn_increment_`; the coordinator's c is the buffer of the outer optimizer
# "increments"): a codec that leaves out most of every δ_i leaves less of it each round, as c_i comes nearer to v_i. v_i
# begins as the first estimate. c is known to a node from the update, −update/(ν·Ση).
#
# Ours for SCALLION, so that neither message nor memory grows: a node uses c − c_i only, so it keeps only that, d_i, one
# copy. Of the increments above c drops out, and with deltas Δ_i = x − y_i, their mean Δ̄, and Ση over the steps of a
# delta for ηK,
#
#     d_i ← d_i + α·(Δ̄ − Δ_i)/Ση          after a merge, deltas as decoded, so that the d_i of all nodes sum to 0
#     y ← y − η·d_i                        after every inner step
#
# which is SCALLION whose codec is applied to deltas instead of increments. Taking d_i from the weights rather than
# adding it to the gradient is the same with SGD; with Adam the deltas are in units of its steps, and so must the
# correction be.
#
# What an uplink codec loses stays in d_i and comes with the next delta: d_i feeds errors back by itself. A residual
# would add them once more, and a delta of which most stays behind sets d_i to many times what it should be: with top-k
# and α = 1 nodes diverge, so codecs are checked (`quant/codec_checks.py`). A downlink codec's loss, the difference e of
# target and anchor, is in the mean of the d_i as α·e/(ν·Ση), and moves the next deltas back by α·e: of the feedback
# that the downlink has by itself, 1 − α is left.
#
# Limits. Every node must be in every merge (quorum = all): who was absent would need the change of c. A node must know
# Δ̄: with an outer optimizer without momentum the update says it; with momentum it does not, and nothing here guesses.
# With AdamW inside there is no theorem. Which runs can have it: `validation.py`; when:
# `node/model/control_variates.py`.


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
        lr_sum: Ση of the inner steps inside the delta; the same on all nodes.
        alpha: 1 forgets the last estimate at once; less averages out the noise of gradients and codecs.

    Raises ValueError: no rate, or α outside (0, 1].
    """
    if not lr_sum > 0.0:
        raise ValueError(f"the learning rates inside a delta sum to {lr_sum}; without a step there is nothing to learn")
    if not 0.0 < alpha <= 1.0:
        raise ValueError(f"alpha is {alpha}; it must be above 0 and at most 1")
    factor = alpha / lr_sum
    for drift_part, delta_part, merged_part in tiles(drift, delta, merged):
        drift_part.add_((merged_part - delta_part).mul_(factor))


@torch.no_grad()
def increment_(
    delta: Tensor, smoothed: Tensor, sent: Tensor, drift: Tensor | None, *, lr_sum: float, rate: float
) -> None:
    """v ← (1 − β)·v + β·(Δ/Ση − d);  Δ ← v − c, what a node of SCAFCOM sends; all fp32 [n].

    Args:
        smoothed: v_i; it begins as the first estimate.
        sent: c_i, the sum of all that the node has sent and that was merged.
        drift: d_i; None for zeros.
        lr_sum: Ση of the inner steps inside the delta; without any v stays.
        rate: β, of the first estimate 1.
    """
    if lr_sum > 0.0:
        delta.mul_(1.0 / lr_sum)
        if drift is not None:
            delta.sub_(drift)
        smoothed.mul_(1.0 - rate)
        smoothed.add_(delta.mul_(rate))
    torch.sub(smoothed, sent, out=delta)


@torch.no_grad()
def learn_increment_(drift: Tensor, sent: Tensor, own: Tensor, merged: Tensor, *, lr_sum: float) -> None:
    """c_i ← c_i + own;  d_i ← c − c_i, all fp32 [n]: `own` as decoded, c = merged/Ση from `merged_by_plain_step`."""
    sent.add_(own)
    torch.sub(merged * (1.0 / lr_sum), sent, out=drift)


def merged_by_plain_step(update: Tensor, outer_lr: float) -> Tensor:
    """Δ̄, fp32 [n], from what an outer step without momentum has added to the anchor: −update/ν."""
    return update * (-1.0 / outer_lr)
