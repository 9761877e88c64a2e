"""Writes docker/requirements.txt: what the images install, with the hashes of its wheels for x86-64 and arm64.

    python docker/requirements.py      # asks pip's index, for half a minute

The packages are those that farloop[cloud,hf] needs in this environment, the versions those of constraints.txt. torch
has two wheels for x86-64, with CUDA and without: run this where pip's indexes offer both.
"""

import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("cloud", "hf")
PYTHON = "3.11.7"
"""The images' own; wheels for other versions have other hashes."""

MACHINES = ("x86_64", "aarch64")
LIBCS = (*(f"manylinux_2_{minor}" for minor in (28, 27, 26, 24, 17, 12, 5)), "manylinux2014")
BROUGHT_BY_CUDA = re.compile(r"nvidia-|cuda-|triton$")
"""torch with CUDA needs these too. No list of hashes has them: torch's own metadata names their exact versions."""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    """Name → version, of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {plain(name): version for name, _, version in (line.partition("==") for line in lines) if version}


def needed() -> set[str]:
    """The packages of the images."""
    found: set[tuple[str, tuple[str, ...]]] = set()
    todo = [("farloop", EXTRAS)]
    while todo:
        name, extras = one = todo.pop()
        if one in found:
            continue
        found.add(one)
        for text in importlib.metadata.requires(name) or ():
            needs = Requirement(text)
            if BROUGHT_BY_CUDA.match(plain(needs.name)):
                continue
            if needs.marker is None or any(needs.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                todo.append((plain(needs.name), tuple(sorted(needs.extras))))
    return {name for name, _ in found} - {"farloop"}


def hashes(machine: str, wanted: list[str]) -> dict[str, str]:
    """Name → sha256 of the wheel that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = ["install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--only-binary=:all:"]
        words += [word for libc in LIBCS for word in ("--platform", f"{libc}_{machine}")]
        words += ["--python-version", PYTHON, "--target", folder, "--report", str(report), *wanted]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, stderr=subprocess.PIPE, text=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {plain(one["metadata"]["name"]): one["download_info"]["archive_info"]["hashes"]["sha256"] for one in found}


def main() -> None:
    """Ask, and write."""
    versions = pins()
    found: dict[str, set[str]] = {name: set() for name in needed()}
    wanted = [f"{name}=={versions[name]}" for name in found]
    for machine, asked in [
        *((machine, wanted) for machine in MACHINES),
        (MACHINES[0], [f"torch==={versions['torch']}"]),
    ]:
        for name, digest in hashes(machine, asked).items():
            found[name].add(digest)
    lines = ["# Made by docker/requirements.py."]
    for name in sorted(found):
        lines.append(f"{name}=={versions[name]}" + "".join(f" --hash=sha256:{one}" for one in sorted(found[name])))
    (ROOT / "docker" / "requirements.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
