"""How CPU kernels are compiled, kept, and dealt to threads."""

import ast
import importlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from farloop.quant.kernels.cpu import primitives
from farloop.quant.kernels.cpu.kernels import warm
from farloop.quant.kernels.cpu.primitives import Kernel, kernel_threads, on_parts


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
    assert warm(["q4", "topk"]) >= 0  # a format without kernels needs none
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


MANY = 1 << 14  # blocks of 256: enough for 32 threads


def parts_of(num_blocks: int, threads: int | None = None) -> list[tuple[int, int]]:
    parts: list[tuple[int, int]] = []

    def kernel(first: int, last: int) -> int:
        parts.append((first, last))
        return -1

    with kernel_threads(threads) if threads else nullcontext():
        assert on_parts(kernel, num_blocks=num_blocks, block=256) == -1
    return sorted(parts)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("num_blocks", [0, 1, MANY, MANY + 5])
def test_every_block_is_in_one_part(threads: int, num_blocks: int) -> None:
    parts = parts_of(num_blocks, threads)
    assert [block for first, last in parts for block in range(first, last)] == list(range(num_blocks))
    assert len(parts) == (threads if num_blocks >= MANY else 1)


def test_limits_nest_and_belong_to_one_thread() -> None:
    with kernel_threads(2):
        assert len(parts_of(MANY)) == 2
        with kernel_threads(1):
            assert len(parts_of(MANY)) == 1
        assert len(parts_of(MANY)) == 2
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(len(parts_of(MANY))))
        other.start()
        other.join()
    assert [len(parts_of(MANY)), *found] == [torch.get_num_threads()] * 2
    with pytest.raises(ValueError, match="at least 1"), kernel_threads(0):
        pass


def test_the_first_fault_of_all_parts_is_told_and_an_error_raised() -> None:
    def faulty(first: int, last: int) -> int:
        return -1 if first == 0 else first + 7

    def broken(first: int, last: int) -> int:
        if first > 0:
            raise RuntimeError("broken")
        return -1

    with kernel_threads(4):
        assert on_parts(faulty, num_blocks=MANY, block=256) == MANY // 4 + 7
        with pytest.raises(RuntimeError, match="broken"):
            on_parts(broken, num_blocks=MANY, block=256)


def test_kernels_lie_in_a_users_cache_and_old_ones_are_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "farloop" / "farloop-kernels"
    for age in range(1, 11):
        (root / f"old{age}").mkdir(parents=True)
        os.utime(root / f"old{age}", (1e9 - age, 1e9 - age))
    folder = primitives.cache_folder.__wrapped__()
    assert folder.parent == root
    assert {path.name for path in root.iterdir()} == {folder.name, *(f"old{age}" for age in range(1, 8))}
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "own"))
    assert primitives.cache_folder.__wrapped__() == tmp_path / "own" / "farloop-kernels" / folder.name
    (tmp_path / "file").touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file"))
    assert primitives.cache_folder.__wrapped__() is None


def test_kernels_of_others_keep_their_place(tmp_path: Path) -> None:
    file = tmp_path / "theirs.py"
    file.write_text("import numba\n@numba.njit(cache=True)\ndef one():\n    return 1\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from farloop.quant.kernels.cpu import primitives\n"
    script += "import theirs; assert theirs.one() == 1"
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    subprocess.run([sys.executable, "-c", script], env=env, timeout=120, check=True)
    assert list((tmp_path / "__pycache__").glob("theirs.one-*.nbi"))
