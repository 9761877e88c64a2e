"""Input of the planner: nodes with their network cards, links in each direction, the model, and the request.

Nothing here is measured or guessed. An inventory that cannot be planned is refused when
it is made, in one sentence that names the nearest valid value.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from farloop.monitoring.units import BELOW_1, LEAST_0, LEAST_1, AtLeast, Checked, Count, NotNegative, Positive, filled

COORDINATOR = "coordinator"  # the coordinator's name as an end of a link; no node and no site may have it
MOST_NODES = 1024  # planned within a minute or so; the search takes about four times as long for twice as many
MOST_MICROBATCHES = 10_000  # of a source in a step: each is simulated by itself
MOST_LAYERS = 10_000  # of a model, as of one that is simulated


_RATE = AtLeast(math.ulp(0.0), wanted="a number above 0")  # or infinite
_SHARE = AtLeast(math.ulp(0.0), most=1.0, wanted="a share above 0 and at most 1, as 0.8")


class CardKind(StrEnum):
    """Kinds of network cards, as far as they decide who can share a collective (Holmes, arXiv 2312.03549)."""

    INFINIBAND = "infiniband"
    ROCE_V2 = "roce-v2"
    ROCE_V1 = "roce-v1"
    IWARP = "iwarp"
    ETHERNET = "ethernet"
    VIRTUAL = "virtual"

    @property
    def fabric(self) -> "CardKind":
        """The class that nodes must have in common: iWARP and virtual cards speak plain Ethernet to each other."""
        return CardKind.ETHERNET if self in (CardKind.IWARP, CardKind.VIRTUAL) else self

    @property
    def is_rdma(self) -> bool:
        """Whether a group of this class alone can use RDMA."""
        return self.fabric is not CardKind.ETHERNET


class Mode(StrEnum):
    """What crosses the links between islands."""

    A = "A"  # fragments, now and then: pipelines stay inside islands
    B = "B"  # activations, every step: one stage or more per island, data parallel inside (Holmes' layout)
    C = "C"  # activations of microbatches that skip stages (SkipPipe's paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card(Checked):
    kind: CardKind
    bytes_per_s: float | None = None  # line rate; None if unknown
    efficiency: Annotated[float, _SHARE] = 1.0  # share of the line rate that transfers reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Checked):
    """One node of the run: a machine or a whole cluster behind one address."""

    name: str
    site: str = ""  # nodes of one site are near each other; empty: a site of its own, named as the node
    cards: tuple[Card, ...] = ()  # None given: Ethernet
    layer_s: NotNegative = 0.0  # seconds of the forward pass of one microbatch through one layer, measured
    max_layers: Annotated[int | None, LEAST_1] = None  # how many layers its memory holds; None: any number
    slots: Count = 1  # microbatches that it may keep between their forward and their backward pass
    stage: int | None = None  # must replicate this stage; None: the planner chooses
    address: str = ""
    """Where the other stages reach it, as tcp://host:port. Nothing is planned by it: it goes into the layout file."""

    def __post_init__(self) -> None:
        if not self.name or self.name == COORDINATOR:
            raise ValueError(
                f"name is {self.name!r}; any other text than that and {COORDINATOR!r} can be a node's name"
            )
        if not self.site:
            object.__setattr__(self, "site", self.name)
        Checked.__post_init__(self)

    @property
    def fabric(self) -> CardKind:
        """Class of its best card: RDMA before Ethernet, InfiniBand before RoCE."""
        rates = self.card_rates()
        return next((kind for kind in CardKind if kind in rates), CardKind.ETHERNET)

    def card_rates(self) -> dict[CardKind, float]:
        """Class → bytes/s that its fastest card of that class reaches; inf if unknown."""
        found: dict[CardKind, float] = {}
        for card in self.cards:
            rate = math.inf if card.bytes_per_s is None else card.bytes_per_s * card.efficiency
            found[card.kind.fabric] = max(rate, found.get(card.kind.fabric, 0.0))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Checked):
    """One direction between two places."""

    latency_s: NotNegative  # one way
    bytes_per_s: Annotated[float, _RATE] = math.inf
    assumed: bool = False  # its rate was neither given nor measured

    def seconds(self, num_bytes: float) -> float:
        """From the first byte sent to the last received."""
        return self.latency_s + num_bytes / self.bytes_per_s


