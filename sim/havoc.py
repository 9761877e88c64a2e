"""What the faults of `faults.py` do to a world."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from farloop.algo.spec import NodeId
from farloop.coordinator.errors import StateLocked
from farloop.sim import faults as ft
from farloop.sim.disk import MemoryStore, PowerCut
from farloop.sim.network import STORM, Side
from farloop.sim.node import NodeActor

if TYPE_CHECKING:
    from farloop.sim.world import World

_LOOKS_S = 0.2
"""How often it is looked whether a node that leaves has left."""


def enter(world: "World", fault: ft.More) -> None:
    """Put a fault on the world's agenda."""
    agenda, disk = world.agenda, world.disk
    match fault:
        case ft.CrashAtWrite():
            disk.at_write.append(_power(world, fault))
        case ft.ReadOnlyDisk(at=at, for_s=for_s):
            agenda.at(at, lambda: setattr(disk, "read_only", True))
            agenda.at(at + for_s, lambda: setattr(disk, "read_only", False))
        case ft.NarrowDisk(at=at, for_s=for_s, room=room):
            agenda.at(at, lambda: setattr(disk, "room", room))
            agenda.at(at + for_s, lambda: setattr(disk, "room", None))
        case ft.ClockJump(node=node, at=at, by_s=by_s):
            agenda.at(at, lambda: _jump(world, node, by_s))
        case ft.OneWayCut(node=node, at=at, for_s=for_s, to=to):
            cable, side = world.hosts[node].cable, Side.NODE if to == "node" else Side.COORDINATOR
            agenda.at(at, lambda: cable.blocked.add(side))
            agenda.at(at + for_s, cable.mend)
        case ft.Squall(at=at, for_s=for_s):
            agenda.at(at, lambda: _squall(world, fault))
        case ft.ComeAndGo(at=at):
            agenda.at(at, lambda: _leave(world, fault))
        case ft.SlowLink(at=at, for_s=for_s):
            agenda.at(at, lambda: _slow_link(world, fault.node, fault.factor))
            agenda.at(at + for_s, lambda: _slow_link(world, fault.node, 1.0))
        case ft.SlowNode(at=at, for_s=for_s):
            agenda.at(at, lambda: world.actor(fault.node, lambda actor: actor.slow_down(fault.factor)))
            agenda.at(at + for_s, lambda: world.actor(fault.node, lambda actor: actor.slow_down(1.0)))
        case ft.SecondCoordinator(at=at):
            agenda.at(at, lambda: _second(world))
        case _:
            assert_never(fault)


def _power(world: "World", fault: ft.CrashAtWrite) -> Callable[[int, bool], None]:
    def look(write: int, durable: bool) -> None:
        if (write, durable) == (fault.write, fault.durable):
            world.crash_coordinator(fault.down_s)
            raise PowerCut(fault.down_s)

    return look


def _jump(world: "World", node: NodeId | None, by_s: float) -> None:
    if node is None:
        process = world.coordinator.process if world.coordinator else None
    else:
        process = None if world.hosts[node].down else world.hosts[node].actor.process
    if process is not None:
        process.ahead_s += by_s


def _slow_link(world: "World", node: NodeId, factor: float) -> None:
    """Of the connections that stand, and of those to come."""
    host = world.hosts[node]
    usual = host.setup.weather or world.scenario.weather
    slow = dataclasses.replace(usual, bytes_per_s=usual.bytes_per_s / factor)
    host.weather = None if factor == 1.0 else slow
    for connection in host.connections:
        connection.change(slow)


def _squall(world: "World", fault: ft.Squall) -> None:
    host = world.hosts[fault.node]
    host.weather = dataclasses.replace(STORM, duplication=0.3, reordering=0.3)

    def reset() -> None:
        for connection in host.connections:
            connection.reset()
        host.connections.clear()

    def calm() -> None:
        host.weather = None
        reset()  # the connections of this weather would keep it

    for number in range(fault.resets):
        world.agenda.after(number * fault.for_s / fault.resets, reset)
    world.agenda.after(fault.for_s, calm)


def _leave(world: "World", fault: ft.ComeAndGo) -> None:
    """It goes, and comes back as soon as it has gone."""
    host = world.hosts[fault.node]
    if world.coordinator is not None and world.coordinator.finished:
        return
    if host.down or not host.actors:
        return world.agenda.after(_LOOKS_S, lambda: _leave(world, fault))
    if fault.gently:
        world.actor(fault.node, NodeActor.drain)
    else:
        world.crash_node(fault.node)
    leaving = host.actor

    def look() -> None:
        if host.actor is not leaving:
            return  # somebody else started it
        if not (host.down or leaving.gone):
            return world.agenda.after(_LOOKS_S, look)
        if world.coordinator is not None and world.coordinator.finished:
            return
        leaving.process.kill()
        world.start_node(fault.node)
        if fault.times > 1:
            again = dataclasses.replace(fault, times=fault.times - 1)
            world.agenda.after(fault.stays_s, lambda: _leave(world, again))

    world.agenda.after(_LOOKS_S, look)


def _second(world: "World") -> None:
    if world.coordinator is None:
        return
    before = world.disk.epoch, len(world.disk.entries)
    try:
        MemoryStore(world.disk, world.spec)
    except StateLocked:
        assert before == (world.disk.epoch, len(world.disk.entries)), "who is refused changes nothing"
    else:
        raise AssertionError("two coordinators have one state")
