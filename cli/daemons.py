"""`farloop coordinator` and `farloop node`: settings in, an exit code out. The daemons are elsewhere."""

import asyncio
import dataclasses
import gc
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import uvloop

from farloop.algo.spec import Identity, RunSpec
from farloop.algo.terms import Terms
from farloop.cli.interrupts import end_at_once, on_signals
from farloop.config.exit_codes import CommandError, ExitCode, say_error
from farloop.config.run_spec import Plan, planned
from farloop.config.settings import NodeFile, RunFile
from farloop.coordinator.admin import over
from farloop.coordinator.change_terms import adoption_of
from farloop.coordinator.daemon import Coordinator
from farloop.coordinator.decide.adoption import AdoptionSettings
from farloop.coordinator.decide.closing import RETRY_S
from farloop.coordinator.errors import NoRoom
from farloop.coordinator.net.zmq_router import BindError
from farloop.coordinator.settings import CoordinatorConfig
from farloop.coordinator.storage.copies import Bucket, CopyFailed, read_manifest, restore
from farloop.coordinator.storage.mapped_buffers import MappedBuffers
from farloop.coordinator.storage.recovery import Place, as_they_are
from farloop.coordinator.storage.store import Store
from farloop.monitoring import descriptors, page
from farloop.monitoring.addresses import parse_host_port
from farloop.monitoring.endpoint import HEALTH, METRICS, PAGE, READY, STATUS, Endpoint, Response
from farloop.monitoring.status import Status, dumps, saved_status
from farloop.monitoring.status_summary import idle_steps
from farloop.node.library import Node
from farloop.node.pipeline.trainer import train_stage
from farloop.node.trainer import train
from farloop.quant.registry import warm_for
from farloop.runtime.log_queue import say, stack_of
from farloop.runtime.system import keep_freed_blocks, trim_heap

_log = logging.getLogger(__name__)

STANDSTILL_S = 5.0  # an event loop that has not turned for this long is unhealthy
END_S = 20.0  # and for this long, once it was asked to stop: the process ends without it
BEAT_S = 0.5
LAST_LOOK_S = 3.0  # some periods of `farloop status --watch` and of the page
POLL_S = 0.1

_DIFFERS = {
    "name": "the name differs",
    "model": "the model differs",
    "layout": "the division of the model into fragments differs",
    "anchor_digests": "the first weights differ",
    "data": "the data differ",
    "evaluation_set": "the evaluation set differs",
}


def run_coordinator(
    file: RunFile,
    *,
    rewind: bool = False,
    adopt_patience_s: float | None = None,
    adopt_newest: bool = False,
    restore_from: str = "",
) -> ExitCode:
    """Start the run, or continue that of the state directory, until its end or the first signal.

    Args:
        rewind: continue even if nodes have seen newer versions.
        adopt_patience_s: adopt versions from nodes, and wait this long for absent ones.
        adopt_newest: also adopt a version that only one node knows.
        restore_from: object store whose newest copy becomes the state directory first.

    Raises:
        ConfigError: the run is invalid.
        CommandError: the directory holds another run, or the port is taken.
        StorageError, KeyFileError, EndpointError: one line each.
    """
    on_signals(end_at_once)  # until it serves: nothing is held that a crash would lose
    descriptors.raise_limit(spare=descriptors.SPARE)
    plan = planned(file)
    trim_heap()
    keep_freed_blocks()
    if file.coordinator.copy_to:
        _can_copy(file.coordinator.copy_to)
    if restore_from:
        restored(file.coordinator.state_dir, plan, restore_from)
    store = open_run(
        file.coordinator.state_dir,
        plan,
        rewind=rewind,
        adopt=adopt_patience_s is not None,
        map_buffers=file.coordinator.map_buffers,
    )
    adopt = None if adopt_patience_s is None else adoption_of(adopt_patience_s, store.fetched, newest=adopt_newest)
    gc.collect()
    gc.freeze()  # modules stay: a collection that goes through all of them stops the loop for 0.2 s
    try:
        finished = uvloop.run(_serve(file.coordinator, store, adopt))
    except (BindError, CopyFailed) as error:
        raise CommandError(str(error)) from error
    finally:
        store.close()
    if not finished:
        say("stopped before the run's end; the same command continues it")
        return ExitCode.DONE
    say(_last_line(plan.spec.identity.name, file.coordinator.state_dir))
    return ExitCode.DONE


