"""How much of a link a blob fills: two sessions over an ideal pipe, in virtual time (protocol, Flow control).

A share is the blob's time at the pipe's rate ÷ the time until its receiver has it. The most that is possible is below
1, because the last byte needs one way's delay.
"""

import heapq
import math
import statistics
from collections.abc import Sequence

import pytest
from session_pairs import delta, opened, update
from slow_cases import slow

from farloop.algo.spec import BlobId
from farloop.wire.blobs import BytesSource, Ranges
from farloop.wire.events import BlobReceived, MessageReceived
from farloop.wire.frames import Buffer, parse_bulk
from farloop.wire.limits import Limits
from farloop.wire.link_measurement import DIGEST, Sink
from farloop.wire.messages import Committed, Finished, Offer, Role, update_id
from farloop.wire.outgoing import LinkKnown
from farloop.wire.uplink import Uplink, UplinkLimit

MBIT = 1e6 / 8
MB = 1_000_000


class IdealPipe:
    """A node and a coordinator. Bulk frames take the rate of their lane, all frames the pipe's delay, and none is lost
    but with its lane."""

    def __init__(
        self,
        *lanes_mbit: float,
        rtt_s: float,
        known: Sequence[LinkKnown | None] = (None, None),
        uplinks: Sequence[Uplink | None] = (None, None),
    ) -> None:
        self.lanes = {number: mbit * MBIT for number, mbit in enumerate(lanes_mbit, start=1)}
        self.delay_s, self.now = rtt_s / 2, 0.0
        node, coordinator = opened(known=known, uplinks=uplinks)
        self.ends = {Role.NODE: node, Role.COORDINATOR: coordinator}
        for lane in [*self.lanes][1:]:
            for end in self.ends.values():
                end.lane_opened(lane)
        self.received: set[BlobId] = set()
        self.left: list[tuple[float, Role, int]] = []
        """When each frame was sent, its receiver, and its bytes."""
        self.again = 0
        """Bytes of blobs that were sent more than once."""
        self.lost = 0
        """... of which on a lane that was lost, as its ends knew."""
        self.dies: tuple[float, int] | None = None
        """When a lane is lost, and which."""
        self.mute: set[int] = set()
        """Lanes that take everything and bring nothing."""
        self._air: list[tuple[float, int, Role, int, list[Buffer]]] = []
        self._count = 0
        self._free_at: dict[tuple[Role, int], float] = {}
        self.longest_queue_s = 0.0  # what a further frame would have waited
        self._seen: dict[tuple[Role, bytes], Ranges] = {}

    @property
    def bytes_per_s(self) -> float:
        return sum(self.lanes.values())

    def share(self, number: int, num_bytes: int, *, up: bool, at_once: int = 1) -> float:
        """Carry blobs; the share of the pipe that they filled."""
        self.now = began = self.now + 1.0  # what those before left behind is over
        blobs = {self._begin(number + n, num_bytes, up=up) for n in range(at_once)}
        while not blobs <= self.received:
            self._turn()
            assert self.now - began < 100.0, "it never ends"
        return at_once * num_bytes / self.bytes_per_s / (self.now - began)

    def _begin(self, number: int, num_bytes: int, *, up: bool) -> BlobId:
        source = BytesSource(bytes(num_bytes))
        if up:
            blob = delta(number)
            self.ends[Role.NODE].send_blob(Offer(blob=blob, size=num_bytes, digest=DIGEST), source)
        else:
            announced = Committed(
                fragment=0, version=number, size=num_bytes, digest=DIGEST, anchor_digest=0, merged=(), drops=(),
                next_window=None, rounds=(),
            )  # fmt: skip
            blob = update_id(announced)
            self.ends[Role.COORDINATOR].send(announced, self.now)
            self.ends[Role.COORDINATOR].push_blob(blob, source)
        return blob

    def _turn(self) -> None:
        for role, other in ((Role.NODE, Role.COORDINATOR), (Role.COORDINATOR, Role.NODE)):
            self._handle(role)
            while frames := self.ends[role].outgoing(self.now):
                for lane, parts in frames:
                    self._send(other, lane, parts)
        timers = [end.next_timer() for end in self.ends.values()] + [self.dies[0] if self.dies else None]
        timers += [self._air[0][0]] if self._air else []
        self.now = max(self.now, min(time for time in timers if time is not None))
        if self.dies is not None and self.now >= self.dies[0]:
            (_, dead), self.dies = self.dies, None
            self._air = [frame for frame in self._air if frame[3] != dead]
            heapq.heapify(self._air)
            for end in self.ends.values():
                self.lost += end.transfers.lanes._lanes[dead].in_flight
                end.lane_lost(dead)
        while self._air and self._air[0][0] <= self.now:
            _, _, role, lane, parts = heapq.heappop(self._air)
            self.ends[role].receive(lane, parts, self.now)
        for role, end in self.ends.items():
            end.handle_timer(self.now)
            self._handle(role)
            end.check()

    def _send(self, to: Role, lane: int, parts: list[Buffer]) -> None:
        at = self.now
        self.left.append((at, to, sum(map(len, parts))))
        if lane:
            took_s = sum(map(len, parts)) / self.lanes[lane]
            at = self._free_at[to, lane] = max(self.now, self._free_at.get((to, lane), 0.0)) + took_s
            self.longest_queue_s = max(self.longest_queue_s, at - self.now)
            frame = parse_bulk(parts, Limits())
            seen = self._seen.setdefault((to, frame.key), Ranges())
            before = seen.num_bytes
            seen.add(frame.offset, frame.end)
            self.again += len(frame.chunk) - (seen.num_bytes - before)
        self._count += 1
        if lane in self.mute:
            return
        heapq.heappush(self._air, (at + self.delay_s, self._count, to, lane, parts))

    def _handle(self, role: Role) -> None:
        end = self.ends[role]
        for event in end.events():
            match event:
                case MessageReceived(message=Offer(blob=blob, size=size)):
                    end.expect(blob, size, DIGEST, Sink(size), self.now)
                case MessageReceived(message=Committed(size=size) as announced):
                    end.expect(update_id(announced), size, DIGEST, Sink(size), self.now)
                case BlobReceived(blob=blob):
                    self.received.add(blob)


