"""What the deployment tests run beside Python, and why a test that cannot have it is skipped.

`tests/deploy/setup.sh` puts the tools into .cache/deploy and the distribution's packages into the system.
"""

import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "deploy"
"""Ignored by git: tools, container images, Kubernetes' binaries."""

_WHERE = os.pathsep.join([str(CACHE / "bin"), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

T = TypeVar("T")


def tool(name: str) -> str:
    """Its path. Skips the test that asks where it is missing."""
    found = shutil.which(name, path=_WHERE)
    if found is None:
        pytest.skip(f"{name} is missing: tests/deploy/setup.sh installs it")
    return found


def root_needed(why: str) -> None:
    """Skips the test unless it is run as root."""
    if os.geteuid() != 0:
        pytest.skip(f"needs root: {why}")


def run(
    *words: str | Path,
    timeout_s: float = 120,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    text: str | None = None,
    code: int | None = 0,
) -> str:
    """What a command wrote, both streams together. Fails with it unless the exit code is `code` (None: any)."""
    done = subprocess.run(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=timeout_s,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        input=text,
    )
    assert code is None or done.returncode == code, (
        f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout[-6000:]}"
    )
    return done.stdout


def until(
    what: str, poll: Callable[[], T], *, within_s: float, tell: Callable[[], str] = str, every_s: float = 1.0
) -> T:
    """The first true value of `poll`; fails with what was waited for, and with `tell()`, after `within_s` seconds."""
    end = time.monotonic() + within_s
    while not (value := poll()):
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}\n{tell()}"
        time.sleep(every_s)
    return value


def page(address: str) -> str | None:
    """What `http://ADDRESS` answers with 200; None otherwise."""
    try:
        with urllib.request.urlopen(f"http://{address}", timeout=5) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError):
        return None
