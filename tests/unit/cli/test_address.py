"""Addresses as people write them."""

import pytest

from farloop.config.sources import Address, parse_host_port, parse_tcp


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "[::1]"])
def test_addresses_of_this_machine_are_loopback(host: str) -> None:
    assert parse_tcp(f"tcp://{host}:7700").is_loopback


@pytest.mark.parametrize("host", ["10.0.0.1", "oslo.example", "[2001:db8::1]", "localhost.example"])
def test_all_others_are_not(host: str) -> None:
    assert not parse_tcp(f"tcp://{host}:7700").is_loopback


def test_every_interface_is_a_place_to_listen_and_none_to_dial() -> None:
    address = parse_tcp("tcp://*:7700", listens=True)
    assert not address.is_loopback
    assert address.reachable_host == "127.0.0.1"
    with pytest.raises(ValueError, match="no place to dial"):
        parse_tcp("tcp://0.0.0.0:7700")


def test_port_0_is_only_for_listening() -> None:
    assert parse_host_port("127.0.0.1:0", listens=True) == Address(host="127.0.0.1", port=0)
    with pytest.raises(ValueError, match="from 1 to 65535"):
        parse_host_port("127.0.0.1:0")


def test_ipv6_is_written_in_brackets_and_comes_back_so() -> None:
    assert str(parse_host_port("[::1]:9700")) == "[::1]:9700"
    with pytest.raises(ValueError, match=r"as 127\.0\.0\.1:7700 or \[::1\]:7700"):
        parse_host_port("::1:9700")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("127.0.0.1:7700", "did you mean tcp://127.0.0.1:7700"),
        ("ipc:///tmp/x", "tcp:// only, not ipc://"),
        ("tcp://oslo", "host:port is wanted"),
        ("tcp://oslo:http", "'http' is no port"),
        ("tcp://oslo:70000", "from 1 to 65535"),
        ("tcp://oslo:٧٧", "is no port"),
    ],
)
def test_a_wrong_address_is_answered_with_a_right_one(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_tcp(text)
