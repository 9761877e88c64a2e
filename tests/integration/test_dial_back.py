"""Whether an address leads back: on real sockets."""

import asyncio
import socket

import pytest

from farloop.cli.doctor import dial_back
from farloop.config.sources import Address
from farloop.coordinator.net.link_monitor import reaches

pytestmark = pytest.mark.integration


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_an_address_of_this_machine_leads_back() -> None:
    finding = dial_back(Address(host="127.0.0.1", port=free_port()))
    assert finding.level == "ok" and "leads back" in finding.detail


def test_a_port_that_is_taken_is_dialled_all_the_same() -> None:
    with socket.create_server(("", 0)) as server:
        finding = dial_back(Address(host="127.0.0.1", port=server.getsockname()[1]))
    assert finding.level == "ok" and "is taken" in finding.detail


def test_an_address_that_nobody_reaches_is_a_warning_with_its_mend() -> None:
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
def test_who_has_no_key_has_nobody_dialled_but_itself(host: str, only: str | None, reached: bool | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://{host}:{server.getsockname()[1]}"
        assert asyncio.run(reaches(address, only)) is reached


def test_a_port_where_nobody_listens_is_not_reached_and_nonsense_is_not_tried() -> None:
    assert asyncio.run(reaches(f"tcp://127.0.0.1:{free_port()}", None)) is False
    for nonsense in ("", "tcp://", "tcp://host", "tcp://host:0", "tcp://host:99999", "tcp://host:²"):
        assert asyncio.run(reaches(nonsense, None)) is None
