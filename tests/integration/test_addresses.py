"""Names, IPv6 and the MTU over real sockets: what lanes connect to, what daemons bind, and what gets through."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import Daemon, NewRun, assert_all_agree
from pipeline_layouts import layout_of
from pipeline_nodes import Nodes, microbatches
from test_link import key_files, linked, station, until, wait_for
from typer.testing import CliRunner

from farloop.cli.main import app
from farloop.config.sources import dump_toml
from farloop.local.processes import free_port
from farloop.monitoring import addresses
from farloop.node.link import LinkConfig
from farloop.node.zmq_dealer import try_link
from farloop.wire import events as wire_ev
from farloop.wire import messages as msg

pytestmark = pytest.mark.integration


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


class Resolver:
    """Stands in for the system's: names of these tests have these addresses, after `delay_s`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, delay_s: float = 0.0, **hosts: tuple[str, ...]) -> None:
        self.asked: list[str] = []
        self._hosts, self._delay_s, self._system = hosts, delay_s, addresses.getaddrinfo
        monkeypatch.setattr(addresses, "getaddrinfo", self._look_up)

    async def _look_up(self, host: str) -> list[Any]:
        if host not in self._hosts:
            return await self._system(host)
        self.asked.append(host)
        await asyncio.sleep(self._delay_s)
        return [("", "", 0, "", (address, 0)) for address in self._hosts[host]]


def test_a_name_is_looked_up_once_for_all_lanes_and_a_slow_name_server_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(addresses, "SLOW_LOOKUP_S", 0.1)
    resolver, port = Resolver(monkeypatch, delay_s=0.3, oslo=("127.0.0.2",)), free_port()
    with station(f"tcp://127.0.0.2:{port}") as there:
        with linked(LinkConfig(coordinator=f"tcp://oslo:{port}", lanes=8)) as (link, delivered):
            wait_for(delivered, msg.Welcome)
            until(lambda: link.num_lanes == 8 or there.turned_away)
        assert resolver.asked == ["oslo"]
    assert "slow name server host=oslo took=0." in caplog.text


def test_all_lanes_take_the_first_address_that_answers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    with station(f"tcp://127.0.0.2:{port}") as there:
        Resolver(monkeypatch, oslo=("127.0.0.3", "127.0.0.2"))
        with linked(LinkConfig(coordinator=f"tcp://oslo:{port}", lanes=3)) as (link, delivered):
            wait_for(delivered, msg.Welcome)
            until(lambda: link.num_lanes == 3)
            assert "no link" not in caplog.text, "an address that refuses costs no session"
            there.break_lane(0)
            wait_for(delivered, wire_ev.SessionClosed)
            wait_for(delivered, msg.Welcome)
            assert {str(address.host) for address in link._dialer.unreachable} == {"127.0.0.3"}
    with linked(LinkConfig(coordinator=f"tcp://oslo:{port}")) as (_, delivered):
        closed = wait_for(delivered, wire_ev.SessionClosed)
        assert f"cannot connect to 127.0.0.3:{port}, 127.0.0.2:{port}: is the" in closed.detail


