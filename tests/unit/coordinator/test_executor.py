"""Covers `coordinator/executor.py`: what an unexpected error ends. What a run does: `tests/unit/sim`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import stored_runs
from disk_faults import refuse
from plain_runs import plain_hello, plain_spec
from virtual_files import VirtualFiles
from virtual_host import VirtualHost

from farloop.algo.spec import BlobId, BlobKind, NodeId, RunSpec
from farloop.coordinator.decide import events as ev
from farloop.coordinator.decide import records as rec
from farloop.coordinator.decide.machine import CoordinatorMachine
from farloop.coordinator.errors import MachineBroken, StorageFailed
from farloop.coordinator.executor import CoordinatorExecutor
from farloop.coordinator.net.sessions import Peer
from farloop.coordinator.storage.storage_queue import StorageQueue
from farloop.coordinator.uploads import DeltaUploads
from farloop.wire import events as wire_ev
from farloop.wire.messages import Fetch, Finished, Offer, Role, Welcome
from farloop.wire.reasons import Reason
from farloop.wire.session import Session

A = NodeId("a")
PARTED = ev.NodeDisconnected(session=1, node=A, reason=Reason.CLOSED)
DECIDED = ev.Tell(node=A, message=Finished())
BLOB = BlobId(kind=BlobKind.DELTA, fragment=0, version=0, node=A, incarnation=1, seq=1)
OFFER = Offer(blob=BLOB, size=10, digest=1, window=1, contributors=())


class Eyes:
    """An observer that keeps the commands."""

    def __init__(self) -> None:
        self.commands: list[ev.Command] = []

    def on_command(self, command: ev.Command) -> None:
        self.commands.append(command)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Desk(VirtualHost):
    """An executor and one session; what goes wrong in the session is kept, as the session router ends it."""

    def __init__(self, spec: RunSpec, files: VirtualFiles | None = None) -> None:
        super().__init__()
        store = stored_runs.begun(Path("/state"), spec, files=files or VirtualFiles())
        self.machine = CoordinatorMachine(store.ledger.copy(), now=0.0)
        self.eyes, self.ended = Eyes(), list[tuple[Peer, Exception]]()
        self.executor = CoordinatorExecutor(
            clock=self.clock,
            compute=self.compute,
            storage=StorageQueue(store, self.storage, self.clock, {}, self.fatal),
            store=store,
            machine=self.machine,
            router=self,
            observer=self.eyes,
            fatal=self.fatal,
            adapt="off",
            model_path=Path("/state/model.safetensors"),
        )
        self.peer = self.new_peer(1)

    def new_peer(self, number: int) -> Peer:
        session = Session(Role.COORDINATOR, 0.0)
        return Peer(number, session, None, "a", "a", b"token", {})

    @contextmanager
    def working_for(self, peer: Peer) -> Iterator[Session]:
        try:
            yield peer.session
        except (MachineBroken, StorageFailed):
            raise
        except Exception as error:  # noqa: BLE001 - as the router does
            self.ended.append((peer, error))

    def closed_by_us(self, peer: Peer, reason: Reason, told: str = "") -> None:
        self.executor.on_session_event(peer, wire_ev.SessionClosed(reason=reason, detail=""))

    def decide(self, *commands: ev.Command) -> None:
        """Have the machine give these commands."""
        self.machine.handle = lambda event, now: list(commands)  # type: ignore[method-assign]
        self.executor.happened(PARTED)

    def accept(self, peer: Peer) -> None:
        """A greeting, and the machine lets the node in."""
        welcome = Welcome(protocol=1, epoch=1, spec=plain_spec(), lane_token=b"", versions=(0,), windows=(), rounds=())
        accept = ev.Accept(session=peer.number, node=A, welcome=welcome)
        self.machine.handle = lambda event, now: [accept]  # type: ignore[method-assign]
        self.executor.on_session_event(peer, wire_ev.MessageReceived(message=plain_hello(node=A)))
        self.run()
        self.ended.clear()  # its session, without a node at the other end, takes no welcome

    def note_events(self) -> list[ev.Event]:
        """From now on the machine is told in vain."""
        handled: list[ev.Event] = []
        self.machine.handle = lambda event, now: handled.append(event) or []  # type: ignore[method-assign,func-returns-value]
        return handled


@pytest.fixture
def desk(spec: RunSpec) -> Desk:
    return Desk(spec)


def test_a_machine_that_fails_is_used_only_if_its_invariants_hold(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the error goes on to whose event it was."""

    def half(*args: object) -> Any:
        desk.machine._decisions.do(DECIDED)
        refuse()()

    monkeypatch.setattr(desk.machine, "handle", half)
    with pytest.raises(OSError, match="Input/output error"):
        desk.executor.happened(PARTED)
    desk.run()
    assert desk.eyes.commands[-1] == DECIDED, "what was decided is true in the ledger"
    desk.machine.windows.clear()
    with pytest.raises(MachineBroken, match="NodeDisconnected broke the machine"):
        desk.executor.happened(PARTED)


