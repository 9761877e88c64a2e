"""Call `farloop` in this process, as a person on a terminal would, and read what it prints."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.testing import CliRunner, Result

from farloop.cli.main import app
from farloop.config.exit_codes import ExitCode


@contextmanager
def logging_as_before() -> Iterator[None]:
    """Commands set up the logs of their process, which here is everybody's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def farloop(*words: str, columns: int = 100) -> Result:
    env = {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb"}
    with logging_as_before():
        return CliRunner().invoke(app, words, env=env, prog_name="farloop")


def found(*words: str) -> Any:
    """What `--json` prints."""
    result = farloop(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def error_line(*words: str, code: int = ExitCode.USAGE) -> str:
    """The one line on standard error of a command that ends with this code and prints nothing else."""
    result = farloop(*words)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = (line for line in result.stderr.splitlines() if line and not line.startswith("ts="))
    return line.removeprefix("farloop: error: ")


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command, groups included, by its words."""
    for name, one in getattr(group, "commands", {}).items():
        yield (*words, name)
        yield from commands(one, (*words, name))
