"""The node's link: a background thread that keeps a session with the coordinator alive, whatever the network does.

A session lives as long as its connections (`dialogue.py`); when one breaks, the link dials again after a jittered
pause. Nothing here decides: what the session reports goes to the training thread through `deliver`, what that wants to
send comes back through thread-safe calls. A fault of the link itself is delivered too, as an exception: training would
wait for ever for a thread that is gone.
"""

import asyncio
import dataclasses
import logging
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import uvloop

from farloop.algo.spec import BlobId, BlobKind
from farloop.node.dialogue import Dealers, Dialogue
from farloop.node.downloads import Downloads
from farloop.node.errors import LinkFailed
from farloop.node.link_config import LinkConfig, split_address
from farloop.node.moved import Moved, moved_by
from farloop.node.probing import Probing
from farloop.node.uploads import Uploads
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.errors import LimitReached, LocalProtocolError
from farloop.wire.handshake import Role, State
from farloop.wire.messages import SINCE
from farloop.wire.reasons import Reason
from farloop.wire.session import Session

_log = logging.getLogger(__name__)

BACKOFF_S = (0.1, 5.0)
"""First and longest pause between two attempts; the second to tenth double, each is jittered by a half."""

TOLD_EVERY_S = 60.0
"""An outage is told of when it begins, and again once in so long: somebody may have to do something."""

BAD_SESSIONS = 8
"""So many sessions in a row that end because one end does not understand the other, without a delta of this node being
taken in between, end the node: the next one would end the same way."""


