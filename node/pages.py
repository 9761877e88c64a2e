"""What a node shows over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for whoever started it."""

from farloop.monitoring.endpoint import HEALTH, METRICS, READY, Endpoint, EndpointError, Response
from farloop.node.metrics import Metrics

STANDSTILL_S = 600.0
"""A training thread that has been silent for this long hangs. Long, for a first step may compile and an evaluation may
be large, and being killed costs what was trained since the last send."""


def serve(address: str, metrics: Metrics, names: str = "") -> Endpoint:
    """Serve the pages at host:port until the endpoint is closed. `names`: as `Endpoint` has it.

    `/healthz` answers 200 as long as training goes on, or waits for others; `/readyz` once the node has joined and
    training has begun. 503 otherwise, with the reason.

    Raises:
        EndpointError: the address is none, or cannot be bound.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdecimal():
        raise EndpointError(f"http is host:port, as 127.0.0.1:9710, not {address!r}")

    def text() -> Response:
        return Response(content_type=metrics.content_type, body=metrics.exposition())

    def alive() -> Response:
        if (silent_s := metrics.silent_s) > STANDSTILL_S:
            return Response(status=503, body=f"no inner step has ended for {silent_s:.0f} s\n".encode())
        return Response(body=b"alive\n")

    def ready() -> Response:
        started, words = metrics.standing
        return Response(status=200 if started else 503, body=f"{words}\n".encode())

    return Endpoint(host.strip("[]"), int(port), {METRICS: text, HEALTH: alive, READY: ready}, names=names)
