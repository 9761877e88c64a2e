"""The front door: words in, text and exit codes out. Nothing is started here."""

import os
import re
import tomllib
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import typer.main
import zmq
from command_line import commands, error_line, farloop, found

from farloop.algo.methods import METHODS
from farloop.cli.check import _bulk_lines
from farloop.cli.main import app
from farloop.cli.ranks import rank_of
from farloop.config.settings import load_run

EXAMPLES = Path(__file__).parents[3] / "examples"


ROOT = typer.main.get_command(app)
COMMANDS = list(commands(ROOT))
GROUPS = {words[:-1] for words in COMMANDS if len(words) > 1}


def written(folder: Path, text: str, name: str = "node.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_help_names_every_command_and_all_exit_codes() -> None:
    text = farloop("--help").stdout
    assert all(f" {words[0]} " in text for words in COMMANDS)
    for code in ("0 done", "2 bad usage or configuration", "130 stopped at once by a signal"):
        assert code in " ".join(text.split())
    assert re.fullmatch(r"farloop \d+\.\d+\.\d+\n", farloop("--version").stdout)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_that_fits_and_an_example(words: tuple[str, ...]) -> None:
    result = farloop(*words, "--help")
    assert result.exit_code == 0 and max(map(len, result.stdout.splitlines())) <= 100
    assert f"Usage: farloop {' '.join(words)}" in result.stdout
    assert words in {*GROUPS, ("lab", "methods")} or f"Example: farloop {' '.join(words)}" in result.stdout
    text = " ".join(re.sub("[│╭╰─]", " ", result.stdout).split())
    command: Any = reduce(lambda group, word: group.commands[word], words, ROOT)
    written = [command.help, *(getattr(one, "help", None) for one in command.params)]
    for table in re.findall(r"\[[a-z]+\]", " ".join(filter(None, written))):
        assert table in text, f"{table} of a settings file is taken for a style"


def test_what_the_environment_gives_is_named_and_levels_have_no_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARLOOP_LOG_LEVEL", "DEBUG")
    assert error_line("coordinator", "x.toml") == "x.toml: cannot be read: no such file or directory"
    monkeypatch.setenv("FARLOOP_LOG_JSON", "maybe")
    assert error_line("coordinator", "x.toml") == "FARLOOP_LOG_JSON: expected true or false, got 'maybe'"
    monkeypatch.setenv("FARLOOP_LOG_LEVEL", "LOUD")
    line = "FARLOOP_LOG_LEVEL: there is no 'LOUD'; there are debug, info, warning, error"
    assert error_line("coordinator", "x.toml") == line


def test_the_port_of_nodes_is_no_status_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ZeroMQ greets whoever connects, and waits for a greeting."""
    monkeypatch.setattr("farloop.cli.status.TIMEOUT_S", 0.2)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        url = f"127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        line = error_line("status", "--url", url)
    assert line.startswith(f"http://{url}/status: what answers there, as on the port of nodes, is not the status page")


def test_what_is_set_of_a_nodes_link_is_told(tmp_path: Path) -> None:
    for keys in (["keys", "new", str(tmp_path), "--name", name] for name in ("a", "c")):
        assert farloop(*keys).exit_code == 0
    plain = "[node]\nname = 'a'\n"
    told = (
        "key = 'a.key'\nserver_key = 'c.pub'\nbulk_source = '127.0.0.2'\nlanes = 4\ntau = 1\nadapt_tau = false\n"
        "max_uplink = '1000gbit'\nquiet_hours = '08:00-18:00'\nquiet_uplink = '2mbit'\n"
    )
    lines = [
        line.split(maxsplit=1)
        for line in farloop("config", "check", written(tmp_path, plain + told)).stdout.splitlines()
    ]
    text = "\n".join(" ".join(words) for words in lines)
    for line in (
        "lanes 4", "bulk source 127.0.0.2", "tau 1 step", "adapt tau no", "uplink at most 1 Tbit/s",
        "quiet hours 08:00-18:00, at most 2 Mbit/s",
    ):  # fmt: skip
        assert " ".join(line.split()) in " ".join(text.split()), line
    bare = farloop("config", "check", written(tmp_path, plain)).stdout
    assert not any(word in bare for word in ("lanes", "bulk", "tau", "uplink"))


def test_what_a_round_costs_by_either_plane_is_told(tmp_path: Path) -> None:
    """50 clusters with 4 GB up and 2 GB down: by hand."""
    told = "state_dir = 's'\nbulk_url = 's3://runs/a'\negress_price_per_gb = 0.05\negress_currency = 'EUR'\n"
    file = load_run(Path(written(tmp_path, f"[run]\nbulk = 'store'\n[coordinator]\n{told}")), flags=[], environ={})
    assert _bulk_lines(file, [4e9, 2e9], 50) == [
        (
            "bulk",
            "store; a round: by session 100 GB out (5 EUR), 202 GB to disk, by store 2.00 GB out (0.1 EUR), names to "
            "disk; the store sends 300 GB: cheaper where it charges less than 0.0163 EUR a GB",
        )
    ]


@pytest.mark.parametrize("name", ["run.toml", "node-a.toml", "node-b.toml"])
def test_the_examples_are_good(name: str) -> None:
    result = farloop("config", "check", str(EXAMPLES / name), "--set", "data.max_bytes=300000")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[0] == f"{EXAMPLES / name} is good"
    line = error_line("config", "check", str(EXAMPLES / "own-run.toml"), "--set", "run.init=nowhere.safetensors")
    assert "[run] init: there is no file" in line


def test_what_show_prints_is_a_file_that_says_the_same(tmp_path: Path) -> None:
    path = written(
        tmp_path, "[run]\nname = 'a \"b\"'\nlr = 1e-5\ntau = 3\n[coordinator]\nstate_dir = 's'\n", "run.toml"
    )
    again = written(tmp_path, farloop("config", "show", path, "--set", "run.h=20").stdout, "again.toml")
    first, second = (
        {(table, key): entry["value"] for table, keys in shown.items() for key, entry in keys.items()}
        for shown in (found("config", "show", path, "--set", "run.h=20"), found("config", "show", again))
    )
    assert first == second and tomllib.loads(Path(again).read_text())["run"]["name"] == 'a "b"'


def test_show_says_who_gave_a_value_and_what_it_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "[node]\nname = 'a'\n")
    monkeypatch.setenv("FARLOOP_NODE__THREADS", "3")
    shown = found("config", "show", path, "--set", "node.nproc=2")["node"]
    origins = [shown[key]["from"] for key in ("name", "threads", "nproc", "http")]
    assert origins == [f"{path}:2", "FARLOOP_NODE__THREADS", "--set", "default"]
    assert "# (FARLOOP_NODE__THREADS) CPU threads per process" in farloop("config", "show", path).stdout


def suited(where: str) -> dict[str, Any]:
    return dict(found("lab", "methods", "--for", where)["recommended"])


def test_the_recommended_method_is_the_first_that_keeps_a_node_busy() -> None:
    assert suited("200mbit, 1b") == suited("1b, 2 nodes, 200 mbit/s, 1000ms")
    wide, narrow, none = suited("200mbit, 1b"), suited("100 mbit, 1b, 4 nodes"), suited("1mbit, 1b")
    assert (wide["method"], wide["h"], wide["tau"]) == ("streaming", 15, 3)
    assert wide["busy"] >= 0.95 and wide["needed_bits_per_s"] < 200e6 and 200 < wide["fewer_bytes"] < 216
    assert narrow["h"] > wide["h"] and narrow["busy"] >= 0.95, "fewer bytes where the link is slower"
    assert suited("1gbit, 1b, 0.1s")["h"] == suited("100mbit, 1b")["h"], "ten times the rate for a tenth of the time"
    assert none["busy"] == max(one["busy"] for one in found("lab", "methods", "--for", "1mbit, 1b")["choices"]) < 0.95


def test_what_the_recommended_method_needs_is_what_simulate_says() -> None:
    from farloop.quant.blob import typical_bytes
    from farloop.quant.codec import flat
    from farloop.quant.registry import codec_named

    bits = 8 * typical_bytes(codec_named("q4r"), flat(1 << 20)) / (1 << 20)
    words = f"--params 1B --layers 24 --step-s 1 --h 15 --overlap 3 --bits {bits!r}".split()
    assert suited("200mbit, 1b")["needed_bits_per_s"] == pytest.approx(
        1e9 * found("lab", "simulate", "bandwidth", *words)["required_gbit_s"]["0.95"]
    )


def test_the_text_of_a_recommendation_has_its_settings() -> None:
    shown = farloop("lab", "methods", "--for", "10mbit, 350m, 3 nodes").stdout
    assert '[run] method = "streaming", h = 120' in shown and "(nodes: 3)" in shown
    assert "No method keeps a node busy" in farloop("lab", "methods", "--for", "1kbit, 1b").stdout


def test_the_table_lists_all_methods() -> None:
    assert all(name in farloop("lab", "methods").stdout for name in METHODS)
    assert [row["name"] for row in found("lab", "methods")] == list(METHODS)


def test_this_test_run_is_no_rank() -> None:
    """Or the commands above would have ended the interpreter."""
    assert rank_of(os.environ) is None
