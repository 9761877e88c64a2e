"""Random lives of two or three coordinators in virtual time: killed, suspended, cut off from each other and from the
store of the record, whose answers may be lost, and which may do late what it was asked. Whatever was told is in the
folder of the one that leads, and it alone tells.

The code is the product's: `Mirror`, `MirroredFiles`, `Replica`, `Leadership`, and `Contender` that decides to take
over. A wait of one of them is a turn of the world, in which everything else happens.
"""

import json
import random
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from terms_in_memory import Terms
from virtual_files import AllOrNothing, Drawn, VirtualFiles

from farloop.coordinator import leadership, standby
from farloop.coordinator.errors import Deposed, StorageFailed
from farloop.coordinator.leadership import Leadership, Term, Unreachable, Version
from farloop.coordinator.net.zmq_mirror import SILENCE_S
from farloop.coordinator.settings import CoordinatorConfig
from farloop.coordinator.standby import Contender
from farloop.coordinator.storage.files import Bytes
from farloop.coordinator.storage.mirror import Mirror, MirroredFiles, Replica, digests

PLACE = Path("/state")
LOG = PLACE / "journal-000000.log"
RECORD_BYTES = 8
TURN_S = 0.25
WHOLE = AllOrNothing(writes=True, names=True)


class Killed(Exception):
    """The process in whose call this rises is dead."""


class View:
    """The store of the record, as one host reaches it."""

    def __init__(self, world: "World", name: str) -> None:
        self._world, self._name = world, name

    def read(self) -> tuple[Term | None, Version]:
        self._require()
        return self._world.terms.read()

    def replace(self, term: Term, version: Version) -> bool:
        self._require()
        return self._world.terms.replace(term, version)

    def _require(self) -> None:
        if self._world.is_cut(self._name, "the store"):
            raise Unreachable("the store is away from here")


class Turn:
    """In place of a condition variable: a wait is a turn of the world."""

    def __init__(self, world: "World", owner: "Coordinator") -> None:
        self._world, self._owner = world, owner

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait(self, seconds: float) -> None:
        self._world.turn(self._owner)


