"""The HTTP endpoint over real sockets on loopback."""

import contextlib
import http.client
import logging
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from plain_runs import plain_progress
from tiny_run import until

from farloop.algo.spec import NodeId
from farloop.monitoring import endpoint as endpoint_module
from farloop.monitoring.endpoint import Endpoint, EndpointError, Response
from farloop.node.metrics import STANDSTILL_S, Metrics, serve

pytestmark = pytest.mark.integration


def broken() -> Response:
    raise RuntimeError("the secret is 42")


POLICY = {"content-security-policy": "default-src 'none'"}
ROUTES = {
    "/": lambda: Response(body=b"a page", headers=tuple(POLICY.items())),
    "/status": lambda: Response(content_type="application/json", body=b'{"round": 7}'),
    "/ready": lambda: Response(status=503, body=b"not yet\n"),
    "/broken": broken,
}


def ask(port: int, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in lower case, body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "headers", "body"),
    [
        (
            "GET",
            "/status?pretty=1",
            200,
            {"content-type": "application/json", "content-length": "12", "cache-control": "no-store"},
            b'{"round": 7}',
        ),
        ("GET", "/ready", 503, {}, b"not yet\n"),
        ("GET", "/", 200, {**POLICY, "x-content-type-options": "nosniff"}, b"a page"),
        ("HEAD", "/status", 200, {"content-length": "12"}, b""),
        ("GET", "/nope", 404, {}, b"/\n/broken\n/ready\n/status\n"),
        ("POST", "/status", 405, {"allow": "GET, HEAD"}, b""),
    ],
)
def test_a_route_answers_with_its_status_headers_and_body(
    method: str, path: str, status: int, headers: dict[str, str], body: bytes
) -> None:
    """An unknown page lists the known ones; writing is refused and says what is allowed."""
    with Endpoint("127.0.0.1", 0, ROUTES) as endpoint:
        code, told, text = ask(endpoint.port, method, path)
    assert (code, told | headers) == (status, told) and text.endswith(body)


def test_a_failing_page_is_one_line_outside_and_a_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with Endpoint("127.0.0.1", 0, ROUTES) as endpoint, caplog.at_level(logging.ERROR):
        status, _, body = ask(endpoint.port, "GET", "/broken")
        assert status == 500
        assert body == b"/broken failed: RuntimeError; the log has the details\n"
        assert "the secret is 42" in caplog.text
        assert ask(endpoint.port, "GET", "/status")[0] == 200


def test_a_request_that_drips_in_is_ended_by_the_deadline() -> None:
    with (
        Endpoint("127.0.0.1", 0, ROUTES, request_limit_s=0.4) as endpoint,
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=5) as slow,
    ):
        started = time.monotonic()
        ended = False
        while not ended and time.monotonic() - started < 5:
            try:
                slow.sendall(b"G")
                slow.settimeout(0.1)
                ended = slow.recv(1) == b""
            except TimeoutError:
                continue  # nothing yet: drip on, each time well inside the limit
            except ConnectionError:
                ended = True
        assert ended
        assert 0.3 < time.monotonic() - started < 3


@contextlib.contextmanager
def crowd(port: int, count: int, request: bytes) -> Iterator[list[socket.socket]]:
    """Clients that send this, and then nothing; nor do they read."""
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(count):
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(30)
            client.connect(("127.0.0.1", port))
            client.sendall(request)
            clients.append(client)
        yield clients


