"""Every refusal, late delta, drop and leave has a reason: in the log, the metrics and the status (protocol E, V)."""

import dataclasses
import io
import logging
from pathlib import Path

import pytest
from plain_runs import plain_hello
from rich.console import Console

from farloop.algo.spec import BlobId, BlobKind, NodeId, RunSpec
from farloop.cli.status_view import draw
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.ledger import Ledger
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.decide.run_state import StorageHold
from farloop.coordinator.errors import DiskFull
from farloop.coordinator.observe.event_log import KEEP, EventLog, RejectionCounter
from farloop.coordinator.observe.metrics import Metrics
from farloop.monitoring.status import Status
from farloop.monitoring.status_summary import view_of
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A = NodeId("oslo")
BLOB = BlobId(kind=BlobKind.DELTA, fragment=1, version=4, node=A, incarnation=1, seq=5)


class Scene:
    """A machine without nodes, and what is told of it."""

    def __init__(self, spec: RunSpec) -> None:
        self.machine = CoordinatorMachine(Ledger.begin(rec.RunStarted(spec=spec, epoch=1)), now=0.0)
        self.metrics = Metrics()
        self.happenings = EventLog(self.metrics)

    def value(self, kind: str, code: str) -> float:
        return self.metrics.registry.get_sample_value("farloop_events_total", {"kind": kind, "reason": code}) or 0.0

    def screen(self, *, width: int = 300) -> str:
        """What `farloop status` prints."""
        console = Console(width=width, file=io.StringIO())
        console.print(draw(view_of(a_status(self.happenings)), width=width, max_nodes=9))
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    def greet(self, session: int = 1, node: NodeId = A, **changes: object) -> None:
        hello = plain_hello(node=node, device="cpu")
        self.handle(ev.NodeHello(session=session, node=node, hello=dataclasses.replace(hello, **changes)))  # type: ignore[arg-type]

    def handle(self, event: ev.Event) -> None:
        self.happenings.saw(event, self.machine, 0.0)
        for command in self.machine.handle(event, 0.0):
            self.happenings.carries_out(command, 0.0)


def a_status(happenings: EventLog) -> Status:
    return {
        "run": {
            "name": "small", "fingerprint": "0", "method": "streaming", "codec_up": "q4", "codec_down": "q4",
            "steps": 40, "h": 10, "tau": 2, "mix": 0.5, "fragments": 2, "parameters": 500, "state": "training",
            "epoch": 1, "started_s": 60.0, "uptime_s": 60.0,
        },
        "position": 4.0, "round": 0, "versions": [0, 0], "digests": ["0", "0"], "outer_steps": 0, "commits": 0,
        "nodes": [], "windows": [], "evaluations": [], "alarms": [], "recent": happenings.recent(12.0),
    }  # fmt: skip


@pytest.fixture
def scene(spec: RunSpec) -> Scene:
    return Scene(spec)


def refusal(scene: Scene, reason: Reason) -> None:
    scene.happenings.carries_out(
        ev.Refuse(session=1, refused=msg.Refused(reason=reason, detail="here", retriable=False)), 0.0
    )


def outcome(scene: Scene, reason: Reason) -> None:
    tell = ev.Tell(node=A, message=msg.Outcome(blob=BLOB, reason=reason, detail=reason.sentence))
    scene.happenings.carries_out(tell, 0.0)


def leave(scene: Scene, reason: Reason) -> None:
    scene.happenings.carries_out(ev.Record(record=rec.NodeLeft(node=A, reason=reason)), 0.0)


def session_end(scene: Scene, reason: Reason) -> None:
    scene.happenings.parted(A, reason, reason.sentence, scene.machine, 0.0)


def farewell(scene: Scene, reason: Reason) -> None:
    scene.happenings.told("farewell", "", reason, "", 0.0)


def stall(scene: Scene, reason: Reason) -> None:
    scene.happenings.told("stalled", A, reason, "", 0.0)


