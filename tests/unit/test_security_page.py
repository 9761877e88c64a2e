"""`docs/security.md` says which tests hold what it says: they exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_tests_that_the_page_names_exist() -> None:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) >= 8
    for path, test in named:
        functions = {
            part.name for part in ast.parse((ROOT / path).read_text()).body if isinstance(part, ast.FunctionDef)
        }
        assert test in functions, f"{path}::{test}"
