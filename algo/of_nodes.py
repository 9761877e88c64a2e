"""What some nodes of a run have of their own: the codec of their deltas, their share of a round's steps.

In the terms it is a tuple of (node, value) in the order of the names, without those that have what all have; as text
`rome=q4 oslo=q4r:step=0.7,rounding=nearest`, with blanks between nodes, because codecs have commas. Pure, and free of
torch: a codec is a word here.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from farloop.algo.require import require
from farloop.algo.schedule import steps_by_share
from farloop.algo.spec import Layout, NodeId, Terms

if TYPE_CHECKING:
    from farloop.algo.methods import Method

OwnCodecs = tuple[tuple[NodeId, str], ...]
OwnShares = tuple[tuple[NodeId, float], ...]

OF_NODES: Final[Mapping[str, str]] = {"codec_up_of": "codec_up", "h_share_of": "h"}
"""Terms of this kind, and the term of all nodes that each stands in the place of."""


def own_codecs(text: str) -> OwnCodecs:
    """`rome=q4 oslo=q8` → what the terms have. Raises ValueError, one sentence."""
    return _sorted({node: codec(value) for node, value in _pairs(text, "rome=q4").items()})


def own_shares(text: str) -> OwnShares:
    """`rome=0.5 oslo=0.86` → what the terms have; who does all steps is left out. Raises ValueError, one sentence."""
    given = {node: share(value) for node, value in _pairs(text, "rome=0.5").items()}
    return _sorted({node: value for node, value in given.items() if value != 1.0})


def codec(word: str) -> str:
    """A codec's spelling, as far as one can say here. Raises ValueError."""
    if not word:
        raise ValueError("a codec is wanted")
    return word


def share(word: str) -> float:
    """A share of the steps, above 0 and at most 1. Raises ValueError."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= 1.0:
        raise ValueError(f"a share of a round's steps above 0 and at most 1 is wanted, not {word!r}")
    return value


_READ: Final[Mapping[str, Callable[[str], Any]]] = {"codec_up_of": codec, "h_share_of": share}
_READ_ALL: Final[Mapping[str, Callable[[str], Any]]] = {"codec_up_of": own_codecs, "h_share_of": own_shares}


def given_as(key: str, text: str, held: tuple[tuple[NodeId, Any], ...]) -> tuple[tuple[NodeId, Any], ...]:
    """The term's value where `text` is given: under `codec_up_of` for all nodes, under `codec_up_of.rome` for one,
    the others as `held` has them. `none` gives a node what all have.

    Raises:
        ValueError: one sentence that begins with the key.
    """
    name, dot, node = key.partition(".")
    none = text.strip().lower() in ("", "none")
    try:
        if not dot:
            return () if none else tuple(_READ_ALL[name](text))
        if not node:
            raise ValueError(f"a node is wanted behind the point, as {name}.rome")
        others = {one: value for one, value in held if one != node}
        value = None if none else _READ[name](text.strip())
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
    return _sorted(others if value is None or value == 1.0 else {**others, NodeId(node): value})


def check_of_nodes(terms: Terms, method: "Method", layout: Layout) -> None:
    """Raise ValueError, one sentence, unless nodes of such a run can have these of their own."""
    for name, of_all in OF_NODES.items():
        pairs = getattr(terms, name)
        names = [node for node, _ in pairs]
        require(names == sorted(set(names)), f"{name} names a node twice, or not in the order of the names")
        if pairs and of_all in method.fixed:
            kept = getattr(method, of_all)
            raise ValueError(f"{name}: {names[0]} cannot have its own, for {method.name} runs with {of_all} = {kept}")
    slots = layout.slots
    for node, own in terms.h_share_of:
        require(0.0 < own < 1.0, f"h_share_of: {node} has {own}; a share is above 0 and below 1")
        steps = steps_by_share(terms.h, own)
        require(
            steps >= slots,
            f"h_share_of: {node} would do {steps} of h = {terms.h} steps, too few for {slots} slots of one step or "
            f"more; the least is {math.ceil(1000 * slots / terms.h) / 1000:g}",
        )
    require(
        not terms.h_share_of or layout.num_stages == 1,
        "h_share_of: the model is cut in stages, whose steps are one another's; leave it out",
    )
    require(
        not (terms.control_variates and terms.h_share_of),
        "h_share_of: with control_variates all nodes do the same number of steps, or the corrections would not sum to "
        "zero; leave it out",
    )


def _pairs(text: str, example: str) -> dict[NodeId, str]:
    found: dict[NodeId, str] = {}
    for word in text.split():
        node, equals, value = word.partition("=")
        if not node or not equals:
            raise ValueError(f"NODE=VALUE with blanks between nodes is wanted, as {example}, not {word!r}")
        if node in found:
            raise ValueError(f"{node} is given twice")
        found[NodeId(node)] = value
    return found


def _sorted(values: Mapping[NodeId, Any]) -> tuple[tuple[NodeId, Any], ...]:
    return tuple(sorted(values.items()))
