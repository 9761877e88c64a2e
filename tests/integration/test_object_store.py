"""Deltas and updates by an object store: real processes, a real signature, and stores that fail."""

import itertools
import json
import os
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest
from command_line import farloop
from loopback import PACED, NewRun, Run, assert_all_agree
from object_server import ObjectServer, serving

from farloop.cli.doctor import object_store, store_from_here
from farloop.config.exit_codes import ExitCode
from farloop.coordinator.decide import records as rec
from farloop.coordinator.storage.objects import note_objects, signer
from farloop.coordinator.storage.verify import verify
from farloop.lab.bench import http_store
from farloop.lab.bench.http_store import ObjectServer as ObjectStore
from farloop.local.processes import free_ports
from farloop.runtime import http_objects
from farloop.runtime.http_objects import Client, Failed, HttpObjects
from farloop.runtime.ports import Moved

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("obstore") is None, reason="needs the extra 'cloud' (obstore)"),
]


STORE = "s3://runs/first"


@pytest.fixture(autouse=True)
def another_store() -> None:
    signer.cache_clear()  # of the last test, at the same URL


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def plain() -> Iterator[ObjectStore]:
    """Without signatures."""
    with ObjectStore().serving() as server:
        yield server


@pytest.fixture
def client() -> Iterator[Client]:
    with closing(Client()) as client:
        yield client


def by_store(new_run: NewRun, url: str = STORE, **settings: object) -> Run:
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


def test_a_signed_url_is_for_one_object_written_once_and_read_in_ranges(server: ObjectServer, client: Client) -> None:
    sign, data = signer(STORE), os.urandom(9 << 20)
    client.put(sign("PUT", "f0/a"), memoryview(data))
    client.put(sign("PUT", "f0/a"), memoryview(b"other"))  # 412: it is there, and stays
    assert client.fetch(sign("GET", "f0/a")) == data
    part = bytearray(len(data))
    client.get(sign("GET", "f0/a"), memoryview(part), 1 << 20, 2 << 20)
    assert part[1 << 20 : 2 << 20] == data[1 << 20 : 2 << 20] and not any(part[: 1 << 20])
    with pytest.raises(Failed, match="404"):
        client.get(sign("GET", "f0/b"), memoryview(part), 0, 1)


def test_doctor_tries_the_store_from_both_ends(server: ObjectServer) -> None:
    (found,) = object_store(STORE)
    assert found.level == "ok" and "PUT, GET and DELETE" in found.detail, found
    assert store_from_here(found.detail.split("'")[1]).level == "ok"