class Link:
    """Runs from `start` to `close`. Every public call may be made from any thread."""

    def __init__(
        self,
        config: LinkConfig,
        hello: Callable[[], msg.Hello],
        deliver: Callable[[wire_ev.SessionEvent | Exception], None],
    ) -> None:
        """`hello` tells what the node holds when a session begins; `deliver` must not block. Both run in the thread.

        Raises:
            BadAddress: the coordinator's address is none.
            KeyFileError: a key file cannot be used.
        """
        self._config, self._hello, self._deliver = config, hello, deliver
        self._host, self._port = split_address(config.coordinator)
        self._dealers = Dealers(config)
        self._session: Session | None = None
        self._traffic: tuple[Moved, Session | None] = (Moved(), None)
        """Of past sessions, and the present one; replaced as a whole: other threads read it."""
        self._downloads, self._uploads = Downloads(), Uploads()
        self._probing = Probing()
        self._dialogue: Dialogue | None = None
        self._wake = asyncio.Event()
        """Something is to be sent, or the session's state has changed."""
        self._ended_by = ""
        """Why the last session, or attempt, ended."""
        self._misunderstood = 0
        """Sessions in a row that ended because one end did not understand the other."""
        self._hurt = False
        """Whether the last session ended by an error: the next one may, too, and the pause grows."""
        self._over = False
        """No further session is wanted."""
        self._closing = asyncio.Event()
        self._loop = uvloop.new_event_loop()
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def close(self, linger_s: float = 1.0) -> None:
        """End the session and the thread; what is queued has `linger_s` to leave. More than once is harmless."""
        if self._thread.is_alive():
            self._call(self._end, linger_s)
            self._thread.join(linger_s + 5.0)
        elif not self._loop.is_closed():
            self._loop.close()

    @property
    def moved(self) -> Moved:
        """All bytes so far."""
        past, session = self._traffic
        return past + moved_by(session) if session is not None and session.traffic.connections else past

    def send(self, message: msg.Message) -> None:
        """Queue a message; dropped where no session is open: the next handshake tells all that matters. So is one that
        the session's version of the protocol does not have."""
        self._call(self._send, message)

    def send_blob(self, offer: msg.Offer, data: bytearray) -> None:
        """Offer a delta; dropped where no session is open: it is offered again after the next Welcome."""
        self._call(self._send_blob, offer, data)

    def flushed(self, timeout_s: float) -> bool:
        """Wait until a Leave that was sent is acknowledged, or its session is over."""
        if self._loop.is_closed():
            return True
        future: Future[bool] = asyncio.run_coroutine_threadsafe(self._flushed(timeout_s), self._loop)
        try:
            return future.result(timeout_s + 1.0)
        except TimeoutError:
            return False

    # --- on the loop

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        """Have the link's thread call it; nothing happens once the link is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._main = self._loop.create_task(self._live())
        try:
            self._loop.run_until_complete(self._main)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _live(self) -> None:
        """Keep connected as long as that is wanted, then stay until `close`: other threads may still call."""
        try:
            await self._keep_connected()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: it becomes an event for the one that waits
            self._deliver(LinkFailed(error))
        await self._closing.wait()

    def _end(self, linger_s: float) -> None:
        self._over = True
        self._closing.set()
        if self._session:
            self._session.close(Reason.CLOSED, "this node stops")
        self._wake.set()
        assert self._main is not None
        self._loop.call_later(linger_s if self._session else 0.0, self._main.cancel)

    async def _flushed(self, timeout_s: float) -> bool:
        deadline = self._loop.time() + timeout_s
        while (session := self._session) and session.state is State.CLOSING:
            if self._loop.time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def _send(self, message: msg.Message) -> None:
        if (
            self._session
            and self._session.state is State.OPEN
            and self._session.protocol >= SINCE.get(type(message), 0)
        ):
            try:
                self._session.send(message, time.monotonic())
                self._over = self._over or isinstance(message, msg.Leave)
            except LimitReached as error:  # a message that is lost would be missed: the next session derives it again
                self._session.close(Reason.BEHIND, f"the coordinator takes no messages: {error}")
            except LocalProtocolError as error:
                _log.warning("not sent message=%s reason=%r", type(message).__name__, str(error))
            self._wake.set()

    def _send_blob(self, offer: msg.Offer, data: bytearray) -> None:
        if self._session and self._session.state is State.OPEN:
            self._uploads.offer(self._session, offer, data)
            self._wake.set()

    async def _keep_connected(self) -> None:
        attempt, since, told_at = 0, time.monotonic(), float("-inf")
        while not self._over:
            self._hurt = False
            opened = await self._one_session()
            attempt = 0 if opened and not self._hurt else attempt + 1
            if opened:
                since, told_at = time.monotonic(), float("-inf")
            if self._over:
                return
            now = time.monotonic()
            if now - told_at >= TOLD_EVERY_S:
                for_s = now - since
                _log.warning(
                    "no link coordinator=%s reason=%r for=%.0fs", self._config.coordinator, self._ended_by, for_s
                )
                told_at = now
            first, longest = BACKOFF_S
            await asyncio.sleep(min(longest, first * 2 ** min(attempt, 10)) * random.uniform(0.5, 1.5))

    async def _one_session(self) -> bool:
        """Dial, talk until the session is over; whether it was ever open."""
        if not await self._resolves():
            return False
        session = Session(Role.NODE, time.monotonic(), limits=self._config.limits, timing=self._config.timing)
        session.traffic.curve = self._config.key is not None
        session.send(dataclasses.replace(self._hello(), inventory=self._config.inventory), time.monotonic())
        self._session, self._traffic = session, (self._traffic[0], session)
        dialogue = Dialogue(session, self._config.coordinator, self._dealers, self._emit, self._key_refused, self._wake)
        self._dialogue = dialogue
        try:
            await dialogue.run()
        finally:
            self._emit(session)
            self._downloads.session_over()
            self._uploads.session_over()
            self._probing = Probing()
            self._session, self._dialogue, self._traffic = None, None, (self.moved, None)
        return dialogue.opened

    async def _resolves(self) -> bool:
        """Whether the host has an address. ZeroMQ would look for one in silence, and never say that there is none."""
        try:
            async with asyncio.timeout(self._config.timing.liveness_s):
                await self._loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except TimeoutError:
            self._ended_by = f"no name server answers for {self._host!r}"
        except OSError as error:
            self._ended_by = f"the host {self._host!r} has no address: {error.strerror or error}"
        else:
            return True
        return False

    def _ended(self, reason: Reason, detail: str) -> None:
        """A session, or an attempt at one, is over."""
        self._ended_by = detail or reason.sentence
        self._hurt = reason in (Reason.MALFORMED, Reason.FAULT)
        opened = self._dialogue is not None and self._dialogue.opened
        if reason is Reason.SILENT and not opened and self._session is not None and self._session.traffic.connections:
            self._ended_by += "; it takes the connection and does not answer: it is busy, or of another version"
        if self._over:
            return
        if reason is not Reason.MALFORMED:
            self._misunderstood = 0 if opened else self._misunderstood
            return
        self._misunderstood += 1
        why = f"the coordinator at {self._config.coordinator} and this node do not understand each other: {detail}"
        mend = "install the same version of farloop on both"
        _log.warning("session refused times=%d of=%d why=%r mend=%r", self._misunderstood, BAD_SESSIONS, why, mend)
        if self._misunderstood >= BAD_SESSIONS:
            self._over = True
            told = f"{why} ({self._misunderstood} sessions in a row ended so). Their versions may differ: {mend}"
            refused = msg.Refused(reason=Reason.MALFORMED, detail=told, retriable=False)
            self._deliver(wire_ev.MessageReceived(message=refused))

    def _key_refused(self) -> None:
        self._over = True
        detail = "the coordinator does not know this node's key; add its .pub file to the allow-list"
        refused = msg.Refused(reason=Reason.WRONG_KEY, detail=detail, retriable=False)
        self._deliver(wire_ev.MessageReceived(message=refused))

    def _emit(self, session: Session) -> None:
        for event in session.events():
            match event:
                case wire_ev.MessageReceived(message=msg.Probe() as probe):
                    self._probing.asked(session, probe)
                    continue
                case wire_ev.MessageReceived(message=msg.Offer(blob=BlobId(kind=BlobKind.PROBE)) as offer):
                    self._probing.offered(session, offer, time.monotonic())
                    continue
                case (
                    wire_ev.BlobReceived(blob=BlobId(kind=BlobKind.PROBE) as blob)
                    | wire_ev.BlobSent(blob=BlobId(kind=BlobKind.PROBE) as blob)
                    | wire_ev.BlobDeclined(blob=BlobId(kind=BlobKind.PROBE) as blob)
                ):
                    self._probing.ended(blob)
                    continue
                case wire_ev.MessageReceived(message=msg.Offer() as offer):
                    self._downloads.announced(session, offer.blob, offer.size, offer.digest, time.monotonic())
                    continue
                case wire_ev.MessageReceived(message=msg.Committed() as committed):
                    blob = msg.update_id(committed)
                    self._downloads.announced(session, blob, committed.size, committed.digest, time.monotonic())
                case wire_ev.MessageReceived(message=msg.Refused(retriable=False)):
                    self._over = True
                case wire_ev.BlobReceived(blob=blob) | wire_ev.BlobCorrupt(blob=blob):
                    self._downloads.ended(session, blob, time.monotonic())
                case wire_ev.MessageReceived(message=msg.Stored()):
                    self._misunderstood = 0
                case wire_ev.SessionClosed(reason=reason, detail=detail):
                    self._ended(reason, detail)
                case _:
                    pass
            self._deliver(event)
        self._uploads.go_on(session)
        self._report(session)

    def _report(self, session: Session) -> None:
        """Tell what was seen of the link."""
        now = time.monotonic()
        reports = [self._probing.look(session)]
        if self._dialogue is not None and self._probing.is_due(now):
            reports.append(self._probing.connection(session, self._dialogue.connection(), now))
        for report in reports:
            if report is not None:
                self._send(report)
