"""What this process asks of the system (`runtime/system.py`)."""

import subprocess
import sys

import pytest

_FAULTS = """
import resource, sys
from farloop.runtime.system import keep_freed_blocks
if sys.argv[1] == "kept":
    keep_freed_blocks()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(13 << 20) for _ in range(3)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_blocks_that_are_made_and_freed_again_and_again_keep_their_pages() -> None:
    counts = {
        how: int(subprocess.run([sys.executable, "-c", _FAULTS, how], capture_output=True, check=True).stdout)
        for how in ("kept", "returned")
    }
    assert counts["kept"] < 100 < 3000 < counts["returned"]
