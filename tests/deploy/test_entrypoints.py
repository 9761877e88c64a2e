"""The very command lines of the Dockerfiles and of compose.yaml, run outside of containers: needs nothing but Python.

What a container would have at /etc/farloop, /keys and /var/lib/farloop lies in a folder of the test, and the services'
names are loopback with a port of their own; every other word is the file's.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from toolbox import ROOT, page, until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

DOCKER = ROOT / "docker"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
DAEMONS = ["coordinator", "link-a", "link-b", "node-a", "node-b"]


def last(dockerfile: str, name: str) -> str:
    """The words of an instruction, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (DOCKER / dockerfile).read_text())
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)[-1]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Every container of ours as a process."""

    folder: Path
    ports: dict[str, int]
    processes: dict[str, subprocess.Popen[bytes]]

    def outside(self, service: str, text: str) -> str:
        """A word or a file of a container, with its folders and names as they are here."""
        own = self.ports.get(f"pages of {service}", 0)
        for name in ("coordinator", "link-a", "link-b"):
            text = text.replace(f"{name}:7700", f"127.0.0.1:{self.ports[name]}")
        text = text.replace("0.0.0.0:7700", f"127.0.0.1:{self.ports.get(service, 0)}")
        text = re.sub(r"(?:0\.0\.0\.0|127\.0\.0\.1):97[01]0", f"127.0.0.1:{own}", text)
        for inside in ("/keys", "/var/lib/farloop", "/etc/farloop"):
            shared = self.folder / "keys" if inside == "/keys" else self.folder / service / inside[1:]
            text = re.sub(rf'(^|["\s=]){inside}', rf"\g<1>{shared}", text)
        return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)

    def logs(self) -> str:
        return "\n".join(f"--- {path.stem}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))


def environment(dockerfile: str) -> dict[str, str]:
    """What ENV of the image says of farloop itself."""
    words = shlex.split(
        " ".join(re.findall(r"^ENV (.*)$", re.sub(r"\\\n\s*", " ", (DOCKER / dockerfile).read_text()), re.M))
    )
    return dict(word.split("=", 1) for word in words if word.startswith(("FARLOOP_", "PYTHON")))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder = tmp_path_factory.mktemp("host")
    names = ["coordinator", "link-a", "link-b", *(f"pages of {name}" for name in ("coordinator", "node-a", "node-b"))]
    made = Host(folder=folder, ports={name: free_port() for name in names}, processes={})
    farloop = [sys.executable, "-m", "farloop.cli.main"]
    entry, flags = SERVICES["keys"]["entrypoint"]
    (script,) = SERVICES["keys"]["command"]
    script = script.replace("/keys", str(folder / "keys")).replace("$$", "$")
    (folder / "keys").mkdir()
    subprocess.run([entry, flags, f'farloop() {{ {shlex.join(farloop)} "$@"; }}\n{script}'], check=True, timeout=200)
    ran = {name: value for name, value in os.environ.items() if not name.startswith("FARLOOP_")}
    try:
        for name in DAEMONS:
            service = SERVICES[name]
            for mount in service.get("volumes", []):
                source, target, *_ = mount.split(":")
                at = folder / name / target[1:]
                if source.startswith("./"):
                    at.parent.mkdir(parents=True, exist_ok=True)
                    at.write_text(made.outside(name, (DOCKER / source).read_text()))
                elif source != "keys":
                    at.mkdir(parents=True, exist_ok=True)
            words = service.get("command") or json.loads(last("node.Dockerfile", "CMD"))
            tini, dashes, command = json.loads(last("node.Dockerfile", "ENTRYPOINT"))
            assert (tini, dashes, command) == ("tini", "--", "farloop")
            image = environment("node.Dockerfile")
            image = {key: made.outside(name, value) for key, value in image.items()}
            with (folder / f"{name}.log").open("wb") as log:
                made.processes[name] = subprocess.Popen(
                    [*farloop, *(made.outside(name, word) for word in words)],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**ran, **image},
                    cwd=folder,
                )
        yield made
    finally:
        for process in made.processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            process.wait(timeout=30)


def test_the_command_lines_train_together(host: Host) -> None:
    def trained() -> bool:
        assert all(process.poll() is None for process in host.processes.values()), host.logs()
        told = json.loads(page(f"127.0.0.1:{host.ports['pages of coordinator']}/status") or "{}")
        return bool(told) and {name for window in told["windows"] for name in window["merged"]} == {"a", "b"}

    until("windows merge both nodes", trained, within_s=400, tell=host.logs)


@pytest.mark.parametrize("dockerfile", ["coordinator.Dockerfile", "node.Dockerfile"])
def test_the_health_checks_find_the_daemons_well(host: Host, dockerfile: str) -> None:
    service = "coordinator" if dockerfile.startswith("coordinator") else "node-a"
    words = json.loads(last(dockerfile, "HEALTHCHECK").partition("CMD ")[2])
    command = [sys.executable, *(host.outside(service, word) for word in words[1:])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_stop_signal_of_the_images_ends_every_one_in_order(host: Host) -> None:
    number = signal.Signals[last("node.Dockerfile", "STOPSIGNAL")]
    for name in ("node-a", "node-b", "coordinator", "link-a", "link-b"):
        host.processes[name].send_signal(number)
        assert host.processes[name].wait(timeout=45) == 0, f"{name}\n{host.logs()}"
