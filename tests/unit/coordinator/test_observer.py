"""What is told about a run: status, metrics.jsonl, log lines (protocol J, E; Figures)."""

import dataclasses
import errno
import json
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from disk_faults import refuse
from observed import Watched, lines_of
from plain_runs import plain_progress
from stories import Scripted, StoryText, all_stories, check_story
from virtual_files import VirtualFiles

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.aggregator import Buffers, Result
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.run_state import StorageHold
from farloop.coordinator.errors import DiskFull
from farloop.coordinator.observe.metrics import Metrics
from farloop.coordinator.observe.observer import Observer
from farloop.coordinator.storage.store import Store
from farloop.monitoring.status import DecisionEvent, NodeStatus, Status, TotalsStatus, WindowStatus
from farloop.runtime.version import version_of
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")
PROGRESS = plain_progress(
    position=12.5, inner_steps=12, tokens=6000, loss=3.25, compute_share=0.875, lost_steps=2,
    detail="fragment 1, window 2", skipped_turns=7, skipped_steps=3,
    sent=msg.BytesByKind(delta=600, control=100),
    received=msg.BytesByKind(update=750, snapshot=800, probe=100, control=50),
)  # fmt: skip
FULL = DiskFull(Path("disk"), 10, 0)


class Scene(Watched):
    """A run with its observer."""

    def __init__(self, store: Store, file: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(store.ledger.copy(), now=1000.0)
        self.store, self.file = store, file
        patch.setattr("farloop.coordinator.observe.observer.time", SimpleNamespace(monotonic=lambda: self.now))
        self.metrics = Metrics()
        self.hold = StorageHold(self.machine.alarms)
        self.observer = Observer(store, file, self.metrics, self.hold)
        self.machine.start()

    def on_event(self, event: ev.Event) -> None:
        self.observer.on_event(event, self.machine)

    def on_command(self, command: ev.Command) -> None:
        self.observer.on_command(command)

    def on_committed(self, record: rec.WindowCommitted) -> None:
        buffers = Buffers(version=record.version, anchor=torch.zeros(1), target=torch.zeros(1), outer={})
        self.observer.on_committed(
            dataclasses.replace(record, drops=(msg.Drop(node=B, reason=Reason.LATE),)),
            Result(buffers=buffers, update=bytearray(77), anchor_digest=5, target_digest=6, outer_digest=None,
                   delta_norm=2.5),
            0.25,
            0.5,
        )  # fmt: skip

    def start(self) -> None:
        self.join(A)
        self.say(A, msg.Ready())

    def evaluate(self, loss: float, versions: tuple[int, ...] = (0, 1)) -> None:
        self.machine._evaluations.ask(1, A)
        self.say(A, msg.Evaluation(loss=loss, versions=versions, position=20.0, seconds=1.0))

    def refresh(self) -> Status:
        """What is told of it from now on."""
        self.observer.refresh(self.machine)
        status: Status = json.loads(self.observer.status_json)
        return status

    def status(self) -> Status:
        return self.observer.status(self.machine)

    def lines(self) -> list[dict[str, Any]]:
        assert self.observer._timeline.flush() and self.observer._diary.timeline.flush()
        return lines_of(self.file)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)

    def values(self, expected: dict[str, float | None]) -> bool:
        """Whether these metrics without labels have these values."""
        return {name: self.value(name) for name in expected} == expected


