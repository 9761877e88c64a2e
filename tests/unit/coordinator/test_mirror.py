"""A standby's folder is the leader's at every sync, whatever is cut off: `MirroredFiles` and `Replica` over two disks
that forget what was not synced."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any

import pytest
import stored_runs
from power_cuts import extremes, image_of
from terms_in_memory import Terms
from virtual_files import AllOrNothing, Fate, VirtualFiles

from farloop.algo.spec import RunSpec
from farloop.coordinator import leadership
from farloop.coordinator.errors import Deposed, NoDescriptor, StorageFailed
from farloop.coordinator.leadership import Leadership, Term, Unreachable, Version
from farloop.coordinator.net.zmq_mirror import MirrorClient
from farloop.coordinator.storage import mirror as mirrors
from farloop.coordinator.storage.files import Bytes
from farloop.coordinator.storage.follower import Adopted, Follower
from farloop.coordinator.storage.mirror import Mirror, MirroredFiles, Replica, digests, finish_incoming
from farloop.coordinator.storage.store import Store
from farloop.monitoring.addresses import Address
from farloop.quant.digest import digest

PLACE = Path("/state")
SEGMENT_BYTES = 12 << 10
WHOLE = AllOrNothing(writes=True, names=True)


class Pair:
    """A leader and a standby. Messages arrive at once, unless `cut_off`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("farloop.coordinator.leadership.RETRY_S", 0.0)
        self.terms, self.leader, self.standby = Terms(), VirtualFiles(), VirtualFiles()
        self.terms.term = term = Term(run="r", leader="a", process="1", mark="1", term=1, address="tcp://a:7700")
        self.time = 0.0
        self.mirror = Mirror(PLACE, Leadership(self.terms, PLACE, term, 0), self.leader, lambda: self.time)
        self.mirror.send, self.mirror.lets_in = self.deliver, True
        self.files = MirroredFiles(self.mirror)
        self.cut_off = False
        self.standby.make_directory(PLACE)
        self.replica = Replica(PLACE, self.standby, beside=False)
        self.route = b"1"
        self.after_change: Callable[[list[Any]], None] = lambda head: None

    def deliver(self, route: bytes, frames: Sequence[Bytes]) -> None:
        if self.cut_off or route != self.route:
            return
        head = json.loads(bytes(frames[0]))
        if head not in (["pong"], ["unknown"]):
            self.replica.apply(head, frames[1:], lambda number: self.mirror.received(route, ["ack", number]))
            self.mirror.received(route, ["took", self.replica.taken])
            self.after_change(head)

    def join(self, route: bytes = b"1", process: str = "1") -> None:
        self.route = route
        self.mirror.received(route, ["join", "b", "r", process, digests(PLACE, self.standby, {})])
        self.mirror.tick()
        if self.mirror.error is not None:
            raise self.mirror.error

    def begin(self, spec: RunSpec) -> Store:
        return stored_runs.begun(PLACE, spec, segment_bytes=SEGMENT_BYTES, files=self.files)


