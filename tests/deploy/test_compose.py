"""docker/compose.yaml as it is: keys are made, both nodes train behind their thin links, everything stops in order.

Prometheus' and Grafana's images come from a registry. In place of the first the distribution's Prometheus is started
with what the file gives it; Grafana is not, and what it is given is checked in test_static.py.
"""

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from containers import Engine
from toolbox import ROOT, page, run, tool, until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(2400)]

FILE = ROOT / "docker" / "compose.yaml"
OURS = [
    name
    for name, service in yaml.safe_load(FILE.read_text())["services"].items()
    if service["image"].startswith("farloop:")
]
STARTED = [*OURS, "prometheus"]
PROJECT = "farloop-test"


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """The compose file's containers, under a project name of this test."""

    podman: Engine
    env: dict[str, str]
    pages: str
    prometheus: str

    def compose(self, *words: str, timeout_s: float = 300) -> str:
        command = (tool("podman-compose"), "--project-name", PROJECT, "--file", FILE, *words)
        return run(*command, env=self.env, timeout_s=timeout_s, cwd=FILE.parent)

    def container(self, service: str) -> str:
        return f"{PROJECT}_{service}_1"

    def logs(self, service: str, lines: int = 20) -> str:
        return self.podman.podman("logs", "--tail", str(lines), self.container(service), code=None)

    def every_log(self) -> str:
        return "\n".join(f"--- {name}\n{self.logs(name)}" for name in STARTED)

    def status(self) -> dict[str, Any]:
        """Empty while the coordinator does not answer."""
        told = page(f"{self.pages}/status")
        return json.loads(told) if told else {}

    def asked(self, question: str) -> Any:
        """What Prometheus answers; empty while it does not."""
        told = page(f"{self.prometheus}/api/v1/{question}")
        return json.loads(told)["data"] if told else {}


@pytest.fixture(scope="module")
def composed(podman: Engine, node_image: str) -> Iterator[Composed]:
    with socket.socket() as one, socket.socket() as other:
        ports = []
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
            ports.append(str(each.getsockname()[1]))
    podman.podman("tag", node_image, "farloop:compose")
    names = {"PAGES_PORT": ports[0], "PROMETHEUS_PORT": ports[1], "PROMETHEUS_IMAGE": podman.prometheus()}
    env = {**podman.env, **names, "FARLOOP_LINK": "50mbit/20ms"}
    made = Composed(podman=podman, env=env, pages=f"127.0.0.1:{ports[0]}", prometheus=f"127.0.0.1:{ports[1]}")
    made.compose("up", "--detach", "--no-build", *STARTED)
    try:
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout", "0")


def test_both_nodes_train_behind_their_links_until_windows_commit(composed: Composed) -> None:
    def trained() -> bool:
        told = composed.status()
        nodes = {node["name"] for node in told.get("nodes", []) if node["connected"]}
        merged = {name for window in told.get("windows", []) for name in window["merged"]}
        return nodes == {"a", "b"} and merged == {"a", "b"} and sum(told["versions"]) > 6

    until("windows merge both nodes", trained, within_s=400, tell=composed.every_log)


def test_what_the_nodes_send_crosses_their_own_links(composed: Composed) -> None:
    for letter in "ab":

        def crossed(letter: str = letter) -> bool:
            told = re.findall(r"up_bytes\D+(\d+).*?down_bytes\D+(\d+)", composed.logs(f"link-{letter}"))
            return bool(told) and all(int(number) > 100_000 for number in told[-1])

        until(f"bytes cross link {letter}", crossed, within_s=60, tell=composed.every_log)


def test_prometheus_scrapes_all_three_and_has_the_alerts(composed: Composed) -> None:
    def scraped() -> bool:
        targets = composed.asked("targets").get("activeTargets", [])
        return len(targets) == 3 and all(target["health"] == "up" for target in targets)

    until("Prometheus scrapes all", scraped, within_s=120, tell=lambda: composed.logs("prometheus"))
    rules = {
        rule["name"]
        for group in composed.asked("rules")["groups"]
        for rule in group["rules"]
        if rule["type"] == "alerting"
    }
    assert rules == {path.stem for path in (ROOT / "monitoring" / "runbooks").glob("*.md")}
    (merged,) = composed.asked("query?query=max(farloop_position_steps)")["result"]
    assert float(merged["value"][1]) > 0


def test_everything_stops_in_order(composed: Composed) -> None:
    composed.compose("stop")
    for name in STARTED:
        told = composed.podman.podman("inspect", "--format", "{{.State.ExitCode}}", composed.container(name))
        assert told.strip() == "0", f"{name}\n{composed.logs(name, 50)}"


def test_a_run_that_was_stopped_goes_on_where_it_was(composed: Composed) -> None:
    composed.compose("up", "--detach", "--no-build", *STARTED)
    # A run of its own would begin with no fragment of a version above 0.
    until("it goes on", lambda: sum(composed.status().get("versions", [])) > 6, within_s=300, tell=composed.every_log)
