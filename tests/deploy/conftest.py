"""Images are built once for all tests."""

import time

import pytest
from containers import Engine, engine

NODE, COORDINATOR = "localhost/farloop:compose", "localhost/farloop-coordinator:test"
"""The first is the name that compose.yaml and k8s/overlays/local have for the CPU node."""


@pytest.fixture(scope="session")
def podman() -> Engine:
    return engine()


@pytest.fixture(scope="session")
def node_image(podman: Engine) -> str:
    """The CPU target of node.Dockerfile."""
    began = time.monotonic()
    podman.build("node.Dockerfile", target="cpu", tag=NODE)
    _tell(podman, NODE, began)
    return NODE


@pytest.fixture(scope="session")
def coordinator_image(podman: Engine, node_image: str) -> str:
    """After the other: they share the heavy layer."""
    began = time.monotonic()
    podman.build("coordinator.Dockerfile", target=None, tag=COORDINATOR)
    _tell(podman, COORDINATOR, began)
    return COORDINATOR


def _tell(podman: Engine, image: str, began: float) -> None:
    size = int(podman.podman("image", "inspect", "--format", "{{.Size}}", image))
    _FACTS.append(f"{image}: {size / 1e9:.2f} GB, built in {time.monotonic() - began:.0f} s")


_FACTS: list[str] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for fact in _FACTS:
        terminalreporter.write_line(fact)
