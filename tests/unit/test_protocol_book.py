"""The rule book, `docs/protocol.md`: its letters, the tests that hold its rules, and who cites it.

`tests/held_by.toml` has the tests, also those of the promises in `docs/reliability.md` and `docs/security.md`.
"""

import ast
import re
import string
import tomllib
from functools import cache
from pathlib import Path

import pytest
from stories import read_stories

ROOT = Path(__file__).resolve().parents[2]
BOOK = (ROOT / "docs/protocol.md").read_text(encoding="utf-8")

HELD_BY: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "tests/held_by.toml").read_text(encoding="utf-8"))

NAMED = (
    "Revisions",
    "Lanes",
    "Object store",
    "Who leads",
    "Adoption",
    "Data leases",
    "What peers claim",
    "Reasons",
    "Participation",
    "Deadlines",
    "The end",
    "Figures",
)
"""Sections that have a name and no letter."""

INVARIANTS = [
    *(f"A{number}" for number in range(1, 17)),
    *(f"B{number}" for number in range(17, 26)),
    *(f"C{number}" for number in range(26, 35)),
    *(f"D{number}" for number in [35, 36, 37, 38, 39]),
]

LETTERS = re.compile(r"\b[Pp]rotocol ([A-Z]\b(?:–[A-Z]\b)?(?:(?:, | and )[A-Z]\b(?:–[A-Z]\b)?)*)")
NAME = re.compile(r"\b[Pp]rotocol(?: [A-Z](?:, [A-Z])*)?(?:, | )\"?([A-Z][a-z]+(?: [a-z]+)?)")


def sections(text: str = BOOK) -> dict[str, str]:
    """The text of each rule, by its letter or name."""
    parts = re.split(r"^#{2,3} (.+)\n", text, flags=re.MULTILINE)
    return {title.partition(". ")[0]: text for title, text in zip(parts[1::2], parts[2::2], strict=True)}


def cited(text: str) -> set[str]:
    """The sections that a text cites as "protocol A, C–E and G", "protocol, Figures" or "protocol Q, Data leases"."""
    prose = re.sub(r"^from typing import .*$", "", text, flags=re.MULTILINE)
    flat = re.sub(r"\s+(?:# )?", " ", prose)
    found = set()
    for letters in LETTERS.findall(flat):
        for first, last in re.findall(r"\b([A-Z])\b(?:–([A-Z]))?", letters, re.ASCII):
            alphabet = string.ascii_uppercase
            found |= set(alphabet[alphabet.index(first) : alphabet.index(last or first) + 1])
    for name in NAME.findall(flat):
        found.add(next((known for known in NAMED if name.startswith(known)), name))
    return found


@cache
def functions_of(path: Path) -> dict[str, list[str]]:
    """The test functions that a file defines, without importing it, and the stories that each plays: `file: title`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name: [
            f"{file.stem}: {story.title}"
            for marker in node.decorator_list
            if isinstance(marker, ast.Call) and ast.unparse(marker.func) == "all_stories"
            for name in marker.args[1:]
            for file in path.with_name("stories").glob(f"{name.value if isinstance(name, ast.Constant) else '*'}.txt")
            for story in read_stories(file)
        ]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


BUILT = frozenset({"out", "build", "dist", "node_modules"})
"""Folders that git ignores: in the site, a page of a source is a folder with the source's name."""


