"""The relay in real time on loopback: rate, round trip, sharing, back-pressure, half-close, cut and heal."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from farloop.local.relay import Link, Relay, RelayThread, _made_small

pytestmark = pytest.mark.integration

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(handler: Handler, link: str) -> AsyncIterator[Relay]:
    """A started relay in front of a server on loopback."""
    near_ends: list[asyncio.StreamWriter] = []

    async def remembered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near_ends.append(writer)
        with contextlib.suppress(ConnectionError):
            await handler(reader, writer)

    server = await asyncio.start_server(remembered, "127.0.0.1", 0)
    relay = Relay(target_host="127.0.0.1", target_port=server.sockets[0].getsockname()[1], link=Link.parse(link))
    await relay.start()
    try:
        yield relay
    finally:
        await relay.close()
        server.close()
        for writer in near_ends:
            writer.transport.abort()
        await asyncio.sleep(0.01)  # the transports close their sockets


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads to the end, then answers with the number of bytes: proves half-close both ways."""
    total = 0
    while data := await reader.read(65536):
        total += len(data)
    writer.write(str(total).encode())
    writer.close()


async def upload(port: int, num_bytes: int) -> float:
    """Seconds from the first byte to the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    started = time.monotonic()
    writer.write(bytes(num_bytes))
    writer.write_eof()
    assert int(await reader.read()) == num_bytes
    writer.close()
    await writer.wait_closed()
    return time.monotonic() - started


@pytest.mark.parametrize(("link", "num_bytes"), [("50mbit/20ms", 5_000_000), ("2mbit/1ms", 150_000)])
def test_a_transfer_takes_as_long_as_the_rate_says(link: str, num_bytes: int) -> None:
    async def run() -> float:
        async with serving(count, link) as relay:
            seconds = await upload(relay.port, num_bytes)
            assert relay.bytes_up == num_bytes
            assert 0 < relay.bytes_down < 10
            return seconds

    parsed = Link.parse(link)
    expected = num_bytes / parsed.bytes_per_s + 2 * parsed.rtt_s  # connecting, then the last byte and its answer
    assert asyncio.run(run()) == pytest.approx(expected, rel=0.15)


def test_connections_share_one_rate_evenly() -> None:
    async def run() -> list[float]:
        async with serving(count, "40mbit/0ms") as relay:
            return await asyncio.gather(*(upload(relay.port, 1_250_000) for _ in range(3)))

    seconds = asyncio.run(run())
    assert max(seconds) == pytest.approx(0.75, rel=0.15)
    assert min(seconds) > 0.6


def test_both_directions_have_a_rate_of_their_own() -> None:
    async def run() -> float:
        async with serving(echo, "40mbit/0ms") as relay:
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            started = time.monotonic()
            writer.write(bytes(2_500_000))
            await reader.readexactly(2_500_000)
            writer.close()
            return time.monotonic() - started

    assert asyncio.run(run()) == pytest.approx(0.5, rel=0.2)


def test_a_small_message_takes_one_round_trip_even_beside_a_bulk_transfer() -> None:
    async def ping(port: int) -> float:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        samples = []
        for index in range(6):
            started = time.monotonic()
            writer.write(b"ping")
            assert await reader.readexactly(4) == b"ping"
            if index:  # the first also pays for the connection
                samples.append(time.monotonic() - started)
        writer.close()
        return sorted(samples)[len(samples) // 2]

    async def run() -> tuple[float, float]:
        async with serving(echo, "40mbit/60ms") as relay:
            alone = await ping(relay.port)
            _, bulk = await asyncio.open_connection("127.0.0.1", relay.port)
            bulk.write(bytes(8_000_000))
            beside = await ping(relay.port)
            bulk.transport.abort()
            return alone, beside

    alone, beside = asyncio.run(run())
    assert 0.059 <= alone <= 0.060 * 3
    assert 0.059 <= beside <= 0.060 * 5, "behind the bulk it would wait for 8 MB at 40 Mbit/s: 1.6 s"


def test_small_writes_do_not_wait_for_an_acknowledgement() -> None:
    with socket.socket() as made:
        assert _made_small(made).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_reader_that_stops_stops_the_sender_and_no_other_connection() -> None:
    stalled, resumed = asyncio.Event(), asyncio.Event()

    async def first_byte_decides(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(1) == b"s":
            stalled.set()
            await resumed.wait()
        writer.write(b"here")
        writer.close()

    async def run() -> int:
        async with serving(first_byte_decides, "1gbit/10ms") as relay:
            _, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            writer.write(b"s" + bytes(32 << 20))
            await stalled.wait()
            await asyncio.sleep(0.5)
            reader, other = await asyncio.open_connection("127.0.0.1", relay.port)
            other.write(b"x")
            assert await reader.read() == b"here"
            other.close()
            writer.transport.abort()
            resumed.set()
            return relay.bytes_up

    # The kernel's and the stalled server's own buffers come on top of the relay's bound of 1.3 MB.
    assert asyncio.run(run()) < 16 << 20


def test_a_cut_drops_connections_and_refuses_new_ones_until_healed() -> None:
    async def run() -> None:
        async with serving(echo, "100mbit/2ms") as relay:
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
            relay.cut()
            await _expect_end(reader, writer)
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            await _expect_end(reader, writer)
            relay.heal()
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            writer.write(b"again")
            assert await reader.readexactly(5) == b"again"
            writer.close()

    async def _expect_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 2) == b""
        writer.close()

    asyncio.run(run())


def test_a_link_that_changes_does_so_for_connections_that_stand() -> None:
    async def run() -> list[float]:
        async with serving(echo, "100mbit/2ms") as relay:
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            seconds = []
            for link in ("100mbit/2ms", "100mbit/2s", "100mbit/2ms"):
                relay.change(Link.parse(link))
                begun = time.monotonic()
                writer.write(b"hello")
                assert await reader.readexactly(5) == b"hello"
                seconds.append(time.monotonic() - begun)
            writer.close()
            return seconds

    before, changed, after = asyncio.run(run())
    assert before < 2.0 <= changed
    assert after < changed


def test_a_target_that_is_not_there_ends_the_connection() -> None:
    async def run() -> bytes:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
            relay = Relay(target_host="127.0.0.1", target_port=taken.getsockname()[1], link=Link.parse("1gbit/0ms"))
            await relay.start()
            reader, writer = await asyncio.open_connection("127.0.0.1", relay.port)
            answer = await asyncio.wait_for(reader.read(), 2)
            writer.close()
            await relay.close()
            return answer

    with contextlib.suppress(ConnectionError):
        assert asyncio.run(run()) == b""


def test_a_relay_thread_serves_blocking_sockets_and_ends_with_its_block() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(target_host="127.0.0.1", target_port=server.getsockname()[1], link=Link.parse("1gbit/1ms"))
        running = RelayThread(relay)
        with running:
            with socket.create_connection(("127.0.0.1", relay.port), timeout=5) as near:
                near.sendall(b"up")
                far, _ = server.accept()
                with far:
                    assert far.recv(2) == b"up"
                    running.cut(relay)
                    far.settimeout(5)
                    with contextlib.suppress(ConnectionError):
                        assert far.recv(1) == b""
            assert relay.bytes_up == 2
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", relay.port), timeout=5).close()
    assert not [thread for thread in threading.enumerate() if thread.name == "relay"]


def test_a_taken_port_is_an_error_of_the_thread_that_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        relay = Relay(target_host="127.0.0.1", target_port=1, link=Link.parse("1gbit/1ms"), listen_port=port)
        with pytest.raises(OSError, match="in use"), RelayThread(relay):
            pass
    assert not [thread for thread in threading.enumerate() if thread.name == "relay"]
