"""The pages of a coordinator, who looks at them, and whether its event loop turns."""

import asyncio
import dataclasses
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Self

from farloop.config.exit_codes import ExitCode, say_error
from farloop.coordinator.daemon import Coordinator
from farloop.coordinator.observe.metrics import Metrics, standby_metrics
from farloop.coordinator.settings import CoordinatorConfig
from farloop.coordinator.standby import Contender
from farloop.monitoring import page
from farloop.monitoring.addresses import parse_host_port
from farloop.monitoring.endpoint import HEALTH, METRICS, PAGE, READY, STATUS, Endpoint, Handler, Response
from farloop.monitoring.status import Status, dumps
from farloop.runtime.log_queue import stack_of

_log = logging.getLogger(__name__)

STANDSTILL_S = 5.0  # an event loop that has not turned for this long is unhealthy
END_S = 20.0  # and for this long, once it was asked to stop: the process ends without it
BEAT_S = 0.5
LAST_LOOK_S = 3.0  # some periods of `farloop status --watch` and of the page
POLL_S = 0.1


class Viewers:
    """Those who ask for the status again and again, as `farloop status --watch` and the page do."""

    _told, _told_at = b"", -math.inf

    def record(self, status: bytes) -> None:
        self._told, self._told_at = status, time.monotonic()

    async def see_the_end(self) -> None:
        """Wait, `LAST_LOOK_S` at most, until every client that asked of late has asked once more."""
        ended_at = time.monotonic()
        while ended_at - LAST_LOOK_S < self._told_at and time.monotonic() < ended_at + LAST_LOOK_S:
            await asyncio.sleep(POLL_S)
            if json.loads(self._told).get("run", {}).get("state") == "finished":
                return


