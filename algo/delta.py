"""What a node measures and what it merges: delta = anchor − local (protocol L), local ← a·local + (1 − a)·anchor.

Local weights may be of any floating type and strides; anchors and deltas are flat fp32. All on one device.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from farloop.algo.fragments import tiles, view, zero_padding_
from farloop.algo.spec import TILE, Fragment

# Bounds the temporaries (here 64 MiB in fp32) without making launches on an accelerator too short.
_CHUNK: Final = 16 * TILE


@torch.no_grad()
def delta_into(anchor: Tensor, local: Tensor, out: Tensor) -> None:
    """out ← cast(anchor, local's dtype) − local, in fp32; anchor and out are fp32 [local.numel()].

    The anchor is rounded as `mix_into` rounded it into the local weights: a bf16 node that has not moved has a delta of
    exactly zero, and the rounding is never sent as if it were progress. Positive where training went downhill.
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

    a = 0 copies the anchor exactly, a = 1 leaves the local weights alone. The optimizer's moments are nobody's business
    here: they stay (arXiv 2311.08105).
    """
    assert anchor.dtype == torch.float32 and 0.0 <= a <= 1.0
    if a == 1.0:
        return
    for local_part, anchor_part in _pieces(local, anchor):
        if a == 0.0:
            local_part.copy_(anchor_part)
        else:
            mixed = local_part.to(torch.float32) * a
            mixed.add_(anchor_part * (1.0 - a))
            local_part.copy_(mixed)


def fragment_delta_into(fragment: Fragment, anchor: Tensor, local: Mapping[str, Tensor], out: Tensor) -> None:
    """The flat delta of a fragment, padding zeroed; anchor and out are fp32 [fragment.numel]."""
    for tensor in fragment.tensors:
        delta_into(view(anchor, tensor).view(-1), local[tensor.name], view(out, tensor).view(-1))
    zero_padding_(fragment, out)


def mix_fragment_into(fragment: Fragment, local: Mapping[str, Tensor], anchor: Tensor, a: float) -> None:
    """Merge a fragment's anchor, fp32 [fragment.numel], into the local weights."""
    for tensor in fragment.tensors:
        mix_into(local[tensor.name], view(anchor, tensor).view(-1), a)


def _pieces(local: Tensor, *flats: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Matching parts of local and the flat tensors, sharing memory with them."""
    if local.is_contiguous():
        return tiles(local.view(-1), *flats, size=_CHUNK)
    return [
        (local, *(flat.view(local.shape) for flat in flats))
    ]  # without a flat view it is taken whole, by its strides
