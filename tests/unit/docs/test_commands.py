"""Every command of the pages works: it is run here, or says before it why not.

A page's commands run one after the other in one empty folder, as a reader would type them, with examples/ beside it
and the page's own TOML files written down where their first line names them. What cannot run so, because it goes on
until it is stopped or wants what this machine has not, has a comment before its block:

    <!-- not run: WHY -->                                   the whole block
    <!-- not run, farloop coordinator, farloop node: WHY --> its lines that begin so

A reason may name the test that runs the command instead. Of every `farloop …` of the pages, run or not and in prose
too, the words and options are looked up in the program.
"""

import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer.main
from command_line import farloop

from farloop.cli.main import app

ROOT = Path(__file__).resolve().parents[3]

MADE = {ROOT / "docs/cli.md"}
"""Made from the code: its examples are those of --help, of which only the spelling can be wrong."""

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("docker", "k8s", "wire", "quant")),
]

RUNBOOKS = sorted((ROOT / "monitoring").rglob("*.md"))
"""They speak of a run that is in trouble: nothing in them can be run here."""

SHELLS = {"sh", "bash", "console", "shell"}
PROGRAMS = r"(?:\.venv/bin/)?farloop|make|docker|podman|kubectl|python3?|pip|k8s/keys\.sh|mkdir|curl|git"

NOT_HERE = {"demo", "coordinator", "node", "chaos", "throttle", "bench", "status", "top"}
"""Commands that start processes, take minutes or want a coordinator."""

MARK = re.compile(r"<!-- not run(?P<which>, [^:]+)?: (?P<why>.+?) -->", re.DOTALL)


@dataclass(slots=True, kw_only=True)
class Block:
    """Code of a page."""

    language: str
    line: int
    text: list[str] = field(default_factory=list)
    marks: list[re.Match[str]] = field(default_factory=list)

    @property
    def commands(self) -> list[str]:
        """Its command lines, continued ones joined, without comments."""
        joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(self.text))
        if self.language in SHELLS or (not self.language and re.match(rf"(?:{PROGRAMS})\s", joined)):
            return [bare for line in joined.splitlines() if (bare := re.sub(r"(^|\s+)#.*", "", line).strip())]
        return []

    def skipped(self, command: str) -> bool:
        return any(mark["which"] is None or self.begins(command, mark) for mark in self.marks)

    @staticmethod
    def begins(command: str, mark: re.Match[str]) -> bool:
        return any(command.startswith(word.strip()) for word in mark["which"].removeprefix(",").split(","))


def blocks(page: Path) -> Iterator[Block]:
    """The fenced and the indented code of a page, with the marks that stand right before it."""
    text = MARK.sub(lambda mark: mark[0].replace("\n", "\x00"), page.read_text(encoding="utf-8"))
    marks: list[re.Match[str]] = []
    block: Block | None = None
    fence = before = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if fence:
            if line.strip() == fence and block is not None:
                yield block
                fence, block, marks = "", None, []
            elif block is not None:
                block.text.append(line)
        elif opened := re.match(r"(```+)(\w*)", line):
            fence, block = opened[1], Block(language=opened[2], line=number, marks=marks)
        elif line.startswith("    ") and (block is not None or not before or before.startswith("<!--")):
            block = block or Block(language="", line=number, marks=marks)
            block.text.append(line.removeprefix("    "))
        else:
            if block is not None and line.strip():
                yield block
                block, marks = None, []
            if mark := MARK.fullmatch(line.replace("\x00", " ").strip()):
                marks = [*marks, mark]
            elif line.strip():
                marks = []
        before = line.strip()
    if block is not None:
        yield block


