"""Commands against real sockets on loopback."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import statuses
from slow_cases import slow
from typer.testing import CliRunner, Result

from farloop.cli.doctor import connect, port, wall_clock
from farloop.cli.main import app
from farloop.cli.status import fetch
from farloop.config.exit_codes import CommandError
from farloop.config.logs import print_anywhere
from farloop.local.processes import free_port, free_ports, page
from farloop.monitoring.addresses import Address
from farloop.monitoring.endpoint import Endpoint, Response
from farloop.monitoring.healthcheck import probe
from farloop.monitoring.status import Status

pytestmark = pytest.mark.integration


def farloop(*words: str) -> Result:
    return CliRunner().invoke(app, words, env={"COLUMNS": "110"}, prog_name="farloop")


def served(body: bytes, status: int = 200) -> Endpoint:
    return Endpoint("127.0.0.1", 0, {"/status": lambda: Response(status=status, body=body)})


@pytest.mark.parametrize("make", statuses.ALL)
def test_status_says_what_it_has_to_say_at_80_columns_in_every_state(make: Callable[[], Status]) -> None:
    told = make()
    with served(json.dumps(told).encode()) as endpoint:
        url = f"127.0.0.1:{endpoint.port}"
        shown = CliRunner().invoke(
            app, ["status", "--url", f"http://{url}"], env={"COLUMNS": "80"}, prog_name="farloop"
        )
        assert json.loads(farloop("status", "--url", url, "--json").stdout) == told
    assert shown.exit_code == 0
    assert told["run"]["state"] in shown.stdout and "\x1b" not in shown.stdout
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())
    assert ("recent events" in shown.stdout) == bool(told.get("recent"))
    assert shown.stdout.count("! ") == len(told["alarms"])


def test_status_watches_until_the_coordinator_of_a_finished_run_is_gone() -> None:
    told = [statuses.status(), statuses.held(), statuses.finished()]

    def tell() -> Response:
        if not told:
            threading.Thread(target=endpoint.close).start()
            return Response(status=500)
        return Response(body=json.dumps(told.pop(0)).encode())

    endpoint = Endpoint("127.0.0.1", 0, {"/status": tell})
    result = farloop("status", "--watch", "--url", f"127.0.0.1:{endpoint.port}")
    assert result.exit_code == 0
    for words in ("run fjord-1b is training", "run fjord-1b is held", "ALARM: storage", "run fjord-1b is finished"):
        assert words in result.stdout


@pytest.mark.parametrize("ends", ["in order", "killed and started again"])
def test_status_watches_the_coordinator_of_a_folder_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """One without pages; the end that falls between two looks is in the folder. A restart is waited for."""
    told: list[Status | None] = [statuses.status(), statuses.held()]
    told += [] if ends == "in order" else [None, None, statuses.status()]

    def ask(folder: Path, *_: object) -> Status:
        if told and (now := told.pop(0)) is not None:
            return now
        if not told:
            (folder / "status.json").write_text(json.dumps(statuses.finished()))
        raise ConnectionRefusedError

    monkeypatch.setattr("farloop.cli.status.ask", ask)
    monkeypatch.setattr("farloop.cli.status.POLL_S", 0.0)
    result = farloop("status", "--watch", "--state", str(tmp_path))
    assert "run fjord-1b is training" in result.stdout and "run fjord-1b is held" in result.stdout
    assert result.exit_code == 0 and "run fjord-1b is finished" in result.stdout
    waits = f"no coordinator runs on {tmp_path}; waiting for it to start again (Ctrl-C ends this)"
    assert result.stdout.count(waits) == (0 if ends == "in order" else 1)


@pytest.mark.parametrize("words", [("--watch", "--json"), ("--watch", "--network"), ("--state", ".", "--url", "a:1")])
def test_options_of_status_that_exclude_each_other_are_refused(words: tuple[str, ...]) -> None:
    result = farloop("status", *words)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert re.search(r"leave one of them out|give one of them", result.stderr)


@pytest.mark.parametrize(("body", "status"), [(b"hello", 200), (b"[]", 200), (b"{}", 200), (b"", 404)])
def test_a_page_that_is_no_status_ends_with_2_and_a_line(body: bytes, status: int) -> None:
    with served(body, status) as endpoint:
        result = farloop("status", "--url", f"127.0.0.1:{endpoint.port}")
    assert result.exit_code == 2
    assert result.stderr.startswith("farloop: error: http://127.0.0.1:")
    assert result.stderr.count("\n") == 1


def test_without_an_answer_status_ends_with_5() -> None:
    result = farloop("status", "--url", f"127.0.0.1:{free_port()}")
    assert result.exit_code == 5
    assert "connection refused" in result.stderr


def test_a_port_in_use_fails_and_a_free_one_does_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = Address(host="127.0.0.1", port=taken.getsockname()[1])
        finding = port("port", address, "[coordinator] bind")
        assert finding.level == "fail"
        assert "[coordinator] bind" in finding.fix
        assert connect(address) is None
    assert port("port", address, "[coordinator] bind").level == "ok"
    assert connect(address) == "connection refused"


@pytest.mark.parametrize(
    ("encoding", "words", "parts"),
    [
        ("ascii", ["lab", "methods"], ["tau"]),
        *slow(
            ("latin-1", ["lab", "methods"], ["tau"]),
            ("ascii", ["lab", "codecs", "--no-measure"], ["beta"]),
            ("ascii", ["lab", "schedule", "--help"], []),
            ("ascii", ["status", "--url", ""], ["fjord"]),
        ),
        ("latin-1", ["status", "--url", ""], ["fjord"]),
        ("ascii", ["config", "check", "no–such.toml"], ["no-such.toml"]),
    ],
)
def test_commands_write_for_terminals_without_unicode(encoding: str, words: list[str], parts: list[str]) -> None:
    with served(json.dumps(statuses.status()).encode()) as endpoint:
        words = [word or f"127.0.0.1:{endpoint.port}" for word in words]
        command = [sys.executable, "-m", "farloop.cli.main", *words]
        environ = {**os.environ, "PYTHONIOENCODING": encoding}
        ended = subprocess.run(command, env=environ, capture_output=True, check=False)
    told = (ended.stdout + ended.stderr).decode(encoding)
    assert "this is a bug" not in told and "Traceback" not in told, told
    assert ended.returncode == (2 if "config" in words else 0) and all(part in told for part in parts), told


def test_every_character_has_a_reading_in_ascii(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        print_anywhere()
        stream.write("q4 · τ = ⌊½ β 10⁹⌋ → 3 ≤ é ▁█ \N{SNOWMAN}")
    assert (tmp_path / "out").read_text() == "q4 - tau = [1/2 beta 10^9] -> 3 <= e _# ?"


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy"])
def test_own_pages_are_read_past_the_proxy_of_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    for exception in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(exception, raising=False)
    told = {"run": {"name": "r"}, "nodes": []}
    routes = {
        "/status": lambda: Response(content_type="application/json", body=json.dumps(told).encode()),
        "/healthz": lambda: Response(status=503, body=b"stands still"),
        "/b/status": lambda: Response(status=503, body=b"b stands by for a\n"),
    }
    with Endpoint("127.0.0.1", 0, routes) as endpoint:
        assert fetch(f"127.0.0.1:{endpoint.port}") == told
        assert wall_clock(f"127.0.0.1:{endpoint.port}").detail.startswith("within ")
        with pytest.raises(CommandError, match="b stands by for a"):
            fetch(f"127.0.0.1:{endpoint.port}/b/status")
        assert probe(f"127.0.0.1:{endpoint.port}/status") == ""
        assert probe(f"127.0.0.1:{endpoint.port}/healthz").endswith("/healthz answers 503: stands still")
        assert page(endpoint.port, 5) == told


def test_the_wall_clock_is_compared_only_where_a_page_answers() -> None:
    with served(b"{}") as endpoint:
        assert wall_clock(f"127.0.0.1:{endpoint.port}").detail.startswith("within ")
    assert "not compared" in wall_clock(f"127.0.0.1:{free_port()}").detail


def test_doctor_ends_with_2_when_something_fails(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    address = f"tcp://127.0.0.1:{free_port()}"
    path.write_text(f"[node]\nname = 'a'\ncoordinator = '{address}'\n[data]\nmax_bytes = 300000\n")
    result = farloop("doctor", str(path), "--json")
    assert result.exit_code == 2
    failed = [finding["what"] for finding in json.loads(result.stdout) if finding["level"] == "fail"]
    assert failed == ["coordinator"]


def test_a_port_that_was_given_out_is_not_given_to_another_process() -> None:
    ports = free_ports(8)
    script = f"from farloop.local.processes import _reserved; print(*map(_reserved, {ports}))"
    answer = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert len(set(ports)) == 8 and answer.stdout.split() == ["False"] * 8
    for each in ports:
        with socket.create_server(("127.0.0.1", each)):
            """A server can have it."""
