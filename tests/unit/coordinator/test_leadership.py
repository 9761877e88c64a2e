"""The record of who leads: one table of laws for every store that can keep it, and what a process makes of it."""

import dataclasses
import errno
import http.server
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import object_server
import pytest
from disk_faults import refuse
from terms_in_memory import Terms

from farloop.coordinator.errors import (
    Deposed,
    NoRoom,
    StartRefused,
    StateLocked,
    StateMismatch,
    StorageError,
    StorageFailed,
)
from farloop.coordinator.leadership import (
    Leadership,
    Term,
    TermStore,
    Unreachable,
    Unusable,
    Version,
    mark,
    marked,
    term_store,
)
from farloop.coordinator.net.zmq_mirror import MirrorClient
from farloop.coordinator.settings import CoordinatorConfig, check_leads_by
from farloop.coordinator.standby import Contender
from farloop.coordinator.storage.bucket import Bucket, CopyFailed
from farloop.coordinator.storage.files import DISK, OsFiles
from farloop.coordinator.storage.follower import Following
from farloop.coordinator.storage.mirror import INCOMING, finish_incoming
from farloop.coordinator.storage.recovery import as_they_are
from farloop.coordinator.storage.segment import segment_header
from farloop.lab.chaos import record_server

FIRST = Term(run="8f3c", leader="a", process="1", term=1, address="tcp://a:7700")


def etcd(stack: ExitStack, folder: Path) -> str:
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    command = [binary, "--data-dir", str(folder / "etcd"), "--listen-client-urls", client]
    command += ["--advertise-client-urls", client, "--listen-peer-urls", peer]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return f"etcd://127.0.0.1:{ports[0]}/farloop/run"


