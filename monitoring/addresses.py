"""Hosts and ports: parse and print them, look names up, and choose the address family of a socket.

ZeroMQ looks names up itself, for every socket again and one at a time, and takes the first address that it finds. So
names are looked up here, once, and sockets get addresses.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import re
import socket
import time
from dataclasses import dataclass
from typing import Any, Final

_log = logging.getLogger(__name__)

ANY_HOST: Final = ("*", "0.0.0.0", "::")
SLOW_LOOKUP_S: Final = 1.0  # a lookup that takes longer is logged: it delays every reconnection


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    host: str  # without the brackets of IPv6
    port: int

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET6 if self.is_ipv6 else socket.AF_INET

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be at the other end."""
        return self.host == "localhost" or (is_ip(self.host) and ipaddress.ip_address(self.host).is_loopback)

    @property
    def reachable_host(self) -> str:
        """The host by which this machine reaches a listener on the address."""
        return "127.0.0.1" if self.host in ANY_HOST else self.host

    def overlaps(self, other: "Address") -> bool:
        """Whether two listeners on one machine cannot have both addresses."""
        if self.port != other.port or self.port == 0:
            return False
        hosts = {self.host, other.host}
        if "0.0.0.0" in hosts:  # every interface, of IPv4 alone
            return not any(":" in host and host != "::" for host in hosts)
        same = len(hosts) == 1 or not hosts.isdisjoint(ANY_HOST)
        return same or ("localhost" in hosts and self.is_loopback and other.is_loopback)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"


def parse_tcp(text: str, *, listens: bool = False) -> Address:
    """The address in `tcp://host:port`. `listens`: it will be bound, so port 0 (any free one) and host * (all
    interfaces) are valid. Raises ValueError: one sentence."""
    if not text.startswith("tcp://"):
        scheme, separator, _ = text.partition("://")
        near = f"; did you mean tcp://{text}?" if not separator and ":" in text else ""
        raise ValueError(f"expected tcp://host:port, as tcp://10.0.0.5:7700; got {text!r}{near}" if not separator else
                         f"farloop speaks tcp:// only, not {scheme}://")  # fmt: skip
    address = parse_host_port(text.removeprefix("tcp://"), listens=listens)
    if not listens and address.host in ANY_HOST:
        raise ValueError(
            f"{address.host} means every interface, so a node cannot connect to it; name the coordinator's host"
        )
    return address


def parse_each_tcp(text: str, *, listens: bool = False) -> list[Address]:
    """The addresses in `tcp://a:7700, tcp://b:7700`: one or several. As `parse_tcp`."""
    return [parse_tcp(part.strip(), listens=listens) for part in text.split(",")]


def parse_host_port(text: str, *, listens: bool = False) -> Address:
    """The address in `host:port`; an IPv6 host stands in brackets. As `parse_tcp`."""
    host, separator, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    known = is_ip(host) and ":" in host if bracketed else re.fullmatch(r"[^\s:/@\[\]]+", host)
    try:
        host.encode("idna")  # as the resolver does: a..b is no name
    except UnicodeError:
        known = None
    if not separator or not known:
        raise ValueError(f"expected host:port, as 127.0.0.1:7700 or [::1]:7700; got {text!r}")
    least = 0 if listens else 1
    if not port.isascii() or not port.isdecimal() or not least <= int(port) <= 65535:
        raise ValueError(f"{port!r} is not a port; take one from {least} to 65535")
    return Address(host=host, port=int(port))


def check_listening(text: str) -> None:
    """Raises ValueError unless it is empty, or `host:port` where something can listen."""
    if text:
        parse_host_port(text, listens=True)


def check_tcp_listening(text: str) -> None:
    """Raises ValueError unless something can listen at `tcp://host:port`."""
    parse_tcp(text, listens=True)


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def plain_host(host: str) -> str:
    """An IPv4 address as such, also where a socket of both families shows it as an IPv6 address."""
    return host.removeprefix("::ffff:")


