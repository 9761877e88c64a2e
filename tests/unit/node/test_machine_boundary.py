"""Covers `node/machine.py` at one step boundary: what comes first, and who is waited for (protocol D, F)."""

import pytest
from plain_runs import plain_terms

from farloop.algo import schedule
from farloop.algo.spec import (
    BlobId,
    BlobKind,
    Fragment,
    Identity,
    Layout,
    NodeId,
    RunSpec,
    TensorSlot,
)
from farloop.node import events as ev
from farloop.node.machine import NodeMachine
from farloop.wire import messages as msg
from farloop.wire.reasons import Reason

A = NodeId("a")
H = 4
LAYOUT = Layout(
    slots=2,
    fragments=tuple(
        Fragment(index=i, slot=i, numel=256, tensors=(TensorSlot(name=f"t{i}", shape=(256,), offset=0),))
        for i in range(2)
    ),
)


def begun(*, tau: int) -> NodeMachine:
    """Two fragments, due at step 2 and 4 of every round; training from round 0 on."""
    identity = Identity(
        name="boundary", model="own", layout=LAYOUT, anchor_digests=(0, 0), data="own", num_samples=0,
        evaluation_set="none", seed=0,
    )  # fmt: skip
    terms = plain_terms(h=H, tau=tau, mix=0.5)
    rounds = schedule.first_rounds(terms, count=10)
    machine = NodeMachine(name=A, incarnation=1)
    welcome = msg.Welcome(
        protocol=1,
        epoch=1,
        spec=RunSpec(identity=identity, terms=terms),
        lane_token=b"",
        versions=(0, 0),
        windows=schedule.first_windows(terms, LAYOUT),
        rounds=rounds,
    )
    machine.handle(ev.Received(message=welcome))
    for index in range(2):
        machine.handle(ev.BlobArrived(blob=BlobId(kind=BlobKind.SNAPSHOT, fragment=index, version=0)))
    machine.handle(ev.Received(message=msg.Start(round=rounds[0], lease=None)))
    assert machine.running
    return machine


def step(machine: NodeMachine) -> list[ev.Command]:
    assert machine.waiting is None
    return machine.handle(ev.StepDone(tokens=1))


def commit_of_last_slot(machine: NodeMachine) -> None:
    """Version 1 of fragment 1 is announced, and its bytes are here."""
    spec = machine.spec
    assert spec is not None
    window = schedule.first_windows(spec.terms, LAYOUT)[1]
    rounds = dict(enumerate(schedule.first_rounds(spec.terms)))
    committed = msg.Committed(
        fragment=1,
        version=1,
        size=1,
        digest=0,
        anchor_digest=11,
        merged=(msg.Share(node=A, weight=1.0),),
        drops=(),
        next_window=schedule.window_after(spec.terms, LAYOUT, window, rounds),
        rounds=(),
    )
    assert machine.handle(ev.Received(message=committed)) == []
    assert machine.handle(ev.BlobArrived(blob=msg.update_id(committed))) == []


def test_within_one_inner_step_all_that_is_due_is_encoded_before_anything_is_merged() -> None:
    """D: the merge of one fragment and the send of another fall on one step; the delta must not depend on it."""
    machine = begun(tau=2)
    for _ in range(H):
        step(machine)
    commit_of_last_slot(machine)
    step(machine)
    commands = step(machine)
    of = [(type(command), command.blob.fragment if isinstance(command, ev.Encode) else 1) for command in commands]
    assert of == [(ev.Encode, 0), (ev.Apply, 1), (ev.ForgetBlob, 1), (ev.Merge, 1)]


@pytest.mark.parametrize("tau", [0, 1, 2])
def test_without_a_coordinator_training_goes_on_to_send_plus_tau_and_says_what_it_stands_still_for(tau: int) -> None:
    """F: a run that waits for all stands still while the coordinator is away, and no sooner than it must."""
    machine = begun(tau=tau)
    for _ in range(H):
        step(machine)
    machine.handle(ev.Disconnected(reason=Reason.SILENT))
    for _ in range(tau):
        step(machine)
    assert machine.waiting == "fragment 1, window 1"
    assert machine.inner_steps == H + tau
