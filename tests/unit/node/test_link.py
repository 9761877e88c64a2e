"""Covers downloads, uploads, measurement and traffic of `node/link.py`, and what is known of a link.

Its sessions: `tests/integration/test_link.py`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from plain_runs import plain_hello, plain_spec
from session_pairs import messages, opened
from stories import StoryText, all_stories, check_story, python
from tcp_infos import resent
from virtual_host import VirtualHost

import farloop.node.link
from farloop.algo.spec import BlobId, BlobKind, NodeId
from farloop.node.link import (
    LOOK_S,
    MOST_READS,
    Downloads,
    LinkConfig,
    NodeLink,
    Probing,
    read_known,
    write_known,
)
from farloop.wire import events
from farloop.wire import messages as wire_messages
from farloop.wire.blobs import BytesSource, Reassembly, blob_digest
from farloop.wire.events import BlobReceived, MessageReceived
from farloop.wire.limits import THIN_CHUNK, Limits
from farloop.wire.link_measurement import DIGEST, INFO_BYTES, Noise, Sink
from farloop.wire.messages import (
    Connection,
    Hello,
    Leave,
    Message,
    Observed,
    Offer,
    Place,
    Placed,
    Probe,
    Refused,
    Role,
    Welcome,
)
from farloop.wire.outgoing import LinkKnown
from farloop.wire.reasons import AlreadyUnderWay, LimitReached, Reason
from farloop.wire.session import Session, State
from farloop.wire.transfer import Transfers


class Limited:
    """A session of which only `expect` and `cancel` are used; it takes so many blobs at once."""

    state = State.OPEN

    def __init__(self, most: int = 256) -> None:
        self.most = most
        self.under_way: dict[BlobId, Reassembly | None] = {}

    def cancel(self, blob: BlobId) -> None:
        del self.under_way[blob]

    def expect(self, blob: BlobId, size: int, digest: int, reassembly: Reassembly | None, now: float) -> Reassembly:
        self._begin(blob, reassembly)
        return reassembly or Reassembly(size, digest)

    def _begin(self, blob: BlobId, reassembly: Reassembly | None) -> None:
        if blob in self.under_way:
            raise AlreadyUnderWay("it is under way already")
        if len(self.under_way) >= self.most:
            raise LimitReached("no more at once")
        self.under_way[blob] = reassembly


# --- downloads


def update(version: int, fragment: int = 0) -> BlobId:
    return BlobId(kind=BlobKind.UPDATE, fragment=fragment, version=version)


def snapshot(version: int) -> BlobId:
    return dataclasses.replace(update(version), kind=BlobKind.SNAPSHOT)


class Coming:
    """Downloads, and the session that they are asked for in."""

    def __init__(self, most: int = 256) -> None:
        self.downloads, self.session = Downloads(), Limited(most)

    def announce(self, *blobs: BlobId) -> list[bool]:
        session = cast(Session, self.session)
        return [self.downloads.announced(session, blob, 8, 1, 0.0) for blob in blobs]

    def end(self, blob: BlobId) -> None:
        self.session.under_way.pop(blob, None)
        self.downloads.on_blob_end(cast(Session, self.session), blob, 0.0)

    def next_session(self) -> None:
        self.downloads.on_session_end()
        self.session = Limited(self.session.most)

    def coming(self) -> Iterator[BlobId]:
        """All that is under way, and what is asked for then."""
        while self.session.under_way:
            yield (blob := next(iter(self.session.under_way)))
            self.end(blob)

    @property
    def expected(self) -> set[BlobId]:
        return set(self.session.under_way)


# --- uploads


def delta(seq: int, fragment: int = 0) -> Offer:
    blob = BlobId(kind=BlobKind.DELTA, fragment=fragment, version=0, node=NodeId("a"), incarnation=1, seq=seq)
    return Offer(blob=blob, size=1, digest=blob_digest(bytes(1)))


def linked(session: Session) -> NodeLink:
    """The link of a node in this session, without a connection."""
    link = NodeLink(LinkConfig(coordinator="here"), cast(Any, None), cast(Any, None), max)
    link._session = session
    return link


def test_300_fragments_at_once_go_up_and_come_down() -> None:
    """Of both, one more than were sent at once came in the next session, if ever."""
    node, coordinator = opened()
    link, downloads = linked(node), Downloads()
    arrived: set[BlobId] = set()
    for n in range(300):
        link.send_blob(delta(n, n), bytearray(1))
        coordinator.push_blob(update(1, n), BytesSource(b"x"))
        downloads.announced(node, update(1, n), 1, blob_digest(b"x"), 0.0)

    def each() -> None:
        for event in coordinator.events():
            match event:
                case MessageReceived(message=Offer(blob=blob, size=size, digest=digest)):
                    coordinator.expect(blob, size, digest, None, 0.0)
                case BlobReceived(blob=blob):
                    arrived.add(blob)
        for event in node.events():
            if isinstance(event, BlobReceived):
                arrived.add(event.blob)
                downloads.on_blob_end(node, event.blob, 0.0)

    carry(node, coordinator, each=each)
    assert arrived == {delta(n, n).blob for n in range(300)} | {update(1, n) for n in range(300)}
    assert node.transfers.waiting == coordinator.transfers.waiting == [] and len(downloads) == 0


# --- measurement

BUDGET = 4 << 20
BLOB = BlobId(kind=BlobKind.PROBE, fragment=0, version=7)
UP = Probe(number=7, upward=True, num_bytes=BUDGET, rtt_s=0.02)
DOWN = dataclasses.replace(UP, upward=False)
TOLD = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=0, segments=9)


def carry(a: Session, b: Session, *, step_s: float = 0.0, each: Callable[[], None] = lambda: None) -> None:
    """Everything that both have to say, frame by frame; each takes `step_s`."""
    now, moved = 0.0, True
    while moved:
        moved = False
        for source, target in ((a, b), (b, a)):
            for lane, parts in source.outgoing(now, max_chunks=1):
                now += step_s if lane else 0.0
                target.receive(lane, parts, now)
                moved = True
                each()


def probed_downward(num_bytes: int, *, asked: bool = True) -> tuple[Probing, Session, Session]:
    """The coordinator sends bytes, that the node was told of or not."""
    (node, coordinator), probing = opened(), Probing()
    if asked:
        probing.on_probe(node, dataclasses.replace(DOWN, num_bytes=num_bytes))
    coordinator.send_blob(Offer(blob=BLOB, size=num_bytes, digest=DIGEST), Noise(num_bytes), background=True)
    carry(node, coordinator)
    (offer,) = messages(node)
    assert isinstance(offer, Offer)
    probing.on_offer(node, offer, 0.0)
    return probing, node, coordinator


def called_off(probe: Probe) -> tuple[bool, Observed | None]:
    """Whether a coordinator still counts a probe that was called off, and what a node tells of it."""
    (node, coordinator), probing = opened(), Probing()
    probing.on_probe(node, probe)
    carry(node, coordinator)
    probing.on_probe(node, dataclasses.replace(probe, num_bytes=0))
    coordinator.events()
    if probe.upward:
        coordinator.expect(BLOB, BUDGET, DIGEST, Sink(BUDGET), 0.0)
    carry(node, coordinator)
    node.check()
    return coordinator.transfers.meter.busy, probing.report(node)


def test_a_probe_that_comes_is_reported_with_its_number_and_what_was_seen() -> None:
    probing, node, coordinator = probed_downward(BUDGET)
    reports = list[Observed]()

    def look() -> None:
        for event in node.events():
            if isinstance(event, BlobReceived):
                probing.on_blob_end(event.blob)
        if (report := probing.report(node)) is not None:
            reports.append(report)

    carry(node, coordinator, step_s=0.25, each=look)
    ((seen,),) = [report.links for report in reports]
    assert (seen.peer, seen.probe) == ("", 7)
    (burst,) = seen.bursts
    assert burst.half_bytes / burst.half_s == pytest.approx(THIN_CHUNK / 0.25)
    assert burst.seconds < 4.0  # ended before the budget was used
    assert messages(coordinator) == [] and node.transfers.meter.pop_bursts() == []


# --- what is known of a link


KNOWN = LinkKnown(bytes_per_s=25e6, round_trip_s=0.1, arriving_bytes_per_s=1.5e6)


def test_what_is_known_of_a_link_is_kept_for_the_coordinator_that_it_leads_to(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    assert read_known(path, "tcp://a:1") is None
    write_known(path, "tcp://a:1", KNOWN)
    assert read_known(path, "tcp://a:1") == KNOWN and read_known(path, "tcp://b:1") is None


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", '{"coordinator": "tcp://a:1", "rate": 1.0}',
        '{"coordinator": "tcp://a:1", "bytes_per_s": NaN, "round_trip_s": 0.1, "arriving_bytes_per_s": 0.0}',
        '{"coordinator": "tcp://a:1", "bytes_per_s": "1", "round_trip_s": 0.1, "arriving_bytes_per_s": 0.0}',
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_link_is_told_and_costs_nothing_but_a_slower_start(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "link.json"
    path.write_text(text)
    assert read_known(path, "tcp://a:1") is None
    assert "link not known" in caplog.text
    write_known(tmp_path / "no" / "folder.json", "tcp://a:1", KNOWN)
    assert "link not kept" in caplog.text


# --- lanes


class Wires(VirtualHost):
    """A node's link over connections that carry everything at once, and the coordinator's session behind them."""

    has_others = False
    epoch, seen = 3, 0  # of the coordinator, and the highest that the node has seen
    turned_away = 0

    def __init__(self, lanes: int, *, max_lanes: int = 16, known: LinkKnown | None = None) -> None:
        super().__init__()
        self.max_lanes = max_lanes
        self.opened: list[int] = []
        """Lanes that were asked for, in order."""
        self.sessions = 0
        self.refusal: Message | None = None  # the answer to a greeting, where it is no welcome
        self.told: list[object] = []
        self.heard: list[Message] = []
        """What the coordinator got."""
        config = LinkConfig(coordinator="there", lanes=lanes)
        self.link = NodeLink(config, self, self.clock, lambda low, high: 1.0, check=True)
        self.link._known = known
        self.link.start(lambda: dataclasses.replace(plain_hello(), epoch_seen=self.seen), self.told.append)
        self.run_for(0.01)

    def dial(self, opened: Callable[[Any], None], failed: Callable[[str], None]) -> None:
        self.sessions += 1
        self.other = Session(Role.COORDINATOR, self.clock.now(), limits=Limits(max_lanes=self.max_lanes))
        opened(self)

    def turn_away(self) -> None:
        self.turned_away += 1

    def listen(self, listener: Any) -> None:
        self.listener = listener

    def open_lane(self, lane: int, greeting: Any) -> None:
        self.opened.append(lane)
        self.agenda.after(0.0, lambda: self.listener.on_ready(lane))

    def is_ready(self, lane: int) -> bool:
        return True

    def send(self, lane: int, frames: Any) -> None:
        for parts in frames:
            self.other.receive(lane, parts, self.clock.now())
        self.heard += (heard := messages(self.other))
        if any(isinstance(message, Hello) for message in heard):
            welcome = Welcome(
                protocol=1, epoch=self.epoch, spec=plain_spec(), lane_token=b"t", versions=(), windows=(), rounds=()
            )
            self.other.send(self.refusal or welcome, self.clock.now())
        self.agenda.after(0.0, self._answer)

    def _answer(self) -> None:
        for lane, parts in self.other.outgoing(self.clock.now()):
            self.listener.on_frame(lane, parts)

    def kernel(self) -> None:
        return None

    def close(self, last: Any = ()) -> None:
        pass


class Reads:
    """An object store that answers when it is told to."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, Callable[[str, tuple[int, int]], None]]] = []

    def put(self, url: str, data: Any, over: Callable[[str, tuple[int, int]], None]) -> None:
        self.begun.append((url, over))

    def get(self, url: str, into: bytearray, right: Any, over: Callable[[str, tuple[int, int]], None]) -> None:
        self.begun.append((url, over))


