"""Images built from the Dockerfiles as they are, in a store of their own, and containers of them.

A base image comes from a registry, which a test should not need: here it is the distribution's own Python, under a
name that the Dockerfiles take as BASE. What this machine's pip is told (`pip config list`), pip is told in the build.
"""

import ast
import functools
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolbox import CACHE, ROOT, root_needed, run, tool

BASE = "localhost/python:3.11"
PROMETHEUS = "localhost/prometheus:distribution"
SUITE, PYTHON = "bookworm", "python3,python3-venv,python3-pip,ca-certificates"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
HARDENED = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--tmpfs", "/tmp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """podman and buildah with settings that work in a virtual machine too."""

    env: dict[str, str]

    def podman(self, *words: str | Path, timeout_s: float = 120, code: int | None = 0, text: str | None = None) -> str:
        told = run(tool("podman"), *words, timeout_s=timeout_s, env=self.env, code=code, text=text)
        # Without systemd it has no timer for health checks and says so each time; the tests ask for themselves.
        return "".join(line for line in told.splitlines(True) if "unable to get systemd connection" not in line)

    def has(self, image: str) -> bool:
        done = subprocess.run([tool("podman"), "image", "exists", image], env={**os.environ, **self.env}, timeout=60)
        return done.returncode == 0

    def build(self, dockerfile: str, *, target: str | None, tag: str) -> None:
        """From the whole tree, with the layers of an earlier build where nothing changed."""
        self._base()
        words = ["bud", "--isolation", "chroot", "--format", "docker", "--layers", "--pull-never"]
        words += ["--build-arg", f"BASE={BASE}", "--build-arg", f"PIP_ARGS={os.environ.get('PIP_ARGS', '')}"]
        words += [word for source, at in _mounted().items() for word in ("--volume", f"{source}:{at}:ro")]
        words += ["--target", target] if target else []
        run(
            tool("buildah"), *words, "--ignorefile", ROOT / ".dockerignore", "--file", ROOT / "docker" / dockerfile,
            "--tag", tag, ROOT, timeout_s=1800, env=self.env,
        )  # fmt: skip

    def prometheus(self) -> str:
        """The distribution's Prometheus, where the official image has its files, with that image's user and command."""
        words = ("--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus")
        changes = (f"ENTRYPOINT {json.dumps(['/usr/bin/prometheus', *words])}", "USER 65534:65534", "EXPOSE 9090")
        folder = 'mkdir "$1/prometheus" && chown 65534:65534 "$1/prometheus"'
        self._system(PROMETHEUS, "prometheus", *changes, hook=folder)
        return PROMETHEUS

    def _base(self) -> None:
        self._system(BASE, PYTHON)

    def _system(self, image: str, packages: str, *changes: str, hook: str = "true") -> None:
        """An image of the distribution with these packages; `hook` is run as `$1` holds its files."""
        if self.has(image):
            return
        archive = CACHE / "base.tar"
        words = ["--variant=minbase", f"--include={packages}", f"--customize-hook={hook}", SUITE, archive]
        run(tool("mmdebstrap"), *words, timeout_s=600)
        self.podman(
            "import", *(word for change in changes for word in ("--change", change)), archive, image, timeout_s=300
        )
        archive.unlink()


@functools.cache
def _mounted() -> dict[str, str]:
    """Files and folders of this machine that pip in a build needs, and where it sees them."""
    told: dict[str, Any] = {}
    for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
        name, _, value = line.partition("=")
        if name.startswith("global."):
            told[name.removeprefix("global.")] = ast.literal_eval(value)
    # Among wheels whose hashes are required, pip prefers those that its index has a hash for: so do those of a folder.
    if (found := Path(str(told.get("find-links")))).is_dir():
        wheels = CACHE / "wheels.html"
        links = (f"{path.as_uri()}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}" for path in found.iterdir())
        wheels.write_text("".join(f'<a href="{link}">{link}</a>\n' for link in links))
        told["find-links"] = f"{wheels} {found}"
    config = CACHE / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in told.items()))
    mounted = {str(config): "/etc/pip.conf"}
    for word in " ".join(map(str, told.values())).split():  # indexes, constraints, certificates
        path = word.removeprefix("file://").removesuffix("/simple")
        if path.startswith("/") and Path(path).exists():
            mounted[path] = path
    if CERTIFICATES.exists():
        mounted[str(CERTIFICATES)] = str(CERTIFICATES)
    return mounted


@functools.cache
def engine() -> Engine:
    """Skips the test where images cannot be built."""
    root_needed("containers get a network")
    for name in ("buildah", "podman", "runc"):
        tool(name)
    at = CACHE / "containers"
    at.mkdir(parents=True, exist_ok=True)
    storage, settings = at / "storage.conf", at / "containers.conf"
    storage.write_text(f'[storage]\ndriver = "overlay"\nrunroot = "{at}/run"\ngraphroot = "{at}/images"\n')
    # Limits that an engine may set without CAP_SYS_RESOURCE, and no systemd.
    settings.write_text(
        '[containers]\ndefault_ulimits = ["nofile=20000:20000", "nproc=16384:16384"]\n'
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        '[network]\nnetwork_backend = "netavark"\n'
    )
    return Engine(env={"CONTAINERS_STORAGE_CONF": str(storage), "CONTAINERS_CONF": str(settings)})
