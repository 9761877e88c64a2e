"""What is told about a run: status, metrics.jsonl, log lines (protocol J, E; Figures)."""

import dataclasses
import errno
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_runs import plain_hello

from farloop.algo.spec import BlobId, BlobKind, Contribution, NodeId, RunSpec
from farloop.coordinator.aggregator import Buffers, Result
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.run_state import StorageHold
from farloop.coordinator.errors import DiskFull
from farloop.coordinator.observe.metrics import Metrics
from farloop.coordinator.observe.observer import Observer
from farloop.coordinator.storage.store import Store
from farloop.monitoring.status import NodeStatus, Status, WindowStatus
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A, B = NodeId("a"), NodeId("b")


class Scene:
    """A run with its observer, at a time that tests move by hand."""

    def __init__(self, store: Store, file: Path, patch: pytest.MonkeyPatch) -> None:
        self.store, self.file = store, file
        self.now = 1000.0
        patch.setattr("farloop.coordinator.observe.observer.time", SimpleNamespace(monotonic=lambda: self.now))
        self.metrics = Metrics()
        self.machine = CoordinatorMachine(store.ledger.copy(), now=self.now)
        self.hold = StorageHold(self.machine.alarms)
        self.observer = Observer(store, file, self.metrics, self.hold)
        self.machine.start()

    def handle(self, event: ev.Event) -> list[ev.Command]:
        self.observer.saw(event, self.machine)
        return self.machine.handle(event, self.now)

    def join(self, node: NodeId, session: int = 1, *, epoch_seen: int = 0) -> list[ev.Command]:
        hello = plain_hello(node=node, epoch_seen=epoch_seen, device="cpu")
        return self.handle(ev.NodeHello(session=session, node=node, hello=hello))

    def say(self, node: NodeId, message: msg.Message, session: int = 1) -> list[ev.Command]:
        return self.handle(ev.NodeMessage(session=session, node=node, message=message))

    def commit(self, fragment: int) -> None:
        """The window closes with a delta of node a alone."""
        window = self.machine.windows[fragment].terms.window
        blob = BlobId(kind=BlobKind.DELTA, fragment=fragment, version=window - 1, node=A, incarnation=1, seq=window)
        contribution = Contribution(node=A, incarnation=1, base=window - 1, steps=10, tokens=10, norm_sq=1.0)
        offer = msg.Offer(blob=blob, size=1, digest=1, window=window, contributors=(contribution,))
        (commit,) = (c for c in self.handle(ev.InputStored(offer=offer)) if isinstance(c, ev.Commit))
        record = dataclasses.replace(
            commit.draft, update_size=77, anchor_digest=5, drops=(msg.Drop(node=B, reason=Reason.LATE),)
        )
        buffers = Buffers(version=window, anchor=torch.zeros(1), target=torch.zeros(1), outer={})
        result = Result(
            buffers=buffers,
            update=bytearray(77),
            anchor_digest=5,
            target_digest=6,
            outer_digest=None,
            delta_norm=2.5,
        )
        self.observer.committed(record, result, 0.25, 0.5)
        self.handle(ev.CommitDone(record=record))

    def status(self) -> Status:
        return self.observer.status(self.machine)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


PROGRESS = msg.Progress(
    state="training",
    position=12.5,
    round=1,
    inner_steps=12,
    tokens=6000,
    loss=3.25,
    tokens_per_s=500.0,
    compute_share=0.875,
    blocked_s=1.5,
    lost_steps=2,
    sample_watermark=48,
    bytes_up=700,
    bytes_down=800,
    bytes_state=900,
    detail="fragment 1, window 2",
    skipped_turns=7,
    skipped_steps=3,
    sent=msg.BytesByKind(delta=600, control=100),
    received=msg.BytesByKind(update=750, snapshot=800, probe=100, control=50),
)


@pytest.fixture
def reopen(tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Scene]]:
    """Another observer of the same run and the same file."""
    store = Store.create(tmp_path / "state", spec, [torch.zeros(512), torch.zeros(256)])
    scenes: list[Scene] = []

    def make() -> Scene:
        scenes.append(Scene(store, tmp_path / "metrics.jsonl", monkeypatch))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.observer.close()
    store.close()


