"""Who leads a run: one small record in a store that can compare and set.

    {"run": "8f3c…", "leader": "a", "process": "5e1d…", "mark": "77aa…", "recovering": false, "term": 7,
     "address": "tcp://10.0.0.1:7700", "in_sync": ["b"]}

The leader tells nothing before every coordinator of `in_sync` has it on its disk, and takes one out of `in_sync` here
before it goes on without it. A standby takes over only if it is in `in_sync`, by replacing the record. So at most one
of "the leader goes on alone" and "the standby takes over" succeeds, whatever clocks and pauses do: no lease is renewed.
This is primary-backup replication with a configuration master (PacificA, Microsoft Research TR-2008-25; Kafka's ISR).
"""

import base64
import dataclasses
import http.client
import json
import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import SplitResult, parse_qs, urlsplit

from farloop.coordinator.errors import Deposed, StorageFailed
from farloop.coordinator.storage.files import DISK, Files, disk_errors

_log = logging.getLogger(__name__)

TIMEOUT_S = 3.0  # of one request to the store
RETRY_S = 0.5  # between two tries while it does not answer
MARK = "has-standbys"  # file of a folder that was led or mirrored by a record
REPEAT_S = 30.0  # an outage is logged when it begins, and again this often

T = TypeVar("T")
Version = str | int | None  # of a record, as its store counts; None: there is no record


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """The record."""

    run: str  # fingerprint
    leader: str  # its [coordinator] name
    process: str
    """Drawn at its start by the process that leads. It leads for as long as the record has this."""
    mark: str = ""
    """Of the folders that have all that was told, on disk in each. Drawn anew with each standby that is let in, and by
    a leader that goes on without those that could have. Empty until the run has begun."""
    recovering: bool = True
    """Whether the leader has yet to read the state: it tells nothing, and if it is not heard of in time, one of
    `in_sync` goes on in its place."""
    term: int  # each record that replaces one has the next
    address: str  # where nodes reach the leader, as far as it knows
    in_sync: tuple[str, ...] = ()  # others that have all that was told; while it is recovering, also the last leader

    def counts(self, marks: Sequence[str] | None) -> bool:
        """Whether a folder that holds the run, with these marks, has all that was told. The leader's name would not do:
        two hosts may be given one. None: it has no marks, as a backup from before there was a record."""
        return not self.mark or marks is None or self.mark in marks

    def claimed(self, before: "Term | None", *, has_all: bool) -> "Term":
        """The record of this process in place of another. `has_all`: so has its folder. Should that turn out to be
        unreadable, another that has all goes on. Else no other counts any more."""
        if before is None:
            return dataclasses.replace(self, term=1)
        others = {before.leader, *before.in_sync} - {self.leader} if has_all else set()
        mark = before.mark if has_all or not before.mark else self.process
        return dataclasses.replace(self, term=before.term + 1, mark=mark, in_sync=tuple(sorted(others)))

    def begun(self) -> "Term":
        """Once this leader has read the state, or made the first. What others have no longer counts."""
        mark = self.process if self.in_sync or not self.mark else self.mark
        return dataclasses.replace(self, mark=mark, recovering=False, in_sync=())

    def encode(self) -> bytes:
        return json.dumps(asdict(self), allow_nan=False).encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> "Term":
        """Raises Unusable: it is no record of this version."""
        try:
            plain = json.loads(data)
            found = cls(**{**plain, "in_sync": tuple(plain["in_sync"])})
            texts = (found.run, found.leader, found.process, found.mark, found.address, *found.in_sync)
            kinds = type(found.term), type(found.recovering), *(type(text) for text in texts)
            if kinds != (int, bool, *(str for _ in texts)):
                raise TypeError("a field has another type")
        except (ValueError, TypeError, LookupError) as error:
            raise Unusable(f"{where} holds something else than the record of a leader: {data[:80]!r}") from error
        return found


class Unreachable(Exception):
    """The store does not answer, or not as it should: what it holds is unknown. One line."""


class Unusable(Unreachable):
    """What the store holds is no record; waiting does not help. One line."""


class TermStore(Protocol):
    """One record. Calls block for a few seconds at most."""

    def read(self) -> tuple[Term | None, Version]:
        """The record and its version. Raises Unreachable."""

    def replace(self, term: Term, version: Version) -> bool:
        """Compare and set. False: another was faster.
        Raises Unreachable: it may have happened or not; read, compare, decide."""


