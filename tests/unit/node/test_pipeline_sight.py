"""What two stages see of the link between them, whatever their clocks say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farloop.node.pipeline.link import LEAST_S, LOOKS_BACK_S, Echo, LinkEstimate
from farloop.wire.messages import Transfer

BEAT_S = 0.5


class Pair:
    """Two nodes with clocks of their own, and a link of a given way and rate between them."""

    def __init__(self, *, ahead_s: float = 0.0, there_s: float = 0.02, back_s: float = 0.03, rate: float = 1e6) -> None:
        self.ahead_s, self.there_s, self.back_s, self.rate = ahead_s, there_s, back_s, rate
        self.near, self.far = LinkEstimate(), LinkEstimate()
        self.now = 100.0

    def talk(self, beats: int, *, queue_s: float = 0.0) -> None:
        """Words both ways; every second one stands in a queue on its way here."""
        for beat in range(beats):
            echo = self.near.echo(self.now)
            self.far.word(self.now, echo, self.now + self.there_s + self.ahead_s)
            said = self.now + BEAT_S / 2
            back = self.far.echo(said + self.ahead_s)
            self.near.word(said + self.ahead_s, back, said + self.back_s + queue_s * (beat % 2))
            self.now += BEAT_S

    def tensor(self, num_bytes: int, queue_s: float = 0.0) -> None:
        """One comes here."""
        self.near.tensor(num_bytes, self.now + self.ahead_s, self.now + self.back_s + num_bytes / self.rate + queue_s)


@given(st.floats(-50.0, 1e6), st.floats(1e-3, 1.0), st.floats(1e-3, 1.0), st.floats(1e4, 1e9))
def test_round_trip_and_rate_are_those_of_the_link_whatever_the_clocks_say(
    ahead_s: float, there_s: float, back_s: float, rate: float
) -> None:
    pair = Pair(ahead_s=ahead_s, there_s=there_s, back_s=back_s, rate=rate)
    pair.talk(10, queue_s=0.2)
    pair.tensor(1_000_000, queue_s=0.3)
    pair.tensor(1_000_000)
    seen = pair.near.seen("far", pair.now)
    assert seen is not None and seen.peer == "far" and seen.transfer is not None
    assert seen.rtt_s == pytest.approx(there_s + back_s, abs=1e-6)
    told = seen.transfer.num_bytes / seen.transfer.seconds
    assert told == pytest.approx(min(rate, 1e6 / LEAST_S), rel=1e-3)


def test_a_link_that_becomes_longer_is_told_once_the_old_words_are_forgotten() -> None:
    pair = Pair()
    pair.talk(20)
    pair.there_s = 0.5
    pair.talk(4)
    seen = pair.near.seen("far", pair.now)
    assert seen is not None and seen.rtt_s == pytest.approx(0.05)
    pair.talk(int(LOOKS_BACK_S / BEAT_S) + 1)
    seen = pair.near.seen("far", pair.now)
    assert seen is not None and seen.rtt_s == pytest.approx(0.53)


def test_nothing_is_told_before_it_is_known_and_after_it_is_old() -> None:
    pair = Pair()
    assert pair.near.seen("far", pair.now) is None and pair.near.echo(pair.now) == Echo(sent_s=0.0, held_s=0.0)
    pair.near.word(0.0, Echo(sent_s=0.0, held_s=0.0), pair.now)  # an older node's
    pair.tensor(10)
    assert pair.near.seen("far", pair.now) is None
    pair.talk(4)
    seen = pair.near.seen("far", pair.now)
    assert seen is not None and seen.transfer == Transfer(num_bytes=10, seconds=LEAST_S)
    assert pair.near.seen("far", pair.now + 2 * LOOKS_BACK_S) is None
