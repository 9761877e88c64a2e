"""A run whose leading coordinator is killed, stopped or told to stop: the one that stands by goes on with everything
that nodes were told."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import zmq
from keyring import authorize, keys_of, new_keys
from loopback import (
    FARLOOP,
    PACED,
    Daemon,
    NewRun,
    Run,
    assert_all_agree,
    assert_one_line,
    further_than,
    new_run,  # noqa: F401 - a fixture
)
from object_server import serving
from terms_in_memory import Terms
from zmq.utils.monitor import recv_monitor_message

from farloop.cli.keys import write_pair
from farloop.config.exit_codes import ExitCode
from farloop.coordinator.errors import StorageFailed
from farloop.coordinator.leadership import Leadership, Term
from farloop.coordinator.net import zmq_mirror
from farloop.coordinator.net.zmq_mirror import MirrorClient, MirrorServer
from farloop.coordinator.storage import mirror as mirrors
from farloop.coordinator.storage.files import Bytes
from farloop.coordinator.storage.mirror import Mirror
from farloop.local.processes import free_port
from farloop.monitoring.addresses import Address
from farloop.monitoring.status import Status

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


STANDBY = Term(run="r", leader="b", process="2", term=0, address="")


class Pair:
    """Coordinators a and b of one run, with one file."""

    def __init__(self, run: Run, **hosts: str) -> None:
        """`hosts`: of a coordinator that is not on loopback."""
        self.run = run
        self.ports = {name: (free_port(), free_port(), free_port()) for name in ("a", "b")}
        self.hosts = {"a": "127.0.0.1", "b": "127.0.0.1"} | hosts
        peers = ", ".join(f"tcp://{self.hosts[name]}:{mirror}" for name, (_, _, mirror) in self.ports.items())
        run.tables["coordinator"] |= {"leads_by": f"file://{run.folder}/record", "peers": peers}
        self.daemons: dict[str, Daemon] = {}
        self.file = run.write_toml()

    @property
    def addresses(self) -> str:
        return ", ".join(f"tcp://{self.hosts[name]}:{bind}" for name, (bind, _, _) in self.ports.items())

    def start(self, name: str, *options: str) -> Daemon:
        (bind, http, mirror), host = self.ports[name], self.hosts[name]
        own = {"name": name, "bind": f"tcp://{host}:{bind}", "http": f"{host}:{http}",
               "mirror": f"tcp://{host}:{mirror}", "state_dir": str(self.run.folder / name)}  # fmt: skip
        given = {option.partition("=")[0].removeprefix("coordinator.") for option in options}
        sets = [f"--set=coordinator.{key}={value}" for key, value in own.items() if key not in given]
        self.daemons[name] = self.run.start(name, *FARLOOP, "coordinator", str(self.file), *sets, *options)
        return self.daemons[name]

    def look_at(self, name: str) -> None:
        """From now on the run's pages and files are this one's."""
        self.run.host, self.run.http = self.hosts[name], self.ports[name][1]
        self.run.state_dir = self.run.folder / name

    def begin(self, *options: str) -> None:
        """a leads, b stands by with these options."""
        self.start("a")
        self.run.until_said(self.run.folder / "a.log", "at tcp://")
        self.start("b", *options)
        self.look_at("a")

    def start_nodes(self) -> None:
        self.run.start_metronome("n", pace_s=0.1, coordinator=self.addresses)
        self.run.start_node("m", coordinator=self.addresses)

    def trains(self, *options: str) -> Status:
        """a leads, b is in sync, and windows commit."""
        self.begin(*options)
        self.start_nodes()
        self.until_in_sync("b")
        return self.run.until("windows commit", lambda status: min(status["versions"]) >= 2)

    def until_in_sync(self, name: str) -> Status:
        return self.run.until(f"{name} is in sync", lambda status: status["standby"]["in_sync"] == [name])

    def goes_on_at(self, name: str, before: Status) -> Status:
        """Wait for commits there, on top of all that was told."""
        self.look_at(name)
        found = self.run.until(f"{name} leads", lambda status: status["run"]["epoch"] > before["run"]["epoch"])
        for version, digest, old, known in zip(
            found["versions"], found["digests"], before["versions"], before["digests"], strict=True
        ):
            assert version > old or (version == old and digest == known), "nothing that was told is lost"
        return self.run.until("windows commit again", partial(further_than, before=found))


@pytest.fixture
def pair(new_run: NewRun) -> Pair:  # noqa: F811
    return Pair(new_run(steps=100_000, **PACED))


def test_a_standby_takes_over_from_a_leader_that_is_killed_again_and_again(new_run: NewRun) -> None:  # noqa: F811
    """Encrypted; each comes back, stands by and leads again."""
    run = new_run(steps=150, **PACED)
    keys = new_keys(run, "coordinator", "n", "m")
    authorize(run, "n", "m")
    pair = Pair(run)
    pair.begin()
    run.start_metronome("n", pace_s=0.1, coordinator=pair.addresses, **keys_of(keys, "n"))
    run.start_node("m", coordinator=pair.addresses, **keys_of(keys, "m"))
    for leader, standby in (("a", "b"), ("b", "a")):
        status = pair.until_in_sync(standby)
        assert status["standby"]["farloop"] == {standby: status["run"]["farloop"]}
        assert page_of(pair, standby, "/readyz")[0] == 503
        code, text = page_of(pair, standby, "/healthz")
        assert code == 200 and f"{standby} stands by for {leader}: in sync" in text
        assert "farloop_standby_in_sync 1.0" in page_of(pair, standby, "/metrics")[1]
        run.until(
            "it has the state in memory", lambda _, at=standby: "in_memory 1.0" in page_of(pair, at, "/metrics")[1]
        )
        before = run.until("windows commit", lambda status: min(status["versions"]) >= 2)
        pair.daemons[leader].kill()
        pair.goes_on_at(standby, before)
        pair.start(leader)
    pair.until_in_sync("b")
    assert "farloop_standbys_in_sync 1.0" in run.page("/metrics")[1]
    run.hurry()
    status = run.until_done(pair.daemons["a"], *(daemon for daemon in run.daemons if daemon.name.startswith("node")))
    assert_all_agree(run, status, "n", "m")
    assert run.until_ended(pair.daemons["b"]) == 0, "it takes over a run that is finished, and ends"
    assert (run.folder / "a" / "model.safetensors").read_bytes() == (
        run.folder / "b" / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("obstore") is None, reason="needs the extra 'cloud' (obstore)")
def test_a_standby_follows_records_whose_bytes_are_in_an_object_store(
    new_run: NewRun,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(monkeypatch) as server:
        run = new_run(steps=100_000, **PACED, bulk="store")
        run.tables["coordinator"]["bulk_url"] = "s3://runs/first"
        pair = Pair(run)
        pair.trains()
        run.until("it has the state in memory", lambda _: "in_memory 1.0" in page_of(pair, "b", "/metrics")[1])
        before = run.until("windows commit", lambda status: min(status["versions"]) >= 4)
        assert any("update-" in path for path in server.objects)
        pair.daemons["a"].kill()
        pair.goes_on_at("b", before)


def test_a_leader_that_stops_in_order_hands_over(pair: Pair) -> None:
    """Its own file differs in the terms: the run keeps those that it has."""
    run, before = pair.run, pair.trains("--set", "run.h=9")
    pair.daemons["a"].signal(signal.SIGTERM)
    assert run.until_ended(pair.daemons["a"]) == ExitCode.DONE
    status = pair.goes_on_at("b", before)
    assert status["run"]["h"] == before["run"]["h"]
    kept = f'kept h={before["run"]["h"]} file=9 cause="the run keeps its terms; farloop run set changes them"'
    assert run.logs().count(kept) == 1
    assert status["totals"]["tokens"] >= before["totals"]["tokens"] > 0
    standby = pair.start("a")
    pair.until_in_sync("a")
    standby.signal(signal.SIGTERM)
    assert run.until_ended(standby) == ExitCode.DONE
    assert standby.last_line == "stopped while it stood by; the same command stands by again"


def test_a_standby_whose_dials_are_taken_and_dropped_leads_after_a_second(tmp_path: Path) -> None:
    """As by a port forward or a load balancer in front of a leader that is gone: no new loss begins with each try."""
    with Listening() as port:
        client = MirrorClient(tmp_path, [Address(host="127.0.0.1", port=port)], None, STANDBY)
        client.heard_at = client.lost_at = began = time.monotonic()
        client.run(lambda: client.is_without_leader or time.monotonic() - began > 4.0)
        assert time.monotonic() - began < 2.0
        assert client._dials <= 3, "and it does not dial all the time"


def test_a_standby_says_its_clock_with_every_ping(tmp_path: Path) -> None:
    """So that the alarm about it ends once it is set. Its last word is that it goes."""
    said, until = list[str](), time.monotonic() + 5.0
    with zmq.Context() as context, context.socket(zmq.ROUTER) as leader:
        port = leader.bind_to_random_port("tcp://127.0.0.1")
        client = MirrorClient(tmp_path, [Address(host="127.0.0.1", port=port)], None, STANDBY)

        def over() -> bool:
            with suppress(zmq.Again):
                route, message = leader.recv_multipart(zmq.DONTWAIT)
                said.append(json.loads(message)[0])
                leader.send_multipart([route, b'["pong"]'])
            return said.count("clock") > 1 or time.monotonic() > until

        client.run(over)
        while leader.poll(5000) and said[-1] != "bye":
            said.append(json.loads(leader.recv_multipart()[1])[0])
    assert said.count("clock") > 1 and said.count("join") == 1 and said[-1] == "bye"


def test_a_standby_whose_record_answers_slowly_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks whether it may take over for longer than it waits for an answer: what has come meanwhile counts."""
    monkeypatch.setattr(zmq_mirror, "JOIN_S", 0.1)
    terms, port, asked = Terms(), free_port(), 0
    terms.term = Term(run="r", leader="a", process="1", term=1, address="")
    mirror = Mirror(tmp_path / "a", Leadership(terms, tmp_path / "a", terms.term, 0))
    mirror.lets_in = True
    client = MirrorClient(tmp_path / "b", [Address(host="127.0.0.1", port=port)], None, STANDBY)

    def over() -> bool:
        nonlocal asked
        asked += 1
        time.sleep(0.3)
        return client.is_in_sync or asked == 20

    with closing(MirrorServer(f"tcp://127.0.0.1:{port}", None, mirror)):
        client.run(over)
    assert client.is_in_sync and client._dials == 1