class BucketTerms:
    """An object store or a folder: one object a record, PREFIX/leader/00000007.json; the newest counts.

    Each is created with If-None-Match: *, the condition that every store has, a folder too. None is overwritten or
    deleted: a writer that slept could create a deleted number anew, and take the past for its own.
    """

    def __init__(self, url: str) -> None:
        """Raises CopyFailed."""
        from farloop.coordinator.storage.bucket import Bucket

        self._bucket = Bucket(url, patience_s=TIMEOUT_S)

    def read(self) -> tuple[Term | None, Version]:
        from farloop.coordinator.storage.bucket import CopyFailed

        try:
            newest = max(self._bucket.paths("leader"), default=None)
            data = None if newest is None else self._bucket.get(newest)
        except CopyFailed as error:
            raise Unreachable(str(error)) from error
        if newest is None:
            return None, 0
        if data is None:
            raise Unreachable(f"{self._bucket.url}: {newest} was listed and is not there")
        number = newest.removeprefix("leader/").removesuffix(".json")
        if not number.isdecimal():
            raise Unusable(f"{self._bucket.url}: {newest} is not a record of a leader")
        return Term.decode(data, f"{self._bucket.url}/{newest}"), int(number)

    def replace(self, term: Term, version: Version) -> bool:
        from farloop.coordinator.storage.bucket import CopyFailed

        assert isinstance(version, int)
        try:
            return self._bucket.create(f"leader/{version + 1:08d}.json", term.encode())
        except CopyFailed as error:
            raise Unreachable(str(error)) from error


def _call(request: urllib.request.Request, context: ssl.SSLContext | None) -> tuple[int, bytes]:
    where = urlsplit(request.full_url).netloc
    try:
        try:
            answer = urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context)
        except urllib.error.HTTPError as error:
            answer = error  # another status, and a body, which may end early too
        with answer:
            return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{where}: {getattr(error, 'reason', error)}") from error


def _object(data: bytes, where: str, has: str) -> dict[str, Any]:
    """`has`: a field that every answer of this store has, and that of another server has not."""
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict) or has not in found:
        raise Unreachable(f"{where} answers {data[:80]!r}")
    return found


def _options(parts: SplitResult) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(parts.query).items()}


class EtcdTerms:
    """etcd 3.4 or later by its JSON gateway: etcd://HOST:PORT/KEY; with ?ca=FILE&cert=FILE&key=FILE over TLS."""

    def __init__(self, url: str) -> None:
        """Raises CopyFailed: a file of TLS cannot be read."""
        from farloop.coordinator.storage.bucket import CopyFailed

        parts = urlsplit(url)
        files = _options(parts)
        self._context = None
        try:
            if files:
                self._context = ssl.create_default_context(cafile=files.get("ca"))
            if self._context and "cert" in files:
                self._context.load_cert_chain(files["cert"], files.get("key"))
        except OSError as error:
            raise CopyFailed(f"{url}: {error.strerror}; check the files ca, cert and key") from error
        self._where = f"etcd {parts.netloc}{parts.path}"
        self._base = f"{'https' if files else 'http'}://{parts.netloc}/v3"
        self._key = base64.b64encode(parts.path.encode()).decode()

    def read(self) -> tuple[Term | None, Version]:
        match found := self._post("kv/range", {"key": self._key}).get("kvs", []):
            case []:
                return None, "0 "
            case [{"value": str(value), "mod_revision": str(version)}]:
                return Term.decode(base64.b64decode(value), self._where), f"{version} {value}"
        raise Unusable(f"{self._where} holds something else than the record of a leader: {found}")

    def replace(self, term: Term, version: Version) -> bool:
        # The gateway drops fields that it does not know: a misspelt condition would be none. The value is compared,
        # too: a store that lost its data counts from 1 again.
        revision, _, before = str(version).partition(" ")
        of_key, value = {"key": self._key, "result": "EQUAL"}, base64.b64encode(term.encode()).decode()
        compare = [{**of_key, "target": "MOD", "mod_revision": revision}]
        compare += [{**of_key, "target": "VALUE", "value": before}] if before else []
        body = {
            "compare": compare,
            "success": [{"requestPut": {"key": self._key, "value": value}}],
        }
        return bool(self._post("kv/txn", body).get("succeeded"))

    def _post(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body, allow_nan=False).encode()
        status, answer = _call(urllib.request.Request(f"{self._base}/{what}", data), self._context)
        if status != 200:
            raise Unreachable(f"{self._where} answers {status}: {answer[:200].decode(errors='replace')}")
        return _object(answer, self._where, "header")