def _last_line(run: str, folder: Path) -> str:
    """Of a finished run, with what its saved status says against the result."""
    status = saved_status(folder)
    parts = (f"run {run} is finished", idle_steps(status) if status else "", f"model: {folder / 'model.safetensors'}")
    return "; ".join(filter(None, parts))


def _can_copy(url: str) -> None:
    """Refuse a store that cannot be opened before the state folder is touched. Raises CommandError."""
    try:
        Bucket(url)
    except CopyFailed as error:
        raise CommandError(str(error)) from error


def restored(directory: Path, plan: Plan, url: str) -> None:
    """Restore the state directory from the newest copy. Raises CommandError, StorageError."""
    try:
        bucket = Bucket(url)
        manifest = read_manifest(bucket)
        wanted = plan.spec.identity.fingerprint()
        if manifest is not None and manifest["fingerprint"] != wanted:
            held = f"run {manifest['name']} (fingerprint {manifest['fingerprint']}, the file's is {wanted})"
            raise CommandError(
                f"{url} holds copies of another run, {held}; give that run's file, or its own URL", ExitCode.REFUSED
            )
        ledger = restore(bucket, directory)
    except CopyFailed as error:
        raise CommandError(str(error)) from error
    say(f"restored {directory} from {url}: versions {', '.join(map(str, ledger.versions))}")


def open_run(
    directory: Path, plan: Plan, *, rewind: bool = False, adopt: bool = False, map_buffers: bool = False
) -> Store:
    """The planned run from the directory, or a new one if the directory has none and none is required.

    Raises:
        CommandError: it is another run, and the line says what differs; or there is nothing to rewind or adopt.
        StorageError
    """

    def the_planned_one(kept: RunSpec) -> None:
        if kept.identity != plan.spec.identity:
            raise CommandError(
                f"{directory} holds another run (fingerprint {kept.identity.fingerprint()}, the file's is "
                f"{plan.spec.identity.fingerprint()}): {different_identity(kept.identity, plan.spec.identity)}; "
                "give the new run a folder of its own with --state DIR, or undo the change",
                ExitCode.REFUSED,
            )

    place: Place = MappedBuffers(directory) if map_buffers else as_they_are
    store = _once_there_is_room(lambda: Store.recover(directory, accept=the_planned_one, rewind=rewind, place=place))
    if store is None and rewind:
        raise CommandError(f"{directory} holds no run to rewind; leave out --rewind, or give its folder: --state DIR")
    if store is None and adopt:
        raise CommandError(
            f"{directory} holds no run, not even an old copy of one; leave out --adopt-from-nodes, or give its folder: "
            "--state DIR"
        )
    if store is not None and rewind:
        versions = ",".join(str(version) for version in store.ledger.versions)
        _log.warning("rewound history=%d versions=%s note='nodes resync from here'", store.ledger.history, versions)
    if store is None:
        for note in plan.notes:
            _log.info("plan note=%r", note)
        return Store.create(directory, plan.spec, plan.anchors, place=place)
    kept, wanted = (spec.terms.schedule.steps for spec in (store.ledger.spec, plan.spec))
    if store.ledger.finished and wanted > kept:
        store.close()
        raise CommandError(
            f"the file asks for {wanted} steps: {over(plan.spec.identity.name, kept, directory)}. A run that has not "
            f"ended takes more steps by farloop set steps={wanted}",
            ExitCode.REFUSED,
        )
    for term in different_terms(store.ledger.spec.terms, plan.spec.terms):
        _log.warning("kept %s cause='the run keeps its terms; farloop set changes them'", term)
    return store


def _once_there_is_room(recover: Callable[[], Store | None]) -> Store | None:
    """On a full disk, a restart waits for free space, like a running coordinator."""
    held = False
    while True:
        try:
            return recover()
        except NoRoom as error:
            if not held:
                _log.warning("storage hold begin what='start' why=%r fix=%r", str(error), error.fix)
            held = True
            time.sleep(RETRY_S)


def different_identity(kept: Identity, wanted: Identity) -> str:
    """The differences between two identities."""
    told = []
    for field in dataclasses.fields(kept):
        old, new = getattr(kept, field.name), getattr(wanted, field.name)
        if old != new:
            short = isinstance(old, str | int) and len(f"{old}{new}") < 60
            told.append(f"{field.name} was {old}, is {new}" if short else _DIFFERS[field.name])
    return ", ".join(told)


