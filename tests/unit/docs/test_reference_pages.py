"""Pages of reference, the changelog, the licence and the images agree with the code and with pyproject.toml."""

import ast
import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from farloop.config.settings import NODE_SCHEMA, RUN_SCHEMA

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION: str = PROJECT["version"]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_reference", ROOT / "docs/reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_what_the_code_and_the_results_say_today() -> None:
    pages: dict[Path, str] = made().pages()
    stale = [page.name for page, text in pages.items() if page.read_text(encoding="utf-8") != text]
    assert not stale and {"cli.md", "configuration.md", "performance.md"} <= {page.name for page in pages}, (
        f"{stale}: run: python docs/reference.py"
    )
    told = "".join(pages.values())
    assert len(re.findall("<!-- (?:rows of|measured:)", told)) == len(made()._RESULTS.findall(told)), "a bad mark"
    for result in (ROOT / "docs/results").iterdir():
        assert f"/{result.name}) `farloop " in told, f"no page says what {result} is from"


def test_a_table_has_what_the_results_have(tmp_path: Path) -> None:
    rows = [{"of": "a", "op": "up", "s": 0.25}, {"of": "a", "op": "down", "s": 2}, {"of": "b", "op": "up", "s": 3}]
    origin = {"command": "farloop x", "commit": "1a2b3c", "date": "2026-01-02", "machine": "a machine"}
    (tmp_path / "x.json").write_text(json.dumps({**origin, "rows": rows, "by": {"k": {"s": 1}}}))
    (tmp_path / "y.json").write_text(json.dumps(origin))
    page, mark, head = tmp_path / "page.md", "<!-- rows of x.json", "| | | |\n| --- | --- | --- |\n"
    page.write_text(
        f"{mark} by of op: `{{of}}` | {{up[s]:1e3*.0f}} ms | {{down[s]:.1f}} -->\n{head}| old | 1 | 2 |\n\n"
        f"{mark} by: {{key}} | {{s:.0%}} -->\n{head}\n<!-- measured: x.json y.json -->\n- old\n\nend\n"
    )
    tables = made().measured(page)
    assert "old" not in tables and tables.endswith("\n\nend\n")
    assert "| --- |\n| `a` | 250 ms | 2.0 |\n| `b` | 3000 ms |  |\n\n" in tables and "|\n| k | 100% |\n\n" in tables
    assert "-->\n- commit 1a2b3c, 2026-01-02, a machine: [x](x.json) `farloop x`; [y](y.json) `farloop x`\n\n" in tables
    page.write_text(f"{mark} rows by of op: {{of}} | {{up[s]}} | {{gone}} -->\n{head}")
    with pytest.raises(AssertionError, match="a column is empty"):
        made().measured(page)


def test_every_key_stands_on_the_page_with_its_meaning() -> None:
    page = text_of("docs/configuration.md")
    for section, keys in [*RUN_SCHEMA.items(), *NODE_SCHEMA.items()]:
        assert f"### [{section}]" in page
        for key in keys.values():
            assert key.meaning and f"\n- `{key.name}` (" in page, f"[{section}] {key.name}"


def test_the_head_of_the_start_page_is_its_settings() -> None:
    """mkdocs shows as text what it cannot read."""
    assert re.match(r"---\n(?:\w+: [^:\n]+\n)+---\n", text_of("docs/index.md"))


def test_the_reading_list_names_functions_that_exist_and_counts_their_lines() -> None:
    path = text_of("docs/architecture.md").partition("## The path of a fragment")[2].partition("\n## ")[0]
    lines, files, lists = 0, list[str](), 0
    for link, named in re.findall(r"\]\(\.\./([\w/]+\.py)\)|Read: ([\w/]+\.py [^|]+?)\.\n", path):
        files += [link] if link else []
        lists += bool(named)
        for file, names in re.findall(r"([\w/]+\.py)\s([^;]+)", named):
            there = file if "/" in file else next(known for known in reversed(files) if known.endswith(f"/{file}"))
            functions: dict[str, int] = {}
            for owner in ast.walk(ast.parse(text_of(there))):
                for node in ast.iter_child_nodes(owner):
                    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                        for name in (node.name, f"{getattr(owner, 'name', '')}.{node.name}"):
                            functions[name] = max(functions.get(name, 0), node.end_lineno - node.lineno + 1)
            lines += sum(functions[name] for name in re.findall(r"`([\w.]+)`", names))
    told = re.search(r"reading list of a new developer: about ([\d,]+)\slines", path)
    assert lists == path.count("Read: ") == 8
    assert told is not None and abs(int(told[1].replace(",", "")) - lines) <= 150, f"the functions have {lines} lines"


def test_the_changelog_begins_with_what_is_unreleased_or_with_this_version() -> None:
    headings = re.findall(r"^## \[(.+?)\]", text_of("CHANGELOG.md"), flags=re.MULTILINE)
    assert headings[0] in ("Unreleased", VERSION)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert not released or released[0] == VERSION
    assert released == sorted(released, key=lambda one: [int(part) for part in one.split(".")], reverse=True)
    for image in ("coordinator", "node"):
        said = re.findall(r"^ARG VERSION=(.*)$", text_of(f"docker/{image}.Dockerfile"), flags=re.MULTILINE)
        assert said in ([VERSION], ["unknown"]), "an image says no other version"
    assert PROJECT["license"] == "Apache-2.0" and text_of("LICENSE").lstrip().startswith("Apache License")


def test_every_dependency_is_pinned_for_the_images() -> None:
    pinned = [line.partition("==")[0] for line in text_of("constraints.txt").splitlines() if "==" in line]
    pins = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    extras = PROJECT["optional-dependencies"]
    for needed in [*PROJECT["dependencies"], *extras["dev"], *extras["docs"], *extras["release"]]:
        name = re.match(r"[\w.-]+", needed)
        assert name is not None and re.sub(r"[-_.]+", "-", name[0]).lower() in pins, f"{needed} has no pin"


def test_every_number_of_the_limits_stands_on_a_page_that_its_row_leads_to() -> None:
    rows = [
        line
        for line in text_of("docs/limits.md").splitlines()
        if line.startswith("| ") and line[2:6] not in ("what", "--- ")
    ]
    pages: list[str] = []
    for row in rows:
        pages = re.findall(r"\]\(([\w-]+\.md)", row) or pages  # "the same": those of the row before
        told = "\n".join(text_of(f"docs/{page}") for page in pages)
        for number in re.findall(r"\d[\d,.]*\d|\d", re.sub(r"\]\([^)]*\)", "", row)):
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)", told), f"{number}: {row}"
    assert len(rows) > 8
