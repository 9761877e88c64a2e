"""decisions.jsonl: a line for every closed window, with who came when and who did not (protocol, Reasons)."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from plain_runs import plain_hello
from stored_runs import NODES

from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.observe.decision_log import DecisionLog
from farloop.monitoring.status import ArrivedDelta, DecisionEvent
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

BERGEN, OSLO = NODES
TROMSO = NodeId("tromso")


class Scene:
    """A machine with three nodes, and its diary; commits are done as soon as they are decided, two seconds later."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self.file = folder / "decisions.jsonl"
        self.diary = DecisionLog(self.file)
        self.now = 100.0
        spec = dataclasses.replace(spec, terms=spec.terms.replace(min_nodes=3))
        self.machine = CoordinatorMachine(Ledger.begin(rec.RunStarted(spec=spec, epoch=1)), now=self.now)
        for session, node in enumerate((BERGEN, OSLO, TROMSO)):
            hello = plain_hello(node=node, device="cpu")
            self.handle(ev.NodeHello(session=session, node=node, hello=hello))
        for session, node in enumerate((BERGEN, OSLO, TROMSO)):
            self.handle(ev.NodeMessage(session=session, node=node, message=msg.Ready()))

    def handle(self, event: ev.Event) -> None:
        self.diary.saw(event, self.machine, self.now - 50.0, self.now)
        for command in self.machine.handle(event, self.now):
            self.diary.carries_out(command, self.now)
            if isinstance(command, ev.Commit):
                self.now += 2.0
                record = dataclasses.replace(command.draft, update_size=77, anchor_digest=5)
                self.diary.computed(record.fragment, 2.5, 0.25, 0.5)
                self.handle(ev.CommitDone(record=record))

    def deliver(self, node: NodeId, fragment: int = 1) -> None:
        self.handle(ev.InputStored(offer=self.offer(node, fragment)))

    def offer(self, node: NodeId, fragment: int) -> msg.Offer:
        window = self.machine.windows[fragment].terms.window
        blob = BlobId(kind=BlobKind.DELTA, fragment=fragment, version=window - 1, node=node, incarnation=1, seq=window)
        work = Contribution(node=node, incarnation=1, base=window - 1, steps=10, tokens=640, norm_sq=4.0)
        return msg.Offer(blob=blob, size=1, digest=1, window=window, contributors=(work,))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []


@pytest.fixture
def scene(spec: RunSpec, tmp_path: Path) -> Scene:
    return Scene(spec, tmp_path)


def test_a_window_that_all_came_to_has_who_came_when(scene: Scene) -> None:
    for node in (OSLO, TROMSO, BERGEN):
        scene.now += 3.0
        scene.deliver(node)
    (line,) = scene.lines()
    assert set(line) == DecisionEvent.__required_keys__ | {"norm", "merge_s", "journal_s"}
    assert (line["fragment"], line["version"], line["round"], line["h"]) == (1, 1, 0, 10)
    assert (line["t"], line["open_s"], line["why"]) == (61.0, 9.0, "all 3 expected came")
    assert line["expected"] == ["bergen", "oslo", "tromso"]
    assert all(set(row) == ArrivedDelta.__required_keys__ for row in line["arrived"])
    assert [(row["node"], row["after_s"]) for row in line["arrived"]] == [
        ("bergen", 9.0),
        ("oslo", 3.0),
        ("tromso", 6.0),
    ]
    assert {(row["steps"], row["tokens"], row["norm"], row["base"]) for row in line["arrived"]} == {(10, 640, 2.0, 0)}
    assert sum(row["weight"] for row in line["arrived"]) == pytest.approx(1.0)
    assert (line["missing"], line["refused"]) == ([], [])
    assert (line["norm"], line["merge_s"], line["journal_s"], line["anchor_digest"]) == (2.5, 0.25, 0.5, f"{5:016x}")


def test_who_is_missing_and_who_was_refused_is_there_with_the_reason(scene: Scene) -> None:
    scene.deliver(BERGEN)
    scene.now += 4.0
    scene.handle(ev.InputFailed(offer=scene.offer(OSLO, 1), reason=Reason.CORRUPT, detail="a flipped bit"))
    scene.now += 1.0
    scene.handle(ev.NodeDisconnected(session=2, node=TROMSO, reason=Reason.SILENT))
    for command in scene.machine.handle_timer(scene.now):
        scene.diary.carries_out(command, scene.now)
        if isinstance(command, ev.Commit):
            scene.handle(ev.CommitDone(record=command.draft))
    (line,) = scene.lines()
    assert line["expected"] == ["bergen", "oslo", "tromso"] and len(line["arrived"]) == 1
    assert [(row["node"], row["code"]) for row in line["missing"]] == [("oslo", "corrupt"), ("tromso", "silent")]
    assert line["refused"] == [{"node": "oslo", "after_s": 4.0, "code": "corrupt", "detail": "a flipped bit"}]


def test_refusals_of_one_window_are_not_those_of_the_next(scene: Scene) -> None:
    scene.handle(ev.InputFailed(offer=scene.offer(OSLO, 1), reason=Reason.CORRUPT, detail="a flipped bit"))
    for _ in range(2):
        for node in (BERGEN, OSLO, TROMSO):
            if node in scene.machine.windows[1].missing:
                scene.deliver(node)
    first, second = scene.lines()
    assert len(first["refused"]) == 1 and second["refused"] == []


def test_a_delta_of_an_earlier_start_of_the_coordinator_has_no_age(scene: Scene, spec: RunSpec) -> None:
    scene.deliver(BERGEN)
    scene.deliver(OSLO)
    scene.machine = CoordinatorMachine(scene.machine.ledger.copy(), now=scene.now)
    scene.diary = DecisionLog(scene.file)
    scene.deliver(TROMSO)
    (line,) = scene.lines()
    assert [row["after_s"] for row in line["arrived"]] == [None, None, 0.0]


def test_a_node_that_offers_nonsense_all_the_time_makes_no_long_line(scene: Scene) -> None:
    for _ in range(1000):
        scene.handle(ev.InputFailed(offer=scene.offer(OSLO, 1), reason=Reason.CORRUPT, detail="nonsense"))
    scene.deliver(BERGEN)
    scene.deliver(TROMSO)
    (line,) = scene.lines()
    assert len(line["refused"]) == 64


def test_lines_that_the_disk_does_not_take_stop_nothing(spec: RunSpec, tmp_path: Path) -> None:
    scene = Scene(spec, tmp_path / "nowhere")
    for node in (BERGEN, OSLO, TROMSO):
        scene.deliver(node)
    assert scene.machine.ledger.versions[1] == 1 and scene.diary.timeline.dropped == 1
