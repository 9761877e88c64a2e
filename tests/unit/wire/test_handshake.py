"""farloop.wire.session. Covers protocol S (run and epoch of every frame, fencing) and the session's state chart."""

import dataclasses

import pytest

from farloop.algo.spec import Revision
from farloop.wire.frames import ControlFrame
from farloop.wire.messages import (
    Fetch,
    Finished,
    Heartbeat,
    Hello,
    LaneHello,
    Leave,
    Message,
    Ready,
    Refused,
    Revised,
    Role,
    Welcome,
)
from farloop.wire.reasons import LocalProtocolError, Reason, RemoteProtocolError
from farloop.wire.session import Handshake, State, run_tag

REFUSED = Refused(reason=Reason.WRONG_RUN, detail="", retriable=False)
LEAVE = Leave(reason=Reason.DRAINED)


def frame(run: int, epoch: int, seq: int, ack: int = 1) -> ControlFrame:
    return ControlFrame(run=run, epoch=epoch, seq=seq, ack=ack, body=b"x")


def open_node(hello: Hello, welcome: Welcome) -> Handshake:
    node = Handshake(Role.NODE)
    node.check_send(hello)
    node.sent(hello)
    node.delivered(welcome)
    return node


def open_coordinator(hello: Hello, welcome: Welcome) -> Handshake:
    coordinator = Handshake(Role.COORDINATOR)
    coordinator.delivered(hello)
    coordinator.check_send(welcome)
    coordinator.sent(welcome)
    return coordinator


def test_welcome_opens_both_ends_with_the_same_run_and_epoch(hello: Hello, welcome: Welcome) -> None:
    node, coordinator = open_node(hello, welcome), open_coordinator(hello, welcome)
    for end in (node, coordinator):
        assert end.state is State.OPEN
        assert (end.run, end.epoch) == (run_tag(welcome), welcome.epoch)
    assert node.lane_token == welcome.lane_token


def test_a_node_says_hello_first_and_once_and_then_waits(hello: Hello) -> None:
    node = Handshake(Role.NODE)
    for message in (Ready(), LEAVE, Fetch(fragment=0)):
        with pytest.raises(LocalProtocolError):
            node.check_send(message)
    node.check_send(hello)
    node.sent(hello)
    for after in (hello, Ready()):
        with pytest.raises(LocalProtocolError):
            node.check_send(after)


def test_a_coordinator_answers_a_hello_once(hello: Hello, welcome: Welcome) -> None:
    coordinator = Handshake(Role.COORDINATOR)
    for message in (welcome, REFUSED, Finished(), LEAVE):
        with pytest.raises(LocalProtocolError):
            coordinator.check_send(message)
    coordinator.delivered(hello)
    coordinator.check_send(REFUSED)
    coordinator.check_send(welcome)
    coordinator.sent(welcome)
    for message in (welcome, REFUSED):
        with pytest.raises(LocalProtocolError):
            coordinator.check_send(message)
    coordinator.check_send(Finished())


@pytest.mark.parametrize("epoch", [0, -1, 1 << 32])
def test_a_welcome_needs_an_epoch_that_a_frame_can_carry(hello: Hello, welcome: Welcome, epoch: int) -> None:
    coordinator = Handshake(Role.COORDINATOR)
    coordinator.delivered(hello)
    with pytest.raises(LocalProtocolError, match="epoch"):
        coordinator.check_send(dataclasses.replace(welcome, epoch=epoch))


@pytest.mark.parametrize("message", [LEAVE, REFUSED])
def test_nothing_follows_a_farewell(hello: Hello, message: Leave | Refused) -> None:
    coordinator = Handshake(Role.COORDINATOR)
    coordinator.delivered(hello)
    coordinator.sent(message)
    assert coordinator.state is State.CLOSING
    assert coordinator.farewell is message
    for after in (Finished(), LEAVE, REFUSED):
        with pytest.raises(LocalProtocolError):
            coordinator.check_send(after)


@pytest.mark.parametrize("message", [Finished(), REFUSED, LaneHello(lane_token=b"")])
def test_no_end_says_what_belongs_to_the_other(hello: Hello, welcome: Welcome, message: Message) -> None:
    node, coordinator = open_node(hello, welcome), open_coordinator(hello, welcome)
    with pytest.raises(LocalProtocolError):
        node.check_send(message)
    with pytest.raises(RemoteProtocolError):
        coordinator.admit(frame(coordinator.run, coordinator.epoch, 5), message)
    with pytest.raises(LocalProtocolError):
        coordinator.check_send(Ready())
    with pytest.raises(RemoteProtocolError):
        node.admit(frame(node.run, node.epoch, 5), Ready())


