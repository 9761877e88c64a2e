"""The HTTP endpoint over real sockets on loopback."""

import http.client
import logging
import socket
import time

import pytest

from farloop.monitoring import endpoint as endpoint_module
from farloop.monitoring.endpoint import Endpoint, EndpointError, Response

pytestmark = pytest.mark.integration


def broken() -> Response:
    raise RuntimeError("the secret is 42")


ROUTES = {
    "/status": lambda: Response(content_type="application/json", body=b'{"round": 7}'),
    "/ready": lambda: Response(status=503, body=b"not yet\n"),
    "/broken": broken,
}


def ask(port: int, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Status, headers in lower case, body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_a_route_answers_with_its_status_type_and_body() -> None:
    with Endpoint("127.0.0.1", 0, ROUTES) as endpoint:
        status, headers, body = ask(endpoint.port, "GET", "/status?pretty=1")
        assert (status, headers["content-type"], body) == (200, "application/json", b'{"round": 7}')
        assert headers["content-length"] == "12"
        assert headers["cache-control"] == "no-store"
        assert ask(endpoint.port, "GET", "/ready")[::2] == (503, b"not yet\n")


def test_a_route_may_send_headers_of_its_own() -> None:
    policy = (("Content-Security-Policy", "default-src 'none'"),)
    with Endpoint("127.0.0.1", 0, {"/": lambda: Response(body=b"a page", headers=policy)}) as endpoint:
        _, headers, body = ask(endpoint.port, "GET", "/")
        assert (headers["content-security-policy"], body) == ("default-src 'none'", b"a page")
        assert headers["x-content-type-options"] == "nosniff"


def test_head_has_the_headers_without_the_body() -> None:
    with Endpoint("127.0.0.1", 0, ROUTES) as endpoint:
        status, headers, body = ask(endpoint.port, "HEAD", "/status")
        assert (status, headers["content-length"], body) == (200, "12", b"")


def test_an_unknown_page_lists_the_known_ones() -> None:
    with Endpoint("127.0.0.1", 0, ROUTES) as endpoint:
        status, _, body = ask(endpoint.port, "GET", "/nope")
        assert status == 404
        assert body.decode().splitlines()[1:] == ["/broken", "/ready", "/status"]


def test_writing_is_refused_and_says_what_is_allowed() -> None:
    with Endpoint("127.0.0.1", 0, ROUTES) as endpoint:
        status, headers, _ = ask(endpoint.port, "POST", "/status")
        assert (status, headers["allow"]) == (405, "GET, HEAD")


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


def test_requests_beyond_the_bound_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_REQUESTS", 1)
    with (
        Endpoint("127.0.0.1", 0, ROUTES, request_limit_s=2) as endpoint,
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=5),
        socket.create_connection(("127.0.0.1", endpoint.port), timeout=1) as second,
    ):
        assert second.recv(1) == b""


def test_a_taken_port_is_one_line_with_its_mend() -> None:
    with Endpoint("127.0.0.1", 0, ROUTES) as endpoint, pytest.raises(EndpointError) as caught:
        Endpoint("127.0.0.1", endpoint.port, ROUTES)
    message = str(caught.value)
    assert f"port {endpoint.port} on 127.0.0.1 is in use" in message
    assert "choose another port, or 0" in message
    assert "\n" not in message


@pytest.mark.parametrize(("host", "port", "words"), [("127.0.0.1", 70000, "not a port"), ("203.0.113.1", 0, "0.0.0.0")])
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
