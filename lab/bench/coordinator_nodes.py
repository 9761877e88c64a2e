"""Nodes without models in one process, for `bench/coordinator.py`: the real machine and link of a node, made-up deltas.

Every round each node offers one delta times a number near 1. It takes every update, and applies none. Its step lasts as
long as it is told, and costs nothing.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farloop.algo.spec import BlobId, BlobKind, Contribution, Fragment, NodeId
from farloop.monitoring.status import dumps
from farloop.node import events as ev
from farloop.node.errors import LinkFailed
from farloop.node.link import LinkConfig, NodeLink
from farloop.node.machine import NodeMachine
from farloop.node.zmq_dealer import ZmqDialer
from farloop.quant.blob import HEADER_BYTES, BlobHeader, as_tensor, blob_bytes, seal
from farloop.quant.registry import codec_named
from farloop.runtime.http_objects import HttpObjects
from farloop.runtime.ports import Objects
from farloop.runtime.system import LoopClock
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.blobs import blob_digest

_PROGRESS_S = 1.0

_deltas: dict[Fragment, Tensor] = {}  # of all nodes of this process


class Node:
    """One node. `told` and `held`: when it heard of each version, and had its update, in monotonic seconds."""

    def __init__(
        self,
        number: int,
        config: LinkConfig,
        step_s: float,
        failed: Callable[[Exception], None],
        clock: LoopClock,
        objects: Objects,
    ) -> None:
        self._step_s, self._steps = step_s, False
        self.machine = NodeMachine(name=NodeId(f"node-{number}"), incarnation=1)
        self.told: dict[int, float] = {}
        self.held: dict[int, float] = {}
        self.ended = asyncio.Event()
        self._blobs: dict[BlobId, bytearray] = {}
        self.link = NodeLink(config, ZmqDialer(config, failed), clock, random.uniform, objects=objects)
        self.link.start(self._hello, self._on_event)

    def _hello(self) -> msg.Hello:
        return msg.Hello(
            protocol_min=msg.PROTOCOL_VERSION, protocol_max=msg.PROTOCOL_VERSION, node=self.machine.name,
            incarnation=1, fingerprint=None, layout=None, epoch_seen=0, anchors=(), round=None,
            can_evaluate=False,
        )  # fmt: skip

    def report(self) -> None:
        machine, moved = self.machine, self.link.moved
        self.link.send(
            msg.Progress(
                state="waiting" if machine.running else "ready", position=machine.position,
                round=machine.schedule.round,
                inner_steps=machine.inner_steps, tokens=machine.tokens, loss=None, tokens_per_s=0.0, compute_share=0.0,
                blocked_s=0.0, lost_steps=0, sample_watermark=0, sent=moved.up, received=moved.down,
            )
        )  # fmt: skip

    def seen(self) -> dict[str, Any]:
        moved = self.link.moved
        return {"told": self.told, "held": self.held, "bytes": moved.up.delta + moved.down.update}

    def _on_event(self, event: wire_ev.SessionEvent | Exception) -> None:
        match event:
            case wire_ev.MessageReceived(message=message):
                if isinstance(message, msg.Committed):
                    self.told[message.version] = time.monotonic()
                self._handle(ev.Received(message=message))
                if isinstance(message, msg.Welcome) and not any(message.versions):  # it has the run's first weights
                    for fragment in range(len(message.versions)):
                        blob = BlobId(kind=BlobKind.SNAPSHOT, fragment=fragment, version=0)
                        self._handle(ev.BlobArrived(blob=blob))
            case wire_ev.BlobReceived(blob=blob):
                self.held[blob.version] = time.monotonic()
                self._handle(ev.BlobArrived(blob=blob))
            case wire_ev.SessionClosed(reason=reason, detail=detail):
                if self.machine.running:  # what was measured would be its return
                    raise LinkFailed(RuntimeError(f"{self.machine.name}: session ended: {reason.name}: {detail}"))
                self._handle(ev.Disconnected(reason=reason))
                if self.machine.ended:
                    self.ended.set()
            case _:
                pass
        self._begin_step()

    def _begin_step(self) -> None:
        if self.machine.running and self.machine.waiting is None and not self._steps:
            self._steps = True
            asyncio.get_running_loop().call_later(self._step_s, self._end_step)

    def _end_step(self) -> None:
        self._steps = False
        if self.machine.running and self.machine.waiting is None:
            self._handle(ev.StepDone(tokens=1))
        self._begin_step()

    def _handle(self, event: ev.Event) -> None:
        for command in self.machine.handle(event):
            match command:
                case ev.Encode():
                    self._handle(ev.DeltaEncoded(offer=self._encoded(command)))
                case ev.SendBlob(offer=offer):
                    self.link.send_blob(offer, self._blobs[offer.blob])
                case ev.ForgetBlob(blob=blob):
                    self._blobs.pop(blob, None)
                case ev.Tell(message=message):
                    self.link.send(message)
                case ev.Stop(reason=reason, detail=detail):
                    raise LinkFailed(RuntimeError(f"{self.machine.name}: {reason.name}: {detail}"))
                case _:
                    pass  # there is no model

    def _encoded(self, command: ev.Encode) -> msg.Offer:
        spec, blob = self.machine.spec, command.blob
        assert spec is not None
        codec, fragment = codec_named(command.codec), spec.identity.layout.fragments[blob.fragment]
        header = BlobHeader(
            codec=codec, fragment=fragment, version=command.window, base=blob.version, epoch=self.machine.epoch
        )
        if fragment not in _deltas:
            _deltas[fragment] = torch.zeros(fragment.numel, dtype=torch.float32, device="cpu")
            for tensor in fragment.tensors:
                _deltas[fragment][tensor.offset : tensor.offset + tensor.numel].normal_(0.0, 1e-3)
        # The coordinator drops numbers that came before.
        payload = codec.encode(_deltas[fragment] * random.uniform(1.0, 1.01), fragment)
        data = bytearray(blob_bytes(codec, fragment))
        as_tensor(data)[HEADER_BYTES:] = payload
        data = self._blobs[blob] = seal(header, data)
        own = Contribution(
            node=blob.node, incarnation=1, base=blob.version, steps=command.steps, tokens=command.tokens,
            norm_sq=codec.norm_sq(payload, fragment),
        )  # fmt: skip
        return msg.Offer(
            blob=blob, size=len(data), digest=blob_digest(data), window=command.window, contributors=(own,),
            history=command.history,
        )  # fmt: skip


async def _run(address: str, first: int, count: int, step_s: float) -> list[Node]:
    failed = asyncio.get_running_loop().create_future()

    def fail(error: Exception) -> None:
        if not failed.done():
            failed.set_exception(error)

    config, clock = LinkConfig(coordinator=address, lanes=1), LoopClock(fail)
    objects = HttpObjects(clock.post)  # its threads are those of all nodes of this process
    nodes = [Node(number, config, step_s, fail, clock, objects) for number in range(first, first + count)]

    async def report() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            for node in nodes:
                node.report()

    reports = asyncio.create_task(report())
    ends = asyncio.gather(*(node.ended.wait() for node in nodes))
    await asyncio.wait({ends, failed}, return_when=asyncio.FIRST_COMPLETED)
    reports.cancel()
    if failed.done():
        failed.result()
    return nodes


def main() -> None:
    """FILE ADDRESS FIRST COUNT SECONDS: be COUNT nodes from FIRST on until the run is over; a step lasts so long."""
    torch.set_num_threads(1)
    path, address, first, count, step_s = sys.argv[1:]
    nodes = asyncio.run(_run(address, int(first), int(count), float(step_s)))
    Path(path).write_text(dumps([node.seen() for node in nodes]))


if __name__ == "__main__":
    main()
