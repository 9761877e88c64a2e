"""What a node reports: hello, progress, farewell, isolation and time accounting."""

import dataclasses
import logging
from typing import Final, Literal

from farloop.algo.spec import NodeId
from farloop.node.link import Traffic
from farloop.node.machine import NodeMachine, Stage
from farloop.node.model.replica import Replica
from farloop.node.send_schedule import LeaseCursor
from farloop.node.state_dir import NodeState
from farloop.wire import messages as msg

# --- Isolation: the node's work reaches no other node, or no other work reaches it
#
# Training goes on, as the method says; but its numbers alone look normal, so the node reports it.

ROUNDS: Final = 3  # rounds without a merge that are reported: more than a joiner, or a late delta, takes
AWAY_S: Final = 10.0  # seconds without a session that are reported
NO_SESSION: Final = "trains without the coordinator: no session"
NOT_MERGED: Final = f"no delta of this node was merged in the last {ROUNDS} rounds"
MERGED_ALONE: Final = f"no other node was merged in the last {ROUNDS} rounds"


class Isolation:
    """Detects that a node trains alone. `round_index` is the node's own round."""

    def __init__(self, name: NodeId) -> None:
        self._name = name
        self._own_round: int | None = None
        self._others_round: int | None = None
        self._away_since: float | None = None

    def on_message(self, message: msg.Message, round_index: int) -> None:
        if not isinstance(message, msg.Committed):
            return
        names = {share.node for share in message.merged}
        if self._name in names:
            self._own_round = round_index
        if names - {self._name}:
            self._others_round = round_index

    def how(self, *, trains: bool, connected: bool, round_index: int, now: float) -> str:
        """How it trains alone now, in words; empty if it does not. Call it about once a second."""
        if connected or not trains:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = now
        if not trains:
            self._own_round = self._others_round = None
            return ""
        if self._own_round is None or self._others_round is None:  # it has only just begun
            self._own_round = round_index if self._own_round is None else self._own_round
            self._others_round = round_index if self._others_round is None else self._others_round
        if self._away_since is not None and now - self._away_since >= AWAY_S:
            return NO_SESSION
        if round_index - self._own_round > ROUNDS:
            return NOT_MERGED
        return MERGED_ALONE if round_index - self._others_round > ROUNDS else ""


# --- Time accounting

Activity = Literal["training", "farloop", "blocked", "evaluation"]


class TimeAccount:
    """Adds up the seconds of each activity. It runs from the first `turn` on; `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._seconds: dict[Activity, float] = dict.fromkeys(("training", "farloop", "blocked", "evaluation"), 0.0)
        self.activity: Activity | None = None  # the current one; None before the first step and after the last
        self._since = 0.0

    def turn(self, activity: Activity | None, now: float) -> None:
        """Switch to another activity; None stops counting."""
        if self.activity is not None:
            self._seconds[self.activity] += now - self._since
        self.activity, self._since = activity, now

    def seconds(self, activity: Activity, now: float) -> float:
        running = now - self._since if activity == self.activity else 0.0
        return self._seconds[activity] + running

    def all_seconds(self, now: float) -> dict[Activity, float]:
        return {activity: self.seconds(activity, now) for activity in self._seconds}

    def compute_share(self, now: float) -> float:
        """Share of the time in the training loop, data loading included; the rest is farloop's code, waiting and
        evaluation."""
        wall = sum(self.all_seconds(now).values())
        return self.seconds("training", now) / wall if wall > 0 else 1.0


# --- Log lines of stage transitions

_log = logging.getLogger(__name__)

_WHY: Final[dict[Stage, str]] = {
    "joining": "this node begins anew: it has no anchors of the run",
    "ready": "all fragments are here",
    "training": "it takes part in the round that begins",
    "finishing": "its last round is over: it waits for the outcome of what it sent",
    "draining": "it was asked to leave, and finishes what it has begun",
    "finished": "the run is over",
    "left": "all that it sent has an outcome",
    "stopped": "it was refused, or cannot continue",
}


class StageLog:
    """Logs changes of a node's stage. Show it the machine whenever something may have changed."""

    def __init__(self) -> None:
        self._stage: Stage = "joining"
        self._connected = False

    def log_changes(self, machine: NodeMachine) -> None:
        if machine.connected != self._connected:
            self._connected = machine.connected
            if machine.connected:  # its end is told where the reason is known
                told = machine.epoch, machine.stage, machine.schedule.round
                _log.info("session open epoch=%d stage=%s round=%d", *told)
        if machine.stage != self._stage:
            moved, at = (machine.stage, self._stage), machine.schedule
            _log.info("stage is=%s was=%s round=%d step=%d why=%r", *moved, at.round, at.step, _WHY[machine.stage])
            self._stage = machine.stage


# --- Hello, Progress and the farewell
#
# `hello` is called and `starts_in` is set in the link's thread. State that they share with the training thread is
# replaced as a whole.

PROGRESS_S = 1.0  # between two reports to the coordinator


def anchors_of(replica: Replica) -> tuple[msg.AnchorRef, ...]:
    return tuple(
        msg.AnchorRef(fragment=i, version=version, digest=replica.digests[i])
        for i, version in replica.versions.items()
        if version >= 0
    )


