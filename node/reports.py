"""What a node tells of itself: who it is and what it holds (Hello), how it goes (Progress), and its good-bye.

`hello` and `starts_in` are called in the link's thread. All that they share with the training thread is replaced as a
whole.
"""

import dataclasses

from farloop.node.clock import Clock
from farloop.node.cluster import Cluster
from farloop.node.leases import LeaseCursor
from farloop.node.machine import NodeMachine
from farloop.node.memory import Memory
from farloop.node.moved import Moved
from farloop.node.replica import Replica
from farloop.wire import messages as msg

PROGRESS_S = 1.0
"""Between two reports to the coordinator."""


def anchors_of(replica: Replica) -> tuple[msg.AnchorRef, ...]:
    """What a replica can prove that it holds."""
    return tuple(
        msg.AnchorRef(fragment=i, version=version, digest=replica.digests[i])
        for i, version in replica.versions.items()
        if version >= 0
    )


def all_held(held: msg.Held, replica: Replica | None, samples: LeaseCursor) -> msg.Held:
    """What a machine holds, with what it does not know of."""
    anchors = () if replica is None else anchors_of(replica)
    return dataclasses.replace(held, anchors=anchors, unused=samples.unused, granted_to=samples.granted_to)


class Announced:
    """The newest commit of each fragment that the coordinator told of. For one thread, which hears before all others:
    what it was told outlives the session, whether or not the bytes of the update came."""

    def __init__(self) -> None:
        self._history = 0
        self._newest: dict[int, msg.AnchorRef] = {}

    def beside(
        self, history: int, anchors: tuple[msg.AnchorRef, ...]
    ) -> tuple[int, tuple[msg.AnchorRef, ...], tuple[msg.AnchorRef, ...]]:
        """For a greeting: the history that it speaks of, the anchors that are held of it, and what was told of it."""
        if not anchors:  # what is known is what was told
            history = self._history
        told = tuple(ref for _, ref in sorted(self._newest.items())) if self._history == history else ()
        return history, anchors, told

    def heard(self, message: msg.Message) -> None:
        """A control message came."""
        match message:
            case msg.Welcome(history=history) if history != self._history:
                self._history = history
                self._newest.clear()
            case msg.Committed(fragment=fragment, version=version, anchor_digest=digest):
                if fragment not in self._newest or self._newest[fragment].version < version:
                    self._newest[fragment] = msg.AnchorRef(fragment=fragment, version=version, digest=digest)
            case _:
                pass


class Reports:
    """One node's words. Sends nothing itself."""

    def __init__(
        self,
        machine: NodeMachine,
        clock: Clock,
        samples: LeaseCursor,
        memory: Memory,
        cluster: Cluster,
        fingerprint: str | None,
    ) -> None:
        """`fingerprint`: of the run that is wanted; None takes any."""
        self.loss: float | None = None
        """Of the last inner step."""
        self.skipped_steps = 0
        """Inner steps whose gradient was not finite: nothing was stepped."""
        self.layout: str | None = None
        """Digest of the model's layout, once there is a model."""
        self.announced = Announced()
        """The link's thread's own."""
        self._machine, self._clock, self._samples = machine, clock, samples
        self._memory, self._cluster, self._fingerprint = memory, cluster, fingerprint
        self._held: tuple[int, tuple[msg.AnchorRef, ...]] = (0, ())
        """A history, and the anchors of it that are held: together, for the link's thread may ask at any moment."""
        self._starts_in: int | None = None
        self._reported = (0.0, 0)
        """When, and the tokens until then."""

    def hold(self, replica: Replica) -> None:
        """These are the anchors that are held now."""
        self._held = (self._machine.history, anchors_of(replica))

    def begin_again(self, history: int) -> None:
        """The run was wound back: nothing is held of this history yet, and no round was started in it."""
        self._starts_in = None
        self._held = (history, ())

    def starts_in(self, index: int) -> None:
        """A Start named this round: the link's thread knows of it before the machine does."""
        self._starts_in = index

    def hello(self) -> msg.Hello:
        """The first message of a session."""
        machine = self._machine
        history, anchors, announced = self.announced.beside(*self._held)
        return msg.Hello(
            protocol_min=msg.PROTOCOL_VERSIONS[0],
            protocol_max=msg.PROTOCOL_VERSIONS[1],
            node=machine.name,
            incarnation=machine.incarnation,
            fingerprint=self._fingerprint if machine.spec is None else machine.spec.identity.fingerprint(),
            layout=self.layout,
            epoch_seen=max(self._memory.epoch, machine.epoch),
            anchors=anchors,
            round=machine.schedule.round if machine.schedule.start_round is not None else self._starts_in,
            device=self._cluster.describe(),
            history=history,
            announced=announced,
            holds=machine.holds,
            begins=True,
        )

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next report."""
        return now - self._reported[0] >= PROGRESS_S

    def reported(self, now: float) -> None:
        """That was one; the next will measure from here."""
        self._reported = (now, self._machine.tokens)

    def progress(self, moved: Moved, waiting: str | None, now: float, alone: str = "") -> msg.Progress:
        """How it goes, for the coordinator and the metrics.

        `waiting`: what training stands still for, in words; `alone`: how it trains alone, if it does (`alone.py`).
        """
        machine = self._machine
        since, tokens = self._reported
        rate = (machine.tokens - tokens) / (now - since) if since and now > since else 0.0
        return msg.Progress(
            state=self._state(waiting),
            position=machine.position,
            round=machine.schedule.round,
            inner_steps=machine.inner_steps,
            tokens=machine.tokens,
            loss=self.loss,
            tokens_per_s=rate,
            compute_share=self._clock.compute_share(now),
            blocked_s=self._clock.seconds("blocked", now),
            lost_steps=machine.lost_steps,
            sample_watermark=self._samples.watermark,
            bytes_up=moved.up.exchanged,
            bytes_down=moved.down.exchanged,
            bytes_state=moved.state,
            detail=waiting or alone,
            skipped_turns=machine.skipped_turns,
            samples_left=self._samples.remaining if machine.takes_samples else None,
            sent=moved.up,
            received=moved.down,
            skipped_steps=self.skipped_steps,
        )

    def farewell(self, leave: msg.Leave) -> msg.Leave:
        """With the anchors, which prove what this node holds."""
        return dataclasses.replace(leave, anchors=self._held[1])

    def _state(self, waiting: str | None) -> msg.NodeState:
        match self._machine.stage:
            case "joining" | "ready" | "draining" as stage:
                return stage
            case "finished" | "left" | "stopped":
                return "finished"
            case "training" | "finishing":
                return "waiting" if waiting else "training"