_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class KubernetesTerms:
    """A Lease of the API server: k8s://NAMESPACE/NAME, with the pod's service account.

    The record is its annotation farloop/term; spec.holderIdentity is for `kubectl get lease`. ?api=URL&account=FOLDER
    name another server and another folder of token and ca.crt.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        options = _options(parts)
        self._account = Path(options.get("account", _ACCOUNT))
        self._name = parts.path.strip("/")
        api = options.get("api", "https://kubernetes.default.svc")
        self._all = f"{api}/apis/coordination.k8s.io/v1/namespaces/{parts.netloc}/leases"
        self._where = f"lease {parts.netloc}/{self._name}"

    def read(self) -> tuple[Term | None, Version]:
        status, lease = self._send("GET", f"{self._all}/{self._name}")
        if status == 404:
            return None, None
        match lease:
            case {
                "metadata": {"annotations": {"farloop/term": str(text)}, "resourceVersion": str(at), "uid": str(uid)}
            }:
                return Term.decode(text.encode(), self._where), f"{at} {uid}"
        raise Unusable(f"{self._where} has no annotation farloop/term: it belongs to something else")

    def replace(self, term: Term, version: Version) -> bool:
        metadata: dict[str, Any] = {"name": self._name, "annotations": {"farloop/term": term.encode().decode()}}
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {"holderIdentity": term.leader, "leaseTransitions": term.term},
        }
        if version is None:
            status, _ = self._send("POST", self._all, lease)
        else:
            metadata["resourceVersion"], metadata["uid"] = str(version).split()  # made again, it counts anew
            status, _ = self._send("PUT", f"{self._all}/{self._name}", lease)
        return status in (200, 201)

    def _send(self, method: str, url: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        request = urllib.request.Request(url, data, method=method)
        request.add_header("Content-Type", "application/json")
        try:  # anew for each call: Kubernetes replaces the token every hour
            if url.startswith("https"):
                request.add_header("Authorization", f"Bearer {(self._account / 'token').read_text().strip()}")
            ca = self._account / "ca.crt"
            context = ssl.create_default_context(cafile=str(ca)) if url.startswith("https") else None
        except OSError as error:
            raise Unreachable(f"{self._where}: {error.filename or self._account}: {error.strerror}") from error
        status, answer = _call(request, context)
        if status not in (200, 201, 404, 409) or (status, method) == (404, "POST"):  # then there is no such namespace
            raise Unreachable(
                f"{self._where}: the API server answers {status}: {answer[:200].decode(errors='replace')}"
            )
        return status, _object(answer, self._where, "kind")


def term_store(url: str) -> TermStore:
    """The store of a URL. Raises CopyFailed: the extra 'cloud' is missing, or the store cannot be opened."""
    match urlsplit(url).scheme:
        case "etcd":
            return EtcdTerms(url)
        case "k8s":
            return KubernetesTerms(url)
        case _:
            return BucketTerms(url)


class Leadership:
    """This process's hold of the record. Any thread; a call may wait while the store does not answer."""

    def __init__(self, store: TermStore, root: Path, term: Term, version: Version) -> None:
        """`term`, `version`: the record, in which this process leads. `root`: the state folder, for error lines."""
        self._store, self._root = store, root
        self.term, self._there, self._version = term, term, version  # `_there`: as it was read last
        self._lock = threading.RLock()
        self._closed, self._why_given_up = False, ""
        self.why_held = ""
        """Why a change of the record waits; empty while none does."""
        self.why_unchecked = ""
        """Why the record could not be read the last time, or not be put right."""

    @classmethod
    def claim(cls, store: TermStore, root: Path, term: Term, version: Version) -> "Leadership | None":
        """Set the record to `term` in place of `version`; None: another was faster.
        Raises Unreachable: it may have happened or not."""
        store.replace(term, version)
        found, now = store.read()
        return cls(store, root, term, now) if found == term else None

    def begun(self, files: Files = DISK) -> None:
        """Record that the run is in this folder, before anything is told: none of the same name, with an empty folder,
        begins it anew, and what others have no longer counts. The store is waited for only where others could go on.
        Raises Deposed, StorageFailed."""
        with self._lock:
            before, begun = self.term, self.term.begun()
            mark(self._root, f"{before.mark} {begun.mark}", files)  # a crash in between leaves it this leader's
            if not self._change(begun, lambda: not before.in_sync):
                self.term = begun  # `check` records it
            mark(self._root, begun.mark, files)

    def set_in_sync(
        self, names: tuple[str, ...], unless: Callable[[], bool] = lambda: False, *, mark: str = ""
    ) -> bool:
        """Record who has all that was told. Waits for the store, and gives up where `unless`; whether it is recorded.
        One thread at a time decides the names (`Mirror`). `mark`: that of their folders from now on; not together with
        `unless`.
        Raises Deposed: another leads. StorageFailed: the process was told to stop while it waited."""
        with self._lock:
            wanted = dataclasses.replace(self.term, in_sync=names, mark=mark or self.term.mark)
            return self.term == wanted or self._change(wanted, unless)

    def _change(self, wanted: Term, unless: Callable[[], bool]) -> bool:
        """Record this in a term of its own, under the lock. As `set_in_sync`. What is given up may happen all the same,
        or later: `term` stays, and `check` puts it back."""

        def change() -> bool:
            new = None
            while new is None or self._there != new:  # after a write to the newest version none before it can arrive
                new, failed = dataclasses.replace(wanted, term=self._there.term + 1), None
                try:
                    self._store.replace(new, self._version)
                except Unreachable as error:  # its answer may be lost: what is there decides
                    failed = error
                found, version = self._store.read()
                if found is None or found.process != wanted.process:
                    raise self._deposed(found)
                self._there, self._version = found, version
                if failed is not None and found != new:
                    raise failed
            self.term, self.why_held = self._there, ""
            return True

        def over(error: Unreachable) -> bool:
            given_up = unless()
            self.why_held, self._why_given_up = ("", str(error)) if given_up else (str(error), "")
            if self._closed and not given_up:
                what = "stopped while the record of the leader could not be changed"
                raise StorageFailed(self._root, f"{what}: {error}")
            return given_up

        return _patiently(change, over, "changed", "the run is held until it is") or False

    def check(self) -> None:
        """Put right what a change that was given up left in the record, or did not record.

        Raises Deposed: another leads. A store that does not answer says nothing of that.
        """
        with self._lock:
            try:
                found, version = self._store.read()
            except Unreachable as error:
                self.why_unchecked = str(error)
                return
            self.why_unchecked = ""
            if found is None or found.process != self.term.process:
                raise self._deposed(found)
            self._there, self._version = found, version
            if found != self.term and not self._change(self.term, lambda: True):
                self.why_unchecked = self._why_given_up

    def close(self) -> None:
        """No call waits any more."""
        self._closed = True

    def _deposed(self, found: Term | None) -> Deposed:
        return Deposed(self._root, found.leader if found else "", found.term if found else 0)


