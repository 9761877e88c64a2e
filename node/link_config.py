"""Where the coordinator is, and with which key to knock: what a node's link is told."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from farloop.monitoring.connection import congestion_refused
from farloop.node.errors import BadAddress
from farloop.wire.inventory import NOTHING, Inventory
from farloop.wire.limits import Limits, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Settings of a link. Raises ValueError for half a pair of keys, and for a congestion control out of reach."""

    coordinator: str
    """ZeroMQ address, as tcp://host:port."""
    key: Path | None = None
    """This node's secret key file; CURVE is on with it."""
    server_key: Path | None = None
    """The coordinator's public key file; goes with `key`."""
    congestion: str = ""
    """Congestion control of its TCP connections, as `bbr`; the system's unless given."""
    inventory: Inventory = NOTHING
    """What it tells of its machine."""
    limits: Limits = field(default_factory=Limits)
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        if (self.key is None) != (self.server_key is None):
            raise ValueError("key and server_key go together: with one alone nothing would be encrypted")
        if self.congestion and (refused := congestion_refused(self.congestion)):
            raise ValueError(refused)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of tcp://host:port. Raises BadAddress."""
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]*]+):([0-9]{1,5})", address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise BadAddress(f"the coordinator's address is tcp://host:port, as tcp://10.0.0.5:7700, not {address!r}")
    return match[1].strip("[]"), int(match[2])