def test_only_opening_messages_stand_first_and_only_there(hello: Hello, welcome: Welcome) -> None:
    coordinator = open_coordinator(hello, welcome)
    run, epoch = coordinator.run, coordinator.epoch
    assert coordinator.admit(frame(0, 0, 0), hello), "a Hello sent again is only a duplicate"
    assert coordinator.admit(frame(run, epoch, 1), Ready())
    assert coordinator.admit(frame(run, epoch, 1), None)
    assert coordinator.admit(frame(run, epoch, 0), Heartbeat())
    for bad, message in [
        (frame(run, epoch, 0), Ready()),
        (frame(run, epoch, 0), None),
        (frame(run, epoch, 1), Heartbeat()),
        (frame(0, 0, 1), hello),
    ]:
        with pytest.raises(RemoteProtocolError):
            coordinator.admit(bad, message)


def test_frames_of_another_run_or_epoch_are_refused(hello: Hello, welcome: Welcome) -> None:
    ends: list[tuple[Handshake, Message]] = [
        (open_node(hello, welcome), Finished()),
        (open_coordinator(hello, welcome), Ready()),
    ]
    for end, message in ends:
        for run, epoch in [(end.run + 1, end.epoch), (end.run, end.epoch + 1), (end.run, end.epoch - 1), (0, 0)]:
            with pytest.raises(RemoteProtocolError):
                end.admit(frame(run, epoch, 3), message)


def test_an_opening_message_must_match_its_frame(hello: Hello, welcome: Welcome) -> None:
    run = run_tag(welcome)
    node, coordinator = Handshake(Role.NODE), Handshake(Role.COORDINATOR)
    node.sent(hello)
    assert node.admit(frame(run, welcome.epoch, 0), welcome)
    assert node.admit(frame(0, 0, 0), REFUSED)
    for bad in [frame(run, 9, 0), frame(run + 1, welcome.epoch, 0), frame(0, 0, 0), frame(run, welcome.epoch, 0, 0)]:
        with pytest.raises(RemoteProtocolError):
            node.admit(bad, welcome)
    with pytest.raises(RemoteProtocolError, match="begin at 1"):
        node.admit(frame(run, 0, 0), dataclasses.replace(welcome, epoch=0))
    for bad in [frame(run, 1, 0), frame(0, 0, 0, 0)]:
        with pytest.raises(RemoteProtocolError):
            node.admit(bad, REFUSED)
    with pytest.raises(RemoteProtocolError):
        coordinator.admit(frame(run, 1, 0), hello)


def test_an_open_node_takes_no_second_welcome(hello: Hello, welcome: Welcome) -> None:
    node = open_node(hello, welcome)
    other = dataclasses.replace(welcome, epoch=welcome.epoch + 1)
    assert node.admit(frame(node.run, node.epoch, 0), welcome)
    with pytest.raises(RemoteProtocolError):
        node.admit(frame(node.run, other.epoch, 0), other)


def test_what_overtakes_the_welcome_is_not_judged(hello: Hello) -> None:
    node = Handshake(Role.NODE)
    node.sent(hello)
    assert not node.admit(frame(5, 5, 1), Finished())
    assert not node.admit(frame(5, 5, 0), Heartbeat())


def test_nothing_but_hello_comes_before_the_welcome_to_a_coordinator() -> None:
    coordinator = Handshake(Role.COORDINATOR)
    for run, epoch in [(0, 0), (5, 5)]:
        with pytest.raises(RemoteProtocolError):
            coordinator.admit(frame(run, epoch, 1), Ready())


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_message_is_not_sent_to_a_peer_of_a_version_that_has_none_of_it(
    hello: Hello, welcome: Welcome, protocol: int
) -> None:
    """Z: the version is the one that Welcome names."""
    agreed = dataclasses.replace(welcome, protocol=protocol)
    coordinator, node = open_coordinator(hello, agreed), open_node(hello, agreed)
    assert coordinator.protocol == node.protocol == protocol
    revised = Revised(revision=Revision(number=1, terms=welcome.spec.terms, windows=(2,), round=3))
    if protocol < 2:
        with pytest.raises(LocalProtocolError, match="Revised needs version 2 of the protocol, the session has 1"):
            coordinator.check_send(revised)
    else:
        coordinator.check_send(revised)
        assert node.admit(frame(run_tag(welcome), welcome.epoch, seq=1), revised)