def same_host(one: str, other: str) -> bool:
    """Whether two spellings are one address."""
    return plain_host(one).partition("%")[0] == plain_host(other).partition("%")[0]


def network_of(host: str) -> str:
    """What limits per address count by: an IPv4 address, or the /64 network that one IPv6 host has to itself."""
    host = plain_host(host)
    if ":" not in host or not is_ip(host) or ipaddress.ip_address(host).is_loopback:
        return host
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))


# --- Lookups


async def look_up(address: Address, limit_s: float) -> list[Address]:
    """The addresses of a host, the preferred one first. Raises OSError with one sentence if there is none in time."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            found = await getaddrinfo(address.host)
    except TimeoutError:
        raise OSError(f"no name server answers for {address.host!r} within {limit_s:g} s") from None
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise OSError(f"the host {address.host!r} has no address: {why}") from error
    if (took_s := time.monotonic() - started) > SLOW_LOOKUP_S:
        _log.warning("slow name server host=%s took=%.1fs note='it delays every connection'", address.host, took_s)
    return _addresses(found, address.port)


async def getaddrinfo(host: str) -> list[Any]:
    """What the system's resolver finds, without blocking the loop."""
    return await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)


def resolved(address: Address) -> Address:
    """The address that a socket binds: * is every interface, of both families if the machine has IPv6."""
    if address.host == "*":
        return dataclasses.replace(address, host="::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    with contextlib.suppress(OSError):  # the name of a network card, or of nothing: binding tells
        return _addresses(socket.getaddrinfo(address.host, None, type=socket.SOCK_STREAM), address.port)[0]
    return address


def bound_socket(address: Address) -> socket.socket:
    """A TCP socket that is bound to the address; one on `::` takes IPv4, too. Raises OSError, OverflowError."""
    address = resolved(address)
    bound = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.is_ipv6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind((address.host, address.port))
    except BaseException:
        bound.close()
        raise
    return bound


def _addresses(found: list[Any], port: int) -> list[Address]:
    """As `getaddrinfo` returns them. It has the zone of a link-local address beside its text."""
    hosts = [(str(end[0]), f"%{end[3]}" if len(end) > 3 and end[3] else "") for *_, end in found]
    return [Address(host=host if "%" in host else host + zone, port=port) for host, zone in dict.fromkeys(hosts)]


# --- The address that connections leave from


def check_source(source: str, host: str = "") -> None:
    """Raises ValueError unless connections of this machine can leave from the address, those to `host` where that is an
    IP address. No network need be up."""
    try:
        found = ipaddress.ip_address(source)
    except ValueError:
        raise ValueError(f"{source!r} is not an IP address, as 10.0.0.5") from None
    to, why = ipaddress.ip_address(host) if is_ip(host) else None, ""
    if to is not None and to.version != found.version:
        why = f"is an IPv{found.version} address, and the coordinator {host} an IPv{to.version} address"
    elif found.is_unspecified or found.is_multicast or (found.is_reserved and not found.is_loopback):
        why = "is not the address of one network card"
    elif found.is_loopback and to is not None and not to.is_loopback:
        why = f"never leaves this machine, and the coordinator {host} is beyond it"
    else:
        try:
            with socket.socket(Address(host=source, port=0).family) as trial:
                trial.bind((source, 0))
        except OSError as error:
            why = f"is not an address of this machine: {error.strerror}"
    if why:
        raise ValueError(f"{source} {why}; the nearest is {_own_address(host)}")


def _own_address(host: str) -> str:
    """That from which the system connects to `host`, or to the world unless that is an IP address. It sends nothing:
    UDP connects by the table of routes alone."""
    to = Address(host=host if is_ip(host) else "192.0.2.1", port=9)
    with contextlib.suppress(OSError), socket.socket(to.family, socket.SOCK_DGRAM) as trial:
        trial.connect((to.host, to.port))
        return str(trial.getsockname()[0])
    return "::1" if to.is_ipv6 else "127.0.0.1"
