"""Copies to real object stores: a folder, and an S3 server on this machine where there is one to install."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from loopback import PACED, NewRun, assert_all_agree, assert_one_line, free_port

from farloop.config.exit_codes import ExitCode
from farloop.coordinator.storage.copies import Bucket, CopyFailed, read_manifest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("obstore") is None, reason="needs the extra 'cloud' (obstore)"),
]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a prefix in a bucket of a local S3 server."""
    if find_spec("moto") is None:
        pytest.skip("needs moto[server], an S3 server for tests")
    port = free_port()
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stderr=subprocess.DEVNULL)
    endpoint = f"http://127.0.0.1:{port}"
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urlopen(Request(f"{endpoint}/runs", method="PUT")).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the server does not come up"
                time.sleep(0.2)
        yield "s3://runs/first"
    finally:
        server.kill()
        server.wait()


def says_what_a_store_says(bucket: Bucket) -> None:
    assert bucket.paths("ckpt") == [] and bucket.get("ckpt/1/a") is None
    large = os.urandom(12 << 20)
    for path, data in (("ckpt/1/a", b"first"), ("ckpt/1/a", b"second"), ("ckpt/2/b", large)):
        bucket.put(path, data)
    assert bucket.paths("ckpt") == ["ckpt/1/a", "ckpt/2/b"]
    assert (bucket.get("ckpt/1/a"), bucket.get("ckpt/2/b")) == (b"second", large)
    bucket.delete(["ckpt/1/a", "ckpt/1/nothing"])
    assert bucket.paths("ckpt") == ["ckpt/2/b"]


def test_a_folder_is_an_object_store(tmp_path: Path) -> None:
    says_what_a_store_says(Bucket((tmp_path / "a b").as_uri()))


def test_an_s3_server_is_an_object_store(s3: str) -> None:
    says_what_a_store_says(Bucket(s3))


@pytest.mark.parametrize(
    ("url", "why"),
    [("ftp://x/y", "begins with s3://, gs://"), ("/just/a/path", "begins with"), ("file:///proc/no/such", "open")],
)
def test_what_is_no_object_store_is_said_in_one_line(url: str, why: str) -> None:
    with pytest.raises(CopyFailed, match=why) as error:
        Bucket(url)
    assert "\n" not in str(error.value)


def test_a_run_goes_on_from_a_copy_on_a_new_disk(new_run: NewRun, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    goes_on_from_a_copy(new_run, url)


def test_a_run_goes_on_from_a_copy_in_s3(new_run: NewRun, s3: str) -> None:
    goes_on_from_a_copy(new_run, s3)


def goes_on_from_a_copy(new_run: NewRun, url: str) -> None:
    """All processes die, and the disk is lost; a second restore over the new one is refused."""
    run = new_run(steps=120, **PACED)
    run.tables["coordinator"] |= {"copy_to": url, "copy_every_s": 0.5}
    coordinator, a, b = run.start_coordinator(), run.start_metronome("a", pace_s=0.1), run.start_node("b")
    status = run.until("a copy has a version of each", lambda status: min(status["copy"]["versions"], default=0) >= 1)
    assert status["copy"]["failures"] == 0 and status["copy"]["bytes"] > 0
    for process in (a, b, coordinator):
        process.kill()
    copied = read_manifest(Bucket(url))
    assert copied is not None and min(copied["versions"]) >= 1
    shutil.rmtree(run.state_dir)

    coordinator = run.start_coordinator("--restore", url)
    after = run.until("it is back", lambda status: status["run"]["epoch"] > copied["epoch"])
    assert after["versions"] == copied["versions"]
    run.hurry()
    a, b = run.start_metronome("a"), run.start_node("b")
    assert_all_agree(run, run.until_done(coordinator, a, b), "a", "b")

    again = run.start_coordinator("--restore", url)
    assert run.until_ended(again) == ExitCode.STORAGE
    assert_one_line(again, "holds a run already")
