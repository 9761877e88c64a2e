"""A coordinator that is gone at each step of its work, as if by a power cut, and is started again: nothing is lost.

The nodes live in this process, and ride through it. What anybody was told, the status page, the nodes and the journal
as it was left, is in the journal at the end, and everybody ends with the same anchors.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from crashing import BEGIN, ONCE, POINTS, RESTART
from loopback import Daemon, Run, node_of
from safetensors.torch import save_file
from torch import nn

from farloop.cli.storm_watch import History, Journal
from farloop.coordinator.segment import read_segments
from farloop.monitoring.status import Status
from farloop.node import join

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

CRASHING = Path(__file__).with_name("crashing.py")
STEPS = 80
HITS = (1, 2, 5)

DEFAULT = {
    ("record-write-torn", 2),
    ("journal-sync-before", 5),
    ("commit-durable", 1),
    ("snapshot-saved", 1),
    ("segment-rename-after", 1),
    ("prune-before", 1),
    ("publish-one-of-several", 2),
    ("stored-told-before", 1),
    ("restart-epoch-renamed", 1),
    ("export-before", 1),
}
"""Of the matrix, what every run of the tests tries."""

MATRIX = [(point, hit) for point in POINTS for hit in (HITS[:1] if point in ONCE else HITS)]


def model() -> nn.Sequential:
    """The same weights every time."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))


class Nodes:
    """Two nodes, in threads, that write down what they are told."""

    def __init__(self, run: Run, history: History) -> None:
        self._run, self._history = run, history
        self._over = threading.Event()
        self.failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._train, args=(name,), daemon=True) for name in ("a", "b")]

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

    def _train(self, name: str) -> None:
        try:
            address = f"tcp://127.0.0.1:{self._run.port}"
            with join(address, model(), name=name, state_dir=self._run.folder / name, timeout_s=90.0) as node:
                assert node.leader is not None and node.leader.replica is not None
                replica = node.leader.replica
                draw = torch.Generator().manual_seed(sum(name.encode()))
                while node.running and not self._over.is_set():
                    x = torch.randn(4, 16, generator=draw)
                    torch.autograd.backward(nn.functional.mse_loss(node.model(x), 2 * x))
                    node.step(tokens=4)
                    for fragment, (version, digest) in enumerate(zip(replica.versions, replica.digests, strict=True)):
                        if version >= 0:
                            self._history.told(fragment, version, f"{digest:016x}")
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.failures.append(error)


class Story:
    """A run whose coordinator dies, and what is seen of it."""

    def __init__(self, folder: Path) -> None:
        save_file(dict(model().state_dict()), folder / "init.safetensors")
        self.run = Run(folder, steps=STEPS, method="streaming", h=2, tau=1, blocks_per_fragment=1)
        self.run.tables["run"]["init"] = str(folder / "init.safetensors")
        del self.run.tables["run"]["model"]
        self.history = History()
        self.nodes = Nodes(self.run, self.history)

    def start(self, point: str = "never", hit: int = 0) -> Daemon:
        file = self.run.write_toml()
        return self.run.start("coordinator", str(CRASHING), point, str(hit), "coordinator", str(file))

    def look_until_dead(self, coordinator: Daemon) -> int:
        """All that its page tells meanwhile is compared."""
        while coordinator.running:
            self.look()
            threading.Event().wait(0.05)
        if self.run.state_dir.exists():
            self.history.saw_journal(Journal.of(read_segments(self.run.state_dir)))
        return coordinator.process.returncode

    def look(self) -> Status | None:
        if (status := self.run.status()) is not None:
            self.history.saw_status(status)
        return status


@contextmanager
def story(folder: Path) -> Iterator[Story]:
    """Nothing of it outlives the test."""
    told = Story(folder)
    try:
        yield told
    finally:
        told.nodes.give_up()
        told.run.end()


@pytest.mark.parametrize(
    ("point", "hit"),
    [
        pytest.param(point, hit, id=f"{point}-{hit}", marks=() if (point, hit) in DEFAULT else pytest.mark.slow)
        for point, hit in MATRIX
    ],
)
def test_a_coordinator_that_dies_at_any_step_loses_nothing(tmp_path: Path, point: str, hit: int) -> None:
    with story(tmp_path) as told:
        told.nodes.start()
        if point in RESTART:
            first = told.start()
            told.run.until_said(first.log, "version=2")
            first.kill()
        assert told.look_until_dead(told.start(point, hit)) == -signal.SIGKILL, f"never reached\n{told.run.logs()}"
        assert (told.history.committed > 0) == (point not in BEGIN)
        assert told.look_until_dead(told.start()) == 0, told.run.logs()
        told.nodes.until_done()
        assert_whole(told)


def assert_whole(told: Story) -> None:
    """Nothing that was told is missing, nobody was told anything else, and the run is at its end."""
    final = told.run.final()
    told.history.saw_status(final)
    assert final["run"]["state"] == "finished"
    assert told.history.committed == final["commits"] == sum(final["versions"]) > 0
    assert not told.history.lost
    assert told.history.forks == []
    for name in ("a", "b"):
        assert node_of(final, name).get("digests") == final["digests"], told.run.logs()
        assert node_of(final, name)["incarnation"] == 1
    assert not final["alarms"]
    assert (told.run.state_dir / "model.safetensors").exists()


def test_every_point_that_is_tried_by_default_is_in_the_matrix() -> None:
    assert set(MATRIX) >= DEFAULT
