"""The order of a set of strings is another in every process; no decision follows it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import environment

from farloop.algo.methods import METHODS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SIMULATED = Path(__file__).with_name("simulated.py")
CASES = SIMULATED.parents[1] / "cases"


@pytest.mark.slow
def test_equal_scenarios_give_equal_tapes_in_processes_that_hash_otherwise() -> None:
    """Y, for every method."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(SIMULATED)],
            env={**environment(), "PYTHONPATH": str(CASES), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    told = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
            told.append(json.loads(out))
    finally:
        for process in processes:
            process.kill()
    assert told[0].keys() == METHODS.keys()
    assert told[0] == told[1]