def test_reads_that_a_snapshot_makes_needless_let_the_next_ones_begin() -> None:
    reads, link = Reads(), Wires(1).link
    link._objects, session = cast(Any, reads), link._session
    assert session is not None
    versions = range(1, MOST_READS + 1)
    for blob in (*map(update, versions), update(1, fragment=1)):
        link._places[blob] = f"f{blob.fragment}"
        link._announced(session, blob, 8, 0, 0.0)
    assert [url for url, _ in reads.begun] == ["f0" for _ in versions]
    link._announced(session, snapshot(MOST_READS), 8, 0, 0.0)
    for _, over in list(reads.begun):
        over("", (0, 8))
    assert [url for url, _ in reads.begun][MOST_READS:] == ["f1"]


def test_a_delta_written_ahead_says_nothing_of_the_object_that_a_later_session_asks_for() -> None:
    store, wires = Reads(), Wires(1)
    wires.link._objects = cast(Any, store)
    blob = BlobId(kind=BlobKind.DELTA, fragment=2, version=7, node=NodeId("a"), incarnation=1)
    wires.other.send(Place(blob=blob, url="ahead?signed", ahead=3), wires.clock.now())
    wires._answer()
    delta = dataclasses.replace(blob, version=6, seq=1)
    offer = Offer(blob=delta, size=8, digest=0, window=6)
    wires.link.send_blob(offer, bytearray(8))
    assert not store.begun, "the URL is for another window"
    wires.link.send_blob(
        dataclasses.replace(offer, blob=(late := dataclasses.replace(blob, seq=2)), window=7), bytearray(8)
    )
    assert [url for url, _ in store.begun] == ["ahead?signed"]
    wires.listener.on_lost(0, "gone")
    wires.run_for(5.0)
    wires.link.send_blob(dataclasses.replace(offer, blob=late, window=7), bytearray(8))
    store.begun[0][1]("", (8, 0))
    wires.run_for(1.0)
    assert not any(isinstance(message, Placed) for message in wires.heard)


