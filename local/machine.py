"""What a result is from: the command, the day, the machine and the commit."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import torch

from farloop.monitoring.units import plural


def origin() -> dict[str, str]:
    """What a result is recorded with: `docs/reference.py` shows it below the tables that it makes of the rows."""
    return {
        "command": shlex.join(["farloop", *sys.argv[1:]]),
        "date": f"{datetime.now(UTC):%F}",
        "machine": machine(),
        "commit": source_commit() or "unknown",
    }


def cpu_model() -> str:
    for line in text_of(Path("/proc/cpuinfo")).splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine() -> str:
    """This machine in a line: processor, cores, Python and torch."""
    cores = plural(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, "core")
    return f"{cpu_model()}, {cores}, Python {platform.python_version()}, torch {torch.__version__}"


@lru_cache(maxsize=1)
def source_commit() -> str | None:
    """The commit of the source tree; None for an installed package."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def text_of(path: Path) -> str:
    """A file's text; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