@pytest.fixture(params=["file", "s3", "k8s", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ExitStack() as stack:
        match request.param:
            case "file":
                yield f"file://{tmp_path}/record"
            case "s3":
                stack.enter_context(object_server.serving(monkeypatch))
                yield "s3://runs/demo"
            case "k8s":
                yield stack.enter_context(record_server.serving()).url
            case "etcd":
                yield etcd(stack, tmp_path)


def answering(url: str) -> TermStore:
    """The store, once it answers."""
    store, deadline = term_store(url), time.monotonic() + 30
    while True:
        try:
            store.read()
        except Unreachable:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            return store


def test_laws(url: str) -> None:
    """Create, read, replace; every stale or absent version loses, and of many writers one wins."""
    store = answering(url)
    none, absent = store.read()
    assert none is None
    assert store.replace(FIRST, absent)
    found, first = store.read()
    assert found == FIRST
    assert not store.replace(dataclasses.replace(FIRST, leader="z"), absent), "it is there by now"
    second = dataclasses.replace(FIRST, term=2, in_sync=("b", "c"))
    assert store.replace(second, first)
    for stale in (first, absent):
        assert not term_store(url).replace(dataclasses.replace(FIRST, leader="z"), stale)
    found, version = store.read()
    assert found == second
    if url.startswith(("etcd", "k8s")):  # they count: another one's record may have the same number
        number, _, _ = str(version).partition(" ")
        assert not store.replace(FIRST, f"{number} b3RoZXI=")

    winners, together = list[int](), threading.Barrier(8)

    def race(number: int) -> None:
        own = term_store(url)
        together.wait()
        if own.replace(dataclasses.replace(FIRST, process=str(number), term=3), version):
            winners.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found, _ = store.read()
    assert found is not None and [found.process] == list(map(str, winners))


def test_a_store_that_does_not_answer_says_so_in_one_line(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    for url in (f"etcd://127.0.0.1:{port}/run", f"k8s://farloop/run?api=http://127.0.0.1:{port}"):
        with pytest.raises(Unreachable, match="refused") as told:
            term_store(url).read()
        assert "\n" not in str(told.value)
    with ExitStack() as stack:
        server = stack.enter_context(record_server.serving())
        with pytest.raises(Unreachable, match=r"answers 403: .*'other' is forbidden"):
            term_store(f"k8s://farloop/other?api=http://127.0.0.1:{server.server_port}").read()
        server.leases["run"] = {"kind": "Lease", "metadata": {"resourceVersion": "1"}}
        with pytest.raises(Unusable, match="has no annotation"):
            term_store(f"k8s://farloop/run?api=http://127.0.0.1:{server.server_port}").read()


@contextmanager
def answering_with(status: int, body: bytes, length: int | None = None) -> Iterator[str]:
    """HOST:PORT of a server that gives every request this answer; `length`: as it claims."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def _do(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

        do_GET = do_POST = do_PUT = _do

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "body", "length"),
    [
        (500, b"it fai", 40),  # the connection ends within the body
        (200, b'{"kvs": [{"mod_rev', 40),
        (200, b'{"header": {}, "kvs": [{"mod_revision": "7"}]}', None),  # an empty value is left out
        (200, b'{"header": {}, "kvs": "none"}', None),
        (200, b'{"kind": "Lease", "metadata": []}', None),
        (200, b'{"kind": "Lease", "metadata": {"annotations": {"farloop/term": 7}}}', None),
        (200, b'{"status": "ok"}', None),  # of another server: it does not say that there is no record
        (404, b"<html>", None),
    ],
)
@pytest.mark.parametrize("scheme", ["etcd://{}/run", "k8s://farloop/run?api=http://{}"])
def test_an_answer_that_is_none_is_one_line(scheme: str, status: int, body: bytes, length: int | None) -> None:
    with answering_with(status, body, length) as server, pytest.raises(Unreachable, match=r"^.{20,}$"):
        term_store(scheme.format(server)).read()


def test_a_namespace_that_is_not_there_is_said() -> None:
    body = b'{"kind": "Status", "message": "namespaces farloop not found"}'
    with answering_with(404, body) as server, pytest.raises(Unreachable, match=r"404.*namespaces farloop not found"):
        term_store(f"k8s://farloop/run?api=http://{server}").replace(FIRST, None)


def test_some_errors_of_obstore_are_pythons_own(tmp_path: Path) -> None:
    """`Bucket` takes a missing object for none, and a folder has no condition but that an object is not there."""
    obstore = pytest.importorskip("obstore")
    store = obstore.store.LocalStore(tmp_path)
    tag = obstore.put(store, "x", b"1")["e_tag"]
    with pytest.raises(FileNotFoundError) as missing:
        obstore.get(store, "y")
    with pytest.raises(NotImplementedError) as refused:
        obstore.put(store, "x", b"2", mode={"e_tag": tag})
    assert not any(isinstance(each.value, obstore.exceptions.BaseError) for each in (missing, refused))
    assert Bucket(f"file://{tmp_path}").get("y") is None


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"term": "x"}', b"\xff", FIRST.encode()[:-9]])
def test_something_else_in_its_place_is_no_record(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "leader").mkdir()
    (tmp_path / "leader" / "00000001.json").write_bytes(content)
    with pytest.raises(Unusable, match="something else than the record of a leader"):
        term_store(f"file://{tmp_path}").read()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://x/y", "expected a URL that begins with one of s3://"),
        ("etcd://host:2379", "expected etcd://HOST:2379/KEY"),
        ("k8s://farloop", "expected k8s://NAMESPACE/NAME"),
        ("file://x", "three slashes"),
        ("etcd://host:2379/x?cafile=/ca.crt", r"expected options out of ca, cert, key; got 'cafile=/ca\.crt'"),
        ("etcd://host:2379/x?ca=", "expected a value for ca; got 'ca='"),
        ("etcd://host:2379/x?key=/k", "key goes with cert; got 'key=/k'"),
        ("etcd://user@host:2379/x", "expected host:port"),
        ("k8s://fö/x", "expected small letters, digits, - and . in k8s://NAMESPACE/NAME"),
        ("k8s://farloop/x y", "expected small letters"),
        ("etcd://host/x", "expected host:port"),
        ("etcd://host:abc/x", "'abc' is not a port"),
        ("etcd://host:99999/x", "'99999' is not a port"),
        ("etcd://a..b:2379/x", r"expected host:port, .* got 'a\.\.b:2379'"),
        ("k8s://farloop/x/y", "expected k8s://NAMESPACE/NAME"),
        ("k8s://farloop/x?api=nonsense", "expected api=https://HOST:PORT; got 'nonsense'"),
        ("k8s://farloop/x?api=https://host:abc", "'abc' is not a port"),
    ],
)
def test_urls(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_leads_by(url)
    for good in ("etcd://[::1]:2379/a/b?ca=/ca&cert=/c&key=/k", "k8s://farloop/x?api=https://api.example&account=/a"):
        check_leads_by(good)


# The records of a run's life
OWN = {name: Term(run="r", leader=name[0], process=name, term=0, address="") for name in ("a1", "a2", "b1", "c1")}
CREATED = OWN["a1"].claimed(None, has_all=False)
TWO = dataclasses.replace(CREATED.begun(), mark="m", in_sync=("b", "c"))
LOST = OWN["b1"].claimed(TWO, has_all=True)
AGAIN = OWN["c1"].claimed(LOST, has_all=True)
COPY = OWN["a2"].claimed(AGAIN.begun(), has_all=False)


@pytest.mark.parametrize(
    ("term", "process", "in_sync", "recovering", "mark"),
    [
        (CREATED, "a1", "", True, ""),
        (CREATED.begun(), "a1", "", False, "a1"),
        (OWN["a2"].claimed(CREATED, has_all=False), "a2", "", True, ""),  # it had not begun
        (OWN["a2"].claimed(CREATED.begun(), has_all=True).begun(), "a2", "", False, "a1"),  # nobody could have gone on
        (TWO.begun(), "a1", "", False, "a1"),
        (LOST, "b1", "ac", True, "m"),
        (AGAIN, "c1", "ab", True, "m"),
        (AGAIN.begun(), "c1", "", False, "c1"),
        (COPY, "a2", "", True, "a2"),  # an old one, or --force-lead
        (COPY.begun(), "a2", "", False, "a2"),
    ],
)
def test_who_leads_who_is_waited_for_and_whose_folder_counts(
    term: Term, process: str, in_sync: str, recovering: bool, mark: str
) -> None:
    assert (term.leader, term.process, "".join(term.in_sync)) == (process[0], process, in_sync)
    assert (term.recovering, term.mark) == (recovering, mark)
    for marks, counts in ((None, True), ([], not mark), (["x", mark], True), (["x"], not mark)):
        assert term.counts(marks) == counts
    assert Term.decode(term.encode(), "here") == term


def test_files_of_tls_that_cannot_be_read_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "ca").touch()
    for name, why in (("none", "No such file"), ("ca", "check the files ca, cert and key")):
        with pytest.raises(CopyFailed, match=why):
            term_store(f"etcd://host:2379/x?ca={tmp_path / name}")


def leading(folder: Path) -> tuple[Leadership, TermStore]:
    store = term_store(f"file://{folder}/record")
    leadership = Leadership.claim(store, folder, FIRST, 0)
    assert leadership is not None
    return leadership, store


def test_a_leader_changes_its_record_until_another_leads(tmp_path: Path) -> None:
    leadership, store = leading(tmp_path)
    leadership.set_in_sync(("b",))
    leadership.check()
    found, version = store.read()
    assert found is not None and (found.term, found.in_sync) == (2, ("b",))
    assert store.replace(dataclasses.replace(found, leader="b", process="2", term=3), version)
    with pytest.raises(Deposed, match="b leads the run since term 3"):
        leadership.check()
    with pytest.raises(Deposed):
        leadership.set_in_sync(())


def test_a_leader_that_is_told_to_stop_does_not_wait_for_the_store(tmp_path: Path) -> None:
    class Away:
        def read(self) -> Any:
            leadership.close()
            raise Unreachable("it is away")

        replace: Callable[..., Any] = lambda self, term, version: self.read()

    leadership = Leadership(Away(), tmp_path, FIRST, 0)
    with pytest.raises(StorageFailed, match="stopped while the record of the leader could not be changed: it is away"):
        leadership.set_in_sync(("b",))


# --- What a start makes of the record


class Start:
    """One coordinator's start, which may be asked to stand by."""

    def __init__(self, folder: Path, name: str, run: str = "8f3c", **settings: Any) -> None:
        (folder / name).mkdir(exist_ok=True)
        url = f"file://{folder}/record"
        self.config = CoordinatorConfig(state_dir=folder / name, leads_by=url, name=name, **settings)
        self.contender = Contender(self.config, run, term_store(url))
        self.stands_by = False

    def lead(self, *, force: bool = False) -> Leadership | None:
        return self.contender.lead(force=force, stand_by=self._stand_by, stopped=lambda: self.stands_by)

    def _stand_by(self) -> None:
        self.stands_by = True

    def has_run(self) -> None:
        (self.config.state_dir / "journal-000000.log").touch()


PAIR = {"mirror": "tcp://127.0.0.1:0", "peers": "tcp://127.0.0.1:9"}


def test_the_first_leads_and_leads_again_on_its_own_folder(tmp_path: Path) -> None:
    a = Start(tmp_path, "a", **PAIR)
    leads = a.lead()
    assert leads is not None and leads.term.term == 1
    a.has_run()
    leads.set_in_sync(("b",))
    again = Start(tmp_path, "a", **PAIR).lead()
    assert again is not None and again.term.term == 3
    with pytest.raises(Deposed, match="a leads the run since term 3"):
        leads.set_in_sync(())


@pytest.mark.parametrize("force", [False, True])
def test_a_second_start_in_a_folder_that_is_in_use_claims_nothing(tmp_path: Path, *, force: bool) -> None:
    """It deposed the leader, and then met its lock."""
    a = Start(tmp_path, "a", **PAIR)
    leads = a.lead()
    assert leads is not None
    a.has_run()
    with closing(DISK.lock(tmp_path / "a" / "lock")), pytest.raises(StateLocked):
        Start(tmp_path, "a", **PAIR).lead(force=force)
    leads.check()


def test_a_second_one_of_the_same_name_does_not_begin_the_run_anew(tmp_path: Path) -> None:
    leads = Start(tmp_path, "a", **PAIR).lead()
    assert leads is not None
    leads.begun()
    assert (leads.term.term, leads.term.in_sync) == (2, ())
    other = Start(tmp_path, "a", **PAIR)  # with an empty folder: of another host
    assert other.lead() is None and other.stands_by
    leads.begun()
    leads.check()


def test_a_leader_begins_though_every_answer_to_a_change_is_lost(tmp_path: Path) -> None:
    terms = Terms()
    terms.term = Term(run="8f3c", leader="a", process="2", mark="1", term=4, address="", in_sync=("b",))
    leads, terms.deaf = Leadership(terms, tmp_path, terms.term, 0), True
    leads.begun()
    assert terms.term == leads.term and (leads.term.mark, leads.term.in_sync, leads.term.term) == ("2", (), 5)


class LosesOne(Terms):
    """The next change happens or not, and the store is away from then on."""

    def __init__(self, term: Term, *, happens: bool) -> None:
        super().__init__()
        self.term, self.happens, self.loses = term, happens, True

    def replace(self, term: Term, version: Version) -> bool:
        if self.loses and version == self.version:
            if self.happens:
                super().replace(term, version)
            self.loses, self.away = False, True
        return super().replace(term, version)


@pytest.mark.parametrize("happens", [True, False])
def test_a_change_that_was_given_up_leaves_the_record_as_the_leader_has_it(tmp_path: Path, *, happens: bool) -> None:
    """The standby is heard again: it is waited for, and has to be in the record. Undoing it may fail, too."""
    before = dataclasses.replace(FIRST, mark="1", recovering=False, term=4, in_sync=("b",))
    terms = LosesOne(before, happens=happens)
    leads = Leadership(terms, tmp_path, before, 0)
    assert not leads.set_in_sync((), unless=lambda: True)
    assert terms.term is not None and terms.term.in_sync == (() if happens else ("b",))
    for loses in (True, False):
        assert leads.term == before
        terms.away, terms.loses = False, loses
        leads.check()
    assert terms.term == leads.term and leads.term.in_sync == ("b",)
    number = leads.term.term
    leads.check()
    assert leads.term.term == number, "it is changed once"


def test_a_change_that_arrives_late_undoes_no_later_one(tmp_path: Path) -> None:
    """A standby is dropped, which is given up and happens all the same. To put it back takes its time; then it is
    dropped: it must not come back to the record."""
    before = dataclasses.replace(FIRST, term=4, in_sync=("b",))
    terms = LosesOne(before, happens=True)
    leads = Leadership(terms, tmp_path, before, 0)
    assert not leads.set_in_sync((), unless=lambda: True)
    terms.away, terms.slow = False, True
    leads.check()
    terms.slow = False
    assert leads.set_in_sync(())
    terms.arrive()
    assert terms.term == leads.term and leads.term.in_sync == ()


@pytest.mark.parametrize("happens", [True, False])
def test_a_run_that_begins_while_the_store_is_away_is_in_the_record_later(tmp_path: Path, *, happens: bool) -> None:
    terms = LosesOne(FIRST, happens=happens)
    leads = Leadership(terms, tmp_path, FIRST, 0)
    leads.check()
    assert terms.version == 0, "it has not begun"
    leads.begun()
    terms.away = False
    leads.check()
    assert terms.term == leads.term and leads.term.term > 1 and leads.term.mark


def test_a_start_that_fails_before_the_run_exists_may_be_repeated(tmp_path: Path) -> None:
    """As with a full disk: the third one stood by for itself."""
    for number in range(1, 4):
        leads = Start(tmp_path, "a", **PAIR).lead()
        assert leads is not None and leads.term.term == number


@pytest.mark.parametrize(("code", "why"), [(errno.EROFS, "the file system is read-only"), (errno.EIO, "Input/output")])
def test_a_mark_that_cannot_be_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, why: str
) -> None:
    monkeypatch.setattr(OsFiles, "write_bytes", refuse(code))
    with pytest.raises(StorageError, match=why):
        mark(tmp_path, "1")
    assert marked(tmp_path) is None


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
def test_a_mark_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    mark(tmp_path, "1")
    monkeypatch.setattr(OsFiles, "read_bytes", refuse(code))
    with pytest.raises(NoRoom if code == errno.EMFILE else StorageFailed, match="has-standbys"):
        marked(tmp_path)


@pytest.mark.parametrize("content", [b'["journal', b"\xff", b"7"])
def test_a_list_of_files_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / INCOMING).mkdir()
    (tmp_path / INCOMING / "complete").write_bytes(content)
    with pytest.raises(StorageFailed, match="complete: does not say which files stay"):
        finish_incoming(tmp_path)
    monkeypatch.setattr(OsFiles, "read_bytes", refuse(errno.EIO))
    with pytest.raises(StorageFailed, match="complete: read: Input/output error"):
        finish_incoming(tmp_path)


def test_a_second_one_stands_by(tmp_path: Path) -> None:
    assert Start(tmp_path, "a", **PAIR).lead() is not None
    b = Start(tmp_path, "b", **PAIR)
    assert b.lead() is None and b.stands_by


def test_a_folder_that_a_record_was_about_does_not_begin_without_one(tmp_path: Path) -> None:
    """The record was deleted: which of the folders is the newest is not known here."""
    a = Start(tmp_path, "a", **PAIR)
    a.has_run()
    mark(a.config.state_dir, "1")
    with pytest.raises(StateMismatch, match=r"a record said who leads its run, and file://.* has none: put it back"):
        a.lead()
    assert a.lead(force=True) is not None


def test_a_record_that_cannot_be_written_is_tried_again_with_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with credentials that may only read. One line; an answer that was lost does no harm."""
    a, terms, pauses = Start(tmp_path, "a", **PAIR), Terms(), list[float]()
    monkeypatch.setattr(a.contender, "_store", terms)
    monkeypatch.setattr("farloop.coordinator.leadership.time.sleep", pauses.append)
    replace = terms.replace

    def refused(term: Term, version: Version) -> bool:
        terms.deaf = len(pauses) == 8
        if len(pauses) < 8:
            raise Unreachable("403: AccessDenied")
        return replace(term, version)

    monkeypatch.setattr(terms, "replace", refused)
    leads = a.lead()
    assert leads is not None and leads.term.term == 1 and len(pauses) == 9
    assert [line.message for line in caplog.records if "403" in line.message] == [
        "record not changed why='403: AccessDenied' note='who leads is not settled; trying again'"
    ]


def test_a_claim_of_an_earlier_process_may_arrive_late(tmp_path: Path) -> None:
    """The store stood still, and its host was restarted meanwhile: the record still means this folder."""
    terms = Terms()
    terms.term, terms.slow = dataclasses.replace(FIRST, mark="1"), True

    def contender() -> Contender:
        a = Start(tmp_path, "a", **PAIR)
        a.has_run()
        a.contender._store, a.contender.leader = terms, terms.term
        return a.contender

    mark(tmp_path / "a", "1")
    for _ in range(2):
        with pytest.raises(Unreachable):
            contender()._claim(terms.version)
    terms.slow = False
    terms.arrive()
    assert contender().lead(force=False, stand_by=lambda: pytest.fail("nobody leads"), stopped=lambda: False)
    assert marked(tmp_path / "a") == ["1"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_claim_that_arrives_late_counts_with_the_folder_it_was_made_with(
    tmp_path: Path, *, is_replaced: bool
) -> None:
    c, terms = Start(tmp_path, "c", **PAIR), Terms()
    c.has_run()
    c.contender._store = terms
    terms.term, terms.slow = dataclasses.replace(FIRST, mark="2", recovering=False, in_sync=("c",)), True
    mark(tmp_path / "c", "2")
    assert c.contender._take_over() is None
    if is_replaced:  # by the older state of another
        mark(tmp_path / "c", "1 3")
    terms.slow = False
    terms.arrive()
    assert terms.term.leader == "c" and (c.contender._take_over() is None) == is_replaced


def test_a_run_that_the_record_does_not_know_is_not_replaced(tmp_path: Path) -> None:
    """A host with an empty folder was started before the one that has the run."""
    assert Start(tmp_path, "b", **PAIR).lead() is not None
    a = Start(tmp_path, "a", **PAIR)
    a.has_run()
    with pytest.raises(StateMismatch, match=r"holds a run, and b, which leads by .* since term 1, did not have it"):
        a.lead()
    mark(a.config.state_dir, "1")
    assert a.lead() is None and a.stands_by


def test_a_standby_that_was_killed_while_its_first_state_took_its_place_stands_by_again(tmp_path: Path) -> None:
    """Its journal was there, and its mark was not: the start was refused."""
    assert Start(tmp_path, "a", **PAIR).lead() is not None
    b = Start(tmp_path, "b", **PAIR)
    b.has_run()
    given = b.config.state_dir / INCOMING
    mark(given, "1")
    (given / "complete").write_text('["journal-000000.log"]')
    with closing(DISK.lock(b.config.state_dir / "lock")), pytest.raises(StateLocked):
        b.lead()  # another process, which may be given the state at this moment
    assert b.lead() is None and b.stands_by
    assert marked(b.config.state_dir) == ["1"] and b.contender._has_run()


def test_a_leader_that_lost_its_folder_stands_by_for_those_that_have_all(tmp_path: Path) -> None:
    leads = Start(tmp_path, "a", **PAIR).lead()
    assert leads is not None
    leads.set_in_sync(("b",))
    again = Start(tmp_path, "a", **PAIR)
    assert again.lead() is None and again.stands_by


def test_only_a_folder_with_the_leaders_state_goes_on(tmp_path: Path) -> None:
    """The name is in the record; the disk is empty, or an old one that was put back."""
    a, b = Start(tmp_path, "a", **PAIR), Start(tmp_path, "b", **PAIR)
    leads = a.lead()
    assert leads is not None
    a.has_run()
    leads.begun()
    leads.set_in_sync(("b",))
    assert b.contender._take_over() is None
    b.has_run()
    for start in (a, b):
        mark(start.config.state_dir, "another")
    assert b.contender._take_over() is None and a.lead() is None and a.stands_by
    leads.check()
    again = Start(tmp_path, "a", **PAIR)
    assert again.contender._take_over() is None
    assert "it led with another folder, or before this one was salvaged: start b, or" in again.contender.told
    leads.set_in_sync(())
    assert again.contender._take_over() is None
    assert "start the coordinator that has the folder that led, or --force-lead" in again.contender.told
    leads.set_in_sync(("b",))
    mark(b.config.state_dir, leads.term.mark)
    taken = b.contender._take_over()
    assert taken is not None
    later = Start(tmp_path, "b", **PAIR).lead()
    assert later is not None and later.term.term == taken.term.term + 1


def in_sync(folder: Path) -> tuple[Start, Start, Leadership]:
    """Two coordinators, of which a leads and b has all that it told."""
    a, b = Start(folder, "a", **PAIR), Start(folder, "b", **PAIR)
    leads = a.lead()
    assert leads is not None
    leads.begun()
    leads.set_in_sync(("b",))
    for start in (a, b):
        start.has_run()
        mark(start.config.state_dir, leads.term.mark)
    return a, b, leads


def test_until_a_leader_has_recovered_the_state_another_that_has_all_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder turns out to be damaged, or it dies again. It is given time to be heard, once."""
    now = 100.0
    monkeypatch.setattr("farloop.coordinator.standby.time.monotonic", lambda: now)
    a, b, leads = in_sync(tmp_path)
    for _ in range(3):  # a dies as often as it starts
        leads = Start(tmp_path, "a", **PAIR).lead()
        assert leads is not None and leads.term.in_sync == ("b",)
        assert b.contender._take_over() is None
        now += 2.5
    taken = b.contender._take_over()
    assert taken is not None and taken.term.in_sync == ("a",)
    with pytest.raises(Deposed, match="b leads"):
        leads.begun()
    a = Start(tmp_path, "a", **PAIR)
    assert a.contender._take_over() is None
    now += 6.5
    back = a.contender._take_over()
    assert back is not None and back.term.in_sync == ("b",)
    back.begun()
    assert back.term.in_sync == () and Start(tmp_path, "b", **PAIR).contender._take_over() is None
    assert len(marked(a.config.state_dir) or []) < 4, "the mark does not grow with each start"


def test_a_leader_that_fails_in_recovery_is_awaited_from_the_standbys_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from its first try, which silence has to come before."""
    now = 100.0
    monkeypatch.setattr("farloop.coordinator.standby.time.monotonic", lambda: now)
    _, b, _ = in_sync(tmp_path)
    assert Start(tmp_path, "a", **PAIR).lead() is not None
    assert b.lead() is None and b.stands_by
    now += 6.5
    assert b.contender._take_over() is not None


def test_of_two_standbys_the_second_gives_the_first_time_to_be_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both had heard nothing of a lost leader for as long: the second deposed the first at once."""
    now, heard_at = 100.0, 93.5
    monkeypatch.setattr("farloop.coordinator.standby.time.monotonic", lambda: now)
    leads = Start(tmp_path, "a", **PAIR).lead()
    assert leads is not None
    leads.begun()
    leads.set_in_sync(("b", "c"))
    b, c = (Start(tmp_path, name, **PAIR).contender for name in "bc")
    for each in (b, c):
        (each._root / "journal-000000.log").touch()
        mark(each._root, leads.term.mark)
        each.client = cast("MirrorClient", SimpleNamespace(heard_at=heard_at))
    led = b._take_over()
    assert led is not None
    now += 0.5
    assert c._take_over() is None
    now += 5.5
    assert c._take_over() is None
    led.check()
    assert c.client is not None
    c.client.heard_at = 101.0  # it was heard, and its connection broke
    assert c._take_over() is not None


COPY_OF_RUN = {"fingerprint": "8f3c"}


def copies(monkeypatch: pytest.MonkeyPatch, manifest: dict[str, str] | CopyFailed | None) -> None:
    def read(_: Bucket) -> dict[str, str] | None:
        if isinstance(manifest, CopyFailed):
            raise manifest
        return manifest

    monkeypatch.setattr("farloop.coordinator.standby.read_manifest", read)


@pytest.mark.parametrize("manifest", [None, {"fingerprint": "0000"}, CopyFailed("s3://x: it is away")])
def test_an_empty_folder_takes_no_lead_where_no_copy_can_take_the_place_of_what_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: Any
) -> None:
    """The leader was silent while its host started: then its folder, the only one, was refused."""
    copies(monkeypatch, manifest)
    a = Start(tmp_path, "a")
    leads = a.lead()
    assert leads is not None
    a.has_run()
    leads.begun()
    b = Start(tmp_path, "b", recover="auto", copy_to=f"file://{tmp_path}/copies")
    why = "it is away" if isinstance(manifest, CopyFailed) else "holds no copy of this run"
    line = rf"what a told .*{why}.*: start the coordinator that has its folder, with --force-lead if"
    with pytest.raises(StartRefused, match=line):
        b.lead()
    leads.set_in_sync(("b",))
    assert b.contender._take_over() is None and re.search(line, b.contender.told)
    leads.check()
    copies(monkeypatch, COPY_OF_RUN)
    assert b.contender._take_over() is not None


