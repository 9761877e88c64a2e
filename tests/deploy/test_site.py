"""The site of the pages: builds strictly, stops at a link that leads nowhere, and fetches nothing from elsewhere."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is missing: make docs installs it"),
]

ROOT = Path(__file__).resolve().parents[2]


def build(tree: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Runs the command of `make docs`: its options decide whether a warning counts (under --quiet, none does)."""
    command = re.search(r"/mkdocs (build .*)$", (tree / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert command is not None
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", *command[1].split(), "--site-dir", site],
        cwd=tree,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what git knows: a page that is there and not committed is no page."""
    copy = tmp_path / "tree"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    return copy


def test_the_site_builds_with_the_pages_that_lie_beside_what_they_are_about(tree: Path, tmp_path: Path) -> None:
    ended = build(tree, tmp_path / "site")
    assert ended.returncode == 0, ended.stderr
    for page in ("index.html", "k8s/index.html", "docker/index.html", "wire/index.html", "readme/index.html"):
        assert (tmp_path / "site" / page).is_file(), page
    assert "farloop keys new" in (tmp_path / "site/cli/index.html").read_text(encoding="utf-8")
    assert "class Mixer" in re.sub(
        "<[^>]+>", "", (tmp_path / "site/examples/own_loop.py/index.html").read_text(encoding="utf-8")
    )


def test_a_link_that_leads_nowhere_stops_the_build(tree: Path, tmp_path: Path) -> None:
    for broken in ("[no page](nowhere.md)", "[no part](methods.md#nowhere)", "[no file](../algo/nowhere.py)"):
        shutil.copyfile(ROOT / "docs/faq.md", tree / "docs/faq.md")
        with (tree / "docs/faq.md").open("a", encoding="utf-8") as page:
            page.write(f"\n{broken}\n")
        ended = build(tree, tmp_path / "site")
        assert ended.returncode != 0 and "nowhere" in ended.stderr, broken


def test_a_page_fetches_nothing_from_elsewhere(tree: Path, tmp_path: Path) -> None:
    assert build(tree, tmp_path / "site").returncode == 0
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(
            r'<(?:script|img|iframe)[^>]+src="([^"]+)"|<link[^>]+rel="stylesheet"[^>]+href="([^"]+)"', text
        )
        assert not [one for pair in loaded for one in pair if one.startswith(("http:", "https:", "//"))], page
