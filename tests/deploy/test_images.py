"""The images, built from the Dockerfiles as they are, and run as docker/README.md says for two places."""

import json
import re
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from containers import HARDENED, Engine
from toolbox import ROOT, page, run, until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(2400)]

README = (ROOT / "docker" / "README.md").read_text()
USER = "10001"
SMALL = 'model = "nano"\nsteps = 100000\nh = 3\ntau = 1\nbatch_sequences = 4\nsequence_tokens = 32'
"""A run whose windows close within seconds: the rest of run.toml is the README's."""


@pytest.fixture(scope="module", params=["node_image", "coordinator_image"])
def image(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


def test_an_image_says_what_it_is_and_how_it_is_run(podman: Engine, image: str) -> None:
    (told,) = json.loads(podman.podman("image", "inspect", image))
    config = told["Config"]
    assert config["User"] == "10001:10001" and config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["tini", "--", "farloop"]
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert {"title", "version", "revision"} <= {name.rpartition(".")[2] for name in config["Labels"]}
    assert "farloop.monitoring.healthcheck" in " ".join(
        told["HealthCheck" if "HealthCheck" in told else "Healthcheck"]["Test"]
    )


def test_an_image_is_as_small_as_the_readme_says(podman: Engine, image: str) -> None:
    torch = podman.podman(
        "run", "--rm", "--entrypoint", "python3", image, "-c", "import torch; print(torch.__version__)"
    )
    if not torch.strip().endswith("+cpu"):
        pytest.skip(f"pip installed torch {torch.strip()}: name the index of CPU wheels in PIP_ARGS")
    row = "node, target `cpu`" if image.endswith(":compose") else "coordinator"
    (stated,) = re.findall(rf"^\| {re.escape(row)} \|.*?([\d.]+) GB", README, re.MULTILINE)
    size = int(podman.podman("image", "inspect", "--format", "{{.Size}}", image)) / 1e9
    assert abs(size - float(stated)) < 0.1, f"{size:.2f} GB"


def test_nothing_of_an_image_can_be_written_and_the_process_has_no_rights(podman: Engine, image: str) -> None:
    script = (
        "import os; from pathlib import Path\n"
        "lines = [line.partition(':\\t') for line in Path('/proc/self/status').read_text().splitlines()]\n"
        "fields = {name: value for name, _, value in lines}\n"
        "print(os.getuid(), fields['CapEff'], fields['NoNewPrivs'])\n"
        "for path in ('/etc/x', '/opt/farloop/x', '/var/lib/farloop/x', '/tmp/x'):\n"
        "    try: Path(path).touch(); print(path, 'written')\n"
        "    except OSError: print(path, 'refused')\n"
    )
    told = podman.podman("run", "--rm", *HARDENED, "--entrypoint", "python3", image, "-c", script).splitlines()
    assert told == [
        f"{USER} 0000000000000000 1",
        "/etc/x refused",
        "/opt/farloop/x refused",
        "/var/lib/farloop/x written",  # its volume
        "/tmp/x written",
    ]


def test_tini_is_the_first_process_and_the_command_answers(podman: Engine, image: str) -> None:
    assert podman.podman("run", "--rm", *HARDENED, image, "--version").startswith("farloop ")
    told = podman.podman("run", "--rm", *HARDENED, image, "coordinator", "/etc/farloop/none.toml", code=2)
    assert "farloop: error:" in told and "Traceback" not in told


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Two hosts of the README, as two folders and containers in a network of their own."""

    podman: Engine
    folder: Path
    network: str
    pages: str

    def logs(self) -> str:
        names = ("farloop", "farloop-node")
        return "\n".join(self.podman.podman("logs", "--tail", "30", name, code=None) for name in names)


def _blocks(kind: str) -> list[str]:
    section = README.partition("## Two clusters")[2]
    return re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def places(
    podman: Engine, node_image: str, coordinator_image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Places]:
    """What the README's commands made, with this test's names, ports and text in place of its examples."""
    folder = tmp_path_factory.mktemp("places")
    network, port, text = f"farloop-{folder.name}", _free_port(), folder / "text"
    text.mkdir()
    (text / "words.txt").write_text((Path(json.__file__).read_text() + Path(shlex.__file__).read_text()) * 3)
    podman.podman("network", "create", network)
    replaced = {
        '"$(id -u):$(id -g)"': f"{USER}:{USER}",
        "-v /data/text:": f"-v {text}:",
        "-p 7700:7700 -p 127.0.0.1:9700:9700": f"-p 127.0.0.1:{port}:9700",
        "--gpus all ": "",
        "docker run -d": f"docker run -d --network {network}",
        "coordinator.example": "farloop",
        'name = "first"\nnodes = 2': 'name = "first"\nnodes = 1\n' + SMALL,
    }
    commands, files = _blocks("sh"), _blocks("toml")
    assert len(commands) == len(files) == 2
    try:
        for place, command, file in zip(("coordinator", "oslo"), commands, files, strict=True):
            here = folder / place
            here.mkdir()
            for old, new in replaced.items():
                command, file = command.replace(old, new), file.replace(old, new)
            command = re.sub(r"farloop-coordinator(?=\n| keys)", coordinator_image, command)
            command = re.sub(r"farloop-node(?=\n| keys)", node_image, command)
            (here / file.splitlines()[0].removeprefix("# ")).write_text(file)
            # The folders belong to whoever types the commands.
            made, _, rest = command.partition("\n")
            run("sh", "-euc", made, cwd=here)
            run("chown", "-R", f"{USER}:{USER}", here)
            if place == "oslo":
                (here / "keys" / "coordinator.pub").write_bytes(
                    (folder / "coordinator/keys/coordinator.pub").read_bytes()
                )
            docker = f'docker() {{ {shlex.quote(run("sh", "-c", "command -v podman").strip())} "$@"; }}\n'
            run("sh", "-euc", docker + rest, cwd=here, env=podman.env, timeout_s=120)
            if place == "oslo":
                (folder / "coordinator/allowed/oslo.pub").write_bytes((here / "keys/oslo.pub").read_bytes())
        yield Places(podman=podman, folder=folder, network=network, pages=f"127.0.0.1:{port}")
    finally:
        podman.podman("rm", "--force", "--time", "0", "farloop", "farloop-node", code=None)
        podman.podman("network", "rm", "--force", network, code=None)


def test_the_two_commands_of_the_readme_train(places: Places) -> None:
    def trained() -> bool:
        told = json.loads(page(f"{places.pages}/status") or "{}")
        return bool(told) and sum(told["versions"]) > 5 and [node["name"] for node in told["nodes"]] == ["oslo"]

    until("five windows commit", trained, within_s=300, tell=places.logs)


@pytest.mark.parametrize("name", ["farloop", "farloop-node"])
def test_the_health_check_of_an_image_finds_its_daemon_well(places: Places, name: str) -> None:
    def well() -> bool:
        return "unhealthy" not in places.podman.podman("healthcheck", "run", name, code=None)

    until(f"{name} is healthy", well, within_s=120, tell=places.logs)


def test_what_is_logged_in_a_container_is_json(places: Places) -> None:
    """All of it but what the commands say to people, on standard output."""
    podman = run("sh", "-c", "command -v podman").strip()
    told = run("sh", "-c", f"{podman} logs farloop 2>&1 >/dev/null", env=places.podman.env).splitlines()
    assert len(told) > 5 and all(json.loads(line)["event"] for line in told)


@pytest.mark.parametrize("name", ["farloop-node", "farloop"])
def test_a_stop_drains_and_ends_in_order(places: Places, name: str) -> None:
    until("the run goes on", lambda: page(f"{places.pages}/status"), within_s=60, tell=places.logs)
    places.podman.podman("stop", name, timeout_s=90)
    assert int(places.podman.podman("inspect", "--format", "{{.State.ExitCode}}", name)) == 0, places.logs()
    if name == "farloop-node":

        def left() -> str:
            told = page(f"{places.pages}/status") or ""
            (node,) = json.loads(told)["nodes"]
            return told if not node["connected"] and node["reason"] else ""

        (places.folder / "left").write_text(until("the node has left", left, within_s=60, tell=places.logs))


def test_the_same_containers_started_again_go_on(places: Places) -> None:
    before = sum(json.loads((places.folder / "left").read_text())["versions"])
    for name in ("farloop", "farloop-node"):
        places.podman.podman("start", name)

    def joined() -> bool:
        told = json.loads(page(f"{places.pages}/status") or "{}")
        return bool(told) and sum(told["versions"]) > before and bool(told["nodes"][0]["connected"])

    until("the node is back", joined, within_s=180, tell=places.logs)