LINKS = [(50, 0.05, 2 * MB), (1000, 0.1, 16 * MB), *slow((10_000, 0.1, 256 * MB))]


def possible(mbit: float, rtt_s: float, num_bytes: int) -> float:
    at_rate_s = num_bytes / (mbit * MBIT)
    return at_rate_s / (at_rate_s + rtt_s / 2)


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(("mbit", "rtt_s", "num_bytes"), LINKS)
def test_the_third_blob_of_a_session_and_the_first_of_the_next_fill_the_link(
    mbit: float, rtt_s: float, num_bytes: int, up: bool
) -> None:
    pipe = IdealPipe(mbit, rtt_s=rtt_s)
    shares = [pipe.share(number, num_bytes, up=up) for number in (1, 2, 3)]
    assert shares[-1] > 0.97 * possible(mbit, rtt_s, num_bytes)
    later = IdealPipe(mbit, rtt_s=rtt_s, known=[end.transfers.known for end in pipe.ends.values()])
    assert later.share(1, num_bytes, up=up) > 0.97 * possible(mbit, rtt_s, num_bytes), "the next session begins so"


UNEQUAL = (320.0, 320.0, 320.0, 40.0)


@pytest.mark.parametrize("up", [True, *slow(False)])
@pytest.mark.parametrize("lanes", [UNEQUAL, *slow(((250.0,) * 4,), ((1000.0,),), ((62.5,) * 16,), ((900.0, 100.0),))])
def test_lanes_that_are_not_equal_fill_their_links_together(lanes: tuple[float, ...], up: bool) -> None:
    """Dealt in turn, the chunks of the second blob fill 16 % of the first of these."""
    pipe = IdealPipe(*lanes, rtt_s=0.1)
    shares = [pipe.share(number, 256 * MB, up=up) for number in (1, 2)]
    assert shares[0] > 0.85 * possible(1000, 0.1, 256 * MB)
    assert shares[1] > 0.95 * possible(1000, 0.1, 256 * MB)
    assert pipe.again == 0


@pytest.mark.parametrize("up", [True, *slow(False)])
@pytest.mark.parametrize("dead", [1, *slow(4)])
@pytest.mark.parametrize("after_s", [0.06, *slow(0.001, 0.5, 0.9)])
def test_a_lane_that_dies_costs_its_own_chunks_and_no_others(dead: int, after_s: float, up: bool) -> None:
    pipe = IdealPipe(*UNEQUAL, rtt_s=0.1)
    pipe.share(1, 64 * MB, up=up)
    pipe.dies = (pipe.now + 1.0 + after_s, dead)
    left = (pipe.bytes_per_s - pipe.lanes[dead]) / pipe.bytes_per_s
    assert pipe.share(2, 128 * MB, up=up) > 0.9 * left * possible(1000, 0.1, 128 * MB)
    assert not any(end.traffic.rewinds for end in pipe.ends.values())
    assert pipe.again <= pipe.lost < 0.35 * 128 * MB, "the lane's share of the windows, once more"
    for lane in {1, 2, 3, 4} - {dead, 3}:
        pipe.dies = (pipe.now + 1.0, lane)
        pipe.share(10 + lane, 4 * MB, up=up)
    assert pipe.share(20, 64 * MB, up=up) > 0.9 * pipe.lanes[3] / pipe.bytes_per_s, "the last one carries everything"


