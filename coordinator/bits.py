"""Adaptive bits: a step for every tensor of a fragment, chosen by L-GreCo from what was merged last.

`q4r:policy=l-greco` asks for it. Tensors lose unequally at an equal step; the choice spends no more squared error than
the uniform step would, and fewer bits. It is published with the terms of the fragment's next window, and journaled with
them; decoders need not know, because a payload holds its scales. Nodes with a codec of their own have their own choice
where that one asks for it, and none otherwise.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from farloop.algo.bits import Candidate, budget, by_multiplier
from farloop.algo.fragments import view
from farloop.algo.spec import Fragment, Terms, WindowTerms
from farloop.quant.rates import measure
from farloop.quant.reference.q4r import L_GRECO_FACTORS, Q4rCodec
from farloop.quant.registry import codec_named, spelling_of


def next_codecs(terms: Terms, delta: Tensor, fragment: Fragment) -> dict[str, str]:
    """What is chosen for the fragment's next deltas by its merged delta, fp32 [numel]: by the codec that the terms of
    their window ask for, where it is one that leaves a choice."""
    asked = dict.fromkeys((terms.codec_up, *(codec for _, codec in terms.codec_up_of)))
    return {codec: chosen for codec in asked if (chosen := next_codec(codec, delta, fragment)) is not None}


def as_chosen(terms: Terms, window: WindowTerms) -> dict[str, str]:
    """What was chosen for the deltas of an open window, of which `terms` say what was asked for."""
    own = dict(window.codec_up_of)
    return {terms.codec_up: window.codec_up} | {codec: own[node] for node, codec in terms.codec_up_of}


def with_chosen(following: WindowTerms, chosen: Mapping[str, str]) -> WindowTerms:
    """The terms of a window with the choice in the place of what was asked for."""
    own = tuple((node, chosen.get(codec, codec)) for node, codec in following.codec_up_of)
    return replace(following, codec_up=chosen.get(following.codec_up, following.codec_up), codec_up_of=own)


@torch.no_grad()
def next_codec(codec_up: str, delta: Tensor, fragment: Fragment) -> str | None:
    """How the fragment's next deltas should be encoded, by its merged delta, fp32 [numel]; None: as the terms say."""
    codec = codec_named(codec_up)
    if not isinstance(codec, Q4rCodec) or codec.policy != "l-greco":
        return None
    plain = replace(codec, policy="relative", step=codec.step[:1])
    base = codec.step[0]
    tables = [
        [
            Candidate(bits=rate.bits, error=rate.error)
            for factor in L_GRECO_FACTORS
            for rate in [measure(replace(plain, step=(base * factor,)), view(delta, tensor).reshape(-1))]
        ]
        for tensor in fragment.tensors
    ]
    choice = by_multiplier(tables, budget(tables, 0, 1.0))  # no more error than the uniform choice has
    # Four digits: the spelling travels with every commit.
    steps = tuple(float(f"{base * L_GRECO_FACTORS[index]:.4g}") for index in choice.indices)
    return spelling_of(replace(plain, step=steps))
