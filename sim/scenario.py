"""What a simulated run is made of: the problem that is trained, its terms, its nodes and their links. Plain values."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from farloop.algo.spec import NodeId, RunSpec
from farloop.algo.stages import Part
from farloop.algo.terms import Terms
from farloop.coordinator.decide.roster import EXPIRE_S
from farloop.coordinator.net.sessions import UNLIMITED, RateLimits
from farloop.runtime.ports import Objects
from farloop.sim.network import LinkConditions
from farloop.sim.virtual_time import Process
from farloop.wire.limits import Limits, Timing
from farloop.wire.uplink import UplinkLimit


class Learner(Protocol):
    """What one start of a node trains."""

    @property
    def module(self) -> nn.Module:
        """Whose parameters the run's layout cuts; the run's weights overwrite them."""

    def optimizer(self, terms: Terms) -> Optimizer:
        """The inner optimizer that a node brings; its learning rate is set at every step."""

    def backward(self, samples: Sequence[int], at: float = 0.0) -> float:
        """Put the gradient of a batch on the parameters, in the place of the one before; returns the batch's loss.

        `samples` are positions of the granted stream; where nodes bring their own, the number of the inner step alone.
        `at`: the schedule position, by which a re-warm brings new data.
        """

    def evaluate(self) -> float:
        """The loss of the module as it stands, when this node is asked for it."""


class Problem(Protocol):
    """A model and its data, the same for every node of the run."""

    def begin(self, terms: Terms) -> tuple[RunSpec, list[Tensor]]:
        """The run's spec and the anchors of version 0, fp32 [numel] each."""

    def learner(self, node: NodeId, seed: int) -> Learner:
        """A fresh one; `seed` is that of the node's data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSetup:
    name: NodeId
    seed: int = 0  # of its data: nodes with the same seed see the same samples
    step_s: float = 0.1  # seconds of one inner step
    step_wobble: float = 0.0  # standard deviation of their logarithm
    tokens: int | None = None  # of one inner step; the terms' batch unless given
    tau: int | None = None  # its own overlap; the terms' unless given
    adapt_tau: bool = False  # whether it chooses that by what deltas and updates take
    joins_at: float = 0.0  # virtual seconds
    holds: Part = None  # of the model
    weather: LinkConditions | None = None  # of its link; the scenario's unless given


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run; equal scenarios give equal outcomes."""

    problem: Problem  # what is trained
    terms: Terms
    nodes: tuple[NodeSetup, ...]
    weather: LinkConditions = field(default_factory=LinkConditions)
    seed: int = 0  # of everything that varies: latencies, losses, jobs' durations
    limits: Limits = field(default_factory=Limits)
    timing: Timing = field(default_factory=Timing)
    rates: RateLimits = UNLIMITED  # how often nodes may ask the coordinator
    uplink: UplinkLimit = field(default_factory=UplinkLimit)  # what each end may send
    background_share: float = 1.0  # share of the coordinator's uplink that downloads get while updates are sent
    lane_buffer_s: float = math.inf  # a lane of the coordinator is full while this much of the link's time waits in it
    store: Callable[[Process, random.Random], Objects] | None = None
    """A process's way to an object store, whose URLs are a method and a key; None: all blobs go by sessions."""
    floor_share: float | None = None  # the coordinator's; its own default unless given
    adapt: str = "off"  # what it does about nodes that become slow
    drops_silent: bool = True  # whether windows go on without a node that misses its deadline
    expire_s: float = EXPIRE_S  # how long a node may be away before its samples go to others
    job_s: tuple[float, float] = (0.001, 0.02)
    """Shortest and longest duration of an encoding, a commit's arithmetic, a sync."""
    patience_s: float = 60.0  # virtual seconds without any progress after which the world is called stuck