@pytest.mark.parametrize("up", [True, False])
def test_on_a_thin_link_control_waits_behind_little_of_the_blobs(up: bool) -> None:
    """Control has a connection of its own, but the same queue at the bottleneck."""
    pipe = IdealPipe(10, rtt_s=0.04)
    pipe.share(1, MB, up=up)
    pipe.longest_queue_s = 0.0
    assert pipe.share(2, MB, up=up, at_once=4) > 0.9
    assert pipe.longest_queue_s < 0.6


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("mbit", [0.1, 2.0, 20.0])
def test_an_uplink_with_a_limit_sends_at_its_rate_and_never_above(mbit: float, up: bool) -> None:
    """... and the chunks of several blobs, the announcements and the Credits of what comes the other way are in it."""
    limit, num_bytes = UplinkLimit(bytes_per_s=mbit * MBIT), int(mbit * MBIT)
    uplinks = [Uplink(limit, lambda: 0, 0.0) if up == is_node else None for is_node in (True, False)]
    pipe = IdealPipe(200.0, rtt_s=0.1, uplinks=uplinks)
    assert pipe.share(1, num_bytes, up=up, at_once=3) * 200.0 == pytest.approx(mbit, rel=0.12)
    pipe.share(9, MB, up=not up)
    away = [(at, sent) for at, to, sent in pipe.left if to is (Role.COORDINATOR if up else Role.NODE)]
    burst, total = max(0.1 * limit.bytes_per_s, 0.05 * limit.bytes_per_s + 4096), 0
    starts = [at * limit.bytes_per_s for at, _ in away]
    least = math.inf  # of what was sent before a moment, less what the rate gives until then
    for (_, sent), start in zip(away, starts, strict=True):
        least = min(least, total - start)
        total += sent
        assert total - start - least <= burst + 1000, "no control message is as large"


def test_control_leaves_at_once_while_the_uplink_holds_blobs_back() -> None:
    uplink = Uplink(UplinkLimit(bytes_per_s=12_500.0), lambda: 0, 0.0)
    _, coordinator = opened(uplinks=(None, uplink))
    coordinator.push_blob(update(), BytesSource(bytes(MB)))
    coordinator.outgoing(0.0)
    assert not uplink.allows(0.0) and not any(lane for lane, _ in coordinator.outgoing(0.0))
    coordinator.send(Finished(), 0.0)
    assert [lane for lane, _ in coordinator.outgoing(0.0)] == [0]
    due = coordinator.next_timer()
    assert due == uplink.free_at, "and the chunk that waits has a timer"
    coordinator.handle_timer(due)
    assert any(lane for lane, _ in coordinator.outgoing(due))


@pytest.mark.parametrize(
    ("mbit", "least_kib", "most_kib"), [(200, 256, 256), (4_000, 1024, 2048), (10_000, 2048, 4096)]
)
def test_a_near_link_has_chunks_that_take_time(mbit: float, least_kib: int, most_kib: int) -> None:
    """Its flight window is small, so that a 64th of it would be thousands of chunks a second."""
    pipe = IdealPipe(mbit, rtt_s=0.0004)
    pipe.share(0, 16 << 20, up=True)
    pipe.left.clear()
    pipe.share(1, 16 << 20, up=True)
    chunks = [num_bytes for _, to, num_bytes in pipe.left if to is Role.COORDINATOR and num_bytes > 64 << 10]
    assert least_kib << 10 <= statistics.median(chunks) < (most_kib + 1) << 10


@pytest.mark.parametrize("up", [*slow(True), False])
@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_lane_that_takes_all_and_brings_nothing_costs_time_outs_then_little(from_the_start: bool, up: bool) -> None:
    """T: until its connection is given up, which is not announced. It has brought nothing ever, or nothing of late."""
    pipe = IdealPipe(*(250.0,) * 4, rtt_s=0.1)
    if not from_the_start:
        pipe.share(1, 16 * MB, up=up)
    pipe.mute = {3}
    shares = [pipe.share(number, 32 * MB, up=up) for number in range(2, 8)]
    assert min(shares) > 0.04, "a time-out or three"
    assert min(shares[-2:]) > 0.9 * 0.75 * possible(1000, 0.1, 32 * MB), "the three others"
    assert pipe.again < 0.06 * 6 * 32 * MB