def texts() -> list[Path]:
    """Every source and document of the tree that may cite the book, and nothing that was built into it."""
    rooms = [folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    found = [path for room in rooms for kind in ("*.py", "*.md") for path in sorted(room.rglob(kind))]
    ours = [path for path in [*found, *ROOT.glob("*.md")] if not BUILT.intersection(path.relative_to(ROOT).parts)]
    return [path for path in ours if path != Path(__file__)]


def test_every_letter_has_a_section_in_its_place() -> None:
    titles = re.findall(r"^### ([A-Z])\. ", BOOK, flags=re.MULTILINE)
    assert titles == list(string.ascii_uppercase)
    assert all(re.search(rf"^## {name}$", BOOK, flags=re.MULTILINE) for name in NAMED)


def test_every_rule_invariant_and_promise_has_tests() -> None:
    rules = HELD_BY["rules"].keys()
    assert {*string.ascii_uppercase, *NAMED} <= rules <= sections().keys()
    assert [title.split()[0] for title in HELD_BY["invariants"]] == INVARIANTS
    promises = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    assert list(HELD_BY["promises"]) == re.findall(r"^- \*\*([A-Z]\d+)\*\* ", promises, flags=re.MULTILINE)
    assert HELD_BY["security"].keys() <= sections((ROOT / "docs/security.md").read_text(encoding="utf-8")).keys()
    counts = {rule: len(tests) for table in HELD_BY.values() for rule, tests in table.items()}
    assert {rule: count for rule, count in counts.items() if not 1 <= count <= 9} == {}


def test_every_invariant_that_a_test_begins_with_is_listed() -> None:
    shown = {
        number
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for numbers in re.findall(r'"""((?:[A-D]\d+, )*[A-D]\d+)\b', path.read_text(encoding="utf-8"))
        for number in numbers.split(", ")
    }
    assert len(shown) > 20
    assert shown <= set(INVARIANTS)


def is_there(test: str) -> bool:
    """Whether a test is there: a function, and of one that plays stories the only story that begins so."""
    path, _, function = test.partition("::")
    name, _, begin = function.removesuffix("]").partition("[")
    stories = functions_of(ROOT / path).get(name) if (ROOT / path).is_file() else None
    if not stories or not begin:
        return stories == [] and not begin
    return sum(title.startswith(begin) for title in stories) == 1


def test_every_test_and_story_that_holds_a_rule_exists() -> None:
    named = [test for table in HELD_BY.values() for tests in table.values() for test in tests]
    assert len(named) > 300
    assert [test for test in named if not is_there(test)] == []


def test_every_citation_of_the_book_names_a_section() -> None:
    titles = re.findall(r"^### [A-Z]\. (\w+)(?:,? (\w+))?", BOOK, flags=re.MULTILINE)
    known = set(sections()) | {name for one, two in titles for name in (one, f"{one} {two}")}
    by_file = {path.relative_to(ROOT).as_posix(): cited(path.read_text(encoding="utf-8")) for path in texts()}
    assert sum(map(len, by_file.values())) > 100
    assert {place: names - known for place, names in by_file.items() if names - known} == {}


@pytest.mark.parametrize(
    "name", ["test_stories", "test_stories[ledger: No such story]", "test_no", "test_no[ledger: The]"]
)
def test_a_test_that_plays_stories_is_named_with_one_of_them(name: str) -> None:
    path = "tests/unit/coordinator/test_ledger.py"
    assert is_there(f"{path}::test_stories[ledger: The first commit of round r fixes round r + 2]")
    assert not is_there(f"{path}::{name}")
    assert not is_there(f"{path}::test_stories[ledger: A]"), "several begin so"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("the order (protocol A, I).", {"A", "I"}),
        ("Protocol O and P: every decision", {"O", "P"}),
        ("the run ends (protocol B–D, O–P, Y)", {"B", "C", "D", "O", "P", "Y"}),
        ("as reports want it (protocol,\n    Figures).", {"Figures"}),
        ('a comment # of protocol "Data leases").', {"Data leases"}),
        ("used (protocol Q, Data leases)", {"Q", "Data leases"}),
        ("# what a rule (protocol\n# M) says", {"M"}),
        ("a rule of its own (protocol, Fencing)", {"Fencing"}),
        ("only then told (protocol, Commit order).", {"Commit order"}),
        ("A protocol version that both speak, as protocol D, by counting", {"D"}),
    ],
)
def test_a_citation_is_read_in_every_form_that_it_has(text: str, names: set[str]) -> None:
    assert cited(text) == names
