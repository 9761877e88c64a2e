"""A coordinator over an old copy of its state asks what a node holds: it tells, sends, and stands by it (S)."""

import dataclasses

import pytest
import torch
from lone_nodes import ROUNDS, committed, hear, undecided, update, welcome
from torch import nn

from farloop.algo.digest import digest
from farloop.algo.spec import BlobKind, Lease, NodeId
from farloop.node import events as ev
from farloop.node.encoder import encode_anchor
from farloop.node.machine import NodeMachine
from farloop.node.replica import Replica
from farloop.node.reports import all_held
from farloop.node.sample_cursor import LeaseCursor
from farloop.quant.blob import unpack_anchor
from farloop.wire import messages as msg
from farloop.wire.blobs import blob_digest
from farloop.wire.reasons import Reason

RECALLS = dataclasses.replace(welcome(epoch=2, version=0), recalls=True)
"""Of a coordinator that is behind in everything, its epoch included."""


def held(machine: NodeMachine) -> msg.Held:
    (told,) = hear(machine, RECALLS)
    assert isinstance(told, ev.Tell) and isinstance(told.message, msg.Held)
    return told.message


@pytest.fixture
def machine() -> NodeMachine:
    """It holds version 3, and version 4 has come while the overlap is not over."""
    machine = undecided()
    hear(machine, committed(4, digest=44))
    machine.handle(ev.BlobArrived(blob=update(4)))
    assert machine.versions == (3,)
    return machine


def test_it_tells_what_follows_its_version_and_keeps_following_what_it_does(machine: NodeMachine) -> None:
    told = held(machine)
    assert [(terms.fragment, terms.window) for terms in told.windows] == [(0, 4)] and told.final == ()
    assert set(ROUNDS) >= set(told.rounds) and told.windows[0].round in {plan.index for plan in told.rounds}
    assert [revision.number for revision in told.revisions] == [0]
    assert (machine.epoch, machine.history, machine.stage) == (5, 0, "training"), "a lower epoch fences nobody here"
    assert not machine.connected, "it is let in for this alone"


def test_what_it_told_of_stays_as_it_is_until_the_session_ends(machine: NodeMachine) -> None:
    held(machine)
    stands = [machine.handle(ev.StepDone(tokens=10)) for _ in range(2)]
    assert machine.versions == (3,) and not any(isinstance(c, ev.Apply) for commands in stands for c in commands)
    assert hear(machine, msg.Recall(fragment=0)) == [ev.SendAnchor(fragment=0)]
    moved = machine.handle(ev.Disconnected(reason=Reason.HOLDING))
    assert any(isinstance(command, ev.Apply) for command in moved) and machine.versions == (4,)
    assert hear(machine, msg.Recall(fragment=0)) == [], "that was another session"


def test_who_holds_nothing_yet_has_nothing_to_tell() -> None:
    assert hear(NodeMachine(name=NodeId("new"), incarnation=1), RECALLS) == []


def test_the_next_welcome_of_a_new_history_has_it_begin_anew(machine: NodeMachine) -> None:
    held(machine)
    machine.handle(ev.Disconnected(reason=Reason.HOLDING))
    commands = hear(machine, welcome(epoch=8, history=8, version=4))
    assert ev.Resync(history=8) in commands and machine.versions == (-1,)


def test_anchors_and_samples_are_told_as_they_are() -> None:
    module = nn.Module()
    module.t = nn.Parameter(torch.arange(256.0))
    replica = Replica(module, RECALLS.spec.identity.layout, gradients=False)
    assert all_held(msg.Held(anchors=(), windows=(), final=(), rounds=(), revisions=()), replica, LeaseCursor()) == (
        msg.Held(anchors=(), windows=(), final=(), rounds=(), revisions=())
    ), "an anchor that is not there is not told of"
    replica.anchors[0].copy_(torch.arange(256.0) / 3)
    replica.versions[0], replica.digests[0] = 7, digest(replica.anchors[0])
    samples = LeaseCursor()
    for start in (100, 10):
        samples.grant(Lease(start=start, count=5))
    samples.take(3)
    told = all_held(msg.Held(anchors=(), windows=(), final=(), rounds=(), revisions=()), replica, samples)
    assert told.anchors == (msg.AnchorRef(fragment=0, version=7, digest=replica.digests[0]),)
    assert told.unused == (Lease(start=103, count=2), Lease(start=10, count=5)) and told.granted_to == 105

    offer, data = encode_anchor(replica, 0, NodeId("a"), epoch=9)
    assert (offer.blob.kind, offer.blob.version, offer.blob.node) == (BlobKind.SNAPSHOT, 7, "a")
    assert (offer.size, offer.digest) == (len(data), blob_digest(data))
    assert digest(unpack_anchor(data, replica.layout.fragments[0], 7)) == told.anchors[0].digest
