"""The node's session with the coordinator: dial, back off, upload, download, measure."""

import asyncio
import contextlib
import dataclasses
import logging
import random
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import uvloop

from farloop.algo.spec import BlobId, BlobKind
from farloop.node.errors import LinkFailed
from farloop.node.zmq_dealer import Dealers, LinkConfig, ZmqDialer, split_address
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.blobs import BytesSource, Reassembly
from farloop.wire.link_measurement import DIGEST, Noise, Sink
from farloop.wire.messages import MOST_SEEN, SINCE, BytesByKind, Connection, Observed, Offer, Probe, Seen
from farloop.wire.meter import HALF_LEAST_CHUNKS, enough
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, LocalProtocolError, Reason
from farloop.wire.session import Role, Session, State

# --- What a node's link moved, by direction and kind (protocol, Figures).


NONE: Final = BytesByKind()


@dataclass(frozen=True, slots=True)
class Traffic:
    """All bytes, seen from the node."""

    up: BytesByKind = NONE
    down: BytesByKind = NONE

    @property
    def state(self) -> int:
        """Snapshots and probes, both directions."""
        return self.up.snapshot + self.up.probe + self.down.snapshot + self.down.probe

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.up + other.up, self.down + other.down)


def moved_by(session: Session) -> Traffic:
    """So far, seen from the node."""
    return Traffic(session.traffic.sent, session.traffic.received)


# --- The node's side of measuring its link: sends and ends probes as the coordinator asks, and reports what came in.
#
# Whatever arrives is a measurement (`wire/meter.py`); it is told as it was seen, and judged by the coordinator, which
# knows the round trip. Lives in the link's thread; reads no clock.


PROBES_SINCE = 3
"""Version of the protocol from which on the coordinator wants to hear of it."""

LOOK_S = 5.0
"""Between two reports on the connection itself."""


class Probing:
    """Of one session."""

    def __init__(self) -> None:
        self._expected: Probe | None = None
        """A probe that is coming down, or will."""
        self._over = False
        """Whether it has come, or was ended."""
        self._sending: BlobId | None = None
        self._told_at = float("-inf")

    def asked(self, session: Session, probe: Probe) -> None:
        """The coordinator wants a probe, or none any more."""
        self._stop(session)
        if probe.num_bytes <= 0:
            return
        if probe.upward:
            blob = self._sending = _blob(probe)
            offer = msg.Offer(blob=blob, size=probe.num_bytes, digest=DIGEST)
            with contextlib.suppress(AlreadyUnderWay, LimitReached):  # too many blobs as it is: none is due
                session.send_blob(offer, Noise(probe.num_bytes, seed=probe.number), background=True)
        else:
            self._expected = probe

    def offered(self, session: Session, offer: msg.Offer, now: float) -> None:
        """The bytes of a probe are about to come."""
        probe = self._expected
        if probe is None or offer.blob.version != probe.number or not 0 < offer.size <= probe.num_bytes:
            return session.cancel(offer.blob)
        with contextlib.suppress(AlreadyUnderWay, LimitReached):  # offered twice; or others come first
            session.expect(offer.blob, offer.size, DIGEST, Sink(offer.size), now)

    def ended(self, blob: BlobId) -> None:
        """The bytes of a probe have all come, or all gone, or are not wanted any more."""
        if blob == self._sending:
            self._sending = None
        elif self._expected is not None and blob == _blob(self._expected):
            self._over = True

    def look(self, session: Session) -> Observed | None:
        """End a probe that has told enough; what is to be reported, if anything is."""
        if session.state is not State.OPEN or session.protocol < PROBES_SINCE:
            return None
        probe, burst = self._expected, session.meter.burst()
        if probe is not None and burst is not None and enough(burst, probe.rtt_s):
            session.cancel(_blob(probe))
            self._over = True
        bursts = [burst for burst in session.meter.take() if burst.half_chunks >= HALF_LEAST_CHUNKS]
        if not bursts and not self._over:
            return None
        number = probe.number if probe is not None and self._over else 0
        if self._over:
            self._expected, self._over = None, False
        return Observed(links=(Seen(bursts=tuple(bursts[-MOST_SEEN:]), probe=number),))

    def is_due(self, now: float) -> bool:
        """Whether it is time to look at the connection again."""
        return now - self._told_at >= LOOK_S

    def connection(self, session: Session, told: Connection | None, now: float) -> Observed | None:
        """What the kernel says of the connection that carries blobs, as a report."""
        self._told_at = now
        if told is None or session.state is not State.OPEN or session.protocol < PROBES_SINCE:
            return None
        return Observed(links=(Seen(bulk=told),))

    def _stop(self, session: Session) -> None:
        if self._sending is not None:
            session.cancel(self._sending)
        if self._expected is not None:
            session.cancel(_blob(self._expected))
            session.meter.take()
        self._sending, self._expected, self._over = None, None, False


def _blob(probe: Probe) -> BlobId:
    return BlobId(kind=BlobKind.PROBE, fragment=0, version=probe.number)


# --- Blobs on their way to a node, over its sessions: what goes on where it stopped, and what will never come.
#
# A transfer that broke off is continued if it is announced again (protocol Q). Not every one is: a snapshot may take
# the place of updates, or a later one its own. What a session did not ask for again is let go with it at the latest, so
# that a node holds half a blob only for as long as somebody may send the rest.


_log = logging.getLogger(__name__)


