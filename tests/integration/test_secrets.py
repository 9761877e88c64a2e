"""Secrets stay where they were made: in no log, however talkative, on no page, in no file of a run."""

import base64
import urllib.request
from pathlib import Path

import pytest
from keyring import authorize, keys_of, new_keys
from loopback import FARLOOP, PACED, NewRun, Run, merged_since
from zmq.utils import z85

from farloop.config.sources import dump_toml
from farloop.local.processes import free_port

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TELLTALE = Path(__file__).with_name("telltale.py")
DEBUG = ("--log-level", "debug")


def test_no_secret_is_in_a_log_on_a_page_or_in_the_state(new_run: NewRun) -> None:
    run = new_run(steps=60, **PACED)
    keys, tokens, page = new_keys(run, "coordinator", "a", "b"), run.folder / "tokens", free_port()
    authorize(run, "a", "b")
    file = run.folder / "run.toml"
    file.write_text(dump_toml(run.tables))
    coordinator = run.start("coordinator", str(TELLTALE), str(tokens), "coordinator", str(file), *DEBUG)
    a = run.start_metronome("a", **keys_of(keys, "a"))
    http = {"http": f"127.0.0.1:{page}"}
    b = run.start("node-b", *FARLOOP, "node", str(run.node_toml("b", "", keys_of(keys, "b") | http)), *DEBUG)
    run.until("both train", lambda s: merged_since(s, [0, 0, 0], "b"))
    places = pages(run, f"http://127.0.0.1:{page}/metrics") | files(run, but=tokens)
    run.hurry()
    run.until_done(coordinator, a, b)
    assert "level=debug" in coordinator.said and "level=debug" in b.said
    places |= {f"{name} at the end": content for name, content in files(run, but=tokens).items()}

    secrets = {name: (keys / f"{name}.key").read_bytes().strip() for name in ("coordinator", "a", "b")}
    lane_tokens = tokens.read_bytes().split()
    assert len(lane_tokens) >= 2, "each session has one"
    wanted = [form for secret in secrets.values() for form in (*forms_of(secret), *forms_of(z85.decode(secret)))]
    wanted += [form for token in lane_tokens for form in forms_of(token)]
    looked = {"/", "/status", "/metrics", "coordinator.log", "node-a.log", "node-b.log", "state/metrics.jsonl"}
    assert all(places[name] for name in looked), "there was something to look through"
    assert any(name.startswith("state/journal-") and content for name, content in places.items())
    leaks = {name.removesuffix(" at the end") for name, content in places.items() if any(x in content for x in wanted)}
    assert leaks == {f"keys/{name}.key" for name in secrets}, "each secret is in its own file, and nowhere else"


def pages(run: Run, node_page: str) -> dict[str, bytes]:
    """What the coordinator and a node show."""
    shown = {path: run.page(path)[1].encode() for path in ("/", "/status", "/metrics", "/healthz", "/readyz")}
    with urllib.request.urlopen(node_page, timeout=5) as answer:
        return shown | {node_page: answer.read()}


def files(run: Run, *, but: Path) -> dict[str, bytes]:
    """Logs, journal, snapshots, what the nodes keep, the model, and the keys themselves."""
    found: dict[str, bytes] = {}
    for path in run.folder.rglob("*"):
        try:
            if path.is_file() and path != but:
                found[path.relative_to(run.folder).as_posix()] = path.read_bytes()
        except FileNotFoundError:  # a draft that has its name by now, or a snapshot that was replaced
            continue
    return found


def forms_of(secret: bytes) -> set[bytes]:
    """As it is, and as a log or a JSON text would show it."""
    listed, escaped = ", ".join(map(str, secret)), repr(secret)[2:-1]
    return {
        secret,
        secret.hex().encode(),
        secret.hex().upper().encode(),
        base64.b64encode(secret).rstrip(b"="),
        base64.urlsafe_b64encode(secret).rstrip(b"="),
        escaped.encode(),
        escaped.replace("\\", "\\\\").encode(),
        listed.encode(),
    }