def test_a_standby_that_cannot_write_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk is full: each of its tries held the leader's commits until its silence was long enough."""
    monkeypatch.setattr(mirrors, "SILENCE_S", 1000.0)
    terms, port, until = Terms(), free_port(), time.monotonic() + 20.0
    terms.term = Term(run="r", leader="a", process="1", term=1, address="")
    mirror = Mirror(tmp_path / "a", Leadership(terms, tmp_path / "a", terms.term, 0))
    client = MirrorClient(tmp_path / "b", [Address(host="127.0.0.1", port=port)], None, STANDBY)
    apply = client._replica.apply

    def full(head: list[Any], parts: Sequence[Bytes], ack: Callable[[int], None]) -> None:
        if head[1] == "whole":
            raise StorageFailed(tmp_path / "b", "No space left on device")
        apply(head, parts, ack)

    monkeypatch.setattr(client._replica, "apply", full)
    mirror.lets_in = True
    gone = "standby left behind name=b"
    with closing(MirrorServer(f"tcp://127.0.0.1:{port}", None, mirror)):
        client.run(lambda: gone in caplog.text or time.monotonic() > until)
    assert gone in caplog.text and "standby cannot go on name=b why='" in caplog.text
    assert client.trouble.endswith("No space left on device") and terms.term.in_sync == ()