def different_terms(kept: Terms, wanted: Terms) -> list[str]:
    """`h=30 file=20`, for each term of the file that differs from those of the run."""
    old, new = _flat(kept), _flat(wanted)
    return [f"{name}={old[name]} file={new[name]}" for name in old if old[name] != new[name]]


def _flat(terms: Terms) -> dict[str, object]:
    values = terms.flat()
    rate = values.pop("lr")
    return values | {"lr": rate.peak, "min_lr": rate.minimum, "warmup_steps": rate.warmup_steps}


async def _serve(config: CoordinatorConfig, store: Store, adopt: AdoptionSettings | None) -> bool:
    """Whether the run has finished."""
    warm_for(store.ledger.spec.terms)
    coordinator = Coordinator(config, store, adopt)
    viewers = _Viewers()
    with LoopWatch() as watch, _pages(config, coordinator, watch, viewers) as url:
        say(_first_line(coordinator.link.endpoint, store.ledger.spec, store.ledger.epoch, url))
        _log.info("serving encrypted=%s", str(config.key is not None).lower())
        await coordinator.run(watch.stop)
        if store.ledger.finished:
            await viewers.see_the_end()
    return store.ledger.finished


class _Viewers:
    """Those who ask for the status again and again, as `farloop status --watch` and the page do."""

    def __init__(self) -> None:
        self._told, self._told_at = b"", -math.inf

    def tell(self, status: bytes) -> None:
        self._told, self._told_at = status, time.monotonic()

    async def see_the_end(self) -> None:
        """Wait until they have asked once more, `LAST_LOOK_S` at most; nobody who asked of late: not at all."""
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
            self._look()

    def _look(self) -> None:
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


def _first_line(endpoint: str, spec: RunSpec, epoch: int, url: str) -> str:
    again = f", start {epoch}" if epoch > 1 else ""
    status = f", status {url}" if url else ""
    return f"run {spec.identity.name} at {endpoint}, fingerprint {spec.identity.fingerprint()}{again}{status}"


@contextmanager
def _pages(config: CoordinatorConfig, coordinator: Coordinator, watch: LoopWatch, viewers: _Viewers) -> Iterator[str]:
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

    def told() -> tuple[int, bytes]:
        text = coordinator.observer.status_json
        if (age_s := coordinator.observer.age_s) < STANDSTILL_S or text == b"{}":
            return 200, text
        old: Status = json.loads(text)
        what = f"standstill: the coordinator stands still, and all else here is {age_s:.0f} s old; its log says where"
        return 503, dumps({**old, "alarms": [what, *old["alarms"]]}).encode()

    def status() -> Response:
        code, text = told()
        viewers.tell(text)
        return Response(status=code, content_type="application/json", body=text)

    def look() -> Response:
        code, text = told()
        viewers.tell(text)
        body = page.page(json.loads(text) or None).encode()
        return Response(status=code, content_type=page.TYPE, body=body, headers=page.headers())

    page.page(None)  # its files are read now: once the package is upgraded in place, they are others
    address = parse_host_port(config.http, listens=True)
    routes = {PAGE: look, METRICS: metrics, HEALTH: health, READY: ready, STATUS: status}
    with Endpoint(address.host, address.port, routes, names=config.http_names) as endpoint:
        yield f"http://{dataclasses.replace(address, host=address.reachable_host, port=endpoint.port)}"


def run_node(file: NodeFile) -> ExitCode:
    """Train in this process until the run ends or a signal comes.

    Raises:
        NodeError, CorpusError, KeyFileError, EndpointError: one line each.
    """
    descriptors.raise_limit()
    keep_freed_blocks()
    config, pipeline = file.node, file.pipeline
    on_signals(end_at_once)
    encrypted = str(config.key is not None).lower()
    _log.info("joining coordinator=%s name=%s encrypted=%s", config.coordinator, config.name, encrypted)
    joined = list[Node]()
    if pipeline.layout is None:
        train(config, on_join=joined.append, environ=os.environ)
    else:
        train_stage(config, pipeline, on_join=joined.append, environ=os.environ)
    if any(node.asked_to_leave for node in joined):
        _log.info("left note='the same command rejoins the run'")
        return ExitCode(config.leave_code)
    _log.info("finished note='the run is over; its model is in the state folder of the coordinator'")
    return ExitCode.DONE
