"""A node's pages over real sockets on loopback."""

import http.client

import pytest

from farloop.algo.spec import NodeId
from farloop.monitoring.endpoint import EndpointError
from farloop.node.metrics import STANDSTILL_S, Metrics, serve
from farloop.wire.messages import NodeState, Progress

pytestmark = pytest.mark.integration


def progress(state: NodeState, detail: str = "") -> Progress:
    return Progress(
        state=state,
        position=0.0,
        round=0,
        inner_steps=7,
        tokens=0,
        loss=None,
        tokens_per_s=0.0,
        compute_share=1.0,
        blocked_s=0.0,
        lost_steps=0,
        sample_watermark=0,
        bytes_up=0,
        bytes_down=0,
        bytes_state=0,
        detail=detail,
    )


def ask(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_node_is_alive_from_the_first_moment_and_ready_once_it_trains() -> None:
    metrics = Metrics(NodeId("a"))
    with serve("127.0.0.1:0", metrics) as endpoint:
        assert ask(endpoint.port, "/healthz") == (200, "alive\n")
        assert ask(endpoint.port, "/readyz") == (503, "starting\n")
        status, text = ask(endpoint.port, "/metrics")
        assert status == 200 and "farloop_" not in text  # nothing is known yet but its process
        metrics.saw(progress("joining", "the coordinator"), versions={}, connected=False)
        assert ask(endpoint.port, "/readyz") == (503, "joining: the coordinator\n")
        metrics.saw(progress("training"), versions={0: 0}, connected=True)
        assert ask(endpoint.port, "/readyz") == (200, "training\n")
        status, text = ask(endpoint.port, "/metrics")
        assert status == 200 and 'farloop_node_inner_steps_total{node="a"} 7.0' in text


def test_a_node_whose_training_thread_has_been_silent_for_long_is_not_alive() -> None:
    now = 1000.0
    metrics = Metrics(NodeId("a"), clock=lambda: now)
    with serve("127.0.0.1:0", metrics) as endpoint:
        now += 10 * STANDSTILL_S  # it may wait for a coordinator for as long as it likes
        assert ask(endpoint.port, "/healthz")[0] == 200
        metrics.saw(progress("training"), versions={0: 0}, connected=True)
        now += STANDSTILL_S
        assert ask(endpoint.port, "/healthz")[0] == 200
        now += 1
        assert ask(endpoint.port, "/healthz") == (503, "no inner step has ended for 601 s\n")
        metrics.saw(progress("training"), versions={0: 0}, connected=True)
        assert ask(endpoint.port, "/healthz")[0] == 200


@pytest.mark.parametrize("address", ["", "9710", ":9710", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_one_line(address: str) -> None:
    with pytest.raises(EndpointError) as caught:
        serve(address, Metrics(NodeId("a")))
    assert "\n" not in str(caught.value)
