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
from disk_faults import refuse
from observed import Watched, lines_of
from plain_runs import plain_progress
from virtual_files import VirtualFiles

from farloop.algo.spec import NodeId, RunSpec
from farloop.coordinator.aggregator import Buffers, Result
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.run_state import StorageHold
from farloop.coordinator.errors import DiskFull
from farloop.coordinator.observe.metrics import Metrics
from farloop.coordinator.observe.observer import Observer
from farloop.coordinator.storage.store import Store
from farloop.monitoring.status import NodeStatus, Status, TotalsStatus, WindowStatus
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
def reopen(tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Scene]]:
    """Another observer of the same run and the same file."""
    store = Store.create(Path("/state"), spec, [torch.zeros(512), torch.zeros(256)], files=VirtualFiles())
    scenes: list[Scene] = []

    def make() -> Scene:
        scenes.append(Scene(store, tmp_path / "metrics.jsonl", monkeypatch))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.observer.close()


@pytest.fixture
def scene(reopen: Callable[[], Scene]) -> Scene:
    return reopen()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[str]]:
    """Lines of the log that begin so."""
    caplog.set_level(logging.INFO)
    return lambda start: [line for line in caplog.messages if line.startswith(start)]


# --- The run


def test_a_run_that_waits_for_its_nodes_says_so(scene: Scene, spec: RunSpec) -> None:
    scene.now += 5.0
    status = scene.status()
    assert status["run"] == {
        "name": "small", "fingerprint": spec.identity.fingerprint(), "method": "streaming", "codec_up": "q4",
        "codec_down": "q4", "steps": 40, "h": 10, "tau": 2, "mix": 0.5, "fragments": 2, "parameters": 500,
        "state": "waiting", "epoch": 1, "revision": 0, "changed": [], "nodes": 1, "started_s": 0.0, "uptime_s": 5.0,
        "farloop": version_of(),
    }  # fmt: skip
    assert (status["position"], status["round"], status["outer_steps"], status["commits"]) == (0.0, 0, 0, 0)
    assert (status["versions"], status["nodes"], status["alarms"]) == ([0, 0], [], [])
    assert status["digests"] == [f"{digest:016x}" for digest in spec.identity.anchor_digests]
    assert status["samples"] == {"granted": 0, "trained": 0, "returned": 0, "uncertain": 0}
    assert status["windows"] == [
        {"fragment": f, "window": 1, "round": 1 - f, "state": "open", "expected": [], "arrived": [], "merged": []}
        for f in (0, 1)
    ]


def test_the_status_has_the_fields_that_were_promised(scene: Scene) -> None:
    """Whoever reads it relies on `monitoring/status.py`."""
    scene.join(A)
    status = scene.refresh()
    assert status == json.loads(json.dumps(scene.status()))
    assert set(status) - set(Status.__optional_keys__) == Status.__required_keys__
    assert set(status["nodes"][0]) - set(NodeStatus.__optional_keys__) == NodeStatus.__required_keys__
    assert set(status["windows"][0]) == WindowStatus.__required_keys__


def test_every_state_of_the_run_is_told_once_with_its_cause(scene: Scene, log: Callable[[str], list[str]]) -> None:
    """O: a full disk holds it, and says what to do."""
    scene.refresh()
    scene.start()
    scene.refresh()
    scene.hold.begin("a record", FULL)
    for _ in range(3):
        status = scene.refresh()
    assert "free space on its file system" in status["alarms"][0] and scene.value("farloop_storage_held") == 1
    scene.hold.end("a record")
    status = scene.refresh()
    assert (status["run"]["state"], status["alarms"]) == ("training", []) and scene.value("farloop_storage_held") == 0
    lines = log("run ")
    assert [line.partition(" round=")[0] for line in lines] == [
        "run is=waiting was=-", "run is=training was=waiting", "run is=held was=training", "run is=training was=held"
    ]  # fmt: skip
    assert "0 of 1 so far" in lines[0] and "nothing holds the run" in lines[1]
    assert "until the alarm is resolved" in lines[2]


def test_a_run_that_waits_for_a_decision_says_so(scene: Scene, log: Callable[[str], list[str]]) -> None:
    """S: whoever dials again every few seconds fills no log."""
    assert scene.value("farloop_rollback_held") == 0
    for session in (1, 2, 3):
        (refused,) = [c for c in scene.join(A, session, epoch_seen=5) if isinstance(c, ev.Refuse)]
        assert refused.session == session
        scene.observer.on_command(refused)
        status = scene.refresh()
    (alarm,) = status["alarms"]
    assert status["run"]["state"] == "holding" and scene.value("farloop_rollback_held") == 1
    assert alarm.startswith("history: the run is held: node a has met epoch 5") and "--rewind" in alarm
    line, state = log("")
    assert state.startswith("run is=holding")
    assert line.startswith("alarm") and "the run is held" in line
    assert scene.value("farloop_refusals_total", reason="holding") == 3