@pytest.fixture
def scene(reopen: Callable[[], Scene]) -> Scene:
    return reopen()


def test_a_run_that_waits_for_its_nodes_says_so(scene: Scene, spec: RunSpec) -> None:
    scene.now += 5.0
    status = scene.status()
    assert status["run"] == {
        "name": "small",
        "fingerprint": spec.identity.fingerprint(),
        "method": "streaming",
        "codec_up": "q4",
        "codec_down": "q4",
        "steps": 40,
        "h": 10,
        "tau": 2,
        "mix": 0.5,
        "fragments": 2,
        "parameters": 500,
        "state": "waiting",
        "epoch": 1,
        "revision": 0,
        "changed": [],
        "nodes": 1,
        "started_s": 0.0,
        "uptime_s": 5.0,
    }
    assert (status["position"], status["round"], status["outer_steps"], status["commits"]) == (0.0, 0, 0, 0)
    assert (status["versions"], status["nodes"], status["alarms"]) == ([0, 0], [], [])
    assert status["digests"] == [f"{digest:016x}" for digest in spec.identity.anchor_digests]
    assert status["windows"] == [
        {"fragment": 0, "window": 1, "round": 1, "state": "open", "expected": [], "arrived": [], "merged": []},
        {"fragment": 1, "window": 1, "round": 0, "state": "open", "expected": [], "arrived": [], "merged": []},
    ]


def test_the_status_has_the_fields_that_were_promised(scene: Scene) -> None:
    """Whoever reads it relies on `monitoring/status.py`."""
    scene.join(A)
    scene.observer.refresh(scene.machine)
    status = json.loads(scene.observer.status_json)
    assert status == json.loads(json.dumps(scene.status()))
    assert set(status) - set(Status.__optional_keys__) == Status.__required_keys__
    assert status["samples"] == {"granted": 0, "trained": 0, "returned": 0, "uncertain": 0}
    assert set(status["nodes"][0]) - set(NodeStatus.__optional_keys__) == NodeStatus.__required_keys__
    assert set(status["windows"][0]) == WindowStatus.__required_keys__


def test_a_node_is_shown_with_what_it_last_reported(scene: Scene) -> None:
    scene.join(A)
    scene.say(A, msg.Ready())
    scene.now += 3.0
    scene.say(A, PROGRESS)
    scene.now += 2.0
    status = scene.status()
    (node,) = status["nodes"]
    assert (node["name"], node["state"], node["connected"], node["device"]) == ("a", "training", True, "cpu")
    assert (node["position"], node["inner_steps"], node["tokens"], node["loss"]) == (12.5, 12, 6000, 3.25)
    assert (node["detail"], node["lost_steps"], node["last_heard_s"]) == ("fragment 1, window 2", 2, 2.0)
    assert node["skipped_turns"] == 7
    assert node["skipped_steps"] == 3
    assert (status["position"], status["run"]["state"]) == (12.5, "training")
    assert status["windows"][1]["expected"] == ["a"]


def test_a_report_becomes_a_line_and_metrics(scene: Scene) -> None:
    scene.join(A)
    scene.now += 4.0
    scene.say(A, PROGRESS)
    assert scene.lines() == [
        {
            "event": "progress",
            "t": 4.0,
            "node": "a",
            "position": 12.5,
            "inner_steps": 12,
            "tokens": 6000,
            "loss": 3.25,
            "bytes_up": 700,
            "bytes_down": 1700,
            "bytes_state": 900,
            "bytes_by_kind": {"delta": 600, "update": 750, "snapshot": 800, "probe": 100, "control": 150},
            "lost_steps": 2,
        }
    ]
    assert scene.value("farloop_node_tokens", node="a") == 6000
    assert scene.value("farloop_node_loss_nats", node="a") == 3.25
    for direction, kind, count in (("up", "delta", 600), ("down", "snapshot", 800), ("up", "probe", 0)):
        assert scene.value("farloop_node_bytes", node="a", direction=direction, kind=kind) == count


