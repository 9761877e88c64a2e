"""Covers `node/zmq_dealer.py`."""

from pathlib import Path

import pytest

from farloop.node.errors import BadAddress
from farloop.node.zmq_dealer import LinkConfig, split_address


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("tcp://10.0.0.5:7700", "10.0.0.5", 7700),
        ("tcp://coordinator.example:1", "coordinator.example", 1),
        ("tcp://[::1]:65535", "::1", 65535),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "coordinator:7700",
        "tcp://coordinator",
        "tcp://:7700",
        "tcp://*:7700",
        "tcp://host:0",
        "tcp://host:65536",
        "tcp://host:7700/",
        "tcp://two words:7700",
        "tcp://::1:7700",
        "ipc:///tmp/socket",
        "tcp://host:７７００",
    ],
)
def test_anything_else_is_one_line_that_shows_how_it_looks(address: str) -> None:
    with pytest.raises(BadAddress, match=r"tcp://host:port, as tcp://10\.0\.0\.5:7700, not ") as caught:
        split_address(address)
    assert repr(address) in str(caught.value) and caught.value.exit_code == 2


def test_half_a_pair_of_keys_is_refused_and_never_means_no_encryption() -> None:
    """U."""
    LinkConfig(coordinator="tcp://a:1", key=Path("k"), server_key=Path("s"))
    with pytest.raises(ValueError, match="key and server_key go together"):
        LinkConfig(coordinator="tcp://a:1", key=Path("k"))
    with pytest.raises(ValueError, match="key and server_key go together"):
        LinkConfig(coordinator="tcp://a:1", server_key=Path("s"))
