"""A coordinator on an open port: everybody knocks at once, and the run goes on. Numbers: `tests/chaos/strangers.py`."""

import time
import urllib.request

import pytest
from keyring import authorize, keys_of, new_keys
from loopback import PACED, NewRun, Run, assert_all_agree, merged_since, node_of
from strangers import strangers_at

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

KNOCK_S = 6.0


def turned_away(run: Run) -> dict[str, float]:
    """By reason, as Prometheus would see it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{run.http}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    found = [line for line in lines if line.startswith("farloop_rejected_peers_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


def test_strangers_a_thief_and_half_open_connections_stop_nobody(new_run: NewRun) -> None:
    run = new_run(steps=150, **PACED)
    keys = new_keys(run, "coordinator", "a", "b", "thief")
    authorize(run, "a", "b", "thief")
    coordinator = run.start_coordinator()
    a = run.start_metronome("a", pace_s=0.15, **keys_of(keys, "a"))
    b = run.start_node("b", **keys_of(keys, "b"))
    run.until("both train", lambda s: merged_since(s, [0, 0, 0], "b"))
    with strangers_at(run.port, keys) as strangers:
        time.sleep(KNOCK_S)
        versions = run.until("it is still there", lambda s: True)["versions"]
        run.until("the run goes on under siege", lambda s: merged_since(s, versions, "b"))
        b.kill()
        run.until("b is missed", lambda s: not node_of(s, "b")["connected"])
        b = run.start_node("b", **keys_of(keys, "b"))
        versions = run.until("it is back", lambda s: node_of(s, "b")["connected"])["versions"]
        run.until("who comes back gets in, and takes part", lambda s: merged_since(s, versions, "b"))
        away = turned_away(run)
    assert min(strangers.did.values()) > 0, strangers.did
    assert {"malformed", "wrong_key", "too_often"} <= away.keys(), away
    said = coordinator.said
    assert 0 < said.count("rejected peer") < 100, said
    run.hurry()
    status = run.until_done(coordinator, a, b)
    assert_all_agree(run, status, "a", "b")
    assert node_of(status, "a")["lost_steps"] == 0
