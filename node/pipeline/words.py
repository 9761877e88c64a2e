"""What the nodes of a pipeline say to each other, as plain values; their bytes are made in `frames.py`.

A *trip* is one attempt of a microbatch to go its way: forward along its path, back to its source for the loss, and the
same nodes backwards. A trip that is lost is followed by another, or the microbatch is dropped and counted.
"""

from dataclasses import dataclass
from enum import IntEnum

from farloop.algo.layout import Hop, Layout


class Kind(IntEnum):
    """Of the work that a tensor asks for; the number is on the wire."""

    FORWARD = 1
    """Activations of the stage before, for the next."""
    LOSS = 2
    """Activations of the last stage, for the source: its norm, head and loss (SkipPipe's C0)."""
    BACKWARD = 3
    """The gradient of what a node sent forward."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Trip:
    """One attempt of one microbatch. Unique among all trips of a run."""

    source: str
    start: int
    """Incarnation of the source: steps are counted from 0 in each."""
    step: int
    index: int
    """Of the microbatch in the step."""
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be done with a tensor, where it came from and where it is to go."""

    kind: Kind
    epoch: int
    """Of the layout."""
    trip: Trip
    path: int
    """Which of the source's paths is followed."""
    position: int
    """Forward: place in the path of the visit that is asked for. Backward: place in `visited`. Loss: hops visited."""
    visited: tuple[Hop, ...]
    """Visits so far, of a backward all of them: where the path was left, not those that were planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What the raw bytes beside a `Work` are."""

    shape: tuple[int, ...]
    dtype: str
    """Of the tensor, as torch calls it: float32, bfloat16 or float16."""
    codec: str
    """Spelling of the codec that wrote the bytes; an empty text where they are the tensor's own, little-endian."""
    size: int
    """Bytes."""
    checksum: int
    """xxh3-64 of the bytes."""
    sent_s: float = 0.0
    """When it was given to the link, by the sender's clock (`sight.py`); 0: an older node does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """To every peer, about twice a second, and first on every connection: I live, and this is my load."""

    incarnation: int
    epoch: int
    ready: bool
    """Whether it has met those that it may have to send to."""
    queued: int
    """Jobs that wait."""
    job_s: float
    """Seconds that one takes, of late."""
    age_s: float
    """Since it last finished or began one: a node that stands still says so by this."""
    over: int = -1
    """Of a source: the newest of its steps in which every microbatch is settled."""
    sent_s: float = 0.0
    """When it was said, by the sender's clock; 0: an older node does not say."""
    echo_s: float = 0.0
    """`sent_s` of the newest word that came from the receiver; 0 before there is one ..."""
    held_s: float = 0.0
    """... and how long ago that came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """To a source: a trip of yours ends here, and why."""

    trip: Trip
    epoch: int
    """Of the layout that the sender has."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """From a source: what you keep for this trip is not wanted any more."""

    trip: Trip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """From a source: all microbatches of this step are settled."""

    start: int
    step: int
    microbatches: int
    next_epoch: int
    """Of the layout that its next step follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Phase one of a switch: a new layout, to be made ready and not yet followed."""

    layout: Layout
    addresses: dict[str, str]
    """Where its nodes can be reached, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The answer to `Prepare`; with a `refusal`, in words, the switch does not take place."""

    epoch: int
    refusal: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Phase two: from the end of its round on, each source follows the layout that was prepared."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """I go on purpose, and do not come back to this run by myself."""

    start: int


Message = Leave | Word | Lost | Forget | Ended | Prepare | Prepared | Switch