@pytest.mark.parametrize(("window", "later_s", "is_used"), [(7, 500.0, True), (7, 560.0, False), (8, 1.0, False)])
def test_a_delta_is_written_with_its_offer_where_a_url_for_its_window_is_known_and_lives(
    window: int, later_s: float, is_used: bool
) -> None:
    store, wires = Reads(), Wires(1)
    wires.link._objects = cast(Any, store)
    blob = BlobId(kind=BlobKind.DELTA, fragment=2, version=7, node=NodeId("a"), incarnation=1)
    wires.other.send(Place(blob=blob, url="ahead?signed", ahead=3), wires.clock.now())
    wires._answer()
    wires.link._ahead = {2: (wires.link._ahead[2][0], wires.link._ahead[2][1] - later_s)}
    wires.run_for(1.0)
    delta = dataclasses.replace(blob, version=6, seq=1)
    wires.link.send_blob(Offer(blob=delta, size=8, digest=0, window=window), bytearray(8))
    (offer,) = [message for message in wires.heard if isinstance(message, Offer)]
    assert offer.ahead == 3 * is_used and [url for url, _ in store.begun] == ["ahead?signed"] * is_used
    wires.other.send(Place(blob=delta, url="asked?signed"), wires.clock.now())  # the coordinator did not use it
    wires._answer()
    for _, over in store.begun:
        over("", (8, 0))
    wires.run_for(1.0)
    assert [url for url, _ in store.begun][is_used:] == ["asked?signed"]
    assert [message.blob for message in wires.heard if isinstance(message, Placed)] == [delta], "of the last one alone"


