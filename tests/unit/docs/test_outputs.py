"""What pages call exact is what the commands print: they are run here, and compared. A mark before a block says how.

    <!-- checked -->               a block of output: the last command before it prints its lines, in their order.
                                   A line with … alone stands for any lines.
    <!-- checked but for WORDS --> the same, but for the lines that begin with one of the words
    <!-- checked: COMMAND -->      the same, of this command; before a picture, which COMMAND --plot draws: its texts
    <!-- checked: COMMAND → KEY KEY × FACTOR -->
        a table: COMMAND prints JSON, and a cell is what these keys lead to, times the factor, to three digits. Its
        options are COMMAND's and those of the head: `--h 30` above the cell, `--bits` above the first word of the row.
    <!-- checked: COMMAND → "TEXT {key[key]:.2f}" "TEXT" -->
        any block: each text, with values of COMMAND's JSON put in, is in it; objects of a list go by their first value

`checked slowly` is for what takes longer than some seconds: `make test-slow` runs it.
"""

import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import farloop
from test_commands import PAGES, ROOT, blocks, name_of

MARK = re.compile(
    r"^<!-- checked(?P<slow> slowly)?(?: but for (?P<skip>[^:]+?))?"
    r"(?::\s(?P<command>[^→]+?)(?:\s→\s(?P<values>.+?))?)?\s-->\n",
    re.DOTALL | re.MULTILINE,
)

PICTURE = re.compile(r"!\[[^]]*\]\((\S+\.svg)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A block of a page, and where it comes from."""

    page: Path
    line: int
    command: str
    slow: bool
    skip: tuple[str, ...]
    values: str
    text: tuple[str, ...]

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def claims(page: Path) -> Iterator[Claim]:
    whole = page.read_text(encoding="utf-8")
    marks = list(MARK.finditer(whole))
    assert len(marks) == len(re.findall("^<!-- checked", whole, flags=re.MULTILINE)), f"{page}: a bad mark"
    for mark in marks:
        line = whole.count("\n", 0, mark.start()) + 1
        rest = whole[mark.end() :].lstrip("\n").split("\n")
        text = rest[1 : rest.index("```", 1)] if rest[0].startswith("```") else rest[: rest.index("")]
        command = mark["command"]
        if command is None:
            command = [block.commands for block in blocks(page) if block.commands and block.line < line][-1][-1]
        values, skip = " ".join((mark["values"] or "").split()), tuple((mark["skip"] or "").split())
        yield Claim(
            page=page, line=line, command=" ".join(command.split()), slow=mark["slow"] is not None, skip=skip,
            values=values, text=tuple(text),
        )  # fmt: skip


CLAIMS = [claim for page in PAGES for claim in claims(page)]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With the examples in it."""
    path, before = tmp_path_factory.mktemp("pages"), Path.cwd()
    shutil.copytree(ROOT / "examples", path / "examples")
    os.chdir(path)
    yield
    os.chdir(before)


@functools.cache
def printed(command: str) -> str:
    program, *words = shlex.split(command)
    assert program == "farloop"
    ended = farloop(*words)
    assert ended.exit_code == 0, f"{command}\n{ended.output}"
    return ended.stdout


def problems(claim: Claim) -> list[str]:
    """What the page says and the command does not."""
    if picture := PICTURE.match(claim.text[0]):
        return wrong_texts(claim, claim.page.parent / picture[1])
    if '"' in claim.values:
        return wrong_values(claim)
    return wrong_cells(claim) if claim.values else missing_lines(claim, printed(claim.command))


def missing_lines(claim: Claim, output: str) -> list[str]:
    """The first of the claimed lines that does not follow those before it."""
    found = iter([line.rstrip() for line in output.split("\n")])
    said = [line.rstrip() for line in claim.text if line.strip() not in ("", "…")]
    said = [line for line in said if line.split()[0] not in claim.skip]
    return [line for line in said if line not in found][:1]


def wrong_texts(claim: Claim, picture: Path) -> list[str]:
    printed(f"{claim.command} --plot {picture.name}")
    page, drawn = (re.findall(r"<text[^>]*>([^<]*)", file.read_text()) for file in (picture, Path(picture.name)))
    assert page
    return [f"{picture.name}: {text}" for text in sorted({*page} ^ {*drawn})]


def wrong_values(claim: Claim) -> list[str]:
    found: Any = json.loads(printed(claim.command))
    if isinstance(found, list):
        found = {next(iter(row.values())): row for row in found}
    block = " ".join(" ".join(claim.text).replace("*", "").split())
    texts = [text.format(**found) for text in re.findall(r'"([^"]+)"', claim.values)]
    return [text for text in texts if text not in block]


def wrong_cells(claim: Claim) -> list[str]:
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in claim.text)
    options = [title.strip("`") for title in head]
    by_row = [number for number, option in enumerate(options) if re.fullmatch(r"--[\w-]+", option)]
    by_column = [number for number, option in enumerate(options) if re.fullmatch(r"--[\w-]+ \S+", option)]
    keys, _, factor = claim.values.partition(" × ")
    assert by_column and rows, f"{claim}: no cell can be checked"
    wrong = []
    for row in rows:
        given = " ".join(f"{options[number]} {row[number].split()[0]}" for number in by_row)
        for number in by_column:
            found = json.loads(printed(f"{claim.command} {given} {options[number]}"))
            for key in keys.split():
                found = found[key]
            value, shown = float(factor or 1) * float(found), row[number].split()[0]
            if float(f"{value:.3g}") != float(shown):
                wrong.append(f"{given} {options[number]} is {value:.6g}, the page says {shown}")
    return wrong


SLOW = (pytest.mark.slow, pytest.mark.timeout(900))


@pytest.mark.parametrize("claim", [pytest.param(c, marks=SLOW if c.slow else (), id=str(c)) for c in CLAIMS])
def test_what_a_page_calls_exact_is_what_the_command_prints(claim: Claim) -> None:
    assert not (found := problems(claim)), f"{claim}: of {claim.command}\n" + "\n".join(found)


def test_a_number_that_is_not_the_commands_is_found() -> None:
    table = next(claim for claim in CLAIMS if claim.values and '"' not in claim.values)
    *rest, row = table.text
    assert not problems(table)
    assert problems(dataclasses.replace(table, text=(*rest, re.sub(r"\d \|$", "5 |", row))))
    output = dataclasses.replace(table, values="", text=("a 1", "…", "b 3"), skip=("c",))
    assert not missing_lines(output, "a 1\nb 2\nb 3\n")
    assert missing_lines(output, "b 3\na 1\n") == ["b 3"]
    assert not missing_lines(dataclasses.replace(output, text=("c 1",)), "")
    (values,) = {claim for claim in CLAIMS if "bits_per_element" in claim.values}
    assert not problems(values)
    assert problems(dataclasses.replace(values, values=values.values.replace("q4", "q8")))