@pytest.fixture
def reopen(tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    """Another observer of the same run and the same file."""
    stores: dict[str, Store] = {}
    scenes: list[Scene] = []

    def make(**terms: Any) -> Scene:
        if str(terms) not in stores:
            own = dataclasses.replace(spec, terms=spec.terms.replace(**terms))
            stores[str(terms)] = Store.create(
                Path("/state"), own, [torch.zeros(512), torch.zeros(256)], files=VirtualFiles()
            )
        scenes.append(Scene(stores[str(terms)], tmp_path / "metrics.jsonl", monkeypatch))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.observer.close()


@pytest.fixture
def scene(reopen: Callable[[], Scene]) -> Scene:
    return reopen()


class Told(Scripted):
    """The words of stories:

    joins a | ready a | reports a state=waiting | leaves a FAILED why | parts a SILENT
    passes 3.0 | ticks 300.0           time; and timers that are due then fire
    delivers a | spoils a why | offers a | fetches a 1 | finishes a | scores 2.75 | claims_score 0 0
    fills | empties                    the disk: the run is held
    refreshed                          what is told of it from now on
    status run.state                   a part of the status
    lines | decisions | log run        of metrics.jsonl, decisions.jsonl and the log, what is new
    events | metric nodes state=training
    """

    def __init__(self, scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.scene, self.caplog = scene, caplog
        self.lines_told = self.logged = self.decided = 0

    def joins(self, node: str, session: int = 1, **hello: Any) -> None:
        self.scene.join(NodeId(node), session, **hello)

    def ready(self, node: str, session: int = 1) -> None:
        self.scene.say(NodeId(node), msg.Ready(), session)

    def reports(self, node: str, **changes: Any) -> None:
        self.scene.say(NodeId(node), dataclasses.replace(PROGRESS, **changes))

    def leaves(self, node: str, reason: str, *detail: str) -> None:
        """`|` is the end of a line, `~` very much."""
        text = " ".join(detail).replace("|", "\n").replace("~", 999 * "x")
        self.scene.say(NodeId(node), msg.Leave(reason=Reason[reason], detail=text))

    def parts(self, node: str, reason: str, session: int = 1) -> None:
        why, who = Reason[reason], NodeId(node)
        self.scene.observer.on_disconnect(who, why, why.sentence, self.scene.machine)
        self.scene.handle(ev.NodeDisconnected(session=session, node=who, reason=why))

    def passes(self, seconds: float) -> None:
        self.scene.now += seconds

    def ticks(self, seconds: float) -> None:
        self.scene.pass_time(seconds)

    def delivers(self, node: str) -> None:
        self.scene.deliver(NodeId(node))

    def finishes(self, node: str) -> None:
        while windows := self.scene.machine.windows:
            self.scene.now += 1.0
            self.scene.deliver(NodeId(node), min(windows, key=lambda f: (windows[f].terms.round, -f)))

    def scores(self, loss: float) -> None:
        self.scene.evaluate(loss)

    def claims_score(self, *versions: int) -> None:
        self.scene.say(A, msg.Evaluation(loss=0.0, versions=versions, position=20.0, seconds=1.0))

    def fills(self) -> None:
        self.scene.hold.begin("a record", FULL)

    def empties(self) -> None:
        self.scene.hold.end("a record")

    def alarms_of(self, what: str) -> None:
        """The store and the machine have one each."""
        self.scene.store.alarms = {f"snapshot of {what}": "no room"}
        self.scene.machine.alarms[f"commit of {what}"] = "no room either"

    def refreshed(self) -> None:
        self.scene.refresh()

    def status(self, path: str) -> str:
        found: Any = self.scene.status()
        for name in path.split("."):
            found = found[int(name) if name.isdigit() else name]
        return str(found)

    def run(self) -> dict[str, Any]:
        """The status of it, but for the version of farloop."""
        found: dict[str, Any] = dict(self.scene.status()["run"])
        assert found.pop("farloop") == version_of()
        return {name: value for name, value in found.items() if value not in ("", [], 0)}

    def joined(self) -> bool:
        return self.scene.observer.joined

    def spoils(self, node: str, *why: str) -> None:
        """A delta comes that cannot be kept."""
        self.scene.handle(
            ev.InputFailed(offer=self.scene.offer(NodeId(node)), reason=Reason.CORRUPT, detail=" ".join(why))
        )

    def offers(self, node: str) -> None:
        self.scene.say(NodeId(node), self.scene.offer(NodeId(node)))

    def fetches(self, node: str, fragment: int) -> None:
        self.scene.say(NodeId(node), msg.Fetch(fragment=fragment))

    def events(self) -> str:
        """The newest ones."""
        told = self.scene.status()["recent"]
        assert all(len(one["detail"]) < 400 for one in told)
        rows = (f"{one['kind']} {one['node'] or '-'} {one['code']}: {one['detail'][:120]}" for one in told)
        return "\n".join(rows)

    def decisions(self, *names: str) -> str:
        """New lines of decisions.jsonl, or some of their fields."""
        assert self.scene.observer._diary.timeline.flush()
        lines = lines_of(self.scene.file.with_name("decisions.jsonl"))
        new, self.decided = lines[self.decided :], len(lines)
        assert all(DecisionEvent.__required_keys__ <= line.keys() for line in new)

        def short(value: Any) -> str:
            return f"{len(value)}, as {value[0]}" if isinstance(value, list) and len(value) > 4 else str(value)

        return "\n".join(", ".join(f"{key} {short(line[key])}" for key in names or line) for line in new) or "none"

    def lines(self) -> str:
        new, self.lines_told = self.scene.lines()[self.lines_told :], len(self.scene.lines())
        return "\n".join(", ".join(f"{key} {value}" for key, value in line.items() if value) for line in new) or "none"

    def log(self, start: str = "") -> str:
        new, self.logged = self.caplog.messages[self.logged :], len(self.caplog.messages)
        return "\n".join(line for line in new if line.startswith(start)) or "none"

    def metric(self, name: str, **labels: str) -> str:
        return str(self.scene.value(f"farloop_{name}", **{label: str(value) for label, value in labels.items()}))


@all_stories(__file__, "observer")
def test_stories(
    reopen: Callable[..., Scene], caplog: pytest.LogCaptureFixture, path: Path, story: StoryText, rewrite: bool
) -> None:
    check_story(path, story, Told(reopen(**story.settings), caplog).told, rewrite=rewrite)


# --- The run


def test_the_status_has_the_fields_that_were_promised(scene: Scene) -> None:
    """Whoever reads it relies on `monitoring/status.py`."""
    scene.join(A)
    status = scene.refresh()
    assert status == json.loads(json.dumps(scene.status()))
    assert set(status) - set(Status.__optional_keys__) == Status.__required_keys__
    assert set(status["nodes"][0]) - set(NodeStatus.__optional_keys__) == NodeStatus.__required_keys__
    assert set(status["windows"][0]) == WindowStatus.__required_keys__


# --- Nodes and their reports


@pytest.mark.parametrize(("loss", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_loss_that_is_no_number_is_a_word_and_the_status_stays_json(scene: Scene, loss: float, word: str) -> None:
    scene.start()
    scene.say(A, dataclasses.replace(PROGRESS, loss=loss))
    scene.deliver(A)
    scene.evaluate(loss)
    status = scene.refresh()
    assert [line["loss"] for line in scene.lines() if line["event"] in ("progress", "evaluation")] == [None, None]

    def no_json(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for text in (scene.observer.status_json.decode(), *scene.file.read_text().splitlines()):
        json.loads(text, parse_constant=no_json)
    assert (status["nodes"][0]["loss"], status["nodes"][0]["loss_is"]) == (None, word)
    assert status["evaluations"][0]["loss"] is None
    assert str(scene.value("farloop_node_loss_nats", node="a")) == word, "by which an alert knows it"


# --- Files


def test_a_status_that_cannot_be_kept_leaves_the_one_of_before(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:5])
        return refuse(errno.ENOSPC)()

    path = scene.file.with_name("status.json")
    scene.refresh()
    scene.observer.save_status(path)
    before = path.read_bytes()
    assert json.loads(before)["run"]["name"] == "small"
    scene.join(A)
    scene.refresh()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        scene.observer.save_status(path)
    assert path.read_bytes() == before
    scene.observer.save_status(path)
    assert path.read_bytes() == scene.observer.status_json != before


def test_a_start_after_the_end_keeps_the_status_of_the_last_start(scene: Scene, reopen: Callable[[], Scene]) -> None:
    path = scene.file.with_name("status.json")
    scene.join(A)
    scene.store.ledger.finished = scene.machine.ledger.finished = True
    scene.refresh()
    scene.observer.save_status(path)
    ended = path.read_bytes()
    again = reopen()
    assert not again.refresh()["nodes"]
    again.observer.save_status(path)
    assert path.read_bytes() == ended
    path.write_text('{"run": {"state": "training"}}')  # the one that ended the run was killed before it told
    again.observer.save_status(path)
    assert path.read_bytes() == again.observer.status_json


def test_totals_go_on_when_a_node_starts_again_is_forgotten_or_another_coordinator_takes_over(
    scene: Scene, reopen: Callable[[], Scene]
) -> None:
    def told(scene: Scene) -> tuple[int, int, int]:
        totals = scene.refresh()["totals"]
        moved = totals["bytes_up"], totals["bytes_down"]
        assert sum(totals["bytes_by_kind"].values()) == sum(moved)
        return totals["tokens"], *moved

    scene.start()
    scene.say(A, PROGRESS)
    scene.join(B)
    scene.say(B, PROGRESS)
    assert told(scene) == (12_000, 1400, 3400)
    scene.join(A, incarnation=2)
    assert told(scene) == (12_000, 1400, 3400)
    again = dataclasses.replace(PROGRESS, inner_steps=1, tokens=500, sent=msg.BytesByKind(control=10))
    scene.say(A, again)
    assert told(scene) == (12_500, 1410, 5100)
    del scene.machine.members[B]
    assert told(scene) == (12_500, 1410, 5100)
    scene.observer.save_status(scene.file.with_name("status.json"))
    later = reopen()
    assert told(later) == (12_500, 1410, 5100)
    later.join(A, incarnation=2)
    later.say(A, dataclasses.replace(again, tokens=700))
    assert told(later) == (12_700, 1410, 5100)
    steps = {name: node["inner_steps"] for name, node in later.refresh()["totals"]["nodes"].items()}
    assert steps == {A: PROGRESS.inner_steps + 1, B: PROGRESS.inner_steps}


def test_totals_and_time_of_training_go_on_after_a_kill(
    scene: Scene, reopen: Callable[[], Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No start saves its status; lines of any number follow the last totals."""
    monkeypatch.setattr("farloop.coordinator.observe.observer._TOTALS_EVERY", 3)

    def told(scene: Scene) -> tuple[TotalsStatus, float]:
        assert scene.observer._timeline.flush()
        status = scene.refresh()
        return status["totals"], status["run"]["started_s"]

    scene.start()
    scene.refresh()
    expected = 0
    for start in range(1, 4):
        for count in range(1, 6):
            scene.now += 2.0
            scene.say(A, dataclasses.replace(PROGRESS, tokens=1000 * count, sent=msg.BytesByKind(delta=10 * count)))
            before = told(scene)
            assert before[0]["tokens"] == expected + 1000 * count
            assert before[0]["bytes_by_kind"]["delta"] == (expected + 1000 * count) // 100
            scene = reopen()
            assert told(scene) == before
            scene.join(A, incarnation=start)
        expected += 5000
    assert before[1] == 30.0 and sum(line["event"] == "totals" for line in scene.lines()) > 3


def test_a_damaged_line_of_totals_costs_no_start(
    scene: Scene, reopen: Callable[[], Scene], caplog: pytest.LogCaptureFixture
) -> None:
    scene.start()
    scene.say(A, PROGRESS)
    assert scene.observer._timeline.flush()
    scene.file.write_text(scene.file.read_text().replace('"tokens": 0', '"tokens": "many"'))
    assert reopen().refresh()["totals"]["tokens"] == PROGRESS.tokens
    assert sum("damaged" in message for message in caplog.messages) == 1


def test_the_time_of_a_resumed_run_goes_on_behind_a_torn_line(scene: Scene, reopen: Callable[[], Scene]) -> None:
    scene.join(A)
    scene.now += 30.0
    scene.say(A, PROGRESS)
    scene.observer.close()
    whole = scene.file.read_text()
    scene.file.write_text(whole + whole[:25])
    again = reopen()
    assert again.observer.t == 30.0
    again.now += 2.0
    again.join(A)
    again.say(A, PROGRESS)
    again.observer.close()
    *first, torn, _, last = again.file.read_text().splitlines()
    assert torn == whole[:25] and [json.loads(line)["t"] for line in (*first, last)] == [30.0, 30.0, 32.0]


def test_a_delta_of_an_earlier_start_of_the_coordinator_has_no_age(reopen: Callable[..., Scene]) -> None:
    scene = reopen(min_nodes=3)
    for node in "abc":
        scene.join(NodeId(node))
    for node in "abc":
        scene.say(NodeId(node), msg.Ready())
    scene.deliver(A)
    scene.deliver(B)
    again = reopen(min_nodes=3)
    again.machine = CoordinatorMachine(scene.machine.ledger.copy(), now=scene.now)
    again.now = scene.now
    again.deliver(NodeId("c"))
    assert again.observer._diary.timeline.flush()
    (line,) = lines_of(again.file.with_name("decisions.jsonl"))
    assert [row["after_s"] for row in line["arrived"]] == [None, None, 0.0]
