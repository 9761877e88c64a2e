"""Looking at real TCP connections through descriptors that belong to others, and dialling addresses back."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_run
from plain_runs import plain_hello

from farloop.cli.doctor import dial_back
from farloop.coordinator.daemon import Coordinator
from farloop.coordinator.net.link_monitor import reaches
from farloop.monitoring.addresses import Address
from farloop.monitoring.tcp_connection import check_congestion, choose_congestion, congestion_of, tcp_info
from farloop.node.link import LinkConfig
from farloop.node.zmq_dealer import LinkThread
from farloop.wire.link_measurement import INFO_BYTES, parse

pytestmark = [pytest.mark.integration, pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            yield client, accepted


def test_the_kernel_tells_of_a_connection_and_the_owner_keeps_it(pair: tuple[socket.socket, socket.socket]) -> None:
    client, accepted = pair
    for _ in range(5):
        client.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(accepted.recv(1 << 20))
    told = parse(tcp_info(client.fileno(), "127.0.0.1", INFO_BYTES), congestion_of(client.fileno(), "127.0.0.1"))
    assert told is not None
    assert 0 < told.least_rtt_s <= told.rtt_s < 1.0
    assert told.segments > 0 and told.congestion
    accepted.sendall(b"still here")
    assert client.recv(100) == b"still here"


def test_a_descriptor_that_is_another_sockets_by_now_is_left_alone(pair: tuple[socket.socket, socket.socket]) -> None:
    client, _ = pair
    assert tcp_info(client.fileno(), "10.1.2.3", INFO_BYTES) == b""
    assert not choose_congestion(client.fileno(), "10.1.2.3", "reno")
    reader, writer = os.pipe()
    try:
        assert tcp_info(reader, "127.0.0.1", INFO_BYTES) == b""
    finally:
        os.close(reader)
        os.close(writer)
    assert tcp_info(reader, "127.0.0.1", INFO_BYTES) == b""  # closed


def test_congestion_control_is_chosen_per_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    client, _ = pair
    check_congestion("reno")
    assert choose_congestion(client.fileno(), "127.0.0.1", "reno")
    assert congestion_of(client.fileno(), "127.0.0.1") == "reno"


def test_one_that_may_not_be_chosen_is_refused_with_those_that_may() -> None:
    with pytest.raises(ValueError, match=r"^'warp9': [^\n]*reno[^\n]*$"):
        check_congestion("warp9")


def test_a_nodes_connections_use_the_control_that_it_chose(tmp_path: Path) -> None:
    """Over real sockets, both ends: the kernel says so of each."""
    store = tiny_run.begin(tmp_path / "state", tiny_run.plan(steps=8, h=2, nodes=3))
    try:
        with tiny_run.serving(tmp_path / "state", store, congestion="reno", probe_bytes=0) as coordinator:
            config = LinkConfig(coordinator=coordinator.link.endpoint, congestion="reno")
            link = LinkThread(config)
            link.start(plain_hello, lambda event: None)
            try:
                tiny_run.until(lambda: sorted(controls(coordinator)) == ["reno", "reno"])
            finally:
                link.close()
    finally:
        store.close()


def controls(coordinator: Coordinator) -> list[str]:
    seen = json.loads(coordinator.observer.status_json).get("inventory", {"links": []})
    return [link["congestion"] for link in seen["links"]]


# --- whether an address leads back


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_an_address_of_this_machine_leads_back() -> None:
    finding = dial_back(Address(host="127.0.0.1", port=free_port()))
    assert finding.level == "ok" and "reaches this machine" in finding.detail


def test_a_port_that_is_taken_is_dialled_all_the_same() -> None:
    with socket.create_server(("", 0)) as server:
        finding = dial_back(Address(host="127.0.0.1", port=server.getsockname()[1]))
    assert finding.level == "ok" and "is taken" in finding.detail


def test_an_address_that_cannot_be_reached_is_a_warning_with_its_mend() -> None:
    finding = dial_back(Address(host="node.invalid", port=free_port()))
    assert finding.level == "warn" and "forward the port" in finding.fix


@pytest.mark.parametrize(
    ("host", "only", "reached"),
    [
        ("127.0.0.1", None, True),
        ("127.0.0.1", "127.0.0.1", True),
        ("[::ffff:127.0.0.1]", "127.0.0.1", True),
        ("127.0.0.1", "10.9.8.7", None),
        ("localhost", "127.0.0.1", None),
    ],
)
def test_without_a_key_only_the_own_address_is_dialled(host: str, only: str | None, reached: bool | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://{host}:{server.getsockname()[1]}"
        assert asyncio.run(reaches(address, only)) is reached


def test_a_port_without_a_listener_is_not_reached_and_nonsense_is_not_tried() -> None:
    assert asyncio.run(reaches(f"tcp://127.0.0.1:{free_port()}", None)) is False
    for nonsense in ("", "tcp://", "tcp://host", "tcp://host:0", "tcp://host:99999", "tcp://host:²"):
        assert asyncio.run(reaches(nonsense, None)) is None