@pytest.mark.parametrize(("name", "waits_s"), [("b", 60), ("a", 0)])
def test_a_leader_that_is_silent_has_a_minute_to_answer_before_a_copy_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, waits_s: int
) -> None:
    """Its host may be starting. The same name again has no other to wait for."""
    copies(monkeypatch, COPY_OF_RUN)
    slept = list[float]()
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr("farloop.coordinator.standby.time", clock)
    monkeypatch.setattr("farloop.coordinator.standby.leading_peer", lambda peers, key: None)
    assert term_store(f"file://{tmp_path}/record").replace(dataclasses.replace(FIRST, mark="1"), 0)
    start = Start(tmp_path, name, recover="auto", copy_to=f"file://{tmp_path}/copies", **PAIR)
    assert start.lead() is not None and sum(slept) == waits_s


def test_an_emptied_folder_is_recovered_from_copies_only_where_no_other_may_have_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that recovers the state takes for granted that those in sync before have theirs."""
    copies(monkeypatch, COPY_OF_RUN)
    b = Start(tmp_path, "b", recover="auto", copy_to=f"file://{tmp_path}/copies", **PAIR).contender
    b._awaited = ("a", "1", float("-inf"))
    term = dataclasses.replace(FIRST, mark="1", term=4, in_sync=("b",))
    for each, may in (
        (term, False),
        (dataclasses.replace(term, recovering=False, in_sync=("b", "c")), False),
        (dataclasses.replace(term, recovering=False), True),
    ):
        assert b._store.replace(each, b._store.read()[1])
        assert (b._take_over() is not None) == may
    assert "start a or c, or put back the folder that b had; if all are lost, --force-lead here goes on from" in b.told


@pytest.mark.parametrize("marks", ["1", "another", "salvaged"])
@pytest.mark.parametrize("record", [dataclasses.replace(FIRST, mark="1"), None])
def test_a_forced_leader_that_dies_before_it_has_recovered_leads_again(
    tmp_path: Path, record: Term | None, marks: str
) -> None:
    """The record named it, and its folder had another's mark: nobody led."""
    b = Start(tmp_path, "b", **PAIR)
    b.has_run()
    mark(b.config.state_dir, marks)
    if record is not None:
        assert term_store(b.config.leads_by).replace(record, 0)
    assert b.lead(force=True) is not None
    assert Start(tmp_path, "b", **PAIR).lead() is not None


