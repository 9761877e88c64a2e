"""farloop.wire.session. Covers protocol T (decisions only on control, in order, exactly once) and V (heartbeats)."""

import pytest

from farloop.wire.limits import AHEAD_FRAMES, Limits, Timing
from farloop.wire.messages import Fetch
from farloop.wire.reasons import LimitReached, LocalProtocolError, RemoteProtocolError
from farloop.wire.session import HEARTBEAT, ControlStream
from farloop.wire.traffic import Traffic

TIMING = Timing(heartbeat_s=1.0, ack_delay_s=0.25, rto_s=2.0, rto_max_s=10.0)


def stream(limits: Limits | None = None) -> ControlStream:
    return ControlStream(limits or Limits(), TIMING, Traffic(), 0.0)


def numbers(frames: list[tuple[int, bytes]]) -> list[int]:
    return [seq for seq, _ in frames]


def test_frames_are_numbered_from_zero_and_sent_once() -> None:
    control = stream()
    control.push(b"x")
    control.push(b"y")
    assert control.outgoing(0.0) == [(0, b"x"), (1, b"y")]
    assert control.outgoing(0.0) == []
    control.check()


def test_what_is_not_acknowledged_is_sent_again_after_a_doubling_time_out() -> None:
    control = stream()
    control.push(b"x")
    control.outgoing(0.0)
    at, sent_at = 0.0, []
    for _ in range(5):
        at = control.next_timer() or 0.0
        control.handle_timer(at)
        assert control.outgoing(at) == [(0, b"x")]
        sent_at.append(at)
        control.check()
    assert sent_at == [2.0, 6.0, 14.0, 24.0, 34.0]


def test_an_early_timer_does_nothing() -> None:
    control = stream()
    control.push(b"x")
    control.outgoing(0.0)
    control.handle_timer(1.9)
    assert control.outgoing(1.9) == []


def test_an_acknowledgement_ends_resending_and_resets_the_time_out() -> None:
    control = stream()
    for body in (b"x", b"y", b"z"):
        control.push(body)
    control.outgoing(0.0)
    control.handle_timer(2.0)
    control.outgoing(2.0)
    control.acknowledge(2, 3.0)
    assert not control.idle
    assert control.next_timer() == 5.0
    control.handle_timer(5.0)
    assert control.outgoing(5.0) == [(2, b"z")]
    control.acknowledge(3, 5.5)
    assert control.idle
    assert control.next_timer() is None
    control.acknowledge(1, 6.0)
    control.check()


def test_no_more_than_the_window_is_in_flight() -> None:
    control = stream()
    for _ in range(AHEAD_FRAMES + 5):
        control.push(b"x")
    assert numbers(control.outgoing(0.0)) == list(range(AHEAD_FRAMES))
    control.acknowledge(3, 0.0)
    assert numbers(control.outgoing(0.0)) == [AHEAD_FRAMES, AHEAD_FRAMES + 1, AHEAD_FRAMES + 2]
    control.check()


def test_a_full_queue_is_a_local_error() -> None:
    control = stream(Limits(max_queued_messages=2))
    control.push(b"x")
    control.push(b"x")
    with pytest.raises(LocalProtocolError):
        control.push(b"x")
    control.push(b"the session's own", bounded=False)
    assert len(control.outgoing(0.0)) == 3


def test_messages_are_delivered_in_order_once() -> None:
    control = stream()
    first, second, third = Fetch(fragment=0), Fetch(fragment=1), Fetch(fragment=2)
    assert control.accept(2, third, 10, 0.0) == []
    assert control.accept(2, third, 10, 0.0) == []
    assert control.accept(0, first, 10, 0.0) == [first]
    assert control.received == 1
    assert control.accept(1, second, 10, 0.0) == [second, third]
    for seq, message in enumerate((first, second, third)):
        assert control.accept(seq, message, 10, 0.0) == [], "the newest one again, as well"
    assert control.received == 3
    control.check()


def test_an_unknown_message_is_numbered_but_not_delivered() -> None:
    control = stream()
    assert control.accept(1, Fetch(fragment=1), 10, 0.0) == []
    assert control.accept(0, None, 10, 0.0) == [Fetch(fragment=1)]
    assert control.received == 2


def test_frames_ahead_are_kept_only_within_the_bound() -> None:
    control = stream(Limits(max_ahead_bytes=20))
    for seq in (1, 2, 3):
        control.accept(seq, Fetch(fragment=seq), 10, 0.0)
        control.check()
    assert control.accept(0, Fetch(fragment=0), 10, 0.0) == [Fetch(fragment=seq) for seq in (0, 1, 2)]
    assert control.accept(3, Fetch(fragment=3), 10, 0.0) == [Fetch(fragment=3)]


def test_impossible_numbers_are_remote_errors() -> None:
    control = stream()
    control.push(b"x")
    control.outgoing(0.0)
    control.admit(AHEAD_FRAMES - 1, 1)
    with pytest.raises(RemoteProtocolError, match="acknowledged"):
        control.admit(0, 2)
    with pytest.raises(RemoteProtocolError, match="ahead"):
        control.admit(AHEAD_FRAMES, 0)


def test_a_silent_end_sends_a_heartbeat_each_second() -> None:
    control = stream()
    assert control.next_timer() is None
    control.heartbeats = True
    assert control.next_timer() == 1.0
    assert control.outgoing(0.9) == []
    assert control.outgoing(1.0) == [(0, HEARTBEAT)]
    assert control.next_timer() == 2.0


def test_a_frame_is_acknowledged_within_the_delay_by_what_comes_first() -> None:
    control = stream()
    control.heartbeats = True
    control.accept(0, Fetch(fragment=0), 10, 0.5)
    assert control.next_timer() == 0.75
    control.push(b"x")
    assert numbers(control.outgoing(0.6)) == [0]
    assert control.outgoing(0.75) == []
    control.accept(0, Fetch(fragment=0), 10, 0.8)
    assert control.outgoing(1.05) == [(0, HEARTBEAT)], "a duplicate asks for the acknowledgement that was lost"


def test_messages_that_wait_are_bounded_by_number_and_by_bytes() -> None:
    for limits, size, most in ((Limits(max_queued_messages=3), 1, 3), (Limits(max_queued_bytes=100), 40, 2)):
        stream = ControlStream(limits, Timing(), Traffic(), 0.0)
        for _ in range(most):
            stream.push(bytes(size))
        with pytest.raises(LimitReached):
            stream.push(bytes(size))
        stream.check()
        stream.outgoing(0.0)
        stream.acknowledge(1, 0.0)
        stream.push(bytes(size))
        stream.check()
    large = ControlStream(Limits(max_queued_bytes=100), Timing(), Traffic(), 0.0)
    large.push(bytes(1000))
