"""Whether an address leads back: on real sockets."""

import socket

import pytest

from farloop.cli.address import Address
from farloop.cli.doctor_network import dial_back

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
    assert finding.level == "warn" and "forward the port" in finding.mend