HOW = {
    Reason.NONE: leave,
    Reason.PROTOCOL_VERSION: refusal,
    Reason.WRONG_RUN: refusal,
    Reason.WRONG_LAYOUT: refusal,
    Reason.WRONG_KEY: refusal,
    Reason.NAME_TAKEN: refusal,
    Reason.FENCED: refusal,
    Reason.MALFORMED: session_end,
    Reason.OLD_INCARNATION: leave,
    Reason.CLOSED: session_end,
    Reason.SILENT: session_end,
    Reason.DRAINED: leave,
    Reason.SUPERSEDED: session_end,
    Reason.RUN_FINISHED: farewell,
    Reason.COORDINATOR_STOPPING: farewell,
    Reason.STALLED: stall,
}
"""How a reason comes about; what is not here is a delta's outcome."""


@pytest.mark.parametrize("reason", Reason)
def test_whatever_happens_for_a_reason_is_in_the_log_in_the_metrics_and_in_the_status(
    scene: Scene, reason: Reason, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert scene.happenings.recent(0.0) == [] and not caplog.messages
    HOW.get(reason, outcome)(scene, reason)
    (line,) = caplog.messages
    assert f"reason={reason.code}" in line and repr(reason.sentence) in line
    (told,) = scene.happenings.recent(12.0)
    assert (told["code"], told["sentence"], told["age_s"]) == (reason.code, reason.sentence, 12.0)
    assert scene.value(told["kind"], reason.code) == 1.0
    shown = scene.screen()
    assert reason.code in shown and reason.sentence in shown and "12s ago" in shown


def test_codes_and_sentences_tell_reasons_apart() -> None:
    assert len({reason.code for reason in Reason}) == len({reason.sentence for reason in Reason}) == len(Reason)


@pytest.mark.parametrize("width", [80, 120])
def test_the_last_happenings_fit_the_screen(scene: Scene, width: int) -> None:
    for reason in Reason:
        outcome(scene, reason)
    lines = scene.screen(width=width).splitlines()
    assert max(map(len, lines)) <= width
    shown = [line for line in lines if "12s ago" in line]
    assert 1 < len(shown) < len(Reason)
    assert list(Reason)[-1].code in shown[-1]


def test_a_node_that_is_refused_is_named(scene: Scene) -> None:
    scene.greet(session=7, fingerprint="another")
    (told,) = scene.happenings.recent(0.0)
    assert (told["kind"], told["node"], told["code"]) == ("refused", "oslo", "wrong_run")
    assert told["detail"].startswith("the node wants run another, this is ")


def test_a_delta_that_comes_from_a_node_that_has_not_started_says_so(scene: Scene) -> None:
    scene.greet()
    offer = msg.Offer(blob=dataclasses.replace(BLOB, version=0, seq=1), size=1, digest=1, window=1, contributors=())
    scene.handle(ev.NodeMessage(session=1, node=A, message=offer))
    (told,) = scene.happenings.recent(0.0)
    assert (told["kind"], told["node"], told["code"]) == ("delta", "oslo", "corrupt")
    assert told["detail"] == "fragment 1, base 0: the offer does not fit its sender"


@pytest.mark.parametrize("started", [True, False])
def test_a_leave_is_told_once_whether_the_node_had_started_or_not(scene: Scene, started: bool) -> None:
    scene.greet()
    if started:
        scene.handle(ev.NodeMessage(session=1, node=A, message=msg.Ready()))
    scene.handle(ev.NodeMessage(session=1, node=A, message=msg.Leave(reason=Reason.DRAINED)))
    scene.happenings.parted(A, Reason.DRAINED, Reason.DRAINED.sentence, scene.machine, 0.0)
    assert [(told["kind"], told["code"]) for told in scene.happenings.recent(0.0)] == [("left", "drained")]


def test_a_window_that_closes_without_a_node_says_why(scene: Scene) -> None:
    record = rec.WindowCommitted(
        fragment=1, version=5, round=2, merged=(), drops=(msg.Drop(node=A, reason=Reason.SILENT),), blobs=(),
        anchor_digest=0, target_digest=0, momentum_digest=None, next_window=None, update_size=0, update_digest=0,
        outer_lr=1.0, outer_momentum=0.0, why="",
    )  # fmt: skip
    scene.happenings.committed(record, 0.0)
    (told,) = scene.happenings.recent(0.0)
    assert (told["kind"], told["code"], told["detail"]) == ("dropped", "silent", "fragment 1, window 5")


def test_strangers_that_hang_up_push_out_nothing(scene: Scene) -> None:
    for reason in Reason:
        scene.happenings.parted(None, reason, "", scene.machine, 0.0)
    assert {told["code"] for told in scene.happenings.recent(0.0)} == {"malformed", "wrong_key", "superseded"}


def test_what_repeats_itself_is_one_line_with_a_count_and_no_more_than_so_many_are_kept(scene: Scene) -> None:
    for second in range(5):
        scene.happenings.told("delta", "bergen", Reason.LATE, f"window {second}", float(second))
    (told,) = scene.happenings.recent(4.0)
    assert (told["count"], told["age_s"], told["detail"]) == (5, 0.0, "window 4")
    assert scene.value("delta", "late") == 5.0
    for number in range(KEEP):
        scene.happenings.told("delta", f"node{number}", Reason.LATE, "", 5.0)
    kept = scene.happenings.recent(5.0)
    assert len(kept) == KEEP and "bergen" not in {told["node"] for told in kept}


def test_what_a_node_says_reaches_the_terminal_without_control_characters(scene: Scene) -> None:
    scene.greet()
    scene.handle(
        ev.NodeMessage(session=1, node=A, message=msg.Leave(reason=Reason.NONE, detail="\x1b[2J\nbye " + "x" * 999))
    )
    (told,) = scene.happenings.recent(0.0)
    assert told["detail"].startswith("?[2J?bye xxx") and len(told["detail"]) < 400


def test_every_alarm_has_a_metric_and_its_end_is_told(scene: Scene) -> None:
    alarms = scene.machine.alarms
    hold = StorageHold(alarms)
    hold.begin("a record", DiskFull(Path("disk"), 10, 0))
    alarms.update({"commit of fragment 1": "no", "anchor of oslo": "no", "anchor of bergen": "no"})
    scene.happenings.alarms(alarms, 0.0)

    def count(kind: str) -> float | None:
        return scene.metrics.registry.get_sample_value("farloop_alarm", {"kind": kind})

    assert [count(kind) for kind in ("storage", "commit", "anchor")] == [1.0, 1.0, 2.0]
    hold.end("a record")
    del alarms["anchor of oslo"]
    scene.happenings.alarms(alarms, 1.0)
    scene.happenings.alarms(alarms, 2.0)
    assert [count(kind) for kind in ("storage", "commit", "anchor")] == [0.0, 1.0, 1.0]
    told = [(told["kind"], told["code"]) for told in scene.happenings.recent(2.0)]
    assert told[:3] == [("alarm", "storage"), ("alarm", "commit"), ("alarm", "anchor")]
    assert sorted(told[3:]) == [("over", "anchor"), ("over", "storage")]


def test_an_anchor_that_did_not_match_is_told(scene: Scene) -> None:
    scene.greet()
    scene.handle(ev.NodeMessage(session=1, node=A, message=msg.Fetch(fragment=1)))
    (told,) = scene.happenings.recent(0.0)
    assert (told["kind"], told["node"], told["code"]) == ("anchor", "oslo", "anchor_mismatch")


def test_everything_is_counted_by_its_reason_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    refusals = RejectionCounter(metrics)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            refusals(Reason.MALFORMED, "10.6.6.6")
        refusals(Reason.TOO_OFTEN, "a")
    text = metrics.exposition().decode()
    assert 'farloop_rejected_peers_total{reason="malformed"} 100.0' in text
    assert 'farloop_rejected_peers_total{reason="too_often"} 1.0' in text
    assert [record.getMessage().split(" why=")[0] for record in caplog.records] == [
        "rejected peer who='10.6.6.6' reason=MALFORMED",
        "rejected peer who='a' reason=TOO_OFTEN",
    ]


def test_a_crowd_of_strangers_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    refusals = RejectionCounter(Metrics())
    with caplog.at_level(logging.WARNING):
        for i in range(10_000):
            refusals(Reason.WRONG_KEY, f"key-{i}")
        refusals(Reason.TOO_OFTEN, "a")
    assert 0 < len(caplog.records) <= 17
    assert "TOO_OFTEN" in caplog.records[-1].getMessage(), "nor drown what is said of others"