class Downloads:
    """All that is half here."""

    def __init__(self) -> None:
        self._partial: dict[BlobId, Reassembly] = {}
        self._coming: set[BlobId] = set()
        """Of those, what the present session brings."""
        self._waiting: OrderedDict[BlobId, tuple[int, int]] = OrderedDict()
        """Announced while the session took no more at once: their size and digest."""

    def __len__(self) -> int:
        return len(self._partial)

    def announced(self, session: Session, blob: BlobId, size: int, digest: int, now: float) -> bool:
        """Take a blob from this session, from where an earlier one left off, or as soon as the session takes more;
        False where it is coming already.

        Whatever came before it in the order of versions and is not on its way will not come: of a fragment, updates
        are announced in order, and a snapshot stands for all before it, its own version included, on its way or not.
        """
        if session.state is not State.OPEN:  # this end has said good-bye
            return False
        if blob.kind is BlobKind.SNAPSHOT:
            self._give_up_updates(session, blob)
        try:
            reassembly = session.expect(blob, size, digest, self._partial.get(blob), now)
        except AlreadyUnderWay:  # announced twice: once by catch-up, once live
            return False
        except LimitReached:
            self._waiting[blob] = (size, digest)
            return True
        except LocalProtocolError as error:
            _log.warning("announced and not taken blob=%s reason=%r", blob, str(error))
            return False
        self._waiting.pop(blob, None)
        for other in [b for b in self._partial if b.fragment == blob.fragment and b.version < blob.version]:
            if other not in self._coming:
                del self._partial[other]
        self._partial[blob] = reassembly
        self._coming.add(blob)
        return True

    def ended(self, session: Session, blob: BlobId, now: float) -> None:
        """All bytes are here, good or bad. What waited can come."""
        self._partial.pop(blob, None)
        self._coming.discard(blob)
        for waited, (size, digest) in list(self._waiting.items()):
            self.announced(session, waited, size, digest, now)
            if waited in self._waiting:
                break

    def session_over(self) -> None:
        """Keep what it was bringing, and nothing that was left from before."""
        self._partial = {blob: reassembly for blob, reassembly in self._partial.items() if blob in self._coming}
        self._coming.clear()
        self._waiting.clear()

    def _give_up_updates(self, session: Session, snapshot: BlobId) -> None:
        """The snapshot holds them: one that is behind is not sent them at all."""

        def holds(blob: BlobId) -> bool:
            same = blob.kind is BlobKind.UPDATE and blob.fragment == snapshot.fragment
            return same and blob.version <= snapshot.version

        for blob in [blob for blob in self._waiting if holds(blob)]:
            del self._waiting[blob]
        for blob in [blob for blob in self._coming if holds(blob)]:
            session.cancel(blob)
            self._coming.discard(blob)
            del self._partial[blob]


# --- Deltas on their way from a node: what its session does not take yet waits here, and is offered when one has ended.


class Uploads:
    """Of one link, over its sessions."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[BlobId, tuple[Offer, bytearray]] = OrderedDict()
        """In the order in which they came."""

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, session: Session, offer: Offer, data: bytearray) -> None:
        """Offer a delta, now or as soon as the session takes more. A newer one of its fragment takes its place."""
        for blob in [b for b in self._waiting if b.fragment == offer.blob.fragment and b.seq < offer.blob.seq]:
            del self._waiting[blob]
        self._waiting[offer.blob] = (offer, data)
        self.go_on(session)

    def go_on(self, session: Session) -> None:
        """Offer what waits, as far as the session takes it. To be called after each of its events."""
        while self._waiting and session.state is State.OPEN:
            blob, (offer, data) = next(iter(self._waiting.items()))
            try:
                session.send_blob(offer, BytesSource(data))
            except LimitReached:
                return
            except AlreadyUnderWay as error:  # offered twice, by a reconnection and by its encoder
                _log.debug("offer skipped reason=%s", error)
            except LocalProtocolError as error:
                _log.warning("delta not offered blob=%s reason=%r", blob, str(error))
            del self._waiting[blob]

    def session_over(self) -> None:
        """What matters of it is offered again in the next session, after its Welcome."""
        self._waiting.clear()


# --- The node's link: a background thread that keeps a session with the coordinator alive, whatever the network does.
#
# A session lives as long as its connections (`zmq_dealer.py`); when one breaks, the link dials again after a jittered
# pause. Nothing here decides: what the session reports goes to the training thread through `deliver`, what that wants
# to send comes back through thread-safe calls. A fault of the link itself is delivered too, as an exception: training
# would wait for ever for a thread that is gone.


BACKOFF_S = (0.1, 5.0)
"""First and longest pause between two attempts; the second to tenth double, each is jittered by a half."""

TOLD_EVERY_S = 60.0
"""An outage is told of when it begins, and again once in so long: somebody may have to do something."""

BAD_SESSIONS = 8
"""So many sessions in a row that end because one end does not understand the other, without a delta of this node being
taken in between, end the node: the next one would end the same way."""


class NodeLink:
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
        self._traffic: tuple[Traffic, Session | None] = (Traffic(), None)
        """Of past sessions, and the present one; replaced as a whole: other threads read it."""
        self._downloads, self._uploads = Downloads(), Uploads()
        self._probing = Probing()
        self._dialogue: ZmqDialer | None = None
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
    def moved(self) -> Traffic:
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
        dialogue = ZmqDialer(
            session, self._config.coordinator, self._dealers, self._emit, self._key_refused, self._wake
        )
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
