"""Runs of real processes that end with their test, however it ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from loopback import NewRun, Run


@pytest.fixture
def new_run(tmp_path: Path) -> Iterator[NewRun]:
    """Each run has a folder of its own."""
    runs: list[Run] = []

    def make(**settings: object) -> Run:
        folder = tmp_path / f"run-{len(runs)}"
        folder.mkdir()
        runs.append(Run(folder, **settings))
        return runs[-1]

    yield make
    for run in runs:
        run.end()
