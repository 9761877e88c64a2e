"""What `make demo-hf` runs, with fewer steps."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[2] / "examples" / "hf_demo.py"


@pytest.mark.slow
def test_a_llama_is_trained_loses_a_process_and_is_loaded_by_transformers(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "36", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the sharded node trains again, as its start number 2" in done.stdout
    assert "def __init__(self" in done.stdout.partition("and writes:")[2]