@pytest.mark.parametrize(
    "request_head",
    [b"", b"GET /stat", b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    ids=["silent", "half a request", "never reads"],
)
def test_health_and_pages_answer_beside_slow_clients(request_head: bytes) -> None:
    """A liveness probe that finds no answer restarts a coordinator that is well."""
    routes = {**ROUTES, "/healthz": lambda: Response(body=b"ok\n"), "/large": lambda: Response(body=bytes(4 << 20))}
    with Endpoint("127.0.0.1", 0, routes, request_limit_s=60) as endpoint, crowd(endpoint.port, 120, request_head):
        assert [ask(endpoint.port, "GET", "/healthz")[0] for _ in range(20)] == [200] * 20
        assert ask(endpoint.port, "GET", "/status")[0] == 200
        assert len(endpoint._open) <= endpoint_module.MAX_CONNECTIONS


def test_health_answers_while_other_pages_hang_and_these_are_refused_beyond_a_bound() -> None:
    """They are made once for all who wait, in a thread of their own."""
    held, made = threading.Event(), []

    def slow() -> Response:
        made.append(1)
        held.wait(60)
        return Response(body=b"at last")

    routes = {"/status": slow, "/metrics": slow, "/healthz": lambda: Response(body=b"ok\n")}
    asked = b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Endpoint("127.0.0.1", 0, routes) as endpoint:
        with crowd(endpoint.port, 40, asked) as clients:
            assert clients[-1].recv(100).startswith(b"HTTP/1.1 503 ")
            assert [ask(endpoint.port, "GET", "/healthz")[0] for _ in range(20)] == [200] * 20
            assert ask(endpoint.port, "GET", "/metrics")[0] == 503
            held.set()
            assert clients[0].recv(100).startswith(b"HTTP/1.1 200 ")
        assert len(made) == 1


def test_the_slowest_connection_gives_way(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_CONNECTIONS", 2)
    with Endpoint("127.0.0.1", 0, ROUTES, request_limit_s=60) as endpoint:
        with crowd(endpoint.port, 3, b"GET /st") as clients:
            assert clients[0].recv(1) == b""
            clients[2].sendall(b"atus HTTP/1.0\r\n\r\n")
            assert clients[2].recv(100).startswith(b"HTTP/1.1 200 ")
        with crowd(endpoint.port, 3, b"GET /st"):
            assert ask(endpoint.port, "GET", "/status")[0] == 200
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["pages crowded connections=2 most_from=127.0.0.1 count=2"], "and not for each of them"


def test_a_client_that_does_not_read_its_answer_is_ended_by_the_deadline() -> None:
    asked = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"
    routes = {"/large": lambda: Response(body=bytes(16 << 20))}
    with Endpoint("127.0.0.1", 0, routes, request_limit_s=0.3) as endpoint, crowd(endpoint.port, 1, asked):
        until(lambda: len(endpoint._open) == 1)
        until(lambda: not endpoint._open)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /status HTTP/1.1\r\nHost: evil.example:9700\r\n\r\n", 421),
        (b"GET /healthz HTTP/1.1\r\nHost: evil.example:9700\r\n\r\n", 200),
        (b"GET /status HTTP/1.1\r\nHost: run.example:9700\r\n\r\n", 200),
        (b"GET /status HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 400),
        (b"GET http://localhost/status HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\n", 400),
        (b"GET /status HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 400),
        (b"GET /status HTTP/1.1\r\nHost: localhost\r\n" + b"X: 1\r\n" * 9000 + b"\r\n", 400),
        (b"GET /status HTTP/1.0\r\n\r\n", 200),
    ],
    ids=["rebinding", "health", "given name", "two hosts", "proxy", "TLS", "long line", "many headers", "no host"],
)
def test_what_a_request_may_look_like(head: bytes, status: int) -> None:
    routes = {**ROUTES, "/healthz": lambda: Response(body=b"ok\n")}
    with (
        Endpoint("127.0.0.1", 0, routes, names="run.example") as endpoint,
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=30) as client,
    ):
        client.sendall(head if b"\r\n\r\n" in head else head + b"\n")
        assert client.recv(12) == f"HTTP/1.1 {status}".encode()


def test_closing_ends_connections_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    endpoint = Endpoint("127.0.0.1", 0, ROUTES, request_limit_s=60)
    with crowd(endpoint.port, 3, b"GET") as clients:
        until(lambda: len(endpoint._open) == 3)
        endpoint.close()
        endpoint.close()
        assert set(threading.enumerate()) <= before
        for client in clients:
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""


@pytest.mark.parametrize(("host", "port", "words"), [("127.0.0.1", 70000, "not a port"), ("203.0.113.1", 0, "all")])
def test_an_impossible_address_is_one_line_with_its_mend(host: str, port: int, words: str) -> None:
    with pytest.raises(EndpointError, match=words):
        Endpoint(host, port, ROUTES)


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)])
def test_pages_that_others_can_reach_are_warned_of(host: str, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Endpoint(host, 0, ROUTES) as endpoint:
        said = [record.getMessage() for record in caplog.records]
    assert len(said) == warned
    if warned:
        assert said[0].startswith(f"pages open to others host=0.0.0.0 port={endpoint.port} ")
        assert "keep http on 127.0.0.1" in said[0]


def test_closing_frees_the_port() -> None:
    first = Endpoint("127.0.0.1", 0, ROUTES)
    port = first.port
    first.close()
    with Endpoint("127.0.0.1", port, ROUTES) as second:
        assert ask(second.port, "GET", "/status")[0] == 200


# --- a node's pages


def page(port: int, path: str) -> tuple[int, str]:
    status, _, body = ask(port, "GET", path)
    return status, body.decode()


def test_a_node_is_alive_from_the_first_moment_and_ready_once_it_trains() -> None:
    metrics = Metrics(NodeId("a"))
    with serve("127.0.0.1:0", metrics) as endpoint:
        assert page(endpoint.port, "/healthz") == (200, "alive\n")
        assert page(endpoint.port, "/readyz") == (503, "starting\n")
        status, text = page(endpoint.port, "/metrics")
        assert status == 200 and "farloop_" not in text  # nothing is known yet but its process
        metrics.update(plain_progress(state="joining", detail="the coordinator"), versions={}, connected=False)
        assert page(endpoint.port, "/readyz") == (503, "joining: the coordinator\n")
        metrics.update(plain_progress(inner_steps=7), versions={0: 0}, connected=True)
        assert page(endpoint.port, "/readyz") == (200, "training\n")
        status, text = page(endpoint.port, "/metrics")
        assert status == 200 and 'farloop_node_inner_steps_total{node="a"} 7.0' in text


def test_a_node_whose_training_thread_has_been_silent_for_long_is_not_alive() -> None:
    now = 1000.0
    metrics = Metrics(NodeId("a"), clock=lambda: now)
    with serve("127.0.0.1:0", metrics) as endpoint:
        now += 10 * STANDSTILL_S  # it may wait for a coordinator for as long as it likes
        assert page(endpoint.port, "/healthz")[0] == 200
        metrics.update(plain_progress(inner_steps=7), versions={0: 0}, connected=True)
        now += STANDSTILL_S
        assert page(endpoint.port, "/healthz")[0] == 200
        now += 1
        assert page(endpoint.port, "/healthz") == (503, "no inner step has ended for 601 s\n")
        metrics.update(plain_progress(inner_steps=7), versions={0: 0}, connected=True)
        assert page(endpoint.port, "/healthz")[0] == 200


@pytest.mark.parametrize("address", ["", "9710", ":9710", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_one_line(address: str) -> None:
    with pytest.raises(EndpointError) as caught:
        serve(address, Metrics(NodeId("a")))
    assert "\n" not in str(caught.value)
