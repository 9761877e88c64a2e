"""Visitors of a storm's run: slow joiners, silent and lying peers, floods, and second starts on the state directory.

They are processes without a supervisor and end with their fault. Trials of damage to a copy of the state continue
after their fault.
"""

import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from farloop.chaos import faults as files
from farloop.chaos.faults import copy_truncated, examine, second_start, small_enough
from farloop.chaos.journal_referee import Journal
from farloop.chaos.lying_peers import LYING, SILENT
from farloop.chaos.processes import Child, Children, free_port, write_coordinator, write_node
from farloop.chaos.relay import Link, Relay
from farloop.chaos.storm_plan import JOINER, Kind
from farloop.config.admin_client import asked
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.monitoring.status import Status

THIN: Final = Link.parse("64kbit/50ms")
"""The link of a joiner: a snapshot takes minutes, and updates come faster than it can take them."""

RELEASE_S: Final = 90.0
"""A run that a liar holds goes on by itself after a minute, if a node contradicts it. Nodes that were all killed just
before cannot: then the operator is needed."""

_OVER: Final = object()

GUESTS: Final[frozenset[Kind]] = frozenset(
    {"slow_joiner", "silent_peer", "lying_peer", "descriptor_flood", "second_start"}
)
"""Kinds of faults that are processes of their own."""

DESCRIPTORS: Final = 1024
"""Soft limit of open files that a storm's processes start with: what most systems give a service."""

_PEERS: Final[Mapping[Kind, tuple[str, ...]]] = {
    "silent_peer": tuple(SILENT),
    "lying_peer": tuple(LYING),
    "descriptor_flood": ("flood",),
}


@contextmanager
def few_descriptors() -> Iterator[None]:
    """Processes that are started within the block inherit `DESCRIPTORS`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@dataclass(slots=True)
class Guests:
    """All of one storm, in a folder of their own."""

    out: Path
    bind: int  # the coordinator's port
    settings: Callable[[], Mapping[str, object]]  # of the run
    children: Children
    wrong: Callable[[str], None]  # told each finding, in a sentence
    seed: int
    relay: Relay = field(init=False)  # in front of joiners; to be run by the storm
    unlocked: bool = field(init=False, default=False)
    """Whether a second start goes on without the lock: then either coordinator may stop."""
    lockless: int | None = field(init=False, default=None)
    """Process id of the coordinator whose lock was removed. It stops at its next append: after the fault, maybe."""
    released: int = field(init=False, default=0)  # holds that ended by `farloop release`
    _held_since: float | None = field(init=False, default=None)
    _dice: random.Random = field(init=False)
    _trials: list[Iterator[None]] = field(init=False, default_factory=list)
    _begun: dict[Kind, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.relay = Relay(target_host="127.0.0.1", target_port=self.bind, link=THIN)
        self._dice = random.Random(f"farloop guests {self.seed}")
        (self.out / "trials").mkdir(parents=True)

    def begin(self, kind: Kind, coordinator: Callable[[], Child]) -> str:
        """Let one come; what it is, in a few words."""
        number = self._begun[kind] = self._begun.get(kind, 0) + 1
        match kind:
            case "slow_joiner":
                toml = write_node(self.out, JOINER, self.relay.port, threads=1, data=files.DATA)
                self.children.start(kind, ["node", str(toml)], threads=1)
                return str(THIN)
            case "second_start":
                self.unlocked = number % 2 == 0
                if self.unlocked:
                    (self.out.parent / "state" / "lock").unlink(missing_ok=True)
                    self.lockless = coordinator().process.pid
                http = free_port()
                toml = self._toml(self.out.parent / "state", http)
                trial = second_start(
                    self.children, kind, coordinator, http, toml, locked=not self.unlocked, wrong=self.wrong
                )
                self._trials.append(trial)
                return "the lock is removed" if self.unlocked else "the lock is held"
            case _:
                behaviours = _PEERS[kind]
                behaviour = behaviours[(number + self.seed) % len(behaviours)]
                command = ("-m", "farloop.chaos.lying_peers")
                self.children.start(kind, [behaviour, str(self.bind)], threads=1, command=command)
                return behaviour

    def end(self, kind: Kind) -> None:
        """Its time is over."""
        for child in self.children:
            if child.name == kind and child.running:
                child.kill()
        if kind == "slow_joiner":
            shutil.rmtree(self.out / "nodes" / JOINER, ignore_errors=True)
        if kind == "second_start":
            self.unlocked = False

    def damage(self, whole: Journal) -> str:
        """Begin a trial of damage to a copy of the state; the coordinator is dead. Where it was cut, in words."""
        number = self._begun["truncate_file"] = self._begun.get("truncate_file", 0) + 1
        state, copy = self.out.parent / "state", self.out / "trials" / f"{number}"
        if not small_enough(state):
            return "left out: the state folder is too large to copy"
        cut = copy_truncated(state, copy, self._dice)
        self._trials.append(examine(self.children, f"trial-{number}", copy, cut, whole, self._toml, self.wrong))
        return cut

    def turn(self, status: Status | None, state: Path, now: float) -> None:
        """Advance all trials; and be the operator of a run that is held by a liar's word alone."""
        held = status is not None and status["run"]["state"] == "holding" and "node x-" in str(status["alarms"])
        self._held_since = (self._held_since if self._held_since is not None else now) if held else None
        if self._held_since is not None and now - self._held_since > RELEASE_S:
            self._held_since = None
            self._release(state, {"do": "release"})
        for trial in tuple(self._trials):
            if next(trial, _OVER) is _OVER:
                self._trials.remove(trial)

    def _release(self, state: Path, request: Mapping[str, Any]) -> None:
        try:
            asked(request, state)
            self.released += 1
        except CommandError as error:
            if error.code == ExitCode.UNREACHABLE:  # it is dead now, and holds nothing when it is back
                return
            liars = re.findall(r"--node (\S+)", str(error))
            if "nodes" not in request and liars and all(name.startswith("x-") for name in liars):
                return self._release(state, {**request, "nodes": liars})
            self.wrong(f"a held run cannot be released: {error}")

    @property
    def busy(self) -> bool:
        """Whether a trial goes on."""
        return bool(self._trials)

    def _toml(self, state: Path, http: int) -> Path:
        """Settings of a coordinator over this folder, that no node knows of."""
        path, run = self.out / f"coordinator-{http}.toml", {**files.RUN, **self.settings()}
        return write_coordinator(path, bind=free_port(), http=http, state=state, run=run, data=files.DATA)