def test_an_empty_folder_that_is_forced_to_lead_needs_a_copy(tmp_path: Path) -> None:
    b = Start(tmp_path, "b", **PAIR)
    record = dataclasses.replace(FIRST, mark="1", recovering=False)
    assert term_store(b.config.leads_by).replace(record, 0)
    with pytest.raises(StartRefused, match=r"no copy can take the place of what a told \(--restore URL names one\)"):
        b.lead(force=True)
    assert term_store(b.config.leads_by).read()[0] == record


def test_one_that_cannot_stand_by_says_who_leads(tmp_path: Path) -> None:
    assert Start(tmp_path, "a").lead() is not None
    with pytest.raises(StateMismatch, match="a leads this run since term 1; to stand by for it give"):
        Start(tmp_path, "b").lead()
    forced = Start(tmp_path, "b").lead(force=True)
    assert forced is not None and forced.term.leader == "b"


def test_an_empty_folder_is_recovered_from_copies_where_it_may(tmp_path: Path) -> None:
    assert Start(tmp_path, "a").lead() is not None
    taken = Start(tmp_path, "b", recover="auto").lead()
    assert taken is not None and taken.term.leader == "b"
    c = Start(tmp_path, "c", recover="auto")
    c.has_run()
    with pytest.raises(StateMismatch, match="b leads this run"):
        c.lead()