def test_doctor_says_what_a_store_lacks_or_refuses(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.fault = lambda method, path: "403" if method == "GET" else ""
    (found,) = object_store(STORE)
    assert found.level == "fail" and "GET: 403" in found.detail
    server.fault = lambda method, path: "403"
    assert "403" in store_from_here(signer(STORE)("PUT", "a")).detail
    server.fault, server.life_s = lambda method, path: "", 0.0
    expired = store_from_here(signer(STORE)("PUT", "a")).detail
    assert "403 Forbidden: SignatureDoesNotMatch: The signature is not the calculated one" in expired
    assert "secret" not in expired
    assert "in quotes" in (store_from_here("a").fix or "")
    server.life_s, server.date = 600.0, "Fri, 27 Nov 2020 06:45:41 GMT"
    (found,) = object_store(STORE)
    assert found.level == "warn" and "set this machine's by NTP" in found.detail, "clocks are compared"
    server.fault = lambda method, path: "403"
    (found,) = object_store(STORE)
    assert "PUT: 403" in found.detail and "set this machine's by NTP" in found.detail
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    (found,) = object_store(STORE)
    assert f"PUT: 127.0.0.1:{server.server_port} by the proxy 127.0.0.1:9: [Errno 111]" in found.detail
    for wrong in ("::::", "http://", "socks5://127.0.0.1:9", "http://user:secret@h:port"):
        monkeypatch.setenv("HTTP_PROXY", wrong)
        (found,) = object_store(STORE)
        assert found.detail == f"{STORE}: PUT: HTTP_PROXY names no proxy: expected http://HOST:PORT"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    signer.cache_clear()
    (found,) = object_store(STORE)
    assert found.detail == f"{STORE}: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


def test_no_byte_of_a_delta_or_update_passes_the_coordinator(new_run: NewRun, server: ObjectServer) -> None:
    """Neither its sockets nor its journal: what nodes moved by HTTP is counted, and each node ends with its anchors."""
    run = by_store(new_run)
    moved = play(run)
    for kind, method, way in (("delta", "PUT", "received"), ("update", "GET", "sent")):
        seen = [
            n
            for (m, path, w), n in server.moved.items()
            if (m, w) == (method, way) and ("update-" in path) == (kind == "update") and "/trial/" not in path
        ]
        assert sum(kinds[kind] for kinds in moved.values()) == sum(seen) > 1 << 19, (
            "to the byte, by the server's sockets"
        )
    crossed = sum(relay.bytes_up + relay.bytes_down for relay in run.relays.values())
    bulk = sum(kinds["delta"] + kinds["update"] for kinds in moved.values())
    assert bulk > 1 << 20, "by HTTP"
    assert crossed - sum(kinds["snapshot"] + kinds["probe"] for kinds in moved.values()) < bulk / 4
    assert crossed < sum(sum(kinds.values()) for kinds in moved.values()) - bulk / 2
    assert sum(path.stat().st_size for path in run.state_dir.glob("journal-*")) < bulk / 4
    assert any(isinstance(record, rec.InputStored) for record in run.records())
    report = verify(run.state_dir)
    assert not report.faults and report.deltas > 0


def test_a_damaged_note_of_the_store_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / "objects").write_bytes(b'{"url": "s3://run\xff')
    note_objects(tmp_path, STORE)
    assert json.loads((tmp_path / "objects").read_bytes()) == {"url": STORE}


def test_a_start_reads_what_the_store_has(new_run: NewRun, server: ObjectServer) -> None:
    """It waits for a store that is away, and ends in one line where an object is gone."""
    run = by_store(new_run, steps=40)
    coordinator = run.start_coordinator()
    for name in "ab":
        run.start_metronome(name, pace_s=0.1)
    run.until("every fragment has two versions", lambda status: min(status["versions"]) >= 2)
    coordinator.kill()
    run.tables["coordinator"]["bulk_url"] = "s3://runs/second"
    again = run.start_coordinator()
    assert run.until_ended(again) == ExitCode.STORAGE
    assert "bulk_url changed" in again.said and "s3://runs/second/" in again.last_line
    assert "perhaps by a lifecycle rule" in again.last_line and "gone for good: docs/" in again.last_line
    run.tables["coordinator"]["bulk_url"] = STORE
    server.fault = lambda method, path: "503" if method == "GET" else ""
    run.until_said(run.start_coordinator().log, "storage hold begin")
    server.fault = lambda method, path: ""
    run.hurry()
    assert_all_agree(run, run.until_done(), "a", "b")
    assert not verify(run.state_dir).faults
    server.fault, asked = lambda method, path: "503", server.requests
    assert verify(run.state_dir).objects_missing > 2
    assert server.requests - asked == 6, "one by verify and one by the trial of a start, each asked for three times"
    server.fault = lambda method, path: ""
    server.objects.clear()
    shown = farloop("journal", "verify", str(run.state_dir), columns=200)
    assert shown.exit_code == ExitCode.STORAGE and shown.stdout.count("damaged") == 1
    assert "objects cannot be had, as s3://runs/first/" in shown.stdout and "bring them back" in shown.stdout
    assert "make a copy" not in shown.stdout


