"""Addresses as people write them, `tcp://host:port` and `host:port`, and whether only this machine can reach them."""

import ipaddress
from dataclasses import dataclass

ANY_HOST = ("*", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A host and a port."""

    host: str
    """Without the brackets of IPv6."""
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether nobody outside this machine is at the other end."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def reachable_host(self) -> str:
        """Where this machine itself finds what listens here."""
        return "127.0.0.1" if self.host in ANY_HOST else self.host

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_tcp(text: str, *, listens: bool = False) -> Address:
    """The address in `tcp://host:port`.

    Args:
        listens: it is bound here, so port 0 (any free one) and host * (all interfaces) make sense.

    Raises:
        ValueError: one sentence.
    """
    if not text.startswith("tcp://"):
        scheme, separator, _ = text.partition("://")
        near = f"; did you mean tcp://{text}?" if not separator and ":" in text else ""
        raise ValueError(f"tcp://host:port is wanted, not {text!r}{near}" if not separator else
                         f"farloop speaks tcp:// only, not {scheme}://")  # fmt: skip
    address = parse_host_port(text.removeprefix("tcp://"), listens=listens)
    if not listens and address.host in ANY_HOST:
        raise ValueError(f"{address.host} means every interface and is no place to dial; name the coordinator's host")
    return address


def parse_host_port(text: str, *, listens: bool = False) -> Address:
    """The address in `host:port`. As `parse_tcp`."""
    host, separator, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if not separator or not host or (":" in host and not bracketed):
        example = "host:port is wanted, as 127.0.0.1:7700 or [::1]:7700"
        raise ValueError(f"{example}, not {text!r}")
    least = 0 if listens else 1
    if not port.isascii() or not port.isdecimal() or not least <= int(port) <= 65535:
        raise ValueError(f"{port!r} is no port; take one from {least} to 65535")
    return Address(host=host, port=int(port))
