"""How the endpoint explains itself; its behaviour over sockets is in tests/integration/test_endpoint.py."""

import errno
import sys

import pytest

from farloop.monitoring.endpoint import Response, _explain


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
