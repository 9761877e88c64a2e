"""One member of the run, and which pipeline stages have holders."""

from collections import deque
from collections.abc import Collection, Iterable, MutableMapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from farloop.algo.spec import Fragment, NodeId
from farloop.algo.stages import Part, is_in
from farloop.coordinator.decide.ledger import Ledger
from farloop.wire.machine_info import NOTHING, Inventory
from farloop.wire.messages import AnchorRef, Hello, Progress
from farloop.wire.reasons import Reason

# --- Members

CLOSED_GRACE_S = 1.0  # how long a window waits for a node whose connection closed: long enough to redial
STALL_S = 30.0  # shortest time without progress after which a training node stalls
STALL_STEPS = 10.0  # and in times of its usual inner step
EXPIRE_S = 600.0  # how long a node may be away before its samples go to others
MOST_MEMBERS = 1024  # names that are remembered; beyond it, the node that left first is forgotten

SLOW_TASKS = 10.0  # factor for the first inner step, which compiles the model, and for evaluations
_STEP_TIMES = 15  # measurements that the usual inner step is the median of

Stage = Literal["joining", "ready", "training", "left"]


@dataclass(slots=True, kw_only=True)
class Member:
    name: NodeId
    incarnation: int
    process: int = 0  # of this start, see `Hello`
    holds: Part = None  # of the model
    stage: Stage = "joining"
    session: int | None = None
    start_round: int | None = None  # first round it trains in
    start_slot: int = 0  # and the slot of it that it began with
    gone_at: float | None = None  # when it stops being expected unless it returns; None while connected, or after that
    absent: bool = False  # no window waits for it until it returns or, if it stalled, moves
    reason: Reason = Reason.NONE  # why it is absent, or left
    detail: str = ""  # what it said of that when it left
    frozen: int = 0  # digest of its weights that are not exchanged, once it is ready
    unsaved: int = 0  # and of buffers that no state dict has
    device: str = ""
    inventory: Inventory = NOTHING  # its machine, by its last greeting
    can_evaluate: bool = True  # by its last greeting
    progress: Progress | None = None
    anchors: tuple[AnchorRef, ...] = ()  # what it held when it left
    heard_at: float = 0.0
    steps_per_s: float = 0.0  # inner steps per second of training, without waiting; 0 until known
    progress_at: float = 0.0  # time of its last known step, or of a good reason for none
    awaited_since: float = 0.0  # when it was started, or windows took it in again
    expires_at: float | None = None
    """When its samples go to others unless it returns; None while it is here, or has none."""
    let_go: bool = True  # it uses only samples in the coordinator's record
    evaluates: bool = False  # it was asked last and has not answered
    _measured: tuple[float, int] = (0.0, 0)
    """(seconds without waiting, inner steps) of the report at which the next speed measurement begins, after the first
    step."""
    seconds_per_step: float | None = None  # recent, without waiting; None if unknown
    _most_steps: int = 0  # most inner steps reported: a smaller count is no progress
    _stepped: tuple[float, int] | None = None  # the same for `_step_s`
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=_STEP_TIMES))  # recent seconds per inner step

    @property
    def counts(self) -> bool:
        """Whether new windows expect it."""
        return self.stage == "training" and not self.absent

    def has(self, fragment: Fragment) -> bool:
        return is_in(fragment, self.holds)

    @property
    def stalled(self) -> bool:
        return self.session is not None and self.absent

    @property
    def stalls_at(self) -> float | None:
        """When it stalls without progress; None if it need not make any."""
        if self.session is None or not self.counts:
            return None
        usual = self.seconds_per_step
        limit = max(STALL_S, STALL_STEPS * (usual or 0.0))
        return self.progress_at + limit * (1.0 if usual is not None and not self.evaluates else SLOW_TASKS)

    def connect(self, session: int, hello: Hello, now: float) -> None:
        self.session, self.gone_at, self.absent, self.reason = session, None, False, Reason.NONE
        self.expires_at, self.detail = None, ""
        self.device, self.heard_at, self.progress_at = hello.device, now, now
        self.inventory, self.can_evaluate = hello.inventory, hello.can_evaluate
        if hello.round is not None:
            self.stage = "training"
            self.start_round = hello.round if self.start_round is None else self.start_round
        else:
            self.stage = "joining"

    def start(self, round_index: int, slot: int, now: float) -> None:
        self.stage, self.start_round, self.start_slot = "training", round_index, slot
        self.progress_at, self.awaited_since, self._stepped = now, now, (now, 0)

    def disconnect(self, reason: Reason, now: float, grace_s: float, expire_s: float = EXPIRE_S) -> None:
        """The session ended; it stays expected for `grace_s`, and keeps its samples for `expire_s`."""
        self.session, self.reason = None, reason
        self.gone_at = now + grace_s
        self.expires_at = now + expire_s if self.stage == "training" else None

    def report(self, progress: Progress, now: float) -> None:
        """Handle a report. Speed excludes waiting, or nodes that wait would look slow."""
        if progress.inner_steps > self._most_steps or progress.state != "training":
            self.progress_at = now
        self._most_steps = max(self._most_steps, progress.inner_steps)
        self.progress = progress
        seconds, steps = now - progress.blocked_s, progress.inner_steps
        since, had = self._stepped or (seconds, steps)
        if steps > had and seconds > since:
            self._step_s.append((seconds - since) / (steps - had))
            self.seconds_per_step = median(self._step_s)
        if self._stepped is None or steps > had:
            self._stepped = seconds, steps
        since, had = self._measured
        if not had:
            self._measured = seconds, steps
        elif steps > had and seconds > since:
            latest = (steps - had) / (seconds - since)
            self.steps_per_s = (self.steps_per_s + latest) / 2 if self.steps_per_s else latest
            self._measured = seconds, steps

    def check(self) -> None:
        assert self.session is None or (self.gone_at is None and self.expires_at is None)
        assert not self.stalled or self.reason is Reason.STALLED
        assert self.stage != "training" or self.start_round is not None


# --- Holders of the stages
#
# A stage without a holder raises an alarm and nothing else: its windows stay open, and those of other stages a round
# later (`Ledger.is_too_far_ahead`), until a node that holds it joins. Skipping them would train a model of which one
# part has silently stopped.


def stages_held(members: Iterable[Member], ledger: Ledger) -> dict[int, int]:
    """How many of these members hold each stage of the model."""
    parts = [member.holds for member in members]
    stages = range(ledger.spec.identity.layout.num_stages)
    return {stage: sum(part is None or stage in part for part in parts) for stage in stages}


def too_few_to_begin(ready: Iterable[Member], ledger: Ledger) -> bool:
    """Whether a stage has fewer ready holders than the run needs to start."""
    return min(stages_held(ready, ledger).values()) < ledger.spec.terms.admission.min_nodes


def alarm_unheld_stages(members: Collection[Member], ledger: Ledger, alarms: MutableMapping[str, str]) -> None:
    fragments = ledger.spec.identity.layout.fragments
    waiting = {fragments[index].stage for index in ledger.windows}
    for stage, count in stages_held([m for m in members if m.counts], ledger).items():
        alarms.pop(f"stage {stage}", None)
        if not count and stage in waiting:
            which = ", ".join(str(f.index) for f in fragments if f.stage == stage)
            alarms[f"stage {stage}"] = f"no node that trains holds it: start one; the windows of fragments {which} wait"
