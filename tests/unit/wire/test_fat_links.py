"""How much of a link a blob fills: two sessions over an ideal pipe, in virtual time (protocol, Flow control).

A share is the blob's time at the pipe's rate ÷ the time until its receiver has it. The most that is possible is below
1, because the last byte needs one way's delay.
"""

import heapq
from collections.abc import Sequence

import pytest
from session_pairs import delta, opened

from farloop.algo.spec import BlobId
from farloop.wire.blobs import BytesSource
from farloop.wire.events import BlobReceived, MessageReceived
from farloop.wire.frames import Buffer
from farloop.wire.link_measurement import DIGEST, Sink
from farloop.wire.messages import Committed, Offer, Role, update_id
from farloop.wire.transfer import LinkKnown

MBIT = 1e6 / 8
MB = 1_000_000


class IdealPipe:
    """A node and a coordinator. Bulk frames take the pipe's rate, all frames its delay, and none is ever lost."""

    def __init__(
        self, mbit: float, rtt_s: float, *, protocol: int = 5, known: Sequence[LinkKnown | None] = (None, None)
    ) -> None:
        self.bytes_per_s, self.delay_s, self.now = mbit * MBIT, rtt_s / 2, 0.0
        node, coordinator = opened(protocol=protocol, known=known)
        self.ends = {Role.NODE: node, Role.COORDINATOR: coordinator}
        self.received: set[BlobId] = set()
        self._air: list[tuple[float, int, Role, int, list[Buffer]]] = []
        self._count = 0
        self._free_at = dict.fromkeys(Role, 0.0)

    def share(self, number: int, num_bytes: int, *, up: bool) -> float:
        """Carry a blob; the share of the pipe that it filled."""
        self.now = began = self.now + 1.0  # what the one before left behind is over
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
        while blob not in self.received:
            self._turn()
        return num_bytes / self.bytes_per_s / (self.now - began)

    def _turn(self) -> None:
        for role, other in ((Role.NODE, Role.COORDINATOR), (Role.COORDINATOR, Role.NODE)):
            self._handle(role)
            while frames := self.ends[role].outgoing(self.now):
                for lane, parts in frames:
                    self._send(other, lane, parts)
        timers = [end.next_timer() for end in self.ends.values()]
        self.now = max(self.now, min([time for time in timers if time is not None] + [self._air[0][0]]))
        while self._air and self._air[0][0] <= self.now:
            _, _, role, lane, parts = heapq.heappop(self._air)
            self.ends[role].receive(lane, parts, self.now)
        for role, end in self.ends.items():
            end.handle_timer(self.now)
            self._handle(role)
            end.check()

    def _send(self, to: Role, lane: int, parts: list[Buffer]) -> None:
        at = self.now
        if lane:
            at = self._free_at[to] = max(self.now, self._free_at[to]) + sum(map(len, parts)) / self.bytes_per_s
        self._count += 1
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


LINKS = [(50, 0.05, 2 * MB), (200, 0.1, 2 * MB), (200, 0.1, 16 * MB), (1000, 0.1, 16 * MB), (10_000, 0.1, 256 * MB)]


@pytest.mark.parametrize(
    ("link", "up", "down"),
    [*zip(LINKS, [0.79, 0.25, 0.71, 0.28, 0.17], [0.91, 0.36, 0.79, 0.35, 0.19], strict=True)],
)
def test_with_an_older_peer_credit_is_a_window_that_grows(
    link: tuple[float, float, int], up: float, down: float
) -> None:
    mbit, rtt_s, num_bytes = link
    for upwards, share in ((True, up), (False, down)):
        pipe = IdealPipe(mbit, rtt_s, protocol=4)
        shares = [pipe.share(number, num_bytes, up=upwards) for number in (1, 2)]
        assert shares == pytest.approx([share, share], abs=0.02)


def possible(mbit: float, rtt_s: float, num_bytes: int) -> float:
    at_rate_s = num_bytes / (mbit * MBIT)
    return at_rate_s / (at_rate_s + rtt_s / 2)


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(("mbit", "rtt_s", "num_bytes"), LINKS)
def test_the_third_blob_of_a_session_and_the_first_of_the_next_fill_the_link(
    mbit: float, rtt_s: float, num_bytes: int, up: bool
) -> None:
    pipe = IdealPipe(mbit, rtt_s)
    shares = [pipe.share(number, num_bytes, up=up) for number in (1, 2, 3)]
    assert shares[-1] > 0.97 * possible(mbit, rtt_s, num_bytes)
    later = IdealPipe(mbit, rtt_s, known=[end.known for end in pipe.ends.values()])
    assert later.share(1, num_bytes, up=up) > 0.97 * possible(mbit, rtt_s, num_bytes), "the next session begins so"