def typed(have: str) -> list[str]:
    """The commands in the sentences of the start page for a reader who has that."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    (part,) = re.findall(rf"^### {re.escape(have)}\n(.*?)^##", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"`((?:farloop|kubectl|k8s/keys\.sh|sbatch) [^`]+)`", part.replace("\n   ", " "))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str) -> None:
    """A command line of `farloop` and `mkdir`, joined by && and written to files by >."""
    for one in command.split(" && "):
        line, _, target = one.partition(" > ")
        program, *words = shlex.split(line)
        if program == "mkdir":
            for word in words:
                Path(word).mkdir(parents=word != words[0])
            continue
        assert program in ("farloop", ".venv/bin/farloop"), f"{program} is not run here: mark it"
        assert not NOT_HERE & set(words[:1]) or "--help" in words, f"farloop {words[0]} is not run here: mark it"
        assert "|" not in words and "&" not in words, "only && and > are run here: mark it"
        ended = farloop(*words)
        assert ended.exit_code == 0, f"{one}\n{ended.output}"
        if target:
            Path(target.strip()).write_text(ended.stdout, encoding="utf-8")


@pytest.mark.parametrize("page", [page for page in PAGES if page not in MADE], ids=name_of)
def test_the_commands_of_a_page_run_in_their_order(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.language == "toml" and (named := re.match(r"# ([\w.-]+\.toml)\b", block.text[0])):
            (folder / named[1]).write_text("\n".join(block.text) + "\n", encoding="utf-8")
        for command in block.commands:
            if not block.skipped(command):
                try:
                    run(command)
                except (AssertionError, OSError) as error:
                    error.add_note(f"{name_of(page)}:{block.line}: {command} (or <!-- not run: WHY --> before it)")
                    raise


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_mark_says_why_and_is_about_something(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    used = [mark for block in blocks(page) if block.commands for mark in block.marks]
    written = re.findall("^<!-- not run", text, flags=re.MULTILINE)
    assert len(used) == len(written), "a mark stands before no commands"
    for block in blocks(page):
        for mark in block.marks:
            assert len(mark["why"].split()) >= 3
            for path in re.findall(r"tests/[\w/]+\.py", mark["why"]):
                assert (ROOT / path).is_file(), f"{name_of(page)}:{block.line}: there is no {path}"
            for word in (mark["which"] or "").removeprefix(",").split(","):
                assert not word or any(command.startswith(word.strip()) for command in block.commands), (
                    f"{name_of(page)}:{block.line}: no line begins with {word.strip()}"
                )


def spelled(page: Path) -> Iterator[tuple[str, bool]]:
    """Every `farloop …` of a page, and whether it is a command line and not prose."""
    for block in blocks(page):
        for command in block.commands:
            for one in re.split(r" && | \| ", command):
                if re.match(r"(?:\.venv/bin/)?farloop\s", one):
                    yield one.partition(" > ")[0].removesuffix("&").strip(), True
    prose = re.sub(
        r"^(```+).*?^\1\s*$|^(    ).*$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    for code in re.findall(r"`(farloop [^`]+)`", prose):
        yield " ".join(code.split()), False


def check_spelling(line: str, *, is_whole: bool) -> None:
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while words and (inner := getattr(command, "commands", None)) is not None:
        if words[0].startswith("-"):
            break
        if not is_whole and not re.fullmatch("[a-z]+", words[0]):
            return  # as `farloop COMMAND --help`
        assert words[0] in inner, f"{line}: there is no {words[0]}"
        command = inner[words.pop(0)]
    known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known | {"--help", "--version"}, f"{line}: there is no {word}"


@pytest.mark.parametrize("page", [*PAGES, *RUNBOOKS], ids=name_of)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    for line, is_whole in spelled(page):
        check_spelling(line, is_whole=is_whole)


def test_what_does_not_exist_is_found() -> None:
    for line in ("farloop simulte run", "farloop lab schedule --stpes 4", "farloop lab codecs --no-mesure"):
        with pytest.raises(AssertionError, match="there is no"):
            check_spelling(line, is_whole=True)


def test_marks_skip_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n\n<!-- not run, farloop node: it goes on -->\n"
        "```sh\nfarloop node x \\\n  y  # a\nfarloop lab methods\n```\n\n"
        "    farloop lab codecs --no-measure   # b\n\n    make it\n\n<!-- not run: it\nlasts -->\n\n    farloop demo\n"
    )
    first, second, third = blocks(page)
    assert [first.skipped(command) for command in first.commands] == [True, False]
    assert first.commands == ["farloop node x y", "farloop lab methods"]
    assert second.commands == ["farloop lab codecs --no-measure", "make it"] and not second.marks
    assert third.skipped(third.commands[0]) and third.marks[0]["why"] == "it lasts"


def test_every_command_of_the_start_page_is_one_of_a_page_that_its_section_leads_to() -> None:
    home = ROOT / "docs/index.md"
    told: set[str] = set()
    for section in home.read_text(encoding="utf-8").partition("## What do you have?")[2].split("\n### ")[1:]:
        pages = {(home.parent / name).resolve() for name in re.findall(r"\]\(([^)#]+\.md)", section)}
        told |= {" ".join(command.split()) for page in pages for block in blocks(page) for command in block.commands}
        for command in re.findall(r"`((?:farloop|kubectl|k8s/keys\.sh) [^`]+)`", section):
            assert any(one == command or one.startswith(f"{command} ") for one in told), f"{section[:30]}: {command}"