def test_a_leader_that_answers_is_not_replaced_by_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on alone when this host's disk was lost: the newest copy has less than it."""
    assert Start(tmp_path, "a", **PAIR).lead() is not None
    answers = ["tcp://a:7701", None]
    monkeypatch.setattr("farloop.coordinator.standby.leading_peer", lambda peers, key: answers.pop(0))
    b = Start(tmp_path, "b", recover="auto", **PAIR)
    assert b.lead() is None and b.stands_by
    taken = Start(tmp_path, "b", recover="auto", **PAIR).lead()
    assert taken is not None and taken.term.leader == "b"


def test_a_standby_that_cannot_read_the_state_does_not_take_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its leader is of a newer farloop, whose journal has another format."""
    leads = Start(tmp_path, "a", **PAIR).lead()
    assert leads is not None
    leads.begun()
    leads.set_in_sync(("b",))
    b = Start(tmp_path, "b", **PAIR)
    contender, header = b.contender, bytearray(segment_header(0, 0, 7))
    header[8] = 99
    (b.config.state_dir / "journal-000000.log").write_bytes(header)
    contender.following = Following(b.config.state_dir, as_they_are, lambda: 1)
    contender.following.stop()
    assert not contender.following._step() and contender._take_over() is None
    assert "cannot read the state: " in caplog.text and "format version 99 is unknown here" in caplog.text
    leads.check()
    contender.following.unreadable = ""
    assert contender._take_over() is not None


def test_the_record_of_another_run_is_refused(tmp_path: Path) -> None:
    assert Start(tmp_path, "a", run="0000").lead() is not None
    with pytest.raises(StateMismatch, match=r"another run \(fingerprint 0000, the file's is 8f3c\)"):
        Start(tmp_path, "b").lead()
