"""`docs/methods.md`: its table is the code's, and every function that it puts beside an equation exists."""

import ast
import re
from pathlib import Path

import pytest

from farloop.algo.methods import METHODS, Method

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/methods.md").read_text(encoding="utf-8")


def row_of(method: Method) -> list[str]:
    return [
        f"`{method.name}`",
        str(method.h),
        str(method.tau),
        f"{method.mix:g}",
        str(method.lag),
        f"{method.codec_up}, {method.codec_down}",
        f"{method.merge}, {method.weights}",
        method.outer,
        "all" if method.quorum is None else str(method.quorum),
        method.on_late_update,
    ]


def defined() -> set[str]:
    """Functions as module.name, methods as Class.name."""
    names: set[str] = set()
    for path in [path for room in ("algo", "node", "coordinator", "quant") for path in (ROOT / room).rglob("*.py")]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                names.add(f"{path.stem}.{node.name}")
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def test_the_table_holds_every_method_with_its_defaults() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
    table = [row for row in rows if len(row) == 10 and row[0].startswith("`")]
    assert table == [row_of(method) for method in METHODS.values()]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_section_and_is_advised_to_some_reader(method: str) -> None:
    assert f"\n## {method}\n" in PAGE
    advice = PAGE[PAGE.index("## Which one") : PAGE.index("## Words")]
    assert f"`{method}`" in advice


def test_every_function_beside_an_equation_exists() -> None:
    named = set(re.findall(r"`([A-Za-z_0-9]+\.[a-z_]+)`", PAGE)) - {"RUN.toml"}
    assert len(named) > 15
    assert {name for name in named if not name.endswith((".toml", ".md"))} <= defined()
