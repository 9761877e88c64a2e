"""Covers `coordinator/net/router.py` where no other process is needed (protocol C)."""

import asyncio
from typing import Any

import pytest
import zmq

from farloop.coordinator.net.router import BURST_FRAMES, SessionRouter
from farloop.wire.limits import Limits, Timing


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
        link = SessionRouter(
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