def test_lanes_are_added_once_the_link_is_known_and_at_most_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [LinkKnown(bytes_per_s=1e6, round_trip_s=0.1)]
    monkeypatch.setattr(Transfers, "known", property(lambda transfers: seen[0]))
    wires = Wires(0)
    wires.run_for(20.0)
    assert wires.link.num_lanes == 1, "the first blob shows little of the link"
    seen[0] = LinkKnown(bytes_per_s=25e6, round_trip_s=0.1)
    wires.run_for(LOOK_S + 1.5)
    assert wires.link.num_lanes == 4
    losing = Connection(rtt_s=0.1, least_rtt_s=0.1, retransmits=100, segments=100_000, congestion="cubic")
    monkeypatch.setattr("farloop.node.link.parse", lambda *kernel: losing)
    monkeypatch.setattr(Wires, "kernel", lambda wires: ())
    wires.run_for(40.0)
    assert wires.link.num_lanes == 4
    wires.run_for(25.0)
    assert wires.link.num_lanes == 16 and wires.sessions == 1


def test_a_session_that_does_not_begin_because_large_packets_are_lost_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Wires, "_answer", lambda wires: None)
    gap = bytearray(INFO_BYTES)
    gap[224] = 1  # the answer came without its first packets
    for info, said in ((resent(3), "MTU"), (bytes(gap), "MTU"), (resent(2), "busy"), (b"", "busy")):
        monkeypatch.setattr(Wires, "kernel", lambda wires, info=info: (info, "cubic"))
        wires = Wires(1)
        wires.listener.on_connected(0)
        wires.run_for(11.0)
        assert said in caplog.text and ("MTU" in caplog.text) == (said == "MTU")
        caplog.clear()


