"""Stories: what happens to a state machine and what it does then, as text (the files `stories/*.txt` beside tests).

    # A node that leaves is not waited for.
    with: nodes=ab
    a sends 1; b leaves → commit 1.1 of a, b DRAINED; left b DRAINED

A story is a paragraph: a sentence or two, settings that are not plain, and lines of events in their order. Behind the
arrow of a line, or indented below it where that is too long, stands what followed the last of its events; a line
without either was followed by nothing. A paragraph without events says what a file is about; its settings are those of
all stories behind it. The words for events and commands stand in `node_story.py` and `coordinator_run.py`.

`pytest --rewrite` writes what follows anew. Read the difference before you commit it. Where the words are the methods
and attributes of one object, it is a `Scripted`. Where lines are of Python (what a user writes, and the error that
answers it; a function's arguments and values), `python` plays them.
"""

import ast
import re
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from textwrap import wrap
from typing import Any

import pytest

from farloop.algo.spec import Lease

ARROW, INDENT, WIDTH = " → ", "    ", 120


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryText:
    """One story of a file."""

    head: tuple[str, ...]
    """The lines above its events."""
    settings: dict[str, Any]
    lines: tuple[str, ...]
    """Of events, and what follows each of them."""

    @property
    def title(self) -> str:
        """What it says of itself, as one line."""
        return " ".join(line.removeprefix("# ") for line in self.head if line.startswith("#"))

    @property
    def name(self) -> str:
        """Its first sentence."""
        return re.split(r"[.:]( |$)", self.title)[0]

    def told(self, play: Callable[[str], str]) -> list[str]:
        """Its lines as `play` makes them: it takes a line of events and returns what follows."""
        lines: list[str] = []
        for events in self.lines:
            if not events.startswith(INDENT):
                events = events.partition(ARROW)[0]
                after = play(events).splitlines()
                line = f"{events}{ARROW}{' '.join(after)}" if after else events
                if len(line) <= WIDTH:
                    lines.append(line)
                    continue
                lines.append(events)
                for told in after:
                    lines += wrap(told, WIDTH, initial_indent=INDENT, subsequent_indent=2 * INDENT)
        return lines


class Scripted:
    """Its methods and attributes are the words of stories: `give a 10; free` calls give("a", 10), and free is told.
    `3 give a#` calls it for a1, a2 and a3."""

    def told(self, line: str) -> str:
        """What the last word of a line returned, as text."""
        found: Any = None
        for event in line.split("; "):
            count, _, once = event.partition(" ")
            for number in range(int(count)) if count.isdigit() else [0]:
                word, *given = (once if count.isdigit() else event).replace("#", str(number + 1)).split()
                plain = [literal(value) for value in given if "=" not in value]
                named = {key: literal(value) for key, value in (pair.split("=", 1) for pair in given if "=" in pair)}
                found = getattr(self, word)
                found = found(*plain, **named) if callable(found) else found
        return self.text(found)

    def text(self, found: Any) -> str:
        """Nothing for None, "none" for what is empty."""
        match found:
            case None:
                return ""
            case Lease(start=start, count=count):
                return f"{start}+{count}"
            case dict():
                return ", ".join(f"{self.text(key)} {self.text(value)}" for key, value in found.items()) or "none"
            case list() | tuple() | set():
                texts = map(self.text, found)
                return ", ".join(sorted(texts) if isinstance(found, set) else texts) or "none"
        return str(found)


def all_stories(test_file: str, *names: str) -> pytest.MarkDecorator:
    """Those of `stories/<name>.txt` beside a test, each for its arguments `path` and `story`."""
    paths = [Path(test_file).with_name("stories") / f"{name}.txt" for name in names]
    stories = [(path, story) for path in paths for story in read_stories(path)]
    return pytest.mark.parametrize(
        ("path", "story"), stories, ids=[f"{path.stem}: {one.name}" for path, one in stories]
    )


def read_stories(path: Path) -> list[StoryText]:
    """All of a file, of which there is one at least; only its first paragraph, or one with settings, has no events."""
    stories, common = list[StoryText](), dict[str, Any]()
    for number, paragraph in enumerate(_paragraphs(path)):
        story = _story(paragraph.splitlines(), common)
        if story.lines:
            stories.append(story)
        else:
            assert number == 0 or story.settings != common, f"{path}: no events: {story.title}"
            common = story.settings
    assert stories, f"{path}: no stories"
    return stories


def _paragraphs(path: Path) -> list[str]:
    return path.read_text().strip().split("\n\n")


def _story(lines: list[str], common: dict[str, Any]) -> StoryText:
    head = tuple(line for line in lines if line.startswith(("#", "with:")))
    given = (pair for line in head if line.startswith("with:") for pair in line.split()[1:])
    settings = {key: literal(value) for key, value in (pair.split("=", 1) for pair in given)}
    return StoryText(head=head, settings=common | settings, lines=tuple(line for line in lines if line not in head))


def literal(value: str) -> Any:
    """A number or a tuple where it is one, else the text."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def check_story(path: Path, story: StoryText, play: Callable[[str], str], *, rewrite: bool) -> None:
    """What `play` makes of it is what the file says; with `rewrite` the file says it afterwards."""
    lines = story.told(play)
    if rewrite:
        paragraphs = _paragraphs(path)
        old, new = ("\n".join([*story.head, *text]) for text in (story.lines, lines))
        paragraphs[paragraphs.index(old)] = new
        path.write_text("\n\n".join(paragraphs) + "\n")
    else:
        assert lines == list(story.lines)


def python(*names: Mapping[str, Any]) -> Callable[[str], str]:
    """Plays lines of Python that know these names, and those that lines before gave.

    What follows is the value of a line's last expression as at Python's prompt, or the error that it ends with.
    """
    scope = {key: value for given in names for key, value in given.items()}

    def play(line: str) -> str:
        *before, last = ast.parse(line).body
        said = StringIO()
        try:
            exec(compile(ast.Module(before, []), line, "exec"), scope)
            with redirect_stdout(said):
                exec(compile(ast.Interactive([last]), line, "single"), scope)
        except NameError:
            raise  # the line itself is wrong
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what follows
            said.write(f"{type(error).__name__}: {error}".replace("\n", "\\n"))
        return said.getvalue()

    return play