@needs_ipv6
@pytest.mark.parametrize("bind", ["[::]", "*", "[::1]"])
def test_nodes_of_both_families_reach_a_coordinator(bind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With keys, and blobs from an address of their own."""
    Resolver(monkeypatch, oslo=("::1",), lima=("::1", "127.0.0.1"))
    server_key, server_pub = key_files(tmp_path / "server", "coordinator")
    key, _ = key_files(tmp_path / "allow", "a")
    port = free_port()
    with station(f"tcp://{bind}:{port}", key=server_key, allow=tmp_path / "allow") as there:
        for host, source, seen in (
            ("[::1]", "::1", "::1"), ("oslo", "", "::1"), ("lima", "", "::1"), ("127.0.0.1", "127.0.0.2", "127.0.0.1"),
        ):  # fmt: skip
            if bind == "[::1]" and seen != "::1":
                continue
            config = LinkConfig(
                coordinator=f"tcp://{host}:{port}", key=key, server_key=server_pub, bulk_source=source, lanes=1
            )
            with linked(config) as (link, delivered):
                wait_for(delivered, msg.Welcome)
                until(lambda link=link: link.num_lanes == 1 and there.route(1) is not None)
                assert [there.host(lane) for lane in (0, 1)] == [seen, source or seen]


@needs_ipv6
def test_stages_of_a_pipeline_reach_each_other_by_ipv6_and_by_the_second_address_of_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Resolver(monkeypatch, oslo=("127.0.0.1", "::1"))
    nodes = Nodes(layout_of(["a", "b"], ["ab"]), bind="tcp://[::1]:0")
    assert all(address.startswith("tcp://[::1]:") for address in nodes.addresses.values())
    for name, executor in nodes.executors.items():
        named = {other: to.replace("[::1]", "oslo") for other, to in nodes.addresses.items() if other != name}
        executor.link.dial(named)

    def work(name: str, executor: Any, part: Any) -> None:
        executor.step(microbatches(1, 0) if name == "a" else [])

    nodes.train(work)


@needs_ipv6
@pytest.mark.slow
def test_a_run_over_ipv6_from_its_settings_to_its_end(new_run: NewRun) -> None:
    run = new_run(steps=8, h=4, tau=1, nodes=1)
    run.tables["coordinator"] |= {"bind": f"tcp://[::]:{run.port}", "http": f"[::1]:{run.http}", "insecure": True}
    node_http = free_port()
    node = {"name": "a", "coordinator": f"tcp://[::1]:{run.port}", "http": f"[::1]:{node_http}", "threads": 1}
    node_toml = run.folder / "a.toml"
    node_toml.write_text(dump_toml({"node": node, "data": run.tables["data"]}))

    def farloop(*words: str) -> str:
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output
        return result.output

    farloop("config", "check", str(run.write_toml()))
    assert f"[::]:{run.port} is free" in farloop("doctor", str(run.write_toml()))
    coordinator = run.start_coordinator()
    run.until_said(coordinator.log, f"status http://[::1]:{run.http}")
    assert "waiting" in farloop("status", "--url", f"[::1]:{run.http}")
    assert f"[::1]:{run.port} accepts connections" in farloop("doctor", str(node_toml), "--url", f"[::1]:{run.http}")
    run.start("node-a", "-m", "farloop.cli.main", "node", str(node_toml))
    assert_all_agree(run, run.until_done(), "a")


# --- the size of packets


def tried(num_bytes: int, **config: Any) -> str:
    return asyncio.run(try_link(LinkConfig(**config), num_bytes, 10.0))


def test_a_trial_sends_bytes_both_ways_and_names_a_key_that_is_not_known(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    server_key, server_pub = key_files(tmp_path / "server", "coordinator")
    known, _ = key_files(tmp_path / "allow", "a")
    stranger, _ = key_files(tmp_path / "elsewhere", "b")
    with station(endpoint, key=server_key, allow=tmp_path / "allow") as there:
        for num_bytes in (0, 16_000):
            assert tried(num_bytes, coordinator=endpoint, key=known, server_key=server_pub) == ""
        assert there.turned_away == [] and there.heard.empty()
        assert "allow-list" in tried(0, coordinator=endpoint, key=stranger, server_key=server_pub)
        assert "encryption is on at one end only" in tried(0, coordinator=endpoint)
        _, other_pub = key_files(tmp_path / "other", "coordinator")
        assert "wrong server_key" in tried(0, coordinator=endpoint, key=known, server_key=other_pub)
    assert "is the coordinator running" in tried(0, coordinator=endpoint)


@pytest.fixture
def small_mtu() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, with an MTU of 1,500 and one of 1,300 between them: bridges drop
    what is larger without a word."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip (iproute2)")
    hub, *ends = (f"farloop-{os.getpid()}-{name}" for name in ("hub", "node", "coordinator"))

    def ip(words: str) -> None:
        subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=30)

    try:
        try:
            ip(f"netns add {hub}")
            ip(f"-n {hub} link add m1 mtu 1300 type veth peer name m2 mtu 1300")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for number, end in enumerate(ends, start=1):
            ip(f"netns add {end}")
            ip(f"-n {end} link set lo up")
            ip(f"-n {hub} link add br{number} type bridge")
            ip(f"-n {hub} link add p{number} type veth peer name eth0 netns {end}")
            for port in ("p", "m"):
                ip(f"-n {hub} link set {port}{number} master br{number} up")
            ip(f"-n {hub} link set br{number} up")
            ip(f"-n {end} addr add 10.77.0.{number}/24 dev eth0")
            ip(f"-n {end} link set eth0 gso_max_segs 1 up")  # bridges pass what is yet to be cut into packets
        yield ends[0], ends[1]
    finally:
        for name in (hub, *ends):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)


@pytest.mark.slow
def test_node_doctor_and_status_name_the_mtu_that_loses_packets(small_mtu: tuple[str, str], new_run: NewRun) -> None:
    run = new_run(steps=1000, h=4, tau=1, nodes=1)
    run.tables["coordinator"] |= {"bind": f"tcp://*:{run.port}", "http": "", "insecure": True}
    node = {"name": "a", "coordinator": f"tcp://10.77.0.2:{run.port}", "insecure": True, "threads": 1}
    (run.folder / "a.toml").write_text(dump_toml({"node": node, "data": run.tables["data"]}))

    def start(end: str, *words: str) -> Daemon:
        inside = "import os, sys; os.execvp('ip', ['ip', 'netns', 'exec', *sys.argv[1:]])"
        return run.start(words[0], "-c", inside, end, sys.executable, "-m", "farloop.cli.main", *words)

    coordinator = start(small_mtu[1], "coordinator", str(run.write_toml()))
    run.until_said(coordinator.log, "serving")
    begun = start(small_mtu[0], "node", "a.toml")
    run.until_said(begun.log, "large packets are lost and small ones pass")
    run.until_said(coordinator.log, 'why="mtu of a: to it, large packets are lost and small ones pass')
    doctor = start(small_mtu[0], "doctor", "a.toml")
    assert run.until_ended(doctor) == 2
    assert "16.0 kB do not come back: large packets are lost" in doctor.said and "mtu 1280" in doctor.said
