"""Echoes, probes and reports of the coordinator's side, on sessions without a link between them."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime

import pytest
from plain_runs import plain_hello, plain_spec
from tcp_infos import resent

from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.coordinator.decide.roster import Member
from farloop.coordinator.net.link_monitor import LinkMonitor
from farloop.coordinator.net.link_table import COORDINATOR
from farloop.coordinator.net.sessions import Peer
from farloop.node.link import Probing
from farloop.wire.blobs import BytesSource, blob_digest
from farloop.wire.events import BlobDeclined, BlobReceived, BlobSent, MessageReceived
from farloop.wire.limits import THIN_CHUNK
from farloop.wire.machine_info import Inventory, Nic
from farloop.wire.messages import Connection, Observed, Offer, Probe, Role, Seen, Transfer, Welcome
from farloop.wire.reasons import Reason
from farloop.wire.session import Session, State

OSLO, BERGEN = NodeId("oslo"), NodeId("bergen")
BUDGET = 4 << 20
CHUNK_S = 0.25
"""Time that each chunk takes: of a thin link, 256 KiB a second."""


class Star:
    """A coordinator and its nodes; frames cross at once, but a chunk takes its time."""

    def __init__(self, *names: NodeId, budget: int = BUDGET) -> None:
        self.now = 0.0
        self.peers: dict[NodeId, Peer] = {}
        self.nodes: dict[NodeId, Session] = {}
        self.probing = {name: Probing() for name in names}
        self.members = {name: Member(name=name, incarnation=1) for name in names}
        self.sight = LinkMonitor(budget, lambda peer: nullcontext(peer.session), 0.0, quiet_s=1.0, share=1e9)
        self.probes: list[Probe] = []
        self.halts = False
        """Whether time stops as soon as a probe's first bytes are on their way."""
        for number, name in enumerate(names, start=1):
            self.nodes[name], session = _opened()
            self.peers[name] = Peer(number, session, None, name, "10.0.0.1", b"", {0: b"", 1: b""})

    @property
    def halted(self) -> bool:
        return self.halts and bool(self.probes)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until and not self.halted:
            self.sight.poll(self.peers, self.members, self.now)
            for name in self.peers:
                self._carry(name)
            self.now += 0.25

    def push(self, name: NodeId, data: bytes) -> None:
        """An update, of which the node has heard."""
        update = BlobId(kind=BlobKind.UPDATE, fragment=0, version=1)
        self.nodes[name].expect(update, len(data), blob_digest(data), None, self.now)
        self.peers[name].session.push_blob(update, BytesSource(data))

    def _carry(self, name: NodeId) -> None:
        node, peer, probing = self.nodes[name], self.peers[name], self.probing[name]
        moved = True
        while moved and not self.halted:
            moved = False
            for source, target in ((node, peer.session), (peer.session, node)):
                for lane, parts in source.outgoing(self.now, max_chunks=1):
                    self.now += CHUNK_S if lane else 0.0
                    target.receive(lane, parts, self.now)
                    moved = True
                self._events(name)
            if (report := probing.report(node)) is not None:
                node.send(report, self.now)
                moved = True
            self.sight.poll(self.peers, self.members, self.now)

    def _events(self, name: NodeId) -> None:
        node, peer, probing = self.nodes[name], self.peers[name], self.probing[name]
        for event in node.events():
            match event:
                case MessageReceived(message=Probe() as probe):
                    self.probes.append(probe)
                    probing.on_probe(node, probe)
                case MessageReceived(message=Offer(blob=BlobId(kind=BlobKind.PROBE)) as offer):
                    probing.on_offer(node, offer, self.now)
                case BlobReceived(blob=blob) | BlobSent(blob=blob) | BlobDeclined(blob=blob):
                    probing.on_blob_end(blob)
        for event in peer.session.events():
            if isinstance(event, MessageReceived):
                assert self.sight.on_message(peer, name, event.message, self.members, self.now)
            else:
                assert self.sight.is_about_probe(event) == (event.blob.kind is BlobKind.PROBE)  # type: ignore[union-attr]


def _opened() -> tuple[Session, Session]:
    node, coordinator = Session(Role.NODE, 0.0), Session(Role.COORDINATOR, 0.0)
    node.send(plain_hello(), 0.0)
    for lane, parts in node.outgoing(0.0):
        coordinator.receive(lane, parts, 0.0)
    welcome = Welcome(protocol=1, epoch=3, spec=plain_spec(), lane_token=b"t", versions=(0,), windows=(), rounds=())
    coordinator.send(welcome, 0.0)
    for lane, parts in coordinator.outgoing(0.0):
        node.receive(lane, parts, 0.0)
    for session in (node, coordinator):
        session.events()
        session.lane_opened(1)
    return node, coordinator


def test_in_quiet_times_every_direction_is_probed_once_and_known() -> None:
    star = Star(OSLO, BERGEN)
    star.run(90.0)
    assert {(probe.upward, probe.num_bytes > 0) for probe in star.probes} == {(True, True), (False, True)}
    assert len(star.probes) == 4
    for name in (OSLO, BERGEN):
        for ends in ((name, COORDINATOR), (COORDINATOR, name)):
            assert star.sight.matrix.rate(ends) == pytest.approx(THIN_CHUNK / CHUNK_S, rel=0.02)
    assert all(row["measured_by"] == "probe" for row in star.sight.matrix.rows(star.now))


