"""What Python code costs, counted: a machine's speed and load do not matter."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def work_of(work: Callable[[], object]) -> int:
    """How many instructions of the interpreter it takes: neither sets nor sorting, which are faster by far."""
    count = 0

    def trace(frame: FrameType, what: str, argument: object) -> Callable[..., Any]:
        nonlocal count
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        count += what == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
