"""One storm: a run of real processes on this machine that must finish despite the faults of a plan.

The daemons do not know of it. Nodes dial through relays, as over a wide-area link. Processes are killed and stopped by
signals, a file fills the disk, and killed processes are restarted as a supervisor would.
"""

import heapq
import math
import random
import re
import resource
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from farloop.config.admin_client import asked
from farloop.config.exit_codes import CommandError, ExitCode
from farloop.lab.bench.http_store import ObjectServer
from farloop.lab.chaos import faults as files
from farloop.lab.chaos.faults import Ballast, copy_truncated, examine, second_start, small_enough
from farloop.lab.chaos.journal_referee import Journal, Tail, Unreadable, read_journal
from farloop.lab.chaos.lying_peers import LYING, SILENT
from farloop.lab.chaos.recovery_watch import Book, History, Memory, Recoveries, in_words, is_expected, trains
from farloop.lab.chaos.storm_plan import COORDINATOR, JOINER, KINDS, OF_NODES, OF_STORE, STORE, Fault, Kind
from farloop.local.processes import Child, Children, free_port, page, write_coordinator, write_node
from farloop.local.relay import Link, Relay, RelayThread
from farloop.monitoring.status import Status, finished_status

# --- Visitors: joiners, silent and lying peers, floods, and second starts, which end with their fault; trials of damage
# to a copy of the state, which continue after it

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
    more: Mapping[str, str]  # settings of a coordinator
    children: Children
    wrong: Callable[[str], None]  # told each finding, in a sentence
    seed: int
    relay: Relay = field(init=False)  # in front of joiners; to be run by the storm
    unlocked: bool = field(init=False, default=False)
    """Whether a second start goes on without the lock: then either coordinator may stop."""
    lockless: int | None = field(init=False, default=None)
    """Process id of the coordinator whose lock was removed. It stops at its next append: after the fault, maybe."""
    released: int = field(init=False, default=0)  # holds that ended by `farloop run release`
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
                command = ("-m", "farloop.lab.chaos.lying_peers")
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
        return write_coordinator(
            path, bind=free_port(), http=http, state=state, run=run, data=files.DATA, more=self.more
        )


# --- The storm

STEP_S = 0.25  # what an inner step takes at least, so that a run lasts as long as its storm
FASTEST_STEP_S = 0.02  # ... and where time was lost to faults.
STORE_S = 5.0  # after a store is back, in which a start that it failed may still end
SLOW_BYTES_PER_S = 50e3  # of a store that is slow

GATHER_STEP_S, GATHER_STEPS = 0.5, 240
"""The run's steps in which everybody comes back after the last fault: as many as fit into `GATHER_S`."""

TICK_S = 0.1

MEMORY_EVERY_S = 2.0  # between two samples of memory, and two looks at what the coordinator has appended to its journal

LINE_EVERY_S = 10.0
POSTPONE_S, PATIENCE_S = 1.0, 60.0
"""How long a fault is put off at a time while its target has not recovered from the last one, and at most."""

AGAIN_S = 1.0  # after which a process that ended by itself is started again

START_S, GATHER_S, END_S, TRIALS_S = 120.0, 180.0, 300.0, 400.0
"""How long the run may take to begin, to have all nodes back after the last fault, and, beside what the storm itself
took, to end; and how long the last trials of damage may take."""

LAST_STEPS = 240  # of the run, at most, once nothing goes wrong any more
MAX_SURPRISES = 40  # findings, before the storm is given up

