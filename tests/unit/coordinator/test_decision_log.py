"""decisions.jsonl: a line for every closed window, with who came when and who did not (protocol, Reasons)."""

import dataclasses
from pathlib import Path

import pytest
from observed import Watched, begun, lines_of

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.observe.decision_log import DecisionLog
from farloop.monitoring.status import ArrivedDelta, DecisionEvent
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

BERGEN, OSLO, TROMSO = NODES = tuple(map(NodeId, ("bergen", "oslo", "tromso")))
SILENT = ev.NodeDisconnected(session=2, node=TROMSO, reason=Reason.SILENT)


class Scene(Watched):
    """Three nodes, and the log of their windows."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        super().__init__(begun(dataclasses.replace(spec, terms=spec.terms.replace(min_nodes=3))), now=100.0)
        self.file = folder / "decisions.jsonl"
        self.log = DecisionLog(self.file)
        for session, node in enumerate(NODES):
            self.join(node, session)
        for session, node in enumerate(NODES):
            self.say(node, msg.Ready(), session)

    def on_event(self, event: ev.Event) -> None:
        self.log.on_event(event, self.machine, self.now - 50.0, self.now)
        assert self.log.timeline.flush()

    def on_command(self, command: ev.Command) -> None:
        self.log.on_command(command, self.now)

    def on_committed(self, record: rec.WindowCommitted) -> None:
        self.now += 2.0
        self.log.on_computed(record.fragment, 2.5, 0.25, 0.5)

    def refuse(self, detail: str) -> None:
        self.handle(ev.InputFailed(offer=self.offer(OSLO), reason=Reason.CORRUPT, detail=detail))


@pytest.fixture
def scene(spec: RunSpec, tmp_path: Path) -> Scene:
    return Scene(spec, tmp_path)


def test_a_window_that_all_came_to_has_who_came_when(scene: Scene) -> None:
    for node in (OSLO, TROMSO, BERGEN):
        scene.now += 3.0
        scene.deliver(node)
    (line,) = lines_of(scene.file)
    assert set(line) == DecisionEvent.__required_keys__ | {"norm", "merge_s", "journal_s"}
    assert (line["fragment"], line["version"], line["round"], line["h"]) == (1, 1, 0, 10)
    assert (line["t"], line["open_s"], line["why"]) == (61.0, 9.0, "all 3 expected came")
    assert line["expected"] == ["bergen", "oslo", "tromso"]
    assert all(set(row) == ArrivedDelta.__required_keys__ for row in line["arrived"])
    assert {row["node"]: row["after_s"] for row in line["arrived"]} == {"bergen": 9.0, "oslo": 3.0, "tromso": 6.0}
    assert {(row["steps"], row["tokens"], row["norm"], row["base"]) for row in line["arrived"]} == {(10, 640, 2.0, 0)}
    assert sum(row["weight"] for row in line["arrived"]) == pytest.approx(1.0)
    assert (line["missing"], line["refused"]) == ([], [])
    assert (line["norm"], line["merge_s"], line["journal_s"], line["anchor_digest"]) == (2.5, 0.25, 0.5, f"{5:016x}")


def test_who_is_missing_and_who_was_refused_is_there_with_the_reason(scene: Scene) -> None:
    scene.deliver(BERGEN)
    scene.now += 4.0
    scene.refuse("a flipped bit")
    scene.now += 1.0
    scene.handle(SILENT)
    scene.pass_time(0.0)
    (line,) = lines_of(scene.file)
    assert line["expected"] == ["bergen", "oslo", "tromso"] and len(line["arrived"]) == 1
    assert [(row["node"], row["code"]) for row in line["missing"]] == [("oslo", "corrupt"), ("tromso", "silent")]
    assert line["refused"] == [{"node": "oslo", "after_s": 4.0, "code": "corrupt", "detail": "a flipped bit"}]


def test_refusals_are_those_of_their_window_and_make_no_long_line(scene: Scene) -> None:
    for _ in range(1000):
        scene.refuse("nonsense")
    for _ in range(2):
        for node in NODES:
            if node in scene.machine.windows[1].missing:
                scene.deliver(node)
    assert [len(line["refused"]) for line in lines_of(scene.file)] == [64, 0]


def test_a_delta_of_an_earlier_start_of_the_coordinator_has_no_age(scene: Scene) -> None:
    scene.deliver(BERGEN)
    scene.deliver(OSLO)
    scene.machine = CoordinatorMachine(scene.machine.ledger.copy(), now=scene.now)
    scene.log = DecisionLog(scene.file)
    scene.deliver(TROMSO)
    (line,) = lines_of(scene.file)
    assert [row["after_s"] for row in line["arrived"]] == [None, None, 0.0]


def test_lines_that_the_disk_does_not_take_stop_nothing(spec: RunSpec, tmp_path: Path) -> None:
    scene = Scene(spec, tmp_path / "nowhere")
    for node in NODES:
        scene.deliver(node)
    assert scene.machine.ledger.versions[1] == 1 and scene.log.timeline.dropped == 1