def test_what_watches_the_run_stops_nothing_in_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    handled = desk.note_events()
    monkeypatch.setattr(desk.eyes, "on_event", refuse(), raising=False)
    desk.executor.happened(PARTED)
    assert handled == [PARTED]


def test_commands_wait_for_the_record_before_them_and_for_nothing_that_is_told_meanwhile(desk: Desk) -> None:
    """P: durable before what follows from it is told."""
    desk.decide(ev.Record(record=rec.EpochSeen(epoch=1)), DECIDED)
    desk.run_for(0.005)
    assert [type(command) for command in desk.eyes.commands] == [ev.Record]
    desk.decide(DECIDED, ev.Forget(blob=BLOB))
    desk.run_for(0.001)
    assert [type(command) for command in desk.eyes.commands] == [ev.Record]
    desk.run()
    assert [type(command) for command in desk.eyes.commands] == [ev.Record, ev.Tell, ev.Tell, ev.Forget]


@pytest.mark.parametrize("there", [True, False])
def test_a_delta_that_cannot_be_kept_has_its_outcome_and_ends_its_session_alone(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setattr("farloop.coordinator.uploads.verify", refuse())
    monkeypatch.setattr(DeltaUploads, "arrived", lambda self, blob: OFFER)
    if there:
        desk.accept(desk.peer)
    handled = desk.note_events()
    desk.executor.on_session_event(desk.peer, wire_ev.BlobReceived(blob=BLOB, data=bytearray(10)))
    desk.run()
    assert [peer for peer, _ in desk.ended] == ([desk.peer] if there else [])
    (event,) = handled
    assert isinstance(event, ev.InputFailed) and event.reason is Reason.FAULT and desk.errors == []


def test_a_failure_of_the_disk_ends_the_process(spec: RunSpec) -> None:
    files = VirtualFiles()
    desk = Desk(spec, files)
    files.failing_sync = lambda path: path.suffix == ".log"
    desk.decide(ev.Record(record=rec.EpochSeen(epoch=1)), DECIDED)
    desk.run()
    assert [type(error) for error in desk.errors] == [StorageFailed]
    assert DECIDED not in desk.eyes.commands


def test_the_end_of_a_session_that_another_one_took_the_place_of_is_not_its_nodes(desk: Desk) -> None:
    """A node that dials again is accepted before the end of its old session is noticed."""
    old, new = desk.peer, desk.new_peer(2)
    desk.accept(old)
    desk.accept(new)
    handled = desk.note_events()
    desk.executor.on_session_event(old, wire_ev.MessageReceived(message=Fetch(fragment=0)))
    desk.executor.on_session_event(old, wire_ev.SessionClosed(reason=Reason.CLOSED, detail=""))
    assert desk.executor.sessions == {A: new} and handled == []
    desk.executor.on_session_event(new, wire_ev.SessionClosed(reason=Reason.CLOSED, detail=""))
    assert desk.executor.sessions == {} and [type(event) for event in handled] == [ev.NodeDisconnected]
