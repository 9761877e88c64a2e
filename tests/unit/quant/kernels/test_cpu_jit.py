"""Kernels are compiled when they are needed, and once."""

import ast
import importlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import pytest

from farloop.quant.kernels.cpu import primitives
from farloop.quant.kernels.cpu.kernels import warm
from farloop.quant.kernels.cpu.primitives import Kernel


def halved(x: float) -> float:
    return x / 2


def test_a_kernel_is_compiled_at_its_first_call_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_it = Kernel._compile

    def counted(self: Kernel) -> object:
        compiled.append(self.name)
        return compile_it(self)

    monkeypatch.setattr(Kernel, "_compile", counted)
    kernel = Kernel("halved", "float64(float64)", halved)
    assert compiled == []
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda x: kernel.compiled()(x), [1.0, 2.0, 3.0, 4.0])) == [0.5, 1.0, 1.5, 2.0]
    assert compiled == ["halved"]


def test_without_a_place_on_disk_a_kernel_is_compiled_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    njit: Any = numba.njit

    def nowhere(*args: object, cache: bool = False, **options: object) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", nowhere)
    assert Kernel("halved", "float64(float64)", halved).compiled()(3.0) == 1.5


def test_warming_up_compiles_what_a_run_needs_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm(["q4", "no format of this folder"]) >= 0
    monkeypatch.setattr(Kernel, "_compile", lambda self: pytest.fail(f"{self.name} was not warm"))
    assert warm(["q4"]) < 1


def test_the_kernels_kept_on_disk_are_those_of_all_sources_that_they_are_made_of() -> None:
    sources = set(primitives.sources())
    for path in sources:
        for part in ast.walk(ast.parse(path.read_text())):
            if isinstance(part, ast.ImportFrom) and part.module and part.module.startswith("farloop."):
                module = importlib.import_module(part.module)
                of_package = hasattr(module, "__path__")
                names = [f"{part.module}.{alias.name}" for alias in part.names] if of_package else [part.module]
                for name in names:
                    assert Path(str(importlib.import_module(name).__file__)) in sources, f"{path.name}: {name}"
