"""Who is answered and how failures are explained; behaviour over sockets is in tests/integration/test_endpoint.py."""

import errno
import sys

import pytest

import farloop.monitoring.endpoint
import farloop.monitoring.status
from farloop.monitoring.endpoint import _explain, answers_to


def test_every_failure_to_listen_is_one_line_that_says_what_to_change() -> None:
    for number, words in (
        (errno.EADDRINUSE, "port 80 on localhost is in use by another program: choose another port, or 0"),
        (errno.EACCES, "choose one above 1023"),
        (errno.EADDRNOTAVAIL, "127.0.0.1 (this machine only)"),
        (errno.EMFILE, "cannot listen on localhost port 80"),
    ):
        message = _explain("localhost", 80, OSError(number, "because"))
        assert words in message and "\n" not in message


def test_the_monitoring_package_needs_no_other_library() -> None:
    for module in (farloop.monitoring.endpoint, farloop.monitoring.status):
        names = {getattr(value, "__module__", "") or "" for value in vars(module).values()}
        roots = {name.partition(".")[0] for name in names if name}
        assert roots <= set(sys.stdlib_module_names) | {"farloop"}


LOCAL = (None, "127.0.0.1:9700", "localhost:9700", "LOCALHOST.", "[::1]:9700", "[::1]", "10.2.3.4:9700", "[fd00::7]:1")
PUBLIC = ("run.example.com:9700", "127.0.0.1.evil.example", "localhost.evil.example:9700", "", ":9700")
SERVICES = ("coordinator:9700", "node-a:9710", "farloop.farloop.svc:9700", "a.b.svc.cluster.local", "host.internal")


@pytest.mark.parametrize("on_loopback", [True, False])
def test_a_page_is_not_answered_under_a_public_name(on_loopback: bool) -> None:
    """DNS rebinding: a web page elsewhere makes its own name point here, and reads what is for this machine's user."""
    for host in LOCAL:
        assert answers_to(host, on_loopback=on_loopback), host
    for host in PUBLIC:
        assert not answers_to(host, on_loopback=on_loopback), host
    for host in SERVICES:  # Prometheus asks under the names of services, which no public server knows
        assert answers_to(host, on_loopback=on_loopback) != on_loopback, host
    given = "oslo.example.com, run.example.com"
    assert answers_to("Run.Example.com:80", on_loopback=on_loopback, names=given)
    assert not answers_to("evil.example", on_loopback=on_loopback, names=given)
    assert answers_to("any.example", on_loopback=on_loopback, names="*")
