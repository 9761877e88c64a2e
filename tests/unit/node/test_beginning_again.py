"""A run that was wound back: a node gives up all that it knows of the lost history, and joins anew (protocol S)."""

from pathlib import Path

import pytest
from lone_nodes import ROUNDS, committed, hear, snapshot, undecided, update, welcome

from farloop.algo.spec import Lease
from farloop.node import events as ev
from farloop.node.machine import NodeMachine
from farloop.node.reports import Announced, Reports, TimeAccount
from farloop.node.sample_cursor import LeaseCursor
from farloop.node.state_dir import NodeState
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason


@pytest.fixture
def machine() -> NodeMachine:
    """That, with the update to version 4, which is not merged yet."""
    machine = undecided()
    hear(machine, committed(4, digest=44))
    machine.handle(ev.BlobArrived(blob=update(4)))
    assert machine.versions == (3,), "the overlap is not over"
    return machine


def test_what_is_undecided_or_not_merged_is_forgotten_and_the_node_joins_anew(machine: NodeMachine) -> None:
    (undecided,) = machine.fragments[0].sent
    commands = hear(machine, welcome(epoch=8, history=8, version=3))
    assert commands == [ev.ForgetBlob(blob=undecided.blob), ev.ForgetBlob(blob=update(4)), ev.Resync(history=8)]
    assert (machine.stage, machine.versions, machine.schedule.start_round) == ("joining", (-1,), None)
    assert machine.waiting == "the first snapshot" and machine.incarnation == 1 and machine.inner_steps == 4
    installed = machine.handle(snapshot(3))
    assert installed == [
        ev.Install(fragment=0, version=3, codec="q4"),
        ev.Merge(fragment=0, mix=0.0),
        ev.Tell(message=msg.Ready(history=8)),
    ]
    hear(machine, msg.Start(round=ROUNDS[3], lease=None))
    assert machine.running and machine.waiting is None


def test_the_lost_version_of_the_same_number_is_never_merged(machine: NodeMachine) -> None:
    """Its bytes are here; the new one is announced under the same name, and is waited for."""
    hear(machine, welcome(epoch=8, history=8, version=3))
    machine.handle(snapshot(3))
    commands = hear(machine, committed(4, digest=444))
    assert not any(isinstance(command, ev.Apply) for command in commands)
    commands = machine.handle(ev.BlobArrived(blob=update(4)))
    assert ev.Apply(fragment=0, version=4, anchor_digest=444, codec="q4") in commands


def test_deltas_name_the_history_of_their_base(machine: NodeMachine) -> None:
    hear(machine, welcome(epoch=8, history=8, version=3))
    machine.handle(snapshot(3))
    hear(machine, msg.Start(round=ROUNDS[2], lease=None))
    encodes: list[ev.Encode] = []
    for _ in range(8):
        assert machine.waiting is None
        encodes += [c for c in machine.handle(ev.StepDone(tokens=10)) if isinstance(c, ev.Encode)]
    assert [(encode.blob.version, encode.history) for encode in encodes] == [(3, 8)]
    assert encodes[0].steps == 8, "of what was done since the snapshot alone"


def test_what_comes_before_the_first_step_is_taken_whole(machine: NodeMachine) -> None:
    """As by a late joiner: its weights are an anchor, and nothing of them is work."""
    hear(machine, welcome(epoch=8, history=8, version=3))
    machine.handle(snapshot(3))
    hear(machine, msg.Start(round=ROUNDS[3], lease=None))
    hear(machine, committed(4, digest=444))
    assert machine.waiting == "fragment 0, version 4"
    assert ev.Merge(fragment=0, mix=0.0) in machine.handle(ev.BlobArrived(blob=update(4)))


def test_a_later_start_of_the_coordinator_in_the_same_history_changes_nothing(machine: NodeMachine) -> None:
    commands = hear(machine, welcome(epoch=6, version=3))
    assert machine.stage == "training" and machine.fragments[0].sent
    assert not any(isinstance(command, ev.Resync) for command in commands)


def test_a_node_that_drains_has_nothing_left_to_wait_for() -> None:
    machine = undecided()
    machine.handle(ev.DrainRequested())
    assert machine.stage == "draining"
    commands = hear(machine, welcome(epoch=8, history=8, version=3))
    assert commands[-1] == ev.Tell(message=msg.Leave(reason=Reason.DRAINED))


def test_a_coordinator_that_holds_the_run_does_not_end_the_node(machine: NodeMachine) -> None:
    for message in (
        msg.Leave(reason=Reason.HOLDING, detail="node b is ahead"),
        msg.Refused(reason=Reason.HOLDING, detail="node b is ahead", retriable=True),
    ):
        assert hear(machine, message) == []
    assert machine.stage == "training" and machine.fragments[0].sent


# --- the greeting


def anchor(version: int) -> msg.AnchorRef:
    return msg.AnchorRef(fragment=0, version=version, digest=version)


def test_a_greeting_names_what_was_told_before_it_is_merged() -> None:
    """Else a coordinator over an old copy would let a node in that merges what the copy knows nothing of."""
    announced = Announced()
    for version in (4, 5, 4):
        announced.heard(committed(version, digest=version))
    assert announced.beside(0, (anchor(3),)) == (0, (anchor(3),), (anchor(5),))


def test_what_was_told_of_another_history_than_the_anchors_stays_out() -> None:
    """The link's thread hears of a rewind long before the training thread gives its anchors up."""
    announced = Announced()
    announced.heard(committed(4, digest=4))
    announced.heard(welcome(epoch=8, history=8))
    announced.heard(committed(5, digest=5))
    assert announced.beside(0, (anchor(4),)) == (0, (anchor(4),), ())
    assert announced.beside(8, (anchor(4),)) == (8, (anchor(4),), (anchor(5),))
    assert announced.beside(0, ()) == (8, (), (anchor(5),)), "who holds nothing follows what it was told"


def test_after_a_rewind_a_greeting_claims_nothing_of_the_old(machine: NodeMachine, tmp_path: Path) -> None:
    reports = Reports(machine, TimeAccount(), LeaseCursor(), NodeState.claim(tmp_path), "", None)
    reports.starts_in(3)
    reports.announced.heard(committed(4, digest=44))
    hear(machine, welcome(epoch=8, history=8, version=3))
    reports.announced.heard(welcome(epoch=8, history=8, version=3))
    reports.begin_again(8)
    hello = reports.hello()
    assert (hello.history, hello.anchors, hello.announced, hello.round) == (8, (), (), None)


def test_samples_of_a_lost_history_are_given_up_and_may_be_granted_again() -> None:
    cursor = LeaseCursor()
    cursor.grant(Lease(start=0, count=10))
    cursor.take(4)
    cursor.begin_again()
    assert (cursor.remaining, cursor.watermark) == (0, 0)
    cursor.grant(Lease(start=5, count=10))
    assert cursor.take(2) == [5, 6]
