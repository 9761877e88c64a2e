"""A hook of mkdocs: pages that lie beside what they are about (k8s/README.md, CHANGELOG.md, …) belong to the site too.

Links are written for the tree, where everybody can follow them, and turned into the site's here. Whatever of the tree
is linked to from a page comes along: a page as a page, a text as a page that shows it, anything else as it is.
"""

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]

_log = get_plugin_logger("tree")

_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")

_CELL_CODE = re.compile(r"`([^`]*\\\|[^`]*)`")
"""Code in a table with a bar, which everybody but Python-Markdown wants escaped."""

_LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".json": "json"}
_TEXTS = frozenset({"Makefile", "LICENSE"})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the navigation that are not in docs/, and whatever of the tree is linked to."""
    todo = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    todo += [path for path in _paths(config.nav) if path is not None and not (ROOT / "docs" / path).is_file()]
    todo = [path if path != "readme.md" else "README.md" for path in todo]
    seen: set[str] = set()
    while todo:
        path = todo.pop()
        if path in seen or not (ROOT / path).exists():
            continue  # what does not exist is told of by mkdocs, where it is linked to
        seen.add(path)
        if not path.startswith("docs/"):
            files.append(_file(path, config))
        if path.endswith(".md"):
            lines = [line for line, is_prose in _lines((ROOT / path).read_text(encoding="utf-8")) if is_prose]
            targets = (_target(path, match[2]) for line in lines for match in _LINK.finditer(line))
            todo += [target for target in targets if target is not None]
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Turns the links of a page into the site's, and what is written for others into what Python-Markdown wants."""
    path = _in_tree(page.file.src_uri)

    def moved(match: re.Match[str]) -> str:
        target = _target(path, match[2])
        if target is None:
            _log.warning(f"{path}: {match[2]} is a folder without a README.md")
            return match[0]
        there = posixpath.relpath(_in_site(target), posixpath.dirname(page.file.src_uri))
        return f"{match[1]}{there}{match[3] or ''}"

    def turned(line: str) -> str:
        line = _LINK.sub(moved, line)
        return _CELL_CODE.sub(_code, line) if line.startswith("|") else line

    return "\n".join(_spaced(turned(line) if is_prose else line for line, is_prose in _lines(markdown)))


# --- names


def _target(page: str, link: str) -> str | None:
    """What a link of a page of the tree leads to, as a path of the tree; None for a folder without a page."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if (ROOT / path).is_dir():
        path = f"{path}/README.md"
        return path if (ROOT / path).is_file() else None
    return path


def _in_site(path: str) -> str:
    if path == "README.md":  # the site's own first page is docs/index.md
        return "readme.md"
    return path.removeprefix("docs/") if path.startswith("docs/") or _is_page(path) else f"{path}.md"


def _in_tree(uri: str) -> str:
    if uri == "readme.md":
        return "README.md"
    return f"docs/{uri}" if (ROOT / "docs" / uri).is_file() else uri.removesuffix(".md") if _shown(uri) else uri


def _is_page(path: str) -> bool:
    return path.endswith(".md") or not _is_text(path)


def _is_text(path: str) -> bool:
    return posixpath.splitext(path)[1] in _LANGUAGES or posixpath.basename(path) in _TEXTS


def _shown(uri: str) -> bool:
    """Whether a page only shows a text of the tree."""
    return uri.endswith(".md") and _is_text(uri.removesuffix(".md"))


def _file(path: str, config: MkDocsConfig) -> File:
    if _is_page(path):
        return File.generated(config, _in_site(path), abs_src_path=str(ROOT / path))
    language = _LANGUAGES.get(posixpath.splitext(path)[1], "text")
    text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
    return File.generated(config, _in_site(path), content=f"# {path}\n\n````{language}\n{text}\n````\n")


# --- texts


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Every line, and whether it is outside of fenced code."""
    fence = ""
    for line in markdown.split("\n"):
        mark = re.match(r"\s*(```+)", line)
        if mark and (not fence or line.strip() == fence):
            yield line, False
            fence = "" if fence else mark[1]
        else:
            yield line, not fence


def _code(match: re.Match[str]) -> str:
    return f"<code>{html.escape(match[1].replace(chr(92) + '|', '|')).replace('|', '&#124;')}</code>"


def _spaced(lines: Iterator[str]) -> Iterator[str]:
    before = ""
    for line in lines:
        if re.match(r"(- |\* |1\. )", line) and re.match(r"[^\s\-*|]", before):
            yield ""
        yield line
        before = line


def _paths(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for one in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _paths(one)