class LoopWatch:
    """Watches from a thread whether the running loop turns, and takes the signals, which a loop that stands still would
    not. Make it in the main thread."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        """Set by the first signal."""
        self._loop, self._main = asyncio.get_running_loop(), threading.current_thread()
        self.still_s = 0.0
        """For how long the loop has not turned."""
        self._looked_at = time.monotonic()
        self._signals, self._wakeup = socket.socketpair()  # the interpreter writes a byte for each signal
        self._wakeup.setblocking(False)
        self._signals.settimeout(BEAT_S)
        self._asked = self._told = False
        self._thread = threading.Thread(target=self._watch, name="loop watch", daemon=True)

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._wakeup.close()
        self._thread.join()
        self._signals.close()

    def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                numbers = self._signals.recv(64)
                if not numbers:
                    return
                for _ in self._handlers.keys() & set(numbers):
                    self._ask_to_stop()
            self._check()

    def _check(self) -> None:
        before, self._looked_at = self._looked_at, time.monotonic()
        self.still_s += min(self._looked_at - before, 2 * BEAT_S)  # a process that was suspended did not stand still
        self._loop.call_soon_threadsafe(self._turn)
        if (still_s := self.still_s) < STANDSTILL_S:
            return
        if not self._told:
            self._told = True
            _log.error("loop stands still for=%.0fs at=%r", still_s, stack_of(self._main))
        if self._asked and still_s >= END_S:
            say_error(f"the event loop has stood still for {still_s:.0f} s and cannot stop in order; start it again")
            os._exit(ExitCode.HUNG)

    def _turn(self) -> None:
        if self._told:
            self._told = False
            _log.warning("loop turns again after=%.0fs", self.still_s)
        self.still_s = 0.0

    def _ask_to_stop(self) -> None:
        if self._asked:
            say_error("stopped at once; nothing durable is lost")
            os._exit(ExitCode.INTERRUPTED)
        _log.info("stopping note='a second signal stops at once'")
        self._asked = True
        self._loop.call_soon_threadsafe(self.stop.set)


@contextmanager
def standby_pages(config: CoordinatorConfig, contender: Contender) -> Iterator[str]:
    """Serve the pages of a standby: healthy, not ready, and which leader it stands by for. Yields their URL."""
    if not config.http:
        yield ""
        return

    def has_state() -> bool:
        return contender.following is not None and contender.following.in_memory

    def text() -> str:
        client, leader = contender.client, contender.leader
        if client is None:
            return f"{contender.name} begins to stand by"
        in_memory = ", and in memory" if has_state() else ""
        state = f"in sync{in_memory}" if client.is_in_sync else client.trouble or "not in sync"
        silence_s = time.monotonic() - client.heard_at
        whom = leader.leader if leader else "a leader"
        why = f"; it does not take over: {contender.told}" if contender.told and client.is_without_leader else ""
        return f"{contender.name} stands by for {whom}: {state}, {silence_s:.0f} s since it was heard of{why}"

    def told(status: int) -> Response:
        return Response(status=status, body=f"{text()}\n".encode())

    def figures() -> Response:
        if (client := contender.client) is None:
            body = standby_metrics()
        else:
            silence_s = time.monotonic() - client.heard_at
            body = standby_metrics(
                in_sync=client.is_in_sync, in_memory=has_state(), silence_s=silence_s, taken=client.taken
            )
        return Response(content_type=Metrics.content_type, body=body)

    routes = {
        PAGE: lambda: told(200),
        HEALTH: lambda: told(200),
        READY: lambda: told(503),
        STATUS: lambda: told(503),
        METRICS: figures,
    }
    with _served(config, routes) as url:
        yield url


@contextmanager
def _served(config: CoordinatorConfig, routes: Mapping[str, Handler]) -> Iterator[str]:
    """Serve pages at `config.http`, and yield their URL."""
    address = parse_host_port(config.http, listens=True)
    with Endpoint(address.host, address.port, routes, names=config.http_names) as endpoint:
        yield f"http://{dataclasses.replace(address, host=address.reachable_host, port=endpoint.port)}"


@contextmanager
def pages(config: CoordinatorConfig, coordinator: Coordinator, watch: LoopWatch, viewers: Viewers) -> Iterator[str]:
    """Serve the HTTP pages and yield their URL; an empty text without pages.

    While the loop stands still they answer 503, except for the metrics, which tell the age of the status.
    """
    if not config.http:
        yield ""
        return

    def metrics() -> Response:
        return Response(content_type=coordinator.metrics.content_type, body=coordinator.metrics.exposition())

    def health() -> Response:
        if watch.still_s > STANDSTILL_S:
            return Response(status=503, body=f"the event loop stands still for {watch.still_s:.0f} s\n".encode())
        return Response(body=b"ok\n")

    def ready() -> Response:
        # Ready does not depend on nodes: behind a Kubernetes service none can join before.
        if watch.stop.is_set():
            return Response(status=503, body=b"stopping\n")
        return Response(body=b"ready\n") if (found := health()).status == 200 else found

    def status_body() -> tuple[int, bytes]:
        code, text = 200, coordinator.observer.status_json
        if (age_s := coordinator.observer.age_s) >= STANDSTILL_S and text != b"{}":
            old: Status = json.loads(text)
            what = f"standstill: the coordinator stands still, and all else is {age_s:.0f} s old; its log says where"
            code, text = 503, dumps({**old, "alarms": [what, *old["alarms"]]}).encode()
        viewers.record(text)
        return code, text

    def status() -> Response:
        code, text = status_body()
        return Response(status=code, content_type="application/json", body=text)

    def status_page() -> Response:
        code, text = status_body()
        body = page.page(json.loads(text) or None).encode()
        return Response(status=code, content_type=page.TYPE, body=body, headers=page.headers())

    page.page(None)  # its files are read now: once the package is upgraded in place, they are others
    routes = {PAGE: status_page, METRICS: metrics, HEALTH: health, READY: ready, STATUS: status}
    with _served(config, routes) as url:
        yield url
