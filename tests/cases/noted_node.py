"""A simulated node that notes its sends, merges and steps, and may cheat."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from forged_deltas import ForgingLink, SharedForgeries
from simulated_faults import NodeSetup, Scenario
from torch import Tensor, nn

from farloop.algo.spec import BlobId, BlobKind
from farloop.node import events as ev
from farloop.node.cluster import Decision
from farloop.node.state_dir import NodeState
from farloop.sim.network import Dial
from farloop.sim.node import SimulatedNode
from farloop.sim.virtual_time import Process
from farloop.wire.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """A delta was taken."""

    inner_step: int
    position: float
    fragment: int
    window: int
    base: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """An anchor was merged into the local weights."""

    inner_step: int
    fragment: int
    version: int
    mix: float
    sends: int  # deltas that were taken before


@dataclass(slots=True, kw_only=True)
class SendLog:
    """What one start of a node did, for whoever looks at the outcome."""

    sends: list[Send] = field(default_factory=list)
    merges: list[Merged] = field(default_factory=list)
    settled: list[tuple[BlobId, int | None]] = field(default_factory=list)
    """Deltas, and the version that the node believes them to be part of; None for none."""
    applied: list[tuple[int, int]] = field(default_factory=list)
    """(fragment, version) of every update that was decoded onto an anchor."""
    mismatches: int = 0
    weights: list[Tensor] = field(default_factory=list)
    """Local weights before every inner step, and at the end, fp32 [numel]; none in a frugal run."""
    learning_rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    """Positions of the granted stream that were trained on."""


class NotedNode(SimulatedNode):
    """One start of a node, with all that it did."""

    link: ForgingLink

    def __init__(
        self,
        process: Process,
        setup: NodeSetup,
        scenario: Scenario,
        dial: Dial,
        rng: random.Random,
        state: NodeState,
        on_event: Callable[[object], None],
        board: SharedForgeries,
    ) -> None:
        self.diary = SendLog()
        self.stopped_by: tuple[Reason, str] | None = None
        self._on_event, self._board, self._frugal = on_event, board, scenario.frugal
        super().__init__(process, setup, scenario, dial, rng, state)

    def _new_link(self, process: Process, rng: random.Random, scenario: Scenario, dial: Dial) -> ForgingLink:
        return ForgingLink(process, rng, scenario, dial, self.setup.seed, self.setup.deceit, self._board)

    def drain(self) -> None:
        """As SIGTERM asks."""
        self.executor.request_drain()

    def slow_down(self, factor: float, usual: NodeSetup) -> None:
        """Inner steps take so many times as long as usual from the next one on."""
        self.setup = dataclasses.replace(usual, step_s=usual.step_s * factor)

    def spoil(self, fragment: int) -> None:
        """Flip a bit of an anchor; of another one, where it does not hold that."""
        if self.replica is not None:
            anchors = self.replica.anchors
            anchors.get(fragment, anchors[min(anchors)]).write()[0] += 1.0

    # --- what is noted of it

    def _begin_step(self, decision: Decision) -> None:
        self.diary.samples += decision.samples
        self._note_weights()
        super()._begin_step(decision)

    def _step(self, decision: Decision) -> float:
        self.diary.learning_rates.append(decision.lr)
        self.diary.losses.append(super()._step(decision))
        return self.diary.losses[-1]

    def _leave(self) -> None:
        super()._leave()
        if self.gone:
            self._note_weights()

    def _note_weights(self) -> None:
        if not self._frugal:
            parameters = self._learner.module.parameters()
            self.diary.weights.append(nn.utils.parameters_to_vector(parameters).detach())

    def observe(self, what: ev.Event | ev.Command) -> None:
        super().observe(what)
        self._on_event(what)
        machine, diary = self.machine, self.diary
        match what:
            case ev.Encode(blob=blob):
                assert machine.spec is not None
                self.link.encodes(blob, what.codec, machine.spec.identity.layout.fragments[blob.fragment])
                diary.sends.append(
                    Send(
                        inner_step=machine.inner_steps,
                        position=machine.position,
                        fragment=blob.fragment,
                        window=what.window,
                        base=blob.version,
                        steps=what.steps,
                        tokens=what.tokens,
                    )
                )
            case ev.ForgetBlob(blob=blob, merged_in=merged_in) if blob.kind is BlobKind.DELTA:
                diary.settled.append((blob, merged_in))
                self.link.forget(blob)
            case ev.Apply(fragment=fragment, version=version):
                diary.applied.append((fragment, version))
            case ev.AnchorMismatch():
                diary.mismatches = self.executor.metrics.mismatches
            case ev.Merge(fragment=fragment, mix=mix):
                diary.merges.append(
                    Merged(
                        inner_step=machine.inner_steps,
                        fragment=fragment,
                        version=machine.fragments[fragment].version,
                        mix=mix,
                        sends=len(diary.sends),
                    )
                )
            case ev.Resync():
                diary.applied.clear()  # versions come again, with another content
            case ev.Stop(reason=reason, detail=detail):
                self.stopped_by = (reason, detail)
            case _:
                pass