def test_a_finished_run_stands_still(scene: Scene) -> None:
    scene.start()
    scene.status()
    while scene.machine.windows:
        scene.now += 1.0
        windows = scene.machine.windows
        scene.deliver(A, min(windows, key=lambda f: (windows[f].terms.round, -f)))
    first = scene.status()
    scene.now += 100.0
    second = scene.status()
    assert first["run"]["state"] == "finished" and first["run"]["started_s"] == second["run"]["started_s"] == 8.0
    assert {window["state"] for window in second["windows"]} == {"final"}


# --- Nodes and their reports


def test_a_node_is_shown_with_what_it_last_reported(scene: Scene) -> None:
    scene.start()
    scene.now += 3.0
    scene.say(A, PROGRESS)
    scene.now += 2.0
    status = scene.status()
    (node,) = status["nodes"]
    expected = {
        "name": "a", "state": "training", "connected": True, "device": "cpu", "position": 12.5, "inner_steps": 12,
        "tokens": 6000, "loss": 3.25, "detail": "fragment 1, window 2", "lost_steps": 2, "last_heard_s": 2.0,
        "skipped_turns": 7, "skipped_steps": 3,
    }  # fmt: skip
    assert expected.items() <= node.items()
    assert (status["position"], status["run"]["state"]) == (12.5, "training")
    assert status["windows"][1]["expected"] == ["a"]


def test_a_report_becomes_a_line_and_metrics(scene: Scene) -> None:
    scene.join(A)
    scene.now += 4.0
    scene.say(A, PROGRESS)
    by_kind = {"delta": 600, "update": 750, "snapshot": 800, "probe": 100, "control": 150}
    first = {
        "event": "progress", "t": 4.0, "node": "a", "position": 12.5, "inner_steps": 12, "tokens": 6000, "loss": 3.25,
        "bytes_up": 700, "bytes_down": 1700, "bytes_state": 900, "bytes_by_kind": by_kind, "lost_steps": 2,
    }  # fmt: skip
    assert scene.lines()[1:] == [first]
    assert scene.value("farloop_node_tokens", node="a") == 6000
    for direction, kind, count in (("up", "delta", 600), ("down", "snapshot", 800), ("up", "probe", 0)):
        assert scene.value("farloop_node_bytes", node="a", direction=direction, kind=kind) == count
    scene.say(A, dataclasses.replace(PROGRESS, loss=None))
    assert scene.lines()[2] == {**first, "loss": None}
    assert scene.value("farloop_node_loss_nats", node="a") == 3.25, "the last one"


def test_a_report_that_cannot_be_true_is_an_alarm_and_no_more(scene: Scene) -> None:
    scene.join(A)
    scene.say(A, dataclasses.replace(PROGRESS, tokens=-1))
    assert scene.lines() == [] and scene.value("farloop_node_tokens", node="a") is None
    assert scene.refresh()["alarms"] == ["report of a: it claims -1 tokens in 12 inner steps"]
    assert scene.value("farloop_alarms") == 1
    scene.say(A, PROGRESS)
    scene.refresh()
    assert scene.value("farloop_alarms") == 0
    scene.store.alarms = {"snapshot of fragment 0": "no room"}
    scene.machine.alarms["commit of fragment 1"] = "no room either"
    assert scene.status()["alarms"] == ["snapshot of fragment 0: no room", "commit of fragment 1: no room either"]


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


def test_every_state_of_a_node_is_told_once_with_the_reason(scene: Scene, log: Callable[[str], list[str]]) -> None:
    assert not scene.observer.joined
    scene.join(A)
    for _ in range(2):
        scene.refresh()
    assert scene.observer.joined
    scene.say(A, msg.Ready())
    scene.refresh()
    assert scene.value("farloop_nodes", state="connected") == scene.value("farloop_nodes", state="training") == 1
    scene.say(A, dataclasses.replace(PROGRESS, state="waiting"))
    scene.refresh()
    scene.handle(ev.NodeDisconnected(session=1, node=A, reason=Reason.SILENT))
    for _ in range(2):
        scene.refresh()
    assert not scene.observer.joined
    expected = [
        ("joining", ""), ("training", ""), ("waiting", "waits for fragment 1, window 2"),
        ("away", Reason.SILENT.sentence),
    ]  # fmt: skip
    assert [line["state"] for line in scene.lines() if line["event"] == "node"] == [state for state, _ in expected]
    assert scene.lines()[-1]["reason"] == Reason.SILENT.sentence
    assert log("node ") == [f"node name=a state={state} reason={reason!r}" for state, reason in expected]


