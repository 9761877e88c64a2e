"""Measures links: passes echoes, probes and reports between sessions and the link table.

A run does not depend on it. Results are kept in memory only; after a restart links are measured again.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import cast

from farloop.algo.spec import BlobId, BlobKind, NodeId, to_plain
from farloop.coordinator.decide.roster import Member
from farloop.coordinator.net.link_table import COORDINATOR, BandwidthProbe, Candidate, Ends, LinkTable, Running
from farloop.coordinator.net.sessions import Peer
from farloop.coordinator.settings import PROBE_SHARE
from farloop.monitoring.addresses import parse_tcp, same_host
from farloop.monitoring.status import InventoryStatus, MachineStatus, NicStatus
from farloop.monitoring.tcp_connection import congestion_of, tcp_info
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg
from farloop.wire.link_measurement import DIGEST, INFO_BYTES, LARGE_LOST, MTU_FIX, Noise, Sink, large_lost, parse
from farloop.wire.machine_info import Nic
from farloop.wire.messages import MOST_SEEN, Observed, Probe, Seen
from farloop.wire.meter import Burst, Measured, enough
from farloop.wire.reasons import AlreadyUnderWay, LimitReached
from farloop.wire.session import ROUND_TRIPS, Session, State

_log = logging.getLogger(__name__)

ECHO_S = 10.0  # interval of echoes, once the first ten have returned
DIAL_S = 5.0  # how long a connection to a node's declared address may take
LOOK_S = 5.0  # interval of reading TCP_INFO of the connections
MOST_CLOCK_S = 1e11  # a wall clock beyond the year 5000 is none
LOST_S = 60.0  # an alarm about lost packets lasts so long after the last one


@dataclass(slots=True)
class _Look:
    run_bytes: int = 0  # that it moved for the run
    probe_bytes: int = 0
    echoed_at: float = -math.inf  # time of the last echo
    tcp_info: bytes = b""


class LinkMonitor:
    """Call `poll` a few times a second, `on_message` and `is_about_probe` for what sessions report."""

    def __init__(
        self,
        probe_bytes: int,
        working_for: Callable[[Peer], AbstractContextManager[Session]],
        now: float,
        *,
        quiet_s: float,
        share: float = PROBE_SHARE,
    ) -> None:
        """`probe_bytes`: most bytes of one probe; 0 disables probes. `working_for`: the context for all work in a
        session (`router.py`). `quiet_s`: seconds without waiting transfers before a probe. `share`: of a link's traffic
        that probes may take."""
        self.matrix, self._working_for = LinkTable(), working_for
        self._prober = BandwidthProbe(probe_bytes, now, quiet_s=quiet_s, share=share)
        self._looks: dict[int, _Look] = {}  # by session
        self._large_lost: dict[NodeId, tuple[float, str]] = {}  # node → when large packets "to" or "from" it were lost
        self._looked_at = now
        self._peer: Peer | None = None  # the session that is being probed
        self._told: dict[NodeId, tuple[float, Observed]] = {}  # node → its clock minus ours, and what it told
        self.reachable: dict[str, bool] = {}  # node → whether its declared address answered
        self._dialled: dict[str, tuple[str, int]] = {}  # node → (address, incarnation) that was tried last

    async def dial_back(self, members: Mapping[NodeId, Member], sessions: Mapping[NodeId, Peer]) -> None:
        """Try the addresses that nodes declare for other nodes to dial, once for each start of a node.

        A node without a key may name only the host that it connects from: it must not make us dial others.
        """
        for node, peer in sessions.items():
            member = members.get(node)
            if member is None or not member.inventory.address:
                continue
            wanted = (member.inventory.address, member.incarnation)
            if self._dialled.get(node) != wanted:
                self._dialled[node] = wanted
                self.reachable.pop(node, None)
                reached = await reaches(member.inventory.address, None if peer.owner is not None else peer.address)
                if reached is not None:
                    self.reachable[node] = reached
        self._dialled = {node: tried for node, tried in self._dialled.items() if NodeId(node) in members}

    def probe_next(self, node: str) -> str:
        """Probe the uplink of this node as soon as no transfer waits. Returns why not, or an empty text."""
        if not self._prober.probes:
            return "probe_bytes is 0"
        self._prober.asked.add((node, True))
        return ""

    def on_message(self, peer: Peer, node: NodeId, message: msg.Message, known: Iterable[str], now: float) -> bool:
        """Handle a message. Returns whether it was about links. `known`: all nodes of the run."""
        match message:
            case Observed(links=links, clock_s=clock_s):
                if clock_s is not None and 0.0 <= clock_s < MOST_CLOCK_S:
                    self._told[node] = (clock_s - datetime.now(UTC).timestamp(), message)
                for seen in links[:MOST_SEEN]:
                    if not seen.peer or (seen.peer != node and seen.peer in known):
                        self._on_observed(node, seen, now)
            case msg.Offer(blob=BlobId(kind=BlobKind.PROBE) as blob, size=size):
                self._offered(peer, blob, size, now)
            case _:
                return False
        return True

    def is_about_probe(self, event: wire_ev.SessionEvent) -> bool:
        if isinstance(event, wire_ev.MessageReceived | wire_ev.SessionClosed):
            return False
        return event.blob.kind is BlobKind.PROBE

    def _on_observed(self, node: NodeId, seen: Seen, now: float) -> None:
        peer, running = seen.peer or COORDINATOR, self._prober.running
        if seen.peer and seen.rtt_s is not None and 0.0 < seen.rtt_s < 60.0:
            self.matrix.round_trips(node, peer, [seen.rtt_s])
        if seen.peer and seen.transfer is not None:
            self.matrix.transfer((peer, node), seen.transfer, now)
        ours = ("", node, seen.probe, False)
        if running is not None and (seen.peer, running.node, running.number, running.upward) != ours:
            running = None
        for burst in seen.bursts[:MOST_SEEN]:
            self._took((peer, node), burst, now, probe=running)
        if running is not None and not seen.bursts:
            self._prober.finish(now, learned=False)
        if seen.bulk is not None:
            if seen.bulk.large_lost:
                self._large_lost[node] = (now, "from")
            self.matrix.connection((node, peer), seen.bulk)

    def _took(self, ends: Ends, burst: Burst, now: float, probe: Running | None) -> None:
        found = self.matrix.burst(ends, burst, now, probe=probe is not None and probe.quiet)
        if probe is not None:
            self._peer = None
            self._prober.finish(now, learned=isinstance(found, Measured))

    def _offered(self, peer: Peer, blob: BlobId, size: int, now: float) -> None:
        """A node offers the bytes of an uplink probe."""
        running, session = self._prober.running, peer.session
        wanted = running is not None and running.upward and peer is self._peer and blob.version == running.number
        if session.state is not State.OPEN:
            return
        with self._working_for(peer) as session:
            if not wanted or running is None or not 0 < size <= running.num_bytes:
                session.cancel(blob)
            else:
                with contextlib.suppress(AlreadyUnderWay, LimitReached):  # offered twice, or no room now
                    session.expect(blob, size, DIGEST, Sink(size), now)

    def poll(self, sessions: Mapping[NodeId, Peer], members: Mapping[NodeId, Member], now: float) -> None:
        """Send echoes, read new measurements, and continue or begin a probe."""
        here = {node: peer for node, peer in sessions.items() if peer.session.state is State.OPEN}
        self.matrix.retain(members.keys())
        self._prober.retain(members.keys())
        self._told = {node: told for node, told in self._told.items() if node in members}
        self.reachable = {node: reached for node, reached in self.reachable.items() if NodeId(node) in members}
        if any(_is_busy(peer.session, self._is_probed(peer), now) for peer in here.values()):
            self._prober.busy(now)
        self._looks = {peer.number: self._looks.get(peer.number) or _Look() for peer in here.values()}
        connections = now - self._looked_at >= LOOK_S
        self._looked_at = now if connections else self._looked_at
        for node, peer in here.items():
            look = self._looks[peer.number]
            echoes = len(peer.session.round_trips) < ROUND_TRIPS or now - look.echoed_at >= ECHO_S
            if echoes or connections or peer.session.transfers.meter.has_bursts or self._is_probed(peer):
                with self._working_for(peer) as session:
                    self._see(node, peer, now)
                    if connections:
                        self._read_tcp_info(node, peer, now)
                    if echoes and session.state is State.OPEN:
                        look.echoed_at = now
                        session.echo(now)
        for node, peer in here.items():  # what crossed each link since the last look: probes may take a share of it
            traffic, look = peer.session.traffic, self._looks[peer.number]
            probes = traffic.sent_blobs[BlobKind.PROBE].bytes + traffic.received_blobs[BlobKind.PROBE].bytes
            run = traffic.sent.total + traffic.received.total - probes
            self._prober.has_moved(node, max(0, run - look.run_bytes), probes - look.probe_bytes)
            look.run_bytes, look.probe_bytes = run, probes
        self._probe(now)
        self._begin(here, now)

    def _see(self, node: NodeId, peer: Peer, now: float) -> None:
        session, running = peer.session, self._prober.running
        self.matrix.round_trips(node, COORDINATOR, session.round_trips)
        if running is not None and running.upward and self._is_probed(peer):
            burst = session.transfers.meter.burst()
            if burst is not None and enough(burst, running.rtt_s):
                session.cancel(_blob(running))
        for burst in session.transfers.meter.pop_bursts():
            running = self._prober.running
            ours = running is not None and running.upward and self._is_probed(peer)
            self._took((node, COORDINATOR), burst, now, probe=running if ours else None)

    def _read_tcp_info(self, node: NodeId, peer: Peer, now: float) -> None:
        if peer.connection is None:
            return
        look, info = self._looks[peer.number], tcp_info(*peer.connection, INFO_BYTES)
        before, look.tcp_info = look.tcp_info, info
        if large_lost(info, before, now - peer.session.heard_at):
            self._large_lost[node] = (now, "to")
        told = parse(info, congestion_of(*peer.connection))
        if told is not None:
            self.matrix.connection((COORDINATOR, node), told)

    def _is_probed(self, peer: Peer) -> bool:
        return self._prober.running is not None and peer is self._peer

    def _probe(self, now: float) -> None:
        """Cancel the running probe if a transfer waits, its session is over, or it takes too long."""
        running, peer = self._prober.running, self._peer
        if running is None:
            return
        gone = peer is None or peer.session.state is not State.OPEN
        if not gone and running.quiet and now < running.ends_by:
            return
        why = "its session is over" if gone else "it takes too long" if running.quiet else "other bytes wait"
        _log.info("probe cancelled node=%s upward=%s why=%r", running.node, running.upward, why)
        self._peer = None
        self._prober.finish(now, learned=False)
        if peer is not None and not gone:
            with self._working_for(peer) as session:
                session.cancel(_blob(running))
                session.send(Probe(number=running.number, upward=running.upward, num_bytes=0, rtt_s=0.0), now)

    def _begin(self, here: Mapping[NodeId, Peer], now: float) -> None:
        running = self._prober.next(self._candidates(here, now), now)
        if running is None:
            return
        peer = self._peer = here[NodeId(running.node)]
        asked = Probe(number=running.number, upward=running.upward, num_bytes=running.num_bytes, rtt_s=running.rtt_s)
        with self._working_for(peer) as session:
            session.send(asked, now)
            if not running.upward:
                offer = msg.Offer(blob=_blob(running), size=running.num_bytes, digest=DIGEST)
                session.send_blob(offer, Noise(running.num_bytes, seed=running.number), background=True)

    def _candidates(self, here: Mapping[NodeId, Peer], now: float) -> Iterator[Candidate]:
        for node, peer in here.items():
            rtt_s = self.matrix.rtt_s(node, COORDINATOR)
            is_open = peer.session.state is State.OPEN  # else sending found its connection broken
            if rtt_s is None or len(peer.session.round_trips) < ROUND_TRIPS or not is_open:
                continue
            for upward, ends in ((True, (node, COORDINATOR)), (False, (COORDINATOR, node))):
                age_s, changed = self.matrix.age_s(ends, now), self.matrix.changed(ends)
                yield Candidate(node=node, upward=upward, rtt_s=rtt_s, age_s=age_s, changed=changed)

    def alarms(self, now: float) -> dict[str, str]:
        """One for each node that large packets do not reach, or do not come from. It lasts until none was lost for a
        minute: sessions end and begin again meanwhile."""
        return {
            f"mtu of {node}": f"{way} it, {LARGE_LOST}; {MTU_FIX}"
            for node, (at, way) in self._large_lost.items()
            if now - at < LOST_S
        }

    def status(self, members: Iterable[Member], now: float) -> InventoryStatus:
        nodes = [self._machine(member) for member in members if member.stage != "left"]
        return {"nodes": nodes, "links": self.matrix.rows(now)}

    def _machine(self, member: Member) -> MachineStatus:
        off_s, latest = self._told.get(member.name, (None, Observed(links=())))
        told = {
            **to_plain(member.inventory),
            "name": member.name,
            "reachable": self.reachable.get(member.name),
            "connected": member.session is not None,
            "nics": [_nic(nic) for nic in member.inventory.nics],
            "seconds_per_step": member.seconds_per_step,
            "clock_off_s": off_s,
            "disk_free_bytes": latest.disk_free,
            "disk_used_bytes": latest.disk_used,
        }
        return cast(MachineStatus, told)


async def reaches(address: str, only: str | None) -> bool | None:
    """Whether tcp://host:port accepts a connection; None if it is not tried: `only` is the one host to be dialled."""
    try:
        there = parse_tcp(address)
    except ValueError:
        return None
    if only is not None and not same_host(there.host, only):
        return None
    try:
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(there.host, there.port)
    except (OSError, TimeoutError, UnicodeError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def _is_busy(session: Session, probed: bool, now: float) -> bool:
    """Whether a transfer of this session waits, other than a probe."""
    transfers = session.transfers
    if transfers.live_in_flight:
        return True
    if probed:
        return False
    return transfers.background_in_flight > 0 or session.blob_waits(now) is True or transfers.meter.busy


def _blob(running: Running) -> BlobId:
    return BlobId(kind=BlobKind.PROBE, fragment=0, version=running.number)


def _nic(nic: Nic) -> NicStatus:
    return {
        "name": nic.name,
        "kind": nic.kind,
        "netdev": nic.netdev,
        "bytes_per_s": nic.bits_per_s / 8 if nic.bits_per_s else None,
        "flow_bytes_per_s": nic.flow_bits_per_s / 8 if nic.flow_bits_per_s else None,
        "active": nic.active,
        "usable": nic.usable,
        "why": nic.why,
        "members": list(nic.members),
        "addresses": list(nic.addresses),
        "fabric": nic.fabric,
        "provenance": nic.source("bits_per_s"),
        "kind_from": nic.source("kind"),
        "others": [f"{fact.about} {fact.value} ({fact.source})" for fact in nic.others],
    }
