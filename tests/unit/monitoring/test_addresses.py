"""Covers `monitoring/addresses.py`."""

import asyncio
from typing import Any

import pytest

from farloop.monitoring import addresses
from farloop.monitoring.addresses import Address, look_up, network_of, parse_host_port, parse_tcp, resolved, same_host


def test_addresses_are_parsed() -> None:
    for host in ("127.0.0.1", "127.8.9.10", "localhost", "[::1]"):
        assert parse_tcp(f"tcp://{host}:7700").is_loopback
    for host in ("10.0.0.1", "oslo.example", "[2001:db8::1]", "localhost.example"):
        assert not parse_tcp(f"tcp://{host}:7700").is_loopback
    every = parse_tcp("tcp://*:7700", listens=True)
    assert (every.is_loopback, every.reachable_host) == (False, "127.0.0.1")
    assert parse_host_port("127.0.0.1:0", listens=True) == Address(host="127.0.0.1", port=0)
    assert str(parse_host_port("[::1]:9700")) == "[::1]:9700"


@pytest.mark.parametrize(
    ("here", "there", "overlap"),
    [
        ("*:1", "127.0.0.1:1", True), ("[::]:1", "127.0.0.1:1", True), ("0.0.0.0:1", "[::]:1", True),
        ("*:1", "[::1]:1", True), ("0.0.0.0:1", "[::1]:1", False), ("[::1]:1", "127.0.0.1:1", False),
        ("localhost:1", "[::1]:1", True), ("*:0", "*:0", False), ("*:1", "*:2", False),
    ],
)  # fmt: skip
def test_listeners_that_cannot_both_have_their_addresses(here: str, there: str, overlap: bool) -> None:
    one, other = (parse_host_port(text, listens=True) for text in (here, there))
    assert one.overlaps(other) == other.overlaps(one) == overlap


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("127.0.0.1:7700", "did you mean tcp://127.0.0.1:7700"),
        ("ipc:///tmp/x", "tcp:// only, not ipc://"),
        ("tcp://oslo", "expected host:port"),
        ("oslo", "expected tcp://host:port, as tcp://10"),
        ("tcp://oslo:7700/", "'7700/' is not a port"),
        ("tcp://two words:7700", "expected host:port"),
        ("tcp://[fe80::zz]:7700", "expected host:port"),
        ("tcp://oslo:http", "'http' is not a port"),
        ("tcp://oslo:٧٧", "is not a port"),
        ("tcp://oslo:0", "from 1 to 65535"),
        ("tcp://0.0.0.0:7700", "cannot connect to it"),
        ("tcp://::1:9700", r"as 127\.0\.0\.1:7700 or \[::1\]:7700"),
    ],
)
def test_a_wrong_address_is_answered_with_a_right_one(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_tcp(text)


def test_an_address_has_several_spellings() -> None:
    assert same_host("::ffff:10.0.0.1", "10.0.0.1") and same_host("fe80::1%eth0", "fe80::1")
    assert not same_host("10.0.0.1", "10.0.0.2")


def test_limits_count_an_ipv6_host_by_the_network_that_it_has_to_itself() -> None:
    assert network_of("2001:db8:1:2::1") == network_of("2001:db8:1:2:ffff::9") == "2001:db8:1:2::/64"
    assert network_of("fe80::1%eth0") == "fe80::/64" and network_of("::1") == "::1"
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") == "10.0.0.1" and network_of("?") == "?"


def test_every_interface_is_of_both_families_where_the_machine_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for has, host in ((True, "::"), (False, "0.0.0.0")):
        monkeypatch.setattr("socket.has_dualstack_ipv6", lambda has=has: has)
        assert resolved(Address(host="*", port=7)) == Address(host=host, port=7)


def found_by(monkeypatch: pytest.MonkeyPatch, answer: Any) -> Any:
    """What a lookup returns when the resolver gives, or raises, this answer."""

    async def resolver(host: str) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return await answer() if callable(answer) else answer

    monkeypatch.setattr(addresses, "getaddrinfo", resolver)
    return asyncio.run(look_up(Address(host="oslo", port=7), 0.1))


def test_a_name_is_looked_up_once_for_all_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [("", "", 0, "", end) for end in (("2001:db8::1", 0, 0, 0), ("fe80::1", 0, 0, 3), ("10.0.0.1", 0))]
    hosts = [str(address) for address in found_by(monkeypatch, records + records)]
    assert hosts == ["[2001:db8::1]:7", "[fe80::1%3]:7", "10.0.0.1:7"]


def test_a_name_that_is_not_found_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer, line in (
        (OSError(2, "Name or service not known"), "the host 'oslo' has no address: Name or service not known"),
        (UnicodeError("label too long"), "the host 'oslo' has no address: label too long"),
        (asyncio.Event().wait, "no name server answers for 'oslo' within 0.1 s"),
    ):
        with pytest.raises(OSError, match=f"^{line}$"):
            found_by(monkeypatch, answer)
