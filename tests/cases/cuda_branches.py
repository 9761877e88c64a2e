"""Where node/ and quant/ ask for the type of a device, and which of these lines a block of code has run."""

import ast
import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from pretend_cuda import ROOT

Line = tuple[str, int]


def branches() -> dict[Line, str]:
    """By file and line: "module: expression". The line is that of the question, or what is run on CUDA alone."""
    return {
        (str(path), line): f"{path.relative_to(ROOT)}: {asks}"
        for folder in ("node", "quant")
        for path in sorted(Path(ROOT, folder).rglob("*.py"))
        for line, asks in _in(path)
    }


def _in(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Compare) and isinstance(node.comparators[-1], ast.Constant):
            asks = ast.unparse(node)
            if asks.endswith((".type == 'cuda'", ".type != 'cpu'", ".type != 'cuda'", ".type == 'cpu'")):
                yield node.lineno, asks
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith((".type == 'cuda'", ".type != 'cpu'")):
            yield node.body[0].lineno, ast.unparse(node.test)


@contextlib.contextmanager
def traced(wanted: dict[Line, str]) -> Iterator[None]:
    """Takes out of `wanted` what is run inside, in any thread."""
    files = {path for path, _ in wanted}

    def lines(frame: FrameType, event: str, _: object) -> Any:
        wanted.pop((frame.f_code.co_filename, frame.f_lineno), None)
        return lines

    def calls(frame: FrameType, event: str, _: object) -> Any:
        return lines if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    threading.settrace(calls)
    sys.settrace(calls)
    try:
        yield
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]
