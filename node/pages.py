"""What a node shows over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for whoever started it."""

from farloop.monitoring.endpoint import Endpoint, EndpointError, Response
from farloop.node.metrics import Metrics


def serve(address: str, metrics: Metrics) -> Endpoint:
    """Serve the pages at host:port until the endpoint is closed.

    `/healthz` answers as long as the process does; `/readyz` with 200 once the node has joined and training has begun.

    Raises:
        EndpointError: the address is none, or cannot be bound.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdecimal():
        raise EndpointError(f"http is host:port, as 127.0.0.1:9710, not {address!r}")

    def text() -> Response:
        return Response(content_type=metrics.content_type, body=metrics.exposition())

    def alive() -> Response:
        return Response(body=b"alive\n")

    def ready() -> Response:
        started, words = metrics.standing
        return Response(status=200 if started else 503, body=f"{words}\n".encode())

    return Endpoint(host.strip("[]"), int(port), {"/metrics": text, "/healthz": alive, "/readyz": ready})
