"""Pipes, cables and connections, in every weather."""

import dataclasses
import random

import pytest

from farloop.sim.network import HOSTILE_LINK, Connection, Frame, LinkConditions, PhysicalLink, Pipe, Side, damaged
from farloop.sim.virtual_time import EventQueue, Process

NUMBERED = [[number.to_bytes(4), bytes(50)] for number in range(400)]


def sent_through(weather: LinkConditions, *, gently: bool = False) -> list[tuple[float, Frame]]:
    """(time of arrival, frame) of what comes of `NUMBERED`, one every 10 ms."""
    agenda, arrived = EventQueue(), list[tuple[float, Frame]]()
    pipe = Pipe(agenda, weather, random.Random(7), lambda frame: arrived.append((agenda.now, frame)))
    for number, frame in enumerate(NUMBERED):
        agenda.at(0.01 * number, lambda frame=frame: pipe.send(frame, gently=gently))  # type: ignore[misc]
    while agenda.step():
        pass
    return arrived


def test_in_clear_weather_every_frame_comes_once_in_order_and_late() -> None:
    arrived = sent_through(LinkConditions(latency_s=0.5, jitter_s=0.3, bytes_per_s=5400.0))
    assert [frame for _, frame in arrived] == NUMBERED
    assert arrived[0][0] >= 0.51
    assert arrived[-1][0] >= 400 * 54 / 5400.0 + 0.5


@pytest.mark.parametrize("fault", ["loss", "duplication", "reordering", "garbage"])
def test_each_fault_shows(fault: str) -> None:
    frames = [frame for _, frame in sent_through(dataclasses.replace(LinkConditions(), **{fault: 0.2}))]
    whole = [frame for frame in frames if frame in NUMBERED]
    assert (len(frames) < 400) == (fault == "loss")
    assert (len(frames) > 400) == (fault == "duplication")
    assert (len(whole) < len(frames)) == (fault == "garbage")
    assert (frames != sorted(frames)) == (fault in ("reordering", "duplication", "garbage"))


def test_a_frame_sent_gently_is_spared() -> None:
    assert [frame for _, frame in sent_through(HOSTILE_LINK, gently=True)] == NUMBERED


def test_a_frame_is_a_copy() -> None:
    agenda, arrived = EventQueue(), list[Frame]()
    pipe, buffer = Pipe(agenda, LinkConditions(), random.Random(0), arrived.append), bytearray(b"abc")
    pipe.send([buffer])
    buffer[:] = b"xyz"
    agenda.step()
    assert arrived == [[b"abc"]]


def test_damage_always_changes_a_frame_of_two_parts_or_leaves_its_sizes() -> None:
    rng, frame = random.Random(3), [b"header", b"chunk of bytes"]
    assert all(damaged(frame, rng) != frame for _ in range(300))


def connection(cable: PhysicalLink, agenda: EventQueue) -> tuple[Connection, list[str]]:
    made = Connection(agenda, cable, LinkConditions(), random.Random(0), Process(agenda), Process(agenda))
    heard = list[str]()
    made.deliver[Side.NODE] = lambda lane, frame: heard.append(f"node {lane} {frame[0].decode()}")
    made.deliver[Side.COORDINATOR] = lambda lane, frame: heard.append(f"coordinator {lane} {frame[0].decode()}")
    made.lost = lambda: heard.append("lost")
    return made, heard


def test_a_cut_cable_keeps_frames_until_it_is_mended() -> None:
    agenda = EventQueue()
    cable = PhysicalLink(agenda)
    made, heard = connection(cable, agenda)
    cable.cut = True
    assert made.send(Side.NODE, 0, [b"first"])
    assert made.send(Side.NODE, 0, [b"second"])
    while agenda.step():
        pass
    assert heard == []
    cable.mend()
    while agenda.step():
        pass
    assert heard == ["coordinator 0 first", "coordinator 0 second"]


def test_the_other_end_hears_of_a_closed_socket_after_what_was_sent() -> None:
    agenda = EventQueue()
    made, heard = connection(PhysicalLink(agenda), agenda)
    made.send(Side.COORDINATOR, 1, [b"last"])
    agenda.after(0.1, lambda: made.close(Side.COORDINATOR))
    while agenda.step():
        pass
    assert heard == ["node 1 last", "lost"]
    assert not made.send(Side.NODE, 0, [b"too late"])


def test_a_reset_loses_what_is_under_way() -> None:
    agenda = EventQueue()
    made, heard = connection(PhysicalLink(agenda), agenda)
    made.send(Side.NODE, 0, [b"lost"])
    made.reset()
    while agenda.step():
        pass
    assert heard == ["lost"]
    assert not made.is_open(Side.COORDINATOR)
