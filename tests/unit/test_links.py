"""Links and file names on the pages of the tree lead somewhere."""

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")
FILE = re.compile(r"`([\w./-]+\.(?:py|md))`")


@cache
def tree() -> frozenset[str]:
    """Files that git knows or would add, and their folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    files = [Path(name) for name in listed.stdout.decode().splitlines() if (ROOT / name).exists()]
    return frozenset(str(path) for file in files for path in (file, *file.parents))


def prose(page: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: str) -> frozenset[str]:
    """Ids that the site gives to headings, and those written by hand."""
    text = prose(page)
    titles = [re.sub(r"[`*]|\s*\{#.*\}$", "", title) for title in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)]
    slugs = [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles]
    return frozenset([*slugs, *re.findall(r"\{#([\w-]+)", text), *re.findall(r'\bid="([\w-]+)"', text)])


def test_every_link_leads_to_a_file_and_to_a_heading() -> None:
    broken = []
    for page in sorted(path for path in tree() if path.endswith(".md")):
        for target, anchor in LINK.findall(prose(page)):
            if re.match(r"\w+:", target):
                continue
            path = str((ROOT / page).parent.joinpath(target).resolve().relative_to(ROOT)) if target else page
            if path not in tree():
                broken.append(f"{page}: no file {target}")
            elif anchor and path.endswith(".md") and anchor not in anchors(path):
                broken.append(f"{page}: no heading {target}#{anchor}")
    assert not broken, "\n".join(broken)


def test_every_file_that_a_page_names_exists() -> None:
    names = {Path(path).name for path in tree()}
    gone = [
        f"{page}: {name}"
        for page in sorted(path for path in tree() if path.endswith(".md") and path != "CHANGELOG.md")
        for name in FILE.findall(prose(page))
        if Path(name).name not in names or ("/" in name and not any(path.endswith(name) for path in tree()))
    ]
    assert not gone, "\n".join(gone)