GOOD_LINK = Link.parse("1gbit/1ms")
BAD_LINKS = tuple(map(Link.parse, ("1mbit/200ms", "3mbit/100ms", "10mbit/300ms")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    seconds: float
    faults: Counter[Kind]
    committed: int
    lost: int
    forks: int
    digests_equal: bool | None  # None: the run did not come to its end
    recovery_s: dict[str, list[float]]
    memory: dict[str, list[tuple[float, int]]]
    released: int = 0  # holds that the operator ended: a liar's word that no node could contradict
    problems: list[str]  # what should not have been, beside the numbers; a sentence each
    interrupted: bool = False

    @property
    def wrong(self) -> list[str]:
        """What is wrong with it: a few sentences."""
        found = [f"{self.lost} versions lost"] * bool(self.lost) + [f"{self.forks} forks"] * bool(self.forks)
        return found + ["the last digests are not equal everywhere"] * (self.digests_equal is False) + self.problems[:3]

    @property
    def good(self) -> bool:
        return not self.wrong

    def figures(self) -> dict[str, Any]:
        kinds: list[tuple[str, Kind]] = [*zip(KINDS, KINDS, strict=True), ("node_back", "kill_node")]
        measured = [s for what, seconds in self.recovery_s.items() if what != "node_back" for s in seconds]
        return {
            "faults": {kind: self.faults[kind] for kind in KINDS if self.faults[kind]},
            "committed": self.committed,
            "lost": self.lost,
            "forks": self.forks,
            "digests_equal": self.digests_equal,
            "recovery_s_mean": statistics.fmean(measured) if measured else None,
            "recovery_s_max": max(measured, default=None),
            "recovery_s": {
                what: {
                    "times": self.faults[kind],
                    "count": len(seconds := self.recovery_s.get(what, [])),
                    "mean": statistics.fmean(seconds) if seconds else None,
                    "max": max(seconds, default=None),
                }
                for what, kind in kinds
                if self.faults[kind]
            },
            "rss_bytes": {
                name: {"first": sizes[min(len(sizes) - 1, SETTLED)], "last": sizes[-1], "max": max(sizes)}
                for name, sizes in ((name, [size for _, size in series]) for name, series in self.memory.items())
            },
            "released": self.released,
            "problems": self.problems,
            "good": self.good,
            "interrupted": self.interrupted,
        }


SETTLED: Final = 15  # samples until the memory of a process has settled


class Stopped(Exception):
    """A person asked to stop, or the run came to no end."""


class Storm:
    """Everything of one storm. `run` is the only way in."""

    def __init__(
        self,
        *,
        out: Path,
        seed: int,
        seconds: float,
        nodes: Sequence[str],
        faults: Sequence[Fault],
        store: ObjectServer | None,
        say: Callable[[str], None],
        stopped: Sequence[int],
    ) -> None:
        """`stopped`: not empty once a person asked to stop."""
        self.out, self.seed, self.seconds, self.nodes = out, seed, seconds, nodes
        self.faults, self.store, self.say, self.stopped = faults, store, say, stopped
        self.state_dir = out / "state"
        self._bind, self._http = free_port(), free_port()
        self._history, self._recoveries = History(), Recoveries()
        self._memory, self._ballast = Memory(out / "memory.csv"), Ballast(self.state_dir)
        self._tail = Tail(self.state_dir)
        self._books = {name: Book(out / f"anchors-{name}.jsonl") for name in nodes}
        self._relays = {name: Relay(target_host="127.0.0.1", target_port=self._bind, link=GOOD_LINK) for name in nodes}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._down = set[str]()  # killed, and not started again yet
        self._hit = set[str]()  # targets of the faults that last
        self._ended: dict[str, tuple[float, int]] = {}
        """When the last fault of a target ended, and the commits by then."""
        self._begun, self._storm_ends = time.monotonic(), 0.0
        self._ending = False
        self._coordinator_starts = False  # whether its last process has not answered yet
        self._status: Status | None = None
        self._problems: list[str] = []
        self._happened = Counter[Kind]()
        self._due_memory = self._due_line = 0.0

    def run(self) -> Outcome:
        """Begin the run, let everything happen to it, and see it to its end. What was seen until then if it is stopped.

        Raises CommandError: a process cannot be started. Nothing is left behind.
        """
        interrupted = True
        with suppress(Stopped), ExitStack() as stack:
            (self.out / "guests").mkdir()
            others = stack.enter_context(Children(self.out / "guests", stop_s=5.0))
            self._guests = Guests(
                self.out / "guests", self._bind, lambda: self._settings, self._more, others, self._found, self.seed
            )
            self._links = RelayThread(*self._relays.values(), self._guests.relay)
            stack.enter_context(few_descriptors())
            stack.callback(self._memory.close)
            stack.callback(self._ballast.remove)
            stack.enter_context(self._links)
            self._children = stack.enter_context(Children(self.out, last=COORDINATOR, stop_s=15.0))
            files.set_pace(self.out, STEP_S)
            self._start(COORDINATOR)
            for name in self.nodes:
                self._start(name)
            self._until("the run begins", lambda: min(self._versions) > 0, START_S)
            self._weather()
            if self._gather():
                self._end()
            interrupted = False
        return self._outcome(interrupted)

    def _weather(self) -> None:
        begins = self._now
        ends = self._storm_ends = begins + self.seconds
        for fault in self.faults:
            self._at(begins + fault.at_s, partial(self._begin, fault))
        while self._now < ends:
            self._turn()
            steps = self._storm_steps - (self._status["position"] if self._status else 0.0)
            # Whoever is waited for costs time, which is made up for: these steps are due at the storm's end.
            files.set_pace(self.out, min(STEP_S, max(FASTEST_STEP_S, (ends - self._now) / max(1.0, steps))))

    def _gather(self) -> bool:
        """Everybody is back once nothing goes wrong any more."""
        files.set_pace(self.out, GATHER_STEP_S)
        self._until("the last faults end", lambda: not self._hit and not self._guests.busy, TRIALS_S, fatal=False)
        return self._until("all nodes train again", self._all_train, GATHER_S, fatal=False)

    def _end(self) -> None:
        self._ending = True
        files.set_pace(self.out, 0.0)
        self.say("no more faults: the run continues to its end")
        self._shorten()
        over = self._until(
            "the run ends", lambda: not any(c.running for c in self._children), END_S + self.seconds, fatal=False
        )
        for child in self._children if over else ():
            if child.process.returncode:
                self._problems.append(f"{child.name} ended with {child.process.returncode}: {child.last_words()}")

    def _shorten(self) -> None:
        """Where faults took so much time that many steps are left, the run gets fewer: nothing more can go wrong."""
        assert self._status is not None
        near = int(self._status["position"]) + LAST_STEPS
        if near >= self._status["run"]["steps"]:
            return
        if why := files.shorten(self.state_dir, near):
            self._found(f"the run cannot be shortened to {near} steps: {why}")
        else:
            self.say(f"the run is shortened to {near} steps")

    def _until(self, what: str, condition: Callable[[], bool], timeout_s: float, *, fatal: bool = True) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                self._problems.append(f"not within {timeout_s:g} s: {what} ({in_words(self._status)})")
                if fatal:
                    raise Stopped
                return False
            self._turn()
        return True

    def _turn(self) -> None:
        """A tenth of a second of everything."""
        if self.stopped:
            raise Stopped
        while self._agenda and self._agenda[0][0] <= self._now:
            heapq.heappop(self._agenda)[2]()
        self._supervise()
        self._guests.turn(self._status, self.state_dir, self._now)
        self._observe()
        time.sleep(TICK_S)

    def _observe(self) -> None:
        if self._now >= self._due_memory:
            self._due_memory = self._now + MEMORY_EVERY_S
            self._memory.sample(self._now, [(c.name, c.process.pid) for c in self._children if c.running])
            self._history.appended(self._tail.read())
        self._read_books()
        if (status := page(self._http)) is not None:
            self._status, self._coordinator_starts = status, False
            self._history.on_status(status)
            self._recoveries.on_status(status, self._now)
        if self._now >= self._due_line:
            self._due_line = self._now + LINE_EVERY_S
            self._print(in_words(self._status))

    def _read_books(self) -> None:
        for book in self._books.values():
            for fragment, version, digest in book.read():
                self._history.record(fragment, version, digest)

    # --- Faults

    def _begin(self, fault: Fault) -> None:
        kind, target, since = fault.kind, fault.target, self._now
        # A trial reads the store more than once, and compares.
        apart = (kind == "truncate_file" and STORE in self._hit) or (target == STORE and self._guests.busy)
        if apart or not self._is_back(target):
            if since + POSTPONE_S + fault.lasts_s < self._storm_ends:
                self._at(since + POSTPONE_S, partial(self._begin, fault))
            return
        self._happened[kind] += 1
        self._hit.add(target)
        self._print(f"{kind} {target}, for {fault.lasts_s:.1f} s")
        if kind in GUESTS:
            self._print(f"{kind}: {self._guests.begin(kind, lambda: self._children[COORDINATOR])}")
            self._at(self._now + fault.lasts_s, partial(self._finish, fault))
            return
        self._recoveries.forget(target)
        was_expected = is_expected(self._status, target)
        match kind:
            case "kill_node":
                self._kill(target)
            case "kill_coordinator":
                self._kill(target)
                self._recoveries.await_commit(kind, target, since, self._compare_journal().newest)
            case "truncate_file":
                self._kill(target)
                self._print(f"{kind}: {self._guests.damage(self._compare_journal())}")
            case "stop_node" | "stop_coordinator":
                self._signal(target, signal.SIGSTOP)
            case "cut_link":
                self._links.cut(self._relays[target])
            case "slow_link":
                self._links.change(self._relays[target], BAD_LINKS[self._happened[kind] % len(BAD_LINKS)])
            case "fill_disk":
                self._ballast.fill()
            case _ if self.store is not None and kind in OF_STORE:
                self.store.fault = lambda method, path: OF_STORE[kind]
                self.store.bytes_per_s = SLOW_BYTES_PER_S if kind == "store_slow" else float("inf")
        if kind == "kill_node" and was_expected:
            self._recoveries.await_commit(kind, target, since, self._versions, lambda merged: target not in merged)
        self._at(self._now + fault.lasts_s, partial(self._finish, fault))

    def _is_back(self, target: str) -> bool:
        """Whether it has recovered from its last fault, or had time to: a slow machine starts processes slowly."""
        if target in self._hit | self._down or (target == COORDINATOR and self._coordinator_starts):
            return False
        ended_at, commits = self._ended.get(target, (-PATIENCE_S, 0))
        if self._now - ended_at >= PATIENCE_S or self._status is None:
            return True
        if target == COORDINATOR:
            return self._status["commits"] > commits
        return target not in self.nodes or any(n["name"] == target and trains(n) for n in self._status["nodes"])

    def _finish(self, fault: Fault) -> None:
        kind, target = fault.kind, fault.target
        self._hit.discard(target)
        self._ended[target] = self._now, self._status["commits"] if self._status else 0
        due: Callable[[list[str]], bool] = (lambda merged: target in merged) if kind in OF_NODES else lambda _: True
        match kind:
            case "kill_node" | "kill_coordinator" | "truncate_file":
                self._start_again(target)
            case "stop_node" | "stop_coordinator":
                self._signal(target, signal.SIGCONT)
            case "cut_link":
                self._links.heal(self._relays[target])
            case "slow_link":
                self._links.change(self._relays[target], GOOD_LINK)
            case "fill_disk":
                self._ballast.remove()
            case _ if self.store is not None and kind in OF_STORE:
                self.store.fault, self.store.bytes_per_s = lambda method, path: "", float("inf")
            case _:
                self._guests.end(kind)
                self._start_again(target)
        if kind != "kill_coordinator":
            what = "node_back" if kind == "kill_node" else kind
            self._recoveries.await_commit(what, target, self._now, self._versions, due)

    def _compare_journal(self) -> Journal:
        """While the coordinator is dead: all that was told must be in what it leaves."""
        self._read_books()
        try:
            journal = read_journal(self.state_dir)
        except Unreadable as error:
            self._found(f"the journal cannot be read: {error}")
            return Journal({}, ())
        self._history.on_journal(journal)
        return journal

    # --- Processes

    def _start(self, name: str) -> Child:
        if name == COORDINATOR:
            self._coordinator_starts = True
            run = {**files.RUN, **self._settings}
            file, at, http = self.out / "run.toml", self._bind, self._http
            write_coordinator(file, bind=at, http=http, state=self.state_dir, run=run, data=files.DATA, more=self._more)
            return self._children.start(name, ["coordinator", str(file)], threads=1)
        file = write_node(self.out, name, self._relays[name].port, threads=1, data=files.DATA)
        arguments = [str(file), str(self.out / files.PACE), str(self._books[name].path)]
        return self._children.start(name, arguments, threads=1, command=("-m", "farloop.lab.chaos.storm_node"))

    def _kill(self, name: str) -> None:
        self._down.add(name)
        self._children[name].kill()

    def _signal(self, name: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self._children[name].process.send_signal(number)

    def _supervise(self) -> None:
        """Who ended by itself was not asked to: that is told, and it is started again as a scheduler would."""
        for child in self._children:
            if child.running or child.name in self._down or (self._ending and child.process.returncode == 0):
                continue
            code = child.process.returncode
            self._down.add(child.name)
            no_store = STORE in self._hit or self._now - self._ended.get(STORE, (-math.inf, 0))[0] < STORE_S
            full = child.name == COORDINATOR and code == ExitCode.STORAGE and (self._ballast.lies or no_store)
            # One of two coordinators on a folder without a lock has to stop: the end of the fault starts it again.
            stops = child.name == COORDINATOR and code in (ExitCode.REFUSED, ExitCode.STORAGE)
            fenced = stops and (self._guests.unlocked or child.process.pid == self._guests.lockless)
            if fenced:
                self._print(f"{child.name} has noticed the second start: {child.last_words()}")
                if self._guests.unlocked:
                    continue
            if not full and not fenced:  # where there is no room to begin, or no store, code 6 says to try again
                self._found(f"{child.name} ended by itself with {code}: {child.last_words()}")
            if len(self._problems) > MAX_SURPRISES:
                raise Stopped
            if not self._ending:
                self._at(self._now + AGAIN_S, partial(self._start_again, child.name))

    def _start_again(self, name: str) -> None:
        """Restart the process unless it was restarted already."""
        if name in self._down:
            self._down.discard(name)
            self._start(name)

    def _found(self, problem: str) -> None:
        self._problems.append(problem)
        self._print(f"FOUND {problem}")

    @property
    def _settings(self) -> dict[str, object]:
        steps, bulk = self._storm_steps + GATHER_STEPS, "session" if self.store is None else "store"
        return {"nodes": len(self.nodes), "steps": steps, "seed": self.seed, "bulk": bulk}

    @property
    def _more(self) -> dict[str, str]:
        return {} if self.store is None else {"bulk_url": f"{self.store.url}/objects"}

    @property
    def _storm_steps(self) -> int:
        return round(self.seconds / STEP_S)

    # --- Observation

    @property
    def _now(self) -> float:
        """Seconds since the processes were started."""
        return time.monotonic() - self._begun

    @property
    def _versions(self) -> list[int]:
        return self._status["versions"] if self._status else [0]

    def _all_train(self) -> bool:
        if self._status is None or self._down or not all(child.running for child in self._children):
            return False
        live = {node["name"] for node in self._status["nodes"] if trains(node)}
        windows = self._status["windows"]
        return live >= set(self.nodes) and all(set(window["expected"]) >= live for window in windows)

    def _print(self, what: str) -> None:
        self.say(f"{int(self._now) // 60:3d}:{int(self._now) % 60:02d}  {what}")

    def _at(self, at: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at, next(self._order), call))

    # --- End

    def _outcome(self, interrupted: bool) -> Outcome:
        if self._status is not None:
            self._compare_journal()
        self._history.finish()
        final = finished_status(self.state_dir)
        return Outcome(
            seconds=self.seconds,
            faults=self._happened,
            committed=self._history.committed,
            lost=len(self._history.lost),
            forks=len(self._history.forks) + len(self._history.twice),
            digests_equal=None if interrupted else final is not None and self._all_equal(final),
            recovery_s=self._recoveries.seconds,
            memory=self._memory.series,
            released=self._guests.released,
            problems=self._problems,
            interrupted=interrupted,
        )

    def _all_equal(self, final: Status) -> bool:
        """Every node said good-bye with the run's last anchors, and wrote the same down."""
        self._history.on_status(final)
        last = dict(enumerate(zip(final["versions"], final["digests"], strict=True)))
        told = {node["name"]: node["digests"] for node in final["nodes"]}
        return all(told.get(name) == final["digests"] and self._books[name].anchors == last for name in self.nodes)
