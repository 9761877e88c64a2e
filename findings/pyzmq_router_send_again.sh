#!/usr/bin/env bash
# pyzmq: an awaited send of a ROUTER that must deliver waits for room at a full peer only while no other peer has room.
#
# With ROUTER_MANDATORY and a high-water mark, the manual has a send to a full peer wait or, with DONTWAIT, fail with
# EAGAIN. zmq.asyncio sends with DONTWAIT and, on EAGAIN, again once the *socket* may be written to, which a ROUTER may
# as soon as any of its peers has room. With one peer that is full the awaited send waits, as those of other sockets do;
# with a second peer that has room it raises zmq.Again at once. A blocking socket (zmq.Context) waits in both cases. The
# way out is to send with DONTWAIT, to expect Again, and to try again when the peer shows that it has read.
#
# Exits with 0 while that is so, with 1 once it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pyzmq==27.3.0
"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import sys
import time
from contextlib import ExitStack

import zmq
import zmq.asyncio


def peers_of(stack, context, router, names):
    for name in names:
        dealer = stack.enter_context(context.socket(zmq.DEALER))
        dealer.routing_id, dealer.linger = name, 0
        dealer.set_hwm(1)
        dealer.connect("inproc://peers")
        dealer.send(b"here")


async def awaited(names):
    with ExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        router = stack.enter_context(context.socket(zmq.ROUTER))
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.linger = 0
        router.set_hwm(1)
        router.bind("inproc://peers")
        peers_of(stack, zmq.Context(context), router, names)
        for _ in names:
            await router.recv_multipart()
        try:
            for _ in range(10):
                await asyncio.wait_for(router.send_multipart([b"full", b"x"]), 1)
        except zmq.Again:
            return "Again"
        except TimeoutError:
            return "waits"
        return "sent"


def blocking(names):
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.ROUTER))
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.linger, router.sndtimeo = 0, 1000
        router.set_hwm(1)
        router.bind("inproc://peers")
        peers_of(stack, context, router, names)
        for _ in names:
            router.recv_multipart()
        for _ in range(10):
            begun = time.monotonic()
            try:
                router.send_multipart([b"full", b"x"])
            except zmq.Again:
                return "waits" if time.monotonic() - begun > 0.5 else "Again"
        return "sent"


print("pyzmq", zmq.__version__, "libzmq", zmq.zmq_version())
seen = {}
for names in ((b"full",), (b"full", b"free")):
    seen["blocking", len(names)] = blocking(names)
    seen["awaited", len(names)] = asyncio.run(awaited(names))
for (kind, peers), outcome in seen.items():
    print(f"{kind} send to a full peer, {peers} peer{'s' * (peers > 1)} connected: {outcome}")
expected = {("blocking", 1): "waits", ("blocking", 2): "waits", ("awaited", 1): "waits", ("awaited", 2): "Again"}
sys.exit(seen != expected)
PYTHON