def all_held(held: msg.Held, replica: Replica | None, samples: LeaseCursor) -> msg.Held:
    """The machine's answer with anchors and samples filled in."""
    anchors = () if replica is None else anchors_of(replica)
    return dataclasses.replace(held, anchors=anchors, unused=samples.unused, granted_to=samples.granted_to)


class Announced:
    """The newest announced commit of each fragment. Used in one thread, which hears it first; it outlives the session,
    whether or not the bytes of the update came."""

    def __init__(self) -> None:
        self._history = 0
        self._newest: dict[int, msg.AnchorRef] = {}

    def beside(
        self, history: int, anchors: tuple[msg.AnchorRef, ...]
    ) -> tuple[int, tuple[msg.AnchorRef, ...], tuple[msg.AnchorRef, ...]]:
        """For a greeting: the history, the anchors held of it, and the announced commits."""
        if not anchors:  # what is known is what was told
            history = self._history
        told = tuple(ref for _, ref in sorted(self._newest.items())) if self._history == history else ()
        return history, anchors, told

    def on_message(self, message: msg.Message) -> None:
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
    """Makes one node's messages about itself. Sends nothing."""

    def __init__(
        self,
        machine: NodeMachine,
        clock: TimeAccount,
        samples: LeaseCursor,
        state: NodeState,
        device: str,
        fingerprint: str | None,
        *,
        can_evaluate: bool = True,
    ) -> None:
        """`device`: what the node trains on, in words; `fingerprint`: of the run to join; None joins any;
        `can_evaluate`: whether its loop can measure the loss."""
        self.loss: float | None = None  # of the last inner step
        self.skipped_steps = 0  # inner steps that changed no weight: no gradient, or one that was not finite
        self.layout: str | None = None  # digest of the model's layout, once there is a model
        self.saved: msg.SavedAnchors | None = None  # what lies on disk, until this start of the node has begun
        self.announced = Announced()  # used by the link's thread
        self._machine, self._clock, self._samples = machine, clock, samples
        self._state, self._device, self._fingerprint = state, device, fingerprint
        self._can_evaluate = can_evaluate
        self._held: tuple[int, tuple[msg.AnchorRef, ...]] = (0, ())
        """A history and its anchors, replaced together: the link's thread may read them at any moment."""
        self.starts_in: int | None = None  # round of a Start: the link's thread knows it before the machine
        self._reported = (0.0, 0)  # time of the last report, and tokens until then

    def hold(self, replica: Replica) -> None:
        self._held = (self._machine.history, anchors_of(replica))

    def begin_again(self, history: int) -> None:
        """The run was rewound: no anchor of this history is held, and no round was started in it."""
        self.starts_in = None
        self._held = (history, ())

    def hello(self) -> msg.Hello:
        """The first message of a session."""
        machine = self._machine
        run = machine.run  # before its epoch, for the training thread changes them in the other order
        history, anchors, announced = self.announced.beside(*self._held)
        return msg.Hello(
            protocol_min=msg.PROTOCOL_VERSION,
            protocol_max=msg.PROTOCOL_VERSION,
            node=machine.name,
            incarnation=machine.incarnation,
            fingerprint=self._fingerprint if machine.spec is None else machine.spec.identity.fingerprint(),
            layout=self.layout,
            epoch_seen=machine.epoch,
            anchors=anchors,
            round=machine.schedule.round if machine.schedule.start_round is not None else self.starts_in,
            device=self._device,
            history=history,
            announced=announced,
            holds=machine.holds,
            saved=self.saved,
            can_evaluate=self._can_evaluate,
            process=self._state.process,
            epoch_run=run,
        )

    def is_due(self, now: float) -> bool:
        return now - self._reported[0] >= PROGRESS_S

    def reported(self, now: float) -> None:
        self._reported = (now, self._machine.tokens)

    def progress(self, moved: Traffic, waiting: str | None, now: float, alone: str = "") -> msg.Progress:
        """A report for the coordinator and the metrics.

        `waiting`: what training waits for, in words; `alone`: how it trains alone, if it does.
        """
        machine = self._machine
        since, tokens = self._reported
        rate = (machine.tokens - tokens) / (now - since) if since and now > since else 0.0
        return msg.Progress(
            state=self._progress_state(waiting),
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
            detail=waiting or alone,
            skipped_turns=machine.skipped_turns,
            samples_left=self._samples.remaining if machine.takes_samples else None,
            sent=moved.up,
            received=moved.down,
            skipped_steps=self.skipped_steps,
            tau=machine.chosen_tau if machine.chooses_tau else 0,
        )

    def farewell(self, leave: msg.Leave) -> msg.Leave:
        """The Leave with the anchors that this node holds."""
        return dataclasses.replace(leave, anchors=self._held[1])

    def _progress_state(self, waiting: str | None) -> msg.NodeState:
        match self._machine.stage:
            case "joining" | "ready" | "draining" as stage:
                return stage
            case "finished" | "left" | "stopped":
                return "finished"
            case "training" | "finishing":
                return "waiting" if waiting else "training"
