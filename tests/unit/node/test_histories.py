"""A run that is wound back or recovered from its nodes: what a node gives up, tells and sends (protocol S).

The machine, and what it has beside it: reports, the greeting, the cursor of samples, anchors.
"""

from pathlib import Path

import pytest
import torch
from node_story import A, B, Story, slots
from torch import nn

from farloop.algo.spec import BlobKind, Lease, NodeId
from farloop.node import events as ev
from farloop.node.model.encoder import encode_anchor
from farloop.node.model.replica import Replica
from farloop.node.reports import Announced, Reports, TimeAccount, all_held
from farloop.node.send_schedule import LeaseCursor
from farloop.node.state_dir import NodeState
from farloop.quant.blob import unpack_anchor
from farloop.quant.digest import digest
from farloop.wire import messages as msg
from farloop.wire.blobs import blob_digest


@pytest.fixture
def story() -> Story:
    """It trains from version 3 and has sent a delta for window 4, of which the update has come and is not merged."""
    story = undecided()
    assert story.receive(story.commit(merged=[A, B])) == []
    assert story.machine.versions == (3,), "the overlap is not over"
    return story


def undecided() -> Story:
    story = Story(tau=2, mix=0.5)
    story.open_at(3)
    story.epoch = 5
    story.begin(round_=3).steps(4)
    assert story.machine.fragments[0].sent and story.machine.versions == (3,)
    return story


def wind_back(story: Story) -> list[ev.Command]:
    """To version 3."""
    story.epoch = story.history = 8
    story.open_at(3)
    return story.hear(story.welcome())


# --- wound back


def test_the_lost_version_of_the_same_number_is_never_merged(story: Story) -> None:
    """Its bytes are here; the new one is announced under the same name, and is waited for."""
    wind_back(story)
    story.snapshot()
    assert not any(isinstance(command, ev.Apply) for command in story.hear(story.commit(anchor_digest=444)))
    assert ev.Apply(fragment=0, version=4, anchor_digest=444, codec="q4") in story.arrive(4)


def test_samples_of_a_lost_history_are_given_up_and_may_be_granted_again() -> None:
    cursor = LeaseCursor()
    cursor.grant(Lease(start=0, count=10))
    cursor.consume(4)
    cursor.begin_again()
    assert (cursor.remaining, cursor.watermark) == (0, 0)
    cursor.grant(Lease(start=5, count=10))
    assert cursor.consume(2) == [5, 6]


# --- the greeting


def anchor(version: int) -> msg.AnchorRef:
    return msg.AnchorRef(fragment=0, version=version, digest=version)


def committed(version: int) -> msg.Committed:
    story = Story()
    story.open_at(version - 1)
    return story.commit()


def test_a_greeting_names_what_was_told_before_it_is_merged() -> None:
    """Else a coordinator over an old copy would let a node in that merges what the copy knows nothing of."""
    announced = Announced()
    for version in (4, 5, 4):
        announced.on_message(committed(version))
    assert announced.beside(0, (anchor(3),)) == (0, (anchor(3),), (anchor(5),))


def test_what_was_told_of_another_history_than_the_anchors_stays_out() -> None:
    """The link's thread hears of a rewind long before the training thread gives its anchors up."""
    announced = Announced()
    announced.on_message(committed(4))
    announced.on_message(Story().welcome(epoch=8, history=8))
    announced.on_message(committed(5))
    assert announced.beside(0, (anchor(4),)) == (0, (anchor(4),), ())
    assert announced.beside(8, (anchor(4),)) == (8, (anchor(4),), (anchor(5),))
    assert announced.beside(0, ()) == (8, (), (anchor(5),)), "who holds nothing follows what it was told"


def test_after_a_rewind_a_greeting_claims_nothing_of_the_old(story: Story, tmp_path: Path) -> None:
    reports = Reports(story.machine, TimeAccount(), LeaseCursor(), NodeState.claim(tmp_path), "", None)
    reports.starts_in = 3
    reports.announced.on_message(committed(4))
    wind_back(story)
    reports.announced.on_message(story.welcome())
    reports.begin_again(8)
    hello = reports.hello()
    assert (hello.history, hello.anchors, hello.announced, hello.round) == (8, (), (), None)


# --- a coordinator over an old copy asks what a node holds


def test_it_tells_what_follows_its_version_and_keeps_following_what_it_does(story: Story) -> None:
    (command,) = story.hear(Story(tau=2, mix=0.5).welcome(epoch=2, recalls=True))
    assert isinstance(command, ev.Tell) and isinstance(command.message, msg.Held)
    told = command.message
    assert [(terms.fragment, terms.window) for terms in told.windows] == [(0, 4)] and told.final == ()
    assert set(story.rounds.values()) >= set(told.rounds)
    assert told.windows[0].round in {plan.index for plan in told.rounds}
    assert [revision.number for revision in told.revisions] == [0]
    machine = story.machine
    assert (machine.epoch, machine.history, machine.stage) == (5, 0, "training"), "a lower epoch fences no node here"
    assert not machine.connected, "it is let in for this alone"


def test_anchors_and_samples_are_told_as_they_are() -> None:
    module = nn.Module()
    module.t0 = nn.Parameter(torch.arange(256.0))
    replica = Replica(module, slots(1), gradients=False)
    nothing = msg.Held(anchors=(), windows=(), final=(), rounds=(), revisions=())
    assert all_held(nothing, replica, LeaseCursor()) == nothing, "an anchor that is not there is not told of"
    replica.anchors[0].write().copy_(torch.arange(256.0) / 3)
    replica.versions[0], replica.digests[0] = 7, digest(replica.anchors[0].read())
    samples = LeaseCursor()
    for start in (100, 10):
        samples.grant(Lease(start=start, count=5))
    samples.consume(3)
    told = all_held(nothing, replica, samples)
    assert told.anchors == (msg.AnchorRef(fragment=0, version=7, digest=replica.digests[0]),)
    assert told.unused == (Lease(start=103, count=2), Lease(start=10, count=5)) and told.granted_to == 105

    offer, data = encode_anchor(replica, 0, NodeId("a"), epoch=9)
    assert (offer.blob.kind, offer.blob.version, offer.blob.node) == (BlobKind.SNAPSHOT, 7, "a")
    assert (offer.size, offer.digest) == (len(data), blob_digest(data))
    assert digest(unpack_anchor(data, replica.layout.fragments[0], 7)) == told.anchors[0].digest
