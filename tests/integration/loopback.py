"""A run of real processes on this machine: the files and commands of a person, and the pages that a person reads.

Nothing here sleeps for a fixed time: every wait polls a condition until its deadline, and a deadline that passes shows
the ends of all logs.
"""

import argparse
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prefork import Process

from farloop.config.exit_codes import ExitCode
from farloop.config.sources import dump_toml
from farloop.coordinator.decide.records import Record
from farloop.coordinator.storage.journal import Journal
from farloop.local.processes import free_port
from farloop.local.relay import Link, Relay, RelayThread
from farloop.monitoring.status import NodeStatus, Status
from farloop.monitoring.status_summary import left_with_the_last

TEXT = Path(argparse.__file__)
"""What the nodes learn: one source file, the same for every process of this interpreter."""

FARLOOP = ("-m", "farloop.cli.main")
"""The command, in whatever environment this Python has."""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
"""... so many ranks of a script."""

METRONOME = Path(__file__).with_name("metronome.py")
OWN_NODE = Path(__file__).with_name("own_node.py")
RECORDED = Path(__file__).with_name("recorded.py")

POLL_S = 0.05
DEADLINE_S = 180.0
"""Far beyond what anything here takes on an idle machine: it tells "never" from "slow", and nothing else."""

SMALL: Mapping[str, object] = {
    "model": "nano",
    "batch_sequences": 4,
    "sequence_tokens": 32,
    "evaluation_sequences": 8,
    "warmup_steps": 5,
}
"""An inner step of a few milliseconds."""

PACED: Mapping[str, object] = {"method": "streaming", "h": 3, "tau": 1}
"""Every inner step has a send and a merge: with a metronome, a round takes less than a second however long the run."""

Tables = dict[str, dict[str, object]]


