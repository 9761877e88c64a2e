"""How the endpoint explains itself; its behaviour over sockets is in tests/integration/test_endpoint.py."""

import errno
import sys

import pytest

from farloop.monitoring.endpoint import Response, _explain, answers_to


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EADDRINUSE, "port 80 on localhost is in use by another program: choose another port, or 0"),
        (errno.EACCES, "choose one above 1023"),
        (errno.EADDRNOTAVAIL, "127.0.0.1 (this machine only)"),
        (errno.EMFILE, "cannot listen on localhost port 80"),
    ],
)
def test_every_failure_to_listen_is_one_line_that_says_what_to_change(number: int, words: str) -> None:
    message = _explain("localhost", 80, OSError(number, "because"))
    assert words in message
    assert "\n" not in message


def test_a_response_is_plain_text_and_fine_unless_told_otherwise() -> None:
    assert (Response().status, Response().content_type) == (200, "text/plain; charset=utf-8")


def test_the_monitoring_package_needs_no_other_library() -> None:
    import farloop.monitoring.endpoint
    import farloop.monitoring.status

    for module in (farloop.monitoring.endpoint, farloop.monitoring.status):
        names = {getattr(value, "__module__", "") or "" for value in vars(module).values()}
        roots = {name.partition(".")[0] for name in names if name}
        assert roots <= set(sys.stdlib_module_names) | {"farloop"}


@pytest.mark.parametrize("on_loopback", [True, False])
@pytest.mark.parametrize(
    ("host", "taken"),
    [
        (None, True),
        ("127.0.0.1:9700", True),
        ("localhost:9700", True),
        ("LOCALHOST.", True),
        ("[::1]:9700", True),
        ("[::1]", True),
        ("10.2.3.4:9700", True),
        ("[fd00::7]:9700", True),
        ("run.example.com:9700", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:9700", False),
        ("", False),
        (":9700", False),
    ],
)
def test_a_page_is_not_answered_under_a_public_name(host: str | None, taken: bool, on_loopback: bool) -> None:
    """DNS rebinding: a web page elsewhere makes its own name point here, and reads what is for this machine's user."""
    assert answers_to(host, on_loopback=on_loopback) == taken


@pytest.mark.parametrize(
    "host",
    [
        "coordinator:9700",
        "node-a:9710",
        "farloop-coordinator.farloop.svc:9700",
        "a.b.svc.cluster.local",
        "host.internal",
    ],
)
def test_beyond_loopback_names_that_no_public_server_knows_go_on_working(host: str) -> None:
    """Prometheus asks under the names of services."""
    assert answers_to(host, on_loopback=False)
    assert not answers_to(host, on_loopback=True)


def test_other_names_are_given() -> None:
    for on_loopback in (True, False):
        assert answers_to("Run.Example.com:80", on_loopback=on_loopback, names="oslo.example.com, run.example.com")
        assert not answers_to("evil.example", on_loopback=on_loopback, names="oslo.example.com, run.example.com")
        assert answers_to("any.example", on_loopback=on_loopback, names="*")
