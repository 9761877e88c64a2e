"""Covers `coordinator/link.py` where no other process is needed: whose a lane is (protocol T, U)."""

import asyncio
from typing import Any

import pytest
import zmq

from farloop.algo.spec import NodeId
from farloop.coordinator.link import BURST_FRAMES, RouterLink
from farloop.wire.frames import lane_hello
from farloop.wire.limits import Limits, Timing


def test_the_token_of_a_session_binds_one_lane_once_and_only_for_its_owner() -> None:
    """T, U: who overhears a token, or guesses one, gets no lane with it."""

    async def story() -> None:
        link = RouterLink(
            endpoint="inproc://lanes",
            key=None,
            allow=None,
            on_event=lambda peer, event: None,
            limits=Limits(),
            timing=Timing(),
        )
        try:
            control = link._new_session(b"control", NodeId("a"))
            assert control is not None
            peer = control.peer
            hello = lane_hello(1, 1, peer.token)

            link._meet(b"guess", lane_hello(1, 1, bytes(16)), NodeId("a"))
            assert peer.routes == {0: b"control"}
            link._meet(b"bulk", hello, NodeId("a"))
            assert peer.routes == {0: b"control", 1: b"bulk"}
            link._meet(b"again", hello, NodeId("a"))
            assert peer.routes == {0: b"control", 1: b"bulk"}

            other = link._new_session(b"other", NodeId("b"))
            assert other is not None
            link._meet(b"stolen", lane_hello(1, 1, other.peer.token), NodeId("a"))
            assert other.peer.routes == {0: b"other"}
        finally:
            link.close()

    asyncio.run(story())


class Readable:
    """A socket on which so many frames wait, and then no more come."""

    def __init__(self, frames: int) -> None:
        self.waiting = iter(range(frames))
        self.drained = asyncio.Event()

    async def recv_multipart(self, *, copy: bool, flags: int = 0) -> Any:
        frame = next(self.waiting, None)
        if frame is not None:
            return frame
        if flags & zmq.DONTWAIT:
            raise zmq.Again
        self.drained.set()
        return await asyncio.Event().wait()


@pytest.mark.parametrize("frames", [1, BURST_FRAMES, BURST_FRAMES + 1, 3 * BURST_FRAMES + 7])
def test_every_frame_of_a_burst_is_taken_once_and_in_order(frames: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C: all that is readable goes in before a timer fires, in bursts that give the others their turn."""

    async def story() -> list[Any]:
        link = RouterLink(
            endpoint="inproc://burst",
            key=None,
            allow=None,
            on_event=lambda peer, event: None,
            limits=Limits(),
            timing=Timing(),
        )
        taken: list[Any] = []
        try:
            with monkeypatch.context() as patch:
                patch.setattr(link, "_socket", readable := Readable(frames))
                patch.setattr(link, "_take", taken.append)
                receiving = asyncio.create_task(link._receive())
                await readable.drained.wait()
                receiving.cancel()
        finally:
            link.close()
        return taken

    assert asyncio.run(story()) == list(range(frames))
