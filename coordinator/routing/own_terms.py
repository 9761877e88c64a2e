"""A plan's rates as terms of a run: what `farloop set` would be given to put them in place. Pure.

Bits are those of a codec: the run's is that of the nodes with the most, the others have theirs by name. H is the
run's, and who does fewer steps has a share of it.
"""

from collections.abc import Mapping
from typing import Any, Final

from farloop.algo.schedule import steps_by_share
from farloop.algo.spec import NodeId, Terms
from farloop.coordinator.routing.lightening import Advice
from farloop.coordinator.routing.rates import Rate

CODEC_OF: Final[Mapping[int, str]] = {32: "fp32", 16: "bf16", 8: "q8", 4: "q4", 2: "q4r"}
"""By bits of a parameter."""

_BITS_OF: Final[Mapping[str, int]] = {
    **{codec: bits for bits, codec in CODEC_OF.items()},
    **dict.fromkeys(("e3m0", "e2m1", "nf4", "lattice"), 4),
}
"""Of the codecs whose bits are a matter of choice: a sparse one sends what it sends."""


class NotInPlace(Exception):
    """Why these rates cannot be put in place, as a sentence."""


def settings(run: Mapping[str, Any], rates: Mapping[str, Rate], h: int) -> dict[str, str]:
    """Keys and values for `farloop set`, in the order of a line; empty where the run has these rates.

    Args:
        run: of a coordinator's status.
        rates: by node.
        h: inner steps between two syncs that they were chosen for.

    Raises:
        NotInPlace: the run has no such codecs, or cannot have rounds of unequal nodes.
    """
    if not rates:
        return {}
    if run["method"] == "data-parallel":
        raise NotInPlace("data-parallel runs with fp32 and a step per round: these rates are for another method")
    if bits_of(run["codec_up"]) is None:
        *others, last = CODEC_OF.values()
        known = f"{', '.join(others)} or {last}"
        raise NotInPlace(f"the run sends by {run['codec_up']}, whose bits no plan chooses: take {known}")
    if odd := sorted({rate.bits for rate in rates.values()} - CODEC_OF.keys()):
        raise NotInPlace(f"there is no codec of {odd[0]} bits; [plan] bits can be {', '.join(map(str, CODEC_OF))}")
    words: dict[str, str] = {}
    most = max(rate.bits for rate in rates.values())
    codec_up = run["codec_up"] if bits_of(run["codec_up"]) == most else CODEC_OF[most]
    if codec_up != run["codec_up"]:
        words["codec_up"] = codec_up
    if h != run["h"]:
        words["h"] = str(h)
    own_codecs, own_shares = run.get("codec_up_of", {}), run.get("h_share_of", {})
    for node, rate in sorted(rates.items()):
        if bits_of(own_codecs.get(node, codec_up)) != rate.bits:
            words[f"codec_up_of.{node}"] = "none" if rate.bits == most else CODEC_OF[rate.bits]
        steps = h if "stages" in run else min(rate.h, h)  # those of a cut model are one another's
        if steps_by_share(h, own_shares.get(node, 1.0)) != steps:
            words[f"h_share_of.{node}"] = "none" if steps == h else share_text(steps, h)
    return words


def settings_of(advice: Advice, terms: Terms, h: int, *, in_stages: bool) -> dict[str, str]:
    """The same for what is advised to one node, in rounds of h steps; bits alone where the model is cut in stages.

    Raises:
        NotInPlace: there is no such codec beside the node's own.
    """
    words: dict[str, str] = {}
    node, codec = advice.node, terms.codec_of(NodeId(advice.node))
    own = bits_of(codec)
    if own is not None and own != advice.bits:
        if advice.bits not in CODEC_OF:
            raise NotInPlace(f"there is no codec of {advice.bits} bits")
        words[f"codec_up_of.{node}"] = CODEC_OF[advice.bits]
    if not in_stages and steps_by_share(h, dict(terms.h_share_of).get(NodeId(node), 1.0)) != advice.h:
        words[f"h_share_of.{node}"] = share_text(advice.h, h)
    if not words:
        raise NotInPlace(f"{node} sends by {codec}, and no other codec or share of the steps is to be had for it")
    return words


def bits_of(codec: str) -> int | None:
    """About how many bits of a parameter; None where that is not what the codec is chosen by."""
    return _BITS_OF.get(codec.partition(":")[0])


def share_text(steps: int, h: int) -> str:
    """The shortest share that gives this many of h steps."""
    near = (f"{steps / h + up:.{digits}f}" for digits in range(1, 17) for up in (0.0, 10.0**-digits))
    return next(text for text in near if 0.0 < float(text) < 1.0 and steps_by_share(h, float(text)) == steps)