def test_a_coordinator_that_comes_back_held_is_told_at_once_and_every_half_minute_with_the_way_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wires = Wires(1)
    wires.refusal = Refused(reason=Reason.HOLDING, detail="the run is held: put the newer one back", retriable=True)
    wires.other.send(Leave(reason=Reason.COORDINATOR_STOPPING), wires.clock.now())
    wires._answer()
    wires.run_for(2.0)
    told = [record.message for record in caplog.records if "no link" in record.message]
    assert len(told) == 2 and "shutting down" in told[0] and "the run is held: put the newer one back" in told[1]
    wires.run_for(100.0)
    assert 4 <= caplog.text.count("the run is held: put the newer one back") <= 5
    wires.refusal = None
    wires.run_for(10.0)
    assert wires.link.state is State.OPEN


def test_an_old_leader_is_left_for_the_other_addresses_and_told_to_the_machine_only_after_minutes() -> None:
    """Where there are several coordinators, a lower epoch is the wrong address, and no reason to end."""
    wires = Wires(1)
    wires.has_others, wires.seen = True, 3

    def meets(epoch: int, for_s: float) -> list[int]:
        """The epochs that the machine is told, once the session has ended and each new one has this epoch."""
        wires.epoch = epoch
        wires.told.clear()
        wires.other.send(Leave(reason=Reason.COORDINATOR_STOPPING), wires.clock.now())
        wires._answer()
        wires.run_for(for_s)
        messages = [getattr(event, "message", None) for event in wires.told]
        return [message.epoch for message in messages if isinstance(message, Welcome)]

    assert meets(2, 20.0) == [] and wires.turned_away >= 10, "it tries again within a second"
    wires.epoch = 4
    wires.run_for(2.0)
    assert wires.link.state is State.OPEN
    told = meets(2, 590.0)
    assert told == []
    wires.run_for(20.0)
    assert wires.told, "none leads for ten minutes: the machine ends the node"


def test_large_packets_that_are_lost_in_a_session_are_logged_once_in_a_while_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The way may change: a VPN comes up, a route moves."""
    wires = Wires(1)
    tries = iter(range(3, 99))  # one more at each look
    loss = {"rtt_s": 0.1, "least_rtt_s": 0.1, "retransmits": 9, "segments": 99}
    monkeypatch.setattr("farloop.node.link.parse", lambda *kernel: Connection(**loss))
    monkeypatch.setattr(Wires, "kernel", lambda wires: (resent(next(tries), acked=10**6), "cubic"))
    for _ in range(30):
        wires.other.speak()
        wires._answer()
        wires.run_for(1.0)
    seen = [link.bulk for message in wires.heard if isinstance(message, Observed) for link in message.links]
    lost = [bulk.large_lost for bulk in seen if bulk is not None]
    assert lost[:4] == [False, True, True, True], "where large packets passed, one loss more decides"
    assert caplog.text.count("packets lost coordinator=there") == 1 and "tcp_mtu_probing" in caplog.text


def test_a_lane_that_is_lost_is_opened_again_ever_more_patiently_and_the_session_goes_on() -> None:
    wires = Wires(3)
    for pause_s in (1.0, 2.0, 4.0, 8.0):
        wires.listener.on_lost(2, "on purpose")
        wires.run_for(pause_s - 0.1)
        assert wires.link.num_lanes == 2
        wires.run_for(0.2)
        assert wires.link.num_lanes == 3 and wires.opened.pop() == 2
    wires.run_for(61.0)
    wires.listener.on_lost(2, "it had lasted for longer than the longest pause")
    wires.run_for(1.1)
    assert wires.link.num_lanes == 3 and wires.opened.pop() == 2
    assert wires.sessions == 1 and wires.opened == [1, 2, 3]


def test_a_session_ends_with_control_or_the_last_lane() -> None:
    for lost in ((0,), (1, 3, 2)):
        wires = Wires(3)
        for lane in lost[:-1]:
            wires.listener.on_lost(lane, "on purpose")
        assert wires.link.state is State.OPEN
        wires.listener.on_lost(lost[-1], "on purpose")
        assert wires.link.state is None and wires.link.num_lanes == 0
        wires.run_for(5.0)
        assert wires.sessions == 2 and wires.opened == [1, 2, 3, 1, 2, 3]


def lanes_of(wires: Wires) -> tuple[list[int], int | None]:
    """Those that were asked for, and their number."""
    return wires.opened, wires.link.num_lanes


@all_stories(__file__, "downloads")
def test_stories(path: Path, story: StoryText, rewrite: bool) -> None:
    check_story(path, story, python(*map(vars, (wire_messages, events, farloop.node.link)), globals()), rewrite=rewrite)