def test_a_run_whose_objects_are_gone_goes_on_from_a_copy(new_run: NewRun, server: ObjectServer) -> None:
    """With what its nodes hold beyond that."""
    run = by_store(new_run, steps=40)
    copies = f"file://{run.folder}/copies"
    run.tables["coordinator"] |= {"copy_to": copies, "copy_every_s": 2.0}
    coordinator = run.start_coordinator()
    for name in "ab":
        run.start_metronome(name, pace_s=0.3)
    run.until("every fragment has three versions", lambda status: min(status["versions"]) >= 3)
    coordinator.kill()
    server.objects.clear()
    shutil.rmtree(run.state_dir)
    again = run.start_coordinator("--restore", copies, "--adopt-from-nodes")
    run.hurry()
    assert_all_agree(run, run.until_done(), "a", "b")
    assert f"from {copies}: versions " in again.said


def test_what_the_store_fails_goes_by_the_session(new_run: NewRun, server: ObjectServer) -> None:
    """Each way in turn; no window is lost, it is counted, and an alarm is raised."""
    faults, asked = ["403", "", "500", "cut", "", "spoil", "lost", "", "away", "expired"], itertools.count()

    def fault(method: str, path: str) -> str:
        chosen = faults[next(asked) % len(faults)]
        server.life_s = 0.0 if chosen == "expired" else 600.0
        return chosen.removeprefix("expired")

    server.fault = fault
    run = by_store(new_run)
    moved = play(run)
    assert all(kinds["delta"] and kinds["update"] for kinds in moved.values())
    assert any(alarm.startswith("object store: it fails ") for alarm in run.final()["alarms"])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_cut_transfer_goes_on_where_it_was(plain: ObjectStore, client: Client, share: float) -> None:
    plain.objects["/a"] = data = os.urandom(1 << 20)
    plain.cut_at = share
    faults = iter(["cut", "cut", "", "cut", "cut", ""])
    plain.fault = lambda method, path: next(faults)
    into = bytearray(len(data))
    client.get(f"{plain.url}/a", memoryview(into), 0, len(data))
    assert into == data
    assert client.received < 1.01 * len(data), "no byte came twice"
    client.put(f"{plain.url}/b", memoryview(data))
    assert plain.objects["/b"] == data


def test_a_connection_that_the_server_has_closed_costs_no_second_try(client: Client) -> None:
    class Impatient(http_store.Handler):
        timeout = 0.05

    with ObjectStore(Impatient).serving() as store:
        for _ in range(3):
            client.put(f"{store.url}/a", memoryview(b"data"))
            sent = client.sent
            (held,) = client._open.values()
            assert held.sock is not None and held.sock.recv(1, socket.MSG_PEEK) == b"", "until it is closed"
        assert store.requests == 3
        client.put(f"{store.url}/a", memoryview(b"data"))
        assert client.sent - sent == sent / 3


