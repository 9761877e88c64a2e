"""The containers agree with the code: what they run, where it listens, how it is asked for its health."""

import importlib
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from farloop.cli.main import app
from farloop.config.settings import load_node, load_run
from farloop.local.relay import Link
from farloop.monitoring.endpoint import HEALTH

ROOT = Path(__file__).resolve().parents[3]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
sys.path.insert(0, str(DOCKER))
requirements, slim = (importlib.import_module(name) for name in ("requirements", "slim"))
OURS = {name: service for name, service in SERVICES.items() if service["image"].startswith("farloop:")}


def instructions(path: Path) -> list[tuple[str, str]]:
    """Every instruction of a Dockerfile and its words, continued lines joined, in order."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [(name, words) for name, _, words in (line.partition(" ") for line in joined.splitlines() if line)]


def last(path: Path, name: str) -> str:
    return [words for found, words in instructions(path) if found == name][-1]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_runs_a_command_that_exists_without_rights_and_checks_its_health_where_it_answers(path: Path) -> None:
    assert json.loads(last(path, "ENTRYPOINT")) == ["tini", "--", "farloop"]
    command, file = json.loads(last(path, "CMD"))
    assert command in get_command(app).commands  # type: ignore[attr-defined]
    assert Path(file).parent == Path("/etc/farloop")
    (hashed, rest) = [words for name, words in instructions(path) if name == "RUN" and "pip install" in words][:2]
    assert "--require-hashes --requirement requirements.txt" in hashed and "'.[cloud,hf]'" in rest
    assert (last(path, "USER"), last(path, "STOPSIGNAL")) == ("10001:10001", "SIGTERM")
    *python, page = json.loads(last(path, "HEALTHCHECK").partition("CMD ")[2])
    assert python == ["python3", "-m", "farloop.monitoring.healthcheck"]
    host_port, slash, rest = page.partition("/")
    assert slash + rest == HEALTH
    kind = path.name.partition(".")[0]
    config = "run.toml" if kind == "coordinator" else "node-a.toml"
    served = tomllib.loads((DOCKER / "config" / config).read_text())[kind]["http"]
    assert port_of(host_port) == port_of(served)
    assert str(port_of(served)) in last(path, "EXPOSE").split()


def test_only_what_the_images_are_made_of_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert {name.split(".")[1] for name in packages if "." in name} <= sent
    assert {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= sent
    assert all((ROOT / name).exists() for name in sent)


def test_the_images_install_by_hash_what_farloop_needs_in_the_pinned_versions() -> None:
    lines = (DOCKER / "requirements.txt").read_text().splitlines()[1:]
    found = {name: version for line in lines for name, _, version in [line.split()[0].partition("==")]}
    pins = requirements.pins()
    assert found == {name: pins[name] for name in requirements.needed()}, "run python docker/requirements.py"
    assert all(re.fullmatch(r"\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)


def test_the_packages_of_an_image_fit_into_its_budget() -> None:
    if not importlib.metadata.version("torch").endswith("+cpu"):
        pytest.skip("torch with CUDA is larger")
    (budget,) = re.findall(r"([\d.]+) GB for packages", (DOCKER / "README.md").read_text())
    files = [file for name in requirements.needed() for file in importlib.metadata.files(name) or ()]
    kept = [file.locate() for file in files if not slim.is_unread(file.as_posix())]
    size = sum(path.stat().st_size for path in kept if path.exists())
    assert 0.9 < size / 1e9 / float(budget) < 1, f"{size / 1e9:.3f} GB"


def test_the_workflow_runs_and_builds_what_exists_and_names_no_host() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    made = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in (step["run"] for job in jobs.values() for step in job["steps"] if "run" in step):
        subprocess.run(["bash", "-n"], input=command, text=True, check=True)
        assert set(re.findall(r"\bmake (\w+)", command)) <= made
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", one) for one in used), "actions by their digest"
    for image in jobs["images"]["strategy"]["matrix"]["include"]:
        stages = re.findall(r" AS (\w+)$", (ROOT / image["file"]).read_text(), re.MULTILINE)
        assert image.get("target") in {*stages, None}
    assert not re.search(r"\w\.(com|dev|io|org)\b", text)


def test_services_have_no_rights_mount_files_that_exist_and_publish_on_loopback_alone() -> None:
    for service in OURS.values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
    published = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    for mount in (mount for service in SERVICES.values() for mount in service.get("volumes", [])):
        source, target, *_ = mount.split(":")
        assert (DOCKER / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], target


def test_the_nodes_reach_the_coordinator_through_their_links_and_prometheus_reaches_every_daemon() -> None:
    run = load_run(DOCKER / "config" / "run.toml", flags=[], environ={})
    wanted = {f"coordinator:{port_of(run.coordinator.http)}"}
    nodes = [name for name in SERVICES if name.startswith("node-")]
    assert len(nodes) == run.run.nodes
    for name in nodes:
        letter = name.removeprefix("node-")
        node = load_node(DOCKER / "config" / f"{name}.toml", flags=[], environ={}).node
        link = SERVICES[f"link-{letter}"]["command"]
        assert node.name == letter and node.coordinator == f"tcp://link-{letter}:{port_of(link[-1])}"
        assert link[link.index("--to") + 1] == f"coordinator:{port_of(run.coordinator.bind)}"
        Link.parse(re.sub(r"\$\{\w+:-(.*)\}", r"\1", link[1]))
        assert f"./config/{name}.toml:/etc/farloop/node.toml:ro" in SERVICES[name]["volumes"]
        wanted.add(f"{name}:{port_of(node.http)}")
    jobs = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert {target for job in jobs for fixed in job["static_configs"] for target in fixed["targets"]} == wanted


def test_the_service_that_makes_the_keys_makes_those_that_the_daemons_read(tmp_path: Path) -> None:
    """Its very script, with /keys somewhere else; twice, for a second start finds them there."""
    shell, flags = SERVICES["keys"]["entrypoint"]
    (script,) = SERVICES["keys"]["command"]
    here = script.replace("/keys", str(tmp_path)).replace("$$", "$")
    commands = f'farloop() {{ {shlex.quote(sys.executable)} -m farloop.cli.main "$@"; }}\n{here}'
    for _ in range(2):
        done = subprocess.run([shell, flags, commands], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
    for file, section in (("run.toml", "coordinator"), ("node-a.toml", "node"), ("node-b.toml", "node")):
        settings = tomllib.loads((DOCKER / "config" / file).read_text())[section]
        for key in ("key", "server_key", "allow"):
            if key in settings:
                assert (tmp_path / Path(settings[key]).relative_to("/keys")).exists()
    assert {path.name for path in (tmp_path / "allowed").iterdir()} == {"a.pub", "b.pub"}
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.glob("*.key"))
