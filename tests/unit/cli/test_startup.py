"""What is answered without the libraries that take seconds to import: help, wrong usage and wrong settings."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from command_line import commands

from farloop.cli.main import ELSEWHERE, LAB, app
from farloop.lab.commands import COMMANDS

ROOT = Path(__file__).parents[3]

TABLE = {**ELSEWHERE, **LAB, **COMMANDS}

HEAVY = ["torch", "numba", "scipy", "matplotlib", "zmq"]

SCRIPT = """
import contextlib, io, json, sys
from farloop.cli.main import app
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            app(words, prog_name="farloop")
        except SystemExit as end:
            code = end.code
    loaded = [name for name in %r if name in sys.modules]
    print(json.dumps([" ".join(words), code, loaded, said.getvalue()]), flush=True)
    if loaded:
        break
"""


def answered(lines: list[str], folder: Path, heavy: list[str] = HEAVY) -> list[tuple[str, int, list[str], str]]:
    """Of each command line, all in one process: words, exit code, heavy modules that are loaded then, output."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT % heavy],
        input=json.dumps([line.split() for line in lines]),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_help_of_every_command_imports_nothing_heavy(tmp_path: Path) -> None:
    words = ["--help", "--version"]
    words += [f"{' '.join(command)} --help" for command in commands(typer.main.get_command(app))]
    for line, code, loaded, said in answered(words, tmp_path):
        assert (code, loaded) == (0, []), line
        assert "Usage" in said or line == "--version"


def test_top_help_and_version_import_no_command(tmp_path: Path) -> None:
    script = "import sys; from farloop.cli.main import app\ntry: app([sys.argv[1]])\nexcept SystemExit: pass\n"
    script += "print(*(name for name in sys.modules if name.startswith('farloop.cli.')))"
    for word in ("--help", "--version"):
        done = subprocess.run(
            [sys.executable, "-c", script, word], capture_output=True, text=True, timeout=60, check=True
        )
        assert set(done.stdout.splitlines()[-1].split()) == {
            "farloop.cli.interrupts",
            "farloop.cli.main",
            "farloop.cli.options",
            "farloop.cli.ranks",
        }


def test_without_the_lab_its_commands_are_unknown_and_all_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    without = typer.main.get_command(app).commands["lab"].commands  # type: ignore[attr-defined]
    assert "bench" not in without and not COMMANDS.keys() & set(without)
    monkeypatch.undo()
    with_all = typer.main.get_command(app).commands["lab"].commands  # type: ignore[attr-defined]
    assert set(with_all) - set(without) == set(COMMANDS)


@pytest.mark.parametrize("name", TABLE)
def test_the_table_says_what_the_command_says(name: str) -> None:
    command = TABLE[name].load(name)
    assert " ".join(command.help.split("\n\n")[0].split()) == TABLE[name].summary
    assert command.name == name


RUN, NODE = f"{ROOT}/examples/run.toml", f"{ROOT}/examples/node-a.toml"

REFUSED = [
    *("nod", "coordinator", "demo --nonsense", "lab schedule none.toml", "lab schedule --set run.h=0", "plan"),
    *("demo --method foo", "demo --codec q4r:stepp=1", "demo --link foo", "demo --nodes 0", "demo --h 0"),
    *(
        "demo --model foo",
        "demo --resume none",
        "demo --data none",
        "lab chaos --faults foo",
        "lab chaos --faults store_away",
        "lab throttle foo --to 127.0.0.1:7700",
    ),
    *(f"coordinator {RUN} --restore foo://x", f"coordinator {RUN} --adopt-newest", "coordinator none.toml"),
    *(
        f"{command} --set {setting}"
        for command in (f"coordinator {RUN}", f"config check {RUN}")
        for setting in ("run.stepz=1", "run.h=x", "run.codec_up=foo", "run.codec_up=q4r:stepp=1", "run.min_lr=1")
    ),
    *(
        f"coordinator {RUN} --set {setting}"
        for setting in ("run.tau=90", "data.path=none", "run.model=foo", "coordinator.bind=foo", "run.steps=0")
    ),
    f"coordinator {RUN} --set coordinator.key=none.key --set coordinator.allow=none",
    *(f"node {NODE} --set {setting}" for setting in ("node.lanes=x", "node.anchors=foo", "pipeline.layout=none")),
    *(f"config show {NODE} --set node.lanez=3", "config check none.toml", "node none.toml"),
    f"node {NODE} --set node.key=none.key --set node.server_key=none.pub",
    *(
        f"{command} --state none"
        for command in ("run set h=3", "run release", "explain f0:1", "lab eval", "export out")
    ),
    *(f"journal {command} --state none" for command in ("show", "verify", "salvage", "replay")),
    *("plan --inventory none.toml", "lab simulate bandwidth --method foo", "lab simulate run none.toml"),
    *(
        "lab bench codecs --codec foo",
        "lab bench codecs --threads foo",
        "lab bench memory --model foo",
        "lab bench loop --link foo",
    ),
    *("lab bench sync --codec foo", "lab bench coordinator --codec foo", "lab bench quality --model foo"),
    *("data build none --out x.bin", "data show none", "keys authorize none --name x", "keys revoke x --allow none"),
]
"""Wrong usage and wrong settings; `none` is missing."""


def test_wrong_usage_and_settings_import_nothing_heavy(tmp_path: Path) -> None:
    told = answered(REFUSED, tmp_path)
    for line, code, loaded, said in told:
        assert (code, loaded) == (2, []), (line, said)
        assert "this is a bug" not in said and said.strip(), line
    assert len(told) == len(REFUSED)


def test_a_missing_state_folder_is_named_before_the_parts_of_the_coordinator_are_loaded(tmp_path: Path) -> None:
    lines = (
        "journal verify",
        "journal salvage",
        "journal replay",
        "run set h=3",
        "run release",
        "export out",
        "status",
    )
    heavy = [*HEAVY, "numpy", "farloop.coordinator.decide.ledger", "farloop.wire.messages"]
    told = answered([f"{command} --state none" for command in lines], tmp_path, heavy)
    assert [(line, code, loaded) for line, code, loaded, _ in told] == [
        (f"{command} --state none", 2, []) for command in lines
    ]