def test_transfers_one_after_the_other_use_one_connection(plain: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    connections: list[object] = []
    accept = plain.get_request
    monkeypatch.setattr(plain, "get_request", lambda: connections.append(made := accept()) or made)  # type: ignore[func-returns-value]
    answers = Queue[str]()
    objects = HttpObjects(lambda action: action())
    for number in range(4):
        objects.put(f"{plain.url}/{number}", b"data", lambda why, moved: answers.put(why))
        assert answers.get(timeout=60) == ""
    objects.close()
    assert len(plain.objects) == 4 and len(connections) == 1


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_an_object_of_unknown_size_is_read_by_one_request_and_from_where_it_was_cut(
    plain: ObjectStore, client: Client, share: float
) -> None:
    plain.objects["/a"] = data = os.urandom(3 << 20)
    faults = iter(["", "cut", "cut", ""])
    plain.cut_at, plain.fault = share, lambda method, path: next(faults)
    assert client.fetch(f"{plain.url}/a") == data and plain.requests == 1
    before = client.received
    assert client.fetch(f"{plain.url}/a") == data
    assert plain.requests == 4 and client.received - before < len(data) + 2000, "nothing is sent twice"


def test_a_write_whose_answer_was_lost_is_done(plain: ObjectStore, client: Client) -> None:
    faults = iter(["lost", ""])
    plain.fault = lambda method, path: next(faults)
    client.put(f"{plain.url}/a", memoryview(b"data"))  # 412 the second time
    assert plain.objects == {"/a": b"data"}


@pytest.mark.parametrize(
    ("fault", "asked", "why"),
    [
        ("403", 1, "403"),
        ("404", 1, "404"),
        ("503", 3, "503"),
        ("away", 3, "closed"),
        ("spoil", 1, "announced"),
        ("cut", 3, ""),
    ],
)
def test_a_failure_says_why_and_is_tried_again_only_where_that_may_help(
    plain: ObjectStore, fault: str, asked: int, why: str
) -> None:
    plain.objects["/a"] = b"data"
    requests: list[str] = []
    plain.cut_at = 0.0
    plain.fault = lambda method, path: requests.append(method) or fault  # type: ignore[func-returns-value]
    into = bytearray(4)
    url = f"{plain.url}/a"
    failed, (sent, _) = by_port(lambda objects, over: objects.get(url, into, lambda data: data == b"data", over))
    assert why in failed and len(requests) == asked and sent > 0


def test_a_store_that_stands_still_is_given_up_once_for_all_that_wait(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each of them: twelve reads by four threads wait one time-out."""
    monkeypatch.setattr(http_objects, "TIMEOUT_S", 0.5)
    server.objects["/runs/first/a"] = os.urandom(1 << 20)
    server.stands_still = "GET"
    url, answers = signer(STORE)("GET", "a"), Queue[tuple[str, Moved]]()
    objects = HttpObjects(lambda action: action())
    for _ in range(12):
        objects.get(url, bytearray(1 << 20), right, lambda why, moved: answers.put((why, moved)))
    whys = [answers.get(timeout=60)[0] for _ in range(12)]
    assert all(whys) and sum(method == "GET" and size > 1000 for method, size in server.bodies) <= http_objects.THREADS
    objects.close()


def test_a_slow_store_has_failed(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.objects["/runs/first/a"] = bytes(4 << 20)
    monkeypatch.setattr(http_objects, "_patience_s", lambda num_bytes: 0.5)
    server.bytes_per_s = 1e6
    url, into = signer(STORE)("GET", "a"), bytearray(4 << 20)
    why, _ = by_port(lambda objects, over: objects.get(url, into, right, over))
    assert "too slow" in why
    why, _ = by_port(lambda objects, over: objects.put(signer(STORE)("PUT", "b"), into, over))
    assert "too slow" in why


def test_what_is_sent_to_the_store_is_within_max_uplink(plain: ObjectStore) -> None:
    data, began = bytes(2 << 20), time.monotonic()
    why, _ = by_port(lambda objects, over: objects.put(f"{plain.url}/a", data, over), bytes_per_s=4e6)
    took_s = time.monotonic() - began
    assert not why and took_s >= (len(data) - http_objects.PIECE_BYTES) / 4e6, "the first piece does not wait"


def test_https_goes_through_the_proxy_of_the_environment(
    tmp_path: Path, plain: ObjectStore, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By CONNECT and with its password; not past it, except to the hosts of NO_PROXY."""
    made = tmp_path / "cert.pem", tmp_path / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(made[0]), "-keyout", str(made[1])]
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make a certificate")
    subprocess.run(words, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*made)
    plain.socket = context.wrap_socket(plain.socket, server_side=True)
    url, asked = plain.url.replace("http:", "https:"), list[bytes]()
    with pytest.raises(Failed, match=r"self-signed certificate.*SSL_CERT_FILE"):
        client.fetch(f"{url}/a")
    monkeypatch.setenv("SSL_CERT_FILE", str(made[0]))
    with proxy(asked) as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:p%40ss@127.0.0.1:{port}")
        client.put(f"{url}/a", memoryview(b"data"))
        assert client.fetch(f"{url}/a") == b"data"
        assert asked and all(request.startswith(b"CONNECT 127.0.0.1:") for request in asked)
        assert all(b"Basic " + b64encode(b"user:p@ss") in request for request in asked)
        before = len(asked)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        client.close()
        assert client.fetch(f"{url}/a") == b"data" and len(asked) == before
    monkeypatch.delenv("NO_PROXY")
    client.close()
    with pytest.raises(Failed, match="refused"):
        client.fetch(f"{url}/a")


@pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx, a web server that takes PUT")
def test_nginx_is_an_object_store(tmp_path: Path, new_run: NewRun, client: Client) -> None:
    """Without signatures and If-None-Match, with ranges: a run's bytes go by it, and doctor says what it lacks."""
    port, small, readable = free_ports(3)
    (tmp_path / "nginx.conf").write_text(
        f"""daemon off; master_process off; pid {tmp_path}/pid; error_log stderr;
        events {{}}
        http {{ access_log off; client_max_body_size 0; client_body_temp_path {tmp_path}/body;
        proxy_temp_path {tmp_path}/t; fastcgi_temp_path {tmp_path}/t; uwsgi_temp_path {tmp_path}/t;
        scgi_temp_path {tmp_path}/t;
        root {tmp_path}/objects; dav_methods PUT DELETE; create_full_put_path on;
        server {{ listen 127.0.0.1:{port}; }}
        server {{ listen 127.0.0.1:{small}; client_max_body_size 1m; }}
        server {{ listen 127.0.0.1:{readable}; dav_methods off; }} }}"""
    )
    (tmp_path / "objects").mkdir()
    with subprocess.Popen(["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]) as nginx:
        try:
            url, data = f"http://127.0.0.1:{port}/runs", os.urandom(9 << 20)
            while nginx.poll() is None:
                with suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                time.sleep(0.05)
            client.put(f"{url}/a", memoryview(data))
            into = bytearray(len(data))
            why, _ = by_port(lambda objects, over: objects.get(f"{url}/a", into, right, over))
            assert not why and into == data
            (found,) = object_store(url)
            assert found.level == "warn" and "it has no If-None-Match" in found.detail
            for other, words in ((small, "client_max_body_size 0"), (readable, "dav_methods PUT DELETE")):
                (found,) = object_store(f"http://127.0.0.1:{other}/runs")
                assert found.level == "fail" and words in found.detail
            moved = play(by_store(new_run, url, steps=12))
            assert sum(path.stat().st_size for path in (tmp_path / "objects").rglob("update-*")) > 1 << 16
            assert all(kinds["delta"] for kinds in moved.values())
        finally:
            nginx.terminate()


def right(data: bytearray) -> bool:
    return True


def by_port(
    call: Callable[[HttpObjects, Callable[[str, Moved], None]], None], bytes_per_s: float = float("inf")
) -> tuple[str, Moved]:
    """What one request of the port ends with."""
    answers = Queue[tuple[str, Moved]]()
    objects = HttpObjects(lambda action: action(), lambda: bytes_per_s)
    call(objects, lambda why, moved: answers.put((why, moved)))
    objects.close()
    return answers.get(timeout=60)


@contextmanager
def proxy(asked: list[bytes]) -> Iterator[int]:
    """One that knows CONNECT alone; its port. `asked` gets the requests."""

    class Tunnel(StreamRequestHandler):
        def handle(self) -> None:
            request = b"".join(iter(lambda: self.rfile.readline(), b"\r\n"))
            asked.append(request)
            host, port = request.split()[1].decode().split(":")
            with socket.create_connection((host, int(port))) as far:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while ready := select.select([self.connection, far], [], [], 60)[0]:
                    for one in ready:
                        if not (data := one.recv(1 << 16)):
                            return
                        (far if one is self.connection else self.connection).sendall(data)

    with ThreadingTCPServer(("127.0.0.1", 0), Tunnel) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()
