"""What a node reports: hello, progress, farewell, isolation and time accounting."""

import dataclasses
import logging
from typing import Final, Literal

from farloop.algo.spec import NodeId
from farloop.node.link import Traffic
from farloop.node.machine import NodeMachine, Stage
from farloop.node.replica import Replica
from farloop.node.sample_cursor import LeaseCursor
from farloop.node.state_dir import NodeState
from farloop.wire import messages as msg

# --- Isolation: the node's work reaches nobody, or nobody else's reaches it
#
# Training goes on, as the method says; but its numbers alone look normal, so the node reports it.


ROUNDS: Final = 3
"""Without a merge, after which it is worth a word: more than a joiner takes to its first, or a late delta."""

AWAY_S: Final = 10.0  # without a session; shorter ones are dialled again, and cost nothing
IsolationKind = Literal["", "without the coordinator", "not merged", "merged alone"]

SENTENCES: Final[dict[IsolationKind, str]] = {
    "": "",
    "without the coordinator": "trains without the coordinator: no session",
    "not merged": f"nothing of it was merged in the last {ROUNDS} rounds",
    "merged alone": f"nobody else was merged in the last {ROUNDS} rounds",
}


class Isolation:
    """What one node has seen of the others. `round_index` is the node's own round."""

    def __init__(self, name: NodeId) -> None:
        self._name = name
        self._own_round: int | None = None
        self._others_round: int | None = None
        self._away_since: float | None = None

    def heard(self, message: msg.Message, round_index: int) -> None:
        """A commit says who is in it."""
        if not isinstance(message, msg.Committed):
            return
        names = {share.node for share in message.merged}
        if self._name in names:
            self._own_round = round_index
        if names - {self._name}:
            self._others_round = round_index

    def how(self, *, trains: bool, connected: bool, round_index: int, now: float) -> IsolationKind:
        """In what way it trains alone now, if it does; to be asked about every second."""
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
            return "without the coordinator"
        if round_index - self._own_round > ROUNDS:
            return "not merged"
        if round_index - self._others_round > ROUNDS:
            return "merged alone"
        return ""


# --- Time accounting


Activity = Literal["training", "farloop", "blocked", "evaluation"]


class TimeAccount:
    """Adds up the seconds of each activity. It runs from the first `turn` on; `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._seconds: dict[Activity, float] = dict.fromkeys(("training", "farloop", "blocked", "evaluation"), 0.0)
        self._activity: Activity | None = None
        self._since = 0.0

    @property
    def activity(self) -> Activity | None:
        """What the time goes into now; None before the first step and after the last."""
        return self._activity

    def turn(self, activity: Activity | None, now: float) -> None:
        """From now on the time goes into something else, or, with None, is not counted."""
        if self._activity is not None:
            self._seconds[self._activity] += now - self._since
        self._activity, self._since = activity, now

    def seconds(self, activity: Activity, now: float) -> float:
        """Seconds of it so far, the present stretch included."""
        running = now - self._since if activity == self._activity else 0.0
        return self._seconds[activity] + running

    def all_seconds(self, now: float) -> dict[Activity, float]:
        """Those of every activity."""
        return {activity: self.seconds(activity, now) for activity in self._seconds}

    def compute_share(self, now: float) -> float:
        """Share of the time that the training loop had for itself, data loading included; farloop's code, waiting and
        evaluation are the rest."""
        wall = sum(self.all_seconds(now).values())
        return self.seconds("training", now) / wall if wall > 0 else 1.0


# --- Log lines of stage transitions


_log = logging.getLogger(__name__)

_WHY: Final[dict[Stage, str]] = {
    "joining": "this node begins anew: it has no anchors of the run",
    "ready": "all fragments are here",
    "training": "a round begins that it takes part in",
    "finishing": "its last round is over: what it has sent is waited for",
    "draining": "it was asked to leave, and finishes what it has begun",
    "finished": "the run is over",
    "left": "nothing that it has sent is open any more",
    "stopped": "it was refused, or cannot go on",
}


class StageLog:
    """Of one node. To be shown its machine whenever something may have changed."""

    def __init__(self) -> None:
        self._stage: Stage = "joining"
        self._connected = False

    def saw(self, machine: NodeMachine) -> None:
        """Write what has changed since the last look."""
        if machine.connected != self._connected:
            self._connected = machine.connected
            if machine.connected:  # its end is told where the reason is known
                told = machine.epoch, machine.stage, machine.schedule.round
                _log.info("session open epoch=%d stage=%s round=%d", *told)
        if machine.stage != self._stage:
            before, self._stage = self._stage, machine.stage
            _log.info(
                "stage is=%s was=%s round=%d step=%d why=%r",
                machine.stage,
                before,
                machine.schedule.round,
                machine.schedule.step,
                _WHY[machine.stage],
            )


# --- Hello, Progress and the farewell
#
# `hello` and `starts_in` are called in the link's thread. State that they share with the training thread is replaced as
# a whole.


PROGRESS_S = 1.0  # between two reports to the coordinator


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
        clock: TimeAccount,
        samples: LeaseCursor,
        state: NodeState,
        device: str,
        fingerprint: str | None,
    ) -> None:
        """`device`: what the node trains on, in words; `fingerprint`: of the run that is wanted, None takes any."""
        self.loss: float | None = None  # of the last inner step
        self.skipped_steps = 0  # inner steps whose gradient was not finite: nothing was stepped
        self.layout: str | None = None  # digest of the model's layout, once there is a model
        self.announced = Announced()  # the link's thread's own
        self._machine, self._clock, self._samples = machine, clock, samples
        self._state, self._device, self._fingerprint = state, device, fingerprint
        self._held: tuple[int, tuple[msg.AnchorRef, ...]] = (0, ())
        """A history, and the anchors of it that are held: together, for the link's thread may ask at any moment."""
        self._starts_in: int | None = None
        self._reported = (0.0, 0)  # when, and the tokens until then

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
            epoch_seen=max(self._state.epoch, machine.epoch),
            anchors=anchors,
            round=machine.schedule.round if machine.schedule.start_round is not None else self._starts_in,
            device=self._device,
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

    def progress(self, moved: Traffic, waiting: str | None, now: float, alone: str = "") -> msg.Progress:
        """How it goes, for the coordinator and the metrics.

        `waiting`: what training stands still for, in words; `alone`: how it trains alone, if it does (`reports.py`).
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

    def _progress_state(self, waiting: str | None) -> msg.NodeState:
        match self._machine.stage:
            case "joining" | "ready" | "draining" as stage:
                return stage
            case "finished" | "left" | "stopped":
                return "finished"
            case "training" | "finishing":
                return "waiting" if waiting else "training"