class Daemon:
    """One process and its log."""

    def __init__(self, name: str, command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        self._begins_at = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as file:
            # In a session of its own: what it starts ends with it.
            self.process: subprocess.Popen[bytes] | Process = (
                Process(command[1:], folder, environment, file.fileno())
                if (command[0] == sys.executable and not command[1].startswith("-")) or command[1:3] == [*FARLOOP]
                else subprocess.Popen(
                    command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                    start_new_session=True,
                )
            )  # fmt: skip

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def said(self) -> str:
        """Its log, without that of an earlier process of the same name."""
        return self.log.read_bytes()[self._begins_at :].decode(errors="replace")

    @property
    def last_line(self) -> str:
        return self.said.strip().rpartition("\n")[2]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """As a power cut would."""
        self.process.kill()
        self.process.wait()

    def end(self, grace_s: float = 5.0) -> None:
        """Whatever state it is in."""
        if not self.running:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Run:
    """One run: its folder, its coordinator (however often it is started) and its nodes.

    Args:
        folder: everything is kept here.
        settings: of [run], over `SMALL`.
    """

    def __init__(self, folder: Path, **settings: object) -> None:
        self.folder, self.state_dir = folder, folder / "state"
        self.port, self.http = free_port(), free_port()
        self.host = "127.0.0.1"  # of the pages
        self.daemons: list[Daemon] = []
        self.programs: dict[str, Path] = {}
        """By name of a process, the `farloop` of another environment that it is started with."""
        self.on_tape = False
        """Whether daemons started from now on keep tapes, in NAME.tape (tapes.py), and all journal segments."""
        self._coordinator: Daemon | None = None
        self.tables: Tables = {
            "run": {**SMALL, **settings},
            "data": {"path": str(TEXT)},
            "coordinator": {
                "bind": f"tcp://127.0.0.1:{self.port}",
                "http": f"127.0.0.1:{self.http}",
                "state_dir": str(self.state_dir),
            },
        }
        self._go = folder / "go"
        self._relays: dict[str, tuple[RelayThread, Relay]] = {}
        self._open_links = ExitStack()

    @property
    def address(self) -> str:
        """Of the coordinator."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def relays(self) -> dict[str, Relay]:
        """The links that were given to nodes, by their names."""
        return {name: relay for name, (_, relay) in self._relays.items()}

    # --- starting and ending

    def start_coordinator(self, *options: str) -> Daemon:
        """Begin the run, or go on with it; returns at once."""
        self._coordinator = self._start("coordinator", ["coordinator", str(self.write_toml()), *options])
        return self._coordinator

    def start_second_coordinator(self, *flags: str, same_state: bool = True, name: str = "second") -> Daemon:
        """Another one over this run's state, or with this run's port; each with settings on top of the run's."""
        ports = {"bind": f"tcp://127.0.0.1:{free_port()}", "http": f"127.0.0.1:{free_port()}"}
        own = ports if same_state else {"state_dir": str(self.folder / name)}
        tables = {**self.tables, "coordinator": {**self.tables["coordinator"], **own}}
        sets = [word for flag in flags for word in ("--set", flag)]
        return self._start(name, ["coordinator", str(self._write(f"{name}.toml", tables)), *sets])

    def start_node(self, name: str, *, link: str = "", **settings: object) -> Daemon:
        """Take part as `name`, over a link of its own if one is given or was before; returns at once."""
        return self._start(f"node-{name}", ["node", str(self.node_toml(name, link, settings))])

    def start_stage(self, name: str, layout: Path, **pipeline: object) -> Daemon:
        """Take part as `name` with the stage that a layout file gives it; returns at once."""
        path = self.node_toml(name, "", {})
        path.write_text(path.read_text() + "\n" + dump_toml({"pipeline": {"layout": str(layout), **pipeline}}))
        return self.start(f"node-{name}", *FARLOOP, "node", str(path))

    def start_metronome(self, name: str, *, pace_s: float = 0.25, link: str = "", **settings: object) -> Daemon:
        """A node whose inner steps take this long, and with it the run's, until `hurry`."""
        file = self.node_toml(name, link, settings)
        return self.start(f"node-{name}", str(METRONOME), str(file), str(self._go), str(pace_s))

    def start_own_node(self, name: str, *options: str) -> Daemon:
        """A user's own script as a node: see there for its options."""
        return self.start(f"node-{name}", str(OWN_NODE), "train", f"tcp://127.0.0.1:{self.port}", name, *options)

    def hurry(self) -> None:
        """From here to the run's end as fast as it goes."""
        self._go.touch()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Metronomes take no step meanwhile, and hear what they are told."""
        (pause := self._go.with_name("pause")).touch()
        yield
        pause.unlink()

    def node_toml(self, name: str, link: str, settings: Mapping[str, object]) -> Path:
        """The file of a node."""
        if link:
            self._relays[name] = self._open_relay(link)
        port = self._relays[name][1].port if name in self._relays else self.port
        node = {
            "name": name,
            "coordinator": f"tcp://127.0.0.1:{port}",
            "state_dir": str(self.folder / name),
            "threads": 1,
            **settings,
        }
        return self._write(f"node-{name}.toml", {"node": node, "data": self.tables["data"]})

    def start(self, name: str, *command: str) -> Daemon:
        """Any other process of the run, with this Python, or a command of farloop with what `programs` has for it."""
        words = [sys.executable, *command]
        if name in self.programs and command[: len(FARLOOP)] == FARLOOP:
            words = [str(self.programs[name]), *command[len(FARLOOP) :]]
        daemon = Daemon(name, words, self.folder, environment())
        self.daemons.append(daemon)
        return daemon

    def write_toml(self) -> Path:
        """The file of the coordinator."""
        return self._write("run.toml", self.tables)

    def end(self) -> None:
        """Nothing is left behind."""
        for daemon in self.daemons:
            daemon.end()
        self._open_links.close()

    def _start(self, name: str, arguments: list[str]) -> Daemon:
        recorder = (str(RECORDED), str(self.folder / f"{name}.tape")) if self.on_tape else FARLOOP
        return self.start(name, *recorder, *arguments)

    def _write(self, name: str, tables: Tables) -> Path:
        path = self.folder / name
        path.write_text(dump_toml(tables))
        return path

    def _open_relay(self, link: str) -> tuple[RelayThread, Relay]:
        relay = Relay(target_host="127.0.0.1", target_port=self.port, link=Link.parse(link))
        thread = RelayThread(relay)
        self._open_links.enter_context(thread)
        return thread, relay

    # --- looking

    def page(self, path: str) -> tuple[int, str]:
        """Status and body of one of the coordinator's pages."""
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self.http}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self) -> Status | None:
        """What the coordinator tells now; None while it is away."""
        with suppress(OSError, ValueError, http.client.HTTPException):  # it may die while it answers
            status: Status = json.loads(self.page("/status")[1])
            return status if "run" in status else None
        return None

    def final(self) -> Status:
        """What the coordinator told last."""
        status: Status = json.loads((self.state_dir / "status.json").read_text())
        return status

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of that kind."""
        lines = (self.state_dir / "metrics.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    # --- waiting

    def records(self) -> list[Record]:
        """The journal of a coordinator that has ended: from its oldest segment on, all of it only when `on_tape`."""
        journal, found = Journal.open(self.state_dir)
        journal.close()
        return [entry.record for entry in found.entries]

    def set_back(self, coordinator: Daemon) -> Status:
        """Leave a state that is older than what the nodes hold, and no coordinator. The last status before."""
        copied = self.until("every fragment has two versions", lambda status: min(status["versions"]) >= 2)
        coordinator.signal(signal.SIGSTOP)  # a copy of one moment, as a snapshot of the disk would be
        copy = shutil.copytree(self.state_dir, self.folder / "copy", ignore=shutil.ignore_patterns("admin.sock"))
        coordinator.signal(signal.SIGCONT)
        later = self.until("the run has gone on", lambda status: further_than(status, copied))
        coordinator.kill()
        shutil.rmtree(self.state_dir)
        shutil.copytree(copy, self.state_dir)
        return later

    def until(self, what: str, condition: Callable[[Status], bool], timeout_s: float = DEADLINE_S) -> Status:
        """Poll the status of a run that is going on until it meets the condition; returns that status.

        Raises:
            AssertionError: it never was, or a process failed; with the last status and the ends of all logs.
        """
        deadline, last = time.monotonic() + timeout_s, None
        while time.monotonic() < deadline:
            assert not (ended := self._ended_too_soon()), f"{ended} ended before this: {what}\n{self.logs()}"
            if status := self.status():
                last = status
                if condition(status):
                    return status
            time.sleep(POLL_S)
        raise AssertionError(f"not within {timeout_s:g} s: {what}\n{json.dumps(last, indent=1)}\n{self.logs()}")

    def until_said(self, log: Path, words: str, timeout_s: float = DEADLINE_S) -> None:
        """Wait until these words are in a log."""
        deadline = time.monotonic() + timeout_s
        while not log.exists() or words not in log.read_text(errors="replace"):
            assert time.monotonic() < deadline, f"{words!r} is not in {log} within {timeout_s:g} s\n{self.logs()}"
            assert not (ended := self._ended_too_soon()), f"{ended} ended before {words!r}\n{self.logs()}"
            time.sleep(POLL_S)

    def until_ended(self, daemon: Daemon, timeout_s: float = DEADLINE_S) -> int:
        """Wait for a process; its exit code."""
        try:
            return daemon.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{daemon.name} did not end within {timeout_s:g} s\n{self.logs()}") from None

    def until_done(self, *daemons: Daemon, timeout_s: float = DEADLINE_S) -> Status:
        """Wait for these processes, or all that still run, to end well; the final status."""
        for daemon in daemons or [daemon for daemon in self.daemons if daemon.running]:
            code = self.until_ended(daemon, timeout_s)
            assert code == 0, f"{daemon.name} ended with {code}\n{self.logs()}"
        return self.final()

    def logs(self, lines: int = 25) -> str:
        """The ends of all logs."""
        tails = {daemon.log: daemon.said.splitlines()[-lines:] for daemon in self.daemons}
        return "\n".join(f"--- {log.name}\n" + "\n".join(tail) for log, tail in tails.items())

    def _ended_too_soon(self) -> list[str]:
        """The coordinator, and whoever ended as nothing here may end: with an unexpected error."""
        unexpected = [daemon for daemon in self.daemons if daemon.process.poll() == ExitCode.UNEXPECTED]
        gone = [self._coordinator] if self._coordinator and not self._coordinator.running else []
        return [daemon.name for daemon in [*unexpected, *gone]]


NewRun = Callable[..., Run]
"""Makes runs of a test: `new_run(steps=100, method="diloco")`."""


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[NewRun]:
    """Each run has a folder of its own, and ends with its test."""
    runs: list[Run] = []

    def make(**settings: object) -> Run:
        folder = tmp_path / f"run-{len(runs)}"
        folder.mkdir()
        runs.append(Run(folder, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


def own_run(new_run: "NewRun", *options: str, script: Path = OWN_NODE, **settings: object) -> Run:
    """A run of a model that farloop does not know, made by `script init` with `options`; `start_own_node` takes part in
    that of `OWN_NODE`."""
    run = new_run(**settings)
    run.tables["run"] |= {"init": str(run.folder / "own.safetensors")}
    del run.tables["run"]["model"], run.tables["data"]
    assert run.until_ended(run.start("init", str(script), "init", "own.safetensors", *options), 300.0) == 0
    return run


def node_of(status: Status, name: str) -> NodeStatus:
    """One node of the run, of which the coordinator has heard."""
    (node,) = (node for node in status["nodes"] if node["name"] == name)
    return node


def merged_since(status: Status, versions: list[int], name: str) -> bool:
    """Whether a window newer than these versions merged this node's work."""
    return any(
        status["versions"][window["fragment"]] > versions[window["fragment"]] and name in window["merged"]
        for window in status["windows"]
    )


