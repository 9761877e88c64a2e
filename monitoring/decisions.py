"""The shape of `decisions.jsonl`: a line for every window that closed, with all that its decision rested on.

The journal says what was decided, and forgets it once it is not needed; this says it for as long as the file is kept,
with the times that the journal has no business with. Standard library only.
"""

from typing import Literal, NotRequired, TypedDict


class OwnOfDelta(TypedDict):
    """What its node had of its own."""

    codec: NotRequired[str]
    """By which it was sent, where that is not the window's `codec_up`."""
    h: NotRequired[int]
    """Of its node in the window's round, where that is not the round's."""


class ArrivedDelta(OwnOfDelta):
    """A delta that the window merged."""

    node: str
    after_s: float | None
    """Seconds from the opening until it was durable; negative: before; None: in an earlier start of the coordinator."""
    base: int
    """Version that it was taken from."""
    window: int
    """Which it named: an earlier one than this where it was late."""
    weight: float
    steps: int
    tokens: int
    norm: float
    """As its node reported it."""


class RefusedDelta(TypedDict):
    """A delta of the fragment that was refused while the window was open."""

    node: str
    after_s: float
    code: str
    detail: str


class MissingNode(TypedDict):
    """Who was expected, and is not in it."""

    node: str
    code: str
    sentence: str


class DecisionEvent(TypedDict):
    """One closed window."""

    event: Literal["decision"]
    t: float
    """Seconds since the run's start at which its commit was durable."""
    epoch: int
    fragment: int
    version: int
    """Also the window's number."""
    round: int
    final: bool
    why: str
    open_s: float
    """Seconds from the opening until it closed."""
    quorum: int | None
    """Contributions that were enough; None: of all that were expected."""
    quorum_s: float | None
    """Seconds from the opening until the quorum had come; None where it had not, or is none."""
    grace_s: float | None
    """Seconds that the others were then given; None where that is not how the method waits."""
    floor: int
    revision: int
    """Of the terms that the window ran under."""
    stage: NotRequired[int]
    """Of the model, where that is cut in stages: those who hold it were expected."""
    expected: list[str]
    arrived: list[ArrivedDelta]
    missing: list[MissingNode]
    refused: list[RefusedDelta]
    h: int
    """Inner steps of the window's round."""
    outer_lr: float
    outer_momentum: float
    delta_scale: float
    codec_up: str
    codec_down: str
    update_bytes: int
    anchor_digest: str
    norm: NotRequired[float]
    """Of the merged delta."""
    merge_s: NotRequired[float]
    journal_s: NotRequired[float]
