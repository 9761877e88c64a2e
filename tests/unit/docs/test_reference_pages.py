"""docs/configuration.md and docs/cli.md say what the code says today."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from farloop.config.settings import NODE_SCHEMA, RUN_SCHEMA

ROOT = Path(__file__).resolve().parents[3]


def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs/reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["configuration.md", "cli.md"])
def test_a_page_of_reference_is_what_the_code_says_today(page: str) -> None:
    pages: dict[Path, str] = made().pages()
    path = ROOT / "docs" / page
    assert path.read_text(encoding="utf-8") == pages[path], "run: python docs/reference.py"


def test_every_key_and_its_meaning_stand_on_the_page() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    for schema in (RUN_SCHEMA, NODE_SCHEMA):
        for section, keys in schema.items():
            assert f"### [{section}]" in page
            for key in keys.values():
                assert key.meaning, f"[{section}] {key.name} says nothing of itself"
                assert f"| `{key.name}` |" in page


def test_every_command_stands_on_the_page_with_its_example() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for command in ("demo", "coordinator", "node", "journal replay", "simulate run", "keys revoke"):
        section = page[page.index(f"### farloop {command}\n") :].split("\n### ")[0]
        assert f"```sh\nfarloop {command}" in section
        assert "| `--" in section
