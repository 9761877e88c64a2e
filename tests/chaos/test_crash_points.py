"""A daemon that is gone at each step of its work, as if by a power cut, and is started again: nothing is lost.

Nodes that stay live in this process. What any process was told, the status page, the nodes and the journal
as it was left, is in the journal at the end, and everybody ends with the same anchors.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from crashing import ADOPT_POINTS, BEGIN, NODE_POINTS, ONCE, POINTS, RESTART
from loopback import Daemon, Run, node_of
from plain_node import model, train
from safetensors.torch import save_file

from farloop.coordinator.storage.verify import verify
from farloop.lab.chaos.journal_referee import read_journal
from farloop.lab.chaos.recovery_watch import History
from farloop.monitoring.status import Status

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

CRASHING = Path(__file__).with_name("crashing.py")
STEPS = 80
HITS = (1, 2, 5)

DEFAULT = {("record-write-torn", 2), ("commit-durable", 1)}
"""Of the matrix, what every run of the tests tries."""


def matrix(points: Iterable[str]) -> list[tuple[str, int]]:
    """Each point at each of the hits; those that are reached once, once."""
    return [(point, hit) for point in points for hit in (HITS[:1] if point in ONCE else HITS)]


MATRIX, ADOPT_MATRIX, NODE_MATRIX = matrix(POINTS), matrix(ADOPT_POINTS), matrix(NODE_POINTS)


def cases(pairs: list[tuple[str, int]]) -> list[Any]:
    """Those that are not tried by default are marked so."""
    marks = {pair: () if pair in DEFAULT else pytest.mark.slow for pair in pairs}
    return [pytest.param(*pair, id=f"{pair[0]}-{pair[1]}", marks=marks[pair]) for pair in pairs]


def test_every_point_names_a_function_of_the_product() -> None:
    """Most points are tried by `make test-slow` alone."""
    check = "import crashing as c; [p(lambda: None) for p in (c.POINTS | c.ADOPT_POINTS | c.NODE_POINTS).values()]"
    path = os.pathsep.join((str(CRASHING.parent), *sys.path))
    done = subprocess.run(
        [sys.executable, "-c", check],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Nodes:
    """Nodes in threads, that write down what they are told."""

    def __init__(self, run: Run, history: History, names: str) -> None:
        self._run, self._history = run, history
        self._over = threading.Event()
        self.pace_s = 0.0
        """Before each step."""
        self.anchors: dict[str, dict[int, str]] = {name: {} for name in names}
        """The digests that each was told last, by fragment."""
        self.failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._train, args=(name,), daemon=True) for name in names]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def give_up(self) -> None:
        self._over.set()

    def until_done(self) -> None:
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), self._run.logs()
        assert not self.failures, self.failures

    def _pace(self) -> float:
        return self.pace_s

    def _told(self, name: str, fragment: int, version: int, digest: str) -> None:
        self._history.record(fragment, version, digest)
        self.anchors[name][fragment] = digest

    def _train(self, name: str) -> None:
        try:
            train(self._run.address, name, self._run.folder / name, partial(self._told, name), self._over, self._pace)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.failures.append(error)


class Story:
    """A run whose coordinator dies, and what is seen of it."""

    def __init__(self, folder: Path, names: str) -> None:
        save_file(dict(model().state_dict()), folder / "init.safetensors")
        self.run = Run(folder, steps=STEPS, method="streaming", h=2, tau=1, blocks_per_fragment=1)
        self.run.tables["run"]["init"] = str(folder / "init.safetensors")
        del self.run.tables["run"]["model"]
        self.history = History()
        self.nodes = Nodes(self.run, self.history, names)

    def start(self, point: str = "never", hit: int = 0, *options: str) -> Daemon:
        words = ("coordinator", str(self.run.write_toml()), *options)
        return self.run.start("coordinator", str(CRASHING), point, str(hit), *words)

    def start_node(self, point: str = "never", hit: int = 0) -> Daemon:
        """The node b, in a process of its own."""
        words = ("node", self.run.address, "b", str(self.run.folder / "b"))
        return self.run.start("node-b", str(CRASHING), point, str(hit), *words)

    def look_until_dead(self, coordinator: Daemon) -> int:
        """All that its page tells meanwhile is compared."""
        while coordinator.running:
            self.look()
            threading.Event().wait(0.05)
        if self.run.state_dir.exists():
            self.history.on_journal(read_journal(self.run.state_dir))
        return coordinator.process.returncode

    def look(self) -> Status | None:
        if (status := self.run.status()) is not None:
            self.history.on_status(status)
        return status


@contextmanager
def story(folder: Path, names: str) -> Iterator[Story]:
    """A run with these nodes in threads; nothing of it outlives the test."""
    told = Story(folder, names)
    try:
        yield told
    finally:
        told.nodes.give_up()
        told.run.end()


@pytest.mark.parametrize(("point", "hit"), cases(MATRIX))
def test_a_coordinator_that_dies_at_any_step_loses_nothing(tmp_path: Path, point: str, hit: int) -> None:
    with story(tmp_path, "ab") as told:
        told.nodes.start()
        if point in RESTART:
            first = told.start()
            told.run.until_said(first.log, "version=2")
            first.kill()
        assert told.look_until_dead(told.start(point, hit)) == -signal.SIGKILL, f"never reached\n{told.run.logs()}"
        assert (told.history.committed > 0) == (point not in BEGIN)
        assert told.look_until_dead(told.start()) == 0, told.run.logs()
        told.nodes.until_done()
        assert_whole(told, [1, 1])
        if point in BEGIN:
            (first, *_) = told.run.events("commit")
            assert first["merged"] == ["a", "b"], "the run begins with all of its nodes, however often"


@pytest.mark.timeout(300)  # twice, unknown nodes are listened for
@pytest.mark.parametrize(("point", "hit"), cases(ADOPT_MATRIX))
def test_a_coordinator_that_dies_while_it_adopts_goes_on_from_the_nodes(tmp_path: Path, point: str, hit: int) -> None:
    with story(tmp_path, "ab") as told:
        coordinator = told.start()
        told.nodes.pace_s = 0.02
        told.nodes.start()
        told.run.set_back(coordinator)
        adopting = told.start(point, hit, "--adopt-from-nodes", "--adopt-newest")
        assert told.run.until_ended(adopting) == -signal.SIGKILL, f"never reached\n{told.run.logs()}"
        again = told.start("never", 0, "--adopt-from-nodes", "--adopt-newest")
        told.nodes.pace_s = 0.0
        assert told.run.until_ended(again) == 0, told.run.logs()
        told.nodes.until_done()
        final = told.run.final()
        assert final["run"]["state"] == "finished" and not final["alarms"]
        assert [node["incarnation"] for node in final["nodes"]] == [1, 1]
        assert all(anchors == dict(enumerate(final["digests"])) for anchors in told.nodes.anchors.values())
        assert told.history.forks == [], "what a node once held, all hold in the end"
        assert not verify(told.run.state_dir).faults


LAST = {"node-good-bye-before"}
"""All is merged by then."""


@pytest.mark.parametrize(("point", "hit"), cases(NODE_MATRIX))
def test_a_node_that_dies_at_any_step_comes_back_under_its_name(tmp_path: Path, point: str, hit: int) -> None:
    # Its second start counts as one, unless the first was gone before a node could know of it; and with the run at its
    # end no node waits for a second.
    starts = 1 if point in {"node-start-counted-before", *LAST} else 2
    with story(tmp_path, "a") as told:
        coordinator = told.start()
        told.nodes.pace_s = 0.02
        told.nodes.start()
        assert told.run.until_ended(told.start_node(point, hit)) == -signal.SIGKILL, f"never\n{told.run.logs()}"
        if point not in LAST:
            told.nodes.pace_s = 1.0  # the run must not end before the node is back
            node = told.start_node()
            told.run.until("b is back", lambda status: takes_part(status, "b", starts))
            told.nodes.pace_s = 0.0
        assert told.look_until_dead(coordinator) == 0, told.run.logs()
        if point not in LAST:
            assert told.run.until_ended(node) == 0
        told.nodes.until_done()
        assert_whole(told, [1, starts], gone=frozenset("b") if point in LAST else frozenset())


def takes_part(status: Status, name: str, incarnation: int) -> bool:
    """Whether this start of a node trains, or waits for the others in between."""
    nodes = [node for node in status["nodes"] if (node["name"], node["incarnation"]) == (name, incarnation)]
    return any(node["state"] in {"training", "waiting"} for node in nodes)


def assert_whole(told: Story, incarnations: list[int], *, gone: frozenset[str] = frozenset()) -> None:
    """Nothing that was told is missing, no node was told anything else, and the run is at its end.

    `gone`: nodes that never told with what they ended.
    """
    final = told.run.final()
    told.history.on_status(final)
    assert final["run"]["state"] == "finished"
    assert told.history.committed == final["commits"] == sum(final["versions"]) > 0
    assert not told.history.lost
    assert told.history.forks == []
    last = dict(enumerate(final["digests"]))
    assert told.nodes.anchors == dict.fromkeys(told.nodes.anchors, last)
    for name in {"a", "b"} - set(told.nodes.anchors) - gone:
        assert node_of(final, name).get("digests") == final["digests"], told.run.logs()
    assert [node["incarnation"] for node in final["nodes"]] == incarnations
    assert not final["alarms"]
    assert (told.run.state_dir / "model.safetensors").exists()


def test_every_point_that_is_tried_by_default_is_in_the_matrix() -> None:
    assert {*MATRIX, *ADOPT_MATRIX, *NODE_MATRIX} >= DEFAULT
