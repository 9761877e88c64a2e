"""Copies to real object stores: a folder, and a small S3 server on loopback."""

import os
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from loopback import PACED, NewRun, assert_all_agree
from object_server import ObjectServer, serving

from farloop.coordinator.storage import bucket as buckets
from farloop.coordinator.storage.bucket import Bucket, CopyFailed
from farloop.coordinator.storage.copies import read_manifest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("obstore") is None, reason="needs the extra 'cloud' (obstore)"),
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with serving(monkeypatch) as server:
        yield server


def says_what_a_store_says(bucket: Bucket) -> None:
    assert bucket.paths("ckpt") == [] and bucket.get("ckpt/1/a") is None
    large = os.urandom(12 << 20)
    for path, data in (("ckpt/1/a", b"first"), ("ckpt/1/a", b"second"), ("ckpt/2/b", large)):
        bucket.put(path, data)
    assert bucket.paths("ckpt") == ["ckpt/1/a", "ckpt/2/b"]
    assert (bucket.get("ckpt/1/a"), bucket.get("ckpt/2/b")) == (b"second", large)
    bucket.delete(["ckpt/1/nothing", "ckpt/1/a"])
    assert bucket.paths("ckpt") == ["ckpt/2/b"]


def test_a_folder_is_an_object_store_and_what_kills_left_in_it_goes(tmp_path: Path) -> None:
    bucket = Bucket((tmp_path / "a b").as_uri())
    says_what_a_store_says(bucket)
    left = tmp_path / "a b" / "ckpt" / "2" / "c#1"  # as obstore names what it has not finished
    left.write_bytes(b"half")
    bucket.delete([])
    assert not left.exists() and bucket.paths("ckpt") == ["ckpt/2/b"]


def test_an_s3_server_is_an_object_store(server: ObjectServer) -> None:
    says_what_a_store_says(Bucket("s3://runs/first"))


def test_a_transfer_may_take_any_time_while_it_goes_on(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request, and all of its body, were cut after 60 s and begun again: over a slow link no copy could be read."""
    monkeypatch.setattr(buckets, "IDLE_S", 2.0)
    monkeypatch.setattr(buckets, "PART_BYTES", 128 << 10)
    bucket, data = Bucket("s3://runs/first"), os.urandom(1 << 20)
    server.bytes_per_s = 400e3
    began = time.monotonic()
    bucket.put("ckpt/1/a", data)
    wrote_s = time.monotonic() - began
    assert bucket.get("ckpt/1/a") == data
    assert min(wrote_s, time.monotonic() - began - wrote_s) > buckets.IDLE_S
    parts = [size for method, size in server.bodies if method == "PUT"]
    assert sum(parts) == len(data) and max(parts) == buckets.PART_BYTES, "none was sent again"


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_a_body_that_stands_still_fails_within_the_idle_time_and_says_how_far_it_came(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(buckets, "IDLE_S", 2.0)
    monkeypatch.setattr(buckets, "PART_BYTES", 1 << 20)
    bucket, data = Bucket("s3://runs/first"), os.urandom(6 << 20)
    if method == "GET":
        bucket.put("ckpt/1/a", data)
    server.stands_still, server.still_after = method, 2
    how = r"(read|write) ckpt/1/a at [1-4]\.\d+ MB of 6\.29 MB after \d+ s \(.*/s\): "
    with pytest.raises(CopyFailed, match=how) as error:
        _ = bucket.get("ckpt/1/a") if method == "GET" else bucket.put("ckpt/1/a", data)
    assert "\n" not in str(error.value)
    assert method == "GET" or bucket.paths("ckpt") == [], "nothing half written is left"


@pytest.mark.parametrize(
    ("url", "why"),
    [("ftp://x/y", "begins with s3://, gs://"), ("/just/a/path", "begins with"), ("file:///proc/no/such", "open")],
)
def test_what_is_no_object_store_is_said_in_one_line(url: str, why: str) -> None:
    with pytest.raises(CopyFailed, match=why) as error:
        Bucket(url)
    assert "\n" not in str(error.value)


def test_a_run_goes_on_from_a_copy_in_s3_after_all_processes_died_and_the_disk_was_lost(
    new_run: NewRun, server: ObjectServer
) -> None:
    run, bucket = new_run(steps=60, nodes=1, **PACED), Bucket("s3://runs/first")
    run.tables["coordinator"] |= {"copy_to": bucket.url, "copy_every_s": 0.5}
    coordinator, node = run.start_coordinator(), run.start_metronome("a", pace_s=0.1)
    status = run.until("a copy has a version of each", lambda status: min(status["copy"]["versions"], default=0) >= 1)
    assert status["copy"]["failures"] == 0 and status["copy"]["bytes"] > 0
    for process in (node, coordinator):
        process.kill()
    copied = read_manifest(bucket)
    assert copied is not None and min(copied["versions"]) >= 1
    shutil.rmtree(run.state_dir)

    coordinator = run.start_coordinator("--restore", bucket.url)
    after = run.until("it is back", lambda status: status["run"]["epoch"] > copied["epoch"])
    assert after["versions"] == copied["versions"]
    run.hurry()
    node = run.start_metronome("a")
    status = run.until_done(coordinator, node)
    assert_all_agree(run, status, "a")
    finished = read_manifest(bucket)
    assert finished is not None and finished["finished"] and finished["versions"] == status["versions"]