@pytest.mark.parametrize("started", [True, False])
def test_a_node_that_ended_by_an_error_is_shown_with_it_until_it_returns(
    scene: Scene, log: Callable[[str], list[str]], started: bool
) -> None:
    """Not with what it waited for when it last reported."""
    scene.join(A)
    if started:
        scene.say(A, msg.Ready())
    scene.say(A, dataclasses.replace(PROGRESS, state="joining", detail="the first snapshot"))
    scene.say(A, msg.Leave(reason=Reason.FAILED, detail="RuntimeError: no\nspace " + "x" * 999))
    (node,) = scene.refresh()["nodes"]
    why = f"{Reason.FAILED.sentence}: RuntimeError: no?space x"
    assert node["reason"].startswith(why) and len(node["reason"]) < 400
    assert scene.lines()[-1]["reason"] == node["reason"] and log("node name=a state=away")[0].count("no?space") == 1
    scene.join(A, session=2, incarnation=2)
    scene.handle(ev.NodeDisconnected(session=2, node=A, reason=Reason.SILENT))
    assert scene.refresh()["nodes"][0]["reason"] == Reason.SILENT.sentence


def test_a_node_that_has_stalled_is_shown_with_the_reason(scene: Scene) -> None:
    """V: it is connected, and no node waits for it."""
    scene.start()
    scene.pass_time(300.0)
    (node,) = scene.refresh()["nodes"]
    assert scene.lines()[-1]["state"] == "stalled"
    assert node["connected"] and node["reason"] == Reason.STALLED.sentence


def test_a_node_that_waits_for_its_start_says_for_which_nodes(scene: Scene, log: Callable[[str], list[str]]) -> None:
    scene.start()
    scene.join(B)
    scene.say(B, msg.Ready())
    scene.say(B, dataclasses.replace(PROGRESS, state="ready", detail="the start"))
    scene.refresh()
    assert "node name=b state=ready reason='waits for the start with a commit, for which a must train or stall'" in log(
        ""
    )


# --- Commits and evaluations


def test_a_commit_is_told_with_who_was_merged_and_who_was_not(scene: Scene, log: Callable[[str], list[str]]) -> None:
    """E"""
    scene.start()
    scene.now += 6.0
    scene.deliver(A)
    assert scene.lines() == [
        {
            "event": "commit", "t": 6.0, "fragment": 1, "version": 1, "round": 0, "merged": ["a"],
            "drops": [["b", Reason.LATE.sentence]], "update_bytes": 77, "norm": 2.5,
        }
    ]  # fmt: skip
    assert log("commit ") == [
        "commit fragment=1 version=1 round=0 merged=a dropped=b:LATE why='all 1 expected came'"
    ]  # fmt: skip
    assert scene.values(
        {
            "farloop_commits_total": 1, "farloop_update_bytes_total": 77, "farloop_merge_seconds_sum": 0.25,
            "farloop_journal_seconds_sum": 0.5,
        }
    )  # fmt: skip
    assert scene.value("farloop_merged_deltas_total", node="a") == 1
    assert scene.value("farloop_dropped_deltas_total", node="b", reason="late") == 1
    assert scene.value("farloop_fragment_version", fragment="1") == 1
    status = scene.status()
    assert (status["versions"], status["commits"], status["outer_steps"]) == ([0, 1], 1, 1)
    assert status["windows"][1]["merged"] == ["a"] and status["windows"][1]["window"] == 2
    assert status["digests"][1] == f"{5:016x}"


def test_an_evaluation_that_the_machine_believes_is_told_with_what_it_took_to_get_there(scene: Scene) -> None:
    """J"""
    scene.start()
    for versions in ((), (0, 0)):
        scene.say(A, msg.Evaluation(loss=0.0, versions=versions, position=20.0, seconds=1.0))
    assert scene.lines() == [] and scene.status()["evaluations"] == []
    scene.say(A, PROGRESS)
    scene.now += 8.0
    scene.deliver(A)
    scene.evaluate(2.75)
    assert scene.lines()[-1] == {"event": "evaluation", "t": 8.0, "loss": 2.75, "position": 20.0}
    assert scene.status()["evaluations"] == [{"loss": 2.75, "position": 20.0, "outer_steps": 1}]
    assert scene.value("farloop_validation_loss_nats") == 2.75


# --- Files


def test_lines_that_the_disk_does_not_take_are_counted(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.join(A)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse(errno.ENOSPC))
        scene.refresh()
        scene.say(A, PROGRESS)
        assert scene.observer._timeline.flush()
    for _ in range(2):
        scene.say(A, PROGRESS)
        assert [line["event"] for line in scene.lines()][-1] == "progress"
        scene.refresh()
        assert scene.value("farloop_log_dropped_lines_total", file="metrics.jsonl") == 3, "with the totals"


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