LOCAL = Link(latency_s=0.5e-3, bytes_per_s=1.25e9, assumed=True)
"""Between nodes of one site without a given link: 10 Gbit/s Ethernet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Checked):
    layers: Annotated[int, AtLeast(1, MOST_LAYERS)]
    layer_bytes: float | None = None  # memory of one layer, by which nodes say how many they hold
    activation_bytes: NotNegative = 0.0  # of one microbatch between two stages, or of a gradient back
    parameters: NotNegative = 0.0  # of all of it
    sync_bytes: Annotated[float | None, LEAST_0] = None
    """Of a parameter in an all-reduce inside an island. None: the bits that are planned, or fp32 where none are."""
    microbatches: Annotated[int, AtLeast(1, MOST_MICROBATCHES)] = 1  # of every source in a step
    backward: NotNegative = 1.5  # backward pass of a layer in forward passes; 1.5 in SkipPipe's code
    loss: NotNegative = 0.25
    """Head and loss at the source in forward passes of its stage; ¼ in SkipPipe's code."""
    gap_s: NotNegative = 0.0  # of a node between two pieces of work
    overhead_s: NotNegative = 0.0  # of the hosts, per message: copies between CPU and GPU, framing

    @property
    def parameter_bytes(self) -> float:
        """In fp32: what a sync without a codec sends."""
        return 4.0 * self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub(Checked):
    in_bytes_per_s: Annotated[float, _RATE] = math.inf
    out_bytes_per_s: Annotated[float, _RATE] = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest(Checked):
    stages: Annotated[int | None, LEAST_1] = None  # None: as few as memory allows
    skip: Annotated[float, BELOW_1] = 0.0  # share of the stages that a microbatch leaves out, below 1
    seed: int = 0
    h: Count = 100  # inner steps between two syncs of the same parameters
    bits: Annotated[tuple[int, ...], filled, lambda bits: LEAST_1(min(bits))] = (8, 4, 2)
    """Of a parameter on its way to the coordinator: what the planner may choose from."""
    fragments: Count = 8  # of a sync, each sent by itself
    mode: Mode | None = None  # None: the cheapest; C where something is skipped
    effort: Positive = 1.0  # multiplies the number of moves that a search may try


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    nodes: tuple[Node, ...]
    model: Model
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    """(from, to) → link; an end is a node, a site or the coordinator. What is said of nodes goes before what is said
    of their sites. Two places without one cannot reach each other; only nodes of one site have LOCAL between them."""
    hub: Hub | None = None  # None: nothing is known of the coordinator's end
    wish: PlanRequest = PlanRequest()
    cut: tuple[int, ...] | None = None
    """Layers of each stage, of nodes that say theirs: a running pipeline cannot change them. None: by speed."""
    name: str = ""
    about: str = ""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("nodes is empty; the least is 1")
        if len(self.nodes) > MOST_NODES:
            raise ValueError(
                f"there are {len(self.nodes):,} nodes; the most that are planned together is {MOST_NODES:,}"
            )
        names = [node.name for node in self.nodes]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"nodes: the name {twice!r} stands twice")
        stages = self.wish.stages
        if stages is not None and stages > self.model.layers:
            raise ValueError(f"stages is {stages}; the model has {self.model.layers} layers, so at most that many")
        if stages is not None and stages > len(self.nodes):
            raise ValueError(f"stages is {stages}; there are {len(self.nodes)} nodes, so at most that many")
        pinned = [node for node in self.nodes if node.stage is not None]
        if pinned and len(pinned) != len(self.nodes):
            free = next(node.name for node in self.nodes if node.stage is None)
            raise ValueError(
                f"stage is given for {pinned[0].name} and not for {free}; give it for all nodes or for none"
            )
        if pinned:
            self._check_pins({node.stage for node in pinned if node.stage is not None})
        known = {*names, *(node.site for node in self.nodes), COORDINATOR}
        for ends in self.links:
            for end in ends:
                if end not in known:
                    raise ValueError(f"links: {end!r} is no node and no site")

    def _check_pins(self, stages: set[int]) -> None:
        last = max(stages)
        if self.wish.stages is not None and last != self.wish.stages - 1:
            raise ValueError(f"stages is {self.wish.stages}; the nodes have stages 0 to {last}, so it is {last + 1}")
        if missing := [stage for stage in range(last + 1) if stage not in stages]:
            raise ValueError(f"stage {missing[0]} has no node; stages count from 0 without a gap")
        cut = self.cut
        if cut is not None and (len(cut) != last + 1 or sum(cut) != self.model.layers):
            raise ValueError(
                f"the cut is {list(cut)}; the model has {self.model.layers} layers and the nodes {last + 1} stages"
            )
        if last + 1 > self.model.layers:
            raise ValueError(f"stage {last} of a node: the model has {self.model.layers} layers, so the last is less")

    @property
    def pinned(self) -> bool:
        """Whether the nodes say which stage they replicate."""
        return self.nodes[0].stage is not None

    def link(self, source: Node, target: Node) -> Link | None:
        """The link from one node to another; None if they cannot reach each other."""
        for ends in itertools.product((source.name, source.site), (target.name, target.site)):
            if (found := self.links.get(ends)) is not None:
                return found
        return LOCAL if source.site == target.site else None

    def uplink(self, node: Node) -> Link | None:
        return self.links.get((node.name, COORDINATOR), self.links.get((node.site, COORDINATOR)))

    def downlink(self, node: Node) -> Link | None:
        return self.links.get((COORDINATOR, node.name), self.links.get((COORDINATOR, node.site)))
