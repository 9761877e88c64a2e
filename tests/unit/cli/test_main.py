"""The front door: words in, text and exit codes out. Nothing is started here."""

import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from command_line import error_line, farloop, found

from farloop.algo.methods import METHODS
from farloop.cli.main import app
from farloop.cli.ranks import rank_of

EXAMPLES = Path(__file__).parents[3] / "examples"


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command, groups included, by its words."""
    for name, one in getattr(group, "commands", {}).items():
        yield (*words, name)
        yield from commands(one, (*words, name))


COMMANDS = list(commands(typer.main.get_command(app)))
GROUPS = {words[:-1] for words in COMMANDS if len(words) > 1}


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Daemon commands set up the logs of their process, which here is everybody's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_help_names_every_command_and_all_exit_codes() -> None:
    text = farloop("--help").stdout
    assert all(f" {words[0]} " in text for words in COMMANDS)
    for code in ("0 done", "2 bad usage or configuration", "130 stopped at once by a signal"):
        assert code in " ".join(text.split())


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_that_fits_and_an_example(words: tuple[str, ...]) -> None:
    result = farloop(*words, "--help")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert f"Usage: farloop {' '.join(words)}" in result.stdout
    assert words in {*GROUPS, ("methods",)} or f"Example: farloop {' '.join(words)}" in result.stdout


def test_help_answers_without_torch_numpy_and_zmq() -> None:
    script = (
        "import sys; from farloop.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'zmq', 'pydantic', 'matplotlib', 'uvloop'} & sys.modules.keys()\n"
        "sys.exit(', '.join(sorted(heavy)) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_the_packages() -> None:
    assert re.fullmatch(r"farloop \d+\.\d+\.\d+\n", farloop("--version").stdout)


@pytest.mark.parametrize("words", [["nod"], ["node"], ["node", "x.toml", "--foo"], ["status", "x"]])
def test_wrong_usage_ends_with_2(words: list[str]) -> None:
    assert farloop(*words).exit_code == 2


def test_a_misspelt_command_is_answered_with_the_nearest() -> None:
    assert "'coordinator'" in farloop("coordinatr").stderr


@pytest.mark.parametrize("words", [["coordinator"], ["node"], ["config", "check"], ["config", "show"]])
def test_a_missing_file_is_one_line_and_ends_with_2(words: list[str], tmp_path: Path) -> None:
    assert error_line(*words, f"{tmp_path}/x.toml") == f"{tmp_path}/x.toml: cannot be read: no such file or directory"


def test_nproc_is_a_setting_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[node]\nname = 'a'\n")
    assert error_line("node", str(path), "--nproc", "0") == "--set: [node] nproc: the least is 1, not 0"


@pytest.mark.parametrize("name", ["run.toml", "node-a.toml", "node-b.toml"])
def test_the_examples_are_good(name: str) -> None:
    result = farloop("config", "check", str(EXAMPLES / name), "--set", "data.max_bytes=300000")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[0] == f"{EXAMPLES / name} is good"


def test_the_example_with_a_model_of_its_own_wants_its_first_weights() -> None:
    line = error_line("config", "check", str(EXAMPLES / "own-run.toml"), "--set", "run.init=nowhere.safetensors")
    assert "[run] init: there is no file" in line


def test_check_says_what_a_run_comes_to(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nmodel = 'nano'\n[data]\nmax_bytes = 300000\n[coordinator]\nstate_dir = 's'\n")
    lines = dict(line.split(maxsplit=1) for line in farloop("config", "check", str(path)).stdout.splitlines()[1:])
    assert lines["model"].startswith("nano, ")
    assert lines["method"] == "streaming, H 30, τ 5, mix 0.5"
    assert lines["listens"] == "tcp://127.0.0.1:7700, in the clear, this machine only"


def test_check_reads_the_keys_too(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[node]\nname = 'a'\nkey = 'a.key'\nserver_key = 'c.pub'\n")
    assert error_line("config", "check", str(path)).startswith(
        f"cannot read the key file {tmp_path}/a.key: No such file"
    )


def test_what_show_prints_is_a_file_that_says_the_same(tmp_path: Path) -> None:
    path, again = tmp_path / "run.toml", tmp_path / "again.toml"
    path.write_text("[run]\nname = 'a \"b\"'\nlr = 1e-5\ntau = 3\n[coordinator]\nstate_dir = 's'\n")
    flags = ["--set", "run.h=20"]
    again.write_text(farloop("config", "show", str(path), *flags).stdout)
    first, second = found("config", "show", str(path), *flags), found("config", "show", str(again))
    assert values(first) == values(second)
    assert tomllib.loads(again.read_text())["run"]["name"] == 'a "b"'


def values(shown: dict[str, dict[str, dict[str, object]]]) -> dict[str, dict[str, object]]:
    return {table: {key: entry["value"] for key, entry in keys.items()} for table, keys in shown.items()}


def test_show_says_who_gave_a_value_and_what_it_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.toml"
    path.write_text("[node]\nname = 'a'\n")
    monkeypatch.setenv("FARLOOP_NODE__THREADS", "3")
    shown = found("config", "show", str(path), "--set", "node.nproc=2")["node"]
    assert [shown[key]["from"] for key in ("name", "threads", "nproc", "http")] == [
        f"{path}:2",
        "FARLOOP_NODE__THREADS",
        "--set",
        "default",
    ]
    assert "# (default) CPU threads" not in farloop("config", "show", str(path)).stdout
    assert "# (FARLOOP_NODE__THREADS) CPU threads per process" in farloop("config", "show", str(path)).stdout


def test_tables_list_all_methods_and_codecs() -> None:
    assert all(name in farloop("methods").stdout for name in METHODS)
    assert [row["name"] for row in found("methods")] == list(METHODS)
    listed = farloop("codecs", "--no-measure").stdout
    assert all(name in listed for name in ("fp32", "bf16", "q8", "q4", "e3m0"))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--steps", "0"], "steps and h are at least 1"),
        (["--method", "streeming"], "did you mean 'streaming'?"),
        (["--codec", "q44"], "did you mean 'q4'?"),
        (["--model", "huge"], "there is no 'huge'; there are nano"),
        (["--link", "fast"], "fast"),
        (["--data", "nowhere"], "no file or folder nowhere"),
        (["--resume", "nowhere"], "nowhere holds no demo run"),
    ],
)
def test_a_demo_that_cannot_be_is_one_line_before_anything_is_started(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert line in error_line("demo", *words)
    assert list(tmp_path.iterdir()) == []


def test_a_status_address_that_is_none_ends_with_2() -> None:
    assert error_line("status", "--url", "ftp://x") == "--url ftp://x: http://host:port is wanted"


def test_this_test_run_is_no_rank() -> None:
    """Or the commands above would have ended the interpreter."""
    assert rank_of(os.environ) is None
