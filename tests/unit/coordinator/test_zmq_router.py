"""Covers `coordinator/net/zmq_router.py` as far as no other process is needed: bursts, and the connection budget."""

import asyncio
from collections.abc import Sequence

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from farloop.coordinator.net.zmq_router import (
    BURST_FRAMES,
    STRANGER_S,
    STRANGERS_OF_AN_ADDRESS,
    Connections,
    ZmqRouter,
)
from farloop.runtime.ports import Buffer, Route, Sender, Sent


class Listener:
    """Collects what a socket reports."""

    def __init__(self) -> None:
        self.frames: list[int] = []
        self.last, self.writable = asyncio.Event(), asyncio.Event()

    def on_frame(self, route: Route, parts: Sequence[Buffer], sender: Sender) -> None:
        self.route = route
        self.frames.append(int.from_bytes(parts[0], "big"))
        assert (sender.owner, sender.address, sender.descriptor) == (None, "?", None), "inproc has none of them"
        if len(parts) > 1:
            self.last.set()

    def on_writable(self) -> None:
        self.writable.set()

    def on_gone(self) -> None: ...
    def on_revoked(self, owners: object) -> None: ...
    def uses(self, descriptor: int) -> bool:
        return False


@pytest.mark.parametrize("frames", [1, BURST_FRAMES, 3 * BURST_FRAMES + 7])
def test_frames_arrive_once_and_in_order_and_a_full_lane_is_tried_again(frames: int) -> None:
    """C: in bursts that give timers and other tasks their turn."""

    async def story() -> list[int]:
        endpoint, listener = "tcp://127.0.0.1:0", Listener()
        router = ZmqRouter(endpoint=endpoint, key=None, allow=None, max_frame_bytes=100)
        router._socket.bind("inproc://burst")  # TCP's buffers would take far more frames
        router.listen(listener)
        assert router.send(b"nobody", [b""]) is Sent.GONE
        running = asyncio.create_task(router.run())
        with router._context.socket(zmq.DEALER) as dealer:
            dealer.set_hwm(1)
            dealer.setsockopt(zmq.SNDHWM, 0)
            dealer.connect("inproc://burst")
            for number in range(frames):
                await dealer.send_multipart([number.to_bytes(4, "big"), b""][: 1 + (number == frames - 1)])
            await listener.last.wait()
            sent = 0
            while router.send(listener.route, [b"down"]) is Sent.TAKEN:
                sent += 1
            for _ in range(sent):
                await dealer.recv()
            await listener.writable.wait()
            assert router.send(listener.route, [b"again"]) is Sent.TAKEN
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        router.close()
        return listener.frames

    assert asyncio.run(asyncio.wait_for(story(), 60.0)) == list(range(frames))


def crowd(connections: Connections, descriptors: range, address: str) -> None:
    """So many fit."""
    for descriptor in descriptors:
        assert connections.accepted(descriptor, address, 1, 0.0) is None


def goes(connections: Connections, descriptor: int) -> int | None:
    """Who makes room for this one of an address that no other node has."""
    going = connections.accepted(descriptor, "10.0.0.1", 1, 0.0)
    connections.check()
    return going.descriptor if going else None


def test_the_oldest_stranger_of_an_address_makes_room_for_the_next() -> None:
    connections = Connections(10_000, lambda descriptor: False)
    crowd(connections, range(STRANGERS_OF_AN_ADDRESS), "10.0.0.1")
    crowd(connections, range(9000, 9001), "10.0.0.2")  # another address has its own
    assert [goes(connections, 1000 + number) for number in range(5)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("speakers", "going"), [(5, 5), (10, 10)])
def test_where_there_are_too_many_in_all_the_address_with_most_strangers_gives_one(speakers: int, going: int) -> None:
    """Of those by which sessions speak none goes; where sessions speak by all, the newest does."""
    connections = Connections(10, lambda descriptor: descriptor < speakers)
    crowd(connections, range(5), "10.0.0.1")
    crowd(connections, range(5, 10), "10.9.9.9")
    assert goes(connections, 10) == going
    connections.on_closed(going)
    connections.check()
    assert len(connections) == 10


def test_who_says_nothing_for_long_goes_and_who_speaks_stays() -> None:
    """A key's holder may answer ZeroMQ's heartbeats for ever, and the lanes of a session that is over say no more."""
    speaks = {1}
    connections = Connections(10, lambda descriptor: descriptor in speaks)
    crowd(connections, range(1, 3), "10.0.0.1")

    def gone_at(now: float) -> list[int]:
        return [connection.descriptor for connection in connections.find_idle(now)]

    assert [gone_at(STRANGER_S + seconds) for seconds in (0, 1, 2)] == [[], [2], []], "it is told once"
    speaks.clear()
    assert [gone_at(2 * STRANGER_S), gone_at(3 * STRANGER_S)] == [[], [1]]
    connections.check()


@given(st.lists(st.tuples(st.sampled_from("aceld"), st.integers(0, 30), st.sampled_from(["x", "y"]))))
def test_the_budget_holds_and_no_session_loses_its_connection(steps: list[tuple[str, int, str]]) -> None:
    """`a`: accepted, `c`: what was told to go has gone, `e`: ended, `l`: a look, `d`: a session begins or ends."""
    speaks: set[int] = set()
    connections, going, now = Connections(8, speaks.__contains__), list[int](), 0.0
    for what, descriptor, host in steps:
        now += 5.0
        match what:
            case "a":
                one = connections.accepted(descriptor, host, 1, now)
                going += [one.descriptor] if one else []
            case "c":
                for gone in going:
                    connections.on_closed(gone)
                going.clear()
            case "e":
                connections.on_closed(descriptor)
            case "l":
                going += [connection.descriptor for connection in connections.find_idle(now)]
            case _:
                speaks ^= {descriptor}
                continue
        connections.check()
        speakers = [descriptor for descriptor in speaks if descriptor in connections._open]
        assert len(connections) - len(connections._closing) <= 8 or len(speakers) > 8 or not connections._strangers