@pytest.mark.parametrize("to", [OSLO, BERGEN])
def test_a_probe_is_called_off_as_soon_as_other_bytes_wait(to: NodeId) -> None:
    star = Star(OSLO, BERGEN, budget=64 << 20)
    star.halts = True
    star.run(60.0)
    star.halts = False
    assert len(star.probes) == 1
    star.push(to, bytes(1 << 20))
    star.peers[to].session.outgoing(star.now, max_chunks=1)  # it is on its way
    star.sight.poll(star.peers, star.members, star.now)
    began = star.probes[0]
    star.run(0.25)
    assert star.probes[-1] == dataclasses.replace(began, num_bytes=0, rtt_s=0.0)
    assert all(peer.session.transfers.background_in_flight == 0 for peer in star.peers.values())


def test_a_budget_of_nothing_measures_by_what_is_sent_anyway() -> None:
    star = Star(OSLO, budget=0)
    star.run(5.0)
    star.push(OSLO, bytes(8 << 20))
    star.run(20.0)
    assert star.probes == []
    (down, _) = star.sight.matrix.rows(star.now)
    assert down["measured_by"] == "transfer"
    assert down["bytes_per_s"] == pytest.approx(THIN_CHUNK / CHUNK_S, rel=0.02)


def test_stages_tell_what_came_from_each_other_and_nothing_of_the_coordinators_link() -> None:
    """A node speaks of its own links alone; of that to the coordinator, how its connection fares."""
    star = Star(OSLO, BERGEN)
    told = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=1, segments=100)
    took = Transfer(num_bytes=3_000_000, seconds=0.5)
    links = tuple(Seen(peer=peer, bulk=told, rtt_s=0.1, transfer=took) for peer in ("", "bergen", "oslo", "nobody"))
    star.sight.on_message(star.peers[OSLO], OSLO, Observed(links=links), star.members, 0.0)
    table = [((row["from"], row["to"]), row) for row in star.sight.matrix.rows(0.0)]
    connected = {ends for ends, row in table if row["retransmit_ratio"] is not None}
    assert connected == {("oslo", COORDINATOR), ("oslo", "bergen")}
    assert {ends: row["bytes_per_s"] for ends, row in table if row["bytes_per_s"]} == {("bergen", "oslo"): 6e6}
    assert star.sight.matrix.rtt_s("oslo", "bergen") == 0.1 and star.sight.matrix.rtt_s("oslo", COORDINATOR) is None


def test_large_packets_that_are_lost_in_either_direction_raise_an_alarm_until_none_was_for_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    star = Star(OSLO, BERGEN)
    star.peers[BERGEN].connection = (7, "10.0.0.2")
    monkeypatch.setattr("farloop.coordinator.net.link_monitor.tcp_info", lambda *of: resent(3))
    monkeypatch.setattr("farloop.coordinator.net.link_monitor.congestion_of", lambda *of: "cubic")
    star.run(6.0)
    told = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=9, segments=99, large_lost=True)
    star.sight.on_message(star.peers[OSLO], OSLO, Observed(links=(Seen(bulk=told),)), star.members, star.now)
    alarms = star.sight.alarms(star.now)
    assert alarms.keys() == {"mtu of oslo", "mtu of bergen"}
    assert alarms["mtu of oslo"].startswith("from it, large packets are lost and small ones pass")
    assert "mtu 1280" in alarms["mtu of bergen"] and alarms["mtu of bergen"].startswith("to it")
    assert star.sight.alarms(star.now + 61.0) == {}


def test_the_status_tells_machines_and_who_left_is_not_among_them() -> None:
    star = Star(OSLO, BERGEN)
    star.members[OSLO].inventory = Inventory(site="north", nics=(Nic(name="eth0", kind="ethernet", bits_per_s=1e10),))
    star.members[BERGEN].stage = "left"
    ahead = datetime.now(UTC).timestamp() + 100.0
    told_of = Observed(links=(), clock_s=ahead, disk_free=10**9, disk_used=10**6)
    star.sight.on_message(star.peers[OSLO], OSLO, told_of, star.members, 0.0)
    (told,) = star.sight.status(star.members.values(), 0.0)["nodes"]
    assert (told["name"], told["site"], told["reachable"]) == ("oslo", "north", None)
    assert told["nics"][0]["bytes_per_s"] == 1.25e9
    assert (told["disk_free_bytes"], told["disk_used_bytes"]) == (10**9, 10**6)
    assert told["clock_off_s"] == pytest.approx(100.0, abs=30.0)


def test_a_session_that_turns_out_to_be_broken_as_it_is_asked_is_not_probed() -> None:
    star = Star(OSLO)
    star.run(3.0)
    assert star.sight.matrix.rtt_s(OSLO, COORDINATOR) is not None

    @contextmanager
    def finds_it_gone(peer: Peer) -> Iterator[Session]:
        yield peer.session
        peer.session.close(Reason.CLOSED, "the link found it gone")

    gone = LinkMonitor(BUDGET, finds_it_gone, star.now, quiet_s=0.0)
    gone.matrix.round_trips(OSLO, COORDINATOR, star.peers[OSLO].session.round_trips)
    gone.poll(star.peers, star.members, star.now)
    assert star.peers[OSLO].session.state is State.CLOSED
    gone.poll(star.peers, star.members, star.now + 60.0)
