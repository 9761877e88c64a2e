"""Covers `coordinator/link.py` where no other process is needed: whose a lane is (protocol T, U)."""

import asyncio

from farloop.algo.spec import NodeId
from farloop.coordinator.link import RouterLink
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
