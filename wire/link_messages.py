"""What both ends say about the link between them: echoes, probes, and what was seen. From protocol version 3 on.

None of it decides anything in a run. A probe's bytes travel as a blob of a kind of its own, in the background: whatever
anybody waits for goes first (`probe.py`).
"""

from dataclasses import dataclass, field

from farloop.algo.spec import LATER
from farloop.wire.meter import Burst

MOST_SEEN = 16
"""Bursts, and links, of one report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """Coordinator → node: say this number back at once. The node's session does, before anybody else hears of it."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Echoed:
    """Node → coordinator: here it is."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Coordinator → node: the link is to be measured, one way."""

    number: int
    upward: bool
    """Whether the node is to send the bytes; else they come, and the node ends them when it has seen enough."""
    num_bytes: int
    """At most; 0: the probe of this number is called off."""
    rtt_s: float
    """Round trip of the link, as the coordinator knows it: what "enough" depends on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """What the kernel of one end knows of a TCP connection (TCP_INFO). Of the first hop alone, where somebody in
    between ends connections: a relay, a mesh, a load balancer."""

    rtt_s: float
    """Smoothed."""
    least_rtt_s: float
    retransmits: int
    """Segments sent again since it was opened ..."""
    segments: int
    """... of so many."""
    delivered_bytes_per_s: float = 0.0
    """Its own estimate of what arrives; 0 where it has none, or was not limited by the link."""
    congestion: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A message that came whole, from another node."""

    num_bytes: int
    seconds: float
    """That its bytes took: beyond what a message of next to no bytes takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a node saw of one link that ends at it."""

    peer: str = ""
    """The other end; empty: the coordinator."""
    bursts: tuple[Burst, ...] = ()
    """What came from there lately, in busy times long enough to tell something."""
    probe: int = 0
    """The probe that they were; 0: whatever had to be sent."""
    rtt_s: float | None = None
    """Round trip as the node measured it, where the coordinator cannot."""
    bulk: Connection | None = None
    """The connection that carries blobs, as this node's kernel sees it."""
    transfer: Transfer | None = field(default=None, metadata=LATER)
    """The quickest that came from another node lately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Node → coordinator, now and then: its links."""

    links: tuple[Seen, ...]
