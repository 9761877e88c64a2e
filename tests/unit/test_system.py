"""What this process asks of the system (`runtime/system.py`)."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest
import uvloop

from farloop.runtime.system import LoopClock, ThreadWorker, yield_cores

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


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_a_worker_that_yields_has_a_lower_priority_and_others_keep_theirs() -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before, found = nice(), list[int]()
    worker = ThreadWorker("yields", lambda action: action(), yield_cores)
    worker.submit(nice, found.append, lambda error: None)
    worker.close()
    assert found == [max(before, 10)]
    assert nice() == before


def test_a_timer_calls_no_earlier_than_it_was_asked_to() -> None:
    """Else whoever asks again for the rest of a millisecond is called dozens of times for each timer."""
    early = []

    async def calls() -> None:
        clock = LoopClock(lambda error: pytest.fail(str(error)))
        for delay_s in [0.0021 * number for number in range(1, 9)] * 4:
            due, called = clock.now() + delay_s, asyncio.Event()
            clock.call_later(delay_s, called.set)
            await called.wait()
            early.append(clock.now() < due)

    uvloop.run(calls())
    assert len(early) == 32 and not any(early)
