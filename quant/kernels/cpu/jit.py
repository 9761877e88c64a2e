"""How functions of this folder are compiled: when first called, for one signature, kept on disk from run to run.

What numba's defaults would do otherwise: fastmath stays off and nothing is contracted, so that every operation rounds
as IEEE says; divisions do not branch; the interpreter lock is released; there are no parallel loops (`threads.py`).
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import binding  # type: ignore[import-untyped]
from numba.extending import register_jitable

from farloop.quant import packing

Function = TypeVar("Function", bound=Callable[..., Any])

Number = Any
"""A scalar inside a kernel, of the type that numba infers."""

Numbers = Any
"""A pointer inside a kernel, of the type that numba infers."""

_compiling = threading.Lock()


def inlined(function: Function) -> Function:
    """For functions that kernels call: they are compiled as part of their callers."""
    return register_jitable(forceinline=True)(function)


class Kernel:
    """A function that is compiled for one signature when it is first called."""

    def __init__(self, name: str, signature: str, function: Callable[..., Any]) -> None:
        self.name = name
        self._signature = signature
        self._function = function
        self._compiled: Callable[..., Any] | None = None

    def compiled(self) -> Callable[..., Any]:
        if self._compiled is None:
            with _compiling:
                if self._compiled is None:
                    self._compiled = self._compile()
        return self._compiled

    def _compile(self) -> Callable[..., Any]:
        # Numba names its files after the function, and takes what it finds there if the function's own file has not
        # changed. This name changes with all that is compiled in, and no two kernels or machines share one: processes
        # that start together on an empty cache could otherwise mix up each other's kernels.
        self._function.__qualname__ = f"{self.name}.{_fingerprint()}"
        options: Any = {"nogil": True, "error_model": "numpy", "boundscheck": False}
        try:
            decorator = numba.njit(self._signature, cache=True, **options)
            return cast(Callable[..., Any], decorator(self._function))
        except RuntimeError:  # there is no place on disk that may be written to
            decorator = numba.njit(self._signature, **options)
            return cast(Callable[..., Any], decorator(self._function))


def warm_up(kernels: Iterable[Kernel]) -> float:
    """Compile, or load from disk; seconds that it took."""
    started = time.monotonic()
    for kernel in kernels:
        kernel.compiled()
    return time.monotonic() - started


def sources() -> list[Path]:
    """What kernels are made of: this folder, and the formats' constants."""
    return [*sorted(Path(__file__).parent.glob("*.py")), Path(packing.__file__)]


@cache
def _fingerprint() -> str:
    """Of the sources, of numba and of the CPU."""
    digest = hashlib.blake2b(digest_size=6)
    for path in sources():
        digest.update(path.read_bytes())
    digest.update(f"{numba.__version__} {binding.get_host_cpu_name()}".encode())
    digest.update(binding.get_host_cpu_features().flatten().encode())
    return digest.hexdigest()