def test_a_standby_that_hears_no_leader_says_where_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its key is another one, as after a change of one of the two."""
    monkeypatch.setattr(zmq_mirror, "JOIN_S", 0.5)
    keys = [write_pair(tmp_path / name, name)[0] for name in ("a", "b")]
    peers, until = [Address(host="127.0.0.1", port=free_port()) for _ in range(2)], time.monotonic() + 20.0
    terms = Terms()
    terms.term = Term(run="r", leader="a", process="1", term=1, address="")
    mirror = Mirror(tmp_path / "a", Leadership(terms, tmp_path / "a", terms.term, 0))
    client = MirrorClient(tmp_path / "b", peers, keys[1], STANDBY)
    with closing(MirrorServer(f"tcp://{peers[0]}", keys[0], mirror)):
        client.run(lambda: "standby is not let in" in caplog.text or time.monotonic() > until)
    assert (
        f"no leader at {peers[0]} (it ends the connection: are [coordinator] key here and there the same?)"
        in client.trouble
    )
    assert f"{peers[1]} (no answer)" in client.trouble and client.trouble in caplog.text
    assert client.lost_at is None, "a leader that was never heard is not lost"


@pytest.mark.parametrize(("size", "noticed"), [(1, True), (64 << 20, False)])
def test_heartbeats_do_not_fire_within_a_large_message(size: int, noticed: bool) -> None:
    """To a peer that takes no bytes any more. Where packets are lost the kernel ends it, as TCP_MAXRT says."""
    message, ready = zmq.Frame(bytes(size)), b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        zmq.Context() as context,
        zmq_mirror._dealer(context, None) as dealer,
        dealer.get_monitor_socket(int(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)) as monitor,
    ):
        dealer.heartbeat_ivl = dealer.heartbeat_timeout = 200
        dealer.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        with server.accept()[0] as peer:
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
            peer.sendall(greeting + bytes([4, len(ready)]) + ready)
            dealer.send(message, copy=False)
            with socket.socket(fileno=os.dup(recv_monitor_message(monitor)["value"])) as tcp:
                assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000  # milliseconds
            assert bool(monitor.poll(1500)) == noticed
        dealer.disable_monitor()


class Listening:
    """A port that takes each connection and ends it."""

    def __enter__(self) -> int:
        self._socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._run, daemon=True).start()
        port: int = self._socket.getsockname()[1]
        return port

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                self._socket.accept()[0].close()

    def __exit__(self, *_: object) -> None:
        self._socket.close()


@pytest.mark.slow
def test_a_leader_that_was_suspended_ends_and_nothing_of_it_counts(pair: Pair) -> None:
    run, before = pair.run, pair.trains()
    pair.daemons["a"].signal(signal.SIGSTOP)
    after = pair.goes_on_at("b", before)
    pair.daemons["a"].signal(signal.SIGCONT)
    assert run.until_ended(pair.daemons["a"]) == ExitCode.REFUSED
    assert_one_line(pair.daemons["a"], "b leads the run since term 5", "start this one again, and it stands by")
    later = run.until("windows commit", partial(further_than, before=after))
    assert later["run"]["epoch"] == after["run"]["epoch"]


AHEAD = """
import datetime
import time