class Coordinator:
    """One host: its disk, and the process that runs on it."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.disk = VirtualFiles()
        self.disk.make_directory(PLACE)
        self.backup = self.disk  # as it was before it was given all the last time
        self.start()

    def start(self) -> None:
        config = CoordinatorConfig(state_dir=PLACE, leads_by="file:///record", name=self.name)
        self.contender = Contender(config, "run", View(self.world, self.name))
        self.contender.files = self.disk
        self.mirror: Mirror | None = None
        self.replica: Replica | None = None
        self.route: bytes | None = None  # of its connection to the leader, while it stands by
        self.heard_at = self.world.now
        self.alive, self.suspended_until = True, 0.0
        self.size = 0

    @property
    def runs(self) -> bool:
        return self.alive and self.world.now >= self.suspended_until

    def kill(self) -> None:
        self.alive = False
        self.disk = self.disk.power_cut(self.world.fate()) if self.world.dice.random() < 0.5 else self.disk.killed()

    def lead(self, led: Leadership) -> None:
        """Go on with what the folder has, or fail as one does that cannot read it."""
        if not self.world.calm and self.world.dice.random() < 0.2:
            self.alive = False
            return
        try:
            self._begin(led)
        except (Killed, Deposed, StorageFailed):
            self.mirror, self.alive = None, False

    def _begin(self, led: Leadership) -> None:
        """All that was told has to be there."""
        self.replica = self.route = None
        Replica(PLACE, self.disk, beside=False)  # what a start does with a half-given state
        self.mirror = Mirror(PLACE, led, self.disk, lambda: self.world.now)
        self.mirror._moved = Turn(self.world, self)  # type: ignore[assignment]
        self.mirror.send = self.send
        self.files = MirroredFiles(self.mirror)
        held = b"" if self.disk.identity(LOG) is None else self.disk.read_bytes(LOG)
        self.size = len(held) // RECORD_BYTES * RECORD_BYTES
        records = [held[at : at + RECORD_BYTES] for at in range(0, self.size, RECORD_BYTES)]
        missing = set(self.world.told) - set(records)
        assert not missing, f"{self.name} leads without {missing}"
        if self.disk.identity(LOG) is None:
            self.files.create(LOG).close()
        with closing(self.files.open(PLACE)) as folder:
            folder.sync()
        led.begun(self.disk)
        self.mirror.lets_in = True

    def tell(self) -> None:
        """Write a record; once it is durable as it has to be, nodes are told."""
        record = b"%07d\n" % self.world.next_record()
        with closing(self.files.open(LOG, write=True)) as file:
            file.write([record], self.size)
            file.sync()
        self.size += RECORD_BYTES
        if not self.runs:  # it was killed or suspended in its call, and told nothing yet
            raise Killed
        assert self.world.has(self, record), f"{self.name} tells what {self.world.terms.term} does not have"
        self.world.told.append(record)

    def send(self, route: bytes, frames: Sequence[Bytes]) -> None:
        self.world.carry(self, route, [bytes(frame) for frame in frames])


class World:
    """Two or three hosts, the network between them, and the store of the record."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dice, self.now, self.terms = random.Random(seed), 100.0, Terms()
        self.told: list[bytes] = []
        self._records = 0
        self._depth = 0
        self.calm = False
        self.away_until = 0.0
        self.cut_until = dict[frozenset[str], float]()  # two hosts, or one and the store
        self.routes: dict[bytes, Coordinator] = {}
        for module in (leadership, standby):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(leadership.time, "sleep", lambda seconds: self.turn(self.speaks))
        self.hosts = [Coordinator(self, name) for name in ("ab", "abc")[seed % 2]]
        self.speaks = self.hosts[0]  # whose call is under way

    def fate(self) -> Any:
        return Drawn(lambda most: self.dice.randrange(most))

    def is_cut(self, one: str, other: str) -> bool:
        return self.now < self.cut_until.get(frozenset((one, other)), 0.0)

    def next_record(self) -> int:
        self._records += 1
        return self._records

    def leads(self, host: Coordinator) -> bool:
        """Whether no other holds the record."""
        return self.terms.term is not None and self.terms.term.leader == host.name

    def has(self, teller: Coordinator, record: bytes) -> bool:
        """Whether whom the record names has it: the teller, or one whose claim has just arrived and that stands by."""
        return self.leads(teller) or any(
            self.leads(host) and host.mirror is None and record in host.disk.read_bytes(LOG) for host in self.hosts
        )

    # --- Messages

    def carry(self, leader: Coordinator, route: bytes, frames: list[bytes]) -> None:
        """From the leader to a standby, and its answer back, at once; or neither."""
        host = self.routes.get(route)
        if (
            host is None
            or host.route != route
            or host.replica is None
            or not host.runs
            or self.is_cut(leader.name, host.name)
        ):
            self.routes.pop(route, None)  # a connection that lost something is broken
            return
        head = json.loads(frames[0])
        if not isinstance(head[0], int):
            return
        host.heard_at = self.now
        assert leader.mirror is not None
        with suppress(FileNotFoundError):
            host.replica.apply(head, frames[1:], lambda number: self._answer(leader, host, route, ["ack", number]))
            self._answer(leader, host, route, ["took", host.replica.taken])

    def _answer(self, leader: Coordinator, host: Coordinator, route: bytes, head: list[Any]) -> None:
        if leader.mirror is not None and not self.is_cut(leader.name, host.name):
            leader.mirror.received(route, head)

    # --- Time

    def turn(self, caller: Coordinator | None) -> None:
        """A quarter of a second. Raises Killed in the call of a process that died."""
        self.now += TURN_S
        life = caller and caller.contender
        if self._depth < 6:
            self._depth += 1
            try:
                self._chance()
                for host in self.hosts:
                    if host is not caller and host.runs and host.mirror is None:
                        self._stand_by(host)
            finally:
                self._depth -= 1
        while caller is not None and caller.alive and not caller.runs:
            self.turn(None)
        if caller is not None and not (caller.alive and caller.contender is life):
            raise Killed

    def _chance(self) -> None:
        self.terms.away = self.now < self.away_until
        match 6 if self.calm else self.dice.randrange(60):
            case 0:
                self.away_until = self.now + self.dice.uniform(0.0, 15.0)
            case 1 | 2:
                names = [*(host.name for host in self.hosts), "the store"]
                ends = frozenset(self.dice.sample(names, 2))
                self.cut_until[ends] = self.now + self.dice.uniform(0.0, 15.0)
                for route, host in list(self.routes.items()):
                    if host.name in ends and "the store" not in ends:
                        del self.routes[route]
            case 3:
                self.terms.deaf = not self.terms.deaf
            case 4:
                self.dice.choice(self.hosts).suspended_until = self.now + self.dice.uniform(0.0, 20.0)
            case 5:
                host = self.dice.choice(self.hosts)
                if host.alive:
                    host.kill()
            case 6 | 7 | 8 | 9:
                for host in self.hosts:
                    if not host.alive:
                        host.start()
            case 10 if self.terms.term is not None:
                self.terms.arrive()  # of the two that have all, one keeps its disk
                for host in self.hosts:
                    if self.leads(host):
                        host.suspended_until = self.now + 20.0
                    else:  # another host of its name, with an older copy
                        host.kill()
                        host.disk = host.backup.survivor(WHOLE)
                        host.start()
            case 11:
                self.terms.slow = not self.terms.slow
            case 12 | 13:
                self.terms.arrive()
            case _:
                pass

    def _stand_by(self, host: Coordinator) -> None:
        """What a standby's loop does: keep a connection, and take over from a leader that is silent."""
        leaders = [
            other
            for other in self.hosts
            if other is not host and other.mirror and other.runs and not self.is_cut(host.name, other.name)
        ]
        if any(leader.mirror and host.route in leader.mirror._known_routes for leader in leaders) and (
            host.route in self.routes
        ):  # its ping is answered
            host.heard_at = self.now
        elif leaders:
            self._join(host, self.dice.choice(leaders))
        elif self.now - host.heard_at > SILENCE_S:
            speaks, self.speaks = self.speaks, host
            try:
                if (led := host.contender._take_over()) is not None:
                    host.lead(led)
            finally:
                self.speaks = speaks

    def _join(self, host: Coordinator, leader: Coordinator) -> None:
        host.route = b"%d" % self.next_record()
        self.routes[host.route] = host
        host.backup = host.disk.survivor(WHOLE)
        host.replica = Replica(PLACE, host.disk, beside=False)
        host.heard_at = self.now
        assert leader.mirror is not None
        own = host.contender._own
        held = digests(PLACE, host.disk, {})
        leader.mirror.received(host.route, ["join", own.leader, own.run, own.process, held])

    def begin(self, host: Coordinator) -> None:
        """A start that finds no leader, or itself."""
        self.speaks = host
        with suppress(leadership.Unreachable):
            found, version = host.contender._store.read()
            host.contender.leader = found
            if host.contender._may_begin(found, lambda: False) and (led := host.contender._claim(version)):
                host.lead(led)

    def live(self, turns: int) -> None:
        for _ in range(turns):
            for host in self.hosts:
                if not host.runs:
                    continue
                self.speaks = host
                try:
                    if host.mirror is None:
                        self.begin(host)
                    else:
                        for heard in host.mirror._standbys.values():
                            at = self.routes.get(heard.route)
                            if at is not None and at.runs and not self.is_cut(host.name, at.name):
                                heard.heard_at = heard.moved_at = self.now
                        host.mirror.tick()
                        host.tell()
                except Killed:
                    if host.alive:
                        continue
                except (Deposed, StorageFailed):
                    host.mirror, host.alive = None, False  # it ends, and is started again
            self.turn(None)


def play(seed: int, monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(seed, monkeypatch)
    world.live(150)
    world.calm = True
    world.terms.deaf = world.terms.slow = False
    world.terms.arrive()
    world.away_until = 0.0
    world.cut_until.clear()
    told = len(world.told)
    for host in world.hosts:
        host.suspended_until = 0.0
        if not host.alive:
            host.start()
    world.live(120)
    assert len(world.told) > told, "once everything is well the run goes on"
    assert world.terms.term is not None and world.terms.term.in_sync, "and the other is in sync again"
    return world


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.slow) for block in range(1, 100))])
def test_what_was_told_is_never_lost_and_one_tells(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    leaders = 0
    for seed in range(100 * block, 100 * (block + 1)):
        try:
            world = play(seed, monkeypatch)
        except AssertionError as error:
            raise AssertionError(f"play({seed}): {error}") from error
        leaders += world.terms.version
    assert leaders > 500, "much happens"