class Clock(Condition):
    """Each wait takes half a second of virtual time."""

    def __init__(self, pair: Pair, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__(Lock())
        self._pair, self._meanwhile = pair, meanwhile

    def wait(self, timeout: float | None = None) -> bool:
        self._pair.time += 0.5
        self.release()
        self._meanwhile()
        self.acquire()
        return False


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    stored_runs.shorten(monkeypatch, snapshot_every=2, history=1)
    return Pair(monkeypatch)


def told(store: Store) -> tuple[Any, ...]:
    """What nodes know once a call of the store has returned."""
    versions = tuple((each.version, digest(each.anchor), digest(each.target)) for each in store.buffers)
    return versions, tuple(sorted(str(blob) for blob in store.ledger.inputs))


def found(files: VirtualFiles) -> tuple[Any, ...]:
    """What a start on this disk finds."""
    store = stored_runs.recovered(PLACE, segment_bytes=SEGMENT_BYTES, files=files)
    assert not store.alarms
    return told(store)


def mirrored_names(files: VirtualFiles) -> dict[str, bytes]:
    held = {}
    for folder in (PLACE, PLACE / "snapshots"):
        for name in files.names(folder):
            if mirrors.mirrored(PLACE, folder / name) and not files.is_directory(folder / name):
                held[str(folder / name)] = files.read_bytes(folder / name).rstrip(b"\0")
    return held


def work(store: Store, rounds: int = 4) -> None:
    """Commits, snapshots, new segments, pruned ones, and deltas without an outcome."""
    for _ in range(rounds):
        stored_runs.commit(store, 0)
        stored_runs.commit(store, 1)
    stored_runs.spool(store, 0, stored_runs.NODES[0])


def test_the_two_folders_are_equal_after_every_call(pair: Pair, spec: RunSpec) -> None:
    store = pair.begin(spec)
    pair.join()
    assert pair.terms.term is not None and pair.terms.term.in_sync == ("b",)
    for _ in range(6):
        stored_runs.commit(store, 0)
        stored_runs.commit(store, 1)
        assert mirrored_names(pair.standby) == mirrored_names(pair.leader)
    assert min(int(name.split("-")[1].split(".")[0]) for name in pair.standby.names(PLACE) if "journal" in name) > 0
    store.close()
    assert found(pair.standby.killed()) == told(store)


@pytest.mark.parametrize("fate", extremes(), ids=repr)
def test_whatever_was_told_is_on_the_standby_after_a_power_cut_of_both(pair: Pair, spec: RunSpec, fate: Fate) -> None:
    """The standby's power is cut after each change that reaches it. A start there finds what was told, or, of the call
    that was under way, its result."""
    store = pair.begin(spec)
    pair.join()
    cuts = dict[int, VirtualFiles]()

    def cut(head: list[Any]) -> None:
        survivor = pair.standby.survivor(fate)
        cuts.setdefault(image_of(survivor), survivor)

    pair.after_change = cut
    seen = 0
    for fragment in (0, 1, 0, 1, 0):
        before = told(store)
        stored_runs.commit(store, fragment, snapshots=False)
        store.take_snapshots()
        after = told(store)
        for survivor in cuts.values():
            state = found(survivor)
            seen += 1
            assert state[0] in (before[0], after[0])
        cuts.clear()
        assert found(pair.standby.survivor(fate)) == after
    assert seen > 15


UNLOCKED = ("sync", "allocate", "forget")
"""Calls of the disk between which a standby may be let in: the others are made together with their change."""


def test_a_standby_may_join_at_any_moment(monkeypatch: pytest.MonkeyPatch, spec: RunSpec) -> None:
    """Also in the middle of a snapshot or of a new segment."""
    stored_runs.shorten(monkeypatch, snapshot_every=2, history=1)
    moment, joined = 0, True
    while joined:
        pair, left, joined = Pair(monkeypatch), moment, False
        store = pair.begin(spec)

        def joins(what: str, path: Path, pair: Pair = pair) -> bool:
            nonlocal left, joined
            left -= what in UNLOCKED
            if left < 0 and not joined:
                joined = True
                pair.join()
            return True

        pair.leader.on_call = joins
        work(store, 2)
        if joined:
            assert mirrored_names(pair.standby) == mirrored_names(pair.leader), moment
            assert found(pair.standby.killed()) == told(store)
        moment += 1
    assert moment > 20


def test_a_standby_that_comes_back_is_given_what_changed_and_keeps_the_rest(pair: Pair, spec: RunSpec) -> None:
    store = pair.begin(spec)
    pair.join()
    work(store)
    pair.cut_off = True
    pair.time += 10.0  # nothing was heard of it
    stored_runs.commit(store, 0)
    assert pair.terms.term is not None and pair.terms.term.in_sync == (), "the leader went on alone"
    pair.cut_off = False
    pair.replica = Replica(PLACE, pair.standby, beside=False)
    sent = list[str]()
    pair.after_change = lambda head: sent.append(head[1])
    pair.join(b"2")
    assert "keep" in sent
    work(store, 1)
    assert mirrored_names(pair.standby) == mirrored_names(pair.leader)
    assert pair.terms.term.in_sync == ("b",)


def state(store: Store) -> tuple[Any, ...]:
    """All that later commits depend on."""
    outer = tuple(tuple(sorted((name, digest(it)) for name, it in each.outer.items())) for each in store.buffers)
    return told(store), outer, store.ledger.saved(), store._restart_from


def test_a_follower_has_the_leaders_state_and_leads_without_reading(pair: Pair, spec: RunSpec) -> None:
    """Over new segments, pruned ones and snapshots; commits that come after are as those of a cold start."""
    store = pair.begin(spec)
    pair.join()
    follower = Follower(PLACE, pair.standby)
    taken = 0
    for _ in range(6):
        work(store, 1)
        taken += follower.follow()
    assert taken > 30 and follower.follow() == 0
    left = state(store)
    pair.leader.killed()

    cold_disk = pair.standby.survivor(extremes()[0])
    opened = list[Path]()
    read = pair.standby.read_bytes
    pair.standby.read_bytes = lambda path: opened.append(path) or read(path)  # type: ignore[method-assign, func-returns-value]
    led = Store.recover(PLACE, segment_bytes=SEGMENT_BYTES, files=pair.standby, follower=follower)
    assert led is not None and not [path for path in opened if path.parent.name == "snapshots"]
    assert state(led)[:2] == left[:2] and led.ledger.epoch == 2
    cold = stored_runs.recovered(PLACE, segment_bytes=SEGMENT_BYTES, files=cold_disk)
    for one in (led, cold):
        work(one, 3)
    assert state(led)[:3] == state(cold)[:3]
    led.close()
    assert found(pair.standby) == told(cold)


def test_a_follower_of_an_adoption_reads_anew(pair: Pair, spec: RunSpec) -> None:
    store = pair.begin(spec)
    pair.join()
    work(store, 2)
    follower = Follower(PLACE, pair.standby)
    stored_runs.fetch(store)
    stored_runs.adopt(store)
    with pytest.raises(Adopted):
        follower.follow()
    again = Follower(PLACE, pair.standby)
    assert told_by(again) == told(store)[0]


def told_by(follower: Follower) -> tuple[Any, ...]:
    return tuple((each.version, digest(each.anchor), digest(each.target)) for each in follower.recovery.buffers)


@pytest.mark.parametrize("fate", extremes(), ids=repr)
def test_the_old_folder_stays_until_the_new_one_is_whole(pair: Pair, spec: RunSpec, fate: Fate) -> None:
    """A standby that had the state and is given a later one: a power cut at any of its calls leaves either."""
    store = pair.begin(spec)
    pair.join()
    work(store, 2)
    old = told(store)
    pair.cut_off = True
    pair.time += 10.0
    work(store, 2)
    new = told(store)
    pair.cut_off = False
    pair.replica = Replica(PLACE, pair.standby, beside=False)
    cuts = dict[int, VirtualFiles]()

    def cut(what: str, path: Path) -> bool:
        survivor = pair.standby.survivor(fate)
        cuts.setdefault(image_of(survivor), survivor)
        return True

    pair.standby.on_call = cut
    pair.join(b"2")
    states = set()
    for survivor in cuts.values():
        finish_incoming(PLACE, survivor)
        states.add(found(survivor))
    assert states == {old, new}


def test_a_standby_waits_until_the_leader_has_recovered(pair: Pair) -> None:
    pair.mirror.lets_in = False
    pair.join()
    assert not pair.mirror.has_standbys
    pair.mirror.lets_in = True
    pair.mirror.tick()
    assert pair.mirror.has_standbys


@pytest.mark.parametrize(
    ("name", "run", "why"),
    [
        ("a", "r", "another coordinator of the name a leads since term 1: give each a name of its own"),
        (
            "b",
            "q",
            "a leads another run (fingerprint r, not q): [coordinator] peers are to be the coordinators of one",
        ),
    ],
)
def test_a_standby_of_the_leaders_name_or_of_another_run_is_refused(
    pair: Pair, caplog: pytest.LogCaptureFixture, name: str, run: str, why: str
) -> None:
    sent = list[Any]()
    pair.mirror.send = lambda route, frames: sent.extend(json.loads(bytes(frame)) for frame in frames)
    pair.mirror.received(b"1", ["join", name, run, "1", {}])
    pair.mirror.tick()
    assert [head[0] for head in sent] == ["refused"] and sent[0][1].startswith(why)
    assert f"standby refused name={name} why='{why}" in caplog.text and not pair.mirror.has_standbys


def test_the_second_of_two_standbys_of_one_name_is_refused(
    pair: Pair, spec: RunSpec, caplog: pytest.LogCaptureFixture
) -> None:
    """The record has the name: the one of the two that is behind could take over."""
    store = pair.begin(spec)
    pair.join()
    deliver, refused = pair.mirror.send, list[Any]()
    pair.mirror.send = lambda route, frames: refused.append(json.loads(bytes(frames[0]))) or deliver(route, frames)  # type: ignore[func-returns-value]
    pair.mirror.received(b"2", ["join", "b", "r", "2", {}])
    for _ in range(3):
        pair.time += 0.6
        for route in (b"1", b"2"):
            pair.mirror.received(route, ["ping"])
        pair.mirror.tick()
    why = "another standby of the name b is connected: give each a name of its own"
    assert ["refused", why] in refused and f"standby refused name=b why='{why}'" in caplog.text
    work(store, 1)
    assert [*pair.mirror._standbys] == [b"1"] and mirrored_names(pair.standby) == mirrored_names(pair.leader)


def test_a_standby_that_was_started_again_is_let_in_once_its_last_process_is_silent(pair: Pair, spec: RunSpec) -> None:
    pair.begin(spec)
    pair.join()
    pair.replica = Replica(PLACE, pair.standby, beside=False)
    pair.join(b"2", "2")
    assert [*pair.mirror._standbys] == [b"1"]
    pair.time += mirrors.SILENCE_S + 0.1
    pair.mirror.received(b"2", ["ping"])
    pair.mirror.tick()
    assert [*pair.mirror._standbys] == [b"2"] and pair.mirror.leadership.term.in_sync == ("b",)


def test_a_second_standby_that_is_silent_since_it_asked_is_refused(pair: Pair, spec: RunSpec) -> None:
    """It ended the leader."""
    pair.begin(spec)
    pair.join()
    pair.mirror.lets_in = False
    pair.join(b"2", "2")
    pair.time += mirrors.SILENCE_S + 0.1
    pair.mirror.lets_in, pair.replica = True, Replica(PLACE, pair.standby, beside=False)
    pair.join()
    assert [*pair.mirror._standbys] == [b"1"] and not pair.mirror._joining


def test_nothing_waits_for_a_standby_that_said_good_bye(pair: Pair, spec: RunSpec) -> None:
    store = pair.begin(spec)
    pair.join()
    pair.mirror.received(b"1", ["bye", ""])
    pair.cut_off = True
    pair.mirror._moved = Clock(pair)
    stored_runs.commit(store, 0)
    assert pair.time < 1.0 and pair.terms.term is not None and pair.terms.term.in_sync == ()
    pair.cut_off, pair.replica = False, Replica(PLACE, pair.standby, beside=False)
    pair.join(b"2", "2")
    assert pair.terms.term.in_sync == ("b",), "nor does its next process"


def test_a_leader_remembers_no_more_than_whoever_is_heard(pair: Pair, spec: RunSpec) -> None:
    pair.begin(spec)
    pair.join()
    pair.mirror.lets_in = False
    for dial in range(2, 102):
        pair.time += 1.0
        pair.join(b"%d" % dial, str(dial // 2))
    assert len(pair.mirror._known_routes) < 5 and len(pair.mirror._heard_at) < 5


def test_a_folder_from_before_the_last_standby_was_let_in_does_not_count(pair: Pair, spec: RunSpec) -> None:
    """Under the same leader: of another host of its name, or put back."""
    store = pair.begin(spec)
    leadership.mark(PLACE, "1", pair.leader)
    olds = [pair.leader.survivor(WHOLE)]
    for route, process in ((b"1", "1"), (b"2", "2")):
        pair.join(route, process)
        olds.append(pair.standby.survivor(WHOLE))
        pair.time += 10.0
        pair.replica = Replica(PLACE, pair.standby, beside=False)
    assert pair.terms.term is not None and pair.terms.term.in_sync == ("b",)
    new = pair.terms.term.mark
    for disk in (pair.leader, pair.standby):
        assert new in (leadership.marked(PLACE, disk) or [])
    for disk in olds[:-1]:
        assert new not in (leadership.marked(PLACE, disk) or [])
    pair.mirror.leadership.check()
    store.close()


def test_every_standby_in_sync_gets_the_mark_of_a_new_one(pair: Pair, spec: RunSpec) -> None:
    pair.begin(spec)
    pair.join()
    disk, replica = VirtualFiles(), pair.replica
    disk.make_directory(PLACE)
    other = Replica(PLACE, disk, beside=False)

    def deliver(route: bytes, frames: Sequence[Bytes]) -> None:
        head = json.loads(bytes(frames[0]))
        of = replica if route == b"1" else other
        of.apply(head, frames[1:], lambda number: pair.mirror.received(route, ["ack", number]))

    pair.mirror.send = deliver
    pair.mirror.received(b"3", ["join", "c", "r", "3", {}])
    pair.mirror.tick()
    assert pair.terms.term is not None and pair.terms.term.in_sync == ("b", "c")
    for each in (pair.standby, disk):
        assert pair.terms.term.mark in (leadership.marked(PLACE, each) or [])


def test_a_standbys_clock_that_is_off_is_an_alarm(pair: Pair, spec: RunSpec) -> None:
    pair.begin(spec)
    pair.join()
    for off_s, alarm in ((7230.0, "b's is 2h 00m ahead of this host's"), (-90.0, "b's is 1m 30s behind"), (5.0, "")):
        pair.mirror.received(b"1", ["clock", "b", datetime.now(UTC).timestamp() + off_s])
        assert pair.mirror.alarms().get("clock", "").startswith(alarm) and (alarm or not pair.mirror.alarms())


def test_alarms_are_read_while_another_standby_tells_its_clock(pair: Pair, spec: RunSpec) -> None:
    pair.begin(spec)
    pair.join()

    class Meanwhile(float):
        def __abs__(self) -> float:
            pair.mirror.received(b"2", ["clock", "c", 0.0])
            return super().__abs__()

    pair.mirror._clocks_off["b"] = Meanwhile(90.0)
    assert pair.mirror.alarms()["clock"].startswith("b's is 1m 30s ahead")


def test_the_page_of_a_standby_is_made_while_a_leader_is_heard(tmp_path: Path) -> None:
    class Meanwhile(Address):
        def __str__(self) -> str:
            client._unheard.clear()
            return super().__str__()

    lost = [time.monotonic() - 2.0]

    class Heard(MirrorClient):
        lost_at = property(lambda self: lost.pop() if lost else None, lambda self, lost_at: None)

    peers = [Meanwhile(host="h", port=port) for port in (1, 2)]
    client = Heard(tmp_path, peers, None, Term(run="r", leader="b", process="2", term=1, address=""))
    client._unheard.update(dict.fromkeys(peers, "no answer"))
    assert client.trouble == "no leader at h:1 (no answer), h:2 (no answer)"
    assert client.is_without_leader and not client.is_without_leader
    client.run(lambda: True)


def test_a_record_that_cannot_be_read_is_an_alarm_after_a_minute(pair: Pair, spec: RunSpec) -> None:
    """The run goes on, and no standby could take over."""
    pair.begin(spec)
    pair.join()
    for away, seconds, alarm in (
        (True, 3.0, ""),
        (True, 60.0, "should this host be lost, no standby takes"),
        (False, 3.0, ""),
    ):
        pair.terms.away = away
        pair.time += seconds
        pair.mirror.received(b"1", ["ping"])
        pair.mirror.tick()
        assert alarm in pair.mirror.alarms().get("leads_by", "") and (alarm or not pair.mirror.alarms())


def test_a_record_that_cannot_be_put_right_is_an_alarm_after_a_minute(pair: Pair, spec: RunSpec) -> None:
    """A change that was given up has happened all the same, and the store can only be read."""
    pair.begin(spec)
    pair.join()
    assert pair.terms.term is not None
    pair.terms.term = dataclasses.replace(pair.terms.term, in_sync=())

    def refused(term: Term, version: Version) -> bool:
        raise Unreachable("403: AccessDenied")

    replace, pair.terms.replace = pair.terms.replace, refused  # type: ignore[method-assign]
    for seconds, alarm in (
        (3.0, ""),
        (60.0, "put right: should this host be lost, no standby takes over"),
    ):
        pair.time += seconds
        pair.mirror.received(b"1", ["ping"])
        pair.mirror.tick()
        assert alarm in pair.mirror.alarms().get("leads_by", "") and (alarm or not pair.mirror.alarms())
    pair.terms.replace = replace  # type: ignore[method-assign]
    pair.time += 3.0
    pair.mirror.received(b"1", ["ping"])
    pair.mirror.tick()
    assert not pair.mirror.alarms() and pair.terms.term.in_sync == ("b",)


def test_nothing_is_told_once_a_standby_leads(pair: Pair, spec: RunSpec) -> None:
    """A leader that slept: its sync never returns."""
    store = pair.begin(spec)
    pair.join()
    work(store, 1)
    before = told(store)
    term, version = pair.terms.read()
    assert term is not None
    assert pair.terms.replace(Term(run="r", leader="b", process="2", term=term.term + 1, address=""), version)
    pair.cut_off = True
    pair.time += 60.0
    with pytest.raises(Deposed, match="b leads the run since term 3"):
        stored_runs.commit(store, 0)
    assert told(store)[0] == before[0]
    with pytest.raises(Deposed):
        store.require_ours()


@pytest.mark.parametrize("silent_s", [1.0, 60.0])
def test_a_leader_that_hears_nobody_lets_the_standby_lead_first(pair: Pair, spec: RunSpec, silent_s: float) -> None:
    """It is cut off from nodes and standby, and not from the store of the record."""
    store = pair.begin(spec)
    pair.join()
    pair.cut_off = True
    pair.time += 5.0
    pair.mirror.nodes_silent_s = lambda: silent_s
    waited = pair.time

    def takes_over() -> None:
        term, version = pair.terms.read()
        if pair.time > waited + 2.0 and term is not None and term.in_sync:
            pair.terms.replace(Term(run="r", leader="b", process="2", term=term.term + 1, address=""), version)

    pair.mirror._moved = Clock(pair, takes_over)
    if silent_s > 10.0:
        with pytest.raises(Deposed, match="b leads"):
            stored_runs.commit(store, 0)
    else:
        stored_runs.commit(store, 0)
        assert pair.terms.term is not None and pair.terms.term.leader == "a"


def test_a_leader_that_writes_nothing_notices_that_another_leads(
    pair: Pair, spec: RunSpec, caplog: pytest.LogCaptureFixture
) -> None:
    store = pair.begin(spec)
    term, version = pair.terms.read()
    assert term is not None
    pair.terms.replace(
        Term(run="r", leader="a", process="2", term=2, address=""), version
    )  # another process of its name
    for _ in range(2):
        pair.time += 10.0
        pair.mirror.tick()
    assert caplog.text.count("this leader ends why='/state: a leads the run since term 2") == 1
    with pytest.raises(Deposed):
        store.require_ours()


@pytest.mark.parametrize("is_away", [False, True])
def test_a_leader_that_another_replaced_replaces_no_folder(pair: Pair, spec: RunSpec, *, is_away: bool) -> None:
    """It was suspended, or is cut off from the record. The standby asks it once its own leader is lost."""
    pair.begin(spec)
    term, version = pair.terms.read()
    assert term is not None
    pair.terms.replace(Term(run="r", leader="c", process="3", term=9, address="", in_sync=("b",)), version)
    pair.terms.away, waits = is_away, [0]

    def hears_and_finds_the_record() -> None:
        waits[0] += 1
        pair.mirror.received(pair.route, ["ping"])
        pair.terms.away = pair.terms.away and waits[0] < 20

    pair.mirror._moved = Clock(pair, hears_and_finds_the_record)
    with pytest.raises(Deposed, match="c leads"):
        pair.join()
    assert pair.replica.whole == 0 and waits[0] == 20 * is_away


def test_a_standby_that_has_nothing_to_take_is_not_given_all_again_while_the_store_is_away(
    pair: Pair, spec: RunSpec
) -> None:
    pair.begin(spec)
    heads = list[list[Any]]()
    pair.terms.away, pair.after_change = True, heads.append

    def is_heard() -> None:
        pair.mirror.received(pair.route, ["ping"])
        pair.terms.away = pair.time < 100.0

    pair.mirror._moved = Clock(pair, is_heard)
    pair.join()
    assert [head[1] for head in heads].count("begin") == 1 and pair.time >= 100.0
    assert pair.terms.term is not None and pair.terms.term.in_sync == ("b",)


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_record_is_looked_at_while_a_standby_is_given_the_state(
    pair: Pair, spec: RunSpec, monkeypatch: pytest.MonkeyPatch, *, is_slow: bool
) -> None:
    work(pair.begin(spec))
    term, version = pair.terms.read()
    assert term is not None
    writes = list[list[Any]]()

    def goes_on(head: list[Any]) -> None:
        if head[1] == "write":
            writes.append(head)
            pair.time += 3.0
            pair.mirror.received(pair.route, ["ping"])
            pair.terms.replace(Term(run="r", leader="c", process="3", term=9, address=""), version)

    pair.after_change = goes_on
    pair.mirror._moved = Clock(pair, lambda: pair.mirror.received(pair.route, ["ping"]))
    if is_slow:  # it takes nothing of what it is sent, and is heard
        monkeypatch.setattr(mirrors, "WINDOW_BYTES", 0)
        monkeypatch.setattr(Replica, "taken", property(lambda self: 0, lambda self, taken: None), raising=False)
    with pytest.raises(Deposed, match="c leads"):
        pair.join()
    assert len(writes) == 1 and pair.replica.whole == 0 and pair.time < 10.0


def test_a_standby_that_is_heard_while_the_leader_yields_stays_in_sync(pair: Pair, spec: RunSpec) -> None:
    store = pair.begin(spec)
    pair.join()
    pair.mirror.nodes_silent_s = lambda: 60.0
    sent = list[tuple[bytes, Sequence[Bytes]]]()
    pair.mirror.send = lambda route, frames: sent.append((route, [bytes(frame) for frame in frames]))
    pair.time += 10.0

    def comes_back() -> None:
        pair.mirror.send = pair.deliver
        for message in sent:
            pair.deliver(*message)
        sent.clear()

    pair.mirror._moved = Clock(pair, comes_back)
    stored_runs.commit(store, 0)
    assert pair.terms.term is not None and pair.terms.term.in_sync == ("b",) and not sent
    assert mirrored_names(pair.standby) == mirrored_names(pair.leader)


def test_the_record_is_changed_before_the_run_goes_on_alone(pair: Pair, spec: RunSpec) -> None:
    """While the store is away and the standby is silent, nothing is told. An answer that is lost does no harm."""
    store = pair.begin(spec)
    pair.join()
    pair.cut_off = True
    pair.time += 10.0
    pair.terms.away = True
    asked = [0]
    read = pair.terms.read

    def comes_back() -> tuple[Term | None, Version]:
        asked[0] += 1
        if asked[0] == 3:
            assert "standby b does not answer" in pair.mirror.alarms()["leads_by"]
            assert pair.terms.term is not None and pair.terms.term.in_sync == ("b",)
            pair.terms.away, pair.terms.deaf = False, True
        return read()

    pair.terms.read = comes_back  # type: ignore[method-assign]
    replace = pair.terms.replace

    def counted(term: Term, version: Version) -> bool:
        if pair.terms.away:
            comes_back()
        return replace(term, version)

    pair.terms.replace = counted  # type: ignore[method-assign]
    stored_runs.commit(store, 0)
    assert asked[0] >= 3 and pair.terms.term is not None and pair.terms.term.in_sync == ()
    assert not pair.mirror.alarms().get("leads_by")


def test_a_standby_that_comes_back_releases_the_run_while_the_store_is_away(pair: Pair, spec: RunSpec) -> None:
    store = pair.begin(spec)
    pair.join()
    pair.cut_off = True
    pair.time += 10.0
    pair.terms.away = True
    sent = list[tuple[bytes, Sequence[Bytes]]]()
    pair.mirror.send = lambda route, frames: sent.append((route, frames))
    asked = [0]

    def away() -> tuple[Term | None, Version]:
        asked[0] += 1
        if asked[0] == 3:  # it was suspended, and takes all that waits for it
            pair.cut_off, pair.mirror.send = False, pair.deliver
            pair.mirror.received(pair.route, ["ping"])
            for route, frames in sent:
                pair.deliver(route, [bytes(frame) for frame in frames])
        raise Unreachable("the store is away")

    pair.terms.replace = lambda term, version: away()  # type: ignore[method-assign, return-value, func-returns-value]
    stored_runs.commit(store, 0)
    assert pair.terms.term is not None and pair.terms.term.in_sync == ("b",) and not pair.mirror.alarms()
    assert mirrored_names(pair.standby) == mirrored_names(pair.leader)


def test_a_coordinator_that_stops_does_not_wait_for_a_standby(pair: Pair, spec: RunSpec) -> None:
    store = pair.begin(spec)
    pair.join()
    pair.cut_off = True
    pair.mirror.close()
    store.close()
    assert found(pair.leader.killed()) == told(store)


def test_a_standby_that_is_lost_while_it_is_let_in_is_not_in_sync(pair: Pair, spec: RunSpec) -> None:
    """It has all, and falls silent before the record says so: whoever goes on without it first takes it out."""
    store = pair.begin(spec)
    set_in_sync, at_work = pair.mirror.leadership.set_in_sync, list[Thread]()

    def slowly(names: tuple[str, ...], unless: Callable[[], bool] = lambda: False, *, mark: str = "") -> bool:
        if names == ("b",):  # the storage thread finds it silent now
            pair.cut_off = True
            pair.time += 10.0
            at_work.append(Thread(target=lambda: stored_runs.commit(store, 0)))
            at_work[0].start()
            at_work[0].join(0.5)
            assert at_work[0].is_alive(), "it waits until the record is settled"
        return set_in_sync(names, unless, mark=mark)

    pair.mirror.leadership.set_in_sync = slowly  # type: ignore[method-assign]
    pair.join()
    at_work[0].join(30.0)
    assert not at_work[0].is_alive()
    assert pair.terms.term is not None and pair.terms.term.in_sync == () and not pair.mirror.has_standbys


def test_a_standby_that_is_heard_again_while_it_is_copied_to_is_given_all(pair: Pair, spec: RunSpec) -> None:
    """It was silent while another thread changed the record."""
    store = pair.begin(spec)
    work(store, 1)
    free = pair.mirror._membership

    class Held:
        def acquire(self, timeout: float) -> bool:
            pair.mirror._membership = free
            pair.mirror.received(pair.route, ["ping"])
            return False

    def falls_silent(head: list[Any]) -> None:
        if head[1] == "begin":
            pair.time += 10.0
            pair.mirror._membership = Held()  # type: ignore[assignment]

    pair.after_change = falls_silent
    pair.join()
    assert pair.mirror._membership is free and pair.mirror.leadership.term.in_sync == ("b",)
    assert mirrored_names(pair.standby) == mirrored_names(pair.leader)


def test_a_leader_that_cannot_read_its_files_goes_on(pair: Pair, spec: RunSpec) -> None:
    store = pair.begin(spec)
    opened = pair.leader.open

    def fails(path: Path, *, write: bool = False) -> Any:
        raise NoDescriptor(path)

    pair.leader.open = fails  # type: ignore[method-assign]
    pair.join()
    assert not pair.mirror.has_standbys
    pair.leader.open = opened  # type: ignore[method-assign]
    work(store, 1)
    pair.join(b"2")
    assert pair.terms.term is not None and pair.terms.term.in_sync == ("b",)


def test_reports_follow_and_nothing_waits_for_them(pair: Pair, spec: RunSpec) -> None:
    """So that totals, clock and `farloop report` go on after a standby has taken over."""
    pair.begin(spec)
    pair.join()
    log = PLACE / "metrics.jsonl"
    for content in (b"one\n", b"one\ntwo\n", b"anew\n"):
        pair.leader.write_bytes(log, content)
        if content == b"one\ntwo\n":
            pair.leader.write_bytes(PLACE / "decisions.jsonl", b"x\n")
        pair.time += 10.0
        pair.mirror._standbys[b"1"].heard_at = pair.time
        pair.mirror.tick()
        assert pair.standby.read_bytes(log) == content
    pair.leader.unlink(PLACE / "decisions.jsonl")
    pair.time += 10.0
    pair.mirror.tick()
    assert "decisions.jsonl" not in pair.standby.names(PLACE)


def test_a_snapshot_that_cannot_be_synced_is_not_acknowledged_and_ends_the_copy(pair: Pair, spec: RunSpec) -> None:
    """Its thread has no caller: the next change raises what went wrong there, and the standby asks anew."""
    store = pair.begin(spec)
    pair.replica = Replica(PLACE, pair.standby)
    pair.join()
    acknowledged = list[int]()
    pair.standby.failing_sync = lambda path: path.parent.name == "snapshots"
    name = next(iter(pair.standby.names(PLACE / "snapshots")))
    pair.replica.apply([900, "sync", f"snapshots/{name}"], [], acknowledged.append)
    assert pair.replica._later is not None
    pair.replica._later.submit(lambda: None).result(10.0)
    with pytest.raises(StorageFailed, match="sync: Input/output error"):
        pair.replica.apply([901, "sync", ""], [], acknowledged.append)
    assert acknowledged == []
    store.close()


def test_a_standby_writes_nothing_beside_the_state(tmp_path: Path) -> None:
    replica = Replica(tmp_path, beside=False)
    for name in ("../x", "lock", "admin.sock", "other/x", "snapshots/../../x", "status.json", "mapped-1"):
        with pytest.raises(StorageFailed, match="not its to change"):
            replica.apply([1, "create", name], [], lambda number: None)
    with pytest.raises(StorageFailed, match="not known here: swap"):
        replica.apply([1, "swap", "epoch"], [], lambda number: None)
