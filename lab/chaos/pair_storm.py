"""A storm over two coordinators: one leads, the other stands by, and both, their connection and the store of the record
fail in turn. Nothing that nodes were told may be lost, and no version may have two contents."""

import math
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from safetensors.torch import save_file

from farloop.config.exit_codes import ExitCode
from farloop.config.sources import dump_toml
from farloop.lab.chaos.record_server import RecordServer, serving
from farloop.lab.chaos.storm import Stopped
from farloop.lab.chaos.wide_node import TENSORS, weights
from farloop.local.processes import PAGE_TIMEOUT_S, Children, free_port, page
from farloop.local.relay import Link, Relay, RelayThread
from farloop.monitoring.endpoint import HEALTH
from farloop.monitoring.healthcheck import open_page
from farloop.monitoring.status import Status

FAULTS: Final = (
    "kill_leader",
    "kill_leader_answers_lost",
    "kill_leader_store_away",
    "kill_both",
    "kill_standby",
    "kill_standby_store_away",
    "end_leader",
    "stop_leader",
    "stop_standby",
    "cut_apart",
    "store_away",
    "store_slow",
)
"""Where the leader goes on, their time is the longest without a commit; else it is from the fault to the next commit
(from the store's return, where no process may commit before)."""

AWAY_S: Final = 8.0  # how long a store is away or slow, a standby stands still, and the two are cut apart
STOPPED_S: Final = 20.0  # how long a leader stands still
PATIENCE_S: Final = 120.0
_PATIENCE_S_PER_PARAMETER: Final = 2e-6  # beyond that: a standby that is let in copies the state
NODES: Final = ("n", "m")

RUN: Final[dict[str, object]] = {
    "name": "pair",
    "method": "streaming",
    "h": 8,
    "batch_sequences": 4,
    "sequence_tokens": 32,
    "evaluate_every_rounds": 20,
    "steps": 1_000_000,
    "nodes": len(NODES),
}

WIDE: Final[dict[str, object]] = {
    "name": "pair",
    "method": "streaming",
    "h": TENSORS,
    "tau": 1,
    "blocks_per_fragment": 1,
    "steps": 1_000_000,
    "nodes": len(NODES),
}
"""In place of `RUN`, of a run of nodes of `wide_node.py`."""


@dataclass(slots=True)
class PairOutcome:
    seconds: list[tuple[str, float]] = field(default_factory=list)
    """Each fault, and the time to the next commit."""
    versions: int = 0  # that were told
    lost: int = 0
    forks: int = 0
    problems: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def wrong(self) -> list[str]:
        """What is wrong with it: a few sentences."""
        found = [f"{self.lost} versions lost"] * bool(self.lost) + [f"{self.forks} forks"] * bool(self.forks)
        return found + self.problems[:3]

    @property
    def good(self) -> bool:
        return not self.wrong

    def figures(self) -> dict[str, Any]:
        times = sorted(seconds for _, seconds in self.seconds)
        by_kind: dict[str, list[float]] = {}
        for kind, seconds in self.seconds:
            by_kind.setdefault(kind, []).append(seconds)
        return {
            "faults": len(times),
            "next_commit_s": {
                "median": statistics.median(times) if times else None,
                "p99": times[max(0, math.ceil(0.99 * len(times)) - 1)] if times else None,
                "max": max(times, default=None),
            },
            "by_fault": {kind: {"count": len(each), "max": max(each)} for kind, each in sorted(by_kind.items())},
            "versions": self.versions,
            "lost": self.lost,
            "forks": self.forks,
            "problems": self.problems,
            "good": self.good,
            "interrupted": self.interrupted,
        }


