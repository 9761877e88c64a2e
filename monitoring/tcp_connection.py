"""Reads TCP_INFO of a connection that ZeroMQ owns, through its file descriptor, and sets its congestion control.

ZeroMQ has no option for either, but reports the descriptor of a connection when it opens and with every message. It may
close the descriptor at any moment, and the number may then belong to another socket. So each call briefly duplicates
the descriptor and first checks the peer. One confusion remains possible: a number that went to another connection with
the same peer, so that two lanes of one node are briefly mixed up.
"""

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Final

from farloop.monitoring.addresses import plain_host, same_host

_INFO: Final = getattr(socket, "TCP_INFO", None)
_CONGESTION: Final = getattr(socket, "TCP_CONGESTION", None)
_NAME_BYTES: Final = 16


def end_of(descriptor: int) -> tuple[str, int]:
    """Address and port of the peer; ("", 0) without one. Needs no descriptor of its own."""
    with contextlib.suppress(OSError), _as_it_is(descriptor) as connection:
        peer = connection.getpeername()
        return (plain_host(str(peer[0])), int(peer[1])) if isinstance(peer, tuple) else ("", 0)
    return "", 0


def hang_up(descriptor: int, host: str, port: int) -> bool:
    """Shut the connection to this address and port down, if the descriptor still belongs to it; returns whether it did.
    Its owner sees the end of the stream, and closes it."""
    with contextlib.suppress(OSError), _as_it_is(descriptor) as connection:
        peer = connection.getpeername()
        if isinstance(peer, tuple) and (plain_host(str(peer[0])), int(peer[1])) == (host, port):
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def tcp_info(descriptor: int, host: str, num_bytes: int) -> bytes:
    """TCP_INFO of the connection to `host`; empty without one, or where the system cannot read it."""
    if _INFO is None:
        return b""
    with contextlib.suppress(OSError), _borrowed(descriptor, host) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, _INFO, num_bytes)
    return b""


def congestion_of(descriptor: int, host: str) -> str:
    """Its congestion control, as `cubic`; empty where the system cannot read it."""
    if _CONGESTION is None:
        return ""
    with contextlib.suppress(OSError), _borrowed(descriptor, host) as connection:
        return connection.getsockopt(socket.IPPROTO_TCP, _CONGESTION, _NAME_BYTES).partition(b"\0")[0].decode()
    return ""


def choose_congestion(descriptor: int, host: str, name: str) -> bool:
    """Have the connection use this one; whether it does."""
    if _CONGESTION is None:
        return False
    with contextlib.suppress(OSError), _borrowed(descriptor, host) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, _CONGESTION, name.encode())
        return True
    return False


def check_congestion(name: str) -> None:
    """Raises ValueError, one line, where this process may not choose it; empty is the system's choice."""
    if not name:
        return
    if _CONGESTION is None:
        raise ValueError(f"{name!r}: this system does not support the choice; leave it out")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.IPPROTO_TCP, _CONGESTION, name.encode())
    except OSError as error:
        known = _allowed() or "what the kernel has"
        fix = f"choose one of {known}, or have an administrator add it to net.ipv4.tcp_allowed_congestion_control"
        raise ValueError(f"{name!r}: {(error.strerror or str(error)).lower()}; {fix}") from None


def _allowed() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/net/ipv4/tcp_allowed_congestion_control") as file:
        return ", ".join(file.read().split())
    return ""


@contextlib.contextmanager
def _as_it_is(descriptor: int) -> Iterator[socket.socket]:
    """Without a duplicate, for where there may be none left. Raises OSError unless it is a socket."""
    connection = socket.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


@contextlib.contextmanager
def _borrowed(descriptor: int, host: str) -> Iterator[socket.socket]:
    """Raises OSError unless it is a connection to `host`."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        peer = connection.getpeername()
        if not isinstance(peer, tuple) or not same_host(str(peer[0]), host):
            raise OSError(f"connected to {peer}, not to {host}")
        yield connection