def further_than(status: Status, before: Status) -> bool:
    """Whether every fragment has a newer version than it had."""
    return all(new > old for new, old in zip(status["versions"], before["versions"], strict=True))


def alone_since(status: Status, versions: list[int], name: str) -> bool:
    """Whether every fragment has a version newer than these, and the newest of each is this node's work alone."""
    return all(
        status["versions"][window["fragment"]] > versions[window["fragment"]] and window["merged"] == [name]
        for window in status["windows"]
    )


def assert_one_line(daemon: Daemon, *parts: str) -> None:
    """The process ended with one line for the person who started it, and these words are in it."""
    errors = [line for line in daemon.said.splitlines() if line.startswith("farloop: error: ")]
    assert len(errors) == 1 and errors[0] == daemon.last_line, daemon.said
    assert "Traceback" not in daemon.said, daemon.said
    assert all(part in errors[0] for part in parts), errors[0]


def assert_all_agree(run: Run, status: Status, *names: str) -> None:
    """Every one of these nodes left with the coordinator's final anchors, bit for bit."""
    assert status["run"]["state"] == "finished", run.logs()
    for name in names:
        node = node_of(status, name)
        assert left_with_the_last(node, status), f"{node}\n{run.logs()}"


def environment() -> dict[str, str]:
    """Ours, without settings of farloop or torchrun in it, and one thread a process."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("FARLOOP_")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        ours.pop(name, None)
    return {**ours, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}
