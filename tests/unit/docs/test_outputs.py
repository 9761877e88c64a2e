"""What pages call exact is what the commands print: they are run here, and compared.

<!-- checked -->             before a block of output: the lines of it, in their order, are printed by the command
                             of the shell block before it. A line with … alone stands for any number of lines.
<!-- checked: COMMAND -->    the same, of this command
<!-- checked: COMMAND → KEY KEY × FACTOR -->   before a table: COMMAND prints JSON, and a cell is what these keys lead
                             to, times the factor, to three digits. Its options are COMMAND's, and those of
                             the table's head: `--h 30` above the cell, `--bits` above the first word of its row.
"""

import json
import logging
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_commands import PAGES, ROOT, blocks, name_of
from typer.testing import CliRunner

from farloop.cli.main import app

MARK = re.compile(r"<!-- checked(?:: (?P<command>[^→]+?)(?: → (?P<keys>[^×]+?)(?: × (?P<factor>\d+))?)?)? -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A block of output or a table, and where it comes from."""

    page: Path
    line: int
    command: str
    keys: str | None
    factor: float
    text: tuple[str, ...]

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def claims(page: Path) -> Iterator[Claim]:
    lines = page.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines):
        if not line.startswith("<!-- checked"):
            continue
        mark = MARK.fullmatch(line)
        assert mark is not None, f"{name_of(page)}:{number + 1}: this mark is not understood"
        begin = number + 2
        if lines[begin].startswith("```"):
            text = lines[begin + 1 : lines.index("```", begin + 1)]
        else:
            text = lines[begin : lines.index("", begin)]
        command = mark["command"]
        if command is None:
            command = [block.commands for block in blocks(page) if block.commands and block.line <= number][-1][-1]
        factor = float(mark["factor"] or 1)
        yield Claim(page=page, line=number + 1, command=command, keys=mark["keys"], factor=factor, text=tuple(text))


CLAIMS = [claim for page in PAGES for claim in claims(page)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def printed(command: str) -> str:
    program, *words = shlex.split(command)
    assert program == "farloop"
    ended = CliRunner().invoke(app, words, env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}, prog_name="farloop")
    assert ended.exit_code == 0, f"{command}\n{ended.output}"
    return ended.stdout


def missing_line(claimed: tuple[str, ...], output: str) -> str | None:
    """The first of the claimed lines that does not follow those before it."""
    found = iter([line.rstrip() for line in output.split("\n")])
    return next((line for line in claimed if line.strip() not in ("", "…") and line.rstrip() not in found), None)


def wrong_cells(claim: Claim) -> Iterator[str]:
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in claim.text)
    options = [title.strip("`") for title in head]
    by_row = [number for number, option in enumerate(options) if re.fullmatch(r"--[\w-]+", option)]
    by_column = [number for number, option in enumerate(options) if re.fullmatch(r"--[\w-]+ \S+", option)]
    assert by_column and rows, f"{claim}: no cell can be checked"
    for row in rows:
        given = " ".join(f"{options[number]} {row[number].split()[0]}" for number in by_row)
        for number in by_column:
            found = json.loads(printed(f"{claim.command} {given} {options[number]}"))
            for key in (claim.keys or "").split():
                found = found[key]
            value, shown = claim.factor * float(found), row[number].split()[0]
            if float(f"{value:.3g}") != float(shown):
                yield f"{claim}: {given} {options[number]} is {value:.6g}, the page says {shown}"


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_what_a_page_calls_exact_is_what_the_command_prints(claim: Claim) -> None:
    if claim.keys is not None:
        assert not list(wrong_cells(claim))
        return
    missing = missing_line(claim.text, printed(claim.command))
    assert missing is None, f"{claim}: {claim.command} does not print this, or not there:\n{missing}"


def test_a_number_that_is_not_the_commands_is_found() -> None:
    claim = next(claim for claim in CLAIMS if claim.keys and claim.page.name == "tuning.md")
    *rest, row = claim.text
    assert list(wrong_cells(Claim(**{**_fields(claim), "text": (*rest, re.sub(r"\d \|$", "5 |", row))})))
    assert missing_line(("a 1", "…", "b 3"), "a 1\nb 2\nb 3\n") is None
    assert missing_line(("b 3", "a 1"), "a 1\nb 3\n") == "a 1"


def _fields(claim: Claim) -> dict[str, object]:
    return {name: getattr(claim, name) for name in Claim.__slots__}
