"""Every refusal, late delta, drop and leave has a reason: in the log, the metrics and the status (protocol E, V).

And the files of lines that are told beside the state: they never stop a run, and never grow too large.
"""

import errno
import io
import json
import logging
import os
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import statuses
from disk_faults import refuse
from observed import Watched, begun
from plain_runs import plain_offer
from rich.console import Console

from farloop.algo.spec import NodeId, RunSpec
from farloop.cli.status_view import draw
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.run_state import StorageHold
from farloop.coordinator.errors import DiskFull
from farloop.coordinator.observe.event_log import KEEP, EventLog, MetricsLog, files, last_time
from farloop.coordinator.observe.metrics import Metrics
from farloop.monitoring.status import EventStatus, NodeEvent
from farloop.monitoring.status_summary import view_of
from farloop.runtime.log_queue import MOST_WAITING
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A = NodeId("oslo")
OFFER = plain_offer(A, 5, seq=5)


class Scene(Watched):
    """A machine without nodes, and what is told of it."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(begun(spec))
        self.metrics = Metrics()
        self.events = EventLog(self.metrics)

    def on_event(self, event: ev.Event) -> None:
        self.events.on_event(event, self.machine, 0.0)

    def on_command(self, command: ev.Command) -> None:
        self.events.on_command(command, 0.0)

    def value(self, kind: str, code: str) -> float:
        return self.metrics.registry.get_sample_value("farloop_events_total", {"kind": kind, "reason": code}) or 0.0

    def screen(self) -> str:
        """What `farloop status` prints."""
        console = Console(width=300, file=io.StringIO())
        status = statuses.status(recent=self.events.recent(12.0), nodes=[], windows=[], evaluations=[])
        console.print(draw(view_of(status), width=300, max_nodes=9))
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    def only(self) -> EventStatus:
        (told,) = self.events.recent(0.0)
        return told


@pytest.fixture
def scene(spec: RunSpec) -> Scene:
    return Scene(spec)


def refusal(scene: Scene, reason: Reason) -> None:
    scene.on_command(ev.Refuse(session=1, refused=msg.Refused(reason=reason, detail="here", retriable=False)))


def outcome(scene: Scene, reason: Reason) -> None:
    scene.on_command(ev.Tell(node=A, message=msg.Outcome(blob=OFFER.blob, reason=reason, detail=reason.sentence)))


def leave(scene: Scene, reason: Reason) -> None:
    scene.on_command(ev.Record(record=rec.NodeLeft(node=A, reason=reason)))


def session_end(scene: Scene, reason: Reason) -> None:
    scene.events.on_disconnect(A, reason, reason.sentence, scene.machine, 0.0)


def told(scene: Scene, reason: Reason) -> None:
    scene.events.add("stalled", A, reason, "", 0.0)


R = Reason
HOW: dict[Reason, Callable[[Scene, Reason], None]] = {
    **dict.fromkeys((R.PROTOCOL_VERSION, R.WRONG_RUN, R.WRONG_LAYOUT, R.WRONG_KEY, R.NAME_TAKEN, R.FENCED), refusal),
    **dict.fromkeys((R.MALFORMED, R.CLOSED, R.SILENT, R.SUPERSEDED), session_end),
    **dict.fromkeys((R.NONE, R.OLD_INCARNATION, R.DRAINED, R.FAILED, R.OUT_OF_TIME), leave),
    **dict.fromkeys((R.RUN_FINISHED, R.COORDINATOR_STOPPING, R.STALLED), told),
}
"""How a reason comes about; what is not here is a delta's outcome."""