class PairStorm:
    """Two coordinators a and b, two nodes, and faults one after the other, each once the two are in sync again."""

    def __init__(
        self,
        out: Path,
        *,
        seed: int,
        count: int,
        model: str,
        parameters: int,
        say: Callable[[str], None],
        stopped: Sequence[int],
    ) -> None:
        """`parameters`: of a model whose steps cost nearly nothing, in place of `model`; 0 for `model`."""
        self._out, self._say, self._stopped, self._count = out, say, stopped, count
        self._dice = random.Random(f"farloop pair {seed}")
        self._ports = {name: (free_port(), free_port(), free_port()) for name in "ab"}
        self._parameters = parameters
        self._run = {**RUN, "model": model}
        if parameters:
            save_file(weights(parameters), out / "first.safetensors")
            self._run = {**WIDE, "init": str(out / "first.safetensors")}
        self._patience_s = PATIENCE_S + parameters * _PATIENCE_S_PER_PARAMETER
        self._told: dict[tuple[int, int], str] = {}
        self._newest: dict[int, int] = {}
        self._commits_at: list[float] = []
        self.outcome = PairOutcome()
        self._leader, self._term, self._took = "a", 0, 0.0
        self._either = False  # whether either may go on as the leader

    @property
    def _standby(self) -> str:
        return "b" if self._leader == "a" else "a"

    def run(self) -> PairOutcome:
        """What was seen until then, if it is stopped. Raises CommandError: a process cannot be started."""
        self.outcome.interrupted = True
        with suppress(Stopped), ExitStack() as stack:
            self._server: RecordServer = stack.enter_context(serving())
            link = Link.parse("1gbit/0ms")
            self._relays = [
                Relay(target_host="127.0.0.1", target_port=mirror, link=link) for _, _, mirror in self._ports.values()
            ]
            self._thread = RelayThread(*self._relays)
            stack.enter_context(self._thread)
            self._children = stack.enter_context(Children(self._out, last="a", stop_s=15.0))
            self._start("a")
            self._until("a leads", lambda: self._status("a") is not None)
            self._start("b")
            for name in NODES:
                self._start_node(name)
            self._until("windows commit", lambda: bool(self._newest) and min(self._newest.values()) >= 1)
            kinds = [FAULTS[number % len(FAULTS)] for number in range(self._count)]
            self._dice.shuffle(kinds)
            for number, kind in enumerate(kinds):
                self._until("the two are in sync", self._in_sync)
                self._rest(self._dice.uniform(0.5, 3.0))
                self._inject(kind)
                self.outcome.seconds.append((kind, self._took))
                self._say(f"{number + 1}/{self._count} {kind}: no commit for {self._took:.1f} s, {self._leader} leads")
                self._bring_back()
            self._until("the two are in sync", self._in_sync)
            self.outcome.interrupted = False
        self.outcome.versions = len(self._told)
        return self.outcome

    # --- Faults

    def _inject(self, kind: str) -> None:
        """One fault, to its end."""
        leader, standby = self._children[self._leader], self._children[self._standby]
        began = time.monotonic()
        match kind:
            case "kill_leader" | "end_leader":
                leader.process.send_signal(signal.SIGKILL if kind == "kill_leader" else signal.SIGTERM)
                self._next_commit(self._standby, began)
            case "kill_leader_answers_lost":
                self._server.mode = "deaf"
                leader.kill()
                self._next_commit(self._standby, began)
                self._server.mode = "well"
            case "kill_leader_store_away":
                self._server.mode = "away"
                leader.kill()
                self._rest(AWAY_S)
                if self._status(self._standby) is not None:
                    self.outcome.problems.append("a standby led that could not know whether it may")
                self._server.mode = "well"
                self._next_commit(self._standby, time.monotonic())
            case "kill_both":
                leader.kill()
                standby.kill()
                self._start(self._standby)
                self._start(self._leader)
                self._next_commit(self._leader, began)
            case "kill_standby":
                standby.kill()
                self._rest(AWAY_S)
                self._took = self._gap(began)
            case "stop_standby":
                standby.process.send_signal(signal.SIGSTOP)
                self._rest(AWAY_S)
                self._took = self._gap(began)
                standby.process.send_signal(signal.SIGCONT)
            case "kill_standby_store_away":
                self._server.mode = "away"
                standby.kill()
                self._rest(AWAY_S)
                held = dict(self._newest)
                self._rest(1.0)
                if held != self._newest:
                    self.outcome.problems.append("commits were told that a standby in sync does not have")
                self._server.mode = "well"
                self._next_commit(self._leader, time.monotonic())
            case "stop_leader":
                leader.process.send_signal(signal.SIGSTOP)
                self._next_commit(self._standby, began)
                self._rest(STOPPED_S - self._took)
                leader.process.send_signal(signal.SIGCONT)
                self._until("the old leader ends", lambda: not leader.running)
                if leader.process.poll() != ExitCode.REFUSED:
                    self.outcome.problems.append(f"a deposed leader ended with {leader.process.poll()}")
            case "cut_apart":
                for relay in self._relays:
                    self._thread.cut(relay)
                self._either = True
                self._rest(AWAY_S)
                self._either, self._took = False, self._gap(began)
                for relay in self._relays:
                    self._thread.heal(relay)
            case _:
                self._server.mode = "away" if kind == "store_away" else "slow"
                self._rest(AWAY_S)
                self._took = self._gap(began)
                self._server.mode = "well"

    def _gap(self, began: float) -> float:
        """The longest time without a commit since then."""
        times = [began, *(at for at in self._commits_at if at > began), time.monotonic()]
        return max(after - before for before, after in pairwise(times))

    def _next_commit(self, leader: str, began: float) -> None:
        """Wait until it commits a version that neither was told nor was there when it began to lead."""
        self._leader = leader
        self._until(f"{leader} answers", lambda: self._status(leader) is not None)
        before = dict(self._newest)
        self._until(f"{leader} commits", lambda: any(now > before.get(f, 0) for f, now in self._newest.items()))
        self._took = time.monotonic() - began

    def _bring_back(self) -> None:
        """Start who is not there."""
        for name in (*"ab", *NODES):
            child = self._children[name]
            if not child.running:
                code = child.process.poll()
                if name in NODES:
                    self.outcome.problems.append(f"node {name} ended with {code}: {child.last_words()}")
                    self._start_node(name)
                else:
                    if code not in (-signal.SIGKILL, ExitCode.DONE, ExitCode.REFUSED):
                        self.outcome.problems.append(f"coordinator {name} ended with {code}: {child.last_words()}")
                    self._start(name)

    # --- Processes and pages

    def _start(self, name: str) -> None:
        bind, http, mirror = self._ports[name]
        coordinator = {
            "name": name,
            "bind": f"tcp://127.0.0.1:{bind}",
            "http": f"127.0.0.1:{http}",
            "mirror": f"tcp://127.0.0.1:{mirror}",
            "peers": ", ".join(f"tcp://127.0.0.1:{relay.port}" for relay in self._relays),
            "leads_by": self._server.url,
            "state_dir": str(self._out / f"state-{name}"),
        }
        path = self._out / f"run-{name}.toml"
        path.write_text(dump_toml({"run": self._run, "coordinator": coordinator}))
        self._children.start(name, ["coordinator", str(path)], threads=1)

    def _start_node(self, name: str) -> None:
        path = self._out / f"node-{name}.toml"
        addresses = ", ".join(f"tcp://127.0.0.1:{bind}" for bind, _, _ in self._ports.values())
        if self._parameters:
            arguments = [addresses, name, str(self._out / name), str(self._parameters)]
            self._children.start(name, arguments, threads=1, command=("-m", "farloop.lab.chaos.wide_node"))
            return
        node = {"name": name, "coordinator": addresses, "state_dir": str(self._out / name), "http": "", "threads": 1}
        path.write_text(dump_toml({"node": node}))
        self._children.start(name, ["node", str(path)], threads=1)

    def _status(self, name: str) -> Status | None:
        """Of a coordinator that leads; what it tells is compared with all that was told before."""
        status = page(self._ports[name][1])
        if status is None or "versions" not in status:
            return None
        if (term := status["standby"]["term"]) > self._term:
            self._leader, self._term = name, term  # where the two are cut apart, either may go on
        for fragment, (version, digest) in enumerate(zip(status["versions"], status["digests"], strict=True)):
            if self._told.setdefault((fragment, version), digest) != digest:
                self.outcome.forks += 1
            if name == self._leader:
                if version < self._newest.get(fragment, 0):
                    self.outcome.lost += 1
                if version > self._newest.get(fragment, 0):
                    self._newest[fragment] = version
                    self._commits_at.append(time.monotonic())
        return status

    def _in_sync(self) -> bool:
        """Whether the standby has all, on its disk and in memory."""
        status = self._status(self._leader)
        if status is None or not status.get("standby", {}).get("in_sync"):
            return False
        url = f"http://127.0.0.1:{self._ports[self._standby][1]}{HEALTH}"
        with suppress(OSError), open_page(url, PAGE_TIMEOUT_S) as answer:
            return b"in sync, and in memory" in answer.read()
        return False

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._observe()

    def _observe(self) -> None:
        if self._stopped:
            raise Stopped
        for name in "ab" if self._either else self._leader:
            self._status(name)
        time.sleep(0.02)

    def _until(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._patience_s
        while not condition():
            self._observe()
            if time.monotonic() > deadline:
                self.outcome.problems.append(f"not within {self._patience_s:g} s: {what}")
                raise Stopped
