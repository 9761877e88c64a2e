"""A thin link of its own: a process between a node and its coordinator that gives the way a rate and a round trip."""

import asyncio
import logging
import signal

from farloop.cli.address import parse_host_port
from farloop.cli.exit_codes import CommandError
from farloop.cli.relay import Link, LinkError, Relay

_log = logging.getLogger(__name__)

REPORT_S = 10.0
"""Between two lines about what crossed."""


def throttle(link: str, *, listen: str, to: str) -> None:
    """Relay until the first signal. Raises CommandError: an address or the link is none, or the port is taken."""
    try:
        here, there = parse_host_port(listen, listens=True), parse_host_port(to)
        thin = Link.parse(link)
    except (LinkError, ValueError) as error:
        raise CommandError(str(error)) from error
    relay = Relay(
        target_host=there.host,
        target_port=there.port,
        link=thin,
        listen_host="0.0.0.0" if here.host == "*" else here.host,
        listen_port=here.port,
    )
    try:
        asyncio.run(_relay(relay, to))
    except OSError as error:
        raise CommandError(f"cannot listen at {listen}: {error.strerror}; name another with --listen") from error


async def _relay(relay: Relay, to: str) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await relay.start()
    _log.info("relaying port=%d to=%s link=%s", relay.port, to, relay.link)
    while not stop.is_set():
        try:
            await asyncio.wait_for(stop.wait(), REPORT_S)
        except TimeoutError:
            _log.info("crossed up_bytes=%d down_bytes=%d", relay.bytes_up, relay.bytes_down)
    await relay.close()