@pytest.mark.parametrize("reason", Reason)
def test_whatever_happens_for_a_reason_is_in_the_log_in_the_metrics_and_in_the_status(
    scene: Scene, reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert scene.events.recent(0.0) == [] and not caplog.messages
    HOW.get(reason, outcome)(scene, reason)
    (line,) = caplog.messages
    assert f"reason={reason.code}" in line and repr(reason.sentence) in line
    (event,) = scene.events.recent(12.0)
    assert (event["code"], event["sentence"], event["age_s"]) == (reason.code, reason.sentence, 12.0)
    assert scene.value(event["kind"], reason.code) == 1.0
    shown = scene.screen()
    assert reason.code in shown and reason.sentence in shown and "12s ago" in shown


def test_strangers_that_hang_up_push_out_nothing(scene: Scene) -> None:
    for reason in Reason:
        scene.events.on_disconnect(None, reason, "", scene.machine, 0.0)
    assert {event["code"] for event in scene.events.recent(0.0)} == {"malformed", "wrong_key", "superseded"}


def test_what_repeats_itself_is_one_line_with_a_count_and_no_more_than_so_many_are_kept(scene: Scene) -> None:
    for second in range(5):
        scene.events.add("delta", "bergen", Reason.LATE, f"window {second}", float(second))
    (event,) = scene.events.recent(4.0)
    assert (event["count"], event["age_s"], event["detail"]) == (5, 0.0, "window 4")
    assert scene.value("delta", "late") == 5.0
    for number in range(KEEP):
        scene.events.add("delta", f"node{number}", Reason.LATE, "", 5.0)
    kept = scene.events.recent(5.0)
    assert len(kept) == KEEP and "bergen" not in {event["node"] for event in kept}


def test_every_alarm_has_a_metric_and_its_end_is_told(scene: Scene) -> None:
    alarms = scene.machine.alarms
    hold = StorageHold(alarms)
    hold.begin("a record", DiskFull(Path("disk"), 10, 0))
    alarms.update({"commit of fragment 1": "no", "anchor of oslo": "no", "anchor of bergen": "no"})
    scene.events.alarms(alarms, 0.0)

    def counts() -> list[float | None]:
        value = scene.metrics.registry.get_sample_value
        return [value("farloop_alarm", {"kind": kind}) for kind in ("storage", "commit", "anchor")]

    assert counts() == [1.0, 1.0, 2.0]
    hold.end("a record")
    del alarms["anchor of oslo"]
    scene.events.alarms(alarms, 1.0)
    scene.events.alarms(alarms, 2.0)
    assert counts() == [0.0, 1.0, 1.0]
    recent = [(event["kind"], event["code"]) for event in scene.events.recent(2.0)]
    assert recent[:3] == [("alarm", "storage"), ("alarm", "commit"), ("alarm", "anchor")]
    assert sorted(recent[3:]) == [("over", "anchor"), ("over", "storage")]


def test_peers_that_are_turned_away_are_counted_and_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    log = EventLog(metrics)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            log.turned_away(Reason.MALFORMED, "10.6.6.6", 0.0)
        log.turned_away(Reason.TOO_OFTEN, "a", 0.0)
        assert [record.getMessage().split(" why=")[0] for record in caplog.records] == [
            "rejected peer who='10.6.6.6' reason=MALFORMED",
            "rejected peer who='a' reason=TOO_OFTEN",
        ]
        for i in range(10_000):
            log.turned_away(Reason.WRONG_KEY, f"key-{i}", 0.0)
        log.turned_away(Reason.TOO_OFTEN, "b", 0.0)
    assert 0 < len(caplog.records) <= 19
    assert "who='b'" in caplog.messages[-1], "nor drown what is said of others"
    text = metrics.exposition().decode()
    for reason, count in (("malformed", 100), ("too_often", 2), ("wrong_key", 10_000)):
        assert f'farloop_rejected_peers_total{{reason="{reason}"}} {float(count)}' in text


# --- Files of lines


def line(t: float) -> NodeEvent:
    return {"event": "node", "t": t, "name": "a", "state": "training", "reason": ""}


LINE_BYTES = len(json.dumps(line(0.0))) + 1


def write(log: MetricsLog, *times: float) -> None:
    for t in times:
        log.write(line(t))
    assert log.flush()


def times(path: Path) -> list[float]:
    """Of all lines in all parts."""
    return [json.loads(text)["t"] for part in files(path) for text in part.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_file_that_has_grown_is_put_aside_and_the_last_few_stay(path: Path) -> None:
    log = MetricsLog(path, part_bytes=2 * LINE_BYTES, keep=3)
    write(log, *map(float, range(9)))
    log.close()
    assert [part.name for part in files(path)] == [
        *(f"metrics-00000{number}.jsonl" for number in (1, 2, 3)), "metrics.jsonl"
    ]  # fmt: skip
    assert times(path) == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    again = MetricsLog(path, part_bytes=2 * LINE_BYTES, keep=3)
    write(again, 9.0, 10.0)
    again.close()
    assert times(path) == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0], "the numbers go on"


def test_lines_on_a_full_disk_are_dropped_whole_and_said_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    free, real = [LINE_BYTES // 2], os.pwrite

    def half(fd: int, data: bytes, offset: int) -> int:
        return real(fd, data[: free.pop()], offset) if free else refuse(errno.ENOSPC)()

    log = MetricsLog(path)
    write(log, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half)
        write(log, 2.0, 3.0, 4.0)
    assert log.dropped == 3
    write(log, 5.0)
    log.close()
    assert times(path) == [1.0, 5.0]
    dropped, again = caplog.messages
    assert dropped.startswith("lines dropped") and again == f"lines written again path={path} dropped=3"


def test_a_disk_that_hangs_is_not_waited_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers, real = threading.Event(), os.pwrite
    monkeypatch.setattr("farloop.coordinator.observe.event_log.FLUSH_S", 0.01)
    monkeypatch.setattr(os, "pwrite", lambda *wanted: answers.wait() and real(*wanted))
    log = MetricsLog(path)
    for t in range(MOST_WAITING + 100):
        log.write(line(float(t)))
    log.close()
    assert log.dropped >= 99 and "the disk does not answer" in caplog.messages[0]
    answers.set()
    while not log.flush():
        pass
    log.close()
    assert len(times(path)) == MOST_WAITING + 100 - log.dropped


@pytest.mark.parametrize("calls", [["open"], ["replace"], ["open", "listdir"]])
@pytest.mark.parametrize("code", [errno.EROFS, errno.EMFILE])
def test_a_file_that_cannot_be_opened_or_put_aside_stops_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, calls: list[str], code: int
) -> None:
    log = MetricsLog(path, part_bytes=LINE_BYTES)
    if "open" not in calls:
        write(log, 1.0)
    with monkeypatch.context() as patch:
        for call in calls:
            patch.setattr(os, call, refuse(code))
        write(log, 2.0)
    assert log.dropped == 1
    write(log, 3.0)
    log.close()
    assert times(path) == ([3.0] if "open" in calls else [1.0, 3.0])


def test_the_end_of_a_large_file_is_read_and_no_more(path: Path) -> None:
    size = 256 << 20
    with path.open("wb") as file:
        file.truncate(size)  # a hole: no bytes on the disk
        file.seek(size)
        file.write(b"\n" + json.dumps(line(77.5)).encode() + b"\n" + b'{"event": "node", "t": 9')
    tracemalloc.start()
    try:
        assert last_time(path) == 77.5
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_the_time_goes_on_from_what_can_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert last_time(path) == 0.0
    log = MetricsLog(path, part_bytes=LINE_BYTES)
    write(log, 1.0, 2.0)
    log.close()
    damaged = ('{"t": NaN}\n', '{"t": 1e999}\n', '{"t": 1%s}\n' % ("0" * 400), '{"t": -5}\n', "[" * 100_000, "\0\xff\0")
    for broken in ('{"event": "no', "[]\n", "7\n", '{"t": null}\n', '{"t": "x"}\n', *damaged):
        path.write_text(broken)
        assert last_time(path) == 1.0, "of the part that was put aside"
    path.unlink()
    path.mkdir()
    assert last_time(path) == 1.0
    path.rmdir()
    path.symlink_to(path)
    assert last_time(path) == 1.0
    monkeypatch.setattr(Path, "open", refuse())
    assert last_time(path) == 0.0