real = time.time
time.time = lambda: real() + 3.01 * 3600


class Ahead(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(hours=3.01)


datetime.datetime = Ahead
from farloop.cli.main import main

main()
"""


@pytest.mark.slow
def test_a_clock_that_is_hours_off_is_named_and_nothing_depends_on_it(pair: Pair, tmp_path: Path) -> None:
    """b's, which stands by, leads, and stands by again."""
    pair.run.programs = {"b": program(tmp_path / "farloop-ahead", sys.executable, AHEAD)}
    before = pair.trains()
    told = "b's is 3h 00m ahead of this host's: set both by NTP"
    before = pair.run.until("it is named", lambda status: any(told in why for why in status["alarms"]), timeout_s=30)
    for leader, standby in (("a", "b"), ("b", "a")):
        pair.daemons[leader].kill()
        pair.goes_on_at(standby, before)
        pair.start(leader)
        before = pair.until_in_sync(leader)
        assert before["run"]["started_s"] < 1800


def program(path: Path, interpreter: str, text: str) -> Path:
    """An executable file."""
    path.write_text(f"#!{interpreter}\n{text}")
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_the_run_goes_on_when_the_leaders_host_is_gone(new_run: NewRun, tmp_path: Path) -> None:  # noqa: F811
    """It is in a network namespace, whose card goes down before it dies: nobody is sent a packet that says so."""
    net = f"198.18.{os.getpid() % 256}"  # RFC 2544's, of no real network
    space, inside, outside = f"fl{os.getpid()}", f"{net}.2", f"{net}.1"
    with ExitStack() as stack:
        for number, words in enumerate((
            f"netns add {space}",
            f"link add {space} type veth peer name card netns {space}",
            f"addr add {outside}/30 dev {space}",
            f"link set {space} up",
            f"-n {space} addr add {inside}/30 dev card",
            f"-n {space} link set card up",
        )):  # fmt: skip
            done = ip(words)
            if done.returncode and number < 2:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
            assert done.returncode == 0, done.stderr
            if number == 0:
                stack.callback(ip, f"netns delete {space}")
        run = new_run(steps=100_000, **PACED)
        keys = new_keys(run, "coordinator", "n", "m")
        authorize(run, "n", "m")
        command = f'exec ip netns exec {space} {sys.executable} {" ".join(FARLOOP)} "$@"\n'
        run.programs = {"a": program(tmp_path / "farloop-in-a", "/bin/sh", command)}
        pair = Pair(run, a=inside)
        pair.begin()
        run.start_metronome("n", pace_s=0.1, coordinator=pair.addresses, **keys_of(keys, "n"))
        run.start_node("m", coordinator=pair.addresses, **keys_of(keys, "m"))
        pair.until_in_sync("b")
        before = run.until("windows commit", lambda status: min(status["versions"]) >= 2)
        assert ip(f"-n {space} link set card down").returncode == 0
        pair.daemons["a"].kill()
        pair.goes_on_at("b", before)


def ip(words: str) -> subprocess.CompletedProcess[str]:
    """Run iproute2's command."""
    if (command := shutil.which("ip")) is None:
        pytest.skip("ip is not installed (Debian: iproute2)")
    return subprocess.run([command, *words.split()], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_run_goes_on_without_a_standby_that_is_suspended(pair: Pair) -> None:
    run, before = pair.run, pair.trains()
    pair.daemons["b"].signal(signal.SIGSTOP)
    run.until("the leader is alone", lambda status: status["standby"]["in_sync"] == [])
    run.until("windows commit", partial(further_than, before=before))
    pair.daemons["b"].signal(signal.SIGCONT)
    before = pair.until_in_sync("b")
    pair.daemons["a"].kill()
    pair.goes_on_at("b", before)


@pytest.mark.slow
def test_a_coordinator_without_a_folder_restores_the_newest_copy(pair: Pair) -> None:
    """`recover = "auto"`: its host is lost with its disk, another starts with nothing."""
    run = pair.run
    copies = ("--copy-to", f"file://{run.folder}/copies", "--copy-every", "1", "--set", "coordinator.recover=auto")
    alone = ("--set", "coordinator.peers=", "--set", "coordinator.mirror=")
    pair.start("a", *copies, *alone)
    pair.look_at("a")
    pair.start_nodes()
    run.until("it is copied", lambda status: bool(status.get("copy", {}).get("versions")))
    run.until("windows commit", lambda status: min(status["versions"]) >= 4)
    seen = list[list[int]]()

    def rests(status: Status) -> bool:
        seen.append(status["versions"])
        return seen[-40:].count(seen[-1]) == 40

    with run.paused():  # a version that only one node knows waits for a person
        before = run.until("both nodes know the newest versions", rests)
        pair.daemons["a"].kill()
    pair.start("b", *copies, *alone)
    pair.look_at("b")
    run.until("what nodes hold is adopted", lambda status: at_least(status, before))
    pair.goes_on_at("b", before)


def test_the_record_of_another_run_is_one_line(pair: Pair) -> None:
    (pair.run.folder / "record" / "leader").mkdir(parents=True)
    record: dict[str, Any] = {
        "run": "0" * 16,
        "leader": "z",
        "process": "1",
        "mark": "",
        "recovering": True,
        "term": 1,
        "address": "",
        "in_sync": [],
    }
    Path(pair.run.folder / "record" / "leader" / "00000001.json").write_text(json.dumps(record))
    refused = pair.start("a")
    assert pair.run.until_ended(refused) == ExitCode.REFUSED
    assert_one_line(refused, "the record holds the leader of another run")


def test_a_second_coordinator_of_the_same_name_ends_in_one_line(pair: Pair) -> None:
    pair.start("a")
    pair.run.until_said(pair.run.folder / "a.log", "at tcp://")
    refused = pair.start("b", "--set", "coordinator.name=a")
    assert pair.run.until_ended(refused) == ExitCode.REFUSED
    assert_one_line(refused, "another coordinator of the name a leads since term 2")


def test_a_second_record_beside_a_leader_begins_no_second_run(pair: Pair) -> None:
    pair.start("a")
    pair.run.until_said(pair.run.folder / "a.log", "at tcp://")
    refused = pair.start("b", "--set", f"coordinator.leads_by=file://{pair.run.folder}/other")
    assert pair.run.until_ended(refused) == ExitCode.REFUSED
    assert_one_line(refused, f"a coordinator leads at 127.0.0.1:{pair.ports['a'][2]}, and file://")
    assert not (pair.run.folder / "other" / "leader").exists()


def at_least(status: Status, before: Status) -> bool:
    return all(now >= then for now, then in zip(status["versions"], before["versions"], strict=True))


def page_of(pair: Pair, name: str, path: str) -> tuple[int, str]:
    before = pair.run.http
    try:
        pair.run.http = pair.ports[name][1]
        return pair.run.page(path)
    finally:
        pair.run.http = before
