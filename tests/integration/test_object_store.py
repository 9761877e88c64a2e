"""Deltas and updates by an object store: real processes, a real signature, and stores that fail."""

import http.client
import itertools
import logging
import os
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from urllib.parse import urlsplit

import pytest
from loopback import PACED, NewRun, Run, assert_all_agree
from object_server import ObjectServer, serving
from slow_cases import mostly_slow

from farloop.cli.doctor import object_store, store_from_here
from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.objects import signer
from farloop.coordinator.storage.verify import verify
from farloop.runtime.http_objects import Client, Failed

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("obstore") is None, reason="needs the extra 'cloud' (obstore)"),
]


@pytest.fixture(autouse=True)
def another_store() -> None:
    signer.cache_clear()  # of the last test, at the same URL


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An S3 server that checks signatures; the URL of a bucket."""
    pytest.importorskip("moto", reason="needs moto, an S3 server")
    from moto.server import ThreadedMotoServer  # type: ignore[import-not-found]

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").disabled = True
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/runs", method="PUT")).close()
    yield "s3://runs/first"
    server.stop()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def client() -> Iterator[Client]:
    with closing(Client()) as client:
        yield client


def by_store(new_run: NewRun, url: str, **settings: object) -> Run:
    run = new_run(**{"steps": 24, **PACED, "bulk": "store", **settings})
    run.tables["coordinator"]["bulk_url"] = url
    return run


def play(run: Run) -> dict[str, dict[str, int]]:
    """To the end. Bytes of each node by kind."""
    run.start_coordinator()
    for name in "ab":
        run.start_node(name, link="1gbit/0ms")
    status = run.until_done()
    assert_all_agree(run, status, "a", "b")
    assert all(len(window["merged"]) == 2 for window in status["windows"])
    return {node["name"]: dict(node["bytes_by_kind"]) for node in status["nodes"]}


def test_a_signed_url_is_for_one_object_which_is_written_once_and_read_in_ranges(moto: str, client: Client) -> None:
    sign, data = signer(moto), os.urandom(9 << 20)
    client.put(sign("PUT", "f0/a"), memoryview(data))
    client.put(sign("PUT", "f0/a"), memoryview(b"other"))  # 412: it is there, and stays
    assert client.fetch(sign("GET", "f0/a")) == data
    part = bytearray(len(data))
    client.get(sign("GET", "f0/a"), memoryview(part), 1 << 20, 2 << 20)
    assert part[1 << 20 : 2 << 20] == data[1 << 20 : 2 << 20] and not any(part[: 1 << 20])
    with pytest.raises(Failed, match="404"):
        client.get(sign("GET", "f0/b"), memoryview(part), 0, 1)


def test_doctor_tries_the_store_from_both_ends(moto: str) -> None:
    (found,) = object_store(moto)
    assert found.level == "ok" and "PUT, GET and DELETE" in found.detail, found
    assert store_from_here(found.detail.split("'")[1]).level == "ok"


def test_doctor_says_what_a_store_lacks_or_refuses(server: ObjectServer) -> None:
    server.fault = lambda method, path: "403" if method == "GET" else ""
    (found,) = object_store("s3://runs/first")
    assert found.level == "fail" and "GET: 403" in found.detail
    server.fault = lambda method, path: "403"
    assert "403" in store_from_here(signer("s3://runs/first")("PUT", "a")).detail
    server.fault, server.date = lambda method, path: "", "Fri, 27 Nov 2020 06:45:41 GMT"
    (found,) = object_store("s3://runs/first")
    assert "set this machine's by NTP" in found.detail, "clocks are compared"


def test_no_byte_of_a_delta_or_update_passes_the_coordinator(new_run: NewRun, moto: str) -> None:
    """Neither its sockets nor its journal: what nodes moved by HTTP is counted, and each node ends with its anchors."""
    run = by_store(new_run, moto)
    moved = play(run)
    crossed = sum(relay.bytes_up + relay.bytes_down for relay in run.relays.values())
    bulk = sum(kinds["delta"] + kinds["update"] for kinds in moved.values())
    assert bulk > 1 << 20, "by HTTP"
    assert crossed - sum(kinds["snapshot"] + kinds["probe"] for kinds in moved.values()) < bulk / 4
    assert crossed < sum(sum(kinds.values()) for kinds in moved.values()) - bulk / 2
    assert sum(path.stat().st_size for path in run.state_dir.glob("journal-*")) < bulk / 4
    assert any(isinstance(record, rec.InputStored) for record in run.records())
    report = verify(run.state_dir)
    assert not report.faults and report.deltas > 0


def test_a_start_reads_what_the_store_has(new_run: NewRun, moto: str) -> None:
    run = by_store(new_run, moto, steps=40)
    coordinator = run.start_coordinator()
    for name in "ab":
        run.start_metronome(name, pace_s=0.1)
    run.until("every fragment has two versions", lambda status: min(status["versions"]) >= 2)
    coordinator.kill()
    run.start_coordinator()
    run.hurry()
    assert_all_agree(run, run.until_done(*(d for d in run.daemons if d is not coordinator)), "a", "b")
    assert not verify(run.state_dir).faults


@pytest.mark.parametrize("fault", mostly_slow(["500", "403", "cut", "spoil"], "spoil"))
def test_what_the_store_fails_goes_by_the_session(new_run: NewRun, server: ObjectServer, fault: str) -> None:
    """Every third request; no window is lost, it is counted, and an alarm is raised."""
    asked = itertools.count()
    server.fault = lambda method, path: fault if next(asked) % 3 == 2 else ""
    run = by_store(new_run, "s3://runs/first")
    moved = play(run)
    assert all(kinds["delta"] and kinds["update"] for kinds in moved.values())
    if fault in ("403", "spoil"):  # the others are tried again, and succeed
        assert any(alarm.startswith("object store: it fails ") for alarm in run.final()["alarms"])


def test_a_store_that_is_away_costs_no_window(new_run: NewRun, server: ObjectServer) -> None:
    server.fault = lambda method, path: "503"
    play(by_store(new_run, "s3://runs/first", steps=12))
    assert server.objects == {}


def test_a_cut_transfer_goes_on_where_it_was(server: ObjectServer, client: Client) -> None:
    data = os.urandom(1 << 20)
    server.objects["/runs/first/a"] = data
    faults = iter(["cut", "cut", ""])
    server.fault = lambda method, path: next(faults)
    into = bytearray(len(data))
    client.get(signer("s3://runs/first")("GET", "a"), memoryview(into), 0, len(data))
    assert into == data
    assert client.received < 1.01 * len(data), "no byte came twice"


def test_bytes_by_http_are_counted_as_they_are_at_the_socket(server: ObjectServer, client: Client) -> None:
    """An independent count: what a bare socket sends and receives for the same request."""
    server.objects["/runs/first/a"] = data = os.urandom(3 << 20)
    into = bytearray(len(data))
    url = signer("s3://runs/first")("GET", "a")
    client.get(url, memoryview(into), 0, len(data))
    parts = urlsplit(url)
    text = f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\nRange: bytes=0-{len(data) - 1}\r\n\r\n"
    bare = http.client.HTTPConnection(parts.netloc)
    bare.connect()
    bare.sock.sendall(text.encode())
    received = 0
    while received < len(data):
        received += len(bare.sock.recv(1 << 20))
    bare.close()
    assert client.sent == len(text)
    assert client.received == pytest.approx(received, abs=200)