def mark(root: Path, marks: str, files: Files = DISK) -> None:
    """Say that the folder has all that was told by the records of these marks, as "5e1d… 77aa…".

    Raises StorageFailed, NoRoom.
    """
    files.make_directory(root)
    path = root / MARK
    with disk_errors(path, "write", room=True), files.replacing(path) as temporary:
        files.write_bytes(temporary, marks.encode())


def unmark(root: Path, files: Files = DISK) -> None:
    """From now on no record is about the folder."""
    files.delete(root / MARK)


def marked(root: Path, files: Files = DISK) -> list[str] | None:
    """The marks of a folder that was led or mirrored by a record: another's state may take the place of this. None: it
    was not. Raises StorageFailed, NoRoom."""
    path = root / MARK
    if files.identity(path) is None:
        return None
    with disk_errors(path, "read", room=True):
        return files.read_bytes(path).decode(errors="replace").split()


def patiently(call: Callable[[], T], stopped: Callable[[], bool], what: str = "read") -> T | None:
    """Call a store, however long it does not answer; None once `stopped`. Raises Unusable."""

    def over(error: Unreachable) -> bool:
        if isinstance(error, Unusable):
            raise error
        return stopped()

    return None if stopped() else _patiently(call, over, what, "who leads is not settled; trying again")


def _patiently(call: Callable[[], T], over: Callable[[Unreachable], bool], what: str, note: str) -> T | None:
    """Call until the store answers; None once `over`. What is not done, and the note, are for the log."""
    logged_at = float("-inf")
    while True:
        try:
            return call()
        except Unreachable as error:
            if over(error):
                return None
            if time.monotonic() - logged_at >= REPEAT_S:
                logged_at = time.monotonic()
                _log.warning("record not %s why=%r note=%r", what, str(error), note)
        time.sleep(RETRY_S)