def test_a_node_that_tells_no_kinds_is_counted_to_the_last_byte(scene: Scene) -> None:
    scene.join(A)
    scene.say(A, dataclasses.replace(PROGRESS, sent=None, received=None))
    (line,) = scene.lines()
    assert (line["bytes_up"], line["bytes_down"]) == (700, 1700)
    assert line["bytes_by_kind"] == {"delta": 700, "update": 800, "snapshot": 900, "probe": 0, "control": 0}


def test_a_report_without_a_loss_leaves_the_last_one(scene: Scene) -> None:
    scene.join(A)
    scene.say(A, PROGRESS)
    scene.say(A, dataclasses.replace(PROGRESS, loss=None))
    assert scene.value("farloop_node_loss_nats", node="a") == 3.25


def test_every_state_of_the_run_is_told_once_with_its_cause(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene.observer.refresh(scene.machine)
    scene.join(A)
    scene.say(A, msg.Ready())
    scene.observer.refresh(scene.machine)
    scene.hold.begin("a record", DiskFull(Path("disk"), 10, 0))
    for _ in range(3):
        scene.observer.refresh(scene.machine)
    lines = [line for line in caplog.messages if line.startswith("run ")]
    assert [line.partition(" round=")[0] for line in lines] == [
        "run is=waiting was=-",
        "run is=training was=waiting",
        "run is=held was=training",
    ]
    assert "0 of 1 so far" in lines[0] and "nothing holds the run" in lines[1]
    assert "until the alarm is resolved" in lines[2]


def test_a_node_that_waits_says_for_what(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene.join(A)
    scene.say(A, msg.Ready())
    scene.say(A, dataclasses.replace(PROGRESS, state="waiting"))
    scene.observer.refresh(scene.machine)
    assert "node name=a state=waiting reason='waits for fragment 1, window 2'" in caplog.messages


@pytest.mark.parametrize(("loss", "word"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_loss_that_is_no_number_is_told_in_a_word_and_the_status_stays_json(
    scene: Scene, loss: float, word: str
) -> None:
    scene.join(A)
    scene.say(A, msg.Ready())
    scene.say(A, dataclasses.replace(PROGRESS, loss=loss))
    scene.commit(1)
    scene.machine._evaluations.ask(1, A)
    scene.say(A, msg.Evaluation(loss=loss, versions=(0, 1), position=20.0, seconds=1.0))
    scene.observer.refresh(scene.machine)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    for text in (scene.observer.status_json.decode(), *scene.file.read_text().splitlines()):
        json.loads(text, parse_constant=refuse)
    status = scene.status()
    assert (status["nodes"][0]["loss"], status["nodes"][0]["loss_is"]) == (None, word)
    assert status["evaluations"][0]["loss"] is None
    shown = scene.value("farloop_node_loss_nats", node="a")
    assert str(shown) == word, "by which an alert knows it"
    assert [line["loss"] for line in scene.lines() if line["event"] in ("progress", "evaluation")] == [None, None]


def test_coming_starting_and_going_are_told_once_each_with_the_reason(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert not scene.observer.joined
    scene.join(A)
    for _ in range(2):
        scene.observer.refresh(scene.machine)
    assert scene.observer.joined
    scene.say(A, msg.Ready())
    scene.observer.refresh(scene.machine)
    assert scene.value("farloop_nodes", state="connected") == scene.value("farloop_nodes", state="training") == 1
    scene.handle(ev.NodeDisconnected(session=1, node=A, reason=Reason.SILENT))
    for _ in range(2):
        scene.observer.refresh(scene.machine)
    assert not scene.observer.joined
    assert [(line["name"], line["state"], line["reason"]) for line in scene.lines()] == [
        ("a", "joining", ""),
        ("a", "training", ""),
        ("a", "away", Reason.SILENT.sentence),
    ]
    assert [line for line in caplog.messages if line.startswith("node ")] == [
        "node name=a state=joining reason=''",
        "node name=a state=training reason=''",
        f"node name=a state=away reason={Reason.SILENT.sentence!r}",
    ]


def test_a_commit_is_told_with_who_was_merged_and_who_was_not(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """E"""
    caplog.set_level(logging.INFO)
    scene.join(A)
    scene.say(A, msg.Ready())
    scene.now += 6.0
    scene.commit(1)
    assert scene.lines() == [
        {
            "event": "commit",
            "t": 6.0,
            "fragment": 1,
            "version": 1,
            "round": 0,
            "merged": ["a"],
            "drops": [["b", Reason.LATE.sentence]],
            "update_bytes": 77,
            "norm": 2.5,
        }
    ]
    (line,) = (line for line in caplog.messages if line.startswith("commit "))
    assert line == "commit fragment=1 version=1 round=0 merged=a dropped=b:LATE why='all 1 expected came'"
    assert scene.value("farloop_commits_total") == 1
    assert scene.value("farloop_update_bytes_total") == 77
    assert scene.value("farloop_merged_deltas_total", node="a") == 1
    assert scene.value("farloop_dropped_deltas_total", node="b", reason="late") == 1
    assert scene.value("farloop_fragment_version", fragment="1") == 1
    assert scene.value("farloop_merge_seconds_sum") == 0.25
    assert scene.value("farloop_journal_seconds_sum") == 0.5
    status = scene.status()
    assert (status["versions"], status["commits"], status["outer_steps"]) == ([0, 1], 1, 1)
    assert status["windows"][1]["merged"] == ["a"] and status["windows"][1]["window"] == 2
    assert status["digests"][1] == f"{5:016x}"


def test_an_evaluation_is_told_with_the_tokens_and_the_time_it_took_to_get_there(scene: Scene) -> None:
    """J"""
    scene.join(A)
    scene.say(A, msg.Ready())
    scene.say(A, PROGRESS)
    scene.now += 8.0
    scene.commit(1)
    scene.machine._evaluations.ask(1, A)
    scene.say(A, msg.Evaluation(loss=2.75, versions=(0, 1), position=20.0, seconds=1.0))
    assert scene.lines()[-1] == {"event": "evaluation", "t": 8.0, "loss": 2.75, "position": 20.0, "tokens": 6000}
    assert scene.status()["evaluations"] == [{"loss": 2.75, "position": 20.0, "outer_steps": 1, "seconds": 8.0}]
    assert scene.value("farloop_validation_loss_nats") == 2.75


def test_an_evaluation_that_the_machine_does_not_believe_is_not_told(scene: Scene) -> None:
    scene.join(A)
    scene.say(A, msg.Ready())
    for versions in ((), (0, 0)):
        scene.say(A, msg.Evaluation(loss=0.0, versions=versions, position=20.0, seconds=1.0))
    assert scene.lines() == [] and scene.status()["evaluations"] == []


def test_a_report_that_cannot_be_true_is_an_alarm_and_no_more(scene: Scene) -> None:
    scene.join(A)
    scene.say(A, dataclasses.replace(PROGRESS, tokens=-1))
    assert scene.lines() == [] and scene.value("farloop_node_tokens", node="a") is None
    scene.observer.refresh(scene.machine)
    assert scene.status()["alarms"] == ["report of a: it claims -1 tokens in 12 inner steps"]
    assert scene.value("farloop_alarms") == 1
    scene.say(A, PROGRESS)
    scene.observer.refresh(scene.machine)
    assert scene.value("farloop_alarms") == 0


def test_a_node_that_has_stalled_is_shown_with_the_reason(scene: Scene) -> None:
    """V: it is connected, and nobody waits for it."""
    scene.join(A)
    scene.say(A, msg.Ready())
    scene.now += 300.0
    scene.machine.handle_timer(scene.now)
    scene.observer.refresh(scene.machine)
    assert scene.lines()[-1]["state"] == "stalled"
    (node,) = scene.status()["nodes"]
    assert node["connected"] and node["reason"] == Reason.STALLED.sentence


def test_alarms_of_the_disk_and_of_the_machine_are_shown_together(scene: Scene) -> None:
    scene.store.alarms = {"snapshot of fragment 0": "no room"}
    scene.machine.alarms["commit of fragment 1"] = "no room either"
    assert scene.status()["alarms"] == ["snapshot of fragment 0: no room", "commit of fragment 1: no room either"]


def test_a_run_whose_disk_is_full_is_held_and_says_what_to_do(scene: Scene) -> None:
    """O"""
    scene.join(A)
    scene.say(A, msg.Ready())
    for held in (True, False):
        if held:
            scene.hold.begin("a record", DiskFull(Path("disk"), 10, 0))
        else:
            scene.hold.end("a record")
        scene.observer.refresh(scene.machine)
        status: Status = json.loads(scene.observer.status_json)
        assert status["run"]["state"] == ("held" if held else "training")
        assert len(status["alarms"]) == held == scene.value("farloop_storage_held")
        assert all("free space on its file system" in alarm for alarm in status["alarms"])


def test_a_run_that_waits_for_a_decision_says_so_everywhere_and_once_in_the_log(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """S: whoever dials again every few seconds fills no log."""
    assert scene.value("farloop_rollback_held") == 0
    caplog.set_level(logging.INFO)
    for session in (1, 2, 3):
        (refuse,) = [c for c in scene.join(A, session, epoch_seen=5) if isinstance(c, ev.Refuse)]
        assert refuse.session == session
        scene.observer.carries_out(refuse)
        scene.observer.refresh(scene.machine)
    status: Status = json.loads(scene.observer.status_json)
    (alarm,) = status["alarms"]
    assert status["run"]["state"] == "holding" and scene.value("farloop_rollback_held") == 1
    assert alarm.startswith("history: the run is held: node a has met epoch 5") and "--rewind" in alarm
    line, state = (record.getMessage() for record in caplog.records)
    assert state.startswith("run is=holding")
    assert line.startswith("alarm") and "the run is held" in line
    assert scene.value("farloop_refusals_total", reason="holding") == 3


def test_lines_that_the_disk_does_not_take_stop_nothing_and_are_counted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    scene.join(A)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse)
        scene.observer.refresh(scene.machine)
        scene.say(A, PROGRESS)
    assert scene.value("farloop_metrics_log_dropped_lines_total") == 2
    scene.say(A, PROGRESS)
    assert [line["event"] for line in scene.lines()] == ["progress"]
    assert scene.value("farloop_metrics_log_dropped_lines_total") == 2


def test_a_status_that_cannot_be_kept_leaves_the_one_of_before(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    path = scene.file.with_name("status.json")
    scene.observer.refresh(scene.machine)
    scene.observer.save_status(path)
    before = path.read_bytes()
    assert json.loads(before)["run"]["name"] == "small"
    scene.join(A)
    scene.observer.refresh(scene.machine)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", half)
        scene.observer.save_status(path)
    assert path.read_bytes() == before
    scene.observer.save_status(path)
    assert path.read_bytes() == scene.observer.status_json != before


def test_a_finished_run_stands_still(scene: Scene) -> None:
    scene.join(A)
    scene.say(A, msg.Ready())
    scene.status()
    while scene.machine.windows:
        scene.now += 1.0
        fragment = min(scene.machine.windows, key=lambda f: (scene.machine.windows[f].terms.round, -f))
        scene.commit(fragment)
    first = scene.status()
    scene.now += 100.0
    second = scene.status()
    assert first["run"]["state"] == "finished" and first["run"]["started_s"] == second["run"]["started_s"] == 8.0
    assert {window["state"] for window in second["windows"]} == {"final"}


def test_the_time_of_a_resumed_run_goes_on(scene: Scene, reopen: Callable[[], Scene]) -> None:
    scene.join(A)
    scene.now += 30.0
    scene.say(A, PROGRESS)
    scene.observer.close()
    again = reopen()
    assert again.observer.t == 30.0
    again.now += 2.0
    again.join(A)
    again.say(A, PROGRESS)
    assert [line["t"] for line in again.lines()] == [30.0, 32.0]


def test_a_line_that_a_crash_cut_short_spoils_no_other(scene: Scene, reopen: Callable[[], Scene]) -> None:
    scene.join(A)
    scene.now += 30.0
    scene.say(A, PROGRESS)
    scene.observer.close()
    whole = scene.file.read_text()
    scene.file.write_text(whole + whole[:25])
    again = reopen()
    assert again.observer.t == 30.0
    again.join(A)
    again.say(A, PROGRESS)
    lines = again.file.read_text().splitlines()
    assert lines[1] == whole[:25]
    assert [json.loads(lines[number])["t"] for number in (0, 2)] == [30.0, 30.0]
