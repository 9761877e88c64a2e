"""Which part of the model a node holds: all of it, or some of the stages that its layout is cut along (protocol G).

A part is a tuple of stages, and None is the whole model. Whoever holds stage 0 is a source: the embedding and the head
are there, so that samples begin and losses end there. Standard library only.
"""

from farloop.algo.spec import Fragment, Layout

Part = tuple[int, ...] | None


def fault_of(part: Part, layout: Layout) -> str | None:
    """What is wrong with a part, as the rest of a sentence that begins with its node; None for a sound one."""
    if part is None:
        return None
    if not part:
        return "holds no stage of the model: a node without any has nothing to train"
    stages, wrong = layout.num_stages, [stage for stage in part if not 0 <= stage < layout.num_stages]
    if wrong:
        known = f"stages 0 to {stages - 1}" if stages > 1 else "one stage, 0: it is not cut into more"
        return f"holds stage {wrong[0]}, and the run's model has {known}"
    if list(part) != sorted(set(part)):
        return "names its stages more than once, or out of order"
    return None


def is_in(fragment: Fragment, part: Part) -> bool:
    """Whether the fragment is of this part."""
    return part is None or fragment.stage in part


def fragments_of(part: Part, layout: Layout) -> tuple[Fragment, ...]:
    """The fragments of a part, in order."""
    return tuple(fragment for fragment in layout.fragments if is_in(fragment, part))


def is_whole(part: Part, layout: Layout) -> bool:
    """Whether it is all of the model."""
    return part is None or len(part) == layout.num_stages


def is_source(part: Part) -> bool:
    """Whether its node brings samples into the model; the others train on what comes by."""
    return part is None or 0 in part


def described(part: Part) -> str:
    """In words: "all", or its stages."""
    return "all" if part is None else ", ".join(map(str, part))
